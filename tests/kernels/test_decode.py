"""Decode against a softmax per query."""

import itertools

import pytest
import torch

from hf_paged.triton_kernels import config
from hf_paged.triton_kernels.decode import decode_attention

from .paged import Paged

FLOAT32, FLOAT16 = torch.float32, torch.float16


def agree(rows: Paged, *, splits: int = 1, scale: float = 0.3, **options) -> torch.Tensor:
    """Decode into a poisoned output, compare, and return the answer."""
    right = rows.expected(scale, **options)
    given = dict(options)
    if "begins" in given:
        given["begins"] = rows.int32(given["begins"])
    if any(rows.starts):
        given["starts"] = rows.int32(rows.starts)
    out = rows.poisoned_out()
    answer = decode_attention(
        rows.query,
        rows.keys,
        rows.values,
        rows.table,
        rows.lengths_tensor,
        scale=scale,
        longest=max(rows.lengths),
        splits=splits,
        out=out,
        **given,
    )
    assert answer is out
    rows.close(out, right)
    return out


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
def test_any_block_size(block_size, dtype):
    agree(Paged([1, 2 * block_size % 97, 66], block_size=block_size, dtype=dtype), splits=2)


@pytest.mark.parametrize("past", [-1, 0, 1])
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_lengths_at_the_edge_of_a_block_and_of_a_tile(tokens, past):
    agree(Paged([tokens + past], block_size=16, kv_heads=1))


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
@pytest.mark.parametrize("dim", [16, 24, 40, 72, 80, 96, 112, 128, 160, 192, 256])
def test_any_head_dim(dim, dtype):
    agree(Paged([37], key_dim=dim, kv_heads=2, group=1, dtype=dtype), scale=dim**-0.5)


@pytest.mark.parametrize("dims", [(192, 128), (24, 80), (16, 17), (20, 8)])
def test_keys_and_values_of_unlike_dims(dims):
    agree(Paged([19, 33], key_dim=dims[0], value_dim=dims[1]), splits=2, scale=0.1)


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 12, 32, 71])
def test_any_group_size(group):
    agree(Paged([21], kv_heads=2, group=group))


FEATURES = {
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=True),
    "band": dict(band=7),
    "begins": dict(begins=[0, 9, 50, 0]),
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
    rows = Paged([5, 33, 75, 0], kv_heads=1, group=3, seed=3, **shape)
    if "sinks" in wanted:
        wanted["sinks"] = torch.tensor([-1.0, 0.5, 4.0])
    if "key_mask" in wanted:
        mask = torch.rand(4, 80, generator=rows.generator) < 0.6
        mask[0] = False  # a row that sees nothing
        wanted["key_mask"] = mask.to(torch.uint8)
        rows.keys.nan_to_num_(0.25), rows.values.nan_to_num_(0.25)
    out = agree(rows, **wanted)
    assert not out[3].any(), "a row without tokens gives zeros"


def test_every_option_at_once():
    rows = Paged([5, 33, 75, 1], kv_heads=2, group=5, key_dim=40, value_dim=72, starts=[0, 8, 40, 0], dtype=FLOAT16)
    options = dict(softcap=2.0, sinks=torch.linspace(-2, 3, 10), band=30, begins=[1, 0, 50, 0])
    agree(rows, splits=2, **options)


@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), 65504.0])
@pytest.mark.parametrize("splits", [1, 3])
def test_unused_slots_may_hold_anything(poison, splits):
    agree(Paged([1, 33, 66], poison=poison, block_size=16), splits=splits)


def test_masked_positions_may_hold_anything():
    rows = Paged([40], block_size=4)
    mask = torch.ones(1, 40, dtype=torch.uint8)
    for position in (3, 4, 5, 6, 39):
        block, offset = rows.place(0, position)
        rows.keys[:, block, offset] = rows.values[:, block, offset] = float("nan")
        mask[0, position] = 0
    agree(rows, key_mask=mask)


def test_more_parts_than_a_row_has_tokens():
    agree(Paged([1, 70, 0]), splits=9)


