"""The sweep over all model families, as far as a test suite can afford it, and the document made of it."""

import json
from pathlib import Path

import pytest

from hf_paged import prefill
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


def test_a_third_has_every_kind_of_attention():
    entries = tiny_models.entries()
    kept = tiny_models.third(entries)
    assert kept == tiny_models.third(entries)
    assert len(kept) == -(-len(entries) // 3)
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
    (entry,) = [entry for entry in tiny_models.entries() if entry[2] == name]
    (line,) = support.sweep([entry])
    assert (line.kind, reason in line.reason) == (kind, True), line


def test_a_wrong_model_is_found(monkeypatch):
    """A cache that drops a token is seen."""
    from hf_paged.plan import GroupPlan

    honest = GroupPlan.visible_from
    monkeypatch.setattr(GroupPlan, "visible_from", lambda self, row, band=None: max(1, honest(self, row, band)))
    (line,) = support.sweep([("text", "llama", "LlamaForCausalLM")])
    assert line.kind == "wrong"
