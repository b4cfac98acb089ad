"""Tiny random models with fixed seeds, and what the tests compare them with: an unpatched deep copy.

Weights have a standard deviation of 0.15, so that logits are not nearly equal and a wrong key shows in the tokens.
"""

import copy
import warnings
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, StoppingCriteria

import hf_paged
from hf_paged import compat
from hf_paged.commands.tiny_models import text_inputs
from hf_paged.generation.soundness import Gate
from hf_paged.lazy import LazyKV

VOCAB = 97
PAD, BOS, EOS = 0, 1, 2
WINDOW = 8

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
}
_IDS = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": BOS}
_HYBRID = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

# Family -> (model class, config class, config arguments).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_COMMON, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_COMMON, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_COMMON, **_HYBRID, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_COMMON, **_HYBRID}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_COMMON, "head_dim": 16}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, **_IDS}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_COMMON, **_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"},
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "max_position_embeddings": 128,
            **_IDS,
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **_IDS},
    ),
    "falcon_alibi": (
        "FalconForCausalLM",
        "FalconConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
            **_IDS,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4, **_IDS},
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 128,
            "use_cache": True,  # not its default
            **_IDS,
        },
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            **_IDS,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": PAD,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 128,
            "decoder_start_token_id": BOS,
            "forced_eos_token_id": None,
            **_IDS,
        },
    ),
}
ENCODER_DECODER = ("t5", "bart")


def make_config(family: str, **overrides: Any) -> Any:
    """The tiny config of a family."""
    _, config_class, arguments = FAMILIES[family]
    return getattr(transformers, config_class)(**{**arguments, **overrides})


_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "max_seq_len": 256,
    "use_cache": True,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# What some types need beside; None: a field that they do not take.
_OF_TYPE = {"deepseek_v2": _LATENT, "deepseek_v3": _LATENT, "falcon": {"head_dim": None}}


def config_of(model_type: str, **overrides: Any) -> Any:
    """A small config of any of `prefill.PACKED_TYPES`."""
    own = _OF_TYPE.get(model_type, {})
    fields = {name: value for name, value in {**_SMALL, **own}.items() if own.get(name, 0) is not None}
    return transformers.AutoConfig.for_model(model_type, **fields, **overrides)


def build(family: str, seed: int = 0, attn: str | None = None, **overrides: Any) -> Any:
    """A tiny random model in float32 and eval mode.

    Args:
        attn: attention implementation; None: the family's default.
        overrides: config fields.
    """
    config = make_config(family, **overrides)
    if attn is not None:
        config._attn_implementation = attn
    torch.manual_seed(seed)
    return randomise(getattr(transformers, FAMILIES[family][0])(config).eval(), seed)


def randomise(model: Any, seed: int = 0) -> Any:
    """Give a model weights that make a wrong key show. Returns the model."""
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data.normal_(0, 2.0, generator=generator)
        elif parameter.ndim >= 2:
            parameter.data.normal_(0, 0.15, generator=generator)
    return model


def pair(family: str, seed: int = 0, attn: str | None = None, overrides: dict | None = None, **options: Any) -> tuple:
    """`(unpatched model, patched deep copy of it)`; options are `PagedConfig` fields."""
    plain = build(family, seed, attn, **(overrides or {}))
    return plain, hf_paged.patch(copy.deepcopy(plain), **options)


def likely_eos(model: Any, boost: float, token: int = EOS) -> Any:
    """Make a token likely, so that rows finish at unlike times. Returns the model."""
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
    head.bias.data[token] = boost
    return model


def prompts(*lengths: int, seed: int = 3, side: str = "left", pad: int = PAD) -> dict[str, torch.Tensor]:
    """A padded batch of random prompts: `input_ids` and `attention_mask`, [rows, longest]."""
    return text_inputs(lengths, side, seed, VOCAB, pad)


