"""The settings of the paged KV cache."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_KV_DTYPES = ("auto", "float32", "float16", "bfloat16")
_BACKENDS = ("auto", "native", "torch", "triton", "flash_attn", "reference")


@dataclass
class PagedConfig:
    """Settings of a `KVPool` and of the caches in it.

    Args:
        block_size: tokens per block, a power of two from 1 to 256. Small blocks waste less in a row's last block, large
            ones need fewer table entries.
        num_blocks: blocks of a pool of fixed size, per layer group. None (default): the pool grows on demand.
        memory_budget: bytes that the keys and values of a pool may take, as an int, a string such as "2GiB" or "500MB",
            or a float in (0, 1]: that fraction of the device memory free when the first token is stored. The pool then
            has a fixed size. Not together with `num_blocks`.
        kv_dtype: dtype of stored keys and values: "auto" (each as the model makes it), "float32", "float16",
            "bfloat16".
        prefix_caching: find prompts, and what was generated behind them, again in later calls of a patched model.
            Blocks that no cache holds any more stay findable until the pool needs them.
        packed_prefill: compute the prompts of a ragged batch one behind the other in one forward, so that pads are not
            computed; where the model is known to allow it.
        max_packed_tokens: the most tokens one packed prefill forward takes; longer ones go in chunks.
        backend: what attends over the blocks: "torch" (strided views and PyTorch's fused attention), "native" (the
            same, but decode steps on a CPU in a kernel that your C compiler makes once), "triton" (kernels over the
            block table; needs a GPU, and has not run on one yet), "flash_attn" (the package flash-attn, not run yet
            either; FlashAttention 2 takes `block_size=256` only, 3 any), "auto" (native where there is a compiler, else
            torch) or "reference" (naive, float32, slow: for comparisons).
        cuda_graphs: capture the decode steps of a patched model's `generate()` as CUDA graphs and replay them: one
            launch a step instead of many a layer. For `backend="triton"` on a GPU (not run on one yet); what cannot be
            captured runs without, counted in `stats().fallbacks`.
        prompt_once: compute and store a prompt once for all its beams or samples, then fork it.
        free_finished_rows: give back the blocks of rows that have stopped while other rows of the batch go on. Only
            where nothing of these rows is returned but their tokens.

        vouch: your word that code which hf_paged does not know treats each row of a batch by itself and each token from
            those before it alone, does the same in every call, and reads nothing of rows that have stopped: classes of
            modules, functions (hooks, forwards) and classes of processors; True: everything the model has and is
            given, also weights whose content cannot be read. Code that is not vouched for keeps blocks and
            copy-on-write, and goes without what rests on such an assumption (`docs/soundness.md`).
        shortcuts: False: go without all of that, to look for the cause of an answer one doubts. The environment
            variable `HF_PAGED_SHORTCUTS=0` does the same.

    Raises:
        ValueError: if a value is out of range, naming the field.
        TypeError: if `vouch` is neither a bool nor classes and functions.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_budget: int | float | str | None = None
    kv_dtype: str = "auto"
    prefix_caching: bool = True
    backend: str = "auto"
    prompt_once: bool = True
    free_finished_rows: bool = True
    packed_prefill: bool = True
    max_packed_tokens: int = 8192
    cuda_graphs: bool = False
    vouch: bool | Iterable[Any] = False
    shortcuts: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.vouch, bool):
            entries = (self.vouch,) if callable(self.vouch) else self.vouch
            if isinstance(entries, str) or not isinstance(entries, Iterable) or not all(map(callable, entries)):
                raise TypeError(f"vouch must be True, False, or classes and functions, got {self.vouch!r}")
            self.vouch = tuple(entries)
        size = self.block_size
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 256 or size & (size - 1):
            raise ValueError(f"block_size must be a power of two from 1 to 256, got {size!r}")
        if self.num_blocks is not None:
            if self.memory_budget is not None:
                raise ValueError("give num_blocks or memory_budget, not both")
            if not isinstance(self.num_blocks, int) or isinstance(self.num_blocks, bool) or self.num_blocks < 1:
                raise ValueError(f"num_blocks must be a positive int or None, got {self.num_blocks!r}")
        if self.memory_budget is not None:
            self.budget_bytes(available=1 << 62)
        if not isinstance(self.max_packed_tokens, int) or self.max_packed_tokens < 1:
            raise ValueError(f"max_packed_tokens must be a positive int, got {self.max_packed_tokens!r}")
        if self.kv_dtype not in _KV_DTYPES:
            raise ValueError(f"kv_dtype must be one of {_KV_DTYPES}, got {self.kv_dtype!r}")
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend must be one of {_BACKENDS}, got {self.backend!r}")

    @property
    def grows(self) -> bool:
        """Whether the pool has no fixed size."""
        return self.num_blocks is None and self.memory_budget is None

    def budget_bytes(self, available: int) -> int:
        """`memory_budget` in bytes.

        Args:
            available: bytes of free device memory, for a budget given as a fraction.
        """
        budget = self.memory_budget
        if isinstance(budget, float) and 0 < budget <= 1:
            return int(budget * available)
        if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
            return budget
        if isinstance(budget, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMG]I?)?B)?\s*", budget.upper())
            count = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
            if count > 0:
                return count
        raise ValueError(
            f'memory_budget must be bytes (int), a string such as "2GiB", or a fraction in (0, 1], got {budget!r}'
        )
