"""Rows scattered over the blocks of a store, the same rows dense, and the right answer by a softmax per query.

Every slot that holds no token, every block that belongs to no row and every table entry that is not needed is poisoned.
"""

from dataclasses import dataclass, field

import torch

POISON = float("nan")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}


@dataclass
class Paged:
    """A store and its rows.

    Attributes:
        lengths: tokens of each row, dropped ones counted.
        starts: position of the first slot of each row's table; tokens before it are gone.
        query_lengths: queries of each row, the last of its tokens.
        poison: what slots hold that no token is in.
    """

    lengths: list[int]
    query_lengths: list[int] | None = None
    starts: list[int] | None = None
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int | None = None
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype | None = None
    poison: float = POISON
    seed: int = 0
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)
    table: torch.Tensor = field(init=False)
    query: torch.Tensor = field(init=False)  # [total queries, num_heads, key_dim]

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        self.value_dim = self.value_dim or self.key_dim
        self.starts = self.starts or [0] * len(self.lengths)
        self.query_lengths = self.query_lengths or [1] * len(self.lengths)
        size = self.block_size
        counts = [-(-(length - start) // size) for length, start in zip(self.lengths, self.starts, strict=True)]
        num_blocks = sum(counts) + 3
        ids = (torch.randperm(num_blocks, generator=self.generator) + 1).tolist()
        spare = ids.pop()  # a block of poison: what is not needed of a table names it
        self.table = torch.full((len(self.lengths), max(counts, default=0) + 2), spare, dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
        self.keys, self.values = (
            torch.full((self.kv_heads, num_blocks + 1, size, dim), self.poison, dtype=self.dtype)
            for dim in (self.key_dim, self.value_dim)
        )
        for row in range(len(self.lengths)):
            for position in range(self.starts[row], self.lengths[row]):
                block, offset = self.place(row, position)
                self.keys[:, block, offset] = self.random(self.kv_heads, self.key_dim).to(self.dtype)
                self.values[:, block, offset] = self.random(self.kv_heads, self.value_dim).to(self.dtype)
        query_dtype = self.query_dtype or self.dtype
        # As a projection gives it, next to something else.
        whole = self.random(sum(self.query_lengths), self.num_heads + 1, self.key_dim).to(query_dtype)
        self.query = whole[:, 1:]

    def spread(self) -> None:
        """Move the rows to a store of more than 2**31 elements, half of the blocks to its far end.

        Keys and values become one. The memory is asked for and never touched but at the blocks that are in use.
        """
        used = self.table.unique().tolist()
        block = self.block_size * self.key_dim
        last = 2**31 // (4 * block) * 5 // self.kv_heads
        far = torch.empty(self.kv_heads, last + 1, self.block_size, self.key_dim, dtype=self.dtype)
        assert max(last * far.stride(1), (self.kv_heads - 1) * far.stride(0)) > 2**31
        for index, old in enumerate(used):
            new = index + 1 if index % 2 else last - index
            far[:, new] = self.keys[:, old]
            self.table[self.table == old] = -new  # not to be taken for an old id
        self.table.neg_()
        self.keys = self.values = far

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def place(self, row: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position - self.starts[row], self.block_size)
        return int(self.table[row, index]), offset

    def int32(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    @property
    def lengths_tensor(self) -> torch.Tensor:
        return self.int32(self.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return self.int32([sum(self.query_lengths[:row]) for row in range(len(self.lengths) + 1)])

    def expected(
        self,
        scale: float,
        *,
        begins: list[int] | None = None,
        query_ends: list[int] | None = None,
        band: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[total queries, num_heads, value_dim] float32, one query and one head after the other."""
        out = torch.zeros(len(self.query), self.num_heads, self.value_dim)
        packed = 0
        for row, (length, queries) in enumerate(zip(self.lengths, self.query_lengths, strict=True)):
            for index in range(queries):
                end = length - queries + index + 1 if query_ends is None else query_ends[packed]
                begin = self.starts[row] if begins is None else max(begins[row], self.starts[row])
                if band is not None:
                    begin = max(begin, end - band)
                seen = [
                    self.place(row, position)
                    for position in range(begin, min(end, length))
                    if key_mask is None or key_mask[row, position]
                ]
                for head in range(self.num_heads if seen else 0):
                    keys = torch.stack([self.keys[head // self.group][place] for place in seen]).float()
                    values = torch.stack([self.values[head // self.group][place] for place in seen]).float()
                    scores = (keys @ self.query[packed, head].float()) * scale
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[head : head + 1].float()])
                    out[packed, head] = torch.softmax(scores, 0)[: len(seen)] @ values
                packed += 1
        return out

    def poisoned_out(self) -> torch.Tensor:
        """Where an answer goes, with strides of its own."""
        shape = (len(self.query), self.num_heads + 1, self.value_dim)
        return torch.full(shape, POISON, dtype=self.query.dtype)[:, :-1]

    def close(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
