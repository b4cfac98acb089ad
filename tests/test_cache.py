"""The contract of `PagedCache`, without `patch`: what a `DynamicCache` answers, it answers, content included."""

import copy
import gc
import itertools
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    assert_close,
    assert_equal,
    build,
    cache_of,
    forbid_dense,
    likely_eos,
    make_config,
    observe,
    pair,
    prompts,
    run,
    with_cache,
)

import hf_paged
from hf_paged import KVPool, OutOfBlocks, PagedCache, PagedConfig, compat

pytestmark = pytest.mark.filterwarnings("ignore:hf_paged", "ignore:.*past_key_values")

SPELLINGS = ["past_key_values", "cache"] if compat.CACHE_ARGUMENT == "cache" else ["past_key_values"]
KV = {"llama": (2, 16), "mistral": (2, 16), "gemma3": (2, 16)}  # kv heads, head dim


class Both:
    """A `DynamicCache` and a `PagedCache` of one config, given the same calls and compared after each."""

    def __init__(self, family, block_size=4, paged=None):
        self.config = config = make_config(family)
        self.heads, self.dim = KV[family]
        self.dynamic = compat.DynamicCache(config=config)
        self.paged = paged if paged is not None else PagedCache(config, PagedConfig(block_size=block_size))
        self.generator = torch.Generator().manual_seed(0)
        self.rows = 3
        self.recording = False

    def update(self, tokens):
        for index in range(len(self.paged)):
            states = torch.randn(2, self.rows, self.heads, tokens, self.dim, generator=self.generator)
            sizes = self.paged.get_mask_sizes(tokens, index)
            assert sizes == self.dynamic.get_mask_sizes(tokens, index)
            expected = self.dynamic.update(states[0], states[1], index)
            got = self.paged.update(states[0], states[1], index)
            for left, right in zip(expected, got, strict=True):
                left = left[:, :, -sizes[0] :]  # up to 5.17 a recording layer of the library gave more than it had said
                assert left.shape == right.shape
                assert torch.equal(left, right.clone())
        self.compare()

    def compare(self):
        dynamic, paged = self.dynamic, self.paged
        paged.check()
        for index, layer in enumerate(dynamic.layers):
            assert paged.get_seq_length(index) == dynamic.get_seq_length(index)
            assert paged.get_query_offset(index) == dynamic.get_query_offset(index)
            assert paged.get_max_length(index) == dynamic.get_max_length(index)
            for tokens in (1, 2, 5):
                assert paged.get_mask_sizes(tokens, index) == dynamic.get_mask_sizes(tokens, index)
            if dynamic.get_seq_length(index) == 0:
                assert paged.layers[index].keys is None
                continue
            window = paged.layers[index].sliding_window
            for left, right in ((layer.keys, paged.layers[index].keys), (layer.values, paged.layers[index].values)):
                if self.recording and window:  # what a later query may see; a recording layer holds more for a crop
                    left, right = left[:, :, -window + 1 :], right[:, :, -window + 1 :]
                assert torch.equal(left, right)
        assert paged.is_sliding == dynamic.is_sliding

    def each(self, call):
        """The same call on both; the same kind of error from both, or none."""
        error = None
        try:
            call(self.dynamic)
        except Exception as raised:
            error = raised
        if error is None:
            call(self.paged)
        else:
            with pytest.raises(type(error)):
                call(self.paged)
        return error

    def reset(self):
        self.paged.reset()
        self.dynamic = compat.DynamicCache(config=self.config)  # up to 5.17 its own reset() left zeros behind

    def record(self):
        self.each(lambda cache: cache.activate_past_recording())
        self.recording = True


OPERATIONS = {
    "reorder": lambda both: both.each(lambda c: c.reorder_cache(torch.tensor([2, 0, 0]))),
    "reorder_int32": lambda both: both.each(lambda c: c.reorder_cache(torch.tensor([1, 1, 2], dtype=torch.int32))),
    "select": lambda both: both.each(lambda c: c.batch_select_indices(torch.tensor([2, 1]))),
    "select_mask": lambda both: both.each(lambda c: c.batch_select_indices(torch.tensor([True, False, True]))),
    "select_negative": lambda both: both.each(lambda c: c.batch_select_indices(torch.tensor([-1, 0]))),
    "repeat": lambda both: both.each(lambda c: c.batch_repeat_interleave(2)),
    "reset": lambda both: both.reset(),
    "deepcopy": lambda both: (setattr(both, "paged", copy.deepcopy(both.paged)), None)[1],
}
ROWS = {"select": 2, "select_mask": 2, "select_negative": 2, "repeat": 6}


