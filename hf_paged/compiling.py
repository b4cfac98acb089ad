"""What a compiled model calls: one op for all that a layer's attention does, so that nothing of it breaks the graph.

    torch.compile(model.forward)
      mask function ──► TracedMask          cache.update ──► two TracedKV     (objects of `traced`, nothing is written)
      attention     ──► hf_paged::update_and_attend(query, new keys, new values, padding, handles, ...)
                              at run time the eager code: cache.update, begin_step, write, backend, dense fallback

The op is opaque: what belongs to the host (blocks, plans, locks) happens in it, when the graph runs, and no graph
depends on it. It names cache and module by handles, which are tensors; the cache's length is not among its arguments.
The ops write to memory that is none of their arguments; what keeps them in order is that each layer's input is the
output of the layer before.
"""

from functools import partial
from typing import Any

import torch

from . import attention, compat
from .cross import LazyCross
from .lazy import LazyKV, LazyMask
from .traced import Handle

_library = torch.library.Library("hf_paged", "FRAGMENT")
# Blocks and plans are the host's: no CUDA graph may hold one of these.
_TAGS = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)

_library.define(
    "update_and_attend(Tensor query, Tensor? key, Tensor? value, Tensor? padding, Tensor? mask, Tensor cache, "
    "Tensor module, SymInt layer, SymInt value_dim, bool masked, SymInt? window, float dropout, float? scaling, "
    "float? softcap, bool? is_causal, str[] names, Tensor[] tensors) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "attend_to_sources(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor layer, Tensor module, "
    "float dropout, float? scaling, bool? is_causal, str[] names, Tensor[] tensors) -> Tensor",
    tags=_TAGS,
)
_library.define("repeat_sources(Tensor held, Tensor layer, SymInt rows) -> Tensor", tags=_TAGS)
_library.define(
    "update_dense(Tensor key, Tensor value, bool write, Tensor cache, SymInt layer, SymInt visible) "
    "-> (Tensor, Tensor)",
    tags=_TAGS,
)


def update_and_attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    padding: torch.Tensor | None,
    mask: torch.Tensor | None,
    cache: torch.Tensor,
    module: torch.Tensor,
    layer: int,
    value_dim: int,
    masked: bool,
    window: int | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    is_causal: bool | None,
    names: list[str],
    tensors: list[torch.Tensor],
) -> torch.Tensor:
    """Take a layer's new keys and values, and attend.

    Args:
        query: [batch, num_heads, q_len, key_dim]
        key, value: [batch, num_kv_heads, q_len, dim]; None: another layer reads what this one has taken before.
        padding: as of `LazyMask`.
        mask: a dense mask [batch, 1, q_len, kv_len] where it is not a plain causal or sliding one.
        cache, module: handles (`traced.Handle`), 0-dim int64.
        layer: index of the cache's layer.
        value_dim: last dim of the result.
        masked: whether the model made a plain mask; `padding` and `window` (tokens a query sees) belong to it.
        names, tensors: the attention call's other keywords that are tensors.

    Returns:
        [batch, q_len, num_heads, value_dim], contiguous.
    """
    owner, attending = Handle.target(cache), Handle.target(module)
    place = owner.layers[layer]
    lazy = _lazy_of(place, key, value, query, value_dim)
    shown: torch.Tensor | None = mask
    if masked:
        shown = _lazy_mask(owner, place, lazy[0], query, padding, window, attending)
    keywords: dict[str, Any] = {
        name: entry for name, entry in (("softcap", softcap), ("is_causal", is_causal)) if entry is not None
    }
    keywords.update(zip(names, tensors, strict=True))
    out, _ = attention.paged_attention_forward(attending, query, *lazy, shown, dropout, scaling, **keywords)
    return out.contiguous()


def _lazy_of(
    layer: Any, key: torch.Tensor | None, value: torch.Tensor | None, query: torch.Tensor, value_dim: int
) -> tuple[Any, Any]:
    if key is not None and value is not None:
        return layer.update(key, value)
    heads, key_dim, dim, key_dtype, value_dtype, device = layer._store.signature
    visible = layer.get_mask_sizes(0)[0]
    if layer.sliding_window is not None and layer.state.step is not None:
        q_len = layer.state.step.q_len
        visible = layer.columns - max(layer.columns - q_len - layer.sliding_window + 1, 0)
    like = (torch.empty(0, dtype=dtype, device=device) for dtype in (key_dtype, value_dtype))
    sizes = (query.shape[0], heads, visible)
    first, second = (
        LazyKV.make(layer, which, layer.steps, (*sizes, size), entry)
        for which, (size, entry) in enumerate(zip((key_dim, dim), like, strict=True))
    )
    return first, second


