"""`torch.compile(model.forward)`: the same tokens, no graph break in attention, no recompile a step after warm-up."""

import copy
import gc
import shutil
import sys
from contextlib import contextmanager

import pytest
import torch
from models import EOS, assert_close, build, likely_eos, pair, prompts, run, vouch_for, with_cache
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

import hf_paged
from hf_paged import compat
from hf_paged.attention import NAME
from hf_paged.commands import tiny_models
from hf_paged.traced import HANDLE, Handle

WAYS = [
    {},
    {"num_beams": 4},
    {"num_beams": 3, "num_return_sequences": 2},
    {"do_sample": True, "num_return_sequences": 2},
]


# As few layers as show it: each takes seconds to compile.
ONE_OF_EACH = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
FEW = {"gemma2": ONE_OF_EACH, "gemma3": ONE_OF_EACH, "gpt_oss": ONE_OF_EACH}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model, backend="eager", fullgraph=True, **options):
    """Compile a model's forward, as a user does. Returns the model."""
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=fullgraph, **options)
    return model


def compiled_pair(family, backend="eager", fullgraph=True, **options):
    """`(unpatched model, patched and compiled copy)`; options as of `torch.compile`."""
    plain, paged = pair(family, overrides=FEW.get(family), block_size=4)
    return plain, compiled(paged, backend, fullgraph, **options)


