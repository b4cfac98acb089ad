"""A pytest plugin: Transformers' own generation tests, with every model patched on its way into `generate()`, or not.

`library_tests` runs pytest with it twice, `-p hf_paged.commands.library_plugin --hf-paged-report FILE`, once with
`--hf-paged-patch`. Both times the methods of `GenerationTesterMixin` alone are kept, random numbers are seeded from the
test's name, so that both sides make the same weights and inputs, and tests marked as flaky get one attempt. What came
out is appended to the file, one JSON line a test: its outcome, where it failed, and the ids of each `generate()` call.
"""

import contextlib
import functools
import json
import os
import random
import re
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, testing_utils

import hf_paged

MIXIN = "GenerationTesterMixin"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hf_paged")
    group.addoption("--hf-paged-report", metavar="FILE", help="append one JSON line a test there")
    group.addoption("--hf-paged-patch", action="store_true", help="patch every model on its way into generate()")
    group.addoption("--hf-paged-early", action="store_true", help="and already where it is put into evaluation mode")
    group.addoption("--hf-paged-block-size", type=int, default=4, help="tokens per block")
    group.addoption("--hf-paged-tests", default="", metavar="REGEX", help="tests of these names alone")
    group.addoption("--hf-paged-without", default="", metavar="REGEX", help="no tests of these names")
    group.addoption("--hf-paged-seconds", type=float, default=0.0, help="time limit of a test; 0: none")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hf-paged-report"):
        testing_utils.is_flaky = _once  # before the first test module takes it from there
        config.pluginmanager.register(Recorder(config), "hf_paged_recorder")


def pytest_unconfigure(config: pytest.Config) -> None:
    recorder = config.pluginmanager.get_plugin("hf_paged_recorder")
    if recorder is not None:
        recorder.restore()


def _once(*arguments: Any, **_: Any) -> Any:
    """Stands for the library's `is_flaky`: one attempt. Without brackets the library's own makes a test that does
    nothing; this one runs it."""
    if len(arguments) == 1 and callable(arguments[0]):
        return arguments[0]
    return lambda function: function


