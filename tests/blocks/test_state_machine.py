"""Long random lives of several caches over one pool, beside a model that is too simple to be wrong.

The same rules are driven twice: by seeded random numbers, 12,000 operations in all, and by hypothesis, which looks for
a short failing sequence. After each operation the pool's invariants hold against every live table, and every row reads
back the model's tokens through its table.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from hf_paged.blocks import BlockPool, OutOfBlocks, RowTables

from .model import ModelledRows, Storage, check_all, snapshot, table_of


@dataclass
class Remembered:
    """A run of leading blocks that something outside the caches (a prefix index) knows the tokens of."""

    blocks: list[int]
    tokens: list[int]
    held: bool = True  # holds references; else its blocks may be cached, or used by rows


class Workload:
    """The rules. Every choice comes from `draw(n)`, a number from 0 to n - 1.

    Args:
        block_size: tokens per block.
        max_blocks: cap of the pool, or None.
        fixed: whether the pool has all its blocks from the start.
        draw: the source of choices.
    """

    MAX_CACHES = 4
    MAX_ROWS = 7

    def __init__(self, block_size: int, max_blocks: int | None, fixed: bool, draw: Callable[[int], int]):
        self.size, self.draw = block_size, draw
        self.pool = BlockPool(max_blocks or 0 if fixed else 0, max_blocks, on_evict=self.evicted)
        self.storage = Storage()
        self.longest = 3 * block_size + 6
        self.caches: list[ModelledRows] = []
        self.remembered: list[Remembered] = []
        self.done: Counter[str] = Counter()
        self.operations = 0

    # -- rules ------------------------------------------------------------------------------------------------------

    RULES = (
        ("open", 3),
        ("append", 14),
        ("decode", 12),
        ("fork", 3),
        ("select", 6),
        ("repeat_interleave", 3),
        ("crop", 5),
        ("drop_before", 4),
        ("release_row", 2),
        ("release_all", 2),
        ("release_all_kept", 3),
        ("remember", 4),
        ("let_go", 4),
        ("revive", 6),
        ("forget", 1),
    )

    def step(self, name: str) -> None:
        """Do one operation and check everything. A rule that finds nothing to do is not counted."""
        before = self.done.total()
        getattr(self, name)()
        self.operations += self.done.total() > before
        self.lose_what_is_free()
        held = [known.blocks for known in self.remembered if known.held]
        check_all(self.pool, self.caches, held)
        for known in self.remembered:
            assert self.storage.read(known.blocks, len(known.tokens), self.size) == known.tokens

    def open(self) -> None:
        if len(self.caches) < self.MAX_CACHES:
            self.caches.append(ModelledRows(RowTables(self.pool, self.size), self.storage))
            self.caches[-1].add_rows(1 + self.draw(3))
            self.done["open"] += 1

    def append(self) -> None:
        self._append(lambda row: self.draw(2 * self.size + 3), self.draw(4))

    def decode(self) -> None:
        self._append(lambda row: 1, self.draw(4))

    def _append(self, count: Callable[[int], int], spread: int) -> None:
        cache = self.any_cache()
        rows = cache.tables.rows
        counts = [min(count(index), max(self.longest - row.length, 0)) for index, row in enumerate(rows)]
        tables = [entry.tables for entry in self.caches]
        needed, headroom = cache.tables.blocks_needed(counts), self.pool.headroom
        before = snapshot(self.pool, tables) if headroom is not None and needed > headroom else None
        try:
            copies = cache.append(counts, spread)
        except OutOfBlocks as error:
            assert (error.needed, error.free, error.total) == (needed, headroom, self.pool.max_blocks)
            assert snapshot(self.pool, tables) == before
            self.done["out of blocks"] += 1
            self.make_room()
            return
        assert before is None, "more blocks were given than there were"
        self.lose_what_is_overwritten(
            row.blocks[(row.length - count - row.start) // self.size]
            for row, count in zip(rows, counts, strict=True)
            if count
        )
        self.done["append"] += any(counts)
        self.done["copies"] += len(copies)

    def fork(self) -> None:
        if len(self.caches) == self.MAX_CACHES:
            self.release_all()
        self.caches.append(self.any_cache().fork())
        self.done["fork"] += 1

    def select(self) -> None:
        cache = self.any_cache()
        if cache.expected:
            rows = len(cache.expected)
            indices = [self.draw(rows) for _ in range(rows if self.draw(3) else 1 + self.draw(self.MAX_ROWS))]
            cache.select(indices)
            self.done["select"] += 1

    def repeat_interleave(self) -> None:
        cache = self.any_cache()
        repeats = 1 + self.draw(3)
        if len(cache.expected) * repeats <= self.MAX_ROWS:
            cache.repeat_interleave(repeats)
            self.done["repeat_interleave"] += 1

    def crop(self) -> None:
        cache, row = self.any_row()
        if cache is not None:
            table = cache.tables.rows[row]
            cache.crop(row, table.start + self.draw(table.length - table.start + 1))
            self.done["crop"] += 1

    def drop_before(self) -> None:
        cache, row = self.any_row()
        if cache is not None:
            cache.drop_before(row, self.draw(cache.tables.rows[row].length + 2))
            self.done["drop_before"] += 1

    def release_row(self) -> None:
        cache, row = self.any_row()
        if cache is not None:
            cache.release_row(row)
            self.done["release_row"] += 1

    def release_all(self) -> None:
        cache = self.any_cache()
        cache.release_all()
        self.caches.remove(cache)
        self.done["release_all"] += 1

    def release_all_kept(self) -> None:
        """Release a cache so that its rows stay findable, their partly filled last blocks too."""
        cache = self.any_cache()
        for row, tokens in zip(cache.tables.rows, cache.expected, strict=True):
            self.pool.release(row.blocks, keep=True)
            if row.blocks and not row.start:
                self.remembered.append(Remembered(list(row.blocks), list(tokens), held=False))
        cache.tables.rows, cache.expected = [], []
        self.caches.remove(cache)
        self.done["release kept"] += 1

    def remember(self) -> None:
        """Hold the full leading blocks of a row, as a prefix index does."""
        cache, row = self.any_row()
        if cache is None or cache.tables.rows[row].start or sum(known.held for known in self.remembered) >= 4:
            return
        full = cache.tables.rows[row].length // self.size
        if full:
            count = 1 + self.draw(full)
            blocks = cache.tables.rows[row].blocks[:count]
            self.pool.share(blocks)
            tokens = [token for token in cache.expected[row][: count * self.size] if token is not None]
            self.remembered.append(Remembered(blocks, tokens))
            self.done["remember"] += 1

    def let_go(self) -> None:
        """Release remembered blocks, to stay findable."""
        held = [known for known in self.remembered if known.held]
        if held:
            known = held[self.draw(len(held))]
            self.pool.release(known.blocks, keep=True)
            known.held = False
            self.done["let go"] += 1

    def revive(self) -> None:
        """Start a row from remembered blocks, cached or not."""
        cache = self.any_cache()
        if not self.remembered or len(cache.expected) >= self.MAX_ROWS:
            return
        known = self.remembered[self.draw(len(self.remembered))]
        self.done["revive cached"] += any(self.pool.reference_count(block) == 0 for block in known.blocks)
        self.pool.share(known.blocks)
        cache.tables.rows.append(table_of(known.blocks, len(known.tokens)))
        cache.expected.append(list(known.tokens))
        self.done["revive"] += 1

    def forget(self) -> None:
        if self.pool.cached_blocks:
            self.pool.forget()
            self.done["forget"] += 1

    # -- what the rules share ---------------------------------------------------------------------------------------

    def any_cache(self) -> ModelledRows:
        if not self.caches:
            self.open()
        return self.caches[self.draw(len(self.caches))]

    def any_row(self) -> tuple[ModelledRows | None, int]:
        cache = self.any_cache()
        if not cache.expected:
            return None, 0
        return cache, self.draw(len(cache.expected))

    def make_room(self) -> None:
        """Give back what a full pool needs to go on: a cache, or something remembered."""
        if self.draw(2):
            self.let_go()
        else:
            self.release_all()

    def evicted(self, block: int) -> None:
        assert self.pool.reference_count(block) == 0
        self.done["evicted"] += 1
        self.remembered = [known for known in self.remembered if block not in known.blocks]

    def lose_what_is_overwritten(self, blocks: Iterable[int]) -> None:
        """A row that was cut back into a remembered block writes to it in place if it is the only holder."""
        written = set(blocks)
        self.remembered = [known for known in self.remembered if known.held or not written & set(known.blocks)]

    def lose_what_is_free(self) -> None:
        """What was remembered without a reference is lost when its last holder released it for good."""
        free = self.pool._free
        self.remembered = [known for known in self.remembered if known.held or not free.keys() & set(known.blocks)]


def run_seeded(seed: int, block_size: int, max_blocks: int | None, fixed: bool, operations: int) -> Workload:
    rng = random.Random(seed)
    workload = Workload(block_size, max_blocks, fixed, rng.randrange)
    names: Sequence[str] = [name for name, _ in Workload.RULES]
    weights = [weight for _, weight in Workload.RULES]
    while workload.operations < operations:
        workload.step(*rng.choices(names, weights))
    return workload


OPERATIONS = 1000
LIVES = [
    # block size, cap, fixed
    (size, {1: 60, 2: 40, 4: 30, 16: 30}[size] if capped else None, fixed)
    for size in (1, 2, 4, 16)
    for capped, fixed in ((True, True), (True, False), (False, False))
]


@pytest.mark.parametrize(("seed", "life"), list(enumerate(LIVES)))
def test_a_thousand_random_operations_keep_every_row(seed, life):
    block_size, max_blocks, fixed = life
    workload = run_seeded(seed, block_size, max_blocks, fixed, OPERATIONS)
    done = workload.done
    assert workload.operations == OPERATIONS
    for name in ("append", "fork", "select", "repeat_interleave", "crop", "drop_before", "release_row", "release_all"):
        assert done[name] >= 10, f"{name} hardly happened: {done}"
    for name in ("remember", "let go", "release kept", "revive", "revive cached", "forget"):
        assert done[name] >= 5, f"{name} hardly happened: {done}"
    assert done["evicted"] >= 5 or max_blocks is None
    assert (done["copies"] == 0) == (block_size == 1), "blocks of one token are never partly filled"
    assert (done["out of blocks"] > 0) == (max_blocks is not None)
    for known in workload.remembered:
        if known.held:
            workload.pool.release(known.blocks)
    for cache in workload.caches:
        cache.release_all()
    workload.pool.check([])
    assert workload.pool.used_blocks == workload.pool.shared_blocks == 0


def test_the_random_lives_cover_ten_thousand_operations():
    assert len(LIVES) * OPERATIONS >= 10_000
    assert {size for size, _, _ in LIVES} == {1, 2, 4, 16}
    assert {(cap is not None, fixed) for _, cap, fixed in LIVES} == {(True, True), (True, False), (False, False)}


class CachesOverOnePool(RuleBasedStateMachine):
    """The same rules, driven by hypothesis."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        cap=st.sampled_from([None, 5, 9, 24]),
        fixed=st.booleans(),
    )
    def start(self, block_size, cap, fixed):
        self.data = None
        self.workload = Workload(block_size, cap, fixed, self.choose)

    def choose(self, count: int) -> int:
        return self.data.draw(st.integers(0, count - 1))


def _add_rule(name: str) -> None:
    def step(self, data):
        self.data = data
        self.workload.step(name)

    step.__name__ = name
    setattr(CachesOverOnePool, name, rule(data=st.data())(step))


for _name, _ in Workload.RULES:
    _add_rule(_name)

CachesOverOnePool.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestCachesOverOnePool = CachesOverOnePool.TestCase
