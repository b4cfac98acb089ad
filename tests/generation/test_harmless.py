"""What people do to models every day and what changes no row by another: the savings stay, and a change is seen.

Each test compares with an unpatched twin that underwent the same, over greedy search, ragged batches, beams, samples
and a second turn; looks at what was computed and found again; and then changes something inside, in a way that no
version counter shows. Packages that the tests do not require are skipped where they are not installed.
"""

import copy
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import types

import pytest
import torch
from models import build, pair, prompts, run
from transformers.models.llama import modeling_llama

import hf_paged
from hf_paged import compat
from hf_paged.generation.identity import Walk
from hf_paged.state import CacheState

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

BLOCK = 4
POOL = {"block_size": BLOCK, "num_blocks": 300}  # room for all that a test stores
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}


# -- what every test asks ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def forwards(monkeypatch):
    """Tokens that each forward of a patched model put in the cache, rows times columns."""
    begin, seen = CacheState.begin_step, []

    def note(self, layer, key, value, padding):
        seen.append(key.shape[0] * key.shape[2])
        return begin(self, layer, key, value, padding)

    monkeypatch.setattr(CacheState, "begin_step", note)
    return seen


def stats_of(paged):
    return compat.generating_model(paged).paged_stats()


def hits_of(paged):
    return stats_of(paged).prefix_hit_tokens


def forget_prefixes(paged):
    compat.generating_model(paged).paged_pool.reset_prefix_cache()


def same(plain, paged, inputs, **options):
    """Both generate the same ids. Returns them."""
    expected = run(plain, inputs, **options)
    got = run(paged, inputs, **options)
    assert torch.equal(expected, got), f"{expected}\n{got}"
    return expected


def make_prompts(*lengths, seed, **options):
    return prompts(*lengths, seed=seed)


