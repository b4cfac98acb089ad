"""Blocks are held as long as something needs them, and no longer."""

import copy
import gc

import pytest
import torch
from models import (
    EOS,
    WINDOW,
    StopAt,
    Watch,
    assert_equal,
    build,
    cache_of,
    likely_eos,
    pair,
    prompts,
    run,
    vouch_for,
    with_cache,
)
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_paged import KVPool, PagedCache, PagedConfig


def test_nothing_is_left_after_fifty_calls():
    """F7: no block stays in use, and memory does not grow with the number of calls."""
    _, paged = pair("llama", block_size=4)
    modes = [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"prefill_chunk_size": 4}]
    for _ in range(2):
        run(paged, prompts(20, 20), max_new_tokens=8, num_beams=4)
    allocated = paged.paged_stats().bytes_allocated
    for call in range(50):
        run(paged, prompts(1 + call % 17, 1 + call % 5, seed=call), max_new_tokens=1 + call % 7, **modes[call % 4])
        assert paged.paged_stats().used_blocks == 0
    assert paged.paged_stats().bytes_allocated == allocated
    paged.paged_pool.check()


class RaiseAt(StoppingCriteria):
    def __init__(self, error, columns):
        self.error, self.columns = error, columns

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.columns:
            raise self.error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"return_dict_in_generate": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "t5"])
def test_nothing_is_left_after_an_exception(family, options, error):
    """Without the garbage collector's help: no cycle keeps the blocks."""
    _, paged = pair(family, block_size=4)
    gc.collect()
    gc.disable()
    try:
        columns = 3 if family == "t5" else 14
        try:
            run(paged, prompts(5, 11), max_new_tokens=8, stopping_criteria=[RaiseAt(error, columns)], **options)
            raise AssertionError("the criterion did not raise")
        except error:
            pass
        assert paged.paged_stats().used_blocks == 0
    finally:
        gc.enable()
    paged.paged_pool.check()
    assert paged.paged_stats().peak_used_blocks > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_no_cycle_keeps_a_finished_call(family):
    _, paged = pair(family, block_size=4)
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
            run(paged, prompts(5, 11), max_new_tokens=8, **options)
            assert paged.paged_stats().used_blocks == 0
        for inputs in (prompts(4, 9, side="right"), prompts(5, 11)):
            output = run(paged, inputs, max_new_tokens=4, return_dict_in_generate=True)
            assert paged.paged_stats().used_blocks > 0
            del output
            assert paged.paged_stats().used_blocks == 0
    finally:
        gc.enable()


def test_blocks_live_as_long_as_the_returned_cache():
    _, paged = pair("llama", block_size=4)
    output = run(paged, prompts(5, 11), max_new_tokens=4, min_new_tokens=4, return_dict_in_generate=True)
    assert paged.paged_stats().used_blocks == 2 + 4  # 8 and 14 tokens in blocks of 4
    cache = cache_of(output)
    del output
    assert paged.paged_stats().used_blocks == 2 + 4
    assert cache.layers[0].keys.shape == (2, 2, 14, 16)
    del cache
    assert paged.paged_stats().used_blocks == 0


def test_two_caches_on_one_pool():
    plain, model = build("llama"), build("llama", attn="hf_paged")
    pool = KVPool(model.config, PagedConfig(block_size=4))
    caches = [PagedCache(model.config, pool=pool) for _ in range(2)]
    batches = [prompts(5, 11, seed=1), prompts(9, seed=2)]
    expected = [run(plain, batch, max_new_tokens=6) for batch in batches]
    got = [
        run(model, {**batch, **with_cache(cache)}, max_new_tokens=6, min_new_tokens=0)
        for batch, cache in zip(batches, caches, strict=True)
    ]
    for left, right in zip(expected, got, strict=True):
        assert torch.equal(left, right)
    total = pool.stats()
    each = [cache.stats() for cache in caches]
    assert total.stored_tokens == sum(stats.stored_tokens for stats in each)
    assert total.used_blocks == total.num_blocks - total.free_blocks - total.cached_blocks
    keys = caches[1].layers[0].keys
    caches[0].reset()
    assert torch.equal(keys, caches[1].layers[0].keys)
    assert pool.stats().stored_tokens == each[1].stored_tokens
    del caches
    assert pool.stats().used_blocks == 0
    pool.check()


