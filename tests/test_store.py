"""`LayerStore`: the tensors of one layer, growth, block copies, and the modes of torch it must work across."""

from contextlib import nullcontext

import pytest
import torch

from hf_paged.cpu_kernels.library import library
from hf_paged.store import LayerStore

HEADS = 3


def a_store(block_size=4, key_dim=16, value_dim=16, dtype=torch.float32, num_blocks=0, stored_as=None) -> LayerStore:
    key = torch.zeros(1, HEADS, 1, key_dim, dtype=dtype)
    value = torch.zeros(1, HEADS, 1, value_dim, dtype=dtype)
    store = LayerStore(key, value, block_size, stored_as)
    store.ensure(num_blocks)
    return store


def fill(store: LayerStore, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random content in every block but the null block."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (store.memory.keys, store.memory.values):
        tensor[:, 1:] = torch.randn(tensor[:, 1:].shape, generator=generator).to(tensor.dtype)
    return store.memory.keys.clone(), store.memory.values.clone()


def test_a_new_store_holds_the_null_block_alone():
    store = a_store(block_size=4, key_dim=16, value_dim=24)
    assert store.memory.num_blocks == 0 and store.memory.num_slots == 4
    assert store.memory.keys.shape == (HEADS, 1, 4, 16) and store.memory.values.shape == (HEADS, 1, 4, 24)
    assert not store.memory.keys.any() and not store.memory.values.any()


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_growth_keeps_what_was_stored_at_its_place(block_size):
    store = a_store(block_size, num_blocks=5)
    keys, values = fill(store)
    for num_blocks in (6, 7, 40):
        store.ensure(num_blocks)
        assert store.memory.num_blocks == num_blocks and store.memory.num_slots == (num_blocks + 1) * block_size
        assert torch.equal(store.memory.keys[:, :6], keys) and torch.equal(store.memory.values[:, :6], values)


def test_a_store_never_shrinks_and_does_not_move_without_need():
    store = a_store(num_blocks=5)
    before = store.memory.keys.data_ptr()
    for num_blocks in (5, 3, 0):
        store.ensure(num_blocks)
    assert store.memory.keys.data_ptr() == before and store.memory.num_blocks == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_null_block_is_zeros_before_and_after_growth(dtype):
    store = a_store(dtype=dtype, num_blocks=3)
    for num_blocks in (3, 4, 100, 2000):  # large enough that memory given back before is handed out again
        fill(store)
        store.memory.keys[:, 1:] = float("nan")
        store.ensure(num_blocks)
        assert not store.memory.keys[:, 0].any() and not store.memory.values[:, 0].any()


def test_slot_zero_gathers_zeros():
    store = a_store(num_blocks=3, key_dim=16, value_dim=8)
    fill(store)
    keys, values = store.memory.gather(torch.tensor([0, 9, 0]))
    assert keys.shape == (HEADS, 3, 16) and values.shape == (HEADS, 3, 8)
    assert not keys[:, [0, 2]].any() and not values[:, [0, 2]].any()
    assert torch.equal(keys[:, 1], store.memory.keys[:, 2, 1]) and torch.equal(
        values[:, 1], store.memory.values[:, 2, 1]
    )


def test_a_slot_is_block_times_size_plus_offset_in_every_view():
    store = a_store(block_size=4, num_blocks=6, key_dim=16, value_dim=8)
    fill(store)
    slots, rows = store.memory.num_slots, store.memory.key_rows
    for block in range(7):
        for offset in range(4):
            slot = block * 4 + offset
            assert torch.equal(store.memory.key_slots[:, slot], store.memory.keys[:, block, offset])
            assert torch.equal(store.memory.value_slots[:, slot], store.memory.values[:, block, offset])
            for head in range(HEADS):
                assert torch.equal(rows[head * slots + slot], store.memory.keys[head, block, offset])
                assert torch.equal(
                    store.memory.value_rows[head * slots + slot], store.memory.values[head, block, offset]
                )


def test_the_views_are_of_the_memory_the_store_has_now():
    store = a_store(num_blocks=2)
    store.ensure(9)
    for views, memory in (
        ((store.memory.key_slots, store.memory.key_rows), store.memory.keys),
        ((store.memory.value_slots, store.memory.value_rows), store.memory.values),
    ):
        assert all(view.data_ptr() == memory.data_ptr() for view in views)


def test_keys_and_values_may_have_different_dims_and_dtypes():
    key, value = torch.zeros(1, HEADS, 1, 24, dtype=torch.float32), torch.zeros(1, HEADS, 1, 16, dtype=torch.bfloat16)
    store = LayerStore(key, value, 4)
    store.ensure(2)
    assert store.memory.keys.shape == (HEADS, 3, 4, 24) and store.memory.keys.dtype == torch.float32
    assert store.memory.values.shape == (HEADS, 3, 4, 16) and store.memory.values.dtype == torch.bfloat16
    assert store.nbytes == HEADS * 3 * 4 * (24 * 4 + 16 * 2)
    assert store.bytes_per_block == HEADS * 4 * (24 * 4 + 16 * 2)


@pytest.mark.parametrize("stored_as", [torch.float32, torch.float16, torch.bfloat16])
def test_a_given_dtype_is_what_is_stored_and_the_signature_tells_the_models(stored_as):
    store = a_store(dtype=torch.float32, stored_as=stored_as, num_blocks=2)
    store.ensure(5)
    assert store.memory.keys.dtype == store.memory.values.dtype == stored_as
    assert store.signature == (HEADS, 16, 16, torch.float32, torch.float32, torch.device("cpu"))


def test_the_signature_tells_stores_apart_that_cannot_be_shared():
    key, value = torch.zeros(2, HEADS, 5, 16), torch.zeros(2, HEADS, 5, 8)
    same = LayerStore.signature_of(torch.zeros(7, HEADS, 1, 16), torch.zeros(7, HEADS, 1, 8))
    assert LayerStore.signature_of(key, value) == same, "batch and length do not matter"
    for other in (
        (key[:, :1], value[:, :1]),
        (key[..., :8], value),
        (key, value[..., :4]),
        (key.half(), value),
        (key, value.half()),
        (key.to("meta"), value),
    ):
        assert LayerStore.signature_of(*other) != same


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("value_dim", [8, 16])
@pytest.mark.parametrize("block_size", [1, 4])
def test_copied_blocks_equal_their_sources_and_nothing_else_changes(
    block_size, value_dim, dtype, compiled, monkeypatch
):
    kernels = library() if compiled else None
    if compiled and kernels is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr("hf_paged.store.loaded", lambda: kernels)
    store = a_store(block_size, key_dim=16, value_dim=value_dim, dtype=dtype, num_blocks=9)
    keys, values = fill(store)
    sources, targets = [2, 2, 9], [5, 1, 7]
    store.copy_blocks(torch.tensor(sources), torch.tensor(targets))
    keys[:, targets], values[:, targets] = keys[:, sources], values[:, sources]
    assert torch.equal(store.memory.keys, keys) and torch.equal(store.memory.values, values)


def test_the_largest_offset_is_the_last_element_of_the_larger_tensor():
    store = a_store(block_size=4, key_dim=16, value_dim=8, num_blocks=6)
    assert store.largest_offset == HEADS * 7 * 4 * 16 - 1
    store = a_store(block_size=4, key_dim=8, value_dim=24, num_blocks=6)
    assert store.largest_offset == HEADS * 7 * 4 * 24 - 1
    head, slot, dim = HEADS - 1, store.memory.num_slots - 1, 23
    assert (
        head * store.memory.value_slots.stride(0) + slot * store.memory.value_slots.stride(1) + dim
        == store.largest_offset
    )


def test_offsets_beyond_32_bits_are_counted_in_full():
    key = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16, device="meta")
    store = LayerStore(key, key, 16)
    store.ensure(140_000)
    assert store.largest_offset == 8 * 140_001 * 16 * 128 - 1 > 2**31


