"""`python -m hf_paged bench cpu`: time and memory on the CPU against DynamicCache and StaticCache, on the real model.

Baseline and ours alternate in one process; the table gives medians with quartiles. Key-value bytes are those of all
store tensors, spare, null and cached blocks and gather buffers included. A ratio is baseline time / our time: above 1
is faster.
"""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from .. import attention, compat, implementations
from ..cache import PagedCache
from ..cpu_kernels.library import library
from ..generation.identity import Walk, begin, worth_looking_up, worth_storing
from ..generation.soundness import Gate
from .bench_sharing import SHARING_CASES
from .harness import NEW_TOKENS, RAGGED, Bench, Entry, filled, filled_paged, make_entry, time_generate, time_steps
from .measure import UsageError, dense_bytes, megabytes, opening, seconds_text, writable, write_results
from .prompts import ragged_prompts


def beams4(bench: Bench) -> list[Entry]:
    """4 beams, a prompt of 1,500 tokens, 64 new: generate() from end to end"""
    return time_generate(bench, "beams4", bench.prompt(1500), num_beams=4, do_sample=False)


def samples8(bench: Bench) -> list[Entry]:
    """8 samples of a prompt of 1,500 tokens, 64 new: generate() from end to end"""
    return time_generate(bench, "samples8", bench.prompt(1500), num_return_sequences=8, do_sample=True, temperature=0.8)


def ragged8(bench: Bench) -> list[Entry]:
    """a left-padded batch of 8, lengths 16 … 1,024, 64 new: generate() from end to end"""
    ids, mask = ragged_prompts(bench.tokenizer, RAGGED)
    return time_generate(bench, "ragged8", {"input_ids": ids, "attention_mask": mask}, do_sample=False)


def greedy100(bench: Bench) -> list[Entry]:
    """greedy, 1 row, a prompt of 100 tokens, 64 new: generate() from end to end"""
    return time_generate(bench, "greedy100", bench.prompt(100), do_sample=False)


def greedy1500(bench: Bench) -> list[Entry]:
    """greedy, 1 row, a prompt of 1,500 tokens, 64 new: generate() from end to end"""
    return time_generate(bench, "greedy1500", bench.prompt(1500), do_sample=False)


# -- decode steps -----------------------------------------------------------------------------------------------------


def decode8x4k(bench: Bench) -> list[Entry]:
    """one decode step of 8 rows with 4,096 tokens each, nothing shared"""
    rows, past, steps = 8, 4096, 4 + 4 * bench.repeat
    model = bench.model
    caches = {
        "DynamicCache": filled(model, transformers.DynamicCache(config=model.config), rows, past),
        "StaticCache": filled(
            model, transformers.StaticCache(config=model.config, max_cache_len=past + steps), rows, past
        ),
        "hf_paged": filled_paged(model, rows, past, NEW_TOKENS),
    }
    times, logits = time_steps(bench, caches, rows, past, steps)
    paged = caches["hf_paged"].stats()
    entries = []
    for kind in ("DynamicCache", "StaticCache"):
        same = all(
            bool((mine.argmax(-1) == other.argmax(-1)).all())
            for mine, other in zip(logits["hf_paged"], logits[kind], strict=True)
        )
        entries.append(
            make_entry(
                "decode8x4k", kind, times[kind][4:], times["hf_paged"][4:], same, dense_bytes(caches[kind]),
                paged.bytes_allocated + caches["hf_paged"].pool.scratch_bytes,
            )
            | {
                "max_logit_difference": max(
                    float((mine - other).abs().max())
                    for mine, other in zip(logits["hf_paged"], logits[kind], strict=True)
                )
            }
        )  # fmt: skip
    return entries


def floor(bench: Bench) -> list[Entry]:
    """one decode step with one token of context: the model without attention, for 1, 4 and 8 rows"""
    entries = []
    for rows in (1, 4, 8):
        caches = {
            "DynamicCache": filled(bench.model, transformers.DynamicCache(config=bench.model.config), rows, 1),
            "hf_paged": filled_paged(bench.model, rows, 1, NEW_TOKENS),
        }
        times, logits = time_steps(bench, caches, rows, 1, 4 + 8 * bench.repeat)
        same = all(bool((a.argmax(-1) == b.argmax(-1)).all()) for a, b in zip(*logits.values(), strict=True))
        entries.append(
            make_entry(
                f"floor{rows}", "DynamicCache", times["DynamicCache"][4:], times["hf_paged"][4:], same,
                dense_bytes(caches["DynamicCache"]), caches["hf_paged"].stats().bytes_allocated,
            )
        )  # fmt: skip
    return entries


