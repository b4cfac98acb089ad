"""The attention function and the mask function registered under `hf_paged`.

With keys and values of a `PagedCache` the function attends over blocks. Every other call (training, `use_cache=False`,
encoders, an assistant with a cache of its own) takes a dense path that is right for any mask.
"""

from functools import partial
from typing import Any

import torch

from . import compat, implementations, traced
from .backends import AttentionCall
from .cross import LazyCross, pack_rows, unpack_rows
from .implementations import NAME
from .latent import LatentHeads
from .lazy import LazyKV, LazyMask
from .traced import TracedCross, TracedKV, TracedMask

# Keywords that change the result and that the paged path does not know: such a call is computed densely.
_DENSE_KEYWORDS = frozenset(
    ("position_bias", "indices", "block_indices", "attention_bias", "attn_bias", "alibi", "head_mask")
)
# Where the library records what a forward was asked for besides logits. Looked at in each layer, so without a call of
# Python: mostly nothing is.
_recorder = compat.recorder
_recorded = _recorder.context_var.get
# Those that a step done again for another layer must not have.
_UNLIKE_KEYWORDS = _DENSE_KEYWORDS | {"softcap", "s_aux", "sinks"}


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over blocks, or dense where there are none.

    Args:
        query: [batch, num_heads, q_len, head_dim]
        key, value: [batch, num_kv_heads, kv_len, dim], lazy where they come from a `PagedCache`.
        attention_mask: None, a lazy mask, or a dense one broadcastable to [batch, num_heads, q_len, kv_len].
        dropout: probability of dropping a weight.
        scaling: factor on the scores; None: 1 / sqrt(head_dim).
        kwargs: `softcap`, `s_aux`/`sinks`, `position_bias`, `is_causal`, … as the model hands them over.

    Returns:
        [batch, q_len, num_heads, value_dim], and None, or the weights [batch, num_heads, q_len, kv_len] where they are
        asked for and the attention from before `patch` gives them.
    """
    if type(key) is LazyKV and type(value) is LazyKV and key.layer is value.layer:
        if key.layer.captured:
            return _attend_captured(module, query, key, attention_mask, dropout, scaling, kwargs), None
        if torch.compiler.is_compiling():  # the frames before this one were not
            return _outside(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        if isinstance(attention_mask, TracedMask):
            attention_mask = attention_mask.lazy()
        if key.viewed or value.viewed:
            key.settle()
            value.settle()
        heads = LatentHeads(module) if key.layer.latent else None
        out = _over_blocks(module, query, key, attention_mask, dropout, scaling, kwargs, heads)
        if out is not None:
            return out, None
        key, value = key.materialize(""), value.materialize("")
        if heads is not None:
            key, value = heads.expand(torch.cat([key, value], dim=3))
    elif type(key) is LazyCross and type(value) is LazyCross:
        out = _attend_to_sources(module, query, key, value, attention_mask, dropout, scaling, kwargs)
        if out is not None:
            return out, None
    elif gives_weights(module, kwargs):
        pass
    elif isinstance(key, TracedKV) and isinstance(value, TracedKV) and key.update is value.update:
        return traced.attend(module, query, key, attention_mask, dropout, scaling, kwargs), None
    elif isinstance(key, TracedCross) and isinstance(value, TracedCross) and key.layer is value.layer:
        return traced.attend_to_sources(module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    return dense_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


_outside = torch.compiler.disable(paged_attention_forward)


def alibi_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LazyKV | TracedKV,
    attention_mask: Any,
    scaling: float,
    slopes: torch.Tensor,
    by_column: bool = False,
) -> torch.Tensor | None:
    """Attention with a bias that is linear in the keys' positions, over blocks.

    Args:
        query: [batch, num_heads, q_len, head_dim]
        slopes: [num_heads] float32; one object for all layers that have the same.
        by_column: the model counts columns, where others count tokens: pads behind a token are in its way.

    Returns:
        [batch, q_len, num_heads, value_dim]; None, counted, where it has to be computed densely. The step is written
        then, as far as the mask says what to write.
    """
    kwargs = {"alibi_column_slopes" if by_column else "alibi_slopes": slopes}
    if isinstance(key, TracedKV):
        return traced.attend(module, query, key, attention_mask, 0.0, scaling, kwargs)
    if torch.compiler.is_compiling():  # the frames before this one were not
        return _alibi_outside(module, query, key, attention_mask, scaling, slopes, by_column)
    if isinstance(attention_mask, TracedMask):
        attention_mask = attention_mask.lazy()
    return _over_blocks(module, query, key, attention_mask, 0.0, scaling, kwargs, None)


_alibi_outside = torch.compiler.disable(alibi_attention)


def _over_blocks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LazyKV,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
    heads: LatentHeads | None,
) -> torch.Tensor | None:
    """Attention over blocks; None where it has to be dense, which is counted, and the step committed if the mask is one
    of ours."""
    if heads is None or query.shape[2] == 1:
        asked = query if heads is None else heads.bring(query)
        out = _repeat(module, asked, key, mask, dropout, scaling, kwargs)
        if out is not None:
            return out if heads is None else heads.values(out)
    reason = _why_dense(module, query, key, mask, dropout, kwargs)
    if reason is None:
        assert mask is None or isinstance(mask, LazyMask)
        done = _attend(module, query, key, mask, scaling, kwargs, heads)
        if not isinstance(done, str):
            return done
        reason = done
    state = key.layer.state
    state.pool.count_fallback(f"dense attention: {reason}", state.fallbacks)
    if isinstance(mask, LazyMask):
        key.layer.commit(mask.padding)
    return None


def _repeat(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LazyKV,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """A decode step as another layer of the group has just done it; None, and nothing done, if it is not alike."""
    layer = key.layer
    state = layer.state
    step, pending = state.step, layer._pending
    if step is None or pending is None or layer.columns != step.end or key.step != layer.steps or query.shape[2] != 1:
        return None
    replay = step.groups[layer.group].replay
    if replay is None or replay.mask is not mask or replay.scale != scaling or dropout:
        return None
    if (_recorded() or _recorder.compiling or kwargs.get("output_attentions")) and gives_weights(module, kwargs):
        return None
    if replay.slopes is not _slopes_of(kwargs):
        return None
    if not _UNLIKE_KEYWORDS.isdisjoint(kwargs) and any(kwargs.get(name) is not None for name in _UNLIKE_KEYWORDS):
        return None
    store = layer._store
    if store is None or state.pool.stores.get(layer.index) is not store:
        return None
    out = replay.repeat(query, *pending, store)
    if out is not None:
        layer._pending = None
        state.wrote()
    return out


def _slopes_of(kwargs: dict[str, Any]) -> torch.Tensor | None:
    slopes = kwargs.get("alibi_slopes")
    return kwargs.get("alibi_column_slopes") if slopes is None else slopes


def _why_dense(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LazyKV,
    mask: torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> str | None:
    """Why this call cannot be computed over blocks; None: it can."""
    if mask is not None and (type(mask) is not LazyMask or (mask.viewed and mask.written)):
        return "a custom attention mask"
    if (None if mask is None or not mask.chunked else mask.window) != key.layer.chunk:
        return "a mask of other chunks than the layer's"
    if dropout and module.training:
        return "dropout"
    if (_recorded() or _recorder.compiling or kwargs.get("output_attentions")) and gives_weights(module, kwargs):
        return "attention weights are asked for"
    if not _DENSE_KEYWORDS.isdisjoint(kwargs):
        for name in sorted(_DENSE_KEYWORDS.intersection(kwargs)):
            if kwargs[name] is None:
                continue
            if name == "position_bias" and kwargs[name].shape == (1, *query.shape[1:3], key.shape[2]):
                continue  # one for all rows
            return name
    if (sinks := kwargs.get("sinks")) is not None and sinks.ndim != 1:
        return "sinks that differ from token to token"
    if query.shape[2] > 1 and mask is None:
        causal = kwargs.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            return "attention that is not causal"
    if key.step != key.layer.steps:
        return "keys and values of an earlier step"
    return None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LazyKV,
    mask: LazyMask | None,
    scaling: float | None,
    kwargs: dict[str, Any],
    heads: LatentHeads | None = None,
) -> torch.Tensor | str:
    """Attention over blocks, or why it cannot be. `heads`: for latent attention."""
    layer = key.layer
    band = padding = None
    if mask is not None:
        band, padding = mask.window, mask.padding
    fresh: Any = layer._pending
    committed = layer.commit(padding)
    if committed is None:
        # Another layer reads the keys and values that this layer wrote in the same forward (KV sharing).
        step = layer.state.step
        plan, hides = step.groups[layer.group], step.hides
        fresh = (None, None)
    else:
        plan, hides = committed
    if hides or (layer.state.blind and layer.state.hidden_by(padding)):
        return "the attention mask hides tokens that the cache holds"
    if kwargs.get("alibi_column_slopes") is not None and not plan.suffix:
        return "ALiBi that counts pads"
    if kwargs.get("position_bias") is not None and not plan.suffix:
        return "position_bias, and pads behind tokens"
    if plan.window is not None and (band is None or band > plan.window):
        # The mask lets queries see further than the cache keeps: what a token saw depends on how its prompt was cut.
        layer.state.pool.loose_windows = True
        layer.state.known.clear()
    call = _call_of(module, query, band, scaling, kwargs)
    softcap, sinks, slopes, scaling = call.softcap, call.sinks, call.slopes, call.scale
    q_len = query.shape[2]
    if not plan.suffix and plan.first_column == 0 and fresh[0] is not None and sinks is None and slopes is None:
        before = implementation_before(module)
        if before == "eager" or (softcap is not None and before != "sdpa"):
            # A query that sees no key, such as a pad further than the window behind the last token, gets the mean of
            # all values from an eager function, pads included. All of them are here, and only here.
            reason = "dense attention: pads behind tokens, under a model whose own attention is eager"
            layer.state.pool.count_fallback(reason, layer.state.fallbacks)
            fresh = fresh if heads is None else heads.expand(fresh[0])
            return dense_attention(module, query, fresh[0], fresh[1], mask, 0.0, scaling, **kwargs)[0]
    if (
        q_len > 1
        and plan.first_column == 0
        and plan.suffix
        and plan.offsets is None
        and softcap is None
        and sinks is None
        and slopes is None
        and call.bias is None
    ):
        # The very first tokens, no pads: the new keys are all there is.
        new_key, new_value = fresh if heads is None or fresh[0] is None else heads.expand(fresh[0])
        bounded = band is not None and q_len > band
        plain = not bounded and new_key is not None and (heads or new_key.shape[3] == new_value.shape[3])
        if plain and all(new == q_len for new in plan.new):
            return _plain_causal(query, new_key, new_value, scaling)
    if heads is not None:
        if q_len > 1 and plan.suffix and not any(plan.past) and band is None and fresh[0] is not None:
            return _latent_prompts(query, fresh[0], plan, scaling, heads)
        query = heads.bring(query)
    pool = layer.state.pool
    memory = layer._store.memory  # taken once: another thread may make the store grow
    replay = plan.replay
    out = pool.backend(query, *fresh, memory, plan, call)
    if plan.replay is not replay:  # this layer was the first
        plan.replay.mask = mask
    if (used := plan.scratch.get("bytes", 0)) > pool.scratch_bytes:
        pool.scratch_bytes = used
    return out if heads is None else heads.values(out)


def _call_of(
    module: torch.nn.Module, query: torch.Tensor, band: int | None, scaling: float | None, kwargs: dict[str, Any]
) -> AttentionCall:
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if sinks is None:
        sinks = kwargs.get("sinks")
    if softcap is not None and compat.SDPA_IGNORES_SOFTCAP and implementation_before(module) == "sdpa":
        softcap = None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return AttentionCall(scale, band, softcap, sinks, _slopes_of(kwargs), kwargs.get("position_bias"))


def _attend_captured(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LazyKV,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention in a forward that is captured as a CUDA graph (`cuda_graphs`), which has no plan.

    Raises:
        NotImplementedError: if it cannot be computed over blocks.
    """
    reason = _why_dense(module, query, key, mask, dropout, kwargs)
    if isinstance(mask, LazyMask) and mask._dense is not None:
        reason = "the model reads its mask"
    if reason is not None:
        raise NotImplementedError(f"dense attention: {reason}")
    call = _call_of(module, query, mask.window if isinstance(mask, LazyMask) else None, scaling, kwargs)
    if call.bias is not None or call.slopes is not None:
        raise NotImplementedError("a bias on the scores")
    if not key.layer.latent:
        return key.layer.attend(query, call)
    heads = LatentHeads(module)
    return heads.values(key.layer.attend(heads.bring(query), call))


