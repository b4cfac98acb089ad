"""What a prefix is found by besides its tokens: everything that their keys and values depend on.

Weights count by content, not by address or version: optimizers, EMA, merged adapters and raw pointers write where
PyTorch sees nothing. The rest counts by value: what the modules and the config carry (numbers, strings, functions,
dicts and lists of these), how modules are nested, autocast and precision.

The checksum of the weights is taken in the call that stores or looks up, so weights that are swapped for one call and
put back are seen both times. It reads all weights once; calls that are too short to gain by it do without
(`worth_looking_up`).
"""

import contextlib
import functools
import hashlib
import itertools
import marshal
import math
import sys
import types
import weakref
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import checksum, compat, implementations
from . import soundness
from .provenance import METHODS, Provenance
from .soundness import attention_of

# What PyTorch keeps in every module; parameters, buffers and children are looked at by themselves.
_TORCH = frozenset(torch.nn.Module().__dict__) - {"training"}
# The library's own bookkeeping, and ours: nothing that a forward computes depends on it.
_BOOKKEEPING = frozenset(
    (
        "_cached_continuous_batching_manager", "_compiled_call", "_compiled_call_impl", "_hf_paged",
        "_hf_paged_adapted", "_hf_paged_handle", "_hf_paged_slopes", "_hf_paged_weights", "_is_hf_initialized",
        "_is_stateful",
        "_output_capturing_hooks_installed", "_output_embeddings_tied", "forward_pass_done", "generation_config",
        "hf_device_map", "is_loaded_in_4bit", "is_loaded_in_8bit", "model_tags", "name_or_path", "paged_pool",
        "paged_stats", "warnings_issued",
    )
)  # fmt: skip
# Fields of a config that no key or value depends on.
_SETTINGS = frozenset(
    (
        "_commit_hash", "_experts_implementation", "_experts_implementation_internal", "_name_or_path",
        "_output_attentions", "architectures", "chunk_size_feed_forward", "dtype", "id2label", "label2id",
        "output_attentions", "output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings",
        "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
    )
)  # fmt: skip
# Of accelerate's hooks: where they lay weights for the time of a forward, and where its input came from. Of
# bitsandbytes' states: in which mode the last forward was.
_HOOK_BOOKKEEPING = frozenset(
    ("buffer_original_devices", "input_device", "is_training", "original_devices", "param_original_devices",
     "prev_module_hook", "tied_params_map", "tied_pointers_to_remove", "weights_map")
)  # fmt: skip
# Objects within objects that are looked into; those further inside count by which they are.
_DEPTH = 8
# Objects and containers of all attributes that are looked at; models have a few hundred.
_MOST = 20_000
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SCALARS = frozenset((bool, int, float, str, bytes, type(None)))
_NAMED = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, complex, range, slice)


def _is_mark(name: str) -> bool:
    """Whether an attribute of a tensor is a mark: of the library, of ours, or of the compiler, which leaves some."""
    return name in _BOOKKEEPING or name.startswith("_dynamo_")


class OutOfReach(Exception):
    """The content of some weights cannot be read here. The message says which."""


