"""Random sequences of calls and of what touches the model in between: the ids are the unpatched model's."""

import random
from contextlib import ExitStack

import pytest
import torch
from models import VOCAB, prompts, run
from transformers import DynamicCache

import hf_paged
from hf_paged import compat

from .disturbances import TABLE, disturbed, pair_of
from .test_mid_call import CARRIERS, Switch
from .test_soundness import MANY_ENDS, shown

pytestmark = pytest.mark.filterwarnings("ignore")
SEQUENCES, OPERATIONS = 40, 12
MOST_AT_ONCE = 3
# Trained for real, several times over, a model gives numbers that are none.
NAMES = [name for name, case in TABLE.items() if case.base == "llama" and not name.startswith("two_steps")]
IN_CALLS = ("a_hook_adds_a_vector", "data_is_written", "attention_has_another_scale", "a_module_is_replaced")


class Twins:
    """An unpatched model and a patched one, to which the same is done."""

    def __init__(self, rng, switches):
        self.rng, self.switches = rng, switches
        size, tokens = rng.choice([1, 4, 16]), rng.choice([None, 1000, 4000])
        blocks = None if tokens is None else tokens // size
        self.plain, self.paged = pair_of("llama", block_size=size, num_blocks=blocks)
        self.active: list[tuple[str, ExitStack]] = []
        self.log = [f"block_size={size}, num_blocks={blocks}"]
        self.histories = [prompts(rng.randint(3, 24), seed=seed)["input_ids"] for seed in range(3)]
        self.begin_conversations()

    def begin_conversations(self):
        self.chat = hf_paged.Chat(self.paged)
        self.caches = [
            DynamicCache(config=self.plain.config),
            hf_paged.PagedCache(self.paged.config, pool=self.paged.paged_pool),
        ]
        self.filled = None

    def note(self, what):
        self.log.append(what)

    def compare(self, inputs, **options):
        seed = self.rng.randrange(1000)
        expected, got = (run(model, inputs, seed=seed, **options) for model in (self.plain, self.paged))
        self.agree(expected, got)
        return expected

    def agree(self, expected, got):
        assert torch.equal(expected, got), "\n".join([*self.log, str(expected), str(got)])
        self.paged.paged_pool.check()

    # -- what is done -------------------------------------------------------------------------------------------------

    def disturb(self):
        free = [name for name in NAMES if name not in [active for active, _ in self.active]]
        if len(self.active) == MOST_AT_ONCE:
            return self.undo()
        name = self.rng.choice(free)
        self.note(f"+ {name}")
        stack = ExitStack()
        stack.enter_context(disturbed(name, self.plain, self.paged))
        self.active.append((name, stack))
        return None

    def undo(self):
        if self.active:
            name, stack = self.active.pop()
            self.note(f"- {name}")
            stack.close()

    def undo_all(self):
        while self.active:
            self.undo()

    def forget(self):
        self.note("the prefix index is emptied")
        self.paged.paged_pool.reset_prefix_cache()

    def forward(self):
        self.note("a forward without a cache")
        with torch.no_grad():
            for model in (self.plain, self.paged):
                model(**prompts(9), use_cache=False, output_hidden_states=True)

    # -- calls --------------------------------------------------------------------------------------------------------

    def history(self):
        """One row that was seen before, or that begins like one."""
        ids = self.rng.choice(self.histories)
        kept = ids[:, : self.rng.randint(max(1, ids.shape[1] - 6), ids.shape[1])]
        more = torch.tensor([[self.rng.randrange(3, VOCAB) for _ in range(self.rng.randint(0, 3))]], dtype=torch.long)
        return torch.cat([kept, more], 1)[:, :60]

    def generate(self):
        row = self.history()
        kind = self.rng.choice(["one", "one", "equal", "ragged", "header"])
        if kind == "one":
            inputs = shown(row)
        elif kind == "equal":
            inputs = shown(row.repeat(self.rng.randint(2, 4), 1))
        elif kind == "ragged":
            inputs = prompts(*[self.rng.randint(1, 24) for _ in range(3)], seed=self.rng.randrange(3))
        else:
            header = prompts(36, seed=1)["input_ids"].repeat(3, 1)
            inputs = shown(
                torch.cat([header, torch.randint(3, VOCAB, (3, 3), generator=torch.Generator().manual_seed(4))], 1)
            )
        options = self.rng.choice(
            [
                {},
                {},
                {"num_beams": 2},
                {"num_beams": 3, "num_return_sequences": 2},
                {"do_sample": True},
                {"do_sample": True, "num_return_sequences": 3},
                {"eos_token_id": MANY_ENDS},
                {"repetition_penalty": 1.2},
                {"prefill_chunk_size": 7},
            ]
        )
        new = self.rng.randint(1, 5)
        carried = {}
        if self.switches and self.rng.random() < 0.5:
            name = self.rng.choice([name for name in IN_CALLS if name not in [active for active, _ in self.active]])
            last = self.rng.choice([None, 3, 4])
            carried = {"name": name, "first": self.rng.choice([1, 2]), "last": last}
        self.note(f"generate {kind} {tuple(inputs['input_ids'].shape)} {options} {new} new {carried}")
        if not carried:
            ids = self.compare(inputs, max_new_tokens=new, **options)
        else:
            ids = self.switched(inputs, carried, max_new_tokens=new, **options)
        if kind == "one":
            self.histories[self.rng.randrange(3)] = ids[:1]

    def switched(self, inputs, carried, **options):
        seed = self.rng.randrange(1000)
        outputs = []
        for model in (self.plain, self.paged):
            switch = Switch(carried["name"], model, carried["first"], carried["last"])
            outputs.append(run(model, inputs, seed=seed, **options, **CARRIERS["processor"](switch)))
            switch.stack.close()
        self.agree(*outputs)
        return outputs[0]

    def talk(self):
        row = self.history()
        self.note(f"chat {row.shape[1]}")
        expected = run(self.plain, shown(row), max_new_tokens=3)
        torch.manual_seed(5)
        self.agree(expected, self.chat.generate(row, max_new_tokens=3))
        self.histories[self.rng.randrange(3)] = expected

    def go_on(self):
        """With a cache of the user's own, whose keys stay what they are."""
        row = self.history() if self.filled is None else torch.cat([self.filled, torch.tensor([[8, 9]])], 1)
        if row.shape[1] > 70:
            self.begin_conversations()
            return
        self.note(f"goes on from a filled cache {row.shape[1]}")
        expected, got = (
            run(model, shown(row), max_new_tokens=3, **{compat.CACHE_ARGUMENT: cache})
            for model, cache in zip((self.plain, self.paged), self.caches, strict=True)
        )
        self.agree(expected, got)
        self.filled = expected

    OPERATIONS = ("disturb", "undo", "undo_all", "forget", "forward", "generate", "talk", "go_on")
    WEIGHTS = (4, 2, 1, 0.5, 0.5, 8, 2, 2)

    def close(self):
        self.undo_all()
        self.compare(shown(self.history()), max_new_tokens=3)
        self.chat.close()
        self.caches.clear()
        self.paged.paged_pool.check()
        stats = self.paged.paged_stats()
        assert stats.used_blocks == 0
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks


def play(seed, switches):
    rng = random.Random(seed)
    twins = Twins(rng, switches)
    with ExitStack() as undone:
        undone.callback(twins.undo_all)  # what is done to classes must not outlast a failure
        for operation in rng.choices(Twins.OPERATIONS, Twins.WEIGHTS, k=OPERATIONS):
            getattr(twins, operation)()
        twins.close()


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_random_sequences(seed):
    play(seed, switches=False)


@pytest.mark.parametrize("seed", range(100, 112))
def test_random_sequences_with_calls_in_which_the_model_changes(seed):
    play(seed, switches=True)
