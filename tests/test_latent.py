"""Latent attention over blocks, and what is bound to modules for it."""

import copy

import pytest
import torch
from models import assert_equal, cache_of, forbid_dense, pair, prompts, run, with_cache

import hf_paged

MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "chunks": {"prefill_chunk_size": 5},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("family", ["deepseek_v3", "falcon"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_made_dense(family, mode, monkeypatch, short_pieces):
    forbid_dense(monkeypatch)
    plain, paged = pair(family, block_size=4)
    inputs = prompts(14) if mode == "prompt_lookup" else prompts(5, 12, 14)
    assert_equal(plain, paged, inputs, max_new_tokens=12, **MODES[mode])


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
def test_every_backend(backend):
    plain, paged = pair("deepseek_v3", block_size=4, backend=backend)
    for _ in range(2):  # the second time the prefix is found
        assert_equal(plain, paged, prompts(9, 14), max_new_tokens=6)


def test_a_token_takes_what_the_models_own_cache_takes():
    plain, paged = pair("deepseek_v3", block_size=1)
    inputs = prompts(12)
    run(paged, inputs, max_new_tokens=2)
    config = plain.config
    per_token = 4 * (config.kv_lora_rank + config.qk_rope_head_dim) * config.num_hidden_layers
    stats = paged.paged_stats()
    assert stats.bytes_allocated == per_token * (stats.num_blocks + 1)


def test_the_caches_dense_view_is_the_models_own():
    plain, paged = pair("deepseek_v3", block_size=4)
    inputs = prompts(9)
    cache = hf_paged.PagedCache(paged.config)
    with torch.no_grad():
        paged(**inputs, **with_cache(cache))
        own = cache_of(plain(**inputs, use_cache=True))
    for layer, expected in zip(cache.layers, own.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.values, expected.values, atol=1e-5, rtol=1e-5)


def test_a_hooked_projection_is_left_to_the_model():
    plain, paged = pair("deepseek_v3", block_size=4)
    for model in (plain, paged):
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: out * 1.5)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=6)
    assert any("made dense" in reason for reason in paged.paged_stats().fallbacks)


@pytest.mark.parametrize("family", ["deepseek_v3", "falcon", "bloom", "mpt"])
def test_unpatch_takes_everything_away(family):
    plain, paged = pair(family, block_size=4)
    copied = copy.deepcopy(paged)
    assert any("_hf_paged_adapted" in module.__dict__ for module in copied.modules())
    for model in (paged, copied):
        bound = [module for module in model.modules() if "_hf_paged_adapted" in module.__dict__]
        assert all(module.__dict__[module.__dict__["_hf_paged_adapted"]].__self__ is module for module in bound)
        hf_paged.unpatch(model)
        assert not any("_hf_paged_adapted" in module.__dict__ for module in model.modules())
        assert not any({"forward", "expand_kv"} & set(module.__dict__) for module in model.modules())
    assert paged.config._attn_implementation == plain.config._attn_implementation
    assert torch.equal(run(plain, prompts(7), max_new_tokens=5), run(paged, prompts(7), max_new_tokens=5))


@pytest.mark.parametrize("family", ["deepseek_v3", "falcon", "bloom", "mpt"])
def test_without_a_cache_nothing_changes(family):
    plain, paged = pair(family, block_size=4)
    inputs = prompts(5, 12)
    with torch.no_grad():
        assert torch.equal(plain(**inputs, use_cache=False).logits, paged(**inputs, use_cache=False).logits)


def test_a_loaded_cache_shows_and_goes_on_with_what_was_saved(tmp_path):
    plain, paged = pair("deepseek_v3", block_size=4)
    inputs, file = prompts(9), tmp_path / "prefix.safetensors"
    cache = hf_paged.PagedCache(paged.config, pool=paged.paged_pool)
    out = run(paged, inputs, max_new_tokens=4, **with_cache(cache))
    cache.save(file)
    loaded = hf_paged.PagedCache.load(file, paged)
    for mine, saved in zip(loaded.layers, cache.layers, strict=True):
        assert torch.equal(mine.keys, saved.keys) and torch.equal(mine.values, saved.values)
    longer = {"input_ids": torch.cat([out, torch.tensor([[5, 6, 7]])], dim=1)}
    expected = run(plain, longer, max_new_tokens=6)
    assert torch.equal(expected, run(paged, longer, max_new_tokens=6, **with_cache(loaded)))
