"""Where code comes from: what is taken for known, what is not, and that an answer does not outlive what it rests on."""

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import sys
import types
import weakref

import pytest
import torch
import transformers
from models import build
from transformers.models.llama import modeling_llama
from transformers.utils.generic import can_return_tuple

from hf_paged.generation.provenance import Provenance, package_of, package_of_function


@pytest.fixture
def judge():
    return Provenance(lambda entry: False)


def mine(*args, **kwargs):
    return args[0]


LIBRARY = modeling_llama.rotate_half


@functools.wraps(LIBRARY)
def in_the_library_s_name(*args, **kwargs):
    return LIBRARY(*args, **kwargs)


class Callable_:
    def __call__(self, *args, **kwargs):
        return args[0]


class Slotted:
    __slots__ = ()

    def __call__(self, *args, **kwargs):
        return args[0]


def decorated_by_library(function):
    """A function of the library, around one."""
    return can_return_tuple(function)


KNOWN = {
    "a function of the library": lambda: modeling_llama.apply_rotary_pos_emb,
    "of PyTorch": lambda: torch.nn.functional.linear,
    "of the standard library": lambda: functools.reduce,
    "in Python, of the standard library": lambda: functools.cmp_to_key,
    "a method": lambda: build("llama").forward,
    "a partial": lambda: functools.partial(LIBRARY, torch.zeros(2)),
    "a partial of a partial": lambda: functools.partial(functools.partial(LIBRARY), torch.zeros(2)),
    "cached": lambda: functools.lru_cache(LIBRARY),
    "decorated by PyTorch": lambda: torch.no_grad()(LIBRARY),
    "decorated by the library": lambda: decorated_by_library(modeling_llama.LlamaForCausalLM.forward),
    "compiled code": lambda: torch.relu,
    "an object of the library": lambda: transformers.activations.ACT2FN["silu"],
    "no code at all": lambda: 7,
}
UNKNOWN = {
    "a function of one's own": lambda: mine,
    "one that wraps under the library's name": lambda: in_the_library_s_name,
    "a lambda": lambda: lambda x: x,
    "a method bound to a model": lambda: types.MethodType(mine, build("llama")),
    "a partial": lambda: functools.partial(mine, 1),
    "a partial that is given one": lambda: functools.partial(LIBRARY, mine),
    "a partial that is given one by name": lambda: functools.partial(LIBRARY, x=mine),
    "a partial of a partial": lambda: functools.partial(functools.partial(mine), 1),
    "cached": lambda: functools.lru_cache(mine),
    "decorated by PyTorch": lambda: torch.no_grad()(mine),
    "decorated by the library": lambda: decorated_by_library(mine),
    "decorated twice": lambda: torch.no_grad()(decorated_by_library(mine)),
    "a callable object": lambda: Callable_(),
    "a callable object without a weak reference": lambda: Slotted(),
    "a script": lambda: torch.jit.script(_scripted),
    "executed from text": lambda: _executed(),
}


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _executed():
    space = {"__name__": "transformers.models.llama.modeling_llama", "__file__": modeling_llama.__file__}
    exec("def rotate_half(x):\n    return x", space)
    return space["rotate_half"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KNOWN)
def test_known(judge, name):
    entry = KNOWN[name]()
    assert judge.why_not(entry) is None
    assert judge.why_not(entry) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(judge, name):
    entry = UNKNOWN[name]()
    first = judge.why_not(entry)
    assert isinstance(first, str) and first
    assert judge.why_not(entry) == first


def test_names_prove_nothing():
    assert in_the_library_s_name.__module__ == LIBRARY.__module__
    assert in_the_library_s_name.__qualname__ == LIBRARY.__qualname__
    assert package_of_function(LIBRARY) == "transformers"
    assert package_of_function(in_the_library_s_name) == ""


def test_the_answer_says_what_and_where(judge):
    assert judge.why_not(mine) == f"mine ({__file__})"


# -- closures ---------------------------------------------------------------------------------------------------------


