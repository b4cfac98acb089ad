"""`BlockPool`: ids, reference counts, the free list, cached blocks, and where runs are put."""

import copy
import pickle
import random
from itertools import pairwise

import pytest

from hf_paged import OutOfBlocks as PublicOutOfBlocks
from hf_paged.blocks import NULL_BLOCK, BlockPool, OutOfBlocks

from .model import snapshot


def numbers(pool: BlockPool) -> tuple[int, int, int]:
    return pool.free_blocks, pool.used_blocks, pool.cached_blocks


def with_free(num_blocks: int, free: list[int]) -> BlockPool:
    """A pool of fixed size in which exactly the ids `free` are free, to be handed out in that order."""
    pool = BlockPool(num_blocks, max_blocks=num_blocks)
    pool.allocate(num_blocks)
    for block in free:
        pool.release([block])
    return pool


# -- states ------------------------------------------------------------------------------------------------------------


def test_every_id_is_handed_out_once_and_never_the_null_block():
    pool = BlockPool(13, max_blocks=13)
    taken = [pool.allocate(1)[0] for _ in range(13)]
    assert sorted(taken) == list(range(1, 14))
    assert NULL_BLOCK not in taken
    pool.check([taken])


def test_free_used_and_cached_blocks_are_disjoint_and_add_up():
    pool = BlockPool(11, max_blocks=11)
    kept, dropped, held = pool.allocate(3), pool.allocate(2), pool.allocate(5)
    assert numbers(pool) == (1, 10, 0)
    pool.release(kept, keep=True)
    pool.release(dropped)
    assert numbers(pool) == (3, 5, 3)
    assert sum(numbers(pool)) == pool.num_blocks == 11
    pool.check([held])


def test_the_peak_of_used_blocks_stays_when_blocks_go_back():
    pool = BlockPool(9)
    first = pool.allocate(7)
    pool.release(first, keep=True)
    assert pool.peak_used_blocks == 7
    pool.share(first[:2])
    pool.allocate(3)
    assert pool.peak_used_blocks == 7
    pool.allocate(4)
    assert pool.peak_used_blocks == 9


def test_shared_blocks_are_those_with_more_than_one_reference():
    pool = BlockPool(5)
    one, two, three = pool.allocate(3)
    pool.share([two, three])
    pool.share([three], times=4)
    assert [pool.reference_count(block) for block in (one, two, three)] == [1, 2, 6]
    assert [pool.is_shared(block) for block in (one, two, three)] == [False, True, True]
    assert pool.shared_blocks == 2
    pool.release([two])
    assert pool.shared_blocks == 1
    pool.release([three] * 5)
    assert pool.shared_blocks == 0
    pool.check([[one, two, three]])


def test_sharing_zero_times_changes_nothing():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    before = snapshot(pool)
    pool.share(blocks, times=0)
    assert snapshot(pool) == before


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_double_release_names_the_block_and_changes_nothing():
    pool = BlockPool(6, max_blocks=6)
    blocks = pool.allocate(4)
    pool.release([blocks[2]])
    before = snapshot(pool)
    with pytest.raises(ValueError, match=rf"block {blocks[2]} is released 1 time\(s\) but has 0 reference\(s\)"):
        pool.release(blocks)
    assert snapshot(pool) == before
    pool.check([[blocks[0], blocks[1], blocks[3]]])


def test_one_id_twice_in_one_release_needs_two_references():
    pool = BlockPool(4, max_blocks=4)
    block, other = pool.allocate(2)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=rf"block {block} is released 2 time"):
        pool.release([block, other, block])
    assert snapshot(pool) == before
    pool.share([block])
    pool.release([block, other, block])
    assert numbers(pool) == (4, 0, 0)
    taken = [pool.allocate(1)[0] for _ in range(4)]
    assert len(set(taken)) == 4, "a block freed twice would be handed out twice"


def test_a_cached_block_holds_no_reference_to_release():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block], keep=True)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=f"block {block} is released"):
        pool.release([block])
    assert snapshot(pool) == before


@pytest.mark.parametrize("block", [-1, 0, 6, 10**9])
@pytest.mark.parametrize("method", ["share", "release", "forget", "reference_count", "is_shared"])
def test_unknown_ids_and_the_null_block_are_refused(method, block):
    pool = BlockPool(5)
    known = pool.allocate(5)
    pool.release(known[:2], keep=True)
    before = snapshot(pool)
    name = "the null block" if block == NULL_BLOCK else f"unknown block {block}"
    argument = block if method in ("reference_count", "is_shared") else [known[0], block]
    if method == "release":
        argument = [known[-1], block]
    with pytest.raises(ValueError, match=f"{name} cannot be named here; this pool holds ids 1..5"):
        getattr(pool, method)(argument)
    assert snapshot(pool) == before