def beam_step(bench: Bench) -> list[Entry]:
    """the cache's work of one beam step, 4 beams with 4,096 tokens: reorder_cache against tables and copy-on-write"""
    model, rows, past = bench.model, 4, 4096
    dense = filled(model, transformers.DynamicCache(config=model.config), rows, past)
    cache = filled_paged(model, 1, past - 8, NEW_TOKENS)
    cache.batch_repeat_interleave(rows)
    text = model.config
    generator = torch.Generator().manual_seed(0)
    # What the keys of the first layer must be, kept the plain way beside it.
    expected = cache.layers[0].keys

    def append() -> None:
        for layer in range(text.num_hidden_layers):
            cache.update(token, token, layer)
            cache.layers[layer].flush()

    theirs, ours, plain = [], [], []
    for _ in range(8 * bench.repeat):
        beams = torch.randint(0, rows, (rows,), generator=generator)
        token = torch.randn(rows, text.num_key_value_heads, 1, text.head_dim, generator=generator)
        start = time.perf_counter()
        dense.reorder_cache(beams)
        theirs.append(time.perf_counter() - start)
        # A step that follows a reorder copies the blocks the beams share and write to; one that does not is the
        # cost of writing alone, to be taken off.
        start = time.perf_counter()
        cache.reorder_cache(beams)
        append()
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        append()
        plain.append(time.perf_counter() - start)
        cache.check()
        expected = torch.cat([expected.index_select(0, beams), token, token], dim=2)
    same = torch.equal(cache.layers[0].keys, expected)
    writing = statistics.median(plain)
    net = [max(seconds - writing, 1e-9) for seconds in ours]
    return [
        make_entry("beam_step", "DynamicCache", theirs, net, same, dense_bytes(dense), cache.stats().bytes_allocated)
        | {"seconds_with_writing_the_token": statistics.median(ours), "seconds_of_writing_alone": writing}
    ]


class _Causal(torch.nn.Module):
    """Stands for an attention module."""

    is_causal = True


def overhead(bench: Bench) -> list[Entry]:
    """our own Python time per decode step, 30 layers, 8 rows, at contexts of 64, 1,024 and 4,096 tokens"""
    # The attention kernel is replaced by a stub, or its time, which grows with the context, would drown the rest. Where
    # it is PyTorch's, what remains of the tensor work (two writes and two views a layer) is timed by itself and taken
    # off; the compiled kernel writes, too, so nothing but the first layer's writes remains, and nothing is taken off.
    config = bench.model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    token = torch.randn(8, heads, 1, dim)
    query = torch.randn(8, config.num_attention_heads, 1, dim)
    module = _Causal()
    compiled = library() is not None
    entries = []
    for past in (64, 1024, 4096):
        cache = filled_paged(bench.model, 8, past, NEW_TOKENS)
        whole, bare = [], []

        def step(cache: PagedCache = cache) -> torch.Tensor:
            for layer in range(config.num_hidden_layers):
                keys, values = cache.update(token, token, layer)
                out, _ = attention.paged_attention_forward(module, query, keys, values, None, scaling=0.125)
            return out

        with torch.no_grad():
            real = step()
            layer = cache.layers[-1]
            sdpa = torch.nn.functional.scaled_dot_product_attention
            expected = sdpa(query, layer.keys, layer.values, scale=0.125, enable_gqa=True)
            same = torch.allclose(real, expected.transpose(1, 2), atol=1e-5)
            with _without_kernels(query):
                for _ in range(4 + 10 * bench.repeat):
                    start = time.perf_counter()
                    step()
                    whole.append(time.perf_counter() - start)
                    bare.append(_bare_writes(cache, token))
        ours = whole[4:] if compiled else [a - b for a, b in zip(whole[4:], bare[4:], strict=True)]
        entries.append(
            make_entry(f"overhead{past}", "writes and views", bare[4:], ours, same, None, None)
            | {"seconds_in_all": statistics.median(whole[4:])}
        )
    return entries


