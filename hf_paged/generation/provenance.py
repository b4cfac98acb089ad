"""Where code comes from: whether a function was written in a package that is known to treat rows and tokens alike.

A function is judged by its code object and the file that was compiled, by what it closes over and wraps, and by the
functions that it calls by a global name. `__module__`, `__name__` and `__wrapped__` prove nothing: `functools.wraps`
copies them onto anybody's function.
"""

import functools
import importlib.metadata
import itertools
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..binding import Bound

METHODS = (types.MethodType, Bound)

# Packages whose modules compute each row by itself, each token from those before it alone, and nothing from the calls
# before. A name that anybody may give to a package of their own counts only where an installed distribution has it.
_PACKAGES = (
    "accelerate", "bitsandbytes", "causal_conv1d", "einops", "fla", "flash_attn", "hqq", "kernels", "liger_kernel",
    "mamba_ssm", "optimum.quanto", "peft", "timm", "torch", "torchao", "torchvision", "transformers", "triton",
)  # fmt: skip
_UNMISTAKABLE = frozenset(
    (
        "accelerate", "bitsandbytes", "huggingface_hub", "numpy", "packaging", "peft", "safetensors", "tokenizers",
        "torch", "torchao", "transformers", "triton", "typing_extensions",
    )
)  # fmt: skip
_DISTRIBUTIONS = {
    "fla": "flash-linear-attention", "flash_attn": "flash-attn", "liger_kernel": "liger-kernel",
    "optimum.quanto": "optimum-quanto",
}  # fmt: skip
# What the library itself is made of.
_DEPENDENCIES = (
    "huggingface_hub", "numpy", "packaging", "regex", "safetensors", "sympy", "tokenizers", "tqdm", "typing_extensions",
)  # fmt: skip
# Files of the library whose functions compute: what they call by a global name is looked at, too.
_COMPUTES = (
    "activations.py", "integrations/", "masking_utils.py", "modeling_flash_attention_utils.py", "modeling_layers.py",
    "modeling_rope_utils.py", "models/", "pytorch_utils.py",
)  # fmt: skip
# Where the package `kernels` keeps what it has loaded from its own namespace of the hub.
_HUB_KERNELS = f"{os.sep}kernels--kernels-community--", f"{os.sep}models--kernels-community--"
_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep

# What a subclass may override without changing what a forward computes.
HARMLESS = frozenset(
    (
        "__class_getitem__", "__deepcopy__", "__del__", "__dir__", "__getstate__", "__init__", "__init_subclass__",
        "__new__", "__reduce__", "__reduce_ex__", "__repr__", "__setstate__", "__str__", "_init_weights",
        "_load_from_state_dict", "_save_to_state_dict", "compute_loss", "enable_input_require_grads", "eval",
        "extra_repr", "from_pretrained", "generate", "gradient_checkpointing_disable",
        "gradient_checkpointing_enable", "init_weights", "load_state_dict",
        "loss_function", "post_init", "push_to_hub", "reset_parameters", "resize_token_embeddings", "save_pretrained",
        "set_input_embeddings", "set_output_embeddings", "state_dict", "tie_weights", "train",
    )
)  # fmt: skip


@functools.cache
def _standard_library() -> str:
    return os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


def _root_of(name: str) -> str | None:
    """The folder of a known package, if it is loaded and is what it is called; None: no."""
    module = sys.modules.get(name)
    path = list(getattr(module, "__path__", None) or ())[:1]
    if not path:
        return getattr(module, "__file__", None) if name in _UNMISTAKABLE else None
    root = os.path.realpath(path[0])
    if name not in _UNMISTAKABLE:
        try:
            distribution = importlib.metadata.distribution(_DISTRIBUTIONS.get(name, name))
            installed = os.path.realpath(str(distribution.locate_file(name.replace(".", "/"))))
        except (importlib.metadata.PackageNotFoundError, ValueError):
            return None
        if installed != root:
            return None
    return root + os.sep