@pytest.mark.parametrize("tokens", [3, 8, 21])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("family", KV)
def test_operations_answer_like_a_dynamic_cache(family, operation, tokens):
    """A1: K and V of every row follow, at lengths below and above the window, and the cache goes on afterwards."""
    both = Both(family)
    both.compare()
    both.update(tokens)
    both.update(1)
    assert OPERATIONS[operation](both) is None
    both.compare()
    both.rows = ROWS.get(operation, 3)
    both.update(1)
    both.update(5)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("count", [0, -1, -4, -6, 3])
@pytest.mark.parametrize("length", [5, 7, 8, 20])
@pytest.mark.parametrize("family", KV)
def test_crop_means_what_it_means_for_a_dynamic_cache(family, length, count, recording):
    """E1: 0 keeps every token, negative numbers remove, positive ones raise; past the window only while recording."""
    both = Both(family)
    both.update(length - 3)
    if recording:
        both.record()
    both.update(3)
    before = both.paged.get_seq_length()
    windowed = any(layer.is_sliding for layer in both.paged.layers)
    if count > 0:  # up to 5.17 the library still took it for the length to keep
        with pytest.raises(ValueError, match=r"crop\(n - cache.get_seq_length\(\)\)"):
            both.paged.crop(count)
        assert both.paged.get_seq_length() == before
        return
    if count == 0 and windowed and length >= 8 and not recording:
        both.paged.crop(0)  # the library raises here although nothing is to be removed
        assert both.paged.get_seq_length() == before
        return
    if recording and length == 20 and windowed and count < -3:
        # Recording began with 7 tokens of the window's past: more than 3 tokens back, they lack on both sides.
        with pytest.raises(ValueError, match="have left the window"):
            for _ in range(4):
                both.paged.crop(count)
        return
    error = both.each(lambda cache: cache.crop(count))
    both.paged.check()
    if error is not None:
        assert both.paged.get_seq_length() == before
        return
    both.compare()
    both.update(2)


@pytest.mark.parametrize("family", KV)
def test_crop_of_more_than_there_is_empties(family):
    both = Both(family)
    both.update(6)
    both.each(lambda cache: cache.crop(-11))
    assert both.paged.get_seq_length() == both.dynamic.get_seq_length() == 0
    assert both.paged.stats().used_blocks == 0
    both.paged.check()
    both.dynamic = compat.DynamicCache(config=make_config(family))
    both.update(9)


STEPS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 6)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
    st.tuples(st.just("crop"), st.integers(-4, 0)),
    st.tuples(st.just("fork"), st.booleans()),
)


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(sorted(KV)), block_size=st.sampled_from([1, 2, 4, 16]), steps=st.lists(STEPS, max_size=14)
)
def test_any_order_of_operations(family, block_size, steps):
    both = Both(family, block_size)
    both.record()
    both.update(4)
    forks = []
    since = 4
    for step, argument in steps:
        if step == "update":
            both.update(argument)
            since += argument
        elif step == "reorder":
            both.each(lambda cache, order=argument: cache.reorder_cache(torch.tensor(order)))
        elif step == "crop":
            argument = -min(-argument, since, both.paged.get_seq_length() - 1)
            both.each(lambda cache, count=argument: cache.crop(count))
            since = 0  # a crop restricts a sliding layer to its window again
        else:
            other = copy.deepcopy(both.paged)
            keys = [layer.keys for layer in other.layers]
            forks.append((other, keys))
            if argument:  # go on with the fork and leave the original
                both.paged, forks[-1] = other, (both.paged, keys)
        both.compare()
    for other, keys in forks:  # nobody wrote into what the others share
        for layer, expected in zip(other.layers, keys, strict=True):
            assert torch.equal(layer.keys, expected)


def test_every_permutation_of_four_rows():
    """A5: content equals index_select for all 256, and a token written afterwards goes to its own row."""
    both = Both("llama", block_size=4)
    both.rows = 4
    both.update(6)
    original = both.paged
    for order in itertools.product(range(4), repeat=4):
        other = original.fork()
        other.reorder_cache(torch.tensor(order))
        for layer, expected in zip(other.layers, both.dynamic.layers, strict=True):
            assert torch.equal(layer.keys, expected.keys[list(order)])
            assert torch.equal(layer.values, expected.values[list(order)])
        fresh = torch.randn(4, 2, 1, 16)
        for index in range(2):
            keys, _ = other.update(fresh, fresh, index)
            assert torch.equal(keys.clone(), torch.cat([both.dynamic.layers[index].keys[list(order)], fresh], 2))
        other.check()
    both.compare()