# -- inference_mode and no_grad ----------------------------------------------------------------------------------------

MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "grad": nullcontext}


@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("grown", MODES)
@pytest.mark.parametrize("used", MODES)
def test_a_store_made_in_one_mode_is_grown_and_written_in_any_other(made, grown, used):
    with MODES[made]():
        key = torch.randn(1, HEADS, 1, 16)
        store = LayerStore(key, key, 4)
        assert not store.memory.keys.is_inference()
        store.ensure(2)
        store.memory.key_slots.narrow(1, 5, 1).copy_(key[0])
    with MODES[grown]():
        store.ensure(5)
        store.memory.keys[:, 3:] = 0.0
    with MODES[used]():
        new = torch.randn(HEADS, 2, 16)
        store.memory.key_slots.narrow(1, 6, 2).copy_(new)
        store.memory.value_slots[:, 6:8].copy_(new)
        store.memory.key_rows.index_copy_(0, torch.tensor([9]), new[0, :1])
        store.memory.value_rows.index_copy_(0, torch.tensor([9]), new[0, :1])
        store.copy_blocks(torch.tensor([1]), torch.tensor([4]))
        store.ensure(7)
        keys, values = store.memory.gather(torch.tensor([5, 6, 7, 9, 0, 18]))
    assert not store.memory.keys.is_inference() and not store.memory.values.is_inference()
    assert not store.memory.keys.requires_grad
    assert torch.equal(keys[:, 0], key[0, :, 0]) and torch.equal(keys[:, 1:3], new)
    assert torch.equal(values[:, 1:3], new) and torch.equal(keys[0, 3], new[0, 0])
    assert not keys[:, 4].any() and torch.equal(keys[:, 5], new[:, 0])
