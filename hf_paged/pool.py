"""What caches share: per layer group a `BlockPool`, and each layer's store.

Layers that keep the same tokens form a *layer group*: all full-attention layers share one block table per row, sliding
layers of one window share another. A group has an id space of its own; every store of a group uses its ids.
"""

import os
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from . import backends, compat
from .blocks import BlockPool, PrefixIndex, RowTables
from .config import PagedConfig
from .plan import StepPlan
from .stats import PagedStats
from .store import LayerStore

# Modes of PyTorch in which tensors stand for others.
_TRACING = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]


class LayerGroup:
    """Layers that share block ids.

    Attributes:
        window: tokens a query of these layers sees, itself included; None: all.
        chunked: a query sees its own chunk only; chunks of `window` tokens.
        layers: indices of the layers.
        blocks: the group's ids.
    """

    def __init__(self, window: int | None, chunked: bool, layers: list[int], blocks: BlockPool):
        self.window = window
        self.chunked = chunked
        self.layers = layers
        self.blocks = blocks


class KVPool:
    """A pool of key-value blocks that any number of `PagedCache`s of one model draw from.

    Safe to share between threads: bookkeeping holds `lock`, writes and growth of a store hold that store's lock.

    Args:
        config: the model's config (`model.config`); for composite models its text decoder part is used.
        paged_config: settings; None: defaults.

    Attributes:
        owner: the model whose keys and values these are, so that a cache can be saved without naming it; None: not
            known. `patch`, `generate` of a patched model and `PagedCache.load` fill it in.

    Raises:
        TypeError: if `config` is not a Transformers config.
    """

    def __init__(self, config: Any, paged_config: PagedConfig | None = None):
        if not isinstance(config, compat.PreTrainedConfig):
            raise TypeError(f"KVPool needs the model's config (model.config), got {type(config).__name__}")
        self.model_config = config
        self.owner: weakref.ref[Any] | None = None
        self.config = paged_config if paged_config is not None else PagedConfig()
        self.backend, self.writer = backends.choose(self.config.backend, self.config.block_size)
        self.layer_types = compat.reads_layer_types(config)
        self.has_cross_layers = any(layer_type == compat.CROSS_ATTENTION for layer_type, _ in self.layer_types)
        self.latent = compat.latent_dims(config)  # latent attention: dims of the latent vector and of the rotated key
        by_window: dict[tuple[int | None, bool], list[int]] = {}
        self.group_of: dict[int, int] = {}
        for index, (layer_type, arguments) in enumerate(self.layer_types):
            paged, window = compat.window_of(layer_type, arguments)
            if paged:
                by_window.setdefault((window, layer_type == compat.CHUNKED_ATTENTION), []).append(index)
        self.groups: list[LayerGroup] = []
        fixed = self.config.num_blocks
        for (window, chunked), layers in by_window.items():
            self.group_of.update(dict.fromkeys(layers, len(self.groups)))
            self.groups.append(LayerGroup(window, chunked, layers, BlockPool(fixed or 0, max_blocks=fixed)))
        self.index: PrefixIndex | None = None
        if self.config.prefix_caching:
            pools, windows = [group.blocks for group in self.groups], [group.window for group in self.groups]
            self.index = PrefixIndex(pools, windows, self.config.block_size)
        self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self.loose_windows = False  # some layer's mask shows more than its window keeps: prompts must not be cut
        self._sized = self.config.memory_budget is None
        self.stores: dict[int, LayerStore] = {}
        self.fallbacks: Counter[str] = Counter()
        self.stepped_aside: Counter[str] = Counter()
        self.scratch_bytes = 0
        self.graph_captures = self.graph_steps = 0
        self._lock = threading.RLock()
        self._depth = 0
        self._orphans: deque[tuple[list[RowTables], Any]] = deque()
        # Tables of living caches, for check() and stats(); looked at and added to under the lock.
        self._live: weakref.WeakSet = weakref.WeakSet()
        self._cross_layers: weakref.WeakSet = weakref.WeakSet()  # what decoders read of their encoders, for stats()

    # -- locking ----------------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the bookkeeping lock; blocks of caches that died meanwhile are given back on the way in."""
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._release_orphans()
                yield
            finally:
                self._depth -= 1

    def abandon(self, tables: list[RowTables], known: Any) -> None:
        """Remember what a cache that is gone held, and give back its blocks.

        Called by the cache's finalizer, from any thread, at any moment: also by the garbage collector in the middle of
        an operation on this pool, so it may have to wait its turn.
        """
        self._orphans.append((tables, known))
        if torch._guards.TracingContext.try_get() is not None or any(map(torch._C._get_dispatch_mode, _TRACING)):
            return  # while something is traced, tensors of the cache are nothing to compute with
        if self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    with self.locked():
                        pass
            finally:
                self._lock.release()

    def _release_orphans(self) -> None:
        while self._orphans:
            tables, known = self._orphans.popleft()
            try:
                self.remember(tables, known)
                self.forget_trial(known)
            finally:
                for entry in tables:
                    entry.release_all()

    def new_tables(self) -> list[RowTables]:
        """Empty block tables for a new cache, one per layer group."""
        return self.register([RowTables(group.blocks, self.config.block_size) for group in self.groups])

    def register(self, tables: list[RowTables]) -> list[RowTables]:
        with self.locked():
            self._live.update(tables)
        return tables

    def register_cross(self, layer: Any) -> None:
        """Count what a layer holds of its encoder, as long as it lives."""
        with self.locked():
            self._cross_layers.add(layer)

    # -- prefixes ---------------------------------------------------------------------------------------------------

    def remember(self, tables: list[RowTables], known: Any, rows: Iterable[int] | None = None) -> None:
        """Let the prefix index know what rows of a cache hold.

        Args:
            tables: the cache's tables, one per layer group.
            known: its `KnownTokens`.
            rows: which rows; None: all.
        """
        self._insert(tables, known, (known.identity, known.salt), rows, known.row)

    def remember_on_trial(self, tables: list[RowTables], known: Any, rows: Iterable[int], ids: torch.Tensor) -> None:
        """Keep what rows hold that are about to go, until it is known whether the weights have stayed the same.

        `settle_trial` lets it be found, `forget_trial` lets it go.

        Args:
            ids: tokens of all rows, [rows, columns] on the CPU.
        """
        if known.trial is None:
            known.trial = object()
        known.torn = False  # between two forwards
        self._insert(tables, known, known.trial, rows, lambda row: known.tokens_of(row, ids))

    def settle_trial(self, known: Any) -> None:
        """Let what was kept on trial be found."""
        if self.index is not None and known.trial is not None:
            with self.locked():
                self.index.move(known.trial, (known.identity, known.salt))
                known.trial = None

    def forget_trial(self, known: Any) -> None:
        if self.index is not None and known.trial is not None:
            with self.locked():
                self.index.forget(known.trial)
                known.trial = None

    def _insert(
        self,
        tables: list[RowTables],
        known: Any,
        identity: Hashable,
        rows: Iterable[int] | None,
        tokens_of: Callable[[int], list[int]],
    ) -> None:
        if self.index is None or known.identity is None or known.salt is None:
            return
        with self.locked():
            for row in range(len(tables[0].rows)) if rows is None else rows:
                tokens = tokens_of(row)
                held = min(len(tokens), *(entry.rows[row].length for entry in tables))
                if known.torn:  # the last, partly filled block may be a copy that not every layer has made
                    held -= held % self.config.block_size
                self.index.insert(identity, tokens[:held], [entry.rows[row] for entry in tables])

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Blocks that a living cache holds stay its own; all others are free at once.

        Changed weights, adapters and settings are noticed without: this is to have the memory back, or to be sure that
        nothing of a prompt is kept.
        """
        if self.index is not None:
            with self.locked():
                self.index.reset()

    # -- stores -----------------------------------------------------------------------------------------------------

    def adopt(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Get ready for a step that starts with these keys and values, before any block is taken for it.

        An idle pool forgets stores of another shape, dtype or device (the model was moved or cast since).

        Args:
            key, value: [batch, num_kv_heads, tokens, dim]

        Raises:
            ValueError: if the pool holds tokens of another shape, dtype or device; or see `_size_from`.
        """
        store = self.stores.get(layer)
        if store is not None and store.signature != LayerStore.signature_of(key, value):
            with self.locked():
                if not any(group.blocks.used_blocks for group in self.groups):
                    self.stores.clear()
                    if self.index is not None:
                        self.index.reset()
                    for group in self.groups:
                        group.blocks.forget()
        if not self._sized:
            self._size_from(key, value)
        self.store_of(layer, key, value)

    def store_of(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> LayerStore:
        """The store of a layer, made from the first keys and values it sees.

        Raises:
            ValueError: if the store holds another shape, dtype or device.
        """
        store = self.stores.get(layer)
        if store is None:
            with self.locked():
                store = self.stores.get(layer)
                if store is None:
                    self.stores[layer] = store = self._new_store(key, value)
        if store.signature != (signature := LayerStore.signature_of(key, value)):
            raise ValueError(
                f"layer {layer} of this pool stores (kv heads, key dim, value dim, key dtype, value dtype, device) = "
                f"{store.signature}, but got {signature}. Caches of unlike models, dtypes or devices need pools "
                "of their own: give each its own KVPool. After model.to(...), drop the caches that were filled before."
            )
        return store

    def _new_store(self, key: torch.Tensor, value: torch.Tensor) -> LayerStore:
        # Latents are keys and values at once (`PagedLayer.update`).
        once = self.latent is not None and key.shape[1] == 1 and key.shape[3] == value.shape[3] == sum(self.latent)
        return LayerStore(key, value, self.config.block_size, self._kv_dtype, once)

    @property
    def _kv_dtype(self) -> torch.dtype | None:
        return None if self.config.kv_dtype == "auto" else getattr(torch, self.config.kv_dtype)

    def _size_from(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Fix the number of blocks from `memory_budget`, once the first keys and values show what a token takes.

        Every layer is taken to be as large as this one.

        Raises:
            ValueError: if the budget does not hold one block per group.
        """
        with self.locked():
            if self._sized:
                return
            block = self._new_store(key, value).bytes_per_block
            budget = self.config.budget_bytes(_free_memory(key.device))
            layers = sum(len(group.layers) for group in self.groups)
            # The same number of blocks for every group; each group's null block is paid for too.
            count = budget // (block * layers) - 1
            if count < 1:
                raise ValueError(
                    f"memory_budget of {budget} bytes holds no block: one block of {self.config.block_size} "
                    f"tokens takes {block * layers} bytes in {layers} layers, and each layer keeps one reserved "
                    "block besides. Raise memory_budget or lower block_size."
                )
            for group in self.groups:
                group.blocks.max_blocks = count
                group.blocks.grow(count)
            self._sized = True

    def copy_ahead(self, step: StepPlan) -> None:
        """Make a forward's block copies in all layers at once, where the backend can, before any layer writes.

        A layer whose store is not there yet has nothing to copy.
        """
        if self.writer is None:
            return
        for group, plan in zip(self.groups, step.groups, strict=True):
            if not plan.copies:
                continue
            stores = [self.stores[layer] for layer in group.layers if layer in self.stores]
            with ExitStack() as locks:  # in the order of layers, and nobody who holds one waits for another
                for store in stores:
                    locks.enter_context(store.lock)
                self.writer.copy(stores, plan)
            plan.copies = []

    # -- numbers ----------------------------------------------------------------------------------------------------

    def count_fallback(self, reason: str, *others: Counter, detail: str = "") -> None:
        """Count a call that took a dense path or went without a saving; warn the first time a reason occurs.

        Args:
            others: further counters of the same.
            detail: what was found, for the warning alone.
        """
        with self._lock:
            first = not self.fallbacks[reason]
            for counter in (self.fallbacks, *others):
                counter[reason] += 1
        if first:
            said = f"{reason}: {detail}" if detail else reason
            warnings.warn(f"hf_paged: {said} (counted in stats().fallbacks; said once)", stacklevel=3)

    def step_aside(self, code: str, sentence: str, *others: Counter, detail: str = "") -> None:
        """Count a call that went without a shortcut, by the code of the reason and in words."""
        with self._lock:
            self.stepped_aside[code] += 1
        self.count_fallback(sentence, *others, detail=detail)

    def stats(self, tables: Iterable[list[RowTables]] | None = None) -> PagedStats:
        """Numbers of the whole pool, or of the caches whose tables are given."""
        with self.locked():
            size = self.config.block_size
            stats = PagedStats(block_size=size, fallbacks=dict(self.fallbacks), scratch_bytes=self.scratch_bytes)
            stats.prefix_query_tokens, stats.prefix_hit_tokens = self.prefix_query_tokens, self.prefix_hit_tokens
            chosen = list(self._live) if tables is None else [entry for group in tables for entry in group]
            filled = slots = 0
            for group in self.groups:
                blocks = group.blocks
                stats.num_blocks += blocks.num_blocks
                stats.free_blocks += blocks.free_blocks
                stats.used_blocks += blocks.used_blocks
                stats.cached_blocks += blocks.cached_blocks
                stats.shared_blocks += blocks.shared_blocks
                stats.evictions += blocks.evictions
                stats.peak_used_blocks += blocks.peak_used_blocks
                entries = [entry for entry in chosen if entry.pool is blocks]
                merged = RowTables(blocks, size)
                merged.rows = [row for entry in entries for row in entry.rows]
                stored = merged.stored_tokens()
                filled += stored
                slots += len({block for row in merged.rows for block in row.blocks}) * size
                stats.stored_tokens = max(stats.stored_tokens, stored)
                stats.logical_tokens = max(stats.logical_tokens, merged.logical_tokens())
                stats.cow_copies += blocks.cow_copies if tables is None else sum(entry.cow_copies for entry in entries)
                for layer in group.layers:
                    if (store := self.stores.get(layer)) is not None:
                        stats.bytes_allocated += store.nbytes
                        stats.bytes_used += store.bytes_per_block * blocks.used_blocks
            stats.utilization = filled / slots if slots else 1.0
            if tables is None:
                held = {id(each): each.nbytes for layer in list(self._cross_layers) for each in layer.tensors}
                stats.cross_attention_bytes = sum(held.values())
                stats.graph_captures, stats.graph_steps = self.graph_captures, self.graph_steps
                stats.stepped_aside = dict(self.stepped_aside)
            return stats

    def check(self) -> None:
        """Raise AssertionError if an invariant of the bookkeeping is broken, over all living caches."""
        with self.locked():
            for group in self.groups:
                entries = [entry for entry in self._live if entry.pool is group.blocks]
                for entry in entries:
                    entry.check()
                tables = [row.blocks for entry in entries for row in entry.rows]
                group.blocks.check([*tables, *(entry.lent for entry in entries)])
            if self.index is not None:
                self.index.check()

    def __deepcopy__(self, memo: dict) -> "KVPool":
        # A copied model gets a pool of its own: a pool's content belongs to the caches that hold it.
        other = KVPool(self.model_config, self.config)
        owner = self.owner() if self.owner is not None else None
        if id(owner) in memo:
            other.owner = weakref.ref(memo[id(owner)])
        return other

    def __reduce__(self) -> tuple:
        return KVPool, (self.model_config, self.config)  # an empty one, likewise


def _free_memory(device: torch.device) -> int:
    """Bytes free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
