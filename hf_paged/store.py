"""The tensors of one layer: keys and values in blocks. Knows block ids, nothing of caches or models.

Memory layout, head-major, so that adjacent block ids are one strided view per head:

    keys    [num_kv_heads, 1 + num_blocks, block_size, key_dim]
    values  [num_kv_heads, 1 + num_blocks, block_size, value_dim]
                            |
                            block 0 is the null block: zeros, never written

A slot is `block id * block_size + offset`, an index into the same memory seen as [num_kv_heads, slots, dim].
"""

import threading
from typing import NamedTuple

import torch

from .cpu_kernels.library import loaded


class Layout(NamedTuple):
    """Sizes of a store's memory and where keys and values begin in it, in elements."""

    num_slots: int  # those of the null block included
    kv_heads: int
    key_dim: int
    value_dim: int
    key_offset: int
    value_offset: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device


class Memory:
    """The tensors of a store as they lie at one moment.

    A growing store moves to new memory, with everything that was written. Who reads takes `store.memory` once and has
    something whole and consistent, also while another thread makes the store grow.

    Attributes:
        keys, values: [num_kv_heads, 1 + num_blocks, block_size, dim]
        key_slots, value_slots: the same seen as [num_kv_heads, num_slots, dim].
        both: keys and values as one tensor, [2 * num_kv_heads, 1 + num_blocks, block_size, dim], where they are alike,
            else None. Whole blocks are copied through it.
        layout: what views of this memory depend on; alike for all layers of most models.
        key_rows, value_rows: the same with heads and slots in one dim: row `head * num_slots + slot`. They are the
            fastest to write.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, both: torch.Tensor | None = None):
        self.kv_heads, blocks, self.block_size, self.key_dim = keys.shape
        self.value_dim = values.shape[3]
        self.keys, self.values, self.both = keys, values, both
        self.num_blocks = blocks - 1
        self.num_slots = blocks * self.block_size
        self.key_slots = keys.view(self.kv_heads, -1, self.key_dim)
        self.value_slots = values.view(self.kv_heads, -1, self.value_dim)
        self.key_rows = keys.view(-1, self.key_dim)
        self.value_rows = values.view(-1, self.value_dim)
        offsets = (int(keys.storage_offset()), int(values.storage_offset()))
        sizes = (self.num_slots, self.kv_heads, self.key_dim, self.value_dim)
        self.layout = Layout(*sizes, *offsets, keys.dtype, values.dtype, keys.device)

    @property
    def wholes(self) -> tuple[torch.Tensor, ...]:
        """What whole blocks are copied in: keys and values in one tensor or in two."""
        return (self.keys, self.values) if self.both is None else (self.both,)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots` ([n], int64): two tensors [num_kv_heads, n, dim]. Slot 0 gives zeros."""
        return self.key_slots.index_select(1, slots), self.value_slots.index_select(1, slots)


class LayerStore:
    """Keys and values of one layer, on that layer's device, each in its own dtype.

    Writes and growth hold `lock`: a growing store moves to new memory, and a write must not go to the old one.

    Args:
        key: a key tensor to take heads, dim, dtype and device from, [batch, num_kv_heads, tokens, key_dim].
        value: likewise, [batch, num_kv_heads, tokens, value_dim].
        block_size: tokens per block.
        dtype: dtype to store in; None: the tensors' own.
        once: keys and values are the same numbers, in the same memory.
    """

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        block_size: int,
        dtype: torch.dtype | None = None,
        once: bool = False,
    ):
        self.block_size = block_size
        self.once = once
        self.lock = threading.Lock()
        self.signature = self.signature_of(key, value)
        self._shapes = []
        for tensor in (key, value):
            self._shapes.append((tensor.shape[1], tensor.shape[3], dtype or tensor.dtype, tensor.device))
        self.memory = self._memory(0)

    @staticmethod
    def signature_of(key: torch.Tensor, value: torch.Tensor) -> tuple:
        return (key.shape[1], key.shape[3], value.shape[3], key.dtype, value.dtype, key.device)

    def _memory(self, num_blocks: int) -> Memory:
        """Memory for `num_blocks` blocks and the null block, which alone has content."""
        alike = self._shapes[0] == self._shapes[1]
        # Outside inference mode: a store made under inference_mode could not be written to under no_grad.
        with torch.inference_mode(False):
            tensors = []
            for heads, dim, dtype, device in self._shapes[:1] if alike else self._shapes:
                shape = (2 * heads if alike and not self.once else heads, num_blocks + 1, self.block_size, dim)
                tensors.append(torch.empty(shape, dtype=dtype, device=device))
                tensors[-1][:, 0].zero_()
            if alike:
                heads = self._shapes[0][0]
                if self.once:
                    return Memory(tensors[0], tensors[0], tensors[0])
                return Memory(tensors[0][:heads], tensors[0][heads:], tensors[0])
            return Memory(*tensors)

    @property
    def nbytes(self) -> int:
        return self.memory.keys.nbytes + (0 if self.once else self.memory.values.nbytes)

    @property
    def bytes_per_block(self) -> int:
        return self.nbytes // (self.memory.num_blocks + 1)

    @property
    def largest_offset(self) -> int:
        """Largest element offset an address calculation can reach; beyond 2**31 - 1 kernels need 64-bit offsets."""
        return max(self.memory.keys.numel(), self.memory.values.numel()) - 1

    def ensure(self, num_blocks: int) -> Memory:
        """Have memory for ids 0..num_blocks. What was stored keeps its place. Call with `lock` held."""
        old = self.memory
        if old.num_blocks >= num_blocks:
            return old
        with torch.inference_mode(False), torch.no_grad():
            new = self._memory(num_blocks)
            new.keys[:, 1 : old.num_blocks + 1] = old.keys[:, 1:]
            if not self.once:
                new.values[:, 1 : old.num_blocks + 1] = old.values[:, 1:]
            self.memory = new
        return new

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks, keys and values. Call with `lock` held.

        Args:
            sources, targets: block ids, [num_copies], int64, on this store's device, contiguous. No block is both.
        """
        memory = self.memory
        kernels = loaded() if memory.keys.is_cpu else None
        for blocks in memory.wholes:
            if kernels is None:
                blocks.index_copy_(1, targets, blocks.index_select(1, sources))
                continue
            heads, strides, size = blocks.shape[0], blocks.stride(), blocks.element_size()
            kernels.hf_paged_copy_blocks(
                blocks.data_ptr(), heads, strides[0] * size, strides[1] * size,
                sources.data_ptr(), targets.data_ptr(), len(sources),
            )  # fmt: skip
