"""A tiny random model of any family that Transformers can generate with, from nothing but its config class.

The defaults of the config class are shrunk field by field (`SIZES`), parts inside likewise; what a family needs beside
that stands in `OVERRIDES`. Layer patterns keep one layer of each kind.
"""

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.bark.generation_configuration_bark import BarkSemanticGenerationConfig

VOCAB = 320
PAD, BOS, EOS = 0, 1, 2
FIRST_SPECIAL = 250
"""Prompts are drawn from 3 up to this id; ids of images, sounds and the like are laid from it on."""
WINDOW = 8
MOST_PARAMETERS = 120_000_000

MAPPINGS = {
    "text": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "text to text": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
    "speech": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",),
    "images": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
}

# In these mappings, but without generate().
NOT_GENERATING = frozenset(("PI0ForConditionalGeneration",))

# Composite models of any encoder and any decoder, one whose encoder's output has pads, and one whose has none.
PAIRS = {"encoder-decoder": "EncoderDecoderModel", "vision-encoder-decoder": "VisionEncoderDecoderModel"}

# Tiny value -> the fields that get it, where their default is larger.
_BY_SIZE: dict[int, str] = {
    64: """
        hidden_size d_model n_embd embed_dim hidden_dim dim decoder_hidden_size encoder_hidden_dim
        word_embed_proj_dim embedding_size projection_dim out_hidden_size output_dim projector_hidden_size
        width vision_embed_dim hidden_size_per_layer_input pooler_output_size backbone_embed_dim
        text_hidden_size dim_model lm_hidden_size encoder_dim decoder_dim cross_attention_hidden_size
        encoder_hidden_size out_dim output_size text_embed_dim vision_hidden_size visual_hidden_size
        audio_hidden_size d_embed lru_width attention_hidden_size adapter_hidden_size emb_dim input_dim
        output_hidden_size codebook_size rnn_hidden_size hidden_size_global backbone_hidden_size
    """,
    96: """
        intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner intermediate_size_mlp mlp_dim
        feed_forward_dim ffn_hidden_size dense_intermediate_size shared_intermediate_size
        ffn_intermediate_size dim_ff vision_intermediate_size
    """,
    32: """
        moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
        expert_ffn_hidden_size moe_latent_size expert_intermediate_size mamba_d_head mamba_head_dim
        mamba_headdim
    """,
    2: """
        num_hidden_layers encoder_layers decoder_layers n_layer num_layers n_layers depth num_decoder_layers
        num_encoder_layers num_blocks num_block_layers encoder_num_hidden_layers decoder_num_hidden_layers
        speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_encoder_blocks
        conf_num_hidden_layers num_attention_layers num_layers_encoder num_layers_decoder vision_layers
        num_adapter_layers num_global_key_value_heads index_n_heads num_experts_per_tok moe_topk moe_k
        expert_top_k num_experts_per_token top_k_experts n_mamba_heads linear_num_key_heads num_codebooks
    """,
    4: """
        num_attention_heads encoder_attention_heads decoder_attention_heads num_heads n_head n_heads
        speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads
        attention_heads encoder_num_attention_heads decoder_num_attention_heads num_encoder_attention_heads
        num_decoder_attention_heads conf_num_attention_heads num_heads_attention index_topk num_experts
        num_local_experts n_routed_experts moe_num_experts num_routed_experts zero_expert_num mamba_n_heads
        mamba_num_heads time_step_rank mamba_dt_rank linear_num_value_heads num_image_tokens
        num_query_tokens num_queries image_seq_length
    """,
    16: """
        head_dim d_kv kv_channels global_head_dim attention_head_dim dim_head swa_head_dim swa_v_head_dim
        encoder_hidden_size_per_head q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim o_lora_rank
        index_head_dim linear_key_head_dim linear_value_head_dim num_mel_bins codebook_dim shared_head_dim
    """,
    24: """
        qk_head_dim
    """,
    1: """
        num_mtp_layers n_group topk_group num_expert_group n_shared_experts first_k_dense_replace
        moe_layer_start_index max_window_layers num_kv_shared_layers mamba_n_groups n_groups
    """,
    28: """
        image_size
    """,
    14: """
        patch_size
    """,
    256: """
        max_position_embeddings n_positions max_target_positions max_source_positions max_seq_len n_ctx
        max_sequence_length max_encoder_position_embeddings max_decoder_position_embeddings seq_length
    """,
    128: """
        mamba_d_ssm
    """,
    VOCAB: """
        vocab_size text_vocab_size vision_vocab_size vocab_size_per_layer_input decoder_vocab_size char_vocab_size
        t2u_vocab_size encoder_vocab_size src_vocab_size tgt_vocab_size audio_vocab_size unpadded_vocab_size
    """,
    WINDOW: """
        qk_rope_head_dim mamba_d_state state_size ssm_state_size mamba_chunk_size chunk_size laurel_rank
        sliding_window sliding_window_size local_attention window_size attention_chunk_size
        attention_window_size
    """,
}
SIZES: dict[str, int] = {name: size for size, names in _BY_SIZE.items() for name in names.split()}


