"""Cases of `bench cpu` in which something is there already: a prefix, a common header, a prompt of many beams."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import hf_paged

from ..backends import torch_strided
from ..cache import PagedCache
from .harness import NEW_TOKENS, RAGGED, Bench, Entry, filled, filled_paged, make_entry, time_generate, time_steps
from .measure import dense_bytes, say
from .prompts import INSTRUCTIONS, long_prompt, ragged_prompts


def turn1500(bench: Bench) -> list[Entry]:
    """time to the first token of a second turn: 50 new tokens behind 1,500 of the first; cold is the unpatched model"""
    model = bench.model
    history = long_prompt(bench.tokenizer, 1550)
    theirs, ours, ids = [], [], []
    for round_ in range(bench.repeat):
        first: dict[str, float] = {}
        for kind in ("DynamicCache", "hf_paged") if round_ % 2 else ("hf_paged", "DynamicCache"):
            if kind == "hf_paged":
                hf_paged.patch(model)
                model.generate(history[:, :1500], max_new_tokens=1, do_sample=False)
            try:
                gc.collect()
                start = time.perf_counter()
                model.generate(history, max_new_tokens=1, do_sample=False)
                first[kind] = time.perf_counter() - start
                if round_ == 0:
                    ids.append(model.generate(history, max_new_tokens=24, do_sample=False))
                stats = model.paged_stats() if kind == "hf_paged" else None
            finally:
                hf_paged.unpatch(model)
            if stats is not None:
                hits, held = stats.prefix_hit_tokens, stats.bytes_allocated
        theirs.append(first["DynamicCache"])
        ours.append(first["hf_paged"])
        say(f"turn1500 {round_ + 1}/{bench.repeat}: cold {theirs[-1]:.2f} s, hf_paged {ours[-1]:.2f} s")
    entry = make_entry("turn1500", "DynamicCache", theirs, ours, torch.equal(*ids), None, held)
    return [entry | {"prefix_hit_tokens": hits}]


def ragged8_prefill(bench: Bench) -> list[Entry]:
    """the prefill of ragged8: the same batch, one new token"""
    ids, mask = ragged_prompts(bench.tokenizer, RAGGED)
    inputs = {"input_ids": ids, "attention_mask": mask}
    return time_generate(bench, "ragged8_prefill", inputs, new_tokens=1, do_sample=False)


def header8(bench: Bench) -> list[Entry]:
    """8 unlike questions behind one header of 1,000 tokens, the first call with it, 32 new tokens"""
    header = long_prompt(bench.tokenizer, 1000)[0].tolist()
    rows = [header + bench.tokenizer(text, add_special_tokens=False).input_ids[:24] for text in INSTRUCTIONS[:8]]
    longest = max(map(len, rows))
    pad = bench.tokenizer.pad_token_id
    inputs = {
        "input_ids": torch.tensor([[pad] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }
    return time_generate(bench, "header8", inputs, new_tokens=32, do_sample=False)


def shared_steps(bench: Bench) -> list[Entry]:
    """one decode step of 4 and 8 rows that share 1,500 tokens, against the same step with one token of context"""
    entries = []
    for rows in (4, 8):
        shared = filled_paged(bench.model, 1, 1500, NEW_TOKENS)
        shared.batch_repeat_interleave(rows)
        short = filled_paged(bench.model, rows, 1, NEW_TOKENS)
        dense = filled(bench.model, transformers.DynamicCache(config=bench.model.config), 1, 1500)
        dense.batch_repeat_interleave(rows)
        steps = 4 + 4 * bench.repeat
        times, logits = time_steps(bench, {"DynamicCache": dense, "hf_paged": shared}, rows, 1500, steps)
        floor, _ = time_steps(bench, {"floor": short, "hf_paged": shared}, rows, 1500 + steps, steps)
        same = all(bool((a.argmax(-1) == b.argmax(-1)).all()) for a, b in zip(*logits.values(), strict=True))
        held, theirs = shared.stats().bytes_allocated, dense_bytes(dense)
        name = f"shared{rows}"
        entries.append(
            make_entry(name, "DynamicCache", times["DynamicCache"][4:], times["hf_paged"][4:], same, theirs, held)
        )
        entries.append(make_entry(name, "floor", floor["floor"][4:], floor["hf_paged"][4:], same, None, held))
    return entries


def samples16(bench: Bench) -> list[Entry]:
    """one decode step of 16 samples of 2,000 shared tokens, each row reading by itself, and DynamicCache's"""
    rows, past, steps = 16, 2000, 4 + 4 * bench.repeat
    model = bench.model
    dense = filled(model, transformers.DynamicCache(config=model.config), 1, past)
    dense.batch_repeat_interleave(rows)
    stored = PagedCache(model.config)
    stored.state.expected_columns = past + NEW_TOKENS
    for index, layer in enumerate(dense.layers):
        stored.update(layer.keys, layer.values, index)
        stored.layers[index].flush()
    caches: dict[str, Any] = {"DynamicCache": dense, "own copies": stored}
    for kind, backend in (("unshared", "auto"), ("unshared torch", "torch"), ("hf_paged", "auto")):
        caches[kind] = filled_paged(model, 1, past, NEW_TOKENS, backend=backend)
        caches[kind].batch_repeat_interleave(rows)
    threshold = torch_strided.LONG_PREFIX

    def switch(kind: str) -> None:
        torch_strided.LONG_PREFIX = 1 << 30 if kind.startswith("unshared") else threshold

    try:
        times, logits = time_steps(bench, caches, rows, past, steps, before=switch)
    finally:
        torch_strided.LONG_PREFIX = threshold
    ours = logits.pop("hf_paged")
    entries = []
    for kind, theirs in logits.items():
        same = all(bool((a.argmax(-1) == b.argmax(-1)).all()) for a, b in zip(theirs, ours, strict=True))
        held = dense_bytes(dense) if kind == "DynamicCache" else caches[kind].stats().bytes_allocated
        our_bytes = caches["hf_paged"].stats().bytes_allocated
        entries.append(make_entry("samples16", kind, times[kind][4:], times["hf_paged"][4:], same, held, our_bytes))
    return entries


SHARING_CASES: tuple[Callable[[Bench], list[Entry]], ...] = (
    turn1500, ragged8_prefill, header8, shared_steps, samples16,
)  # fmt: skip
