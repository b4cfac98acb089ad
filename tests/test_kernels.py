"""How the compiled kernels are kept, found and believed; and the Triton kernels' own tests, in processes in which
Triton interprets: one a file, so that several workers take part."""

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from hf_paged import KVPool, PagedConfig, checksum, folders
from hf_paged.backends import native
from hf_paged.cpu_kernels import library as compiled

FOLDER = Path(__file__).parent / "kernels"

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["cc", "gcc", "clang"])),
    reason="no C compiler here",
)
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
SOMEBODY = 54321


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not made for this platform")
@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("test_*.py")))
def test_the_kernels_pass_their_tests_in_the_interpreter(name):
    command = [sys.executable, "-m", "pytest", "-q", "--durations=5", str(FOLDER / name)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=env, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


# -- the compiled kernels: whose file is loaded ------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder of its own, in a process that has not asked for the kernels yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HF_PAGED_CACHE", str(folder))
    monkeypatch.setattr(compiled, "_loaded", None)
    monkeypatch.setattr(compiled, "_failure", None)
    return folder


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """The library, compiled once for all tests."""
    return compiled._compile(compiled._compiler(), tmp_path_factory.mktemp("made") / "kernels.so")


@pytest.fixture
def quick(made_once, monkeypatch):
    """Compiling is copying; gives the paths that were made."""
    made: list[Path] = []

    def copy(compiler, path):
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            os.replace(shutil.copy(made_once, scratch), path)
        path.chmod(0o700)
        made.append(path)
        return path

    monkeypatch.setattr(compiled, "_compile", copy)
    return made


@pytest.fixture
def planted(cache, tmp_path):
    """`planted(folder)` puts a library there under the name that is looked for, and returns its path;
    `planted.ran()` is whether its code has run."""
    marker, source = tmp_path / "ran", tmp_path / "planted.c"
    source.write_text(
        f"""#include <stdio.h>
        __attribute__((constructor)) static void run(void) {{ fclose(fopen("{marker}", "w")); }}"""
    )
    words = compiled._compiler()

    def plant(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"cpu-{compiled._fingerprint(words)}.so"
        subprocess.run([*words, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
        path.chmod(0o600)
        return path

    plant.ran = marker.exists
    return plant


def own(cache: Path) -> Path:
    return cache / f"kernels-{os.getuid()}"


@needs_compiler
def test_what_is_made_is_ours_alone_whatever_the_umask(cache):
    before = os.umask(0)
    try:
        assert compiled.library() is not None
    finally:
        os.umask(before)
    (file,) = own(cache).iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, own(cache), file)] == [0o700] * 3


SPOILED = {
    "written by the group": lambda path: path.chmod(0o620),
    "written by others": lambda path: path.chmod(0o602),
    "a link to somewhere": lambda path: path.symlink_to(shutil.move(path, path.parent.parent / "elsewhere.so")),
    "another owner's": lambda path: os.chown(path, SOMEBODY, SOMEBODY),
}


@needs_compiler
@pytest.mark.parametrize("how", [pytest.param(how, marks=needs_root if "owner" in how else ()) for how in SPOILED])
def test_a_file_that_others_may_have_written_is_made_again(how, cache, planted, quick):
    path = planted(own(cache))
    SPOILED[how](path)
    assert compiled.library() is not None
    assert quick == [path] and not path.is_symlink() and not planted.ran()


@needs_compiler
def test_a_file_of_ours_is_loaded(cache, planted, quick):
    """So that the tests around this one see what they say they do. It has none of the functions, and is made again."""
    path = planted(own(cache))
    assert compiled.library() is not None
    assert planted.ran() and quick[0] == path


UNSAFE = {
    "the folder is written by others": lambda cache: own(cache).chmod(0o777),
    "the folder is written by the group": lambda cache: own(cache).chmod(0o770),
    "the folder is another owner's": lambda cache: os.chown(own(cache), SOMEBODY, SOMEBODY),
    "the one above is written by others": lambda cache: cache.chmod(0o777),
    "the one above is written by a group": lambda cache: (os.chown(cache, -1, SOMEBODY), cache.chmod(0o770)),
    "the one above is another owner's": lambda cache: os.chown(cache, SOMEBODY, SOMEBODY),
    "one far above is written by others": lambda cache: cache.parent.chmod(0o707),
}


@needs_compiler
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=needs_root if "owner" in how or "a group" in how else ()) for how in UNSAFE]
)
def test_nothing_is_loaded_from_where_others_may_write(how, cache, planted, quick):
    path = planted(own(cache))
    UNSAFE[how](cache)
    assert compiled.library() is not None
    (made,) = quick
    assert made.parent.parent == Path(tempfile.gettempdir()) and not made.exists(), "for this process only"
    assert path.exists() and not planted.ran()


