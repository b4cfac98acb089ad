"""The gate: which shortcuts one call may take.

A shortcut is taken where everything that it assumes is known to hold. What is not known makes it step aside, with a
reason that is counted and named once. Paging and copy-on-write assume nothing and are always there. What each shortcut
assumes stands beside its name in `Shortcut`.
"""

import enum
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from .. import compat
from .provenance import Provenance, package_of_function


class Shortcut(enum.Enum):
    """What a call may save, and what each saving assumes."""

    # Keys and values of earlier calls. What a token's keys depend on, besides the tokens before it, is what it was when
    # they were stored; `identity` sees all of it.
    PREFIXES = "prefixes"
    # Beams, samples and equal prompts computed once. A row depends on nothing but what the forward is given of it.
    EQUAL_ROWS = "equal rows"
    # Rows one behind the other, without pads, in as many forwards as fit. Likewise; and the forward takes positions as
    # they are given.
    PACKED = "packed rows"
    # A source, or the images of a prompt, read once for all beams or samples. Likewise.
    SOURCES_ONCE = "sources once"
    # A mask read once. Between two forwards the library appends ones to it, and nobody else touches it.
    MASK_ONCE = "mask once"
    # Rows that have stopped give their blocks back. Nobody reads their logits, and no other row depends on them.
    STOPPED_ROWS = "stopped rows"
    # Decode steps replayed as CUDA graphs. The forward does the same in every step.
    GRAPHS = "graphs"


ALL = frozenset(Shortcut)
# What makes one row depend on others, or on chance.
_NOT_ALONE = ALL - {Shortcut.MASK_ONCE, Shortcut.GRAPHS}


class Reason(enum.Enum):
    """Why a shortcut is not taken: a code, and a sentence for people."""

    code: str

    SWITCHED_OFF = "switched_off", "shortcuts are switched off (PagedConfig.shortcuts or HF_PAGED_SHORTCUTS=0)"
    UNKNOWN_CODE = "unknown_code", "the model runs code that hf_paged does not know"
    UNKNOWN_HOOK = "unknown_hook", "the model has a hook that hf_paged does not know"
    UNKNOWN_LOOP = "unknown_loop", "generate() runs a decoding loop that hf_paged does not know"
    UNKNOWN_INPUTS = "unknown_inputs", "prepare_inputs_for_generation is not the library's"
    UNKNOWN_PROCESSOR = "unknown_processor", "a logits processor or stopping criterion is not the library's"
    DROPOUT = "dropout", "the model is in training mode and draws random numbers for each row"
    CHECKPOINTING = "gradient_checkpointing", "gradient checkpointing in training mode leaves the cache out"
    BATCH_CAPACITY = "batch_capacity", "its experts have a capacity that the whole batch shares"
    BATCH_SCALE = "batch_scale", "its layers choose a scale or a precision over all tokens of a forward"
    WEIGHTS = "output_attentions", "attention weights are asked for, of every row and token as it was given"
    SHARDED = "sharded_weights", "weights are sharded over processes, which have to agree on every forward"
    OUT_OF_REACH = "weights_out_of_reach", "the content of some weights cannot be read here"
    NO_SALT = "no_salt", "prefix salts are used in this process, and this call has none"
    UNSTEADY = "unsteady_identity", "what keys and values depend on has changed while a call ran"
    UNKNOWN_KEYWORD = "unknown_keyword", "the model is given a keyword whose meaning for each row is not known"

    def __new__(cls, code: str, sentence: str) -> "Reason":
        member = object.__new__(cls)
        member._value_ = sentence
        member.code = code
        return member


class Verdict:
    """Which shortcuts one call may take.

    Attributes:
        barred: those that it may not, and why.
        detail: each reason once, and what was found, where there is something to name.
    """

    def __init__(self) -> None:
        self.barred: dict[Shortcut, Reason] = {}
        self.detail: dict[Reason, str] = {}

    def bar(self, shortcuts: Iterable[Shortcut], reason: Reason, detail: str = "") -> None:
        """Step aside from some shortcuts. The first reason for each is kept."""
        for shortcut in shortcuts:
            if shortcut not in self.barred:
                self.barred[shortcut] = reason
                self.detail.setdefault(reason, detail)

    def allows(self, shortcut: Shortcut) -> bool:
        return shortcut not in self.barred


