"""Compile every kernel for real models' shapes and several chips, without a GPU, and look at what came out.

    python benchmarks/compile_gate.py              the whole table; exit status 1 if a line fails
    python benchmarks/compile_gate.py --quick      a few lines and the negative controls, in under a minute
    python benchmarks/compile_gate.py --counts     bytes and operations per kernel, and the floor they imply on an H200

Kernels are compiled as their launchers launch them: a launcher is called with tensors that have no memory, and its
launch is caught with all arguments. What must hold:

- no stack, no spilled registers, shared memory within what the chip has;
- matrix instructions wherever 16-bit operands are multiplied;
- loads (and, in copies, stores) of 128 bits, and none of 16 bits but for the few scalars of the sinks.

Two negative controls must fail: a launch whose strides are not known to be aligned, and a tile too tall for its warps.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hf_paged.triton_kernels import config, copy, decode, merge, prefill, shared, write

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Chip:
    """What is compiled for; `shared` is the shared memory a program may have, in bytes."""

    target: GPUTarget
    device: config.Device
    shared: int


CHIPS = {
    # 99 KB: what the smaller chips of the family have (8.6, 8.9), for which there is no other table.
    "sm_80": Chip(GPUTarget("cuda", 80, 32), config.Device("sm", 108), 101376),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), config.Device("sm90", 132), 232448),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), config.Device("sm100", 148), 232448),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), config.Device("gfx", 304), 65536),
}


@dataclass(frozen=True)
class Shape:
    """The attention of one model's layer."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    band: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def values(self) -> int:
        return self.value_dim or self.key_dim

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


SHAPES = {
    "SmolLM2-135M": Shape(9, 3, 64),
    "SmolLM2-135M float32": Shape(9, 3, 64, dtype=torch.float32),
    "Llama-8B": Shape(32, 8, 128),
    "Llama-8B float16": Shape(32, 8, 128, dtype=torch.float16),
    "Llama-8B float32": Shape(32, 8, 128, dtype=torch.float32),
    "Llama-8B block 1": Shape(32, 8, 128, block_size=1),
    "Llama-8B block 256": Shape(32, 8, 128, block_size=256),
    "Qwen3-4B": Shape(32, 8, 128),
    "Qwen3-30B-A3B": Shape(32, 4, 128),
    "Gemma-3-4B full": Shape(8, 4, 256),
    "Gemma-3-4B sliding": Shape(8, 4, 256, band=1024),
    "Gemma-2-9B": Shape(16, 8, 256, band=4096, softcap=50.0),
    "Gemma-3 float32": Shape(8, 4, 256, dtype=torch.float32),
    "gpt_oss-20B full": Shape(64, 8, 64, sinks=True),
    "gpt_oss-20B sliding": Shape(64, 8, 64, band=128, sinks=True),
    "Phi-3-mini": Shape(32, 32, 96),
    "head dim 40": Shape(8, 8, 40),
    "head dim 72": Shape(16, 16, 72),
    "head dim 80": Shape(32, 32, 80),
    "head dim 112": Shape(32, 8, 112),
    "head dim 160": Shape(16, 8, 160),
    "keys 192, values 128": Shape(16, 16, 192, 128),
}


# -- catching launches ------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """A kernel as it was launched."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


