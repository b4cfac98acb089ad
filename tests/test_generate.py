"""Every way to call `generate`, on a tiny Llama: the tokens and logits of the unpatched model."""

import copy
import threading

import pytest
import torch
from models import (
    BOS,
    EOS,
    PAD,
    StopAt,
    Watch,
    assert_close,
    assert_equal,
    build,
    cache_of,
    likely_eos,
    observe,
    pair,
    prompts,
    run,
    tokenizer_of_words,
    with_cache,
)
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged import compat

BLOCK_SIZES = [1, 2, 4, 16]

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beams": {"num_beams": 4},
    "beams_returned": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5, "early_stopping": True},
    "beam_samples": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "guidance": {"guidance_scale": 1.5},
    "chunks": {"prefill_chunk_size": 3},
    "min_new_and_penalties": {"min_new_tokens": 8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, block_size, short_pieces):
    plain, paged = pair("llama", block_size=block_size)
    assert_equal(plain, paged, prompts(1, 5, 17), max_new_tokens=12, **MODES[mode])


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("mode", ["beams", "samples", "beam_samples", "chunks"])
def test_modes_at_the_real_thresholds(mode, block_size):
    """A prompt long enough for a shared tile and a strided run, as the backend ships."""
    plain, paged = pair("llama", block_size=block_size)
    options = {"prefill_chunk_size": 50} if mode == "chunks" else MODES[mode]
    assert_equal(plain, paged, prompts(230, 70), max_new_tokens=8, **options)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("options", [{}, {"prompt_once": False}, {"free_finished_rows": False}], ids=str)
def test_options_change_no_token(backend, options):
    plain, paged = pair("llama", block_size=4, backend=backend, **options)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=8, num_beams=3)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=8, do_sample=True, num_return_sequences=2)


@pytest.mark.parametrize("delta", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_lengths_around_a_block(blocks, delta, options):
    """B9: prompts of k * block - 1, k * block and k * block + 1 tokens."""
    plain, paged = pair("llama", block_size=4)
    assert_equal(plain, paged, prompts(blocks * 4 + delta), max_new_tokens=4, **options)


def test_a_long_row_and_then_a_short_one():
    """B10: nothing of an earlier call is left in a block that is used again."""
    plain, paged = pair("llama", block_size=4)
    for length in (40, 3, 21, 1):
        assert_equal(plain, paged, prompts(length, seed=length), max_new_tokens=6)


# -- padding -----------------------------------------------------------------------------------------------------------


def test_left_padded_rows_equal_solo_rows():
    """G1: each row of a batch has the tokens and logits it has alone."""
    plain, paged = pair("llama", block_size=4)
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    batch = prompts(1, 5, 17)
    together = run(paged, batch, **options)
    for row in range(3):
        real = batch["attention_mask"][row].bool()
        alone = run(plain, {"input_ids": batch["input_ids"][row, real][None]}, **options)
        new = alone.sequences[0, int(real.sum()) :]
        assert torch.equal(together.sequences[row, batch["input_ids"].shape[1] :][: len(new)], new)
        for left, right in zip(alone.logits, together.logits, strict=False):
            torch.testing.assert_close(left[0], right[row], atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_right_and_middle_pads(options):
    plain, paged = pair("llama", block_size=4)
    assert_equal(plain, paged, prompts(3, 9, 12, side="right"), max_new_tokens=8, **options)
    inputs = prompts(12, 12, 7)
    inputs["attention_mask"][0, 3:7] = 0
    inputs["attention_mask"][1, 11:] = 0
    assert_equal(plain, paged, inputs, max_new_tokens=8, **options)


def test_pad_is_eos():
    """G5."""
    plain, paged = pair("llama", overrides={"pad_token_id": EOS}, block_size=4)
    for model in (plain, paged):
        likely_eos(model, 2.0)
    assert_equal(plain, paged, prompts(3, 8, 11, pad=EOS), max_new_tokens=12, do_sample=True)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_a_row_of_pads_beside_real_rows(options):
    plain, paged = pair("llama", block_size=4)
    inputs = prompts(6, 9, 9)
    inputs["attention_mask"][1] = 0
    assert_equal(plain, paged, inputs, max_new_tokens=6, **options)


def test_empty_prompts():
    """G7: bos only, one token, one embedding."""
    plain, paged = pair("llama", block_size=4)
    assert_equal(plain, paged, {}, max_new_tokens=6)
    assert_equal(plain, paged, {"input_ids": torch.tensor([[BOS]])}, max_new_tokens=6, num_beams=3)
    embeds = plain.get_input_embeddings()(torch.tensor([[BOS]])).detach()
    assert_equal(plain, paged, {"inputs_embeds": embeds}, max_new_tokens=6)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "beams", "samples"],
)
def test_inputs_embeds(options):
    plain, paged = pair("llama", block_size=4)
    inputs = prompts(5, 9)
    embeds = plain.get_input_embeddings()(inputs["input_ids"]).detach()
    inputs = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    assert_equal(plain, paged, inputs, max_new_tokens=6, **options)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
