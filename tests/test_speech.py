"""Whisper as its own loop and pipelines drive it: the audio of a segment is read once, whatever its number of beams."""

import copy

import numpy as np
import pytest
import torch
import transformers
from models import observe, randomise, run

import hf_paged

FRAMES = 100  # of a segment, one second
START, PREVIOUS, EOS, NO_SPEECH, NO_TIMESTAMPS = 3, 4, 2, 297, 298  # timestamps follow


def whisper():
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=NO_TIMESTAMPS + 2 + FRAMES // 2, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=FRAMES // 2, max_target_positions=64, pad_token_id=EOS, bos_token_id=1, eos_token_id=EOS,
        decoder_start_token_id=START, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = randomise(transformers.WhisperForConditionalGeneration(config).eval())
    settings = model.generation_config
    settings.no_timestamps_token_id, settings.prev_sot_token_id = NO_TIMESTAMPS, PREVIOUS
    settings.is_multilingual, settings.max_initial_timestamp_index = False, 50
    return model


def make_pair():
    plain = whisper()
    return plain, hf_paged.patch(copy.deepcopy(plain), block_size=4)


def tokenizer():
    names = {1: "<|bos|>", START: "<|startoftranscript|>", PREVIOUS: "<|startofprev|>", EOS: "<|endoftext|>"}
    names |= {NO_SPEECH: "<|nospeech|>", NO_TIMESTAMPS: "<|notimestamps|>"}
    names |= {NO_TIMESTAMPS + 1 + tick: f"<|{tick * 0.02:.2f}|>" for tick in range(FRAMES // 2 + 1)}
    vocab = {names.get(index, f"w{index}"): index for index in range(NO_TIMESTAMPS + 2 + FRAMES // 2)}
    return transformers.WhisperTokenizer(vocab=vocab, merges=[], pad_token="<|endoftext|>")


def audio(*lengths):
    """Features of two segments and a half at most, and their mask."""
    features = torch.randn(len(lengths), 8, max(lengths), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return {"input_features": features, "attention_mask": mask}


MODES = {
    "beams": {"num_beams": 3},
    "previous text": {"num_beams": 3, "condition_on_prev_tokens": True},
    "a prompt": {"num_beams": 3, "prompt_ids": torch.tensor([PREVIOUS, 20, 30, 40])},
    "a prompt for all segments": {
        "num_beams": 3, "prompt_ids": torch.tensor([PREVIOUS, 20, 30, 40]), "prompt_condition_type": "all-segments",
        "condition_on_prev_tokens": True,
    },
    "fallback temperatures": {
        "num_beams": 3, "condition_on_prev_tokens": True, "temperature": (0.0, 0.4), "logprob_threshold": -1.0,
        "compression_ratio_threshold": 1.35,
    },
    "beams, all returned": {"num_beams": 3, "num_return_sequences": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}  # fmt: skip


@pytest.mark.parametrize("lengths", [(250, 130), (100, 100)], ids=["long", "short"])
@pytest.mark.parametrize("mode", MODES)
def test_audio_is_read_once(mode, lengths):
    """Segments end at unlike times, so the mask, which the loop leaves as it was, has more rows than are left."""
    plain, paged = make_pair()
    options = {"return_timestamps": True, "max_new_tokens": 20, **MODES[mode]}
    expected = run(plain, audio(*lengths), **options)
    rows, calls = [], []
    observe(paged, paged.model.decoder.layers[0].encoder_attn.k_proj, lambda args, kwargs: rows.append(len(args[0])))
    observe(paged, paged.model.encoder.conv1, lambda args, kwargs: calls.append(len(args[0])))
    got = run(paged, audio(*lengths), **options)
    assert torch.equal(*(each if isinstance(each, torch.Tensor) else each["sequences"] for each in (expected, got)))
    assert paged.paged_stats().fallbacks == {}
    # The encoder reads each copy that the loop itself has made for samples; then they are seen to be equal.
    once = 3 if mode == "samples" else 1
    assert rows and rows == [count // once for count in calls]
    assert len(calls) > 1 or lengths[0] == FRAMES  # several segments
    assert paged.paged_stats().used_blocks == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_length_s": 1, "stride_length_s": 0.2, "batch_size": 2},
        {"return_timestamps": True},
        {"return_timestamps": True, "batch_size": 2},
    ],
    ids=["chunks", "long-form", "long-form in a batch"],
)
def test_pipelines(settings):
    plain, paged = make_pair()
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    sound = np.random.default_rng(0).standard_normal(40_000).astype(np.float32)  # two seconds and a half
    texts = []
    for model in (plain, paged):
        pipe = transformers.pipeline(
            "automatic-speech-recognition", model=model, tokenizer=tokenizer(), feature_extractor=extractor
        )
        sounds = [sound.copy(), sound[::-1].copy()]
        texts.append(pipe(sounds, generate_kwargs={"num_beams": 4, "max_new_tokens": 20}, **settings))
    assert texts[0] == texts[1] and all(each["text"] for each in texts[0])
    assert paged.paged_stats().fallbacks == {} and paged.paged_stats().peak_used_blocks
