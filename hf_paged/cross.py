"""Cross-attention of encoder-decoder models: what the decoder reads of a source is kept once.

The keys and values of a source do not change while its rows are generated, whatever beam stands where. So they lie in
one tensor, one entry a source, and a list says which source each row reads:

    keys [sources, heads, source tokens, dim]          source_of  [0, 0, 0, 0, 1, 1, 1, 1]   (2 sources, 4 beams)

A beam step permutes the list, which mostly leaves it as it was. Attention packs the queries of a source's rows side by
side, so a key is read once for all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from . import compat
from .lazy import LazyTensor
from .pool import KVPool
from .traced import Handle, TracedCross

_make_wrapper = torch.Tensor._make_wrapper_subclass


class LazyCross(LazyTensor):
    """Keys or values of one cross-attention layer as a row each, [rows, heads, source tokens, dim].

    Attributes:
        held: one entry a source, [sources, heads, source tokens, dim].
        source_of: the source of each row.
        pool: where a dense use is counted.
    """

    held: torch.Tensor
    source_of: list[int]
    pool: KVPool | None

    @staticmethod
    def make(held: torch.Tensor, source_of: list[int], pool: KVPool | None) -> "LazyCross":
        self = _make_wrapper(
            LazyCross, (len(source_of), *held.shape[1:]), dtype=held.dtype, device=held.device, requires_grad=False
        )
        self.held, self.source_of, self.pool = held, source_of, pool
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.select.int and args[1] == 0:  # one row: Whisper takes returned caches apart
            return args[0].held.select(0, args[0].source_of[args[2]])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def materialize(self, reason: str) -> torch.Tensor:
        if self._dense is None:
            if reason and self.pool is not None:
                self.pool.count_fallback(f"cross-attention repeated for every row: {reason}")
            self._dense = self.held.index_select(0, torch.tensor(self.source_of, device=self.held.device))
        return self._dense

    def rows_of_a_source(self) -> int:
        """How many rows each source has, if each has as many, side by side and in order; else 0."""
        sources, rows = self.held.shape[0], len(self.source_of)
        count = rows // sources
        if count * sources == rows and all(source == row // count for row, source in enumerate(self.source_of)):
            return count
        return 0


class CrossLayer(compat.CacheLayerMixin):
    """Keys and values of one cross-attention layer."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, pool: KVPool | None = None):
        self.pool = pool
        self.handle = Handle(self)
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None
        self.source_of: list[int] | None = None  # None: a source a row
        if pool is not None:
            pool.register_cross(self)

    @property
    def is_initialized(self) -> bool:
        return self._held is not None

    @property
    def keys(self) -> torch.Tensor | None:
        """[rows, heads, source tokens, key_dim], lazy where rows share a source; None while empty."""
        return self._rows(0)

    @property
    def values(self) -> torch.Tensor | None:
        """[rows, heads, source tokens, value_dim], lazy where rows share a source; None while empty."""
        return self._rows(1)

    def _rows(self, which: int) -> torch.Tensor | None:
        if self._held is None or self.source_of is None:
            return None if self._held is None else self._held[which]
        if torch.compiler.is_compiling():
            return TracedCross(self, which)  # type: ignore[return-value]
        return LazyCross.make(self._held[which], self.source_of, self.pool)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys and values, [sources, heads, source tokens, dim]; none while empty."""
        return self._held or ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the first `update` brings what there is."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the keys and values of the encoder's output, [rows, heads, source tokens, dim]; a source a row.

        More behind what is there is appended, as the library's layers do; rows are then sources of their own.
        """
        if self._held is not None:
            before = self._held
            if self.source_of is not None:
                index = torch.tensor(self.source_of, device=before[0].device)
                before = (before[0].index_select(0, index), before[1].index_select(0, index))
            key_states = torch.cat([before[0], key_states], dim=-2)
            value_states = torch.cat([before[1], value_states], dim=-2)
        self._held, self.source_of = (key_states, value_states), None
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0 if self._held is None else self._held[0].shape[2]

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    # -- the batch --------------------------------------------------------------------------------------------------

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was. Nothing is copied."""
        if self._held is None:
            return
        before = self.source_of if self.source_of is not None else range(self._held[0].shape[0])
        after = [before[row] for row in rows]
        whole = len(after) == self._held[0].shape[0] and all(source == row for row, source in enumerate(after))
        self.source_of = None if whole else after

    def drop_unused(self) -> None:
        """Let go of sources that no row reads."""
        if self._held is None or self.source_of is None:
            return
        kept = sorted(set(self.source_of))
        if len(kept) < self._held[0].shape[0]:
            index = torch.tensor(kept, device=self._held[0].device)
            self._held = (self._held[0].index_select(0, index), self._held[1].index_select(0, index))
            place = {source: number for number, source in enumerate(kept)}
            renumbered = [place[source] for source in self.source_of]
            self.source_of = None if renumbered == list(range(len(kept))) else renumbered

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.select(beam_idx.tolist())

    @property
    def rows(self) -> int:
        """Rows there are; 0 while empty."""
        if self._held is None:
            return 0
        return len(self.source_of) if self.source_of is not None else self._held[0].shape[0]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select([row for row in range(self.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        self.select(_places(indices))
        self.drop_unused()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self._held is not None:
            keep = self.get_seq_length() - abs(int(tokens_to_remove))
            self._held = (self._held[0][:, :, :keep], self._held[1][:, :, :keep])

    def reset(self) -> None:
        self._held = self.source_of = None

    def offload(self) -> None:
        raise NotImplementedError("keys and values of the encoder's output stay on the device of their layer")

    prefetch = offload

    def __deepcopy__(self, memo: dict) -> "CrossLayer":
        # The tensors are never written to, so a copy shares them.
        other = CrossLayer(self.pool)
        other._held, other.source_of = self._held, self.source_of
        memo[id(self)] = other
        return other


class CrossCache(compat.DynamicCache):
    """The cross-attention half of an `EncoderDecoderCache`: each source's keys and values once.

    Args:
        num_layers: layers of the decoder.
        pool: where its bytes and dense uses are counted; None: nowhere.
    """

    def __init__(self, num_layers: int, pool: KVPool | None = None):
        compat.Cache.__init__(self, layers=[CrossLayer(pool) for _ in range(num_layers)])
        self.pool = pool

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i reads what row `beam_idx[i]` read. One synchronisation, whatever the number of layers."""
        rows = beam_idx.tolist()
        for layer in self.layers:
            layer.select(rows)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows `indices`; sources that no row reads any more are dropped."""
        rows = _places(indices)
        for layer in self.layers:
            layer.select(rows)
            layer.drop_unused()

    def merge(self, copies: int) -> None:
        """Each `copies` rows, side by side, are known to have one source: keep it once."""
        rows = max((layer.rows for layer in self.layers), default=0)
        self.batch_select_indices(list(range(0, rows, copies)))
        self.batch_repeat_interleave(copies)

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict) -> "CrossCache":
        other = CrossCache(0, self.pool)
        other.layers = [layer.__deepcopy__(memo) for layer in self.layers]
        memo[id(self)] = other
        return other


def _places(indices: Any) -> list[int]:
    """Rows that `batch_select_indices` is to keep: indices, or a boolean mask."""
    if not isinstance(indices, torch.Tensor):
        return list(indices)
    return (indices.nonzero().flatten() if indices.dtype == torch.bool else indices).tolist()


def pack_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """`[sources * count, heads, q, dim]` as `[sources, heads, count * q, dim]`: the rows of a source side by side."""
    return tensor.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)


def unpack_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """`[sources, count * q, heads, dim]` as `[sources * count, q, heads, dim]`."""
    return tensor.unflatten(1, (count, -1)).flatten(0, 1)
