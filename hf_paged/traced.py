"""Keys, values and masks in a forward that `torch.compile` traces: what `lazy` is for one that runs.

Wrapper subclasses of `torch.Tensor` cannot be made in a graph, plain objects can. These carry what one op needs that
does a layer's whole work when the graph runs (`compiling`). They are no tensors, but become one in the hands of
anything that takes them for one: a model that does its own attention gets the right answer and only loses the speed.
Where a graph breaks they go on as they are, and the op is called outside of a graph.
"""

import itertools
import weakref
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

from . import compat
from .lazy import LazyMask

HANDLE = "_hf_paged_handle"
NO_GRADIENTS = (
    "PagedCache stores keys and values outside the autograd graph, but these need gradients. Run generation under "
    "torch.no_grad(), or train with use_cache=False or a DynamicCache."
)


class Handle:
    """A number that stands for an object where only tensors and numbers go: among the arguments of an op.

    It is a tensor, so that another object is no reason to compile anew. The object is held weakly.

    Attributes:
        number: 0-dim int64 on the CPU.
    """

    _objects: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
    _numbers: ClassVar[Any] = itertools.count()

    def __init__(self, target: Any):
        number = next(self._numbers)
        self._objects[number] = target
        self.number = torch.tensor(number, dtype=torch.int64, device="cpu")

    @classmethod
    def target(cls, number: torch.Tensor) -> Any:
        """The object that a number stands for.

        Raises:
            RuntimeError: if it is gone.
        """
        found = cls._objects.get(int(number))
        if found is None:
            raise RuntimeError("a compiled forward has outlived the cache or the model that it was called with")
        return found

    def __deepcopy__(self, memo: dict) -> "Handle":
        # A copied module's handle stands for the copy.
        target = self.target(self.number)
        return Handle(memo.get(id(target), target))

    def __reduce__(self) -> tuple:
        return Handle, (self.target(self.number),)  # of an object that is pickled with it


