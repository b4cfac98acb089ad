"""What one forward writes and reads, worked out once and shared by all layers of a group.

Rows are ragged inside: outside, the library sees `[batch, columns]` with pads; inside, a row holds its own tokens from
position 0. A plan says, per row, how many tokens were there before, which columns of this forward are stored, and
where.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .blocks import RowTables
from .store import LayerStore, Memory


@dataclass
class GroupPlan:
    """One forward, seen by one layer group.

    Attributes:
        tables: the rows' block tables, already grown for this forward.
        window: tokens a query of these layers sees (from the cache layer's type), or None.
        chunked: a query sees its own chunk only; chunks of `window` tokens begin at position 0.
        num_blocks: blocks the stores must have memory for.
        past: tokens of each row before this forward, [batch].
        new: tokens of each row stored by this forward, [batch].
        q_len: columns of this forward.
        offsets: where one forward row carries the tokens of many rows, one behind the other ([1, total] instead of
            [batch, columns], no pads): the first column of each row's tokens, [batch]; else None.
        copies: (source, target) blocks that each layer copies before it writes; none left where the backend has made
            them in all layers (`KVPool.copy_ahead`).
        live: whether a row still attends; a finished row does not and gets zeros, [batch].
        suffix: every row stores exactly its last `new[i]` columns: true but for pads on the right or in the middle.
        first_column: number of columns before this forward.
        layout: where `suffix` is false: gives, per row, the columns of its stored tokens, counted from the first column
            of the cache, and whether each is a token and not a pad, [past + new] each. (A windowed group stores pads
            behind the first token too: the library's windows count columns.)
        writer: the backend's way to write (`backends.Writer.write`); None: PyTorch's operators.
        scratch: what a backend works out once per forward.
        replay: a decode step as one layer has computed it, for the group's other layers to repeat (`backends.Replay`);
            None: each goes its own way.
    """

    tables: RowTables
    window: int | None
    num_blocks: int
    past: list[int]
    new: list[int]
    q_len: int
    copies: list[tuple[int, int]]
    live: list[bool]
    suffix: bool
    first_column: int
    layout: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None
    chunked: bool = False
    offsets: list[int] | None = None
    writer: Callable[..., bool] | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)
    replay: Any = None

    @property
    def batch(self) -> int:
        return len(self.past)

    def visible_from(self, row: int, band: int | None = None) -> int:
        """First position that the first query of a row may see.

        A windowed layer exposes `window - 1` tokens before the forward, whatever the mask says; a sliding mask of
        `band` tokens bounds each query besides, and so does the query's own chunk.
        """
        start = 0
        for width in (self.window, band):
            if width is not None:
                start = max(start, self.past[row] - width + 1)
        if self.chunked:
            assert self.window is not None
            start = max(start, self.past[row] - self.past[row] % self.window)
        return start

    @property
    def crosses_chunks(self) -> bool:
        """Whether the new tokens of some row are of several chunks."""
        if not self.chunked or self.q_len == 1:
            return False
        assert self.window is not None
        rows = zip(self.past, self.new, strict=True)
        return any(past // self.window != (past + max(new, 1) - 1) // self.window for past, new in rows)

    def shared_spans(self, rows: Sequence[int], least: int) -> list[tuple[list[int], int, int]]:
        """Spans of positions that several rows hold in the same blocks: `(rows, begin, end)`.

        For attention that reads a shared block once for all its rows. Derived from the tables alone, so it follows
        beams as they fork. Nested: what all rows share comes first, then what some of these have in common behind it.
        Rows that share `least` tokens share the block in which they become so many, so it is O(rows · runs).

        Args:
            rows: rows to group; none may have left position 0.
            least: tokens below which a span is not worth it.
        """
        size = self.tables.block_size
        tables = self.tables.rows
        spans = []
        waiting = [(list(rows), 0)]
        while waiting:
            together, begin = waiting.pop()
            place = (begin + least - 1) // size
            by_block: dict[int, list[int]] = {}
            for row in together:
                if len(tables[row].blocks) > place:
                    by_block.setdefault(tables[row].blocks[place], []).append(row)
            for group in by_block.values():
                if len(group) > 1:
                    end = min(tables[group[0]].common_blocks(tables[row]) for row in group[1:]) * size
                    end = min(end, *(self.past[row] + self.new[row] for row in group))
                    if end - begin >= least:
                        spans.append((group, begin, end))
                        waiting.append((group, end))
        return spans

    def token_slots(self, row: int, begin: int, end: int) -> list[int]:
        """Slots of positions `begin .. end` of a row."""
        runs = self.tables.rows[row].token_runs(begin, end, self.tables.block_size)
        return [slot for first, count in runs for slot in range(first, first + count)]

    def columns_of(self, row: int) -> tuple[int, int]:
        """`(index, column)`: in which row of the forward's tensors, and from which column on, row `row` has its new
        tokens. Not for plans with pads on the right or in the middle."""
        return (row, self.q_len - self.new[row]) if self.offsets is None else (0, self.offsets[row])

    def prepare(self, store: LayerStore) -> Memory:
        """Have memory for all blocks that the tables name, and copy those that are about to be written while shared.

        Call with the store's lock held.
        """
        memory = store.memory
        if memory.num_blocks < self.num_blocks:
            memory = store.ensure(self.num_blocks)
        if self.copies:
            store.copy_blocks(*self.copies_on(memory.keys.device))
        return memory

    def write(self, store: LayerStore, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the new tokens into their slots, in memory that is prepared for them.

        Call with the store's lock held.

        Args:
            key, value: [batch, num_kv_heads, q_len, dim]

        Raises:
            ValueError: if they are not of this step's shape and this store's. (An index would tell only some of it.)
        """
        memory = self.prepare(store)
        batch = len(self.past) if self.offsets is None else 1  # once a layer: no call
        for name, given, dim in (("keys", key, memory.key_dim), ("values", value, memory.value_dim)):
            if given.shape != (batch, memory.kv_heads, self.q_len, dim):
                raise ValueError(
                    f"{name} of shape {list(given.shape)} in a forward that stores "
                    f"{[batch, memory.kv_heads, self.q_len, dim]} in each layer"
                )
        if self.writer is not None and self.writer(key, value, memory, self):
            return
        _, heads, q_len, _ = key.shape
        if self.offsets is not None or (q_len >= 16 and self.suffix):
            # Long runs: straight copies, no reordered temporary.
            for row, (past, new) in enumerate(zip(self.past, self.new, strict=True)):
                source, column = self.columns_of(row)
                for slot, count in self.tables.rows[row].token_runs(past, past + new, memory.block_size):
                    memory.key_slots[:, slot : slot + count].copy_(key[source, :, column : column + count])
                    memory.value_slots[:, slot : slot + count].copy_(value[source, :, column : column + count])
                    column += count
            return
        sources, targets = self.rows_on(key.device, heads, memory.num_slots)
        if not len(targets):
            return
        for rows, tensor in ((memory.key_rows, key), (memory.value_rows, value)):
            flat = tensor.reshape(-1, tensor.shape[3])  # [batch * heads * q_len, dim]
            if sources is not None:
                flat = flat.index_select(0, sources)
            rows.index_copy_(0, targets, flat if flat.dtype == rows.dtype else flat.to(rows.dtype))

    def rows_on(self, device: torch.device, heads: int, num_slots: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """`(sources, targets)` of the tokens to write, [n * heads] int64 each.

        A source is an index into `[batch * heads * q_len]`, a target into `[heads * num_slots]`; a source of None
        stands for all in order.
        """
        key = ("rows", device, heads, num_slots)
        if key not in self.scratch:
            columns: list[int] = []
            slots: list[int] = []
            first: list[int] = []
            for row, (past, new) in enumerate(zip(self.past, self.new, strict=True)):
                if new:
                    slots.extend(self.token_slots(row, past, past + new))
                    columns.extend(self.stored_columns(row))
                    first.extend([row * heads * self.q_len] * new)
            head = torch.arange(heads)
            whole = len(slots) == self.batch * self.q_len
            # In the order of [batch, heads, q_len], so that the sources are in order where everything is written.
            target = head[:, None] * num_slots + torch.tensor(slots, dtype=torch.int64)  # [heads, n]
            source = head[:, None] * self.q_len + torch.tensor(columns, dtype=torch.int64) + torch.tensor(first)
            if whole:
                target = target.view(heads, self.batch, self.q_len).transpose(0, 1)
            self.scratch[key] = (
                None if whole else source.flatten().to(device, torch.int64, non_blocking=True),
                target.flatten().to(device, torch.int64, non_blocking=True),
            )
        return self.scratch[key]

    def copies_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`(sources, targets)` of the block copies, [num_copies] int64 each."""
        key = ("copies", device)
        if key not in self.scratch:
            sources, targets = zip(*self.copies, strict=True)
            pairs = torch.tensor([sources, targets], dtype=torch.int64).to(device, non_blocking=True)
            self.scratch[key] = (pairs[0], pairs[1])
        return self.scratch[key]

    def stored_columns(self, row: int) -> Sequence[int]:
        """Columns of this forward, from 0, that row `row` stores."""
        new = self.new[row]
        if self.suffix or new in (0, self.q_len):
            return range(self.q_len - new, self.q_len)
        columns, _ = self._layout()
        return (columns[row][-new:] - self.first_column).tolist()

    def _layout(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if "layout" not in self.scratch:
            assert self.layout is not None
            self.scratch["layout"] = self.layout()
        return self.scratch["layout"]

    def attention_mask(self, row: int, begin: int, band: int | None, device: torch.device) -> torch.Tensor:
        """Which positions `begin ..` of a row each column of this forward sees, [q_len, past + new - begin] bool; in a
        packed forward each of the row's own columns, [new, past + new - begin].

        The long way round, from columns: right for pads on every side. The query of a pad attends too; what is stored
        and what is asked are two things.
        """
        end = self.past[row] + self.new[row]
        first_column, q_len = self.first_column, self.q_len
        if self.offsets is not None:  # counted in the row's own positions
            first_column, q_len = self.past[row], self.new[row]
        if self.suffix:
            lead: int | torch.Tensor = first_column + q_len - end  # pads are all on the left here
            key_columns = torch.arange(begin, end, device=device) + lead
            seen = torch.ones(end - begin, dtype=torch.bool, device=device)
        else:
            columns, real = self._layout()
            key_columns = columns[row][begin:end].to(device)
            lead = key_columns[:1] - begin
            seen = real[row][begin:end].to(device)
        query_columns = torch.arange(first_column, first_column + q_len, device=device)[:, None]
        mask = (key_columns[None, :] <= query_columns) & seen[None, :]
        if band is not None:
            mask &= key_columns[None, :] > query_columns - band
        if self.window is not None:
            mask &= key_columns[None, :] > first_column - self.window
            if self.chunked:
                mask &= ((key_columns - lead) // self.window)[None, :] == (query_columns - lead) // self.window
        return mask


@dataclass
class StepPlan:
    """One forward.

    Attributes:
        groups: a plan per layer group.
        q_len: columns of this forward.
        end: columns of the cache once it is done.
        hides: the mask hides tokens that are stored, so only a dense path is right.
    """

    groups: list[GroupPlan]
    q_len: int
    end: int
    hides: bool = False