class Recorder:
    """Runs the tests of one side and notes what comes out.

    Attributes:
        tried: models that were to be patched in the test that runs.
        models: those that were.
        refused: class and reason of models that `patch` refused in it.
        calls: the outermost `generate()` calls in it, as JSON: `model`, `plain_greedy`, `dtype`, `ids` as nested lists
            (None: not ids), and, where nothing is patched, `gaps`: of each step and row by how much the best score
            exceeds the second.
    """

    def __init__(self, config: pytest.Config):
        self.config = config
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        self.file = Path(config.getoption("--hf-paged-report") + (f".{worker}" if worker else ""))
        self.patching: bool = config.getoption("--hf-paged-patch")
        self.seconds: float = config.getoption("--hf-paged-seconds")
        self.depth = 0
        self.tried: list[Any] = []
        self.models: list[Any] = []
        self.refused: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.gaps: list[list[float]] | None = None
        self.line: dict[str, Any] = {}
        self._replaced: list[tuple[type, str, Any]] = []
        self._wrapped: set[type] = set()
        if not self.patching:
            self._replace(LogitsProcessorList, "__call__", self._noting_gaps)
        elif config.getoption("--hf-paged-early"):
            self._replace(PreTrainedModel, "eval", self._patching_early)

    # -- what is run ---------------------------------------------------------------------------------------------------

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted, unwanted = config.getoption("--hf-paged-tests"), config.getoption("--hf-paged-without")
        kept: list[pytest.Item] = []
        left: list[pytest.Item] = []
        for item in items:
            name = item.name.split("[")[0]
            keep = _is_generation_test(item, name) and re.search(wanted, name) is not None
            keep = keep and not (unwanted and re.search(unwanted, name))
            (kept if keep else left).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=left)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"not_collected": report.nodeid, "error": str(report.longrepr).strip().splitlines()[-1]})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._wrap_generate()
        self.tried, self.models, self.refused, self.calls = [], [], [], []
        self.line = {"test": item.nodeid, "outcome": "passed", "where": "", "error": ""}
        _seed(item.nodeid)
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            fallbacks: Counter[str] = Counter()
            stored = 0
            for model in self.models:
                stats = model.paged_stats() if "paged_pool" in model.__dict__ else None
                if stats is not None:
                    fallbacks.update(stats.fallbacks)
                    stored += stats.peak_used_blocks > 0
            self.line.update(
                seconds=round(time.perf_counter() - begin, 3),
                patched=len(self.models),
                stored=stored,
                refused=self.refused,
                fallbacks=fallbacks,
                calls=self.calls,
            )
            self._write(self.line)
            self.tried, self.models = [], []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with _limit(self.seconds):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[pytest.TestReport]:
        report: pytest.TestReport = yield  # type: ignore[misc,assignment]
        if report.outcome == "passed" or self.line["outcome"] == "failed":
            return report  # type: ignore[return-value]
        self.line["outcome"] = report.outcome
        if report.failed and call.excinfo is not None:
            message = str(call.excinfo.value).strip().splitlines() or [""]
            self.line["error"] = f"{call.excinfo.typename}: {message[0]}"[:500]
            for entry in call.excinfo.traceback:
                path = Path(entry.path)
                if path.is_relative_to(self.config.rootpath):
                    self.line["where"] = f"{path.relative_to(self.config.rootpath)}:{entry.lineno + 1}"
        return report  # type: ignore[return-value]

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    # -- what is done to the library -----------------------------------------------------------------------------------

    def _replace(self, owner: type, name: str, made: Callable[[Any], Any]) -> None:
        inherited = getattr(owner, name)
        self._replaced.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, made(inherited))

    def restore(self) -> None:
        """Put the library back as it was."""
        for owner, name, before in reversed(self._replaced):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced.clear()
        self._wrapped.clear()

    def _wrap_generate(self) -> None:
        """Wrap every `generate` that a model class has: the library's, and those of classes loaded meanwhile."""
        waiting: list[type] = [GenerationMixin, PreTrainedModel]
        while waiting:
            owner = waiting.pop()
            waiting.extend(owner.__subclasses__())
            if "generate" in owner.__dict__ and owner not in self._wrapped:
                self._wrapped.add(owner)
                self._replace(owner, "generate", self._recording)

    def _recording(self, generate: Any) -> Any:
        @functools.wraps(generate)
        def wrapper(model: Any, *arguments: Any, **options: Any) -> Any:
            self._patch(model)
            if self.depth:
                return generate(model, *arguments, **options)
            self.depth, self.gaps = 1, []
            try:
                output = generate(model, *arguments, **options)
            finally:
                self.depth, gaps, self.gaps = 0, self.gaps, None
            self._note(model, options, output, gaps or [])
            return output

        return wrapper

    def _patching_early(self, function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(model: Any) -> Any:
            function(model)
            if isinstance(model, GenerationMixin):
                self._patch(model)
            return model

        return wrapper

    def _noting_gaps(self, function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(processors: Any, ids: Any, scores: Any, *arguments: Any, **options: Any) -> Any:
            processed = function(processors, ids, scores, *arguments, **options)
            if self.gaps is not None and processed.ndim == 2 and processed.shape[1] > 1:
                best = processed.detach().float().topk(2, dim=-1).values
                self.gaps.append((best[:, 0] - best[:, 1]).tolist())
            return processed

        return wrapper

    def _patch(self, model: Any) -> None:
        known = any(model is one for one in self.tried)
        if not self.patching or known or not isinstance(model, PreTrainedModel):
            return
        self.tried.append(model)
        try:
            hf_paged.patch(model, block_size=self.config.getoption("--hf-paged-block-size"))
        except ValueError as error:
            reason = " ".join(str(error).split()).split(" and be right: ")[-1]
            self.refused.append(f"{type(model).__name__}: {reason}")
        else:
            self.models.append(model)

    def _note(self, model: Any, options: dict[str, Any], output: Any, gaps: list[list[float]]) -> None:
        ids = getattr(output, "sequences", output)
        are_ids = isinstance(ids, torch.Tensor) and not ids.is_floating_point() and ids.ndim == 2
        settings = options.get("generation_config") or model.generation_config
        special = ("num_beams", "do_sample", "assistant_model", "prompt_lookup_num_tokens", "use_mtp", "guidance_scale")
        values = [options.get(name, getattr(settings, name, None)) for name in special]
        self.calls.append(
            {
                "model": type(model).__name__,
                "plain_greedy": all(value in (None, False, 1) for value in values),
                "dtype": str(getattr(model, "dtype", "")).removeprefix("torch."),
                "ids": ids.tolist() if are_ids else None,
                "gaps": gaps,
            }
        )


def _is_generation_test(item: pytest.Item, name: str) -> bool:
    owner = getattr(item, "cls", None)
    mixins = [base for base in getattr(owner, "__mro__", ()) if base.__name__ == MIXIN and base is not owner]
    return any(name in vars(base) for mixin in mixins for base in mixin.__mro__)


def _seed(name: str) -> None:
    """Start all random numbers from a test's name; those of the library's test helpers, too."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    for module_name, module in list(sys.modules.items()):
        own = getattr(module, "global_rng", None) if module_name.split(".")[0] == "tests" else None
        if isinstance(own, random.Random):
            own.seed(seed)


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds, where the system has an alarm clock."""
    if not seconds or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: Any) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.getoption("--hf-paged-report"):
        return None
    side = "patched" if config.getoption("--hf-paged-patch") else "unpatched"
    return f"hf_paged {hf_paged.__version__}, Transformers {transformers.__version__}: {side}"