def test_reorder_with_no_block_to_spare():
    """A6: no block passes through the free list while it moves between rows."""
    config = make_config("llama")
    both = Both("llama", paged=PagedCache(config, PagedConfig(block_size=4, num_blocks=4)))
    both.rows = 2
    both.update(8)
    assert both.paged.stats().free_blocks == 0
    both.each(lambda cache: cache.reorder_cache(torch.tensor([1, 1])))
    both.compare()
    both.each(lambda cache: cache.reorder_cache(torch.tensor([1, 0])))
    both.compare()


# -- small promises ----------------------------------------------------------------------------------------------------


def test_length_truth_and_iteration():
    both = Both("gemma3")
    assert len(both.paged) == len(both.dynamic) == 3
    assert both.paged and PagedCache(make_config("llama"))
    both.update(11)
    for left, right in zip(both.dynamic, both.paged, strict=True):
        assert torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])
        assert left[2] == right[2]
    assert both.paged.is_compileable is False and both.paged.is_croppable is True
    assert isinstance(both.paged, compat.DynamicCache)


def test_pickling_says_what_to_do():
    cache = PagedCache(make_config("llama"))
    with pytest.raises(TypeError, match=r"deepcopy.*layer\.keys"):
        pickle.dumps(cache)
    cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
    pool = pickle.loads(pickle.dumps(cache.pool))
    assert pool.config == cache.pool.config and pool.stats().stored_tokens == 0, (
        "a pool's content belongs to its caches"
    )