class Walk:
    """One look over everything that a model consists of.

    Attributes:
        modules: every module once, with a name for people.

    Args:
        provenance: knows functions and classes, and when they have changed; None: the one that all models share.
        vouched: weights that are out of reach are vouched for: they count by the object that holds them.
    """

    def __init__(self, model: torch.nn.Module, provenance: Provenance | None = None, vouched: bool = False):
        self._provenance, self._vouched = provenance or soundness._shared, vouched
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self._seen: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        self._configs: dict[int, int] = {}
        self._within: set[int] = set()  # what is being taken apart
        self._compounds = 0
        self._visit("", model)

    def _visit(self, name: str, module: torch.nn.Module) -> None:
        """A module and those below it, depth first."""
        waiting = [(name, module)]
        while waiting:
            name, module = waiting.pop()
            if id(module) in self._seen:
                continue
            self._seen[id(module)] = len(self.modules)
            self.modules.append((name, module))
            children = module.__dict__["_modules"]
            for key in reversed(children):
                child = children[key]
                if child is not None:
                    waiting.append((f"{name}.{key}" if name else key, child))

    def numbers_everywhere(self) -> tuple[Any, ...]:
        """Stand for the functions of PyTorch that every model runs."""
        return self._provenance.numbers_everywhere()

    # -- what it carries ----------------------------------------------------------------------------------------------

    def describe(self) -> tuple[bytes, list[torch.Tensor]]:
        """Everything but the content of tensors, as 16 bytes, and the tensors.

        Raises:
            OutOfReach: if some weights cannot be read.
        """
        self._tensors, self._configs, self._compounds = [], {}, 0
        try:
            return self._digest_modules(), self._tensors
        except RecursionError:
            raise OutOfReach("attributes that are nested too deeply") from None

    def _digest_modules(self) -> bytes:
        digest, scalars, skipped = hashlib.blake2b(digest_size=16), _SCALARS, _TORCH | _BOOKKEEPING
        place = 0
        classes: dict[type, int] = {}
        while place < len(self.modules):  # modules that are met in attributes are appended
            _, module = self.modules[place]
            own = module.__dict__
            kind = type(module)
            if kind not in classes:
                classes[kind] = self._provenance.number_of_class(kind)
            line: list[Any] = [classes[kind]]
            for attribute in sorted(own.keys() - skipped):
                entry = own[attribute]
                line.append(attribute)
                line.append(entry if type(entry) in scalars else self._value(entry, 0))
            for group in ("_parameters", "_buffers"):
                for key, tensor in own[group].items():
                    if tensor is not None:
                        line.append(key)
                        line.append(self._tensor(tensor, 0, module, key))
            for key, child in own["_modules"].items():
                line.append(key)
                line.append(None if child is None else self._seen.get(id(child)))
            for group in ("_forward_hooks", "_forward_pre_hooks"):
                for hook in own[group].values():
                    if not soundness.is_known_hook(hook):  # it computes nothing, and comes with the first question
                        line.append(self._value(hook, 0))
            # Module by module: thousands of lists that live on at once call the garbage collector.
            digest.update(marshal.dumps(line, 2))  # of this version: equal values give equal bytes
            place += 1
        return digest.digest()

    def _value(self, entry: Any, depth: int) -> Any:
        """Something that stands for an attribute's value: equal where it is equal, made of what `marshal` takes."""
        kind = type(entry)
        if kind in _SCALARS:
            return entry
        if isinstance(entry, torch.Tensor):
            return self._tensor(entry, depth)
        if isinstance(entry, torch.nn.Module):
            if id(entry) not in self._seen:
                self._visit(type(entry).__name__, entry)
            return ("module", self._seen[id(entry)])
        if isinstance(entry, compat.PreTrainedConfig):
            return self._config(entry)
        if isinstance(entry, _NAMED):
            return (kind.__name__, repr(entry))
        if isinstance(entry, METHODS):
            owner = entry.__self__
            place = self._seen.get(id(owner))
            whose = ("module", place) if place is not None else _serial(owner)
            return ("method", self._provenance.number_of(entry.__func__), whose)
        if isinstance(entry, types.FunctionType):
            return ("function", self._provenance.number_of(entry))
        if isinstance(entry, (types.BuiltinFunctionType, type)):
            return ("code", _serial(entry))
        if isinstance(entry, weakref.ref):
            target = entry()
            return ("weak", None if target is None else _serial(target))
        if isinstance(entry, (int, float, str, bytes, np.generic)):  # of a subclass, an enum, a numpy number
            return (kind.__name__, repr(entry))
        if isinstance(entry, np.ndarray) and entry.dtype != object:
            return ("array", str(entry.dtype), entry.shape, entry.tobytes())
        self._compounds += 1
        if self._compounds > _MOST:
            raise OutOfReach("attributes that hold more than can be looked at in every call")
        if id(entry) in self._within:
            return ("outer", len(self._within))
        self._within.add(id(entry))
        try:
            return self._compound(entry, kind, depth)
        finally:
            self._within.discard(id(entry))

    def _compound(self, entry: Any, kind: type, depth: int) -> Any:
        """Something that is made of others. Containers count no depth, objects do."""
        if kind in (dict, list, tuple):
            with contextlib.suppress(ValueError):  # much of it at once, where it is all plain
                return (kind.__name__, marshal.dumps(entry, 2))
        if isinstance(entry, dict):
            pairs = list(entry.items())
            return (kind.__name__, [(self._value(key, depth), self._value(part, depth)) for key, part in pairs])
        if isinstance(entry, (list, tuple, deque)):
            return (kind.__name__, [self._value(part, depth) for part in list(entry)])
        if isinstance(entry, (set, frozenset)):
            return (kind.__name__, sorted(repr(self._value(part, depth)) for part in list(entry)))
        if isinstance(entry, functools.partial):
            return ("partial", [self._value(part, depth) for part in (entry.func, entry.args, entry.keywords)])
        own = getattr(entry, "__dict__", None)
        if isinstance(own, dict) and not isinstance(entry, types.ModuleType) and depth < _DEPTH:
            parts = [
                (key, self._value(part, depth + 1))
                for key, part in list(own.items())
                if key not in _HOOK_BOOKKEEPING and key not in _BOOKKEEPING
            ]
            return ("object", _serial(kind), parts)
        return ("object", _serial(kind), _serial(entry))

    def _config(self, config: Any) -> Any:
        known = self._configs.get(id(config))
        if known is None:
            known = self._configs[id(config)] = len(self._configs)
            parts = [
                (name, entry if type(entry) in _SCALARS else self._value(entry, 0))
                for name, entry in vars(config).items()
                if name not in _SETTINGS
            ]
            attention = [self._provenance.number_of(function) for function in attention_of(config)]
            before = implementations.before(config)  # it rounds otherwise where attention has to be dense
            return ("config", known, type(config).__name__, parts, attention, before)
        return ("config", known)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor, depth: int, module: Any = None, key: str = "") -> Any:
        """Take a tensor apart into plain ones."""
        kind = type(tensor)
        if kind not in _PLAIN:
            return self._subclass(tensor, kind, depth)
        if tensor.is_meta:
            return self._held(module, key)
        if tensor.layout is not torch.strided:
            return self._out_of_reach(f"a tensor of layout {tensor.layout}", tensor)
        self._tensors.append(tensor)
        return self._carried(tensor, depth) if tensor.__dict__ else None

    def _carried(self, tensor: torch.Tensor, depth: int) -> Any:
        """The attributes of a tensor; None: it has none that count."""
        parts = [(name, self._value(entry, depth + 1)) for name, entry in vars(tensor).items() if not _is_mark(name)]
        return parts or None

    def _out_of_reach(self, what: str, owner: Any) -> Any:
        """What stands for weights that cannot be read, if they are vouched for."""
        if self._vouched:
            return ("vouched", _serial(owner))
        raise OutOfReach(what)

    def _subclass(self, tensor: torch.Tensor, kind: type, depth: int) -> Any:
        """A quantised weight and the like: what it is made of, and what it carries."""
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(tensor, distributed.DTensor):
            return self._out_of_reach("a weight that is spread over processes", tensor)
        if depth > _DEPTH:
            return self._out_of_reach(f"a {kind.__qualname__} inside of others", tensor)
        parts: list[Any] = []
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            parts.append(self._value(context, depth))
            parts.extend((name, self._tensor(getattr(tensor, name), depth + 1)) for name in names)
        elif getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
            what = f"a {kind.__module__}.{kind.__qualname__}, which does not say what it is made of"
            return self._out_of_reach(what, tensor)
        else:  # plain memory under another name (bitsandbytes)
            parts.append(self._tensor(tensor.as_subclass(torch.Tensor), depth + 1))
            parts.append(self._carried(tensor, depth))
        return ("tensor", _serial(kind), parts)

    def _held(self, module: Any, key: str) -> Any:
        """A weight that accelerate's hooks bring for each forward: what they hold of it in memory."""
        hook = getattr(module, "_hf_hook", None)
        owner: Any = module
        for each in getattr(hook, "hooks", [hook]):
            weights = getattr(each, "weights_map", None)
            if weights is None:
                continue
            loader = getattr(weights, "dataset", weights)
            held = getattr(loader, "state_dict", None) or loader
            found = held.get(getattr(weights, "prefix", "") + key) if isinstance(held, dict) else None
            if isinstance(found, torch.Tensor) and not found.is_meta:
                return self._tensor(found, 0)
            owner = loader if owner is module else owner
        return self._out_of_reach("weights on the meta device or on disk", owner)


