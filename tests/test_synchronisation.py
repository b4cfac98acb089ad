"""What a decode step costs the host: no wait for the device, and little Python, the same for every layer.

On a GPU that is not there (`faraway`): every operation that would wait for a real one is counted, and the code takes
the ways that it takes on one.
"""

import copy
import gc
import inspect
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from faraway import far, machine, stand_ins
from models import build, likely_eos, pair, prompts, run, vouch_for, with_cache
from transformers import StoppingCriteria

import hf_paged
from hf_paged import PagedCache, backends

pytest.importorskip("triton")

from hf_paged.backends import triton

PACKAGE = str(Path(hf_paged.__file__).parent)
# Calls of functions of this package in a decode step: what each further layer adds, launchers not counted.
CALLS_OF_A_LAYER = 26


@pytest.fixture(autouse=True)
def _launch_nothing(monkeypatch):
    choose = backends.choose
    kernels = backends.Backend(triton.attend, triton.writer)
    monkeypatch.setattr(backends, "choose", lambda name, size: kernels if name == "triton" else choose(name, size))
    monkeypatch.setattr(triton, "LONG_PREFIX", 4)
    stand_ins(triton, monkeypatch)


class Steps(StoppingCriteria):
    """Tells the machine where a step ends: 0 is the prefill, and what comes behind the last answer is past the end."""

    def __init__(self, here):
        self.here = here

    def __call__(self, input_ids, scores, **kwargs):
        self.here.step += 1
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def waits(plain, paged, inputs, cache=None, **options):
    """Generate on the machine. The ids are those of the unpatched model.

    Returns:
        Waits that this package asked for: of the prefill, those of each decode step, and of the end of the call.
    """
    expected = run(plain, inputs, **options)
    vouch_for(paged, Steps)
    with machine(paged) as here:
        out = run(paged, far(inputs), **options, **(cache or {}), stopping_criteria=[Steps(here)])
        ids = getattr(out, "sequences", out)
        assert torch.equal(ids.inner, getattr(expected, "sequences", expected))
        del out
    counts = Counter(step for package, step, *_ in here.waits if package == "hf_paged")
    assert here.step > 3
    return counts[0], [counts[step] for step in range(1, here.step)], counts[here.step]


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "everything returned": {"return_dict_in_generate": True, "output_logits": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_no_decode_step_waits(family, mode):
    """The prompt is read, once; the end of a call, at which the prefix index is told, may read what was generated."""
    plain, paged = pair(family, block_size=4, backend="triton")
    for inputs in (prompts(5, 11), prompts(9)):
        prefill, steps, end = waits(plain, paged, inputs, max_new_tokens=8, **MODES[mode])
        assert (prefill, set(steps), end <= 1) == (1, {0}, True)
    assert paged.paged_stats().fallbacks == {}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_step_of_beam_search_waits_once(family):
    """For the indices by which the tables, which are the host's, change places."""
    plain, paged = pair(family, block_size=4, backend="triton")
    prefill, steps, _ = waits(plain, paged, prompts(5, 11), max_new_tokens=8, num_beams=3)
    assert (prefill, set(steps)) == (1, {1})


@pytest.mark.parametrize("inputs", [prompts(12, 12), prompts(12), prompts(5, 12, 12)], ids=["equal", "one", "ragged"])
@pytest.mark.parametrize(
    "options", [{}, {"packed_prefill": False}, {"prompt_once": False}, {"prefix_caching": False}], ids=str
)
def test_a_prefill_waits_once(options, inputs):
    if inputs["input_ids"].shape[0] == 2:
        inputs["input_ids"][1] = inputs["input_ids"][0]
    plain, paged = pair("llama", block_size=4, backend="triton", **options)
    assert waits(plain, paged, inputs, max_new_tokens=5)[:2] == (1, [0] * 4)
    again = waits(plain, paged, inputs, max_new_tokens=5, prefill_chunk_size=5)
    assert again[:2] == (1, [0] * 4)


def test_a_cache_that_was_passed_in():
    """It outlives the call, so its mask is not taken on trust: what `generate()` appends to a mask that was read is."""
    plain, paged = pair("llama", block_size=4, backend="triton")
    cache = PagedCache(paged.config, pool=paged.paged_pool)
    prefill, steps, _ = waits(plain, paged, prompts(5, 11), max_new_tokens=8, cache=with_cache(cache))
    assert (prefill, set(steps)) == (1, {0})
    cache.check()
    with machine(paged):
        cache.reset()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_rows_that_stop_give_their_blocks_back_without_a_wait(prefix_caching, monkeypatch):
    """Which rows, and what they hold, arrives while the next steps are prepared."""
    freed = []
    finish = hf_paged.state.CacheState.finish_rows

    def finish_rows(self, rows, ids=None):
        freed.extend((self.columns, row) for row in rows)
        finish(self, rows, ids)

    monkeypatch.setattr(hf_paged.state.CacheState, "finish_rows", finish_rows)
    plain = likely_eos(build("llama"), 3.0)
    inputs, options = prompts(5, 11, 8, 9), dict(max_new_tokens=16, do_sample=True)
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4, backend="triton", prefix_caching=prefix_caching)
    near = hf_paged.patch(copy.deepcopy(plain), block_size=4, prefix_caching=prefix_caching)
    ids = run(near, inputs, **options)
    at_once, freed[:] = list(freed), []
    assert len({columns for columns, _ in at_once}) > 1, "rows stop at unlike times"
    prefill, steps, _ = waits(plain, paged, inputs, **options)
    assert (prefill, set(steps)) == (1, {0})
    later = 2 if prefix_caching else 1  # asks until an event is there (`faraway.Event`)
    assert freed == [(columns + later, row) for columns, row in at_once if columns + later < ids.shape[1]]
    found = [model.paged_stats().cached_blocks for model in (near, paged)]
    assert (found[0] == 0) == (found[1] == 0) == (not prefix_caching)


