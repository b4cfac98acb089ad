"""`generate()` gives the unpatched model's ids whatever touches the model: before, meanwhile, and after.

`disturbances` has what is done. Where it is nothing that the shortcuts' assumptions cover, they step aside: it is
counted under its reason, said once, and costs neither blocks nor copy-on-write. Where it only changes what prefixes are
found by, nothing steps aside.
"""

import functools
import warnings
from collections import Counter

import pytest
import torch
from models import Computed, Watch, prompts, run, vouch_for
from transformers import DynamicCache

import hf_paged
from hf_paged import compat
from hf_paged.generation.soundness import Reason

from .disturbances import (
    TABLE,
    disturbed,
    middle,
    pair_of,
    seen_by_content,
    steer,
    with_code,
)

pytestmark = pytest.mark.filterwarnings("ignore")
NEW = 4
ONE, RAGGED, EQUAL = prompts(19), prompts(19, 11, 3), {name: rows.repeat(3, 1) for name, rows in prompts(19).items()}
MANY_ENDS = list(range(2, 30))  # of these tokens each ends a row, so that rows end at unlike times
OTHER = torch.tensor([[5, 6, 7]])


def behind(ids, more=OTHER):
    """A history, and what comes behind it."""
    return shown(torch.cat([ids, more.expand(len(ids), -1)], 1))


def shown(ids):
    """Ids without pads. (Without a mask the library takes what looks like one for a pad.)"""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def second_turn(model):
    first = run(model, ONE, max_new_tokens=NEW)
    return run(model, behind(first), max_new_tokens=NEW)


MODES = {
    "greedy": lambda model: run(model, ONE, max_new_tokens=NEW),
    "ragged": lambda model: run(model, RAGGED, max_new_tokens=NEW, eos_token_id=MANY_ENDS),
    "equal rows": lambda model: run(model, EQUAL, max_new_tokens=NEW),
    "beams": lambda model: run(model, RAGGED, max_new_tokens=NEW, num_beams=2),
    "samples": lambda model: run(model, ONE, max_new_tokens=NEW, do_sample=True, num_return_sequences=3),
    "second turn": second_turn,
}


def ids_in_all_modes(model):
    return {mode: generate(model) for mode, generate in MODES.items()}


@functools.cache
def undisturbed(base):
    """What the unpatched model of a base gives."""
    plain, _ = pair_of(base)
    return ids_in_all_modes(plain)


def assert_all_equal(expected, got, when):
    for mode, ids in got.items():
        assert torch.equal(expected[mode], ids), f"{mode}, {when}:\n{expected[mode]}\n{ids}"


def assert_nothing_is_held(paged):
    paged.paged_pool.check()
    assert paged.paged_stats().used_blocks == 0


# -- nothing touches the model ----------------------------------------------------------------------------------------


def test_rows_of_the_ragged_batch_end_at_unlike_times():
    """Of the inputs above: else they would show less."""
    rows = undisturbed("llama")["ragged"][:, 19:]
    assert len({int((row == 0).sum()) for row in rows}) > 1


@pytest.mark.parametrize("mode", MODES)
def test_all_shortcuts_are_taken_when_nothing_touches_the_model(mode):
    _, paged = pair_of("llama")
    computed = Computed(paged)
    MODES[mode](paged)
    first = computed.since()
    MODES[mode](paged)
    again = computed.since()
    prompt_and_steps = {
        "greedy": 19 + 3,
        "ragged": 33 + 3 * 3,
        "equal rows": 19 + 3 * 3,
        "beams": 33 + 6 * 3,
        "samples": 19 + 3 * 3,
        "second turn": 19 + 3 + 4 + 3,
    }
    assert first <= prompt_and_steps[mode]
    assert again < first
    stats = paged.paged_stats()
    assert stats.prefix_hit_tokens > 0
    assert stats.stepped_aside == stats.fallbacks == {}
    assert_nothing_is_held(paged)


# -- something does ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_ids_are_the_unpatched_model_s_before_meanwhile_and_after(name):
    case = TABLE[name]
    plain, paged = pair_of(case.base)
    before = undisturbed(case.base)
    assert_all_equal(before, {mode: MODES[mode](paged) for mode in ("greedy", "second turn")}, "before")
    assert paged.paged_stats().stepped_aside == {}
    assert paged.paged_stats().prefix_hit_tokens > 0
    with disturbed(name, plain, paged):
        expected = ids_in_all_modes(plain)
        assert_all_equal(expected, ids_in_all_modes(paged), "meanwhile")
    assert_all_equal(before, {mode: MODES[mode](paged) for mode in ("ragged", "beams", "second turn")}, "after")
    assert_nothing_is_held(paged)
    shows = any(not torch.equal(ids, before[mode]) for mode, ids in expected.items())
    assert shows == case.shows, "the disturbance changes nothing" if case.shows else "it was not to show"


