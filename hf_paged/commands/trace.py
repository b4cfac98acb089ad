"""What several sequences of one prompt do to block tables, recorded from a running generate() and replayed.

The tokens that beams or samples choose do not depend on the block size, and neither do the moves of the rows. So one
run of the model gives the moves, and they are made again in a `BlockPool` and `RowTables` of any other block size.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import compat
from ..blocks import BlockPool, BlockTable, RowTables
from ..cache import PagedCache


@dataclass
class RequestTrace:
    """The moves of the rows of one request: its prompt once, forked to `width` rows, then one token a row and step.

    Attributes:
        prompt: tokens of the prompt.
        width: rows, that is beams or samples.
        parents: per decode step and row, which row of the request it continues; None: each row continues itself.
    """

    prompt: int
    width: int
    parents: list[list[int] | None] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Decode steps. The first new token comes from the prompt's own forward, so it is one less than new tokens."""
        return len(self.parents)

    def length(self, step: int) -> int:
        """Tokens that a row holds after decode step `step`, counted from 0."""
        return self.prompt + step + 1


@dataclass
class BlockCounts:
    """Blocks held by the rows of requests, summed over decode steps (and over requests, by `+`).

    Attributes:
        block_size: tokens per block.
        steps: how many states of a cache were added up.
        unshared_blocks: what the rows would hold if each had all its blocks to itself: ceil(length / block size).
        distinct_blocks: blocks held; a shared one counts once.
        logical_tokens: tokens of the rows; one that rows share counts for each.
        stored_tokens: slots filled of the distinct blocks.
    """

    block_size: int
    steps: int = 0
    unshared_blocks: int = 0
    distinct_blocks: int = 0
    logical_tokens: int = 0
    stored_tokens: int = 0

    def add(self, rows: Sequence[BlockTable]) -> None:
        """Add the state of a request's rows, which have lost no blocks to a sliding window."""
        size = self.block_size
        blocks: set[int] = set()
        blocks.update(*(row.blocks for row in rows))
        # Only a row's last block may be partly filled; rows that share one have filled it alike.
        partial = {row.blocks[-1]: row.length % size for row in rows if row.length % size}
        self.steps += 1
        self.unshared_blocks += sum(-(-row.length // size) for row in rows)
        self.distinct_blocks += len(blocks)
        self.logical_tokens += sum(row.length for row in rows)
        self.stored_tokens += (len(blocks) - len(partial)) * size + sum(partial.values())

    def __add__(self, other: "BlockCounts") -> "BlockCounts":
        if self.block_size != other.block_size:
            raise ValueError(f"counts of blocks of {self.block_size} and of {other.block_size} tokens do not add up")
        return BlockCounts(
            self.block_size,
            self.steps + other.steps,
            self.unshared_blocks + other.unshared_blocks,
            self.distinct_blocks + other.distinct_blocks,
            self.logical_tokens + other.logical_tokens,
            self.stored_tokens + other.stored_tokens,
        )

    @property
    def memory_saving(self) -> float:
        """Blocks saved by sharing / blocks without sharing, as the PagedAttention paper has it (section 6.3)."""
        return 1 - self.distinct_blocks / self.unshared_blocks if self.unshared_blocks else 0.0

    @property
    def slots_wasted(self) -> float:
        """Share of the slots of the blocks held that are empty."""
        slots = self.distinct_blocks * self.block_size
        return 1 - self.stored_tokens / slots if slots else 0.0


def replay(trace: RequestTrace, block_size: int) -> BlockCounts:
    """Make the moves of a request in a pool of its own, and count the blocks held after every decode step."""
    tables = RowTables(BlockPool(), block_size)
    tables.add_rows(1)
    tables.append([trace.prompt])
    tables.repeat_interleave(trace.width)
    counts = BlockCounts(block_size)
    for parents in trace.parents:
        if parents is not None:
            tables.select(parents)
        tables.append([1] * trace.width)
        counts.add(tables.rows)
    tables.check()
    tables.pool.check([row.blocks for row in tables.rows])
    return counts


class Recorder:
    """Watches the cache of a patched model during one generate() over a batch of requests.

    It looks after every forward, and notes every reordering of beams. Requests of a batch may want unlike numbers of
    tokens: the call goes on until the longest is done, and what a request does after its own end is left out. Until
    then its rows do what they would do alone. Only blocks that the tables of the running cache name are counted, and a
    block that two requests held would count for both.

    Args:
        model: patched, with full-attention layers only.
        prompts: tokens of each request's prompt.
        new_tokens: new tokens of each request.
        width: beams or samples of each.
        on_forward: called after every forward with how many there have been.

    Attributes:
        traces: what was recorded, per request.
        counts: what the running cache held, per request.

    Raises:
        RuntimeError: during generate(), if the cache does not hold what these requests must have stored.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[int],
        new_tokens: Sequence[int],
        width: int,
        on_forward: Callable[[int], object] = lambda forwards: None,
    ):
        self.width = width
        self.traces = [RequestTrace(prompt, width) for prompt in prompts]
        self.counts = [BlockCounts(model.paged_pool.config.block_size) for _ in prompts]
        self._model = model
        self._new_tokens = list(new_tokens)
        self._on_forward = on_forward
        self._forwards = 0
        self._parents: list[int] | None = None

    def __enter__(self) -> "Recorder":
        self._handle = self._model.register_forward_hook(self._look)
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()

    def _look(self, module: Any, inputs: Any, output: Any) -> None:
        cache = getattr(output, compat.CACHE_ARGUMENT, None)
        if not isinstance(cache, PagedCache) or len(cache.state.tables) != 1:
            raise RuntimeError("the recorder needs a patched model whose layers all keep the same tokens")
        rows = cache.state.tables[0].rows
        self._forwards += 1
        self._on_forward(self._forwards)
        if self._forwards == 1:
            self._expect(rows, [trace.prompt for trace in self.traces])
            self._observe_reordering(cache)
            return
        step = self._forwards - 2
        self._expect(rows, [trace.length(step) for trace in self.traces for _ in range(self.width)])
        for index, (trace, counts) in enumerate(zip(self.traces, self.counts, strict=True)):
            if self._forwards <= self._new_tokens[index]:
                first = index * self.width
                trace.parents.append(self._parents_within(first))
                counts.add(rows[first : first + self.width])
        self._parents = None

    def _expect(self, rows: Sequence[BlockTable], lengths: list[int]) -> None:
        held = [row.length for row in rows]
        if held != lengths:
            raise RuntimeError(f"rows of {lengths} tokens were expected after forward {self._forwards}, found {held}")

    def _parents_within(self, first: int) -> list[int] | None:
        """The parents of a request's rows, counted from its first row; None: nothing has moved."""
        if self._parents is None:
            return None
        parents = [parent - first for parent in self._parents[first : first + self.width]]
        if not all(0 <= parent < self.width for parent in parents):
            raise RuntimeError(f"rows {first} to {first + self.width - 1} continue rows of another request: {parents}")
        return parents

    def _observe_reordering(self, cache: PagedCache) -> None:
        # Over the method of this one cache, and without a reference to it: its blocks go back when generate() ends.
        observed = weakref.ref(cache)

        def reorder_cache(beam_idx: torch.Tensor) -> None:
            parents = beam_idx.tolist()
            before = self._parents
            self._parents = parents if before is None else [before[parent] for parent in parents]
            cache = observed()
            assert cache is not None
            type(cache).reorder_cache(cache, beam_idx)

        cache.__dict__["reorder_cache"] = reorder_cache