def test_masks_of_any_dtype(dtype):
    plain, paged = pair("gemma3", block_size=4)
    for side in ("left", "right"):
        inputs = prompts(5, 12, side=side)
        inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
        assert_equal(plain, paged, inputs, max_new_tokens=5, num_beams=2)


def test_a_mask_that_the_library_infers():
    plain, paged = pair("llama", block_size=4)
    assert_equal(plain, paged, {"input_ids": prompts(5, 12)["input_ids"]}, max_new_tokens=6, num_beams=2)
    assert paged.paged_stats().fallbacks == {}


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length(rope_type):
    """Prompts below and above the original length, and decoding across it."""
    parameters = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 10000.0}
    length = 16
    if rope_type == "longrope":
        parameters |= {"original_max_position_embeddings": 16, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        length = 32
    overrides = {"rope_parameters": parameters, "max_position_embeddings": length}
    plain, paged = pair("llama", overrides=overrides, block_size=4)
    everything = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    for lengths in ((9, 14), (20, 11)):
        for options in ({"num_beams": 2}, {"prefill_chunk_size": 5}, {"do_sample": True, "num_return_sequences": 2}):
            # Call by call: a dynamic RoPE remembers the longest forward there was.
            expected = run(plain, prompts(*lengths), **everything, **options)
            assert_close(expected, run(paged, prompts(*lengths), **everything, **options))


def test_negative_prompt():
    plain, paged = pair("llama", block_size=4)
    negative = prompts(3, 6, seed=9)
    options = {
        "guidance_scale": 2.0,
        "negative_prompt_ids": negative["input_ids"],
        "negative_prompt_attention_mask": negative["attention_mask"],
    }
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=6, **options)


# -- ending ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "samples", "beam_samples"])
def test_rows_that_finish_early(mode):
    """EOS is likely: the rows end at unlike steps, and freed rows change nothing for the others."""
    plain, paged = pair("llama", block_size=2)
    for model in (plain, paged):
        likely_eos(model, 3.0)
    ends = set()
    for seed in range(3):
        output = assert_equal(plain, paged, prompts(3, 8, 11, 5, seed=seed), seed, max_new_tokens=16, **MODES[mode])
        ends.update((output.sequences[:, 11:] == EOS).int().argmax(1).tolist())
    assert len(ends) > 2  # rows did end at unlike steps


def test_several_eos_ids_and_none():
    plain, paged = pair("llama", block_size=2)
    inputs = prompts(3, 8, 11)
    usual = run(plain, inputs, max_new_tokens=16, do_sample=True)
    several = [EOS, *{int(usual[0, 13]), int(usual[1, 15])}]
    assert_equal(plain, paged, inputs, max_new_tokens=16, do_sample=True, eos_token_id=several)
    assert_equal(plain, paged, inputs, max_new_tokens=16, num_beams=3, eos_token_id=several)
    for model in (plain, paged):
        model.generation_config.eos_token_id = None
    assert_equal(plain, paged, inputs, max_new_tokens=16, do_sample=True)


@pytest.mark.parametrize("eos", [EOS, None])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "num_return_sequences": 2}], ids=["greedy", "samples"])
def test_custom_stopping_criteria_per_row(eos, options):
    """With an EOS a stopped row is fed pads; without one it goes on until all rows have stopped."""
    plain, paged = pair("llama", block_size=2)
    for model in (plain, paged):
        model.generation_config.eos_token_id = eos
    lengths = (13, 20, 16) if not options else (13, 20, 16, 22, 14, 15)
    criteria = StoppingCriteriaList([StopAt(*lengths)])
    assert_equal(plain, paged, prompts(3, 8, 11), max_new_tokens=30, stopping_criteria=criteria, **options)