# Weights that are changed in another of many ways: a conversation sees them by their content alone.
ALIKE = (
    "memory_is_written_through_numpy",
    "weights_are_written_in_inference_mode",
    "a_state_dict_is_loaded",
    "two_steps_of_sgd",
    "two_steps_of_adamw",
    "two_steps_of_adamw_foreach",
)


@pytest.mark.parametrize("name", [name for name in TABLE if name not in ALIKE])
def test_a_conversation_goes_on(name):
    """A `Chat` gives what the unpatched model gives for the whole history; a filled cache what it gives with a
    `DynamicCache` that was filled as long ago."""
    case = TABLE[name]
    plain, paged = pair_of(case.base)
    chat = hf_paged.Chat(paged, max_new_tokens=3)
    caches = [DynamicCache(config=plain.config), hf_paged.PagedCache(plain.config, pool=paged.paged_pool)]
    histories = [ONE["input_ids"]] * 2

    def turn(when):
        expected = run(plain, shown(histories[0]), max_new_tokens=3)
        torch.manual_seed(5)
        assert torch.equal(expected, chat.generate(histories[0])), when
        both = [
            run(model, shown(histories[1]), max_new_tokens=3, **{compat.CACHE_ARGUMENT: cache})
            for model, cache in zip((plain, paged), caches, strict=True)
        ]
        assert torch.equal(*both), f"with a filled cache, {when}"
        histories[:] = behind(expected)["input_ids"], behind(both[0])["input_ids"]

    turn("before")
    with disturbed(name, plain, paged):
        turn("meanwhile")
        turn("meanwhile again")
    turn("after")
    chat.close()
    caches.clear()
    assert_nothing_is_held(paged)


# -- stepping aside ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", with_code())
def test_stepping_aside_is_counted_said_once_and_costs_no_paging(name):
    case = TABLE[name]
    plain, paged = pair_of(case.base)
    prompt = prompts(40)
    watch = Watch(paged)
    options = {"max_new_tokens": NEW, "num_beams": 4, "stopping_criteria": [watch]}
    with disturbed(name, plain, paged), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.manual_seed(5)
            paged.generate(**prompt, **options)
    stats = paged.paged_stats()
    sentence = next(reason.value for reason in Reason if reason.code == case.code)
    assert stats.stepped_aside == {case.code: 3}
    assert stats.fallbacks[sentence] == 3
    said = Counter(str(each.message) for each in caught if str(each.message).startswith("hf_paged"))
    assert [count for message, count in said.items() if sentence in message] == [1]
    assert all(count == 1 for count in said.values())
    assert stats.prefix_hit_tokens == 0
    # 40 tokens are 10 blocks a row, and 4 beams store them once after their first choice.
    held = [seen.used_blocks for place, seen in enumerate(watch.seen) if place % NEW]
    assert 0 < max(held) < 2 * 11
    assert stats.peak_used_blocks > 0
    assert_nothing_is_held(paged)


@pytest.mark.parametrize("name", seen_by_content())
def test_what_changes_content_finds_nothing_of_before_and_goes_on(name):
    case = TABLE[name]
    plain, paged = pair_of(case.base)
    hits = lambda: paged.paged_stats().prefix_hit_tokens  # noqa: E731

    def found():
        before = hits()
        run(paged, ONE, max_new_tokens=NEW)
        return hits() - before

    assert [found(), found()] == [0, 18]
    with disturbed(name, plain, paged):
        assert [found(), found()] == [0, 18]
    assert found() in (0, 18)
    assert found() == 18
    assert paged.paged_stats().stepped_aside == {}


def test_a_hook_that_is_vouched_for_costs_nothing():
    plain, paged = pair_of("llama")
    vouch_for(paged, steer)
    handles = [middle(model).register_forward_hook(steer) for model in (plain, paged)]
    assert_all_equal(ids_in_all_modes(plain), ids_in_all_modes(paged), "vouched for")
    stats = paged.paged_stats()
    assert stats.stepped_aside == {} and stats.prefix_hit_tokens > 0
    for handle in handles:
        handle.remove()
    assert_all_equal(undisturbed("llama"), ids_in_all_modes(paged), "removed")
