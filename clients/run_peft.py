"""PEFT: LoRA, adapters switched, merged, hot-swapped and per row, prompt tuning, activated LoRA."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils.hotswap import hotswap_adapter

import hf_paged
from hf_paged.commands.measure import say
from hf_paged.commands.real_model import load_real_model

from .shared import NOT_HERE, header, in_turn, said, same, version_of, warm

NEW_TOKENS = 12
NAME = version_of("peft")
NAMES = ["first", "second", "__base__"]
QUESTIONS = ("What is the report about?", "Who wrote it?")
INVOCATION = "\nAnswer:"
OPTIONS = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}


def lora(**options: Any) -> peft.LoraConfig:
    """A LoRA config; `weights` gives its adapter weights that change answers."""
    targets = ["q_proj", "k_proj", "v_proj"]
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=targets, **options)


def weights(model: Any, name: str, seed: int) -> None:
    """Random weights for an adapter, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f".{name}." in key and "lora_" in key:
                parameter.normal_(0, 0.1, generator=generator)


class Clients:
    """An unpatched and a patched base model, fresh for each kind of adapter."""

    def __init__(self) -> None:
        self.base, self.tokenizer = load_real_model(progress=say)
        self.folder = Path(tempfile.mkdtemp())

    def pair(self, adapters: dict[str, int], **options: Any) -> list[Any]:
        """Unpatched and patched model with the same adapters, by name and seed. PEFT wraps a patched model."""
        models = []
        for model in (copy.deepcopy(self.base), hf_paged.patch(copy.deepcopy(self.base))):
            warm(model)
            for name, seed in adapters.items():
                if isinstance(model, peft.PeftModel):
                    model.add_adapter(name, lora(**options))
                else:
                    model = peft.get_peft_model(model, lora(**options), name)
                weights(model, name, seed)
            models.append(model.eval())
        return models

    def prompt(self, question: str, words: int = 120) -> dict[str, torch.Tensor]:
        return dict(self.tokenizer(f"{header(words)}\n\n{question}{INVOCATION}", return_tensors="pt"))

    def prompts(self) -> list[dict[str, torch.Tensor]]:
        return [self.prompt(question) for question in QUESTIONS]

    def work(self, model: Any) -> Callable[[Any], torch.Tensor]:
        """Calls generate() with an item: a prompt; a tuple is something to do to the model first, and a prompt."""

        def call(item: Any) -> torch.Tensor:
            nonlocal model
            before, inputs = item if isinstance(item, tuple) else (None, item)
            if before is not None:
                model = before(model) or model
            return model.generate(**inputs, **OPTIONS)

        return call

    def run(self, what: str, models: list[Any], items: list[Any], **more: Any) -> None:
        in_turn(NAME, what, *map(self.work, models), items, models[1], **more)


def plain_lora(clients: Clients) -> None:
    models, prompts = clients.pair({"first": 1, "second": 2}), clients.prompts()
    clients.run("LoRA, two prompts that begin alike", models, prompts)
    switched = [(lambda model, name=name: model.set_adapter(name), prompts[0]) for name in ("first", "second", "first")]
    clients.run("LoRA, adapters switched", models, switched, unlike=[(0, 1)])
    items = [(merge_second, prompts[0]), (lambda model: model.unmerge_adapter(), prompts[0]), prompts[1]]
    clients.run("LoRA, merged, and taken out again", models, items)


def merge_second(model: Any) -> None:
    model.set_adapter("second")
    model.merge_adapter(["second"])


def adapter_per_row(clients: Clients) -> None:
    models = clients.pair({"first": 1, "second": 2})
    rows = {key: value.repeat(3, 1) for key, value in clients.prompts()[0].items()}
    items = [rows | {"adapter_names": list(names)} for names in (NAMES, NAMES[1:] + NAMES[:1])]
    clients.run("LoRA, `adapter_names` for each row", models, items, unlike=[(0, 1)])


def merge_and_unload(clients: Clients) -> None:
    prompts = clients.prompts()
    for safe in (False, True):
        items = [  # a base model that has seen the prompt, and then LoRA for good in its weights
            (lambda model: model.base_model.disable_adapter_layers(), prompts[0]),
            (lambda model: model.base_model.enable_adapter_layers(), prompts[1]),
            (lambda model, safe=safe: model.merge_and_unload(safe_merge=safe), prompts[0]),
            prompts[1],
        ]
        what = f"`merge_and_unload(safe_merge={safe})` after the base model has seen the prompt"
        clients.run(what, clients.pair({"first": 1}), items, unlike=[(0, 2)])


def hotswap(clients: Clients) -> None:
    clients.pair({"default": 3})[0].save_pretrained(clients.folder)
    models, prompts = clients.pair({"default": 1}), clients.prompts()

    def swap(model: Any) -> None:
        hotswap_adapter(model, str(clients.folder), "default")

    items = [prompts[0], (swap, prompts[0]), prompts[1]]
    clients.run("hot-swapped adapter, before and after", models, items, unlike=[(0, 1)])


def activated(clients: Clients) -> None:
    ids = clients.tokenizer(INVOCATION, add_special_tokens=False).input_ids
    models, prompts = clients.pair({"first": 1}, alora_invocation_tokens=ids), clients.prompts()
    without = {key: value[:, : -len(ids)] for key, value in prompts[0].items()}
    clients.run("activated LoRA, prompts that begin alike", models, [*prompts, without])


def prompt_tuning(clients: Clients) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    models = []
    for model in (copy.deepcopy(clients.base), hf_paged.patch(copy.deepcopy(clients.base))):
        warm(model)
        tuned = peft.get_peft_model(model, config).eval()
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in tuned.prompt_encoder.parameters():
                parameter.normal_(0, 0.3, generator=generator)
        models.append(tuned)
    # What the tuned model has to put out: the base model's answer behind the virtual tokens, as embeddings.
    prompts = clients.prompts()
    with torch.no_grad():
        text = clients.base.get_input_embeddings()(prompts[0]["input_ids"])
        embedded = torch.cat([models[0].get_prompt(batch_size=1), text], 1)
    expected = clients.base.generate(inputs_embeds=embedded, **OPTIONS)
    try:
        got = clients.work(models[0])(prompts[0])[:, prompts[0]["input_ids"].shape[1] :]
        wrong = "" if same(got, expected) else "PEFT's own answer is not the base model's behind the virtual tokens"
    except Exception as error:
        wrong = said(error)
    note = f"{NOT_HERE}, unpatched: {wrong}" if wrong else ""
    clients.run("prompt tuning, two prompts that begin alike", models, prompts, note=note, may_be_broken=bool(wrong))


def main() -> None:
    clients = Clients()
    for kind in (plain_lora, adapter_per_row, merge_and_unload, hotswap, activated, prompt_tuning):
        kind(clients)


if __name__ == "__main__":
    main()
