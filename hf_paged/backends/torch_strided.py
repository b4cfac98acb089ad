"""The PyTorch backend: attends to blocks where they lie, as strided views, and gathers only what is scattered.

A run of adjacent blocks of the head-major store is one strided view per head, so PyTorch's fused attention reads it
without a copy. A decode step is cut into *pieces*:

- **shared**: leading blocks that several rows share are read once, their queries packed into one tile (cascade
  attention, as in FlashInfer);
- **batched**: a run of every row, at a uniform distance in the store, is one strided batch;
- **single**: a long run of one row;
- **gathered**: what is left, mostly the last few blocks of each row, padded with the null block.

Each piece gives its output and the log-sum-exp of its scores; pieces are merged by log-sum-exp in float32. GQA is
computed packed: the query heads of a group are rows of one tile.
"""

from dataclasses import dataclass, field

import torch

from ..plan import GroupPlan
from ..store import LayerStore, Layout, Memory
from . import AttentionCall

# Tokens from which a run is worth a call of its own; below, it is gathered. Measured on 2 cores: a call costs about
# 25 µs, gathering a token of 3 heads of 64 about 0.1 µs.
LONG_RUN = 192
# Shared leading tokens from which rows are grouped.
LONG_PREFIX = 64
# Bytes of keys per head from which a group's query heads are packed into one tile, so that they read the keys once:
# below, the keys stay in a core's cache from one query head to the next.
PACK_BYTES = 512 * 1024
# Queries per tile where scores are held in memory (softcap, explicit masks).
QUERY_CHUNK = 512

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    memory: Memory,
    plan: GroupPlan,
    call: AttentionCall,
) -> torch.Tensor:
    """See `hf_paged.backends`."""
    if query.shape[2] == 1 and plan.offsets is None and (plan.suffix or (plan.window is None and call.band is None)):
        return _decode(query, memory, plan, call)
    return _extend(query, key, value, memory, plan, call)


# -- one tile ---------------------------------------------------------------------------------------------------------


