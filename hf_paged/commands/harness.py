"""What the CPU benchmarks share: running a case with the library's caches and with ours in turn, and its numbers."""

import time
from collections.abc import Callable
from typing import Any

import torch

from .. import compat, implementations
from ..cache import PagedCache
from ..config import PagedConfig
from .measure import TimedRun, rotated, same_ids, say, spread, timed_generate
from .prompts import long_prompt
from .real_model import load_real_model

Entry = dict[str, Any]
NEW_TOKENS = 64
RAGGED = [16, 40, 100, 180, 320, 600, 840, 1024]


class Bench:
    """The loaded model and how often to repeat."""

    def __init__(self, repeat: int):
        self.repeat = repeat
        self.model, self.tokenizer = load_real_model(progress=say)

    def prompt(self, tokens: int) -> dict[str, torch.Tensor]:
        ids = long_prompt(self.tokenizer, tokens)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# -- whole calls of generate() ----------------------------------------------------------------------------------------


def time_generate(
    bench: Bench, name: str, inputs: dict[str, torch.Tensor], new_tokens: int = NEW_TOKENS, **options: Any
) -> list[Entry]:
    """Time generate() with both of the library's caches and with ours, in turn; each of our calls is the first one."""
    kinds: dict[str, dict[str, Any]] = {
        "DynamicCache": {},
        "StaticCache": {"cache_implementation": "static"},
        "hf_paged": {},
    }
    runs: dict[str, list[TimedRun]] = {kind: [] for kind in kinds}
    for round_ in range(bench.repeat):
        for kind in rotated(list(kinds), round_):
            more = {**options, **kinds[kind]}
            runs[kind].append(timed_generate(bench.model, inputs, new_tokens, kind == "hf_paged", **more))
        times = ", ".join(f"{kind} {runs[kind][-1].seconds:.2f} s" for kind in kinds)
        say(f"{name} {round_ + 1}/{bench.repeat}: {times}")
    ours = runs["hf_paged"]
    first, final, after = ours[-1].watch.first, ours[-1].watch.final, ours[-1].stats
    assert first is not None and final is not None and after is not None
    entries = []
    for kind in ("DynamicCache", "StaticCache"):
        theirs = runs[kind]
        entries.append(
            make_entry(
                name,
                kind,
                [run.seconds for run in theirs],
                [run.seconds for run in ours],
                same_ids([run.ids for run in ours], [run.ids for run in theirs]),
                theirs[-1].kv_bytes,
                ours[-1].kv_bytes,
            )
            | {
                "block_size": final.block_size,
                "prompt_blocks": first.used_blocks,
                "peak_used_blocks": after.peak_used_blocks,
                "slots_wasted": round(1 - final.utilization, 4),
                "fallbacks": after.fallbacks,
                "baseline_peak_rss": _highest(theirs),
                "ours_peak_rss": _highest(ours),
            }
        )
    return entries


def _highest(runs: list[TimedRun]) -> int | None:
    peaks = [run.peak_rss for run in runs if run.peak_rss is not None]
    return max(peaks, default=None)


def make_entry(
    case: str,
    baseline: str,
    theirs: list[float],
    ours: list[float],
    identical: bool,
    baseline_bytes: int | None,
    our_bytes: int | None,
) -> Entry:
    their, their_low, their_high = spread(theirs)
    our, our_low, our_high = spread(ours)
    ratio, ratio_low, ratio_high = spread([a / b for a, b in zip(theirs, ours, strict=True)])
    return {
        "case": case,
        "dtype": "float32",
        "baseline": baseline,
        "baseline_seconds": their,
        "ours_seconds": our,
        "ratio": their / our,
        "identical": identical,
        "baseline_kv_bytes": baseline_bytes,
        "ours_kv_bytes": our_bytes,
        "repetitions": len(ours),
        "baseline_quartiles": [their_low, their_high],
        "ours_quartiles": [our_low, our_high],
        "pairwise_ratio": ratio,
        "pairwise_ratio_quartiles": [ratio_low, ratio_high],
    }


def filled(model: Any, cache: Any, rows: int, tokens: int) -> Any:
    """Fill a cache with the same random keys and values, `tokens` per row."""
    text = model.config
    generator = torch.Generator().manual_seed(0)
    shape = (rows, text.num_key_value_heads, tokens, text.head_dim)
    for layer in range(text.num_hidden_layers):
        cache.update(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), layer)
    if isinstance(cache, PagedCache):
        for layer in cache.paged_layers:
            layer.flush()
    return cache


def filled_paged(model: Any, rows: int, tokens: int, room: int, **options: Any) -> PagedCache:
    """A filled `PagedCache`, told how many tokens are to come, as the patched generate() tells it; options are
    `PagedConfig` fields."""
    cache = PagedCache(model.config, PagedConfig(**options))
    cache.state.expected_columns = tokens + room
    return filled(model, cache, rows, tokens)


def time_steps(
    bench: Bench,
    caches: dict[str, Any],
    rows: int,
    past: int,
    steps: int,
    before: Callable[[str], None] = lambda kind: None,
) -> tuple[dict[str, list[float]], dict[str, list[torch.Tensor]]]:
    """Run decode steps with each cache in turn; the attention implementation follows the cache.

    Args:
        before: called with a cache's name before its step.
    """
    model = bench.model
    usual = model.config._attn_implementation_internal
    times: dict[str, list[float]] = {kind: [] for kind in caches}
    logits: dict[str, list[torch.Tensor]] = {kind: [] for kind in caches}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for step in range(steps):
            ids = torch.randint(5, 1000, (rows, 1), generator=generator)
            positions = torch.full((rows, 1), past + step)
            for kind in rotated(list(caches), step):
                cache = caches[kind]
                before(kind)
                paged = isinstance(cache, PagedCache)
                model.config._attn_implementation_internal = implementations.NAME if paged else usual
                try:
                    start = time.perf_counter()
                    out = model(ids, position_ids=positions, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
                    times[kind].append(time.perf_counter() - start)
                finally:
                    model.config._attn_implementation_internal = usual
                logits[kind].append(out.logits[:, -1])
    return times, logits
