"""The backends, and above all the PyTorch one, on batches in blocks built by hand, against a softmax per query.

Most tests run twice: with the thresholds that were measured, and with tiny ones, so that a few dozen tokens take every
path that a long context takes.
"""

import itertools
import random
from functools import partial

import pytest
import torch

from hf_paged.backends import AttentionCall, choose, native, reference, torch_strided
from hf_paged.store import LayerStore

from .builders import LIVES, Batch, PaddedBatch, Shape, Step, beams, equal_lengths, nested, poison, ragged

BLOCK_SIZES = [1, 2, 4, 16]
# What is called with this forward's keys handed over, and without; the reference reads the store in any case.
RUNS = [
    (reference.attend, False),
    (torch_strided.attend, False),
    (torch_strided.attend, True),
    (native.attend, False),
]
CLOSE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds so small that a few tokens make a long run."""
    monkeypatch.setattr(torch_strided, "LONG_RUN", 5)
    monkeypatch.setattr(torch_strided, "LONG_PREFIX", 3)
    monkeypatch.setattr(torch_strided, "QUERY_CHUNK", 3)
    monkeypatch.setattr(native, "SHORTEST_TASK", 5)
    monkeypatch.setattr(native, "WORTH_THREADS", 0)
    monkeypatch.setattr(native.torch, "get_num_threads", lambda: 2)


@pytest.fixture(params=["measured", "tiny"])
def thresholds(request, monkeypatch):
    if request.param == "tiny":
        shrink(monkeypatch)
    return request.param


@pytest.fixture
def tiny(monkeypatch):
    shrink(monkeypatch)


def agree(step: Step, call: AttentionCall | None = None, close: float | None = None) -> torch.Tensor:
    """All backends give the right answer, with this forward's keys handed over and without."""
    close = close or CLOSE[step.query.dtype]
    right = step.expected(call)
    for attend, from_store in RUNS:
        out = step.run(attend, call, from_store)
        assert out.shape == right.shape and out.dtype == step.query.dtype
        torch.testing.assert_close(out.double(), right, atol=close, rtol=close, msg=partial(blame, attend))
    return right


def blame(attend, message: str) -> str:
    return f"{attend.__module__}: {message}"


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("life", LIVES.values(), ids=list(LIVES))
def test_prefill_extend_and_decode_equal_a_softmax_per_query(life, size, thresholds):
    for step in life(size):
        agree(step)


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("life", [ragged, beams, nested])
def test_scattered_blocks_give_what_adjacent_ones_give(life, size, thresholds):
    for adjacent, scattered in zip(life(size), life(size, scattered=True), strict=True):
        for attend, close in ((reference.attend, 0.0), (torch_strided.attend, 1e-6)):
            one, other = adjacent.run(attend), scattered.run(attend)
            torch.testing.assert_close(one, other, atol=close, rtol=close)
        assert all(run[1] == 1 for row in scattered.plan.tables.rows for run in row.runs)


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 3), (2, 3), (1, 7), (2, 7)])
@pytest.mark.parametrize("dims", [(16, None), (80, None), (96, None), (24, 16), (16, 40)], ids=str)
def test_head_dims_and_groups(dims, kv_heads, group, thresholds):
    shape = Shape(kv_heads, group, *dims)
    for step in ragged(4, shape):
        agree(step)
    batch = Batch(1, shape)
    batch.step(9)
    batch.repeat(3)
    agree(batch.step(1))
    agree(batch.step(1), batch_call(shape, softcap=1.0, sinks=True))
    agree(batch.step(1), batch_call(shape, slopes=True))
    agree(batch.step(3), batch_call(shape, slopes=True))


def batch_call(
    shape: Shape, softcap: float | None = None, sinks: bool = False, band: int | None = None, slopes: bool = False
):
    values = torch.linspace(-4.0, 9.0, shape.num_heads) if sinks else None
    return AttentionCall(0.3, band, softcap, values, torch.linspace(0.02, 0.9, shape.num_heads) if slopes else None)


def test_an_empty_and_a_finished_row_give_zeros_and_never_nan(thresholds):
    for sinks in (None, torch.full((4,), 50.0)):
        batch = Batch(4)
        steps = [batch.step([6, 0, 9, 1], q_len=9)]
        batch.finish(2)
        for columns in (1, 3):
            steps = [batch.step([columns, 0, 0, columns], q_len=columns)]
            for step in steps:
                right = agree(step, step.call(sinks=sinks))
                assert not right[1:3].any() and right[0].any() and right[3].any()