def _tile(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one tile, with the log-sum-exp of its scores.

    Args:
        query: [b, heads, q, key_dim]
        key, value: [b, heads, n, dim], any strides with the last one 1
        mask: [b or 1, heads or 1, q or 1, n], added to the scores; no query may be masked for all keys
        causal: query i sees keys 0..i (q == n)

    Returns:
        Output [b, heads, q, value_dim] in the query's dtype or float32, log-sum-exp [b, heads, q] in float32.
    """
    if query.dtype != torch.float32 and key.shape[2] <= LONG_RUN:
        # Parts that are merged are rounded once more than a whole softmax would be; short ones are exact for little.
        query = query.float()
    if key.dtype != query.dtype or value.dtype != query.dtype:
        key, value = key.to(query.dtype), value.to(query.dtype)
    if mask is not None and query.dtype.itemsize >= 4:  # beside 16 bits a mask may be float32
        mask = mask.to(query.dtype)
    if call.softcap is None and query.is_cpu and key.shape[3] == value.shape[3]:
        return _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=call.scale)
    scores = torch.matmul(query, key.transpose(2, 3)).float() * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if causal:
        size = scores.shape[2]
        scores = scores.masked_fill(torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1), -torch.inf)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, dim=3)
    weights = torch.exp(scores - lse.unsqueeze(3))
    return torch.matmul(weights.to(value.dtype), value), lse


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """A sink takes its share of the softmax and adds nothing: the rest shrinks by `sigmoid(lse - sink)`.

    Args:
        out: [..., dim]; lse, sinks: broadcastable to [...]
    """
    if sinks is None:
        return out
    return out * torch.sigmoid(lse - sinks.float()).unsqueeze(-1).to(out.dtype)


# -- decode: one query a row ------------------------------------------------------------------------------------------


@dataclass
class _Piece:
    """One attention call of a decode step.

    Attributes:
        rows: rows whose queries take part.
        layer: index of the merge layer its result goes to, per part.
        shared: all rows read the same keys (packed into one tile) or each row its own.
        positions: where strided: position of the first token of each row (or part); where gathered: of each token of
            `slots`.
        parts: a shared run is cut into this many equal parts, so that both cores have work.
        start, stride, tokens: where strided: first slot, slots between the starts of rows (or parts), tokens each.
        slots: where gathered: [n] int64, for a shared piece its tokens, else rows x padded tokens.
        mask: where gathered rows are of unlike length: [rows, 1, 1, padded tokens], 0 or -inf.
        added: what `_added` has worked out last: slopes or bias, kv heads, result.
    """

    rows: list[int]
    layer: int
    shared: bool
    positions: list[int]
    parts: int = 1
    start: int = 0
    stride: int = 0
    tokens: int = 0
    slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    index: "slice | torch.Tensor | None" = None  # `rows` to index with; None: all
    views: dict = field(default_factory=dict)
    added: tuple[torch.Tensor, int, torch.Tensor] | None = None


@dataclass
class _Schedule:
    pieces: list[_Piece]
    layers: int  # merge layers
    empty: list[int]  # rows that see nothing
    gathered: int  # tokens gathered per layer
    whole: bool = False  # one piece that is every row's own: nothing to merge
    buffers: dict = field(default_factory=dict)


class Replay:
    """A decode step that is one strided batch, with nothing to merge: what it takes, worked out once for all layers.

    Python's part of a decode step costs mostly what its code and objects take to get back into the processor's
    caches, from which each layer's weights drive them. So layers like the first do this and no more.

    Args:
        shape: of the query, [batch, num_heads, 1, key_dim].
        views: of the keys and of the values; see `_views`.
        packed: a group's query heads are to be one tile, so that they read the keys once.
        scale: factor on the scores.

    Attributes:
        mask: the mask of the layer that went first; set by whoever calls `repeat`.
    """

    mask: torch.Tensor | None = None
    slopes = None  # with ALiBi there is none

    def __init__(self, shape: torch.Size, views: tuple[tuple, tuple], packed: bool, scale: float):
        self.key_view, self.value_view = views
        self.shape, self.scale = shape, scale
        batch, num_heads, _, key_dim = shape
        kv_heads = self.key_view[0][1]
        self.grouped = num_heads != kv_heads
        self.tile = (batch, kv_heads, num_heads // kv_heads, key_dim) if packed else None
        self.layout: Layout | None = None

    def accept(self, layout: Layout, targets: torch.Tensor) -> None:
        """Let `repeat` serve layers with memory of this layout; `targets` as of `GroupPlan.rows_on`."""
        self.layout, self.targets = layout, targets
        rows = self.shape[0]
        self.key_shape = torch.Size((rows, layout.kv_heads, 1, layout.key_dim))
        self.value_shape = torch.Size((rows, layout.kv_heads, 1, layout.value_dim))

    def repeat(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, store: LayerStore
    ) -> torch.Tensor | None:
        """Write and attend for another layer; None, and nothing done, if its memory or a tensor is unlike.

        Args:
            query: [batch, num_heads, 1, key_dim]
            key, value: this forward's, not yet in the store, [batch, num_kv_heads, 1, dim]
        """
        with store.lock:
            memory = store.memory
            layout = self.layout
            if memory.layout != layout or query.shape != self.shape:
                return None
            if key.shape != self.key_shape or value.shape != self.value_shape:  # of as many numbers, in other places
                return None
            if not query.dtype is key.dtype is value.dtype is layout.key_dtype:
                return None
            if not query.device == key.device == value.device == layout.device:
                return None
            if not type(query) is type(key) is type(value):
                return None
            memory.key_rows.index_copy_(0, self.targets, key.reshape(-1, layout.key_dim))
            memory.value_rows.index_copy_(0, self.targets, value.reshape(-1, layout.value_dim))
        return self.attend(query, memory)

    def attend(self, query: torch.Tensor, memory: Memory) -> torch.Tensor:
        keys = memory.key_slots.as_strided(*self.key_view)
        values = memory.value_slots.as_strided(*self.value_view)
        attention = torch.nn.functional.scaled_dot_product_attention
        if self.tile is None:
            return attention(query, keys, values, scale=self.scale, enable_gqa=self.grouped).transpose(1, 2)
        out = attention(query.reshape(self.tile), keys, values, scale=self.scale)
        return out.reshape(self.shape[0], 1, self.shape[1], -1)


def _decode(query: torch.Tensor, memory: Memory, plan: GroupPlan, call: AttentionCall) -> torch.Tensor:
    """One query a row; keys and values of this step are in the store already."""
    batch, num_heads, _, key_dim = query.shape
    kv_heads, value_dim = memory.kv_heads, memory.value_dim
    group = num_heads // kv_heads
    dtype = query.dtype
    key = ("decode", call.band, query.device, dtype)
    schedule = plan.scratch.get(key)
    if schedule is None:
        schedule = plan.scratch[key] = _schedule(plan, call.band, query.device, dtype)
        elements = schedule.layers * batch * num_heads * (value_dim + 1) if schedule.layers > 1 else 0
        plan.scratch["bytes"] = 4 * elements + schedule.gathered * kv_heads * (key_dim + value_dim) * dtype.itemsize
    extras = (call.softcap, call.sinks, call.slopes, call.bias)
    if schedule.whole and dtype == memory.keys.dtype and all(extra is None for extra in extras):
        # One strided batch and nothing to merge: the very call the library makes, on blocks.
        piece = schedule.pieces[0]
        packed = group > 1 and piece.tokens * key_dim * dtype.itemsize >= PACK_BYTES
        replay = Replay(query.shape, _views(piece, batch, memory), packed, call.scale)
        if plan.replay is None and not plan.copies and memory.keys.dtype == memory.values.dtype:
            sources, targets = plan.rows_on(query.device, kv_heads, memory.num_slots)
            if sources is None:  # every row stores its token
                replay.accept(memory.layout, targets)
                plan.replay = replay
        return replay.attend(query, memory)
    queries = query.reshape(batch, kv_heads, group, key_dim)
    sinks = None if call.sinks is None else call.sinks.view(kv_heads, group)
    if not schedule.pieces:
        return query.new_zeros(batch, 1, num_heads, value_dim)

    if schedule.whole:
        out, lse = _run_piece(schedule.pieces[0], queries, memory, plan, call)
        if sinks is not None:
            out = _add_sinks(out, lse, sinks)
        return out.to(query.dtype).reshape(batch, 1, num_heads, value_dim)

    buffers = schedule.buffers.get((kv_heads, group, value_dim))
    if buffers is None:
        outs = torch.zeros(schedule.layers, batch, kv_heads, group, value_dim, device=query.device)
        lses = torch.full((schedule.layers, batch, kv_heads, group), -torch.inf, device=query.device)
        if schedule.empty:
            lses[0, schedule.empty] = 0.0
        buffers = schedule.buffers[(kv_heads, group, value_dim)] = (outs, lses)
    outs, lses = buffers
    for piece in schedule.pieces:
        out, lse = _run_piece(piece, queries, memory, plan, call)
        if piece.shared:
            # [parts, kv_heads, rows * group, ·] -> [parts, rows, kv_heads, group, ·]
            shape = (piece.parts, kv_heads, len(piece.rows), group)
            out = out.reshape(*shape, value_dim).transpose(1, 2)
            lse = lse.reshape(shape).transpose(1, 2)
            first, last = piece.layer, piece.layer + piece.parts
            into_outs, into_lses = outs[first:last], lses[first:last]
            if piece.index is not None:
                into_outs[:, piece.index] = out.to(outs.dtype)
                into_lses[:, piece.index] = lse
                continue
        else:
            into_outs, into_lses = outs[piece.layer], lses[piece.layer]
            if piece.index is not None:
                into_outs[piece.index] = out.to(outs.dtype)
                into_lses[piece.index] = lse
                continue
        into_outs.copy_(out)
        into_lses.copy_(lse)
    if schedule.layers == 1:
        merged, total = outs[0], lses[0]
    else:
        merged = (torch.softmax(lses, 0).unsqueeze(-1) * outs).sum(0)
        total = torch.logsumexp(lses, 0) if sinks is not None else lses
    if sinks is not None:
        merged = _add_sinks(merged, total, sinks)
    # The buffers are reused by the next layer, so nothing of them may leave.
    return merged.to(query.dtype, copy=schedule.layers == 1).view(batch, 1, num_heads, value_dim)


def _run_piece(
    piece: _Piece, queries: torch.Tensor, memory: Memory, plan: GroupPlan, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one piece: [rows, kv_heads, group, dim], or [parts, kv_heads, rows * group, dim] where shared."""
    kv_heads, key_dim, value_dim = memory.kv_heads, memory.key_dim, memory.value_dim
    chosen = queries if piece.index is None else queries[piece.index]
    if piece.shared:
        chosen = chosen.transpose(0, 1).reshape(1, kv_heads, -1, key_dim).expand(piece.parts, -1, -1, -1)
    if piece.slots is not None:
        keys, values = memory.gather(piece.slots)
        count = 1 if piece.shared else len(piece.rows)
        keys = keys.view(kv_heads, count, -1, key_dim).transpose(0, 1)
        values = values.view(kv_heads, count, -1, value_dim).transpose(0, 1)
    else:
        count = piece.parts if piece.shared else len(piece.rows)
        keys, values = _strided(piece, count, memory)
    mask = piece.mask if call.slopes is None and call.bias is None else _added(piece, plan, call, kv_heads)
    return _tile(chosen, keys, values, call, mask)


def _added(piece: _Piece, plan: GroupPlan, call: AttentionCall, kv_heads: int) -> torch.Tensor:
    """What ALiBi or a bias adds to the scores of a piece, its mask included, counted from each row's end:
    [rows, kv_heads, group, tokens], or [parts, kv_heads, rows * group, tokens] where shared."""
    source = call.slopes if call.bias is None else call.bias
    assert source is not None
    if piece.added is None or piece.added[0] is not source or piece.added[1] != kv_heads:
        device = source.device
        positions = torch.tensor(piece.positions, device=device)
        if piece.slots is None:
            positions = positions[:, None] + torch.arange(piece.tokens, device=device)
        else:
            positions = positions.view(1 if piece.shared else len(piece.rows), -1)
        ends = torch.tensor([plan.past[row] + plan.new[row] for row in piece.rows], device=device)
        # [parts, rows, tokens] or [rows, 1, tokens]
        ahead = positions[:, None] - (ends[:, None] if piece.shared else ends[:, None, None])
        if call.bias is None:
            added = source.view(1, kv_heads, 1, -1, 1) * ahead[:, None, :, None]
        else:  # [num_heads, parts or rows, 1 or rows, tokens]
            there = source[0, :, 0, source.shape[3] + ahead].unflatten(0, (kv_heads, -1))
            added = there.permute(2, 0, 3, 1, 4)
        added = added.flatten(2, 3)
        if piece.mask is not None:
            added = added + piece.mask
        piece.added = (source, kv_heads, added)
        plan.scratch["bytes"] += added.nbytes
    return piece.added[2]


def _strided(piece: _Piece, count: int, memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a strided piece, [count, kv_heads, tokens, dim], as views of the memory."""
    key_view, value_view = _views(piece, count, memory)
    return memory.key_slots.as_strided(*key_view), memory.value_slots.as_strided(*value_view)


def _views(piece: _Piece, count: int, memory: Memory) -> tuple[tuple, tuple]:
    """Size, stride and storage offset of the keys and of the values of a strided piece."""
    layout = memory.layout
    views = piece.views.get(layout)
    if views is None:
        views = piece.views[layout] = tuple(
            (
                (count, layout.kv_heads, piece.tokens, dim),
                (piece.stride * dim, layout.num_slots * dim, dim, 1),
                offset + piece.start * dim,
            )
            for dim, offset in ((layout.key_dim, layout.key_offset), (layout.value_dim, layout.value_offset))
        )
    return views


def _schedule(plan: GroupPlan, band: int | None, device: torch.device, dtype: torch.dtype) -> _Schedule:
    """Cut a decode step into pieces. O(rows · runs), independent of the context's length."""
    size = plan.tables.block_size
    tables = plan.tables.rows
    ends = [past + new for past, new in zip(plan.past, plan.new, strict=True)]
    active = [row for row, end in enumerate(ends) if plan.live[row] and end > 0]
    empty = [row for row in range(plan.batch) if not plan.live[row] or ends[row] == 0]
    starts = [max(plan.visible_from(row, band), table.start) for row, table in enumerate(tables)]
    pieces: list[_Piece] = []
    used = [0] * plan.batch  # merge layers used per row
    gathered = 0

    for rows, first, last in plan.shared_spans([row for row in active if starts[row] == 0], LONG_PREFIX):
        scattered: list[int] = []
        positions: list[int] = []
        position = first
        for slot, count in tables[rows[0]].token_runs(first, last, size):
            if count >= LONG_RUN or (not scattered and count == last - first):
                parts = 2 if count >= 2 * LONG_RUN and count % 2 == 0 and torch.get_num_threads() > 1 else 1
                pieces.append(
                    _Piece(
                        rows, _layer_for(used, rows, parts), True,
                        list(range(position, position + count, count // parts)),
                        parts, slot, count // parts, count // parts, index=_index(rows, plan.batch, device),
                    )
                )  # fmt: skip
            else:
                scattered.extend(range(slot, slot + count))
                positions.extend(range(position, position + count))
            position += count
        if scattered:
            pieces.append(
                _Piece(
                    rows,
                    _layer_for(used, rows),
                    True,
                    positions,
                    slots=torch.tensor(scattered, device=device),
                    index=_index(rows, plan.batch, device),
                )
            )
            gathered += len(scattered)
        for row in rows:
            starts[row] = last

    # What each row has for itself.
    spans = {row: tables[row].token_runs(starts[row], ends[row], size) for row in active}
    spans = {row: runs for row, runs in spans.items() if runs}
    while spans:
        batched = _uniform(list(spans.values()))
        if batched is None or (batched[2] < LONG_RUN and any(len(runs) > 1 for runs in spans.values())):
            break
        rows = list(spans)
        positions = [starts[row] for row in rows]
        pieces.append(
            _Piece(rows, _layer_for(used, rows), False, positions, 1, *batched, index=_index(rows, plan.batch, device))
        )
        for row in rows:
            starts[row] += batched[2]
        spans = {row: runs[1:] for row, runs in spans.items() if len(runs) > 1}
        if len(spans) not in (0, len(rows)):
            break
    leftovers: dict[int, list[int]] = {}
    places: dict[int, list[int]] = {}
    for row, runs in spans.items():
        position = starts[row]
        for slot, count in runs:
            if count >= LONG_RUN:
                pieces.append(
                    _Piece(
                        [row], _layer_for(used, [row]), False, [position], 1, slot, 0, count,
                        index=_index([row], plan.batch, device),
                    )
                )  # fmt: skip
            else:
                leftovers.setdefault(row, []).extend(range(slot, slot + count))
                places.setdefault(row, []).extend(range(position, position + count))
            position += count
    if leftovers:
        rows = list(leftovers)
        longest = max(map(len, leftovers.values()))
        slots = torch.zeros(len(rows), longest, dtype=torch.int64)
        for place, own in enumerate(leftovers.values()):
            slots[place, : len(own)] = torch.tensor(own)
        mask = None
        if any(len(own) != longest for own in leftovers.values()):
            lengths = torch.tensor([len(own) for own in leftovers.values()])
            mask = torch.zeros(len(rows), 1, 1, longest, dtype=dtype)
            mask.masked_fill_(torch.arange(longest) >= lengths.view(-1, 1, 1, 1), -torch.inf)
            mask = mask.to(device, non_blocking=True)
        pieces.append(
            _Piece(
                rows,
                _layer_for(used, rows),
                False,
                [position for own in places.values() for position in own + [0] * (longest - len(own))],
                slots=slots.flatten().to(device, non_blocking=True),
                mask=mask,
                index=_index(rows, plan.batch, device),
            )
        )
        gathered += slots.numel()
    whole = len(pieces) == 1 and not pieces[0].shared and pieces[0].slots is None and not empty
    return _Schedule(pieces, max(used, default=0), empty, gathered, whole)


def _layer_for(used: list[int], rows: list[int], parts: int = 1) -> int:
    """The first of `parts` merge layers that are free for all `rows`, taken."""
    layer = max(used[row] for row in rows)
    for row in rows:
        used[row] = layer + parts
    return layer


def _index(rows: list[int], batch: int, device: torch.device) -> "slice | torch.Tensor | None":
    """`rows` as something to index with: a slice wherever they are adjacent."""
    if len(rows) == batch:
        return None
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _uniform(spans: list[list[tuple[int, int]]]) -> tuple[int, int, int] | None:
    """`(start, stride, tokens)` if the first run of every row has the same length, at a uniform distance."""
    first, tokens = spans[0][0]
    if any(runs[0][1] != tokens for runs in spans):
        return None
    stride = spans[1][0][0] - first if len(spans) > 1 else 0
    if stride < 0 or any(runs[0][0] != first + place * stride for place, runs in enumerate(spans)):
        return None
    if len(spans) > 1 and stride == 0:
        return None
    return first, stride, tokens


# -- prefill and everything else --------------------------------------------------------------------------------------


def _extend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    memory: Memory,
    plan: GroupPlan,
    call: AttentionCall,
) -> torch.Tensor:
    """Several queries a row, with any past; pads on the right or in the middle; packed rows. Row by row."""
    batch, num_heads, q_len, key_dim = query.shape
    kv_heads, value_dim = memory.kv_heads, memory.value_dim
    out = query.new_empty(batch, q_len, num_heads, value_dim)
    scratch = 0
    for row in range(plan.batch):
        past, new = plan.past[row], plan.new[row]
        if plan.offsets is None:
            index, columns = row, slice(None)
        else:  # only its own columns are the row's
            index, columns = 0, slice(plan.offsets[row], plan.offsets[row] + new)
        mine, into = query[index, :, columns], out[index, columns]
        if not plan.live[row] or past + new == 0:
            into.zero_()
            continue
        table = plan.tables.rows[row]
        begin = max(plan.visible_from(row, call.band), table.start)
        bounded = call.band is not None and past + new - plan.visible_from(row, None) > call.band and new > 1
        if not plan.suffix:
            begin = max(table.start, plan.visible_from(row, None)) if plan.window is not None else table.start
        if not plan.suffix or bounded or call.bias is not None:
            _masked_row(mine, memory, plan, call, row, begin, into)
            scratch = max(scratch, past + new - begin)
            continue
        pads = mine.shape[1] - new
        if pads:
            into[:pads].zero_()
        if new == 0:
            continue
        tile = mine[:, pads:]
        if key is None or value is None:
            own_keys, own_values = _stored(memory, plan, row, past, past + new)
        else:
            own_keys, own_values = key[index, :, columns][:, pads:], value[index, :, columns][:, pads:]
        # With ALiBi the sums are the smaller, and so the more exact, the nearer a query is to the keys' end.
        chunk = new if call.slopes is None else QUERY_CHUNK
        sinks = None if call.sinks is None else call.sinks.view(-1, 1)
        for first in range(0, new, chunk):
            part = slice(first, min(first + chunk, new))
            results = [_causal_row(tile[:, part], own_keys[:, part], own_values[:, part], call)]
            if past + first > begin:
                runs = table.token_runs(begin, past + first, memory.block_size)
                if len(runs) > 4:
                    scratch = max(scratch, past + first - begin)
                results += _before(tile[:, part], memory, plan, call, row, begin, past + first, runs)
            merged, total = _merge(results)
            into[pads:][part] = _add_sinks(merged, total, sinks).transpose(0, 1).to(out.dtype)
    plan.scratch["bytes"] = max(
        plan.scratch.get("bytes", 0), scratch * kv_heads * (key_dim + value_dim) * query.element_size()
    )
    return out


def _before(
    query: torch.Tensor,
    memory: Memory,
    plan: GroupPlan,
    call: AttentionCall,
    row: int,
    begin: int,
    end: int,
    runs: list[tuple[int, int]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Attention of a row's new tokens to its positions `begin .. end`, which are all before them, as pairs to merge.

    Args:
        query: [num_heads, n, key_dim]
        runs: of these positions; many are gathered.

    Returns:
        Outputs [num_heads, n, value_dim] and log-sum-exps [num_heads, n].
    """
    num_heads, count, key_dim = query.shape
    kv_heads = memory.kv_heads
    if len(runs) > 4:
        slots = torch.tensor(plan.token_slots(row, begin, end), device=query.device)
        pairs = [memory.gather(slots)]
    else:
        pairs = [
            (memory.key_slots[:, slot : slot + count], memory.value_slots[:, slot : slot + count])
            for slot, count in runs
        ]
    results = []
    for keys, values in pairs:
        if call.slopes is None:
            packed = query.reshape(1, kv_heads, -1, key_dim)  # group and queries are rows of one tile
            out, lse = _chunked(packed, keys.unsqueeze(0), values.unsqueeze(0), call)
        else:
            # Each head of a group has its own slope and reads the keys for itself.
            grouped = query.unflatten(0, (kv_heads, -1))
            keys, values = (tensor.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for tensor in (keys, values))
            begin, first = begin + keys.shape[2], begin
            out, lse = _tile(grouped, keys, values, call, _ramp(call, kv_heads, first, begin, end + count))
        results.append((out.reshape(num_heads, count, -1), lse.reshape(num_heads, count)))
    return results


def _ramp(call: AttentionCall, kv_heads: int, begin: int, end: int, origin: int) -> torch.Tensor | None:
    """What ALiBi adds to the scores of keys at positions `begin .. end`, counted from `origin`:
    [kv_heads, group, 1, end - begin]; None without it."""
    if call.slopes is None:
        return None
    ahead = torch.arange(begin - origin, end - origin, device=call.slopes.device)
    return call.slopes.view(kv_heads, -1, 1, 1) * ahead


def _stored(memory: Memory, plan: GroupPlan, row: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions `begin .. end` of a row, [num_kv_heads, n, dim]: a view if they lie in one run."""
    runs = plan.tables.rows[row].token_runs(begin, end, memory.block_size)
    if len(runs) == 1:
        slot, count = runs[0]
        return memory.key_slots[:, slot : slot + count], memory.value_slots[:, slot : slot + count]
    return memory.gather(torch.tensor(plan.token_slots(row, begin, end), device=memory.keys.device))


def _merge(results: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge (output, log-sum-exp) pairs over disjoint keys, in float32."""
    if len(results) == 1:
        return results[0]
    lses = torch.stack([lse for _, lse in results])
    weights = torch.softmax(lses, 0).unsqueeze(-1)
    merged = sum(out.float() * weight for (out, _), weight in zip(results, weights, strict=True))
    assert isinstance(merged, torch.Tensor)
    return merged, torch.logsumexp(lses, 0)


def _chunked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_tile` without mask; where scores are held in memory, a chunk of queries at a time."""
    if call.softcap is None or query.shape[2] <= QUERY_CHUNK:
        return _tile(query, key, value, call)
    parts = [_tile(part, key, value, call) for part in query.split(QUERY_CHUNK, dim=2)]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _causal_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one row over its own new tokens.

    Args:
        query: [num_heads, n, key_dim]; key, value: [num_kv_heads, n, dim]

    Returns:
        Output [num_heads, n, value_dim], log-sum-exp [num_heads, n].
    """
    num_heads, count, _ = query.shape
    kv_heads = key.shape[0]
    shape = (kv_heads, num_heads // kv_heads)
    # A kv head is a batch entry and its keys are expanded over the group, so nothing is copied.
    queries = query.unflatten(0, shape)
    keys, values = (tensor.unsqueeze(1).expand(-1, shape[1], -1, -1) for tensor in (key, value))
    if call.softcap is None or count <= QUERY_CHUNK:
        out, lse = _tile(queries, keys, values, call, _ramp(call, kv_heads, 0, count, count), causal=True)
        return out.reshape(num_heads, count, -1), lse.reshape(num_heads, count)
    outs, lses = [], []
    for first in range(0, count, QUERY_CHUNK):
        last = min(first + QUERY_CHUNK, count)
        positions = torch.arange(last, device=query.device)
        mask = torch.zeros(1, 1, last - first, last, device=query.device)
        mask.masked_fill_(positions > positions[first:last, None], -torch.inf)
        out, lse = _tile(queries[:, :, first:last], keys[:, :, :last], values[:, :, :last], call, mask)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2).reshape(num_heads, count, -1), torch.cat(lses, 2).reshape(num_heads, count)


def _masked_row(
    query: torch.Tensor,
    memory: Memory,
    plan: GroupPlan,
    call: AttentionCall,
    row: int,
    begin: int,
    out: torch.Tensor,
) -> None:
    """One row with an explicit mask: a window that binds in the middle of the queries, or pads on any side.

    Args:
        query: [num_heads, q_len, key_dim], the row's own queries
        begin: first position any query may see
        out: [q_len, num_heads, value_dim], filled
    """
    num_heads, q_len, _ = query.shape
    kv_heads = memory.key_slots.shape[0]
    end = plan.past[row] + plan.new[row]
    if end <= begin:
        out.zero_()
        return
    keys, values = _stored(memory, plan, row, begin, end)
    shape = (kv_heads, num_heads // kv_heads)
    queries = query.unflatten(0, shape)
    keys, values = (tensor.unsqueeze(1).expand(-1, shape[1], -1, -1) for tensor in (keys, values))
    key_mask = ("mask", row, begin, call.band, query.dtype)
    if key_mask not in plan.scratch:
        seen = plan.attention_mask(row, begin, call.band, query.device)  # [q_len, n]
        blind = ~seen.any(1)
        seen[:, 0] |= blind  # a query that sees nothing must not make NaN; its output is zeroed
        added = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, -torch.inf)
        # A pad's key in a windowed group may be anything, but it is finite: the model made it.
        plan.scratch[key_mask] = (added.view(1, 1, *seen.shape), blind if bool(blind.any()) else None)
    mask, blind = plan.scratch[key_mask]
    ramp = _ramp(call, kv_heads, begin, end, end)
    if call.bias is not None:
        columns = call.bias.shape[3]
        mask = mask + call.bias[0, ..., columns - (end - begin) :].unflatten(0, shape)
    for first in range(0, q_len, QUERY_CHUNK):
        last = min(first + QUERY_CHUNK, q_len)
        seen = mask[:, :, first:last] if ramp is None else mask[:, :, first:last] + ramp
        part, lse = _tile(queries[:, :, first:last], keys, values, call, seen)
        part = part.reshape(num_heads, last - first, -1)
        sinks = None if call.sinks is None else call.sinks.view(-1, 1)
        part = _add_sinks(part, lse.reshape(num_heads, last - first), sinks)
        out[first:last] = part.transpose(0, 1).to(out.dtype)
    if blind is not None:
        out[blind] = 0
