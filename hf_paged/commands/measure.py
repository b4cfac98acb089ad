"""What the demo and the benchmarks share: timed generate() calls and their caches, memory, versions, result files."""

import gc
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__, compat
from ..cache import PagedCache
from ..cpu_kernels.library import library
from ..patching import patched
from ..stats import PagedStats


class UsageError(Exception):
    """A command was asked for something it does not have."""


def versions() -> dict[str, Any]:
    """Versions and machine, for a result file. Has the CPU kernels compiled, before anything is timed."""
    return {
        "hf_paged": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_kernels": "none" if library() is None else "compiled",
        "thp_mem_alloc_enable": os.environ.get("THP_MEM_ALLOC_ENABLE", "0"),
    }


def opening() -> dict[str, Any]:
    """Quieten the library, print versions and machine, and return them."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    facts = versions()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def dense_bytes(cache: Any) -> int:
    """Bytes of the key and value tensors of one of the library's caches."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None)


class Watch:
    """Looks at a model's cache while generate() runs: after the first forward, some between, and number `last`.

    Attributes:
        first, final: `PagedStats` at the first and the latest look, for a paged cache.
        kv_bytes: bytes of the library's own cache at the last look, for any other.
    """

    def __init__(self, model: Any, last: int):
        self.first: PagedStats | None = None
        self.final: PagedStats | None = None
        self.kv_bytes = 0
        self._last = last
        self._count = 0
        self._model = model

    def __enter__(self) -> "Watch":
        self._handle = self._model.register_forward_hook(self._look)
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()

    def _look(self, module: Any, inputs: Any, output: Any) -> None:
        self._count += 1
        if self._count % 8 != 1 and self._count != self._last:
            return
        cache = getattr(output, compat.CACHE_ARGUMENT, None)
        if isinstance(cache, PagedCache):
            stats = cache.pool.stats()
            if self._count == 1:
                self.first = stats
            self.final = stats
        elif cache is not None:
            self.kv_bytes = dense_bytes(cache)


class PeakMemory:
    """Peak resident memory of this process while a `with` block runs, in bytes; None where the system cannot tell."""

    peak: int | None = None

    def __enter__(self) -> "PeakMemory":
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
            self._works = True
        except OSError:
            self._works = False
        return self

    def __exit__(self, *error: Any) -> None:
        if self._works:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    self.peak = int(line.split()[1]) * 1024


@dataclass
class TimedRun:
    """One generate() call.

    Attributes:
        ids: what it put out, [rows, tokens].
        seconds: how long it took.
        kv_bytes: the library's cache at the last forward; of ours, all stores and the most scratch memory of a step.
        peak_rss: peak resident bytes of the process meanwhile; None where the system cannot tell.
        watch: looks at the cache on the way.
        stats: of the pool after the call; None: it was not patched.
    """

    ids: torch.Tensor
    seconds: float
    kv_bytes: int
    peak_rss: int | None
    watch: Watch
    stats: PagedStats | None


def timed_generate(
    model: Any, inputs: dict[str, torch.Tensor], new_tokens: int, paged: bool, **options: Any
) -> TimedRun:
    """Time one generate() of exactly `new_tokens` new tokens, with the library's cache or, patched for it, with ours.

    Args:
        model: not patched.
        inputs: `input_ids` and `attention_mask`, [batch, tokens].
        new_tokens: tokens to generate per row.
        paged: patch the model for this call.
        options: of generate().
    """
    gc.collect()
    torch.manual_seed(0)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, **options}

    def call() -> TimedRun:
        with PeakMemory() as memory, Watch(model, new_tokens) as watch:
            start = time.perf_counter()
            ids = model.generate(**inputs, **options)
            seconds = time.perf_counter() - start
        stats = model.paged_stats() if paged else None
        kv_bytes = watch.kv_bytes if stats is None else stats.bytes_allocated + stats.scratch_bytes
        return TimedRun(ids, seconds, kv_bytes, memory.peak, watch, stats)

    if not paged:
        return call()
    with patched(model):
        return call()


def same_ids(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Whether two series of outputs are equal, one by one."""
    return all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))


def rotated(kinds: Sequence[str], round_: int) -> list[str]:
    """The kinds in an order that starts with another one each round, so that none always follows the same other."""
    first = round_ % len(kinds)
    return [*kinds[first:], *kinds[:first]]


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"  {text}", flush=True)


def writable(file: str | None) -> Path | None:
    """The path of a result file to be written; None for None.

    Raises:
        UsageError: if its folder does not exist, or it is itself a folder: better said before the run than after.
    """
    if file is None:
        return None
    target = Path(file)
    if not target.parent.is_dir():
        raise UsageError(f"cannot write {file}: there is no folder {target.parent}")
    if target.is_dir():
        raise UsageError(f"cannot write {file}: it is a folder")
    return target


def write_results(target: Path, facts: dict[str, Any], cases: Sequence[dict[str, Any]]) -> None:
    """Write a result file in one step: a reader, or an interruption, finds the old one or the new one."""
    partial = target.with_name(target.name + ".partial")
    partial.write_text(json.dumps({"versions": facts, "cases": list(cases)}, indent=1) + "\n")
    partial.replace(target)


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median and the two quartiles."""
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return median, low, high


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def seconds_text(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
