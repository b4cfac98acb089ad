"""`patch`, `unpatch`, `patched`: paged `generate()` for one model instance.

Nothing of `generate` is copied. Functions of this module are bound to the instance over the methods that `generate`
calls through `self`, so that a deep-copied model is patched for itself:

- `_extract_generation_mode_kwargs` and `_get_logits_processor` see a decoding loop and processors that are not the
  library's;
- `_prepare_generation_config` takes out the keyword `prefix_salt`;
- `_expand_inputs_for_generation` notes what a prompt with images was before it was repeated for beams or samples;
- `_prepare_cache_for_generation` puts a `PagedCache` where a `DynamicCache` would have been;
- `_prefill` computes what is not there yet, once (see `prefill`);
- `_update_model_kwargs_for_generation` and `prepare_inputs_for_generation` vouch for a mask that has been seen but for
  the ones appended, so that a decode step need not wait for a device to read it;
- `_get_stopping_criteria` learns which rows have stopped, so that they can give their blocks back;
- `_has_unfinished_sequences` learns that all have, so that what was generated can be found again;
- `init_continuous_batching` and `generate_batch` refuse a salt, which they cannot keep;
- `forward`, with `PagedConfig.cuda_graphs` only, replays decode steps (see `cuda_graphs`).
"""

import contextvars
import copy
import dataclasses
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList

from . import adapters, compat, implementations, library, prefill
from .binding import Bound, bind
from .cache import PagedCache
from .config import PagedConfig
from .cross import CrossCache
from .generation import salts
from .generation.call import Call
from .generation.provenance import package_of_function
from .generation.soundness import Gate, Reason, Shortcut, attention_of, hooks_before
from .pool import KVPool
from .stats import PagedStats

if TYPE_CHECKING:
    from .cuda_graphs import Graphs

ModelT = TypeVar("ModelT")

_STATE = "_hf_paged"
_INPUTS = "prepare_inputs_for_generation"  # left alone where somebody else has bound one
# Model types whose attention reads only part of the cache by index, or that keep the cache in a way of their own.
_REFUSED_TYPES = {
    "blt": "it adds a second cache to the one it is given, for its decoder",
    "dory": "it adds layers to the cache while it runs",
    "vibevoice": "it samples in a loop of its own, with a second cache for what is not wanted",
    "git": "it concatenates image features into the cache and counts tokens for itself",
    "kosmos-2": "its positions depend on how a prompt with pads is cut",
}
_DYNAMIC_SCALES = "ao.nn.quantized.dynamic"
_REFUSED_LAYERS = (
    "indexed_attention",
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
    "reference_sliding_attention",
    "minimax_m3_sparse",
)


class PatchState:
    """What `patch` changed on a model, to be put back by `unpatch`.

    Attributes:
        configs: those that name `hf_paged` now.
        methods: names of what is bound to the model.
        graphs: its CUDA graphs; None: none are replayed.
        let_go: lets `configs` name again what they named before. Runs once, at the latest when the model is gone.
    """

    def __init__(self, config: PagedConfig, pool: KVPool):
        self.config = config
        self.pool = pool
        self.gate = Gate(config.shortcuts, config.vouch)
        self.configs: list[Any] = []
        self.methods: list[str] = []
        self.graphs: Graphs | None = None
        self.let_go: Any = None

    def hold(self, configs: list[tuple[Any, str | None]]) -> None:
        """Let configs name `hf_paged`, each with what it named before."""
        for config, before in configs:
            implementations.take(config, before)
            self.configs.append(config)
        self.let_go = weakref.finalize(self, implementations.give_back, self.configs)
        self.let_go.atexit = False

    def _copied(self, pool: KVPool, configs: list[tuple[Any, str | None]]) -> "PatchState":
        other = PatchState(self.config, pool)
        other.methods = list(self.methods)
        other.hold(configs)
        if self.graphs is not None:
            other.graphs = type(self.graphs)(pool)
        return other

    def __deepcopy__(self, memo: dict) -> "PatchState":
        configs = [(copy.deepcopy(config, memo), implementations.before(config)) for config in self.configs]
        return self._copied(copy.deepcopy(self.pool, memo), configs)

    def __reduce__(self) -> tuple:
        # With the model, whose new one gets an empty pool.
        configs = [(config, implementations.before(config)) for config in self.configs]
        owner = self.pool.owner() if self.pool.owner is not None else None
        return _restored, (self.config, self.pool, owner, configs, self.methods, self.graphs is not None)


