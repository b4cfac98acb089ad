"""The prefix index against a model that knows, for every slot, which tokens it was written for."""

import random

import pytest

from hf_paged.blocks import BlockPool, OutOfBlocks, PrefixIndex, RowTables


class Content:
    """Pools, tables and an index over them; every slot remembers the identity and all tokens up to its own."""

    def __init__(self, size, windows=(None,), most=None, hash_tokens=hash):
        self.size, self.windows = size, windows
        self.pools = [BlockPool(0, most) for _ in windows]
        self.index = PrefixIndex(self.pools, windows, size, hash_tokens)
        self.slots = [{} for _ in windows]
        self.rows = []

    def row(self, identity, tokens, keep=None, steps=None):
        """Look up all but the last token, compute the rest as a model would, remember it. Returns the tokens found."""
        match = self.index.find(identity, tokens[:-1] if keep is None else tokens[:keep])
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(match.length - window + 1, 0)
            assert match.starts[group] <= first
            for position in range(first, match.length):
                block = match.blocks[group][(position - match.starts[group]) // self.size]
                slot = block * self.size + position % self.size
                assert self.slots[group][slot] == (identity, tuple(tokens[: position + 1]))
        tables = [RowTables(pool, self.size) for pool in self.pools]
        for entry in tables:
            entry.add_rows(1)
        match.adopt(tables, 0)
        self.rows.append((tables, identity, list(tokens)))
        done = match.length
        for step in steps or [len(tokens) - done]:
            count = min(step, len(tokens) - done)
            self.write(tables, identity, tokens, done, count)
            done += count
        self.index.insert(identity, tokens, [entry.rows[0] for entry in tables])
        self.index.check()
        return match.length

    def write(self, tables, identity, tokens, done, count):
        for entry, window in zip(tables, self.windows, strict=True):
            if window is not None:
                entry.drop_before(0, entry.rows[0].length - window + 1)
        for entry in tables:
            entry.pool.require(entry.blocks_needed([count]))
        for entry, slots in zip(tables, self.slots, strict=True):
            for source, target in entry.append([count]):
                for offset in range(self.size):
                    if source * self.size + offset in slots:
                        slots[target * self.size + offset] = slots[source * self.size + offset]
            for position in range(done, done + count):
                slot = entry.rows[0].slot(position, self.size)
                assert entry.pool.reference_count(slot // self.size) == 1
                slots[slot] = (identity, tuple(tokens[: position + 1]))

    def release(self, place=0):
        for entry in self.rows.pop(place)[0]:
            entry.release_all()
        self.check()

    def check(self):
        self.index.check()
        for group, pool in enumerate(self.pools):
            pool.check([row.blocks for tables, _, _ in self.rows for row in tables[group].rows])


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("keep", range(10))
def test_a_hit_counts_tokens_not_blocks(size, keep):
    content = Content(size)
    tokens = list(range(10, 20))
    assert content.row("m", tokens) == 0
    content.release()
    assert content.row("m", [*tokens[:keep], 99, 98]) == keep


def test_at_least_one_token_is_left_by_asking_for_all_but_the_last():
    content = Content(4)
    for length in (8, 9):  # a multiple of the block size, and not
        tokens = list(range(length))
        content.row("m", tokens)
        assert content.row("m", tokens) == length - 1


def test_other_identities_see_nothing():
    content = Content(2)
    content.row(("salt", "x"), [1, 2, 3, 4])
    assert content.row(("adapter", "x"), [1, 2, 3, 4]) == 0
    assert content.row(("salt", "x"), [1, 2, 3, 4]) == 3


def test_a_partly_filled_block_is_replaced_by_the_longer_one():
    content = Content(4)
    content.row("m", [1, 2, 3, 4, 5])
    content.release()
    before = content.pools[0].cached_blocks
    assert content.row("m", [1, 2, 3, 4, 5, 6, 7]) == 5
    content.release()
    assert content.pools[0].cached_blocks == before == 2
    assert content.index.find("m", [1, 2, 3, 4, 5, 6, 7, 8]).length == 7
    assert len(content.index) == 2


def test_the_row_that_found_a_partial_block_writes_to_a_copy_only_where_tokens_are_counted_on():
    content = Content(4)
    content.row("m", [1, 2, 3, 4, 5, 6])
    content.release()
    assert content.row("m", [1, 2, 3, 4, 5, 6, 7]) == 6
    assert content.pools[0].cow_copies == 0, "it goes on behind the tokens that count"
    content.release()
    assert content.row("m", [1, 2, 3, 4, 5, 9]) == 5
    assert content.pools[0].cow_copies == 1
    content.release()
    assert content.index.find("m", [1, 2, 3, 4, 5, 6, 7]).length == 7
    assert content.index.find("m", [1, 2, 3, 4, 5, 9]).length == 6


def test_the_tail_is_reused_first_and_the_head_stays_findable():
    content = Content(2, most=4)
    content.row("m", list(range(8)))
    content.release()
    assert content.row("n", [50, 51, 52]) == 0  # takes two blocks: the tail's
    assert content.index.find("m", list(range(8))).length == 4
    assert content.pools[0].evictions == 2
    content.check()


def test_what_was_looked_up_is_not_evicted_for_the_rest():
    content = Content(2, most=4)
    content.row("m", list(range(8)))
    content.release()
    assert content.row("m", [0, 1, 2, 3, 70, 71, 72]) == 4
    assert content.pools[0].evictions == 2
    with pytest.raises(OutOfBlocks):
        content.row("m", [0, 1, 80])
    content.rows.pop()[0][0].release_all()
    content.check()


def test_a_sliding_group_needs_the_window_only():
    content = Content(2, windows=(4,))
    content.row("m", list(range(20)), steps=[1] * 20)
    content.release()
    assert content.index.find("m", list(range(20))).length == 20
    assert len(content.index.find("m", list(range(20))).blocks[0]) == 2
    # Blocks that left the window are findable too, until they are reused.
    assert content.index.find("m", [*range(6), 99]).length in (0, 6)


def test_a_hit_counts_as_far_as_every_group_holds_what_it_needs():
    content = Content(2, windows=(None, 3))
    content.row("m", list(range(12)), steps=[1] * 12)
    content.release()
    assert content.index.find("m", list(range(12))).length == 12
    # The sliding group lost the middle; the full group alone is not enough.
    assert content.index.find("m", [*range(7), 99]).length == 0


def test_reset_frees_what_nobody_holds():
    content = Content(2)
    content.row("m", [1, 2, 3, 4])
    content.row("m", [5, 6])
    content.release(1)
    content.index.reset()
    assert (content.pools[0].cached_blocks, content.pools[0].used_blocks, len(content.index)) == (0, 2, 0)
    content.check()
    content.release()
    assert content.pools[0].used_blocks == content.pools[0].cached_blocks == 0


@pytest.mark.parametrize("most", [None, 14])
@pytest.mark.parametrize("hash_tokens", [hash, lambda tokens: 7], ids=["hash", "constant"])
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 3), (7, None)], ids=str)
@pytest.mark.parametrize("size", [1, 4])
def test_random_rows(size, windows, hash_tokens, most):
    """Every hit names slots written for exactly these tokens; invariants hold after each operation."""
    chance = random.Random(size * 100 + len(windows))
    content = Content(size, windows, most, hash_tokens)
    found = refused = 0
    for _ in range(150):
        identity = chance.choice("ab")
        length = chance.randint(1, 3 * size + 3)
        tokens = [chance.choice([1, 1, 1, 1, 2]) for _ in range(length)]
        try:
            found += content.row(identity, tokens, steps=[chance.randint(1, 4) for _ in range(length)])
        except OutOfBlocks:
            refused += 1
            content.check()
        while content.rows and (len(content.rows) > 2 or chance.random() < 0.5):
            content.release(chance.randrange(len(content.rows)))
        if chance.random() < 0.02:
            content.index.reset()
            content.check()
    while content.rows:
        content.release()
    assert found > 50
    assert all(pool.used_blocks == 0 for pool in content.pools)
    if most is not None:
        assert sum(pool.evictions for pool in content.pools) > 0 or refused == 0
    content.index.reset()
    assert all(pool.cached_blocks == 0 for pool in content.pools)
