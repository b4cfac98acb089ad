"""What touches a call from inside: its processors, criteria, streamers and loops, what they do to the model while it
runs, and what is done to ids and caches afterwards."""

import copy
from contextlib import ExitStack

import pytest
import torch
from models import run
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged import compat

from .disturbances import TABLE, disturbed, middle, needs_old_peft, pair_of, randomise
from .test_soundness import MANY_ENDS, ONE, RAGGED, assert_nothing_is_held, behind, shown

pytestmark = pytest.mark.filterwarnings("ignore")
NEW = 5


# -- the model changes while a call runs ------------------------------------------------------------------------------


class Switch:
    """Disturbs a model at one step of a call, and ends it at another.

    Args:
        last: the step before which all is as it was; None: it stays.
    """

    def __init__(self, name, model, first, last):
        self.name, self.model, self.first, self.last = name, model, first, last
        self.steps = 0
        self.stack = ExitStack()

    def step(self):
        self.steps += 1
        if self.steps == self.first:
            self.stack.enter_context(disturbed(self.name, self.model))
        if self.steps == self.last:
            self.stack.close()


class SwitchingProcessor(LogitsProcessor):
    def __init__(self, switch):
        self.switch = switch

    def __call__(self, input_ids, scores):
        self.switch.step()
        return scores


class SwitchingCriterion(StoppingCriteria):
    def __init__(self, switch):
        self.switch = switch

    def __call__(self, input_ids, scores, **kwargs):
        self.switch.step()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class SwitchingStreamer(BaseStreamer):
    def __init__(self, switch):
        self.switch = switch

    def put(self, value):
        if value.ndim == 1:  # not the prompt
            self.switch.step()

    def end(self):
        pass


CARRIERS = {
    "processor": lambda switch: {"logits_processor": [SwitchingProcessor(switch)]},
    "criterion": lambda switch: {"stopping_criteria": [SwitchingCriterion(switch)]},
    "streamer": lambda switch: {"streamer": SwitchingStreamer(switch)},
}
IN_MID_CALL = (
    "a_hook_adds_a_vector", "a_pre_hook_changes_what_goes_in", "a_pre_hook_hides_old_tokens", "a_global_hook",
    "a_global_pre_hook", "a_forward_is_a_function", "the_rotation_is_wrapped", "data_is_written", "data_is_replaced",
    "a_buffer_is_written", "attention_has_another_scale", "a_module_is_replaced", "an_adapter_is_switched",
)  # fmt: skip
WITH_EVERY_CARRIER = ("a_hook_adds_a_vector", "data_is_written", "attention_has_another_scale")


def calls_around(model, name, carrier, last):
    """What a model gives in calls that are disturbed from their second step on, and in those behind them."""
    modes = [(ONE, {}), (RAGGED, {"eos_token_id": MANY_ENDS}), (ONE, {"num_beams": 3})]
    outputs = []
    for inputs, options in modes[: 1 if carrier == "streamer" else None]:
        switch = Switch(name, model, 2, last)
        outputs.append(run(model, inputs, max_new_tokens=NEW, **options, **CARRIERS[carrier](switch)))
        turns = behind(outputs[-1]) if inputs is ONE else RAGGED
        outputs.append(run(model, turns, max_new_tokens=2))
        switch.stack.close()
        outputs.append(run(model, turns, max_new_tokens=2))
    return outputs


@pytest.mark.parametrize("last", [None, 4], ids=["left", "put back"])
@pytest.mark.parametrize(
    ("name", "carrier"),
    [
        (name, carrier)
        for name in IN_MID_CALL
        for carrier in CARRIERS
        if carrier == "processor" or name in WITH_EVERY_CARRIER
    ],
)
def test_a_model_that_changes_while_a_call_runs(name, carrier, last):
    plain, paged = pair_of(TABLE[name].base)
    expected, got = (calls_around(model, name, carrier, last) for model in (plain, paged))
    for place, (left, right) in enumerate(zip(expected, got, strict=True)):
        assert torch.equal(left, right), f"call {place}:\n{left}\n{right}"
    assert_nothing_is_held(paged)


