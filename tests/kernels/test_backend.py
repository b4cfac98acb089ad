"""The Triton backend on the batches that the other backends are tested on."""

import random

import pytest
import torch
from backends.builders import LIVES, Batch, PaddedBatch, Shape, Step, beams, nested, poison, ragged

from hf_paged.backends import choose, reference, torch_strided
from hf_paged.backends import triton as backend
from hf_paged.store import LayerStore
from hf_paged.triton_kernels.common import send


@pytest.fixture(autouse=True)
def _only_kernels(monkeypatch):
    """A few tokens are a long prefix, and nothing goes to the PyTorch backend unless a test says so."""
    monkeypatch.setattr(backend, "LONG_PREFIX", 4)

    def refuse(*_):
        raise AssertionError("left to the PyTorch backend")

    monkeypatch.setattr(torch_strided, "attend", refuse)
    with torch.no_grad():
        yield


def agree(step: Step, **options) -> None:
    call = step.call(**options)
    out, right = step.run(backend.attend, call), step.run(reference.attend, call)
    assert out.shape == right.shape and out.dtype == right.dtype
    close = 2e-5 if step.query.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out, right, atol=close, rtol=close)


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("life", LIVES.values(), ids=list(LIVES))
def test_prefill_extend_and_decode_equal_the_reference(life, size):
    for step in life(size):
        agree(step)


@pytest.mark.parametrize("options", [dict(softcap=1.0), dict(band=5), dict(sinks=True)], ids=str)
@pytest.mark.parametrize("life", [ragged, nested])
def test_options(life, options):
    for step in life(4):
        sinks = {"sinks": torch.linspace(-1, 3, 4)} if "sinks" in options else {}
        agree(step, **{**options, **sinks})


@pytest.mark.parametrize(("window", "band"), [(1, None), (5, 3), (9, None)])
def test_windows_and_the_blocks_that_left_them(window, band):
    for step in ragged(2, window=window):
        agree(step, band=band)


def test_chunks():
    batch = Batch(2, window=8, chunked=True)
    for q_len in (3, 1, 2, 2, *[1] * 9):
        agree(batch.step(q_len), band=8)


def test_queries_of_several_chunks_are_left_to_the_other_backend(monkeypatch):
    step = Batch(2, window=8, chunked=True).step([9, 3])
    assert not backend._has_kernels(step.query, step.store.memory, step.plan, step.call(band=8))


@pytest.mark.parametrize("shape", [Shape(2, 3, 40, 24), Shape(1, 7, 80), Shape(2, 2, 16, dtype=torch.float16)], ids=str)
def test_shapes(shape):
    for step in ragged(4, shape):
        agree(step)


def test_a_store_in_another_dtype():
    for step in ragged(4, Shape(stored_as=torch.float16)):
        agree(step)


def test_rows_that_share_a_prefix_attend_to_it_as_one_tile(monkeypatch):
    spans = []
    shared = backend.shared_attention
    monkeypatch.setattr(
        backend, "shared_attention", lambda *args, **options: spans.append(args[5]) or shared(*args, **options)
    )
    batch = Batch(1, Shape(1, 2))
    batch.step(21)
    batch.repeat(3)
    agree(batch.step(1))
    assert [packed.tiles.tolist() for packed in spans] == [[[0, 3, 0, 20, 0]]]
    assert spans[0].covered.tolist() == [20, 20, 20]


def test_unused_slots_may_hold_anything():
    for step in beams(4, scattered=True):
        assert poison(step.store, step.plan.tables, float("inf"))
        agree(step)


@pytest.mark.parametrize("columns", [["abc..", ".abcd", "abcde"], ["ab..c", "abcde", "..abc"]], ids=["right", "middle"])
def test_pads_on_any_side(columns):
    batch = PaddedBatch(3)
    agree(batch.step(columns))
    agree(batch.step(["a", ".", "b"]))
    agree(batch.step(["a.b", "..c", "def"]))


def written_alike(step: Step) -> None:
    """Both ways to write leave the same store, bit for bit."""
    memory = step.store.memory
    right = memory.keys.clone(), memory.values.clone()
    for row, (past, new) in enumerate(zip(step.plan.past, step.plan.new, strict=True)):
        for slot in step.plan.token_slots(row, past, past + new):
            memory.key_slots[:, slot] = memory.value_slots[:, slot] = float("nan")
    assert not torch.equal(memory.keys, right[0])
    step.plan.scratch.clear()
    assert backend.write(step.key, step.value, memory, step.plan)
    for written, expected in zip((memory.keys, memory.values), right, strict=True):
        torch.testing.assert_close(written, expected, atol=0, rtol=0, equal_nan=True)


def test_write_puts_tokens_where_the_plan_does():
    for life in LIVES.values():
        for step in life(4):
            written_alike(step)
    batch = PaddedBatch(3)
    for columns in (["ab..c", "abcde", "..abc"], ["a", ".", "b"], ["a.b", "..c", "def"]):
        written_alike(batch.step(columns))


def test_write_to_a_store_in_another_dtype():
    for step in ragged(4, Shape(stored_as=torch.float16)):
        written_alike(step)


