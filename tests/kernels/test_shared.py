"""Shared prefixes against a softmax per query, and the merge of parts."""

import pytest
import torch

from hf_paged.triton_kernels.merge import merge_parts
from hf_paged.triton_kernels.shared import members_per_tile, pack_spans, shared_attention

from .paged import Paged

Spans = list[tuple[list[int], int, int]]


def share(rows: Paged, spans: Spans) -> None:
    """Let the tables say what the spans say."""
    for members, begin, end in spans:
        assert begin % rows.block_size == end % rows.block_size == 0
        low, high = begin // rows.block_size, end // rows.block_size
        for row in members[1:]:
            rows.table[row, low:high] = rows.table[members[0], low:high]


def agree(rows: Paged, spans: Spans, splits: tuple[int, int] = (1, 1), scale: float = 0.3, **options) -> torch.Tensor:
    share(rows, spans)
    right = rows.expected(scale, **options)
    packed = pack_spans(spans, rows.lengths, members_per_tile(rows.query, rows.keys, rows.values), "cpu")
    out = rows.poisoned_out()
    answer = shared_attention(
        rows.query,
        rows.keys,
        rows.values,
        rows.table,
        rows.lengths_tensor,
        packed,
        scale=scale,
        shared_splits=splits[0],
        splits=splits[1],
        out=out,
        **options,
    )
    assert answer is out
    rows.close(out, right)
    return out