# -- whose mask it is --------------------------------------------------------------------------------------------------


def masks_read(monkeypatch):
    """Notes, of each forward, whether its mask was looked at."""
    seen = []
    read = hf_paged.state.CacheState._read_padding

    def note(self, padding, *rest):
        seen.append(not (self.trusted or self.vouched))
        return read(self, padding, *rest)

    monkeypatch.setattr(hf_paged.state.CacheState, "_read_padding", note)
    return seen


def test_a_mask_of_ones_appended_is_not_read_again(monkeypatch):
    seen = masks_read(monkeypatch)
    plain, paged = pair("llama", block_size=4)
    options = {"return_dict_in_generate": True, "max_new_tokens": 6}
    out = run(paged, prompts(5, 11), **options)
    assert torch.equal(out.sequences, run(plain, prompts(5, 11), **options).sequences)
    assert seen == [False] * 5, "the prefill is packed and has no mask"


def test_a_mask_that_hides_tokens_is_read_after_the_call(monkeypatch):
    """Nobody vouches for what comes after `generate()`, nor for a step whose inputs are not `generate()`'s."""
    plain, paged = pair("llama", block_size=4)
    inputs = prompts(5, 11)
    with torch.no_grad():
        caches = []
        for model in (plain, paged):
            out = run(model, inputs, max_new_tokens=4, return_dict_in_generate=True)
            mask = torch.ones(2, 15, dtype=torch.long)
            mask[:, 6:13] = 0
            mask[0, :6] = 0
            cache = getattr(out, hf_paged.compat.CACHE_ARGUMENT)
            caches.append(model(out.sequences[:, -1:], attention_mask=mask, **with_cache(cache)).logits)
    torch.testing.assert_close(caches[0], caches[1], atol=1e-4, rtol=1e-4)


def test_a_mask_that_hides_tokens_is_read_in_every_step(monkeypatch):
    seen = masks_read(monkeypatch)
    plain, paged = pair("llama", block_size=4)
    ids = prompts(9)["input_ids"]
    outs = []
    for model in (plain, paged):
        cache = (
            PagedCache(paged.config, pool=paged.paged_pool)
            if model is paged
            else hf_paged.compat.DynamicCache(config=model.config)
        )
        with torch.no_grad():
            model(ids[:, :6], **with_cache(cache))
        seen.clear()
        mask = torch.ones_like(ids)
        mask[:, 2:4] = 0
        outs.append(run(model, {"input_ids": ids, "attention_mask": mask, **with_cache(cache)}, max_new_tokens=5))
    assert torch.equal(*outs)
    assert seen == [True] * 5


def test_generate_sees_the_signature_it_knows():
    plain, paged = pair("llama")
    name = "prepare_inputs_for_generation"
    assert inspect.signature(getattr(paged, name)) == inspect.signature(getattr(plain, name))
    hf_paged.unpatch(paged)
    assert name not in vars(paged)
    mine = paged.prepare_inputs_for_generation
    paged.prepare_inputs_for_generation = mine
    hf_paged.unpatch(hf_paged.patch(paged))
    assert vars(paged)[name] is mine, "somebody else's is left alone"


# -- Python ------------------------------------------------------------------------------------------------------------


def python_of_a_step(family, layers, rows, context, kind):
    """What this package executes in one decode step: calls of its functions, or all its bytecode instructions.

    Returns:
        The count in the fourth decode step.
    """
    lengths = [context] * rows
    overrides = {"num_hidden_layers": layers, "max_position_embeddings": 512}
    if family == "gemma3":
        overrides["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    _, paged = pair(family, overrides=overrides, block_size=64, backend="triton")
    counts = Counter()

    with machine(paged) as here:

        def trace(frame, event, argument):
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            counts[here.step, "call"] += 1
            frame.f_trace_opcodes, frame.f_trace_lines = kind == "opcode", False
            return count if kind == "opcode" else None

        def count(frame, event, argument):
            counts[here.step, event] += 1
            return count

        before = sys.gettrace()
        gc.collect()
        gc.disable()  # what other tests have left behind gives its blocks back when it is collected
        sys.settrace(trace)
        try:
            run(paged, far(prompts(*lengths)), max_new_tokens=6, min_new_tokens=6, stopping_criteria=[Steps(here)])
        finally:
            sys.settrace(before)
            gc.enable()
    return counts[4, kind]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_layer_costs_few_calls_of_python(family):
    """Planning is a step's; what each further layer adds is a small constant."""
    two, four, six = (python_of_a_step(family, layers, 2, 9, "call") for layers in (2, 4, 6))
    assert six - four == four - two
    assert 0 < (six - two) / 4 <= CALLS_OF_A_LAYER


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_layer_costs_the_same_whatever_the_rows_and_the_context(family):
    """To the instruction."""
    costs = {}
    for rows, context in ((1, 9), (5, 9), (1, 50)):
        two, six = (python_of_a_step(family, layers, rows, context, "opcode") for layers in (2, 6))
        costs[rows, context] = six - two
    assert len(set(costs.values())) == 1, costs
