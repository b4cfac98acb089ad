"""The Triton backend: attention over the block tables by kernels, a few launches a layer.

What depends on the rows alone (tables, lengths, which rows share what) goes to the device once a forward, at its first
layer, and waits in the plan's scratch for the others. A block table stays on the device from one forward to the next,
and only the entries that have changed are sent. Per layer nothing is read back and nothing loops over rows.
"""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..blocks import RowTables
from ..plan import GroupPlan
from ..store import LayerStore, Memory
from ..triton_kernels import ops as _ops  # noqa: F401  registers them
from ..triton_kernels.common import send
from ..triton_kernels.copy import StoreSet, copy_blocks, store_sets, update_table
from ..triton_kernels.decode import decode_attention
from ..triton_kernels.prefill import prefill_attention
from ..triton_kernels.shared import SharedSpans, SpanLists, list_spans, members_per_tile, pack_spans, shared_attention
from ..triton_kernels.write import write_tokens
from . import AttentionCall, Writer, torch_strided

# Shared leading tokens from which rows are grouped. Not measured: a guess at what merging costs.
LONG_PREFIX = 256
WIDEST_HEAD = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Where kernels run; in Triton's interpreter on the CPU.
DEVICES = ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)


def attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    memory: Memory,
    plan: GroupPlan,
    call: AttentionCall,
) -> torch.Tensor:
    """See `hf_paged.backends`. What no kernel is for is left to the PyTorch backend."""
    if not _has_kernels(query, memory, plan, call):
        return torch_strided.attend(query, key, value, memory, plan, call)
    batch, num_heads, q_len, key_dim = query.shape
    with torch.cuda.device_of(query):
        # [batch * q_len, num_heads, key_dim]; a view where a projection has made it.
        packed = query.transpose(1, 2).reshape(batch * q_len, num_heads, key_dim)
        if packed.stride(2) != 1:
            packed = packed.contiguous()
        rows = _rows_on(plan, query.device)
        if q_len == 1 and plan.offsets is None:
            out = _decode(packed, memory, plan, call, rows)
        else:
            out = prefill_attention(
                packed,
                memory.keys,
                memory.values,
                rows.table,
                rows.cu_seqlens,
                rows.lengths,
                scale=call.scale,
                longest=rows.longest,
                longest_query=max(plan.new) if plan.offsets is not None else q_len,
                begins=rows.begins,
                starts=rows.starts,
                query_ends=rows.query_ends,
                band=call.band,
                softcap=call.softcap,
                sinks=call.sinks,
            )
    return out.view(batch, q_len, num_heads, memory.value_dim)


def write(key: torch.Tensor, value: torch.Tensor, memory: Memory, plan: GroupPlan) -> bool:
    """Put this forward's tokens into their slots, in one launch. See `hf_paged.backends.Writer`.

    Args:
        key, value: [batch, num_kv_heads, q_len, dim]
    """
    if not _has_dtypes(memory) or key.dtype not in DTYPES or value.dtype not in DTYPES:
        return False
    if key.device.type not in DEVICES:
        return False
    with torch.cuda.device_of(key):
        # [batch * q_len, heads, dim]
        keys, values = key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1)
        write_tokens(keys, values, memory.keys, memory.values, _slots_on(plan, key))
    return True


# The sets that the stores of a group make, by the memory of its first layer: whose growth lets go of all. With them the
# memory of the other layers, by which it is known whether a set is still good.
_store_sets: "weakref.WeakKeyDictionary[Memory, tuple[list[Memory], list[StoreSet]]]" = weakref.WeakKeyDictionary()


def copy(stores: Sequence[LayerStore], plan: GroupPlan) -> None:
    """Make a forward's block copies in all layers of a group: a launch per kind of store. See
    `hf_paged.backends.Writer`."""
    held = []
    for store in stores:
        memory = store.ensure(plan.num_blocks)
        if memory.keys.device.type in DEVICES:
            held.append(memory)
        else:
            store.copy_blocks(*plan.copies_on(memory.keys.device))
    if not held:
        return
    first, *others = held
    known, sets = _store_sets.get(first, (None, []))
    if known != others:
        sets = store_sets([tensor for memory in held for tensor in memory.wholes])
        _store_sets[first] = (others, sets)
    for kind in sets:
        with torch.cuda.device_of(kind.addresses):
            copy_blocks([kind], *plan.copies_on(kind.addresses.device))


writer = Writer(write, copy)