def test_a_free_block_cannot_be_shared():
    pool = BlockPool(3)
    held, gone = pool.allocate(2)
    pool.release([gone])
    before = snapshot(pool)
    with pytest.raises(ValueError, match=f"block {gone} is free"):
        pool.share([held, gone])
    assert snapshot(pool) == before


def test_only_cached_blocks_can_be_forgotten_and_all_or_none_are():
    pool = BlockPool(3)
    cached, held = pool.allocate(2)
    pool.release([cached], keep=True)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=f"block {held} is not cached"):
        pool.forget([cached, held])
    assert snapshot(pool) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1,), "num_blocks must be at least 0"), ((5, 4), r"max_blocks \(4\) is below num_blocks \(5\)")],
)
def test_a_pool_of_impossible_size_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockPool(*arguments)


# -- out of blocks -----------------------------------------------------------------------------------------------------


def test_out_of_blocks_says_what_was_needed_and_what_there_was_and_takes_nothing():
    pool = BlockPool(7, max_blocks=9)
    pool.allocate(2)
    pool.release(pool.allocate(3), keep=True)
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(8)
    error = caught.value
    assert (error.needed, error.free, error.total) == (8, 7, 9)  # cached blocks and growth count as free
    for word in ("needs 8", "7 of 9", "num_blocks", "memory_budget"):
        assert word in str(error)
    assert isinstance(error, RuntimeError) and OutOfBlocks is PublicOutOfBlocks
    assert snapshot(pool) == before
    pool.allocate(7)
    assert pool.used_blocks == pool.num_blocks == 9


def test_several_rows_get_their_blocks_or_none_does():
    pool = BlockPool(10, max_blocks=10)
    (last,) = pool.allocate(1)
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate_rows([4, 3, 3], [last, None, None], spread=2)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (10, 9, 10)
    assert snapshot(pool) == before
    assert [len(row) for row in pool.allocate_rows([4, 3, 2], [last, None, None], spread=2)] == [4, 3, 2]
    assert pool.free_blocks == 0


def test_out_of_blocks_survives_pickle_and_copy():
    error = OutOfBlocks(5, 2, 9)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is OutOfBlocks
        assert (again.needed, again.free, again.total, str(again)) == (5, 2, 9, str(error))


def test_headroom_counts_what_could_be_had_by_growing_and_evicting():
    assert BlockPool(4).headroom is None
    pool = BlockPool(4, max_blocks=10)
    pool.release(pool.allocate(3), keep=True)
    pool.allocate(2)
    assert pool.headroom == 8
    pool.require(8)
    with pytest.raises(OutOfBlocks):
        pool.require(9)


# -- cached blocks -----------------------------------------------------------------------------------------------------


def test_a_cached_block_is_revived_by_its_first_reference():
    evicted = []
    pool = BlockPool(4, max_blocks=4, on_evict=evicted.append)
    blocks = pool.allocate(3)
    pool.release(blocks, keep=True)
    pool.share([blocks[1]])
    assert numbers(pool) == (1, 1, 2)
    pool.share([blocks[0], blocks[0]], times=2)
    assert pool.reference_count(blocks[0]) == 4 and pool.shared_blocks == 1
    pool.check([[blocks[1]], [blocks[0]] * 4])
    assert evicted == [] and pool.evictions == 0


def test_cached_blocks_are_reused_least_recently_freed_first_and_the_tail_of_a_row_before_its_head():
    evicted = []
    pool = BlockPool(6, max_blocks=6, on_evict=evicted.append)
    first, second = pool.allocate(3), pool.allocate(3)
    pool.release(second, keep=True)
    pool.release(first, keep=True)
    taken = [pool.allocate(1)[0] for _ in range(6)]
    assert evicted == taken == second[::-1] + first[::-1]
    assert pool.evictions == 6 and numbers(pool) == (0, 6, 0)


def test_a_revived_block_goes_to_the_end_of_the_queue():
    pool = BlockPool(3, max_blocks=3)
    blocks = pool.allocate(3)
    pool.release(blocks, keep=True)  # queue: 3, 2, 1
    pool.share([blocks[2]])
    pool.release([blocks[2]], keep=True)  # queue: 2, 1, 3
    assert [pool.allocate(1)[0] for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]