class Traced:
    """Base: stands for a tensor that `materialize()` computes."""

    def materialize(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Traced, lambda traced: traced.materialize(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.materialize()[index]


class TracedUpdate:
    """The new keys and values of one layer, and whether an op has taken them.

    Attributes:
        cache, index: whose they are, and of which layer.
        key, value: [batch, num_kv_heads, q_len, dim]
        columns: the layer's length before them.
        taken: an op of this graph, or of one before, has written them.
        latent: they are one latent vector and one rotated key, which attention is to read as they are (see `latent`).
        dense: keys and values of all this layer sees, once something has asked for them.
    """

    def __init__(self, cache: Any, index: int, key: torch.Tensor, value: torch.Tensor):
        self.cache, self.index = cache, index
        self.key, self.value = key, value
        self.columns = cache.layers[index].columns
        self.taken = False
        self.latent = False
        self.dense: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What is to be written: the keys and values the first time, then nothing."""
        if self.taken:
            return None, None
        self.taken = True
        return self.key, self.value

    @property
    def visible(self) -> int:
        """Tokens that attention sees."""
        before, window = self.columns, self.cache.layers[self.index].sliding_window
        if window is not None:
            before = before - max(before - window + 1, 0)
        return before + self.key.shape[2]


class TracedKV(Traced):
    """Keys (0) or values (1) of one layer as attention is to see them, [batch, num_kv_heads, visible tokens, dim]."""

    def __init__(self, update: TracedUpdate, which: int):
        self.update, self.which = update, which

    @property
    def new(self) -> torch.Tensor:
        return self.update.value if self.which else self.update.key

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.Tensor.to`; nothing where it names the device or the dtype that it has (gemma3n up to 5.23)."""
        if not kwargs and len(args) == 1 and (args[0] == self.device or args[0] == self.dtype):
            return self
        return self.materialize().to(*args, **kwargs)

    @property
    def shape(self) -> tuple:
        batch, heads, _, dim = self.new.shape
        return (batch, heads, self.update.visible, dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.new.dtype

    @property
    def device(self) -> torch.device:
        return self.new.device

    def materialize(self) -> torch.Tensor:
        update = self.update
        if update.dense is None:
            like = (update.key, update.value)
            update.dense = torch.ops.hf_paged.update_dense(
                *like, not update.taken, update.cache.handle.number, update.index, update.visible
            )
            update.taken = True
        return update.dense[self.which]


class TracedCross(Traced):
    """Keys (0) or values (1) of a cross-attention layer as a row each; see `cross.LazyCross`.

    Attributes:
        layer: the `CrossLayer`.
        held: one entry a source, [sources, heads, source tokens, dim].
    """

    def __init__(self, layer: Any, which: int):
        self.layer, self.which = layer, which
        self.held = layer.tensors[which]

    @property
    def shape(self) -> tuple:
        return (self.layer.rows, *self.held.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @property
    def device(self) -> torch.device:
        return self.held.device

    def materialize(self) -> torch.Tensor:
        return torch.ops.hf_paged.repeat_sources(self.held, self.layer.handle.number, self.layer.rows)


class TracedMask(Traced):
    """A causal or sliding mask, [batch, 1, q, kv]; see `lazy.LazyMask`.

    Attributes:
        shape: as a tensor it would have it.
        device, dtype: likewise.
        window: tokens a query sees, itself included; None: plain causal.
        padding: 2D mask over all columns, [batch, columns], or None.
        arguments: those of the library's mask function, but for the pattern: a function made in a graph does not
            outlive a break.
        eager: the mask is one for eager attention.
    """

    def __init__(self, shape: tuple, dtype: torch.dtype, window: int | None, arguments: dict[str, Any], eager: bool):
        self.shape, self.device, self.dtype = shape, arguments["device"], dtype
        self.window, self.padding = window, arguments["attention_mask"]
        self.arguments = {name: entry for name, entry in arguments.items() if name != "mask_function"}
        self.eager = eager

    def materialize(self) -> torch.Tensor:
        return compat.full_mask(self._whole(), self.eager).to(self.dtype)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """One that is added becomes one of what is hidden, as of a tensor; it stays a traced one."""
        if args != (torch.bool,) or kwargs:
            return self.materialize().to(*args, **kwargs)
        return TracedMask(self.shape, torch.bool, self.window, self.arguments, self.eager)

    def library(self) -> torch.Tensor | None:
        """What the library's mask function gives; None where its attention needs no mask."""
        return (compat.eager_mask if self.eager else compat.sdpa_mask)(**self._whole())

    def lazy(self) -> LazyMask:
        """The same for a forward that runs: of a forward whose other frames are not compiled."""
        return LazyMask.make(self.shape, self.device, self.window, False, self.padding, self.materialize, self.dtype)

    def _whole(self) -> dict[str, Any]:
        return {**self.arguments, "mask_function": compat.mask_function_of(self.window)}


def handle_of(module: torch.nn.Module) -> torch.Tensor:
    """The number that stands for an attention module. `patch` has given it one; else the graph breaks here, once."""
    handle = module.__dict__.get(HANDLE)
    return (_name(module) if handle is None else handle).number


def name(module: torch.nn.Module) -> Handle:
    """Give a module the handle that the op names it by."""
    handle = module.__dict__[HANDLE] = Handle(module)
    return handle


_name = torch.compiler.disable(name)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: TracedKV,
    mask: Any,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention over what `key` and its values stand for: one op. Arguments as of `attention.paged_attention_forward`.

    Returns:
        [batch, q_len, num_heads, value_dim]
    """
    update = key.update
    padding = window = None
    masked = isinstance(mask, TracedMask) or (isinstance(mask, LazyMask) and not mask.chunked)
    if masked:
        padding, window, mask = mask.padding, mask.window, None
    return torch.ops.hf_paged.update_and_attend(
        query,
        *update.take(),
        padding,
        mask,
        update.cache.handle.number,
        handle_of(module),
        update.index,
        module.v_head_dim if update.latent else update.value.shape[3],
        masked,
        window,
        dropout if module.training else 0.0,
        scaling,
        kwargs.get("softcap"),
        kwargs.get("is_causal"),
        *_tensors_of(kwargs),
    )


def attend_to_sources(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: TracedCross,
    value: TracedCross,
    mask: Any,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Cross-attention of rows that share sources: one op. Arguments as of `attention.paged_attention_forward`.

    Returns:
        [batch, q_len, num_heads, value_dim]
    """
    return torch.ops.hf_paged.attend_to_sources(
        query,
        key.held,
        value.held,
        mask.materialize() if isinstance(mask, TracedMask) else mask,
        key.layer.handle.number,
        handle_of(module),
        dropout if module.training else 0.0,
        scaling,
        kwargs.get("is_causal"),
        *_tensors_of(kwargs),
    )


def _tensors_of(kwargs: dict[str, Any]) -> tuple[list[str], list[torch.Tensor]]:
    """Names and values of the keywords that are tensors."""
    names, tensors = [], []
    for keyword, entry in kwargs.items():
        if isinstance(entry, torch.Tensor):
            names.append(keyword)
            tensors.append(entry)
    return names, tensors


def traced_update(cache: Any, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[TracedKV, TracedKV]:
    """What `PagedCache.update` returns while a forward is traced. Nothing is written yet.

    Args:
        cache, index: the cache and the layer.
        key, value: [batch, num_kv_heads, q_len, dim]

    Raises:
        RuntimeError: if a gradient would have to flow through the cache.
    """
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise RuntimeError(NO_GRADIENTS)
    update = TracedUpdate(cache, index, key, value)
    return TracedKV(update, 0), TracedKV(update, 1)
