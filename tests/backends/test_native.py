"""The compiled backend: how its kernel is made and kept, and how a step is cut. What it computes: test_backends.py."""

import ctypes
import os
import shutil
import stat
import threading
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged
from hf_paged import KVPool, PagedCache, PagedConfig, compat
from hf_paged.backends import native, reference, torch_strided
from hf_paged.cpu_kernels import library as compiled

from .builders import Batch, Shape, Step

compiler = pytest.mark.skipif(
    not any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["cc", "gcc", "clang"])),
    reason="no C compiler here",
)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def unmade(monkeypatch, tmp_path):
    """As in a process that has not asked for the kernel yet, with a cache folder of its own."""
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_loaded", None)
    monkeypatch.setattr(compiled, "_failure", None)
    return tmp_path / "cache" / f"kernels-{os.getuid()}"


def decode_step(rows: int = 3, prompt: int = 40) -> Step:
    batch = Batch(rows, Shape(2, 3), block_size=4)
    batch.step(prompt)
    return batch.step(1)


def agree(step: Step) -> None:
    torch.testing.assert_close(step.run(native.attend), step.run(reference.attend), atol=2e-5, rtol=2e-5)


@compiler
def test_a_decode_step_is_the_kernels(monkeypatch):
    monkeypatch.setattr(torch_strided, "attend", None)
    agree(decode_step())


@compiler
def test_the_kernel_is_made_once_and_found_by_the_next_process(unmade, monkeypatch):
    assert compiled.library() is compiled.library() is not None
    (made,) = unmade.iterdir()
    monkeypatch.setattr(compiled, "_loaded", None)
    monkeypatch.setattr(compiled, "_compile", None)
    assert compiled.library() is not None
    assert list(unmade.iterdir()) == [made]


@compiler
def test_a_kernel_made_with_other_flags_is_another_one():
    words = compiled._compiler()
    assert compiled._fingerprint(words) == compiled._fingerprint(words) != compiled._fingerprint([*words, "-DX"])


