"""A patched model as an object: pickled, sent to another process, dropped, compiled, sharing its config with others."""

import copy
import gc
import inspect
import io
import itertools
import multiprocessing
import pickle
import subprocess
import sys
import weakref
from types import MethodType

import pytest
import torch
import transformers
from models import assert_equal, build, pair, prompts, run

import hf_paged
from hf_paged import PagedConfig, implementations
from hf_paged.binding import Bound, bind

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

MODES = [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}]
# Bound to the model alone; to its attention modules too: falcon, bloom, mpt (forward), deepseek_v3 (expand_kv).
KINDS = ["llama", "gemma3", "falcon", "bloom", "mpt", "deepseek_v3", "t5", "bart"]


def inputs_of(model):
    return prompts(12, 12) if model.config.is_encoder_decoder else prompts(5, 12)


# -- copies ------------------------------------------------------------------------------------------------------------


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("way", [pickled, saved, copy.deepcopy], ids=lambda way: way.__name__)
def test_a_copy_is_patched_with_an_empty_pool(way, family):
    plain, paged = pair(family, attn="eager" if family == "gemma3" else None, block_size=4, prompt_once=False)
    inputs = inputs_of(plain)
    kept = run(paged, inputs, max_new_tokens=4, return_dict_in_generate=True)  # something is in the pool
    assert paged.paged_stats().used_blocks > 0
    other = way(paged)
    assert other.paged_pool is not paged.paged_pool
    assert other.paged_stats().num_blocks == 0 and other.paged_pool.owner() is other
    assert other.paged_pool.config == PagedConfig(block_size=4, prompt_once=False)
    before = [implementations.before(model.config) for model in (paged, other)]
    assert before[0] == before[1] == plain.config._attn_implementation
    for options in MODES:
        assert_equal(plain, other, inputs, max_new_tokens=5, **options)
    assert other.paged_stats().peak_used_blocks > 0
    hf_paged.unpatch(other)
    assert other.config._attn_implementation == plain.config._attn_implementation
    assert_equal(plain, paged, inputs, max_new_tokens=5) if not kept else None
    assert not any(isinstance(entry, Bound) for module in other.modules() for entry in vars(module).values())
    assert torch.equal(run(plain, inputs, max_new_tokens=5), run(other, inputs, max_new_tokens=5))


def generate_elsewhere(model, inputs, queue):
    queue.put((run(model, inputs, max_new_tokens=4).tolist(), model.paged_stats().peak_used_blocks))


@pytest.mark.timeout(300)
def test_a_spawned_process():
    plain, paged = pair("llama", block_size=4)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=generate_elsewhere, args=(paged, prompts(5, 12), queue))
    process.start()
    ids, peak = queue.get(timeout=240)
    process.join(30)
    assert process.exitcode == 0
    assert ids == run(plain, prompts(5, 12), max_new_tokens=4).tolist() and peak > 0


# -- what is bound -----------------------------------------------------------------------------------------------------


def test_bound_methods_are_like_methods():
    plain, paged = pair("llama", block_size=4)
    names = [name for name, entry in vars(paged).items() if isinstance(entry, Bound)]
    assert "prepare_inputs_for_generation" in names and "_prefill" in names
    for name in names:
        method = getattr(paged, name)
        assert method.__self__ is paged and callable(method.__func__)
        assert method == getattr(paged, name) and hash(method) == hash(getattr(paged, name))
        assert method.__name__ and method.__doc__ is not None
        if hasattr(type(paged), name):
            assert inspect.signature(method) == inspect.signature(getattr(plain, name)), name
    other = copy.deepcopy(paged)
    for name in names:
        assert getattr(other, name).__self__ is other
        assert getattr(other, name) != getattr(paged, name)


class Thing:
    def add(self, number: int = 1) -> int:
        return number


def add(self, number):
    return number + 1


def test_bound_alone():
    thing = Thing()
    bind(thing, "add", add)
    assert thing.add(2) == 3 and Thing.add(thing, 2) == 2
    assert inspect.signature(thing.add) == inspect.signature(Thing().add)
    method = copy.deepcopy(thing.add)  # as of any method: with a copy of what it is bound to
    assert isinstance(method, MethodType) and method.__self__ is not thing and method(2) == 3
    assert copy.copy(thing.add) == thing.add
    again = pickle.loads(pickle.dumps(thing))
    assert again.add(2) == 3 and again.add.__self__ is again
    method = thing.add
    del thing
    with pytest.raises(ReferenceError, match="gone"):
        method(2)


# -- dropped -----------------------------------------------------------------------------------------------------------


def use(model):
    inputs = inputs_of(model)
    for options in (*MODES, {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}):
        run(model, inputs, max_new_tokens=4, **options)
    if not model.config.is_encoder_decoder:
        run(model, inputs, max_new_tokens=4, assistant_model=model) if len(inputs["input_ids"]) == 1 else None
        run(model, inputs, max_new_tokens=4, stopping_criteria=[lambda ids, scores: ids[:, 0] < 0])