@contextlib.contextmanager
def caught(device: config.Device) -> Iterator[list[Launch]]:
    """Launches made inside end in this list, and nothing runs."""
    launches: list[Launch] = []

    def run(kernel: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        names = kernel.arg_names
        arguments = dict(zip(names, args, strict=False))
        options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages") if key in kwargs}
        launches.append(Launch(kernel, grid, {**arguments, **kwargs}, options))

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(config, "device_of", lambda _: device):
        yield launches


def nothing(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


@dataclass
class Tensors:
    """What a launcher is called with, for `rows` rows of `context` tokens of which `new` are asked."""

    shape: Shape
    rows: int
    context: int
    new: int = 1

    def __post_init__(self) -> None:
        shape = self.shape
        blocks = -(-self.context // shape.block_size)
        self.query = nothing(self.rows * self.new, shape.num_heads, shape.key_dim, dtype=shape.dtype)
        self.key = nothing(self.rows * self.new, shape.num_kv_heads, shape.key_dim, dtype=shape.dtype)
        self.value = nothing(self.rows * self.new, shape.num_kv_heads, shape.values, dtype=shape.dtype)
        # An odd number of blocks: the strides of heads then are no more aligned than a block is.
        store = (shape.num_kv_heads, (self.rows * blocks) | 1, shape.block_size)
        self.keys = nothing(*store, shape.key_dim, dtype=shape.dtype)
        self.values = nothing(*store, shape.values, dtype=shape.dtype)
        self.table = nothing(self.rows, blocks)
        self.lengths = nothing(self.rows)
        self.options: dict[str, Any] = dict(scale=shape.key_dim**-0.5, softcap=shape.softcap)
        # Sinks are parameters of the model, in its dtype.
        self.options["sinks"] = nothing(shape.num_heads, dtype=shape.dtype) if shape.sinks else None


def launch_write(shape: Shape) -> None:
    data = Tensors(shape, 32, 4096)
    write.write_tokens(data.key, data.value, data.keys, data.values, nothing(32, dtype=torch.int64))


def launch_decode(shape: Shape, splits: int = 1) -> None:
    data = Tensors(shape, 32, 4096)
    arguments = (data.query, data.keys, data.values, data.table, data.lengths)
    decode.decode_attention(*arguments, longest=4096, band=shape.band, splits=splits, **data.options)


def launch_decode_split(shape: Shape) -> None:
    launch_decode(shape, 8)


def launch_prefill(shape: Shape) -> None:
    data = Tensors(shape, 1, 8192, 8192)
    arguments = (data.query, data.keys, data.values, data.table, nothing(2), data.lengths)
    prefill.prefill_attention(*arguments, longest=8192, longest_query=8192, band=shape.band, splits=1, **data.options)


def launch_assisted(shape: Shape) -> None:
    data = Tensors(shape, 4, 8192, 5)
    arguments = (data.query, data.keys, data.values, data.table, nothing(5), data.lengths)
    prefill.prefill_attention(*arguments, longest=8192, longest_query=5, band=shape.band, splits=8, **data.options)


def launch_shared(shape: Shape) -> None:
    data = Tensors(shape, 16, 8192)
    at_most = shared.members_per_tile(data.query, data.keys, data.values)
    spans = shared.pack_spans([(range(16), 0, 8000)], [8192] * 16, at_most, "meta")
    shared.shared_attention(data.query, data.keys, data.values, data.table, data.lengths, spans, **data.options)


def launch_copy(shape: Shape) -> None:
    data = Tensors(shape, 32, 4096)
    stores = [data.keys, data.values] * 8
    copy.copy_blocks(copy.store_sets(stores), *(nothing(8, dtype=torch.int64) for _ in range(2)))


def launch_update(shape: Shape) -> None:
    copy.update_table(nothing(32, 257), nothing(3, 32))


# name: the call that launches it, and the kernel's name among the launches it makes
KERNELS: dict[str, tuple[Callable[[Shape], None], JITFunction]] = {
    "write": (launch_write, write._write_kernel),
    "decode": (launch_decode, decode._decode_kernel),
    "decode, split": (launch_decode_split, decode._decode_kernel),
    "merge": (launch_decode_split, merge._merge_kernel),
    "prefill": (launch_prefill, prefill._prefill_kernel),
    "assisted": (launch_assisted, prefill._prefill_kernel),
    "shared": (launch_shared, shared._shared_kernel),
    "copy": (launch_copy, copy._copy_kernel),
    "update table": (launch_update, copy._update_table_kernel),
}
ATTENTION = ("decode", "decode, split", "prefill", "assisted", "shared")


def launch_of(kernel: str, shape: Shape, chip: Chip) -> Launch:
    call, function = KERNELS[kernel]
    with caught(chip.device) as launches:
        call(shape)
    return next(launch for launch in launches if launch.kernel is function)


# -- compiling -------------------------------------------------------------------------------------------------------

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def source_of(launch: Launch) -> ASTSource:
    """The source with types, constants and hints as a launch derives them from its arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], list] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and special):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            hints[(index,)] = [["tt.divisibility", 16]]  # where the allocator puts tensors
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and special:
                hints[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, hints)


@dataclass
class Verdict:
    """What a compiled kernel looks like."""

    registers: int
    stack: int
    spills: int
    shared: int
    matrix: int
    wide_loads: int
    wide_stores: int
    narrow_loads: int

    def faults(self, kernel: str, shape: Shape, chip: Chip) -> list[str]:
        faults = []
        if self.stack or self.spills:
            faults.append(f"stack {self.stack}, spills {self.spills}")
        if self.shared > chip.shared:
            faults.append(f"shared memory {self.shared} > {chip.shared}")
        if kernel == "update table":
            return faults
        sixteen_bit = shape.dtype != torch.float32
        if kernel in ATTENTION and sixteen_bit and not self.matrix:
            faults.append("no matrix instructions")
        if not self.wide_loads:
            faults.append("no loads of 128 bits")
        if kernel in ("write", "copy") and not self.wide_stores:
            faults.append("no stores of 128 bits")
        # A thread loads the sinks of the rows it holds, each once.
        if self.narrow_loads > (8 if shape.sinks else 0):
            faults.append(f"{self.narrow_loads} loads of 16 bits")
        return faults


def inspect_nvidia(compiled: Any) -> Verdict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def tool(*arguments: str) -> str:
            return subprocess.run(
                [str(NVIDIA_TOOLS / arguments[0]), *arguments[1:], file.name],
                check=True,
                capture_output=True,
                text=True,
            ).stdout

        usage, sass = tool("cuobjdump", "-res-usage"), tool("cuobjdump", "-sass")
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return Verdict(
        registers=registers,
        stack=stack,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared=compiled.metadata.shared,
        matrix=len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", sass)),
        wide_loads=len(re.findall(r"\b(?:LDG|LDGSTS)\.\S*128", sass)),
        wide_stores=len(re.findall(r"\bSTG\.\S*128", sass)),
        narrow_loads=len(re.findall(r"\bLDG\.\S*U16", sass)),
    )


def inspect_amd(compiled: Any) -> Verdict:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", text)[1])  # type: ignore[index]

    return Verdict(
        registers=number("vgpr_count"),
        stack=number("private_segment_fixed_size"),
        spills=number("vgpr_spill_count") + number("sgpr_spill_count"),
        shared=compiled.metadata.shared,
        matrix=text.count("v_mfma_"),
        wide_loads=len(re.findall(r"(?:global|buffer)_load_dwordx4", text)),
        wide_stores=len(re.findall(r"(?:global|buffer)_store_dwordx4", text)),
        narrow_loads=len(re.findall(r"(?:global|buffer)_load_(?:ushort|sshort|short_d16)", text)),
    )


def compile_launch(launch: Launch, chip: Chip) -> Verdict:
    compiled = triton.compile(source_of(launch), target=chip.target, options=launch.options)
    return inspect_nvidia(compiled) if chip.target.backend == "cuda" else inspect_amd(compiled)


def check(kernel: str, shape: str, chip: str) -> list[str]:
    """Compile one line of the table, print it, and return what is wrong with it."""
    began = time.perf_counter()
    launch = launch_of(kernel, SHAPES[shape], CHIPS[chip])
    try:
        verdict = compile_launch(launch, CHIPS[chip])
    except Exception as error:
        print(
            f"{kernel:14} {shape:24} {chip:7} FAILED: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True
        )
        return [str(error)]
    faults = verdict.faults(kernel, SHAPES[shape], CHIPS[chip])
    tile = " x ".join(str(launch.arguments[name]) for name in ("BLOCK_M", "BLOCK_N") if name in launch.arguments)
    print(
        f"{kernel:14} {shape:24} {chip:7} {tile:>9} {launch.options.get('num_warps', 4):5} "
        f"{launch.options.get('num_stages', 0):6} {verdict.registers:9} {verdict.shared:7} {verdict.matrix:6} "
        f"{verdict.wide_loads:8} {verdict.narrow_loads:6} {time.perf_counter() - began:5.1f}  "
        f"{'FAILED: ' + '; '.join(faults) if faults else 'ok'}",
        flush=True,
    )
    return faults


HEADER = (
    f"{'kernel':14} {'shape':24} {'chip':7} {'tile':>9} {'warps':>5} {'stages':>6} {'registers':>9} {'shared':>7} "
    f"{'matrix':>6} {'128-bit':>8} {'16-bit':>6} {'s':>5}"
)

QUICK = [
    ("decode", "Llama-8B", "sm_90"),
    ("prefill", "Llama-8B", "sm_90"),
    ("shared", "SmolLM2-135M", "sm_90"),
    ("merge", "SmolLM2-135M", "sm_90"),
    ("write", "head dim 40", "sm_80"),
    ("copy", "Phi-3-mini", "sm_80"),
    ("decode", "Phi-3-mini", "sm_80"),
    ("decode", "gpt_oss-20B sliding", "gfx942"),
    ("decode, split", "head dim 72", "sm_100"),
]

SMALL_KERNEL_SHAPES = (
    "SmolLM2-135M",
    "SmolLM2-135M float32",
    "Llama-8B",
    "Gemma-2-9B",
    "gpt_oss-20B sliding",
    "Phi-3-mini",
    "head dim 40",
    "keys 192, values 128",
)


def table() -> list[tuple[str, str, str]]:
    """Every shape for the three kernels that differ most by it, a few shapes for the rest."""
    lines = [(kernel, shape, chip) for chip in CHIPS for kernel in KERNELS for shape in SHAPES]
    return [
        (kernel, shape, chip)
        for kernel, shape, chip in lines
        if kernel in ("decode", "prefill", "shared")
        or (shape == "Llama-8B" if kernel == "update table" else shape in SMALL_KERNEL_SHAPES)
    ]


# -- negative controls ------------------------------------------------------------------------------------------------


def control_without_hint() -> list[str]:
    """Decode with strides of which nothing is known: the slot strides at run time, and no alignment."""
    chip = CHIPS["sm_90"]
    with mock.patch.object(decode, "alignment", lambda *_: 1):
        launch = launch_of("decode", SHAPES["Llama-8B"], chip)
    return compile_launch(launch, chip).faults("decode", SHAPES["Llama-8B"], chip)


def control_too_tall() -> list[str]:
    """Prefill with a tile that no four warps have registers for."""
    chip = CHIPS["sm_80"]
    tall = config.Tile(block_m=256, block_n=64, num_warps=4, num_stages=2)
    with mock.patch.object(config, "prefill_tile", lambda *_: tall):
        launch = launch_of("prefill", SHAPES["Llama-8B"], chip)
    return compile_launch(launch, chip).faults("prefill", SHAPES["Llama-8B"], chip)


def controls() -> int:
    """Faults of the gate itself: negative controls that it lets through."""
    missed = 0
    for name, control, word in (
        ("strides without a hint", control_without_hint, "16 bits"),
        ("a tile too tall", control_too_tall, "spills"),
    ):
        faults = control()
        caught_it = any(word in fault for fault in faults)
        missed += not caught_it
        print(f"negative control, {name}: {'; '.join(faults) or 'no fault'}: {'ok' if caught_it else 'NOT CAUGHT'}")
    return missed


# -- bytes and operations ---------------------------------------------------------------------------------------------

NOMINAL, COPY, MATRIX = 4.8e12, 4.3e12, 790e12  # bytes/s, bytes/s, operations/s


def counts() -> None:
    """Arithmetic, not a measurement: what has to be moved and multiplied, and how long an H200 takes at least."""
    print("Arithmetic, not a measurement. Bytes: every key and value read once, queries and outputs once. Operations:")
    print("2 per multiply-add of both products, of what is seen. The floor on an H200 is the larger of bytes at")
    print("4.8 TB/s (nominal) or 4.3 TB/s (a measured device copy) and operations at 790 TFLOP/s (bf16).\n")
    print(f"{'kernel':34} {'shape':22} {'MB':>10} {'GFLOP':>10} {'us at 4.8':>10} {'us at 4.3':>10}  bound by")

    def line(kernel: str, name: str, size: float, operations: float) -> None:
        compute = operations / MATRIX
        floors = [max(size / rate, compute) * 1e6 for rate in (NOMINAL, COPY)]
        bound = "memory" if size / COPY > compute else "matrix"
        amounts = f"{size / 1e6:10.2f} {operations / 1e9:10.2f}"
        print(f"{kernel:34} {name:22} {amounts} {floors[0]:10.1f} {floors[1]:10.1f}  {bound}")

    for name, shape in SHAPES.items():
        if shape.dtype == torch.float32 or "block" in name or "dim" in name:
            continue
        size, dims = shape.dtype.itemsize, shape.key_dim + shape.values
        token = shape.num_kv_heads * dims * size  # bytes of one stored token
        asked = shape.num_heads * dims * size  # bytes of one query and its output
        product = 2 * shape.num_heads * dims  # operations of one query and one key

        def seen(context: int, shape: Shape = shape) -> int:
            return min(context, shape.band or context)

        for rows, context in ((32, 4096), (1, 65536)):
            keys = rows * seen(context)
            line(f"decode {rows} x {context}", name, keys * token + rows * asked, keys * product)
        if shape.band is None:
            line("shared 16 x (8192 + 128)", name, (8192 + 16 * 128) * token + 16 * asked, 16 * 8320 * product)
            line("  the same, each row for itself", name, 16 * 8320 * token + 16 * asked, 16 * 8320 * product)
        pairs = sum(seen(position + 1) for position in range(8192))
        line("prefill 8192", name, 8192 * (token + asked), pairs * product)
        line("write 32", name, 2 * 32 * token, 0)
        line("copy 4 blocks of 16, one layer", name, 2 * 4 * 16 * token, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few lines only")
    parser.add_argument("--counts", action="store_true", help="bytes and operations only; compiles nothing")
    parser.add_argument(
        "--only", default="", help="lines that contain this, as in 'decode|sm_90' (a regular expression)"
    )
    arguments = parser.parse_args()
    if arguments.counts:
        counts()
        return 0
    lines = QUICK if arguments.quick else table()
    lines = [line for line in lines if re.search(arguments.only, " ".join(line))]
    print(f"torch {torch.__version__}, triton {triton.__version__}\n{HEADER}")
    failed = sum(bool(check(*line)) for line in lines)
    print(f"{len(lines)} lines, {failed} failed")
    missed = 0 if arguments.only else controls()
    return 1 if failed or missed or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
