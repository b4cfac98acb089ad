"""The main job on a real model: SmolLM2-135M-Instruct, with and without the paged cache, and whether they agree."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import hf_paged

from .measure import Watch, megabytes, versions
from .prompts import INSTRUCTIONS, long_prompt
from .real_model import load_real_model


@dataclass
class _Run:
    ids: torch.Tensor  # [rows, tokens]
    seconds: float
    watch: Watch


def _timed(model: Any, call: Callable[[], torch.Tensor], forwards: int) -> _Run:
    torch.manual_seed(0)
    with Watch(model, forwards) as watch:
        start = time.perf_counter()
        ids = call()
        seconds = time.perf_counter() - start
    return _Run(ids, seconds, watch)


def _compare(title: str, model: Any, tokenizer: Any, inputs: dict, new_tokens: int, **options: Any) -> bool:
    """Run generate() unpatched and patched, print both, return whether the ids are identical."""
    prompt = inputs["input_ids"].shape[1]
    print(f"\n== {title}")
    call = lambda: model.generate(**inputs, max_new_tokens=new_tokens, **options)  # noqa: E731
    print("   unpatched, DynamicCache ... ", end="", flush=True)
    before = _timed(model, call, new_tokens)
    print(f"{before.seconds:.1f} s", flush=True)
    print("   hf_paged ... ", end="", flush=True)
    with hf_paged.patched(model):
        after = _timed(model, call, new_tokens)
    print(f"{after.seconds:.1f} s", flush=True)
    same = before.ids.shape == after.ids.shape and bool((before.ids == after.ids).all())
    for row in after.ids[:3]:
        text = tokenizer.decode(row[prompt:], skip_special_tokens=True).strip().replace("\n", " ")
        print(f'   "{text[:150]}{"…" if len(text) > 150 else ""}"')
    if len(after.ids) > 3:
        print(f"   … and {len(after.ids) - 3} more")
    _report(before, after, same)
    return same


def _report(before: _Run, after: _Run, same: bool) -> None:
    first, final = after.watch.first, after.watch.final
    assert first is not None and final is not None
    print(f"   identical to the unpatched run: {'yes' if same else 'NO'}")
    print(f"   time {after.seconds:.1f} s against {before.seconds:.1f} s: {before.seconds / after.seconds:.2f}x")
    print(
        f"   blocks of {final.block_size}: prompt stored in {first.used_blocks}, {final.used_blocks} held at the end, "
        f"{final.shared_blocks} of them shared; {final.stored_tokens} tokens stored for {final.logical_tokens} used"
    )
    print(
        f"   keys and values: {megabytes(final.bytes_used)} in use, {megabytes(final.bytes_allocated)} allocated, "
        f"against {megabytes(before.watch.kv_bytes)} in the DynamicCache"
    )


def _chat(model: Any, tokenizer: Any, new_tokens: int) -> bool:
    """Two turns; each takes the whole history as input and a cache that is kept between them."""
    print("\n== a second chat turn on a kept cache")
    from .. import compat

    def turns(make_cache: Callable[[], Any]) -> tuple[torch.Tensor, int, float, float, Any]:
        cache = make_cache()
        document = long_prompt(tokenizer, 800)
        torch.manual_seed(0)
        start = time.perf_counter()
        first = model.generate(
            document, attention_mask=torch.ones_like(document), max_new_tokens=new_tokens, do_sample=False,
            **{compat.CACHE_ARGUMENT: cache},
        )  # fmt: skip
        first_seconds = time.perf_counter() - start
        question = "\n<|im_start|>user\nSay that in one short sentence.<|im_end|>\n<|im_start|>assistant\n"
        follow_up = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        history = torch.cat([first, follow_up], dim=1)
        start = time.perf_counter()
        second = model.generate(
            history, attention_mask=torch.ones_like(history), max_new_tokens=new_tokens, do_sample=False,
            **{compat.CACHE_ARGUMENT: cache},
        )  # fmt: skip
        return second, history.shape[1], first_seconds, time.perf_counter() - start, cache

    print("   unpatched, DynamicCache ... ", end="", flush=True)
    before, _, first_turn, seconds, _ = turns(lambda: transformers.DynamicCache(config=model.config))
    print(f"{first_turn:.1f} s + {seconds:.1f} s", flush=True)
    print("   hf_paged, PagedCache ... ", end="", flush=True)
    with hf_paged.patched(model):
        after, history_length, first_turn, our_seconds, cache = turns(lambda: hf_paged.PagedCache(model.config))
    print(f"{first_turn:.1f} s + {our_seconds:.1f} s", flush=True)
    same = before.shape == after.shape and bool((before == after).all())
    text = tokenizer.decode(after[0, history_length:], skip_special_tokens=True).strip().replace("\n", " ")
    stats = cache.stats()
    print(f'   "{text[:150]}"')
    print(f"   identical to the unpatched run: {'yes' if same else 'NO'}")
    print(f"   second turn {our_seconds:.1f} s against {seconds:.1f} s: {seconds / our_seconds:.2f}x")
    print(
        f"   {stats.used_blocks} blocks hold {stats.stored_tokens} tokens in {megabytes(stats.bytes_used)}, "
        f"{100 * (1 - stats.utilization):.1f} % of their slots empty"
    )
    return same


def _batch(tokenizer: Any, count: int) -> dict[str, torch.Tensor]:
    """`count` instructions of unlike lengths as chat prompts, left-padded."""
    step = max(len(INSTRUCTIONS) // count, 1)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in INSTRUCTIONS[::step][:count]
    ]
    texts[-1] = tokenizer.decode(long_prompt(tokenizer, 400)[0])
    return dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False))


def run(prompt_tokens: int = 1024, new_tokens: int = 32) -> int:
    """The demo. Returns 0 if every run equals its unpatched one, else 1."""
    transformers.logging.set_verbosity_error()
    start = time.perf_counter()
    print("Loading SmolLM2-135M-Instruct (the first time it is converted from GGUF, about 40 s)", flush=True)
    model, tokenizer = load_real_model(progress=lambda text: print(f"   {text}", flush=True))
    print("   " + ", ".join(f"{name} {value}" for name, value in versions().items()))
    document = long_prompt(tokenizer, prompt_tokens)
    inputs = {"input_ids": document, "attention_mask": torch.ones_like(document)}
    batch = _batch(tokenizer, 6)
    lengths = batch["attention_mask"].sum(1).tolist()
    size = f"a prompt of {prompt_tokens} tokens, {new_tokens} new"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        results = [
            _compare(f"greedy: {size}", model, tokenizer, inputs, new_tokens, do_sample=False),
            _compare(f"4 beams: {size}", model, tokenizer, inputs, new_tokens, do_sample=False, num_beams=4,
                     num_return_sequences=1, min_new_tokens=new_tokens),
            _compare(f"8 samples: {size}", model, tokenizer, inputs, new_tokens, do_sample=True, temperature=0.8,
                     num_return_sequences=8, min_new_tokens=new_tokens),
            _compare(f"a left-padded batch, prompts of {lengths} tokens, {new_tokens} new", model, tokenizer, batch,
                     new_tokens, do_sample=False),
            _chat(model, tokenizer, new_tokens),
        ]  # fmt: skip
    same = all(results)
    print(
        f"\n{sum(results)} of {len(results)} runs put out the very tokens of the unpatched model; "
        f"{time.perf_counter() - start:.0f} s in all"
    )
    return 0 if same else 1