def _slots_on(plan: GroupPlan, key: torch.Tensor) -> torch.Tensor:
    """Where each column of the forward goes, -1 where nowhere, [batch * q_len] int64."""
    kept = ("triton slots", key.device)
    if kept not in plan.scratch:
        slots = [-1] * (key.shape[0] * key.shape[2])
        for row, (past, new) in enumerate(zip(plan.past, plan.new, strict=True)):
            if plan.offsets is None:
                places = [row * plan.q_len + column for column in plan.stored_columns(row)]
            else:
                places = list(range(plan.offsets[row], plan.offsets[row] + new))
            for place, slot in zip(places, plan.token_slots(row, past, past + new), strict=True):
                slots[place] = slot
        plan.scratch[kept] = torch.tensor(slots, dtype=torch.int64).to(key.device, non_blocking=True)
    return plan.scratch[kept]


def _has_dtypes(memory: Memory) -> bool:
    return memory.layout.key_dtype in DTYPES and memory.layout.value_dtype in DTYPES


def _has_kernels(query: torch.Tensor, memory: Memory, plan: GroupPlan, call: AttentionCall) -> bool:
    if query.device.type not in DEVICES:
        return False
    if not plan.suffix and (plan.window is not None or call.band is not None):
        return False  # windows count columns, and here columns are not positions
    if call.slopes is not None or call.bias is not None or (plan.chunked and plan.crosses_chunks):
        return False
    return _fits(query, memory)


def _fits(query: torch.Tensor, memory: Memory) -> bool:
    if query.dtype not in DTYPES or not _has_dtypes(memory):
        return False
    return max(memory.key_dim, memory.value_dim) <= WIDEST_HEAD


def _decode(query: torch.Tensor, memory: Memory, plan: GroupPlan, call: AttentionCall, rows: "_Rows") -> torch.Tensor:
    """One query a row, [batch, num_heads, key_dim]."""
    arguments = (query, memory.keys, memory.values, rows.table, rows.lengths)
    if plan.window is None and call.band is None:
        spans = _spans_on(plan, rows, query.device, members_per_tile(query, memory.keys, memory.values))
        if spans.layers:
            return shared_attention(*arguments, spans, scale=call.scale, softcap=call.softcap, sinks=call.sinks)
    return decode_attention(
        *arguments,
        scale=call.scale,
        longest=rows.longest,
        begins=rows.begins,
        starts=rows.starts,
        band=call.band,
        softcap=call.softcap,
        sinks=call.sinks,
    )


# -- once a forward ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """The rows of a forward on the device.

    Attributes:
        table: [batch or more, width] int32.
        lengths: tokens each row attends to, the new ones included; 0 where it is finished, [batch] int32.
        cu_seqlens: where each row's queries begin and end, [batch + 1] int32.
        starts: position of the first slot of each table, [batch] int32; None: 0.
        begins: first position that the window leaves, [batch] int32; None: 0.
        query_ends: one past the last position each query sees, [batch * q_len] int32; None: lower right.
        tokens: `lengths` on the host.
        longest: tokens the longest row has blocks for.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    cu_seqlens: torch.Tensor
    starts: torch.Tensor | None
    begins: torch.Tensor | None
    query_ends: torch.Tensor | None
    tokens: list[int]
    longest: int


def _rows_on(plan: GroupPlan, device: torch.device) -> _Rows:
    key = ("triton rows", device)
    if key not in plan.scratch:
        plan.scratch[key] = _make_rows(plan, device)
    return plan.scratch[key]


def _make_rows(plan: GroupPlan, device: torch.device) -> _Rows:
    batch, q_len = plan.batch, plan.q_len
    held = plan.tables.rows
    tokens = _tokens(plan)
    starts = [row.start for row in held]
    parts: dict[str, list[int]] = {"lengths": tokens}
    if plan.offsets is None:
        parts["cu_seqlens"] = list(range(0, (batch + 1) * q_len, q_len))
    else:
        parts["cu_seqlens"] = [*plan.offsets, q_len]
    if any(starts):
        parts["starts"] = starts
    if plan.window is not None:
        # A windowed layer holds `window - 1` tokens before the first column of the forward.
        ends = [past + new for past, new in zip(plan.past, plan.new, strict=True)]
        columns = plan.past if plan.offsets is not None else [end - q_len for end in ends]
        parts["begins"] = [max(0, column - plan.window + 1) for column in columns]
        if plan.chunked:
            parts["begins"] = [plan.visible_from(row) for row in range(batch)]
    if not plan.suffix and q_len > 1:
        # Pads on the right or in the middle: a query sees as many of the stored tokens as lie at or before its column.
        parts["query_ends"] = [
            end
            for row in range(batch)
            for end in plan.attention_mask(row, 0, None, torch.device("cpu")).sum(1).tolist()
        ]
    sent = dict(zip(parts, send(list(parts.values()), device), strict=True))
    return _Rows(
        table=_table_on(plan.tables, device),
        lengths=sent["lengths"],
        cu_seqlens=sent["cu_seqlens"],
        starts=sent.get("starts"),
        begins=sent.get("begins"),
        query_ends=sent.get("query_ends"),
        tokens=tokens,
        longest=max((length - start for length, start in zip(tokens, starts, strict=True)), default=0),
    )


