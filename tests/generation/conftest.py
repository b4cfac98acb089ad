"""What one test leaves in the process is not there for the next."""

import pytest

from hf_paged.generation import salts, soundness
from hf_paged.generation.provenance import Provenance


@pytest.fixture(autouse=True)
def _judges_anew(monkeypatch):
    """What has been found out about classes and functions so far is not remembered."""
    monkeypatch.setattr(soundness, "_shared", Provenance(lambda entry: False))


@pytest.fixture(autouse=True)
def _no_salt_was_used():
    """Whether a salt was used is known of the whole process."""
    before = salts._used.is_set()
    salts._used.clear()
    yield
    (salts._used.set if before else salts._used.clear)()
