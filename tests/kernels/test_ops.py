"""The launchers as ops: schema, fake implementation and mutation as `opcheck` tests them, and a graph through them."""

import pytest
import torch

from hf_paged.triton_kernels import ops  # noqa: F401  registers them
from hf_paged.triton_kernels.decode import decode_attention
from hf_paged.triton_kernels.prefill import prefill_attention
from hf_paged.triton_kernels.shared import members_per_tile, pack_spans

from .paged import Paged
from .test_shared import share


def arguments(name: str) -> tuple[tuple, dict]:
    """Arguments of one call."""
    if name == "write_tokens":
        stores = [torch.zeros(2, 4, 4, dim) for dim in (16, 8)]
        return (torch.randn(3, 2, 16), torch.randn(3, 2, 8), *stores, torch.tensor([5, -1, 9])), {}
    if name == "copy_blocks":
        return ([torch.randn(2, 5, 4, 16) for _ in range(2)], torch.tensor([1, 4]), torch.tensor([2, 3])), {}
    if name == "update_table":
        return (torch.zeros(3, 5, dtype=torch.int32), torch.tensor([[0, 2], [4, 1], [7, 8]], dtype=torch.int32)), {}
    if name == "prefill_attention":
        rows = Paged([7, 5], query_lengths=[2, 3], poison=0.0, value_dim=8)
        lengths = (rows.cu_seqlens, rows.lengths_tensor)
        return (rows.query, rows.keys, rows.values, rows.table, *lengths), dict(scale=0.3, longest=7, longest_query=3)
    rows = Paged([9, 6], poison=0.0, value_dim=8)
    given = (rows.query, rows.keys, rows.values, rows.table, rows.lengths_tensor)
    if name == "decode_attention":
        options = dict(scale=0.3, longest=9, band=5, sinks=torch.randn(4), splits=2)
        return given, options
    spans = [([0, 1], 0, 4)]
    share(rows, spans)
    packed = pack_spans(spans, rows.lengths, members_per_tile(rows.query, rows.keys, rows.values), "cpu")
    return (*given, *vars(packed).values()), dict(scale=0.3, softcap=5.0)


@pytest.mark.parametrize(
    "name",
    ["write_tokens", "copy_blocks", "update_table", "decode_attention", "prefill_attention", "shared_attention"],
)
def test_ops_are_what_they_say(name):
    given, options = arguments(name)
    torch.library.opcheck(getattr(torch.ops.hf_paged, name).default, given, options)


@pytest.mark.parametrize("name, launcher", [("decode", decode_attention), ("prefill", prefill_attention)])
def test_a_graph_goes_through_and_gives_what_the_launcher_gives(name, launcher):
    given, options = arguments(f"{name}_attention")
    op = getattr(torch.ops.hf_paged, f"{name}_attention")

    def twice(query, *rest):
        return op(query * 2, *rest, **options).sum(2)

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    right = launcher(given[0] * 2, *given[1:], **options).sum(2)
    torch.testing.assert_close(compiled(*given), right, atol=0, rtol=0)


def test_a_write_in_a_graph_stays():
    (key, value, keys, values, slots), _ = arguments("write_tokens")

    def write(key, value, keys, values, slots):
        torch.ops.hf_paged.write_tokens(key + 1, value, keys, values, slots)
        return keys[:, 2, 1]

    seen = torch.compile(write, backend="aot_eager", fullgraph=True)(key, value, keys, values, slots)
    assert torch.equal(seen, key[2] + 1) and torch.equal(keys[:, 2, 1], key[2] + 1)
