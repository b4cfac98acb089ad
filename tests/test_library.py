"""The library's names that `patch` binds over are looked at before anything is changed."""

import functools

import pytest
import transformers
from models import build, pair, prompts, run
from transformers import GenerationMixin

import hf_paged
from hf_paged import library, patching


def test_every_name_that_is_bound_is_known():
    assert library.METHODS.keys() == patching._METHODS.keys() - {"paged_stats"}
    assert library.why_not() is None


def changed(name):
    def other(self, something_else, generation_config=None):
        raise AssertionError("it must not be called")

    def needs_more(self, *known, one_that_is_new, **kwargs):
        raise AssertionError("it must not be called")

    return {"other": other, "needs_more": needs_more}[name]


@pytest.mark.parametrize("name", sorted(library.METHODS))
@pytest.mark.parametrize("how", ["gone", "other"])
def test_a_name_that_is_not_as_it_was_is_refused(monkeypatch, name, how):
    model = build("llama")
    before = dict(vars(model))
    if how == "gone":
        monkeypatch.delattr(next(kind for kind in GenerationMixin.__mro__ if name in vars(kind)), name)
    else:
        monkeypatch.setattr(GenerationMixin, name, changed(how))
    with pytest.raises(RuntimeError, match=rf"{name}.*Nothing was patched") as raised:
        hf_paged.patch(model)
    assert transformers.__version__ in str(raised.value) and library.KNOWN in str(raised.value)
    assert vars(model).keys() == before.keys() and model.config._attn_implementation == "sdpa"
    monkeypatch.undo()
    assert hf_paged.patch(model).paged_stats().num_blocks == 0, "looked at again"


def test_a_required_parameter_that_is_new_is_refused(monkeypatch):
    monkeypatch.setattr(GenerationMixin, "_prefill", changed("needs_more"))
    with pytest.raises(RuntimeError, match="_prefill"):
        hf_paged.patch(build("llama"))


@pytest.mark.parametrize("keeps_name", [True, False])
def test_a_wrapper_that_hands_everything_on_is_taken(monkeypatch, keeps_name):
    own = GenerationMixin._prefill
    calls = []

    def wrapper(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_prefill", functools.wraps(own)(wrapper) if keeps_name else wrapper)
    plain, paged = pair("llama")
    assert (run(plain, prompts(5), max_new_tokens=3) == run(paged, prompts(5), max_new_tokens=3)).all()
    assert len(calls) == 2
