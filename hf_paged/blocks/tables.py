"""Block tables: which blocks hold the tokens of a row.

Positions count a row's own stored tokens from 0; pads are never part of a row. A table may have lost its first blocks
(sliding windows), so it covers positions `start .. length`.
"""

from collections.abc import Sequence

from .pool import BlockPool


class BlockTable:
    """The blocks of one row, in order, and the same as runs of adjacent ids.

    Runs are kept while blocks are added, so that a step never walks the whole table: a backend reads one run as one
    strided view.

    Attributes:
        blocks: ids of the blocks held.
        runs: `[first id, number of blocks]` per run of adjacent ids, covering `blocks`.
        start: position of the first slot of `blocks[0]`, a multiple of the block size.
        length: tokens of the row, dropped ones counted: the next token gets position `length`.
    """

    __slots__ = ("blocks", "length", "runs", "start")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.runs: list[list[int]] = []
        self.start = 0
        self.length = 0

    def copy(self) -> "BlockTable":
        other = BlockTable()
        other.blocks = self.blocks.copy()
        other.runs = [run.copy() for run in self.runs]
        other.start, other.length = self.start, self.length
        return other

    def extend(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.runs and self.runs[-1][0] + self.runs[-1][1] == block:
                self.runs[-1][1] += 1
            else:
                self.runs.append([block, 1])
        self.blocks.extend(blocks)

    def pop_back(self, count: int) -> list[int]:
        """Remove the last `count` blocks and return them."""
        if count <= 0:
            return []
        dropped = self.blocks[-count:]
        del self.blocks[-count:]
        while count:
            run = self.runs[-1]
            cut = min(count, run[1])
            run[1] -= cut
            count -= cut
            if not run[1]:
                self.runs.pop()
        return dropped

    def pop_front(self, count: int, block_size: int) -> list[int]:
        """Remove the first `count` blocks and return them; positions of what stays are unchanged."""
        if count <= 0:
            return []
        dropped = self.blocks[:count]
        del self.blocks[:count]
        self.start += count * block_size
        while count:
            run = self.runs[0]
            cut = min(count, run[1])
            run[0] += cut
            run[1] -= cut
            count -= cut
            if not run[1]:
                self.runs.pop(0)
        return dropped

    def common_blocks(self, other: "BlockTable") -> int:
        """Leading blocks that two tables share. O(runs), not O(blocks)."""
        if self.start != other.start:
            return 0
        common = 0
        for (first, count), (other_first, other_count) in zip(self.runs, other.runs, strict=False):
            if first != other_first:
                break
            common += min(count, other_count)
            if count != other_count:
                break
        return common

    def token_runs(self, begin: int, end: int, block_size: int) -> list[tuple[int, int]]:
        """`(first slot, number of tokens)` of each adjacent run that holds positions `begin .. end`.

        The slot of a token is `block id * block_size + offset in its block`.
        """
        spans = []
        position = self.start
        for first, count in self.runs:
            stop = position + count * block_size
            low, high = max(begin, position), min(end, stop)
            if low < high:
                spans.append((first * block_size + low - position, high - low))
            position = stop
            if position >= end:
                break
        return spans

    def slot(self, position: int, block_size: int) -> int:
        index, offset = divmod(position - self.start, block_size)
        return self.blocks[index] * block_size + offset


class RowTables:
    """The block tables of one cache in one layer group, and every operation that moves references.

    Rows that have finished stay in the list with an empty table. Every operation takes the references it needs before
    it drops any, so no block passes through a reference count of 0 while it moves between rows.

    Args:
        pool: where the blocks come from.
        block_size: tokens per block.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = block_size
        self.rows: list[BlockTable] = []
        self.lent: list[int] = []  # sources of copies that may not have been made yet, still held
        self.cow_copies = 0

    # -- growing ----------------------------------------------------------------------------------------------------

    def blocks_needed(self, counts: Sequence[int]) -> int:
        """Blocks that `append(counts)` would take, copies on write included."""
        size = self.block_size
        fresh = sum(
            -(-(row.length + count) // size) - row.start // size - len(row.blocks)
            for row, count in zip(self.rows, counts, strict=True)
            if count
        )
        return fresh + len(self._writers_of_shared_blocks(counts))

    def _writers_of_shared_blocks(self, counts: Sequence[int]) -> list[int]:
        """Rows that must copy their partly filled last block before they write to it.

        Of the rows that share one such block all copy, except one if no other holder is left. Where the pool has
        promised the slots they would write to, all copy.
        """
        seen: dict[int, int] = {}
        writers = []
        for index, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            if count and row.length % self.block_size and row.blocks:
                block = row.blocks[-1]
                references = self.pool.reference_count(block) - seen.get(block, 0)
                if references > 1 or row.length % self.block_size < self.pool.promised(block):
                    seen[block] = seen.get(block, 0) + 1
                    writers.append(index)
        return writers

    def append(
        self, counts: Sequence[int], spread: int = 0, lend: bool = False, room: int = 0
    ) -> list[tuple[int, int]]:
        """Make room for `counts[i]` new tokens in row i, all rows or none.

        Args:
            counts: new tokens, per row; 0 leaves a row alone.
            spread, room: see `BlockPool.allocate_rows`.
            lend: hold the sources of copies until `return_lent`, so that nobody else writes to them before.

        Returns:
            `(source, target)` block ids to copy before the new tokens are written.

        Raises:
            OutOfBlocks: nothing has changed then.
        """
        size = self.block_size
        writers = self._writers_of_shared_blocks(counts)
        is_writer = set(writers)
        wanted, after, growing = [], [], []
        for index, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            if not count:
                continue
            fresh = -(-(row.length + count) // size) - row.start // size - len(row.blocks)
            fresh += index in is_writer
            if fresh:
                wanted.append(fresh)
                kept = row.blocks[-2:-1] if index in is_writer else row.blocks[-1:]
                after.append(kept[0] if kept else None)
                growing.append(index)
        taken = self.pool.allocate_rows(wanted, after, spread, room)
        copies = []
        for index, blocks in zip(growing, taken, strict=True):
            row = self.rows[index]
            if index in is_writer:
                source = row.pop_back(1)[0]
                copies.append((source, blocks[0]))
                if lend:
                    self.lent.append(source)
                else:
                    self.pool.release([source])
            row.extend(blocks)
        for row, count in zip(self.rows, counts, strict=True):
            row.length += count
        self.cow_copies += len(copies)
        self.pool.cow_copies += len(copies)
        return copies

    def _held_by_others(self, places: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """`(row, place)` of the blocks that a row must copy to be alone with them: of the rows that share one all do,
        except one if no other holder is left and nobody counts on its content."""
        seen: dict[int, int] = {}
        found = []
        for index, (row, chosen) in enumerate(zip(self.rows, places, strict=True)):
            for place in chosen:
                block = row.blocks[place]
                if self.pool.reference_count(block) - seen.get(block, 0) > 1 or self.pool.promised(block):
                    seen[block] = seen.get(block, 0) + 1
                    found.append((index, place))
        return found

    def shared_with_others(self, places: Sequence[Sequence[int]]) -> bool:
        """Whether `make_own` has anything to copy."""
        return bool(self._held_by_others(places))

    def make_own(self, places: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Let each row be alone with some of its blocks, all rows or none.

        Args:
            places: for each row, which of its blocks, counted in its table.

        Returns:
            `(source, target)` block ids to copy. The sources are still held: release them when that is done.

        Raises:
            OutOfBlocks: nothing has changed then.
        """
        found = self._held_by_others(places)
        taken = self.pool.allocate(len(found))
        copies = []
        for (index, place), target in zip(found, taken, strict=True):
            row = self.rows[index]
            copies.append((row.blocks[place], target))
            row.blocks[place] = target
        for index in {index for index, _ in found}:
            row = self.rows[index]
            blocks, row.blocks, row.runs = row.blocks, [], []
            row.extend(blocks)
        self.cow_copies += len(copies)
        self.pool.cow_copies += len(copies)
        return copies

    def return_lent(self) -> None:
        """The copies that `append(lend=True)` asked for are made."""
        lent, self.lent = self.lent, []
        self.pool.release(lent)

    def add_rows(self, count: int) -> None:
        self.rows.extend(BlockTable() for _ in range(count))

    def adopt(self, row: int, blocks: Sequence[int], start: int, length: int) -> None:
        """Let an empty row begin with blocks that are there already; they are shared, not copied.

        Args:
            row: the row.
            blocks: used or cached blocks that hold positions `start .. length`.
            start: position of the first slot of `blocks[0]`, a multiple of the block size.
            length: tokens the row has then.
        """
        table = self.rows[row]
        if table.blocks or table.length:
            raise ValueError(f"row {row} is not empty")
        self.pool.share(blocks)
        table.extend(blocks)
        table.start, table.length = start, length

    # -- batch operations -------------------------------------------------------------------------------------------

    def select(self, indices: Sequence[int]) -> None:
        """Row i becomes what row `indices[i]` was. Rows may be repeated, dropped and reordered.

        A row that is still wanted moves as it is. A copy that takes a dropped row's place changes references only where
        the two differ, so a beam step does not walk the prompt that all beams share.
        """
        old = self.rows
        for index in indices:
            if not 0 <= index < len(old):
                raise IndexError(f"row {index} is out of range for a cache of {len(old)} rows")
        new: list[BlockTable] = []
        moved: set[int] = set()
        copies = []
        for index in indices:
            if index in moved:
                new.append(old[index].copy())
                copies.append(new[-1])
            else:
                new.append(old[index])
                moved.add(index)
        dropped = [row for index, row in enumerate(old) if index not in moved]
        releases = []
        for copy in copies:
            gone = dropped.pop() if dropped else None
            common = copy.common_blocks(gone) if gone is not None else 0
            self.pool.share(copy.blocks[common:])
            if gone is not None:
                releases.append(gone.blocks[common:])
        releases.extend(row.blocks for row in dropped)
        for blocks in releases:
            self.pool.release(blocks)
        self.rows = new

    def replace(self, row: int, source: int) -> None:
        """Row `row` becomes a copy of row `source`."""
        self.pool.share(self.rows[source].blocks)
        self.pool.release(self.rows[row].blocks)
        self.rows[row] = self.rows[source].copy()

    def repeat_interleave(self, repeats: int) -> None:
        """Row i becomes rows `i * repeats .. (i + 1) * repeats`, all sharing its blocks."""
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        new = []
        for row in self.rows:
            self.pool.share(row.blocks, repeats - 1)
            new.append(row)
            new.extend(row.copy() for _ in range(repeats - 1))
        self.rows = new

    def fork(self) -> "RowTables":
        """The same rows again, sharing every block."""
        other = RowTables(self.pool, self.block_size)
        for row in self.rows:
            self.pool.share(row.blocks)
            other.rows.append(row.copy())
        return other

    # -- giving back ------------------------------------------------------------------------------------------------

    def crop(self, row: int, length: int) -> None:
        """Cut row `row` to its first `length` tokens; blocks no longer needed go back."""
        table = self.rows[row]
        if not 0 <= length <= table.length:
            raise ValueError(f"cannot crop a row of {table.length} tokens to {length}")
        if length < table.start:
            raise ValueError(f"positions before {table.start} have left the window; cannot crop to {length}")
        keep = -(-length // self.block_size) - table.start // self.block_size
        self.pool.release(table.pop_back(len(table.blocks) - keep))
        table.length = length

    def drop_before(self, row: int, position: int) -> None:
        """Give back the blocks of row `row` whose every position lies before `position`.

        A partly filled last block stays: the next token goes there.
        """
        table = self.rows[row]
        count = max(min(position, table.length) - table.start, 0) // self.block_size
        if count:
            self.pool.release(table.pop_front(count, self.block_size))

    def release_row(self, row: int) -> None:
        """Give back every block of a finished row; the row stays, empty."""
        self.pool.release(self.rows[row].blocks)
        self.rows[row] = BlockTable()

    def release_all(self) -> None:
        self.return_lent()
        for row in self.rows:
            self.pool.release(row.blocks)
        self.rows = []

    # -- numbers ----------------------------------------------------------------------------------------------------

    def logical_tokens(self) -> int:
        """Tokens held, summed over rows: what a cache without sharing would store."""
        return sum(row.length - row.start for row in self.rows)

    def stored_tokens(self) -> int:
        """Distinct tokens held: a shared block counts once."""
        filled: dict[int, int] = {}
        for row in self.rows:
            position = row.start
            for block in row.blocks:
                filled[block] = max(filled.get(block, 0), min(self.block_size, row.length - position))
                position += self.block_size
        return sum(filled.values())

    def check(self) -> None:
        """Raise AssertionError if a table and its runs disagree or do not cover the row's tokens exactly."""
        for row in self.rows:
            spelled = [first + offset for first, count in row.runs for offset in range(count)]
            assert spelled == row.blocks, f"runs {row.runs} do not spell {row.blocks}"
            assert (row.start % self.block_size == 0 and row.start <= row.length) or not row.blocks
            assert len(row.blocks) == -(-row.length // self.block_size) - row.start // self.block_size, (
                f"{len(row.blocks)} blocks for tokens {row.start}..{row.length}"
            )
