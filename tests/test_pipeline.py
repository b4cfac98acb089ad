"""G9: the text-generation pipeline over a patched model."""

import pytest
import torch
from models import pair, tokenizer_of_words
from transformers import pipeline

TEXTS = ["t5 t9 t11", "t7", "t3 t4 t5 t6 t7 t8 t9 t10", "t20 t21", "t90 t3"]


@pytest.fixture(scope="module")
def pipelines():
    """The same pipeline over an unpatched and a patched model."""
    models = pair("llama", block_size=4)
    return [pipeline("text-generation", model=model, tokenizer=tokenizer_of_words(), device="cpu") for model in models]


def texts(pipe, inputs, **options):
    torch.manual_seed(5)
    return [[entry["generated_text"] for entry in result] for result in pipe(inputs, **options)]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("given", ["list", "generator"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_pipeline(pipelines, batch_size, given, full):
    for options in ({"do_sample": False}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}):
        outputs = []
        for pipe in pipelines:
            inputs = list(TEXTS) if given == "list" else (text for text in TEXTS)
            outputs.append(
                texts(pipe, inputs, batch_size=batch_size, return_full_text=full, max_new_tokens=6, **options)
            )
        assert outputs[0] == outputs[1]
        assert len(outputs[1]) == len(TEXTS)
        for text, answers in zip(TEXTS, outputs[1], strict=True):
            assert len(answers) == options.get("num_return_sequences", 1)
            assert all(answer.startswith(text) == full for answer in answers)
    assert pipelines[1].model.paged_stats().peak_used_blocks > 0
    assert pipelines[1].model.paged_stats().used_blocks == 0


def test_one_text(pipelines):
    outputs = [pipe(TEXTS[0], max_new_tokens=6, do_sample=False) for pipe in pipelines]
    assert outputs[0] == outputs[1]
