"""Batches in blocks, built without a model: block tables, a store, plans, and the dense contents beside them.

`Batch` starts empty and is driven as a cache is: `step` appends (and returns what a backend is called with), `select`,
`repeat`, `crop` and `finish` move rows. What each row holds is kept a second time as plain dense tensors, which
`expected` turns into the right answer by a softmax per query that knows no blocks.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, MistralConfig

from hf_paged import KVPool, PagedConfig
from hf_paged.backends import AttentionCall
from hf_paged.blocks import BlockPool, RowTables
from hf_paged.plan import GroupPlan
from hf_paged.state import CacheState
from hf_paged.store import LayerStore


@dataclass
class Shape:
    """Sizes of one attention layer."""

    kv_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    stored_as: torch.dtype | None = None

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group


@dataclass
class Step:
    """One forward, ready for a backend.

    Attributes:
        query: [batch, num_heads, q_len, key_dim], with the strides a model gives it.
        key, value: [batch, num_kv_heads, q_len, dim], likewise; in the store already.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    store: LayerStore
    plan: GroupPlan
    keys: list[torch.Tensor] = field(default_factory=list)  # per row, every token so far, [num_kv_heads, n, key_dim]
    values: list[torch.Tensor] = field(default_factory=list)

    def call(self, **options) -> AttentionCall:
        """An attention call with a scale that is not the default one."""
        return AttentionCall(**{"scale": 0.3, **options})

    def run(self, attend, call: AttentionCall | None = None, from_store: bool = False) -> torch.Tensor:
        """A backend's answer, [batch, q_len, num_heads, value_dim]. The plan starts afresh: nothing is left over."""
        self.plan.scratch.clear()
        key, value = (None, None) if from_store else (self.key, self.value)
        return attend(self.query, key, value, self.store.memory, self.plan, call or self.call())

    def expected(self, call: AttentionCall | None = None) -> torch.Tensor:
        """The right answer, by a softmax per query in float64. For plans whose pads are all on the left."""
        call = call or self.call()
        batch, num_heads, q_len, _ = self.query.shape
        out = torch.zeros(batch, q_len, num_heads, self.values[0].shape[2], dtype=torch.float64)
        for row in range(batch):
            past, new = self.plan.past[row], self.plan.new[row]
            for query in range(q_len - new, q_len):
                position = past + query - (q_len - new)
                first = 0
                if call.band is not None:
                    first = max(first, position - call.band + 1)
                if self.plan.window is not None:  # what a windowed layer still holds when the forward begins
                    first = max(first, past - self.plan.window + 1)
                if self.plan.chunked:
                    first = max(first, position // self.plan.window * self.plan.window)
                if not self.plan.live[row]:
                    continue
                out[row, query] = softmax_attention(
                    self.query[row, :, query],
                    self.keys[row][:, first : position + 1],
                    self.values[row][:, first : position + 1],
                    call,
                    None if call.bias is None else self._bias(call.bias, row, query, first, position + 1),
                )
        return out

    def _bias(self, bias: torch.Tensor, row: int, query: int, begin: int, end: int) -> torch.Tensor:
        """[num_heads, end - begin], of positions `begin .. end`; the last column is the row's last token."""
        lead = bias.shape[3] - self.plan.past[row] - self.plan.new[row]
        return bias[0, :, query, lead + begin : lead + end]


def softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: AttentionCall,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query against the keys it sees, in float64.

    Args:
        query: [num_heads, key_dim]; keys, values: [num_kv_heads, n, dim]
        bias: of these keys, [num_heads, n]

    Returns:
        [num_heads, value_dim]
    """
    group = query.shape[0] // keys.shape[0]
    keys, values = (tensor.double().repeat_interleave(group, 0) for tensor in (keys, values))
    logits = (keys @ query.double().unsqueeze(2)).squeeze(2) * call.scale  # [num_heads, n]
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if bias is not None:
        logits = logits + bias.double()
    if call.slopes is not None:  # the keys follow one another
        logits = logits + call.slopes.double().unsqueeze(1) * torch.arange(logits.shape[1])
    if call.sinks is not None:
        logits = torch.cat([logits, call.sinks.double().unsqueeze(1)], 1)
    shares = torch.softmax(logits, 1)[:, : keys.shape[1]]  # what the sink takes is lost
    return (shares.unsqueeze(1) @ values).squeeze(1)


class ScatteredPool(BlockPool):
    """Hands out no two adjacent ids in a row, in random order: every second block is taken from the start."""

    def __init__(self, num_blocks: int, seed: int):
        super().__init__(2 * num_blocks, max_blocks=2 * num_blocks)
        every = self.allocate(2 * num_blocks)
        loose = every[1::2]
        random.Random(seed).shuffle(loose)
        for block in loose:
            self.release([block])


class Batch:
    """Rows in blocks and the same rows dense.

    Args:
        rows: batch size.
        shape: sizes of the layer.
        block_size: tokens per block.
        window: the group's window, or None.
        chunked: a query sees its own chunk of `window` tokens only.
        scattered: no two blocks of a row are adjacent.
        seed: of every random tensor.
    """

    def __init__(
        self,
        rows: int,
        shape: Shape | None = None,
        *,
        block_size: int = 4,
        window: int | None = None,
        chunked: bool = False,
        scattered: bool = False,
        seed: int = 0,
    ):
        self.shape = shape = shape or Shape()
        self.window, self.chunked = window, chunked
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = ScatteredPool(4096 // block_size, seed) if scattered else BlockPool()
        self.tables = RowTables(self.pool, block_size)
        self.tables.add_rows(rows)
        self.live = [True] * rows
        self.columns = 0
        self.value_dim = shape.value_dim or shape.key_dim
        self.keys = [torch.zeros(shape.kv_heads, 0, shape.key_dim, dtype=shape.dtype) for _ in range(rows)]
        self.values = [torch.zeros(shape.kv_heads, 0, self.value_dim, dtype=shape.dtype) for _ in range(rows)]
        self.store = LayerStore(self.keys[0][None], self.values[0][None], block_size, shape.stored_as)

    def random(self, heads: int, q_len: int, dim: int) -> torch.Tensor:
        """[batch, heads, q_len, dim] as a projection gives it: memory in the order [batch, q_len, heads, dim]."""
        shape = (len(self.live), q_len, heads, dim)
        return torch.randn(shape, generator=self.generator).to(self.shape.dtype).transpose(1, 2)

    def step(self, new: Sequence[int] | int, q_len: int | None = None, spread: int = 0) -> Step:
        """Append `new[i]` tokens to row i, the last columns of this forward, and write them.

        Args:
            new: tokens per row, or one number for all live rows.
            q_len: columns; None: as many as the largest of `new`.
            spread: see `BlockPool.allocate_rows`.
        """
        counts = [new if live else 0 for live in self.live] if isinstance(new, int) else list(new)
        q_len = q_len or max(counts)
        shape = self.shape
        if self.window is not None:
            for index, row in enumerate(self.tables.rows):
                self.tables.drop_before(index, row.length - self.window + 1)
        past = [row.length for row in self.tables.rows]
        copies = self.tables.append(counts, spread)
        plan = GroupPlan(
            tables=self.tables,
            window=self.window,
            chunked=self.chunked,
            num_blocks=self.pool.num_blocks,
            past=past,
            new=counts,
            q_len=q_len,
            copies=copies,
            live=list(self.live),
            suffix=True,
            first_column=self.columns,
        )
        self.columns += q_len
        key = self.random(shape.kv_heads, q_len, shape.key_dim)
        value = self.random(shape.kv_heads, q_len, self.value_dim)
        plan.write(self.store, key, value)
        for row, count in enumerate(counts):
            self.keys[row] = torch.cat([self.keys[row], key[row, :, q_len - count :]], 1)
            self.values[row] = torch.cat([self.values[row], value[row, :, q_len - count :]], 1)
        query = self.random(shape.num_heads, q_len, shape.key_dim)
        return Step(query, key, value, self.store, plan, list(self.keys), list(self.values))

    # -- moving rows ------------------------------------------------------------------------------------------------

    def select(self, indices: Sequence[int]) -> None:
        self.tables.select(indices)
        self.live, self.keys, self.values = (
            [entries[index] for index in indices] for entries in (self.live, self.keys, self.values)
        )

    def repeat(self, times: int) -> None:
        rows = range(len(self.live))
        self.tables.repeat_interleave(times)
        self.live, self.keys, self.values = (
            [entries[row] for row in rows for _ in range(times)] for entries in (self.live, self.keys, self.values)
        )

    def crop(self, row: int, length: int) -> None:
        self.tables.crop(row, length)
        self.keys[row], self.values[row] = self.keys[row][:, :length], self.values[row][:, :length]

    def finish(self, *rows: int) -> None:
        for row in rows:
            self.live[row] = False
            self.tables.release_row(row)
            self.keys[row], self.values[row] = self.keys[row][:, :0], self.values[row][:, :0]


def used_slots(store: LayerStore, tables: RowTables) -> torch.Tensor:
    """Which slots hold a token of some row, or are the null block's, [slots] bool."""
    used = torch.zeros(store.memory.num_slots, dtype=torch.bool)
    used[: store.block_size] = True
    for row in tables.rows:
        for slot, count in row.token_runs(row.start, row.length, store.block_size):
            used[slot : slot + count] = True
    return used


def poison(store: LayerStore, tables: RowTables, number: float) -> int:
    """Fill every slot that holds no token with `number`; how many there were."""
    unused = ~used_slots(store, tables)
    store.memory.key_slots[:, unused] = number
    store.memory.value_slots[:, unused] = number
    return int(unused.sum())


class PaddedBatch:
    """A batch as the library sees it, columns and pads on any side, planned by the cache's own `CacheState`.

    Args:
        rows: batch size.
        window: every layer is a sliding one of this window (a Mistral), or None (a Llama).
        block_size: tokens per block.
        seed: of every random tensor.
    """

    def __init__(self, rows: int, window: int | None = None, block_size: int = 4, seed: int = 0):
        sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, vocab_size=97)
        config = LlamaConfig(**sizes) if window is None else MistralConfig(**sizes, sliding_window=window)
        self.pool = KVPool(config, PagedConfig(block_size=block_size))
        self.state = CacheState(self.pool)
        self.window = window
        self.generator = torch.Generator().manual_seed(seed)
        self.real = torch.zeros(rows, 0, dtype=torch.bool)
        self.keys = torch.zeros(rows, 2, 0, 16)
        self.values = torch.zeros(rows, 2, 0, 16)

    def step(self, columns: Sequence[str]) -> "PaddedStep":
        """One forward: per row a string with a letter for a token and a dot for a pad."""
        real = torch.tensor([[letter != "." for letter in row] for row in columns])
        batch, q_len = real.shape
        self.real = torch.cat([self.real, real], 1)
        key, value, query = (
            torch.randn(batch, q_len, heads, 16, generator=self.generator).transpose(1, 2) for heads in (2, 2, 4)
        )
        plan = self.state.begin_step(0, key, value, self.real).groups[0]
        store = self.pool.store_of(0, key, value)
        plan.write(store, key, value)
        self.keys, self.values = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        return PaddedStep(query, key, value, store, plan, list(self.keys), list(self.values), self.real.clone())

    def repeat(self, times: int) -> None:
        self.state.repeat_interleave(times)
        self.real, self.keys, self.values = (
            tensor.repeat_interleave(times, 0) for tensor in (self.real, self.keys, self.values)
        )


