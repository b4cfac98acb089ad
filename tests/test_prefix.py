"""A prompt is computed and stored once: across calls, within a call, and without its pads."""

import copy
import itertools
import random

import pytest
import torch
import transformers
from models import (
    EOS,
    VOCAB,
    Computed,
    assert_close,
    assert_equal,
    build,
    cache_of,
    config_of,
    forbid_dense,
    likely_eos,
    observe,
    pair,
    prompts,
    run,
    with_cache,
)

import hf_paged
from hf_paged import PagedCache, compat, prefill
from hf_paged.blocks import PrefixIndex

pytestmark = pytest.mark.filterwarnings("ignore:hf_paged")
FAMILIES = [
    "llama", "mistral", "gemma2", "gemma3", "qwen3", "gpt2", "gpt_oss", "gpt_neox", "bloom", "mpt", "falcon", "opt",
    "deepseek_v3",
]  # fmt: skip


def ids_of(*rows):
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.ones(len(rows), len(rows[0]), dtype=torch.long)}


def random_row(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- packed prefill ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("model_type", sorted(prefill.PACKED_TYPES))
def test_every_type_that_is_packed(model_type, window):
    """In one forward, in chunks, and from what the index has; `window` is set on models that do not heed it, too."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {model_type}")
    config = config_of(model_type)
    if window is not None:
        if not hasattr(config, "sliding_window"):
            pytest.skip("no sliding window")
        config = config_of(model_type, sliding_window=window)
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in plain.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15, generator=generator)
    inputs = prompts(3, 21, 9, 1)
    everything = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    expected = run(plain, inputs, **everything)
    for limit in (8192, 7):
        paged = hf_paged.patch(copy.deepcopy(plain), block_size=4, num_blocks=64, max_packed_tokens=limit)
        for _ in range(2):
            assert_close(expected, run(paged, inputs, **everything))
        assert paged.paged_stats().fallbacks == {}
        paged.paged_pool.check()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_pads_are_not_computed(family, options, monkeypatch):
    plain, paged = pair(family, block_size=4, prefix_caching=False)
    inputs = prompts(3, 21, 9, 1)
    assert_equal(plain, paged, inputs, max_new_tokens=6, **options)
    count = Computed(paged)
    run(paged, inputs, max_new_tokens=1)
    assert count.since() == 3 + 21 + 9 + 1
    assert paged.paged_stats().fallbacks == {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", [1, 5, 8])
def test_a_pack_goes_in_chunks(family, limit):
    plain, paged = pair(family, block_size=4, max_packed_tokens=limit)
    assert_equal(plain, paged, prompts(3, 21, 9, 1), max_new_tokens=5)


def test_a_user_s_chunk_size_bounds_the_pack():
    plain, paged = pair("llama", block_size=4)
    assert_equal(plain, paged, prompts(3, 21, 9), max_new_tokens=4, prefill_chunk_size=4)
    longest = []
    observe(paged, paged.model, lambda args, kwargs: longest.append(kwargs["input_ids"].shape[1]), before=True)
    run(paged, prompts(4, 22, 7, seed=9), max_new_tokens=1, prefill_chunk_size=4)
    assert max(longest) == 4


def test_a_family_that_is_not_packed_says_so_once():
    plain, paged = pair("falcon_alibi", block_size=4)
    assert_equal(plain, paged, prompts(3, 12, 7), max_new_tokens=5)
    (reason,) = (reason for reason in paged.paged_stats().fallbacks if "made dense" not in reason)
    assert "not packed" in reason


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_packed_rows_reach_every_backend(backend):
    plain, paged = pair("gemma2", block_size=2, backend=backend)
    assert_equal(plain, paged, prompts(30, 4, 17), max_new_tokens=5)


# -- within one call --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "opt", "gemma3"])
def test_equal_rows_are_computed_once(family):
    """C12: [P, P] in one batch, and another row between them."""
    plain, paged = pair(family, block_size=4, prefix_caching=False)
    one, other = random_row(13, 1), random_row(13, 2)
    inputs = ids_of(one, other, one)
    assert_equal(plain, paged, inputs, max_new_tokens=6)
    assert_equal(plain, paged, inputs, max_new_tokens=6, do_sample=True, num_return_sequences=2)
    count = Computed(paged)
    run(paged, inputs, max_new_tokens=1)
    assert count.since() == 26


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_common_prefix_is_computed_and_stored_once(family):
    plain, paged = pair(family, block_size=4, prefix_caching=False)
    header = random_row(40, 1)
    inputs = ids_of(*(header + random_row(5, seed) for seed in range(2, 6)))
    assert_equal(plain, paged, inputs, max_new_tokens=6)
    count = Computed(paged)
    out = run(paged, inputs, max_new_tokens=1, return_dict_in_generate=True)
    assert count.since() == 40 + 4 * 5
    if family == "llama":
        assert paged.paged_stats().used_blocks == 10 + 4 * 2
    del out


def test_a_common_prefix_in_a_ragged_batch():
    plain, paged = pair("llama", block_size=4, prefix_caching=False)
    header = random_row(37, 1)
    rows = [header + random_row(length, length) for length in (1, 12, 6)]
    longest = max(map(len, rows))
    inputs = {
        "input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }
    assert_equal(plain, paged, inputs, max_new_tokens=6)
    assert_equal(plain, paged, inputs, max_new_tokens=6, num_beams=2)
    count = Computed(paged)
    run(paged, inputs, max_new_tokens=1)
    assert count.since() == 37 + 1 + 12 + 6


def test_a_row_that_is_the_beginning_of_all_others():
    plain, paged = pair("llama", block_size=4)
    row = random_row(50, 1)
    inputs = {
        "input_ids": torch.tensor([[0] * 10 + row[:40], row]),
        "attention_mask": torch.tensor([[0] * 10 + [1] * 40, [1] * 50]),
    }
    assert_equal(plain, paged, inputs, max_new_tokens=6)


def test_prompt_once_can_be_switched_off():
    plain, paged = pair("llama", block_size=4, prompt_once=False, prefix_caching=False)
    row = random_row(40, 1)
    count = Computed(paged)
    assert_equal(plain, paged, ids_of(row, row), max_new_tokens=4)
    count.since()
    run(paged, ids_of(row, row), max_new_tokens=1)
    assert count.since() == 80


# -- across calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("family", [*FAMILIES, "opt"])
def test_a_retry_computes_one_token(family, length):
    """C1, C2: the whole prompt is there; one token is computed, and lengths are those of a cold run."""
    plain, paged = pair(family, block_size=4)
    inputs = ids_of(random_row(length, 1))
    count = Computed(paged)
    expected = run(plain, inputs, max_new_tokens=5)
    assert torch.equal(expected, run(paged, inputs, max_new_tokens=5))
    count.since()
    out = run(paged, inputs, max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(expected, out.sequences)
    assert count.since() == expected.shape[1] - length  # the last token that is generated is not fed
    cold = run(plain, inputs, max_new_tokens=5, return_dict_in_generate=True)
    assert cache_of(out).get_seq_length() == cache_of(cold).get_seq_length()
    stats = paged.paged_stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (2 * length, length - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_turn_computes_what_is_new(family):
    plain, paged = pair(family, block_size=4)
    count = Computed(paged)
    history = random_row(20, 1)
    for turn in range(4):
        history = history + random_row(6, 10 + turn)
        expected = run(plain, ids_of(history), max_new_tokens=5)
        count.since()
        got = run(paged, ids_of(history), max_new_tokens=5)
        assert torch.equal(expected, got)
        # The last token that was generated was never fed, so it is new as well.
        assert count.since() == (26 if turn == 0 else 6 + 1) + got.shape[1] - len(history) - 1
        history = got[0].tolist()
    paged.paged_pool.check()
    assert paged.paged_stats().used_blocks == 0


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss", "opt"])
def test_a_system_prompt_is_found_by_ragged_batches(family, options):
    """C13: hits are of tokens and positions; no pad enters a key."""
    plain, paged = pair(family, block_size=4)
    header = random_row(18, 1)
    run(paged, ids_of(header + random_row(3, 2)), max_new_tokens=2)
    rows = [header + random_row(length, length) for length in (4, 9, 1)] + [random_row(7, 77)]
    longest = max(map(len, rows))
    inputs = {
        "input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }
    before = paged.paged_stats().prefix_hit_tokens
    expected = run(plain, inputs, max_new_tokens=6, **options)
    assert torch.equal(expected, run(paged, inputs, max_new_tokens=6, **options))
    assert paged.paged_stats().prefix_hit_tokens > before
    assert torch.equal(expected, run(paged, inputs, max_new_tokens=6, **options))
    paged.paged_pool.check()
    assert paged.paged_stats().used_blocks == 0


def test_pads_and_tokens_of_the_same_id_are_not_mixed_up():
    plain, paged = pair("llama", block_size=2)
    rows = [[0, 0, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10]]
    for mask in ([[0, 0, 1, 1, 1, 1], [1] * 6], [[1] * 6, [1] * 6], [[0, 1, 1, 1, 1, 1], [1] * 6]):
        inputs = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
        assert torch.equal(run(plain, inputs, max_new_tokens=5), run(paged, inputs, max_new_tokens=5))


def test_rows_that_finish_early_are_found_too():
    plain, paged = pair("llama", block_size=4)
    likely_eos(plain, 3.0), likely_eos(paged, 3.0)
    inputs = prompts(9, 12, 6, 10)
    first = run(paged, inputs, max_new_tokens=12)
    assert torch.equal(run(plain, inputs, max_new_tokens=12), first)
    lengths = [(row == EOS).nonzero() for row in first]
    assert any(len(entry) for entry in lengths), "some row must finish"
    for row, mask in zip(first, inputs["attention_mask"], strict=True):
        tokens = row[12 - int(mask.sum()) :].tolist()
        if EOS in tokens:
            tokens = tokens[: tokens.index(EOS)]
        turn = ids_of([*tokens, 50, 51])
        assert torch.equal(run(plain, turn, max_new_tokens=4), run(paged, turn, max_new_tokens=4))
    paged.paged_pool.check()


def test_assisted_and_chunked_and_streamed_calls_leave_right_prefixes():
    plain, paged = pair("llama", block_size=4)
    inputs = ids_of(random_row(24, 1))
    for options in ({"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 5}, {"guidance_scale": 1.5}, {}):
        expected = run(plain, inputs, max_new_tokens=8, **options)
        assert torch.equal(expected, run(paged, inputs, max_new_tokens=8, **options))
        turn = ids_of([*expected[0].tolist(), 7, 8, 9])
        assert torch.equal(run(plain, turn, max_new_tokens=4), run(paged, turn, max_new_tokens=4))
    paged.paged_pool.check()


def test_sliding_models_hit_beyond_the_window():
    plain, paged = pair("mistral", block_size=2)
    history = random_row(30, 1)
    count = Computed(paged)
    expected = run(plain, ids_of(history), max_new_tokens=12)
    assert torch.equal(expected, run(paged, ids_of(history), max_new_tokens=12))
    count.since()
    turn = ids_of([*expected[0].tolist(), 7, 8])
    assert torch.equal(run(plain, turn, max_new_tokens=3), run(paged, turn, max_new_tokens=3))
    assert count.since() == 3 + 2
    other = ids_of([*history[:17], 9, 9, 9])
    assert torch.equal(run(plain, other, max_new_tokens=3), run(paged, other, max_new_tokens=3))
    paged.paged_pool.check()


def test_prefix_caching_can_be_switched_off():
    _, paged = pair("llama", prefix_caching=False)
    inputs = ids_of(random_row(20, 1))
    count = Computed(paged)
    for _ in range(2):
        run(paged, inputs, max_new_tokens=1)
        assert count.since() == 20
    stats = paged.paged_stats()
    assert (stats.prefix_query_tokens, stats.cached_blocks) == (0, 0)


# -- identity ---------------------------------------------------------------------------------------------------------


def twice(plain, paged, change):
    """Fill the index, change something, and compare with a cold model that had the same change."""
    inputs = ids_of(random_row(20, 1))
    run(paged, inputs, max_new_tokens=3)
    for model in (plain, paged):
        change(model)
    hits = paged.paged_stats().prefix_hit_tokens
    assert torch.equal(run(plain, inputs, max_new_tokens=6), run(paged, inputs, max_new_tokens=6))
    return paged.paged_stats().prefix_hit_tokens - hits


def test_an_optimizer_step_invalidates():
    def step(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ids = torch.arange(3, 20)[None]
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        model.zero_grad()

    assert twice(*pair("llama", num_blocks=32), step) == 0


def test_loading_weights_invalidates():
    other = build("llama", seed=9).state_dict()
    assert twice(*pair("llama", num_blocks=32), lambda model: model.load_state_dict(other)) == 0


def test_weights_changed_behind_pytorch_s_back_need_a_reset():
    plain, paged = pair("llama", num_blocks=32)

    def change(model):
        for parameter in model.parameters():
            parameter.data.mul_(-1)
        if model is paged:
            model.paged_pool.reset_prefix_cache()

    assert twice(plain, paged, change) == 0
    assert paged.paged_stats().cached_blocks > 0


def test_nothing_changed_hits():
    assert twice(*pair("llama", num_blocks=32), lambda model: None) == 19


def test_salt_separates():
    _, paged = pair("llama", num_blocks=32)
    inputs = ids_of(random_row(20, 1))
    hits = []
    for salt in ("a", "b", "a"):
        before = paged.paged_stats().prefix_hit_tokens
        with hf_paged.prefix_salt(salt):
            run(paged, inputs, max_new_tokens=1)
        hits.append(paged.paged_stats().prefix_hit_tokens - before)
    assert hits == [0, 0, 19]


def test_autocast_is_part_of_the_identity():
    plain, paged = pair("llama", num_blocks=32)
    inputs = ids_of(random_row(20, 1))
    run(paged, inputs, max_new_tokens=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(plain, inputs, max_new_tokens=6), run(paged, inputs, max_new_tokens=6))
    assert paged.paged_stats().prefix_hit_tokens == 0


def test_adapters():
    """C4: switched, disabled, and reloaded under the same name with other weights."""
    peft = pytest.importorskip("peft", exc_type=ImportError)

    def adapter(seed):
        torch.manual_seed(seed)
        return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

    def model():
        wrapped = peft.get_peft_model(build("llama"), adapter(1), adapter_name="one")
        torch.manual_seed(2)
        wrapped.add_adapter("two", adapter(2))
        for name, parameter in wrapped.named_parameters():
            if "lora" in name:
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                parameter.data.normal_(0, 0.3, generator=generator)
        return wrapped.eval()

    plain, paged = model(), hf_paged.patch(model(), num_blocks=64)
    inputs = ids_of(random_row(20, 1))

    def compare():
        assert torch.equal(run(plain, inputs, max_new_tokens=6), run(paged, inputs, max_new_tokens=6))

    for name in ("one", "two", "one"):
        plain.set_adapter(name), paged.set_adapter(name)
        compare()
    with plain.disable_adapter(), paged.disable_adapter():
        compare()
    for wrapped in (plain, paged):
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B.one" in name:
                    parameter.add_(0.5)
    compare()
    plain.merge_adapter(), paged.merge_adapter()
    compare()
    plain.unmerge_adapter(), paged.unmerge_adapter()
    compare()


@pytest.mark.parametrize(
    "extra",
    [
        {"position_ids": torch.arange(5, 25)[None]},
        {"token_type_ids": torch.zeros(1, 20, dtype=torch.long)},
    ],
    ids=["position_ids", "token_type_ids"],
)
def test_what_ids_do_not_identify_is_not_cached(extra):
    family = "llama" if "position_ids" in extra else "gpt2"
    plain, paged = pair(family, num_blocks=32)
    inputs = ids_of(random_row(20, 1))
    for given in ({}, extra, {}):
        assert torch.equal(run(plain, inputs, max_new_tokens=5, **given), run(paged, inputs, max_new_tokens=5, **given))
    stats = paged.paged_stats()
    assert stats.prefix_hit_tokens == 19, "the third call finds the first one's"


def test_embeddings_are_found_by_their_content():
    """C7: other vectors behind the same mask are another prompt; equal ones are the same."""
    plain, paged = pair("llama", block_size=4, num_blocks=64)
    count = Computed(paged)
    embeds = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(1))
    changed = embeds.clone()
    changed[0, 7, 3] += 1e-3
    for vectors, computed in ((embeds, 12), (-embeds, 12), (embeds, 1), (changed, 5), (embeds[:, :9], 1)):
        inputs = {"inputs_embeds": vectors, "attention_mask": torch.ones(vectors.shape[:2], dtype=torch.long)}
        for options in ({}, {"num_beams": 3}):
            count.since()
            expected = run(plain, inputs, max_new_tokens=1, **options)
            assert torch.equal(expected, run(paged, inputs, max_new_tokens=1, **options))
            assert count.since() == computed
            computed = 1  # the second call finds all of it
        expected = run(plain, inputs, max_new_tokens=6, num_beams=2)
        assert torch.equal(expected, run(paged, inputs, max_new_tokens=6, num_beams=2))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 3, "do_sample": True}], ids=["greedy", "samples"])
def test_ragged_embeddings_behind_a_common_prefix(family, options):
    plain, paged = pair(family, block_size=4)
    table = plain.get_input_embeddings()
    header, tails = random_row(40, 1), prompts(5, 11, 2, 5)
    tails["input_ids"][3] = tails["input_ids"][0]
    lead = (tails["attention_mask"] == 0).sum(1)
    ids = torch.stack(
        [
            torch.cat([row[:pads], torch.tensor(header), row[pads:]])
            for row, pads in zip(tails["input_ids"], lead, strict=True)
        ]
    )
    mask = (torch.arange(ids.shape[1]) >= lead[:, None]).long()
    inputs = {"inputs_embeds": table(ids).detach(), "attention_mask": mask}
    count = Computed(paged)
    assert torch.equal(run(plain, inputs, max_new_tokens=1, **options), run(paged, inputs, max_new_tokens=1, **options))
    assert count.since() == 40 + 5 + 11 + 2, "the header once, no pads, the equal row not at all"
    assert_equal(plain, paged, inputs, max_new_tokens=6, **options)


def test_ids_and_their_embeddings_do_not_meet_in_the_index():
    plain, paged = pair("llama", block_size=4, num_blocks=64)
    ids = ids_of(random_row(12, 1))
    embeds = {**ids, "inputs_embeds": plain.get_input_embeddings()(ids["input_ids"]).detach()}
    del embeds["input_ids"]
    count = Computed(paged)
    for inputs, computed in ((ids, 12), (embeds, 12), (ids, 1), (embeds, 1)):
        count.since()
        assert torch.equal(run(plain, inputs, max_new_tokens=1), run(paged, inputs, max_new_tokens=1))
        assert count.since() == computed


def test_embeddings_beside_ids_are_not_cached():
    """Whoever gives both is not understood: the library takes the vectors, and the ids say nothing of them."""
    plain, paged = pair("llama", block_size=4)
    ids = ids_of(random_row(12, 1))
    for seed in (1, 2):
        embeds = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(seed))
        inputs = {**ids, "inputs_embeds": embeds}
        assert torch.equal(run(plain, inputs, max_new_tokens=5), run(paged, inputs, max_new_tokens=5))
    assert paged.paged_stats().cached_blocks == 0


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}], ids=str)
def test_rope_that_depends_on_the_length(rope):
    overrides = {"rope_parameters": rope, "max_position_embeddings": 24}
    plain, paged = pair("llama", overrides=overrides, block_size=4)
    for length in (16, 30, 18, 40, 22):
        row = random_row(48, 1)[:length]
        for _ in range(2):
            expected = run(plain, ids_of(row), max_new_tokens=5)
            assert torch.equal(expected, run(paged, ids_of(row), max_new_tokens=5))
    inputs = prompts(30, 11, 20)
    assert torch.equal(run(plain, inputs, max_new_tokens=5), run(paged, inputs, max_new_tokens=5))


LIMIT = 24
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    "longrope": {**LONGROPE, "original_max_position_embeddings": LIMIT, "factor": 2.0},
}


@pytest.mark.parametrize("before", [0, LIMIT + 9], ids="a call of {} before".format)
@pytest.mark.parametrize("kind", ROPES)
def test_rope_at_just_its_original_length(kind, before):
    """A dynamic one that a longer call has stretched goes back for a sequence that is shorter, not for this one."""
    longest = LIMIT if kind == "dynamic" else 2 * LIMIT
    overrides = {"rope_parameters": ROPES[kind], "max_position_embeddings": longest}
    everything = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 2}
    row = random_row(LIMIT + 9, 1)
    for length in (LIMIT - 1, LIMIT, LIMIT + 1):
        for inputs, options in (
            (ids_of(row[:length]), {}),
            (ids_of(row[:length]), {"num_beams": 3}),
            (prompts(length, 7, length - 5), {}),
        ):
            plain, paged = pair("llama", overrides=overrides, block_size=4)
            for each in (plain, paged) if before else ():
                run(each, ids_of(row[:before]), max_new_tokens=1)
            for shown in (inputs, ids_of(row[: LIMIT + 9]), inputs, ids_of(row[:10]), inputs):
                expected, got = run(plain, shown, **everything, **options), run(paged, shown, **everything, **options)
                assert_close(expected, got)


@pytest.mark.parametrize("kind", ROPES)
def test_rope_below_its_original_length_is_shared(kind):
    overrides = {"rope_parameters": ROPES[kind], "max_position_embeddings": LIMIT}
    _, paged = pair("llama", overrides=overrides, block_size=4)
    row = random_row(LIMIT, 1)
    for _ in range(3):  # in the first the library makes a tensor, so that the model is another then
        run(paged, ids_of(row[: LIMIT - 1]), max_new_tokens=1, num_beams=3)
    assert paged.paged_stats().prefix_hit_tokens >= LIMIT - 2
    assert not paged.paged_stats().fallbacks


def test_a_constant_hash_still_gives_right_answers(monkeypatch):
    """C3."""
    plain, paged = pair("llama", block_size=2)
    pool = paged.paged_pool
    windows = [group.window for group in pool.groups]
    pool.index = PrefixIndex([group.blocks for group in pool.groups], windows, 2, lambda tokens: 0)
    for seed in range(6):
        for length in (9, 14):
            inputs = ids_of(random_row(4, 1) + random_row(length, seed))
            assert torch.equal(run(plain, inputs, max_new_tokens=4), run(paged, inputs, max_new_tokens=4))
    assert paged.paged_stats().prefix_hit_tokens > 0
    pool.check()


# -- a pool under pressure ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "calls"), [("llama", 1000), ("gemma3", 150)])
def test_random_calls_over_a_small_pool(family, calls):
    """Every output equals the cold one, invariants hold after each call, and nothing is in use at the end."""
    plain, paged = pair(family, block_size=4, num_blocks=64)
    chance = random.Random(1)
    headers = [random_row(length, length) for length in (11, 24)]
    known = {}
    for call in range(calls):
        rows = chance.choice([1, 1, 2, 3])
        own = [
            chance.choice([*headers, []]) + random_row(chance.randint(1, 9), chance.randint(0, 5)) for _ in range(rows)
        ]
        longest = max(map(len, own))
        inputs = {
            "input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in own]),
            "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in own]),
        }
        options = chance.choice([{}, {}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
        key = (str(own), str(options))
        if key not in known:
            known[key] = run(plain, inputs, max_new_tokens=4, **options)
        assert torch.equal(known[key], run(paged, inputs, max_new_tokens=4, **options)), f"call {call}"
        paged.paged_pool.check()
        assert paged.paged_stats().used_blocks == 0
    stats = paged.paged_stats()
    assert stats.evictions > 0
    assert stats.prefix_hit_tokens > 1000
    paged.paged_pool.reset_prefix_cache()
    assert paged.paged_stats().free_blocks == paged.paged_stats().num_blocks


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_made_of_reused_blocks_lies_together(rows):
    """So that it is read as one view, as in an empty pool."""
    _, paged = pair("llama", block_size=4)
    for seed in range(4):
        inputs = ids_of(*(random_row(40, 10 * seed + row) for row in range(rows)))
        out = run(paged, inputs, max_new_tokens=14, min_new_tokens=14, return_dict_in_generate=True)
        runs = [row.runs for row in cache_of(out).state.tables[0].rows]
        assert [len(entry) for entry in runs] == [1] * rows
        del out
    assert paged.paged_stats().evictions > 0


def test_counters_agree_with_a_trace_by_hand():
    _, paged = pair("llama", block_size=4, num_blocks=8)
    pool = paged.paged_pool

    def numbers():
        stats = paged.paged_stats()
        return (
            stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.evictions, stats.cow_copies, stats.cached_blocks,
        )  # fmt: skip

    row = random_row(10, 1)
    run(paged, ids_of(row), max_new_tokens=2)  # 11 tokens are fed: 3 blocks
    assert numbers() == (10, 0, 0, 0, 3)
    run(paged, ids_of(row), max_new_tokens=2)  # 9 are found; the tenth goes to a copy of the third block
    assert numbers() == (20, 9, 0, 1, 3)
    run(paged, ids_of([*row[:8], 90, 91]), max_new_tokens=1)  # 8 are found, 2 are new: 1 block
    assert numbers() == (30, 17, 0, 1, 4)
    run(paged, ids_of(random_row(24, 7)), max_new_tokens=1)  # 6 blocks: 4 are free, 2 are evicted
    assert numbers()[:4] == (54, 17, 2, 1)
    assert numbers()[4] == 8
    pool.check()


def test_looking_up_survives_a_pool_that_is_too_small():
    plain, paged = pair("llama", block_size=4, num_blocks=6)
    run(paged, ids_of(random_row(20, 1)), max_new_tokens=1)
    with pytest.raises(hf_paged.OutOfBlocks):
        run(paged, ids_of(random_row(20, 1) + random_row(20, 2)), max_new_tokens=1)
    assert paged.paged_stats().used_blocks == 0
    inputs = ids_of(random_row(20, 1))
    assert torch.equal(run(plain, inputs, max_new_tokens=3), run(paged, inputs, max_new_tokens=3))
    paged.paged_pool.check()


def test_a_cache_of_the_user_on_the_model_s_pool_shares_prefixes():
    plain, paged = pair("llama", block_size=4)
    inputs = ids_of(random_row(20, 1))
    count = Computed(paged)
    run(paged, inputs, max_new_tokens=1)
    cache = PagedCache(paged.config, pool=paged.paged_pool)
    count.since()
    got = run(paged, inputs, max_new_tokens=5, **with_cache(cache))
    assert torch.equal(run(plain, inputs, max_new_tokens=5), got)
    assert count.since() == 1 + 4
    cache.check()
    # Passed in again with the whole history, and once more with all of it there already.
    for more in ([7, 8], []):
        history = [*got[0].tolist(), *more]
        expected = run(plain, ids_of(history), max_new_tokens=3)
        got = run(paged, ids_of(history), max_new_tokens=3, **with_cache(cache))
        assert torch.equal(expected, got)
        got = expected[:, :-3] if not more else expected
    cache.check()


def test_threads_share_prefixes():
    import threading

    plain, paged = pair("llama", block_size=4, num_blocks=256)
    header = random_row(24, 1)
    jobs = [ids_of(header + random_row(5, seed)) for seed in range(6)]
    expected = [run(plain, job, max_new_tokens=6) for job in jobs]
    wrong = []

    def work(offset):
        for place in itertools.islice(itertools.cycle(range(6)), offset, offset + 12):
            if not torch.equal(expected[place], paged.generate(**jobs[place], max_new_tokens=6)):
                wrong.append(place)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    paged.paged_pool.check()
    assert paged.paged_stats().used_blocks == 0


def test_a_deep_copy_of_a_model_finds_nothing_of_the_other():
    _, paged = pair("llama")
    inputs = ids_of(random_row(20, 1))
    run(paged, inputs, max_new_tokens=1)
    other = copy.deepcopy(paged)
    run(other, inputs, max_new_tokens=1)
    assert other.paged_stats().prefix_hit_tokens == 0


def test_no_lazy_tensor_is_made_dense(monkeypatch):
    forbid_dense(monkeypatch)
    _, paged = pair("llama", block_size=4)
    header = random_row(40, 1)
    for _ in range(2):
        run(paged, ids_of([*header, 5, 6], [*header, 7, 8]), max_new_tokens=3, num_beams=2)
        run(paged, prompts(4, 9, 21), max_new_tokens=3)
    assert paged.paged_stats().fallbacks == {}


def test_a_model_switched_to_another_attention_is_not_packed():
    plain, paged = pair("llama", block_size=4)
    paged.set_attn_implementation("sdpa")
    for _ in range(2):
        for inputs in (prompts(3, 12, 7), ids_of(random_row(14, 1))):
            assert torch.equal(run(plain, inputs, max_new_tokens=5), run(paged, inputs, max_new_tokens=5))


def test_packing_can_be_switched_off():
    plain, paged = pair("llama", block_size=4, packed_prefill=False)
    count = Computed(paged)
    assert_equal(plain, paged, prompts(3, 12, 7), max_new_tokens=5)
    count.since()
    run(paged, prompts(4, 13, 8, seed=8), max_new_tokens=1)
    assert count.since() == 3 * 13


def test_what_was_found_can_be_read_before_anything_is_written():
    """Mllama looks into the cache's layers at the start of every forward."""
    _, paged = pair("llama", block_size=4)
    seen = []

    def look(args, kwargs):
        keys = kwargs[compat.CACHE_ARGUMENT].layers[0].keys
        seen.append(None if keys is None else tuple(keys.shape))

    observe(paged, paged.model, look, before=True)
    run(paged, prompts(13), max_new_tokens=2)
    seen.clear()
    run(paged, prompts(13), max_new_tokens=2)
    assert seen == [(1, 2, 12, 16), (1, 2, 13, 16)]