def test_stop_strings():
    plain, paged = pair("llama", block_size=2)
    inputs = prompts(3, 8, 11)
    usual = run(plain, inputs, max_new_tokens=16, do_sample=True)
    stops = [f"t{int(usual[0, 14])}", f"t{int(usual[2, 17])}"]
    output = assert_equal(
        plain, paged, inputs, max_new_tokens=16, do_sample=True, stop_strings=stops, tokenizer=tokenizer_of_words()
    )
    assert (output.sequences[:, 11:] == PAD).any()  # a row did stop before the others


def test_max_time():
    plain, paged = pair("llama", block_size=4)
    assert_equal(plain, paged, prompts(3, 8), max_new_tokens=4, max_time=60.0)
    assert run(paged, prompts(3, 8), max_new_tokens=50, max_time=0.0).shape[1] < 30


class Recorder(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.extend(value.flatten().tolist())

    def end(self):
        self.tokens.append("end")


def test_streamer():
    plain, paged = pair("llama", block_size=4)
    streams = Recorder(), Recorder()
    for model, streamer in zip((plain, paged), streams, strict=True):
        run(model, prompts(7), max_new_tokens=8, streamer=streamer)
    assert streams[0].tokens == streams[1].tokens
    assert streams[1].tokens[-1] == "end" and len(streams[1].tokens) > 9


def test_logits_processor_of_the_user():
    plain, paged = pair("llama", block_size=4)
    processors = LogitsProcessorList([lambda ids, scores: scores.roll(int(ids.shape[1]) % 5, dims=1)])
    assert_equal(plain, paged, prompts(3, 8), max_new_tokens=8, logits_processor=processors, num_beams=2)


# -- what is returned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
def test_everything_returned(mode):
    plain, paged = pair("llama", block_size=4)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 6}
    expected = run(plain, prompts(4, 9), **options, **MODES[mode])
    got = run(paged, prompts(4, 9), **options, **MODES[mode])
    assert_close(expected, got)
    for left, right in zip(expected.scores, got.scores, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=0)
    if "num_beams" in MODES[mode]:
        assert torch.equal(expected.beam_indices, got.beam_indices)
    assert isinstance(cache_of(got), hf_paged.PagedCache)
    assert cache_of(got).get_seq_length() == cache_of(expected).get_seq_length()


@pytest.mark.parametrize("mode", ["greedy", "beams", "samples"])
def test_hidden_states(mode):
    plain, paged = pair("llama", block_size=4)
    options = {"return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 4}
    expected = run(plain, prompts(4, 9), **options, **MODES[mode])
    got = run(paged, prompts(4, 9), **options, **MODES[mode])
    assert torch.equal(expected.sequences, got.sequences)
    real = prompts(4, 9)["attention_mask"].bool().repeat_interleave(expected.hidden_states[0][0].shape[0] // 2, 0)
    for step, (left, right) in enumerate(zip(expected.hidden_states, got.hidden_states, strict=True)):
        for one, other in zip(left, right, strict=True):
            assert one.shape == other.shape
            if step == 0:  # at pads the hidden states are anybody's
                one, other = one[real], other[real]
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_a_returned_cache_is_used_again():
    """Full ids and full mask, as the library wants them."""
    plain, paged = pair("llama", block_size=4)
    outputs = []
    for model in (plain, paged):
        inputs, cache = prompts(4, 9), {}
        for _ in range(3):
            output = run(model, {**inputs, **cache}, max_new_tokens=5, return_dict_in_generate=True, output_logits=True)
            more = torch.tensor([[7, 11], [13, 17]])
            ids = torch.cat([output.sequences, more], 1)
            grown = ids.shape[1] - inputs["input_ids"].shape[1]
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, grown), value=1)
            inputs, cache = {"input_ids": ids, "attention_mask": mask}, with_cache(cache_of(output))
        outputs.append(output)
    assert_close(*outputs)
    cache_of(outputs[1]).check()