def test_a_batch_in_which_every_row_is_empty_gives_zeros(thresholds):
    batch = Batch(2)
    batch.step(3)
    batch.finish(0, 1)
    for columns in (1, 2):
        step = batch.step([0, 0], q_len=columns)
        for attend in (reference.attend, torch_strided.attend):
            assert not step.run(attend).any()


@pytest.mark.parametrize("seed", range(16))
def test_random_lives_of_a_batch_equal_a_softmax_per_query(seed, monkeypatch):
    """Rows are added, selected, repeated, cut and finished in any order, on layers and calls of every kind."""
    rng = random.Random(seed)
    if seed % 2:
        shrink(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + seed % 3)
    shape = Shape(rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 7]), rng.choice([8, 16, 24]), rng.choice([None, 16]))
    window = rng.choice([None, None, 3, 5, 9])
    band = rng.choice([None, window, 1, 4, 7])
    size, scattered = rng.choice(BLOCK_SIZES), rng.random() < 0.2
    batch = Batch(rng.randint(1, 4), shape, block_size=size, window=window, scattered=scattered, seed=seed)
    for _ in range(16):
        rows = len(batch.live)
        chance = rng.random()
        if chance < 0.2:
            batch.select([rng.randrange(rows) for _ in range(rng.randint(1, 6))])
        elif chance < 0.3 and rows < 4:
            batch.repeat(rng.randint(1, 3))
        elif chance < 0.35:
            batch.finish(rng.randrange(rows))
        elif chance < 0.45 and window is None:
            row = rng.randrange(rows)
            batch.crop(row, rng.randint(0, batch.tables.rows[row].length))
        q_len = rng.choice([1, 1, 1, 2, 3, 5, 17])
        new = [
            rng.randint(0, q_len) if live and not row.length else q_len * live  # pads come before a row's first token
            for live, row in zip(batch.live, batch.tables.rows, strict=True)
        ]
        step = batch.step(new, q_len, spread=rng.randint(0, 3))
        sinks = rng.choice([None, 10.0 * torch.randn(shape.num_heads, generator=batch.generator)])
        slopes = (
            torch.rand(shape.num_heads, generator=batch.generator) if sinks is None and rng.random() < 0.5 else None
        )
        agree(step, step.call(band=band, softcap=rng.choice([None, 1.0]), sinks=sinks, slopes=slopes))


# -- windows, softcap, sinks -------------------------------------------------------------------------------------------