def test_wrong_arguments():
    config = make_config("llama")
    for wrong in ([(torch.zeros(1), torch.zeros(1))], None, 3):
        with pytest.raises(TypeError, match=r"PagedCache\(model.config\)"):
            PagedCache(wrong)
    pool = KVPool(config)
    with pytest.raises(ValueError, match="paged_config"):
        PagedCache(config, PagedConfig(block_size=4), pool)
    with pytest.raises(ValueError, match="other layers"):
        PagedCache(make_config("gemma3"), pool=pool)
    with pytest.raises(TypeError, match=r"model\.config"):
        KVPool("llama")
    cache = PagedCache(config)
    with pytest.raises(ValueError, match="same first three sizes"):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 4, 16), 0)
    for name in ("crop", "reset", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(NotImplementedError, match="on the cache"):
            getattr(cache.layers[0], name)(0)


def test_an_old_lazy_tensor_is_refused():
    cache = PagedCache(make_config("llama"))
    states = torch.randn(1, 2, 3, 16)
    keys, _ = cache.update(states, states, 0)
    cache.update(states, states, 1)
    kept, _ = cache.update(states, states, 0)
    cache.update(states, states, 1)
    with pytest.raises(RuntimeError, match="earlier step"):
        keys + 1
    assert torch.equal(kept + 0, torch.cat([states, states], 2))
    cache.reorder_cache(torch.tensor([0]))
    assert torch.equal(kept + 0, torch.cat([states, states], 2))  # read before, so it is there


def test_gradients_are_refused():
    model = build("llama", attn="hf_paged")
    cache = PagedCache(model.config)
    with pytest.raises(RuntimeError, match="autograd"):
        model(**prompts(5), **with_cache(cache))
    assert cache.get_seq_length() == 0 and cache.stats().used_blocks == 0
    with torch.no_grad():
        model(**prompts(5), **with_cache(cache))
    assert cache.get_seq_length() == 5


# -- generate and forward ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_passed_to_generate_under_each_spelling(family, options, spelling, monkeypatch):
    """A3: the same tokens, over blocks, and beams reorder it once a step."""
    forbid_dense(monkeypatch)
    plain, model = build(family), build(family, attn="hf_paged")
    cache = PagedCache(model.config, PagedConfig(block_size=4))
    calls = []
    reorder = PagedCache.reorder_cache
    monkeypatch.setattr(PagedCache, "reorder_cache", lambda self, index: (calls.append(1), reorder(self, index))[1])
    everything = {"max_new_tokens": 9, "min_new_tokens": 9, "return_dict_in_generate": True, "output_logits": True}
    expected = run(plain, prompts(5, 11), **everything, **options)
    got = run(model, {**prompts(5, 11), spelling: cache}, **everything, **options)
    assert_close(expected, got)
    assert cache_of(got) is cache
    assert len(calls) == (9 if "num_beams" in options else 0)
    assert cache.stats().fallbacks == {}
    cache.check()


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_under_another_attention_implementation(family, attn, options):
    """Dense keys and values: the same tokens, said once, counted."""
    plain, model = build(family, attn=attn), build(family, attn=attn)
    cache = PagedCache(model.config, PagedConfig(block_size=4))
    inputs = prompts(11) if "prompt_lookup_num_tokens" in options else prompts(5, 11)
    everything = {"max_new_tokens": 9, "return_dict_in_generate": True, "output_logits": True}
    expected = run(plain, inputs, **everything, **options)
    torch.manual_seed(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = model.generate(**inputs, past_key_values=cache, **everything, **options)
    assert_close(expected, got)
    said = [str(entry.message) for entry in caught if "hf_paged" in str(entry.message)]
    assert len(said) == len(set(said)) == len(cache.stats().fallbacks) > 0
    assert all("made dense" in reason for reason in cache.stats().fallbacks)
    assert sum(cache.stats().fallbacks.values()) >= 9 * 2
    cache.check()


def test_filled_under_one_implementation_and_used_under_another():
    """Under sdpa the pads are stored as if they were tokens; the mask then hides them."""
    plain, model = build("llama"), build("llama", attn="sdpa")
    inputs = prompts(4, 9)
    caches = compat.DynamicCache(config=plain.config), PagedCache(model.config, PagedConfig(block_size=4))
    with torch.no_grad():
        plain(**inputs, **with_cache(caches[0]))
        model(**inputs, **with_cache(caches[1]))
        model.set_attn_implementation("hf_paged")
        for tokens in (1, 3):
            ids = torch.full((2, tokens), 7)
            inputs["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, tokens), value=1)
            arguments = {"input_ids": ids, "attention_mask": inputs["attention_mask"]}
            expected = plain(**arguments, **with_cache(caches[0])).logits
            got = model(**arguments, **with_cache(caches[1])).logits
            torch.testing.assert_close(expected, got, atol=1e-4, rtol=0)
    assert any("hides tokens" in reason for reason in caches[1].stats().fallbacks)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_loop_written_by_hand(family):
    """F3: an empty cache is the object that is updated; its length grows by the tokens of each step."""
    plain, model = build(family), build(family, attn="hf_paged")
    if family == "gemma2":
        plain = build(family, attn="eager")
    dynamic, cache = compat.DynamicCache(config=plain.config), PagedCache(model.config, PagedConfig(block_size=4))
    inputs = prompts(4, 9)
    ids, mask, length = inputs["input_ids"], inputs["attention_mask"], 0
    with torch.no_grad():
        for _ in range(14):
            expected = plain(input_ids=ids, attention_mask=mask, **with_cache(dynamic))
            got = model(input_ids=ids, attention_mask=mask, **with_cache(cache))
            assert cache_of(got) is cache
            length += ids.shape[1]
            assert cache.get_seq_length() == length
            torch.testing.assert_close(expected.logits[:, -1], got.logits[:, -1], atol=1e-4, rtol=0)
            ids = expected.logits[:, -1:].argmax(-1)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    cache.check()
    assert cache.stats().fallbacks == {}


def test_several_tokens_at_a_time_by_hand():
    """New columns with pads of their own, between real ones and on the left."""
    plain, model = build("llama"), build("llama", attn="hf_paged")
    dynamic, cache = compat.DynamicCache(config=plain.config), PagedCache(model.config, PagedConfig(block_size=4))
    mask = torch.zeros(2, 0, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for columns in ([[0, 0, 1, 1], [1, 1, 1, 1]], [[1, 1, 0], [0, 1, 1]], [[1], [1]], [[0, 1], [1, 0]], [[1], [1]]):
        mask = torch.cat([mask, torch.tensor(columns)], 1)
        ids = torch.randint(3, 97, (2, len(columns[0])), generator=generator)
        # Positions as generate() makes them, and the same for both.
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        arguments = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        with torch.no_grad():
            expected = plain(**arguments, **with_cache(dynamic)).logits
            got = model(**arguments, **with_cache(cache)).logits
        shown = torch.tensor(columns).bool()
        torch.testing.assert_close(expected[shown], got[shown], atol=1e-4, rtol=0)
        cache.check()
    assert cache.stats().stored_tokens == int(mask.sum())


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_mask_that_hides_stored_tokens(family, tokens):
    """Equal to the unpatched model, by a dense path that is counted."""
    plain = build(family, attn="eager" if family == "gemma2" else None)
    model = build(family, attn="hf_paged")
    dynamic, cache = compat.DynamicCache(config=plain.config), PagedCache(model.config, PagedConfig(block_size=4))
    inputs = prompts(9, 9)
    mask = torch.ones(2, 9 + tokens, dtype=torch.int64)
    mask[0, 3:6] = 0
    arguments = {"input_ids": torch.full((2, tokens), 7), "attention_mask": mask}
    with torch.no_grad():
        for step in (inputs, arguments):
            expected = plain(**step, **with_cache(dynamic)).logits
            got = model(**step, **with_cache(cache)).logits
            torch.testing.assert_close(expected, got, atol=1e-4, rtol=0)
    assert sum("hides tokens" in reason for reason in cache.stats().fallbacks) == 1
    cache.check()


def test_a_mask_that_shows_pads_or_forgets_them():
    """Pads are not stored, so they cannot come back; the cache is as before and goes on."""
    plain, model = build("llama"), build("llama", attn="hf_paged")
    dynamic, cache = compat.DynamicCache(config=plain.config), PagedCache(model.config, PagedConfig(block_size=4))
    inputs = prompts(5, 9)
    right = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    step = {"input_ids": torch.full((2, 1), 7)}
    with torch.no_grad():
        plain(**inputs, **with_cache(dynamic)), model(**inputs, **with_cache(cache))
        shows = right.clone()
        shows[0, 3:] = 1
        with pytest.raises(ValueError, match="shows tokens where it showed pads"):
            model(**step, attention_mask=shows, **with_cache(cache))
        with pytest.raises(ValueError, match="pads"):  # the library may turn it into no mask
            model(**step, attention_mask=torch.ones_like(right), **with_cache(cache))
        with pytest.raises(ValueError, match="Pass the full attention_mask"):
            model(**step, **with_cache(cache))
        assert cache.get_seq_length() == 9
        cache.check()
        step["attention_mask"] = right
        expected = plain(**step, **with_cache(dynamic)).logits
        torch.testing.assert_close(expected, model(**step, **with_cache(cache)).logits, atol=1e-4, rtol=0)


def test_another_batch_size_is_refused():
    model = build("llama", attn="hf_paged")
    cache = PagedCache(model.config)
    with torch.no_grad():
        model(**prompts(5, 5), **with_cache(cache))
        with pytest.raises(ValueError, match=r"holds 2 rows, but this forward has 3\..*batch_repeat_interleave"):
            model(input_ids=torch.full((3, 1), 7), **with_cache(cache))
        assert cache.get_seq_length() == 5
        cache.check()
        model(input_ids=torch.full((2, 1), 7), **with_cache(cache))
    assert cache.get_seq_length() == 6


# -- encoder-decoder ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoder_models(family):
    """Unwrapped, self- and cross-attention would share layers: refused. Wrapped it is right."""
    plain = build(family)
    inputs = prompts(5, 9, side="right")
    step = {**inputs, "decoder_input_ids": torch.tensor([[0, 5], [0, 7]])}
    with torch.no_grad(), pytest.raises(RuntimeError, match="EncoderDecoderCache"):
        plain(**step, **with_cache(PagedCache(plain.config)))
    wrapped = compat.EncoderDecoderCache(PagedCache(plain.config), compat.DynamicCache(config=plain.config))
    options = {"max_new_tokens": 8, "num_beams": 2, "return_dict_in_generate": True, "output_logits": True}
    expected = run(plain, inputs, **options)
    assert_close(expected, run(plain, {**inputs, **with_cache(wrapped)}, **options))
    wrapped.self_attention_cache.check()
    paged = hf_paged.patch(copy.deepcopy(plain))
    cache = PagedCache(plain.config)
    got = run(paged, {**inputs, **with_cache(cache)}, **options)
    assert_close(expected, got)
    assert cache_of(got).self_attention_cache is cache and cache.get_seq_length() > 0


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoder_crop_leaves_the_cross_attention_alone(family):
    """E4."""
    model = build(family)
    cache = compat.EncoderDecoderCache(PagedCache(model.config), compat.DynamicCache(config=model.config))
    with torch.no_grad():
        model(**prompts(9), decoder_input_ids=torch.tensor([[0, 5, 6, 7]]), **with_cache(cache))
    cache.crop(-2)
    assert cache.self_attention_cache.get_seq_length() == 2
    assert cache.cross_attention_cache.get_seq_length() == 9


def fill(model, inputs, cache):
    """Run a prompt through the model, with the positions that `generate` would give."""
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(**inputs, position_ids=positions, **with_cache(cache))


# -- a cache across calls ----------------------------------------------------------------------------------------------


def continue_with(model, cache, prompt, more, new=8):
    """Generate from a cache that holds all of `prompt` but for what `more` adds."""
    ids = torch.cat([prompt, more], 1)
    output = run(
        model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **with_cache(cache)}, max_new_tokens=new
    )
    return output[:, ids.shape[1] :]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_deepcopy_is_a_fork(family):
    """F4: two continuations of copies, then the original: each equal, blocks shared, nothing copied until a write."""
    plain, model = build(family), build(family, attn="hf_paged")
    prompt = prompts(14)["input_ids"]
    dynamic, cache = compat.DynamicCache(config=plain.config), PagedCache(model.config, PagedConfig(block_size=4))
    with torch.no_grad():
        plain(prompt, **with_cache(dynamic)), model(prompt, **with_cache(cache))
    used, allocated = cache.stats().used_blocks, cache.stats().bytes_allocated
    forks = [copy.deepcopy(cache), copy.copy(cache), cache]
    stats = cache.pool.stats()
    assert stats.used_blocks == stats.shared_blocks == used
    assert stats.bytes_allocated == allocated and stats.cow_copies == 0
    seen = []
    for fork, more in zip(forks, ([[5, 9]], [[5, 9, 13]], [[40]]), strict=True):
        more = torch.tensor(more)
        expected = continue_with(plain, copy.deepcopy(dynamic), prompt, more)
        got = continue_with(model, fork, prompt, more)
        assert torch.equal(expected, got)
        seen.append(got.tolist())
        fork.check()
    assert cache.pool.stats().cow_copies > 0  # 14 is no multiple of 4
    del fork, forks
    assert cache.pool.stats().used_blocks == cache.stats().used_blocks


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_chat_of_four_turns_runs_only_new_tokens(family, patched):
    """F2: the whole history as input each time, and the same cache."""
    plain = build(family)
    model = hf_paged.patch(copy.deepcopy(plain), block_size=4) if patched else build(family, attn="hf_paged")
    cache = PagedCache(model.config, PagedConfig(block_size=4))
    counts = []
    observe(model, model.model.layers[0].self_attn.q_proj, lambda args, kwargs: counts.append(args[0].shape[1]))
    history = torch.empty(1, 0, dtype=torch.int64)
    for turn in range(4):
        history = torch.cat([history, prompts(6, seed=turn)["input_ids"]], 1)
        inputs = {"input_ids": history, "attention_mask": torch.ones_like(history)}
        expected = run(plain, inputs, max_new_tokens=5)
        counts.clear()
        got = run(model, {**inputs, **with_cache(cache)}, max_new_tokens=5)
        assert torch.equal(expected, got)
        new = got.shape[1] - history.shape[1]
        assert counts == [6 + (turn > 0), *[1] * (new - 1)]
        history = got
        assert cache.get_seq_length() == history.shape[1] - 1
        cache.check()


# With `past_key_values` the library feeds a chunked prompt from its start, whatever the cache holds.
CHUNKED = [{"prefill_chunk_size": 3}] if compat.CACHE_ARGUMENT == "cache" else []


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, *CHUNKED], ids=str)
def test_ids_that_are_all_in_the_cache(options):
    """F1: one token is computed again, none is added twice."""
    plain, paged = pair("llama", block_size=4)
    inputs = prompts(5, 12)
    expected = run(plain, inputs, max_new_tokens=6, **options)
    cache = PagedCache(paged.config, pool=paged.paged_pool)
    fill(paged, inputs, cache)
    assert cache.get_seq_length() == 12
    assert torch.equal(expected, run(paged, {**inputs, **with_cache(cache)}, max_new_tokens=6, **options))
    assert cache.get_seq_length() == expected.shape[1] - 1
    longer = run(paged, {**inputs, **with_cache(cache)}, max_new_tokens=6, **options)  # a cache longer than the ids
    assert torch.equal(expected, longer)
    cache.check()


def test_ids_that_are_all_in_a_cache_that_lets_go():
    """F1 with a sliding window: what has left it cannot come back, and the error says what to do."""
    _, paged = pair("mistral", block_size=4)
    cache = PagedCache(paged.config, pool=paged.paged_pool)
    with torch.no_grad():
        paged(**prompts(12), **with_cache(cache))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        run(paged, {**prompts(12), **with_cache(cache)}, max_new_tokens=6)


@pytest.mark.parametrize("copies", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_continuing_from_a_filled_cache_with_copies(family, copies):
    """The public way to compute a prompt once; `patch` needs no repeat by hand."""
    plain, paged = pair(family, block_size=4)
    inputs = prompts(5, 12)
    expected = run(plain, inputs, max_new_tokens=6, **copies)
    head = {name: entry[:, :-1] for name, entry in inputs.items()}
    for by_hand in (True, False):
        cache = PagedCache(paged.config, pool=paged.paged_pool)
        fill(paged, head, cache)
        if by_hand:
            cache.batch_repeat_interleave(3)
        got = run(paged, {**inputs, **with_cache(cache)}, max_new_tokens=6, **copies)
        assert torch.equal(expected, got)
        cache.check()


def test_reset_gives_everything_back():
    model = build("llama", attn="hf_paged")
    cache = PagedCache(model.config, PagedConfig(block_size=4))
    first = run(model, {**prompts(5, 12), **with_cache(cache)}, max_new_tokens=6)
    assert cache.stats().used_blocks > 0
    cache.reset()
    assert cache.stats().used_blocks == cache.get_seq_length() == 0
    assert torch.equal(first, run(model, {**prompts(5, 12), **with_cache(cache)}, max_new_tokens=6))
    cache.reset()
    run(model, {**prompts(3), **with_cache(cache)}, max_new_tokens=2)  # another batch size


def test_finished_rows_keep_their_blocks_in_a_cache_of_the_user():
    """The user may go on from it, so nothing is freed and pads are masked as the library does."""
    plain, paged = pair("llama", block_size=2)
    for model in (plain, paged):
        likely_eos(model, 3.0)
    dynamic, cache = compat.DynamicCache(config=plain.config), PagedCache(paged.config, pool=paged.paged_pool)
    expected = run(plain, {**prompts(3, 8, 11), **with_cache(dynamic)}, max_new_tokens=16, do_sample=True)
    got = run(paged, {**prompts(3, 8, 11), **with_cache(cache)}, max_new_tokens=16, do_sample=True)
    assert torch.equal(expected, got)
    assert cache.get_seq_length() == dynamic.get_seq_length()
    for row, tables in enumerate(cache.state.tables[0].rows):
        assert tables.blocks, f"row {row} gave its blocks back"


# -- out of blocks -----------------------------------------------------------------------------------------------------


def contents(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_pool_one_block_short(family):
    """B12: the error names needed and free blocks, the cache is as before, and later the same call works."""
    plain, model = build(family), build(family, attn="hf_paged")
    pool = KVPool(model.config, PagedConfig(block_size=4, num_blocks=4))
    cache, other = PagedCache(model.config, pool=pool), PagedCache(model.config, pool=pool)
    dynamic = compat.DynamicCache(config=plain.config)
    prompt = prompts(11)["input_ids"]
    step = torch.tensor([[5, 9]])
    with torch.no_grad():
        plain(prompt, **with_cache(dynamic)), model(prompt, **with_cache(cache))
        model(prompts(3)["input_ids"], **with_cache(other))
        before = contents(cache)
        with pytest.raises(OutOfBlocks, match="num_blocks") as caught:
            model(step, **with_cache(cache))
        assert (caught.value.needed, caught.value.free, caught.value.total) == (1, 0, 4)
        assert isinstance(caught.value, RuntimeError)
        del caught
        cache.check()
        other.check()
        assert [cache.get_seq_length(index) for index in range(len(cache))] == [11] * len(cache)
        for left, right in zip(before, contents(cache), strict=True):
            assert torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])
        del other
        expected = plain(step, **with_cache(dynamic)).logits
        torch.testing.assert_close(expected, model(step, **with_cache(cache)).logits, atol=1e-4, rtol=0)
    cache.check()


def test_groups_get_their_blocks_together_or_not_at_all():
    """The sliding group comes first and has room, the full one has not: neither has taken anything."""
    model = build("gemma3", attn="hf_paged")
    cache = PagedCache(model.config, PagedConfig(block_size=2, num_blocks=8))
    sliding, full = (group.blocks for group in cache.pool.groups)
    assert cache.pool.groups[0].window == 8
    with torch.no_grad():
        model(prompts(8)["input_ids"], **with_cache(cache))
        for _ in range(4):
            model(torch.tensor([[5, 7]]), **with_cache(cache))
        assert full.free_blocks == 0 and sliding.free_blocks >= 3
        before, used = contents(cache), sliding.used_blocks
        with pytest.raises(OutOfBlocks):
            model(torch.tensor([[9]]), **with_cache(cache))
    assert sliding.used_blocks <= used
    assert cache.get_seq_length() == 16
    for left, right in zip(before, contents(cache), strict=True):
        assert torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])
    cache.check()


