"""The pool of KV-cache blocks: who holds which block id.

Ids and reference counts only; the tensors live in `hf_paged.store`. The scheme is PagedAttention's (Kwon et al. 2023):
a block is held by reference count, shared blocks are read-only, and a freed block may stay findable until it is reused.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

NULL_BLOCK = 0
"""Id of the reserved null block: never handed out, its slots hold zeros, padding entries of a table name it."""


class OutOfBlocks(RuntimeError):
    """The pool cannot give the blocks a step needs. Nothing was allocated.

    Attributes:
        needed: blocks the step asked for.
        free: blocks that could have been handed out (free, or cached and unreferenced).
        total: blocks in the pool, the null block not counted.
    """

    def __init__(self, needed: int, free: int, total: int):
        self.needed, self.free, self.total = needed, free, total
        super().__init__(
            f"The KV pool is out of blocks: this step needs {needed}, {free} of {total} are free. "
            "Raise `num_blocks` or `memory_budget` in PagedConfig (or leave both None to let the pool grow), "
            "use a smaller batch, fewer beams or a shorter `max_new_tokens`, or drop caches that still hold blocks. "
            "The cache is as it was before this step: the same call works once blocks are free."
        )

    def __reduce__(self) -> tuple:
        return type(self), (self.needed, self.free, self.total)


class BlockPool:
    """Fixed-size blocks by id, with reference counts.

    Invariants, checked by `check()`:

    - every id in `1..num_blocks` is in exactly one state: *free*, *used* (reference count > 0) or *cached*
      (reference count 0, but its content is still findable); `free + used + cached == num_blocks`;
    - the reference count of a block is the number of table entries that name it;
    - id 0, the null block, is in no state and is never handed out.

    `allocate`, `share` and `release` are O(1) per block; asking for more than one block at once scans for a run of
    adjacent ids first (one `bytes.find`), because adjacent blocks can be read as one strided view.

    Args:
        num_blocks: blocks to start with, the null block not counted.
        max_blocks: the pool may grow up to this many blocks; None: without bound.
            `max_blocks == num_blocks` is a pool of fixed size.
        on_evict: called with the id of a cached block just before it is reused for new content.
    """

    def __init__(
        self, num_blocks: int = 0, max_blocks: int | None = None, on_evict: Callable[[int], None] | None = None
    ):
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be at least 0, got {num_blocks}")
        if max_blocks is not None and max_blocks < num_blocks:
            raise ValueError(f"max_blocks ({max_blocks}) is below num_blocks ({num_blocks})")
        self.max_blocks = max_blocks
        self.on_evict = on_evict
        self.num_blocks = 0
        self.shared_blocks = 0  # reference count > 1
        self.peak_used_blocks = 0
        self.evictions = 0
        self.cow_copies = 0
        self._references = [1]  # by id; the null block holds itself
        self._free: OrderedDict[int, None] = OrderedDict()
        self._free_map = bytearray(b"\0")  # 1 where the id is free: lets a run be found at C speed
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._promised: dict[int, int] = {}  # by id: leading slots whose content somebody counts on
        self.grow(num_blocks)

    # -- numbers ----------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def headroom(self) -> int | None:
        """Blocks that could be handed out, by growing too; None: without bound."""
        if self.max_blocks is None:
            return None
        return self.max_blocks - self.used_blocks

    def reference_count(self, block: int) -> int:
        self._known(block)
        return self._references[block]

    def is_shared(self, block: int) -> bool:
        return self.reference_count(block) > 1

    # -- allocation -------------------------------------------------------------------------------------------------

    def grow(self, count: int) -> None:
        """Add `count` free blocks, with the next higher ids."""
        if self.max_blocks is not None and self.num_blocks + count > self.max_blocks:
            raise ValueError(f"growing by {count} blocks passes max_blocks ({self.max_blocks})")
        first = self.num_blocks + 1
        self.num_blocks += count
        self._references.extend([0] * count)
        self._free_map.extend(b"\1" * count)
        self._free.update(dict.fromkeys(range(first, first + count)))

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, each with reference count 1.

        Args:
            count: blocks to take.
            after: where possible the blocks follow this id, so that a row stays one run.

        Raises:
            OutOfBlocks: if fewer are available; nothing is taken then.
        """
        return self.allocate_rows([count], [after])[0]

    def allocate_rows(
        self, counts: Sequence[int], after: Sequence[int | None], spread: int = 0, room: int = 0
    ) -> list[list[int]]:
        """Take blocks for several rows at once, all or nothing.

        Rows that cannot continue their own run get runs at a uniform distance where there is room, so that a backend
        can read all of them as one strided batch.

        Args:
            counts: blocks wanted, per row.
            after: per row the id its new blocks should follow, or None.
            spread: ids to leave free behind each new run, for the row to grow into. A wish, not a reservation.
            room: where cached blocks have to be reused, free so many more per row, so that rows find their next blocks
                beside the last ones.

        Raises:
            OutOfBlocks: if fewer are available; nothing is taken then.
        """
        needed = sum(counts)
        self.require(needed)
        if needed == 0:
            return [[] for _ in counts]
        self._grow_for(needed)
        if len(self._free) < needed:
            # All at once and before any is taken: what was released together lies together.
            self._evict(needed + room * len(counts) - len(self._free))
        taken: list[list[int]] = [[] for _ in counts]
        waiting = []
        for row, (count, previous) in enumerate(zip(counts, after, strict=True)):
            if previous is not None:
                while len(taken[row]) < count and previous < self.num_blocks and self._free_map[previous + 1]:
                    previous += 1
                    self._take(previous)
                    taken[row].append(previous)
            if len(taken[row]) < count:
                waiting.append(row)
        if waiting:
            self._place(waiting, counts, taken, spread)
        self.peak_used_blocks = max(self.peak_used_blocks, self.used_blocks)
        return taken

    def _place(self, rows: list[int], counts: Sequence[int], taken: list[list[int]], spread: int) -> None:
        """Give each row in `rows` the blocks it still lacks: one run for all, else a run each, else any blocks."""
        missing = [counts[row] - len(taken[row]) for row in rows]
        stride = max(missing) + spread
        start = self._find_run(stride * len(rows))
        for place, (row, count) in enumerate(zip(rows, missing, strict=True)):
            first = start + place * stride if start else (self._find_run(count) if count > 1 else 0)
            for offset in range(count):
                block = first + offset if first else next(iter(self._free))
                self._take(block)
                taken[row].append(block)

    def _find_run(self, length: int) -> int:
        """First id of `length` adjacent free blocks, growing the pool for it where that is allowed; 0 if none."""
        if length == 1:
            return next(iter(self._free), 0)
        start = self._free_map.find(b"\1" * length)
        if start < 0:
            tail = len(self._free_map) - len(self._free_map.rstrip(b"\1"))
            lacking = length - tail
            within = self.max_blocks is None or self.num_blocks + lacking <= self.max_blocks
            # Growing for the sake of adjacency alone is kept small, by the call and in all: cached blocks are reused
            # first, and no more than half the pool may lie idle for it.
            idle = len(self._free) + lacking - length
            small = lacking <= max(64, self.num_blocks // 8) and idle <= max(64, self.num_blocks // 2)
            if not within or self._cached or (self.num_blocks and not small):
                return 0
            start = len(self._free_map) - tail
            self.grow(lacking)
        return start

    def _evict(self, count: int) -> None:
        """Make up to `count` cached blocks free, least recently released first."""
        for block in list(islice(self._cached, count)):
            if self.on_evict is not None:
                self.on_evict(block)
            del self._cached[block]
            self._promised.pop(block, None)
            self.evictions += 1
            self._set_free(block)

    def require(self, needed: int) -> None:
        """Raise `OutOfBlocks` unless `needed` blocks can be had."""
        headroom = self.headroom
        if headroom is not None and needed > headroom:
            raise OutOfBlocks(needed, headroom, self.max_blocks or 0)

    def _grow_for(self, needed: int) -> None:
        """Amortised growth: by a sixteenth at least, never above the cap. Cached blocks are reused before it."""
        lacking = needed - len(self._free) - len(self._cached)
        if lacking > 0:
            step = max(lacking, self.num_blocks // 16)
            if self.max_blocks is not None:
                step = min(step, self.max_blocks - self.num_blocks)
            self.grow(step)

    def _take(self, block: int) -> None:
        del self._free[block]
        self._free_map[block] = 0
        self._references[block] = 1

    def _set_free(self, block: int) -> None:
        self._free[block] = None
        self._free_map[block] = 1

    # -- references -------------------------------------------------------------------------------------------------

    def share(self, blocks: Iterable[int], times: int = 1) -> None:
        """Add `times` references to each block. A cached block is revived by its first reference.

        Raises:
            ValueError: for a block that is free (its content is gone) or unknown.
        """
        blocks = list(blocks)
        for block in blocks:
            self._known(block)
            if block in self._free:
                raise ValueError(f"block {block} is free and cannot be shared")
        if times <= 0:
            return
        for block in blocks:
            before = self._references[block]
            if before == 0:
                del self._cached[block]
            self._references[block] = before + times
            if before <= 1 < before + times:
                self.shared_blocks += 1
        self.peak_used_blocks = max(self.peak_used_blocks, self.used_blocks)

    def release(self, blocks: Iterable[int], keep: bool = False) -> None:
        """Drop one reference from each block. A list is released back to front, so a row's tail is reused first.

        Args:
            blocks: ids to release; naming one twice drops two references.
            keep: blocks that reach 0 stay findable as cached blocks until they are reused, least recently freed first.
                Promised blocks do so in any case.

        Raises:
            ValueError: for a block that holds no such reference (double release) or is unknown; nothing is released.
        """
        blocks = list(blocks)
        counts: dict[int, int] = {}
        for block in blocks:
            self._known(block)
            counts[block] = counts.get(block, 0) + 1
        for block, count in counts.items():
            if count > self._references[block]:
                raise ValueError(
                    f"block {block} is released {count} time(s) but has {self._references[block]} reference(s)"
                )
        for block in reversed(blocks):
            left = self._references[block] - 1
            self._references[block] = left
            if left == 1:
                self.shared_blocks -= 1
            elif left == 0:
                if keep or block in self._promised:
                    self._cached[block] = None
                else:
                    self._set_free(block)

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        """Make cached blocks (all of them by default) plain free blocks.

        Raises:
            ValueError: for a block that is not cached or is unknown; nothing is forgotten.
        """
        blocks = dict.fromkeys(self._cached if blocks is None else blocks)
        for block in blocks:
            self._known(block)
            if block not in self._cached:
                raise ValueError(f"block {block} is not cached")
        for block in blocks:
            del self._cached[block]
            self._promised.pop(block, None)
            self._set_free(block)

    # -- promises ---------------------------------------------------------------------------------------------------

    def promise(self, block: int, filled: int) -> None:
        """Keep the first `filled` slots of a used or cached block as they are, and the block findable when released.

        Raises:
            ValueError: for a block that is free or unknown.
        """
        self._known(block)
        if block in self._free:
            raise ValueError(f"block {block} is free: it has no content to promise")
        self._promised[block] = filled

    def promised(self, block: int) -> int:
        """Leading slots of a block that must not be written to, whoever holds it."""
        return self._promised.get(block, 0)

    def withdraw(self, block: int) -> None:
        """Take a promise back; the block is free at once if nobody holds it."""
        if self._promised.pop(block, None) is not None and block in self._cached:
            del self._cached[block]
            self._set_free(block)

    def _known(self, block: int) -> None:
        if not 0 < block <= self.num_blocks:
            name = "the null block" if block == NULL_BLOCK else f"unknown block {block}"
            raise ValueError(f"{name} cannot be named here; this pool holds ids 1..{self.num_blocks}")

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise AssertionError if an invariant is broken.

        Args:
            tables: the block ids of every live table; given, the reference counts are compared with them.
        """
        assert len(self._references) == len(self._free_map) == self.num_blocks + 1
        assert NULL_BLOCK not in self._free and NULL_BLOCK not in self._cached and not self._free_map[NULL_BLOCK]
        for block in range(1, self.num_blocks + 1):
            states = (block in self._free) + (block in self._cached) + (self._references[block] > 0)
            assert states == 1, f"block {block} is in {states} states"
            assert bool(self._free_map[block]) == (block in self._free), f"free map of block {block}"
        assert not self._promised.keys() & self._free.keys(), "a free block is promised"
        assert self.shared_blocks == sum(count > 1 for count in self._references)
        assert self.max_blocks is None or self.num_blocks <= self.max_blocks
        if tables is not None:
            named = [0] * (self.num_blocks + 1)
            for table in tables:
                for block in table:
                    named[block] += 1
            for block in range(1, self.num_blocks + 1):
                assert named[block] == self._references[block], (
                    f"block {block}: {named[block]} table entries, reference count {self._references[block]}"
                )