class Vouch:
    """The user's word for code that hf_paged does not know (`PagedConfig.vouch`).

    Args:
        vouch: True: for everything; or classes and functions.
    """

    def __init__(self, vouch: bool | Iterable[Any]):
        self.everything = vouch is True
        self.entries = frozenset(map(_key, vouch)) if not isinstance(vouch, bool) else frozenset()

    def __call__(self, entry: Any) -> bool:
        return bool(self.entries) and _key(entry) in self.entries


def _key(entry: Any) -> Any:
    function = getattr(entry, "__func__", entry)
    return function if isinstance(function, (type, types.FunctionType)) else id(function)


# Model types whose experts take so many tokens of a batch and drop the rest: pads, equal rows, prefixes found, packed
# rows and rows that have stopped all change which.
_BATCH_CAPACITY = frozenset(("nllb-moe", "switch_transformers"))
# What cannot be where the tokens of a forward, pads included, depend on each other, however often each row is there.
_SAME_TOKENS = frozenset((Shortcut.PREFIXES, Shortcut.PACKED, Shortcut.STOPPED_ROWS))
# Attributes with a positive value that say that a module in training mode draws random numbers.
_RANDOM = ("drop", "jitter", "noise")

# Hooks that are known: (package that they were compiled in, name of the code).
_KNOWN_HOOKS = frozenset(
    (
        # Stays behind after one call with output_hidden_states=True, and records nothing unless that is asked for.
        ("transformers", "output_capturing_hook"),
        # Marks embeddings for gradients, which generate() does not take.
        ("transformers", "make_inputs_require_grads"),
        ("peft", "make_inputs_require_grad"),
    )
)
# Files whose hooks move weights and activations between processes and leave their values alone.
_MOVING = (
    os.path.join("torch", "distributed", "tensor", ""), os.path.join("torch", "distributed", "fsdp", ""),
    os.path.join("torch", "distributed", "_composable", ""), os.path.join("integrations", "tensor_parallel.py"),
    os.path.join("transformers", "distributed", ""),
)  # fmt: skip


_shared = Provenance(lambda entry: False)