@contextmanager
def no_recompiles():
    """Anything that is compiled in the `with` block fails the test."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        before = counters["stats"]["unique_graphs"]
        yield
    assert counters["stats"]["unique_graphs"] == before
    assert not counters["graph_break"]


def agree(plain, paged, inputs, **kwargs):
    """Same ids and logits, and nothing held afterwards."""
    everything = {"return_dict_in_generate": True, "output_logits": True}
    expected = run(plain, inputs, **kwargs, **everything)
    got = run(paged, inputs, **kwargs, **everything)
    assert_close(expected, got)
    del got
    assert torch.equal(expected.sequences, run(paged, inputs, **kwargs))
    gc.collect()  # the compiler makes reference cycles around what it has traced
    paged.paged_pool.check()
    assert paged.paged_stats().used_blocks == 0


def decode(model, cache, ids, steps, mask=None):
    """Greedy steps by forward calls that give no positions, so that the model asks the cache. Returns the ids."""
    new, mask = ids, torch.ones_like(ids) if mask is None else mask
    for _ in range(steps):
        with torch.no_grad():
            out = model(input_ids=new, attention_mask=mask, use_cache=True, **with_cache(cache))
        new = out.logits[:, -1:].argmax(-1)
        ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    return ids


# -- exact, in one graph -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_generates_the_same_without_a_graph_break_or_a_recompile_a_step(family):
    """`fullgraph=True` lets any graph break fail. Left pads; the window of the sliding layers fills and moves on."""
    plain, paged = compiled_pair(family)
    inputs = prompts(3, 9, 12)
    for options in WAYS:
        agree(plain, paged, inputs, max_new_tokens=6, **options)
    with no_recompiles():
        for options in WAYS:
            agree(plain, paged, inputs, max_new_tokens=17, **options)
    assert not paged.paged_stats().fallbacks


def test_the_same_through_aot_autograd():
    plain, paged = compiled_pair("gemma3", "aot_eager")
    for options in ({}, {"num_beams": 3}):
        agree(plain, paged, prompts(2, 7), max_new_tokens=11, **options)
    assert not paged.paged_stats().fallbacks


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_same_through_inductor():
    plain, paged = pair("llama", overrides={"num_hidden_layers": 1}, block_size=4)
    compiled(paged, "inductor", dynamic=True)
    expected = run(plain, prompts(3, 9), max_new_tokens=5)
    assert torch.equal(expected, run(paged, prompts(3, 9), max_new_tokens=5))
    assert not paged.paged_stats().fallbacks


def test_rows_that_finish_and_are_freed():
    plain, paged = compiled_pair("llama")
    for model in (plain, paged):
        likely_eos(model, 3.0, EOS)
    agree(plain, paged, prompts(3, 8, 11), max_new_tokens=20, do_sample=True)


def test_right_and_middle_pads():
    plain, paged = compiled_pair("gemma3")
    inputs = prompts(12, 12, 7, side="right")
    inputs["attention_mask"][0, 3:7] = 0
    agree(plain, paged, inputs, max_new_tokens=8)


def test_softcap_and_sinks():
    for family in ("gemma2", "gpt_oss"):
        torch._dynamo.reset()
        plain, paged = compiled_pair(family)
        agree(plain, paged, prompts(3, 9), max_new_tokens=5)


def test_every_backend_is_behind_the_op():
    for backend in ("reference", "torch"):
        torch._dynamo.reset()
        plain, paged = pair("llama", overrides={"num_hidden_layers": 1}, backend=backend, block_size=4)
        agree(plain, compiled(paged), prompts(3, 9), max_new_tokens=5)


# -- what recompiles, and what does not --------------------------------------------------------------------------------


def test_another_cache_and_another_length_are_no_recompile():
    plain, paged = compiled_pair("gemma3")
    decode(paged, hf_paged.PagedCache(paged.config), prompts(9)["input_ids"], 4)
    decode(paged, hf_paged.PagedCache(paged.config), prompts(5)["input_ids"], 2)
    with no_recompiles():
        for length in (7, 12):
            ids = prompts(length, seed=length)["input_ids"]
            cache = hf_paged.PagedCache(paged.config)
            got = decode(paged, cache, ids, 15)
            cache.check()
            assert torch.equal(got, decode(plain, compat.DynamicCache(config=plain.config), ids, 15))


def test_forward_calls_with_left_pads():
    """No positions are given, so rows count their pads, with us as without."""
    plain, paged = compiled_pair("gemma3")
    inputs = prompts(3, 9)
    cache = hf_paged.PagedCache(paged.config)
    got = decode(paged, cache, inputs["input_ids"], 9, inputs["attention_mask"])
    own = compat.DynamicCache(config=plain.config)
    assert torch.equal(got, decode(plain, own, inputs["input_ids"], 9, inputs["attention_mask"]))
    cache.check()
    assert cache.stats().stored_tokens == 3 + 9 + 2 * 8


def test_a_second_turn_on_a_filled_cache():
    plain, paged = compiled_pair("llama")
    cache, own = hf_paged.PagedCache(paged.config), compat.DynamicCache(config=plain.config)
    ids = prompts(9)["input_ids"]
    for _ in range(3):
        expected = run(plain, {"input_ids": ids}, max_new_tokens=5, **with_cache(own))
        assert torch.equal(expected, run(paged, {"input_ids": ids}, max_new_tokens=5, **with_cache(cache)))
        ids = torch.cat([expected, prompts(4, seed=expected.shape[1])["input_ids"]], 1)
    cache.check()


def test_symbolic_from_the_first_call():
    """`dynamic=True`."""
    plain, paged = compiled_pair("llama", dynamic=True)
    agree(plain, paged, prompts(3, 9), max_new_tokens=6)


# -- caches and calls that are not ours --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_dynamic_cache_gives_what_it_gave(family):
    """Left pads, one query and many; then a cache of ours again, in graphs of its own."""
    plain, paged = compiled_pair(family)
    inputs = prompts(3, 9)
    got = decode(paged, compat.DynamicCache(config=paged.config), inputs["input_ids"], 5, inputs["attention_mask"])
    own = compat.DynamicCache(config=plain.config)
    assert torch.equal(got, decode(plain, own, inputs["input_ids"], 5, inputs["attention_mask"]))
    agree(plain, paged, inputs, max_new_tokens=5)
    assert not paged.paged_stats().fallbacks


def test_a_dynamic_cache_without_pads():
    plain, paged = compiled_pair("llama")
    ids = prompts(9)["input_ids"]
    got = decode(paged, compat.DynamicCache(config=paged.config), ids, 5)
    assert torch.equal(got, decode(plain, compat.DynamicCache(config=plain.config), ids, 5))


def test_without_a_cache_and_in_training():
    plain, paged = compiled_pair("llama", "aot_eager")
    inputs = prompts(4, 9)
    for model in (plain, paged):
        model.train()
        loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
        loss.backward()
    for (name, left), right in zip(plain.named_parameters(), paged.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_gradients_are_refused():
    paged = compiled(hf_paged.patch(build("llama")), fullgraph=False)
    with pytest.raises(RuntimeError, match="outside the autograd graph"):
        paged(**prompts(5), use_cache=True, **with_cache(hf_paged.PagedCache(paged.config)))


def test_a_mask_of_the_users_own_is_dense_and_counted():
    plain, paged = compiled_pair("llama")
    ids = prompts(6)["input_ids"]
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    mask[..., 4:, 1] = False
    cache = hf_paged.PagedCache(paged.config)
    with torch.no_grad(), pytest.warns(UserWarning, match="custom attention mask"):
        got = paged(input_ids=ids, attention_mask=mask, **with_cache(cache)).logits
        torch.testing.assert_close(got, plain(input_ids=ids, attention_mask=mask).logits, atol=1e-4, rtol=0)
    assert cache.stats().fallbacks == {"dense attention: a custom attention mask": 2}


def test_out_of_blocks_leaves_the_cache_as_it_was():
    paged = compiled(hf_paged.patch(build("llama"), block_size=4, num_blocks=3))
    cache = hf_paged.PagedCache(paged.config, pool=paged.paged_pool)
    ids = prompts(9)["input_ids"]
    decode(paged, cache, ids, 1)
    with pytest.raises(hf_paged.OutOfBlocks), torch.no_grad():
        paged(input_ids=ids, **with_cache(cache))
    cache.check()
    assert cache.get_seq_length() == 9


# -- models that do not read blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["falcon_alibi", "llama4"])
def test_dense_attention_is_exact_and_counted(family):
    plain, paged = compiled_pair(family)
    with pytest.warns(UserWarning, match="dense"):
        agree_warned(plain, paged, prompts(3, 9), max_new_tokens=6)
    assert any("dense" in reason for reason in paged.paged_stats().fallbacks)


def agree_warned(plain, paged, inputs, **kwargs):
    torch.manual_seed(5)
    expected = plain.generate(**inputs, **kwargs)
    torch.manual_seed(5)
    assert torch.equal(expected, paged.generate(**inputs, **kwargs))


def test_latent_attention():
    """MLA: the op reads latents, as the eager path does."""
    plain, paged = compiled_pair("deepseek_v3")
    for options in ({}, {"num_beams": 3}):
        agree(plain, paged, prompts(9, 9), max_new_tokens=6, **options)
    assert not paged.paged_stats().fallbacks


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_cross_attention(family):
    plain, paged = compiled_pair(family)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        agree(plain, paged, prompts(4, 9), max_new_tokens=6, **options)
    dense = any("dense" in reason for reason in paged.paged_stats().fallbacks)
    # Up to 5.23 T5 does its own attention.
    assert dense == (family == "t5" and compat.CACHE_ARGUMENT != "cache")


@pytest.mark.parametrize("where", ["mlp", "o_proj", "q_proj"])
def test_a_graph_that_breaks_elsewhere(where):
    """The model's own code breaks the graph, behind attention and before it: what is half done goes on outside."""
    plain, paged = pair("gemma3", overrides=ONE_OF_EACH, block_size=4)
    broken = getattr(paged.model.layers[1], where, None) or getattr(paged.model.layers[1].self_attn, where)
    vouch_for(paged, _break_the_graph)
    broken.register_forward_hook(_break_the_graph)
    compiled(paged, fullgraph=False)
    agree(plain, paged, prompts(3, 9), max_new_tokens=9)
    assert counters["graph_break"]
    assert not paged.paged_stats().fallbacks