def _restored(
    config: PagedConfig,
    pool: KVPool,
    model: Any,
    configs: list[tuple[Any, str | None]],
    methods: list[str],
    graphs: bool,
) -> PatchState:
    """What was pickled with a model, for the new one, which is not filled yet."""
    state = PatchState(config, pool)
    state.methods = methods
    state.hold(configs)
    if model is not None:
        pool.owner = weakref.ref(model)
    if graphs:
        from .cuda_graphs import Graphs

        state.graphs = Graphs(pool)
    return state


def patch(model: ModelT, config: PagedConfig | None = None, **options: Any) -> ModelT:
    """Make `model.generate()` use a paged key-value cache. The tokens it puts out stay the same.

    The model's attention implementation becomes `hf_paged`, and `model.paged_pool` and `model.paged_stats()` appear.
    Calls without a paged cache, training included, compute what they computed before. Patching a patched model again
    changes nothing, unless other settings are given.

    Args:
        model: a Transformers model with `generate`, or a PEFT model around one.
        config: settings; None: defaults.
        options: fields of `PagedConfig` that override `config`.

    Returns:
        The same model.

    Raises:
        TypeError: if `model` is not such a model, or an option is unknown.
        ValueError: if the model cannot be right with a paged cache, with the reason.
        RuntimeError: if the installed Transformers is not one that is known (see `library`).
    """
    target = compat.generating_model(model)
    fields = {field.name for field in dataclasses.fields(PagedConfig)}
    if unknown := sorted(set(options) - fields):
        raise TypeError(f"unknown option(s) {', '.join(unknown)}; PagedConfig has {', '.join(sorted(fields))}")
    wanted = dataclasses.replace(config if config is not None else PagedConfig(), **options)
    state: PatchState | None = target.__dict__.get(_STATE)
    if state is not None:
        if (config is None and not options) or wanted == state.config:
            return model
        unpatch(target)
    library.check()
    _refuse(target)
    pool = KVPool(target.config, wanted)
    pool.owner = weakref.ref(target)
    state = PatchState(wanted, pool)
    before = [(entry, entry._attn_implementation_internal) for entry in _configs(target)]
    try:
        target.set_attn_implementation(_implementation(target))
        adapters.install(target)
        taken = implementations.NAME
        state.hold([(entry, name) for entry, name in before if entry._attn_implementation_internal == taken])
        for name, function in _METHODS.items():
            if name != _INPUTS or name not in target.__dict__:
                bind(target, name, function)
                state.methods.append(name)
        target.__dict__["paged_pool"] = pool
        target.__dict__[_STATE] = state
        if wanted.cuda_graphs:
            _replay_steps(target, state)
    except BaseException:
        for entry, name in before if state.let_go is None else ():
            entry._attn_implementation_internal = name
        target.__dict__[_STATE] = state
        unpatch(target)
        raise
    return model


def unpatch(model: ModelT) -> ModelT:
    """Put the model back as it was before `patch`. Does nothing to a model that is not patched."""
    target = compat.generating_model(model)
    state: PatchState | None = target.__dict__.pop(_STATE, None)
    if state is not None:
        adapters.remove(target)
        for name in state.methods:
            if name == "forward" and not isinstance(target.__dict__.get(name), Bound):
                continue  # wrapped by somebody since
            target.__dict__.pop(name, None)
        target.__dict__.pop("paged_pool", None)
        if state.let_go is not None:
            state.let_go()
    return model


@contextmanager
def patched(model: ModelT, config: PagedConfig | None = None, **options: Any) -> Iterator[ModelT]:
    """`patch` for the length of a `with` block. A model that was patched before is as it was then, afterwards."""
    target = compat.generating_model(model)
    before: PatchState | None = target.__dict__.get(_STATE)
    patch(model, config, **options)
    try:
        yield model
    finally:
        if before is None:
            unpatch(model)
        elif target.__dict__.get(_STATE) is not before:
            unpatch(model)
            patch(model, before.config)
            state = target.__dict__[_STATE]
            state.pool = target.__dict__["paged_pool"] = before.pool
            if state.graphs is not None and before.graphs is not None:
                state.graphs = before.graphs  # they are of that pool


def pool_of(model: Any) -> KVPool:
    """The pool of a patched model."""
    return _state_of(compat.generating_model(model)).pool


