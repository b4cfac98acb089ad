"""`generate()` on the Triton backend: the tokens of the unpatched model, and kernels that wrote what was read."""

import copy
import gc
import weakref
from collections import Counter

import pytest
import torch
from models import assert_equal, pair, prompts, run

import hf_paged
from hf_paged.backends import triton as backend
from hf_paged.commands import tiny_models
from hf_paged.plan import GroupPlan
from hf_paged.state import CacheState
from hf_paged.store import LayerStore

MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.fixture
def launches(monkeypatch):
    """Counts the launches that store, the forwards, and those groups of a forward that have blocks to copy. What
    PyTorch's operators would have stored fails the test."""
    counts = Counter()

    def counted(name, function):
        def wrapper(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return wrapper

    def refuse(*args, **kwargs):
        raise AssertionError("written or copied by PyTorch's operators")

    begin = CacheState.begin_step

    def begin_step(self, *args):
        step = begin(self, *args)
        counts["forwards"] += 1
        counts["groups that copy"] += sum(1 for plan in step.groups if plan.copies)
        return step

    monkeypatch.setattr(CacheState, "begin_step", begin_step)
    monkeypatch.setattr(backend, "write_tokens", counted("writes", backend.write_tokens))
    monkeypatch.setattr(backend, "copy_blocks", counted("copies", backend.copy_blocks))
    monkeypatch.setattr(GroupPlan, "rows_on", refuse)
    monkeypatch.setattr(LayerStore, "copy_blocks", refuse)
    return counts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ids_of_the_unpatched_model(family, mode, launches):
    plain, paged = pair(family, backend="triton", block_size=4)
    inputs = prompts(5, 11)
    expected = run(plain, inputs, max_new_tokens=5, **MODES[mode])
    assert torch.equal(run(paged, inputs, max_new_tokens=5, **MODES[mode]), expected)
    assert paged.paged_stats().used_blocks == 0
    paged.paged_pool.check()
    assert launches["writes"] == launches["forwards"] * plain.config.num_hidden_layers
    assert launches["copies"] == launches["groups that copy"], "one launch a group, whatever the number of layers"
    assert (launches["copies"] > 0) == (mode != "greedy")


def test_keys_and_values_that_are_one(launches):
    """Latent attention keeps both in the same memory: it is copied once."""
    plain, paged = pair("deepseek_v3", backend="triton", block_size=4)
    assert_equal(plain, paged, prompts(5, 11), max_new_tokens=3, num_beams=2)
    assert all(store.once for store in paged.paged_pool.stores.values())
    assert launches["copies"] == launches["groups that copy"] > 0


def test_layers_that_read_what_another_wrote(launches):
    """Gemma 3n's last layers have no keys and values of their own."""
    plain = tiny_models.build("gemma3n_text", "Gemma3nForCausalLM")
    paged = hf_paged.patch(copy.deepcopy(plain), backend="triton", block_size=4)
    inputs = tiny_models.inputs_for(plain, (5, 11))
    expected = run(plain, inputs, max_new_tokens=3, num_beams=2)
    assert torch.equal(run(paged, inputs, max_new_tokens=3, num_beams=2), expected)
    assert sorted(paged.paged_pool.stores) == [0, 1] and plain.config.num_hidden_layers == 4
    assert launches["writes"] == launches["forwards"] * 2
    assert launches["copies"] == launches["groups that copy"] > 0


# -- block copies of a group -------------------------------------------------------------------------------------------


class Layers:
    """Stores of one group, and copies in them."""

    def __init__(self, *dims, device="cpu"):
        self.stores = [LayerStore(*[torch.zeros(1, 2, 1, dim, device=device)] * 2, 4) for dim in dims]
        self.blocks = 0
        self.grow(6)

    def grow(self, blocks):
        for store in self.stores:
            memory = store.ensure(blocks)
            if memory.keys.device.type == "cpu":
                for tensor in (memory.keys, memory.values):
                    tensor[:, 1:] = torch.randn(tensor[:, 1:].shape)
        self.blocks = blocks

    def copy(self, *pairs, blocks=None):
        plan = GroupPlan(None, None, blocks or self.blocks, [], [], 1, list(pairs), [], True, 0)
        right = []
        for store in self.stores:
            right.append([tensor.clone() for tensor in (store.memory.keys, store.memory.values)])
            for tensor in right[-1]:
                for source, target in pairs:
                    if target < tensor.shape[1]:
                        tensor[:, target] = tensor[:, source]
        with torch.no_grad():
            backend.copy(self.stores, plan)
        for store, expected in zip(self.stores, right, strict=True):
            for tensor, wanted in zip((store.memory.keys, store.memory.values), expected, strict=True):
                if tensor.device.type == "cpu":
                    here = tensor[:, : wanted.shape[1]]
                    torch.testing.assert_close(here, wanted, atol=0, rtol=0, equal_nan=True)


def test_a_set_serves_until_a_store_grows(monkeypatch):
    made = []
    make = backend.store_sets
    monkeypatch.setattr(backend, "store_sets", lambda tensors: made.append(len(tensors)) or make(tensors))
    layers = Layers(16, 8, 16)
    layers.copy((1, 4), (2, 5))
    layers.copy((3, 6))
    assert made == [3]
    layers.stores[1].ensure(9)  # as by a forward that was interrupted
    layers.copy((1, 4))
    layers.copy((2, 4), blocks=12)
    layers.copy((2, 4), blocks=12)
    assert made == [3, 3, 3]
    assert torch.equal(layers.stores[2].memory.keys[:, 4], layers.stores[2].memory.keys[:, 2])
    assert {store.memory.num_blocks for store in layers.stores} == {12}


def test_memory_that_was_outgrown_is_let_go():
    layers = Layers(16, 16)
    layers.copy((1, 4))
    old = [weakref.ref(store.memory) for store in layers.stores]
    layers.grow(9)
    gc.collect()
    assert [reference() for reference in old] == [None, None]


def test_a_layer_where_no_kernel_runs_is_copied_by_its_store(monkeypatch):
    layers, elsewhere = Layers(16, 16), Layers(16, device="meta")
    layers.stores[1:1] = elsewhere.stores
    copied = []
    monkeypatch.setattr(LayerStore, "copy_blocks", lambda store, *_: copied.append(store))
    layers.copy((1, 4), (2, 5))
    assert copied == elsewhere.stores


def test_what_no_kernel_is_for_is_not_written():
    store = LayerStore(*[torch.zeros(1, 2, 1, 16, dtype=torch.float64)] * 2, 4)
    key = torch.zeros(1, 2, 1, 16, dtype=torch.float64)
    assert backend.write(key, key, store.ensure(2), None) is False
    store = LayerStore(*[torch.zeros(1, 2, 1, 16, device="meta")] * 2, 4)
    key = torch.zeros(1, 2, 1, 16, device="meta")
    assert backend.write(key, key, store.ensure(2), None) is False