def once_and_found(plain, paged, forwards, lengths, options, make=make_prompts):
    """A prompt is computed once for its beams or samples, pads are not computed, and the next call finds all whole
    blocks of it."""
    options = {"max_new_tokens": 4, **options}
    inputs = make(*lengths, seed=7, **options)
    forget_prefixes(paged)
    forwards.clear()
    same(plain, paged, inputs, **options)
    assert forwards[0] == sum(lengths), (options, forwards)
    before = hits_of(paged)
    same(plain, paged, inputs, **options)
    assert hits_of(paged) - before >= sum((length - 1) // BLOCK * BLOCK for length in lengths)
    assert stats_of(paged).stepped_aside == {}


def same_and_cheap(plain, paged, forwards, make=make_prompts):
    """The same ids as the twin's in every mode, nothing stepped aside, and everything is saved that can be.

    Args:
        make: makes prompts that are generated from with these options.
    """
    # Rows of unlike lengths, pads on the left.
    for options in MODES.values():
        options = {"max_new_tokens": 6, **options}
        same(plain, paged, make(5, 13, seed=3, **options), **options)
    for lengths, options in (((13,), MODES["beams"]), ((14,), MODES["samples"]), ((5, 13), MODES["greedy"])):
        once_and_found(plain, paged, forwards, lengths, options, make)
    # The second turn finds the first one's prompt and its answer.
    options = {"max_new_tokens": 9, "eos_token_id": None}
    first = same(plain, paged, make(13, seed=9, **options), **options)
    history = torch.cat((first, prompts(5, seed=11)["input_ids"]), dim=1)
    before = hits_of(paged)
    same(plain, paged, {"input_ids": history, "attention_mask": torch.ones_like(history)}, max_new_tokens=2)
    assert hits_of(paged) - before >= (first.shape[1] - 1) // BLOCK * BLOCK > 13
    assert stats_of(paged).stepped_aside == {}
    assert stats_of(paged).fallbacks == {}
    gc.collect()  # the compiler makes reference cycles around what it has traced
    compat.generating_model(paged).paged_pool.check()
    assert stats_of(paged).used_blocks == 0


def change_is_seen(plain, paged, change, undo=None, tolerance=1e-3, lengths=(24, 24)):
    """What was stored before a change is not found after it, and is found again by those who compute alike.

    Args:
        change, undo: called with each of the two models.
        tolerance: how far logits may be from the twin's. A wrong key moves them by more than 1.
        lengths: of the prompts. (Each new number of rows is compiled, where things are compiled.)
    """
    inputs = prompts(*lengths, seed=13)

    def logits(model):
        return torch.stack(run(model, inputs, max_new_tokens=1, **LOGITS).logits)

    def agree():
        theirs, ours = logits(plain), logits(paged)
        torch.testing.assert_close(theirs, ours, atol=tolerance, rtol=0)
        return theirs

    agree()
    before = agree()
    known = hits_of(paged)
    assert known > 0
    for model in (plain, paged):
        change(model)
    after = agree()
    assert not torch.allclose(before, after, atol=10 * tolerance), "the change did nothing"
    assert hits_of(paged) == known, "what was stored before the change was found after it"
    agree()
    if tolerance <= 1e-3:
        same(plain, paged, inputs, max_new_tokens=6)
    assert hits_of(paged) > known, "nothing is found again after the change"
    if undo is not None:
        for model in (plain, paged):
            undo(model)
        known = hits_of(paged)
        torch.testing.assert_close(agree(), before, atol=tolerance, rtol=0)
        assert hits_of(paged) > known, "what was stored before the change is not found after it was undone"
    assert stats_of(paged).stepped_aside == {}


def k_proj(model, layer=0):
    """A projection of a Llama, whatever it is wrapped in."""
    return compat.generating_model(model).model.layers[layer].self_attn.k_proj


def scale_weights(model):
    """By a hidden road: no version counter moves."""
    k_proj(model).weight.data.mul_(-2)


def unscale_weights(model):
    k_proj(model).weight.data.div_(-2)


def twins(prepare, **overrides):
    """`(unpatched, patched)` Llamas that underwent the same."""
    plain = prepare(build("llama", **overrides))
    return plain, hf_paged.patch(copy.deepcopy(plain), **POOL)


def barred(model):
    """What the gate says of a patched model outside of a call."""
    model = compat.generating_model(model)
    verdict = model.__dict__["_hf_paged"].gate.judge(model, Walk(model).modules)
    return {reason.code: detail for reason, detail in verdict.detail.items()}


# -- Transformers and PyTorch ------------------------------------------------------------------------------------------


def test_nothing_done_at_all(forwards):
    """The yardstick: an untouched model."""
    plain, paged = pair("llama", **POOL)
    same_and_cheap(plain, paged, forwards)
    change_is_seen(plain, paged, scale_weights, unscale_weights)


def test_idle_recording_hooks(forwards):
    """They stay behind after one call with output_hidden_states=True."""
    plain, paged = pair("llama", **POOL)
    for model in (plain, paged):
        model(**prompts(5), output_hidden_states=True, output_attentions=False)
    assert any(module._forward_hooks for module in paged.modules())
    same_and_cheap(plain, paged, forwards)
    change_is_seen(plain, paged, scale_weights, unscale_weights)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_forward(fresh_compiler, forwards):
    plain, paged = pair("llama", overrides={"num_hidden_layers": 1}, **POOL)
    paged.forward = torch.compile(paged.forward, backend="eager", dynamic=True)
    same_and_cheap(plain, paged, forwards)
    change_is_seen(plain, paged, scale_weights, lengths=(24,))


def test_a_forward_compiled_before_the_model_is_patched(fresh_compiler, forwards):
    plain = build("llama", num_hidden_layers=1)
    paged = copy.deepcopy(plain)
    paged.forward = torch.compile(paged.forward, backend="eager", dynamic=True)
    hf_paged.patch(paged, **POOL)
    once_and_found(plain, paged, forwards, (13,), MODES["beams"])
    change_is_seen(plain, paged, scale_weights, lengths=(24,))


def test_a_compiled_model(fresh_compiler, forwards):
    """model.compile() keeps the compiled call beside the model's own."""
    plain, paged = pair("llama", overrides={"num_hidden_layers": 1}, **POOL)
    paged.compile(backend="eager", dynamic=True)
    assert paged._compiled_call_impl is not None
    once_and_found(plain, paged, forwards, (13,), MODES["beams"])
    change_is_seen(plain, paged, scale_weights, lengths=(24,))


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    if torch.distributed.is_initialized():
        pytest.skip("a process group is there already")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel(one_process, forwards):
    """DDP's hooks are on gradients; the module inside generates."""
    plain, paged = pair("llama", **POOL)
    wrapped = torch.nn.parallel.DistributedDataParallel(paged)
    wrapped(**prompts(9), labels=prompts(9)["input_ids"]).loss.backward()
    plain(**prompts(9), labels=prompts(9)["input_ids"]).loss.backward()
    same_and_cheap(plain, wrapped.module, forwards)

    def step(model):
        torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step()

    change_is_seen(plain, wrapped.module, step)


# -- accelerate --------------------------------------------------------------------------------------------------------


def device_map(places):
    """Layers of a tiny Llama to the places, in order; the rest to the CPU."""
    rest = {name: "cpu" for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")}
    return rest | {f"model.layers.{index}": place for index, place in enumerate(places)}


@pytest.mark.parametrize("order", ["patched first", "dispatched first"])
@pytest.mark.parametrize("kind", ["dispatch_model", "cpu_offload"])
def test_accelerate_device_hooks(kind, order, forwards):
    plain = build("llama")

    def spread(model):
        if kind == "cpu_offload":
            return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        return accelerate.dispatch_model(model, device_map(("cpu", "cpu")), main_device="cpu", force_hooks=True)

    paged = copy.deepcopy(plain)
    paged = (
        spread(hf_paged.patch(paged, **POOL)) if order == "patched first" else (hf_paged.patch(spread(paged), **POOL))
    )
    assert hasattr(k_proj(paged), "_hf_hook")
    same_and_cheap(plain, paged, forwards)

    def change(model):
        if model is paged and kind == "cpu_offload":
            held = k_proj(model)._hf_hook.weights_map
            held.dataset[held.prefix + "weight"].mul_(-2)
        else:
            scale_weights(model)

    change_is_seen(plain, paged, change)


@pytest.mark.parametrize("order", ["patched first", "prepared first"])
def test_accelerate_mixed_precision(order, forwards):
    """`prepare` wraps model.forward: autocast around it, and its outputs in float32.

    Where two tokens are nearly tied, bfloat16 may take either; so prompts are taken to which bfloat16 answers as
    float32 does.
    """
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    try:
        exact, plain, paged = build("llama"), build("llama"), build("llama")
        if order == "patched first":
            paged = hf_paged.patch(paged, **POOL)
        plain, paged = (accelerator.prepare_model(model, evaluation_mode=True) for model in (plain, paged))
        if order == "prepared first":
            paged = hf_paged.patch(paged, **POOL)
        assert "forward" in vars(paged)
        assert paged(**prompts(5)).logits.dtype is torch.float32
        same_and_cheap(plain, paged, forwards, clear_to(plain, exact))
        change_is_seen(plain, paged, scale_weights, tolerance=0.15)
        assert barred(paged) == {}
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def clear_to(plain, exact):
    """Makes prompts to which two models, in float32 and not, answer the same."""

    def make(*lengths, seed, **options):
        for number in range(seed, seed + 1000, 100):
            inputs = prompts(*lengths, seed=number)
            if torch.equal(run(plain, inputs, **options), run(exact, inputs, **options)):
                return inputs
        raise AssertionError("no prompt found")

    return make


# -- PEFT --------------------------------------------------------------------------------------------------------------


def with_lora(model, *names, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj")):
    """A PEFT model with random adapters of these names; the first is active."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=list(targets), r=4)
    adapted = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        adapted.add_adapter(name, config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return adapted.eval()


def lora_b(model, name="one", layer=0):
    return k_proj(model, layer).lora_B[name].weight


def test_lora(forwards):
    plain, paged = twins(lambda model: with_lora(model, "one"))
    same_and_cheap(plain, paged, forwards)
    change_is_seen(plain, paged, lambda model: lora_b(model).data.mul_(-8), lambda model: lora_b(model).data.div_(-8))
    # What the adapter is multiplied by is a number in a dict.
    factor = 64

    def scale(model):
        k_proj(model).scaling["one"] *= factor

    def unscale(model):
        k_proj(model).scaling["one"] /= factor

    change_is_seen(plain, paged, scale, unscale)


def test_two_adapters_of_which_one_is_active(forwards):
    plain, paged = twins(lambda model: with_lora(model, "one", "two"))
    same_and_cheap(plain, paged, forwards)
    change_is_seen(plain, paged, lambda model: model.set_adapter("two"), lambda model: model.set_adapter("one"))
    # Both at once.
    change_is_seen(
        plain,
        paged,
        lambda model: model.base_model.set_adapter(["one", "two"]),
        lambda model: model.set_adapter("one"),
    )


def test_a_disabled_adapter(forwards):
    plain, paged = twins(lambda model: with_lora(model, "one"))
    change_is_seen(
        plain,
        paged,
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.base_model.enable_adapter_layers(),
    )
    with plain.disable_adapter(), paged.disable_adapter():
        same_and_cheap(plain, paged, forwards)


def test_a_merged_adapter(forwards):
    """Merged in place for one rollout, taken out, merged for good."""
    plain, paged = twins(lambda model: with_lora(model, "one"))
    inputs = prompts(13, seed=17)
    same(plain, paged, inputs, max_new_tokens=4)
    for model in (plain, paged):
        model.merge_adapter()
    before = hits_of(paged)
    same(plain, paged, inputs, max_new_tokens=4)
    assert hits_of(paged) == before  # nearly the same weights, but not the same
    same_and_cheap(plain, paged, forwards)
    for model in (plain, paged):
        model.unmerge_adapter()
    before = hits_of(paged)
    same(plain, paged, prompts(13, seed=19), max_new_tokens=4)
    assert hits_of(paged) == before
    for model in (plain, paged):
        model.base_model.model.eval()
    plain, paged = plain.merge_and_unload(), paged.merge_and_unload()
    same(plain, paged, inputs, max_new_tokens=4)
    assert hits_of(paged) == before
    same_and_cheap(plain, paged, forwards)
    change_is_seen(plain, paged, scale_weights, unscale_weights)


@pytest.mark.parametrize("who", ["transformers", "peft"])
def test_gradients_of_inputs(who, forwards):
    """Training with gradient checkpointing and adapters leaves a hook on the embeddings, which marks their output. PEFT
    has one of its own, for models that lack the library's method: here it is shown one that does."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def prepare(model):
        if who == "peft":
            lacking = types.SimpleNamespace(get_input_embeddings=model.get_input_embeddings)
            peft.PeftModel._prepare_model_for_gradient_checkpointing(None, lacking)
        else:
            model.enable_input_require_grads()
        model = with_lora(model, "one")
        model.gradient_checkpointing_enable()
        return model.eval()

    plain, paged = twins(prepare)
    hooks = compat.generating_model(paged).get_input_embeddings()._forward_hooks.values()
    assert any(f"{os.sep}{who}{os.sep}" in hook.__code__.co_filename for hook in hooks)
    for model in (plain, paged):
        model.train()
        model(**prompts(9), labels=prompts(9)["input_ids"]).loss.backward()
        model.eval()
    same_and_cheap(plain, paged, forwards)

    def step(model):
        torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=3.0, fused=True).step()

    change_is_seen(plain, paged, step)


# -- kernels of others -------------------------------------------------------------------------------------------------


@pytest.fixture
def llama_as_it_was(monkeypatch):
    """Whatever a test does to the library's Llama is undone."""
    for owner in (modeling_llama, modeling_llama.LlamaForCausalLM):
        for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP", "forward"):
            if name in vars(owner):
                monkeypatch.setattr(owner, name, vars(owner)[name])
    for name in ("kernel_layer_name", "kernel_condition"):
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, name, None, raising=False)


class _Stub:
    """Stands for a kernel that needs a GPU."""

    def __init__(self, function):
        self.apply = function


def plain_rms_norm(hidden, weight, eps, *_):
    return weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("whole", [False, True], ids=["classes", "one model"])
def test_liger(whole, llama_as_it_was, monkeypatch, forwards):
    """Liger's modules and functions around a stub: its kernels, which need Triton and a GPU, are plain PyTorch here."""
    liger = pytest.importorskip("liger_kernel.transformers", reason="liger-kernel is not installed")
    from liger_kernel.transformers import rms_norm, rope, swiglu

    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(rms_norm, "LigerRMSNormFunction", _Stub(plain_rms_norm))
    monkeypatch.setattr(rope, "dispatch", lambda kind, q, k, cos, sin, *_: rotate(q, k, cos, sin))
    monkeypatch.setattr(swiglu, "_swiglu_dispatch", lambda gate, up: torch.nn.functional.silu(gate) * up)
    plain, paged = pair("llama", **POOL)
    if whole:
        liger.apply_liger_kernel_to_llama(model=paged)
    else:
        liger.apply_liger_kernel_to_llama()
        paged = hf_paged.patch(build("llama"), **POOL)
        assert type(paged.model.norm) is rms_norm.LigerRMSNorm
    assert "liger_kernel" in paged.forward.__func__.__code__.co_filename
    assert modeling_llama.apply_rotary_pos_emb is rope.liger_rotary_pos_emb
    same_and_cheap(plain, paged, forwards)
    change_is_seen(plain, paged, scale_weights, unscale_weights)
    # A function of the user's beside them is seen.
    paged.model.norm.forward = lambda hidden: hidden
    assert list(barred(paged)) == ["unknown_code"]


_hub: dict = {}  # modules of the package, which cannot be loaded twice


@pytest.fixture
def kernels(monkeypatch):
    """The package `kernels`: a folder of these tests is called like it, and found first."""
    try:
        root = str(importlib.metadata.distribution("kernels").locate_file(""))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kernels is not installed")

    def ours():
        return [name for name in sys.modules if name.split(".")[0] == "kernels"]

    before = {name: sys.modules.pop(name) for name in ours()}
    sys.modules.update(_hub)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [root, *sys.path])
        package = importlib.import_module("kernels")
        yield package
    _hub.update({name: sys.modules.pop(name) for name in ours()})
    sys.modules.update(before)


