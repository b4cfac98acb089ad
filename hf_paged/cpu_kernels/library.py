"""Compiles `kernels.c`, once for each machine, and loads it.

The compiler is the user's (`$CC`, else `cc`, `gcc` or `clang`), as it is for Triton and `torch.compile`; what it
makes is kept in a folder of the user's own (`hf_paged.folders.private_folder`), and loaded only if nobody else could
have put it there. OpenMP is left unresolved in it, so that it runs on the threads of
the OpenMP library that PyTorch has loaded: a second pool of threads would spin beside the first and slow both down.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

import torch

from ..folders import check_private, private_folder

SOURCE = Path(__file__).with_name("kernels.c")
COMPILE = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-c")
LINK = ("-shared",)  # without -fopenmp, which would name a library
SECONDS = 120  # after which a compiler is given up

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_loaded: "ctypes.CDLL | None" = None
_failure: str | None = None


class CompileError(RuntimeError):
    """The kernels cannot be compiled or loaded here. The message says why."""


class NoCompiler(CompileError):
    """There is nothing to compile with, as on many machines; not a fault."""


def library() -> ctypes.CDLL | None:
    """The kernels' functions, compiled by the first call; None where that is not possible, whatever the reason, and a
    warning, once, where a compiler is there and something fails."""
    global _loaded, _failure
    if _loaded is None and _failure is None:
        with _lock:
            if _loaded is None and _failure is None:
                try:
                    _loaded = _load()
                except Exception as error:  # compilers, folders and loaders fail in more ways than can be listed
                    _failure = str(error) if isinstance(error, CompileError) else f"{type(error).__name__}: {error}"
                    text = f"no compiled kernels, PyTorch does their work, slower: {_failure}"
                    if isinstance(error, NoCompiler):
                        logger.info(text)
                    else:
                        warnings.warn(f"hf_paged: {text}", stacklevel=2)
    return _loaded


def loaded() -> ctypes.CDLL | None:
    """The kernels' functions if somebody has asked for `library()`; compiles nothing."""
    return _loaded


def needed() -> ctypes.CDLL:
    """`library()`, or the reason why there is none.

    Raises:
        CompileError: with the reason and what to change.
    """
    kernels = library()
    if kernels is None:
        raise CompileError(
            f"backend='native' needs its kernels compiled, and that failed: {_failure}. Install a C compiler with "
            "OpenMP (gcc), or name one in the environment variable CC; backend='auto' does without."
        )
    return kernels


def _load() -> ctypes.CDLL:
    compiler = _compiler()
    name = f"cpu-{_fingerprint(compiler)}.so"
    try:
        path = private_folder("kernels") / name
        try:
            return _open(path)
        except FileNotFoundError:
            pass
        except (OSError, AttributeError) as error:
            logger.info("%s is not loaded (%s) and made again", path, error)
        return _open(_compile(compiler, path))
    except (OSError, RuntimeError, ValueError, AttributeError) as error:
        if isinstance(error, CompileError):
            raise
        logger.info("no compiled kernels are kept, they are made for this process only: %s", error)
    with tempfile.TemporaryDirectory(prefix="hf_paged-") as scratch:
        return _open(_compile(compiler, Path(scratch) / name))


def _open(path: Path) -> ctypes.CDLL:
    """Load a library that is ours and whole.

    Raises:
        OSError: it is not there, others could have written it, or it cannot be loaded.
        AttributeError: a function is not in it.
    """
    check_private(path)
    return _declare(ctypes.CDLL(str(path)))


def _compiler() -> list[str]:
    chosen = os.environ.get("CC")
    for candidate in [chosen] if chosen else ["cc", "gcc", "clang"]:
        try:
            words = shlex.split(candidate)
        except ValueError as error:
            raise CompileError(f"the environment variable CC is no command ({error}): {candidate}") from error
        if words and shutil.which(words[0]):
            return words
    raise NoCompiler(f"no C compiler: {chosen or 'cc, gcc and clang'} not found")


def _fingerprint(compiler: list[str]) -> str:
    """Of everything that the compiled file depends on: `-march=native` makes it this processor's own."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=SECONDS).stdout
    try:
        cpu = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
        processor = [line for line in cpu if line.split("\t")[0] in ("model name", "flags", "Features", "CPU part")]
    except OSError:
        processor = [platform.processor()]
    parts = [
        SOURCE.read_bytes(),
        version,
        *(os.fsencode(text) for text in (*compiler, *COMPILE, *LINK, platform.machine(), *processor)),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: list[str], path: Path) -> Path:
    """Compile into `path`, which appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made, library = Path(scratch) / "kernels.o", Path(scratch) / path.name
        for command in (
            [*compiler, *COMPILE, str(SOURCE), "-o", str(made)],
            [*compiler, *LINK, str(made), "-o", str(library), "-lm"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
            if done.returncode:
                reason = done.stderr.strip()[-500:] or f"exit status {done.returncode}"
                raise CompileError(f"{shlex.join(command)} failed: {reason}")
        library.chmod(0o700)  # a linker leaves that to the umask
        os.replace(library, path)
    return path


class Step(ctypes.Structure):
    """`Step` of `kernels.c`, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "kv_heads", "group", "key_dim", "value_dim", "num_slots")),
        *((name, ctypes.c_int64) for name in ("store_dtype", "query_dtype")),
        *((name, ctypes.c_int64) for name in ("num_tasks", "num_threads", "scratch_floats")),
        *((name, ctypes.c_void_p) for name in ("tasks", "task_rows", "runs", "row_ends")),
        *((name, ctypes.c_void_p) for name in ("row_partials", "targets", "lengths")),
        *((name, ctypes.c_void_p) for name in ("scratch", "partials", "maxima")),
        ("scale", ctypes.c_float),
    )


DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def _declare(made: ctypes.CDLL) -> ctypes.CDLL:
    made.hf_paged_decode.argtypes, made.hf_paged_decode.restype = [ctypes.POINTER(Step), *[ctypes.c_void_p] * 8], None
    made.hf_paged_copy_blocks.argtypes = [
        ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
    ]  # fmt: skip
    made.hf_paged_copy_blocks.restype = None
    made.hf_paged_scratch.argtypes, made.hf_paged_scratch.restype = [ctypes.c_int64] * 3, ctypes.c_int64
    made.hf_paged_padded.argtypes, made.hf_paged_padded.restype = [ctypes.c_int64], ctypes.c_int64
    made.hf_paged_checksum.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p]
    made.hf_paged_checksum.restype = None
    return made