def test_free_blocks_are_taken_before_cached_ones_are_evicted():
    pool = BlockPool(8, max_blocks=8)
    cached = pool.allocate(4)
    pool.release(cached, keep=True)
    pool.allocate(3)
    assert pool.evictions == 0 and pool.cached_blocks == 4
    pool.allocate(2)
    assert pool.evictions == 1


def test_eviction_is_told_before_the_block_is_handed_out():
    seen = []
    pool = BlockPool(1, max_blocks=1, on_evict=lambda block: seen.append((block, pool.reference_count(block))))
    pool.release(pool.allocate(1), keep=True)
    pool.allocate(1)
    assert seen == [(1, 0)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_cached_blocks_are_reused_before_the_pool_grows(count):
    pool = BlockPool(5)
    pool.release(pool.allocate(5), keep=True)
    pool.allocate(count)
    assert pool.num_blocks == 5 and pool.evictions == count
    pool.allocate(6)
    assert pool.cached_blocks == 0, "the pool grew while blocks were cached"


def test_what_is_released_again_and_again_does_not_make_the_pool_grow():
    pool = BlockPool()
    for _ in range(50):
        pool.release(pool.allocate(7), keep=True)
    assert pool.num_blocks == 7


def test_forgotten_blocks_are_plain_free_ones():
    evicted = []
    pool = BlockPool(5, max_blocks=5, on_evict=evicted.append)
    blocks = pool.allocate(4)
    pool.release(blocks, keep=True)
    pool.forget([blocks[0]])
    assert numbers(pool) == (2, 0, 3)
    pool.forget()
    assert numbers(pool) == (5, 0, 0)
    with pytest.raises(ValueError, match="is free"):
        pool.share([blocks[1]])
    pool.allocate(5)
    assert evicted == [] and pool.evictions == 0


def test_a_block_released_without_keep_is_free_though_it_was_cached_before():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block], keep=True)
    pool.share([block])
    pool.release([block])
    assert numbers(pool) == (2, 0, 0)


# -- growth ------------------------------------------------------------------------------------------------------------


def test_grow_adds_free_blocks_with_the_next_ids_up_to_the_cap():
    pool = BlockPool(2, max_blocks=5)
    held = pool.allocate(2)
    pool.grow(2)
    assert (pool.num_blocks, numbers(pool)) == (4, (2, 2, 0))
    before = snapshot(pool)
    with pytest.raises(ValueError, match=r"growing by 2 blocks passes max_blocks \(5\)"):
        pool.grow(2)
    assert snapshot(pool) == before
    pool.grow(1)
    assert pool.allocate(3) == [3, 4, 5]
    pool.check([held, [3, 4, 5]])


def test_an_empty_pool_without_bound_gives_what_is_asked():
    pool = BlockPool()
    assert pool.allocate(0) == []
    assert pool.num_blocks == 0
    assert pool.allocate(37) == list(range(1, 38))
    pool.check([range(1, 38)])


def test_growth_is_amortised_by_a_sixteenth():
    pool = BlockPool()
    sizes = set()
    for _ in range(4000):
        pool.allocate(1)
        sizes.add(pool.num_blocks)
    assert len(sizes) < 120
    assert pool.num_blocks <= 4000 * 17 / 16 + 1


def test_a_pool_never_grows_above_its_cap():
    rng = random.Random(3)
    for cap in (1, 2, 17, 64, 65, 133):
        pool = BlockPool(max_blocks=cap)
        held: list[int] = []
        for _ in range(200):
            rows = rng.randint(1, 4)
            counts = [rng.randint(0, 9) for _ in range(rows)]
            after = [rng.choice([None, *held[-3:]]) for _ in range(rows)]
            try:
                held.extend(block for row in pool.allocate_rows(counts, after, rng.randint(0, 40)) for block in row)
            except OutOfBlocks as error:
                assert sum(counts) == error.needed > error.free == cap - len(held)
                for _ in range(rng.randint(0, len(held))):
                    pool.release([held.pop(rng.randrange(len(held)))], keep=rng.random() < 0.5)
            assert pool.num_blocks <= cap
            pool.check([held])


# -- where blocks are put ----------------------------------------------------------------------------------------------


def test_new_blocks_follow_the_given_one_where_they_are_free():
    pool = BlockPool(12, max_blocks=12)
    first = pool.allocate(2)
    other = pool.allocate(2)
    pool.release(other)
    assert pool.allocate(3, after=first[-1]) == [3, 4, 5]


def test_a_row_takes_what_follows_and_places_the_rest_elsewhere():
    pool = with_free(12, free=[3, 4, 8, 9, 10, 11])
    assert pool.allocate(5, after=2) == [3, 4, 8, 9, 10]


