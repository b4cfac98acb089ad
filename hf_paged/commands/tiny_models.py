"""A tiny random model of any family that Transformers can generate with, from nothing but its config class.

The defaults of the config class are shrunk field by field (`SIZES`), parts inside likewise; what a family needs beside
that stands in `OVERRIDES`. Layer patterns keep one layer of each kind.
"""

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 320
PAD, BOS, EOS = 0, 1, 2
FIRST_SPECIAL = 250
"""Prompts are drawn from 3 up to this id; ids of images, sounds and the like are laid from it on."""
WINDOW = 8
MOST_PARAMETERS = 100_000_000

MAPPINGS = {
    "text": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "text to text": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
    "speech": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",),
    "images": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
}

# Field -> (its tiny value). Applied where the default is larger.
SIZES: dict[str, int] = {
    **dict.fromkeys(
        (
            "hidden_size d_model n_embd embed_dim hidden_dim dim decoder_hidden_size encoder_hidden_dim word_embed_proj_dim "
            "embedding_size projection_dim out_hidden_size output_dim projector_hidden_size width vision_embed_dim "
            "hidden_size_per_layer_input pooler_output_size backbone_embed_dim text_hidden_size dim_model lm_hidden_size "
            "encoder_dim decoder_dim cross_attention_hidden_size encoder_hidden_size out_dim output_size text_embed_dim "
            "vision_hidden_size visual_hidden_size audio_hidden_size d_embed lru_width attention_hidden_size "
            "adapter_hidden_size emb_dim input_dim output_hidden_size"
        ).split(),
        64,
    ),
    **dict.fromkeys(
        (
            "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner intermediate_size_mlp mlp_dim "
            "feed_forward_dim ffn_hidden_size dense_intermediate_size shared_intermediate_size "
            "ffn_intermediate_size dim_ff vision_intermediate_size"
        ).split(),
        96,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size "
            "moe_latent_size expert_intermediate_size"
        ).split(),
        32,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers encoder_layers decoder_layers n_layer num_layers n_layers depth num_decoder_layers "
            "num_encoder_layers num_blocks num_block_layers encoder_num_hidden_layers decoder_num_hidden_layers "
            "speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_encoder_blocks conf_num_hidden_layers "
            "num_attention_layers num_layers_encoder num_layers_decoder vision_layers num_adapter_layers"
        ).split(),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads encoder_attention_heads decoder_attention_heads num_heads n_head n_heads "
            "speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads attention_heads "
            "encoder_num_attention_heads decoder_num_attention_heads num_encoder_attention_heads "
            "num_decoder_attention_heads conf_num_attention_heads num_heads_attention"
        ).split(),
        4,
    ),
    "head_dim": 16, "d_kv": 16, "kv_channels": 16, "global_head_dim": 16, "attention_head_dim": 16, "dim_head": 16,
    "swa_head_dim": 16, "swa_v_head_dim": 16, "encoder_hidden_size_per_head": 16,
    "num_global_key_value_heads": 2,
    "num_mtp_layers": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "qk_head_dim": 24, "o_lora_rank": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    **dict.fromkeys(
        "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts zero_expert_num".split(), 4
    ),
    **dict.fromkeys("num_experts_per_tok moe_topk moe_k expert_top_k num_experts_per_token top_k_experts".split(), 2),
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "vocab_size": VOCAB, "text_vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "decoder_vocab_size": VOCAB,
    "char_vocab_size": VOCAB, "t2u_vocab_size": VOCAB, "encoder_vocab_size": VOCAB, "src_vocab_size": VOCAB,
    "tgt_vocab_size": VOCAB, "audio_vocab_size": VOCAB,
    **dict.fromkeys(
        "max_position_embeddings n_positions max_target_positions max_source_positions max_seq_len n_ctx "
        "max_sequence_length max_encoder_position_embeddings max_decoder_position_embeddings seq_length".split(), 256
    ),
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "local_attention": WINDOW, "window_size": WINDOW,
    "attention_chunk_size": WINDOW, "attention_window_size": WINDOW,
    "max_window_layers": 1,
    "num_kv_shared_layers": 1,
    "mamba_d_state": 8, "state_size": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_num_heads": 4, "mamba_head_dim": 32,
    "ssm_state_size": 8, "mamba_chunk_size": 8, "chunk_size": 8, "n_mamba_heads": 2, "mamba_n_groups": 1, "n_groups": 1,
    "time_step_rank": 4, "mamba_dt_rank": 4, "mamba_headdim": 32, "mamba_d_ssm": 128,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "image_size": 28, "patch_size": 14, "num_image_tokens": 4, "num_query_tokens": 4, "num_queries": 4,
    "num_codebooks": 2, "codebook_size": 64, "num_mel_bins": 16, "laurel_rank": 8,
    "image_seq_length": 4, "codebook_dim": 16,
    "shared_head_dim": 16, "rnn_hidden_size": 64,
}  # fmt: skip