CALLS = {
    "plain": {},
    "softcap": {"softcap": 1.0},
    "large sinks": {"sinks": torch.tensor([30.0, 0.0, -40.0, 8.0])},
    "softcap and sinks": {"softcap": 1.0, "sinks": torch.tensor([2.0, 60.0, -1.0, 0.5])},
    "slopes": {"slopes": torch.tensor([0.5, 0.03, -0.2, 1.0])},
}


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("options", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("life", [ragged, beams, equal_lengths])
@pytest.mark.parametrize(("window", "band"), [(None, None), (6, None), (None, 6), (6, 6), (1, 1), (40, 40)])
def test_windows_softcap_and_sinks_reach_prefill_and_decode_beyond_the_window(life, window, band, options, size, tiny):
    for step in life(size, window=window):
        agree(step, step.call(band=band, **options))


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize(
    ("life", "window"), [(ragged, None), (ragged, 6), (beams, None), (beams, 6), (equal_lengths, None), (nested, None)]
)
def test_a_bias_belongs_to_columns_counted_from_the_end(life, window, size, thresholds):
    generator = torch.Generator().manual_seed(7)
    for step in life(size) if window is None else life(size, window=window):
        columns = step.plan.first_column + step.plan.q_len
        bias = torch.randn(1, 4, step.plan.q_len, columns, generator=generator)
        agree(step, step.call(band=window, bias=bias))


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("life", [ragged, beams, equal_lengths])
def test_windows_with_the_measured_thresholds(life, size):
    for step in life(size, window=6):
        agree(step, step.call(band=6, sinks=torch.tensor([30.0, 0.0, -40.0, 8.0])))


@pytest.mark.parametrize("window", [5, 8])
@pytest.mark.parametrize("first", [1, 3, 4, 5, 7, 8, 9, 24])
def test_chunks_that_cross_the_window_one_two_and_five_at_a_time(first, window, thresholds):
    batch = Batch(2, window=window)
    agree(batch.step(first), AttentionCall(0.3, window))
    for q_len in (1, 2, 5, 1, 5, 2, 1, 1):
        agree(batch.step(q_len), AttentionCall(0.3, window))
    assert all(len(row.blocks) <= -(-(window + 5) // 4) + 1 for row in batch.tables.rows)


@pytest.mark.parametrize("options", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("chunk", [5, 8])
@pytest.mark.parametrize("first", [1, 4, 5, 8, 24])
def test_a_query_sees_its_own_chunk(first, chunk, size, options, thresholds):
    batch = Batch(3, window=chunk, chunked=True, block_size=size)
    agree(batch.step([first, max(first - 3, 0), 1], first), AttentionCall(0.3, chunk, **options))
    batch.select([0, 0, 1, 2])
    for q_len in (1, 2, 5, 1, 5, 2, *[1] * chunk):
        agree(batch.step(q_len), AttentionCall(0.3, chunk, **options))


def test_a_prefill_many_windows_long_is_right_where_whole_stretches_of_keys_are_masked():
    """Longer than a tile of PyTorch's CPU kernel (512 keys), so that whole tiles are masked for a query."""
    batch = Batch(1, Shape(1, 1), block_size=16)
    step = batch.step(700)
    call = AttentionCall(0.3, 7)
    out = step.run(torch_strided.attend, call)
    torch.testing.assert_close(out, step.run(reference.attend, call), atol=1e-5, rtol=1e-5)
    assert out.isfinite().all()


def test_a_prefill_longer_than_a_chunk_of_queries_with_softcap():
    batch = Batch(1, Shape(1, 2), block_size=16)
    for q_len in (515, 514):
        step = batch.step(q_len)
        call = step.call(softcap=1.0)
        out = step.run(torch_strided.attend, call)
        torch.testing.assert_close(out, step.run(reference.attend, call), atol=1e-5, rtol=1e-5)


def test_a_row_of_many_scattered_blocks_beside_a_short_one():
    """The short row is padded to the long one's tokens with the null block, over several tiles of the kernel."""
    batch = Batch(2, Shape(1, 1), block_size=4, scattered=True)
    batch.step([1100, 3], q_len=1100)
    agree(batch.step(1))


def test_a_softcap_saturates_before_the_mask_and_after_the_scale():
    """With scores far above the cap every seen key weighs almost the same, and a hidden one nothing."""
    batch = Batch(1, Shape(1, 1))
    step = batch.step(9)
    step.query.mul_(1000.0)
    agree(step, AttentionCall(1.0, 3, 1.0))
    step = batch.step(1)
    step.query.mul_(1000.0)
    agree(step, AttentionCall(1.0, 3, 1.0))


def test_a_sink_far_above_every_score_leaves_nothing_and_one_far_below_takes_nothing(thresholds):
    for columns in (7, 1, 3):
        batch = Batch(2)
        batch.step(11)
        step = batch.step(columns)
        plain = step.run(torch_strided.attend)
        drowned = step.run(torch_strided.attend, step.call(sinks=torch.full((4,), 1e4)))
        untouched = step.run(torch_strided.attend, step.call(sinks=torch.full((4,), -1e4)))
        assert not drowned.any()
        torch.testing.assert_close(untouched, plain, atol=1e-6, rtol=1e-6)


def test_scores_of_hundreds_do_not_overflow(thresholds):
    for columns in (1, 4):
        batch = Batch(3)
        batch.step([3, 17, 40], q_len=40)
        step = batch.step(columns)
        step.query.mul_(200.0)
        agree(step, close=1e-4)


# -- pads on the right and in the middle -------------------------------------------------------------------------------

PADDED = {
    "right": ["abcde..", "abcdefg", "ab....."],
    "middle": ["ab..cde", "a.b.c.d", "abcdefg"],
    "left and right": ["..abc..", "abcdefg", ".......", "......a"],
    "left, middle and right": [".a.bc.d", "..ab..c", "abc.de."],
}


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("columns", PADDED.values(), ids=list(PADDED))
@pytest.mark.parametrize("options", [CALLS["plain"], CALLS["softcap and sinks"]], ids=["plain", "softcap and sinks"])
@pytest.mark.parametrize("window", [None, 5])
def test_pads_on_every_side_are_never_attended_and_their_queries_attend(window, options, columns, size, tiny):
    batch = PaddedBatch(len(columns), window, size)
    tokens, ragged_end = ["x"] * len(columns), ["xy."] + ["xyz"] * (len(columns) - 1)
    for forward in (columns, tokens, tokens, ragged_end, tokens, tokens, tokens):
        step = batch.step(forward)
        agree(step, step.call(band=window, **options))
    assert not step.plan.suffix


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("window", [None, 5])
def test_pads_on_the_left_alone_are_planned_as_rows_that_end_together(window, size, thresholds):
    batch = PaddedBatch(4, window, size)
    forwards = (
        ["..abcde", "abcdefg", "......a", "......."],
        ["ab", "ab", "ab", ".a"],
        ["a"] * 4,
        ["abc"] * 4,
        ["a"] * 4,
    )
    for forward in forwards:
        step = batch.step(forward)
        assert step.plan.suffix
        agree(step, step.call(band=window))


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_pads_after_rows_that_share_a_partly_filled_block_see_its_tokens_alone(size, thresholds):
    """Nobody has written since the rows were forked, so they share the last block too, with its empty slots."""
    batch = PaddedBatch(1, block_size=size)
    batch.step(["x" * 69])
    batch.repeat(3)
    for forward in (["."] * 3, ["..."] * 3, ["."] * 3, ["x", ".", "x"], ["."] * 3):
        step = batch.step(forward)
        poison(step.store, step.plan.tables, float("nan"))
        agree(step)


@pytest.mark.parametrize("window", [None, 5])
def test_a_finished_row_among_padded_ones_gives_zeros(window, thresholds):
    batch = PaddedBatch(3, window)
    batch.step(["ab..cde", "a.b.c.d", "abcdefg"])
    batch.state.finish_rows([1])
    batch.real[1] = False  # for `expected`: nothing of it is seen any more
    for forward in (["x", ".", "x"], ["xyz", "...", "x.z"], ["x", ".", "x"]):
        step = batch.step(forward)
        right = agree(step, step.call(band=window))
        assert not right[1].any() and right[0].any() and right[2].any()


# -- garbage in unused slots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("life", LIVES.values(), ids=list(LIVES))
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0, "band": 6}], ids=["plain", "softcap and band"])
def test_what_unused_slots_hold_does_not_matter(life, options, size, thresholds):
    poisoned = 0
    for step in life(size):
        call = step.call(**options)
        with step.store.lock:
            step.store.ensure(step.store.memory.num_blocks + 3)
        poison(step.store, step.plan.tables, 0.0)
        clean = [step.run(attend, call, from_store) for attend, from_store in RUNS]
        for number in (float("nan"), float("inf"), 1e30):
            poisoned += poison(step.store, step.plan.tables, number)
            for (attend, from_store), before in zip(RUNS, clean, strict=True):
                out = step.run(attend, call, from_store)
                assert out.isfinite().all()
                assert torch.equal(out, before)
    assert poisoned >= 50


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("window", [None, 5])
def test_what_unused_slots_hold_does_not_matter_where_pads_are_inside(window, size, thresholds):
    batch = PaddedBatch(3, window, size)
    for columns in (["..ab..c", "abcdefg", ".a.bc.."], ["x"] * 3, ["xy."] * 3, ["x"] * 3):
        step = batch.step(columns)
        for number in (float("nan"), float("inf"), 1e30):
            poison(step.store, step.plan.tables, number)
            agree(step, step.call(band=window))


# -- dtypes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", CALLS.values(), ids=list(CALLS))
def test_other_dtypes_stay_near_the_float32_reference_and_are_given_back(options, dtype, thresholds):
    for step in ragged(4, Shape(dtype=dtype)):
        agree(step, step.call(**options))
    batch = Batch(2, Shape(dtype=dtype))
    batch.step(9, spread=3)
    agree(batch.step(1), step.call(**options))


def test_many_pieces_in_bfloat16_are_merged_in_float32(tiny):
    """A decode cut into dozens of pieces is no further from float32 than one that is a single piece."""
    shape = Shape(1, 2, dtype=torch.bfloat16)
    errors = []
    for scattered in (False, True):
        batch = Batch(1, shape, block_size=16, scattered=scattered)
        batch.step(41 * 16 - 1)
        step = batch.step(1)
        assert (len(schedule_of(step).pieces) > 40) == scattered
        errors.append((step.run(torch_strided.attend).double() - step.expected()).abs().max().item())
    assert errors[1] <= 2 * errors[0] + 1e-4


@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float16])
def test_a_store_of_another_dtype_answers_in_the_querys(stored_as, thresholds):
    for step in ragged(4, Shape(stored_as=stored_as)):
        agree(step, close=2e-2)