def hub_kernel(folder, owner):
    """A stub of a kernel of the hub: a folder like that which the package `kernels` makes of a download."""
    root = folder / f"models--{owner}--activation" / "snapshots" / "0123"
    variant = root / "build" / "torch-universal"
    variant.mkdir(parents=True)
    metadata = {
        "id": f"activation_{folder.name}".replace("-", "_"), "name": "activation", "version": 1,
        "license": "Apache-2.0", "python-depends": [], "backend": {"type": "cpu"},
    }  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata))
    (variant / "__init__.py").write_text("from . import layers\n")
    (variant / "layers.py").write_text(
        """
import torch

class RMSNorm(torch.nn.Module):
    def forward(self, hidden_states):
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden_states * scale

class Rotary(torch.nn.Module):
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        def turned(x):
            half = x.shape[-1] // 2
            return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + turned(q) * sin, k * cos + turned(k) * sin
"""
    )
    return root


@pytest.mark.parametrize("owner", ["kernels-community", "somebody"])
def test_kernels_of_the_hub(owner, kernels, tmp_path, llama_as_it_was, forwards):
    """The package `kernels` puts a layer's forward in place of the library's. The layer is a stub, loaded from a folder
    that is named as those of a download are: from kernels-community it is known, from anybody else it is not."""
    kernels.replace_kernel_forward_from_hub(modeling_llama.LlamaRMSNorm, "RMSNorm")
    repository = kernels.LocalLayerRepository(hub_kernel(tmp_path, owner), layer_name="RMSNorm")
    plain, paged = pair("llama", **POOL)
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": repository}}):
        kernels.kernelize(paged, mode=kernels.Mode.INFERENCE, device="cpu")
    assert paged.model.norm.forward.__func__.__code__.co_filename.startswith(str(tmp_path))
    if owner == "kernels-community":
        same_and_cheap(plain, paged, forwards)
        change_is_seen(plain, paged, scale_weights, unscale_weights)
    else:
        same(plain, paged, prompts(5, 13), max_new_tokens=4)
        assert list(stats_of(paged).stepped_aside) == ["unknown_code"]


