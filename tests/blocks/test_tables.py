"""`BlockTable` and `RowTables`: one row's blocks, and every operation that moves references between rows."""

import itertools

import pytest

from hf_paged.blocks import BlockPool, BlockTable, OutOfBlocks, RowTables

from .model import ModelledRows, check_all, snapshot, table_of

SIZES = [1, 2, 4, 16]


class WatchedPool(BlockPool):
    """A pool that notes which blocks entered the free list, and how often it was asked for blocks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.watch()

    def watch(self) -> None:
        self.freed: list[int] = []
        self.requests: list[int] = []

    def _set_free(self, block: int) -> None:
        self.freed.append(block)
        super()._set_free(block)

    def allocate_rows(self, counts, after, spread=0, room=0):
        self.requests.append(sum(counts))
        return super().allocate_rows(counts, after, spread, room)


def prompt_and_beams(pool: BlockPool, size: int, prompt: int, own: list[int]) -> ModelledRows:
    """Rows that share a prompt and have gone apart by `own[i]` tokens each."""
    rows = ModelledRows.of(pool, size, [prompt])
    rows.repeat_interleave(len(own))
    rows.append(own)
    return rows


# -- one table ---------------------------------------------------------------------------------------------------------


def test_runs_spell_the_blocks_while_a_table_grows_and_shrinks_at_both_ends():
    table = BlockTable()
    table.extend([4, 5, 6, 2, 3, 9])
    table.extend([10, 7])
    assert table.runs == [[4, 3], [2, 2], [9, 2], [7, 1]]
    assert table.pop_back(2) == [10, 7]
    assert table.runs == [[4, 3], [2, 2], [9, 1]]
    assert table.pop_front(4, block_size=2) == [4, 5, 6, 2]
    assert (table.blocks, table.runs, table.start) == ([3, 9], [[3, 1], [9, 1]], 8)
    table.extend([10])
    assert table.runs == [[3, 1], [9, 2]]
    assert table.pop_back(0) == table.pop_front(0, 2) == []
    assert table.pop_back(3) == [3, 9, 10]
    assert table.runs == table.blocks == []


def test_a_copied_table_shares_nothing_that_changes():
    table = table_of([3, 4, 8], 9)
    other = table.copy()
    other.extend([9])
    other.pop_front(1, 4)
    other.length = 13
    assert (table.blocks, table.runs, table.start, table.length) == ([3, 4, 8], [[3, 2], [8, 1]], 0, 9)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ([], [], 0),
        ([1, 2], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2, 7], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 9, 10], [1, 2, 9, 11], 3),
        ([1, 2, 9], [1, 3, 9], 1),
        ([5, 6], [6, 7], 0),
        ([1, 5, 2], [1, 5, 3, 2], 2),
        ([1, 2, 3, 9], [1, 2, 9], 2),
    ],
)
def test_common_blocks_are_the_leading_ones_that_two_tables_share(one, other, common):
    assert table_of(one, len(one)).common_blocks(table_of(other, len(other))) == common
    assert table_of(other, len(other)).common_blocks(table_of(one, len(one))) == common


def test_tables_that_start_at_different_positions_have_no_common_blocks():
    one, other = table_of([1, 2, 3], 12), table_of([1, 2, 3], 12)
    other.pop_front(1, 4)
    assert one.common_blocks(other) == 0
    one.pop_front(1, 4)
    assert one.common_blocks(other) == 2
    other.start = 8
    assert one.common_blocks(other) == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dropped", [0, 2])
def test_token_runs_name_the_slots_of_every_span(size, dropped):
    table = table_of([7, 8, 3, 11, 12, 13, 5], 7 * size)
    table.pop_front(dropped, size)
    for begin in range(table.start, table.length + 1):
        for end in range(begin, table.length + 1):
            spans = table.token_runs(begin, end, size)
            slots = [slot for first, count in spans for slot in range(first, first + count)]
            assert slots == [table.slot(position, size) for position in range(begin, end)]
            assert all(count > 0 for _, count in spans)
            assert all(first + count != second for (first, count), (second, _) in itertools.pairwise(spans))


# -- appending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_row_of_n_tokens_holds_exactly_the_blocks_it_needs(size):
    for blocks in (1, 2, 3):
        for length in {blocks * size - 1, blocks * size, blocks * size + 1}:
            pool = BlockPool()
            rows = ModelledRows.of(pool, size, [length])
            for total in range(length, length + 4):
                assert len(rows.tables.rows[0].blocks) == -(-total // size) == pool.used_blocks
                check_all(pool, [rows])
                rows.append([1])


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_unlike_lengths_grow_together_and_zero_leaves_a_row_alone(size):
    pool = BlockPool()
    rows = ModelledRows.of(pool, size, [0, 1, 7, 18])
    before = list(rows.tables.rows[0].blocks), list(rows.tables.rows[2].blocks)
    assert rows.append([0, 3, 0, 5]) == []
    assert (rows.tables.rows[0].blocks, rows.tables.rows[2].blocks) == before
    assert [row.length for row in rows.tables.rows] == [0, 4, 7, 23]
    check_all(pool, [rows])


def test_a_row_that_grows_stays_one_run_where_it_can():
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [9])
    for _ in range(50):
        rows.append([1])
    assert len(rows.tables.rows[0].runs) == 1


def test_rows_decoded_side_by_side_stay_one_run_each_where_room_was_left_for_them():
    pool = BlockPool()
    rows = ModelledRows(RowTables(pool, 4), ModelledRows.of(pool, 4, []).storage)
    rows.add_rows(3)
    rows.append([5, 5, 5], spread=3)
    for _ in range(3 * 4):
        rows.append([1, 1, 1])
    assert [len(row.runs) for row in rows.tables.rows] == [1, 1, 1]
    first = [row.blocks[0] for row in rows.tables.rows]
    assert first[1] - first[0] == first[2] - first[1]


@pytest.mark.parametrize("size", SIZES)
def test_blocks_needed_is_what_append_takes(size):
    for counts in itertools.product([0, 1, 3], repeat=3):
        pool = BlockPool(40, max_blocks=40)
        rows = prompt_and_beams(pool, size, 5, [0, 0, 2])
        needed = rows.tables.blocks_needed(counts)
        free = pool.free_blocks
        rows.append(counts)
        assert free - pool.free_blocks == needed
        check_all(pool, [rows])


@pytest.mark.parametrize("size", SIZES)
def test_out_of_blocks_in_append_leaves_everything_as_it_was_and_the_same_call_works_later(size):
    pool = BlockPool(0, max_blocks=24)
    rows = prompt_and_beams(pool, size, 2 * size + 1 if size > 1 else 2, [0, 0, 0])
    blocker = pool.allocate(pool.headroom - 1)
    counts = [size, size, size]
    needed = rows.tables.blocks_needed(counts)
    before = snapshot(pool, [rows.tables])
    with pytest.raises(OutOfBlocks) as caught:
        rows.tables.append(counts)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (needed, 1, 24)
    assert snapshot(pool, [rows.tables]) == before
    pool.release(blocker)
    rows.append(counts)
    check_all(pool, [rows])


# -- copy-on-write -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 16])
def test_of_the_rows_that_share_a_partial_block_all_but_the_last_writer_copy_it(size):
    pool = BlockPool()
    rows = ModelledRows.of(pool, size, [2 * size + 1])
    rows.repeat_interleave(4)
    assert pool.used_blocks == 3 and pool.shared_blocks == 3
    partial = rows.tables.rows[0].blocks[-1]
    copies = rows.append([1, 1, 1, 1])
    assert [source for source, _ in copies] == [partial] * 3
    assert [row.blocks[-1] for row in rows.tables.rows] == [target for _, target in copies] + [partial]
    assert len({row.blocks[-1] for row in rows.tables.rows}) == 4
    assert {tuple(row.blocks[:2]) for row in rows.tables.rows} == {tuple(rows.tables.rows[0].blocks[:2])}
    assert rows.tables.cow_copies == pool.cow_copies == 3
    assert pool.shared_blocks == 2
    check_all(pool, [rows])
    assert rows.append([1, 1, 1, 1]) == [], "each has its own last block now"


@pytest.mark.parametrize("size", SIZES)
def test_a_full_shared_block_is_never_copied(size):
    pool = BlockPool()
    rows = prompt_and_beams(pool, size, 3 * size, [1, 1, 1])
    assert rows.tables.cow_copies == 0
    assert pool.used_blocks == 3 + 3
    check_all(pool, [rows])


def test_every_writer_copies_while_a_row_that_does_not_write_still_holds_the_block():
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [6])
    rows.repeat_interleave(3)
    assert len(rows.append([1, 0, 1])) == 2
    check_all(pool, [rows])
    assert rows.append([0, 1, 0]) == [], "the last holder writes in place"
    check_all(pool, [rows])


def test_a_fork_in_another_cache_counts_as_a_holder():
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [6, 7])
    other = rows.fork()
    assert len(rows.append([1, 1])) == 2
    assert other.append([1, 1]) == []
    assert (rows.tables.cow_copies, other.tables.cow_copies, pool.cow_copies) == (2, 0, 2)
    check_all(pool, [rows, other])


def test_writers_of_two_different_shared_blocks_each_leave_one_in_place():
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [5, 6])
    rows.repeat_interleave(3)
    copies = rows.append([2] * 6)
    first, second = rows.tables.rows[2].blocks[1], rows.tables.rows[5].blocks[1]
    assert [source for source, _ in copies] == [first, first, second, second]
    check_all(pool, [rows])


def test_rows_cut_back_into_a_shared_block_copy_it_before_they_write():
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [12])
    rows.repeat_interleave(2)
    rows.crop(1, 6)
    assert pool.reference_count(rows.tables.rows[0].blocks[1]) == 2
    assert [source for source, _ in rows.append([0, 1])] == [rows.tables.rows[0].blocks[1]]
    check_all(pool, [rows])


def test_a_copied_block_follows_the_block_before_it_where_it_can():
    pool = BlockPool(12, max_blocks=12)
    rows = ModelledRows.of(pool, 4, [8])
    between = pool.allocate(4)
    rows.append([1])
    assert rows.tables.rows[0].blocks == [1, 2, 7]
    other = rows.fork()
    pool.release(between)
    assert rows.append([4]) == [(7, 3)]
    assert rows.tables.rows[0].blocks == [1, 2, 3, 4]
    check_all(pool, [rows, other])


def test_both_writers_copy_a_block_that_something_else_holds_too():
    pool = BlockPool(12, max_blocks=12)
    rows = ModelledRows.of(pool, 4, [9])
    other = rows.fork()
    pool.share([3])
    assert len(rows.append([4])) == len(other.append([1])) == 1
    check_all(pool, [rows, other], held=[[3]])


# -- select ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("prompt", [0, 9])
def test_all_256_reorders_of_four_rows_equal_index_select(size, prompt):
    pool = BlockPool()
    parent = prompt_and_beams(pool, size, prompt, [1, 2, 3, 4])
    for beam_idx in itertools.product(range(4), repeat=4):
        rows = parent.fork()
        before = [list(tokens) for tokens in rows.expected]
        rows.select(beam_idx)
        assert rows.expected == [before[index] for index in beam_idx]
        check_all(pool, [parent, rows])
        rows.append([1, 1, 1, 1])
        check_all(pool, [parent, rows])
        rows.release_all()
    check_all(pool, [parent])


def test_all_256_reorders_where_nothing_else_holds_the_rows():
    for beam_idx in itertools.product(range(4), repeat=4):
        pool = BlockPool()
        rows = prompt_and_beams(pool, 2, 5, [1, 2, 3, 4])
        rows.select(beam_idx)
        check_all(pool, [rows])
        assert pool.used_blocks == len({block for row in rows.tables.rows for block in row.blocks})
        rows.append([1, 1, 1, 1])
        check_all(pool, [rows])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("beam_idx", [[1, 1], [0, 0], [1, 0]])
def test_a_reorder_takes_no_block_and_no_block_passes_through_the_free_list(size, beam_idx):
    rows_of = [3 * size + 1, 3 * size + 2]
    used = sum(-(-length // size) for length in rows_of)
    pool = WatchedPool(used + 1, max_blocks=used + 1)  # one block free
    rows = ModelledRows.of(pool, size, rows_of)
    gone = {block for index in {0, 1} - set(beam_idx) for block in rows.tables.rows[index].blocks}
    free = set(pool._free)
    assert len(free) == 1
    pool.watch()
    rows.select(beam_idx)
    assert pool.requests == [] and pool.evictions == 0
    assert set(pool.freed) == gone and len(pool.freed) == len(gone)
    assert set(pool._free) == free | gone
    check_all(pool, [rows])


def test_a_beam_step_frees_only_what_no_beam_holds_any_more():
    pool = WatchedPool(6, max_blocks=6)
    rows = prompt_and_beams(pool, 4, 9, [1, 1])  # blocks 1, 2 shared; one of its own each; two free
    own = [row.blocks[-1] for row in rows.tables.rows]
    pool.watch()
    rows.select([1, 1])
    assert pool.freed == [own[0]]
    assert [pool.reference_count(block) for block in rows.tables.rows[0].blocks] == [2, 2, 2]
    check_all(pool, [rows])


def test_a_beam_step_does_not_walk_the_prompt_that_all_beams_share():
    touched = []

    class Counting(BlockPool):
        def share(self, blocks, times=1):
            touched.append(len(blocks))
            super().share(blocks, times)

        def release(self, blocks, keep=False):
            touched.append(len(blocks))
            super().release(blocks, keep)

    rows = prompt_and_beams(Counting(), 4, 4001, [1, 1, 1, 1])
    touched.clear()
    rows.select([2, 2, 0, 1])
    assert sum(touched) == 2, "one block is shared once more, one is released"
    rows.check()


@pytest.mark.parametrize("indices", [[], [2], [0, 0, 0, 0, 0, 1], [3, 1]])
def test_rows_can_be_dropped_and_repeated(indices):
    pool = BlockPool()
    rows = prompt_and_beams(pool, 4, 9, [1, 2, 3, 4])
    expected = [list(rows.expected[index]) for index in indices]
    rows.select(indices)
    assert rows.expected == expected
    check_all(pool, [rows])


@pytest.mark.parametrize("indices", [[0, 1, 3], [-1, 0], [0, 99]])
def test_a_row_that_is_not_there_cannot_be_selected(indices):
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [5, 6, 7])
    before = snapshot(pool, [rows.tables])
    with pytest.raises(IndexError, match=r"row -?\d+ is out of range for a cache of 3 rows"):
        rows.tables.select(indices)
    assert snapshot(pool, [rows.tables]) == before


def test_rows_that_lost_their_first_blocks_are_reordered_like_others():
    pool = BlockPool()
    rows = prompt_and_beams(pool, 4, 30, [1, 2, 3])
    for row, position in enumerate([23, 24, 29]):
        rows.drop_before(row, position)
    for indices in ([2, 0, 0], [1, 1, 1], [0, 2, 1]):
        rows.select(indices)
        check_all(pool, [rows])
        rows.append([1, 1, 1])
        check_all(pool, [rows])


# -- repeat and fork ---------------------------------------------------------------------------------------------------


def test_repeated_rows_stand_side_by_side_and_share_every_block():
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [5, 0, 11])
    used = pool.used_blocks
    rows.repeat_interleave(3)
    assert [row.length for row in rows.tables.rows] == [5, 5, 5, 0, 0, 0, 11, 11, 11]
    assert pool.used_blocks == used == pool.shared_blocks
    check_all(pool, [rows])
    rows.repeat_interleave(1)
    assert len(rows.tables.rows) == 9
    check_all(pool, [rows])


@pytest.mark.parametrize("repeats", [0, -1])
def test_rows_cannot_be_repeated_less_than_once(repeats):
    rows = ModelledRows.of(BlockPool(), 4, [5])
    with pytest.raises(ValueError, match=f"repeats must be at least 1, got {repeats}"):
        rows.tables.repeat_interleave(repeats)
    rows.check()


def test_a_fork_lives_on_when_its_parent_is_gone():
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [5, 9])
    other = rows.fork()
    rows.append([3, 3])
    rows.release_all()
    check_all(pool, [rows, other])
    other.append([2, 2])
    check_all(pool, [other])
    other.release_all()
    assert pool.used_blocks == 0


# -- giving back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_cropped_row_keeps_its_first_tokens_and_gives_back_the_other_blocks(size):
    for length in range(34):
        pool = BlockPool()
        rows = ModelledRows.of(pool, size, [33])
        rows.crop(0, length)
        assert pool.used_blocks == -(-length // size)
        check_all(pool, [rows])
        rows.append([2])
        check_all(pool, [rows])


@pytest.mark.parametrize("length", [-1, 10])
def test_a_row_cannot_be_cropped_to_a_length_it_does_not_have(length):
    rows = ModelledRows.of(BlockPool(), 4, [9])
    with pytest.raises(ValueError, match=f"cannot crop a row of 9 tokens to {length}"):
        rows.tables.crop(0, length)
    rows.check()


def test_a_row_cannot_be_cropped_to_before_its_window():
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [17])
    rows.drop_before(0, 9)
    before = snapshot(pool, [rows.tables])
    with pytest.raises(ValueError, match="positions before 8 have left the window; cannot crop to 7"):
        rows.tables.crop(0, 7)
    assert snapshot(pool, [rows.tables]) == before
    rows.crop(0, 8)
    assert rows.tables.rows[0].blocks == []
    rows.append([3])
    check_all(pool, [rows])


@pytest.mark.parametrize("size", SIZES)
def test_only_blocks_that_lie_before_the_position_as_a_whole_are_dropped(size):
    for position in range(20):
        pool = BlockPool()
        rows = ModelledRows.of(pool, size, [19])
        rows.drop_before(0, position)
        row = rows.tables.rows[0]
        assert row.start == position // size * size and row.length == 19
        check_all(pool, [rows])
        rows.append([size + 1])
        check_all(pool, [rows])
        rows.drop_before(0, position)
        check_all(pool, [rows])


@pytest.mark.parametrize("position", [6, 8, 40])
def test_dropping_beyond_the_end_keeps_the_block_that_is_written_next(position):
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [5])
    rows.drop_before(0, position)
    check_all(pool, [rows])
    rows.append([4])
    check_all(pool, [rows])


def test_a_block_that_leaves_one_rows_window_stays_for_its_sibling():
    pool = BlockPool()
    rows = prompt_and_beams(pool, 4, 16, [1, 1])
    rows.drop_before(0, 12)
    assert pool.used_blocks == 4 + 2
    check_all(pool, [rows])
    rows.drop_before(1, 12)
    assert pool.used_blocks == 1 + 2
    check_all(pool, [rows])


def test_a_finished_row_gives_its_blocks_back_and_stays_empty():
    pool = BlockPool()
    rows = prompt_and_beams(pool, 4, 9, [1, 2, 3])
    used = pool.used_blocks
    rows.release_row(1)
    assert pool.used_blocks == used - 1
    assert rows.tables.rows[1].blocks == [] and rows.tables.rows[1].length == 0
    rows.append([1, 0, 1])
    rows.select([1, 0, 1, 2])
    check_all(pool, [rows])
    rows.release_row(1)
    rows.release_row(1)
    check_all(pool, [rows])


def test_release_all_gives_every_block_back():
    pool = BlockPool()
    rows = prompt_and_beams(pool, 4, 9, [1, 2, 3])
    rows.release_all()
    assert rows.tables.rows == [] and pool.used_blocks == pool.shared_blocks == 0
    check_all(pool, [rows])


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_stored_tokens_count_a_shared_block_once_and_logical_tokens_every_row():
    pool = BlockPool()
    rows = prompt_and_beams(pool, 4, 10, [0, 0, 0])
    assert (rows.tables.stored_tokens(), rows.tables.logical_tokens()) == (10, 30)
    rows.append([1, 2, 3])  # each has its own third block: 2 + 1, 2 + 2, 2 + 3 tokens
    assert (rows.tables.stored_tokens(), rows.tables.logical_tokens()) == (8 + 3 + 4 + 5, 36)
    rows.drop_before(0, 8)
    assert (rows.tables.stored_tokens(), rows.tables.logical_tokens()) == (8 + 3 + 4 + 5, 28)
    rows.release_row(0)
    assert (rows.tables.stored_tokens(), rows.tables.logical_tokens()) == (8 + 4 + 5, 25)


def test_the_fullest_row_says_how_many_tokens_a_shared_block_holds():
    pool = BlockPool()
    rows = ModelledRows.of(pool, 4, [7])
    rows.repeat_interleave(2)
    rows.crop(0, 5)
    assert rows.tables.stored_tokens() == 7


def test_check_finds_runs_and_lengths_that_do_not_fit():
    for damage in (
        lambda row: row.runs.append([9, 1]),
        lambda row: row.blocks.pop(),
        lambda row: setattr(row, "length", 13),
        lambda row: setattr(row, "start", 4),
        lambda row: setattr(row, "start", 2),
    ):
        rows = ModelledRows.of(BlockPool(), 4, [9])
        damage(rows.tables.rows[0])
        with pytest.raises(AssertionError):
            rows.tables.check()