@contextmanager
def _without_kernels(answer: torch.Tensor) -> Iterator[None]:
    """Attention that computes nothing: PyTorch's gives `answer`, the compiled one leaves its output as it is."""
    kernel: Any = library()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    decode = getattr(kernel, "hf_paged_decode", None)
    try:
        torch.nn.functional.scaled_dot_product_attention = lambda *args, **kwargs: answer
        if kernel is not None:
            kernel.hf_paged_decode = lambda *args: None
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = sdpa
        if kernel is not None:
            kernel.hf_paged_decode = decode


def _bare_writes(cache: PagedCache, token: torch.Tensor) -> float:
    """Seconds of the bare tensor operations of the step just done, attention left out: two writes, two views a layer.

    They are repeated on the slots of that step, so the cache does not change.
    """
    step = cache.state.step
    assert step is not None
    plan = step.groups[0]
    batch, heads, _, dim = token.shape
    memories = [cache.pool.stores[layer].memory for layer in range(len(cache.layers))]
    _, targets = plan.rows_on(token.device, heads, memories[0].num_slots)
    start = time.perf_counter()
    for memory in memories:
        memory.key_rows.index_copy_(0, targets, token.reshape(-1, dim))
        memory.value_rows.index_copy_(0, targets, token.reshape(-1, dim))
        memory.key_slots.as_strided((batch, heads, 64, dim), (64 * dim, memory.num_slots * dim, dim, 1), 0)
        memory.value_slots.as_strided((batch, heads, 64, dim), (64 * dim, memory.num_slots * dim, dim, 1), 0)
    return time.perf_counter() - start


