"""The registered attention and mask functions: right for every call, with or without our cache."""

import pytest
import torch
import transformers
from models import VOCAB, WINDOW, build, make_config, pair, prompts, run, with_cache
from transformers import masking_utils

from hf_paged import PagedCache, PagedConfig, attention, compat
from hf_paged.attention import paged_mask
from hf_paged.lazy import LazyMask

pytestmark = pytest.mark.filterwarnings("ignore:hf_paged")


def models(family, **overrides):
    """The same model under its own attention and under ours."""
    attn = "eager" if family == "gemma2" else None
    return build(family, attn=attn, **overrides), build(family, attn="hf_paged", **overrides)


def close(left, right, shown=None):
    if shown is not None:
        left, right = left[shown], right[shown]
    torch.testing.assert_close(left, right, atol=1e-4, rtol=0)


def test_registered_names():
    assert attention.NAME == "hf_paged"
    assert compat.ALL_ATTENTION_FUNCTIONS["hf_paged"] is attention.paged_attention_forward
    assert compat.ALL_MASK_ATTENTION_FUNCTIONS["hf_paged"] is paged_mask
    for part in ("flash", "sdpa", "flex_attention", "paged|", "/"):  # the library reads a meaning into these
        assert part not in attention.NAME


def test_without_the_mask_function_left_pads_would_be_seen(monkeypatch):
    """G2: so it must be registered; this test is loud if it is not."""
    plain, model = models("llama")
    inputs = prompts(3, 9)
    with torch.no_grad():
        expected = plain(**inputs).logits[:, -1]
        close(expected, model(**inputs).logits[:, -1])
        monkeypatch.setitem(compat.ALL_MASK_ATTENTION_FUNCTIONS, "hf_paged", lambda *args, **kwargs: None)
        assert (model(**inputs).logits[0, -1] - expected[0]).abs().max() > 1e-2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "qwen3"])
def test_without_a_cache(family, side):
    plain, model = models(family)
    inputs = prompts(5, 14, side=side)
    shown = inputs["attention_mask"].bool()
    with torch.no_grad():
        close(plain(**inputs, use_cache=False).logits, model(**inputs, use_cache=False).logits, shown)
        one = {"input_ids": inputs["input_ids"][1:]}
        close(plain(**one, use_cache=False).logits, model(**one, use_cache=False).logits)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_several_new_tokens_behind_a_dynamic_cache(family, pads):
    """1 < q < kv without a mask: SDPA's own causality would align upper-left."""
    plain, model = models(family)
    inputs = prompts(7, 17)
    caches = [compat.DynamicCache(config=entry.config) for entry in (plain, model)]
    if not pads:
        inputs = {"input_ids": inputs["input_ids"]}
    with torch.no_grad():
        for first, last in ((0, 9), (9, 12), (12, 17)):
            part = {"input_ids": inputs["input_ids"][:, first:last]}
            if pads:
                part["attention_mask"] = inputs["attention_mask"][:, :last]
            outputs = [
                entry(**part, **with_cache(cache)).logits for entry, cache in zip((plain, model), caches, strict=True)
            ]
            shown = inputs["attention_mask"][:, first:last].bool() if pads else None
            close(*outputs, shown)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_static_cache(family):
    plain, model = models(family)
    inputs, outputs = prompts(5, 12), []
    for entry in (plain, model):
        cache = transformers.StaticCache(config=entry.config, max_cache_len=40)
        options = {"max_new_tokens": WINDOW + 4, "return_dict_in_generate": True, "output_logits": True}
        outputs.append(run(entry, {**inputs, **with_cache(cache)}, **options))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for left, right in zip(outputs[0].logits, outputs[1].logits, strict=True):
        close(left, right)


def test_an_encoder():
    """Bidirectional attention, with pads and without."""
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    outputs = []
    inputs = prompts(5, 12, side="right")
    for attn in ("sdpa", "hf_paged"):
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(**config, attn_implementation=attn)).eval()
        with torch.no_grad():
            outputs.append((model(**inputs)[0], model(input_ids=inputs["input_ids"])[0]))
    shown = inputs["attention_mask"].bool()
    close(outputs[0][0], outputs[1][0], shown)
    close(outputs[0][1], outputs[1][1])


