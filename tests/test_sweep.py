"""A quarter of all classes that the installed Transformers can generate with, every kind of attention among them:
none may do anything else than without the cache. Cut into shares, so that several workers take part."""

import pytest

from hf_paged.commands import support, tiny_models

SHARES = 16


@pytest.mark.parametrize("share", range(SHARES))
def test_no_family_is_wrong(share):
    lines = support.sweep(tiny_models.quarter(tiny_models.entries())[share::SHARES])
    assert [line for line in lines if line.kind == "wrong"] == []
    assert any("exact" in line.modes.values() for line in lines)