_roots: dict[str, str] = {}
_files: dict[str, str] = {}  # file name as compiled -> package, "" where it is not known


def package_of(filename: str) -> str:
    """The known package that a file belongs to: "hf_paged", "" (the standard library: "python"), or "" for none."""
    known = _files.get(filename)
    if known:
        return known
    path = os.path.realpath(filename)
    found = ""
    if path.startswith(_OURS):
        found = "hf_paged"
    for name in (*_PACKAGES, *_DEPENDENCIES):
        if found:
            break
        root = _roots.get(name) or _root_of(name)
        if root is not None:
            _roots[name] = root
            if path.startswith(root):
                found = name
    if not found and path.startswith(_standard_library()) and "site-packages" not in path:
        found = "python"
    if not found and any(part in path for part in _HUB_KERNELS) and "kernels" in sys.modules:
        found = "kernels"
    if found:
        _files[filename] = found  # others are looked up again: their package may be loaded later
    return found


_numbers = itertools.count()


class _Look:
    """One judgement: what was met on the way, so that it can be seen later whether it is still there.

    Attributes:
        number: stands for what was looked at, as it was then.
        unknown: what is not known, as a reader would look for it; None: nothing.
        codes: functions and the code that they had.
        cells: functions, the place of a cell that each closes over, and what was in it.
        defaults: functions, and the addresses of the defaults of their parameters.
        names: namespaces, names in them, and the function that was behind each.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.unknown: str | None = None
        self.codes: list[tuple[weakref.ref, types.CodeType]] = []
        self.cells: list[tuple[weakref.ref, int, Any]] = []
        self.defaults: list[tuple[weakref.ref, int, int]] = []
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: dict[int, Any] = {}

    def done(self) -> None:
        """Let go of what was only held while looking."""
        self._seen = {}

    def holds(self) -> bool:
        """Whether everything that was met is what it was."""
        for reference, code in self.codes:
            if getattr(reference(), "__code__", None) is not code:
                return False
        for reference, place, content in self.cells:
            function = reference()
            if function is None or not _is(_inside(function.__closure__[place]), content):
                return False
        for reference, plain, named in self.defaults:
            function = reference()
            if function is None or id(function.__defaults__) != plain or id(function.__kwdefaults__) != named:
                return False
        return all(_is(names.get(name), entry) for names, name, entry in self.names)

    def callable(self, entry: Any) -> None:
        """Judge anything that can be called; other things pass."""
        if self.unknown is not None or id(entry) in self._seen:
            return
        self._seen[id(entry)] = entry  # held, so that no other object gets its number
        if isinstance(entry, types.FunctionType):
            self._function(entry)
        elif isinstance(entry, METHODS):
            self.callable(entry.__func__)
        elif isinstance(entry, functools.partial):
            for part in (entry.func, *entry.args, *entry.keywords.values()):
                self.callable(part)
        elif isinstance(entry, (staticmethod, classmethod)):
            self.callable(entry.__func__)
        elif isinstance(entry, property):
            self.callable(entry.fget)
        elif isinstance(entry, functools.cached_property):
            self.callable(entry.func)
        elif isinstance(entry, functools._lru_cache_wrapper):
            self.callable(entry.__wrapped__)
        elif isinstance(entry, (type, torch.nn.Module, types.ModuleType)) or not callable(entry):
            return
        elif isinstance(entry, (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType)):
            return  # compiled code, which nobody writes to steer a model
        elif isinstance(entry, (types.ClassMethodDescriptorType, types.MethodWrapperType)):
            return
        elif isinstance(entry, torch.jit.ScriptFunction):
            self.unknown = f"the script function {entry.name}"
        else:
            kind = type(entry)
            call = kind.__call__
            if isinstance(call, types.FunctionType):
                self.callable(call)
            elif not package_of(_file_of(kind)):
                self.unknown = f"an object of {_name(kind)}"

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        own = weakref.ref(function)
        self.codes.append((own, code))  # also of one that is not known: it may be put back
        package = package_of(code.co_filename)
        if not package:
            self.unknown = f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name} ({code.co_filename})"
            return
        for place, cell in enumerate(function.__closure__ or ()):
            inside = _inside(cell)
            self.cells.append((own, place, _held(inside)))
            for part in inside if isinstance(inside, (tuple, list)) else (inside,):
                self.callable(part)
        if function.__defaults__ or function.__kwdefaults__:
            self.defaults.append((own, id(function.__defaults__), id(function.__kwdefaults__)))
        for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.callable(part)
        self.callable(getattr(function, "_torchdynamo_orig_callable", None))
        if package == "transformers" and code.co_filename.startswith(_computing_files()):
            self._globals(function, code)

    def _globals(self, function: types.FunctionType, code: types.CodeType) -> None:
        """What a function of the library calls by a global name: where people put functions of their own."""
        for name in _names_in(code):
            entry = function.__globals__.get(name, _MISSING)
            if isinstance(entry, (types.FunctionType, functools.partial, types.MethodType)):
                self.names.append((function.__globals__, name, _held(entry)))
                self.callable(entry)
            elif isinstance(entry, torch.nn.Module):
                # A function that `kernels` has made a module: all models share it, and its forward may be anybody's.
                self.names.append((function.__globals__, name, _held(entry)))
                self.names.append((entry.__dict__, "forward", _held(entry.__dict__.get("forward"))))
                self.callable(entry.forward)


_MISSING = object()


def _held(entry: Any) -> Any:
    """Stands for an object, so that nothing is kept alive: a weak reference, or an address where there can be none."""
    try:
        return weakref.ref(entry)
    except TypeError:
        return id(entry)


def _is(entry: Any, held: Any) -> bool:
    return held() is entry if isinstance(held, weakref.ref) else id(entry) == held


def _inside(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _MISSING


@functools.cache
def _computing_files() -> tuple[str, ...]:
    """Beginnings of the paths of the library's files that compute."""
    root = os.path.dirname(sys.modules["transformers"].__file__ or "")
    return tuple(os.path.join(root, *name.split("/")) for name in _COMPUTES)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


