"""Salts keep tenants apart: who finds what, which salt counts, and what a call without one may do."""

import copy
import threading

import pytest
import torch
from models import run

import hf_paged
from hf_paged import PagedCache, compat
from hf_paged.generation import salts

from .disturbances import pair_of
from .test_soundness import ONE, behind, shown

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def models():
    return pair_of("llama")


@pytest.fixture
def paged(models):
    return models[1]


def hits_of(paged, call):
    """Prompt tokens that a call finds."""
    before = paged.paged_stats().prefix_hit_tokens
    call()
    return paged.paged_stats().prefix_hit_tokens - before


def generate(paged, **options):
    return run(paged, ONE, max_new_tokens=1, **options)


def within(salt):
    def call(paged):
        with hf_paged.prefix_salt(salt):
            generate(paged)

    return call


def with_cache(salt):
    return lambda paged: generate(
        paged, **{compat.CACHE_ARGUMENT: PagedCache(paged.config, pool=paged.paged_pool, prefix_salt=salt)}
    )


# Everywhere that a salt can be given -> a call with this one.
PLACES = {
    "the call": lambda salt: lambda paged: generate(paged, prefix_salt=salt),
    "the cache": with_cache,
    "the conversation": lambda salt: (
        lambda paged: hf_paged.Chat(paged, prefix_salt=salt, max_new_tokens=1).generate(ONE["input_ids"])
    ),
    "the thread": within,
}


# -- who finds what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_only_the_same_salt_finds(paged, place):
    salted = PLACES[place]
    found = [hits_of(paged, lambda salt=salt: salted(salt)(paged)) for salt in ("a", "b", "a", "", "", "b")]
    assert found == [0, 0, 18, 0, 18, 18]
    assert paged.paged_stats().stepped_aside == {}


@pytest.mark.parametrize("stored", PLACES)
@pytest.mark.parametrize("found", PLACES)
def test_a_salt_is_the_same_wherever_it_was_given(paged, stored, found):
    PLACES[stored]("a")(paged)
    assert hits_of(paged, lambda: PLACES[found]("a")(paged)) == 18
    assert hits_of(paged, lambda: PLACES[found]("b")(paged)) == 0