def _rope(sections: list[int]) -> dict[str, Any]:
    """Rotary parameters with sections for time, height and width: half the rotated dims in all."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}


# model type of a config (the whole model's or a part's) -> fields that shrinking alone does not get right.
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "qwen2_vl_text qwen2_5_vl_text glm4v_text glm46v_text glm_ocr_text paddleocr_vl_text qwen2_5_omni_text "
            "qwen2_5_omni_thinker_text hunyuan_vl_text cosmos3_edge_text"
        ).split(),
        {"rope_parameters": _rope([2, 3, 3])},
    ),
    "ernie4_5_vl_moe_text": {"rope_parameters": _rope([3, 3, 2])},
    "chameleon": {"vocabulary_map": {"<image>": 300, "IMGIMGAZ": 301}},
    "emu3": {"vocabulary_map": {"<image>": 300, "<|extra_200|>": 301, "<|visual token 000000|>": 302}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]]},
    "step3p5": {"sliding_window": WINDOW},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 303},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 303},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "glm4v_moe_text": {"rope_parameters": _rope([1, 1, 2])},
    "hy_v4_vl_text": {"rope_parameters": _rope([1, 1, 2])},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_layers": 1,
        "layer_types": None,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kosmos-2": {"vision_config": {}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 32, "num_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False, "is_decoder": True, "attn_layers": ["local", "lsh"]},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 256, "max_decoder_position_embeddings": 256},
    "glm5_next_text": {"index_kpool": 4},
    "step3p7_text": {"sliding_window": WINDOW},
    "whisper": {"max_source_positions": 16},
}


def entries() -> list[tuple[str, str, str]]:
    """`(task, model type, class name)` of every generation entry in the installed Transformers, each class once a
    model type, in the order of the mappings."""
    seen: dict[tuple[str, str], str] = {}
    for task, names in MAPPINGS.items():
        for name in names:
            for model_type, classes in getattr(modeling_auto, name).items():
                for one in (classes,) if isinstance(classes, str) else classes:
                    seen.setdefault((model_type, one), task)
    return [(task, model_type, one) for (model_type, one), task in seen.items()]


def _default(config_class: type) -> Any:
    """A config with nothing but defaults."""
    return config_class()


@functools.cache
def _special_ids() -> dict[str, int]:
    return {}


def _special_id(name: str) -> int:
    """An id below `VOCAB` for a special token's field; the same for the same field everywhere."""
    known = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
    if name in known:
        return known[name]
    ids = _special_ids()
    return ids.setdefault(name.replace("_index", "_id"), FIRST_SPECIAL + len(ids))


def _one_of_each(kinds: list) -> list:
    """The kinds of a pattern in the order they first come, at least two entries."""
    distinct = list(dict.fromkeys(kinds))
    return distinct if len(distinct) > 1 else distinct * 2