def used_by_step(paged, **options):
    """Used blocks after every step of a call in which row 0 stops at 10 columns and row 1 goes on to 16."""
    watch = Watch(paged)
    vouch_for(paged, StopAt)
    criteria = StoppingCriteriaList([watch, StopAt(10, 16)])
    output = run(paged, prompts(8, 8), max_new_tokens=20, stopping_criteria=criteria, **options)
    del output
    return [stats.used_blocks for stats in watch.seen]


def test_finished_rows_give_their_blocks_back():
    """Blocks of 2; after n new tokens a row holds 8 + n - 1. Row 0 is freed once its second token has stopped it."""
    _, paged = pair("llama", block_size=2)
    likely_eos(paged, -100.0)  # an EOS is known, so stopped rows are fed pads; none comes by itself
    assert used_by_step(paged) == [8, 10, 5, 6, 6, 7, 7, 8]
    kept = [8, 10, 10, 12, 12, 14, 14, 16]
    assert used_by_step(paged, return_dict_in_generate=True) == kept
    assert used_by_step(paged, eos_token_id=None) == kept  # a stopped row goes on and is sampled from
    _, paged = pair("llama", block_size=2, free_finished_rows=False)
    likely_eos(paged, -100.0)
    assert used_by_step(paged) == kept


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_rows_that_end_free_their_blocks_and_change_nothing(family):
    plain, paged = pair(family, block_size=2)
    for model in (plain, paged):
        likely_eos(model, 4.0 if family == "gemma2" else 3.0)
    for seed in range(3):
        output = assert_equal(plain, paged, prompts(3, 9, 5, 12), seed, max_new_tokens=18, do_sample=True)
        assert (output.sequences[:, 12:] == EOS).any()


@pytest.mark.parametrize("options", [{}, {"num_beams": 4}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_sliding_layers_give_back_what_left_the_window(family, block_size, options):
    """D7, D8: at most ceil(window / block) + 1 blocks a row; full layers keep all. Drafts add theirs until the crop."""
    _, paged = pair(family, block_size=block_size)
    likely_eos(paged, -100.0)
    rows = 2 * options.get("num_beams", 1) if "prompt_lookup_num_tokens" not in options else 1
    tokens = 10 * WINDOW if block_size == 4 else 4 * WINDOW
    held = []

    class Held(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            pool = paged.paged_pool
            pool.check()
            held.append({group.window: group.blocks.used_blocks for group in pool.groups})
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    inputs = prompts(12, 5) if rows > 1 else prompts(12)
    run(paged, inputs, max_new_tokens=tokens, min_new_tokens=tokens, stopping_criteria=[Held()], **options)
    drafts = options.get("prompt_lookup_num_tokens", 0)
    most = -(-(WINDOW + drafts) // block_size) + 1
    assert max(entry[WINDOW] for entry in held[1:]) <= rows * most
    if family == "gemma3":
        assert held[-1][None] >= (tokens + 11) // block_size  # the full layers hold the longest row at least


def test_a_fork_outlives_its_original():
    model = build("llama", attn="hf_paged")
    cache = PagedCache(model.config, PagedConfig(block_size=4))
    run(model, {**prompts(9), **with_cache(cache)}, max_new_tokens=3)
    pool, fork = cache.pool, copy.deepcopy(cache)
    keys = cache.layers[1].keys
    del cache
    assert torch.equal(fork.layers[1].keys, keys)
    fork.check()
    del fork
    assert pool.stats().used_blocks == 0