def _break_the_graph(module, given, out):
    torch._dynamo.graph_break()


def test_layers_that_read_the_keys_of_another():
    plain = tiny_models.build("gemma3n_text", "Gemma3nForCausalLM")
    paged = compiled(hf_paged.patch(copy.deepcopy(plain), block_size=4))
    inputs = prompts(3, 9)
    assert torch.equal(run(plain, inputs, max_new_tokens=9), run(paged, inputs, max_new_tokens=9))
    assert not any("dense" in reason for reason in paged.paged_stats().fallbacks)


# -- handles -----------------------------------------------------------------------------------------------------------


def test_not_patched_but_loaded_with_our_implementation():
    """Modules get their handle in the first call, at a graph break; then there is none."""
    plain, ours = build("llama", num_hidden_layers=1), build("llama", attn=NAME, num_hidden_layers=1)
    compiled(ours, fullgraph=False)
    ids = prompts(9)["input_ids"]
    right = decode(plain, compat.DynamicCache(config=plain.config), ids, 5)
    decode(ours, hf_paged.PagedCache(ours.config), ids, 1)
    assert counters["graph_break"]
    counters.clear()
    torch._dynamo.reset()
    assert torch.equal(right, decode(ours, hf_paged.PagedCache(ours.config), ids, 5))
    assert not counters["graph_break"]