# -- assistants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [EOS, None])
@pytest.mark.parametrize("assistant_is", ["unpatched", "patched", "the model itself"])
def test_assistant_model(assistant_is, eos):
    """E3: equal to plain greedy, and to the unpatched model with the same assistant."""
    plain, paged = pair("llama", block_size=2)
    helper = build("llama", seed=0)  # alike enough to be right sometimes
    for parameter in helper.parameters():
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    for model in (plain, paged, helper):
        model.generation_config.eos_token_id = eos
    ours = copy.deepcopy(helper)
    if assistant_is == "patched":
        hf_paged.patch(ours, block_size=4)
    elif assistant_is == "the model itself":
        helper, ours = plain, paged
    greedy = run(plain, prompts(9), max_new_tokens=20)
    expected = run(plain, prompts(9), max_new_tokens=20, assistant_model=helper)
    got = run(paged, prompts(9), max_new_tokens=20, assistant_model=ours)
    assert torch.equal(expected, got)
    assert torch.equal(greedy, got)
    paged.paged_pool.check()


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_assistant_and_sliding_windows(family):
    """Drafts are taken back across the window, in both models."""
    plain, paged = pair(family, block_size=2)
    helper = build(family)
    for parameter in helper.parameters():
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    ours = hf_paged.patch(copy.deepcopy(helper), block_size=4)
    greedy = run(plain, prompts(9), max_new_tokens=16)
    assert torch.equal(greedy, run(paged, prompts(9), max_new_tokens=16, assistant_model=ours))
    if compat.CACHE_ARGUMENT == "cache":  # up to 5.17 a sliding cache of the library is no good for an assistant
        options = {"max_new_tokens": 12, "do_sample": True}
        expected = run(plain, prompts(9), assistant_model=helper, **options)
        assert torch.equal(expected, run(paged, prompts(9), assistant_model=ours, **options))
    assert paged.paged_stats().used_blocks == ours.paged_stats().used_blocks == 0


def test_early_exit():
    """The model is its own assistant, with its first layer only; that part is not paged."""
    plain, paged = pair("llama", block_size=4)
    expected = run(plain, prompts(9), max_new_tokens=12, assistant_early_exit=1)
    assert torch.equal(expected, run(paged, prompts(9), max_new_tokens=12, assistant_early_exit=1))
    assert any("other layers" in reason for reason in paged.paged_stats().fallbacks)
    assert_equal(plain, paged, prompts(9), max_new_tokens=4)


@pytest.mark.parametrize("eos", [EOS, None])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_prompt_lookup_equals_greedy(family, eos):
    """E3."""
    plain, paged = pair(family, block_size=2)
    for model in (plain, paged):
        model.generation_config.eos_token_id = eos
    inputs = prompts(12)
    inputs["input_ids"] = inputs["input_ids"][:, :4].repeat(1, 3)
    greedy = run(plain, inputs, max_new_tokens=24)
    assert torch.equal(greedy, run(paged, inputs, max_new_tokens=24, prompt_lookup_num_tokens=4))
    assert_equal(plain, paged, inputs, max_new_tokens=16, prompt_lookup_num_tokens=3, do_sample=True)


# -- other models and settings -----------------------------------------------------------------------------------------

SHAPES = {
    "head_dim_80": {"head_dim": 80},
    "head_dim_96": {"head_dim": 96},
    "group_of_1": {"num_key_value_heads": 4},
    "group_of_3": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    "group_of_7": {"hidden_size": 112, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 8},
    "mqa": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_head_dims_and_group_sizes(shape, short_pieces):
    """H5."""
    plain, paged = pair("llama", overrides=SHAPES[shape], block_size=4)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=6)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=6, num_beams=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_half_precision(family, dtype):
    """Logits are no further from the float32 ones than the unpatched 16-bit model's, over the prompt's next token."""
    plain, paged = pair(family, block_size=4)
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
    exact = run(plain, prompts(5, 12), **options).logits[0]
    usual = (run(plain.to(dtype), prompts(5, 12), **options).logits[0].float() - exact).abs().mean()
    output = run(paged.to(dtype), prompts(5, 12), **options)
    assert output.logits[0].dtype == torch.float32  # generate() keeps logits in float32
    assert output.sequences.shape[0] == 2 and output.sequences.shape[1] > 12
    assert (output.logits[0].float() - exact).abs().mean() < 2 * usual + 1e-3
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        assert run(paged, prompts(5, 12), max_new_tokens=6, **options).shape[1] > 12