def test_packed_sequences():
    """Positions that start anew: the library masks one sequence from the other where there is no cache."""
    plain, model = models("llama")
    ids = prompts(12)["input_ids"]
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        expected = plain(input_ids=ids, position_ids=positions, use_cache=False).logits
        close(expected, model(input_ids=ids, position_ids=positions, use_cache=False).logits)
        close(expected[:, 5:], plain(input_ids=ids[:, 5:], use_cache=False).logits)


def custom_mask(dtype, query=9, keys=9):
    """A causal mask that hides two more keys, [2, 1, query, keys]."""
    mask = torch.ones(2, 1, query, keys, dtype=torch.bool).tril(keys - query)
    mask[0, :, 4:, 2:4] = False
    return mask if dtype is torch.bool else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_mask_of_the_users_own(family, dtype, cached):
    """4D masks pass through as they are; over a paged cache they are computed densely, and counted."""
    plain, model = models(family)
    ids = prompts(9, 9)["input_ids"]
    caches = [{"use_cache": False}, {"use_cache": False}]
    if cached:
        ours = PagedCache(model.config, PagedConfig(block_size=4))
        caches = [with_cache(compat.DynamicCache(config=plain.config)), with_cache(ours)]
    with torch.no_grad():
        arguments = {"input_ids": ids, "attention_mask": custom_mask(dtype)}
        close(plain(**arguments, **caches[0]).logits, model(**arguments, **caches[1]).logits)
        if cached:
            later = {"input_ids": ids[:, :3], "attention_mask": custom_mask(dtype, 3, 12)}
            close(plain(**later, **caches[0]).logits, model(**later, **caches[1]).logits)
            assert ours.stats().fallbacks == {"dense attention: a custom attention mask": 2 * 2}
            ours.check()
            step = {"input_ids": ids[:, :1]}
            close(plain(**step, **caches[0]).logits, model(**step, **caches[1]).logits)


def test_a_mask_of_the_users_own_between_windows():
    plain, model = models("mistral")
    ids = prompts(9, 9)["input_ids"]
    dynamic, ours = compat.DynamicCache(config=plain.config), PagedCache(model.config, PagedConfig(block_size=2))
    with torch.no_grad():
        arguments = {"input_ids": ids, "attention_mask": custom_mask(torch.bool)}
        close(plain(**arguments, **with_cache(dynamic)).logits, model(**arguments, **with_cache(ours)).logits)
        for _ in range(3):
            step = {"input_ids": ids[:, :2]}
            close(plain(**step, **with_cache(dynamic)).logits, model(**step, **with_cache(ours)).logits)
    ours.check()


def test_sinks_and_softcap_without_our_cache():
    """The eager function of the model's own file computes them."""
    for family in ("gpt_oss", "gemma2"):
        plain, paged = pair(family, attn="eager")
        with torch.no_grad():
            close(plain(**prompts(12), use_cache=False).logits, paged(**prompts(12), use_cache=False).logits)


# -- masks -------------------------------------------------------------------------------------------------------------

CAUSAL = masking_utils.causal_mask_function
SLIDING = masking_utils.sliding_window_causal_mask_function(WINDOW)
SHAPES = {"prefill": (12, 12, 0, 0), "chunk": (4, 12, 8, 0), "decode": (1, 12, 11, 0), "window": (3, 10, 20, 13)}