class _Serials:
    """Numbers for objects that are held weakly: an address that is used again is another number."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, int]] = {}
        self._count = itertools.count()

    def __call__(self, entry: Any) -> int:
        place = id(entry)
        known = self._known.get(place)
        if known is not None and known[0]() is entry:
            return known[1]
        number = next(self._count)
        with contextlib.suppress(TypeError):  # what cannot be held weakly is another one every time
            self._known[place] = (weakref.ref(entry, functools.partial(self._forget, place)), number)
        return number

    def _forget(self, place: int, reference: weakref.ref) -> None:
        known = self._known.get(place)
        if known is not None and known[0] is reference:
            self._known.pop(place, None)


_serial = _Serials()


class Begun(NamedTuple):
    """An identity whose checksum may still be on its way from a device.

    Attributes:
        rest: everything but the content of weights.
        content: the checksum of the weights, begun.
        num_bytes: of all weights.
        tensors: the weights and buffers, taken apart into plain ones.
    """

    rest: Hashable
    content: checksum.Pending
    num_bytes: int
    tensors: list[torch.Tensor]

    def finish(self, arrived: list[torch.Tensor] | None = None) -> Hashable:
        """The identity. Waits for devices whose numbers are not there.

        Args:
            arrived: `content.on_device`, on the host.
        """
        return (self.rest, checksum.finish(self.content, arrived))


def begin(walk: Walk) -> Begun:
    """Begin to work out the identity of a model as it is now.

    Args:
        walk: over the model, taken just now.

    Raises:
        OutOfReach: if some weights cannot be read, and nobody vouches for them.
    """
    described, tensors = walk.describe()
    kinds = {"cpu", *(tensor.device.type for tensor in tensors)}
    if torch.accelerator.is_available():
        kinds.add(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)
    )
    rest = (described, autocast, torch.get_float32_matmul_precision(), walk.numbers_everywhere())
    return Begun(rest, checksum.begin(tensors), checksum.num_bytes(tensors), tensors)


# -- what it costs ----------------------------------------------------------------------------------------------------

# Models below are tests and toys: their checksum takes less time than a call's Python.
SMALL = 8 * 2**20


class _Machine(NamedTuple):
    """What a kind of device does, roughly: a round number for a small one of its kind.

    Attributes:
        starts: seconds that a checksum takes before it has read a byte.
        reads: bytes a second that it reads.
        computes: bytes of weights a second that a forward multiplies one token by.
    """

    starts: float
    reads: float
    computes: float


# Two cores, float32; a data centre's GPU, 16 bit: a token takes two operations a weight, of 4 and of 2 bytes.
_MACHINES = {"cpu": _Machine(1e-4, 20e9, 200e9), "cuda": _Machine(2e-3, 2e12, 2.5e14)}
# A full hit saves at least this many times what the checksum takes.
_WORTH = 5


def break_even(num_bytes: int, kind: str) -> int:
    """Tokens whose computation takes as long as one checksum of the weights.

    Depends on sizes alone, never on a clock, so that processes that work together decide alike.

    Args:
        num_bytes: of the weights.
        kind: type of the device that holds them; any but "cpu" counts as "cuda".
    """
    machine = _MACHINES.get(kind, _MACHINES["cuda"])
    seconds = machine.starts + num_bytes / machine.reads
    return math.ceil(seconds * machine.computes / max(num_bytes, 1))


def worth_looking_up(num_bytes: int, kind: str) -> int:
    """Prompt tokens from which prefixes are looked up; 0: always."""
    return 0 if num_bytes < SMALL else _WORTH * break_even(num_bytes, kind)


def worth_storing(num_bytes: int, kind: str) -> int:
    """Tokens of prompt and answer from which they are stored; 0: always.

    An answer that is stored with its prompt costs a second checksum, so the two have to be twice as long.
    """
    return 2 * worth_looking_up(num_bytes, kind)