class _Class(_Look):
    """What is known of a class: its own functions, and those that it inherits."""

    def __init__(self, kind: type, vouched: Callable[[Any], bool]):
        super().__init__()
        self.spaces = []  # (class, a copy of what it had); torch's own base is looked at like any other
        for place, each in enumerate(kind.__mro__):
            if each is object or vouched(each):
                continue
            space = vars(each)
            self.spaces.append((weakref.ref(each), dict(space)))
            ours = bool(package_of(_file_of(each)))
            later = kind.__mro__[place + 1 :]
            for name, entry in space.items():
                if name in HARMLESS or not _may_run(entry) or vouched(entry):
                    continue
                # A method of a user's class that nobody else knows is called by nobody else.
                if ours or name == "forward" or any(name in vars(base) for base in later if base is not object):
                    self.callable(entry)
                if self.unknown is not None:
                    self.unknown = f"{_name(each)}.{name}: {self.unknown}"
                    return

    def holds(self) -> bool:
        for place, (each, before) in enumerate(self.spaces):
            kind = each()
            if kind is None:
                return False
            space = vars(kind)
            if not _same(space, before):
                # The compiler wraps `Module.__init__`, and leaves marks of its own on classes.
                for name in space.keys() | before.keys():
                    entry = space.get(name)
                    marks = name not in before and name[:1] == "_" and not callable(entry)
                    if entry is not before.get(name) and name not in HARMLESS and not marks:
                        return False
                self.spaces[place] = (each, dict(space))  # another thread may be reading the old one
        return super().holds()