def _spans_on(plan: GroupPlan, rows: _Rows, device: torch.device, members: int) -> SharedSpans:
    key = ("triton spans", device, members)
    if key not in plan.scratch:
        plan.scratch[key] = pack_spans(_spans(plan), rows.tokens, members, device)
    return plan.scratch[key]


def _spans(plan: GroupPlan) -> list[tuple[list[int], int, int]]:
    those = [row for row, length in enumerate(_tokens(plan)) if length and not plan.tables.rows[row].start]
    return plan.shared_spans(those, LONG_PREFIX) if len(those) > 1 else []


def _tokens(plan: GroupPlan) -> list[int]:
    """Tokens that each row attends to."""
    return [past + new if live else 0 for past, new, live in zip(plan.past, plan.new, plan.live, strict=True)]


# -- rows whose tensors stay where they are ----------------------------------------------------------------------------


class StaticSize(NamedTuple):
    """What the launches of a captured decode step depend on, in one layer group. Buckets: powers of two.

    Attributes:
        rows: rows there may be.
        width: blocks that a row's table may have.
        layers: how deep shared spans may be nested; 0: none are shared.
        tiles: tiles of shared spans there may be.
        members: rows of a tile.
    """

    rows: int
    width: int
    layers: int = 0
    tiles: int = 0
    members: int = 0

    @classmethod
    def of(cls, plan: GroupPlan, members: int, least_width: int) -> "StaticSize":
        """The smallest one for a step.

        Args:
            members: rows that a tile holds the queries of, see `members_per_tile`; below 2: nothing is shared.
            least_width: see `width`.
        """
        rows = power_of_two(plan.batch)
        members = min(members, rows)
        width = power_of_two(max(least_width, *(len(row.blocks) for row in plan.tables.rows)))
        spans = _list_spans(plan, members) if plan.window is None and members > 1 else None
        if spans is None or not spans.layers:
            return cls(rows, width)
        # Beams branch anew in every step: room for as many tiles as there are rows is room for nearly all of it.
        tiles = max(rows, power_of_two(len(spans.tiles)))
        return cls(rows, width, power_of_two(spans.layers), tiles, members)

    def parts(self, window: int | None) -> list[int]:
        """Numbers of each kind: lengths, then the starts and begins of `_Rows`, or `SharedSpans`' tensors."""
        if window is not None:
            return [self.rows] * 3
        return [self.rows, *([self.rows * self.layers, self.tiles * 5, self.rows] if self.layers else [])]


