"""`patch`, `unpatch`, `patched`: what they change, and that they put it back."""

import copy

import pytest
import torch
import transformers
from models import _COMMON, WINDOW, assert_close, assert_equal, build, cache_of, pair, prompts, run
from transformers import AutoModelForCausalLM

import hf_paged
from hf_paged import PagedCache, PagedConfig, compat

# The library's own, about names of its own that have moved.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def llava():
    """A tiny vision-language model: two parts with configs of their own."""
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=4, patch_size=2
        ),
        text_config=transformers.LlamaConfig(**_COMMON),
        image_token_id=96,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.15)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    return model


def all_configs(model):
    """Every config object in the model, with the implementation it names."""
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    found[id(model.config)] = model.config
    for name in getattr(model.config, "sub_configs", {}):
        found[id(getattr(model.config, name))] = getattr(model.config, name)
    return [(config, config._attn_implementation, config._attn_implementation_internal) for config in found.values()]


def snapshot(model):
    return dict(model.__dict__), all_configs(model), model.config.to_dict(), model.generation_config.to_dict()


def class_attributes(model):
    """What the model's class says; the library notes answers of its own there (`…_cached_value`)."""
    return {name: entry for name, entry in type(model).__dict__.items() if not name.endswith("_cached_value")}


# -- patch and unpatch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "bart", "t5", "falcon", "gpt_neo"])
@pytest.mark.parametrize("attn", [None, "eager"])
def test_unpatch_leaves_nothing(family, attn):
    """F8: instance, class and configs are as before."""
    model = build(family, attn=attn)
    before, kind = snapshot(model), class_attributes(model)
    forward = model.forward
    assert hf_paged.patch(model) is model
    assert model.__dict__.keys() > before[0].keys()
    assert hf_paged.unpatch(model) is model
    assert snapshot(model) == before
    assert model.forward == forward
    assert class_attributes(model) == kind
    hf_paged.unpatch(model)  # of a model that is not patched: nothing
    assert snapshot(model) == before


def test_patch_changes_the_text_part_of_a_composite_model_only():
    model = llava()
    before = snapshot(model)
    hf_paged.patch(model)
    assert model.config.text_config._attn_implementation == "hf_paged"
    assert model.config.vision_config._attn_implementation == before[1][0][1] == "sdpa"
    hf_paged.unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_a_vision_language_model(options):
    plain = llava()
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=6, **options)
    assert paged.paged_stats().fallbacks == {}
    inputs = prompts(9, 12)
    inputs["input_ids"].clamp_(max=95)
    inputs["input_ids"][:, 4:8] = 96
    inputs["pixel_values"] = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert_equal(plain, paged, inputs, max_new_tokens=6, **options)
    stats = paged.paged_stats()
    assert stats.stepped_aside.keys() == {"unknown_keyword"}, "what an image means for a row is not known"
    assert len(stats.fallbacks) == 1, "the text part attends over blocks all the same"


def test_patch_is_idempotent():
    model = hf_paged.patch(build("llama"), block_size=4)
    pool, state = model.paged_pool, dict(model.__dict__)
    for again in ({}, {"block_size": 4}):
        hf_paged.patch(model, **again)
        assert model.paged_pool is pool and model.__dict__ == state
    hf_paged.patch(model, PagedConfig(block_size=4))
    assert model.paged_pool is pool


def test_other_options_patch_anew():
    plain = build("llama")
    before = snapshot(plain)
    model = copy.deepcopy(plain)
    untouched = snapshot(model)
    hf_paged.patch(model, block_size=4)
    pool = model.paged_pool
    hf_paged.patch(model, block_size=8)
    assert model.paged_pool is not pool and model.paged_stats().block_size == 8
    assert_equal(plain, model, prompts(5, 12), max_new_tokens=5)
    hf_paged.patch(model, PagedConfig(block_size=2), prompt_once=False)  # options override the config
    assert model.paged_pool.config == PagedConfig(block_size=2, prompt_once=False)
    hf_paged.unpatch(model)
    assert snapshot(model) == untouched
    assert snapshot(plain) == before


