"""What the CPU benchmarks share: running a case with the library's caches and with ours in turn, and its numbers."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

import hf_paged

from .. import attention, compat
from ..cache import PagedCache
from .measure import PeakMemory, Watch, spread
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


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def rotated(kinds: dict[str, Any], round_: int) -> list[str]:
    """The kinds in an order that starts with another one each round, so that none always follows the same other."""
    names = list(kinds)
    first = round_ % len(names)
    return names[first:] + names[:first]


# -- whole calls of generate() ----------------------------------------------------------------------------------------


def time_generate(
    bench: Bench, name: str, inputs: dict[str, torch.Tensor], new_tokens: int = NEW_TOKENS, **options: Any
) -> list[Entry]:
    """Time generate() with both of the library's caches and with ours, in turn; each of our calls is the first one."""
    model = bench.model
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, **options}
    kinds: dict[str, dict[str, Any]] = {
        "DynamicCache": {},
        "StaticCache": {"cache_implementation": "static"},
        "hf_paged": {},
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    ids: dict[str, list[torch.Tensor]] = {kind: [] for kind in kinds}
    kv_bytes: dict[str, int] = dict.fromkeys(kinds, 0)
    rss: dict[str, int | None] = dict.fromkeys(kinds)
    extra: Entry = {}
    for round_ in range(bench.repeat):
        for kind in rotated(kinds, round_):
            more = kinds[kind]
            if kind == "hf_paged":
                hf_paged.patch(model)
            gc.collect()
            torch.manual_seed(0)
            try:
                with PeakMemory() as memory, Watch(model, new_tokens) as watch:
                    start = time.perf_counter()
                    ids[kind].append(model.generate(**inputs, **options, **more))
                    times[kind].append(time.perf_counter() - start)
                kv_bytes[kind] = watch.kv_bytes
                if kind == "hf_paged":
                    first, final, after = watch.first, watch.final, model.paged_stats()
                    assert first is not None and final is not None
                    kv_bytes[kind] = after.bytes_allocated + after.scratch_bytes
                    extra = {
                        "block_size": final.block_size,
                        "prompt_blocks": first.used_blocks,
                        "peak_used_blocks": after.peak_used_blocks,
                        "slots_wasted": round(1 - final.utilization, 4),
                        "fallbacks": after.fallbacks,
                    }
            finally:
                hf_paged.unpatch(model)
            rss[kind] = max(rss[kind] or 0, memory.peak) if memory.peak is not None else None
        say(f"{name} {round_ + 1}/{bench.repeat}: " + ", ".join(f"{k} {times[k][-1]:.2f} s" for k in kinds))
    ours = ids["hf_paged"]
    entries = []
    for kind in ("DynamicCache", "StaticCache"):
        same = all(
            mine.shape == other.shape and bool((mine == other).all())
            for mine, other in zip(ours, ids[kind], strict=True)
        )
        entries.append(
            make_entry(name, kind, times[kind], times["hf_paged"], same, kv_bytes[kind], kv_bytes["hf_paged"])
            | extra
            | {"baseline_peak_rss": rss[kind], "ours_peak_rss": rss["hf_paged"]}
        )
    return entries


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


def filled_paged(model: Any, rows: int, tokens: int, room: int) -> PagedCache:
    """A filled `PagedCache`, told how many tokens are to come, as the patched generate() tells it."""
    cache = PagedCache(model.config)
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
            for kind in rotated(caches, step):
                cache = caches[kind]
                before(kind)
                paged = isinstance(cache, PagedCache)
                model.config._attn_implementation_internal = attention.NAME if paged else usual
                try:
                    start = time.perf_counter()
                    out = model(ids, position_ids=positions, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
                    times[kind].append(time.perf_counter() - start)
                finally:
                    model.config._attn_implementation_internal = usual
                logits[kind].append(out.logits[:, -1])
    return times, logits
