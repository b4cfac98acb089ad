"""Copy: whole blocks within the stores of all layers (copy-on-write, defragmentation), and entries of a block table.

All layers are copied in one launch per kind of store: the kernel gets the stores' addresses as numbers and makes
pointers of them. That is sound because a `StoreSet` holds the tensors themselves (no address outlives its memory), and
because a store that grows is a new tensor, of which a new set is made. Stores of different shapes, strides or dtypes
cannot share a launch, as their strides are one launch's arguments. Blocks are copied as words, whatever they hold.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import config

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["head_stride"])
def _copy_kernel(
    addresses,  # [num_stores] int64
    sources,  # [num_copies] int64
    targets,  # [num_copies] int64
    num_heads,
    head_stride,  # bytes, divided by the alignment
    block_stride: tl.constexpr,  # bytes
    BLOCK_WORDS: tl.constexpr,  # words of a block of one head
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    CHUNK: tl.constexpr,  # words a program copies
):
    source = tl.load(sources + tl.program_id(0))
    target = tl.load(targets + tl.program_id(0))
    store = tl.program_id(1) // num_heads
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    words = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = words < BLOCK_WORDS
    # In words; the alignment is a multiple of a word, so the compiler sees how far rows are aligned.
    step: tl.constexpr = ALIGN // WORD_BYTES
    base = tl.load(addresses + store).to(tl.pointer_type(WORD))
    base = tl.multiple_of(base, ALIGN)
    base += head * head_stride * step
    block: tl.constexpr = block_stride // WORD_BYTES
    tl.store(base + target * block + words, tl.load(base + source * block + words, mask=inside), mask=inside)


@dataclass(frozen=True)
class StoreSet:
    """Stores of one shape, whose blocks are copied in one launch.

    Attributes:
        stores: [num_kv_heads, blocks, block_size, dim] each, alike in shape, strides and dtype. Held, so that the
            addresses stay good.
        addresses: of their first elements, [num_stores] int64, on their device.
    """

    stores: tuple[torch.Tensor, ...]
    addresses: torch.Tensor


def store_sets(stores: Sequence[torch.Tensor]) -> list[StoreSet]:
    """Group stores into sets that are copied in one launch each. To be made again when a store has grown.

    Args:
        stores: [num_kv_heads, blocks, block_size, dim] each, contiguous within a block.
    """
    kinds: dict[tuple, list[torch.Tensor]] = {}
    for store in stores:
        size, dim = store.shape[2:]
        if store.stride(3) != 1 or (size > 1 and store.stride(2) != dim):
            raise ValueError(f"a block of shape {[size, dim]} and strides {list(store.stride()[2:])} is not contiguous")
        kind = (store.device, store.dtype, store.shape, store.stride(), _alignment(store))
        kinds.setdefault(kind, []).append(store)
    return [
        StoreSet(
            tuple(alike), torch.tensor([store.data_ptr() for store in alike], dtype=torch.int64).to(alike[0].device)
        )
        for alike in kinds.values()
    ]


def _alignment(store: torch.Tensor) -> int:
    """Bytes, at most 16, that divide the address and the strides of heads and blocks."""
    size = store.element_size()
    return math.gcd(16, store.data_ptr(), store.stride(0) * size, store.stride(1) * size)


def copy_rounds(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Copies in an order that overwrites no block before it has been read.

    Copies of one launch are made in no order, so no block may be source of one and target of another. Copy-on-write
    writes to fresh blocks and is one round; moving blocks together may take more.

    Args:
        pairs: `(source, target)` block ids; no target twice.

    Returns:
        Rounds to be launched one after the other.

    Raises:
        ValueError: a target is named twice, or blocks are to change places, which takes a free block.
    """
    waiting = [(source, target) for source, target in pairs if source != target]
    if len({target for _, target in waiting}) != len(waiting):
        raise ValueError("two copies go to one block")
    rounds = []
    while waiting:
        sources = {source for source, _ in waiting}
        ready = [pair for pair in waiting if pair[1] not in sources]
        if not ready:
            raise ValueError(f"blocks are to change places: {waiting[:4]}; move one of them to a free block first")
        rounds.append(ready)
        waiting = [pair for pair in waiting if pair[1] in sources]
    return rounds


def copy_blocks(sets: Sequence[StoreSet], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole blocks in all stores: one launch per set.

    Args:
        sets: see `store_sets`; all on one device.
        sources, targets: block ids, [num_copies] int64, on the stores' device. No block may be source and target, and
            no target named twice: see `copy_rounds`.
    """
    if not len(sources):
        return
    for kind in sets:
        store = kind.stores[0]
        size = store.element_size()
        num_heads = store.shape[0]
        block_bytes = store.shape[2] * store.shape[3] * size
        align = _alignment(store)
        word = math.gcd(8, align, block_bytes)
        block_words = block_bytes // word
        chunk = min(2048, triton.next_power_of_2(block_words))
        _copy_kernel[(len(sources), len(kind.stores) * num_heads, triton.cdiv(block_words, chunk))](
            kind.addresses,
            sources,
            targets,
            num_heads,
            store.stride(0) * size // align,
            block_stride=store.stride(1) * size,
            BLOCK_WORDS=block_words,
            WORD=WORDS[word],
            WORD_BYTES=word,
            ALIGN=align,
            CHUNK=chunk,
            num_warps=config.copy_warps(store.device, chunk * word),
        )


@triton.jit(do_not_specialize=["num_entries", "table_stride"])
def _update_table_kernel(
    table,  # [rows, width] int32
    entries,  # [3, num_entries] int32: row, column, block id
    num_entries,
    table_stride,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    row = tl.load(entries + entry, mask=inside, other=-1)
    column = tl.load(entries + num_entries + entry, mask=inside, other=0)
    block = tl.load(entries + 2 * num_entries + entry, mask=inside, other=0)
    tl.store(table + row.to(tl.int64) * table_stride + column, block, mask=row >= 0)


def update_table(table: torch.Tensor, entries: torch.Tensor) -> None:
    """Set the entries of a block table that have changed, where it lies.

    Args:
        table: [rows, width] int32, any row stride with a last one of 1.
        entries: row, column and block id of each change, [3, num_entries] int32, contiguous; a row of -1: none. No
            entry may be named twice.
    """
    num_entries = entries.shape[1]
    if not num_entries:
        return
    _update_table_kernel[(triton.cdiv(num_entries, 256),)](
        table, entries, num_entries, table.stride(0), BLOCK=256, num_warps=4
    )
