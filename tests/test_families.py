"""Model families with unlike attention: the same tokens and logits as the unpatched model.

Over blocks where the model lets us, dense where it does its own attention.
"""

import pytest
import torch
from models import ENCODER_DECODER, FAMILIES, WINDOW, assert_equal, forbid_dense, pair, prompts, run

DECODERS = [family for family in FAMILIES if family not in ENCODER_DECODER]
OVER_BLOCKS = ["llama", "mistral", "gemma2", "qwen3", "gpt2", "gpt_oss", "gemma3", "bloom", "mpt", "opt"]
ALIBI = ["bloom", "mpt"]
WINDOWED = ["mistral", "gemma2", "gemma3", "gpt_oss"]

MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "chunks": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", DECODERS)
def test_left_pads(family, mode, short_pieces):
    plain, paged = pair(family, block_size=4)
    assert_equal(plain, paged, prompts(5, 12, 14), max_new_tokens=WINDOW + 3, **MODES[mode])


@pytest.mark.parametrize("family", DECODERS)
def test_prompt_lookup_and_beam_samples(family):
    plain, paged = pair(family, block_size=4)
    inputs = prompts(14)
    inputs["input_ids"] = inputs["input_ids"][:, :7].repeat(1, 2)  # something to look up
    assert_equal(plain, paged, inputs, max_new_tokens=14, prompt_lookup_num_tokens=3)
    assert_equal(plain, paged, prompts(9, 13), max_new_tokens=6, num_beams=4, do_sample=True, num_return_sequences=2)


@pytest.mark.parametrize("family", OVER_BLOCKS)
def test_nothing_is_made_dense(family, monkeypatch, short_pieces):
    """The families the paged path is for never leave it, in any mode."""
    forbid_dense(monkeypatch)
    plain, paged = pair(family, block_size=4)
    for options in [*MODES.values(), {"prompt_lookup_num_tokens": 3}]:
        inputs = prompts(11) if "prompt_lookup_num_tokens" in options else prompts(5, 12, 14)
        expected = run(plain, inputs, max_new_tokens=12, **options)
        assert torch.equal(expected, run(paged, inputs, max_new_tokens=12, **options))
    assert paged.paged_stats().fallbacks == {}


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt2", "bloom", "mpt", "mistral"])
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_model_that_was_eager(family, mode):
    """What the model computed before is what it computes after, and eager arithmetic may differ (softcap)."""
    plain, paged = pair(family, attn="eager", block_size=4)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=14, **MODES[mode])


@pytest.mark.parametrize("length", [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
@pytest.mark.parametrize("family", WINDOWED)
def test_prompts_around_the_window(family, length):
    """D1, D2, D3: one row, three windows on."""
    plain, paged = pair(family, block_size=4)
    assert_equal(plain, paged, prompts(length), max_new_tokens=3 * WINDOW)


@pytest.mark.parametrize("chunk", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_chunks_around_the_window(family, chunk):
    """D2: the prompt in chunks of any size, left pads included."""
    plain, paged = pair(family, block_size=2)
    assert_equal(plain, paged, prompts(7, 20, 3 * WINDOW), max_new_tokens=5, prefill_chunk_size=chunk)


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gemma3"])
def test_windows_and_block_sizes(family, block_size, short_pieces):
    plain, paged = pair(family, block_size=block_size)
    assert_equal(plain, paged, prompts(4, 9, 17), max_new_tokens=WINDOW + 3)
    assert_equal(plain, paged, prompts(4, 9), max_new_tokens=WINDOW + 2, num_beams=3)
    assert_equal(plain, paged, prompts(9), max_new_tokens=2 * WINDOW, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("side", ["right", "middle"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2", *ALIBI])
def test_pads_on_the_right_and_in_the_middle(family, side, short_pieces):
    """The query of a right pad is still sampled from, and the library's windows count pads."""
    plain, paged = pair(family, block_size=4)
    inputs = prompts(5, 14, 12, side="right")
    if side == "middle":
        inputs = prompts(14, 14, 9)
        inputs["attention_mask"][0, 4:9] = 0
        inputs["attention_mask"][2, 11:13] = 0
    assert_equal(plain, paged, inputs, max_new_tokens=WINDOW + 2)
    assert_equal(plain, paged, inputs, max_new_tokens=4, num_beams=2)
    if family != "gemma2" or side == "middle":
        # Eager attention gives a pad that sees no token the mean of all values, pads of earlier chunks included, and
        # those are not stored. So chunks are not for pads longer than the window on the right of an eager model.
        assert_equal(plain, paged, inputs, max_new_tokens=6, prefill_chunk_size=4)
    else:
        assert_equal(plain, paged, prompts(8, 14, 12, side="right"), max_new_tokens=6, prefill_chunk_size=4)


@pytest.mark.parametrize("family", ENCODER_DECODER)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=["greedy", "beams", "samples", "beam_samples", "prompt_lookup"],
)
def test_encoder_decoder(family, options):
    plain, paged = pair(family, block_size=4)
    inputs = prompts(11) if "prompt_lookup_num_tokens" in options else prompts(5, 12, 9, side="right")
    assert_equal(plain, paged, inputs, max_new_tokens=14, **options)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoder_with_a_decoder_prompt(family):
    plain, paged = pair(family, block_size=4)
    decoder = torch.tensor([[0, 5, 9, 11], [0, 7, 7, 3]])
    assert_equal(plain, paged, {**prompts(5, 9, side="right"), "decoder_input_ids": decoder}, max_new_tokens=10)


def test_sinks_are_what_makes_the_difference():
    """Large sinks change the tokens, so a dropped one would be seen (H10)."""
    plain, paged = pair("gpt_oss", block_size=4)
    expected = run(plain, prompts(12), max_new_tokens=12, output_logits=True, return_dict_in_generate=True)
    for model in (plain, paged):
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.data.fill_(6.0)
    other = assert_equal(plain, paged, prompts(12), max_new_tokens=12)
    assert (expected.logits[0] - other.logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize("attn", [None, "eager"])
def test_a_small_softcap(attn):
    """H9: capped before masking, in prefill and decode; where SDPA drops a softcap, so do we."""
    plain, paged = pair("gemma2", attn=attn, overrides={"attn_logit_softcapping": 1.0}, block_size=4)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=12)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=6, prefill_chunk_size=5)