NESTED: Spans = [([0, 1, 2, 3], 0, 32), ([0, 3], 32, 48), ([1, 2], 32, 36)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("splits", [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_one_prefix_of_all_rows(splits, dtype):
    agree(Paged([67, 66, 80], kv_heads=1, group=3, dtype=dtype), [([0, 1, 2], 0, 64)], splits)


@pytest.mark.parametrize("splits", [(1, 1), (2, 2)])
def test_prefixes_may_be_nested(splits):
    agree(Paged([50, 40, 37, 49, 21], kv_heads=2), NESTED, splits)


def test_two_prompts_in_one_batch_and_a_row_of_its_own():
    agree(Paged([33, 17, 35, 18, 9, 0], kv_heads=1), [([0, 2], 0, 32), ([3, 1], 0, 16)], (2, 1))


@pytest.mark.parametrize("options", [dict(softcap=1.5), dict(sinks=True), dict(softcap=1.5, sinks=True)], ids=str)
@pytest.mark.parametrize("splits", [(1, 1), (2, 2)])
def test_options(options, splits):
    if "sinks" in options:
        options = {**options, "sinks": torch.tensor([-1.0, 0.5, 3.0, 0.0])}
    agree(Paged([50, 40, 37, 49, 0], kv_heads=2), NESTED, splits, **options)


@pytest.mark.parametrize("group", [1, 3, 7, 12])
def test_any_group_size(group):
    agree(Paged([18, 17, 21], group=group, kv_heads=2), [([0, 1, 2], 0, 16)])


@pytest.mark.parametrize("dims", [(40, 40), (80, 24), (96, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dims(dims, dtype):
    agree(Paged([18, 17], key_dim=dims[0], value_dim=dims[1], kv_heads=1, dtype=dtype), [([0, 1], 0, 16)])


def test_more_members_than_a_tile_holds():
    rows = Paged([17 + row % 3 for row in range(21)], kv_heads=1, group=3, block_size=16)
    at_most = members_per_tile(rows.query, rows.keys, rows.values)
    assert at_most < 21
    assert len(pack_spans([(list(range(21)), 0, 16)], rows.lengths, at_most, "cpu").tiles) == -(-21 // at_most)
    agree(rows, [(list(range(21)), 0, 16)])


def test_a_row_of_which_everything_is_shared():
    agree(Paged([32, 33, 32]), [([0, 1, 2], 0, 32)], (2, 2))


def test_nothing_shared():
    agree(Paged([9, 17]), [], (1, 2))


@pytest.mark.parametrize("poison", [float("inf"), 3e38])
def test_unused_slots_may_hold_anything(poison):
    agree(Paged([33, 34, 40], poison=poison, block_size=16, kv_heads=1), [([0, 2], 0, 32)], (2, 1))


@pytest.mark.parametrize("kv_heads", [1, 5], ids=["far blocks", "far heads"])
def test_a_store_of_more_than_2_to_the_31_elements(kv_heads):
    rows = Paged([521, 530], block_size=256, key_dim=80, kv_heads=kv_heads, dtype=torch.float16)
    spans: Spans = [([0, 1], 0, 512)]
    share(rows, spans)
    rows.spread()
    agree(rows, spans, (2, 1), scale=0.1)


def test_spans_are_packed_with_their_depth():
    packed = pack_spans(NESTED, [50, 40, 37, 49, 21], 3, "cpu")
    assert packed.members.tolist() == [0, 1, 2, 3, 0, 3, 1, 2]
    assert packed.tiles.tolist() == [[0, 3, 0, 32, 0], [3, 1, 0, 32, 0], [4, 2, 32, 48, 1], [6, 2, 32, 36, 1]]
    assert packed.covered.tolist() == [48, 36, 36, 48, 0]
    assert (packed.layers, packed.fullest, packed.longest, packed.longest_suffix) == (2, 3, 32, 21)


def test_spans_that_leave_a_gap_or_go_too_far_are_refused():
    with pytest.raises(ValueError, match="row 0 of 9 tokens is covered to 0"):
        pack_spans([([0, 1], 4, 8)], [9, 9], 4, "cpu")
    with pytest.raises(ValueError, match=r"no span 0\.\.8"):
        pack_spans([([0, 1], 0, 8)], [9, 7], 4, "cpu")


# -- merge -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [1, 2, 5, 17, 40])
@pytest.mark.parametrize("value_dim", [16, 40, 96])
def test_parts_merge_into_the_whole(num_parts, value_dim):
    """A softmax over all keys, from softmaxes over parts of them."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(num_parts, 2, 3, 6, generator=generator) * 5
    values = torch.randn(num_parts, 2, 3, 6, value_dim, generator=generator)
    scores[0, 0, 0] = float("-inf")  # a part that sees nothing, and says so; what it left behind is not read
    scores[:, 1, 2] = float("-inf")  # a query that sees nothing
    lse = torch.logsumexp(scores, 3)
    parts = (torch.softmax(scores, 3).unsqueeze(-1) * values).sum(3)
    assert parts[0, 0, 0].isnan().all()
    flat = scores.permute(1, 2, 0, 3).flatten(2)  # [queries, heads, parts * n]
    whole = (torch.softmax(flat, 2).nan_to_num(0).unsqueeze(-1) * values.permute(1, 2, 0, 3, 4).flatten(2, 3)).sum(2)
    out, whole_lse = torch.full((2, 3, value_dim), float("nan")), torch.full((2, 3), float("nan"))
    merge_parts(parts, lse, out, whole_lse=whole_lse)
    torch.testing.assert_close(out, whole, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(whole_lse, torch.logsumexp(flat, 2), atol=2e-6, rtol=2e-6)
    assert not out[1, 2].any()


def test_sinks_take_part_once():
    generator = torch.Generator().manual_seed(0)
    lse, parts = torch.randn(3, 2, 2, generator=generator), torch.randn(3, 2, 2, 16, generator=generator)
    sinks = torch.tensor([0.5, float("-inf")])
    shares = torch.softmax(torch.cat([lse, sinks.expand(1, 2, 2)]), 0)[:3]
    out = merge_parts(parts, lse, torch.empty(2, 2, 16), sinks=sinks)
    torch.testing.assert_close(out, (shares.unsqueeze(-1) * parts).sum(0), atol=2e-6, rtol=2e-6)
