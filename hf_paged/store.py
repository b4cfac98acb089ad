"""The tensors of one layer: keys and values in blocks. Knows block ids, nothing of caches or models.

Memory layout, head-major, so that adjacent block ids are one strided view per head:

    keys    [num_kv_heads, 1 + num_blocks, block_size, key_dim]
    values  [num_kv_heads, 1 + num_blocks, block_size, value_dim]
                            |
                            block 0 is the null block: zeros, never written

A slot is `block id * block_size + offset`, an index into the same memory seen as [num_kv_heads, slots, dim].
"""

import threading

import torch


class Memory:
    """The tensors of a store as they lie at one moment.

    A growing store moves to new memory, with everything that was written. Who reads takes `store.memory` once and has
    something whole and consistent, also while another thread makes the store grow.

    Attributes:
        keys, values: [num_kv_heads, 1 + num_blocks, block_size, dim]
        key_slots, value_slots: the same seen as [num_kv_heads, num_slots, dim].
        key_rows, value_rows: the same with heads and slots in one dim: row `head * num_slots + slot`. They are the
            fastest to write.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        heads, blocks, self.block_size, key_dim = keys.shape
        value_dim = values.shape[3]
        self.keys, self.values = keys, values
        self.num_blocks = blocks - 1
        self.num_slots = blocks * self.block_size
        self.key_slots = keys.view(heads, -1, key_dim)
        self.value_slots = values.view(heads, -1, value_dim)
        self.key_rows = keys.view(-1, key_dim)
        self.value_rows = values.view(-1, value_dim)

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
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, block_size: int, dtype: torch.dtype | None = None):
        self.block_size = block_size
        self.lock = threading.Lock()
        self.signature = self.signature_of(key, value)
        self._shapes = []
        for tensor in (key, value):
            self._shapes.append((tensor.shape[1], tensor.shape[3], dtype or tensor.dtype, tensor.device))
        self.memory = Memory(self._empty(0, 1), self._empty(1, 1))

    @staticmethod
    def signature_of(key: torch.Tensor, value: torch.Tensor) -> tuple:
        return (key.shape[1], key.shape[3], value.shape[3], key.dtype, value.dtype, key.device)

    def _empty(self, which: int, blocks: int) -> torch.Tensor:
        heads, dim, dtype, device = self._shapes[which]
        # Outside inference mode: a store made under inference_mode could not be written to under no_grad.
        with torch.inference_mode(False):
            tensor = torch.empty(heads, blocks, self.block_size, dim, dtype=dtype, device=device)
            tensor[:, 0].zero_()
        return tensor

    @property
    def nbytes(self) -> int:
        return self.memory.keys.nbytes + self.memory.values.nbytes

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
            grown = []
            for which, tensor in enumerate((old.keys, old.values)):
                new = self._empty(which, num_blocks + 1)
                new[:, 1 : old.num_blocks + 1] = tensor[:, 1:]
                grown.append(new)
            self.memory = Memory(*grown)
        return self.memory

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks, keys and values. Call with `lock` held.

        Args:
            sources, targets: block ids, [num_copies], int64, on this store's device.
        """
        for blocks in (self.memory.keys, self.memory.values):
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))
