"""`GroupPlan`: where the tokens of one forward are written, and what its columns see."""

import pytest
import torch

from hf_paged.store import LayerStore

from .builders import Batch, PaddedBatch, Shape, used_slots


def reads_back(batch: Batch, close: float = 0.0) -> None:
    """Every row's slots hold the row's keys and values, in order."""
    store = batch.store
    for index, row in enumerate(batch.tables.rows):
        spans = row.token_runs(row.start, row.length, store.block_size)
        slots = [slot for first, count in spans for slot in range(first, first + count)]
        keys, values = store.memory.gather(torch.tensor(slots, dtype=torch.int64))
        for stored, right in ((keys, batch.keys[index]), (values, batch.values[index])):
            torch.testing.assert_close(stored.to(right.dtype), right[:, row.start :], atol=close, rtol=close)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_is_written_where_its_row_reads_it(rows, scattered, size):
    """Steps of 1 token, of a few, and of 16 and more are written in three different ways."""
    batch = Batch(rows, Shape(3, 1, 16, 24), block_size=size, scattered=scattered)
    for new in ([3, 0, 5], [1, 1, 1], [15, 15, 15], [16, 16, 16], [1, 1, 1], [33, 33, 33], [2, 2, 2], [1, 1, 1]):
        batch.step(new[:rows], q_len=max(new))
        reads_back(batch)


@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("new", [1, 3, 18])
def test_a_shared_block_is_copied_before_one_of_its_rows_writes(new, size):
    batch = Batch(2, block_size=size)
    batch.step([7, 5])
    batch.repeat(3)
    for _ in range(2):
        batch.step(new)
        reads_back(batch)
    batch.select([5, 5, 0, 1, 1, 2])
    batch.step(new)
    reads_back(batch)
    assert batch.tables.cow_copies == batch.pool.cow_copies >= 4


def test_rows_that_write_nothing_are_left_alone():
    batch = Batch(3)
    batch.step([5, 5, 5])
    batch.finish(1)
    batch.step(1)
    batch.step(20)
    reads_back(batch)
    batch.finish(0, 2)
    before = batch.store.memory.keys.clone()
    for q_len in (1, 3, 20):
        batch.step([0, 0, 0], q_len=q_len)
    after = batch.store.memory.keys[:, : before.shape[1]]
    # Bit by bit: slots that were never written may hold NaN, which is unequal to itself.
    assert torch.equal(after.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("size", [1, 4])
def test_the_null_block_is_never_written(size):
    for scattered in (False, True):
        batch = Batch(3, block_size=size, scattered=scattered)
        for new in ([0, 0, 20], [3, 3, 3], [1, 1, 1], [17, 17, 17]):
            batch.step(new, q_len=max(new))
        assert not batch.store.memory.keys[:, 0].any() and not batch.store.memory.values[:, 0].any()


def test_nothing_but_the_new_tokens_and_the_copies_is_written():
    batch = Batch(1)
    batch.step(6)
    batch.repeat(2)
    batch.step(1)
    for new in (1, 3, 16):
        held = used_slots(batch.store, batch.tables)
        before = batch.store.memory.key_slots.clone()
        step = batch.step(new)
        same = held.nonzero().flatten()
        assert torch.equal(batch.store.memory.key_slots[:, same], before[:, same])
        assert len(step.plan.copies) == 0


@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float16])
def test_keys_are_converted_to_the_stores_dtype_in_every_way_of_writing(stored_as):
    batch = Batch(2, Shape(stored_as=stored_as))
    for new in (1, 3, 16, 1):
        batch.step(new)
    assert batch.store.memory.keys.dtype == stored_as
    reads_back(batch, close=2e-2)
    alone = Batch(1, Shape(stored_as=stored_as))
    alone.step(1)
    reads_back(alone, close=2e-2)