def _rope(sections: list[int]) -> dict[str, Any]:
    """Rotary parameters with sections for time, height and width: half the rotated dims in all."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}


_DECODER = {"model_type": "bert", "is_decoder": True, "add_cross_attention": True}
# Stands for a vision tower that needs packages beyond Transformers' own. Text alone never runs it.
_NO_TIMM = transformers.CLIPVisionConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=28,
    patch_size=14,
    model_args={"embed_dim": 64},
)


class _NoTimmConfig(transformers.Gemma3nVisionConfig):
    """The same for Gemma 3n, which takes no other config than its own."""

    model_type = "no_timm"


class _NoTimm(transformers.PreTrainedModel):
    config_class = _NoTimmConfig


transformers.AutoModel.register(_NoTimmConfig, _NoTimm, exist_ok=True)
# Parts with which a config is made at first, where defaults alone make none, or not what its model needs.
DEFAULTS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"encoder": {"model_type": "bert"}, "decoder": _DECODER},
    "speech-encoder-decoder": {"encoder": {"model_type": "wav2vec2"}, "decoder": _DECODER},
    "vision-encoder-decoder": {"encoder": {"model_type": "vit"}, "decoder": _DECODER},
    "diffusion_gemma": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"}},
    "granite4_vision": {"text_config": {"model_type": "granite4_vision_text"}},
}
_ASSISTANT = {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_VOCODER = {
    "vocoder_offset": 0,
    "unit_embed_dim": 16,
    "lang_embed_dim": 8,
    "spkr_embed_dim": 8,
    "upsample_initial_channel": 32,
    "upsample_rates": [2, 2],
    "upsample_kernel_sizes": [4, 4],
}
# model type of a config (the whole model's or a part's) -> fields that shrinking alone does not get right.
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"rope_parameters": _rope([2, 3, 3])},
    "qwen2_5_vl_text": {"rope_parameters": _rope([2, 3, 3])},
    "glm4v_text": {"rope_parameters": _rope([2, 3, 3])},
    "glm_ocr_text": {"rope_parameters": _rope([2, 3, 3])},
    "paddleocr_vl_text": {"rope_parameters": _rope([2, 3, 3])},
    "qwen2_5_omni_text": {"rope_parameters": _rope([2, 3, 3])},
    "hunyuan_vl_text": {"rope_parameters": _rope([2, 3, 3])},
    "cosmos3_edge_text": {"rope_parameters": _rope([2, 3, 3])},
    "ernie4_5_vl_moe_text": {"rope_parameters": _rope([3, 3, 2])},
    "apertus1p5": {"image_token_offset": 100, "audio_token_offset": 164},
    "apertus1p5_vision_tokenizer": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    "blip-2": {"image_token_index": FIRST_SPECIAL + 50, "num_query_tokens": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2},
    "dia_decoder": {
        "cross_hidden_size": 64,
        "cross_num_attention_heads": 4,
        "cross_num_key_value_heads": 4,
        "cross_head_dim": 16,
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "hidden_size": 32, "num_res_blocks": 1},
    "fast_vlm": {"vision_config": _NO_TIMM},
    "florence_vision": {
        "depths": [1, 1, 1, 1],
        "embed_dim": [16, 16, 32, 64],
        "num_heads": [1, 1, 2, 4],
        "num_groups": [1, 1, 2, 4],
        "projection_dim": 64,
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma4_assistant": {
        "text_config": {**_ASSISTANT, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gemma4_unified_assistant": {"text_config": _ASSISTANT},
    "gemma3n": {"vision_config": _NoTimmConfig(hidden_size=64)},
    "instructblip": {"image_token_index": FIRST_SPECIAL + 50},
    "instructblipvideo": {"video_token_index": FIRST_SPECIAL + 50},
    "mimi": {
        "num_quantizers": 2,
        "num_filters": 8,
        "codebook_dim": 64,
        "upsample_groups": 64,
        "vector_quantization_hidden_dimension": 64,
        "hidden_size": 64,
    },
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "perception_lm": {"vision_config": _NO_TIMM},
    "CsmDepthDecoderForCausalLM": {"num_codebooks": 32},
    "encodec": {"codebook_size": 512, "codebook_dim": 64},
    "seamless_m4t": _VOCODER,
    "seamless_m4t_v2": {**_VOCODER, "t2u_variance_predictor_embed_dim": 64, "t2u_variance_predictor_hidden_dim": 16},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "rag": {"n_docs": 2, "max_combined_length": 64},
    "xlm": {"causal": True},
    "flaubert": {"causal": True},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 64}},
    "pocket_tts": {"flow_head_config": {"condition_dim": 64}},
    "glm_image_text": {"rope_parameters": _rope([2, 3, 3])},
    "zaya": {"layer_types": ["hybrid_sliding", "hybrid"], "sliding_window": WINDOW},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "layers_block_type": None,
        "attention_hidden_size": 128,
    },
    "moshi_depth": {"input_size": 64, "audio_vocab_size": 64},
    "mpt": {"use_cache": True},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "vibevoice_acoustic_tokenizer": {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
    "wavtokenizer": {"codebook_dim": 64},
    "wavtokenizer_encoder": {"codebook_dim": 64},
    "chameleon": {"vocabulary_map": {"<image>": 300, "IMGIMGAZ": 301}},
    "emu3": {"vocabulary_map": {"<image>": 300, "<|extra_200|>": 301, "<|visual token 000000|>": 302}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
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
    "kosmos-2": {"latent_query_num": 4},
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
    "cohere_compass_text": {"rope_parameters": {"full_attention": _rope([3, 3, 2])}},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 256, "max_decoder_position_embeddings": 256},
    "glm5_next_text": {"index_kpool": 4},
    "step3p7_text": {"sliding_window": WINDOW},
    "whisper": {"max_source_positions": 16},
}


def entries() -> list[tuple[str, str, str]]:
    """`(task, model type, class name)` of every class that the installed Transformers can generate with.

    First those of the mappings, each class once a model type, in their order; then, as task "other", the public classes
    that no mapping names (see `unmapped`), and as "pairs" composite models with each decoder (see `decoders`), whose
    model type is `composite+decoder`.
    """
    seen: dict[tuple[str, str], str] = {}
    for task, names in MAPPINGS.items():
        for name in names:
            for model_type, classes in getattr(modeling_auto, name).items():
                for one in (classes,) if isinstance(classes, str) else classes:
                    seen.setdefault((model_type, one), task)
    for one in unmapped(frozenset(one for _, one in seen)):
        seen[_model_type(getattr(transformers, one)), one] = "other"
    for composite, one in PAIRS.items():
        seen.update({(f"{composite}+{decoder}", one): "pairs" for decoder in decoders()})
    return [(task, model_type, one) for (model_type, one), task in seen.items() if one not in NOT_GENERATING]


_CLASS = re.compile(r"^class (\w+)\(([^)]*)\):", re.MULTILINE)
_GENERATES = re.compile(r"^    def (can_)?generate\(", re.MULTILINE)


@functools.cache
def unmapped(mapped: frozenset[str]) -> tuple[str, ...]:
    """Names of the public classes of Transformers that are models and can generate, without those in `mapped`; sorted.

    Candidates are found in the text of the modeling files, as to import all of them takes half a minute: classes that
    have a generate() or inherit from one that has. Those are imported and asked.
    """
    bases: dict[str, set[str]] = {}
    candidates = {"GenerationMixin"}
    folder = Path(transformers.__file__).parent / "models"
    for file in [*folder.glob("*/modeling_*.py"), *folder.glob("*/generation_*.py")]:
        text = file.read_text()
        found = list(_CLASS.finditer(text))
        for place, match in enumerate(found):
            bases[match[1]] = set(re.split(r"[\s,.]+", match[2]))
            end = found[place + 1].start() if place + 1 < len(found) else len(text)
            if _GENERATES.search(text, match.end(), end):
                candidates.add(match[1])
    before = 0
    while before != len(candidates):
        before = len(candidates)
        candidates |= {name for name, parents in bases.items() if parents & candidates}
    public = sorted((candidates & set(dir(transformers))) - mapped)
    return tuple(name for name in public if _generates(getattr(transformers, name)))


@functools.cache
def decoders() -> tuple[str, ...]:
    """Model types whose causal language model can attend to an encoder's output, in the mapping's order."""
    found = []
    for model_type, one in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if one in NOT_GENERATING or "encoder_hidden_states" not in _modeling_text(model_type):
            continue  # only what is left is imported
        if "encoder_hidden_states" in inspect.signature(getattr(transformers, one).forward).parameters:
            found.append(model_type)
    return tuple(found)


def _generates(one: Any) -> bool:
    is_model = isinstance(one, type) and issubclass(one, transformers.PreTrainedModel)
    return is_model and (issubclass(one, transformers.GenerationMixin) or bool(one.can_generate()))


def missed() -> list[str]:
    """Generating classes that are no entry: there should be none. Imports every model of the library, for a minute."""
    known = {one for _, _, one in entries()} | NOT_GENERATING
    modules = transformers._class_to_module
    names = [name for name, module in modules.items() if module.split(".")[-1].startswith("modeling")]
    return sorted(name for name in set(names) - known if _generates(getattr(transformers, name)))


def _model_type(model_class: Any) -> str:
    """The model type of a class's config; of one that has none of its own, the folder it stands in."""
    return getattr(model_class.config_class, "model_type", "") or model_class.__module__.split(".")[-2]