class _Namespace(_Look):
    """What is known of the functions in a module or class that everything calls, such as `torch.nn.functional`."""

    def __init__(self, space: Any, vouched: Callable[[Any], bool]):
        super().__init__()
        self._space = space
        self._before = {name: entry for name, entry in vars(space).items() if callable(entry) and name[:2] != "__"}
        for name, entry in self._before.items():
            runs = isinstance(entry, (types.FunctionType, types.MethodType, functools.partial))
            if runs and not package_of_function(entry) and not vouched(entry):
                self.unknown = f"{space.__name__}.{name}"
                return

    def holds(self) -> bool:
        """Whether the functions are what they were; new names are nothing that anybody calls."""
        space = vars(self._space)
        return all(space.get(name) is entry for name, entry in self._before.items())


def _modes() -> list[Any]:
    """Modes that see every function or operator of PyTorch, where any is active."""
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return []
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def _may_run(entry: Any) -> bool:
    return callable(entry) or isinstance(entry, (staticmethod, classmethod, property, functools.cached_property))


def _same(space: Any, before: dict[str, Any]) -> bool:
    try:
        return bool(space == before)
    except Exception:  # an attribute of a class that does not compare
        return len(space) == len(before) and all(space.get(name) is entry for name, entry in before.items())


class Provenance:
    """Judges classes and functions, and remembers the answer as long as nothing that it rests on has changed.

    Args:
        vouched: whether somebody vouches for a class or a function.
    """

    def __init__(self, vouched: Callable[[Any], bool]):
        self._vouched = vouched
        self._classes: weakref.WeakKeyDictionary[type, _Class] = weakref.WeakKeyDictionary()
        self._functions: dict[int, tuple[Any, _Look]] = {}
        self._spaces = [_Namespace(space, vouched) for space in (torch.nn.functional, torch, torch.Tensor)]

    def _class(self, kind: type) -> _Class:
        known = self._classes.get(kind)
        if known is None or not known.holds():
            known = self._classes[kind] = _Class(kind, self._vouched)
            known.done()
        return known

    def why_not_class(self, kind: type) -> str | None:
        """What of a class's code is not known; None: all of it is."""
        return self._class(kind).unknown

    def number_of_class(self, kind: type) -> int:
        """A number for a class as it is now: another one when a function of it was replaced."""
        return self._class(kind).number

    def _everywhere(self) -> list[_Namespace]:
        for place, known in enumerate(self._spaces):
            if not known.holds():
                self._spaces[place] = _Namespace(known._space, self._vouched)
        return self._spaces

    def why_not_everywhere(self) -> str | None:
        """What is not known of the functions and modes of PyTorch that every model runs; None: all of it is."""
        for mode in _modes():
            if not self._vouched(type(mode)) and not package_of(_file_of(type(mode))):
                return f"the mode {_name(type(mode))}"
        return next((known.unknown for known in self._everywhere() if known.unknown), None)

    def numbers_everywhere(self) -> tuple[Any, ...]:
        """Numbers for the functions of PyTorch as they are now, and the modes that are active."""
        return (*(known.number for known in self._everywhere()), *(_name(type(mode)) for mode in _modes()))

    def why_not(self, entry: Any) -> str | None:
        """What of something that can be called is not known; None: all of it is."""
        return None if self._vouched(entry) else self._look(entry).unknown

    def number_of(self, entry: Any) -> int:
        """A number for something that can be called, as it is now."""
        return self._look(entry).number

    def _look(self, entry: Any) -> _Look:
        function = entry.__func__ if isinstance(entry, METHODS) else entry
        held = self._functions.get(id(function))
        if held is None or held[0]() is not function or not held[1].holds():
            look = _Look()
            look.callable(function)
            look.done()
            try:
                reference = weakref.ref(function)
            except TypeError:
                return look
            self._functions[id(function)] = held = (reference, look)
            if len(self._functions) > 4096:
                self._functions.clear()
        return held[1]


def package_of_function(entry: Any) -> str:
    """The known package that the code of a function or method was compiled in; "": none."""
    while isinstance(entry, (*METHODS, functools.partial)):
        entry = entry.func if isinstance(entry, functools.partial) else entry.__func__
    code = getattr(entry, "__code__", None)
    return package_of(code.co_filename) if isinstance(code, types.CodeType) else ""