def test_a_model_cast_after_patch():
    plain, paged = pair("llama", block_size=4)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=4)
    assert_equal(plain.double(), paged.double(), prompts(5, 12), max_new_tokens=4)
    assert_equal(plain.float(), paged.float(), prompts(5, 12), max_new_tokens=4, num_beams=2)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate_in_training_mode(options):
    """F10: the cache is used."""
    plain, paged = pair("llama", block_size=4)
    plain.train(), paged.train()
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=6, **options)
    assert paged.paged_stats().peak_used_blocks > 0
    assert paged.training


def test_attention_dropout_in_training_mode():
    """Dropped attention weights are random: the dense path draws them as the unpatched model does."""
    plain, paged = pair("llama", overrides={"attention_dropout": 0.5}, block_size=4)
    plain.train(), paged.train()
    assert_equal(plain, paged, prompts(12), max_new_tokens=6)


def test_inference_mode_and_back():
    """H15: a pool made under inference_mode is used under no_grad, and the reverse."""
    plain, paged = pair("llama", block_size=4)
    for other in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with other():
            assert_equal(plain, paged, prompts(5, 12), max_new_tokens=5, num_beams=2)


def test_use_cache_false():
    plain, paged = pair("llama", block_size=4)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=5, use_cache=False)
    assert paged.paged_stats().peak_used_blocks == 0


def test_two_threads_on_one_model():
    plain, paged = pair("llama", block_size=2)
    jobs = [
        (prompts(5, 12, seed=1), {"num_beams": 3}),
        (prompts(9, 4, 17, seed=2), {}),
    ]
    expected = [run(plain, inputs, max_new_tokens=24, **options) for inputs, options in jobs]
    wrong = []

    def work(index):
        inputs, options = jobs[index]
        try:
            for _ in range(4):
                got = paged.generate(**inputs, max_new_tokens=24, **options)
                if not torch.equal(got, expected[index]):
                    wrong.append((index, got))
        except BaseException as error:
            wrong.append((index, error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    paged.paged_pool.check()
    assert paged.paged_stats().used_blocks == 0


def test_a_deep_copy_is_patched_for_itself():
    plain, paged = pair("llama", block_size=4)
    other = copy.deepcopy(paged)
    assert other.paged_pool is not paged.paged_pool
    assert_equal(plain, other, prompts(5, 12), max_new_tokens=6, num_beams=2)
    assert other.paged_stats().peak_used_blocks > 0 and paged.paged_stats().peak_used_blocks == 0
    hf_paged.unpatch(other)
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=6)
    assert type(cache_of(run(other, prompts(5), max_new_tokens=3, return_dict_in_generate=True))) is compat.DynamicCache


# -- the prompt, once --------------------------------------------------------------------------------------------------


def count_tokens(model):
    """A list that fills with the number of tokens of every forward, rows times columns."""
    counts = []
    first = model.model.layers[0].self_attn.q_proj
    observe(model, first, lambda args, kwargs: counts.append(args[0].shape[0] * args[0].shape[1]))
    return counts


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}, {"num_beams": 4, "do_sample": True}],
    ids=["beams", "samples", "beam_samples"],
)
def test_the_prompt_is_computed_once(options):
    """A9."""
    _, paged = pair("llama", block_size=4)
    counts = count_tokens(paged)
    run(paged, prompts(32, 20), max_new_tokens=3, min_new_tokens=3, **options)
    assert counts == [32 + 20, 8, 8]
    assert paged.paged_stats().fallbacks == {}


def test_without_prompt_once_it_is_computed_for_each():
    _, paged = pair("llama", block_size=4, prompt_once=False)
    counts = count_tokens(paged)
    run(paged, prompts(32), max_new_tokens=3, min_new_tokens=3, num_beams=4)
    assert counts == [4 * 32, 4, 4]


