"""Whether a model is left alone while a call runs in which a processor, a criterion or a streamer is the user's.

The checksum at the end of a call sees what has changed since its beginning, not what was changed for a few steps and
put back. Reading all weights in every step would cost too much. So in a call in which somebody could do that, each step
looks at what costs little: which objects the model consists of, and a sample of the content of each weight.
"""

import operator
from typing import Any

import torch

from .. import checksum
from .provenance import Provenance

# Of every module: what it consists of, and what is looked at in it.
_GROUPS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


class Witness:
    """Remembers a model as it is now.

    Not seen: a write to a few elements of a weight, through `tensor.data` or a pointer, that is undone within the same
    call.

    Args:
        modules: of the model, with their names.
        tensors: its weights and buffers, taken apart into plain ones.
        provenance: knows when the code of classes has changed.
    """

    def __init__(self, modules: list[tuple[str, torch.nn.Module]], tensors: list[torch.Tensor], provenance: Provenance):
        self._provenance = provenance
        self._kinds = list({type(module) for _, module in modules})
        self._modules = [module for _, module in modules]
        self._tensors = tensors
        self._probe = checksum.Probe([tensor for tensor in tensors if tensor.is_cpu])
        self._objects, self._numbers = self._look()

    def _look(self) -> tuple[list[Any], tuple[Any, ...]]:
        every = torch.nn.modules.module
        objects: list[Any] = [*every._global_forward_pre_hooks.values(), *every._global_forward_hooks.values()]
        for module in self._modules:
            own = module.__dict__
            objects.extend(own.values())  # held, so that no other object gets one's address
            for group in _GROUPS:
                if own[group]:
                    objects.extend(own[group].values())
        versions = [(0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in self._tensors]
        code = [self._provenance.number_of_class(kind) for kind in self._kinds]
        return objects, (versions, code, self._provenance.numbers_everywhere(), self._probe.numbers())

    def same(self) -> bool:
        """Whether the model is still what it was."""
        objects, numbers = self._look()
        return (
            numbers == self._numbers
            and len(objects) == len(self._objects)
            and all(map(operator.is_, objects, self._objects))
        )
