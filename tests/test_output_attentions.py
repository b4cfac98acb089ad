"""`output_attentions=True`: a patched model gives the weights that it gave before, and pages again afterwards."""

import copy
import warnings

import pytest
import torch
import transformers
from models import FAMILIES, assert_close, build, pair, prompts, run, with_cache

import hf_paged
from hf_paged import PagedCache

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

WEIGHTS = {"output_attentions": True, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 5}
DENSE = "dense attention: attention weights are asked for"
NAMES = ("attentions", "decoder_attentions", "cross_attentions", "encoder_attentions")
MODES = [
    {},
    {"num_beams": 3},
    {"do_sample": True, "num_return_sequences": 2},
    {"prompt_lookup_num_tokens": 2},
]


def flat(entry):
    """The tensors (or None) of nested tuples, in order, and how they are nested."""
    if isinstance(entry, (tuple, list)):
        parts = [flat(part) for part in entry]
        return [tensor for tensors, _ in parts for tensor in tensors], tuple(shape for _, shape in parts)
    return [entry], None


def assert_same_weights(expected, got):
    """Returns how many tensors there were."""
    count = 0
    for name in NAMES:
        (left, outer), (right, inner) = flat(getattr(expected, name, None)), flat(getattr(got, name, None))
        assert outer == inner, name
        for one, other in zip(left, right, strict=True):
            assert (one is None) == (other is None), name
            if one is not None:
                assert one.shape == other.shape, name
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
                count += 1
    return count


def dense_calls(model):
    return sum(count for reason, count in model.paged_stats().fallbacks.items() if reason.startswith("dense"))


def inputs_of(model):
    lengths = (9, 9) if model.config.is_encoder_decoder else (5, 12)
    return prompts(*lengths)


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_eager_model_gives_its_weights(family, options):
    plain, paged = pair(family, attn="eager", block_size=4)
    inputs = inputs_of(plain)
    if "prompt_lookup_num_tokens" in options:
        inputs = {name: entry[1:] for name, entry in inputs.items()}
    try:
        expected = run(plain, inputs, **WEIGHTS, **options)
    except (ValueError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            run(paged, inputs, **WEIGHTS, **options)
        return
    before = dense_calls(paged)
    got = run(paged, inputs, **WEIGHTS, **options)
    assert_close(expected, got)
    assert_same_weights(expected, got)
    paged.paged_pool.check()
    # The next call pages again.
    del got
    asked, aside = dense_calls(paged), dict(paged.paged_stats().stepped_aside)
    calm = {name: entry for name, entry in WEIGHTS.items() if name != "output_attentions"}
    assert_close(run(plain, inputs, **calm, **options), run(paged, inputs, **calm, **options))
    again = pair(family, attn="eager", block_size=4)[1]
    run(again, inputs, **calm, **options)
    assert dense_calls(paged) - asked == dense_calls(again) - before, "as dense as a model that was never asked"
    assert paged.paged_stats().stepped_aside.get("output_attentions", 0) == aside.get("output_attentions", 0)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "deepseek_v3", "bart", "t5"])
def test_there_are_weights_to_compare(family):
    plain, paged = pair(family, attn="eager", block_size=4)
    inputs = inputs_of(plain)
    layers, steps = 2, 5
    count = assert_same_weights(run(plain, inputs, **WEIGHTS), run(paged, inputs, **WEIGHTS))
    assert count >= layers * steps
    asked = paged.paged_stats().fallbacks
    assert DENSE in asked or any("made dense" in reason for reason in asked), "T5 attends by itself up to 5.23"
    assert paged.paged_stats().stepped_aside["output_attentions"] == 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "bart"])
def test_a_model_whose_attention_gives_none_gives_none(family):
    """SDPA gives no weights. One warning says so, and nothing else changes."""
    plain, paged = pair(family, attn="sdpa", block_size=4)
    inputs = inputs_of(plain)
    expected = run(plain, inputs, **WEIGHTS)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.manual_seed(5)
        got = paged.generate(**inputs, **WEIGHTS)
        del got
        torch.manual_seed(5)
        got = paged.generate(**inputs, **WEIGHTS)
    assert_close(expected, got)
    assert_same_weights(expected, got)
    ours = [str(entry.message) for entry in seen if "hf_paged" in str(entry.message)]
    assert len(ours) == 1 and "sdpa" in ours[0] and "eager" in ours[0], ours
    assert dense_calls(paged) == 0, "over blocks all the same"