def test_the_first_forward_fails_and_the_cache_stays_empty():
    plain, model = build("llama"), build("llama", attn="hf_paged")
    cache = PagedCache(model.config, PagedConfig(block_size=4, num_blocks=4))
    with torch.no_grad(), pytest.raises(OutOfBlocks):
        model(**prompts(12, 17), **with_cache(cache))
    assert cache.get_seq_length() == cache.stats().used_blocks == 0
    cache.check()
    expected = run(plain, prompts(5), max_new_tokens=4)
    assert torch.equal(expected, run(model, {**prompts(5), **with_cache(cache)}, max_new_tokens=4))


def test_the_memory_budget_is_never_exceeded():
    """A token of this model takes 512 bytes: 20,000 bytes hold 8 blocks of 4 tokens and the null block."""
    budget = 20_000
    plain, paged = pair("llama", block_size=4, memory_budget=budget)
    assert_equal(plain, paged, prompts(12), max_new_tokens=8)
    assert paged.paged_stats().num_blocks == 8
    for length in (30, 40):
        with pytest.raises(OutOfBlocks, match="memory_budget"):
            run(paged, prompts(length), max_new_tokens=20, min_new_tokens=20)
        gc.collect()
        assert 0 < paged.paged_stats().bytes_allocated <= budget
        assert paged.paged_stats().used_blocks == 0
    assert_equal(plain, paged, prompts(12), max_new_tokens=8, num_beams=2)
    with pytest.raises(ValueError, match="Raise memory_budget or lower block_size"):
        run(hf_paged.patch(copy.deepcopy(plain), memory_budget=1000), prompts(5), max_new_tokens=2)