@compiler
def test_threads_that_ask_together_get_one_kernel(unmade, monkeypatch):
    made = []
    compile_ = compiled._compile
    monkeypatch.setattr(compiled, "_compile", lambda *args: made.append(1) or compile_(*args))
    threads = [threading.Thread(target=compiled.library) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and compiled.library() is not None


@compiler
def test_a_damaged_file_is_made_again(unmade, monkeypatch):
    compiled.library()
    (made,) = unmade.iterdir()
    made.unlink()  # not written over: this process has it loaded
    made.write_bytes(b"\x7fELF, and no more")
    monkeypatch.setattr(compiled, "_loaded", None)
    assert compiled.library() is not None
    ctypes.CDLL(str(made))


@compiler
def test_without_a_place_to_keep_it_the_kernel_serves_this_process(unmade):
    unmade.parent.write_text("a file where the folder should be")
    assert compiled.library() is not None
    agree(decode_step())


@pytest.mark.parametrize("how", ["missing", "failing", "mute"])
def test_without_a_compiler_pytorch_attends_and_asking_for_the_kernel_is_an_error(how, unmade, monkeypatch, tmp_path):
    cc = tmp_path / "cc"
    if how != "missing":
        # One that fails, and one that claims success and makes nothing.
        script = f'case "$1" in --version) echo 1;; *) echo broken >&2; exit {how == "failing":d};; esac'
        cc.write_text("#!/bin/sh\n" + script)
        cc.chmod(cc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(cc))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert compiled.library() is None and compiled.library() is None
    assert ["PyTorch does their work" in str(entry.message) for entry in said] == [True] * (how != "missing")
    agree(decode_step())
    with pytest.raises(RuntimeError, match=r"backend='native'.*(not found|failed).*Install a C compiler"):
        KVPool(LlamaConfig(num_hidden_layers=1), PagedConfig(backend="native"))
    assert KVPool(LlamaConfig(num_hidden_layers=1), PagedConfig(backend="auto")).backend is native.attend
    if unmade.exists():
        assert not list(unmade.iterdir()), "nothing half-made stays"


@compiler
def test_what_the_kernel_does_not_know_is_pytorchs(monkeypatch):
    asked = []
    attend = torch_strided.attend
    monkeypatch.setattr(torch_strided, "attend", lambda *args: asked.append(1) or attend(*args))
    step = decode_step()
    for call, dtype in ((step.call(softcap=2.0), torch.float32), (step.call(), torch.float16)):
        step.query = step.query.to(dtype)
        step.plan.scratch.clear()
        step.run(native.attend, call)
    assert len(asked) == 2


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 50)), min_size=1, max_size=8),
    st.integers(1, 120),
)
def test_cut_runs_are_the_runs_in_order_and_no_part_is_too_long(runs, longest):
    def slots(runs):
        return [slot for first, count in runs for slot in range(first, first + count)]

    parts = native._cut(runs, longest)
    lengths = [len(slots(part)) for part in parts]
    assert [slot for part in parts for slot in slots(part)] == slots(runs)
    assert max(lengths) <= longest and len(parts) == -(-sum(lengths) // longest)


@compiler
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_every_row_reads_each_of_its_tokens_once(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(native, "SHORTEST_TASK", 5)
    monkeypatch.setattr(native, "WORTH_THREADS", 0)
    monkeypatch.setattr(torch_strided, "LONG_PREFIX", 3)
    batch = Batch(2, Shape(1, 2), block_size=4, scattered=True)
    batch.step([37, 8], q_len=37)
    batch.repeat(3)
    batch.finish(5)
    for _ in range(6):
        step = batch.step(1)
    work = native._tasks(step.plan, None)
    ints, (tasks, rows, runs, ends, partials, targets, lengths) = work.ints.tolist(), work.offsets
    seen: list[list[int]] = [[] for _ in range(6)]
    given_by: list[list[int]] = [[] for _ in range(6)]
    for task in range(work.num_tasks):
        first_row, end_row, first_run, end_run, partial, position = ints[tasks + 6 * task : tasks + 6 * task + 6]
        for place, row in enumerate(ints[rows + first_row : rows + end_row]):
            given_by[row].append(partial + place)
            here = []
            for run in range(first_run, end_run):
                first, count = ints[runs + 2 * run : runs + 2 * run + 2]
                here.extend(range(first, first + count))
            assert here == step.plan.token_slots(row, position, position + len(here))
            seen[row].extend(here)
    for row in range(6):
        length = step.plan.past[row] + step.plan.new[row]
        right = step.plan.token_slots(row, 0, length) if step.plan.live[row] else []
        assert sorted(seen[row]) == sorted(right)
        first, end = ints[ends + row : ends + row + 2]
        assert sorted(ints[partials + first : partials + end]) == sorted(given_by[row])
        assert ints[targets + row] == (right[-1] if right else -1)
        assert ints[lengths + row] == length
    assert any(ints[tasks + 6 * task + 1] - ints[tasks + 6 * task] == 3 for task in range(work.num_tasks))


# -- a step that another layer repeats ---------------------------------------------------------------------------------


class Named(torch.Tensor):
    """A subclass of somebody's."""


UNLIKE = {
    "rows fewer": lambda tensor: tensor[:1],
    "rows more": lambda tensor: torch.cat([tensor, tensor]),
    "heads fewer": lambda tensor: tensor[:, :1],
    "heads more": lambda tensor: torch.cat([tensor, tensor], 1),
    "dim smaller": lambda tensor: tensor[..., :-1],
    "rows and heads the other way round": lambda tensor: tensor.transpose(0, 1),
    "heads and dim the other way round": lambda tensor: tensor.transpose(1, 3),
    "one dim more": lambda tensor: tensor.unsqueeze(0),
    "two tokens": lambda tensor: torch.cat([tensor, tensor], 2),
    "dtype": lambda tensor: tensor.double(),
    "device": lambda tensor: tensor.to("meta"),
    "subclass": lambda tensor: tensor.as_subclass(Named),
}


@compiler
@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("backend", [native, torch_strided], ids=["native", "torch"])
def test_a_step_is_not_repeated_for_tensors_that_are_unlike(backend, which, name, short_pieces):
    """The kernel reads where it is told to: a key of fewer rows would be read past its end."""
    step = decode_step(rows=3, prompt=39)
    step.run(backend.attend)
    replay = step.plan.replay
    tensors = {"query": step.query, "key": step.key, "value": step.value}
    assert replay.repeat(*tensors.values(), step.store) is not None
    tensors[which] = UNLIKE[name](tensors[which])
    memory = step.store.memory
    before = memory.keys.clone(), memory.values.clone()
    assert replay.repeat(*tensors.values(), step.store) is None
    torch.testing.assert_close((memory.keys, memory.values), before, rtol=0, atol=0, equal_nan=True)


@compiler
def test_a_step_is_not_repeated_where_somebody_wants_gradients():
    step = decode_step(rows=2)
    step.run(native.attend)
    with torch.enable_grad():
        for which in range(3):
            tensors = [step.query, step.key, step.value]
            tensors[which] = tensors[which].clone().requires_grad_()
            assert step.plan.replay.repeat(*tensors, step.store) is None


@compiler
def test_a_query_that_does_not_fit_its_step_is_an_error():
    step = decode_step(rows=3)
    whole = step.query
    for query in (whole[:1], torch.cat([whole, whole]), whole[:, :3], whole[..., :8]):
        step.query = query
        with pytest.raises(ValueError, match="does not fit a step of 3 rows"):
            step.run(native.attend)
    step.query = whole
    with pytest.raises(ValueError, match="slopes of shape"):
        step.run(native.attend, step.call(slopes=torch.ones(2)))
    with pytest.raises(ValueError, match="sinks of shape"):
        step.run(native.attend, step.call(sinks=torch.ones(5)))


@compiler
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_key_of_one_row_in_a_step_of_three_is_an_error_as_without_us(layer, backend):
    class Short(PagedCache):
        def update(self, key, value, index, *args, **kwargs):
            if index == layer and key.shape[2] == 1:
                key, value = key[:1].clone(), value[:1].clone()
            return super().update(key, value, index, *args, **kwargs)

    sizes = dict(hidden_size=32, intermediate_size=16, num_attention_heads=4, num_key_value_heads=2, vocab_size=50)
    model = hf_paged.patch(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval(), backend=backend)
    cache = Short(model.config, pool=model.paged_pool)
    ids = torch.arange(60).view(3, 20) % 50
    model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        model(ids[:, :1], use_cache=True, **{compat.CACHE_ARGUMENT: cache})