def test_finished_rows_keep_their_weights():
    """A row that has stopped still attends, in the unpatched model: so it must not give its blocks back."""
    from models import likely_eos

    plain = likely_eos(build("llama", attn="eager"), 6.0)
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    inputs = prompts(5, 12, 9, seed=8)
    expected = run(plain, inputs, **{**WEIGHTS, "max_new_tokens": 12})
    ends = [(row == 2).nonzero().flatten().tolist() for row in expected.sequences[:, 12:]]
    assert any(end and end[0] < 8 for end in ends), "some row stops early"
    assert_same_weights(expected, run(paged, inputs, **{**WEIGHTS, "max_new_tokens": 12}))


def test_savings_stand_aside_and_come_back():
    plain, paged = pair("llama", attn="eager", block_size=4)
    inputs = prompts(24, 24)
    for _ in range(2):  # the second time it could be found
        run(paged, inputs, max_new_tokens=4)
    found = paged.paged_stats().prefix_hit_tokens
    assert found > 0
    expected, got = run(plain, inputs, **WEIGHTS), run(paged, inputs, **WEIGHTS)
    assert_same_weights(expected, got)
    assert got.attentions[0][0].shape[2:] == (24, 24), "every token's weights"
    assert paged.paged_stats().prefix_hit_tokens == found
    run(paged, inputs, max_new_tokens=4)
    assert paged.paged_stats().prefix_hit_tokens > found


@pytest.mark.parametrize("how", ["config", "model"])
def test_a_config_that_says_eager_now(how):
    """The unpatched model attends eagerly from then on, and so does ours where it has to be dense."""
    plain, paged = pair("llama", attn="sdpa", block_size=4)
    for model in (plain, paged):
        if how == "config":
            model.config._attn_implementation = "eager"
        else:
            model.set_attn_implementation("eager")
    expected, got = run(plain, prompts(5, 12), **WEIGHTS), run(paged, prompts(5, 12), **WEIGHTS)
    assert_close(expected, got)
    assert assert_same_weights(expected, got) == 10
    del got
    asked = dense_calls(paged)
    assert torch.equal(run(plain, prompts(5, 12), max_new_tokens=5), run(paged, prompts(5, 12), max_new_tokens=5))
    assert dense_calls(paged) == asked and paged.config._attn_implementation == "hf_paged"
    hf_paged.unpatch(paged)
    assert paged.config._attn_implementation == "eager", "as the unpatched model's"


def test_forward_with_a_paged_cache():
    plain, paged = pair("llama", attn="eager", block_size=4)
    inputs = prompts(5, 12)
    with torch.no_grad():
        expected = plain(**inputs, output_attentions=True)
        cache = PagedCache(paged.config, pool=paged.paged_pool)
        got = paged(**inputs, output_attentions=True, **with_cache(cache))
        assert len(got.attentions) == 2
        for one, other in zip(expected.attentions, got.attentions, strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(expected.logits[:, -1], got.logits[:, -1])
        without = paged(**inputs, output_attentions=True, use_cache=False)
        torch.testing.assert_close(without.attentions[1], expected.attentions[1])


def tiny_whisper():
    torch.manual_seed(0)
    sizes = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 32)
    layers = dict.fromkeys(
        ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2
    )
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        vocab_size=1800,
        max_target_positions=64,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sizes,
        **layers,
        **ids,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    settings = model.generation_config
    settings.no_timestamps_token_id, settings.is_multilingual, settings.alignment_heads = 200, False, [[0, 0], [1, 1]]
    return model


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_whisper_word_timestamps(options):
    """The library sets the config to eager for these, and leaves it so."""
    plain = tiny_whisper()
    paged = hf_paged.patch(copy.deepcopy(plain))
    sound = {"input_features": torch.randn(2, 80, 3000, generator=torch.Generator().manual_seed(0))}
    for _ in range(2):
        asked = {"return_token_timestamps": True, "max_new_tokens": 8, **options}
        expected, got = run(plain, sound, **asked), run(paged, sound, **asked)
        assert torch.equal(expected["sequences"], got["sequences"])
        assert torch.equal(expected["token_timestamps"], got["token_timestamps"])
        assert plain.config._attn_implementation == "eager"
        asked = dense_calls(paged)
        expected, got = (run(model, sound, max_new_tokens=8, **options) for model in (plain, paged))
        assert torch.equal(expected, got)
        assert dense_calls(paged) == asked and paged.config._attn_implementation == "hf_paged"
    assert paged.paged_stats().used_blocks == 0