def _replay_steps(model: PreTrainedModel, state: PatchState) -> None:
    """Bind a forward that replays CUDA graphs where it can."""
    if state.config.backend != "triton":
        state.pool.count_fallback(f"cuda_graphs needs backend='triton', not {state.config.backend!r}")
        return
    if "forward" in model.__dict__:
        state.pool.count_fallback("cuda_graphs needs the model's own forward, and this one is wrapped")
        return
    from .cuda_graphs import Graphs

    state.graphs = Graphs(state.pool)
    bind(model, "forward", _forward)
    state.methods.append("forward")


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    own = type(self).forward
    state: PatchState | None = self.__dict__.get(_STATE)
    if state is not None and state.graphs is not None and not args:
        output = state.graphs.step(self, own, kwargs)
        if output is not None:
            return output
    return own(self, *args, **kwargs)


def _refuse(model: PreTrainedModel) -> None:
    """Raise ValueError if this model cannot be right with a paged cache."""
    text = model.config.get_text_config(decoder=True)
    reason = _REFUSED_TYPES.get(model.config.model_type) or _REFUSED_TYPES.get(text.model_type)
    if reason is None and not isinstance(model, GenerationMixin):
        reason = "its generate() is one of its own, which keeps its cache for itself"
    if reason is None and any(_DYNAMIC_SCALES in type(module).__module__ for module in model.modules()):
        reason = (
            "its layers (torch.ao dynamic quantisation) scale by the largest value of a whole batch, so what a row "
            "gives depends on the pads and rows beside it"
        )
    if reason is None and any("recurrent_states" in vars(module) for module in model.modules()):
        reason = "it keeps a recurrent state in its modules, out of the cache's reach"
    if reason is None and not model._supports_default_dynamic_cache():
        reason = "its generate() does not use the library's cache classes"
    if reason is None:
        try:
            types = [layer_type for layer_type, _ in compat.reads_layer_types(model.config)]
        except Exception as error:
            raise ValueError(
                f"hf_paged cannot patch {type(model).__name__}: its config does not say what its cache layers are "
                f"({error})"
            ) from error
        sparse = sorted(set(types) & set(_REFUSED_LAYERS))
        if sparse:
            reason = f"its layers of type {', '.join(sparse)} read the cache by index or in compressed form"
        elif not any(compat.window_of(layer_type, {"sliding_window": 1})[0] for layer_type in types):
            reason = "none of its layers keeps keys and values"
            if mixed := sorted(set(types) & {"hybrid", "hybrid_sliding"}):
                reason = f"its layers of type {', '.join(mixed)} keep keys, values and a recurrent state in one"
    if reason is None:
        reason = _why_not_attention(model)
    if reason is not None:
        raise ValueError(f"hf_paged cannot patch {type(model).__name__} and be right: {reason}")


def _why_not_attention(model: PreTrainedModel) -> str | None:
    """Why the model's attention is not what hf_paged computes; None: it is."""
    return next(filter(None, map(_why_not_functions, _configs(model))), None)


def _why_not_functions(config: Any) -> str | None:
    """Why the attention that a config names is not what hf_paged computes; None: it is."""
    if all(package_of_function(function) not in ("", "python") for function in attention_of(config)):
        return None
    return (
        f"its attention implementation {config._attn_implementation_internal!r} is a function that hf_paged does not "
        'know and would replace. If another computes the same, call model.set_attn_implementation("sdpa") first.'
    )


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every config object whose attention implementation `set_attn_implementation` may change."""
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        waiting.extend(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    return list(found.values())


def _implementation(model: PreTrainedModel) -> str | dict[str, str]:
    """What to hand to `set_attn_implementation`: the decoder's text part alone in composite models."""
    text = model.config.get_text_config(decoder=True)
    if text is model.config:
        return implementations.NAME
    names = [name for name in model.config.sub_configs if getattr(model.config, name, None) is text]
    return {name: implementations.NAME for name in names} or implementations.NAME


# -- what generate() calls --------------------------------------------------------------------------------------------


# From `_extract_generation_mode_kwargs` to `_prepare_generation_config`, which generate() calls one after the other: a
# decoding loop that is not the library's, and the name of a streamer's class that is not.
_arriving: contextvars.ContextVar[tuple[Any, str | None]] = contextvars.ContextVar(
    "hf_paged_arriving", default=(None, None)
)
# What `generate(prefix_salt=...)` and these are called on the call's own copy of the generation config.
_SALT, _LOOP, _STREAMER, _CALL = "_hf_paged_salt", "_hf_paged_loop", "_hf_paged_streamer", "_hf_paged_call"


