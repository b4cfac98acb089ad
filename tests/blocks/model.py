"""What the block tables should hold, kept beside them in plain Python lists.

Every token is a unique number. Storage is a dict from slot to token, as the tensors of a layer would be: written where
a row is appended to, copied for the `(source, target)` pairs that `append` returns, and never cleaned, so that a stale
slot shows as a wrong token.
"""

import copy
import itertools
from collections.abc import Iterable, Sequence

from hf_paged.blocks import BlockPool, BlockTable, RowTables


def snapshot(pool: BlockPool, caches: Iterable[RowTables] = ()) -> dict:
    """Everything a pool and the tables over it know, copied deep."""
    state = {name: value for name, value in vars(pool).items() if name != "on_evict"}
    state["order"] = (list(pool._free), list(pool._cached))
    state["caches"] = [
        ([(row.blocks, row.runs, row.start, row.length) for row in tables.rows], tables.cow_copies) for tables in caches
    ]
    return copy.deepcopy(state)


def table_of(blocks: Sequence[int], length: int) -> BlockTable:
    """A table over blocks whose references are held already."""
    table = BlockTable()
    table.extend(list(blocks))
    table.length = length
    return table


class Storage:
    """Slot contents of one pool."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.next_token = itertools.count(1)

    def copy_blocks(self, copies: Sequence[tuple[int, int]], size: int) -> None:
        for source, target in copies:
            for offset in range(size):
                if source * size + offset in self.slots:
                    self.slots[target * size + offset] = self.slots[source * size + offset]

    def read(self, blocks: Sequence[int], count: int, size: int) -> list[int]:
        """The first `count` tokens of `blocks`."""
        return [self.slots[blocks[at // size] * size + at % size] for at in range(count)]


class ModelledRows:
    """A `RowTables` and, row by row, the tokens it should give back; None for those that have left the window."""

    def __init__(self, tables: RowTables, storage: Storage, expected: list[list[int | None]] | None = None):
        self.tables = tables
        self.storage = storage
        self.expected: list[list[int | None]] = expected if expected is not None else []

    @classmethod
    def of(cls, pool: BlockPool, block_size: int, lengths: Sequence[int]) -> "ModelledRows":
        """Rows of these lengths, nothing shared."""
        rows = cls(RowTables(pool, block_size), Storage())
        rows.add_rows(len(lengths))
        rows.append(lengths)
        return rows

    def add_rows(self, count: int) -> None:
        self.tables.add_rows(count)
        self.expected.extend([] for _ in range(count))

    def append(self, counts: Sequence[int], spread: int = 0) -> list[tuple[int, int]]:
        """Append unique tokens, as a forward would: take blocks, copy, write."""
        copies = self.tables.append(counts, spread)
        size = self.tables.block_size
        self.storage.copy_blocks(copies, size)
        for row, tokens, count in zip(self.tables.rows, self.expected, counts, strict=True):
            for position in range(row.length - count, row.length):
                slot = row.slot(position, size)
                assert self.tables.pool.reference_count(slot // size) == 1, "a shared block is about to be written"
                self.storage.slots[slot] = token = next(self.storage.next_token)
                tokens.append(token)
        return copies

    def select(self, indices: Sequence[int]) -> None:
        self.tables.select(indices)
        self.expected = [list(self.expected[index]) for index in indices]

    def repeat_interleave(self, repeats: int) -> None:
        self.tables.repeat_interleave(repeats)
        self.expected = [list(tokens) for tokens in self.expected for _ in range(repeats)]

    def fork(self) -> "ModelledRows":
        return ModelledRows(self.tables.fork(), self.storage, [list(tokens) for tokens in self.expected])

    def crop(self, row: int, length: int) -> None:
        self.tables.crop(row, length)
        del self.expected[row][length:]

    def drop_before(self, row: int, position: int) -> None:
        self.tables.drop_before(row, position)
        tokens, size = self.expected[row], self.tables.block_size
        gone = min(position, len(tokens)) // size * size
        tokens[:gone] = [None] * gone

    def release_row(self, row: int) -> None:
        self.tables.release_row(row)
        self.expected[row] = []

    def release_all(self) -> None:
        self.tables.release_all()
        self.expected = []

    def check(self) -> None:
        """The tables keep their invariants, and reading each row through its table gives the model's tokens."""
        self.tables.check()
        size, slots = self.tables.block_size, self.storage.slots
        assert len(self.tables.rows) == len(self.expected)
        for row, tokens in zip(self.tables.rows, self.expected, strict=True):
            assert (row.start, row.length) == (tokens.count(None), len(tokens))
            held = [row.slot(position, size) for position in range(row.start, row.length)]
            assert [slots[slot] for slot in held] == tokens[row.start :]
            spans = row.token_runs(row.start, row.length, size)
            assert [slot for first, count in spans for slot in range(first, first + count)] == held


def check_all(pool: BlockPool, caches: Sequence[ModelledRows], held: Iterable[Sequence[int]] = ()) -> None:
    """`pool.check` over every live table (and what else holds references), and every row reads right."""
    pool.check([row.blocks for cache in caches for row in cache.tables.rows] + [list(blocks) for blocks in held])
    assert pool.free_blocks + pool.used_blocks + pool.cached_blocks == pool.num_blocks
    for cache in caches:
        cache.check()
