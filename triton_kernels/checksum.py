"""Checksum: a multilinear hash over words where they lie, for `hf_paged.checksum`, which has it in plain PyTorch.

One pass, and nothing but the words is read: keys are computed from a word's place. Programs add their sums into the
result; sums modulo 2^64 come out the same in any order.
"""

import torch
import triton
import triton.language as tl

# Words of a tile, and tiles of a program: long enough that adding to the result is nothing beside.
BLOCK = 1024
TILES = 16


@triton.jit
def _fold(numbers, BITS: tl.constexpr):
    """numbers ^ numbers >> BITS, as if they had no sign."""
    return numbers ^ ((numbers >> BITS) & ((1 << (64 - BITS)) - 1))


@triton.jit(do_not_specialize=["start"])
def _checksum_kernel(
    words,  # [num_words] int32
    sums,  # [2] int64, added to
    num_words,
    start,
    STEP: tl.constexpr,
    MIX: tl.constexpr,
    BETWEEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
    first = tl.zeros([BLOCK], dtype=tl.int64)
    second = tl.zeros([BLOCK], dtype=tl.int64)
    for tile in range(TILES):
        place = begin + tile * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + place, mask=place < num_words, other=0).to(tl.int64)
        mixed = _fold(place * STEP + start, 32) * MIX
        mixed = _fold(mixed, 29)
        first += word * (_fold(mixed * FIRST, 32) | 1)
        second += word * (_fold((mixed ^ BETWEEN) * SECOND, 32) | 1)
    tl.atomic_add(sums, tl.sum(first, 0), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(second, 0), sem="relaxed")


def add_words(words: torch.Tensor, start: int, sums: torch.Tensor, constants: tuple[int, int, int, int, int]) -> None:
    """Add word x key to both sums, modulo 2^64: what `hf_paged.checksum.add_words_by_operators` does, to the bit.

    Args:
        words: [num_words] int32, contiguous.
        start: of the first word's keys, int64.
        sums: [2] int64, on the words' device.
        constants: the numbers that keys are made with, int64 each: `hf_paged.checksum.CONSTANTS`.
    """
    if not len(words):
        return
    _checksum_kernel[(triton.cdiv(len(words), BLOCK * TILES),)](
        words, sums, len(words), start, *constants, BLOCK=BLOCK, TILES=TILES, num_warps=4
    )
