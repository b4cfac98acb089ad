"""CUDA graphs: what needs no kernels, and all of it on a GPU. The rest is in tests/kernels/test_cuda_graphs.py."""

import copy

import pytest
import torch
from models import assert_equal, build, pair, prompts, run

import hf_paged

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_other_backends_are_not_captured_and_say_so(backend):
    plain, paged = pair("llama", block_size=4)
    with pytest.warns(UserWarning, match=rf"cuda_graphs needs backend='triton', not '{backend}'"):
        hf_paged.patch(paged, backend=backend, cuda_graphs=True)
    assert "forward" not in paged.__dict__
    inputs = prompts(3, 5)
    assert torch.equal(run(plain, inputs, max_new_tokens=4), run(paged, inputs, max_new_tokens=4))
    stats = paged.paged_stats()
    assert list(stats.fallbacks.values()) == [1] and stats.graph_steps == 0


def test_they_are_off_by_default():
    assert hf_paged.PagedConfig().cuda_graphs is False
    _, paged = pair("llama")
    assert "forward" not in paged.__dict__ and paged.paged_stats().fallbacks == {}


def test_a_copy_is_patched_for_itself_and_unpatched_alone():
    _, paged = pair("llama")
    with pytest.warns(UserWarning, match="cuda_graphs"):
        hf_paged.patch(paged, cuda_graphs=True)
    other = copy.deepcopy(paged)
    hf_paged.unpatch(paged)
    assert other.paged_pool is not None and not hasattr(paged, "paged_pool")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("options", [{}, {"num_beams": 4}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_on_a_gpu(family, options):
    """Captured and replayed for real: the ids of the unpatched model, over two widths of the tables."""
    plain = build(family).cuda()
    paged = hf_paged.patch(copy.deepcopy(plain), backend="triton", cuda_graphs=True, prefix_caching=False)
    inputs = {name: tensor.cuda() for name, tensor in prompts(3, 240, 31).items()}
    assert_equal(plain, paged, inputs, max_new_tokens=40, **options)
    stats = paged.paged_stats()
    assert stats.fallbacks == {} and 0 < stats.graph_captures <= stats.graph_steps // 4


@pytest.mark.gpu
@NEEDS_GPU
def test_memory_that_moves_on_a_gpu():
    plain = build("llama").cuda()
    paged = hf_paged.patch(copy.deepcopy(plain), backend="triton", cuda_graphs=True, prefix_caching=False)
    for rows in (1, 9, 40):
        inputs = {name: tensor.cuda() for name, tensor in prompts(*range(1, rows + 1)).items()}
        assert torch.equal(run(plain, inputs, max_new_tokens=20), run(paged, inputs, max_new_tokens=20))
    assert paged.paged_stats().fallbacks == {}