def run(model: Any, inputs: dict, seed: int = 5, **kwargs: Any) -> Any:
    """`generate` with a seed and without warnings."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(**inputs, **kwargs)


def assert_close(expected: Any, got: Any, tolerance: float = 1e-4) -> None:
    """Two `generate` outputs (dicts) have the same ids and logits within the tolerance at every step."""
    assert torch.equal(expected.sequences, got.sequences), f"{expected.sequences}\n{got.sequences}"
    assert (expected.logits is None) == (got.logits is None)
    for step, (left, right) in enumerate(zip(expected.logits or (), got.logits or (), strict=True)):
        difference = (left - right).abs().max().item()
        assert difference < tolerance, f"logits of step {step} are {difference} apart"
    if getattr(expected, "sequences_scores", None) is not None:
        torch.testing.assert_close(expected.sequences_scores, got.sequences_scores, atol=tolerance, rtol=1e-4)


def assert_equal(plain: Any, paged: Any, inputs: dict, seed: int = 5, **kwargs: Any) -> Any:
    """Both models generate the same: with everything returned (ids, logits), and with ids alone, where the patched
    model may also free finished rows. Nothing is held afterwards.

    Returns:
        The unpatched model's output.
    """
    everything = {"return_dict_in_generate": True, "output_logits": True}
    expected = run(plain, inputs, seed, **kwargs, **everything)
    assert expected.sequences.shape[1] > 1
    got = run(paged, inputs, seed, **kwargs, **everything)
    assert_close(expected, got)
    if (cache := paged_part(got)) is not None:
        cache.check()
    del got, cache
    assert torch.equal(expected.sequences, run(paged, inputs, seed, **kwargs))
    paged.paged_pool.check()
    assert paged.paged_stats().used_blocks == 0
    return expected


def cache_of(output: Any) -> Any:
    """The cache of a `generate` or forward output, under this version's name."""
    return getattr(output, compat.CACHE_ARGUMENT, None)


def paged_part(output: Any) -> hf_paged.PagedCache | None:
    """The `PagedCache` of an output; None: it has none."""
    cache = cache_of(output)
    cache = getattr(cache, "self_attention_cache", cache)
    return cache if isinstance(cache, hf_paged.PagedCache) else None


def with_cache(cache: Any) -> dict[str, Any]:
    """The keyword argument for a forward call with this cache, under this version's name."""
    return {compat.CACHE_ARGUMENT: cache}


def forbid_dense(monkeypatch: Any) -> None:
    """Let any materialised key or value fail the test."""

    def refuse(self: LazyKV, reason: str) -> torch.Tensor:
        raise AssertionError(f"layer {self.layer.index} was made dense for {reason or 'dense attention'}")

    monkeypatch.setattr(LazyKV, "materialize", refuse)


def tokenizer_of_words():
    """A tokenizer whose words are `t3`, `t4`, …: one word a token."""
    words = {f"t{index}": index for index in range(VOCAB)}
    words["abcdef"] = words.pop("t95")  # the library tries stop strings behind this word
    words["<unk>"] = words.pop("t96")
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="t0",
        bos_token="t1",
        eos_token="t2",
        unk_token="<unk>",
        padding_side="left",
    )


class _Observer:
    """A hook that looks and changes nothing."""

    def __init__(self, note):
        self.note = note

    def after(self, module, args, output):
        self.note(args, {})

    def before(self, module, args, kwargs):
        self.note(args, kwargs)


def observe(model: Any, module: torch.nn.Module, note: Any, before: bool = False) -> None:
    """Let `note(args, kwargs)` see what a module of a model is given, and vouch for it: hooks cost all savings.

    Args:
        model: the model that generates.
        before: called before the module, with its keywords; else after it, without.
    """
    vouch_for(model, _Observer.after, _Observer.before)
    if before:
        module.register_forward_pre_hook(_Observer(note).before, with_kwargs=True)
    else:
        module.register_forward_hook(_Observer(note).after)


def vouch_for(model: Any, *entries: Any) -> None:
    """What `PagedConfig.vouch` says when the model is patched, for one that is already. Nothing if it is not."""
    state = compat.generating_model(model).__dict__.get("_hf_paged")
    if state is not None:
        state.config.vouch = (*(state.config.vouch or ()), *entries)
        state.gate = Gate(state.config.shortcuts, state.config.vouch)


class Computed:
    """Counts the tokens that the first layer of a model, or of a part of it, computes queries for."""

    def __init__(self, model, part=None):
        self.tokens = 0
        names = ("q_proj", "q_a_proj", "query_key_value", "Wqkv", "c_attn")
        module = next(module for name, module in (part or model).named_modules() if name.rsplit(".", 1)[-1] in names)
        observe(model, module, self._count)

    def _count(self, args, kwargs):
        self.tokens += args[0].shape[:-1].numel()

    def since(self):
        tokens, self.tokens = self.tokens, 0
        return tokens


class Watch(StoppingCriteria):
    """Notes the pool's numbers after every step; never stops anything."""

    def __init__(self, model):
        self.model, self.seen = model, []
        vouch_for(model, Watch)

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(self.model.paged_stats())
        self.model.paged_pool.check()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class StopAt(StoppingCriteria):
    """Stops a row once it has `lengths[row]` columns."""

    def __init__(self, *lengths):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        return self.lengths.to(input_ids.device) <= input_ids.shape[1]
