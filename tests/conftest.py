"""Shared settings of the tests: one thread, no chatter, new memory full of NaN, and the thresholds of the backend made
small on demand."""

import pytest
import torch
import transformers

from hf_paged.backends import torch_strided
from hf_paged.generation import salts
from hf_paged.store import LayerStore, Memory

transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models are faster on one thread, and sums come out in the same order."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _unwritten_slots_hold_nan():
    """New memory may hold anything, and mostly holds zeros, which hide that somebody reads what nobody wrote."""
    make = LayerStore._memory

    def poisoned(store: LayerStore, num_blocks: int) -> Memory:
        memory = make(store, num_blocks)
        for tensor in (memory.keys, memory.values):
            tensor[:, 1:] = float("nan")
        return memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerStore, "_memory", poisoned)
        yield


@pytest.fixture(autouse=True)
def _no_salt_yet():
    """As in a new process: once a salt is used, calls without one are in no namespace."""
    used = salts._used.is_set()
    salts._used.clear()
    yield
    salts._used.set() if used else salts._used.clear()


@pytest.fixture
def short_pieces(monkeypatch):
    """Let a few tokens count as a long run and a long shared prefix, so that tiny prompts reach every kind of piece."""
    monkeypatch.setattr(torch_strided, "LONG_RUN", 4)
    monkeypatch.setattr(torch_strided, "LONG_PREFIX", 2)
