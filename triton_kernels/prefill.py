"""Prefill: varlen queries over any cached context: prompts, chunks of them, the few tokens of assisted decoding.

As in vLLM's unified attention: rows of a tile are (query token, head in group), and a program finds the row of the
batch it works on by a binary search in `cu_seqlens_q`, so the host plans nothing. Keys and values are read through the
block table, the new ones too. Causal order is aligned to the lower right: the last query sees all of its row.
"""

import torch
import triton
import triton.language as tl

from . import config
from .common import TRITON_DTYPES, alignment, check_queries, check_store, compute_dtype, padded, refuse_scales
from .merge import merge_parts
from .tile import add_sink, attend_span, store_rows


@triton.jit
def _row_of_tile(cu_seqlens_q, tile, rows, TOKENS: tl.constexpr):
    """The row a tile belongs to: row r's tiles begin at `cu_seqlens_q[r] // TOKENS + r`, which leaves room for every
    row's last, partly filled tile."""
    low = 0
    high = rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(
    do_not_specialize=[
        "rows",
        "band",
        "least",
        "table_stride",
        "key_mask_stride",
        "query_token_stride",
        "query_head_stride",
        "keys_head_stride",
        "values_head_stride",
        "out_part_stride",
        "out_token_stride",
        "out_head_stride",
        "lse_part_stride",
    ]
)
def _prefill_kernel(
    query,  # [total_tokens, num_heads, key_dim]
    keys,  # [num_kv_heads, blocks, block_size, key_dim]
    values,  # [num_kv_heads, blocks, block_size, value_dim]
    table,  # [rows, table_width] int32
    cu_seqlens_q,  # [rows + 1] int32
    lengths,  # [rows] int32
    begins,  # [rows] int32 or None
    starts,  # [rows] int32 or None
    query_ends,  # [total_tokens] int32 or None
    key_mask,  # [rows, positions] uint8 or None
    sinks,  # [num_heads] or None
    out,  # [total_tokens, num_heads, value_dim], or [parts, total_tokens, num_heads, value_dim] float32
    lse,  # [parts, total_tokens, num_heads] float32, or None: one part, and `out` is the answer
    scale,
    softcap,  # or None
    band,
    least,  # tokens a part has at least
    rows,
    num_heads,
    table_stride,
    key_mask_stride,
    lse_part_stride,
    query_token_stride,  # strides of what changes from call to call are divided by the alignment
    query_head_stride,
    keys_head_stride,
    values_head_stride,
    out_part_stride,
    out_token_stride,
    out_head_stride,
    keys_block_stride: tl.constexpr,
    keys_slot_stride: tl.constexpr,
    values_block_stride: tl.constexpr,
    values_slot_stride: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens of a tile
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_BAND: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The last tiles of a row see the most: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2).to(tl.int64)
    row = _row_of_tile(cu_seqlens_q, tile, rows, TOKENS)
    first_query = tl.load(cu_seqlens_q + row)
    num_queries = tl.load(cu_seqlens_q + row + 1) - first_query
    first_token = (tile - first_query // TOKENS - row) * TOKENS
    if first_token >= num_queries:
        return
    row = row.to(tl.int64)

    cells = tl.arange(0, BLOCK_M)
    tokens = first_token + cells // GROUP  # of this row
    valid = (cells < TOKENS * GROUP) & (tokens < num_queries)
    heads = kv_head * GROUP + cells % GROUP
    packed = (first_query + tokens).to(tl.int64)
    dims = tl.arange(0, BLOCK_K)
    queries = tl.load(
        query + (packed * query_token_stride + heads * query_head_stride)[:, None] * ALIGN + dims[None, :],
        mask=valid[:, None] & (dims < KEY_DIM)[None, :],
        other=0.0,
    ).to(PRODUCT)

    length = tl.load(lengths + row)
    ends = tokens + (length - num_queries + 1)
    if query_ends is not None:
        ends = tl.load(query_ends + packed, mask=valid, other=0)
    last = tl.where(valid, tl.minimum(ends, length), 0)
    begin = 0
    start = 0
    if starts is not None:
        start = tl.load(starts + row)
        begin = start
    if begins is not None:
        begin = tl.maximum(begin, tl.load(begins + row))
    first = tl.zeros([BLOCK_M], tl.int32) + begin
    if HAS_BAND:
        first = tl.maximum(first, ends - band)
        begin = tl.min(tl.where(valid, first, 2147483647), 0)
    end = tl.max(last, 0)

    share = tl.cdiv(tl.maximum(end - begin, 0), tl.num_programs(2))
    share = tl.cdiv(tl.maximum(share, least), BLOCK_N) * BLOCK_N
    begin += tl.program_id(2) * share
    end = tl.minimum(begin + share, end)

    row_mask = key_mask
    if key_mask is not None:
        row_mask = key_mask + row * key_mask_stride
    keys += kv_head * keys_head_stride * ALIGN
    values += kv_head * values_head_stride * ALIGN
    table += row * table_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if not HAS_BAND and key_mask is None:
        # What every query of the tile sees needs no mask.
        common = tl.minimum(tl.min(tl.where(valid, last, 2147483647), 0), end)
        whole = begin + tl.maximum(common - begin, 0) // BLOCK_N * BLOCK_N
        top, total, acc = attend_span(
            queries,
            first,
            last,
            begin,
            whole,
            top,
            total,
            acc,
            keys,
            values,
            table,
            start,
            None,
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
            False,
        )
        begin = whole
    top, total, acc = attend_span(
        queries,
        first,
        last,
        begin,
        end,
        top,
        total,
        acc,
        keys,
        values,
        table,
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
    else:
        out += part * out_part_stride * ALIGN
        lse += part * lse_part_stride
    store_rows(
        top,
        total,
        acc,
        out,
        lse,
        packed,
        heads,
        valid,
        out_token_stride,
        out_head_stride,
        num_heads,
        VALUE_DIM,
        BLOCK_V,
        ALIGN,
    )


def prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    longest: int,
    longest_query: int,
    begins: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    query_ends: torch.Tensor | None = None,
    band: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    splits: int | None = None,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries over their rows' blocks.

    Args:
        query: row after row, [total_tokens, num_heads, key_dim], any strides with a last one of 1.
        keys, values: the store, [num_kv_heads, blocks, block_size, dim], any strides with a last one of 1; the new
            tokens are in it.
        table: block ids of each row, [rows, width] int32; what a row does not need may hold anything.
        cu_seqlens_q: where each row's queries begin and end in `query`, [rows + 1] int32. A row may have none.
        lengths: tokens of each row, the new ones included, [rows] int32.
        scale: factor on the scores.
        longest: a bound on the tokens a row attends to; it decides only into how many parts rows are cut.
        longest_query: a bound on the queries of a row; it decides only how tall a tile is.
        begins: first position that any query of a row sees, [rows] int32; None: the first there is.
        starts: position of the first slot of each row's table, where windowed rows have dropped blocks, [rows] int32.
        query_ends: one past the last position that each query sees, [total_tokens] int32; None: the last query of a row
            sees all of it, the one before one less.
        band: tokens each query sees, itself included.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: a logit per head that takes part in the softmax and carries no value, [num_heads].
        key_mask: whether a position counts, [rows, positions] uint8 (not 0: it does).
        splits: parts the keys are cut into, for a few queries over a long context; None: as `config.num_splits` has it.
        out: where the answer goes; None: a new tensor in the query's dtype.
        k_scale, v_scale: room for quantised storage; not built.

    Returns:
        [total_tokens, num_heads, value_dim]; zeros for a query that sees nothing.
    """
    refuse_scales(k_scale, v_scale)
    check_store(keys, values)
    total_tokens, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = keys.shape[0], values.shape[3]
    out = check_queries(query, keys, out, value_dim)
    rows = lengths.shape[0]
    if not total_tokens or not rows:
        return out
    group = num_heads // num_kv_heads
    product = compute_dtype(query, keys, values)
    block_k, block_v = padded(key_dim), padded(value_dim)
    tile = config.prefill_tile(
        query.device, product.itemsize, max(block_k, block_v), padded(group), longest_query * group
    )
    tokens_per_tile = tile.block_m // group
    tiles = total_tokens // tokens_per_tile + rows
    if splits is None:
        seen = longest if band is None else min(longest, band + longest_query)
        splits = config.num_splits(tiles * num_kv_heads, seen, config.device_of(query.device).processors)
    parts, lse, lse_part_stride = out[None], None, 0
    if splits > 1:
        parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=query.device)
        lse = torch.empty(splits, total_tokens, num_heads, dtype=torch.float32, device=query.device)
        lse_part_stride = lse.stride(0)
    moving = (*query.stride()[:2], keys.stride(0), values.stride(0), *parts.stride()[:3])
    align = alignment(*moving)
    _prefill_kernel[(tiles, num_kv_heads, splits)](
        query,
        keys,
        values,
        table,
        cu_seqlens_q,
        lengths,
        begins,
        starts,
        query_ends,
        key_mask,
        sinks if splits == 1 else None,
        parts,
        lse,
        float(scale),
        None if softcap is None else float(softcap),
        band or 0,
        config.LEAST_PART,
        rows,
        num_heads,
        table.stride(0),
        0 if key_mask is None else key_mask.stride(0),
        lse_part_stride,
        *(stride // align for stride in moving),
        keys_block_stride=keys.stride(1),
        keys_slot_stride=keys.stride(2),
        values_block_stride=values.stride(1),
        values_slot_stride=values.stride(2),
        GROUP=group,
        BLOCK_SIZE=keys.shape[2],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TOKENS=tokens_per_tile,
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
    if lse is not None:
        merge_parts(parts, lse, out, sinks=sinks)
    return out
