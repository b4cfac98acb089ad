"""The checksum's kernel against PyTorch's operators, bit for bit."""

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from hf_paged import checksum
from hf_paged.triton_kernels import checksum as kernel


def agree(words: torch.Tensor, start: int) -> None:
    expected, sums = torch.tensor([3, -4]), torch.tensor([3, -4])
    checksum.add_words_by_operators(words, start, expected)
    kernel.add_words(words, start, sums, checksum.CONSTANTS)
    assert torch.equal(sums, expected)


def random_words(count: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(count), dtype=torch.int32)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 1023, 1024, 1025, 16 * 1024, 16 * 1024 + 1, 50_001])
def test_any_number_of_words(count):
    agree(random_words(count), checksum.key_start(3, 77))


@pytest.mark.parametrize("start", [0, 1, -1, 2**31, 2**63 - 1, -(2**63)])
def test_any_start(start):
    agree(random_words(3000), start)


def test_words_of_all_ones_and_the_smallest():
    for fill in (0, 1, -1, 2**31 - 1, -(2**31)):
        agree(torch.full((2000,), fill, dtype=torch.int32), checksum.key_start(0, 0))


def test_a_device_gets_the_same_by_either():
    weights = [torch.randn(5000), torch.randn(3, 7).bfloat16(), torch.zeros(5, dtype=torch.bool), torch.empty(0)]
    found, device = checksum.storages(weights), torch.device("cpu")
    by_kernel, by_operators = (
        checksum._device_numbers(device, found, add) for add in (kernel.add_words, checksum.add_words_by_operators)
    )
    assert torch.equal(by_kernel, by_operators)


def test_a_storage_of_more_than_2_to_the_31_words(monkeypatch):
    """Addresses are computed in 64 bits. Of memory that is touched at its end only, the last program is run."""
    count = 2**31 + 5000
    last = count // (kernel.BLOCK * kernel.TILES)
    first = last * kernel.BLOCK * kernel.TILES
    words = torch.empty(count, dtype=torch.int32)
    words[first:] = random_words(count - first)
    sums, expected = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    checksum.add_words_by_operators(words[first:], checksum.key_start(1, first), expected)
    monkeypatch.setattr(interpreter_builder, "set_grid_dim", lambda *grid: None)
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda *index: None)
    monkeypatch.setattr(interpreter_builder, "grid_idx", (last, 0, 0), raising=False)
    monkeypatch.setattr(interpreter_builder, "grid_dim", (last + 1, 1, 1), raising=False)
    kernel._checksum_kernel[(1,)](
        words, sums, count, checksum.key_start(1, 0), *checksum.CONSTANTS, BLOCK=kernel.BLOCK, TILES=kernel.TILES
    )
    assert torch.equal(sums, expected)
