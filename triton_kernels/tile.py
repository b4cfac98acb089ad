"""One tile of attention over a block table: what the attention kernels have in common.

A tile has BLOCK_M rows, each a query of one head. All rows of a tile read the same keys and values, so a row is (query
token, query head in the group of one stored head): keys and values are read once for a group. The tile walks a span of
positions BLOCK_N at a time and looks the slot of each position up in the block table, so BLOCK_N and the block size
have nothing to do with each other. Which positions a row sees is an interval: that is enough for causal order, windows,
bands and ragged lengths.

The online softmax is FlashAttention's, in base 2; sums are float32. Of unused slots nothing may come through, whatever
they hold: scores are replaced after the product and values before it, because 0 * NaN is NaN.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_span(
    query,  # [BLOCK_M, BLOCK_K], in the dtype of the products
    first,  # [BLOCK_M] int32: positions each row sees, `first <= position < last`
    last,
    begin,  # span of positions to walk
    end,
    top,  # [BLOCK_M] float32: largest score so far, base 2
    total,  # [BLOCK_M] float32: sum of exp2(score - top)
    acc,  # [BLOCK_M, BLOCK_V] float32: sum of exp2(score - top) * value
    keys,  # pointer to this head's keys, [blocks, block_size, key_dim]
    values,  # pointer to this head's values, [blocks, block_size, value_dim]
    table,  # pointer to this row's block ids, int32
    start,  # position of the table's first slot
    key_mask,  # pointer to which positions of this row count, uint8; or None: all
    scale,
    softcap,  # or None
    keys_block_stride: tl.constexpr,
    keys_slot_stride: tl.constexpr,
    values_block_stride: tl.constexpr,
    values_slot_stride: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees all of the span, which is a multiple of BLOCK_N
):
    """Continue the online softmax of a tile over `begin .. end`; returns `top, total, acc`."""
    key_dims = tl.arange(0, BLOCK_K)
    value_dims = tl.arange(0, BLOCK_V)
    for low in range(begin, end, BLOCK_N):
        positions = low + tl.arange(0, BLOCK_N)
        places = positions - start
        if MASKED:
            inside = positions < end
            if key_mask is not None:
                inside = inside & (tl.load(key_mask + positions, mask=inside, other=0) != 0)
            block = tl.load(table + places // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            key_cells = inside[:, None] & (key_dims < KEY_DIM)[None, :]
            value_cells = inside[:, None] & (value_dims < VALUE_DIM)[None, :]
        else:
            block = tl.load(table + places // BLOCK_SIZE).to(tl.int64)
            key_cells = (key_dims < KEY_DIM)[None, :]
            value_cells = (value_dims < VALUE_DIM)[None, :]
        offset = places % BLOCK_SIZE

        key_at = keys + (block * keys_block_stride + offset * keys_slot_stride)[:, None] + key_dims[None, :]
        # [BLOCK_N, BLOCK_K]
        key = tl.load(key_at, mask=key_cells, other=0.0) if MASKED or KEY_DIM != BLOCK_K else tl.load(key_at)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if softcap is not None:
            # softcap * tanh(x), and tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right where exp overflows, too.
            bent = scores * (scale / softcap)
            scores = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(bent * (2.0 * LOG2E)) + 1.0))
        else:
            scores = scores * (scale * LOG2E)
        if MASKED:
            seen = inside[None, :] & (positions[None, :] >= first[:, None]) & (positions[None, :] < last[:, None])
            scores = tl.where(seen, scores, float("-inf"))

        peak = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has a peak of -inf, and -inf - -inf is NaN.
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        top = peak

        value_at = values + (block * values_block_stride + offset * values_slot_stride)[:, None] + value_dims[None, :]
        # [BLOCK_N, BLOCK_V]
        value = tl.load(value_at, mask=value_cells, other=0.0) if MASKED or VALUE_DIM != BLOCK_V else tl.load(value_at)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc, input_precision=PRECISION)
    return top, total, acc


@triton.jit
def add_sink(top, total, acc, sinks, heads, valid):
    """Let each row's sink take part in the softmax: a logit that carries no value. Nothing where `sinks` is None."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=float("-inf")).to(tl.float32) * LOG2E
        peak = tl.maximum(top, sink)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.exp2(sink - safe)
        acc = acc * shrink[:, None]
        top = peak
    return top, total, acc


@triton.jit
def store_rows(
    top,
    total,
    acc,
    out,  # pointer to the output, [num_queries, num_heads, value_dim], or to one part of it
    lse,  # pointer to the log-sum-exp of this part, [num_queries, num_heads] float32, or None: not wanted
    queries,  # [BLOCK_M] int64: which query and head each row is
    heads,  # [BLOCK_M]
    valid,  # [BLOCK_M]: rows that are queries at all
    out_query_stride,
    out_head_stride,
    num_heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Normalise and store a tile; zeros, and a log-sum-exp of -inf, for rows that see nothing."""
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    dims = tl.arange(0, BLOCK_V)
    at = out + (queries * out_query_stride + heads * out_head_stride)[:, None] * ALIGN + dims[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=valid[:, None] & (dims < VALUE_DIM)[None, :])
    if lse is not None:
        # Natural, so that anybody can merge it.
        sums = tl.where(nothing, float("-inf"), (top + tl.log2(tl.where(nothing, 1.0, total))) * LN2)
        tl.store(lse + queries * num_heads + heads, sums, mask=valid)