# -- in the middle of a forward ----------------------------------------------------------------------------------------


def test_a_layer_that_is_behind_can_be_read():
    """Layer 0 has begun a step that copies a shared block and makes the stores grow; layer 1 shows what it held."""
    model = build("llama", attn="hf_paged")
    cache = PagedCache(model.config, PagedConfig(block_size=4))
    with torch.no_grad():
        model(prompts(6)["input_ids"], **with_cache(cache))
        cache.batch_repeat_interleave(3)
        before = cache.layers[1].keys
        new = torch.randn(3, 2, 30, 16)
        keys, _ = cache.update(new, new, 0)
        keys + 0  # layer 0 writes
        assert torch.equal(cache.layers[1].keys, before)
        keys, _ = cache.update(new, new, 1)
        assert torch.equal(keys[:, :, :6] + 0, before) and torch.equal(keys[:, :, 6:] + 0, new)


@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [0, 1], [0, 3]], ids=str)
def test_a_model_with_fewer_layers_than_its_config_says(kept):
    """Layers were taken out by hand: what the config names beside them stays empty."""
    plain = build("llama", num_hidden_layers=4)
    plain.model.layers = torch.nn.ModuleList([plain.model.layers[index] for index in kept])
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    for inputs in (prompts(9), prompts(20, 9, 14)):  # the second time prefixes are found, and rows are packed
        for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}):
            assert_equal(plain, paged, inputs, max_new_tokens=6, **options)
    assert paged.paged_stats().fallbacks == {} and paged.paged_stats().prefix_hit_tokens
    cache = PagedCache(paged.config, pool=paged.paged_pool)
    run(paged, {**prompts(9), **with_cache(cache)}, max_new_tokens=6)
    assert cache.get_seq_length() == 14
    for each in (cache, copy.deepcopy(cache)):
        each.check()
        assert [index for index, layer in enumerate(each.layers) if layer.keys is not None] == kept