def test_write_of_a_packed_forward():
    batch = Batch(3, block_size=4)
    step = batch.step([6, 2, 9], q_len=9)
    for name in ("key", "value"):
        rows = [tensor[:, 9 - new :] for tensor, new in zip(getattr(step, name), step.plan.new, strict=True)]
        setattr(step, name, torch.cat(rows, 1).unsqueeze(0))
    step.plan.offsets, step.plan.q_len = [0, 6, 8], 17
    written_alike(step)


def test_windows_with_inner_pads_are_left_to_the_other_backend(monkeypatch):
    batch = PaddedBatch(2, window=4)
    step = batch.step(["ab..cde", "abcdefg"])
    with pytest.raises(AssertionError, match="left to the PyTorch backend"):
        step.run(backend.attend)


def test_float64_is_left_to_the_other_backend():
    step = Batch(1, Shape(dtype=torch.float64)).step(3)
    with pytest.raises(AssertionError, match="left to the PyTorch backend"):
        step.run(backend.attend)


def test_slopes_are_left_to_the_other_backend():
    step = Batch(1).step(3)
    with pytest.raises(AssertionError, match="left to the PyTorch backend"):
        step.run(backend.attend, step.call(slopes=torch.linspace(0.1, 1, 4)))


def test_many_rows_in_one_packed_forward():
    batch = Batch(3, block_size=4)
    batch.step([5, 0, 13], q_len=13)
    step = batch.step([6, 2, 9], q_len=9)
    new = step.plan.new
    step.query = torch.cat([step.query[row : row + 1, :, 9 - count :] for row, count in enumerate(new)], 2)
    step.plan.offsets, step.plan.q_len = [0, 6, 8], 17
    agree(step)


def test_layers_share_what_is_sent_to_the_device(monkeypatch):
    """One table, one transfer of numbers and one of spans a forward, however many layers; and nothing is read back."""
    step = list(nested(4))[2]
    step.plan.scratch.clear()
    made = []
    for name in ("_make_rows", "pack_spans"):
        function = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *args, f=function, n=name: made.append(n) or f(*args))
    call = step.call()
    backend.attend(step.query, step.key, step.value, step.store.memory, step.plan, call)
    assert sorted(made) == ["_make_rows", "pack_spans"]
    for _ in range(3):
        backend.attend(step.query, step.key, step.value, step.store.memory, step.plan, call)
    assert len(made) == 2


def test_layers_of_unlike_heads_and_dims_share_one_plan():
    for step in list(nested(4))[-2:]:  # tables as they are at the end
        for shape in (Shape(), Shape(1, 4), Shape(2, 3, 24, 8)):
            store = LayerStore(
                torch.zeros(1, shape.kv_heads, 1, shape.key_dim),
                torch.zeros(1, shape.kv_heads, 1, shape.value_dim or shape.key_dim),
                step.store.block_size,
            )
            store.ensure(step.store.memory.num_blocks)
            for tensor in (store.memory.keys, store.memory.values):
                tensor[:, 1:] = torch.randn(tensor[:, 1:].shape)
            batch, _, q_len, _ = step.query.shape
            query = torch.randn(batch, q_len, shape.num_heads, shape.key_dim).transpose(1, 2)
            arguments = (query, None, None, store.memory, step.plan, step.call())
            torch.testing.assert_close(backend.attend(*arguments), reference.attend(*arguments), atol=2e-5, rtol=2e-5)


def test_a_device_table_follows_its_rows(monkeypatch):
    sent = []
    update = backend.update_table
    monkeypatch.setattr(backend, "update_table", lambda table, new: sent.append(new.shape[1]) or update(table, new))
    source = random.Random(0)
    rows = [[source.randrange(1000) for _ in range(source.randrange(12))] for _ in range(5)]
    table = backend.DeviceTable(torch.device("cpu"))
    for _ in range(60):
        for blocks in rows:
            move = source.randrange(5)
            if move == 0:
                blocks.append(source.randrange(1000))
            elif move == 1 and blocks:
                blocks[source.randrange(len(blocks))] = source.randrange(1000)
            elif move == 2:
                del blocks[:1]
            elif move == 3:
                del blocks[-2:]
        if source.random() < 0.2:
            rows = [rows[source.randrange(len(rows))].copy() for _ in range(source.randrange(1, 7))]
        tensor = table.update(rows)
        for blocks, on_device in zip(rows, tensor.tolist(), strict=False):
            assert on_device[: len(blocks)] == blocks
    assert sent, "never updated in place"


def test_a_row_that_grows_sends_one_entry(monkeypatch):
    sent = []
    monkeypatch.setattr(backend, "update_table", lambda table, new: sent.append(new.tolist()))
    table = backend.DeviceTable(torch.device("cpu"))
    rows = [[3, 4, 5], [6]]
    table.update(rows)
    table.update(rows)
    rows[1].append(9)
    table.update(rows)
    assert sent == [[[1], [1], [9]]]


def test_numbers_are_sent_at_aligned_addresses():
    parts = [[1, 2, 3], [], [4, 5, 6, 7, 8], [9]]
    sent = send(parts, "cpu")
    assert [part.tolist() for part in sent] == parts
    assert [part.storage_offset() % 4 for part in sent] == [0, 0, 0, 0]


def test_the_backend_is_chosen_by_name():
    assert choose("triton") == (backend.attend, backend.writer)