# -- ALiBi -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("life", LIVES.values(), ids=list(LIVES))
def test_slopes_in_every_life(life, size, thresholds):
    for step in life(size):
        agree(step, batch_call(Shape(), slopes=True))


@pytest.mark.parametrize("life", [ragged, beams, nested])
def test_slopes_over_scattered_blocks(life, thresholds):
    for step in life(4, scattered=True):
        agree(step, batch_call(Shape(), slopes=True))


def test_slopes_in_16_bits(thresholds):
    """No further from the exact answer than the values' own rounding, however long the row."""
    shape = Shape(2, 2, dtype=torch.bfloat16)
    batch = Batch(2, shape)
    for q_len in (700, 1, 3):
        agree(batch.step(q_len), batch_call(shape, slopes=True))


@pytest.mark.parametrize("attend", [reference.attend, torch_strided.attend, native.attend])
def test_far_from_the_beginning_slopes_are_as_exact(attend):
    """Scores of thousands would round the products they hide; counted from the row's end they are small."""
    shape = Shape(1, 2)
    batch = Batch(1, shape, block_size=16)
    batch.step(5000)
    for q_len in (1, 2):
        step = batch.step(q_len)
        call = AttentionCall(0.3, slopes=torch.tensor([0.9, 0.004]))
        torch.testing.assert_close(step.run(attend, call).double(), step.expected(call), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("columns", [["..cdefg", "abcdefg"], ["ab..cde", "abcdefg"], ["abcde..", ".bcdefg"]])
def test_slopes_count_tokens_and_not_pads(columns):
    batch = PaddedBatch(2)
    for forward in (columns, ["ab", "cd"], ["a", "b"]):
        step = batch.step(forward)
        agree(step, step.call(slopes=torch.tensor([0.5, 0.03, 0.2, 1.0])))


# -- one plan, many layers ---------------------------------------------------------------------------------------------


def layer_like(step: Step, shape: Shape, seed: int) -> tuple[LayerStore, torch.Tensor]:
    """Another layer's store over the same blocks, and a query for it."""
    generator = torch.Generator().manual_seed(seed)
    value_dim = shape.value_dim or shape.key_dim
    store = LayerStore(
        torch.zeros(1, shape.kv_heads, 1, shape.key_dim),
        torch.zeros(1, shape.kv_heads, 1, value_dim),
        step.store.block_size,
    )
    store.ensure(step.store.memory.num_blocks)
    for tensor in (store.memory.keys, store.memory.values):
        tensor[:, 1:] = torch.randn(tensor[:, 1:].shape, generator=generator)
    batch, _, q_len, _ = step.query.shape
    return store, torch.randn(batch, q_len, shape.num_heads, shape.key_dim, generator=generator).transpose(1, 2)


@pytest.mark.parametrize("life", LIVES.values(), ids=list(LIVES))
def test_layers_of_unlike_heads_dims_and_calls_share_one_plan(life, thresholds):
    """What a layer leaves in the plan's scratch is right for the next one, and no result changes afterwards."""
    shapes = [Shape(), Shape(), Shape(1, 4), Shape(2, 3, 24, 8), Shape(2, 2, 40), Shape()]
    for step in life(4):
        step.plan.scratch.clear()
        results = []
        for seed, (shape, softcap, band) in enumerate(
            itertools.product(shapes, (None, 1.0), (None, 4)),
        ):
            store, query = layer_like(step, shape, seed)
            sinks = torch.linspace(-1.0, 3.0, shape.num_heads) if seed % 3 == 0 else None
            slopes = torch.linspace(0.1, 0.9, shape.num_heads) if seed % 3 == 1 else None
            call = AttentionCall(0.3, band, softcap, sinks, slopes)
            out = torch_strided.attend(query, None, None, store.memory, step.plan, call)
            naive = reference.attend(query, None, None, store.memory, step.plan, call)
            results.append((out, out.clone(), naive))
        for out, at_first, naive in results:
            assert torch.equal(out, at_first), "a later layer changed the result of an earlier one"
            torch.testing.assert_close(out, naive, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("columns", [["abcdefg", "abcdefg"], ["ab..cde", "abcdefg"]], ids=["no pads", "inner pads"])
def test_layers_of_unlike_bands_do_not_take_each_others_mask(columns):
    batch = PaddedBatch(2)  # held: the blocks go back with it
    step = batch.step(columns)
    step.plan.scratch.clear()
    for band in (2, 4, None, 2):
        call = step.call(band=band)
        out = torch_strided.attend(step.query, step.key, step.value, step.store.memory, step.plan, call)
        torch.testing.assert_close(out.double(), step.expected(call), atol=2e-5, rtol=2e-5)


# -- the schedule ------------------------------------------------------------------------------------------------------


class Counted:
    """Counts calls of `_tile` and of PyTorch's attention, and the key tokens they read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.tiles: list[int] = []
        tile, whole = torch_strided._tile, torch.nn.functional.scaled_dot_product_attention

        def counted_tile(query, key, *args, **kwargs):
            self.tiles.append(key.shape[0] * key.shape[2])
            return tile(query, key, *args, **kwargs)

        def counted_whole(query, key, *args, **kwargs):
            self.tiles.append(key.shape[0] * key.shape[2])
            return whole(query, key, *args, **kwargs)

        monkeypatch.setattr(torch_strided, "_tile", counted_tile)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted_whole)

    def of(self, step: Step) -> tuple[int, int]:
        """Attention calls of a step, and key tokens they read in all."""
        self.tiles.clear()
        agree_quickly(step)
        return len(self.tiles), sum(self.tiles)


def schedule_of(step: Step) -> torch_strided._Schedule:
    return torch_strided._schedule(step.plan, None, step.query.device, step.query.dtype)


def agree_quickly(step: Step) -> None:
    out = step.run(torch_strided.attend)
    torch.testing.assert_close(out, step.run(reference.attend), atol=2e-5, rtol=2e-5)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


def forked(rows: int, prompt: int, own: int, size: int = 16, scattered: bool = False) -> Step:
    """Decode step of rows that share a prompt and have `own` tokens each, this step's included."""
    batch = Batch(1, Shape(1, 2), block_size=size, scattered=scattered)
    batch.step(prompt)
    batch.repeat(rows)
    for _ in range(own - 1):
        batch.step(1)
    return batch.step(1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize("scattered", [False, True])
def test_rows_that_share_a_prefix_read_it_once(rows, scattered, threads, counted, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    shared, own = 63 * 16, 3
    tiles, tokens = counted.of(forked(rows, shared + 5, own, scattered=scattered))
    assert tiles == 2, "one for the prefix, one for what the rows have for themselves"
    assert tokens == shared + rows * (5 + own)


def test_the_number_of_tiles_depends_on_neither_rows_nor_length(counted):
    counts = {
        counted.of(forked(rows, prompt, own=2))[0]
        for rows, prompt in ((2, 16 * 16 + 1), (4, 50 * 16 + 1), (16, 20 * 16 + 1), (16, 90 * 16 + 1))
    }
    assert counts == {2}


def test_the_parts_of_a_shared_prefix_together_read_it_once(counted, monkeypatch):
    """With two threads a long prefix is cut in two equal parts, one for each: still one tile."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    step = forked(3, 40 * 16, own=1)
    (shared, _) = schedule_of(step).pieces
    assert (shared.parts, shared.tokens) == (2, 20 * 16)
    assert counted.of(step) == (2, 40 * 16 + 3)


def test_two_prompts_in_one_batch_are_read_once_each(counted):
    batch = Batch(2, Shape(1, 2), block_size=16)
    batch.step(20 * 16)
    batch.repeat(4)
    assert counted.of(batch.step(1)) == (3, 2 * 20 * 16 + 8)


def test_rows_in_any_order_that_share_a_prefix_read_it_once(counted):
    """The rows of a group need not stand side by side."""
    batch = Batch(2, Shape(1, 2), block_size=16)
    batch.step(20 * 16)
    batch.select([0, 1, 0, 1, 1])
    assert counted.of(batch.step(1)) == (3, 2 * 20 * 16 + 5)


def test_a_row_that_shares_only_a_little_does_not_undo_the_sharing_of_the_others(counted):
    batch = Batch(1, Shape(1, 2), block_size=16)
    batch.step(20 * 16)
    batch.repeat(5)
    batch.crop(2, 2 * 16)
    batch.crop(4, 11)
    tiles, tokens = counted.of(batch.step(1))
    assert tokens <= 20 * 16 + 5 * 33
    assert tiles <= 3


def test_equal_rows_at_a_uniform_distance_are_one_strided_batch(counted):
    batch = Batch(8, Shape(1, 2), block_size=16)
    batch.step(33, spread=2)
    step = batch.step(1)
    assert counted.of(step) == (1, 8 * 34)
    assert step.plan.scratch.get("bytes", 0) == 0, "nothing was gathered"


def test_one_long_row_is_read_in_place(counted):
    batch = Batch(1, Shape(1, 2), block_size=16)
    batch.step(1000)
    step = batch.step(1)
    assert counted.of(step) == (1, 1001)
    assert step.plan.scratch.get("bytes", 0) == 0


def test_short_leftovers_of_all_rows_are_one_gathered_tile(counted):
    batch = Batch(6, Shape(1, 2), block_size=4, scattered=True)
    batch.step([3, 9, 27, 5, 14, 8], q_len=27)
    tiles, tokens = counted.of(batch.step(1))
    assert (tiles, tokens) == (1, 6 * 28), "padded to the longest"


def test_a_windowed_decode_reads_no_more_than_the_window(counted):
    batch = Batch(3, Shape(1, 2), block_size=4, window=10)
    batch.step([50, 3, 31], q_len=50)
    tiles, tokens = counted.of(batch.step(1))
    assert tiles <= 4 and tokens <= 3 * 10


def test_a_finished_row_is_not_read(counted):
    batch = Batch(4, Shape(1, 2), block_size=16)
    batch.step(300)
    batch.finish(1, 3)
    _, tokens = counted.of(batch.step(1))
    assert tokens == 2 * 301


def test_a_plan_is_scheduled_once_for_all_layers(monkeypatch):
    calls = []
    schedule = torch_strided._schedule
    monkeypatch.setattr(torch_strided, "_schedule", lambda *args: calls.append(1) or schedule(*args))
    step = forked(4, 100, own=2)
    for _ in range(5):
        torch_strided.attend(step.query, step.key, step.value, step.store.memory, step.plan, step.call())
    assert len(calls) == 1


def test_the_pieces_of_a_decode_step_cover_every_token_of_every_row_once(thresholds):
    """Read off the schedule itself: no token is left out, none is read twice for one row, none is another row's."""
    for life, size in itertools.product(LIVES.values(), BLOCK_SIZES):
        for step in life(size):
            if step.query.shape[2] == 1:
                schedule = schedule_of(step)
                seen: dict[int, list[int]] = {row: [] for row in range(step.plan.batch)}
                layers: set[tuple[int, int]] = set()
                for piece in schedule.pieces:
                    for place, row in enumerate(piece.rows):
                        seen[row].extend(slots_of(piece, place))
                        for part in range(piece.parts):
                            assert (row, piece.layer + part) not in layers, "two pieces write one merge layer"
                            layers.add((row, piece.layer + part))
                for row, slots in seen.items():
                    right = step.plan.token_slots(row, 0, step.plan.past[row] + step.plan.new[row])
                    assert sorted(slots) == sorted(right)


def slots_of(piece, place: int) -> list[int]:
    """Slots a piece reads for the row at `place` among its rows, the padding left out."""
    if piece.slots is not None:
        slots = piece.slots if piece.shared else piece.slots.view(len(piece.rows), -1)[place]
        return [slot for slot in slots.tolist() if slot]
    if piece.shared:
        starts = [piece.start + part * piece.stride for part in range(piece.parts)]
    else:
        starts = [piece.start + place * piece.stride]
    return [slot for start in starts for slot in range(start, start + piece.tokens)]


def test_backends_are_chosen_by_name():
    assert choose("reference").attend is reference.attend
    assert choose("torch").attend is torch_strided.attend
    assert choose("auto").attend is native.attend


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_triton_backend_without_a_gpu_is_refused():
    with pytest.raises(RuntimeError, match=r"backend='triton' needs a GPU"):
        choose("triton")