def test_one_plan_writes_layers_of_unlike_heads_and_dims():
    """What is worked out for one layer is not taken for another one's."""
    batch = Batch(2)
    batch.step([3, 7], q_len=7)
    step = batch.step(2)
    for heads, dim in ((1, 8), (5, 24), (2, 16)):
        key, value = torch.randn(2, heads, 2, dim), torch.randn(2, heads, 2, dim)
        store = LayerStore(key, value, 4)
        step.plan.write(store, key, value)
        for row in range(2):
            slots = step.plan.token_slots(row, step.plan.past[row], step.plan.past[row] + 2)
            keys, values = store.memory.gather(torch.tensor(slots))
            assert torch.equal(keys, key[row]) and torch.equal(values, value[row])


def test_a_store_grows_when_a_plan_needs_it_to_and_a_smaller_plan_does_not_shrink_it():
    batch = Batch(2)
    first = batch.step(3)
    assert batch.store.memory.num_blocks >= first.plan.num_blocks
    later = batch.step(200)
    assert batch.store.memory.num_blocks >= later.plan.num_blocks > first.plan.num_blocks
    reads_back(batch)


# -- what is seen ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("band", [None, 1, 3, 9])
def test_visible_from_is_the_first_position_that_the_first_query_may_see(window, band):
    batch = Batch(3, window=window)
    for new in ([2, 0, 11], [1, 1, 1], [3, 3, 3]):
        plan = batch.step(new, q_len=max(new)).plan
        for row, past in enumerate(plan.past):
            bounds = [past - width + 1 for width in (window, band) if width is not None]
            assert plan.visible_from(row, band) == max([0, *bounds])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("band", [None, 3])
def test_the_mask_of_left_padded_rows_is_causal_within_the_band(window, band):
    batch = Batch(3, window=window)
    for new in ([2, 0, 7], [1, 1, 1], [5, 5, 5]):
        q_len = max(new)
        plan = batch.step(new, q_len=q_len).plan
        for row in range(3):
            begin, end = batch.tables.rows[row].start, batch.tables.rows[row].length
            mask = plan.attention_mask(row, begin, band, torch.device("cpu"))
            assert mask.shape == (q_len, end - begin) and mask.dtype == torch.bool
            for query in range(q_len):
                position = plan.past[row] + query - (q_len - plan.new[row])
                for place in range(begin, end):
                    right = place <= position
                    right &= band is None or position - place < band
                    right &= window is None or place > plan.past[row] - window
                    assert bool(mask[query, place - begin]) == right


PADS = ["ab..cde", "..abc..", ".a.b.c.", "abcdefg", "......."]


def test_a_full_group_stores_tokens_alone_and_knows_their_columns():
    batch = PaddedBatch(len(PADS))
    step = batch.step(PADS)
    for row, letters in enumerate(PADS):
        columns = [column for column, letter in enumerate(letters) if letter != "."]
        assert step.plan.new[row] == len(columns)
        assert list(step.plan.stored_columns(row)) == columns
    later = batch.step(["a.b", "abc", ".ab", "ab.", "abc"])
    assert [list(later.plan.stored_columns(row)) for row in range(5)] == [[0, 2], [0, 1, 2], [1, 2], [0, 1], [0, 1, 2]]
    assert batch.pool.stats().stored_tokens == sum(letter != "." for row in PADS for letter in row) + 12


def test_a_windowed_group_stores_pads_behind_the_first_token_because_windows_count_columns():
    batch = PaddedBatch(len(PADS), window=20)
    step = batch.step(PADS)
    assert [list(step.plan.stored_columns(row)) for row in range(5)] == [
        list(range(7)), list(range(2, 7)), list(range(1, 7)), list(range(7)), [],
    ]  # fmt: skip


def test_the_tokens_of_padded_rows_are_written_where_they_are_read():
    batch = PaddedBatch(len(PADS))
    for columns in (PADS, ["x"] * 5, ["a.b", "abc", ".ab", "ab.", "abc"], ["x" * 17 + "."] * 5):
        step = batch.step(columns)
    for row in range(5):
        slots = step.plan.token_slots(row, 0, step.plan.past[row] + step.plan.new[row])
        keys, values = step.store.memory.gather(torch.tensor(slots))
        assert torch.equal(keys, batch.keys[row][:, batch.real[row]])
        assert torch.equal(values, batch.values[row][:, batch.real[row]])
