"""The one place that knows which Transformers version is installed.

Supported: 5.17 to 5.24 and what stays compatible. Everything here was read from the installed source; the differences
are named beside each function.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import cache_utils as _cache_utils
from transformers import masking_utils as _masking_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector as recorder

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "CACHE_ARGUMENT",
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "EncoderDecoderCache",
    "GenerationMixin",
    "LinearAttentionLayer",
    "PreTrainedConfig",
    "eager_mask",
    "generating_model",
    "library_layer",
    "mask_pattern",
    "reads_layer_types",
    "recorder",
    "records_attention",
    "rope_limit",
    "sdpa_attention_forward",
    "sdpa_mask",
    "states_of",
]

CACHE_ARGUMENT: str = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""Name under which `generate` and `forward` carry the cache: `cache` from 5.24, `past_key_values` before."""

SDPA_IGNORES_SOFTCAP: bool = "softcap" not in inspect.getsource(sdpa_attention_forward)
"""Up to 5.23 the library's SDPA function drops a model's softcap without a word; later versions raise."""

_OWN_ATTENTION = frozenset(("bloom", "falcon", "mpt"))


def adds_masks(config: Any, before: str | None) -> bool:
    """Whether a model adds its masks to scores, as eager attention does.

    Args:
        before: the attention implementation that its config named before `patch`; None: not known.
    """
    # These look at no registry, so a model that merely has the config of a patched one attends for itself.
    return before == "eager" or getattr(config, "model_type", None) in _OWN_ATTENTION


def needs_masks(config: Any) -> bool:
    """Whether a model type expects a mask in every forward: one of None hides nothing from it, or makes it fail."""
    return getattr(config, "model_type", None) in _OWN_ATTENTION


def admit(model: torch.nn.Module, name: str) -> None:
    """Let models be made from a config that names an attention implementation, where modeling files choose the class of
    attention by it (falcon, gpt_neo, git)."""
    for file in {type(module).__module__ for module in model.modules()}:
        for attribute, classes in vars(sys.modules[file]).items() if file in sys.modules else ():
            if attribute.endswith("_ATTENTION_CLASSES") and isinstance(classes, dict) and "eager" in classes:
                classes.setdefault(name, classes["eager"])


# Layer type -> whether it has a window. Hybrid layers have a recurrent state beside their keys and values.
_PAGED_TYPES = {
    "full_attention": False,
    "sliding_attention": True,
    "chunked_attention": True,  # the window is a chunk's length
    "hybrid": False,
    "hybrid_sliding": True,
}
CROSS_ATTENTION = "cross_attention"
CHUNKED_ATTENTION = "chunked_attention"
_HYBRID_TYPES = ("hybrid", "hybrid_sliding")

LinearAttentionLayer = _cache_utils.LinearAttentionLayer


