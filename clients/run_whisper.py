"""The speech recognition pipeline with word timestamps, on a tiny random Whisper whose tokenizer is made here."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
    pipeline,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

import hf_paged

from .shared import close, in_turn, version_of

SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>")
MORE_SPECIAL = ("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
ASCII, SPACE = 94, 220  # the tokens below are printable ASCII; "Ġ" begins words


def make_tokenizer() -> WhisperTokenizer:
    """One token a byte, the special tokens that Whisper's generate() names, and its timestamps."""
    folder = Path(tempfile.mkdtemp())
    vocabulary = {character: number for number, character in enumerate(bytes_to_unicode().values())}
    names = (*SPECIAL, *MORE_SPECIAL, *(f"<|{step * 0.02:.2f}|>" for step in range(1501)))
    for name in names:
        vocabulary[name] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = WhisperTokenizer(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"), unk_token=SPECIAL[0], pad_token=SPECIAL[0]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[1:], *MORE_SPECIAL]})
    tokenizer.add_tokens([n for n in names if n not in SPECIAL + MORE_SPECIAL])
    return tokenizer


def make_model(tokenizer: WhisperTokenizer) -> WhisperForConditionalGeneration:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*SPECIAL, *MORE_SPECIAL)}
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=len(tokenizer),
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_target_positions=128,
            pad_token_id=ids["<|endoftext|>"],
            bos_token_id=ids["<|endoftext|>"],
            eos_token_id=ids["<|endoftext|>"],
            decoder_start_token_id=ids["<|startoftranscript|>"],
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    ).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.15, generator=generator)
    settings = model.generation_config
    settings.no_timestamps_token_id = ids["<|notimestamps|>"]
    settings.is_multilingual = True
    settings.lang_to_id = {"<|en|>": ids["<|en|>"]}
    settings.task_to_id = {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]}
    settings.alignment_heads = [[0, 0], [1, 1]]
    settings.prev_sot_token_id = ids["<|startofprev|>"]
    settings.return_timestamps = False
    # A random model must not put out names; what is left are bytes, and timestamps where they are asked for.
    settings.suppress_tokens = [*range(ASCII, SPACE), *range(SPACE + 1, 256), *list(ids.values())[1:]]
    settings.max_initial_timestamp_index = 50
    return model


def sound(seconds: float, seed: int) -> np.ndarray:
    """A chirp with noise, 16 kHz."""
    time = np.arange(int(16_000 * seconds)) / 16_000
    noise = np.random.default_rng(seed).normal(0, 0.1, time.shape)
    return (np.sin(2 * np.pi * (200 + 150 * seed) * time * (1 + time)) + noise).astype(np.float32)


def main() -> None:
    tokenizer = make_tokenizer()
    plain = make_model(tokenizer)
    paged = hf_paged.patch(copy.deepcopy(plain))

    def recognise(model: Any, **options: Any):
        transcribe = pipeline(
            "automatic-speech-recognition",
            model=model,
            tokenizer=tokenizer,
            feature_extractor=WhisperFeatureExtractor(),
        )
        settings = {"max_new_tokens": 40, "language": "en", "task": "transcribe"}
        return lambda item: transcribe(item, generate_kwargs=settings, **options)

    name = version_of("transformers")
    sounds = [sound(seconds, seed) for seed, seconds in enumerate((5.0, 9.0, 4.0))]
    for what, options in (
        ("Whisper pipeline, text", {}),
        ("Whisper pipeline, word timestamps", {"return_timestamps": "word"}),
        ("Whisper pipeline, text again after word timestamps", {}),
        ("Whisper pipeline, word timestamps, 3 in a batch", {"return_timestamps": "word", "batch_size": 3}),
        ("Whisper pipeline, segments of a long recording", {"return_timestamps": True, "chunk_length_s": 10}),
    ):
        items = [[s.copy() for s in sounds]] if "batch_size" in options else [s.copy() for s in sounds]
        if "chunk_length_s" in options:
            items = [sound(25.0, 5)]
        in_turn(name, what, recognise(plain, **options), recognise(paged, **options), items, paged, close)


if __name__ == "__main__":
    main()
