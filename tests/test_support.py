"""The sweep over all model families, as far as a test suite can afford it, and the document made of it."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from hf_paged import attention, prefill
from hf_paged.commands import support, tiny_models

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = sorted((DOCS / "models").glob("*.json"))
# Of the families used most, those whose attention the sweep must find on the blocks, without a dense call.
MOST_USED = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "falcon",
    "olmo2",
    "smollm3",
    "granite",
    "gpt_oss",
    "deepseek_v3",
    "cohere2",
]


def test_the_document_is_what_the_results_say():
    assert RESULTS
    results = [json.loads(file.read_text()) for file in RESULTS]
    assert (DOCS / "models.md").read_text() == support.render(results)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_no_family_is_wrong(file):
    models = json.loads(file.read_text())["models"]
    assert {entry["class"] for entry in models} <= set(support.CLASSES)
    assert [entry["model"] for entry in models if entry["class"] == "wrong"] == []
    assert all(entry["reason"] for entry in models if entry["class"] != "paged")
    text = {entry["model"]: entry["class"] for entry in models if entry["task"] == "text"}
    assert {name: text[name] for name in MOST_USED} == dict.fromkeys(MOST_USED, "paged")


def test_a_whole_run_says_which_class_it_does_not_know(monkeypatch, capsys):
    """What the search in the modeling files finds is compared with what importing everything finds."""
    monkeypatch.setattr(support, "sweep", lambda chosen, *rest: [])
    monkeypatch.setattr(tiny_models, "missed", lambda: ["NewForCausalLM"])
    assert support.run(quarter=True) == 0
    assert support.run() == 1
    assert "NewForCausalLM" in capsys.readouterr().out
    monkeypatch.setattr(tiny_models, "missed", lambda: [])
    assert support.run() == 0


def test_a_class_that_is_no_entry_is_missed(monkeypatch):
    names = {
        "GPT2LMHeadModel": "models.gpt2.modeling_gpt2",
        "GPT2Model": "models.gpt2.modeling_gpt2",
        "GPT2Config": "x",
    }
    monkeypatch.setattr(transformers, "_class_to_module", names)
    assert tiny_models.missed() == []
    monkeypatch.setattr(tiny_models, "entries", lambda: [])
    assert tiny_models.missed() == ["GPT2LMHeadModel"]


def test_classes_that_no_mapping_names_and_pairs():
    entries = tiny_models.entries()
    assert len(set(entries)) == len(entries)
    others = {name: model_type for task, model_type, name in entries if task == "other"}
    mapped = {name for task, _, name in entries if task not in ("other", "pairs")}
    assert not mapped & set(others)
    assert others["GPT2DoubleHeadsModel"] == "gpt2"
    # Generation of its own in another file, none of the library's, and from beside a retriever.
    assert {"CsmForConditionalGeneration", "SpeechT5ForTextToSpeech", "RagTokenForGeneration"} <= set(others)
    assert "GPT2ForSequenceClassification" not in others
    pairs = {model_type for task, model_type, _ in entries if task == "pairs"}
    assert {"encoder-decoder+gpt2", "vision-encoder-decoder+mbart"} <= pairs
    assert "encoder-decoder+llama" not in pairs


def test_pairs_have_decoders_with_another_number_of_layers():
    _, config = tiny_models.make_config("vision-encoder-decoder+mbart", "VisionEncoderDecoderModel")
    assert config.decoder.model_type == "mbart" and config.decoder.is_decoder
    assert config.decoder.encoder_layers > config.decoder.decoder_layers


def test_a_quarter_has_every_kind_of_attention():
    entries = tiny_models.entries()
    kept = tiny_models.quarter(entries)
    assert kept == tiny_models.quarter(entries)
    assert len(kept) == -(-len(entries) // 4)
    kinds, all_kinds = ({(task, tiny_models.traits(name)) for task, name, _ in some} for some in (kept, entries))
    assert kinds == all_kinds
    assert set().union(*(traits for _, traits in kinds)) == set(tiny_models.TRAITS)
    names = {name for _, name, _ in kept}
    assert names & prefill.PACKED_TYPES and names & prefill.PACKED_COMPOSITES
    assert names - prefill.PACKED_TYPES - prefill.PACKED_COMPOSITES


def test_the_sweep_finds_what_it_should():
    """One of each class, and a model that dies costs its own line only."""
    entries = {entry[2]: entry for entry in tiny_models.entries()}
    names = ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "BigBirdForCausalLM", "MambaForCausalLM"]
    lines = support.sweep([entries[name] for name in names] + [("text", "llama", "NoSuchModel")])
    assert [line.kind for line in lines] == ["paged", "paged", "dense", "refused", "not built"]
    assert all(line.reason for line in lines[2:])
    assert lines[0].modes == dict.fromkeys(support.MODES, "exact")


def test_a_head_beside_the_language_model():
    """Left pads are left out of the prefill as for the plain model, and the tokens and logits are the same."""
    (entry,) = [entry for entry in tiny_models.entries() if entry[2] == "GPT2DoubleHeadsModel"]
    (line,) = support.sweep([entry])
    assert (line.kind, line.reason, line.modes) == ("paged", "", dict.fromkeys(support.MODES, "exact"))


@pytest.mark.parametrize(
    "name, reason",
    [
        ("CsmForConditionalGeneration", "the prompt is computed once per beam or sample: hidden states are asked for"),
        # It reads the last hidden state alone, which is there for each sample: the prompt is computed once.
        ("PocketTTSForConditionalGeneration", "pads are computed: prefill of pocket_tts is not packed"),
    ],
)
def test_loops_of_the_models_own_that_read_hidden_states(name, reason):
    found = [entry for entry in tiny_models.entries() if entry[2] == name]
    if not found:
        pytest.skip(f"Transformers {transformers.__version__} does not have it")
    (line,) = support.sweep(found)
    assert (line.kind, line.modes["samples"], line.reason) == ("paged", "exact", reason), line


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_decoder_prompts_are_tried(name):
    (entry,) = [entry for entry in tiny_models.entries() if entry[2] == name]
    (line,) = support.sweep([entry])
    assert line.modes == dict.fromkeys({**support.MODES, **support.DECODER_MODES}, "exact")


def test_a_decoder_prompt_whose_tokens_see_later_ones_is_found(monkeypatch):
    """Where the first of several tokens sees those behind it, it is seen, and nowhere but in decoder prompts."""
    honest = attention._attend

    def forgetful(module, query, key, mask, scaling, *rest):
        pending = key.layer._pending
        out = honest(module, query, key, mask, scaling, *rest)
        if pending is not None and query.shape[2] == 4:
            first = torch.nn.functional.scaled_dot_product_attention(query[:, :, :1], *pending, scale=scaling)
            out[:, :1] = first.transpose(1, 2)
        return out

    monkeypatch.setattr(attention, "_attend", forgetful)
    (entry,) = [entry for entry in tiny_models.entries() if entry[2] == "BartForConditionalGeneration"]
    (line,) = support.sweep([entry])
    assert line.kind == "wrong" and line.reason.startswith("decoder prompt:"), line
    assert line.modes["prompt lookup"] == "exact"


@pytest.mark.parametrize(
    "name, kind, reason",
    [
        ("MusicgenForCausalLM", "paged", ""),  # its cache is shorter than the mask, which hides what was generated
        ("KyutaiSpeechToTextForConditionalGeneration", "paged", ""),  # a part of it prepares a cache by our method
        ("DiaForConditionalGeneration", "paged", "a source is read once"),
        ("EncoderDecoderModel", "paged", ""),
        ("Gemma3nForConditionalGeneration", "paged", ""),
        ("XLMWithLMHeadModel", "dense", ""),
        ("BltForCausalLM", "refused", "a second cache"),
        ("DiffusionGemmaForBlockDiffusion", "refused", "generate() is one of its own"),
        ("Gemma4AssistantForCausalLM", "refused", "none of its layers keeps keys and values"),
        ("VibeVoiceForConditionalGeneration", "refused", "a second cache"),
    ],
)
def test_models_that_go_their_own_way(name, kind, reason):
    (entry,) = [entry for entry in tiny_models.entries() if entry[2] == name and entry[0] != "pairs"]
    (line,) = support.sweep([entry])
    assert (line.kind, reason in line.reason) == (kind, True), line


def test_a_wrong_model_is_found(monkeypatch):
    """A cache that drops a token is seen."""
    from hf_paged.plan import GroupPlan

    honest = GroupPlan.visible_from
    monkeypatch.setattr(GroupPlan, "visible_from", lambda self, row, band=None: max(1, honest(self, row, band)))
    (line,) = support.sweep([("text", "llama", "LlamaForCausalLM")])
    assert line.kind == "wrong"