def _lazy_mask(
    cache: Any,
    layer: Any,
    key: LazyKV,
    query: torch.Tensor,
    padding: torch.Tensor | None,
    window: int | None,
    module: torch.nn.Module,
) -> LazyMask:
    """The same object for all layers of a forward, which lets them repeat what the first has worked out."""
    shape = (query.shape[0], 1, query.shape[2], key.shape[2])
    step = layer.state.step
    joins = step is not None and step.end == layer.columns
    known = cache.compiled_masks.get(window) if joins else None
    if known is not None and known.padding is padding and known.shape == shape:
        return known
    eager = attention.implementation_before(module) == "eager"
    arguments = dict(
        batch_size=shape[0],
        q_length=shape[2],
        kv_length=shape[3],
        q_offset=layer.columns - shape[2],
        kv_offset=layer.columns - shape[3],
        mask_function=compat.mask_function_of(window),
        attention_mask=None if padding is None else padding.to(query.device),
        device=query.device,
        dtype=query.dtype,
    )
    made = LazyMask.make(
        shape,
        query.device,
        window,
        False,
        padding,
        partial(compat.full_mask, arguments, eager),
        query.dtype if eager else torch.bool,
    )
    if not joins:
        cache.compiled_masks.clear()
    cache.compiled_masks[window] = made
    return made


def _fake_update_and_attend(query: torch.Tensor, *args: Any) -> torch.Tensor:
    batch, heads, q_len, _ = query.shape
    return query.new_empty(batch, q_len, heads, args[7])


def update_dense(
    key: torch.Tensor, value: torch.Tensor, write: bool, cache: torch.Tensor, layer: int, visible: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take a layer's new keys and values, if they are not taken yet, and give all it sees, dense: for a model that does
    its own attention.

    Args:
        key, value: [batch, num_kv_heads, q_len, dim]
        visible: tokens it sees.

    Returns:
        Keys and values, [batch, num_kv_heads, visible, dim], contiguous.
    """
    place = Handle.target(cache).layers[layer]
    lazy = place.update(key, value) if write else _lazy_of(place, None, None, key, value.shape[3])
    first, second = (entry.materialize("a compiled model") for entry in lazy)
    return first, second


def _fake_update_dense(
    key: torch.Tensor, value: torch.Tensor, write: bool, cache: torch.Tensor, layer: int, visible: int
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads = key.shape[:2]
    return key.new_empty(batch, heads, visible, key.shape[3]), value.new_empty(batch, heads, visible, value.shape[3])


def attend_to_sources(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    layer: torch.Tensor,
    module: torch.Tensor,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    names: list[str],
    tensors: list[torch.Tensor],
) -> torch.Tensor:
    """Cross-attention of rows that share sources.

    Args:
        query: [rows, num_heads, q_len, key_dim]
        key, value: [sources, num_kv_heads, source tokens, dim]
        layer: handle of the `CrossLayer`, which knows each row's source.
        mask, module, dropout, scaling, names, tensors: as of `update_and_attend`.

    Returns:
        [rows, q_len, num_heads, value_dim], contiguous.
    """
    place = Handle.target(layer)
    rows = (LazyCross.make(key, place.source_of, place.pool), LazyCross.make(value, place.source_of, place.pool))
    keywords: dict[str, Any] = dict(zip(names, tensors, strict=True))
    if is_causal is not None:
        keywords["is_causal"] = is_causal
    out, _ = attention.paged_attention_forward(Handle.target(module), query, *rows, mask, dropout, scaling, **keywords)
    return out.contiguous()


def _fake_attend_to_sources(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any) -> torch.Tensor:
    batch, heads, q_len, _ = query.shape
    return query.new_empty(batch, q_len, heads, value.shape[3])


def repeat_sources(held: torch.Tensor, layer: torch.Tensor, rows: int) -> torch.Tensor:
    """Keys or values of a cross-attention layer, repeated for each row, [rows, heads, source tokens, dim]: for a model
    that does its own attention."""
    place = Handle.target(layer)
    return LazyCross.make(held, place.source_of, place.pool).materialize("a compiled model")


def _fake_repeat_sources(held: torch.Tensor, layer: torch.Tensor, rows: int) -> torch.Tensor:
    return held.new_empty(rows, *held.shape[1:])


for _name, _run, _fake in (
    ("update_and_attend", update_and_attend, _fake_update_and_attend),
    ("update_dense", update_dense, _fake_update_dense),
    ("attend_to_sources", attend_to_sources, _fake_attend_to_sources),
    ("repeat_sources", repeat_sources, _fake_repeat_sources),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_paged::{_name}", _fake, lib=_library)
