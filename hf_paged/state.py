"""The logical content of one `PagedCache`: rows, lengths, pads, and the step being written. Knows no Transformers.

Held by the cache and by its layers. When the last of them is gone, the blocks go back to the pool.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from .blocks import RowTables
from .plan import GroupPlan, StepPlan
from .pool import KVPool


class UnknownPadding:
    """Stands for the padding of a forward whose mask never reached us (another attention implementation)."""


UNKNOWN_PADDING = UnknownPadding()


class KnownTokens:
    """The token ids behind a cache's columns, as far as they are known. Outlives the cache: the prefix index is told.

    Ids that are *believed* are what the index may be told: the prompt's, and those of decode steps once the call has
    found at its end that the weights are still those it began with. Until then they are *fed*.

    Attributes:
        identity: what else the keys and values depend on; None: nothing is known.
        salt: the namespace they may be found in; None: none.
        ids: [rows, columns] int64 of its own, on the CPU or where the model has its inputs. Believed.
        fed: what each forward since was given, [rows, n] each, nobody else's.
        columns: columns that are believed, written in every layer.
        real: [rows, m] bool on the CPU: which of the first m columns are tokens; later ones all are. None: all.
        torn: a forward has begun since, and may not have come to its end.
        witness: sees whether the model is left alone while user's code runs in the call; None: none does.
        trial: stands for the identity of rows that went while nothing fed was believed yet; None: there are none.
    """

    def __init__(self) -> None:
        self.torn = False
        self.trial: Hashable = None
        self.clear()

    def clear(self) -> None:
        self.identity: Hashable = None
        self.salt: str | None = None
        self.ids: torch.Tensor | None = None
        self.fed: list[torch.Tensor] = []
        self.witness: Any = None
        self.columns = 0
        self.real: torch.Tensor | None = None

    def note(self, ids: torch.Tensor, real: torch.Tensor | None) -> None:
        """Believe in these ids, [rows, columns]; the tensor is not the caller's any more."""
        self.ids, self.columns, self.real = ids, ids.shape[1], real
        self.fed = []
        self.torn = False

    def feed(self, ids: torch.Tensor) -> None:
        """A forward is about to be given these ids, [rows, n], a tensor that nobody else writes to."""
        self.fed.append(ids)

    @property
    def fed_columns(self) -> int:
        """Columns that are believed or fed."""
        return self.columns + sum(ids.shape[1] for ids in self.fed)

    def together(self) -> torch.Tensor | None:
        """Ids that are believed or fed, [rows, fed_columns], where the model has its inputs. Waits for nothing."""
        if self.ids is None or not self.fed:
            return self.ids
        return torch.cat([self.ids.to(self.fed[0].device, non_blocking=True), *self.fed], dim=1)

    def select(self, indices: Sequence[int]) -> None:
        if self.ids is not None:
            self.ids = self.ids[list(indices)]
        self.fed = [ids[list(indices)] for ids in self.fed]
        if self.real is not None:
            self.real = self.real[list(indices)]

    def crop(self, columns: int) -> None:
        """Forget all behind the first columns."""
        if columns < self.columns:
            self.columns = columns
            self.ids = None if self.ids is None else self.ids[:, :columns]
        if columns < self.fed_columns:
            self.fed = []  # what an assistant has proposed is not kept anyway

    def row(self, index: int) -> list[int]:
        """The tokens of a row that are believed, pads left out."""
        if self.identity is None or self.ids is None:
            return []
        if not self.ids.is_cpu:
            self.ids = self.ids.cpu()  # all rows at once: a read waits for the device
        return self.tokens_of(index, self.ids)

    def tokens_of(self, index: int, ids: torch.Tensor) -> list[int]:
        """Those of a row in `ids`, [rows, columns] on the CPU, pads left out."""
        row = ids[index]
        if self.real is not None:
            shown = self.real[index, : len(row)]
            row = row[torch.cat([shown, torch.ones(len(row) - len(shown), dtype=torch.bool)])]
        return row.tolist()

    def copy_from(self, other: "KnownTokens") -> None:
        self.identity, self.salt = other.identity, other.salt
        self.ids, self.columns, self.real, self.torn = other.ids, other.columns, other.real, other.torn


