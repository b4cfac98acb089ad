"""ALiBi over blocks: bloom and mpt, whose attention adds a slope per head times the key's position."""

import copy
import itertools

import pytest
import torch
from models import VOCAB, assert_close, assert_equal, build, cache_of, forbid_dense, pair, prompts, run, with_cache

import hf_paged
from hf_paged import adapters, compat

pytestmark = pytest.mark.filterwarnings("ignore:hf_paged")
FAMILIES = ["bloom", "mpt"]
SIX_HEADS = {"bloom": {"hidden_size": 96, "n_head": 6}, "mpt": {"d_model": 96, "n_heads": 6}}
LONG = {"bloom": {}, "mpt": {"max_seq_len": 1024}}


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_backend(family, backend, monkeypatch, short_pieces):
    forbid_dense(monkeypatch)
    plain, paged = pair(family, block_size=4, backend=backend)
    for _ in range(2):  # the second time the prefix is found
        assert_equal(plain, paged, prompts(9, 14), max_new_tokens=6)
        assert_equal(plain, paged, prompts(13), max_new_tokens=6, num_beams=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_are_no_power_of_two(family):
    """Their slopes follow another rule."""
    plain, paged = pair(family, overrides=SIX_HEADS[family], block_size=4)
    assert_equal(plain, paged, prompts(5, 21), max_new_tokens=8)
    assert paged.paged_stats().fallbacks == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_longer_than_a_chunk_of_queries(family):
    plain, paged = pair(family, overrides=LONG[family])
    assert_equal(plain, paged, prompts(530, 610), max_new_tokens=3)
    assert_equal(plain, paged, prompts(610), max_new_tokens=3, num_beams=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lost_slope_would_be_seen(family, monkeypatch):
    """So the other tests are loud if a path drops it."""
    forward = getattr(adapters, f"_{family}_forward")
    slopes = adapters._SLOPES[forward]
    monkeypatch.setitem(adapters._SLOPES, forward, lambda *args: torch.zeros_like(slopes(*args)))
    plain, paged = pair(family, block_size=4)
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    outputs = [run(model, prompts(12), **options).logits for model in (plain, paged)]
    for logits, other in zip(*outputs, strict=True):
        assert (logits - other).abs().max() > 1e-2


def test_all_layers_share_one_tensor_of_slopes():
    """Or no layer could repeat what the first has worked out."""
    model = hf_paged.patch(build("bloom"))
    first, second = (layer.self_attention.__dict__[adapters._ALIBI] for layer in model.transformer.h)
    assert first is second
    assert torch.equal(first, torch.tensor([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0]))


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_layers_of_unlike_slopes_do_not_repeat_one_another(backend, monkeypatch):
    """No model has such, but the backends do not know."""
    slopes = itertools.cycle([torch.tensor([0.5, 0.1, 0.02, 0.004]), torch.tensor([0.01, 0.2, 0.9, 0.3])])
    monkeypatch.setitem(adapters._SLOPES, adapters._bloom_forward, lambda *args: next(slopes))  # two layers, in turn
    model, outputs = build("bloom"), []
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    for name in ("reference", backend):
        with hf_paged.patched(model, block_size=4, backend=name):
            outputs.append(run(model, prompts(5, 12), **options))
    assert_close(*outputs)


@pytest.mark.parametrize("side", ["right", "middle"])
def test_mpt_counts_columns_and_says_where_that_keeps_it_dense(side):
    inputs = prompts(5, 14, side="right")
    if side == "middle":
        inputs = prompts(14, 14)
        inputs["attention_mask"][0, 4:9] = 0
    for family, reasons in (("bloom", []), ("mpt", ["dense attention: ALiBi that counts pads"])):
        plain, paged = pair(family, block_size=4)
        assert_equal(plain, paged, inputs, max_new_tokens=5)
        assert list(paged.paged_stats().fallbacks) == reasons


def test_falcon_rounds_its_bias_and_stays_as_it_is():
    plain, paged = pair("falcon_alibi", block_size=4)
    assert_equal(plain, paged, prompts(5, 14), max_new_tokens=5)
    assert any("made dense" in reason for reason in paged.paged_stats().fallbacks)
    assert not any("_hf_paged_adapted" in module.__dict__ for module in paged.modules())


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4}}),
        ("bloom", {"apply_residual_connection_post_layernorm": True}),
        ("bloom", {"pretraining_tp": 2, "slow_but_exact": True}),
    ],
    ids=str,
)
def test_unusual_configs(family, overrides):
    plain, paged = pair(family, overrides=overrides, block_size=4)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_forwards_of_the_users_own(family):
    """With our cache, with the library's, with none; several tokens at a time; behind a crop; weights asked for."""
    plain, paged = pair(family, block_size=4)
    inputs = prompts(6, 11)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = [compat.DynamicCache(config=plain.config), hf_paged.PagedCache(paged.config, pool=paged.paged_pool)]
    caches.append(compat.DynamicCache(config=paged.config))
    shown = mask.bool()
    with torch.no_grad():
        for first, last in ((0, 4), (4, 9), (9, 11)):
            part = {"input_ids": ids[:, first:last], "attention_mask": mask[:, :last], "use_cache": True}
            expected, *others = (
                model(**part, **with_cache(cache)).logits[shown[:, first:last]]
                for model, cache in zip((plain, paged, paged), caches, strict=True)
            )
            for logits in others:
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        for cache in caches:
            cache.crop(-3)
        part = {"input_ids": ids[:, 8:9], "attention_mask": mask[:, :9], "use_cache": True}
        expected, *others = (
            model(**part, **with_cache(cache)).logits
            for model, cache in zip((plain, paged, paged), caches, strict=True)
        )
        for logits in others:
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        asked = [model(**inputs, use_cache=False, output_attentions=True) for model in (plain, paged)]
    for left, right in zip(asked[0].attentions, asked[1].attentions, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_what_it_was(family):
    plain, paged = pair(family, block_size=4)
    losses = []
    for model in (plain, paged):
        model.train()
        inputs = prompts(5, 12)
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        losses.append((loss.detach(), next(model.parameters()).grad))
    assert all(torch.equal(left, right) for left, right in zip(*losses, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_no_further_from_float32(family):
    """The models round their bias to 16 bits; over blocks it stays in 32."""
    exact = build(family, **LONG[family])
    ids = torch.randint(3, VOCAB, (1, 300), generator=torch.Generator().manual_seed(0))
    half = copy.deepcopy(exact).to(torch.bfloat16)
    paged = hf_paged.patch(copy.deepcopy(half))
    distances = []
    with torch.no_grad():
        expected = exact(ids).logits
        for model, cache in (
            (half, compat.DynamicCache(config=half.config)),
            (paged, hf_paged.PagedCache(paged.config, pool=paged.paged_pool)),
        ):
            logits = [
                model(ids[:, first:last], use_cache=True, **with_cache(cache)).logits
                for first, last in ((0, 250), *((place, place + 1) for place in range(250, 300)))
            ]
            distances.append(float((torch.cat(logits, 1).float() - expected).abs().mean()))
    assert distances[1] < 1.05 * distances[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_of_a_patched_model_goes_its_own_way(family):
    plain, paged = pair(family, block_size=4)
    copied = copy.deepcopy(paged)
    hf_paged.unpatch(paged)
    assert_equal(plain, copied, prompts(5, 12), max_new_tokens=5)
    assert copied.paged_stats().fallbacks == {}
    output = run(copied, prompts(7), max_new_tokens=4, return_dict_in_generate=True)
    assert isinstance(cache_of(output), hf_paged.PagedCache)
    assert torch.equal(output.sequences, run(paged, prompts(7), max_new_tokens=4))
