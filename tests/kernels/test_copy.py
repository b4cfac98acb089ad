"""Copies of blocks against index assignment, and entries of a table."""

import pytest
import torch

from hf_paged.triton_kernels.copy import copy_blocks, copy_rounds, store_sets, update_table


def agree(stores: list[torch.Tensor], pairs: list[tuple[int, int]], launches: int) -> None:
    """Copy, and compare every bit of every store with what assignment leaves there."""
    right = []
    for store in stores:
        right.append(store.clone())
        for source, target in pairs:
            right[-1][:, target] = store[:, source]
    sets = store_sets(stores)
    assert len(sets) == launches
    sources, targets = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    copy_blocks(sets, sources.contiguous(), targets.contiguous())
    for store, expected in zip(stores, right, strict=True):
        torch.testing.assert_close(store, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size, dim", [(1, 16), (4, 40), (3, 5), (16, 80)])
def test_layers_alike_are_one_launch(size, dim, dtype):
    stores = [(torch.randn(2, 9, size, dim) * 50).to(dtype) for _ in range(3)]
    agree(stores, [(1, 4), (8, 2), (1, 7)], launches=1)


def test_layers_unlike_are_a_launch_per_kind():
    stores = [torch.randn(2, 9, 4, dim) for dim in (16, 24, 16)] + [torch.randn(2, 9, 4, 16).half()]
    agree(stores, [(1, 4), (8, 2)], launches=3)


def test_keys_and_values_that_are_halves_of_one_tensor():
    both = torch.randn(6, 9, 4, 16)
    agree([both[:3], both[3:]], [(3, 1)], launches=1)


def test_blocks_larger_than_what_a_program_copies():
    agree([torch.randn(1, 4, 64, 130)], [(1, 3)], launches=1)


def test_nan_and_negative_zero_are_copied_bit_for_bit():
    store = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]).repeat(1, 4, 2, 4)
    store[:, 2] = 7.0
    copy_blocks(store_sets([store]), torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(store[:, 1].view(torch.int32), store[:, 2].view(torch.int32))


def test_no_copies():
    agree([torch.randn(2, 9, 4, 16)], [], launches=1)


@pytest.mark.parametrize("kv_heads", [1, 5], ids=["far blocks", "far heads"])
def test_a_store_of_more_than_2_to_the_31_words(kv_heads):
    """Addresses are computed in 64 bits. The memory is asked for and never touched but at a few blocks."""
    size, dim = 511, 81  # odd, so that a word is a byte
    last = 2**31 // (4 * size * dim) * 5 // kv_heads | 1
    store = torch.empty(kv_heads, last + 1, size, dim, dtype=torch.uint8)[:, :last]
    assert max((last - 1) * store.stride(1), (kv_heads - 1) * store.stride(0)) > 2**31
    near, far = (torch.randint(256, (kv_heads, size, dim), dtype=torch.uint8) for _ in range(2))
    store[:, 3], store[:, last - 1] = near, far
    copy_blocks(store_sets([store]), torch.tensor([3, last - 1]), torch.tensor([last - 2, 4]))
    assert torch.equal(store[:, last - 2], near) and torch.equal(store[:, 4], far)


def test_the_same_set_serves_many_copies():
    stores = [torch.randn(2, 9, 4, 16) for _ in range(2)]
    sets = store_sets(stores)
    before = [store[:, 5].clone() for store in stores]
    for source, target in ((5, 1), (1, 2), (2, 8)):
        copy_blocks(sets, torch.tensor([source]), torch.tensor([target]))
    assert all(torch.equal(store[:, 8], held) for store, held in zip(stores, before, strict=True))


def test_a_block_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        store_sets([torch.randn(9, 4, 2, 16).permute(2, 0, 1, 3)])


def test_moves_in_a_chain_take_rounds():
    pairs = [(5, 4), (4, 3), (3, 2), (9, 8), (7, 7)]
    rounds = copy_rounds(pairs)
    assert rounds == [[(3, 2), (9, 8)], [(4, 3)], [(5, 4)]]
    store = torch.randn(1, 10, 2, 16)
    before = store.clone()
    for some in rounds:
        sources, targets = torch.tensor(some).unbind(1)
        copy_blocks(store_sets([store]), sources.contiguous(), targets.contiguous())
    for source, target in pairs:
        assert torch.equal(store[:, target], before[:, source])


def test_copies_on_write_are_one_round():
    assert copy_rounds([(1, 5), (1, 6), (2, 7)]) == [[(1, 5), (1, 6), (2, 7)]]
    assert copy_rounds([]) == []


def test_moves_that_cannot_be_ordered_are_refused():
    with pytest.raises(ValueError, match="change places"):
        copy_rounds([(1, 2), (2, 1), (3, 4)])
    with pytest.raises(ValueError, match="two copies"):
        copy_rounds([(1, 2), (3, 2)])


@pytest.mark.parametrize("entries", [[(0, 0, 9)], [(2, 6, 1), (-1, 0, 5), (0, 3, 8)], []])
def test_only_the_entries_that_changed(entries):
    whole = torch.arange(5 * 9, dtype=torch.int32).view(5, 9)
    right = whole.clone()
    for row, column, block in entries:
        if row >= 0:
            right[1 + row, column] = block
    update_table(whole[1:4, :7], torch.tensor(entries, dtype=torch.int32).view(-1, 3).T.contiguous())
    assert torch.equal(whole, right), "and nothing beside the table"


def test_more_entries_than_a_program_sets():
    table = torch.zeros(20, 30, dtype=torch.int32)
    row, column = torch.arange(600, dtype=torch.int32) // 30, torch.arange(600, dtype=torch.int32) % 30
    block = torch.randperm(600, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    update_table(table, torch.stack([row, column, block]))
    assert torch.equal(table.flatten(), block)