class Gate:
    """Judges the calls of one patched model.

    Args:
        shortcuts: `PagedConfig.shortcuts`.
        vouch: `PagedConfig.vouch`.
    """

    def __init__(self, shortcuts: bool, vouch: bool | Iterable[Any]):
        self.shortcuts = shortcuts
        self.vouch = Vouch(vouch)
        self.provenance = Provenance(self.vouch) if self.vouch.entries else _shared
        self.weights: tuple[int, str] | None = None

    def weights_of(self, model: torch.nn.Module) -> tuple[int, str]:
        """Bytes of a model's weights, as they were counted last, and the type of the device that holds them."""
        if self.weights is None:
            first = next(model.parameters(), None)
            num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
            self.weights = (num_bytes, "cpu" if first is None or first.is_meta else first.device.type)
        return self.weights

    def judge(self, model: Any, modules: Iterable[tuple[str, torch.nn.Module]]) -> Verdict:
        """Look at a model as it is now, inside of a call: some hooks live only there.

        Args:
            modules: every module that the model runs, with a name for people.
        """
        verdict = Verdict()
        if not self.shortcuts or os.environ.get("HF_PAGED_SHORTCUTS") == "0":
            verdict.bar(ALL, Reason.SWITCHED_OFF)
            return verdict
        modules = list(modules)
        if not self.vouch.everything:
            self._code(model, modules, verdict)
        self._chance(modules, verdict)
        if _types_of(model) & _BATCH_CAPACITY:
            verdict.bar(_NOT_ALONE, Reason.BATCH_CAPACITY)
        if kind := _scales_over_batch(modules):
            verdict.bar(_SAME_TOKENS, Reason.BATCH_SCALE, kind)
        if _sharded(model, modules):
            verdict.bar((Shortcut.PREFIXES, Shortcut.PACKED), Reason.SHARDED)
        return verdict

    def _code(self, model: Any, modules: list[tuple[str, torch.nn.Module]], verdict: Verdict) -> None:
        """Hooks, functions bound to instances, and the classes' own code."""
        every = torch.nn.modules.module
        for hook in (*every._global_forward_pre_hooks.values(), *every._global_forward_hooks.values()):
            if why := self._why_not_hook(hook):
                return verdict.bar(ALL, Reason.UNKNOWN_HOOK, f"on all modules: {why}")
        if why := self.provenance.why_not_everywhere():
            return verdict.bar(ALL, Reason.UNKNOWN_CODE, why)
        kinds: dict[type, str] = {}
        configs: dict[int, Any] = {}
        for name, module in modules:
            kinds.setdefault(type(module), name)
            own = module.__dict__
            if (config := own.get("config")) is not None:
                configs[id(config)] = config
            if own["_forward_hooks"] or own["_forward_pre_hooks"]:
                for hook in (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()):
                    if why := self._why_not_hook(hook):
                        return verdict.bar(ALL, Reason.UNKNOWN_HOOK, f"on {name or 'the model'}: {why}")
            for attribute in own.keys() - _TORCH:
                entry = own[attribute]
                if type(entry) in _DATA:
                    continue
                why = None
                if attribute == "_hf_hook":
                    why = self._why_not_moved(entry)
                elif callable(entry) and not isinstance(entry, torch.nn.Module):
                    why = self.provenance.why_not(entry)
                if why:
                    place = f"{name}.{attribute}" if name else attribute
                    return verdict.bar(ALL, Reason.UNKNOWN_CODE, f"{place}: {why}")
        for config in configs.values():
            for function in attention_of(config):
                if why := self.provenance.why_not(function):
                    return verdict.bar(ALL, Reason.UNKNOWN_CODE, f"attention: {why}")
        for kind, name in kinds.items():
            if not self.vouch(kind) and (why := self.provenance.why_not_class(kind)):
                return verdict.bar(ALL, Reason.UNKNOWN_CODE, f"{name or 'the model'}: {why}")
        bound = model.__dict__.get("prepare_inputs_for_generation")
        package = "hf_paged" if bound is None or self.vouch(bound) else package_of_function(bound)
        if package not in ("hf_paged", "transformers"):
            verdict.bar(ALL, Reason.UNKNOWN_INPUTS, f"that of {package or 'another package'}")
        return None

    def _why_not_hook(self, hook: Any) -> str | None:
        function = getattr(hook, "__func__", hook)
        if self.vouch(function):
            return None
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType):
            package = package_of_function(function)
            if package == "hf_paged":
                return None
            moves = package in ("torch", "transformers") and any(part in code.co_filename for part in _MOVING)
            if moves or (package, code.co_name) in _KNOWN_HOOKS:
                return self.provenance.why_not(function)
            return f"{getattr(code, 'co_qualname', code.co_name)} ({code.co_filename})"
        return f"an object of {type(hook).__module__}.{type(hook).__qualname__}"

    def _why_not_moved(self, hook: Any) -> str | None:
        """What of accelerate's hooks on a module is not accelerate's own."""
        for each in (hook, *getattr(hook, "hooks", ())):
            if not self.vouch(type(each)) and (why := self.provenance.why_not_class(type(each))):
                return why
        return None

    def _chance(self, modules: list[tuple[str, torch.nn.Module]], verdict: Verdict) -> None:
        """What a module does in training mode alone."""
        for name, module in modules:
            own = module.__dict__
            if not own["training"]:
                continue
            if own.get("gradient_checkpointing") is True:
                verdict.bar(ALL, Reason.CHECKPOINTING, f"on {name or 'the model'}")
            for attribute, entry in own.items():
                if type(entry) is float and entry > 0:
                    lower = attribute.lower()
                    if any(part in lower for part in _RANDOM) or (lower == "p" and isinstance(module, _DROPOUT)):
                        verdict.bar(_NOT_ALONE | {Shortcut.GRAPHS}, Reason.DROPOUT, f"{name}.{attribute} is {entry}")
                        return

    def why_not_processors(self, processors: Iterable[Any]) -> str | None:
        """Which of a call's processors or criteria is not the library's, and may read rows that have stopped; None:
        all are."""
        if self.vouch.everything:
            return None
        for each in processors:
            kind = type(each)
            if package_of_function(kind.__call__) not in ("transformers", "hf_paged") and not self.vouch(kind):
                return f"{kind.__module__}.{kind.__qualname__}"
        return None

    def why_not_streamer(self, streamer: Any) -> str | None:
        """Whether a streamer is not the library's, with its name; None: it is."""
        for kind in type(streamer).__mro__:
            for entry in vars(kind).values() if kind is not object and not self.vouch(kind) else ():
                package = package_of_function(entry)
                if isinstance(entry, types.FunctionType) and package not in ("transformers", "python"):
                    return f"{kind.__module__}.{kind.__qualname__}"
        return None