@needs_compiler
@pytest.mark.parametrize("how", ["a sticky folder above", "a folder above of our own group", "read by all"])
def test_folders_that_others_cannot_turn_against_us_will_do(how, cache, quick):
    cache.mkdir()
    cache.chmod({"a": 0o1777, "r": 0o755}[how[0]] if "group" not in how else 0o770)
    if "group" in how and not folders._is_our_group(cache.stat().st_gid):
        pytest.skip("no group of our own here")
    assert compiled.library() is not None
    assert [made.parent for made in quick] == [own(cache)]


@needs_compiler
def test_a_link_in_the_place_of_the_folder_is_not_followed(cache, planted, quick, tmp_path):
    planted(tmp_path / "theirs")
    cache.mkdir()
    own(cache).symlink_to(tmp_path / "theirs")
    assert compiled.library() is not None
    assert quick[0].parent.parent == Path(tempfile.gettempdir()) and not planted.ran()


@needs_compiler
def test_a_link_above_the_folder_is_followed_once(cache, quick, tmp_path):
    """As where a home folder is one; what it leads to is looked at, all the way up."""
    (tmp_path / "real").mkdir()
    cache.symlink_to(tmp_path / "real")
    assert compiled.library() is not None
    assert [made.parent for made in quick] == [own(tmp_path / "real")]
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(PermissionError, match="not sticky; name another folder"):
        folders.private_folder("kernels")


def refuse(*args, **kwargs):
    raise PermissionError("read-only")


NOWHERE = {
    "a file in its place": lambda cache, patch: cache.write_text(""),
    "nobody's home": lambda cache, patch: patch.setenv("HF_PAGED_CACHE", "~no_such_user/x"),
    "no home": lambda cache, patch: [
        *(patch.delenv(name, raising=False) for name in ("HF_PAGED_CACHE", "XDG_CACHE_HOME", "HOME")),
        patch.setattr(Path, "expanduser", lambda path: exec("raise RuntimeError('no home')")),
    ],
    "a folder that cannot be made": lambda cache, patch: patch.setattr(Path, "mkdir", refuse),
    "a folder that cannot be written": lambda cache, patch: [
        own(cache).mkdir(parents=True, mode=0o700),
        unwritable(patch),
    ],
    "a name that is too long": lambda cache, patch: patch.setenv("HF_PAGED_CACHE", str(cache / ("x" * 5000))),
    "a link to itself": lambda cache, patch: cache.symlink_to(cache),
}


def unwritable(patch):
    """Compiling works in the temporary folder only."""
    made = compiled._compile
    outside = Path(tempfile.gettempdir())
    patch.setattr(compiled, "_compile", lambda cc, at: made(cc, at) if at.parent.parent == outside else refuse())


@needs_compiler
@pytest.mark.parametrize("how", NOWHERE)
def test_without_a_place_to_keep_them_the_kernels_serve_this_process(how, cache, quick, monkeypatch):
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        NOWHERE[how](cache, patch)
        assert compiled.library() is not None
    assert [made.parent.parent for made in quick] == [Path(tempfile.gettempdir())]