@dataclass
class PaddedStep(Step):
    """A forward of a `PaddedBatch`: `keys` and `values` hold every column, pads too.

    Attributes:
        real: which columns so far are tokens, [batch, columns] bool.
    """

    real: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))

    def expected(self, call: AttentionCall | None = None) -> torch.Tensor:
        """The right answer, column by column. A pad's query attends too, unless it sees nothing."""
        call = call or self.call()
        batch, num_heads, q_len, _ = self.query.shape
        before = self.real.shape[1] - q_len
        out = torch.zeros(batch, q_len, num_heads, 16, dtype=torch.float64)
        for row in range(batch):
            for query in range(q_len):
                column = before + query
                first = 0
                if call.band is not None:
                    first = max(first, column - call.band + 1)
                if self.plan.window is not None:
                    first = max(first, before - self.plan.window + 1)
                seen = [at for at in range(first, column + 1) if self.real[row, at]]
                if seen:
                    out[row, query] = softmax_attention(
                        self.query[row, :, query], self.keys[row][:, seen], self.values[row][:, seen], call
                    )
        return out


# -- lives of a batch --------------------------------------------------------------------------------------------------


def ragged(size: int, shape: Shape | None = None, window: int | None = None, scattered: bool = False) -> Iterator[Step]:
    """Left-padded rows, among them one that starts late and one that finishes, one to five queries at a time."""
    batch = Batch(4, shape, block_size=size, window=window, scattered=scattered)
    yield batch.step([5, 0, 13, 2], q_len=13)
    for q_len in (1, 3, 1):
        yield batch.step([q_len, 0, q_len, q_len], q_len=q_len)
    yield batch.step([4, 2, 4, 4])
    batch.finish(2)
    for q_len in (1, 5, 1, 2, 1):
        yield batch.step(q_len)


