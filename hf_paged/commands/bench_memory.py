"""`python -m hf_paged bench memory`: what sharing blocks saves in beam search and parallel sampling, on the real model.

The measurement is that of PagedAttention (Kwon et al. 2023, section 6.3). Requests whose lengths have published means
(see `workload`) run through a patched generate(). After every decode step the blocks that the cache's tables name are
counted, once each (distinct), and as if every row had its own (unshared); both are summed over steps and requests:

    memory saving  1 - distinct / unshared blocks
    slots wasted   1 - tokens stored / slots of the distinct blocks

Other block sizes are not estimated: the moves of the rows are recorded and made again in pools of those block sizes.
The same is done at the block size that the model ran with, and must give the counts of the run.

Beside it stands what the same sequences would take elsewhere, by accounting: the library's DynamicCache, which holds
every row in full, and allocators that reserve one contiguous piece for each sequence (section 6.1): exactly its final
length (oracle), room for its output rounded up to a power of two, or the longest sequence there may be.

Several requests run in one call, sorted by output length, so that it takes minutes and not hours. Counts are kept per
request, until its own last token, so they are those of the request run alone.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ..patching import patched
from .measure import UsageError, megabytes, opening, say, writable, write_results
from .prompts import instruction_prompts, left_padded
from .real_model import load_real_model
from .trace import BlockCounts, Recorder, RequestTrace, replay
from .workload import WORKLOADS, Workload

Entry = dict[str, Any]
MODES: dict[str, str] = {"samples": "parallel sampling", "beams": "beam search"}
LIVE_BLOCK_SIZE = 16
ROWS_AT_ONCE = 48  # of one generate() call, over all its requests


# -- running the model ------------------------------------------------------------------------------------------------


def run_requests(
    model: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: Sequence[int],
    mode: str,
    width: int,
    block_size: int = LIVE_BLOCK_SIZE,
    on_forward: Callable[[int], object] = lambda forwards: None,
) -> tuple[list[RequestTrace], list[BlockCounts], dict[str, int]]:
    """Run requests through one patched generate() and watch what they hold.

    Args:
        model: not patched.
        prompts: token ids of each request.
        new_tokens: new tokens of each request, at least 2.
        mode: "beams" or "samples".
        width: beams or samples of each request.
        block_size: tokens per block.
        on_forward: see `Recorder`.

    Returns:
        The moves of each request, what each held, and the fallbacks of the call.
    """
    ids, mask = left_padded(prompts, model.generation_config.pad_token_id)
    longest = max(new_tokens)
    how: dict[str, Any]
    if mode == "beams":
        how = {"do_sample": False, "num_beams": width}
    else:
        how = {"do_sample": True, "num_return_sequences": width}
    torch.manual_seed(0)
    # Without prefix caching: requests of a batch must not find each other's prompts, nor those of an earlier call.
    with patched(model, block_size=block_size, prefix_caching=False):
        with Recorder(model, [len(prompt) for prompt in prompts], new_tokens, width, on_forward) as recorder:
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, **how)
        fallbacks = model.paged_stats().fallbacks
    for trace, wanted in zip(recorder.traces, new_tokens, strict=True):
        if trace.steps != wanted - 1:
            raise RuntimeError(f"generate() ran {trace.steps} decode steps of a request of {wanted} new tokens")
    return recorder.traces, recorder.counts, fallbacks


def _batches(requests: Sequence[tuple[int, int]], size: int) -> list[list[int]]:
    """Indices of the requests, `size` in a batch, those with the fewest new tokens first."""
    order = sorted(range(len(requests)), key=lambda index: requests[index][1])
    return [order[first : first + size] for first in range(0, len(order), size)]


# -- accounting -------------------------------------------------------------------------------------------------------


def reserved_slots(prompt: int, new_tokens: int, max_length: int) -> dict[str, int]:
    """Slots that a contiguous allocator reserves for one sequence from its first step to its last.

    The last new token is never fed back, so a cache holds one token less than the sequence has.

    Args:
        prompt: tokens of the prompt.
        new_tokens: tokens generated after it.
        max_length: tokens of the longest sequence there may be.

    Returns:
        "oracle": exactly the tokens it holds in the end; "power of two": the prompt and its output rounded up to a
        power of two, so at most twice the output; "maximum": `max_length`.
    """
    output = new_tokens - 1
    return {
        "oracle": prompt + output,
        "power of two": prompt + (1 << max(output - 1, 0).bit_length()),
        "maximum": max_length,
    }


def contiguous(traces: Iterable[RequestTrace], max_length: int) -> dict[str, dict[str, int]]:
    """Slots filled and reserved without blocks and without sharing, summed over rows, decode steps and requests.

    Returns:
        `{"slots_used": ..., "slots_reserved": ...}` of the DynamicCache, which grows with its rows and holds each in
        full, and of each allocator of `reserved_slots`.
    """
    used = 0
    reserved: dict[str, int] = {}
    for trace in traces:
        used += trace.width * sum(trace.length(step) for step in range(trace.steps))
        for name, slots in reserved_slots(trace.prompt, trace.steps + 1, max_length).items():
            reserved[name] = reserved.get(name, 0) + trace.width * trace.steps * slots
    return {
        name: {"slots_used": used, "slots_reserved": slots}
        for name, slots in {"DynamicCache": used, **reserved}.items()
    }


# -- cases ------------------------------------------------------------------------------------------------------------


class _Progress:
    """Says where a case is: about every ten seconds, and at its end."""

    def __init__(self, name: str, total: int):
        self.name, self.total = name, total
        self.done = 0
        self.start = self.said = time.perf_counter()

    def forward(self, forwards: int, longest: int) -> None:
        """The running call has done `forwards` of `longest` forwards."""
        if time.perf_counter() - self.said >= 10:
            self._say(f", token {forwards} of {longest} of the next")

    def finish(self, requests: int) -> None:
        self.done += requests
        if self.done == self.total:
            self._say()

    def _say(self, more: str = "") -> None:
        self.said = time.perf_counter()
        say(f"{self.name}: {self.done} of {self.total} requests{more}, {self.said - self.start:.0f} s")


def _case(
    model: Any, workload: Workload, requests: list[tuple[int, int]], prompts: list[list[int]], mode: str, width: int,
    block_sizes: Sequence[int], max_length: int,
) -> Entry:  # fmt: skip
    name = f"{workload.name} {mode} width={width}"
    progress = _Progress(name, len(requests))
    traces: list[RequestTrace] = []
    live = BlockCounts(LIVE_BLOCK_SIZE)
    fallbacks: dict[str, int] = {}
    same = True
    for batch in _batches(requests, max(ROWS_AT_ONCE // width, 1)):
        new_tokens = [requests[index][1] for index in batch]
        moves, held, reasons = run_requests(
            model,
            [prompts[index] for index in batch],
            new_tokens,
            mode,
            width,
            on_forward=partial(progress.forward, longest=max(new_tokens)),
        )
        traces.extend(moves)
        same &= held == [replay(trace, LIVE_BLOCK_SIZE) for trace in moves]
        live = sum(held, live)
        for reason, calls in reasons.items():
            fallbacks[reason] = fallbacks.get(reason, 0) + calls
        progress.finish(len(batch))
    seconds = time.perf_counter() - progress.start
    config = model.config
    return {
        "case": name,
        "dataset": workload.name,
        "mode": mode,
        "width": width,
        "requests": len(requests),
        "mean_prompt_tokens": sum(prompt for prompt, _ in requests) / len(requests),
        "mean_new_tokens": sum(new for _, new in requests) / len(requests),
        "live": _numbers(live),
        "replayed": [_numbers(_replay_all(traces, size)) for size in block_sizes],
        "replay_equals_live": same,
        "max_length": max_length,
        "contiguous": {
            kind: {**slots, "slots_filled": slots["slots_used"] / slots["slots_reserved"]}
            for kind, slots in contiguous(traces, max_length).items()
        },
        "kv_bytes_per_token": _bytes_per_token(config, model.dtype),
        "fallbacks": fallbacks,
        "seconds": seconds,
    }


def _replay_all(traces: Iterable[RequestTrace], block_size: int) -> BlockCounts:
    return sum((replay(trace, block_size) for trace in traces), BlockCounts(block_size))


def _numbers(counts: BlockCounts) -> Entry:
    return {**asdict(counts), "memory_saving": counts.memory_saving, "slots_wasted": counts.slots_wasted}


def _bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


# -- the tables -------------------------------------------------------------------------------------------------------


def _print_tables(results: Sequence[Entry]) -> None:
    print("\nBlocks held, summed over all decode steps and requests")
    print(f"{'case':<27} {'block':>5}          {'unshared':>11} {'distinct':>11}   saving  slots wasted")
    for entry in results:
        rows = [("measured", entry["live"]), *(("replayed", counts) for counts in entry["replayed"])]
        for name, (how, counts) in zip([entry["case"], *[""] * len(entry["replayed"])], rows, strict=True):
            print(
                f"{name:<27} {counts['block_size']:>5} {how} {counts['unshared_blocks']:>11,} "
                f"{counts['distinct_blocks']:>11,}  {100 * counts['memory_saving']:5.1f} %  "
                f"{100 * counts['slots_wasted']:10.1f} %"
            )
        if not entry["replay_equals_live"]:
            print(f"{'':<27} REPLAYED AT {entry['live']['block_size']}, THE COUNTS ARE NOT THOSE MEASURED")
    print("\nThe same sequences elsewhere: slots of one request, mean over all decode steps")
    print(f"{'case':<27} {'allocator':<22} {'slots':>9} {'keys and values':>15}   filled   of DynamicCache")
    for entry in results:
        for index, (name, slots, filled) in enumerate(_held(entry)):
            mean = slots / entry["live"]["steps"]
            dense = entry["contiguous"]["DynamicCache"]["slots_reserved"]
            print(
                f"{'' if index else entry['case']:<27} {name:<22} {mean:>9,.0f} "
                f"{megabytes(mean * entry['kv_bytes_per_token']):>15}  {100 * filled:5.1f} %   {slots / dense:10.2f}x"
            )


def _held(entry: Entry) -> list[tuple[str, int, float]]:
    """Allocator, slots summed over steps, and the share of them that is filled."""
    live = entry["live"]
    size = live["block_size"]
    lines = [(f"hf_paged, blocks of {size}", live["distinct_blocks"] * size, 1 - live["slots_wasted"])]
    for name, slots in entry["contiguous"].items():
        title = f"maximum ({entry['max_length']})" if name == "maximum" else name
        lines.append((title, slots["slots_reserved"], slots["slots_filled"]))
    return lines


# -- the command ------------------------------------------------------------------------------------------------------


def _chosen(dataset: str) -> list[Workload]:
    if dataset == "both":
        return list(WORKLOADS.values())
    if dataset not in WORKLOADS:
        raise UsageError(f"no data set named {dataset}; there are {', '.join(WORKLOADS)} and both")
    return [WORKLOADS[dataset]]


def _sizes(option: str, values: Sequence[int], least: int) -> list[int]:
    if not values or min(values) < least:
        raise UsageError(f"{option} must be at least {least}, got {' '.join(map(str, values)) or 'nothing'}")
    return list(dict.fromkeys(values))


def run(
    dataset: str = "alpaca",
    requests: int | None = None,
    block_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    widths: Sequence[int] = (2, 4, 6),
    max_length: int = 2048,
    json_file: str | None = None,
) -> int:
    """Measure, print the tables, write the JSON after every case.

    Args:
        dataset: "alpaca", "sharegpt" or "both".
        requests: how many of each data set; None: the number that its `Workload` names.
        block_sizes: tokens per block of the replays.
        widths: numbers of beams and of samples.
        max_length: tokens of the longest sequence, for the allocator that reserves it.
        json_file: where to write the results, too.

    Returns:
        0 if every replay at the block size of the run gave the counts of the run, else 1; 130 if it was interrupted.

    Raises:
        UsageError: for an unknown data set, a number that is too small, or a file that cannot be written.
    """
    workloads = _chosen(dataset)
    if requests is not None and requests < 1:
        raise UsageError(f"--requests must be at least 1, got {requests}")
    block_sizes = _sizes("--block-sizes", block_sizes, 1)
    widths = _sizes("--widths", widths, 2)  # one sequence has nobody to share with
    drawn = {workload.name: workload.draw(requests or workload.requests) for workload in workloads}
    longest = max(prompt + new for lengths in drawn.values() for prompt, new in lengths)
    if max_length < longest:
        raise UsageError(f"--max-length must hold the longest sequence, {longest} tokens, got {max_length}")
    target = writable(json_file)

    facts = opening()
    model, tokenizer = load_real_model(progress=say)
    results: list[Entry] = []
    try:
        for workload in workloads:
            lengths = drawn[workload.name]
            _introduce(workload, lengths, fewer=requests is None and len(lengths) < 100)
            prompts = instruction_prompts(tokenizer, [prompt for prompt, _ in lengths])
            for mode in MODES:
                for width in widths:
                    results.append(_case(model, workload, lengths, prompts, mode, width, block_sizes, max_length))
                    if target is not None:
                        write_results(target, facts, results)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {len(results)} cases", flush=True)
        _print_tables(results)
        return 130
    _print_tables(results)
    return 0 if all(entry["replay_equals_live"] for entry in results) else 1


def _introduce(workload: Workload, lengths: Sequence[tuple[int, int]], fewer: bool) -> None:
    prompts, outputs = ([pair[index] for pair in lengths] for index in (0, 1))
    print(
        f"{workload.name}: {len(lengths)} requests, prompts of {min(prompts)} to {max(prompts)} tokens "
        f"(mean {sum(prompts) / len(prompts):.1f}), outputs of {min(outputs)} to {max(outputs)} "
        f"(mean {sum(outputs) / len(outputs):.1f}).\n"
        f"  The lengths are drawn from log-normal distributions with the published means, {workload.inputs.mean:.0f} "
        f"and {workload.outputs.mean:.0f}, not from the data set; the prompts are this project's own.\n"
        f"  Up to {ROWS_AT_ONCE} rows run in one call; counts are per request, until its own last token.",
        flush=True,
    )
    if fewer:
        print(f"  Only {len(lengths)} requests, because these are long; --requests N takes more.", flush=True)