def test_closure_cells_are_looked_into(judge):
    def known(function):
        """What the library's decorators make: their code, somebody's function."""
        wrapper = can_return_tuple(function)
        assert package_of_function(wrapper) == "transformers"
        return wrapper

    assert judge.why_not(known(LIBRARY)) is None
    assert judge.why_not(known(mine)) is not None


def test_a_cell_that_is_filled_later(judge):
    """A recursive function's cell is empty while it is made."""
    cell = types.CellType()
    own = can_return_tuple(LIBRARY)
    place = own.__code__.co_freevars.index("func")
    cells = list(own.__closure__)
    cells[place] = cell
    function = types.FunctionType(own.__code__, own.__globals__, closure=tuple(cells))
    assert judge.why_not(function) is None
    cell.cell_contents = mine
    assert judge.why_not(function) is not None


def test_a_cell_that_is_filled_with_something_else(judge):
    function = can_return_tuple(LIBRARY)
    assert judge.why_not(function) is None
    place = function.__code__.co_freevars.index("func")
    function.__closure__[place].cell_contents = mine
    assert judge.why_not(function) is not None


def test_defaults_are_looked_at(judge):
    function = types.FunctionType(LIBRARY.__code__, LIBRARY.__globals__)
    assert judge.why_not(function) is None
    function.__defaults__ = (mine,)
    fresh = Provenance(lambda entry: False)
    assert fresh.why_not(function) is not None


def test_functions_that_call_each_other_end(judge):
    first = types.FunctionType(LIBRARY.__code__, LIBRARY.__globals__)
    second = types.FunctionType(LIBRARY.__code__, LIBRARY.__globals__)
    first.__defaults__, second.__defaults__ = (second,), (first,)
    assert judge.why_not(first) is None


# -- an answer does not outlive what it rests on ----------------------------------------------------------------------


def copied(function):
    """A function like another, to be spoilt."""
    return types.FunctionType(function.__code__, function.__globals__, closure=function.__closure__)


def test_a_code_object_that_is_swapped(judge):
    function = copied(LIBRARY)
    assert judge.why_not(function) is None
    function.__code__ = mine.__code__
    assert judge.why_not(function) is not None


def test_a_code_object_that_is_swapped_back(judge):
    function = copied(LIBRARY)
    function.__code__ = mine.__code__
    assert judge.why_not(function) is not None
    function.__code__ = LIBRARY.__code__
    assert judge.why_not(function) is None


def test_a_name_that_the_library_calls(judge, monkeypatch):
    """Two calls deep: attention calls the rotation, which calls what turns a half."""
    assert judge.why_not_class(modeling_llama.LlamaAttention) is None
    with monkeypatch.context() as change:
        change.setattr(modeling_llama, "rotate_half", in_the_library_s_name)
        assert judge.why_not_class(modeling_llama.LlamaAttention) is not None
        assert judge.why_not_class(modeling_llama.LlamaMLP) is None
    assert judge.why_not_class(modeling_llama.LlamaAttention) is None


@pytest.mark.parametrize("name", ["forward", "__call__", "_call_impl", "__getattr__"])
def test_a_class_that_is_changed_after_it_was_judged(judge, monkeypatch, name):
    kind = modeling_llama.LlamaMLP
    assert judge.why_not_class(kind) is None
    with monkeypatch.context() as change:
        own = getattr(kind, name)
        change.setattr(kind, name, functools.wraps(own)(lambda self, *a, **k: own(self, *a, **k)))
        assert name in judge.why_not_class(kind)
    assert judge.why_not_class(kind) is None


def test_a_base_class_that_is_changed_after_it_was_judged(judge, monkeypatch):
    assert judge.why_not_class(torch.nn.Linear) is None
    with monkeypatch.context() as change:
        change.setattr(torch.nn.Module, "_call_impl", mine)
        assert judge.why_not_class(torch.nn.Linear) is not None
    assert judge.why_not_class(torch.nn.Linear) is None


# -- classes ----------------------------------------------------------------------------------------------------------


def subclass(**methods):
    return type(
        "LlamaForCausalLM", (modeling_llama.LlamaForCausalLM,), {**methods, "__module__": modeling_llama.__name__}
    )