def shrink(config: PreTrainedConfig, model_type: str | None = None, **extra: Any) -> PreTrainedConfig:
    """A tiny config like `config`: of its class, its parts shrunk, too.

    Args:
        model_type: under which name to look in `OVERRIDES`; None: the config's own.
        extra: fields to set, whatever the tables say.
    """
    kind = type(config)
    overrides = {**OVERRIDES.get(model_type or config.model_type, {}), **extra}
    try:
        plain = kind()
    except Exception:
        plain = None
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(vars(config))
    arguments: dict[str, Any] = {}
    for name in names:
        value = _value(config, name)
        if name == "per_layer_config":
            continue
        if isinstance(value, PreTrainedConfig):
            part = overrides.get(name)
            if isinstance(part, PreTrainedConfig):
                arguments[name] = part
            elif part is None and name in overrides:
                arguments[name] = None
            else:
                arguments[name] = shrink(value, **(part or {}))
            continue
        if name in SIZES and isinstance(value, int) and not isinstance(value, bool) and value > SIZES[name]:
            arguments[name] = SIZES[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and name not in ("pad_token_id",):
            arguments[name] = _special_id(name)
        elif name == "pad_token_id":
            arguments[name] = PAD
        elif name == "eos_token_id" and value is not None:
            arguments[name] = EOS
        elif name == "head_dim" and value is None:
            arguments[name] = SIZES[name]
        elif plain is not None and not _same(value, _value(plain, name)):
            arguments[name] = copy.deepcopy(value)
    heads = next((n for n in ("num_key_value_heads", "num_kv_heads") if isinstance(_value(config, n), int)), None)
    if heads is not None:
        stored, asked = _value(config, heads), _value(config, "num_attention_heads")
        arguments[heads] = 1 if stored == 1 else 4 if stored == asked else 2
    layers = arguments.get("num_hidden_layers", 2)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "hybrid_layer_types"):
        kinds = _value(config, name)
        if name in names and isinstance(kinds, list | tuple) and kinds and name not in overrides:
            arguments[name] = _one_of_each(list(kinds))
            layers = max(layers, len(arguments[name]))
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "hybrid_layer_types"):
        if name in arguments and len(arguments[name]) < layers:
            pattern = arguments[name]
            arguments[name] = [pattern[min(i, len(pattern) - 1)] for i in range(layers)]
    if layers != arguments.get("num_hidden_layers", layers):
        arguments["num_hidden_layers"] = layers
    for name, value in overrides.items():
        if not isinstance(arguments.get(name), PreTrainedConfig):
            arguments[name] = copy.deepcopy(value)
    return kind(**arguments)


