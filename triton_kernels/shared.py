"""Shared prefix: rows with common leading blocks attend to them as one fat tile (FlashInfer's cascade attention).

A decode step of rows that share a prompt reads the prompt's keys and values once for all of them, not once a row. What
each row has for itself is left to decode, and the parts are merged by log-sum-exp:

    span of rows 0 1 2 3   ──► part 0 (cut again over the keys)   ─┐
      span of rows 0 1     ──► part 1                             ─┼─► merge ──► out
    each row's own suffix  ──► part 2 …                           ─┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import config
from .common import TRITON_DTYPES, alignment, check_queries, check_store, compute_dtype, padded, refuse_scales, send
from .decode import decode_parts
from .merge import merge_parts
from .tile import attend_span, store_rows


@triton.jit(
    do_not_specialize=[
        "least",
        "table_stride",
        "query_row_stride",
        "query_head_stride",
        "keys_head_stride",
        "values_head_stride",
        "out_part_stride",
        "out_row_stride",
        "out_head_stride",
        "lse_part_stride",
    ]
)
def _shared_kernel(
    query,  # [rows, num_heads, key_dim]
    keys,  # [num_kv_heads, blocks, block_size, key_dim]
    values,  # [num_kv_heads, blocks, block_size, value_dim]
    table,  # [rows, table_width] int32
    members,  # [·] int32: rows of the tiles, tile after tile
    tiles,  # [num_tiles, 5] int32: first member, members, begin, end, layer
    out,  # [layers * parts, rows, num_heads, value_dim] float32
    lse,  # [layers * parts, rows, num_heads] float32
    scale,
    softcap,  # or None
    least,  # tokens a part has at least
    num_heads,
    table_stride,
    lse_part_stride,
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
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 5
    kv_head = tl.program_id(1).to(tl.int64)
    first_member = tl.load(tile)
    count = tl.load(tile + 1)
    begin = tl.load(tile + 2)
    end = tl.load(tile + 3)
    part = (tl.load(tile + 4) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64)

    cells = tl.arange(0, BLOCK_M)
    valid = cells < count * GROUP
    rows = tl.load(members + first_member + cells // GROUP, mask=valid, other=0).to(tl.int64)
    heads = kv_head * GROUP + cells % GROUP
    dims = tl.arange(0, BLOCK_K)
    queries = tl.load(
        query + (rows * query_row_stride + heads * query_head_stride)[:, None] * ALIGN + dims[None, :],
        mask=valid[:, None] & (dims < KEY_DIM)[None, :],
        other=0.0,
    ).to(PRODUCT)

    share = tl.cdiv(end - begin, tl.num_programs(2))
    share = tl.cdiv(tl.maximum(share, least), BLOCK_N) * BLOCK_N
    begin += tl.program_id(2) * share
    end = tl.minimum(begin + share, end)

    any_row = tl.load(members + first_member).to(tl.int64)  # the blocks are the same in all of them
    top, total, acc = attend_span(
        queries,
        tl.zeros([BLOCK_M], tl.int32) + begin,
        tl.zeros([BLOCK_M], tl.int32) + end,
        begin,
        end,
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_V], tl.float32),
        keys + kv_head * keys_head_stride * ALIGN,
        values + kv_head * values_head_stride * ALIGN,
        table + any_row * table_stride,
        0,
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
        True,
    )
    store_rows(
        top,
        total,
        acc,
        out + part * out_part_stride * ALIGN,
        lse + part * lse_part_stride,
        rows,
        heads,
        valid,
        out_row_stride,
        out_head_stride,
        num_heads,
        VALUE_DIM,
        BLOCK_V,
        ALIGN,
    )


@dataclass(frozen=True)
class SharedSpans:
    """Shared spans as the kernel takes them, worked out once a step for all layers.

    Attributes:
        members: rows of the tiles, tile after tile, [·] int32.
        tiles: per tile its first member, number of members, begin, end and layer, [num_tiles, 5] int32.
        covered: first position of each row that no span covers, [rows] int32.
        layers: how deep spans are nested: as many results a row gets at most.
        fullest: members of the tile that has most.
        longest: tokens of the longest span.
        longest_suffix: tokens of the longest row behind what its spans cover.
    """

    members: torch.Tensor
    tiles: torch.Tensor
    covered: torch.Tensor
    layers: int
    fullest: int
    longest: int
    longest_suffix: int


class SpanLists(NamedTuple):
    """What of `SharedSpans` are tensors, as lists of numbers, and `layers`."""

    members: list[int]
    tiles: list[tuple[int, int, int, int, int]]
    covered: list[int]
    layers: int


def list_spans(
    spans: Sequence[tuple[Sequence[int], int, int]], lengths: Sequence[int], members_per_tile: int
) -> SpanLists:
    """Spans as `GroupPlan.shared_spans` gives them, cut into tiles.

    Args:
        spans: `(rows, begin, end)`: positions that these rows hold in the same blocks. A row's spans follow one
            another from position 0 without gaps, and come in that order.
        lengths: tokens of each row.
        members_per_tile: see `members_per_tile`.
    """
    covered, depth = [0] * len(lengths), [0] * len(lengths)
    members: list[int] = []
    tiles: list[tuple[int, int, int, int, int]] = []
    for rows, begin, end in spans:
        layer = max(depth[row] for row in rows)
        for row in rows:
            if covered[row] != begin or end > lengths[row]:
                raise ValueError(
                    f"row {row} of {lengths[row]} tokens is covered to {covered[row]}: no span {begin}..{end}"
                )
            covered[row], depth[row] = end, layer + 1
        for low in range(0, len(rows), members_per_tile):
            some = rows[low : low + members_per_tile]
            tiles.append((len(members), len(some), begin, end, layer))
            members.extend(some)
    return SpanLists(members, tiles, covered, max(depth, default=0))


def pack_spans(
    spans: Sequence[tuple[Sequence[int], int, int]],
    lengths: Sequence[int],
    members_per_tile: int,
    device: torch.device | str,
) -> SharedSpans:
    """What `list_spans` makes of its arguments, as tensors on a device."""
    members, tiles, covered, layers = list_spans(spans, lengths, members_per_tile)
    sent = send([members, [number for tile in tiles for number in tile], covered], device)
    return SharedSpans(
        members=sent[0],
        tiles=sent[1].view(-1, 5),
        covered=sent[2],
        layers=layers,
        fullest=max((count for _, count, *_ in tiles), default=0),
        longest=max((end - begin for _, _, begin, end, _ in tiles), default=0),
        longest_suffix=max((length - done for length, done in zip(lengths, covered, strict=True)), default=0),
    )


def members_per_tile(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> int:
    """Rows that a tile holds the queries of; arguments as of `shared_attention`."""
    group = query.shape[1] // keys.shape[0]
    tile = config.prefill_tile(
        query.device,
        compute_dtype(query, keys, values).itemsize,
        max(padded(keys.shape[3]), padded(values.shape[3])),
        padded(group),
        query.shape[0] * group,
    )
    return tile.block_m // group


def shared_parts(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    spans: SharedSpans,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> None:
    """The shared spans alone, not yet merged; the arguments are those of `shared_attention` but for these.

    Args:
        out: [layers * parts, rows, num_heads, value_dim] float32. Written where a row is a member.
        lse: [layers * parts, rows, num_heads] float32, contiguous; filled with -inf beforehand.
    """
    num_heads, key_dim = query.shape[1:]
    num_kv_heads, value_dim = keys.shape[0], values.shape[3]
    group = num_heads // num_kv_heads
    product = compute_dtype(query, keys, values)
    block_k, block_v = padded(key_dim), padded(value_dim)
    tile = config.prefill_tile(
        query.device, product.itemsize, max(block_k, block_v), padded(group), spans.fullest * group
    )
    if tile.block_m < spans.fullest * group:
        raise ValueError(f"a tile of {tile.block_m} rows does not hold {spans.fullest} members: see `members_per_tile`")
    moving = (*query.stride()[:2], keys.stride(0), values.stride(0), *out.stride()[:3])
    align = alignment(*moving)
    _shared_kernel[(spans.tiles.shape[0], num_kv_heads, out.shape[0] // spans.layers)](
        query,
        keys,
        values,
        table,
        spans.members,
        spans.tiles,
        out,
        lse,
        float(scale),
        None if softcap is None else float(softcap),
        config.LEAST_PART,
        num_heads,
        table.stride(0),
        lse.stride(0),
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
        PRODUCT=TRITON_DTYPES[product],
        PRECISION=config.precision(product),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def shared_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    spans: SharedSpans,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    shared_splits: int | None = None,
    splits: int | None = None,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """A decode step of rows of which some share leading blocks; `decode_attention` for all others.

    There is no band, no window and no mask here: who may not see all of a prefix does not share it.

    Args:
        query: [rows, num_heads, key_dim], any strides with a last one of 1.
        keys, values: the store, [num_kv_heads, blocks, block_size, dim], any strides with a last one of 1; the new
            tokens are in it.
        table: block ids of each row from position 0 on, [rows, width] int32.
        lengths: tokens of each row, the query's own included, [rows] int32.
        spans: what is shared, see `pack_spans`.
        scale: factor on the scores.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: a logit per head that takes part in the softmax once and carries no value, [num_heads].
        shared_splits, splits: parts of the spans and of the suffixes; None: as `config.num_splits` has it.
        out: where the answer goes; None: a new tensor in the query's dtype.
        k_scale, v_scale: room for quantised storage; not built.

    Returns:
        [rows, num_heads, value_dim]
    """
    refuse_scales(k_scale, v_scale)
    check_store(keys, values)
    value_dim = values.shape[3]
    out = check_queries(query, keys, out, value_dim)
    rows, num_heads, _ = query.shape
    if not rows:
        return out
    processors = config.device_of(query.device).processors
    if shared_splits is None:
        shared_splits = config.num_splits(spans.tiles.shape[0] * keys.shape[0], spans.longest, processors)
    if splits is None:
        splits = config.num_splits(rows * keys.shape[0], spans.longest_suffix, processors)
    first = spans.layers * shared_splits
    parts = torch.empty(first + splits, rows, num_heads, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.full((first + splits, rows, num_heads), float("-inf"), device=query.device)
    options: dict[str, Any] = dict(scale=scale, softcap=softcap)
    if first:
        shared_parts(query, keys, values, table, spans, parts[:first], lse[:first], **options)
    decode_parts(query, keys, values, table, lengths, parts[first:], lse[first:], begins=spans.covered, **options)
    return merge_parts(parts, lse, out, sinks=sinks)