def _latent_prompts(
    query: torch.Tensor, latents: torch.Tensor, plan: Any, scale: float, heads: LatentHeads
) -> torch.Tensor:
    """The first tokens of each row, left pads or packed: attention over expanded keys and values, as the model does it.

    Bringing the queries to the latents instead would be more work where there are as many queries as keys.
    """
    keys, values = heads.expand(latents)
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], values.shape[3])
    for row, new in enumerate(plan.new):
        if new and plan.live[row]:
            index, first = plan.columns_of(row)
            here = (slice(index, index + 1), slice(None), slice(first, first + new))
            out[index, first : first + new] = _plain_causal(query[here], keys[here], values[here], scale)[0]
    return out


def _attend_to_sources(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LazyCross,
    value: LazyCross,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Cross-attention of several rows a source: their queries side by side, each key read once.

    None, and nothing done, where the call is not plain enough for that.
    """
    count = key.rows_of_a_source()
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if (
        not count
        or key.source_of is not value.source_of
        or query.shape[0] != len(key.source_of)
        or (causal and query.shape[2] > 1)
        or (dropout and module.training)
        or gives_weights(module, kwargs)
        or any(kwargs.get(name) is not None for name in _DENSE_KEYWORDS - {"position_bias"})
    ):
        return None
    kwargs = {**kwargs, "is_causal": False}
    extra = {"mask": mask, "bias": kwargs.pop("position_bias", None)}
    if getattr(module, "has_relative_attention_bias", True) is False:
        extra["bias"] = None  # zeros
    for name, entry in extra.items():
        if entry is None:
            continue
        if isinstance(entry, LazyMask) or entry.ndim != 4:
            return None
        if entry.shape[0] not in (1, query.shape[0]) or entry.shape[2] not in (1, query.shape[2]):
            return None
        if entry.shape[0] == 1 or entry.shape[2] != query.shape[2]:
            entry = entry.expand(query.shape[0], -1, query.shape[2], -1)
        extra[name] = pack_rows(entry, count)
    if extra["bias"] is not None:
        kwargs["position_bias"] = extra["bias"]
    packed = pack_rows(query, count)
    out, _ = dense_attention(module, packed, key.held, value.held, extra["mask"], 0.0, scaling, **kwargs)
    return unpack_rows(out, count)


def _plain_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """What the library computes for a prefill without pads, to the bit."""
    grouped = query.shape[1] != key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous()


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over plain tensors, by the function the model used before it was patched.

    That is the library's SDPA function or the model's own eager one. A model loaded with
    `attn_implementation="hf_paged"` has no before: it gets SDPA, or its eager function where SDPA would drop a softcap
    or sinks. Causality aligns lower-right: the last query sees every key.
    """
    if _slopes_of(kwargs) is not None:
        attention_mask = _alibi_mask(query, key, attention_mask, kwargs)
        kwargs = {name: entry for name, entry in kwargs.items() if not name.startswith("alibi_")}
    elif isinstance(attention_mask, TracedMask):
        attention_mask = attention_mask.library()
    for name in ("indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} attends by `{name}` (sparse attention), which hf_paged does not compute. "
                "Call hf_paged.unpatch(model) or load the model with another attn_implementation."
            )
    before = implementation_before(module)
    unusual = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sinks"))
    eager = None
    if before == "eager" or (unusual and before != "sdpa") or gives_weights(module, kwargs):
        eager = compat.eager_attention_of(module)
        if eager is None and unusual:
            raise NotImplementedError(
                f"{type(module).__name__} asks for softcap or sinks and brings no eager attention function to "
                "compute them"
            )
    q_len, kv_len = query.shape[2], key.shape[2]
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if isinstance(attention_mask, LazyMask):
        plain = causal and q_len == kv_len and eager is None and kwargs.get("position_bias") is None
        # SDPA's own causality is the faster, and it is what the library would use.
        attention_mask = None if plain and attention_mask.plain else attention_mask.materialize("dense attention")
    if attention_mask is None and causal and q_len > 1 and (q_len < kv_len or eager is not None):
        # SDPA would align upper-left and drop keys; an eager function applies no causality of its own.
        columns = torch.arange(kv_len, device=query.device)
        attention_mask = (columns <= columns[kv_len - q_len :, None])[None, None]
    if eager is None:
        return compat.sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    if scaling is None:
        scaling = query.shape[3] ** -0.5
    return eager(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _alibi_mask(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor:
    """A mask to be added that has ALiBi's bias in it, [batch, num_heads, q_len, kv_len], for a compiled model whose
    attention has to be dense.

    Args:
        mask: one of ours, or a bool one of what is seen; None: plain causal.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    columns = torch.arange(kv_len, device=query.device)
    places = columns[None]
    if isinstance(mask, LazyMask):
        if mask.padding is not None and kwargs.get("alibi_column_slopes") is None:
            places = mask.padding[:, :kv_len].to(query.device).long().cumsum(1)
            places = torch.nn.functional.pad(places, (0, kv_len - places.shape[1]))
        mask = mask.materialize("dense attention")
    if mask is None:
        mask = (columns <= columns[kv_len - q_len :, None])[None, None]
    slopes = _slopes_of(kwargs)
    assert slopes is not None
    bias = slopes[:, None, None] * (places - places.amax(1, keepdim=True))[:, None, None]
    if mask.dtype != torch.bool:
        return (bias + mask).to(query.dtype)
    return torch.where(mask, bias, torch.finfo(query.dtype).min).to(query.dtype)


def implementation_before(module: torch.nn.Module) -> str | None:
    """The attention implementation a module had before `patch`; None: none, or not known."""
    return implementations.before(getattr(module, "config", None))


def gives_weights(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether attention weights are asked for, of a module whose own attention gives them: eager attention does, SDPA
    gives None."""
    if not (compat.records_attention() or kwargs.get("output_attentions")):
        return False
    return implementation_before(module) in (None, "eager", NAME)


def paged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask for `hf_paged` attention, in as little memory as it needs.

    Plain causal without padding, where one query or all keys are new: None. Plain causal, sliding or chunked otherwise:
    a `LazyMask` that carries the 2D padding mask and becomes [batch, 1, q, kv] only if something other than our
    attention function looks at it. Any other pattern (images, packed sequences, bidirectional): the library's full
    mask.

    None for several queries means "causal" to those alone who asked the library for it before. To eager attention it
    means that nothing is hidden (modules of PegasusX and NLLB-MoE do not even say that they are causal), so a model
    that was eager, or of which that is not known, gets a `LazyMask` there.

    A lazy mask keeps its promise in every hand: a model that slices or adds it gets the right numbers. A compact
    [batch, 1, 1, kv] tensor would not.
    """
    arguments = dict(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )
    # A model that was eager may do some of its attention by itself, with masks to be added.
    config = kwargs.get("config")
    before = implementations.before(config)
    eager = compat.adds_masks(config, before)
    library = compat.eager_mask if eager else compat.sdpa_mask
    compiling = torch.compiler.is_compiling()
    if compiling:
        pattern, window = compat.traced_mask_pattern(
            mask_function, local_size, allow_is_causal_skip, kwargs.get("config")
        )
    else:
        pattern, window = compat.mask_pattern(mask_function)
    if pattern == "other" or use_vmap:
        return library(**arguments)
    if (
        not compiling  # a graph must not depend on what is in the mask
        and attention_mask is not None
        and attention_mask.device.type == "cpu"  # elsewhere a look costs a synchronisation
        and attention_mask.shape[1] == kv_length + kv_offset
        and bool(attention_mask.all())
    ):
        attention_mask = None
    dynamic = not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
    if (
        not compiling
        and attention_mask is None
        and not compat.needs_masks(config)
        and allow_is_causal_skip
        and dynamic
        and window is None
        and (q_length == 1 or (q_length == kv_length and before not in (None, "eager")))
    ):
        return None
    if not dynamic:  # a static cache: keys of the future are there, too, and our functions hide nothing by themselves
        return library(**{**arguments, "allow_is_causal_skip": False})
    if compiling and pattern == "chunked":
        return library(**arguments)
    shape = (batch_size, 1, q_length, kv_length)
    dtype = kwargs.get("dtype", torch.float32) if eager else torch.bool
    if compiling:
        return TracedMask(shape, dtype, window, arguments, eager)  # type: ignore[return-value]
    build = partial(compat.full_mask, arguments, eager)
    return LazyMask.make(shape, device, window, pattern == "chunked", attention_mask, build, dtype)


def register() -> None:
    """Make `attn_implementation="hf_paged"` known to Transformers."""
    compat.ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention_forward)
    compat.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, paged_mask)


__all__ = ["NAME", "dense_attention", "paged_attention_forward", "paged_mask", "register"]
