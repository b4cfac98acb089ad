"""The logical content of one `PagedCache`: rows, lengths, pads, and the step being written. Knows no Transformers.

Held by the cache and by its layers. When the last of them is gone, the blocks go back to the pool.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from .blocks import RowTables
from .plan import GroupPlan, StepPlan
from .pool import KVPool


class UnknownPadding:
    """Stands for the padding of a forward whose mask never reached us (another attention implementation)."""


UNKNOWN_PADDING = UnknownPadding()


class CacheState:
    """Rows of a batch over the layer groups of a pool.

    Attributes:
        columns: tokens per row as the library sees them, pads included.
        rows: batch size; None before the first forward.
        lead: pads before the first token of each row.
        real: [batch, n] bool on the CPU: which of the first n columns are tokens; later columns all are. None: all.
        inner_pads: a pad follows a token in some row.
        finished: rows that gave their blocks back and take no more tokens.
        recording: sliding layers keep what leaves the window until the next crop (assisted decoding).
        expected_columns: how many columns the caller may fill in all, a hint for where to put blocks; None: unknown.
        step: the forward written last; None: rows or lengths have changed since.
        writes: layers that have written in `step`.
        blind: a forward whose mask was not known has stored all its columns, pads too.
        trusted: the caller only appends real tokens from now on, so masks need no look on the host.
    """

    def __init__(self, pool: KVPool):
        self.pool = pool
        self.tables = pool.new_tables()
        self.fallbacks: Counter[str] = Counter()
        self.expected_columns: int | None = None
        self.recording = False
        self._finalizer = weakref.finalize(self, pool.abandon, self.tables)
        self._finalizer.atexit = False
        self._clear()

    def _clear(self) -> None:
        self.columns = 0
        self.rows: int | None = None
        self.lead: list[int] = []
        self.real: torch.Tensor | None = None
        self.inner_pads = False
        self.finished: list[bool] = []
        self.trusted = False
        self.step: StepPlan | None = None
        self.writes = 0
        self.blind = False

    @property
    def in_mid_forward(self) -> bool:
        """Some layers have written in this step and some have not."""
        return self.step is not None and self.writes < len(self.pool.group_of)

    # -- a step -----------------------------------------------------------------------------------------------------

    def begin_step(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor | UnknownPadding | None
    ) -> StepPlan:
        """Take the blocks one forward needs, in every group, or none at all.

        Args:
            layer: index of the layer that comes first.
            key, value: its new keys and values, [batch, num_kv_heads, q_len, dim].
            padding: [batch, columns] bool, False at pads, covering the columns before and of this forward; None: no
                padding.

        Raises:
            OutOfBlocks: the cache is as it was.
            ValueError: if the batch or the mask does not fit what the cache holds.
        """
        batch, _, q_len, _ = key.shape
        if self.rows is not None and batch != self.rows:
            raise ValueError(
                f"the cache holds {self.rows} rows, but this forward has {batch}. Before generating with several "
                "beams or samples from a filled cache, call cache.batch_repeat_interleave(n); for other rows use "
                "a new PagedCache."
            )
        new_real, hides = self._read_padding(padding, batch, q_len)
        with self.pool.locked():
            self.pool.adopt(layer, key, value)
            first = self.rows is None
            if first:
                self.finished = [False] * batch
                self.lead = [0] * batch
                for tables in self.tables:
                    tables.add_rows(batch)
            try:
                step = self._plan(batch, q_len, new_real)
            except BaseException:
                if first:
                    for tables in self.tables:
                        tables.release_all()
                    self._clear()
                raise
            self.rows = batch
        step.hides = hides
        self.columns += q_len
        self.step = step
        self.writes = 0
        self.blind |= isinstance(padding, UnknownPadding) and not self.trusted
        return step

    def _read_padding(
        self, padding: torch.Tensor | UnknownPadding | None, batch: int, q_len: int
    ) -> tuple[torch.Tensor | None, bool]:
        """Which of the new columns are tokens ([batch, q_len] bool on the CPU; None: all), and whether the mask hides
        tokens that are already stored."""
        if isinstance(padding, UnknownPadding) or self.trusted:
            return None, False
        past = self.columns
        if padding is None:
            if self.real is not None:
                raise ValueError(
                    "the cache was filled with an attention_mask that has pads, but this forward came without "
                    "one, so the pads would count as tokens. Pass the full attention_mask, one column for every "
                    "token so far."
                )
            return None, False
        padding = padding.detach().to("cpu", torch.bool)
        if padding.shape[0] != batch:
            raise ValueError(f"attention_mask has {padding.shape[0]} rows, the batch has {batch}")
        lacking = past + q_len - padding.shape[1]
        if lacking > 0:  # the library pads a short mask with zeros
            padding = torch.nn.functional.pad(padding, (0, lacking))
        hides = False
        known = 0
        if self.real is not None:
            known = self.real.shape[1]
            before = padding[:, :known]
            if not torch.equal(before, self.real):
                if (before & ~self.real).any():
                    raise ValueError(
                        "the attention_mask shows tokens where it showed pads when the cache was filled; pads are not "
                        "stored. Pass the mask the cache was filled with, extended by the new tokens."
                    )
                hides = True
        if past > known and not padding[:, known:past].all():
            hides = True
        new = padding[:, past : past + q_len]
        return (None if new.all() else new), hides

    def hidden_by(self, padding: torch.Tensor | None) -> bool:
        """Whether a mask hides tokens that a forward without a known mask has stored.

        Layers of one forward may come with unlike masks: the first of them decides what is stored.
        """
        if not self.blind or padding is None:
            return False
        shown = padding.detach().to("cpu", torch.bool)[:, : self.columns]
        stored = self._real_columns(self.columns)
        return bool(stored[:, shown.shape[1] :].any()) or bool((stored[:, : shown.shape[1]] & ~shown).any())

    def _plan(self, batch: int, q_len: int, new_real: torch.Tensor | None) -> StepPlan:
        past_columns = self.columns
        if new_real is None:
            counts = [q_len] * batch
            suffix = not self.inner_pads
            lead, real, inner = self.lead, self.real, self.inner_pads
        else:
            past_real = self._real_columns(past_columns)
            real = torch.cat([past_real, new_real], dim=1)
            counts = new_real.sum(1).tolist()
            first_token = torch.where(real.any(1), real.int().argmax(1), real.shape[1]).tolist()
            lead = first_token
            trailing = [real.shape[1] - first for first in first_token]
            inner = any(total != kept for total, kept in zip(real.sum(1).tolist(), trailing, strict=True))
            suffix = not inner
        live = [not done for done in self.finished]
        counts = [count if alive else 0 for count, alive in zip(counts, live, strict=True)]

        wanted = []  # per group, new entries per row
        for tables in self.tables:
            if inner and self._window(tables) is not None:
                wanted.append(
                    [
                        past_columns + q_len - first - row.length if alive else 0
                        for first, row, alive in zip(lead, tables.rows, live, strict=True)
                    ]
                )
            else:
                wanted.append(counts)
        for tables, entries in zip(self.tables, wanted, strict=True):
            self._leave_window(tables)
            tables.pool.require(tables.blocks_needed(entries))
        past = [[row.length for row in tables.rows] for tables in self.tables]
        copies = [
            tables.append(entries, self._spread(tables, entries))
            for tables, entries in zip(self.tables, wanted, strict=True)
        ]
        self.lead, self.real, self.inner_pads = list(lead), real, inner
        plans = []
        for tables, entries, before, pairs in zip(self.tables, wanted, past, copies, strict=True):
            plan = GroupPlan(
                tables=tables,
                window=self._window(tables),
                num_blocks=tables.pool.num_blocks,
                past=before,
                new=entries,
                q_len=q_len,
                copies=pairs,
                live=live,
                suffix=suffix,
                first_column=past_columns,
            )
            if not suffix:
                columns = self._real_columns(past_columns + q_len)
                lengths = [row.length for row in tables.rows]
                # Bound to values, not to this object: a step must not keep the state alive in a cycle.
                plan.layout = partial(_layout, columns, lengths, None if plan.window is None else self.lead)
            plans.append(plan)
        return StepPlan(plans, q_len, past_columns + q_len)

    def _window(self, tables: RowTables) -> int | None:
        return self.pool.groups[next(i for i, entry in enumerate(self.tables) if entry is tables)].window

    def _leave_window(self, tables: RowTables) -> None:
        """Give back the blocks of a sliding group that no later query sees."""
        window = self._window(tables)
        if window is None or self.recording:
            return
        for index, row in enumerate(tables.rows):
            tables.drop_before(index, row.length - window + 1)

    def _spread(self, tables: RowTables, entries: list[int]) -> int:
        """Blocks to leave free behind each row's new blocks, for the row to grow into: as many as the caller may still
        need, but no more than an eighth of what the row holds, or 8."""
        if sum(1 for count in entries if count) < 2 or self._window(tables) is not None:
            return 0
        size = self.pool.config.block_size
        longest = max(row.length + count for row, count in zip(tables.rows, entries, strict=True))
        if self.expected_columns is None:
            return longest // size // 16
        left = self.expected_columns - self.columns - max(entries)
        return min(-(-max(left, 0) // size), max(longest // size // 8, 8))

    def _real_columns(self, columns: int) -> torch.Tensor:
        """[batch, columns] bool: which of the first `columns` columns are tokens."""
        rows = len(self.lead)
        if self.real is None:
            return torch.ones(rows, columns, dtype=torch.bool)
        if self.real.shape[1] >= columns:
            return self.real[:, :columns]
        later = torch.ones(rows, columns - self.real.shape[1], dtype=torch.bool)
        return torch.cat([self.real, later], dim=1)

    # -- batch operations -------------------------------------------------------------------------------------------

    def select(self, indices: Sequence[int]) -> None:
        """Row i becomes what row `indices[i]` was, in every group."""
        if self.rows is None:
            return
        rows = self.rows
        indices = [index + rows if index < 0 else index for index in indices]
        with self.pool.locked():
            for tables in self.tables:
                tables.select(indices)
        self._follow(indices)

    def repeat_interleave(self, repeats: int) -> None:
        if self.rows is None:
            return
        with self.pool.locked():
            for tables in self.tables:
                tables.repeat_interleave(repeats)
        self._follow([row for row in range(self.rows) for _ in range(repeats)])

    def _follow(self, indices: Sequence[int]) -> None:
        self.rows = len(indices)
        self.lead = [self.lead[index] for index in indices]
        self.finished = [self.finished[index] for index in indices]
        if self.real is not None:
            self.real = self.real[list(indices)]
        self.step = None

    def crop(self, count: int) -> None:
        """Remove the last `count` columns (at least 0) from every row; sliding groups shrink to their window.

        Raises:
            RuntimeError: if a sliding group no longer holds what the crop brings back into the window.
        """
        if self.rows is None:
            return
        keep = max(self.columns - count, 0)
        for group in self.pool.groups:
            if count and group.window is not None and self.columns >= group.window and not self.recording:
                raise RuntimeError(
                    "crop was called on a sliding-window layer that has let go of earlier tokens. Call "
                    "cache.activate_past_recording() before the tokens to be removed are added."
                )
        real = self._real_columns(self.columns)
        with self.pool.locked():
            for tables in self.tables:
                windowed = self._window(tables) is not None and self.inner_pads
                for index, row in enumerate(tables.rows):
                    if self.finished[index]:
                        continue
                    lost = self.columns - max(keep, self.lead[index]) if windowed else int(real[index, keep:].sum())
                    tables.crop(index, max(row.length - lost, 0))
                if self.recording:
                    window = self._window(tables)
                    if window is not None:
                        for index, row in enumerate(tables.rows):
                            tables.drop_before(index, row.length - window + 1)
        self.columns = keep
        if self.real is not None:
            self.real = self.real[:, :keep]
            self.lead = [min(lead, keep) for lead in self.lead]
            if self.real.all():
                self.real = None
        self.inner_pads = self.inner_pads and self._has_inner_pads()
        self.step = None

    def _has_inner_pads(self) -> bool:
        if self.real is None:
            return False
        return any(not bool(self.real[row, lead:].all()) for row, lead in enumerate(self.lead))

    def finish_rows(self, rows: Sequence[int]) -> None:
        """Give back the blocks of rows that have stopped; they take no more tokens and attend to nothing."""
        with self.pool.locked():
            for row in rows:
                if not self.finished[row]:
                    self.finished[row] = True
                    for tables in self.tables:
                        tables.release_row(row)

    def reset(self) -> None:
        """Give back every block and start anew."""
        with self.pool.locked():
            for tables in self.tables:
                tables.release_all()
        self._clear()

    def fork(self) -> "CacheState":
        """The same content again, sharing every block."""
        other = CacheState(self.pool)
        with self.pool.locked():
            other.tables[:] = self.pool.register([tables.fork() for tables in self.tables])
        other.columns, other.rows, other.lead = self.columns, self.rows, list(self.lead)
        other.real, other.inner_pads, other.finished = self.real, self.inner_pads, list(self.finished)
        other.recording, other.expected_columns, other.blind = self.recording, self.expected_columns, self.blind
        return other

    # -- dense views ------------------------------------------------------------------------------------------------

    def dense_slots(self, group: int, first: int, last: int) -> torch.Tensor:
        """Slot of every column `first .. last`, [batch, last - first] int64 on the CPU; the null slot at pads."""
        tables = self.tables[group]
        size = tables.block_size
        rows = self.rows or 0
        slots = torch.zeros(rows, last - first, dtype=torch.int64)
        real = self._real_columns(last)
        windowed = self._window(tables) is not None
        for index, row in enumerate(tables.rows):
            if not row.blocks:
                continue
            if windowed and self.inner_pads:
                position = torch.arange(last) - self.lead[index]
            else:
                position = real[index].long().cumsum(0) - 1
            blocks = torch.tensor(row.blocks, dtype=torch.int64)
            held = real[index] & (position >= row.start) & (position < row.length)
            held[:first] = False
            inside = position[held] - row.start
            slots[index, held[first:]] = blocks[inside // size] * size + inside % size
        return slots

    def check(self) -> None:
        """Raise AssertionError if lengths, pads and tables disagree, or the pool's bookkeeping is broken."""
        self.pool.check()
        if self.rows is None:
            return
        real = self._real_columns(self.columns).sum(1).tolist()
        for tables in self.tables:
            assert len(tables.rows) == self.rows == len(self.lead) == len(self.finished)
            for index, row in enumerate(tables.rows):
                if self.finished[index]:
                    assert not row.blocks, f"finished row {index} holds blocks"
                elif not (self._window(tables) is not None and self.inner_pads):
                    assert row.length == real[index], f"row {index} has {row.length} tokens, its mask {real[index]}"


def _layout(
    real: torch.Tensor, lengths: list[int], lead: list[int] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Per row the column of every stored entry, and whether it is a token.

    Args:
        real: [batch, columns] bool, which columns are tokens.
        lengths: entries stored per row.
        lead: for a windowed group, which stores pads behind the first token too, the pads before it; else None.
    """
    places, tokens = [], []
    for index, length in enumerate(lengths):
        place = real[index].nonzero().flatten() if lead is None else torch.arange(lead[index], real.shape[1])
        places.append(place[:length])
        tokens.append(real[index][places[-1]])
    return places, tokens