def reads_layer_types(config: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """Type and constructor arguments of every cache layer of the (text) model.

    Up to 5.23 the library returned one dict of arguments for all layers, later one a layer.
    """
    text = config.get_text_config(decoder=True)
    types, kwargs = _cache_utils.get_layer_types_and_kwargs(text)
    per_layer = [dict(kwargs) for _ in types] if isinstance(kwargs, dict) else [dict(entry) for entry in kwargs]
    resolved = []
    for layer_type, arguments in zip(types, per_layer, strict=True):
        if layer_type in _PAGED_TYPES:  # up to 5.23 the shared dict also carries other types' arguments
            kept = ("sliding_window", "number_of_states") if layer_type in _HYBRID_TYPES else ("sliding_window",)
            arguments = {name: value for name, value in arguments.items() if name in kept}
        resolved.append((layer_type, arguments))
    # Layers of a decoder that attend to an image alone; the library gives them a layer like any other (mllama).
    for index in getattr(text, "cross_attention_layers", None) or ():
        if index < len(resolved):
            resolved[index] = (CROSS_ATTENTION, {})
    return resolved


def latent_dims(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Dims of the latent vector and the rotated key that a model with latent attention caches; None: it is not one."""
    text = config.get_text_config(decoder=True)
    latent, rotated = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    return (latent, rotated) if isinstance(latent, int) and isinstance(rotated, int) and latent > 0 else None


def function_beside(module: torch.nn.Module, name: str) -> Callable:
    """A function of the modeling file that `module` comes from."""
    return getattr(sys.modules[type(module).__module__], name)


def window_of(layer_type: str, arguments: dict[str, Any]) -> tuple[bool, int | None]:
    """`(paged, window)`: whether a layer of this type holds keys and values that can be paged, and its window."""
    if layer_type not in _PAGED_TYPES:
        return False, None
    return True, int(arguments["sliding_window"]) if _PAGED_TYPES[layer_type] else None


def states_of(layer_type: str, arguments: dict[str, Any]) -> int:
    """How many recurrent states a paged layer of this type has beside its keys and values."""
    return int(arguments.get("number_of_states", 1)) if layer_type in _HYBRID_TYPES else 0


def generating_model(model: Any) -> PreTrainedModel:
    """The Transformers model inside: `model` itself, or what a PEFT model or `torch.compile(model)` wraps.

    Raises:
        TypeError: if `model` is neither, or cannot generate.
    """
    model = getattr(model, "_modules", {}).get("_orig_mod", model)  # of torch.compile(model)
    if not isinstance(model, PreTrainedModel) and callable(getattr(model, "get_base_model", None)):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generate"):
        raise TypeError(
            f"hf_paged needs a Transformers model with generate() (…ForCausalLM, …ForConditionalGeneration), got "
            f"{type(model).__name__}"
        )
    return model


def library_layer(layer_type: str, arguments: dict[str, Any]) -> Any:
    """The library's own dynamic cache layer for a type that is not paged (recurrent, convolution, placeholder, …)."""
    return _cache_utils.DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**arguments)


def rope_limit(config: PreTrainedConfig) -> int | None:
    """Tokens up to which a rotary embedding depends on nothing but positions; None: it never does.

    Beyond them it depends on the length of the sequence. A dynamic one of just its original length also depends on the
    forwards before: the library goes back to the original frequencies for a shorter sequence alone.
    """
    text = config.get_text_config(decoder=True)
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [entry for entry in given.values() if isinstance(entry, dict)]
    limits = []
    for entry in [given, *nested]:
        kind = entry.get("rope_type", entry.get("type")) or ""
        if kind == "longrope" or "dynamic" in kind:
            original = entry.get("original_max_position_embeddings")
            original = int(original or getattr(text, "original_max_position_embeddings", None) or 0)
            longest = int(text.max_position_embeddings)
            if kind == "longrope":
                limits.append(original or longest)
            else:
                limits.append(min(original or longest, longest) - 1)
    return min(limits, default=None)


@functools.cache
def _overlay_code(name: str) -> Any:
    """Code object of the closure that the library's mask factory `name` returns."""
    arguments: dict[str, tuple] = {"sliding_window_overlay": (1,), "chunked_overlay": (1, torch.zeros(1))}
    factory: Callable = getattr(_masking_utils, name)
    return factory(*arguments.get(name, (lambda *a: a[0],))).__code__


def mask_pattern(mask_function: Callable) -> tuple[str, int | None]:
    """What a library mask function means: `("causal", None)`, `("sliding", window)`, `("chunked", length)` or
    `("other", None)`.

    The library hands over closures; the sliding one is `and_masks(sliding_window_overlay(window), causal)`, and the
    chunked one has `chunked_overlay(length, left_padding)` in that place. Anything that is not exactly one of these is
    "other" and gets its full mask.
    """
    if mask_function is _masking_utils.causal_mask_function:
        return "causal", None
    if getattr(mask_function, "__code__", None) is _overlay_code("and_masks"):
        (parts,) = [cell.cell_contents for cell in mask_function.__closure__ or ()] or [()]
        if len(parts) == 2 and parts[1] is _masking_utils.causal_mask_function:
            for pattern, name in (("sliding", "sliding_window_overlay"), ("chunked", "chunked_overlay")):
                if getattr(parts[0], "__code__", None) is _overlay_code(name):
                    return pattern, int(parts[0].__closure__[0].cell_contents)
    return "other", None


_AND_MASKS = _masking_utils.and_masks(_masking_utils.causal_mask_function).__code__


def traced_mask_pattern(
    mask_function: Callable, local_size: int | None, allow_is_causal_skip: bool, config: Any
) -> tuple[str, int | None]:
    """`mask_pattern` in a forward that is being traced, where a closure's content cannot be read.

    `allow_is_causal_skip` says that the mask is causal within `local_size`: then it is a window or a chunk.
    """
    if mask_function is _masking_utils.causal_mask_function:
        return "causal", None
    if (
        getattr(mask_function, "__code__", None) is _AND_MASKS
        and allow_is_causal_skip
        and local_size is not None
        and local_size != getattr(config, "attention_chunk_size", None)
    ):
        return "sliding", local_size
    return "other", None


def mask_function_of(window: int | None) -> Callable:
    """The library's mask function of plain causal attention, or with a window."""
    if window is None:
        return _masking_utils.causal_mask_function
    return _masking_utils.sliding_window_causal_mask_function(window)


def records_attention() -> bool:
    """Whether the forward that runs now was asked for attention weights (`output_attentions=True`).

    The library's hooks pick them out of what attention modules return; most modules are not told.
    """
    # In a traced forward the library keeps it in a plain variable; a context variable cannot be read there.
    collected = recorder.global_var if torch.compiler.is_compiling() else recorder.get()
    return collected is not None and any("attention" in key or "attn" in key for key in collected)


def eager_attention_of(module: torch.nn.Module) -> Callable | None:
    """The `eager_attention_forward` of the modeling file that `module` comes from, with that model's own arithmetic."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    return None


def full_mask(arguments: dict[str, Any], eager: bool = False) -> torch.Tensor:
    """The full mask [batch, 1, q, kv] that the library's mask function gives for these arguments: boolean for SDPA, or
    to be added (0 or the dtype's lowest number) for eager attention."""
    if eager:
        return eager_mask(**arguments)
    arguments = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(**arguments)
    assert mask is not None
    return mask
