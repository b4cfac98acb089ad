"""Prefill against a softmax per query."""

import itertools

import pytest
import torch

from hf_paged.triton_kernels.prefill import prefill_attention

from .paged import Paged

FLOAT32, FLOAT16 = torch.float32, torch.float16


def agree(rows: Paged, *, splits: int = 1, scale: float = 0.3, **options) -> torch.Tensor:
    """Prefill into a poisoned output, compare, and return the answer."""
    right = rows.expected(scale, **options)
    given = dict(options)
    for name in ("begins", "query_ends"):
        if name in given:
            given[name] = rows.int32(given[name])
    if any(rows.starts):
        given["starts"] = rows.int32(rows.starts)
    out = rows.poisoned_out()
    answer = prefill_attention(
        rows.query,
        rows.keys,
        rows.values,
        rows.table,
        rows.cu_seqlens,
        rows.lengths_tensor,
        scale=scale,
        longest=max(rows.lengths),
        longest_query=max(rows.query_lengths),
        splits=splits,
        out=out,
        **given,
    )
    assert answer is out
    rows.close(out, right)
    return out


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_prompts_over_any_block_size(block_size, dtype):
    agree(Paged([5, 33, 1], [5, 33, 1], block_size=block_size, dtype=dtype, kv_heads=1))


@pytest.mark.parametrize("queries", [[2, 3, 5], [1, 1, 1], [1, 17, 4]], ids=["assisted", "decode", "mixed"])
def test_chunks_over_a_cached_context(queries):
    agree(Paged([40, 67, 9], queries, kv_heads=1))


def test_a_prompt_in_chunks_is_the_prompt_in_one():
    whole = Paged([50], [50], kv_heads=1)
    at_once = agree(whole)
    query, blocks = whole.query, (whole.keys, whole.values, whole.table)
    for begin, end in ((0, 13), (13, 32), (32, 50)):
        chunk = query[begin:end]
        out = prefill_attention(
            chunk,
            *blocks,
            whole.int32([0, end - begin]),
            whole.int32([end]),
            scale=0.3,
            longest=end,
            longest_query=end - begin,
            splits=1,
        )
        torch.testing.assert_close(out, at_once[begin:end], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
@pytest.mark.parametrize("dim", [40, 72, 80, 96, 112, 160, 192, 256])
def test_any_head_dim(dim, dtype):
    agree(Paged([19], [7], key_dim=dim, kv_heads=1, group=2, dtype=dtype), scale=dim**-0.5)


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 12, 32, 71])
def test_any_group_size(group):
    """Rows of a tile that are no whole token stay empty: a group of 7 fills 63 of 64."""
    agree(Paged([13, 9], [9, 2], kv_heads=2 if group < 12 else 1, group=group))


FEATURES = {
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=True),
    "band": dict(band=7),
    "begins": dict(begins=[0, 9, 50, 0]),
    "query_ends": dict(query_ends=True),
    "key_mask": dict(key_mask=True),
    "starts": dict(starts=[0, 8, 40, 0]),
    "splits": dict(splits=3),
    "float16": dict(dtype=FLOAT16),
    "wide keys": dict(key_dim=40, value_dim=24),
}
PAIRS = [(name,) for name in FEATURES] + list(itertools.combinations(FEATURES, 2))


@pytest.mark.parametrize("names", PAIRS, ids=["+".join(pair) for pair in PAIRS])
def test_features_alone_and_in_pairs(names):
    wanted = {key: value for name in names for key, value in FEATURES[name].items()}
    shape = {key: wanted.pop(key) for key in ("starts", "dtype", "key_dim", "value_dim") if key in wanted}
    rows = Paged([5, 33, 75, 0], [5, 13, 3, 2], kv_heads=1, group=3, seed=3, **shape)
    if "sinks" in wanted:
        wanted["sinks"] = torch.tensor([-1.0, 0.5, 4.0])
    if "query_ends" in wanted:
        right_pads = [28, 29, 30, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31]
        wanted["query_ends"] = [0, 1, 2, 2, 3, *right_pads, 74, 74, 79, 0, 0]
    if "key_mask" in wanted:
        mask = torch.rand(4, 80, generator=rows.generator) < 0.6
        mask[0] = False  # a row that sees nothing
        wanted["key_mask"] = mask.to(torch.uint8)
        rows.keys.nan_to_num_(0.25), rows.values.nan_to_num_(0.25)
    out = agree(rows, **wanted)
    assert not out[-2:].any(), "a row without tokens gives zeros"


def test_every_option_at_once():
    rows = Paged([5, 33, 75], [5, 3, 20], kv_heads=2, group=5, key_dim=40, value_dim=72, starts=[0, 8, 40])
    options = dict(softcap=2.0, sinks=torch.linspace(-2, 3, 10), band=20, begins=[1, 0, 50])
    agree(rows, splits=2, **options)


@pytest.mark.parametrize("poison", [float("inf"), 3e38])
def test_unused_slots_may_hold_anything(poison):
    agree(Paged([1, 33, 66], [1, 20, 3], poison=poison, block_size=16, kv_heads=1), splits=2)


def test_queries_before_any_key_give_zeros():
    out = agree(Paged([3, 8], [7, 8], kv_heads=1))
    assert not out[:4].any() and out[4:].any()


def test_rows_without_queries_and_queries_without_rows():
    agree(Paged([9, 20, 4, 30, 3], [0, 5, 0, 9, 0], kv_heads=1))
    rows = Paged([9], [3])
    out = prefill_attention(
        rows.query[:0],
        rows.keys,
        rows.values,
        rows.table[:0],
        rows.int32([0]),
        rows.lengths_tensor[:0],
        scale=1.0,
        longest=0,
        longest_query=0,
    )
    assert out.shape == (0, 4, 16)


def test_many_ragged_rows_find_their_tiles():
    """More rows than tiles of some, rows that fill a tile to the last token, and rows beside them."""
    queries = [1, 32, 2, 16, 31, 33, 1, 1, 17, 64]
    agree(Paged([past + count for past, count in zip(range(10), queries, strict=True)], queries, kv_heads=1, group=1))


def test_a_store_in_another_dtype_than_the_query():
    agree(Paged([33, 7], [9, 7], dtype=FLOAT16, query_dtype=FLOAT32, kv_heads=1))


def test_quantised_storage_is_refused():
    rows = Paged([3], [3])
    with pytest.raises(NotImplementedError, match="quantised"):
        prefill_attention(
            rows.query,
            rows.keys,
            rows.values,
            rows.table,
            rows.cu_seqlens,
            rows.lengths_tensor,
            scale=1.0,
            longest=3,
            longest_query=3,
            v_scale=torch.ones(1),
        )


@pytest.mark.parametrize("kv_heads", [1, 5], ids=["far blocks", "far heads"])
def test_a_store_of_more_than_2_to_the_31_elements(kv_heads):
    rows = Paged([301, 290], [3, 2], block_size=256, key_dim=80, kv_heads=kv_heads, dtype=FLOAT16)
    rows.spread()
    agree(rows, splits=2, scale=0.1)
