"""Models with recurrent layers between or beside their attention: attention in blocks, states in the library's layers,
forked and reordered together."""

import copy

import pytest
import torch
import transformers
from models import (
    _COMMON,
    EOS,
    PAD,
    VOCAB,
    Computed,
    assert_close,
    assert_equal,
    cache_of,
    paged_part,
    prompts,
    randomise,
    run,
    with_cache,
)

import hf_paged
from hf_paged import PagedCache, PagedConfig
from hf_paged.cache import PagedHybridLayer
from hf_paged.commands import tiny_models

_MAMBA = dict(mamba_n_heads=4, mamba_d_state=8, mamba_d_conv=4, mamba_chunk_size=4)
MODELS = {
    "jamba": (
        "Jamba",
        dict(
            num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8,
            use_mamba_kernels=False,
        ),
    ),
    "qwen3_next": (
        "Qwen3Next",
        dict(
            num_hidden_layers=4, head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
            linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        ),
    ),
    "falcon_h1": ("FalconH1", dict(mamba_d_ssm=64, head_dim=16, **_MAMBA)),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        dict(
            num_hidden_layers=3, num_local_experts=2, shared_intermediate_size=64, attention_multiplier=0.25,
            layer_types=["linear_attention", "full_attention", "linear_attention"], **_MAMBA,
        ),
    ),
    "lfm2": ("Lfm2", dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])),
}  # fmt: skip
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams_all": {"num_beams": 4, "num_return_sequences": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beam_samples": {"num_beams": 2, "do_sample": True},
}


# Made as the family sweep makes them: hybrid layers behind recurrent ones, and hybrid layers with a window.
TINY = {"zamba": "ZambaForCausalLM", "zamba2": "Zamba2ForCausalLM", "zaya": "ZayaForCausalLM"}
NAMES = [*MODELS, *TINY]


def make(name):
    if name in TINY:
        model = tiny_models.build(name, TINY[name])
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
        return model
    kind, arguments = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **arguments})
    return randomise(getattr(transformers, f"{kind}ForCausalLM")(config).eval())


def make_pair(name, **options):
    plain = make(name)
    return plain, hf_paged.patch(copy.deepcopy(plain), block_size=4, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_same_tokens(name, mode):
    """Left pads and all; nothing goes a dense way."""
    plain, paged = make_pair(name)
    assert_equal(plain, paged, prompts(5, 12, 9), max_new_tokens=8, **MODES[mode])
    stats = paged.paged_stats()
    assert stats.peak_used_blocks > 0
    assert all("pads are computed" in reason for reason in stats.fallbacks), stats.fallbacks


@pytest.mark.parametrize("name", MODELS)
def test_the_prompt_is_computed_once(name):
    """For 4 beams 12 tokens, not 48; their states are forked with their blocks."""
    _, paged = make_pair(name)
    computed = Computed(paged)
    run(paged, prompts(12), num_beams=4, max_new_tokens=1)
    assert computed.since() == 12
    run(paged, prompts(12), do_sample=True, num_return_sequences=3, max_new_tokens=1)
    assert computed.since() == 12  # again: a state has no place in the prefix index


@pytest.mark.parametrize("name", ["jamba", "falcon_h1", "zaya"])
def test_a_chat_in_one_cache(name):
    """As with the library's cache, whatever a model makes of several tokens behind a state."""
    answers = []
    for model in make_pair(name):
        kept = {"max_new_tokens": 5, "min_new_tokens": 5, "return_dict_in_generate": True}
        got = run(model, prompts(9), **kept)
        history = torch.cat([got.sequences, prompts(4, seed=8)["input_ids"]], 1)
        inputs = {"input_ids": history, "attention_mask": torch.ones_like(history)}
        answers.append(run(model, {**inputs, **with_cache(cache_of(got))}, max_new_tokens=6))
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", ["jamba", "falcon_h1", "zaya"])
def test_a_fork_has_a_state_of_its_own(name):
    """Two ways on from one prompt, each as if it were alone."""
    plain = make(name)
    model = copy.deepcopy(plain)
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(model.config, PagedConfig(block_size=4))
    base = prompts(9)["input_ids"]
    with torch.no_grad():
        model(base, **with_cache(cache))
        fork = copy.deepcopy(cache)
        for held, tail in ((cache, 11), (fork, 12), (cache, 13), (fork, 14)):
            got = model(torch.tensor([[tail]]), **with_cache(held)).logits
        expected = plain(torch.cat([base, torch.tensor([[12, 14]])], 1)).logits[:, -1:]
    torch.testing.assert_close(expected, got, atol=1e-4, rtol=1e-4)
    fork.check()
    cache.check()


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next", "zaya", "zamba"])
def test_rows_can_be_picked(name):
    plain, paged = make_pair(name)
    kept = {"return_dict_in_generate": True, "max_new_tokens": 3, "min_new_tokens": 3}
    inputs = prompts(7, 7, 7)
    ids = torch.tensor([[5], [6]])
    outputs = []
    for model in (plain, paged):
        cache = cache_of(run(model, inputs, **kept))
        if model is plain:  # the library has no such method for recurrent layers
            for layer in cache.layers:
                layer.reorder_cache(torch.tensor([2, 0]))
        else:
            cache.batch_select_indices(torch.tensor([2, 0]))
        with torch.no_grad():
            outputs.append(model(ids, **with_cache(cache)).logits)
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)