def test_a_row_at_the_end_of_the_pool_grows_on_as_one_run():
    pool = BlockPool()
    blocks = pool.allocate(3)
    for _ in range(40):
        blocks += pool.allocate(1, after=blocks[-1])
    assert blocks == list(range(1, 44))


def test_several_blocks_are_one_run_where_there_is_one():
    pool = with_free(14, free=[1, 3, 4, 6, 10, 11, 12, 13])
    assert pool.allocate(4) == [10, 11, 12, 13]
    assert sorted(pool.allocate(4)) == [1, 3, 4, 6], "no run is left, so any blocks do"


def test_rows_get_runs_at_a_uniform_distance():
    pool = BlockPool()
    rows = pool.allocate_rows([3, 2, 3, 1], [None] * 4, spread=2)
    assert [len(row) for row in rows] == [3, 2, 3, 1]
    assert [second[0] - first[0] for first, second in pairwise(rows)] == [5, 5, 5]
    assert all(row == list(range(row[0], row[0] + len(row))) for row in rows)


def test_blocks_left_free_behind_a_run_let_its_row_grow_in_place():
    pool = BlockPool()
    rows = pool.allocate_rows([2, 2, 2], [None] * 3, spread=3)
    for _ in range(3):
        for row, more in zip(rows, pool.allocate_rows([1, 1, 1], [row[-1] for row in rows]), strict=True):
            row.extend(more)
    assert all(row == list(range(row[0], row[0] + 5)) for row in rows)


def test_spread_is_a_wish_and_not_a_reservation():
    pool = BlockPool(8, max_blocks=8)
    rows = pool.allocate_rows([2, 2], [None, None], spread=2)
    assert rows == [[1, 2], [5, 6]]
    assert sorted(pool.allocate(4)) == [3, 4, 7, 8]


def test_rows_without_room_for_a_uniform_distance_get_a_run_each_else_any_blocks():
    pool = with_free(13, free=[2, 3, 5, 6, 8, 11])
    rows = pool.allocate_rows([2, 2, 2], [None] * 3, spread=1)
    assert rows[:2] == [[2, 3], [5, 6]]
    assert sorted(rows[2]) == [8, 11]


def test_rows_that_continue_their_own_run_leave_the_others_to_be_placed():
    pool = with_free(10, free=[3, 6, 7, 9])
    rows = pool.allocate_rows([1, 0, 2, 1], [2, None, None, 8])
    assert rows == [[3], [], [6, 7], [9]]


def test_growing_for_the_sake_of_adjacency_alone_is_kept_small():
    pool = BlockPool(1000)
    pool.allocate(1000)
    for block in range(1, 1001, 2):
        pool.release([block])
    taken = pool.allocate(300)
    assert pool.num_blocks == 1000 and len(set(taken)) == 300


def test_a_fragmented_pool_stays_near_what_is_used():
    """Rows come and go and leave a block in the middle behind: runs must not be bought with ever more memory."""
    pool = BlockPool()
    held: list[int] = []
    for _ in range(300):
        blocks = pool.allocate(16)
        held.append(blocks.pop(8))
        pool.release(blocks)
    assert pool.num_blocks <= 2 * len(held) + 128
    pool.check([held])


# -- check -------------------------------------------------------------------------------------------------------------


def corrupt_count(pool: BlockPool) -> None:
    pool._references[2] += 1


def corrupt_free_list(pool: BlockPool) -> None:
    pool._free[2] = None


def corrupt_free_map(pool: BlockPool) -> None:
    pool._free_map[2] = 1


def corrupt_cache(pool: BlockPool) -> None:
    pool._cached[2] = None


def corrupt_shared(pool: BlockPool) -> None:
    pool.shared_blocks += 1


def lose_block(pool: BlockPool) -> None:
    pool._references[2] = 0


def free_null_block(pool: BlockPool) -> None:
    pool._free[NULL_BLOCK] = None


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_count,
        corrupt_free_list,
        corrupt_free_map,
        corrupt_cache,
        corrupt_shared,
        lose_block,
        free_null_block,
    ],
)
def test_check_finds_every_broken_invariant(corrupt):
    pool = BlockPool(5)
    held = pool.allocate(3)
    pool.check([held])
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check([held])


def test_check_compares_reference_counts_with_the_tables():
    pool = BlockPool(5)
    held = pool.allocate(3)
    with pytest.raises(AssertionError, match="block 3: 0 table entries, reference count 1"):
        pool.check([held[:2]])
    with pytest.raises(AssertionError, match="block 1: 2 table entries"):
        pool.check([held, held[:1]])
