"""Dense keys or values of a layer in the hands of user code: an ordinary tensor to read, and what is written to it in
place reaches the blocks.

A `Snapshot` has memory of its own and is read like any tensor: shapes, slices, `torch.cat`, `numpy()`, `torch.save`. An
operation that PyTorch runs on one, or on a view of one, is watched: if it writes to that memory (its schema says so),
the layer stores what has changed before the operation returns. Only writes that PyTorch knows nothing of are not seen,
by a raw pointer for one. What is handed to NumPy is read-only, what goes through DLPack is a copy.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

_REPLACED = (
    "a layer's keys and values keep their memory and shape; assign them instead, cache.layers[i].keys = tensor, or "
    "write into them with copy_()"
)


_alias = torch._C._is_alias_of  # type: ignore[attr-defined]


class Root:
    """Where a snapshot comes from.

    Attributes:
        held: the snapshot's memory as a plain tensor, [batch, num_kv_heads, visible tokens, dim].
        layer: the `PagedLayer`; held weakly, so that a snapshot keeps no blocks.
        which: 0 for keys, 1 for values.
        content: the layer's count of changes when it was taken.
    """

    __slots__ = ("__weakref__", "content", "held", "layer", "which")

    def __init__(self, held: torch.Tensor, layer: Any, which: int):
        self.held, self.layer, self.which, self.content = held, weakref.ref(layer), which, layer.content

    def written(self) -> None:
        """Store what has changed. Once the cache has moved on, the tensor is the caller's own, as the library's is."""
        layer = self.layer()
        if layer is not None and layer.content == self.content:
            layer.rewrite(self.which, self.held)


class _Watch(TorchDispatchMode):
    """Sees which of some tensors' memory the operations within write to."""

    def __init__(self, roots: list[Root]):
        super().__init__()
        self.roots = roots
        self.written: list[Root] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for target in written_by(func, args, kwargs or {}):
            for root in self.roots:
                if root not in self.written and _alias(target, root.held):
                    self.written.append(root)
        return func(*args, **(kwargs or {}))


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    targets: list[torch.Tensor] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            entry = args[place] if place < len(args) else kwargs.get(argument.name)
            targets.extend(each for each in tree_flatten(entry)[0] if isinstance(each, torch.Tensor))
    return targets


def gives_views(func: Any) -> bool:
    """Whether what an operator gives may share memory with what it is given."""
    return any(argument.alias_info is not None for argument in func._schema.arguments)


class Snapshot(torch.Tensor):
    """Dense keys or values of one layer, or a view of them."""

    root: Root

    @staticmethod
    def make(root: Root) -> "Snapshot":
        """All that `root` holds. Several share its memory."""
        self = root.held.as_subclass(Snapshot)
        self.root = root
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__":  # shape, dtype, device, data, T, ...: nothing is written yet
                found = func(*args, **kwargs)
                if not isinstance(found, torch.Tensor) or func == _BASE:
                    return found
                return _as_views(found, [args[0].root])
            if name == "__dlpack__":
                return func(_plain(args[0]).clone(), *args[1:], **kwargs)
            if name in _SHAPING and args[0].shape == args[0].root.held.shape:
                raise RuntimeError(_REPLACED)
            roots = {id(each.root): each.root for each in tree_flatten((args, kwargs))[0] if isinstance(each, Snapshot)}
            if func == _SET_DATA and isinstance(args[0], Snapshot):
                raise RuntimeError(_REPLACED)
            with _Watch(list(roots.values())) as watch:
                found = func(*args, **kwargs)
            if name.endswith("_") and not name.startswith("__") and isinstance(args[0], Snapshot):
                watch.written.append(args[0].root)  # apply_() and its like are no operators
            for root in dict.fromkeys(watch.written):
                root.written()
            if name in ("numpy", "__array__"):
                found.flags.writeable = False
                return found
            return _as_views(found, list(roots.values()))

    def _stays(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(_REPLACED)

    set_ = resize_ = resize_as_ = _stays

    def __copy__(self) -> torch.Tensor:
        return self.view(self.shape)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return _plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


# In place, they change what a tensor looks like and nothing that is stored. (Of a view: as it may be.)
_SHAPING = frozenset(
    ("as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")
)  # fmt: skip
_BASE = torch.Tensor._base.__get__  # type: ignore[union-attr]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _as_views(found: Any, roots: list[Root]) -> Any:
    """What an operation gave: snapshots where it shares memory with one, plain tensors elsewhere."""

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            for root in roots:
                if _alias(tensor, root.held):
                    if not isinstance(tensor, Snapshot):
                        tensor = tensor.as_subclass(Snapshot)
                        tensor.root = root
                    return tensor
        return _plain(tensor) if isinstance(tensor, Snapshot) else tensor

    return tree_map_only(torch.Tensor, wrap, found)
