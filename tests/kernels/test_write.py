"""Write against assignment in a loop."""

import pytest
import torch

from hf_paged.triton_kernels.write import write_tokens


def store(kv_heads: int, blocks: int, size: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((kv_heads, blocks, size, dim), float("nan"), dtype=dtype)


def agree(key, value, keys, values, slots) -> None:
    """Write, and compare every bit of the store with what a loop leaves there."""
    size = keys.shape[2]
    right = keys.clone(), values.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            right[0][:, slot // size, slot % size] = key[token].to(keys.dtype)
            right[1][:, slot // size, slot % size] = value[token].to(values.dtype)
    write_tokens(key, value, keys, values, torch.tensor(slots, dtype=torch.int64))
    for written, expected in zip((keys, values), right, strict=True):
        torch.testing.assert_close(written, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("dims", [(16, 16), (40, 24), (80, 96), (17, 5)])
def test_tokens_land_in_their_slots(dims, size, dtype):
    blocks = 48 // size
    key, value = torch.randn(7, 3, dims[0]).to(dtype), torch.randn(7, 3, dims[1]).to(dtype)
    slots = [5, -1, 47 // size * size - 1, 3, -1, 9, 22]
    agree(key, value, store(3, blocks, size, dims[0], dtype), store(3, blocks, size, dims[1], dtype), slots)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.float16])
def test_values_are_cast_as_the_store_has_it(given, stored):
    key, value = torch.randn(5, 2, 16) * 1e4, torch.randn(5, 2, 16) * 1e-6
    agree(key.to(given), value.to(given), store(2, 4, 4, 16, stored), store(2, 4, 4, 16, stored), [4, 9, 2, 15, -1])


def test_strided_and_expanded_inputs():
    fused = torch.randn(6, 2 * 3 * 16 + 8)  # queries and more beside them
    key = fused[:, 8:56].view(6, 3, 16)
    value = torch.randn(1, 3, 16).expand(6, 3, 16)
    slots = [7, 6, 5, 0, -1, 12]
    agree(key, value, store(3, 4, 4, 16, torch.float32), store(3, 4, 4, 16, torch.float32), slots)
    heads = torch.randn(3, 6, 16).transpose(0, 1)
    agree(heads, heads[..., :8], store(3, 4, 4, 16, torch.float32), store(3, 4, 4, 8, torch.float32), slots)
    backwards = torch.randn(16, 3, 6).permute(2, 1, 0)  # a last stride that is not 1
    agree(backwards, heads, store(3, 4, 4, 16, torch.float32), store(3, 4, 4, 16, torch.float32), slots)


def test_stores_with_any_strides():
    whole = torch.full((5, 2, 4, 3, 16), float("nan"))
    keys, values = whole[:, 0].permute(2, 0, 1, 3), whole[:, 1].permute(2, 0, 1, 3)
    agree(torch.randn(3, 3, 16), torch.randn(3, 3, 16), keys, values, [4, 19, 6])


@pytest.mark.parametrize("tokens", [1, 4, 5, 257])
def test_any_number_of_tokens(tokens):
    slots = (torch.randperm(300, generator=torch.Generator().manual_seed(0))[:tokens]).tolist()
    key, value = torch.randn(tokens, 1, 16), torch.randn(tokens, 1, 16)
    agree(key, value, store(1, 75, 4, 16, torch.float32), store(1, 75, 4, 16, torch.float32), slots)


def test_nothing_to_write():
    agree(torch.randn(0, 2, 16), torch.randn(0, 2, 16), *(store(2, 3, 4, 16, torch.float32) for _ in "kv"), [])
    agree(torch.randn(2, 2, 16), torch.randn(2, 2, 16), *(store(2, 3, 4, 16, torch.float32) for _ in "kv"), [-1, -1])


@pytest.mark.parametrize("kv_heads", [1, 5], ids=["far slots", "far heads"])
def test_a_store_of_more_than_2_to_the_31_elements(kv_heads):
    """Addresses are computed in 64 bits. The memory is asked for and never touched but at a few slots."""
    last = 2**31 // (4 * 512 * 80) * 5 // kv_heads
    keys = torch.empty(kv_heads, last + 1, 512, 80, dtype=torch.float16)
    assert max(last * keys.stride(1), (kv_heads - 1) * keys.stride(0)) > 2**31
    slots = [3, last * 512 + 100]
    key = torch.randn(2, kv_heads, 80).half()
    write_tokens(key, key, keys, keys, torch.tensor(slots))
    for token, at in enumerate(slots):
        assert torch.equal(keys[:, at // 512, at % 512], key[token])


def test_errors_name_what_does_not_fit():
    keys, values = store(2, 3, 4, 16, torch.float32), store(2, 3, 4, 16, torch.float32)
    with pytest.raises(ValueError, match="do not fit a store"):
        write_tokens(torch.randn(2, 3, 16), torch.randn(2, 3, 16), keys, values, torch.tensor([0, 1]))
    with pytest.raises(NotImplementedError, match="quantised"):
        tokens = torch.randn(2, 2, 16)
        write_tokens(tokens, tokens, keys, values, torch.tensor([0, 1]), k_scale=torch.ones(1))
