"""Whether the installed Transformers is one that hf_paged knows: the names that are bound, and how they are called."""

import functools
import inspect
from typing import Any

import transformers
from transformers import GenerationMixin

KNOWN = "5.17 to 5.24"

_VARIABLE = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

# Methods of `GenerationMixin` that `patch` binds over, with the parameters that are known, in order. Others may follow
# if they have defaults: they are handed on.
METHODS: dict[str, tuple[str, ...]] = {
    "_extract_generation_mode_kwargs": ("custom_generate", "kwargs", "synced_gpus", "assistant_model", "streamer"),
    "_prepare_generation_config": ("generation_config",),
    "_get_logits_processor": ("generation_config",),
    "_has_unfinished_sequences": ("this_peer_finished", "synced_gpus", "device"),
    "init_continuous_batching": ("generation_config",),
    "generate_batch": ("inputs", "generation_config"),
    "_expand_inputs_for_generation": ("expand_size", "is_encoder_decoder", "input_ids"),
    "_prepare_cache_for_generation": (
        "generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length",
    ),
    "_prefill": ("input_ids", "generation_config", "model_kwargs"),
    "_get_stopping_criteria": ("generation_config", "stopping_criteria"),
    "_update_model_kwargs_for_generation": ("outputs", "model_kwargs"),
    "prepare_inputs_for_generation": ("input_ids",),
}  # fmt: skip


def why_not(kind: Any = GenerationMixin) -> str | None:
    """What the installed Transformers has otherwise than hf_paged knows it; None: nothing.

    Args:
        kind: the class to look at.
    """
    for name, known in METHODS.items():
        method = inspect.getattr_static(kind, name, None)
        if method is None:
            return f"has no GenerationMixin.{name}"
        signature = inspect.signature(getattr(kind, name))
        parameters = [entry for entry in signature.parameters.values() if entry.name != "self"]
        kinds = {entry.kind for entry in parameters}
        plain = [entry for entry in parameters if entry.kind not in _VARIABLE]
        if not plain and kinds == set(_VARIABLE):
            continue  # wrapped by somebody, who hands everything on
        names = tuple(entry.name for entry in plain)
        more = [entry.name for entry in plain[len(known) :] if entry.default is inspect.Parameter.empty]
        if names[: len(known)] != known or more:
            return f"has GenerationMixin.{name}{signature}, where ({', '.join(known)}) is known"
    return None


@functools.cache
def _checked(methods: tuple[Any, ...]) -> str | None:
    return why_not()


def check() -> None:
    """Look at the names once, and again when one of them is another.

    Raises:
        RuntimeError: if one is not as it is known.
    """
    wrong = _checked(tuple(inspect.getattr_static(GenerationMixin, name, None) for name in METHODS))
    if wrong is not None:
        raise RuntimeError(
            f"hf_paged knows Transformers {KNOWN}, and the installed {transformers.__version__} {wrong}. Nothing was "
            "patched. Install a newer hf_paged, or a Transformers that it knows."
        )
