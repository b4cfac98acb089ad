"""`PagedConfig`: what it accepts, what it refuses, and that every refusal names the field."""

import dataclasses

import pytest

import hf_paged
from hf_paged import PagedConfig

GIB = 2**30


def test_the_defaults_let_the_pool_grow():
    config = PagedConfig()
    assert (config.block_size, config.num_blocks, config.memory_budget) == (16, None, None)
    assert (config.kv_dtype, config.prefix_caching, config.backend) == ("auto", True, "auto")
    assert config.grows


def test_every_option_is_documented():
    for field in dataclasses.fields(PagedConfig):
        assert f"{field.name}:" in (PagedConfig.__doc__ or ""), f"{field.name} has no documentation"


def test_it_is_a_dataclass_that_compares_and_is_replaced_with_validation():
    assert PagedConfig(block_size=4) == PagedConfig(block_size=4) != PagedConfig()
    assert dataclasses.replace(PagedConfig(), block_size=8).block_size == 8
    with pytest.raises(ValueError, match="block_size"):
        dataclasses.replace(PagedConfig(), block_size=3)
    assert hf_paged.PagedConfig is PagedConfig


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_a_block_size_is_a_power_of_two_up_to_256(block_size):
    assert PagedConfig(block_size=block_size).block_size == block_size


@pytest.mark.parametrize(
    ("options", "grows"),
    [({}, True), ({"num_blocks": 7}, False), ({"memory_budget": "1MiB"}, False), ({"memory_budget": 0.5}, False)],
)
def test_a_pool_of_given_size_does_not_grow(options, grows):
    assert PagedConfig(**options).grows is grows


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("block_size", value) for value in (0, -16, 3, 24, 257, 512, 16.0, "16", True, None)),
        *(("num_blocks", value) for value in (0, -1, 1.0, "9", True)),
        *(("kv_dtype", value) for value in ("fp16", "int8", None, "Float32")),
        *(("backend", value) for value in ("sdpa", "", None, "Torch")),
        *(
            ("memory_budget", value)
            for value in (
                0,
                -1,
                0.0,
                -0.5,
                1.5,
                float("nan"),
                float("inf"),
                True,
                False,
                "",
                "GiB",
                "lots",
                "0 MB",
                "0",
                "-1GB",
                "1.2.3 GB",
                "1,5GB",
                "2 GiB of it",
                "3 IB",
                "3iB",
                "4GI",
                "2G",
                "2 PiB",
                "0.5",
                "0.25 B",
                b"2GiB",
                [2],
            )
        ),
    ],
)
def test_a_value_out_of_range_is_refused_and_the_message_names_field_and_value(field, value):
    with pytest.raises(ValueError) as caught:
        PagedConfig(**{field: value})
    assert field in str(caught.value) and repr(value) in str(caught.value)


def test_blocks_and_budget_together_are_refused():
    with pytest.raises(ValueError, match="num_blocks or memory_budget, not both"):
        PagedConfig(num_blocks=4, memory_budget="1GB")


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, 1),
        (2 * GIB, 2 * GIB),
        ("12345", 12345),
        ("17 B", 17),
        ("2GiB", 2 * GIB),
        ("1.5 GiB", GIB + GIB // 2),
        (" 1.5 gib ", GIB + GIB // 2),
        ("500MB", 500 * 10**6),
        ("500MiB", 500 * 2**20),
        ("3KB", 3000),
        ("3kib", 3072),
        ("0.5GB", 5 * 10**8),
        (0.25, GIB),
        (1.0, 4 * GIB),
        (0.001, 4 * GIB // 1000),
    ],
)
def test_a_budget_is_bytes_a_string_with_a_unit_or_a_fraction_of_what_is_free(budget, expected):
    assert PagedConfig(memory_budget=budget).budget_bytes(available=4 * GIB) == expected