@pytest.mark.parametrize("name", ["forward", "prepare_inputs_for_generation", "_sample", "_reorder_cache", "dtype"])
def test_subclasses_that_override_what_the_library_has(judge, name):
    """What nobody knows by its name nobody calls."""
    kind = type("Mine", (modeling_llama.LlamaForCausalLM,), {name: mine})
    assert (judge.why_not_class(kind) is not None) == hasattr(modeling_llama.LlamaForCausalLM, name)


def test_subclasses_that_say_they_are_the_library_s(judge):
    assert judge.why_not_class(subclass(anything=mine)) is not None


def test_subclasses_that_only_add_or_override_what_is_harmless(judge):
    plain = type("Mine", (modeling_llama.LlamaForCausalLM,), {"__init__": mine, "score": mine, "save_pretrained": mine})
    assert judge.why_not_class(plain) is None


def test_properties_and_static_methods_count(judge):
    for entry in (property(mine), staticmethod(mine), classmethod(mine)):
        assert judge.why_not_class(subclass(_expand_inputs_for_generation=entry)) is not None


def test_a_mixin_in_front_of_the_library_s_class(judge):
    mixin = type("Mixin", (), {"forward": mine})
    assert judge.why_not_class(type("Both", (mixin, modeling_llama.LlamaForCausalLM), {})) is not None


def test_a_module_of_one_s_own(judge):
    assert judge.why_not_class(type("Own", (torch.nn.Module,), {"forward": mine})) is not None


def test_classes_are_held_weakly(judge):
    kind = type("Own", (torch.nn.Module,), {"forward": lambda self, x: x})
    gone = weakref.ref(kind)
    assert judge.why_not_class(kind)
    del kind
    gc.collect()
    assert gone() is None


def test_functions_are_held_weakly(judge):
    def make():
        return lambda x: x

    function = make()
    gone = weakref.ref(function)
    assert judge.why_not(function)
    del function
    gc.collect()
    assert gone() is None


def test_an_address_that_is_used_again_is_judged_again(judge):
    for _ in range(200):
        known, unknown = copied(LIBRARY), copied(mine)
        assert judge.why_not(known) is None
        assert judge.why_not(unknown) is not None
        del known, unknown


def test_vouched_for(judge):
    kind = type("Own", (torch.nn.Module,), {"forward": mine})
    assert Provenance(lambda entry: entry is kind).why_not_class(kind) is None
    assert Provenance(lambda entry: entry is mine).why_not_class(kind) is None
    assert Provenance(lambda entry: entry is mine).why_not(mine) is None


# -- packages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kernels", "einops", "fla", "timm"])
def test_a_folder_that_is_named_like_a_known_package(judge, tmp_path, monkeypatch, name):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution({"fla": "flash-linear-attention"}.get(name, name))
        pytest.skip(f"the real {name} is installed")
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("def steer(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    assert package_of(module.__file__) == ""
    assert judge.why_not(module.steer) is not None
    monkeypatch.setitem(sys.modules, name, module)  # so that it goes, and what was there before comes back


def test_a_file_under_a_folder_named_like_the_library(judge, tmp_path):
    folder = tmp_path / "site-packages" / "transformers" / "models" / "llama"
    folder.mkdir(parents=True)
    (folder / "modeling_llama.py").write_text("def rotate_half(x):\n    return x\n")
    space = {}
    exec(compile((folder / "modeling_llama.py").read_text(), str(folder / "modeling_llama.py"), "exec"), space)
    assert judge.why_not(space["rotate_half"]) is not None


def test_a_package_beside_hf_paged_is_not_hf_paged(tmp_path):
    import hf_paged

    assert package_of(hf_paged.__file__) == "hf_paged"
    assert package_of(hf_paged.__file__.replace("hf_paged", "hf_paged_plus")) == ""


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_forward_of_the_library_is_known(judge):
    model = build("llama")
    assert judge.why_not(torch.compile(model.forward, backend="eager")) is None


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_forward_of_one_s_own_is_not(judge):
    model = build("llama")
    model.forward = types.MethodType(mine, model)
    assert judge.why_not(torch.compile(model.forward, backend="eager")) is not None
