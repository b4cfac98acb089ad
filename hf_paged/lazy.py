"""Tensors that are not there yet: keys and values in blocks, and masks that are plain enough to need no memory.

Both are wrapper subclasses of `torch.Tensor` with the logical shape. Our attention function recognises them and never
makes them dense. Any other operation on one makes it dense first, through `__torch_dispatch__`: a model that does its
own attention gets the right answer and only loses the speed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_make_wrapper = torch.Tensor._make_wrapper_subclass


class LazyTensor(torch.Tensor):
    """Base of the two: `materialize()` gives the dense tensor, once."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _dense: torch.Tensor | None = None

    def materialize(self, reason: str) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default and isinstance(args[0], LazyTensor):
            return args[0]
        name = func.name() if hasattr(func, "name") else str(func)
        args, kwargs = tree_map_only(LazyTensor, lambda lazy: lazy.materialize(name), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class LazyKV(LazyTensor):
    """Keys or values of one layer as attention is to see them, [batch, num_kv_heads, visible tokens, dim].

    Valid for the step it was made in; reading it after the cache has moved on raises RuntimeError.

    Attributes:
        layer: the `PagedLayer` it came from.
        which: 0 for keys, 1 for values.
        step: the layer's step count when it was made.
    """

    layer: Any
    which: int
    step: int

    @staticmethod
    def make(layer: Any, which: int, step: int, shape: tuple, like: torch.Tensor) -> "LazyKV":
        """One for `layer`; dtype and device as `like`. (No `__init__`: two are made per layer and step.)"""
        self = _make_wrapper(LazyKV, shape, dtype=like.dtype, device=like.device)
        self.layer, self.which, self.step = layer, which, step
        return self

    def materialize(self, reason: str) -> torch.Tensor:
        if self._dense is None:
            self._dense = self.layer.dense(self.which, self.step, reason)
        return self._dense


class LazyMask(LazyTensor):
    """A causal, sliding or chunked mask, [batch, 1, q, kv]: bool, True where a key is seen, or a dtype to be added to
    scores.

    Attributes:
        window: tokens a query sees at most, itself included; None: plain causal.
        chunked: a query sees its own chunk only; chunks of `window` tokens are counted from a row's first token.
        padding: 2D mask over all columns, [batch, columns], bool, or None: no padding.
        build: makes the dense mask.
    """

    window: int | None
    chunked: bool
    padding: torch.Tensor | None
    build: Callable[[], torch.Tensor]

    @staticmethod
    def make(
        shape: tuple,
        device: Any,
        window: int | None,
        chunked: bool,
        padding: torch.Tensor | None,
        build: Callable[[], torch.Tensor],
        dtype: torch.dtype = torch.bool,
    ) -> "LazyMask":
        self = _make_wrapper(LazyMask, shape, dtype=dtype, device=device)
        self.window, self.chunked, self.padding, self.build = window, chunked, padding, build
        return self

    @property
    def plain(self) -> bool:
        """Causal and no more: nothing is hidden but what comes later."""
        return self.window is None and self.padding is None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in (None, torch.bool):
            # accelerate sends the mask along to every device of a split model; mpt makes one that is added one of what
            # is hidden.
            mask, device, dtype = args[0], kwargs.get("device", args[0].device), kwargs.get("dtype", args[0].dtype)
            build = lambda: mask.materialize("").to(device, dtype)  # noqa: E731
            return LazyMask.make(tuple(mask.shape), device, mask.window, mask.chunked, mask.padding, build, dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def materialize(self, reason: str) -> torch.Tensor:
        if self._dense is None:
            self._dense = self.build()
        return self._dense
