"""The compiled CPU backend: decode steps in one call a layer that writes, attends and merges (`cpu_kernels`).

It reads blocks wherever they lie, a shared block once for all rows that share it, and keys and values once for all
heads of a group. What it does not know (a prompt, softcap, float16, another device) goes to the PyTorch backend.
"""

import ctypes
from dataclasses import dataclass

import torch

from ..cpu_kernels.library import DTYPES, Step, library
from ..plan import GroupPlan
from ..store import LayerStore, Memory
from . import AttentionCall, torch_strided

# Tokens of a task at least, so that it is worth the merge, and tasks per thread at most, so that threads end together.
SHORTEST_TASK = 256
TASKS_PER_THREAD = 4
# Tokens times rows below which waking other threads costs more than they save.
WORTH_THREADS = 256


def attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    memory: Memory,
    plan: GroupPlan,
    call: AttentionCall,
) -> torch.Tensor:
    """See `hf_paged.backends`."""
    if not _knows(query, memory, plan, call):
        return torch_strided.attend(query, key, value, memory, plan, call)
    name = ("native", call.band, call.scale, memory.layout, query.shape, query.dtype)
    step = plan.scratch.get(name)
    if step is None or step.slopes is not call.slopes:
        step = plan.scratch[name] = NativeStep(query, memory, plan, call)
        if call.sinks is None and plan.replay is None:
            plan.replay = step
    return step.run(query, None, None, memory, call.sinks)


def _knows(query: torch.Tensor, memory: Memory, plan: GroupPlan, call: AttentionCall) -> bool:
    layout = memory.layout
    return (
        query.shape[2] == 1
        and plan.offsets is None
        and (plan.suffix or (plan.window is None and call.band is None))
        and call.softcap is None
        and call.bias is None
        and _are_plain(query, query, query)
        and query.dtype in DTYPES
        and layout.key_dtype is layout.value_dtype
        and layout.key_dtype in DTYPES
        and library() is not None
    )