@pytest.mark.parametrize("pads", ["none", "left", "middle", "ones"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pattern", ["causal", "sliding"])
def test_a_lazy_mask_becomes_the_mask_of_the_library(pattern, shape, pads):
    """Whatever is done to it: slices, sums, logic."""
    query, keys, query_offset, key_offset = SHAPES[shape]
    mask = torch.ones(2, keys + key_offset, dtype=torch.bool)
    if pads == "left":
        mask[0, : key_offset + 3] = False
    if pads == "middle":
        mask[0, key_offset + 2 : key_offset + 5] = False
    arguments = {
        "batch_size": 2,
        "q_length": query,
        "kv_length": keys,
        "q_offset": query_offset,
        "kv_offset": key_offset,
        "mask_function": CAUSAL if pattern == "causal" else SLIDING,
        "attention_mask": None if pads == "none" else mask,
        "local_size": None if pattern == "causal" else WINDOW,
        "device": "cpu",
    }
    expected = compat.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert expected.shape == (2, 1, query, keys)
    full = paged_mask(**arguments, allow_is_causal_skip=False)
    assert full is not None and torch.equal(full, expected)  # lazy, but whole in any hands
    got = paged_mask(**arguments)
    if got is None:  # plain causal: one query that sees all, or all keys are new
        assert pattern == "causal" and pads in ("none", "ones") and (query in (1, keys))
        assert torch.equal(expected, torch.ones_like(expected).tril(keys - query))
        return
    assert type(got) is LazyMask and got.shape == expected.shape and got.dtype == torch.bool
    assert got.window == (None if pattern == "causal" else WINDOW)
    assert torch.equal(got[:, :, -1:], expected[:, :, -1:])
    assert torch.equal(got.clone(), expected)
    assert torch.equal(~paged_mask(**arguments), ~expected)
    assert torch.equal(paged_mask(**arguments) + torch.zeros(()), expected + torch.zeros(()))
    assert torch.equal(torch.where(paged_mask(**arguments), 0.0, -1.0), torch.where(expected, 0.0, -1.0))


@pytest.mark.parametrize("pads", [False, True])
def test_other_patterns_get_their_full_mask(pads):
    mask = torch.ones(2, 12, dtype=torch.bool)
    if pads:
        mask[0, :3] = False
    image = torch.tensor([[0] * 3 + [1] * 4 + [0] * 5] * 2).bool()

    def inside(batch, head, query, key):
        return image[batch, query] & image[batch, key]

    no_skip = {"allow_is_causal_skip": False}  # what the library says of masks that are not plain causal
    patterns = {
        "or": (masking_utils.or_masks(CAUSAL, inside), no_skip),
        "and": (masking_utils.and_masks(CAUSAL, inside), no_skip),
        "bidirectional": (masking_utils.bidirectional_mask_function, no_skip),
    }
    for name, (function, options) in patterns.items():
        arguments = {
            "batch_size": 2,
            "q_length": 12,
            "kv_length": 12,
            "mask_function": function,
            "attention_mask": mask,
            "device": "cpu",
            **options,
        }
        got = paged_mask(**arguments)
        assert type(got) is torch.Tensor, name
        assert torch.equal(got, compat.sdpa_mask(**{**arguments, **no_skip})), name


def test_the_patterns_of_the_library_are_recognised():
    assert compat.mask_pattern(CAUSAL) == ("causal", None)
    assert compat.mask_pattern(SLIDING) == ("sliding", WINDOW)
    chunked = masking_utils.chunked_causal_mask_function(7, torch.zeros(2, dtype=torch.int64))
    assert compat.mask_pattern(chunked) == ("chunked", 7)
    assert compat.mask_pattern(masking_utils.and_masks(CAUSAL, CAUSAL)) == ("other", None)
    assert compat.mask_pattern(masking_utils.or_masks(masking_utils.sliding_window_overlay(3), CAUSAL))[0] == "other"
    for family, windows in {"llama": {None}, "mistral": {WINDOW}, "gemma3": {WINDOW, None}}.items():
        layers = compat.reads_layer_types(make_config(family))
        assert {compat.window_of(*layer)[1] for layer in layers} == windows


# -- a decode step done again for the group's other layers ------------------------------------------------------------


def layer_call(cache, layer, generator, heads=4, kv_heads=2, dim=16, tokens=1, rows=2, **kwargs):
    """One layer's update and attention; and what a softmax over its dense keys and values gives."""
    key, value = (torch.randn(rows, kv_heads, tokens, dim, generator=generator) for _ in "kv")
    query = torch.randn(rows, heads, tokens, dim, generator=generator)
    module = torch.nn.Module()
    keys, values = cache.update(key, value, layer)
    scale = kwargs.setdefault("scaling", 0.25)
    out, _ = attention.paged_attention_forward(module, query, keys, values, None, **kwargs)
    dense_keys, dense_values = cache.layers[layer].keys, cache.layers[layer].values
    assert torch.equal(dense_keys[:, :, -tokens:], key)
    assert torch.equal(dense_values[:, :, -tokens:], value)
    scores = query @ dense_keys.repeat_interleave(heads // kv_heads, 1).transpose(2, 3) * scale
    if kwargs.get("softcap"):
        scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
    past = dense_keys.shape[2] - tokens
    scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(past + 1), -torch.inf)
    expected = torch.softmax(scores, 3) @ dense_values.repeat_interleave(heads // kv_heads, 1)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.fixture
def repeated(monkeypatch):
    """Collects, per call, whether a layer was done as the one before it."""
    seen = []
    repeat = attention._repeat

    def watched(*args):
        out = repeat(*args)
        seen.append(out is not None)
        return out

    monkeypatch.setattr(attention, "_repeat", watched)
    return seen


@pytest.mark.parametrize(
    ("unlike", "as_before"),
    [
        ({}, True),
        ({"dropout": 0.0, "position_ids": None, "softcap": None, "s_aux": None}, True),
        ({"scaling": 0.5}, False),
        ({"softcap": 2.0}, False),
        ({"heads": 8}, False),
        ({"heads": 2}, False),
        ({"kv_heads": 4}, False),
        ({"dim": 24}, False),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_layer_is_done_as_the_one_before_it_only_if_it_is_alike(repeated, unlike, as_before):
    generator = torch.Generator().manual_seed(0)
    cache = PagedCache(make_config("llama", num_hidden_layers=3), PagedConfig(block_size=4))
    cache.state.expected_columns = 9  # so that each row finds room beside its blocks
    shapes = {name: unlike[name] for name in ("heads", "kv_heads", "dim") if name in unlike}
    for layer, options in enumerate(({}, shapes, {})):
        layer_call(cache, layer, generator, tokens=5, **options)
    for _ in range(4):  # in the last of them every store grows
        repeated.clear()
        for layer, options in enumerate(({}, unlike, {})):
            layer_call(cache, layer, generator, **options)
            cache.pool.stores[layer].ensure(8)  # so that none is smaller than the first layer's
        assert repeated == [False, as_before, True]
        cache.check()


@torch.no_grad()
def test_a_layer_whose_memory_is_still_small_goes_its_own_way(repeated):
    generator = torch.Generator().manual_seed(0)
    cache = PagedCache(make_config("llama", num_hidden_layers=2), PagedConfig(block_size=4))
    for tokens in (4, 1, 1, 1, 1, 1):
        for layer in range(2):
            layer_call(cache, layer, generator, tokens=tokens, rows=1)
    assert False in repeated[3::2], "a store that has to grow is not written to before it has"
    assert True in repeated[3::2]


@torch.no_grad()
def test_a_layer_with_another_mask_goes_its_own_way():
    """As in a model that hands its layers unlike masks: the second hides a token that is stored."""
    plain, model = models("llama")
    ids = prompts(9)["input_ids"]
    full = torch.ones(1, 10, dtype=torch.long)
    hiding = full.clone()
    hiding[0, 4] = 0
    token = torch.tensor([[7]])
    outs = []
    for current in (plain, model):
        cache = PagedCache(model.config) if current is model else transformers.DynamicCache(config=model.config)
        current(ids, **with_cache(cache))
        outs.append(current(token, attention_mask=hiding, **with_cache(cache)).logits)
    close(*outs)


@torch.no_grad()
def test_a_row_that_stores_no_token_in_a_step_is_not_written_by_any_layer():
    """Its query, a pad, is answered all the same."""
    plain, model = models("llama")
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 0] = 0  # so that both rows hold nine tokens after the step
    outs = []
    for current in (plain, model):
        cache = PagedCache(model.config) if current is model else transformers.DynamicCache(config=model.config)
        current(torch.arange(18).view(2, 9) + 5, attention_mask=mask[:, :9], **with_cache(cache))
        padded = torch.cat([mask[:, :9], torch.tensor([[1], [0]])], 1)
        step = current(torch.tensor([[7], [8]]), attention_mask=padded, **with_cache(cache)).logits
        later = torch.cat([padded, mask[:, -1:]], 1)
        positions = torch.tensor([[10], [9]])
        outs.append(
            (step[0], current(mask[:, -1:], attention_mask=later, position_ids=positions, **with_cache(cache)).logits)
        )
    for expected, ours in zip(*outs, strict=True):
        close(expected, ours)