def equal_lengths(size: int, window: int | None = None) -> Iterator[Step]:
    """Rows of one length at a uniform distance in the store, decoded side by side."""
    batch = Batch(3, block_size=size, window=window)
    yield batch.step(9, spread=20)
    for _ in range(6):
        yield batch.step(1)


def beams(size: int, window: int | None = None, scattered: bool = False) -> Iterator[Step]:
    """A prompt stored once, rows that part from it, and permutations with repeats."""
    batch = Batch(1, block_size=size, window=window, scattered=scattered)
    yield batch.step(15)
    batch.repeat(4)
    yield batch.step(1)
    for indices in ([0, 0, 2, 3], [3, 1, 0, 0], [1, 1, 1, 1], [2, 0, 3, 1]):
        batch.select(indices)
        yield batch.step(1)
    yield batch.step(3)


def nested(size: int, scattered: bool = False) -> Iterator[Step]:
    """Two prompts; rows share one of them, some share more; one row stands alone; lengths differ."""
    batch = Batch(3, block_size=size, scattered=scattered)
    yield batch.step([20, 18, 7], q_len=20)
    batch.select([0, 0, 1, 2, 1])
    yield batch.step(5)
    batch.select([0, 0, 1, 2, 2, 3, 4])
    yield batch.step(1)
    batch.crop(1, 19)
    yield batch.step(1)
    batch.finish(0, 4)
    yield batch.step(1)
    yield batch.step(2)


LIVES = {"ragged": ragged, "equal lengths": equal_lengths, "beams": beams, "nested": nested}