def _default(config_class: Any, decoder: str = "") -> Any:
    """A config with as little beside defaults as it can be made with; `decoder`: model type of a pair's decoder."""
    fields = copy.deepcopy(DEFAULTS.get(config_class.model_type, {}))
    if decoder:
        fields["decoder"] = {**_DECODER, "model_type": decoder, "is_encoder_decoder": False}
    return config_class(**fields)


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
    overrides = {**OVERRIDES.get(model_type or config.model_type or kind.__name__, {}), **extra}
    try:
        plain = kind()
    except Exception:
        plain = None
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(vars(config))
    parts_needed = getattr(kind, "has_no_defaults_at_init", False)
    if parts_needed:
        names = list(dict.fromkeys([*names, *kind.sub_configs]))
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
    if parts_needed:
        arguments = {
            name: value.to_dict() if isinstance(value, PreTrainedConfig) else value for name, value in arguments.items()
        }
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
    model_type, _, decoder = model_type.partition("+")
    wanted = getattr(model_class, "config_class", None)
    config_class = CONFIG_MAPPING.get(model_type, wanted)
    if wanted is not None and not issubclass(config_class, wanted):
        # A text model of a composite one is made from the text part, as `AutoModelForCausalLM` does.
        parts = [part for part in getattr(config_class(), "sub_configs", {}).values() if part is wanted]
        config_class = wanted if parts or wanted.model_type else config_class
    config = _default(config_class, decoder)
    extra = {}
    names = (
        {field.name for field in dataclasses.fields(config_class)} if dataclasses.is_dataclass(config_class) else set()
    )
    if "is_decoder" in names and not config.is_encoder_decoder:
        extra["is_decoder"] = True
    key = next((name for name in (class_name, model_type) if name in OVERRIDES), config.model_type)
    tiny = shrink(config, key, **extra)
    if decoder and hasattr(tiny.decoder, "encoder_layers"):
        tiny.decoder.encoder_layers += 1  # what it says of an encoder of its own is not what it is paired with
    return model_class, tiny


