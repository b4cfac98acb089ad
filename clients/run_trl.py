"""TRL's GRPO with an evaluation between steps, on the default optimizer (fused AdamW).

TRL puts a forward of its own in the place of the model's, which hf_paged does not know, so all savings step aside. The
second run vouches for it: there prefixes are found, and must not be those of the weights of the step before.
"""

import copy
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import hf_paged
from hf_paged.commands.measure import say
from hf_paged.commands.real_model import load_real_model

from .shared import DIFFERENT, SAME, Counts, Row, header, report, same, version_of, warm

STEPS = 3
NEW_TOKENS = 12
QUESTIONS = ("What is the report about?", "Name one decision in it.", "Who will read it?")


class Probe(TrainerCallback):
    """After each step, and in eval mode, as any evaluation is: greedy answers to prompts that begin alike, and for a
    patched model the answers of an unpatched one with the same weights."""

    def __init__(self, tokenizer: Any, reference: Any = None):
        self.prompts = [tokenizer(f"{header(150)}\n\n{q}\n", return_tensors="pt") for q in QUESTIONS]
        self.reference = reference
        self.answers: list[list[torch.Tensor]] = []
        self.expected: list[list[torch.Tensor]] = []
        self.seconds = self.reference_seconds = 0.0
        self.found = self.asked = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        training = model.training
        model.eval()
        start = time.perf_counter()
        self.answers.append(self._ask(model))
        self.seconds += time.perf_counter() - start
        if self.reference is not None:
            self.reference.load_state_dict(model.state_dict())
            start = time.perf_counter()
            self.expected.append(self._ask(self.reference))
            self.reference_seconds += time.perf_counter() - start
        model.train(training)

    def _ask(self, model: Any) -> list[torch.Tensor]:
        return [model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False) for prompt in self.prompts]


def train(model: Any, tokenizer: Any, probe: Probe) -> tuple[list[Any], float, str]:
    """Train for a few steps; what each reward call was given, the seconds without the probe's, and the optimizer."""
    seen: list[Any] = []

    def reward(completion_ids: list[Any], **more: Any) -> list[float]:
        ids = [[int(token) for token in completion] for completion in completion_ids]
        seen.append(("train" if trainer.model.training else "eval", ids))
        return [float(sum(completion) % 17) for completion in ids]

    prompts = [f"{header(60)}\n\nQuestion {number}: what is {number} plus {number}?\n" for number in range(4)]
    data = Dataset.from_dict({"prompt": prompts})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=data,
        eval_dataset=data.select([0]),
        processing_class=tokenizer,
        callbacks=[probe],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            num_generations=4,
            max_steps=STEPS,
            max_completion_length=NEW_TOKENS,
            learning_rate=1e-4,
            eval_strategy="steps",
            eval_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=1,
        ),
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start - probe.seconds - probe.reference_seconds
    optimizer = f"{trainer.args.optim.value}, fused={trainer.optimizer.defaults.get('fused')}"
    return seen, seconds, optimizer


def main() -> None:
    base, tokenizer = load_real_model(progress=say)
    name = version_of("trl")
    plain = copy.deepcopy(base)
    warm(plain)
    expected, plain_seconds, _ = train(plain, tokenizer, Probe(tokenizer))
    for vouch in (False, True):
        paged = hf_paged.patch(copy.deepcopy(base), vouch=vouch or ())
        warm(paged)
        counts = Counts(paged)
        probe = Probe(tokenizer, reference=copy.deepcopy(base))
        seen, seconds, optimizer = train(paged, tokenizer, probe)
        how = "GRPO, patched with `vouch=True`" if vouch else "GRPO"
        row = Row(
            name,
            f"{how}, {STEPS} steps of 4 samples, each evaluated: every completion",
            SAME if seen == expected else DIFFERENT,
            plain_seconds,
            seconds,
            note=f"optimizer {optimizer}; tokens found in the next row's answers, too",
        )
        report(counts.into(row))
        row = Row(
            name,
            f"{how}, greedy answers to {len(QUESTIONS)} prompts after each step, against the same weights unpatched",
            SAME if same(probe.answers, probe.expected) else DIFFERENT,
            probe.reference_seconds,
            probe.seconds,
        )
        if same(probe.answers[0], probe.answers[-1]):
            row.same, row.note = DIFFERENT, "tests nothing: the steps changed no answer"
        report(row)


if __name__ == "__main__":
    main()
