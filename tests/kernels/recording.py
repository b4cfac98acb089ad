"""Stands in for CUDA graphs where there is no GPU, as strictly as a GPU would.

A CUDA graph is a list of kernel launches, with addresses and numbers as they were when it was captured. So is a
`Recording`: every operator that PyTorch dispatches and every Triton launch, with the tensors and numbers it was given.
A replay runs the list; none of the Python that made it runs again, so a number of one step that was baked in shows as
wrong tokens in the next. What a GPU refuses while it captures is refused here: reading a tensor on the host, and making
one of numbers on the host.
"""

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from hf_paged.lazy import LazyTensor

_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class NotAllowedWhileCapturing(RuntimeError):
    pass


class Recording(TorchDispatchMode):
    """What a function launches, while it runs within `with recording:`; and again with `replay()`."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Any] = []

    def replay(self) -> None:
        with torch.no_grad():
            for launch in self.launches:
                launch()

    def __enter__(self) -> "Recording":
        self._launch, recording, thread = GridExecutor.__call__, self, threading.get_ident()

        def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            if threading.get_ident() != thread:
                return recording._launch(executor, *args, **kwargs)
            recording.launches.append(lambda: recording._launch(executor, *args, **kwargs))
            with _disable_current_modes():
                recording._launch(executor, *args, **kwargs)

        GridExecutor.__call__ = launch  # type: ignore[method-assign]
        self._capturing = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: True  # the library asks, and then reads nothing
        self._tolist = torch.Tensor.tolist
        torch.Tensor.tolist = _refuse_tolist
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        GridExecutor.__call__ = self._launch  # type: ignore[method-assign]
        torch.cuda.is_current_stream_capturing = self._capturing
        torch.Tensor.tolist = self._tolist
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, LazyTensor) for tensor in inputs):
            return func(*args, **kwargs)  # it is made dense, or says that it cannot be
        if name in _READS or (name.startswith("index") and any(tensor.dtype == torch.bool for tensor in inputs[1:])):
            raise NotAllowedWhileCapturing(f"{name} reads a tensor on the host")
        if name == "lift_fresh" and inputs[0].ndim:  # a number becomes an argument of a launch
            raise NotAllowedWhileCapturing("a tensor is made of numbers on the host")
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if name in _EMPTY:
            for tensor in outputs:
                _poison(tensor)
            self.launches.append(lambda: [_poison(tensor) for tensor in outputs])
        elif func._schema.is_mutable:
            self.launches.append(lambda: func(*args, **kwargs))
        else:
            memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
            made = [tensor.untyped_storage().data_ptr() not in memory for tensor in outputs]
            if any(made):
                self.launches.append(lambda: _again(func, args, kwargs, outputs, made))
        return result


def _refuse_tolist(tensor: torch.Tensor) -> list:
    raise NotAllowedWhileCapturing("tolist reads a tensor on the host")


def _again(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor], made: list[bool]) -> None:
    """Run an operator into the memory that its outputs had when it was recorded."""
    results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    for output, result, new in zip(outputs, results, made, strict=True):
        if new:
            output.copy_(result)


def _poison(tensor: torch.Tensor) -> None:
    """New memory may hold anything."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))


class RecordingDevice:
    """In the place of `cuda_graphs.Device`."""

    def why_not(self, device: torch.device) -> str | None:
        return None

    def forget(self) -> None:
        pass

    def order(self) -> None:
        pass

    def capture(self, function: Any) -> tuple[Any, Any]:
        function()
        recording = Recording()
        with recording:
            result = function()
        _poison(result.logits)  # nothing has content before it is replayed
        return result, recording.replay