class StaticRows:
    """The rows of decode steps that are captured as a CUDA graph, as one layer group sees them.

    Launches depend on the sizes given here alone. A row that is finished, or beyond the batch, has length 0: it writes
    nowhere and attends to nothing.

    Args:
        numbers: where lengths and the like lie, int32, as many as `count`.
        size: the sizes.
        window: of the group.
        block_size: tokens per block.
    """

    def __init__(self, numbers: torch.Tensor, size: StaticSize, window: int | None, block_size: int):
        self.size, self.window, self.block_size = size, window, block_size
        self.table = DeviceTable(numbers.device, size.rows, size.width)
        longest = size.width * block_size
        self.longest = longest if window is None else min(longest, window)
        wanted = size.parts(window)
        places = numbers.split([_aligned(count) for count in wanted])
        parts = [place[:count] for place, count in zip(places, wanted, strict=True)]
        self.lengths, self._slots = parts[0], torch.empty(0)
        self.starts: torch.Tensor | None = None
        self.begins: torch.Tensor | None = None
        if window is not None:
            self.starts, self.begins = parts[1:]
        self.spans: SharedSpans | None = None
        if size.layers:
            fixed = dict(layers=size.layers, fullest=size.members, longest=longest, longest_suffix=longest)
            self.spans = SharedSpans(parts[1], parts[2].view(-1, 5), parts[3], **fixed)

    @staticmethod
    def count(size: StaticSize, window: int | None) -> int:
        """Numbers that such rows take."""
        return sum(map(_aligned, size.parts(window)))

    def update(self, plan: GroupPlan) -> list[int]:
        """Bring the table up to date; returns what the numbers must become before it is used."""
        held = plan.tables.rows
        self.table.update([row.blocks for row in held])
        parts = [_tokens(plan)]
        if self.window is not None:
            parts.append([row.start for row in held])
            parts.append([max(0, past - self.window + 1) for past in plan.past])
        elif self.spans is not None:
            spans = _list_spans(plan, self.size.members)
            parts.extend([spans.members, [number for tile in spans.tiles for number in tile], spans.covered])
        numbers: list[int] = []
        for part, count in zip(parts, self.size.parts(self.window), strict=True):
            numbers.extend(part)
            numbers.extend([0] * (_aligned(count) - len(part)))
        return numbers

    def locate(self) -> None:
        """Work out, on the device, where each row's last token goes: for `write`."""
        last = self.lengths.long() - 1
        if self.starts is not None:
            last = last - self.starts
        blocks = self.table.table.gather(1, last.clamp(min=0)[:, None] // self.block_size)[:, 0].long()
        self._slots = (blocks * self.block_size + last % self.block_size).masked_fill(self.lengths == 0, -1)

    def write(self, key: torch.Tensor, value: torch.Tensor, memory: Memory) -> None:
        """Put each row's last token, [rows, num_kv_heads, 1, dim], into its slot. `locate` comes before."""
        with torch.cuda.device_of(key):
            write_tokens(key[:, :, 0], value[:, :, 0], memory.keys, memory.values, self._slots)

    def attend(self, query: torch.Tensor, memory: Memory, call: AttentionCall) -> torch.Tensor:
        """[rows, num_heads, 1, key_dim] -> [rows, 1, num_heads, value_dim]

        Raises:
            NotImplementedError: if there is no kernel for it.
        """
        if not _fits(query, memory):
            raise NotImplementedError(f"no kernel for {query.dtype} and head dims {memory.key_dim}, {memory.value_dim}")
        packed = query[:, :, 0]
        if packed.stride(2) != 1:
            packed = packed.contiguous()
        arguments = (packed, memory.keys, memory.values, self.table.table, self.lengths)
        options: dict[str, Any] = dict(scale=call.scale, softcap=call.softcap, sinks=call.sinks)
        with torch.cuda.device_of(query):
            if self.spans is not None and call.band is None and members_per_tile(*arguments[:3]) >= self.size.members:
                return shared_attention(*arguments, self.spans, **options)[:, None]
            options.update(longest=self.longest, begins=self.begins, starts=self.starts, band=call.band)
            return decode_attention(*arguments, **options)[:, None]


def _list_spans(plan: GroupPlan, members: int) -> SpanLists:
    key = ("triton span lists", members)
    if key not in plan.scratch:
        plan.scratch[key] = list_spans(_spans(plan), _tokens(plan), members)
    return plan.scratch[key]


def power_of_two(count: int) -> int:
    """The least power of two from `count` on."""
    return 1 << (count - 1).bit_length()


def _aligned(count: int) -> int:
    """Numbers to leave for `count`, so that what follows begins at a multiple of 16 bytes."""
    return -(-count // 4) * 4


# -- block tables, from one forward to the next -----------------------------------------------------------------------


class DeviceTable:
    """The block tables of one cache in one layer group, as they lie on a device.

    Invariant: `table[i, : len(held[i])] == held[i]`. Beyond that a row holds what it held before; nobody reads it.
    Updates and the kernels that read the table are on one stream, in order.
    """

    def __init__(self, device: torch.device, rows: int = 0, width: int = 0):
        self.device = device
        self.held: list[list[int]] = []
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)

    def update(self, rows: list[list[int]]) -> torch.Tensor:
        """Bring the table up to date; returns it, [rows or more, width] int32.

        Args:
            rows: the block ids of each row.
        """
        width = max((len(blocks) for blocks in rows), default=0)
        if len(rows) > self.table.shape[0] or width > self.table.shape[1]:
            return self._renew(rows, width)
        changes: list[tuple[int, int, int]] = []
        for index, blocks in enumerate(rows):
            old = self.held[index] if index < len(self.held) else []
            if blocks == old:
                continue
            # Mostly a row has grown, and the comparison of lists is quick.
            same = len(old) if blocks[: len(old)] == old else 0
            changes.extend(
                (index, column, block)
                for column, block in enumerate(blocks[same:], same)
                if column >= len(old) or old[column] != block
            )
        if changes:
            entries = torch.tensor(changes, dtype=torch.int32).T.contiguous()
            update_table(self.table, entries.to(self.device, non_blocking=True))
        self.held = [blocks.copy() for blocks in rows]
        return self.table

    def _renew(self, rows: list[list[int]], width: int) -> torch.Tensor:
        """A larger table, with room to grow, so that it is rarely made."""
        room = max(8, width + width // 4)
        filled = [blocks + [0] * (room - len(blocks)) for blocks in rows]
        self.table = torch.tensor(filled, dtype=torch.int32).view(len(rows), room).to(self.device, non_blocking=True)
        self.held = [blocks.copy() for blocks in rows]
        return self.table


_device_tables: "weakref.WeakKeyDictionary[RowTables, dict[torch.device, DeviceTable]]" = weakref.WeakKeyDictionary()


def _table_on(tables: RowTables, device: torch.device) -> torch.Tensor:
    by_device = _device_tables.setdefault(tables, {})
    if device not in by_device:
        by_device[device] = DeviceTable(device)
    return by_device[device].update([row.blocks for row in tables.rows])
