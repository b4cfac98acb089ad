"""Everything there is to find out about the kernels on a GPU, in one run of under eight minutes.

    python benchmarks/gpu_check.py                     from a clone; nothing has to be installed but PyTorch, Triton
                                                       and Transformers
    python benchmarks/gpu_check.py --parts decode,shared --json FILE
    python benchmarks/gpu_check.py --dry-run           every part with tiny sizes on the CPU, in Triton's interpreter;
                                                       no figure of it means anything, and no goal is judged

Exit status: 0, all parts ran and every answer was right (a goal that was missed is printed, and is no failure); 1, a
part failed or an answer was wrong; 2, there is no CUDA device.

Right answers first, then times. A time is a median over CUDA events, with a buffer larger than the second-level cache
written before each run, and the launches queued behind a pause so that the host's part of a call is not in it; the
host's part is measured by itself. A part that leaves the device unusable (an illegal address) does not take the others
with it: they go on in a new process.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DRY = "--dry-run" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, and PyTorch imports Triton

import torch  # noqa: E402

Figures = dict[str, Any]


def load_ours() -> None:
    """Import this clone's hf_paged, and its kernels under their installed name, installed or not."""
    sys.path.insert(0, str(ROOT))
    import hf_paged

    name, folder = "hf_paged.triton_kernels", ROOT / "triton_kernels"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    hf_paged.triton_kernels = module  # type: ignore[attr-defined]


# -- a run and what it records -----------------------------------------------------------------------------------------


class Run:
    """Where the parts put what they find.

    Args:
        budget: seconds for all parts; what would begin later is skipped, and said so.
        json_path: where the results go, after every part; None: nowhere.
    """

    def __init__(self, budget: float, json_path: Path | None):
        self.began = time.perf_counter()
        self.budget, self.json_path = budget, json_path
        self.device = torch.device("cpu" if DRY else "cuda")
        self.part: Figures = {}
        self.results: Figures = {"dry_run": DRY, "versions": versions(), "parts": {}, "goals": []}
        self._flush: torch.Tensor | None = None

    @property
    def left(self) -> float:
        return self.budget - (time.perf_counter() - self.began)

    def record(self, name: str, **figures: Any) -> None:
        """A result of the part that is running."""
        self.part["results"].append({"name": name, **figures})
        print(f"    {name:46} " + "  ".join(f"{key} {shown(value)}" for key, value in figures.items()), flush=True)

    def check(self, name: str, right: bool, **figures: Any) -> None:
        """A result that is right or wrong."""
        self.record(name, right=bool(right), **figures)
        if not right:
            self.part["wrong"].append(name)

    def goal(self, name: str, wanted: str, got: float, met: bool) -> None:
        """How a figure stands to what was aimed at. Not judged in a dry run."""
        if not DRY:
            self.results["goals"].append({"name": name, "wanted": wanted, "got": got, "met": bool(met)})

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Let a failure inside be one result, not the end of the part."""
        try:
            yield
        except Exception:
            self.part["failures"].append({"name": name, "traceback": traceback.format_exc()})
            print(f"    {name:46} FAILED: {traceback.format_exc().strip().splitlines()[-1][:160]}", flush=True)
            if not self.usable():
                raise

    def usable(self) -> bool:
        """Whether the device still answers: after an illegal address nothing of this process does."""
        try:
            synchronize(self.device)
        except Exception:
            return False
        return True

    def figure(self, part: str, name: str, key: str) -> float | None:
        """A figure that an earlier part recorded."""
        for result in self.results["parts"].get(part, {}).get("results", []):
            if result["name"] == name and key in result:
                return result[key]
        return None

    def save(self) -> None:
        self.results["seconds"] = round(time.perf_counter() - self.began, 1)
        if self.json_path is not None:
            self.json_path.write_text(json.dumps(self.results, indent=1))

    # -- times ---------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Put something else into the second-level cache."""
        if self._flush is None:
            size = 1 << 10 if DRY else max(256 << 20, 4 * torch.cuda.get_device_properties(0).L2_cache_size)
            self._flush = torch.empty(size, dtype=torch.int8, device=self.device)
        self._flush.zero_()

    def time(self, call: Callable[[], Any], repeats: int = 30) -> Figures:
        """Median, quartiles and host time of a call, in microseconds."""
        for _ in range(0 if DRY else 3):
            call()
        synchronize(self.device)
        times, host = [], []
        for _ in range(1 if DRY else repeats):
            if DRY:
                self.flush()
                began = time.perf_counter()
                call()
                times.append((time.perf_counter() - began) * 1e6)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # about a millisecond, in which the launches below are queued
            self.flush()
            begin.record()
            began = time.perf_counter()
            call()
            host.append((time.perf_counter() - began) * 1e6)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        figures: Figures = {"us": statistics.median(times), "quartiles_us": [quartiles[0], quartiles[2]]}
        if host:
            figures["host_us"] = statistics.median(host)
        return figures


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    return str(value)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def versions() -> Figures:
    import transformers
    import triton

    found: Figures = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }
    if not DRY:
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = torch.cuda.get_device_name(0)
        found["processors"] = properties.multi_processor_count
        found["memory_bytes"] = properties.total_memory
        found["l2_bytes"] = properties.L2_cache_size
    for package in ("flash_attn", "flash_attn_interface"):
        try:
            found[package] = getattr(importlib.import_module(package), "__version__", "installed")
        except Exception as error:  # a broken build is as good as none, and says why
            found[package] = f"not there ({type(error).__name__})"
    return found


# -- rows in blocks, and the right answer ------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
HALF = torch.float16 if DRY else torch.bfloat16  # Triton's interpreter multiplies bfloat16 wrongly


