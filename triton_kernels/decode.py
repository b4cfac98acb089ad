"""Decode: one query a row, split over the keys (FlashDecoding), each part with the log-sum-exp of its scores.

A row with one query has too few tiles to fill a chip, so its keys are cut into parts that are computed side by side
and merged (`merge.py`). As many parts as the chip has room for (`config.num_splits`): a fixed number starves it at
long contexts.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from . import config
from .common import TRITON_DTYPES, alignment, check_queries, check_store, compute_dtype, padded, refuse_scales
from .merge import merge_parts
from .tile import add_sink, attend_span, store_rows


@triton.jit(
    do_not_specialize=[
        "band",
        "least",
        "table_stride",
        "key_mask_stride",
        "query_row_stride",
        "query_head_stride",
        "keys_head_stride",
        "values_head_stride",
        "out_part_stride",
        "out_row_stride",
        "out_head_stride",
    ]
)
def _decode_kernel(
    query,  # [rows, num_heads, key_dim]
    keys,  # [num_kv_heads, blocks, block_size, key_dim]
    values,  # [num_kv_heads, blocks, block_size, value_dim]
    table,  # [rows, table_width] int32
    lengths,  # [rows] int32
    begins,  # [rows] int32 or None
    starts,  # [rows] int32 or None
    key_mask,  # [rows, positions] uint8 or None
    sinks,  # [num_heads] or None
    out,  # [rows, num_heads, value_dim], or [parts, rows, num_heads, value_dim] float32
    lse,  # [parts, rows, num_heads] float32, or None: one part, and `out` is the answer
    scale,
    softcap,  # or None
    band,
    least,  # tokens a part has at least
    num_heads,
    table_stride,
    key_mask_stride,
    query_row_stride,  # strides of what changes from call to call are divided by the alignment
    query_head_stride,
    keys_head_stride,
    values_head_stride,
    out_part_stride,
    out_row_stride,
    out_head_stride,
    keys_block_stride: tl.constexpr,
    keys_slot_stride: tl.constexpr,
    values_block_stride: tl.constexpr,
    values_slot_stride: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_BAND: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_tiles: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = (tl.program_id(1) // head_tiles).to(tl.int64)
    part = tl.program_id(2).to(tl.int64)

    length = tl.load(lengths + row)
    begin = 0
    start = 0
    if starts is not None:
        start = tl.load(starts + row)
        begin = start
    if begins is not None:
        begin = tl.maximum(begin, tl.load(begins + row))
    if HAS_BAND:
        begin = tl.maximum(begin, length - band)

    # The row's keys in equal parts, whole tiles each; a short row has fewer parts, and the rest have nothing to do.
    share = tl.cdiv(tl.maximum(length - begin, 0), tl.num_programs(2))
    share = tl.cdiv(tl.maximum(share, least), BLOCK_N) * BLOCK_N
    begin += tl.program_id(2) * share
    end = tl.minimum(begin + share, length)

    in_group = (tl.program_id(1) % head_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = in_group < GROUP
    heads = kv_head * GROUP + in_group
    dims = tl.arange(0, BLOCK_K)
    queries = tl.load(
        query + row * query_row_stride * ALIGN + (heads * query_head_stride)[:, None] * ALIGN + dims[None, :],
        mask=valid[:, None] & (dims < KEY_DIM)[None, :],
        other=0.0,
    ).to(PRODUCT)

    first = tl.full([BLOCK_M], 0, tl.int32) + begin
    last = tl.full([BLOCK_M], 0, tl.int32) + end
    row_mask = key_mask
    if key_mask is not None:
        row_mask = key_mask + row * key_mask_stride
    top, total, acc = attend_span(
        queries,
        first,
        last,
        begin,
        end,
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_V], tl.float32),
        keys + kv_head * keys_head_stride * ALIGN,
        values + kv_head * values_head_stride * ALIGN,
        table + row * table_stride,
        start,
        row_mask,
        scale,
        softcap,
        keys_block_stride,
        keys_slot_stride,
        values_block_stride,
        values_slot_stride,
        BLOCK_SIZE,
        KEY_DIM,
        VALUE_DIM,
        BLOCK_N,
        BLOCK_K,
        BLOCK_V,
        PRECISION,
        True,
    )
    if lse is None:
        top, total, acc = add_sink(top, total, acc, sinks, heads, valid)
        store_rows(
            top,
            total,
            acc,
            out,
            None,
            tl.full([BLOCK_M], 0, tl.int64) + row,
            heads,
            valid,
            out_row_stride,
            out_head_stride,
            num_heads,
            VALUE_DIM,
            BLOCK_V,
            ALIGN,
        )
    else:
        store_rows(
            top,
            total,
            acc,
            out + part * out_part_stride * ALIGN,
            lse + part * tl.num_programs(0) * num_heads,
            tl.full([BLOCK_M], 0, tl.int64) + row,
            heads,
            valid,
            out_row_stride,
            out_head_stride,
            num_heads,
            VALUE_DIM,
            BLOCK_V,
            ALIGN,
        )


def decode_parts(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    begins: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    band: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> None:
    """The parts of a decode step, not yet merged; the arguments are those of `decode_attention` but for these.

    Args:
        out: [parts, rows, num_heads, value_dim] float32, with the log-sum-exps in `lse`; without one the answer itself,
            [1, rows, num_heads, value_dim] of any dtype.
        lse: [parts, rows, num_heads] float32, contiguous; -inf where a part sees nothing. None: one part only.
    """
    rows, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = keys.shape[0], values.shape[3]
    group = num_heads // num_kv_heads
    product = compute_dtype(query, keys, values)
    block_k, block_v = padded(key_dim), padded(value_dim)
    tile = config.decode_tile(query.device, product.itemsize, max(block_k, block_v), padded(group))
    moving = (*query.stride()[:2], keys.stride(0), values.stride(0), *out.stride()[:3])
    align = alignment(*moving)
    _decode_kernel[(rows, num_kv_heads * triton.cdiv(group, tile.block_m), out.shape[0])](
        query,
        keys,
        values,
        table,
        lengths,
        begins,
        starts,
        key_mask,
        sinks,
        out,
        lse,
        float(scale),
        None if softcap is None else float(softcap),
        band or 0,
        config.LEAST_PART,
        num_heads,
        table.stride(0),
        0 if key_mask is None else key_mask.stride(0),
        *(stride // align for stride in moving),
        keys_block_stride=keys.stride(1),
        keys_slot_stride=keys.stride(2),
        values_block_stride=values.stride(1),
        values_slot_stride=values.stride(2),
        GROUP=group,
        BLOCK_SIZE=keys.shape[2],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        ALIGN=align,
        HAS_BAND=band is not None,
        PRODUCT=TRITON_DTYPES[product],
        PRECISION=config.precision(product),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    longest: int,
    begins: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    band: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    splits: int | None = None,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query a row over the row's blocks.

    Args:
        query: [rows, num_heads, key_dim], any strides with a last one of 1.
        keys, values: the store, [num_kv_heads, blocks, block_size, dim], any strides with a last one of 1; the new
            tokens are in it.
        table: block ids of each row, [rows, width] int32; what a row does not need may hold anything.
        lengths: tokens of each row, the query's own included, [rows] int32; 0: zeros come out.
        scale: factor on the scores.
        longest: a bound on the tokens a row attends to; it decides only into how many parts rows are cut.
        begins: first position each row attends to, [rows] int32; None: its first.
        starts: position of the first slot of each row's table, where windowed rows have dropped blocks, [rows] int32.
        band: tokens each query sees, itself included.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: a logit per head that takes part in the softmax and carries no value, [num_heads].
        key_mask: whether a position counts, [rows, positions] uint8 (not 0: it does).
        splits: parts; None: as `config.num_splits` has it.
        out: where the answer goes; None: a new tensor in the query's dtype.
        k_scale, v_scale: room for quantised storage; not built.

    Returns:
        [rows, num_heads, value_dim]; zeros for a row that sees nothing.
    """
    refuse_scales(k_scale, v_scale)
    check_store(keys, values)
    value_dim = values.shape[3]
    out = check_queries(query, keys, out, value_dim)
    rows, num_heads, _ = query.shape
    if not rows:
        return out
    if splits is None:
        tokens = longest if band is None else min(longest, band)
        splits = config.num_splits(rows * keys.shape[0], tokens, config.device_of(query.device).processors)
    options: dict[str, Any] = dict(
        scale=scale, begins=begins, starts=starts, band=band, softcap=softcap, key_mask=key_mask
    )
    if splits == 1:
        decode_parts(query, keys, values, table, lengths, out[None], None, sinks=sinks, **options)
        return out
    parts = torch.empty(splits, rows, num_heads, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(splits, rows, num_heads, dtype=torch.float32, device=query.device)
    decode_parts(query, keys, values, table, lengths, parts, lse, **options)
    return merge_parts(parts, lse, out, sinks=sinks)