def _are_plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there is host memory behind tensors whose address is about to be taken, and nobody wants gradients."""
    return (
        type(query) is type(key) is type(value) is torch.Tensor
        and query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    )


def _check(query: torch.Tensor, memory: Memory, plan: GroupPlan, call: AttentionCall) -> None:
    """Raise ValueError where the kernel, which takes sizes on trust, would read behind the query or the slopes."""
    batch, num_heads, _, key_dim = query.shape
    layout = memory.layout
    if batch != plan.batch or num_heads % layout.kv_heads or key_dim != layout.key_dim:
        raise ValueError(
            f"a query of shape {list(query.shape)} does not fit a step of {plan.batch} rows over "
            f"{layout.kv_heads} stored heads of dim {layout.key_dim}: it must be [rows, heads, 1, dim], and heads a "
            "multiple of the stored ones"
        )
    if call.slopes is not None and call.slopes.shape != (num_heads,):
        raise ValueError(f"slopes of shape {list(call.slopes.shape)} for {num_heads} heads: one for each is needed")


class NativeStep:
    """One decode step of a layer group, as the kernel takes it, for all layers whose memory is laid out alike.

    Attributes:
        mask: the mask of the layer that went first; set by whoever calls `repeat`.
        scale: factor on the scores.
        slopes: of ALiBi, [num_heads]; None: none.
    """

    mask: torch.Tensor | None = None

    def __init__(self, query: torch.Tensor, memory: Memory, plan: GroupPlan, call: AttentionCall):
        _check(query, memory, plan, call)
        self.layout, self.shape, self.dtype = memory.layout, query.shape, query.dtype
        rows, heads = query.shape[0], memory.layout.kv_heads
        self.key_shape = torch.Size((rows, heads, 1, memory.layout.key_dim))
        self.value_shape = torch.Size((rows, heads, 1, memory.layout.value_dim))
        self._copies = plan.copies_on(query.device) if plan.copies else None
        self.scale, self.slopes = call.scale, call.slopes
        self._slopes = None if call.slopes is None else call.slopes.float().contiguous()
        batch, num_heads, _, key_dim = query.shape
        layout = memory.layout
        kernel = library()
        assert kernel is not None
        self._decode = kernel.hf_paged_decode
        work = plan.scratch.get(("tasks", call.band))
        if work is None:
            work = plan.scratch[("tasks", call.band)] = _tasks(plan, call.band)
        group = num_heads // layout.kv_heads
        scratch = kernel.hf_paged_scratch(work.most_rows * group, key_dim, layout.value_dim)
        partials = work.num_partials * num_heads
        self._floats = torch.empty(
            work.num_threads * scratch + partials * (kernel.hf_paged_padded(layout.value_dim) + 2), dtype=torch.float32
        )
        plan.scratch["bytes"] = self._floats.nbytes
        self._ints = work.ints  # both are pointed into
        first = self._floats.data_ptr()
        numbers = work.ints.data_ptr()
        self.step = Step(
            batch, layout.kv_heads, group, key_dim, layout.value_dim, layout.num_slots,
            DTYPES[layout.key_dtype], DTYPES[query.dtype],
            work.num_tasks, work.num_threads, scratch,
            *(numbers + 8 * offset for offset in work.offsets),
            first, first + 4 * (work.num_threads * scratch + 2 * partials), first + 4 * work.num_threads * scratch,
            call.scale,
        )  # fmt: skip
        self._out_shape = (batch, 1, num_heads, layout.value_dim)

    def repeat(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, store: LayerStore
    ) -> torch.Tensor | None:
        """Write and attend for another layer; None, and nothing done, if it is unlike.

        The kernel is given addresses, so all that it takes on trust is compared here: shapes, dtypes, and that there is
        host memory behind each tensor.

        Args:
            query: [batch, num_heads, 1, key_dim]
            key, value: this forward's, not yet in the store, [batch, num_kv_heads, 1, dim]
        """
        with store.lock:
            memory = store.memory
            if memory.layout != self.layout or not _are_plain(query, key, value):
                return None
            if query.shape != self.shape or key.shape != self.key_shape or value.shape != self.value_shape:
                return None
            if not query.dtype is key.dtype is value.dtype is self.dtype:
                return None
            if self._copies is not None:
                store.copy_blocks(*self._copies)
            return self.run(query, key, value, memory)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        memory: Memory,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = query.contiguous()
        new: tuple[int | None, int | None] = (None, None)
        if key is not None and value is not None:
            key, value = key.contiguous(), value.contiguous()  # held here while the kernel reads them
            new = (key.data_ptr(), value.data_ptr())
        if sinks is not None:
            if sinks.shape != self.shape[1:2]:
                raise ValueError(
                    f"sinks of shape {list(sinks.shape)} for {self.shape[1]} heads: one for each is needed"
                )
            sinks = sinks.float().contiguous()
        out = torch.empty(self._out_shape, dtype=self.dtype)
        self._decode(
            ctypes.byref(self.step),
            query.data_ptr(), *new, memory.keys.data_ptr(), memory.values.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            None if self._slopes is None else self._slopes.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out


@dataclass
class _Work:
    """The tasks of a step: spans of slots, and the rows that attend to each.

    Attributes:
        ints: the kernel's integer arrays, one behind the other, int64.
        offsets: where each begins in it.
        most_rows: rows of the task that has most.
    """

    ints: torch.Tensor
    offsets: list[int]
    num_tasks: int
    num_partials: int
    num_threads: int
    most_rows: int


def _tasks(plan: GroupPlan, band: int | None) -> _Work:
    """Cut a decode step into tasks. O(rows · runs), independent of the context's length."""
    size = plan.tables.block_size
    tables = plan.tables.rows
    ends = [past + new for past, new in zip(plan.past, plan.new, strict=True)]
    starts = [max(plan.visible_from(row, band), table.start) for row, table in enumerate(tables)]
    active = [row for row, end in enumerate(ends) if plan.live[row] and end > starts[row]]
    spans: list[tuple[list[int], list[tuple[int, int]], int]] = []  # rows, runs, position of the first token
    at_start = [row for row in active if starts[row] == 0]
    for rows, first, last in plan.shared_spans(at_start, torch_strided.LONG_PREFIX):
        spans.append((rows, tables[rows[0]].token_runs(first, last, size), first))
        for row in rows:
            starts[row] = last
    for row in active:
        if runs := tables[row].token_runs(starts[row], ends[row], size):
            spans.append(([row], runs, starts[row]))

    threads = torch.get_num_threads()
    tokens = sum(count for _, runs, _ in spans for _, count in runs)
    if sum(len(rows) * count for rows, runs, _ in spans for _, count in runs) < WORTH_THREADS:
        threads = 1
    longest = tokens if threads == 1 else max(SHORTEST_TASK, -(-tokens // (threads * TASKS_PER_THREAD)))
    tasks = []
    for rows, runs, position in spans:
        for part in _cut(runs, longest):
            tasks.append((rows, part, position))
            position += sum(count for _, count in part)
    tasks.sort(key=lambda task: -(2 + len(task[0])) * sum(count for _, count in task[1]))  # the longest first

    entries: list[int] = []
    task_rows: list[int] = []
    flat_runs: list[int] = []
    partials: list[list[int]] = [[] for _ in tables]
    num_partials = 0
    for rows, runs, position in tasks:
        entries += (len(task_rows), len(task_rows) + len(rows), len(flat_runs) // 2, len(flat_runs) // 2 + len(runs))
        entries += (num_partials, position)
        task_rows += rows
        for run in runs:
            flat_runs += run
        for row in rows:
            partials[row].append(num_partials)
            num_partials += 1
    row_ends = [0]
    for own in partials:
        row_ends.append(row_ends[-1] + len(own))
    targets = [
        table.slot(past, size) if new else -1 for table, past, new in zip(tables, plan.past, plan.new, strict=True)
    ]
    flat_partials = [partial for own in partials for partial in own]
    arrays = (entries, task_rows, flat_runs, row_ends, flat_partials, targets, ends)
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + len(array))
    return _Work(
        torch.tensor([number for array in arrays for number in array], dtype=torch.int64),
        offsets[:-1],
        len(tasks),
        num_partials,
        threads,
        max((len(rows) for rows, _, _ in tasks), default=0),
    )


def _cut(runs: list[tuple[int, int]], longest: int) -> list[list[tuple[int, int]]]:
    """Runs in parts of at most about `longest` tokens, all about as long."""
    tokens = sum(count for _, count in runs)
    parts = -(-tokens // longest)
    if parts <= 1:
        return [runs]
    longest = -(-tokens // parts)
    out: list[list[tuple[int, int]]] = [[]]
    room = longest
    for first, count in runs:
        while count:
            if not room:
                out.append([])
                room = longest
            taken = min(count, room)
            out[-1].append((first, taken))
            first, count, room = first + taken, count - taken, room - taken
    return out
