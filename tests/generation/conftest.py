"""What one test leaves in the process is not there for the next."""

import pytest

from hf_paged.generation import soundness
from hf_paged.generation.provenance import Provenance


@pytest.fixture(autouse=True)
def _judges_anew(monkeypatch):
    """What has been found out about classes and functions so far is not remembered."""
    monkeypatch.setattr(soundness, "_shared", Provenance(lambda entry: False))