def lives_on(make):
    """Whether a used model waits for the garbage collector when it is dropped."""
    gc.collect()
    gc.disable()
    try:
        model = make()
        use(model)
        reference = weakref.ref(model)
        pool = weakref.ref(getattr(model, "paged_pool", model))
        stores = [weakref.ref(store.memory.keys) for store in getattr(pool(), "stores", {}).values()]
        del model
        return [each() is not None for each in (reference, pool, *stores)]
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.parametrize("family", KINDS)
def test_a_dropped_model_is_freed_as_soon_as_the_unpatched_one(family):
    unpatched = lives_on(lambda: build(family))
    patched = lives_on(lambda: hf_paged.patch(build(family), block_size=4))
    assert any(patched) == any(unpatched), (unpatched, patched)


def test_llama_needs_no_garbage_collector():
    assert not any(lives_on(lambda: build("llama"))), "the library has no cycle there"
    assert not any(lives_on(lambda: hf_paged.patch(build("llama"), cuda_graphs=True)))
    assert not any(lives_on(lambda: hf_paged.unpatch(hf_paged.patch(build("llama")))))


def test_a_dropped_model_lets_a_shared_config_go():
    config = build("llama").config
    model = hf_paged.patch(transformers.LlamaForCausalLM(config))
    assert config._attn_implementation == "hf_paged"
    del model
    assert config._attn_implementation == "sdpa"


MEASURE = """
import sys, torch, transformers, hf_paged
import ctypes, gc
gc.disable()
def resident():
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
def make():
    sizes = dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8, vocab_size=8000)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)).eval()
    return hf_paged.patch(model) if "patched" in sys.argv else model
def use(model):
    ids = torch.arange(1500).reshape(3, 500) + 5
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
model = make(); use(model); del model  # what the first use leaves behind stays
before = resident()
model = make(); use(model)
peak = resident()
del model
print(peak - before, resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
@pytest.mark.timeout(300)
def test_resident_memory_comes_back():
    """As much as of the unpatched model, at once, with the garbage collector switched off."""
    left = {}
    for kind in ("unpatched", "patched"):
        done = subprocess.run([sys.executable, "-c", MEASURE, kind], capture_output=True, text=True, check=True)
        held, left[kind] = map(float, done.stdout.split())
        assert held > 200, "MiB of weights"
    assert left["patched"] < left["unpatched"] + 20, left


# -- a config that is shared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("order", list(itertools.permutations("pPuU", 4)), ids="".join)
def test_two_models_that_share_a_config(order, attn):
    """p, u: patch and unpatch the first; P, U: the second. In any order, each is right and pages while patched."""
    plain = build("gemma3", attn=attn)
    models = [copy.deepcopy(plain)]
    models.append(type(plain)(models[0].config).eval())
    models[1].load_state_dict(plain.state_dict())
    inputs = prompts(5, 12)
    expected = run(plain, inputs, max_new_tokens=5)
    patched = [False, False]
    for step in order:
        which = int(step.isupper())
        patched[which] = step.lower() == "p"
        (hf_paged.patch if patched[which] else hf_paged.unpatch)(models[which])
        assert models[0].config._attn_implementation == ("hf_paged" if any(patched) else attn)
        for model, pages in zip(models, patched, strict=True):
            got = run(model, inputs, max_new_tokens=5, return_dict_in_generate=True)
            assert torch.equal(expected, got.sequences)
            assert hasattr(model, "paged_pool") == pages
            if pages:
                assert model.paged_stats().used_blocks > 0 and not model.paged_stats().fallbacks
    for model in models:
        hf_paged.unpatch(model)
    assert models[0].config._attn_implementation == attn


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neo", "falcon", "falcon_alibi", "bloom", "mpt"])
@pytest.mark.parametrize("attn", [None, "eager"])
def test_a_model_with_the_config_of_a_patched_one(family, attn):
    """There before, made from it, made from a copy of it: each attends as it always did."""
    plain = build(family, attn=attn)
    paged = copy.deepcopy(plain)
    config = paged.config

    def made(config):
        model = type(plain)(config).eval()
        model.load_state_dict(plain.state_dict())
        return model

    neighbour = made(config)
    hf_paged.patch(paged, block_size=4)
    expected = run(plain, prompts(5, 12), max_new_tokens=5)
    for model in (neighbour, made(config), made(copy.deepcopy(config)), hf_paged.patch(made(copy.deepcopy(config)))):
        assert torch.equal(expected, run(model, prompts(5, 12), max_new_tokens=5))
    assert torch.equal(expected, run(paged, prompts(5, 12), max_new_tokens=5))


# -- compiled ----------------------------------------------------------------------------------------------------------


def test_patch_takes_the_module_inside_of_a_compiled_one():
    plain, model = build("llama"), build("llama")
    compiled = torch.compile(model, backend="eager")
    assert hf_paged.patch(compiled) is compiled
    assert_equal(plain, model, prompts(5, 12), max_new_tokens=4)
    assert torch.equal(run(plain, prompts(5, 12), max_new_tokens=4), run(compiled, prompts(5, 12), max_new_tokens=4))
    assert compiled.paged_stats().peak_used_blocks > 0
    hf_paged.unpatch(compiled)
    assert "_hf_paged" not in vars(model)