def bfloat16(bench: Bench) -> list[Entry]:
    """bfloat16: mean distance of the logits to the float32 ones, ours and the unpatched model's"""
    model, text = bench.model, bench.model.config
    half = copy.deepcopy(model).to(torch.bfloat16)
    before = half.config._attn_implementation_internal
    prompts, _ = ragged_prompts(bench.tokenizer, [300] * 5)
    distances: dict[str, list[float]] = {"DynamicCache": [], "hf_paged": []}
    seconds: dict[str, list[float]] = {"DynamicCache": [], "hf_paged": []}
    for prompt in prompts.split(1):
        length = prompt.shape[1]
        torch.manual_seed(0)
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=True,
            num_return_sequences=4,
        )
        with torch.no_grad():
            exact = model(ids).logits[:, length - 1 : -1]
            for kind in distances:
                paged = kind == "hf_paged"
                cache = PagedCache(text) if paged else transformers.DynamicCache(config=text)
                half.config._attn_implementation_internal = implementations.NAME if paged else before
                start = time.perf_counter()
                first = half(prompt, use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits[:, -1:]
                cache.batch_repeat_interleave(len(ids))
                logits = [first.expand(len(ids), -1, -1)]
                for column in range(length, ids.shape[1] - 1):
                    out = half(ids[:, column : column + 1], use_cache=True, **{compat.CACHE_ARGUMENT: cache})
                    logits.append(out.logits)
                seconds[kind].append(time.perf_counter() - start)
                half.config._attn_implementation_internal = before
                distances[kind].append(float((torch.cat(logits, 1).float() - exact).abs().mean()))
    ours, theirs = (statistics.mean(distances[kind]) for kind in ("hf_paged", "DynamicCache"))
    entry = make_entry(
        "bfloat16", "DynamicCache", seconds["DynamicCache"], seconds["hf_paged"], ours <= 1.05 * theirs, None, None
    )
    # Ids in 16 bits differ by rounding; "identical" stands for: no further from float32 than 1.05 times the baseline.
    entry |= {
        "dtype": "bfloat16",
        "baseline_distance": theirs,
        "ours_distance": ours,
        "distance_ratio": ours / theirs,
    }
    return [entry]


def identity(bench: Bench) -> list[Entry]:
    """what prefixes are found by, gate included, against the computation of the 256 tokens that a hit saves"""
    model, gate = bench.model, Gate(True, False)
    ids = bench.prompt(256)["input_ids"]

    def look() -> tuple[Any, float, float]:
        start = time.perf_counter()
        walk = Walk(model)
        verdict = gate.judge(model, walk.modules)
        judged = time.perf_counter()
        begun = begin(walk)
        found = begun.finish()
        return (found, begun.num_bytes, verdict.barred), judged - start, time.perf_counter() - judged

    before, _, _ = look()
    theirs, gates, checksums, same = [], [], [], True
    with torch.no_grad():
        for _ in range(4 * bench.repeat):
            start = time.perf_counter()
            model(ids, logits_to_keep=1, use_cache=False)
            theirs.append(time.perf_counter() - start)
            now, gate_seconds, checksum_seconds = look()
            same = same and now == before and not now[2]
            gates.append(gate_seconds)
            checksums.append(checksum_seconds)
    ours = [a + b for a, b in zip(gates, checksums, strict=True)]
    num_bytes = before[1]
    return [
        make_entry("identity", "256 tokens", theirs, ours, same, None, None)
        | {
            "gate_seconds": statistics.median(gates),
            "checksum_seconds": statistics.median(checksums),
            "weight_bytes": num_bytes,
            "modules": len(list(model.modules())),
            "looked_up_from": worth_looking_up(num_bytes, "cpu"),
            "stored_from": worth_storing(num_bytes, "cpu"),
        }
    ]


CASES: dict[str, Callable[[Bench], list[Entry]]] = {
    case.__name__: case
    for case in (
        beams4, samples8, decode8x4k, greedy100, greedy1500, ragged8, beam_step, overhead, floor, bfloat16, identity,
        *SHARING_CASES,
    )
}  # fmt: skip


def _line(entry: Entry) -> str:
    low, high = entry["pairwise_ratio_quartiles"]
    text = (
        f"{entry['case']:<13} {entry['baseline']:<14} {seconds_text(entry['baseline_seconds']):>10} "
        f"{seconds_text(entry['ours_seconds']):>10}  {entry['ratio']:7.2f}x  [{low:.2f}, {high:.2f}]  "
        f"{'yes' if entry['identical'] else 'NO':<4}"
    )
    if entry["baseline_kv_bytes"]:
        share = entry["ours_kv_bytes"] / entry["baseline_kv_bytes"]
        text += f" {megabytes(entry['ours_kv_bytes'])} of {megabytes(entry['baseline_kv_bytes'])} ({share:.3f})"
    if "slots_wasted" in entry:
        text += f", {100 * entry['slots_wasted']:.1f} % of slots empty"
    if entry.get("ours_peak_rss"):
        text += f", peak RSS {entry['ours_peak_rss'] / 1e9:.2f} of {entry['baseline_peak_rss'] / 1e9:.2f} GB"
    if "gate_seconds" in entry:
        gate, checksum = (seconds_text(entry[f"{name}_seconds"]) for name in ("gate", "checksum"))
        text += (
            f" gate {gate}, checksum {checksum} of {megabytes(entry['weight_bytes'])}; looked up from "
            f"{entry['looked_up_from']} tokens, stored from {entry['stored_from']}"
        )
    if "distance_ratio" in entry:
        text += f" distance to float32 logits {entry['ours_distance']:.4f} of {entry['baseline_distance']:.4f}"
    return text


def run(cases: list[str] | None = None, json_file: str | None = None, repeat: int = 5) -> int:
    """Run the cases, print a table, write the JSON. Returns 0 if all outputs were identical, else 1.

    Raises:
        UsageError: for a case that does not exist, a number of repetitions below 1, or a file that cannot be written.
    """
    if unknown := sorted(set(cases or []) - set(CASES)):
        raise UsageError(f"no case named {', '.join(unknown)}; there are {', '.join(CASES)}")
    if repeat < 1:
        raise UsageError(f"--repeat must be at least 1, got {repeat}")
    target = writable(json_file)
    facts = opening()
    bench = Bench(repeat)
    results: list[Entry] = []
    for name in cases or CASES:
        print(f"{name}: {(CASES[name].__doc__ or '').splitlines()[0]}", flush=True)
        results.extend(CASES[name](bench))
        gc.collect()
        if target is not None:  # after every case, so that an interruption loses one case and not all
            write_results(target, facts, results)
    print("\ncase          baseline        baseline       ours    ratio   quartiles     same  key-value bytes")
    for entry in results:
        print(_line(entry))
    return 0 if all(entry["identical"] for entry in results) else 1