@pytest.mark.parametrize("owner", ["kernels-community", "somebody"])
def test_kernels_of_the_hub_for_functions(owner, kernels, tmp_path, llama_as_it_was, forwards):
    """A function becomes a module that all models share, and its forward may be anybody's. Likewise with a stub."""
    plain = build("llama")
    rotate = kernels.use_kernel_forward_from_hub("rotary")(modeling_llama.apply_rotary_pos_emb)
    modeling_llama.apply_rotary_pos_emb = rotate
    paged = hf_paged.patch(copy.deepcopy(plain), **POOL)
    for layer in paged.model.layers:  # as the decorator `use_kernelized_func` does
        layer.self_attn._kernel_funcs = {"rotary": rotate}
    assert isinstance(rotate, torch.nn.Module)
    assert barred(paged) == {}
    repository = kernels.LocalLayerRepository(hub_kernel(tmp_path, owner), layer_name="Rotary")
    with kernels.use_kernel_mapping({"rotary": {"cpu": repository}}):
        kernels.kernelize(paged, mode=kernels.Mode.INFERENCE, device="cpu")
    assert rotate.forward.__func__.__code__.co_filename.startswith(str(tmp_path))
    if owner == "kernels-community":
        same_and_cheap(plain, paged, forwards)
        change_is_seen(plain, paged, scale_weights, unscale_weights)
    else:
        assert list(barred(paged)) == ["unknown_code"]


