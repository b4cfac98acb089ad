"""What the demo and the benchmarks share: watching the cache of a running generate(), memory, versions."""

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__, compat
from ..cache import PagedCache
from ..stats import PagedStats


class UsageError(Exception):
    """A command was asked for something it does not have."""


def versions() -> dict[str, Any]:
    """Versions and machine, for a result file."""
    return {
        "hf_paged": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "thp_mem_alloc_enable": os.environ.get("THP_MEM_ALLOC_ENABLE", "0"),
    }


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


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median and the two quartiles."""
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return median, low, high


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"