def test_unknown_and_wrong_options_change_nothing():
    model = build("llama")
    before = snapshot(model)
    with pytest.raises(TypeError, match=r"unknown option\(s\) blocksize.*block_size"):
        hf_paged.patch(model, blocksize=4)
    with pytest.raises(ValueError, match="block_size must be a power of two"):
        hf_paged.patch(model, block_size=3)
    assert snapshot(model) == before
    hf_paged.patch(model, block_size=4)
    with pytest.raises(ValueError, match="not both"):
        hf_paged.patch(model, num_blocks=4, memory_budget="1GB")
    assert model.paged_stats().block_size == 4


def test_patched_puts_back():
    plain, model = build("llama"), build("llama")
    before = snapshot(model)
    with hf_paged.patched(model, block_size=4) as same:
        assert same is model and model.paged_stats().block_size == 4
        assert_equal(plain, model, prompts(5), max_new_tokens=4)
    assert snapshot(model) == before
    with pytest.raises(ZeroDivisionError), hf_paged.patched(model):
        raise ZeroDivisionError
    assert snapshot(model) == before


def test_patched_inside_patched():
    model = build("llama")
    before = snapshot(model)
    with hf_paged.patched(model, block_size=4):
        outer = model.paged_pool
        with pytest.raises(ZeroDivisionError), hf_paged.patched(model, block_size=8):
            assert model.paged_stats().block_size == 8
            raise ZeroDivisionError
        assert model.paged_pool is outer
        with hf_paged.patched(model):  # no settings: nothing changes
            assert model.paged_pool is outer
        assert model.paged_pool is outer and model.paged_stats().block_size == 4
        run(model, prompts(5), max_new_tokens=3)
        assert outer.stats().peak_used_blocks > 0
    assert snapshot(model) == before


def test_an_exception_in_generate_leaves_the_model_as_it_was():
    plain, paged = pair("llama", block_size=4)
    before = dict(paged.__dict__), paged.generation_config.to_dict()

    def fail(ids, scores):
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run(paged, prompts(5), max_new_tokens=4, logits_processor=[fail])
        assert (dict(paged.__dict__), paged.generation_config.to_dict()) == before
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=4)


def test_generate_leaves_no_trace_on_the_generation_config():
    _, paged = pair("llama", block_size=4)
    config = transformers.GenerationConfig(max_new_tokens=4, num_beams=2, eos_token_id=2, pad_token_id=0)
    before = dict(config.__dict__)
    paged.generate(**prompts(5), generation_config=config)
    assert dict(config.__dict__) == before
    assert not hasattr(paged.generation_config, "_hf_paged_call")


# -- training ----------------------------------------------------------------------------------------------------------