def _extract_generation_mode_kwargs(
    self: Any, custom_generate: Any, kwargs: Any, synced_gpus: Any, assistant_model: Any, streamer: Any
) -> Any:
    state = self.__dict__.get(_STATE)
    unknown = None if streamer is None or state is None else state.gate.why_not_streamer(streamer)
    _arriving.set((custom_generate if callable(custom_generate) else None, unknown))
    return type(self)._extract_generation_mode_kwargs(
        self, custom_generate, kwargs, synced_gpus, assistant_model, streamer
    )


def _prepare_generation_config(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    loop, streamer = _arriving.get()
    _arriving.set((None, None))
    salt = salts.checked(kwargs.pop("prefix_salt", None))
    own, model_kwargs = type(self)._prepare_generation_config(self, generation_config, *args, **kwargs)
    if salt is not None:
        setattr(own, _SALT, salt)
    if loop is not None:
        setattr(own, _LOOP, loop)
    if streamer is not None:
        setattr(own, _STREAMER, streamer)
    if own.cache_implementation == "paged":
        _refuse_salt(getattr(own, _SALT, None))
    state = self.__dict__.get(_STATE)
    if state is not None:
        _retake(state)
    return own, model_kwargs


def _refuse_salt(given: str | None) -> None:
    if salts.in_force(given):
        raise ValueError(
            "continuous batching shares blocks among all its requests and knows no prefix_salt. Call generate() "
            'without cache_implementation="paged", or without a salt.'
        )


def _retake(state: PatchState) -> None:
    """The model's attention is ours again, whatever it was set to since (Whisper sets "eager" for word timestamps)."""
    others = [config for config in state.configs if config._attn_implementation_internal != implementations.NAME]
    for config in others:
        if (why := _why_not_functions(config)) is None and not implementations.retake(config):
            why = "continuous batching has the model's attention until it stops"
        if why is not None:
            state.pool.count_fallback(f"dense attention: {why}")


def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The library's continuous batching, by the attention from before `patch`. It knows no prefix salts.

    Until the manager is stopped, or gone, `generate()` of this model attends densely over its blocks.

    Raises:
        ValueError: with a salt, and within `prefix_salt(...)`.
    """
    _refuse_salt(salts.checked(kwargs.pop("prefix_salt", None)))
    state = _state_of(self)
    for config in state.configs:
        implementations.lend(config)
    try:
        manager = type(self).init_continuous_batching(self, *args, **kwargs)
        bind(manager, "stop", _stop)
        for config in state.configs:
            implementations.lend(config, manager)
    except BaseException:
        _retake(state)
        raise
    return manager


def _stop(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`stop()` of a manager of continuous batching: the attention is ours again."""
    try:
        return type(self).stop(self, *args, **kwargs)
    finally:
        state = self.model.__dict__.get(_STATE)
        if state is not None and not self.is_running():
            for config in state.configs:
                implementations.take_from(config, self)
            _retake(state)


def generate_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The library's, by the attention from before `patch`. It knows no prefix salts.

    Raises:
        ValueError: with a salt.
    """
    _refuse_salt(salts.checked(kwargs.pop("prefix_salt", None)))
    return type(self).generate_batch(self, *args, **kwargs)


# From `_expand_inputs_for_generation` to `_prepare_cache_for_generation`, which generate() calls one after the other.
_unrepeated: contextvars.ContextVar[prefill.Unrepeated | None] = contextvars.ContextVar(
    "hf_paged_unrepeated", default=None
)


def _expand_inputs_for_generation(
    self: Any, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
) -> Any:
    before = None
    if expand_size > 1 and input_ids is not None and self.config.model_type in prefill.IMAGES_ONCE:
        before = prefill.Unrepeated(input_ids, model_kwargs)
    _unrepeated.set(before)
    library = inspect.getattr_static(type(self), "_expand_inputs_for_generation")  # up to 5.23 a static method
    return library.__get__(self, type(self))(
        expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
    )


def _state_of(model: Any) -> PatchState:
    return model.__dict__[_STATE]


def _prepare_cache_for_generation(
    self: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _STATE not in self.__dict__:
        # Taken from the patched model and bound to a part of it, which makes a cache of its own (Kyutai's codec).
        return GenerationMixin._prepare_cache_for_generation(
            self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args, **kwargs
        )
    state = _state_of(self)
    before = _unrepeated.get()
    _unrepeated.set(None)
    _retake(state)
    name = compat.CACHE_ARGUMENT
    given = model_kwargs.get(name)
    result = type(self)._prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args, **kwargs
    )
    copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    if given is not None:
        if isinstance(given, PagedCache) and self.config.is_encoder_decoder:
            # Unwrapped, self- and cross-attention would share layers.
            cross = CrossCache(len(given.layers), given.pool)
            model_kwargs[name] = compat.EncoderDecoderCache(given, cross)
        cache = _paged_part(given)
        if cache is not None:
            cache.state.expected_columns = max_cache_length
            cache.state.wrapped = cache is not model_kwargs[name]
            if cache.pool.owner is None:
                cache.pool.owner = weakref.ref(self)
            call = Call(state.gate, cache, copies, False, generation_mode, state.graphs, *_asked(generation_config))
            setattr(generation_config, _CALL, call)
        else:
            state.pool.count_fallback(f"a {type(given).__name__} was passed in, so generate() is not paged")
        return result
    made = model_kwargs.get(name)
    inner = made.self_attention_cache if isinstance(made, compat.EncoderDecoderCache) else made
    if type(inner) is not compat.DynamicCache or getattr(inner, "offloading", False):
        if made is not None:
            wanted = generation_config.cache_implementation or type(inner).__name__
            state.pool.count_fallback(f"cache_implementation={wanted!r} was asked for, so generate() is not paged")
        return result
    if state.pool.layer_types != compat.reads_layer_types(self.config):
        # Early exit: the library runs the model with fewer layers for a while, as its own assistant.
        state.pool.count_fallback("the model runs with other layers than when patched, so generate() is not paged")
        return result
    cache = PagedCache(self.config, pool=state.pool)
    cache.state.expected_columns = max_cache_length
    if generation_config.is_assistant:
        cache.activate_past_recording()
    if isinstance(made, compat.EncoderDecoderCache):
        made.self_attention_cache = cache
        cache.state.wrapped = True
        made.cross_attention_cache = CrossCache(len(cache.layers), state.pool)
    else:
        model_kwargs[name] = cache
    owned = not generation_config.return_dict_in_generate and not generation_config.is_assistant
    call = Call(state.gate, cache, copies, owned, generation_mode, state.graphs, *_asked(generation_config))
    call.before = before
    setattr(generation_config, _CALL, call)
    return result


def _asked(generation_config: Any) -> tuple[str | None, Any, bool, bool]:
    """The salt, the loop, whether there is a streamer of the user's, and whether attention weights are asked for."""
    salt, loop, streamer = (getattr(generation_config, name, None) for name in (_SALT, _LOOP, _STREAMER))
    return salt, loop, streamer is not None, bool(generation_config.output_attentions)


def _paged_part(cache: Any) -> PagedCache | None:
    if isinstance(cache, compat.EncoderDecoderCache):
        cache = cache.self_attention_cache
    return cache if isinstance(cache, PagedCache) else None


def _prefill(
    self: Any,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    library = type(self)._prefill
    call: Call | None = getattr(generation_config, _CALL, None)
    if call is None:
        return library(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    cache, state = call.cache, _state_of(self)
    call.look(self)
    past = cache.get_seq_length()
    if past and not self.config.is_encoder_decoder and "inputs_embeds" not in model_kwargs:
        mask = model_kwargs.get("attention_mask")
        length = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", input_ids.shape[1])
        if length == input_ids.shape[1] <= past - cache.state.added:
            # Everything is in the cache already: compute the last token again, as at least one must be.
            cache.crop(input_ids.shape[1] - 1 - past)
            past = cache.get_seq_length()

    def compute(ids: torch.Tensor, keywords: dict[str, Any]) -> Any:
        return library(self, ids, generation_config, keywords, *args, **kwargs)

    once = call.allows(Shortcut.EQUAL_ROWS) and state.config.prompt_once
    if self.config.is_encoder_decoder:
        copies = call.copies
        if copies == 1 and input_ids.shape[0] > 1 and not past and call.allows(Shortcut.SOURCES_ONCE):
            copies = prefill.equal_neighbours(model_kwargs, input_ids)
        if past or copies == 1:
            return compute(input_ids, model_kwargs)
        return _prefill_sources(self, input_ids, generation_config, model_kwargs, call, copies, compute)
    repeats = call.copies if once else 1
    reason = prefill.why_not_shared(self, input_ids, generation_config, model_kwargs, cache)
    begun = None
    if reason is not None and (unknown := prefill.unknown_keywords(self, input_ids, model_kwargs, cache)):
        call.step_aside(Reason.UNKNOWN_KEYWORD, ", ".join(unknown))
    if reason is None:
        prompt = input_ids if input_ids.shape[1] else model_kwargs["inputs_embeds"]
        begun = call.begin_identity(self, *prompt.shape[:2])
    goes_on = past and reason is None and prefill.goes_on(call, begun, input_ids, model_kwargs)
    if past and not goes_on and cache.reset_if_stale:
        cache.reset()
        past = 0
    if reason is None and not past:
        outputs = prefill.prefill(self, call, begun, input_ids, generation_config, model_kwargs, compute)
    else:
        known = cache.state.known
        if not goes_on:
            known.clear()
        if repeats > 1 and reason is None:
            reason = _why_not_once(input_ids, model_kwargs, repeats, cache)
        before = None  # the keywords of the rows before they were repeated
        if repeats > 1 and reason is not None and call.before is not None and call.allows(Shortcut.SOURCES_ONCE):
            if not prefill.why_images_are_not_once(self, input_ids, generation_config, model_kwargs, cache):
                before = call.before.for_images(self, input_ids, model_kwargs, repeats)
            reason = None if before is not None else reason
        call.before = None
        if repeats > 1 and reason is not None:
            state.pool.count_fallback(
                f"the prompt is computed once per beam or sample: {reason}", cache.state.fallbacks
            )
        if repeats == 1 or reason is not None:
            outputs = compute(input_ids, model_kwargs)
        else:
            if before is None:
                before = prefill.of_rows(model_kwargs, input_ids.shape[0], slice(None, None, repeats))
            outputs = compute(input_ids[::repeats].contiguous(), before)
            cache.batch_repeat_interleave(repeats)
            prefill.give_rows(self, outputs, _copied(input_ids.shape[0], repeats))
        if known.identity is not None:
            known.note(input_ids.clone(), known.real)
            cache.state.remember()
    if not past and input_ids.shape[1] and model_kwargs.get("inputs_embeds") is None:
        cache.state.added = max(cache.get_seq_length() - input_ids.shape[1], 0)
    mask = model_kwargs.get("attention_mask")
    whole = mask is None or mask.shape[-1] == cache.get_seq_length()
    if call.owned and call.allows(Shortcut.MASK_ONCE) and whole:
        # From here on generate() appends ones to the mask, and the cache dies with the call. (Musicgen reads the last
        # token of a prompt alone, and what it generates falls under the mask of the others; nor is one whole that the
        # user has given too short.)
        cache.state.trusted = True
    return outputs


def _prefill_sources(
    self: Any,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    call: Call,
    copies: int,
    compute: Callable[[torch.Tensor, dict[str, Any]], Any],
) -> Any:
    """The first decoder forward: computed for one row of each source where that can be, and stored so."""
    cache = call.cache
    both = model_kwargs.get(compat.CACHE_ARGUMENT)
    if not call.allows(Shortcut.SOURCES_ONCE):
        return compute(input_ids, model_kwargs)
    keywords = prefill.sources({**model_kwargs, "the prompt": input_ids}, input_ids.shape[0], copies)
    reason = None
    if isinstance(keywords, str):
        reason = keywords
    elif not _state_of(self).config.prompt_once:
        reason = "prompt_once is off"
    elif prefill.asks_hidden_states(generation_config, model_kwargs):
        reason = "hidden states are asked for"
    elif hasattr(self, "_reorder_cache"):
        reason = "the model reorders the cache itself"
    elif not isinstance(both, compat.EncoderDecoderCache):
        reason = "the model has another kind of cache"
    if reason is None and not isinstance(keywords, str) and both is not None:
        ids = keywords.pop("the prompt")
        outputs = compute(ids, keywords)
        both.batch_repeat_interleave(copies)
        prefill.give_rows(self, outputs, _copied(input_ids.shape[0], copies))
        return outputs
    cache.pool.count_fallback(f"a source is read once per beam or sample: {reason}", cache.state.fallbacks)
    outputs = compute(input_ids, model_kwargs)
    cross = getattr(both, "cross_attention_cache", None)
    if not isinstance(keywords, str) and isinstance(cross, CrossCache):
        cross.merge(copies)
    return outputs


def _copied(rows: int, copies: int) -> list[int]:
    """For each of `rows` rows, `copies` of each source side by side, its source."""
    return [row // copies for row in range(rows)]


def _why_not_once(input_ids: torch.Tensor, model_kwargs: dict[str, Any], copies: int, cache: PagedCache) -> str | None:
    """Why what follows a filled cache cannot be computed once for its copies; None: it can."""
    rows = input_ids.shape[0]
    if rows % copies or cache.state.rows not in (None, rows // copies):
        return "the cache holds a row per copy already"
    mask = model_kwargs.get("attention_mask")
    for entry in (input_ids, mask):
        if entry is not None and not bool((entry.unflatten(0, (-1, copies)) == entry[::copies].unsqueeze(1)).all()):
            return "the copies of a prompt are not equal"
    return None


def _update_model_kwargs_for_generation(
    self: Any, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    name, method = "attention_mask", "_update_model_kwargs_for_generation"
    before = model_kwargs.get(name)
    model_kwargs = getattr(type(self), method)(self, outputs, model_kwargs, *args, **kwargs)
    cache = model_kwargs.get(compat.CACHE_ARGUMENT)
    own = getattr(type(self), method) is getattr(compat.GenerationMixin, method)
    if own and isinstance(cache, PagedCache) and cache.state.watched:
        # What the library's own method makes is the mask of the last forward, which was read or vouched for, and ones.
        state = cache.state
        seen = before is not None and before.shape[1] == state.columns and not (state.hides or state.blind)
        state.appended = model_kwargs.get(name) if seen else None
    return model_kwargs


def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own, which comes right before a forward, so it can say whose mask that gets."""
    inputs = type(self).prepare_inputs_for_generation(self, *args, **kwargs)
    cache = kwargs.get(compat.CACHE_ARGUMENT)
    paged = _paged_part(cache)
    if paged is not None:
        _before_forward(self, paged, inputs, kwargs.get("attention_mask") if paged is cache else None)
    return inputs


def _before_forward(model: Any, cache: PagedCache, inputs: dict[str, Any], mask: torch.Tensor | None) -> None:
    """What is looked at in each step: hooks that have come since, whose mask it is, and which tokens go in."""
    state = cache.state
    if state.watched and state.hooks != hooks_before(model):
        # Registered in the middle of the call: masks are read again, and no more rows are let go.
        state.watched = state.trusted = False
        cache.pool.step_aside(
            Reason.UNKNOWN_HOOK.code, Reason.UNKNOWN_HOOK.value, state.fallbacks, detail="it came while generate() ran"
        )
    state.vouched = state.watched and mask is not None and mask is state.appended
    known = state.known
    if state.follows and known.identity is not None and state.columns >= known.columns > 0:
        if known.witness is not None and not known.witness.same():
            cache.pool.step_aside(
                Reason.UNSTEADY.code, Reason.UNSTEADY.value, state.fallbacks, detail="in the middle of generate()"
            )
            known.clear()
            return
        ids = inputs.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.ndim == 2 and inputs.get("inputs_embeds") is None:
            known.feed(ids)  # the library's own copy of them
        else:
            known.clear()


class _Arriving:
    """A tensor on its way to the host, which does not wait for it. On a CPU it is there at once."""

    def __init__(self, tensor: torch.Tensor):
        self._event = None
        if tensor.device.type == "cuda":
            self.tensor = tensor.to("cpu", non_blocking=True)  # in pinned memory
            self._event = torch.cuda.current_stream(tensor.device).record_event()
        else:
            self.tensor = tensor.cpu()

    @property
    def here(self) -> bool:
        return self._event is None or self._event.query()


# The criteria that were asked last in this thread, until the library says whether it goes on.
_asked_last = threading.local()


class _WatchedCriteria(StoppingCriteriaList):
    """Stopping criteria that tell the cache which rows have stopped. Their answer is unchanged.

    Attributes:
        call: the call.
        may_free: rows that have stopped may give their blocks back, as far as can be said before the call begins. From
            a GPU the answer, and what such a row holds, arrive while the next steps are prepared, so it does so a step
            or two later.
        answers: answers on their way to the host.
        stopped: rows that are known to have stopped.
        leaving: rows that have stopped, and the known ids of all rows, on their way likewise.
    """

    call: Call
    may_free: bool
    answers: deque[_Arriving]
    stopped: set[int]
    leaving: deque[tuple[list[int], _Arriving | None]]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = super().__call__(input_ids, scores, **kwargs)
        call = self.call
        state = call.cache.state
        _asked_last.call = weakref.ref(call)  # an exception may come before the library answers
        frees = self.may_free and state.watched and call.allows(Shortcut.STOPPED_ROWS)
        if frees and isinstance(done, torch.Tensor) and state.rows == done.shape[0]:
            self._free(done)
        return done

    def _free(self, done: torch.Tensor) -> None:
        """Let the rows go that have stopped; `done`: [rows] bool."""
        state = self.call.cache.state
        known = state.known
        self.answers.append(_Arriving(done))
        while self.answers and self.answers[0].here:
            stopped = self.answers.popleft().tensor
            if not bool(stopped.any()):
                continue
            rows = stopped.nonzero().flatten().tolist()
            new = [row for row in rows if row not in self.stopped]
            if new and len(rows) < len(stopped):
                self.stopped.update(new)
                ids = None
                if known.identity is not None and (together := known.together()) is not None:
                    ids = _Arriving(together)
                self.leaving.append((new, ids))
        while self.leaving and ((ids := self.leaving[0][1]) is None or ids.here):
            rows, _ = self.leaving.popleft()
            state.finish_rows(rows, None if ids is None else ids.tensor)


def _get_logits_processor(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    processors = type(self)._get_logits_processor(self, generation_config, *args, **kwargs)
    call: Call | None = getattr(generation_config, _CALL, None)
    if call is not None:
        call.processors = _state_of(self).gate.why_not_processors(processors)
        call.runs_users_code |= call.processors is not None or kwargs.get("prefix_allowed_tokens_fn") is not None
    return processors


def _get_stopping_criteria(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
    criteria = type(self)._get_stopping_criteria(self, generation_config, *args, **kwargs)
    call: Call | None = getattr(generation_config, _CALL, None)
    if call is None or not call.follows:
        return criteria
    watched = _WatchedCriteria(criteria)
    watched.call = call
    watched.answers, watched.stopped, watched.leaving = deque(), set(), deque()
    # Only where a stopped row's next tokens are pads whatever the model says: greedy or sampling, with an EOS
    # criterion.
    watched.may_free = (
        call.owned
        and _state_of(self).config.free_finished_rows
        and not self.config.is_encoder_decoder
        and any(hasattr(entry, "eos_token_id") for entry in criteria)
    )
    unknown = _state_of(self).gate.why_not_processors(criteria)
    call.runs_users_code |= unknown is not None
    unknown = call.processors or unknown
    if watched.may_free and unknown:
        watched.may_free = False
        call.step_aside(Reason.UNKNOWN_PROCESSOR, unknown)
    return watched


def _has_unfinished_sequences(self: Any, *args: Any, **kwargs: Any) -> bool:
    goes_on = type(self)._has_unfinished_sequences(self, *args, **kwargs)
    asked: weakref.ref[Call] | None = _asked_last.__dict__.pop("call", None)
    call = asked() if asked is not None else None
    if call is not None and not goes_on:
        call.settle(self)
    return goes_on


def _paged_stats(self: Any) -> PagedStats:
    """Numbers of the model's pool: everything its living caches hold."""
    return _state_of(self).pool.stats()


_METHODS: dict[str, Callable[..., Any]] = {
    "_extract_generation_mode_kwargs": _extract_generation_mode_kwargs,
    "_prepare_generation_config": _prepare_generation_config,
    "_get_logits_processor": _get_logits_processor,
    "_has_unfinished_sequences": _has_unfinished_sequences,
    "init_continuous_batching": init_continuous_batching,
    "generate_batch": generate_batch,
    "_expand_inputs_for_generation": _expand_inputs_for_generation,
    "_prepare_cache_for_generation": _prepare_cache_for_generation,
    "_prefill": _prefill,
    "_get_stopping_criteria": _get_stopping_criteria,
    "_update_model_kwargs_for_generation": _update_model_kwargs_for_generation,
    _INPUTS: prepare_inputs_for_generation,
    "paged_stats": _paged_stats,
}