class Rows:
    """Rows scattered over a store whose other slots hold NaN, and the same rows dense.

    Args:
        lengths: tokens of each row, those counted that a window has dropped.
        queries: queries of each row, its last tokens; None: one each.
        starts: position of the first slot of each row's table.
        shared: rows hold this many leading tokens in the same blocks (a multiple of the block size).
        scattered: in random blocks; else one after the other.
        room: blocks the store has at least; the rows lie at its end.
    """

    def __init__(
        self,
        run: Run,
        lengths: list[int],
        queries: list[int] | None = None,
        *,
        kv_heads: int = 2,
        group: int = 4,
        key_dim: int = 128,
        value_dim: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = HALF,
        starts: list[int] | None = None,
        shared: int = 0,
        scattered: bool = True,
        room: int = 0,
        seed: int = 0,
    ):
        self.device = run.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.lengths, self.starts = lengths, starts or [0] * len(lengths)
        self.queries = queries or [1] * len(lengths)
        self.kv_heads, self.group, self.block_size, self.dtype = kv_heads, group, block_size, dtype
        self.key_dim, self.value_dim = key_dim, value_dim or key_dim
        common = shared // block_size
        counts = [-(-(length - start) // block_size) for length, start in zip(lengths, self.starts, strict=True)]
        own = sum(count - common for count in counts) + common
        blocks = max(own, room) + 1
        order = torch.randperm(own, generator=torch.Generator().manual_seed(seed)) if scattered else torch.arange(own)
        ids = (order + (blocks - own)).tolist()
        head = [ids.pop() for _ in range(common)][::-1]
        spare = 0  # the null block: NaN here, and what a table's spare entries name
        table = torch.full((len(lengths), max(counts, default=0) + 2), spare, dtype=torch.int32)
        for row, count in enumerate(counts):
            mine = head + [ids.pop() for _ in range(count - common)][::-1]
            table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        self.table = table.to(self.device)
        self.keys, self.values = (
            torch.full((kv_heads, blocks, block_size, dim), float("nan"), dtype=dtype, device=self.device)
            for dim in (self.key_dim, self.value_dim)
        )
        self.dense: list[tuple[torch.Tensor, torch.Tensor]] = []
        for row, (length, start) in enumerate(zip(lengths, self.starts, strict=True)):
            tokens = length - start
            keys, values = (self.random(kv_heads, tokens, dim) for dim in (self.key_dim, self.value_dim))
            if row and common:
                keys[:, :shared], values[:, :shared] = (tensor[:, :shared] for tensor in self.dense[0])
            places = torch.arange(tokens, device=self.device)
            slots = self.table[row].long()[places // block_size] * block_size + places % block_size
            self.keys.view(kv_heads, -1, self.key_dim)[:, slots] = keys
            self.values.view(kv_heads, -1, self.value_dim)[:, slots] = values
            self.dense.append((keys, values))
        whole = self.random(sum(self.queries), kv_heads * group + 1, self.key_dim)
        self.query = whole[:, 1:]  # as a projection gives it, next to something else

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def int32(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Of each row, the first position it holds and its length."""
        return list(zip(self.starts, self.lengths, strict=True))

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def lengths_tensor(self) -> torch.Tensor:
        return self.int32(self.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return self.int32([sum(self.queries[:row]) for row in range(len(self.queries) + 1)])

    def poisoned_out(self) -> torch.Tensor:
        shape = (len(self.query), self.heads + 1, self.value_dim)
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)[:, :-1]

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
        """[total queries, num_heads, value_dim] float32, a dense softmax a row."""
        out = []
        packed = 0
        for row, (length, queries) in enumerate(zip(self.lengths, self.queries, strict=True)):
            keys, values = (tensor.float().repeat_interleave(self.group, 0) for tensor in self.dense[row])
            query = self.query[packed : packed + queries].float().transpose(0, 1)  # [num_heads, queries, key_dim]
            positions = torch.arange(self.starts[row], length, device=self.device)[None]
            ends = torch.arange(length - queries + 1, length + 1, device=self.device)[:, None]
            if query_ends is not None:
                ends = torch.tensor(query_ends[packed : packed + queries], device=self.device)[:, None]
            seen = positions < ends
            if begins is not None:
                seen = seen & (positions >= begins[row])
            if band is not None:
                seen = seen & (positions >= ends - band)
            if key_mask is not None:
                seen = seen & (key_mask[row][positions[0]] != 0)[None]
            scores = query @ keys.transpose(1, 2) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                extra = sinks.float().view(-1, 1, 1).expand(-1, queries, 1)
                scores = torch.cat([scores, extra], 2)
            weights = torch.softmax(scores, 2).nan_to_num(0.0)[:, :, : keys.shape[1]]
            out.append((weights @ values).transpose(0, 1))
            packed += queries
        return torch.cat(out)

    def close(self, run: Run, name: str, out: torch.Tensor, right: torch.Tensor) -> None:
        """Compare and record; NaN is wrong."""
        error = (out.float() - right).abs()
        worst = error.max().item() if error.numel() else 0.0
        figures = {"worst": worst, "mean": error.mean().item() if error.numel() else 0.0}
        run.check(name, worst <= TOLERANCE[self.dtype] and not math.isnan(worst), **figures)


# -- answers of the kernels --------------------------------------------------------------------------------------------


def lengths_of(run: Run) -> list[int]:
    return [5, 33, 0] if DRY else [1, 300, 0, 1031, 2048]


F32, F16 = torch.float32, torch.float16
SHAPES: dict[str, Figures] = {
    "Llama-8B": dict(kv_heads=8),
    "SmolLM2": dict(kv_heads=3, group=3, key_dim=64),
    "float16, dim 80, group 1": dict(group=1, key_dim=80, dtype=F16),
    "float32": dict(dtype=F32),
    "float32, dim 64, group 7": dict(group=7, key_dim=64, dtype=F32),
    "dim 256, group 2": dict(group=2, key_dim=256),
    "float32, dim 256": dict(kv_heads=1, group=2, key_dim=256, dtype=F32),
    "dim 40, group 5": dict(group=5, key_dim=40),
    "keys 192, values 128": dict(key_dim=192, value_dim=128),
    "group 71": dict(kv_heads=1, group=71, key_dim=64),
    "block 1": dict(block_size=1),
    "block 256": dict(block_size=256),
}
OPTIONS: dict[str, Figures] = {
    "band": dict(band=100),
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "window that dropped blocks": dict(starts=True, begins=True),
    "key mask": dict(key_mask=True),
    "everything": dict(band=100, softcap=5.0, sinks=True, starts=True, begins=True, key_mask=True),
}


def cases() -> Iterator[tuple[str, Figures, Figures]]:
    """`(name, shape, options)`: shapes without options and options on one shape; few of them in a dry run."""
    for name, shape in SHAPES.items():
        if not DRY or name == "float32":
            yield name, shape, {}
    for name, options in OPTIONS.items():
        if not DRY or name == "everything":
            yield name, dict(group=3, key_dim=64), options
    if not DRY:
        yield "everything, float32", dict(group=3, key_dim=64, dtype=F32), OPTIONS["everything"]
    yield "softcap and sinks", dict(group=3, key_dim=64, dtype=F16), dict(softcap=2.0, sinks=True)


def prepared(rows: Rows, options: Figures) -> tuple[Figures, Figures]:
    """Options as the reference takes them, and as the kernels do."""
    wanted = {name: value for name, value in options.items() if name in ("band", "softcap")}
    given = dict(wanted)
    if options.get("sinks"):
        wanted["sinks"] = given["sinks"] = torch.linspace(-2, 3, rows.heads, device=rows.device).to(rows.dtype)
    if options.get("begins"):
        begins = [start + 3 if length > start + 3 else start for start, length in rows.spans]
        wanted["begins"], given["begins"] = begins, rows.int32(begins)
    if any(rows.starts):
        given["starts"] = rows.int32(rows.starts)
    if options.get("key_mask"):
        shape = (len(rows.lengths), max(rows.lengths))
        mask = torch.rand(shape, generator=rows.generator, device=rows.device) < 0.7
        wanted["key_mask"] = given["key_mask"] = mask.to(torch.uint8)
    return wanted, given


def dropped(lengths: list[int], options: Figures, block_size: int = 16) -> list[int] | None:
    if not options.get("starts"):
        return None
    return [max(0, length - 150 if not DRY else length - 20) // block_size * block_size for length in lengths]


def decode_answers(run: Run) -> None:
    from hf_paged.triton_kernels.decode import decode_attention

    lengths = lengths_of(run)
    for name, shape, options in cases():
        with run.case(name):
            rows = Rows(run, lengths, starts=dropped(lengths, options), **shape)
            wanted, given = prepared(rows, options)
            right = rows.expected(0.1, **wanted)
            for splits in (1, 3):
                out = rows.poisoned_out()
                arguments = (rows.query, rows.keys, rows.values, rows.table, rows.lengths_tensor)
                decode_attention(*arguments, scale=0.1, longest=max(lengths), splits=splits, out=out, **given)
                rows.close(run, f"decode, {name}, {splits} parts", out, right)
    with run.case("decode, scattered and adjacent blocks alike"):
        outs = []
        for scattered in (True, False, True):
            rows = Rows(run, lengths, scattered=scattered)
            arguments = (rows.query, rows.keys, rows.values, rows.table, rows.lengths_tensor)
            outs.append(decode_attention(*arguments, scale=0.1, longest=max(lengths)))
        run.check("decode, scattered and adjacent blocks alike", all(torch.equal(outs[0], out) for out in outs[1:]))


def prefill_answers(run: Run) -> None:
    from hf_paged.triton_kernels.prefill import prefill_attention

    lengths = lengths_of(run)
    queries = [5, 3, 2] if DRY else [1, 300, 2, 257, 64]
    for name, shape, options in cases():
        with run.case(name):
            rows = Rows(run, lengths, queries, starts=dropped(lengths, options), **shape)
            wanted, given = prepared(rows, options)
            right = rows.expected(0.1, **wanted)
            for splits in (1, 3):
                out = rows.poisoned_out()
                arguments = (rows.query, rows.keys, rows.values, rows.table, rows.cu_seqlens, rows.lengths_tensor)
                prefill_attention(
                    *arguments,
                    scale=0.1,
                    longest=max(lengths),
                    longest_query=max(queries),
                    splits=splits,
                    out=out,
                    **given,
                )
                rows.close(run, f"prefill, {name}, {splits} parts", out, right)
    with run.case("prefill, right pads"):
        rows = Rows(run, lengths, queries, kv_heads=1, group=2)
        ends = [
            max(0, length - count // 2 - max(0, count - 3 - index))
            for length, count in zip(lengths, queries, strict=True)
            for index in range(count)
        ]
        out = rows.poisoned_out()
        arguments = (rows.query, rows.keys, rows.values, rows.table, rows.cu_seqlens, rows.lengths_tensor)
        options = dict(scale=0.1, longest=max(lengths), longest_query=max(queries))
        prefill_attention(*arguments, **options, query_ends=rows.int32(ends), out=out)
        rows.close(run, "prefill, right pads", out, rows.expected(0.1, query_ends=ends))


def shared_answers(run: Run) -> None:
    from hf_paged.triton_kernels.shared import members_per_tile, pack_spans, shared_attention

    prefix, count = (16, 3) if DRY else (1024, 21)
    lengths = [prefix + 1 + row for row in range(count)]
    spans = [(list(range(count)), 0, prefix)]
    for name, shape, options in cases():
        if "starts" in options or "band" in options or "key_mask" in options:
            continue  # who may not see all of a prefix does not share it
        if prefix % shape.get("block_size", 16):
            continue
        with run.case(name):
            rows = Rows(run, lengths, shared=prefix, **shape)
            wanted, given = prepared(rows, options)
            packed = pack_spans(spans, lengths, members_per_tile(rows.query, rows.keys, rows.values), run.device)
            right = rows.expected(0.1, **wanted)
            for splits in ((1, 1), (3, 2)):
                out = rows.poisoned_out()
                arguments = (rows.query, rows.keys, rows.values, rows.table, rows.lengths_tensor, packed)
                shared_attention(*arguments, scale=0.1, shared_splits=splits[0], splits=splits[1], out=out, **given)
                rows.close(run, f"shared, {name}, {splits[0]} + {splits[1]} parts", out, right)


def store_answers(run: Run) -> None:
    from hf_paged.triton_kernels.copy import copy_blocks, store_sets, update_table
    from hf_paged.triton_kernels.decode import decode_attention
    from hf_paged.triton_kernels.write import write_tokens

    tokens = 9 if DRY else 2000
    for key_dim, value_dim, size, dtype in ((128, 128, 16, HALF), (40, 24, 1, F16), (64, 64, 16, F32), (17, 5, 4, F32)):
        name = f"write, dims {key_dim} and {value_dim}, block {size}, {str(dtype)[6:]}"
        with run.case(name):
            generator = torch.Generator(run.device).manual_seed(0)
            blocks = tokens // size + 4
            stores = [
                torch.full((3, blocks, size, dim), float("nan"), dtype=dtype, device=run.device)
                for dim in (key_dim, value_dim)
            ]
            new = [
                torch.randn(tokens, 3, dim, generator=generator, device=run.device).to(dtype)
                for dim in (key_dim, value_dim)
            ]
            slots = torch.randperm(blocks * size, generator=generator, device=run.device)[:tokens]
            slots[::5] = -1
            right = [store.clone() for store in stores]
            for store, tensor in zip(right, new, strict=True):
                store.view(3, -1, store.shape[3])[:, slots[slots >= 0]] = tensor[slots >= 0].transpose(0, 1)
            write_tokens(*new, *stores, slots)
            alike = (
                store.nan_to_num(7.0).equal(other.nan_to_num(7.0)) for store, other in zip(stores, right, strict=True)
            )
            run.check(name, all(alike))
    for dtype in (HALF, F32, torch.uint8):
        name = f"copy of blocks of 6 layers, {str(dtype)[6:]}"
        with run.case(name):
            stores = [(torch.randn(2, 40, 16, 80, device=run.device) * 50).to(dtype) for _ in range(2 if DRY else 6)]
            right = [store.clone() for store in stores]
            for store in right:
                store[:, [30, 31, 9]] = store[:, [1, 2, 1]]
            pairs = torch.tensor([[1, 2, 1], [30, 31, 9]], device=run.device)
            copy_blocks(store_sets(stores), pairs[0], pairs[1])
            run.check(name, all(torch.equal(*both) for both in zip(stores, right, strict=True)))
    with run.case("entries of a table"):
        table = torch.zeros(20, 30, dtype=torch.int32, device=run.device)
        cells = torch.arange(600, dtype=torch.int32, device=run.device)
        update_table(table, torch.stack([cells // 30, cells % 30, cells + 7]))
        run.check("entries of a table", torch.equal(table.flatten(), cells + 7))
    with run.case("a store of more than 2**31 elements, ids beyond 65,535"):
        room = 64 if DRY else int(1.05 * 2**31 / (8 * 16 * 128))
        rows = Rows(run, [100] if DRY else [100, 3000], kv_heads=8, group=1, room=room)
        if not DRY:
            assert rows.keys.numel() > 2**31 and int(rows.table.max()) > 65535
        out = rows.poisoned_out()
        arguments = (rows.query, rows.keys, rows.values, rows.table, rows.lengths_tensor)
        decode_attention(*arguments, scale=0.1, longest=max(rows.lengths), out=out)
        rows.close(run, "a store of more than 2**31 elements, decode", out, rows.expected(0.1))
        new = rows.random(2, 8, 128)
        slots = torch.tensor([rows.keys.shape[1] * 16 - 1, 3], device=run.device)
        write_tokens(new, new, rows.keys, rows.values, slots)
        written = rows.keys.view(8, -1, 128)[:, slots].transpose(0, 1)
        run.check("a store of more than 2**31 elements, write", torch.equal(written, new))


# -- whole models ------------------------------------------------------------------------------------------------------

MODELS: dict[str, Figures] = {
    "SmolLM2-135M size": dict(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
    ),
    "1B size": dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
    ),
}
TINY = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=61,
)


def make_model(run: Run, size: Figures, dtype: torch.dtype, like: Any = None) -> Any:
    """A random Llama; weights so large that attention chooses among keys, and a wrong key shows in the tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = TINY if DRY else size
    config = LlamaConfig(
        **size,
        max_position_embeddings=16384,
        initializer_range=1.2 / size["hidden_size"] ** 0.5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # and not `.to`, which would round the rotary frequencies, too
    try:
        with run.device:
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model


def prompts(run: Run, vocabulary: int, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Left-padded random prompts."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids.to(run.device), "attention_mask": mask.to(run.device)}


def generated(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **options)


MODES: dict[str, Figures] = {
    "greedy": {},
    "4 beams": {"num_beams": 4},
    "4 samples": {"do_sample": True, "num_return_sequences": 4, "top_k": 50},
}


def same_generate(run: Run, model: Any, name: str, **settings: Any) -> None:
    """`generate()` with and without us, over modes and pads: the same ids."""
    import hf_paged

    vocabulary = model.config.vocab_size
    new = 3 if DRY else 24
    ragged, even = ([3, 7], [4]) if DRY else ([5, 40, 333], [300, 300])
    for lengths in (ragged, even):
        inputs = prompts(run, vocabulary, lengths)
        for mode, options in MODES.items():
            if DRY and (lengths is even) != (mode == "greedy"):
                continue
            title = f"{name}, {mode}, " + ("left pads" if lengths is ragged else "no pads")
            with run.case(title):
                right = generated(model, inputs, max_new_tokens=new, **options)
                with hf_paged.patched(model, prefix_caching=False, **settings):
                    got = generated(model, inputs, max_new_tokens=new, **options)
                    stats = model.paged_stats()
                fallbacks = dict(stats.fallbacks)
                same = torch.equal(right.sequences, got.sequences)
                figures: Figures = {}
                if settings.get("cuda_graphs"):
                    figures = {"captures": stats.graph_captures, "replayed": stats.graph_steps}
                if same:
                    pairs = zip(right.logits, got.logits, strict=True)
                    figures["logits"] = max((one - other).abs().max().item() for one, other in pairs)
                elif right.sequences.shape == got.sequences.shape:
                    differ = (right.sequences != got.sequences).any(0).nonzero()
                    figures["first_differing_column"] = int(differ[0])
                run.check(title, same, **figures, **({"fallbacks": fallbacks} if fallbacks else {}))
                if "replayed" in figures:
                    run.check(f"{title}: every step replayed", figures["replayed"] == new - 1)


def generate_answers(run: Run) -> None:
    for name, size in MODELS.items():
        if run.left < 20:
            run.record(f"{name}: skipped, out of time")
            return
        model = make_model(run, size, F32)
        same_generate(run, model, f"{name}, float32", backend="triton")
        del model
        if DRY:
            return
        torch.cuda.empty_cache()


def logits_along(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits of given tokens, [rows, tokens, vocabulary] float32: a prompt in two chunks, then token by token."""
    from hf_paged import compat

    half, prompt = (3, 6) if DRY else (300, 600)
    cuts = [0, half, *range(prompt, ids.shape[1] + 1)]
    out = []
    with torch.no_grad():
        for begin, end in itertools.pairwise(cuts):
            out.append(model(input_ids=ids[:, begin:end], **{compat.CACHE_ARGUMENT: cache}).logits.float())
    return torch.cat(out, 1)


def bfloat16_distance(run: Run) -> None:
    """How far 16-bit logits are from the float32 ones, with us and without."""
    from transformers import DynamicCache

    import hf_paged

    for name, size in MODELS.items():
        exact = make_model(run, size, F32)
        vocabulary = exact.config.vocab_size
        ids = prompts(run, vocabulary, [8, 8] if DRY else [632] * 4)["input_ids"]
        right = logits_along(exact, ids, DynamicCache(config=exact.config))
        model = make_model(run, size, HALF, like=exact)
        del exact
        plain = logits_along(model, ids, DynamicCache(config=model.config))
        with hf_paged.patched(model, backend="triton", prefix_caching=False):
            ours = logits_along(model, ids, hf_paged.PagedCache(model.config, pool=model.paged_pool))
        first = 3 if DRY else 300  # what comes before is the library's own attention in both
        theirs, mine = ((logits - right)[:, first:].abs().mean().item() for logits in (plain, ours))
        ratio = mine / max(theirs, 1e-12)
        # Two roundings of the same size differ by chance; five per cent is more than that.
        run.check(f"{name}, 16-bit logits to float32", ratio < 1.05 or DRY, unpatched=theirs, ours=mine, ratio=ratio)
        run.goal(f"{name}: 16-bit distance to float32, ours / unpatched", "<= 1 on average", ratio, ratio <= 1.0)
        del model, right, plain, ours
        if DRY:
            return
        torch.cuda.empty_cache()


def graphs_without_a_gpu() -> None:
    """In a dry run graphs are recorded and replayed as the tests do it."""
    if DRY:
        from hf_paged import cuda_graphs

        spec = importlib.util.spec_from_file_location("recording", ROOT / "tests" / "kernels" / "recording.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cuda_graphs.Device = module.RecordingDevice  # type: ignore[misc]


def graph_answers(run: Run) -> None:
    """Decode steps replayed as CUDA graphs choose the same tokens."""
    graphs_without_a_gpu()
    for name, size in MODELS.items():
        model = make_model(run, size, F32)
        same_generate(run, model, f"{name}, float32, graphs", backend="triton", cuda_graphs=True)
        del model
        if DRY or run.left < 60:
            return
        torch.cuda.empty_cache()


# -- times of the kernels ----------------------------------------------------------------------------------------------

LLAMA = dict(kv_heads=8, group=4, key_dim=128)


def ceilings(run: Run) -> None:
    """What the chip does at most: a device copy, and a matrix product in 16 bits."""
    size = 1 << 12 if DRY else 1 << 31
    source, target = (torch.zeros(size, dtype=torch.int8, device=run.device) for _ in range(2))
    figures = run.time(lambda: target.copy_(source))
    run.record("copy", **figures, bytes_per_s=2 * size / figures["us"] * 1e6)
    side = 16 if DRY else 8192
    one, other = (torch.randn(side, side, device=run.device).to(HALF) for _ in range(2))
    figures = run.time(lambda: one @ other)
    run.record("matrix product", **figures, flops_per_s=2 * side**3 / figures["us"] * 1e6)


def copy_rate(run: Run) -> float:
    """Bytes per second of a device copy; measured now if the part has not been run."""
    rate = run.figure("ceilings", "copy", "bytes_per_s")
    if rate is None:
        size = 1 << 12 if DRY else 1 << 31
        source, target = (torch.zeros(size, dtype=torch.int8, device=run.device) for _ in range(2))
        rate = 2 * size / run.time(lambda: target.copy_(source))["us"] * 1e6
    return rate


def dense_of(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of rows of one length as SDPA takes them, [rows, heads, tokens, dim]."""
    keys, values = (torch.stack([pair[index] for pair in rows.dense]) for index in (0, 1))
    query = rows.query.reshape(len(rows.lengths), rows.queries[0], rows.heads, rows.key_dim).transpose(1, 2)
    return query.contiguous(), keys.contiguous(), values.contiguous()


def time_others(run: Run, name: str, rows: Rows, scale: float, more: Callable[[float], Figures]) -> None:
    """SDPA and, where it is installed, flash-attn, on contiguous keys and values."""
    query, keys, values = dense_of(rows)
    causal = rows.queries[0] > 1
    with run.case(f"{name}, SDPA"):

        def sdpa() -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, is_causal=causal, scale=scale, enable_gqa=True
            )

        figures = run.time(sdpa)
        run.record(f"{name}, SDPA contiguous", **figures, **more(figures["us"]))
    for package in ("flash_attn_interface", "flash_attn"):
        try:
            module = importlib.import_module(package)
        except Exception:
            continue
        with run.case(f"{name}, {package}"):
            q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (query, keys, values))
            lengths = rows.lengths_tensor
            options = dict(cache_seqlens=lengths, softmax_scale=scale, causal=True)
            figures = run.time(lambda: module.flash_attn_with_kvcache(q, k, v, **options))  # noqa: B023
            run.record(f"{name}, {package} contiguous", **figures, **more(figures["us"]))


def decode_times(run: Run) -> None:
    """A decode step of a Llama-8B layer over blocks of 16 and over one block a row."""
    from hf_paged.triton_kernels.decode import decode_attention

    rate = copy_rate(run)
    scale = 128**-0.5
    for count, length in ((32, 4096), (1, 65536)):
        if DRY:
            count, length = min(count, 2), 32
        name = f"decode {count} x {length}"
        size = count * length * 8 * 128 * 2 * HALF.itemsize + 2 * count * 32 * 128 * HALF.itemsize

        def more(us: float, size: int = size) -> Figures:
            return {"of_copy_bandwidth": size / us * 1e6 / rate}

        took = {}
        for block in (16, length):
            with run.case(f"{name}, block {block}"):
                rows = Rows(run, [length] * count, **LLAMA, block_size=block)
                arguments = (rows.query, rows.keys, rows.values, rows.table, rows.lengths_tensor)
                out = torch.empty(count, 32, 128, dtype=HALF, device=run.device)
                figures = run.time(lambda: decode_attention(*arguments, scale=scale, longest=length, out=out))  # noqa: B023
                took[block] = figures["us"]
                title = f"{name}, block {block}" + (" (contiguous)" if block == length else "")
                run.record(title, **figures, **more(figures["us"]))
        time_others(run, name, rows, scale, more)
        share = size / took[16] * 1e6 / rate
        if count == 1:
            run.goal(f"{name}: time / floor at copy bandwidth", "<= 1.5", 1 / share, 1 / share <= 1.5)
        else:
            run.goal(f"{name}: share of copy bandwidth", ">= 0.85", share, share >= 0.85)
        ratio = took[16] / took[length]
        run.goal(f"{name}: block 16 / contiguous", "<= 1.03", ratio, ratio <= 1.03)


def shared_times(run: Run) -> None:
    """16 rows that share 8k tokens: the shared kernel, and plain decode over the same tables and over unshared ones."""
    from hf_paged.triton_kernels.decode import decode_attention
    from hf_paged.triton_kernels.shared import members_per_tile, pack_spans, shared_attention

    count, prefix = (2, 16) if DRY else (16, 8192)
    lengths, scale = [prefix + 16] * count, 128**-0.5
    took = {}
    for title, shared in (("shared tables", prefix), ("tables of their own", 0)):
        rows = Rows(run, lengths, **LLAMA, shared=shared)
        arguments = (rows.query, rows.keys, rows.values, rows.table, rows.lengths_tensor)
        figures = run.time(lambda: decode_attention(*arguments, scale=scale, longest=lengths[0]))  # noqa: B023
        took[title] = figures["us"]
        run.record(f"plain decode {count} x {prefix}, {title}", **figures)
        if shared:
            at_most = members_per_tile(rows.query, rows.keys, rows.values)
            spans = pack_spans([(list(range(count)), 0, prefix)], lengths, at_most, run.device)
            figures = run.time(lambda: shared_attention(*arguments, spans, scale=scale))  # noqa: B023
            took["kernel"] = figures["us"]
            run.record(f"shared kernel {count} x {prefix}", **figures)
    gain = took["shared tables"] / took["kernel"]
    run.goal(f"shared {count} x {prefix}: plain / shared kernel, same tables", ">= 5", gain, gain >= 5)
    gain = took["tables of their own"] / took["kernel"]
    run.goal(f"shared {count} x {prefix}: plain on unshared tables / shared kernel", ">= 5", gain, gain >= 5)


def prefill_times(run: Run) -> None:
    """A prompt of 8k tokens in one Llama-8B layer."""
    from hf_paged.triton_kernels.prefill import prefill_attention

    length = 32 if DRY else 8192
    scale, operations = 128**-0.5, 4 * 32 * 128 * length * (length + 1) / 2
    took = {}

    def more(us: float) -> Figures:
        return {"flops_per_s": operations / us * 1e6}

    for block in (16, length):
        with run.case(f"prefill {length}, block {block}"):
            rows = Rows(run, [length], [length], **LLAMA, block_size=block)
            arguments = (rows.query, rows.keys, rows.values, rows.table, rows.cu_seqlens, rows.lengths_tensor)
            options = dict(scale=scale, longest=length, longest_query=length)
            figures = run.time(lambda: prefill_attention(*arguments, **options), 15)  # noqa: B023
            took[block] = figures["us"]
            title = f"prefill {length}, block {block}" + (" (contiguous)" if block == length else "")
            run.record(title, **figures, **more(figures["us"]))
    time_others(run, f"prefill {length}", rows, scale, more)
    rate = operations / took[16] / 1e6
    run.goal(f"prefill {length}: TFLOP/s", ">= 400", rate, rate >= 400)
    run.goal(
        f"prefill {length}: block 16 / contiguous", "<= 1.10", took[16] / took[length], took[16] <= 1.1 * took[length]
    )


def flex_times(run: Run) -> None:
    """FlexAttention on the same work, where it compiles: minutes of compilation are possible, so it comes late."""
    if DRY:
        run.record("FlexAttention: not compiled in a dry run")
        return
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    for name, count, length, queries in (("decode 32 x 4096", 32, 4096, 1), ("prefill 8192", 1, 8192, 8192)):
        with run.case(name):
            rows = Rows(run, [length] * count, [queries] * count, **LLAMA)
            query, keys, values = dense_of(rows)
            mask = None
            if queries > 1:
                mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cuda")
            options = dict(block_mask=mask, enable_gqa=True)
            figures = run.time(lambda: compiled(query, keys, values, **options), 15)  # noqa: B023
            run.record(f"{name}, FlexAttention contiguous", **figures)


# -- times of generate() -----------------------------------------------------------------------------------------------


def generate_times(run: Run) -> None:
    """Tokens per second of whole calls, a model of 1B size in 16 bits; each of ours computes its prompt anew."""
    import hf_paged

    model = make_model(run, MODELS["1B size"], HALF)
    ours: dict[str, Figures] = {
        "hf_paged, PyTorch backend": {"backend": "torch"},
        "hf_paged, triton": {"backend": "triton"},
        "hf_paged, triton, graphs": {"backend": "triton", "cuda_graphs": True},
    }
    graphs_without_a_gpu()
    work: dict[str, tuple[int, int, int, Figures]] = {
        "greedy, 8 rows x 512": (8, 512, 128, {}),
        "4 beams, 4 rows x 2048": (4, 2048, 64, {"num_beams": 4}),
    }
    kinds: dict[str, Figures] = {"DynamicCache": {}, "StaticCache, compiled": {"cache_implementation": "static"}}
    fastest: dict[tuple[str, str], float] = {}
    order = [(title, kind) for title in work for kind in ("DynamicCache", *ours)]
    order += [(title, "StaticCache, compiled") for title in work]  # it compiles for a minute or so: last
    for title, kind in order:
        rows, length, new, options = work[title]
        if DRY:
            rows, length, new = 2, 5, 2
        if run.left < (75 if kind.startswith("Static") else 15):
            run.record(f"{title}, {kind}: skipped, out of time")
            continue
        with run.case(f"{title}, {kind}"):
            inputs = prompts(run, model.config.vocab_size, [length] * rows)
            call = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, **options, **kinds.get(kind, {}))

            def seconds(call: Figures = call, inputs: dict[str, torch.Tensor] = inputs) -> float:
                synchronize(run.device)
                began = time.perf_counter()
                model.generate(**inputs, **call)
                synchronize(run.device)
                return time.perf_counter() - began

            def measured() -> list[float]:
                first = seconds()
                return [first, *(seconds() for _ in range(1 if DRY else 3))]

            if kind in ours:
                with hf_paged.patched(model, prefix_caching=False, **ours[kind]):
                    first, *times = measured()
                    fallbacks = dict(model.paged_stats().fallbacks)
            else:
                first, *times = measured()
                fallbacks = {}
            best = statistics.median(times)
            fastest[title, kind] = rows * new / best
            more = {"fallbacks": fallbacks} if fallbacks else {}
            figures = {"tokens_per_s": rows * new / best, "s": best, "first_s": first}
            run.record(f"{title}, {kind}", **figures, **more)
    for title, kind in (("greedy, 8 rows x 512", "StaticCache, compiled"), ("4 beams, 4 rows x 2048", "DynamicCache")):
        candidates = {name: fastest[title, name] for name in ours if (title, name) in fastest}
        if (title, kind) not in fastest or not candidates:
            continue
        least = 1.0 if kind.startswith("Static") else 3.0
        chosen = max(candidates, key=lambda name: candidates[name])
        if kind.startswith("Static") and "hf_paged, triton, graphs" in candidates:
            chosen = "hf_paged, triton, graphs"
        ratio = candidates[chosen] / fastest[title, kind]
        run.goal(f"generate, {title}: {chosen} / {kind}", f">= {least:g}", ratio, ratio >= least)


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Run], None]] = {
    "decode_answers": decode_answers,
    "prefill_answers": prefill_answers,
    "shared_answers": shared_answers,
    "store_answers": store_answers,
    "ceilings": ceilings,
    "decode": decode_times,
    "shared": shared_times,
    "prefill": prefill_times,
    "generate_answers": generate_answers,
    "bfloat16_distance": bfloat16_distance,
    "graph_answers": graph_answers,
    "generate": generate_times,
    "flex": flex_times,
}


def run_part(run: Run, name: str) -> bool:
    """Run one part; whether the device is still usable."""
    run.part = {"status": "running", "results": [], "wrong": [], "failures": []}
    run.results["parts"][name] = run.part
    if run.left <= 0:
        run.part["status"] = "skipped"
        print(f"{name}: skipped, the budget of {run.budget:.0f} s is spent", flush=True)
        run.save()
        return True
    print(f"{name} ({run.left:.0f} s left)", flush=True)
    run.save()
    began = time.perf_counter()
    try:
        PARTS[name](run)
        synchronize(run.device)
    except Exception:
        run.part["traceback"] = traceback.format_exc()
        print(run.part["traceback"], flush=True)
    bad = run.part["wrong"] or run.part["failures"] or "traceback" in run.part
    run.part["status"] = "failed" if bad else "passed"
    run.part["seconds"] = round(time.perf_counter() - began, 1)
    usable = run.usable()
    if usable and run.device.type == "cuda":
        torch.cuda.empty_cache()
    run.save()
    return usable


# Parts that time nothing, so that several may run at once: mostly they compile.
SIDE_BY_SIDE = ("decode_answers", "prefill_answers", "shared_answers", "store_answers")


def elsewhere(run: Run, *groups: list[str]) -> list[str]:
    """Run groups of parts in a process each, at the same time, and take over what they find.

    Returns:
        Parts of which nothing came back: where a GPU serves one process only, or one has crashed.
    """
    lost = []
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for index, names in enumerate(groups):
            path = Path(folder) / f"{index}.json"
            command = [sys.executable, __file__, "--parts", ",".join(names), "--budget", str(max(run.left, 0))]
            command += ["--no-apart", "--json", str(path), *(["--dry-run"] if DRY else [])]
            pipes: Figures = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            started.append((names, path, subprocess.Popen(command, **pipes)))
        for names, path, process in started:
            try:
                told, _ = process.communicate(timeout=max(run.left, 30))
            except subprocess.TimeoutExpired:
                process.kill()
                told, _ = process.communicate()
            print(told, flush=True)
            found = json.loads(path.read_text()) if path.exists() else {"parts": {}, "goals": []}
            for name in names:
                nothing = {"status": "failed", "results": [], "wrong": [], "failures": [], "traceback": told[-4000:]}
                part = run.results["parts"][name] = found["parts"].get(name, nothing)
                if part is nothing:
                    lost.append(name)
                elif part["status"] == "running":  # killed in the middle
                    part.update(status="failed", traceback=told[-4000:])
            run.results["goals"] += found["goals"]
    run.save()
    return lost


def summary(run: Run) -> bool:
    """Print the table; whether everything that ran was right."""
    print("\n" + "  ".join(f"{name} {value}" for name, value in run.results["versions"].items()))
    right = True
    for name, part in run.results["parts"].items():
        right &= part["status"] in ("passed", "skipped")
        bad = [*part["wrong"], *(failure["name"] for failure in part["failures"])]
        told = f"   wrong or failed: {'; '.join(bad)}" if bad else ""
        print(f"{name:20} {part['status']:8} {part.get('seconds', 0.0):6.1f} s {len(part['results']):4} results{told}")
    if DRY:
        print("\ndry run: sizes are tiny and kernels interpreted, so no figure above means anything; no goal is judged")
    elif run.results["goals"]:
        print(f"\n{'goal':72} {'wanted':>16} {'got':>9}")
        for goal in run.results["goals"]:
            met = "met" if goal["met"] else "MISSED"
            print(f"{goal['name']:72} {goal['wanted']:>16} {goal['got']:9.3f}  {met}")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    out = os.environ.get("OUT")
    default = Path(out) / "gpu_check.json" if out else None
    parser.add_argument("--json", type=Path, default=default, help="file for the results; default $OUT/gpu_check.json")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds; parts that would begin later are skipped")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument(
        "--apart",
        action=argparse.BooleanOptionalAction,
        default=not DRY,
        help="run the parts that only compare answers in processes of their own, side by side",
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to test this script")
    arguments = parser.parse_args()
    names = [name for name in arguments.parts.split(",") if name]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not DRY and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        if arguments.json is not None:
            nothing = {"dry_run": False, "error": "no CUDA device: nothing was measured", "parts": {}, "goals": []}
            arguments.json.write_text(json.dumps(nothing))
        return 2
    load_ours()
    if DRY:
        from hf_paged.triton_kernels import config

        config.LEAST_PART = 1  # let contexts of a few tokens be worth splitting
    run = Run(arguments.budget, arguments.json)
    print("  ".join(f"{name} {value}" for name, value in run.results["versions"].items()), flush=True)
    if arguments.apart:
        lost = elsewhere(run, *([name] for name in names if name in SIDE_BY_SIDE))
        names = [name for name in names if name not in SIDE_BY_SIDE or name in lost]  # then one after the other
    for index, name in enumerate(names):
        if not run_part(run, name) and names[index + 1 :]:
            print("the device no longer answers in this process; the other parts go on in a new one", flush=True)
            elsewhere(run, names[index + 1 :])
            break
    right = summary(run)
    run.save()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