class CacheState:
    """Rows of a batch over the layer groups of a pool.

    Attributes:
        columns: tokens per row as the library sees them, pads included.
        rows: batch size; None before the first forward.
        lead: pads before the first token of each row.
        real: [batch, n] bool on the CPU: which of the first n columns are tokens; later columns all are. None: all.
        inner_pads: a pad follows a token in some row.
        finished: rows that gave their blocks back and take no more tokens.
        wrapped: known to be the self-attention half of an `EncoderDecoderCache`.
        recording: sliding layers keep what leaves the window until the next crop (assisted decoding).
        expected_columns: how many columns the caller may fill in all, a hint for where to put blocks; None: unknown.
        added: columns that the model itself has put before the prompt of a call (CPM-Ant does).
        step: the forward written last; None: rows or lengths have changed since.
        writes: layers that have written in `step`.
        blind: a forward whose mask was not known has stored all its columns, pads too.
        rewritten: somebody has written keys or values that are not the model's; no prefix is made of them.
        trusted: the caller only appends real tokens from now on, so masks need no look on the host.
        hides: the mask of the forward written last hid stored tokens.
        appended: the mask of the next forward, if `generate()` has made it by appending ones to one that was seen.
        hooks: those before the model's forward when the call began, see `generation.soundness.hooks_before`.
        vouched: the next forward comes with that mask.
        watched: nobody but the library touches masks in this call, so one that was seen need not be read again.
        announced: the mask of a prompt, [batch, columns] bool on the CPU, while its forwards run; None: not known.
        known: the token ids, as far as they are known.
        follows: what each forward is given is noted there.
        packed: the next forward carries these many tokens of each row, one row behind the other; None: a column each.
    """

    def __init__(self, pool: KVPool):
        self.pool = pool
        self.tables = pool.new_tables()
        self.windows = [group.window for group in pool.groups]
        self.fallbacks: Counter[str] = Counter()
        self.expected_columns: int | None = None
        self.added = 0
        self.recording = self.wrapped = False
        self.follows = self.watched = False  # set by each call
        self.hooks: tuple[tuple[int, ...], ...] = ()
        self.known = KnownTokens()
        self._finalizer = weakref.finalize(self, pool.abandon, self.tables, self.known)
        self._finalizer.atexit = False
        self._clear()

    def _clear(self) -> None:
        self.columns = 0
        self.rows: int | None = None
        self.lead: list[int] = []
        self.real: torch.Tensor | None = None
        self.inner_pads = False
        self.finished: list[bool] = []
        self.trusted = self.hides = self.vouched = False
        self.appended: torch.Tensor | None = None
        self.announced: torch.Tensor | None = None
        self.step: StepPlan | None = None
        self.writes = 0
        self.blind = self.rewritten = False
        self.packed: list[int] | None = None
        self.known.clear()

    @property
    def first_of_a_step(self) -> bool:
        """One layer alone has written in this step, and there are others. (How many, a config need not say right.)"""
        return self.step is not None and self.writes == 1 < len(self.pool.group_of)

    def wrote(self) -> None:
        """A layer has written its part of the step."""
        self.writes += 1
        if self.writes == len(self.pool.group_of):
            self._return_lent()

    def _return_lent(self) -> None:
        if any(tables.lent for tables in self.tables):
            with self.pool.locked():
                for tables in self.tables:
                    tables.return_lent()

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
        packed, self.packed = self.packed, None
        if packed is not None and (batch != 1 or q_len != sum(packed)):
            raise ValueError(f"expected a packed forward of [1, {sum(packed)}] tokens, got [{batch}, {q_len}]")
        if packed is None and self.rows is not None and batch != self.rows:
            raise ValueError(
                f"the cache holds {self.rows} rows, but this forward has {batch}. Before generating with several "
                "beams or samples from a filled cache, call cache.batch_repeat_interleave(n); for other rows use "
                "a new PagedCache."
            )
        new_real, hides = (None, False) if packed is not None else self._read_padding(padding, batch, q_len)
        with self.pool.locked():
            self._return_lent()
            self.pool.adopt(layer, key, value)
            first = self.rows is None
            if first:
                self.open(batch)
            try:
                step = self._plan(q_len, new_real, packed)
            except BaseException:
                if first:
                    for tables in self.tables:
                        tables.release_all()
                    self._clear()
                raise
        step.hides = self.hides = hides
        self.vouched = False
        self.known.torn = True
        self.columns += q_len
        self.step = step
        self.writes = 0
        if isinstance(padding, UnknownPadding) and not self.trusted:
            self.blind = True
            self.known.clear()
        return step

    def open(self, rows: int) -> None:
        """Begin with empty rows."""
        assert self.rows is None
        with self.pool.locked():
            self.rows = rows
            self.finished = [False] * rows
            self.lead = [0] * rows
            for tables in self.tables:
                tables.add_rows(rows)

    def copy_prefix(self, source: int, targets: Sequence[int]) -> None:
        """Let rows begin with all that row `source` holds, instead of what they hold."""
        with self.pool.locked():
            for tables in self.tables:
                for target in targets:
                    tables.replace(target, source)

    def _read_padding(
        self, padding: torch.Tensor | UnknownPadding | None, batch: int, q_len: int
    ) -> tuple[torch.Tensor | None, bool]:
        """Which of the new columns are tokens ([batch, q_len] bool on the CPU; None: all), and whether the mask hides
        tokens that are already stored."""
        if isinstance(padding, UnknownPadding) or self.trusted or self.vouched:
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
        announced = self.announced
        if announced is not None and not padding.is_cpu and announced[:, : padding.shape[1]].shape == padding.shape:
            padding = announced[:, : padding.shape[1]]
        padding = padding.detach().to("cpu", torch.bool)
        if padding.shape[0] != batch:
            raise ValueError(f"attention_mask has {padding.shape[0]} rows, the batch has {batch}")
        lacking = past + q_len - padding.shape[1]
        hides = lacking > 0
        if hides:
            # To the library a short mask hides what it does not name, and the next one, a column longer, may show it.
            # So nothing of this forward is a pad.
            padding = torch.nn.functional.pad(padding, (0, lacking))
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
        return (None if lacking > 0 or new.all() else new), hides

    def hidden_ahead(self, padding: torch.Tensor, q_len: int) -> bool:
        """Whether a mask over the columns before and of a forward of `q_len` columns hides any but the known pads."""
        new, hides = self._read_padding(padding, len(self.lead), q_len)
        return hides or new is not None

    def hidden_by(self, padding: torch.Tensor | None) -> bool:
        """Whether a mask hides tokens that a forward without a known mask has stored.

        Layers of one forward may come with unlike masks: the first of them decides what is stored.
        """
        if not self.blind or padding is None:
            return False
        shown = padding.detach().to("cpu", torch.bool)[:, : self.columns]
        stored = self._real_columns(self.columns)
        return bool(stored[:, shown.shape[1] :].any()) or bool((stored[:, : shown.shape[1]] & ~shown).any())

    def _plan(self, q_len: int, new_real: torch.Tensor | None, packed: list[int] | None) -> StepPlan:
        past_columns = self.columns
        if new_real is None:
            counts = [q_len] * len(self.lead) if packed is None else packed
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
        for tables, window in zip(self.tables, self.windows, strict=True):
            if inner and window is not None:
                wanted.append(
                    [
                        past_columns + q_len - first - row.length if alive else 0
                        for first, row, alive in zip(lead, tables.rows, live, strict=True)
                    ]
                )
            else:
                wanted.append(counts)
        for tables, window, entries in zip(self.tables, self.windows, wanted, strict=True):
            self._leave_window(tables, window)
            tables.pool.require(tables.blocks_needed(entries))
        past = [[row.length for row in tables.rows] for tables in self.tables]
        copies = []
        for tables, window, entries in zip(self.tables, self.windows, wanted, strict=True):
            room = self.room(tables, entries)
            together = window is None and sum(1 for count in entries if count) > 1
            copies.append(tables.append(entries, room if together else 0, lend=True, room=room))
        self.lead, self.real, self.inner_pads = list(lead), real, inner
        if inner:
            self.known.clear()  # the library's windows count the pads, so the keys depend on them
        plans = []
        groups = zip(self.pool.groups, self.tables, wanted, past, copies, strict=True)
        for group, tables, entries, before, pairs in groups:
            plan = GroupPlan(
                tables=tables,
                window=group.window,
                chunked=group.chunked,
                num_blocks=tables.pool.num_blocks,
                past=before,
                new=entries,
                q_len=q_len,
                copies=pairs,
                live=live,
                suffix=suffix,
                first_column=past_columns,
                offsets=None if packed is None else list(itertools.accumulate(packed[:-1], initial=0)),
                writer=None if self.pool.writer is None else self.pool.writer.write,
            )
            if not suffix:
                columns = self._real_columns(past_columns + q_len)
                lengths = [row.length for row in tables.rows]
                # Bound to values, not to this object: a step must not keep the state alive in a cycle.
                plan.layout = partial(_layout, columns, lengths, None if plan.window is None else self.lead)
            plans.append(plan)
        return StepPlan(plans, q_len, past_columns + q_len)

    def _leave_window(self, tables: RowTables, window: int | None) -> None:
        """Give back the blocks of a sliding group that no later query sees."""
        if window is None or self.recording:
            return
        for index, row in enumerate(tables.rows):
            tables.drop_before(index, row.length - window + 1)

    def room(self, tables: RowTables, entries: list[int]) -> int:
        """Blocks that each row may still need behind its new ones: as many as the caller has announced, but no more
        than an eighth of what the row holds, or 8."""
        size = self.pool.config.block_size
        longest = max(row.length + count for row, count in zip(tables.rows, entries, strict=True))
        if self.expected_columns is None:
            return longest // size // 16
        left = self.expected_columns - longest
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
        self.known.select(indices)
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
        if not keep:
            with self.pool.locked():
                for tables in self.tables:
                    tables.release_all()
                self.pool.forget_trial(self.known)
            return self._clear()
        for group in self.pool.groups:
            if count and group.window is not None and self.columns >= group.window and not self.recording:
                raise RuntimeError(
                    "crop was called on a sliding-window layer that has let go of earlier tokens. Call "
                    "cache.activate_past_recording() before the tokens to be removed are added."
                )
        real = self._real_columns(self.columns)
        with self.pool.locked():
            for tables, window in zip(self.tables, self.windows, strict=True):
                windowed = window is not None and self.inner_pads
                for index, row in enumerate(tables.rows):
                    if self.finished[index]:
                        continue
                    lost = self.columns - max(keep, self.lead[index]) if windowed else int(real[index, keep:].sum())
                    tables.crop(index, max(row.length - lost, 0))
                if self.recording and window is not None:
                    for index, row in enumerate(tables.rows):
                        tables.drop_before(index, row.length - window + 1)
        self.columns = keep
        self.known.crop(keep)
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

    def finish_rows(self, rows: Sequence[int], ids: torch.Tensor | None = None) -> None:
        """Give back the blocks of rows that have stopped; they take no more tokens and attend to nothing.

        Args:
            ids: what is known of all rows, [rows, columns] on the CPU; None: nothing is.
        """
        going = [row for row in rows if not self.finished[row]]
        with self.pool.locked():
            if ids is not None:
                self.pool.remember_on_trial(self.tables, self.known, going, ids)
            for row in going:
                self.finished[row] = True
                for tables in self.tables:
                    tables.release_row(row)

    def remember(self, rows: Iterable[int] | None = None) -> None:
        """Tell the prefix index what the rows (all of them by default) hold."""
        self.pool.remember(self.tables, self.known, rows)

    def reset(self) -> None:
        """Give back every block and start anew."""
        with self.pool.locked():
            self.remember()
            self.pool.forget_trial(self.known)
            for tables in self.tables:
                tables.release_all()
        self._clear()

    def fork(self) -> "CacheState":
        """The same content again, sharing every block."""
        other = CacheState(self.pool)
        other.known.copy_from(self.known)
        with self.pool.locked():
            other.tables[:] = self.pool.register([tables.fork() for tables in self.tables])
        other.columns, other.rows, other.lead = self.columns, self.rows, list(self.lead)
        other.real, other.inner_pads, other.finished = self.real, self.inner_pads, list(self.finished)
        other.recording, other.expected_columns, other.blind = self.recording, self.expected_columns, self.blind
        other.wrapped, other.rewritten, other.added = self.wrapped, self.rewritten, self.added
        return other

    def make_own(self, group: int, slots: torch.Tensor, changed: torch.Tensor) -> None:
        """Somebody is about to write other keys or values than the model's: let no one else hold those blocks, and
        forget which tokens they are of.

        Args:
            slots: of every column, see `dense_slots`.
            changed: those to be written, [batch, columns] bool.

        Raises:
            RuntimeError: in the middle of a forward, if blocks would have to be copied.
            OutOfBlocks: if there is no room for copies; nothing has changed then.
        """
        tables = self.tables[group]
        places: list[list[int]] = []
        for row, entries, written in zip(tables.rows, slots, changed, strict=True):
            blocks = set((entries[written] // tables.block_size).tolist())
            places.append([place for place, block in enumerate(row.blocks) if block in blocks])
        with self.pool.locked():
            if tables.shared_with_others(places):
                if self.step is not None and self.writes < len(self.pool.stores):
                    raise RuntimeError(
                        "keys and values in blocks that several rows or caches share cannot be written to in the "
                        "middle of a forward: write to cache.layers[i].keys and .values between two forwards"
                    )
                self._return_lent()
                copies = tables.make_own(places)
                for layer in self.pool.groups[group].layers:
                    if (store := self.pool.stores.get(layer)) is not None:
                        with store.lock:
                            device = store.ensure(tables.pool.num_blocks).keys.device
                            sources, targets = torch.tensor(copies, dtype=torch.int64).to(device).unbind(1)
                            store.copy_blocks(sources.contiguous(), targets.contiguous())
                tables.pool.release([source for source, _ in copies])
                self.step = None
            self.pool.forget_trial(self.known)
            self.known.clear()
            self.rewritten = True

    # -- dense views ------------------------------------------------------------------------------------------------

    def dense_slots(self, group: int, first: int, last: int) -> torch.Tensor:
        """Slot of every column `first .. last`, [batch, last - first] int64 on the CPU; the null slot at pads."""
        tables = self.tables[group]
        size = tables.block_size
        rows = self.rows or 0
        slots = torch.zeros(rows, last - first, dtype=torch.int64)
        real = self._real_columns(last)
        windowed = self.windows[group] is not None
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
        for tables, window in zip(self.tables, self.windows, strict=True):
            assert len(tables.rows) == self.rows == len(self.lead) == len(self.finished)
            for index, row in enumerate(tables.rows):
                if self.finished[index]:
                    assert not row.blocks, f"finished row {index} holds blocks"
                elif window is None or not self.inner_pads:
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