def train(model, steps=2):
    """Gradients of the first step and the weights after all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = prompts(5, 12, side="right")
    gradients = None
    torch.manual_seed(0)  # T5 has dropout
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients = gradients or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return gradients, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "t5"])
def test_training_is_bit_equal_after_unpatch_and_the_same_while_patched(family):
    """F8, H16."""
    plain = build(family)
    after, during = copy.deepcopy(plain), copy.deepcopy(plain)
    hf_paged.patch(after)
    run(after, prompts(5), max_new_tokens=3)
    hf_paged.unpatch(after)
    hf_paged.patch(during)
    gradients, weights = train(plain)
    assert gradients
    for left, right in zip(weights, train(after)[1], strict=True):
        assert torch.equal(left, right)
    for left, right in zip(gradients, train(during)[0], strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-5)
    assert during.paged_stats().num_blocks == 0  # training has stored nothing


def test_gradient_checkpointing():
    plain, paged = pair("llama")
    for model in (plain, paged):
        model.gradient_checkpointing_enable()
    for left, right in zip(train(plain)[0], train(paged)[0], strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-5)


def test_generating_between_training_steps():
    """New weights are seen: nothing of an earlier call is used."""
    plain, paged = pair("llama", block_size=4)
    for _ in range(2):
        assert_equal(plain, paged, prompts(5, 12), max_new_tokens=4)
        train(plain, 1), train(paged, 1)


# -- refused -----------------------------------------------------------------------------------------------------------


def refuse(model, match):
    before = snapshot(model)
    with pytest.raises(ValueError, match=match) as caught:
        hf_paged.patch(model)
    assert type(model).__name__ in str(caught.value)
    assert snapshot(model) == before


def test_git_is_refused():
    config = transformers.GitConfig(
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=97,
    )  # fmt: skip
    refuse(transformers.GitForCausalLM(config), "image features")


def test_sparse_index_attention_is_refused():
    arguments = {**_COMMON, "num_key_value_heads": 4}
    config = transformers.GlmMoeDsaConfig(
        **arguments, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=16,
        q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16, index_topk=4, index_head_dim=16,
        index_n_heads=2,
        moe_intermediate_size=32,
    )  # fmt: skip
    refuse(transformers.GlmMoeDsaForCausalLM(config), "read the cache by index")


def test_models_without_keys_and_values_are_refused():
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    refuse(transformers.MambaForCausalLM(config), "keys and values|cache classes")


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), lambda: "gpt2", lambda: build("t5").encoder, object])
def test_other_objects_are_refused(make):
    with pytest.raises(TypeError, match="needs a Transformers model with generate"):
        hf_paged.patch(make())


# -- beside other things -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_static_cache_passes_through_and_is_counted(family, options):
    plain, paged = pair(family, block_size=4)
    everything = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": WINDOW + 2}
    expected = run(plain, prompts(5, 12), cache_implementation="static", **everything, **options)
    got = run(paged, prompts(5, 12), cache_implementation="static", **everything, **options)
    assert_close(expected, got)
    assert type(cache_of(got)) is type(cache_of(expected))
    assert paged.paged_stats().peak_used_blocks == 0
    (reason,) = paged.paged_stats().fallbacks
    assert "cache_implementation='static'" in reason
    assert paged.paged_stats().fallbacks[reason] == 1


def test_a_cache_of_the_user_stays_what_it_is():
    plain, paged = pair("llama")
    cache = compat.DynamicCache(config=paged.config)
    got = run(paged, {**prompts(5, 12), compat.CACHE_ARGUMENT: cache}, max_new_tokens=4, return_dict_in_generate=True)
    assert cache_of(got) is cache and cache.get_seq_length() > 12
    assert torch.equal(run(plain, prompts(5, 12), max_new_tokens=4), got.sequences)


def test_a_patched_model_can_be_saved(tmp_path):
    plain, paged = pair("llama", block_size=4)
    paged.save_pretrained(tmp_path)
    assert "hf_paged" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(run(plain, prompts(5), max_new_tokens=4), run(loaded, prompts(5), max_new_tokens=4))
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="hf_paged")
    cache = PagedCache(ours.config)
    got = run(ours, {**prompts(5), compat.CACHE_ARGUMENT: cache}, max_new_tokens=4)
    assert torch.equal(run(plain, prompts(5), max_new_tokens=4), got)


def test_peft():
    """A model wrapped by PEFT is patched inside; adapters are honoured, switched off too."""
    peft = pytest.importorskip("peft")
    plain = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    plain.eval()
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    base = paged.get_base_model()
    for options in ({}, {"num_beams": 3}):
        expected = run(plain, prompts(5, 12), max_new_tokens=6, **options)
        assert torch.equal(expected, run(paged, prompts(5, 12), max_new_tokens=6, **options))
        with plain.disable_adapter(), paged.disable_adapter():
            other = run(plain, prompts(5, 12), max_new_tokens=6, **options)
            assert torch.equal(other, run(paged, prompts(5, 12), max_new_tokens=6, **options))
        assert not torch.equal(expected, other)
    assert base.paged_stats().peak_used_blocks > 0
    hf_paged.unpatch(paged)
    assert "_hf_paged" not in base.__dict__