def test_no_rows_launch_nothing():
    rows = Paged([3])
    query = rows.query[:0]
    out = decode_attention(
        query, rows.keys, rows.values, rows.table[:0], rows.lengths_tensor[:0], scale=1.0, longest=0, splits=2
    )
    assert out.shape == (0, 4, 16)


def test_a_store_in_another_dtype_than_the_query():
    agree(Paged([33, 7], dtype=FLOAT16, query_dtype=FLOAT32), splits=2)


def test_a_store_with_any_strides():
    rows = Paged([33, 7], block_size=4)
    # Block-major, keys and values in one: [blocks, 2, block_size, kv_heads, dim].
    whole = torch.full((rows.keys.shape[1], 2, 4, 2, 16), float("nan"))
    whole[:, 0], whole[:, 1] = rows.keys.permute(1, 2, 0, 3), rows.values.permute(1, 2, 0, 3)
    rows.keys, rows.values = whole[:, 0].permute(2, 0, 1, 3), whole[:, 1].permute(2, 0, 1, 3)
    agree(rows)


def test_rows_may_share_blocks():
    rows = Paged([33, 33])
    rows.table[1, :8] = rows.table[0, :8]
    agree(rows)


@pytest.mark.parametrize("kv_heads", [1, 5], ids=["far blocks", "far heads"])
def test_a_store_of_more_than_2_to_the_31_elements(kv_heads):
    """Addresses are computed in 64 bits."""
    rows = Paged([301], block_size=256, key_dim=80, kv_heads=kv_heads, dtype=FLOAT16)
    rows.spread()
    agree(rows, splits=2, scale=0.1)


def test_scores_far_below_zero():
    """What is masked must not outweigh what is seen, however little that weighs."""
    rows = Paged([33, 7])
    rows.query[:] = -1e5
    rows.keys.abs_()
    agree(rows)


def test_scores_beyond_what_exp_can_take():
    agree(Paged([33, 7]), scale=200.0)
    agree(Paged([33, 7]), scale=200.0, softcap=30.0)


def test_errors_name_what_does_not_fit():
    rows = Paged([3])
    arguments = (rows.keys, rows.values, rows.table, rows.lengths_tensor)
    with pytest.raises(NotImplementedError, match="quantised"):
        decode_attention(rows.query, *arguments, scale=1.0, longest=3, k_scale=torch.ones(1))
    with pytest.raises(ValueError, match="3 query heads of dim 16 do not fit 2"):
        decode_attention(rows.query[:, :3], *arguments, scale=1.0, longest=3)
    with pytest.raises(ValueError, match="float64"):
        decode_attention(rows.query, rows.keys.double(), *arguments[1:], scale=1.0, longest=3)


# -- the number of parts -----------------------------------------------------------------------------------------------


@pytest.fixture
def usual_parts(monkeypatch):
    monkeypatch.setattr(config, "LEAST_PART", 256)


def test_parts_follow_the_chip_the_rows_and_the_context(usual_parts):
    h200 = 132
    assert config.num_splits(8, 65536, h200) == 66, "one row of a Llama-8B: all 132 processors, four times"
    assert config.num_splits(32 * 8, 4096, h200) == 2
    assert config.num_splits(8, 4096, h200) == 16, "no part below LEAST_PART"
    assert config.num_splits(8, 4096, 13) == 6, "a smaller chip, fewer parts"
    assert config.num_splits(1024 * 8, 4096, h200) == 1, "the rows fill the chip"
    assert config.num_splits(8, 100, h200) == 1
    assert config.num_splits(1, 10**7, h200) == config.MOST_SPLITS
    assert config.num_splits(0, 0, h200) == 1


@pytest.mark.parametrize("longest", [1, 255, 256, 257, 5000, 131072])
@pytest.mark.parametrize("tiles", [1, 3, 64, 4096])
def test_more_context_never_means_fewer_parts(tiles, longest, usual_parts):
    few, many = (config.num_splits(tiles, tokens, 132) for tokens in (longest, 2 * longest))
    assert 1 <= few <= many <= config.MOST_SPLITS