def _steps(model, cache, ids, mask):
    """Logits of a prompt, and of further forwards under one mask that does not grow."""
    logits = [model(input_ids=ids, **with_cache(cache)).logits]
    for count in (1, 3, 1):
        logits.append(model(input_ids=ids[:, :count], attention_mask=mask, **with_cache(cache)).logits)
    return logits


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_masks_shorter_than_the_ids(family, attn):
    """To the library they hide what they do not name; a later one may show it."""
    plain, paged = pair(family, attn=attn, block_size=4)
    ids = prompts(11, 11)["input_ids"]
    for length in (1, 8, 11):
        for lead in (0, 1):
            mask = torch.ones(2, length, dtype=torch.long)
            mask[0, :lead] = 0
            inputs = {"input_ids": ids, "attention_mask": mask}
            for options in (
                ({}, {"num_beams": 3}) if length in (1, 11) else ()
            ):  # else the library's positions do not fit
                assert_equal(plain, paged, inputs, max_new_tokens=6, **options)
            with torch.no_grad():
                expected = _steps(plain, compat.DynamicCache(config=plain.config), ids, mask)
                got = _steps(paged, PagedCache(paged.config, pool=paged.paged_pool), ids, mask)
            for left, right in zip(expected, got, strict=True):
                torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_a_whole_mask_is_no_reason_to_be_dense():
    _, paged = pair("llama", block_size=4)
    run(paged, {"input_ids": prompts(9)["input_ids"], "attention_mask": torch.ones(1, 9)}, max_new_tokens=4)
    assert paged.paged_stats().fallbacks == {}