# What PyTorch keeps in every module.
_TORCH = frozenset(torch.nn.Module().__dict__)
_DROPOUT = torch.nn.modules.dropout._DropoutNd
# Kinds of attributes that are never called.
_DATA = frozenset(
    (bool, int, float, str, bytes, type(None), dict, list, tuple, set, frozenset, OrderedDict, torch.dtype,
     torch.device, torch.Tensor, torch.nn.Parameter, torch.Size)
)  # fmt: skip


def is_known_hook(hook: Any) -> bool:
    """Whether a hook is one of those that are known to leave what a module computes alone."""
    code = getattr(hook, "__code__", None)
    return isinstance(code, types.CodeType) and (package_of_function(hook), code.co_name) in _KNOWN_HOOKS


def hooks_before(model: torch.nn.Module) -> tuple[tuple[int, ...], ...]:
    """Numbers of the hooks that a model's forward meets before its own modules, and of those on all modules."""
    every = torch.nn.modules.module
    hooks = (model._forward_pre_hooks, every._global_forward_pre_hooks, every._global_forward_hooks)
    return tuple(map(tuple, hooks))


def attention_of(config: Any) -> list[Any]:
    """The functions registered under the attention implementation that a config names: for attention and masks."""
    name = getattr(config, "_attn_implementation_internal", None)
    registries = (compat.ALL_ATTENTION_FUNCTIONS, compat.ALL_MASK_ATTENTION_FUNCTIONS)
    return [registry[name] for registry in registries if isinstance(name, str) and name in registry]


def _types_of(model: Any) -> set[str]:
    config = model.config
    return {config.model_type, config.get_text_config(decoder=True).model_type}


def _scales_over_batch(modules: list[tuple[str, torch.nn.Module]]) -> str | None:
    """The kind of layer or weight that rounds activations by all tokens of a forward; None: there is none."""
    if "bitsandbytes" in sys.modules:
        for _, module in modules:
            # LLM.int8(): a column with one value above the threshold is computed in 16 bits for all tokens.
            if getattr(module.__dict__.get("state"), "threshold", 0.0) > 0.0:
                return f"{type(module).__name__} with a threshold for outliers"
    if "torchao" in sys.modules:
        for _, module in modules:
            for weight in module.__dict__["_parameters"].values():
                if type(weight) is not torch.nn.Parameter and getattr(weight, "act_quant_scale", None) is None:
                    granularity = getattr(getattr(weight, "act_quant_kwargs", None), "granularity", None)
                    if type(granularity).__name__ == "PerTensor":
                        return f"{type(weight).__name__} with one scale for all activations"
    return None


def _sharded(model: Any, modules: list[tuple[str, torch.nn.Module]]) -> bool:
    """Whether forwards gather weights from other processes."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds = tuple(filter(None, (getattr(fsdp, name, None) for name in ("FullyShardedDataParallel", "FSDPModule"))))
        if any(isinstance(module, kinds) for _, module in modules) or getattr(model, "_is_fsdp_managed_module", False):
            return True
    if "deepspeed" in sys.modules:
        weights = (weight for _, module in modules for weight in module.__dict__["_parameters"].values())
        return any(hasattr(weight, "ds_id") for weight in weights)
    return False
