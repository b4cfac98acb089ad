"""Merge: parts of one attention into the whole, by the log-sum-exp of their scores.

Parts are disjoint sets of keys: those of a split context (FlashDecoding), or a shared prefix and a row's own suffix
(FlashInfer's cascade attention). The whole is the sum of the parts weighted by `exp(lse of the part)`, in float32.
"""

import torch
import triton
import triton.language as tl

from .common import alignment, padded
from .tile import LN2, LOG2E


@triton.jit(do_not_specialize=["num_parts", "part_stride", "query_stride", "head_stride"])
def _merge_kernel(
    parts,  # [num_parts, num_queries, num_heads, value_dim] float32
    lse,  # [num_parts, num_queries, num_heads] float32, contiguous
    out,  # [num_queries, num_heads, value_dim]
    whole_lse,  # [num_queries, num_heads] float32 or None
    sinks,  # [num_heads] or None
    num_parts,
    part_stride,
    query_stride,  # of `out`, divided by the alignment
    head_stride,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ALIGN: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    cell = query * num_heads + head
    cells = tl.num_programs(0).to(tl.int64) * num_heads
    dims = tl.arange(0, BLOCK_V)
    inside = dims < VALUE_DIM

    top = float("-inf")
    total = 0.0
    if sinks is not None:
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for low in range(0, num_parts, BLOCK_P):
        part = (low + tl.arange(0, BLOCK_P)).to(tl.int64)
        sums = tl.load(lse + part * cells + cell, mask=part < num_parts, other=float("-inf")) * LOG2E
        peak = tl.maximum(top, tl.max(sums, 0))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(sums - safe)  # [BLOCK_P]
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 0)
        # A part that has seen nothing need not have been written: not read.
        there = (sums > float("-inf"))[:, None] & inside[None, :]
        at = parts + part[:, None] * part_stride * ALIGN + cell * VALUE_DIM + dims[None, :]
        acc = acc * shrink + tl.sum(weights[:, None] * tl.load(at, mask=there, other=0.0), 0)
        top = peak
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    at = out + query * query_stride * ALIGN + head * head_stride * ALIGN + dims
    tl.store(at, (acc / total).to(out.dtype.element_ty), mask=inside)
    if whole_lse is not None:
        tl.store(whole_lse + cell, tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2))


def merge_parts(
    parts: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    whole_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merge parts of an attention.

    Args:
        parts: each part's own softmax, [num_parts, num_queries, num_heads, value_dim] float32, contiguous. What has a
            log-sum-exp of -inf is not read.
        lse: natural log-sum-exp of each part's scores, [num_parts, num_queries, num_heads] float32, contiguous.
        out: where the whole goes, [num_queries, num_heads, value_dim], any strides with a last one of 1.
        sinks: a logit per head that takes part in the softmax once, and carries no value, [num_heads].
        whole_lse: where the log-sum-exp of the whole goes (sink included), [num_queries, num_heads] float32,
            contiguous; None: not wanted.

    Returns:
        `out`; zeros where no part has seen anything.
    """
    num_parts, num_queries, num_heads, value_dim = parts.shape
    if not (parts.is_contiguous() and lse.is_contiguous()):
        raise ValueError("parts and lse must be contiguous")
    if not num_queries:
        return out
    moving = (parts.stride(0), *out.stride()[:2])
    align = alignment(*moving)
    _merge_kernel[(num_queries, num_heads)](
        parts,
        lse,
        out,
        whole_lse,
        sinks,
        num_parts,
        *(stride // align for stride in moving),
        VALUE_DIM=value_dim,
        BLOCK_V=padded(value_dim),
        BLOCK_P=min(16, triton.next_power_of_2(num_parts)),
        ALIGN=align,
        num_warps=4 if value_dim > 64 else 2,
    )
    return out
