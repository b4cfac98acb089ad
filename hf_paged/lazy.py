"""Tensors that are not there yet: keys and values in blocks, and masks that are plain enough to need no memory.

Both are wrapper subclasses of `torch.Tensor` with the logical shape. Our attention function recognises them and never
makes them dense. Any other operation on one makes it dense first, through `__torch_dispatch__`: a model that does its
own attention gets the right answer and only loses the speed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from .snapshot import gives_views, written_by

_make_wrapper = torch.Tensor._make_wrapper_subclass


class LazyTensor(torch.Tensor):
    """Base of the two: `materialize()` gives the dense tensor, once."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _dense: torch.Tensor | None = None

    def materialize(self, reason: str) -> torch.Tensor:
        raise NotImplementedError

    def about_to_be_written(self, name: str) -> None:
        """Called before an operation writes to it in place: the dense tensor is not what attention reads.

        Raises:
            RuntimeError: if that would be lost.
        """
        raise RuntimeError(
            f"{name} would write to keys or values that attention reads in blocks. Use a copy (.clone()), or write to "
            "cache.layers[i].keys and .values behind the forward."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default and isinstance(args[0], LazyTensor):
            return args[0]
        name = func.name() if hasattr(func, "name") else str(func)
        for target in written_by(func, args, kwargs or {}):
            if isinstance(target, LazyTensor):
                target.about_to_be_written(name)
        if gives_views(func):
            for entry in args:
                if isinstance(entry, LazyTensor):
                    entry.about_to_be_viewed(name)
        args, kwargs = tree_map_only(LazyTensor, lambda lazy: lazy.materialize(name), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def about_to_be_viewed(self, name: str) -> None:
        """Called before somebody gets a view of the dense tensor, through which it can be written to unseen."""


class LazyKV(LazyTensor):
    """Keys or values of one layer as attention is to see them, [batch, num_kv_heads, visible tokens, dim].

    Valid for the step it was made in; reading it after the cache has moved on raises RuntimeError.

    Attributes:
        layer: the `PagedLayer` it came from.
        which: 0 for keys, 1 for values.
        step: the layer's step count when it was made.
        viewed: somebody has a view of the dense tensor, and may have written to it.
    """

    layer: Any
    which: int
    step: int
    viewed = False

    @classmethod
    def make(cls, layer: Any, which: int, step: int, shape: tuple, like: torch.Tensor) -> "LazyKV":
        """One for `layer`; dtype and device as `like`. (No `__init__`: two are made per layer and step.)"""
        self = _make_wrapper(cls, shape, dtype=like.dtype, device=like.device)
        self.layer, self.which, self.step = layer, which, step
        return self

    def materialize(self, reason: str) -> torch.Tensor:
        if self._dense is None:
            self._dense = self.layer.dense(self.which, self.step, reason)
        return self._dense

    def about_to_be_viewed(self, name: str) -> None:
        self.viewed = True

    def settle(self) -> None:
        """Before attention reads the blocks: store what has been written to a view of the dense tensor."""
        if self.viewed and self._dense is not None and self.step == self.layer.steps:
            self.layer.rewrite(self.which, self._dense)


class LazySnapshot(LazyKV):
    """What `cache.layers[i].keys` gives where it is mostly looked at (mllama asks each layer in every step): a snapshot
    that is made when something reads it."""

    def materialize(self, reason: str) -> torch.Tensor:
        if self._dense is None:
            self.layer.dense(self.which, self.step, reason)
            self._dense = self.layer.snapshot(self.which)
        return self._dense

    def about_to_be_written(self, name: str) -> None:
        """The snapshot takes it."""


class LazyMask(LazyTensor):
    """A causal, sliding or chunked mask, [batch, 1, q, kv]: bool, True where a key is seen, or a dtype to be added to
    scores.

    Attributes:
        window: tokens a query sees at most, itself included; None: plain causal.
        chunked: a query sees its own chunk only; chunks of `window` tokens are counted from a row's first token.
        padding: 2D mask over all columns, [batch, columns], bool, or None: no padding.
        build: makes the dense mask.
        viewed: somebody has a view of the dense mask, and may have written to it.
        written: somebody has written to it in place: the dense mask says what is seen, and the rest does not.
        of_sdpa: the same as a bool one, once somebody has asked for it.
    """

    window: int | None
    chunked: bool
    padding: torch.Tensor | None
    build: Callable[[], torch.Tensor]
    _before: torch.Tensor | None = None  # what the dense mask was, where somebody may write to it

    viewed = False
    of_sdpa: "LazyMask | None" = None

    @property
    def written(self) -> bool:
        return self._before is not None and not torch.equal(self._before, self.materialize(""))

    def about_to_be_written(self, name: str) -> None:
        if self._before is None:
            self._before, self.viewed = self.materialize("").clone(), True

    about_to_be_viewed = about_to_be_written

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
        return self.window is None and self.padding is None and not self.written

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kinds = (None, torch.bool)
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in kinds and not args[0].written:
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
