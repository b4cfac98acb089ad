"""What the launchers share: alignment of strides, dtypes, checks. No kernels here."""

import math
from collections.abc import Sequence

import torch
import triton.language as tl

# The widest a thread loads is 128 bits: 16 elements of one byte, 8 of two.
WIDEST = 16

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def alignment(*strides: int) -> int:
    """Largest power of two, at most 16, that divides every stride.

    Kernels get strides divided by it, and it as a constant. So the compiler knows how far loads are aligned whatever
    the strides are: the hint that a launch gives by itself is 16 or nothing, and nothing (head dim 40) makes loads of
    16 bits. And a store that grows has other strides and the same kernel.
    """
    return math.gcd(WIDEST, *strides)


def padded(size: int) -> int:
    """The power of two a tile needs for `size` elements; `tl.dot` wants 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype of the matrix products: what holds every operand exactly. Sums are float32 anyway."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def check_store(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise unless these can be one layer's store, [num_kv_heads, blocks, block_size, dim]."""
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.dim() != 4 or tensor.stride(3) != 1:
            raise ValueError(
                f"{name}: wanted [num_kv_heads, blocks, block_size, dim] with a last stride of 1, got shape "
                f"{list(tensor.shape)} and strides {list(tensor.stride())}"
            )
        if tensor.dtype not in TRITON_DTYPES:
            raise ValueError(f"{name}: a store of {tensor.dtype} has no kernel; use float32, float16 or bfloat16")
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} differ in more than the last dim")


def check_queries(query: torch.Tensor, keys: torch.Tensor, out: torch.Tensor | None, value_dim: int) -> torch.Tensor:
    """The output tensor of an attention call, made if there is none; raises where query and store do not fit.

    Args:
        query: [num_queries, num_heads, key_dim]
        keys: [num_kv_heads, blocks, block_size, key_dim]
    """
    queries, num_heads, key_dim = query.shape
    if key_dim != keys.shape[3] or num_heads % keys.shape[0]:
        raise ValueError(
            f"{num_heads} query heads of dim {key_dim} do not fit {keys.shape[0]} stored heads of dim {keys.shape[3]}"
        )
    if query.stride(2) != 1:
        raise ValueError("the query's last stride must be 1")
    if query.dtype not in TRITON_DTYPES:
        raise ValueError(f"a query of {query.dtype} has no kernel; use float32, float16 or bfloat16")
    if out is None:
        return query.new_empty(queries, num_heads, value_dim)
    if out.shape != (queries, num_heads, value_dim) or out.stride(2) != 1:
        raise ValueError(
            f"out: wanted {[queries, num_heads, value_dim]} with a last stride of 1, got {list(out.shape)}"
        )
    return out


def send(parts: Sequence[Sequence[int]], device: torch.device | str) -> list[torch.Tensor]:
    """Lists of numbers as int32 tensors on a device, by one transfer.

    Each begins at a multiple of 16 bytes: a kernel is compiled anew for pointers that are aligned otherwise.
    """
    numbers: list[int] = []
    begins = []
    for part in parts:
        begins.append(len(numbers))
        numbers.extend(part)
        numbers.extend([0] * (-len(numbers) % 4))
    whole = torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
    return [whole[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=True)]


def refuse_scales(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    """Quantised storage is planned for and not built."""
    if k_scale is not None or v_scale is not None:
        raise NotImplementedError("quantised storage is not built: leave k_scale and v_scale out")