def test_copies_of_a_model_have_handles_of_their_own():
    paged = hf_paged.patch(build("llama"))
    other = copy.deepcopy(paged)
    for model in (paged, other):
        for module in model.modules():
            if HANDLE in module.__dict__:
                assert Handle.target(module.__dict__[HANDLE].number) is module
    hf_paged.unpatch(other)
    assert not any(HANDLE in module.__dict__ for module in other.modules())
    assert any(HANDLE in module.__dict__ for module in paged.modules())


def test_handles_hold_nothing():
    cache = hf_paged.PagedCache(build("llama").config)
    number = cache.handle.number
    assert Handle.target(number) is cache
    assert Handle.target(copy.deepcopy(cache).handle.number) is not cache
    del cache
    gc.collect()
    with pytest.raises(RuntimeError, match="outlived"):
        Handle.target(number)


@contextmanager
def _in_a_kernel():
    """Where fake tensors are computed with: their mode is off, and what is made has no content."""
    mode = FakeTensorMode()
    with tracing(TracingContext(mode)), in_kernel_invocation_manager(mode):
        yield


@pytest.mark.parametrize("moment", [FakeTensorMode, _in_a_kernel])
def test_a_cache_that_dies_while_something_is_traced(moment, monkeypatch):
    """The garbage collector may run at any time, also where tensors are fake ones."""
    paged = hf_paged.patch(build("llama", num_hidden_layers=1), block_size=4)
    out = run(paged, prompts(3, 9), max_new_tokens=4, return_dict_in_generate=True)
    failed = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    with moment():
        del out
        gc.collect()
    assert not failed
    assert paged.paged_stats().used_blocks == 0
    paged.paged_pool.check()


def test_the_op_is_what_it_says():
    """Schema and fake implementation. (What it writes to is none of its arguments, so it does not run twice alike.)"""
    paged = hf_paged.patch(build("llama", num_hidden_layers=1), block_size=4)
    cache = hf_paged.PagedCache(paged.config)
    query, key, value = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 16)
    module = paged.model.layers[0].self_attn
    handles = (cache.handle.number, module.__dict__[HANDLE].number)
    arguments = (query, key, value, None, None, *handles, 0, 16, True, None, 0.0, 0.25, None, None, [], [])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.hf_paged.update_and_attend.default, arguments, test_utils=checks)
    torch.library.opcheck(
        torch.ops.hf_paged.update_dense.default,
        (key, value, True, cache.handle.number, 0, cache.get_seq_length() + 3),
        test_utils="test_schema",
    )


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_alibi_stays_over_blocks(family):
    plain, paged = compiled_pair(family)
    agree(plain, paged, prompts(5, 12), max_new_tokens=5)
    agree(plain, paged, prompts(9), max_new_tokens=5, num_beams=3)
    assert paged.paged_stats().fallbacks == {}
    right = prompts(5, 12, side="right")
    agree(plain, paged, right, max_new_tokens=5)
    reasons = [] if family == "bloom" else ["dense attention: ALiBi that counts pads"]
    assert list(paged.paged_stats().fallbacks) == reasons