@pytest.mark.parametrize("mode", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
def test_beams_and_samples_keep_apart(models, mode):
    plain, paged = models
    expected = run(plain, ONE, max_new_tokens=4, **mode)
    for salt, found in (("a", False), ("b", False), ("a", True)):
        got = []
        hits = hits_of(
            paged, lambda salt=salt, got=got: got.append(run(paged, ONE, max_new_tokens=4, prefix_salt=salt, **mode))
        )
        assert torch.equal(expected, got[0])
        assert (hits > 0) == found


def test_answers_keep_apart(models):
    """What was generated, not only what was asked."""
    _, paged = models
    first = run(paged, ONE, max_new_tokens=5, prefix_salt="a")
    history = behind(first)
    assert hits_of(paged, lambda: run(paged, history, max_new_tokens=1, prefix_salt="b")) == 0
    assert hits_of(paged, lambda: run(paged, history, max_new_tokens=1, prefix_salt="a")) == 23


# -- which salt counts ------------------------------------------------------------------------------------------------


def test_the_call_s_salt_counts_before_the_cache_s(paged):
    generate(paged, prefix_salt="call")
    cache = PagedCache(paged.config, pool=paged.paged_pool, prefix_salt="cache")
    both = {"prefix_salt": "call", compat.CACHE_ARGUMENT: cache}
    assert hits_of(paged, lambda: generate(paged, **both)) == 18


def test_the_call_s_salt_counts_before_the_conversation_s(paged):
    generate(paged, prefix_salt="call")
    chat = hf_paged.Chat(paged, prefix_salt="chat", max_new_tokens=1)
    assert hits_of(paged, lambda: chat.generate(ONE["input_ids"], prefix_salt="call")) == 18


@pytest.mark.parametrize("place", ["the call", "the cache", "the conversation"])
def test_what_is_given_counts_before_the_thread_s(paged, place):
    generate(paged, prefix_salt="given")
    with hf_paged.prefix_salt("thread"):
        assert hits_of(paged, lambda: PLACES[place]("given")(paged)) == 18
        assert hits_of(paged, lambda: PLACES[place](None)(paged)) == 0
        assert hits_of(paged, lambda: generate(paged)) == 18  # the one before has stored it under "thread"


def test_the_inner_block_counts_and_ends(paged):
    for salt in ("outer", "inner"):
        generate(paged, prefix_salt=salt)
    run(paged, {name: rows[:, :9] for name, rows in ONE.items()}, max_new_tokens=1, prefix_salt="")
    with hf_paged.prefix_salt("outer"):
        with hf_paged.prefix_salt("inner"):
            assert hits_of(paged, lambda: generate(paged)) == 18
        with hf_paged.prefix_salt(""):
            assert hits_of(paged, lambda: generate(paged)) == 9
        assert hits_of(paged, lambda: generate(paged)) == 18


def test_a_block_that_raises_ends(paged):
    with pytest.raises(KeyError), hf_paged.prefix_salt("a"):
        raise KeyError
    generate(paged)
    assert paged.paged_stats().stepped_aside == {"no_salt": 1}


# -- calls without a salt ---------------------------------------------------------------------------------------------


def test_before_the_first_salt_none_is_shared(paged):
    generate(paged)
    assert hits_of(paged, lambda: generate(paged)) == 18
    assert hits_of(paged, lambda: generate(paged, prefix_salt="")) == 18
    assert hits_of(paged, lambda: generate(paged)) == 18
    assert paged.paged_stats().stepped_aside == {}


@pytest.mark.parametrize("place", PLACES)
def test_after_the_first_salt_calls_without_one_neither_find_nor_store(models, place):
    plain, paged = models
    generate(paged)  # stored as shared
    PLACES[place]("a")(paged)
    expected = run(plain, ONE, max_new_tokens=4)
    for times in (1, 2):
        got = []
        assert hits_of(paged, lambda got=got: got.append(run(paged, ONE, max_new_tokens=4))) == 0
        assert torch.equal(expected, got[0])
        assert paged.paged_stats().stepped_aside == {"no_salt": times}
    history = behind(expected)
    assert hits_of(paged, lambda: run(paged, history, max_new_tokens=1, prefix_salt="")) == 19  # the prompt of before
    assert hits_of(paged, lambda: generate(paged, prefix_salt="")) == 18


def test_a_salt_that_was_made_and_not_used_counts(paged):
    """A cache or a conversation of a tenant is there: the process serves tenants."""
    generate(paged)
    PagedCache(paged.config, pool=paged.paged_pool, prefix_salt="a")
    assert hits_of(paged, lambda: generate(paged)) == 0


def test_the_shared_salt_alone_changes_nothing_for_calls_without_one(paged):
    with hf_paged.prefix_salt(""):
        generate(paged)
    assert hits_of(paged, lambda: generate(paged)) == 18
    assert not salts._used.is_set()


def test_a_conversation_without_a_salt_still_goes_on(models):
    """Its own cache is its own; nobody else's is looked at."""
    plain, paged = models
    salts.checked("a")
    chat = hf_paged.Chat(paged, max_new_tokens=4)
    history = ONE["input_ids"]
    for _ in range(3):
        expected = run(plain, shown(history), max_new_tokens=4)
        assert torch.equal(expected, chat.generate(history))
        history = behind(expected)["input_ids"]
    assert paged.paged_stats().prefix_hit_tokens == 0


# -- threads ----------------------------------------------------------------------------------------------------------


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_thread_started_in_the_block_finds_nothing_of_anybody(models):
    plain, paged = models
    generate(paged)
    generate(paged, prefix_salt="other tenant")
    got = []
    with hf_paged.prefix_salt("mine"):
        generate(paged)
        hits = hits_of(paged, lambda: in_a_thread(lambda: got.append(run(paged, ONE, max_new_tokens=4))))
    assert hits == 0
    assert torch.equal(run(plain, ONE, max_new_tokens=4), got[0])
    assert paged.paged_stats().stepped_aside == {"no_salt": 1}


def test_a_thread_passes_its_salt_along(paged):
    generate(paged, prefix_salt="mine")
    hits = hits_of(paged, lambda: in_a_thread(lambda: generate(paged, prefix_salt="mine")))
    assert hits == 18


def test_another_thread_s_block_is_its_own(paged):
    generate(paged, prefix_salt="theirs")
    inside, done = threading.Event(), threading.Event()

    def stay():
        with hf_paged.prefix_salt("theirs"):
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait(60)
    try:
        assert hits_of(paged, lambda: generate(paged)) == 0
    finally:
        done.set()
        thread.join()


# -- a cache that goes on under another -------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [None, "a"])
def test_a_cache_filled_under_one_salt_goes_on_under_another_and_is_not_stored(models, own):
    plain, paged = models
    cache = PagedCache(paged.config, pool=paged.paged_pool, prefix_salt=own)
    first = run(paged, ONE, max_new_tokens=4, **{compat.CACHE_ARGUMENT: cache}, **({} if own else {"prefix_salt": "a"}))
    history = behind(first)
    second = run(paged, history, max_new_tokens=4, prefix_salt="b", **{compat.CACHE_ARGUMENT: cache})
    assert torch.equal(run(plain, history, max_new_tokens=4), second)
    third = behind(second)
    # Under "b" nothing of the first turn, which is a's; under "a" nothing of the second, which is b's.
    assert hits_of(paged, lambda: run(paged, third, max_new_tokens=1, prefix_salt="b")) == 0
    assert hits_of(paged, lambda: run(paged, third, max_new_tokens=1, prefix_salt="a")) == 22
    paged.paged_pool.check()


def test_a_copied_cache_keeps_its_salt(paged):
    cache = PagedCache(paged.config, pool=paged.paged_pool, prefix_salt="a")
    run(paged, ONE, max_new_tokens=4, **{compat.CACHE_ARGUMENT: cache})
    assert copy.deepcopy(cache).prefix_salt == "a"


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [1, b"a", ("a",), True, object()])
def test_what_is_no_string_is_refused(paged, salt):
    for call in (
        lambda: generate(paged, prefix_salt=salt),
        lambda: PagedCache(paged.config, prefix_salt=salt),
        lambda: hf_paged.Chat(paged, prefix_salt=salt),
        lambda: within(salt)(paged),
    ):
        with pytest.raises(TypeError, match="prefix_salt must be a string"):
            call()
    assert not salts._used.is_set()
    assert hits_of(paged, lambda: generate(paged)) == 0
    assert paged.paged_stats().used_blocks == 0


def continuous(paged, **options):
    """Three ways to continuous batching."""
    ids = ONE["input_ids"]
    return {
        "generate_batch": lambda: paged.generate_batch([ids[0].tolist()], **options),
        "init_continuous_batching": lambda: paged.init_continuous_batching(**options),
        "generate": lambda: paged.generate(ids, cache_implementation="paged", **options),
    }


@pytest.mark.parametrize("way", ["generate_batch", "init_continuous_batching", "generate"])
def test_continuous_batching_refuses_a_salt(paged, way):
    with pytest.raises(ValueError, match="prefix_salt"):
        continuous(paged, prefix_salt="a")[way]()
    with hf_paged.prefix_salt("a"), pytest.raises(ValueError, match="prefix_salt"):
        continuous(paged)[way]()
    assert paged.paged_stats().used_blocks == 0
    assert hits_of(paged, lambda: generate(paged, prefix_salt="a")) == 0


def test_an_unpatched_model_knows_no_salt(models):
    plain, _ = models
    with pytest.raises(ValueError, match="prefix_salt"):
        generate(plain, prefix_salt="a")