@pytest.mark.parametrize("last", [None, 4], ids=["left", "put back"])
@pytest.mark.parametrize("name", IN_MID_CALL)
def test_what_a_changed_model_has_computed_is_not_found(name, last):
    """The prompt and the first token are from before."""
    _, paged = pair_of(TABLE[name].base)
    switch = Switch(name, paged, 2, last)
    first = run(paged, ONE, max_new_tokens=NEW, **CARRIERS["processor"](switch))
    switch.stack.close()
    run(paged, behind(first), max_new_tokens=1)
    assert paged.paged_stats().prefix_hit_tokens <= 19 + 1


def test_weights_that_change_while_a_call_runs_are_counted():
    _, paged = pair_of("llama")
    switch = Switch("data_is_written", paged, 2, None)
    run(paged, ONE, max_new_tokens=NEW, **CARRIERS["streamer"](switch))
    switch.stack.close()
    assert sum(paged.paged_stats().stepped_aside.values()) == 1


def test_what_a_call_generated_is_found_when_nothing_changes():
    _, paged = pair_of("llama")
    first = run(paged, ONE, max_new_tokens=NEW)
    run(paged, behind(first), max_new_tokens=1)
    assert paged.paged_stats().prefix_hit_tokens == 19 + NEW - 1
    assert paged.paged_stats().stepped_aside == {}


# -- processors, criteria, loops --------------------------------------------------------------------------------------


class AcrossRows(LogitsProcessor):
    """Looks at the logits of all rows, those that have stopped too."""

    def __call__(self, input_ids, scores):
        return scores + 3 * scores.roll(1, 0) + scores.mean(0)


class ReadsStoppedIds(LogitsProcessor):
    """Looks at the tokens of other rows."""

    def __call__(self, input_ids, scores):
        return scores.scatter_add(1, input_ids.roll(1, 0)[:, -3:], scores.new_full((len(scores), 3), 1.5))


class EditsIds(LogitsProcessor):
    """Writes to what it is given."""

    def __call__(self, input_ids, scores):
        input_ids[:, -1] = (input_ids[:, -1] + 1).clamp(min=30)
        return scores


class EditsThePrompt(LogitsProcessor):
    def __call__(self, input_ids, scores):
        input_ids[:, 17] = 44
        return scores