def build(model_type: str, class_name: str, seed: int = 0, spread: float = 0.15) -> Any:
    """A tiny random model, float32, in eval mode.

    Weights have a standard deviation of `spread`: logits are not nearly equal, and a wrong key shows in the tokens.

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
    if model_type == "pop2piano":
        model.generation_config.composer_to_feature_token = {
            f"composer{index}": FIRST_SPECIAL for index in range(config.composer_vocab_size)
        }
    if model_type.startswith("seamless_m4t"):
        for name in ("text_decoder_lang_to_code_id", "t2u_lang_code_to_id", "vocoder_lang_code_to_id"):
            setattr(model.generation_config, name, {"eng": 3})
        model.generation_config.id_to_text = {str(index): chr(97 + index % 26) for index in range(VOCAB)}
        model.generation_config.char_to_id = {chr(97 + index): 3 + index for index in range(26)}
    if model_type in ("musicgen", "musicgen_melody"):
        model.generation_config.num_return_sequences = 1  # read without a default by their own generate()
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data.normal_(0, 2.0, generator=generator)
        elif parameter.ndim >= 2:
            parameter.data.normal_(0, spread, generator=generator)
    for name, buffer in model.named_buffers():
        if "embed_sum" in name:  # a codebook: all zeros at first
            buffer.normal_(0, spread, generator=generator)
    return model


def text_inputs(
    lengths: tuple[int, ...], side: str = "left", seed: int = 3, below: int = FIRST_SPECIAL, pad: int = PAD
) -> dict[str, torch.Tensor]:
    """A padded batch of random prompts, [rows, longest] each: `input_ids` from 3 up to `below` and `attention_mask`."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, below, (len(lengths), longest), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        pads = slice(0, longest - length) if side == "left" else slice(length, longest)
        ids[row, pads] = pad
        mask[row, pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _for_model(table: dict[str, Any], model: Any) -> Any:
    """A table's entry for a model's class or else its model type; None: there is none."""
    return table.get(type(model).__name__, table.get(model.config.model_type))


def inputs_for(model: Any, lengths: tuple[int, ...], changed: bool = False) -> Mapping[str, torch.Tensor]:
    """What to hand to `generate`: a padded batch of prompts, and what else the model cannot do without.

    Args:
        lengths: tokens of each row's prompt.
        changed: give the first row another first token (or another sound or image), for a look at what depends on it.
    """
    config = model.config
    main = _for_model(MAIN_INPUT, model) or model.main_input_name
    rows = len(lengths)
    generator = torch.Generator().manual_seed(7)
    if main == "input_ids" or config.model_type in TEXT_FIRST:
        if config.model_type in UNPADDED:
            lengths = (max(lengths),) * rows
        inputs = text_inputs(lengths, "right" if config.is_encoder_decoder else "left")
        if changed:
            place = 0 if config.is_encoder_decoder else int((inputs["attention_mask"][0] == 0).sum())
            place = -1 if config.model_type in LAST_TOKEN_ALONE else place
            inputs["input_ids"][0, place] = 3 + (inputs["input_ids"][0, place] - 3 + 5) % (FIRST_SPECIAL - 3)
        made = _for_model(MORE_INPUTS, model)
        if made is not None:
            inputs = {**inputs, **made(config, inputs, generator)}
        return inputs
    shape = _for_model(SHAPES, model) or SHAPES.get(main)
    if shape is None:
        raise ValueError(f"no tiny input for {main}")
    values = torch.randn(rows, *(shape(config) if callable(shape) else shape), generator=generator)
    if changed:
        values[0] = torch.randn(values[0].shape, generator=generator) * 2
    inputs = {main: values}
    made = _for_model(MORE_INPUTS, model)
    if made is not None:
        inputs = {**inputs, **made(config, inputs, generator)}
    return inputs


def padded_left(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The same rows with their pads in front of them; None: they have none, or are not text alone."""
    if set(inputs) != {"input_ids", "attention_mask"} or bool(inputs["attention_mask"].all()):
        return None
    pads = (inputs["attention_mask"] == 0).sum(1).tolist()
    return {
        name: torch.stack([row.roll(count) for row, count in zip(rows, pads, strict=True)])
        for name, rows in inputs.items()
    }


def decoder_prompts(model: Any, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A left-padded batch of what the decoder of a model with an encoder begins with, the start token first:
    `decoder_input_ids` [rows, longest] and `decoder_attention_mask`."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompts = text_inputs(lengths, seed=11, below=min(FIRST_SPECIAL, vocabulary))
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    start = model.generation_config.decoder_start_token_id
    ids[torch.arange(len(ids)), mask.argmax(1)] = BOS if start is None else start
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


_SEAMLESS_SPEECH = (
    "SeamlessM4TForSpeechToSpeech",
    "SeamlessM4TForTextToSpeech",
    "SeamlessM4TModel",
    "SeamlessM4Tv2ForSpeechToSpeech",
    "SeamlessM4Tv2ForTextToSpeech",
    "SeamlessM4Tv2Model",
)
# Class -> a token that ends a row, of those that do not generate without one.
END = dict.fromkeys(_SEAMLESS_SPEECH, VOCAB - 1)
# Models that say their main input is something else and generate from text alone.
TEXT_FIRST: frozenset[str] = frozenset()
# Models that, given a cache, read the last token of a prompt and nothing before it.
LAST_TOKEN_ALONE = frozenset(("musicgen_decoder",))
# Models that cut left-padded prompts at the wrong end.
UNPADDED = frozenset(("xlm", "flaubert"))
# Main input, class or model type -> shape of one row.
SHAPES: dict[str, Any] = {
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": lambda config: (2, config.hidden_size),
    "SeamlessM4TTextToUnitForConditionalGeneration": lambda config: (9, config.hidden_size),
    "pixel_values": lambda config: (3, _image_size(config), _image_size(config)),
    "input_features": lambda config: (config.num_mel_bins, 32),
    "input_values": (4000,),
    "speech_to_text": lambda config: (32, config.input_feat_per_channel),
    "seamless_m4t": lambda config: (32, config.feature_projection_input_dim),
    "seamless_m4t_v2": lambda config: (32, config.feature_projection_input_dim),
    "pop2piano": lambda config: (16, config.d_model),
    "pix2struct": lambda config: (9, 2 + config.vision_config.patch_embed_hidden_size),
    "kyutai_speech_to_text": (1, 19200),
    "canary": lambda config: (64, config.encoder_config.num_mel_bins),
    "cohere_asr": lambda config: (64, config.encoder_config.num_mel_bins),
    "instructblipvideo": lambda config: (2, 3, _image_size(config), _image_size(config)),
}


def _image_size(config: Any) -> int:
    part = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    size = getattr(part, "image_size", 28)
    return size if isinstance(size, int) else size[0]


def _with_queries(config: Any, inputs: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Text behind an image's (or two frames') placeholders; once more for a query transformer that reads it, too."""
    frames = 2 if config.model_type == "instructblipvideo" else 1
    place = config.video_token_index if frames == 2 else config.image_token_index
    rows = next(iter(inputs.values())).shape[0]
    text = text_inputs((6, 9, 8)[:rows])
    image = torch.full((rows, frames * config.num_query_tokens), place)
    more = {
        "input_ids": torch.cat([image, text["input_ids"]], 1),
        "attention_mask": torch.cat([torch.ones_like(image), text["attention_mask"]], 1),
    }
    if config.model_type != "blip-2":
        more["qformer_input_ids"], more["qformer_attention_mask"] = text["input_ids"], text["attention_mask"]
    return more


def _images(config: Any, inputs: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    size = _image_size(config)
    return {"pixel_values": torch.randn(len(inputs["input_ids"]), 3, size, size, generator=generator)}


def _ends_with_audio(config: Any, inputs: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = inputs["input_ids"].clone()
    ids[:, -1] = config.audio_bos_token_id
    return {"input_ids": ids}


def _audio_codes(config: Any, inputs: dict, generator: torch.Generator) -> dict[str, Any]:
    """What user and model have said so far, as long as the text."""
    rows, columns = inputs["input_ids"].shape
    codes = torch.randint(3, 60, (2, rows, config.num_codebooks, columns), generator=generator)
    return {"user_audio_codes": codes[0], "moshi_audio_codes": codes[1], "return_audio_waveforms": False}


def _documents(config: Any, inputs: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two documents for each question, as a retriever would find them."""
    rows = len(inputs["input_ids"])
    found = text_inputs((9, 7, 8, 12, 5, 10)[: config.n_docs * rows], "right", seed=17)
    more = {f"context_{name}": tensor for name, tensor in found.items()}
    more["context_input_ids"] += inputs["input_ids"][:, :1].repeat_interleave(config.n_docs, 0).remainder(40)
    return {**more, "doc_scores": torch.randn(rows, config.n_docs, generator=generator)}


# Class or model type -> inputs beside the main one.
MORE_INPUTS: dict[str, Any] = {
    "BlipForQuestionAnswering": _images,
    **dict.fromkeys(("pocket_tts", "gradium_phonon_tts"), _ends_with_audio),
    "rag": _documents,
    "BarkSemanticModel": lambda config, inputs, generator: {
        "semantic_generation_config": BarkSemanticGenerationConfig(
            eos_token_id=config.output_vocab_size - 1,
            text_encoding_offset=0,
            text_pad_token=PAD,
            semantic_infer_token=BOS,
            semantic_vocab_size=200,
            semantic_pad_token=200,
            max_input_semantic_length=inputs["input_ids"].shape[1],
        )
    },
    "ClvpModelForConditionalGeneration": lambda config, inputs, generator: {
        "input_features": torch.randn(
            len(inputs["input_ids"]), config.decoder_config.feature_size, 32, generator=generator
        )
    },
    "MoshiForConditionalGeneration": _audio_codes,
    "CsmDepthDecoderForCausalLM": lambda config, inputs, generator: {
        "backbone_last_hidden_state": torch.randn(
            len(inputs["input_ids"]), config.backbone_hidden_size, generator=generator
        )
    },
    **dict.fromkeys(_SEAMLESS_SPEECH, lambda config, inputs, generator: {"tgt_lang": "eng"}),
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), _with_queries),
    "idefics": lambda config, inputs, generator: {
        "pixel_values": torch.randn(len(inputs["input_ids"]), 1, 3, 28, 28, generator=generator),
        "image_attention_mask": torch.ones(*inputs["input_ids"].shape, 1, dtype=torch.long),
    },
    "voxtral_realtime": lambda config, inputs, generator: {
        "input_features": torch.randn(len(inputs["input_ids"]), 16, 8 * 32, generator=generator)
    },
    "kosmos-2": lambda config, inputs, generator: {
        "pixel_values": torch.randn(len(inputs["input_ids"]), 3, 28, 28, generator=generator),
        "image_embeds_position_mask": torch.zeros_like(inputs["input_ids"])
        .index_fill_(1, torch.arange(10, 14), 1)
        .long(),
    },
    **dict.fromkeys(
        ("musicgen_decoder", "musicgen_melody_decoder"),
        lambda config, inputs, generator: {
            "input_ids": inputs["input_ids"].remainder(59).add(1).repeat_interleave(config.num_codebooks, 0)
        },
    ),
    "udop": lambda config, inputs, generator: {"bbox": torch.rand(*inputs["input_ids"].shape, 4, generator=generator)},
    "pix2struct": lambda config, inputs, generator: {
        "flattened_patches": torch.cat(
            [torch.ones_like(inputs["flattened_patches"][..., :2]), inputs["flattened_patches"][..., 2:]], -1
        )
    },
}
# Class or model type -> its main input, where the model says something else.
MAIN_INPUT: dict[str, str] = {
    "SeamlessM4TForTextToSpeech": "input_ids",
    "SeamlessM4Tv2ForTextToSpeech": "input_ids",
    "SeamlessM4TTextToUnitForConditionalGeneration": "inputs_embeds",
    "BlipForQuestionAnswering": "input_ids",
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": "inputs_embeds",
    "speech-encoder-decoder": "input_values",
    "pop2piano": "input_features",
    "kosmos-2": "input_ids",
    "kyutai_speech_to_text": "input_values",
}


# What a modeling file's text says of its attention, and of what it keeps beside it.
TRAITS = (
    "ALL_ATTENTION_FUNCTIONS",
    "def expand_kv",
    "sliding_window",
    "chunked",
    "position_bias",
    "alibi",
    "s_aux",
    "softcap",
    "indexer",
    "rope_deltas",
    "conv_state",
    "rotary_emb",
    "EncoderDecoderCache",
    "shared_kv_states",
)


def _modeling_text(model_type: str) -> str:
    """The modeling files of a model type; of a pair, its decoder's."""
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type.split("+")[-1])
    return "".join(file.read_text() for file in sorted(folder.glob("modeling_*.py")))


@functools.cache
def traits(model_type: str) -> frozenset[str]:
    """Which of `TRAITS` the modeling files of a model type have."""
    text = _modeling_text(model_type)
    return frozenset(trait for trait in TRAITS if trait in text)


def quarter(chosen: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """A quarter of the entries, the same each time: the first of each kind of attention, and of the others as many as
    are left of the quarter, in even steps. Kinds are told apart by `traits` and task."""
    firsts: dict[tuple, tuple[str, str, str]] = {}
    for entry in chosen:
        firsts.setdefault((entry[0], traits(entry[1])), entry)
    kept = set(firsts.values())
    others = [entry for entry in chosen if entry not in kept]
    more = max(0, -(-len(chosen) // 4) - len(kept))
    kept.update(others[place * len(others) // more] for place in range(more))
    return [entry for entry in chosen if entry in kept]