def test_hybrid_layers_are_paged():
    """Falcon-H1 has attention and a state in every layer: the former in blocks."""
    plain, paged = make_pair("falcon_h1")
    kept = {"return_dict_in_generate": True, "max_new_tokens": 6, "output_logits": True}
    output = run(paged, prompts(5, 12), num_beams=2, **kept)
    assert_close(run(plain, prompts(5, 12), num_beams=2, **kept), output)
    cache = paged_part(output)
    assert [type(layer) for layer in cache.layers] == [PagedHybridLayer] * 2
    assert cache.stats().used_blocks > 0
    assert cache.layers[0].keys.shape[0] == 4 == cache.layers[0].recurrent_states[0].shape[0]
    with pytest.raises(ValueError, match="cannot be saved"):
        cache.save("/nowhere/file", paged)
    cache.reset()
    assert paged.paged_stats().used_blocks == 0 and cache.get_seq_length() == 0


def test_hybrid_layers_with_a_window():
    """ZAYA: far beyond the window, rows of unlike length; what left the window is given back, the states stay."""
    plain, paged = make_pair("zaya")
    window = plain.config.sliding_window
    kept = {"return_dict_in_generate": True, "max_new_tokens": 3 * window, "output_logits": True}
    for options in ({}, {"num_beams": 3}):
        output = run(paged, prompts(5, 19), **kept, **options)
        assert_close(run(plain, prompts(5, 19), **kept, **options), output)
        cache = paged_part(output)
        assert [type(layer) for layer in cache.layers] == [PagedHybridLayer] * 2
        held = [max(len(row.blocks) for row in tables.rows) for tables in cache.state.tables]
        assert min(held) <= -(-window // 4) + 1 < max(held)
        assert {layer.conv_states[0].shape[0] for layer in cache.layers} == {2 * options.get("num_beams", 1)}
        cache.check()


@pytest.mark.parametrize("name", ["jamba", "falcon_h1", "lfm2", "zaya"])
def test_chunks(name):
    plain, paged = make_pair(name)
    assert_equal(plain, paged, prompts(13, 13), max_new_tokens=5, prefill_chunk_size=5)


def test_drafts_that_a_state_cannot_take_back():
    """Where the library refuses assisted decoding or goes another way, so do we."""
    plain, paged = make_pair("lfm2")
    inputs = prompts(14)
    inputs["input_ids"] = inputs["input_ids"][:, :7].repeat(1, 2)
    assert VOCAB > 3
    assert_equal(plain, paged, inputs, max_new_tokens=10, prompt_lookup_num_tokens=3)
    for name in ("jamba", "falcon_h1"):
        errors = []
        for model in make_pair(name):
            try:
                errors.append(run(model, inputs, max_new_tokens=6, prompt_lookup_num_tokens=3).tolist())
            except Exception as error:
                errors.append(type(error))
        assert errors[0] == errors[1]