class EditsIdsWhenAsked(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        input_ids[:, -1] = 50
        return torch.zeros(len(input_ids), dtype=torch.bool)


def loop_over_all_rows(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """A decoding loop of one's own, which reads the logits of rows that have stopped."""
    logits_processor.append(AcrossRows())
    return type(model)._sample(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


# Name -> the keywords of a call; and what is counted for a ragged batch.
CALLS = {
    "a processor looks across rows": (lambda: {"logits_processor": [AcrossRows()]}, "unknown_processor"),
    "a processor looks at other rows' ids": (lambda: {"logits_processor": [ReadsStoppedIds()]}, "unknown_processor"),
    "a processor edits ids": (lambda: {"logits_processor": [EditsIds()]}, "unknown_processor"),
    "a processor edits the prompt": (lambda: {"logits_processor": [EditsThePrompt()]}, "unknown_processor"),
    "a criterion edits ids": (lambda: {"stopping_criteria": [EditsIdsWhenAsked()]}, "unknown_processor"),
    "a loop reads rows that have stopped": (lambda: {"custom_generate": loop_over_all_rows}, "unknown_loop"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_look_and_write_where_they_like(name):
    make, code = CALLS[name]
    plain, paged = pair_of("llama")

    def calls(model):
        outputs = []
        for inputs, options in ((ONE, {}), (RAGGED, {"eos_token_id": MANY_ENDS}), (RAGGED, {"do_sample": True})):
            own = {name: tensor.clone() for name, tensor in inputs.items()}  # a processor may be given the caller's
            outputs.append(run(model, own, max_new_tokens=NEW, **make(), **options))
            outputs.append(run(model, inputs, max_new_tokens=2))
            if inputs is ONE:
                outputs.append(run(model, behind(outputs[-2]), max_new_tokens=2))
        if code != "unknown_loop":
            own = {name: tensor.clone() for name, tensor in ONE.items()}
            outputs.append(run(model, own, max_new_tokens=NEW, num_beams=3, **make()))
        return outputs

    for place, (left, right) in enumerate(zip(calls(plain), calls(paged), strict=True)):
        assert torch.equal(left, right), f"call {place}:\n{left}\n{right}"
    assert set(paged.paged_stats().stepped_aside) == {code}
    assert_nothing_is_held(paged)


def test_the_library_s_processors_step_nowhere():
    plain, paged = pair_of("llama")
    options = {"eos_token_id": MANY_ENDS, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 2}
    for more in ({}, {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.7}):
        both = [run(model, RAGGED, max_new_tokens=NEW, **options, **more) for model in (plain, paged)]
        assert torch.equal(*both)
    assert paged.paged_stats().stepped_aside == {}
    assert_nothing_is_held(paged)


# -- what the user holds ----------------------------------------------------------------------------------------------


def test_returned_ids_are_edited_and_used_again():
    plain, paged = pair_of("llama")
    for edited in (3, 20, 23):
        both = [run(model, ONE, max_new_tokens=NEW) for model in (plain, paged)]
        untouched = both[0].clone()
        for ids in both:
            ids[:, edited] = 71
        again = [run(model, behind(ids), max_new_tokens=3) for model, ids in zip((plain, paged), both, strict=True)]
        assert torch.equal(*again)
        again = [run(model, behind(untouched), max_new_tokens=3) for model in (plain, paged)]
        assert torch.equal(*again)
    assert paged.paged_stats().stepped_aside == {}


def test_a_prompt_is_edited_after_its_call():
    plain, paged = pair_of("llama")
    inputs = {name: tensor.clone() for name, tensor in ONE.items()}
    for place in (18, 5, 0):
        assert torch.equal(*[run(model, inputs, max_new_tokens=NEW) for model in (plain, paged)])
        inputs["input_ids"][:, place] = 60
    assert torch.equal(*[run(model, inputs, max_new_tokens=NEW) for model in (plain, paged)])
    assert torch.equal(*[run(model, ONE, max_new_tokens=NEW) for model in (plain, paged)])


def test_a_returned_cache_goes_on_after_other_calls_and_other_weights():
    plain, paged = pair_of("llama")
    outputs = [run(model, ONE, max_new_tokens=NEW, return_dict_in_generate=True) for model in (plain, paged)]
    caches = [getattr(output, compat.CACHE_ARGUMENT) for output in outputs]
    history = behind(outputs[0].sequences)
    with disturbed("data_is_written", plain, paged):
        both = [
            run(model, history, max_new_tokens=NEW, **{compat.CACHE_ARGUMENT: cache})
            for model, cache in zip((plain, paged), caches, strict=True)
        ]
        assert torch.equal(*both)
        # The cache holds keys of both: none of it may be found.
        assert torch.equal(*[run(model, behind(both[0]), max_new_tokens=2) for model in (plain, paged)])
    for ids in (outputs[0].sequences, both[0]):
        assert torch.equal(*[run(model, behind(ids), max_new_tokens=2) for model in (plain, paged)])
    del caches, outputs
    assert_nothing_is_held(paged)


def test_a_cache_that_was_cropped_and_filled_with_other_tokens():
    plain, paged = pair_of("llama")
    outputs = [run(model, ONE, max_new_tokens=NEW, return_dict_in_generate=True) for model in (plain, paged)]
    caches = [getattr(output, compat.CACHE_ARGUMENT) for output in outputs]
    [cache.crop(-3) for cache in caches]
    history = outputs[0].sequences[:, :21]
    other = shown(torch.cat([history, torch.tensor([[70, 71, 72]])], 1))
    both = [
        run(model, other, max_new_tokens=NEW, **{compat.CACHE_ARGUMENT: cache})
        for model, cache in zip((plain, paged), caches, strict=True)
    ]
    assert torch.equal(*both)
    for ids in (outputs[0].sequences, both[0]):
        assert torch.equal(*[run(model, behind(ids), max_new_tokens=2) for model in (plain, paged)])
    del caches, outputs
    assert_nothing_is_held(paged)


def test_a_conversation_begins_anew_with_what_is_in_the_index():
    """Nothing of its cache is left, and another call's prompt is found."""
    plain, paged = pair_of("llama")
    unlike = behind(ONE["input_ids"][:, 1:])
    run(paged, unlike, max_new_tokens=2)
    chat = hf_paged.Chat(paged, max_new_tokens=NEW)
    for inputs in (ONE, unlike, ONE):
        torch.manual_seed(5)
        assert torch.equal(run(plain, inputs, max_new_tokens=NEW), chat.generate(inputs["input_ids"]))
    assert paged.paged_stats().prefix_hit_tokens > 0
    chat.close()
    assert_nothing_is_held(paged)


def test_a_cache_that_was_cropped_to_nothing_takes_what_is_in_the_index():
    plain, paged = pair_of("llama")
    unlike = behind(ONE["input_ids"][:, 1:])
    run(paged, unlike, max_new_tokens=2)
    cache = hf_paged.PagedCache(paged.config, pool=paged.paged_pool)
    run(paged, ONE, max_new_tokens=2, **{compat.CACHE_ARGUMENT: cache})
    cache.crop(-cache.get_seq_length())
    got = run(paged, unlike, max_new_tokens=NEW, **{compat.CACHE_ARGUMENT: cache})
    assert torch.equal(run(plain, unlike, max_new_tokens=NEW), got)
    del cache
    assert_nothing_is_held(paged)


# -- again and again --------------------------------------------------------------------------------------------------


def test_modules_that_come_and_go():
    """What is freed leaves its address to the next."""
    plain, paged = pair_of("llama")
    for seed in range(8):
        for model in (plain, paged):
            middle(model).mlp = randomise(type(middle(model).mlp)(model.config), seed)
        assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)]), seed
    assert paged.paged_stats().prefix_hit_tokens == 0
    assert paged.paged_stats().stepped_aside == {}


def test_weights_that_are_gathered_for_a_call_and_let_go():
    plain, paged = pair_of("llama")
    masters = [parameter.detach().clone() for parameter in plain.parameters()]
    for factor in (1.0, 0.9, 0.8, 1.0, 0.9, 0.8):
        for model in (plain, paged):
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.data = master * factor
        assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
        for model in (plain, paged):
            for parameter in model.parameters():
                parameter.data = torch.empty(0)
    assert paged.paged_stats().prefix_hit_tokens == 3 * 18  # the second time round


def test_functions_that_come_and_go():
    plain, paged = pair_of("llama")
    for strength in range(6):
        own = [middle(model).forward for model in (plain, paged)]
        for model, forward in zip((plain, paged), own, strict=True):
            middle(model).forward = lambda *a, _f=forward, _s=strength, **k: _f(*a, **k) + _s
        assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
        for model in (plain, paged):
            del middle(model).forward
    assert paged.paged_stats().stepped_aside == {"unknown_code": 6}


# -- settings that reach into a call ----------------------------------------------------------------------------------


def test_autocast_finds_nothing_of_another_dtype():
    plain, paged = pair_of("llama")
    hits = []
    for dtype in (None, torch.bfloat16, torch.float16, torch.bfloat16, None):
        before = paged.paged_stats().prefix_hit_tokens
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            got = run(paged, ONE, max_new_tokens=3)
            if dtype is None:
                assert torch.equal(run(plain, ONE, max_new_tokens=3), got)
        hits.append(paged.paged_stats().prefix_hit_tokens - before)
    assert hits[1] == hits[2] == 0
    assert paged.paged_stats().stepped_aside == {}


def test_another_precision_of_products_finds_nothing():
    plain, paged = pair_of("llama")
    before = torch.get_float32_matmul_precision()
    run(paged, ONE, max_new_tokens=3)
    try:
        torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
        run(paged, ONE, max_new_tokens=3)
        assert paged.paged_stats().prefix_hit_tokens == 0
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
    assert paged.paged_stats().prefix_hit_tokens == 18


def test_training_mode_with_gradient_checkpointing():
    plain, paged = pair_of("llama")
    run(paged, ONE, max_new_tokens=3)
    for model in (plain, paged):
        model.gradient_checkpointing_enable()
        model.train()
    for inputs, options in ((ONE, {}), (RAGGED, {}), (ONE, {"num_beams": 3})):
        assert torch.equal(*[run(model, inputs, max_new_tokens=NEW, **options) for model in (plain, paged)])
    assert paged.paged_stats().stepped_aside == {"gradient_checkpointing": 3}
    for model in (plain, paged):
        model.eval()
    assert torch.equal(*[run(model, ONE, max_new_tokens=NEW) for model in (plain, paged)])
    assert paged.paged_stats().stepped_aside == {"gradient_checkpointing": 3}
    assert_nothing_is_held(paged)


def test_fewer_layers_in_the_config():
    plain, paged = pair_of("llama")
    assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
    for model in (plain, paged):
        model.config.num_hidden_layers = 1
    assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
    for model in (plain, paged):
        model.config.num_hidden_layers = 2
    assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
    assert_nothing_is_held(paged)


# -- adapters of a call -----------------------------------------------------------------------------------------------


def test_another_adapter_for_each_row():
    plain, paged = pair_of("lora")
    names = ["one", "two", "__base__"]
    equal = {name: rows.repeat(3, 1) for name, rows in ONE.items()}
    calls = [
        (equal, {"adapter_names": names}),
        (RAGGED, {"adapter_names": names}),
        (ONE, {"adapter_names": ["two"]}),
        (ONE, {}),
        (ONE, {"adapter_names": ["one"]}),
        (ONE, {"adapter_names": ["two"], "num_beams": 2}),
        (equal, {}),
    ]
    for inputs, options in calls:
        assert torch.equal(*[run(model, inputs, max_new_tokens=NEW, **options) for model in (plain, paged)]), options
    assert sum(paged.paged_stats().stepped_aside.values()) == 5
    assert_nothing_is_held(paged)


@needs_old_peft
@pytest.mark.parametrize("order", ["patched around", "patched before"])
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_in_front_of_every_prompt(kind, order):
    import peft
    from models import build

    def tuned(base):
        torch.manual_seed(1)
        model = peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5))
        torch.manual_seed(2)
        for parameter in model.prompt_encoder.parameters():
            parameter.data.normal_(0, 0.5)
        return model.eval()

    plain = tuned(build("llama"))
    paged = tuned(hf_paged.patch(build("llama"))) if order == "patched before" else hf_paged.patch(copy.deepcopy(plain))
    for _ in range(2):
        for inputs, options in ((ONE, {}), (RAGGED, {}), (ONE, {"num_beams": 2})):
            assert torch.equal(*[run(model, inputs, max_new_tokens=NEW, **options) for model in (plain, paged)])
    for model in (plain, paged):
        for parameter in model.prompt_encoder.parameters():
            parameter.data.mul_(-1)
    assert torch.equal(*[run(model, ONE, max_new_tokens=NEW) for model in (plain, paged)])
    base = build("llama")
    for model in (base, hf_paged.patch(build("llama"))):
        assert torch.equal(run(base, ONE, max_new_tokens=NEW), run(model, ONE, max_new_tokens=NEW))
    assert_nothing_is_held(paged.base_model)