@pytest.mark.parametrize(
    "options", [{"num_beams": 8}, {"do_sample": True, "num_return_sequences": 8}], ids=["beams", "samples"]
)
def test_the_prompt_is_stored_once(options):
    """A9: 16 full blocks of prompt are shared by eight rows; each row adds the blocks of its own tokens."""
    _, paged = pair("llama", block_size=4)
    watch = Watch(paged)
    run(paged, prompts(64), max_new_tokens=4, min_new_tokens=4, stopping_criteria=[watch], **options)
    # After the prefill the prompt alone; then one block a row for its first four tokens.
    assert watch.seen[0].used_blocks == 16 and watch.seen[0].shared_blocks == 16
    assert all(16 < stats.used_blocks <= 16 + 8 for stats in watch.seen[1:])
    assert watch.seen[1].logical_tokens == 8 * 65 and watch.seen[1].stored_tokens == 64 + 8
    assert paged.paged_stats().peak_used_blocks == 16 + 8


def test_left_pads_take_no_block():
    """G1: rows of 1, 5 and 17 tokens, blocks of 4: 1 + 2 + 5 blocks, not 3 * 5."""
    _, paged = pair("llama", block_size=4)
    watch = Watch(paged)
    run(paged, prompts(1, 5, 17), max_new_tokens=3, min_new_tokens=3, stopping_criteria=[watch])
    assert watch.seen[0].used_blocks == 1 + 2 + 5
    assert watch.seen[0].stored_tokens == 1 + 5 + 17
    assert watch.seen[0].utilization == pytest.approx(23 / 32)
    watch = Watch(paged)
    run(paged, prompts(1, 5, 17), max_new_tokens=3, min_new_tokens=3, num_beams=2, stopping_criteria=[watch])
    assert watch.seen[0].used_blocks == 1 + 2 + 5
    assert watch.seen[0].logical_tokens == 2 * 23


@pytest.mark.parametrize("beams", [2, 4])
def test_siblings_part_at_their_first_token(beams):
    """A4: a prompt of 2 * block + 1 tokens leaves a shared block partly filled: each beam writes to its own copy."""
    plain, paged = pair("llama", block_size=4)
    assert_equal(plain, paged, prompts(9), max_new_tokens=8, num_beams=beams)
    watch = Watch(paged)
    before = paged.paged_stats().cow_copies
    run(paged, prompts(9), max_new_tokens=3, min_new_tokens=3, num_beams=beams, stopping_criteria=[watch])
    assert watch.seen[0].used_blocks == 3
    assert watch.seen[1].used_blocks == 2 + beams  # two full prompt blocks and a last one for each beam
    assert paged.paged_stats().cow_copies - before >= beams - 1


def test_a_pool_far_smaller_than_beams_times_length():
    """A10: prompt blocks, decode blocks per beam and a spare one per beam are enough."""
    beams, new = 4, 8
    plain, paged = pair("llama", block_size=4, num_blocks=16 + beams * (new // 4) + beams)
    assert_equal(plain, paged, prompts(64), max_new_tokens=new, num_beams=beams)
    assert paged.paged_stats().num_blocks == 28  # beams times all blocks would be 72


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "falcon", "bloom"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("lengths", [(9, 9), (5, 12)], ids=["no pads", "pads"])
def test_a_static_cache_has_slots_that_nothing_is_in_yet(family, options, lengths):
    """Its keys reach into the future, so a mask of None would not say which are there."""
    plain, paged = pair(family, block_size=4)
    options = {**options, "cache_implementation": "static", "max_new_tokens": 6}
    expected = run(plain, prompts(*lengths), **options)
    assert torch.equal(expected, run(paged, prompts(*lengths), **options))
    assert torch.equal(run(plain, prompts(*lengths), max_new_tokens=6), run(paged, prompts(*lengths), max_new_tokens=6))


def test_a_model_that_puts_tokens_of_its_own_before_the_prompt_goes_on_from_its_cache():
    from hf_paged.commands import tiny_models

    plain = tiny_models.build("cpmant", "CpmAntForCausalLM")
    plain.generation_config.eos_token_id = None
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    ids = torch.randint(3, 250, (2, 7), generator=torch.Generator().manual_seed(0))
    answers = []
    for model in (plain, paged):
        first = run(model, {"input_ids": ids}, max_new_tokens=3, return_dict_in_generate=True)
        going_on = {"input_ids": first.sequences, "past_key_values": cache_of(first)}
        answers.append(run(model, going_on, max_new_tokens=2))
    assert torch.equal(*answers)