# -- numbers of few bits -----------------------------------------------------------------------------------------------


def replace_linears(model, make):
    """Every linear layer but the head by what `make` makes of it."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and name != "lm_head":
                setattr(module, name, make(child))
    return model.eval()


def wide():
    """A Llama whose layers are as wide as the formats ask."""
    return build("llama", hidden_size=128, head_dim=32, intermediate_size=128)


def eight_bits(threshold):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def make(linear):
        new = bitsandbytes.nn.Linear8bitLt(
            linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, threshold=threshold
        )
        new.weight = bitsandbytes.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        return new.to("cpu")

    return replace_linears(wide(), make)


def four_bits(nested=False):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def make(linear):
        new = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        new.weight = bitsandbytes.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=nested
        )
        return new.to("cpu")

    return replace_linears(wide(), make)


def torchao_weights(config, **options):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = wide()
    quantization.quantize_(model, getattr(quantization, config)(**options))
    return model


def quanto_weights(bits):
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model = wide()
    quanto.quantize(model, weights=getattr(quanto, f"qint{bits}"), exclude="lm_head")
    quanto.freeze(model)
    return model


def hqq_weights(bits):
    quantize = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed")
    config = quantize.BaseQuantizeConfig(nbits=bits, group_size=32)
    return replace_linears(
        wide(), lambda linear: quantize.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
    )


def of_weight(*path):
    """Scales a tensor inside of a weight, in place and past the version counters."""

    def change(model):
        tensor = k_proj(model).weight
        for name in path:
            tensor = getattr(tensor, name)
        tensor.detach().data.mul_(-2)

    return change


def of_state(model):
    module = k_proj(model)
    scale = module.weight.SCB if module.state.SCB is None else module.state.SCB
    scale.mul_(-2)


def of_meta(model):
    k_proj(model).meta["scale"].mul_(-2)


FORMATS = {
    "bitsandbytes, 8 bits": (lambda: eight_bits(0.0), of_state),
    "bitsandbytes, 4 bits": (four_bits, of_weight("quant_state", "absmax")),
    "bitsandbytes, 4 bits, scales quantised": (lambda: four_bits(True), of_weight("quant_state", "absmax")),
    "torchao, 8 bits": (lambda: torchao_weights("Int8WeightOnlyConfig"), of_weight("scale")),
    "quanto, 8 bits": (lambda: quanto_weights(8), of_weight("_scale")),
    "quanto, 4 bits": (lambda: quanto_weights(4), of_weight("_scale")),
    "hqq, 8 bits": (lambda: hqq_weights(8), of_meta),
    "hqq, 4 bits": (lambda: hqq_weights(4), of_meta),
}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_few_bits(name, forwards):
    make, change = FORMATS[name]
    plain, paged = make(), hf_paged.patch(make(), **POOL)
    with torch.no_grad():
        paged(**prompts(5))  # bitsandbytes lays its weights out in another way in the first forward
    same_and_cheap(plain, paged, forwards)
    change_is_seen(plain, paged, change)


ROUNDS_OVER_THE_BATCH = {
    "bitsandbytes, outliers over 6": lambda: eight_bits(6.0),
    "bitsandbytes, outliers over 2": lambda: eight_bits(2.0),
    "torchao, one scale for all activations": lambda: torchao_weights(
        "Int8DynamicActivationInt8WeightConfig",
        granularity=pytest.importorskip("torchao.quantization.granularity").PerTensor(),
    ),
}


@pytest.mark.parametrize("name", ROUNDS_OVER_THE_BATCH)
def test_layers_that_round_over_the_whole_batch(name, forwards):
    """LLM.int8() and the like: what is left out of a forward changes how the rest is rounded. A prompt is still
    computed once for its beams and samples, which are the same rows."""
    make = ROUNDS_OVER_THE_BATCH[name]
    plain, paged = make(), hf_paged.patch(make(), **POOL)
    for seed in range(5):
        inputs = prompts(5, 13, seed=seed)
        theirs, ours = (torch.stack(run(each, inputs, max_new_tokens=1, **LOGITS).logits) for each in (plain, paged))
        torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=0)
    for options in (MODES["beams"], MODES["samples"]):
        forwards.clear()
        run(paged, prompts(13), max_new_tokens=3, **options)
        assert forwards[0] == 13
    assert list(stats_of(paged).stepped_aside) == ["batch_scale"]
    assert hits_of(paged) == 0


# -- optimizers --------------------------------------------------------------------------------------------------------


def optimizer(module, name, **options):
    def make(weights):
        return getattr(pytest.importorskip(module, reason=f"{module} is not installed"), name)(weights, **options)

    return make


def schedule_free(weights):
    made = optimizer("schedulefree", "AdamWScheduleFree", lr=0.3)(weights)
    made.train()
    return made


OPTIMIZERS = {
    "torch, fused": lambda weights: torch.optim.AdamW(weights, lr=0.3, fused=True),
    "bitsandbytes, 8 bits": optimizer("bitsandbytes.optim", "AdamW8bit", lr=0.3, min_8bit_size=16),
    "bitsandbytes, paged": optimizer("bitsandbytes.optim", "PagedAdamW8bit", lr=0.3),
    "torchao, 8 bits": optimizer("torchao.optim", "AdamW8bit", lr=0.3),
    "torchao, 4 bits": optimizer("torchao.optim", "AdamW4bit", lr=0.3),
    "lion": optimizer("lion_pytorch", "Lion", lr=0.3),
    "prodigy": optimizer("prodigyopt", "Prodigy", lr=3000.0),
    "schedulefree": schedule_free,
    "galore": optimizer("galore_torch", "GaLoreAdamW", lr=0.3),
    "lomo": None,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_an_optimizer(name):
    """On the weights of an adapter. Many write past the version counters; the twin gets the weights that came out."""
    plain, paged = twins(lambda model: with_lora(model, "one"))
    weights = [parameter for parameter in paged.parameters() if parameter.requires_grad]
    lomo = pytest.importorskip("lomo_optim", reason="lomo_optim is not installed") if name == "lomo" else None
    made = lomo.Lomo(paged, lr=30.0, clip_grad_value=1.0) if lomo is not None else OPTIMIZERS[name](weights)
    inputs = prompts(17, 17, seed=23)

    def step(model):
        if model is plain:  # its turn comes first
            loss = paged.train()(**inputs, labels=inputs["input_ids"]).loss
            if lomo is not None:
                made.fused_backward(loss, 30.0)
            else:
                loss.backward()
                made.step()
                made.zero_grad()
            paged.eval()
            plain.load_state_dict(paged.state_dict())

    def swap(model):
        if model is plain:
            made.eval()
            plain.load_state_dict(paged.state_dict())

    change_is_seen(plain, paged, step)
    if name == "schedulefree":
        change_is_seen(plain, paged, step)
        change_is_seen(plain, paged, swap, tolerance=1e-4)  # weights are averaged, without a step
