"""The tile of every kernel, in tables, and how many parts a decode step is cut into. No kernels here.

Chosen by offline compilation (`benchmarks/compile_gate.py`): no stack, no spills, shared memory within what the chip
has. None of it has been tuned by a measurement.

BLOCK_M is rows of a tile (query token, head in group), BLOCK_N keys per step of its loop.
"""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """What a launcher asks of a device.

    Attributes:
        arch: "sm" for NVIDIA below 9.0, "sm90" below 10.0, "sm100" from there on, "gfx" for AMD.
        processors: multiprocessors, or compute units.
    """

    arch: str
    processors: int


@dataclass(frozen=True)
class Tile:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (bytes of an element, widest padded head dim up to which the line holds): (BLOCK_N, num_warps, num_stages)
_NVIDIA_DECODE = {
    (2, 64): (64, 4, 3),
    (2, 128): (64, 4, 3),
    (2, 256): (32, 4, 3),
    (4, 64): (32, 4, 2),
    (4, 128): (16, 4, 2),
    (4, 256): (16, 8, 2),
}
DECODE: dict[str, dict[tuple[int, int], tuple[int, int, int]]] = {
    "sm": _NVIDIA_DECODE,
    "sm90": _NVIDIA_DECODE,
    "sm100": _NVIDIA_DECODE,
    "gfx": {
        (2, 64): (64, 4, 2),
        (2, 128): (64, 4, 1),
        (2, 256): (32, 4, 1),
        (4, 64): (32, 4, 1),
        (4, 128): (16, 4, 1),
        (4, 256): (16, 8, 1),
    },
}

# (bytes of an element, widest padded head dim): (BLOCK_M, BLOCK_N, num_warps, num_stages)
_SM90_PREFILL = {
    (2, 64): (128, 64, 4, 3),
    (2, 128): (128, 64, 8, 3),
    (2, 256): (64, 32, 8, 3),
    (4, 64): (32, 32, 8, 2),
    (4, 128): (32, 16, 8, 2),
    (4, 256): (16, 16, 8, 1),
}
PREFILL: dict[str, dict[tuple[int, int], tuple[int, int, int, int]]] = {
    "sm": {
        (2, 64): (128, 64, 8, 3),
        (2, 128): (128, 32, 8, 3),
        (2, 256): (64, 32, 8, 2),
        (4, 64): (32, 32, 4, 2),
        (4, 128): (32, 16, 4, 2),
        (4, 256): (16, 16, 8, 1),
    },
    "sm90": _SM90_PREFILL,
    # With three stages a tile of 64 rows, which few members of a shared prefix give, spills there.
    "sm100": {**_SM90_PREFILL, (2, 64): (128, 64, 4, 2)},
    "gfx": {
        (2, 64): (128, 32, 4, 1),
        (2, 128): (128, 32, 8, 1),
        (2, 256): (64, 32, 8, 1),
        (4, 64): (32, 32, 4, 1),
        (4, 128): (32, 16, 4, 1),
        (4, 256): (16, 16, 8, 1),
    },
}

# Programs a processor is to have at once, so that one computes while another waits for memory.
PROGRAMS_PER_PROCESSOR = 4
# Tokens below which a part costs more to merge than it saves.
LEAST_PART = 256
MOST_SPLITS = 128


@functools.cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device("sm", 1)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Device("gfx", properties.multi_processor_count)
    arch = "sm100" if properties.major >= 10 else "sm90" if properties.major == 9 else "sm"
    return Device(arch, properties.multi_processor_count)


def num_splits(tiles: int, longest: int, processors: int) -> int:
    """Into how many parts the keys of each row are cut.

    As many as the chip has room for at once: one program more would run alone at the end. And no more than there is
    work for: each part has LEAST_PART tokens.

    Args:
        tiles: programs there would be without splitting: rows * num_kv_heads.
        longest: tokens of the longest row.
        processors: of the device.
    """
    wanted = processors * PROGRAMS_PER_PROCESSOR // max(tiles, 1)
    return max(1, min(wanted, -(-longest // LEAST_PART), MOST_SPLITS))


def _line(table: dict, itemsize: int, dim: int) -> tuple:
    for (size, widest), line in table.items():
        if size == itemsize and dim <= widest:
            return line
    raise ValueError(f"head dims beyond 256 have no tile (padded, this one is {dim})")


def decode_tile(device: torch.device, itemsize: int, dim: int, group: int) -> Tile:
    """Args: bytes of an element of the products, widest padded head dim, padded group size."""
    block_n, num_warps, num_stages = _line(DECODE[device_of(device).arch], itemsize, dim)
    return Tile(min(group, 64 if itemsize == 2 else 16), block_n, num_warps, num_stages)


def prefill_tile(device: torch.device, itemsize: int, dim: int, group: int, rows: int) -> Tile:
    """Like `decode_tile`, for tiles of up to `rows` rows: a short query does not pay for a tall tile."""
    block_m, block_n, num_warps, num_stages = _line(PREFILL[device_of(device).arch], itemsize, dim)
    if rows <= block_m // 2:
        block_m = max(16, 1 << (rows - 1).bit_length())
        num_warps = min(num_warps, 4) if dim <= 128 else num_warps
    return Tile(max(block_m, group), block_n, num_warps, num_stages)


def precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: float32 in full, not in TF32, so that float32 models choose the same tokens."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _warps(device: torch.device, size: int) -> int:
    """Warps, at most 4, of which each thread has 16 of `size` bytes: so it can load and store 128 bits at once."""
    lanes = 64 if device_of(device).arch == "gfx" else 32
    return max(1, min(4, size // (16 * lanes)))


def write_tile(device: torch.device, num_tokens: int, row: int) -> tuple[int, int]:
    """`(tokens of a program, num_warps)`; `row` is the bytes of a token of one head."""
    tokens = max(4 if num_tokens <= 256 else 32, min(16, 1024 // row))
    return tokens, _warps(device, tokens * row)


def copy_warps(device: torch.device, size: int) -> int:
    """Warps of a program that copies `size` bytes."""
    return _warps(device, size)