@needs_compiler
def test_where_there_are_no_user_ids(cache, quick, monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(os, "getuid")
    assert compiled.library() is not None
    assert [made.parent for made in quick] == [cache / "kernels"]


@needs_compiler
@pytest.mark.slow
def test_processes_that_compile_at_once_get_along(cache):
    code = "from hf_paged.cpu_kernels import library as made; print(made.library() is not None, made._failure)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    assert [process.communicate()[0].split() for process in both] == [["True", "None"]] * 2
    assert len(list(own(cache).iterdir())) == 1


# -- the compiled kernels: whatever fails ------------------------------------------------------------------------------


def script(path: Path, text: str | bytes) -> str:
    path.write_bytes(b"#!/bin/sh\n" + (text.encode() if isinstance(text, str) else text))
    path.chmod(0o700)
    return str(path)


def with_compiler(body: str | bytes):
    """A compiler that knows its version and does this when it is to compile."""
    body = body.encode() if isinstance(body, str) else body
    text = b'case "$*" in *--version*) echo 1; exit 0;; esac\n' + body
    return lambda patch, folder: patch.setenv("CC", script(folder / "cc", text))


LAST = 'for word; do case "$before" in -o) out=$word;; esac; before=$word; done\n'
FAILING = {
    "an open quote": lambda patch, folder: patch.setenv("CC", 'cc "-O2'),
    "no version": lambda patch, folder: patch.setenv("CC", script(folder / "cc", "exit 3")),
    "fails": with_compiler("echo broken >&2; exit 1"),
    "fails in Latin-1": with_compiler(b"printf 'erreur: \\351chec\\n' >&2; exit 1"),
    "says nothing": with_compiler("exit 1"),
    "makes nothing": with_compiler("exit 0"),
    "makes no library": with_compiler(LAST + 'echo text > "$out"'),
    "makes an empty file": with_compiler(LAST + ': > "$out"'),
    "makes a library without the functions": with_compiler(
        LAST + 'echo "int x;" | cc -x c -shared -fPIC - -o "$out"',
    ),
    "makes a folder": with_compiler(LAST + 'mkdir "$out"'),
    "is too slow": lambda patch, folder: [
        patch.setattr(compiled, "SECONDS", 0.3),
        with_compiler("exec sleep 60")(patch, folder),
    ],
    "is gone": lambda patch, folder: patch.setattr(compiled, "_compiler", lambda: [str(folder / "gone")]),
    "may not be run": lambda patch, folder: patch.setattr(compiled, "_compiler", lambda: [str(folder)]),
    "is no program": lambda patch, folder: [
        script(folder / "cc", ""),
        (folder / "cc").write_bytes(b"\0\1"),
        patch.setenv("CC", str(folder / "cc")),
    ],
    "nowhere for scratch": lambda patch, folder: [
        patch.setenv("HF_PAGED_CACHE", "~no_such_user/x"),
        patch.setattr(tempfile, "TemporaryDirectory", lambda **kwargs: exec("raise FileNotFoundError('no folder')")),
    ],
    "the source is not there": lambda patch, folder: patch.setattr(compiled, "SOURCE", folder / "kernels.c"),
    "the loader fails": lambda patch, folder: patch.setattr(
        compiled.ctypes, "CDLL", lambda name: exec("raise OSError(name)")
    ),
    "something nobody thought of": lambda patch, folder: patch.setattr(compiled, "_fingerprint", lambda words: {}["x"]),
}


@needs_compiler
@pytest.mark.parametrize("how", FAILING)
def test_what_fails_is_said_once_and_pytorch_does_the_work(how, cache, tmp_path, request):
    if how == "the loader fails":
        request.getfixturevalue("quick")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        FAILING[how](patch, tmp_path)
        assert compiled.library() is None and compiled.library() is None
        assert KVPool(LlamaConfig(num_hidden_layers=1), PagedConfig()).backend is native.attend
    assert ["PyTorch does their work" in str(entry.message) for entry in said] == [True]
    with pytest.raises(
        compiled.CompileError, match=r"backend='native' needs its kernels compiled, and that failed: \S"
    ):
        KVPool(LlamaConfig(num_hidden_layers=1), PagedConfig(backend="native"))
    left = [path for path in cache.rglob("*") if path.is_file()]
    assert all(path.parent == own(cache) for path in left) and len(left) <= 1, "nothing half-made stays"


def test_without_the_kernel_checksums_are_xxhashs(cache, monkeypatch):
    monkeypatch.setenv("CC", "no such compiler")
    checksum._kernels.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(checksum.begin([torch.ones(3)]).host) == 2
            assert checksum._host_function() is checksum.by_xxhash
    finally:
        checksum._kernels.cache_clear()


@needs_compiler
def test_a_kept_file_without_a_function_is_made_again(cache, planted, quick):
    """This process has the old one under its name, the next one finds the new one."""
    path = planted(own(cache))
    assert compiled.library() is not None
    assert quick[0] == path and hasattr(compiled.library(), "hf_paged_checksum")
    compiled._declare(compiled.ctypes.CDLL(str(shutil.copy(path, path.parent / "copy.so"))))