def _value(config: Any, name: str) -> Any:
    """A field's value; of one that may differ from layer to layer, the class's default."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return getattr(type(config), name, None)


def _same(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except Exception:
        return False


def make_config(model_type: str, class_name: str) -> tuple[type, PreTrainedConfig]:
    """The model class and a tiny config for it."""
    model_class = getattr(transformers, class_name)
    wanted = getattr(model_class, "config_class", None)
    config_class = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else wanted
    if wanted is not None and not issubclass(config_class, wanted):
        # A text model of a composite one is made from the text part, as `AutoModelForCausalLM` does.
        parts = [part for part in getattr(config_class(), "sub_configs", {}).values() if part is wanted]
        config_class = wanted if parts or wanted.model_type else config_class
    config = _default(config_class)
    extra = {}
    names = (
        {field.name for field in dataclasses.fields(config_class)} if dataclasses.is_dataclass(config_class) else set()
    )
    if "is_decoder" in names and not config.is_encoder_decoder:
        extra["is_decoder"] = True
    key = model_type if model_type in OVERRIDES else config.model_type
    return model_class, shrink(config, key, **extra)


def build(model_type: str, class_name: str, seed: int = 0, spread: float = 0.15) -> Any:
    """A tiny random model, float32, in eval mode.

    Weights have a standard deviation of `spread`, so that logits are not nearly equal and a wrong key shows in the tokens.

    Raises:
        ValueError: if what came out is not tiny.
    """
    model_class, config = make_config(model_type, class_name)
    config.dtype = torch.float32
    try:
        with torch.device("meta"):
            large = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
    except Exception:
        large = 0  # some cannot be made there; the memory limit of the worker is the other guard
    if large > MOST_PARAMETERS:
        raise ValueError(f"{large:,} parameters are left of it")
    torch.manual_seed(seed)
    model = model_class(config).eval().float()
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data.normal_(0, 2.0, generator=generator)
        elif parameter.ndim >= 2:
            parameter.data.normal_(0, spread, generator=generator)
    return model


def text_inputs(lengths: tuple[int, ...], side: str = "left", seed: int = 3) -> dict[str, torch.Tensor]:
    """A padded batch of random prompts: `input_ids` and `attention_mask`, [rows, longest]."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, FIRST_SPECIAL, (len(lengths), longest), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        pads = slice(0, longest - length) if side == "left" else slice(length, longest)
        ids[row, pads] = PAD
        mask[row, pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


def inputs_for(model: Any, lengths: tuple[int, ...], changed: bool = False) -> Mapping[str, torch.Tensor]:
    """What to hand to `generate`: a padded batch of prompts, and what else the model cannot do without.

    Args:
        lengths: tokens of each row's prompt.
        changed: give the first row another first token (or another sound or image), for a look at what depends on it.
    """
    config = model.config
    main = model.main_input_name
    rows = len(lengths)
    generator = torch.Generator().manual_seed(7)
    if main == "input_ids" or config.model_type in TEXT_FIRST:
        inputs = text_inputs(lengths, "right" if config.is_encoder_decoder else "left")
        if changed:
            place = 0 if config.is_encoder_decoder else int((inputs["attention_mask"][0] == 0).sum())
            inputs["input_ids"][0, place] = 3 + (inputs["input_ids"][0, place] - 3 + 5) % (FIRST_SPECIAL - 3)
        made = MORE_INPUTS.get(config.model_type)
        if made is not None:
            inputs = {**inputs, **made(config, inputs, generator)}
        return inputs
    shape = SHAPES.get(config.model_type) or SHAPES.get(main)
    if shape is None:
        raise ValueError(f"no tiny input for {main}")
    values = torch.randn(rows, *(shape(config) if callable(shape) else shape), generator=generator)
    if changed:
        values[0] = values[0].flip(0) * 2
    inputs = {main: values}
    made = MORE_INPUTS.get(config.model_type)
    if made is not None:
        inputs = {**inputs, **made(config, inputs, generator)}
    return inputs


# Models that say their main input is something else and generate from text alone.
TEXT_FIRST: frozenset[str] = frozenset()
# Main input, or model type -> shape of one row.
SHAPES: dict[str, Any] = {
    "pixel_values": lambda config: (3, _image_size(config), _image_size(config)),
    "input_features": lambda config: (config.num_mel_bins, 32),
    "input_values": (4000,),
    "speech_to_text": lambda config: (32, config.input_feat_per_channel),
    "seamless_m4t": lambda config: (32, config.feature_projection_input_dim),
    "seamless_m4t_v2": lambda config: (32, config.feature_projection_input_dim),
    "pop2piano": lambda config: (16, config.d_model),
    "pix2struct": lambda config: (9, 2 + 3 * config.vision_config.patch_size**2),
}


def _image_size(config: Any) -> int:
    part = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    size = getattr(part, "image_size", 28)
    return size if isinstance(size, int) else size[0]


# Model type -> inputs beside the main one.
MORE_INPUTS: dict[str, Any] = {}


def third(chosen: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """A third of the entries, the same each time: of every kind of attention the first, the fourth, ..."""
    return chosen[::3]
