"""`python -m hf_paged library-tests FOLDER`: Transformers' own generation tests must fail where they fail without us.

FOLDER is a checkout of Transformers at about the installed version; its tests are in none of its packages. Of the test
classes in `tests/models/*/test_modeling_*.py` the methods of `GenerationTesterMixin` are run twice by pytest (see
`library_plugin`): as they are, and with every model patched on its way into `generate()`. The installed library is
tested, not the checkout's.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIDES = ("unpatched", "patched")
TIE = 1e-4
"""Two scores that are no further apart are tied: which of the two tokens is chosen is not held against anyone."""
# Tests that compile a model take minutes each.
WITHOUT = "compil"


@dataclass
class Outcome:
    """What the two sides did.

    Attributes:
        counts: side → outcome → tests.
        differences: a line for each test that did not end alike on both sides.
        after_ties: a line for each that did so after a tie in one of its calls and no other id: half precision, mostly.
        other_ids: a line for each `generate()` call with other ids that are not ties.
        ties: rows of `generate()` calls whose first differing id was a tie.
        compared: `generate()` calls whose ids were compared.
        not_collected: a line for each test module that could not be imported.
        patched, stored: models that were patched, and those among them that kept something in blocks.
        refused: class and reason → times that `patch` refused.
        fallbacks: reason → times that a patched model took a dense path or went without a saving.
    """

    counts: dict[str, Counter[str]] = field(default_factory=lambda: {side: Counter() for side in SIDES})
    differences: list[str] = field(default_factory=list)
    after_ties: list[str] = field(default_factory=list)
    other_ids: list[str] = field(default_factory=list)
    ties: int = 0
    compared: int = 0
    not_collected: list[str] = field(default_factory=list)
    patched: int = 0
    stored: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)


def compare(unpatched: Sequence[dict[str, Any]], patched: Sequence[dict[str, Any]]) -> Outcome:
    """Lay the lines of the two sides (see `library_plugin`) beside each other."""
    outcome = Outcome()
    missing: dict[str, None] = {}  # each worker says so
    tables: list[dict[str, dict[str, Any]]] = []
    for side, lines in zip(SIDES, (unpatched, patched), strict=True):
        for line in lines:
            if "not_collected" in line:
                missing[f"{side}: {line['not_collected']}: {line['error']}"] = None
        tables.append({line["test"]: line for line in lines if "test" in line})
        outcome.counts[side].update(line["outcome"] for line in tables[-1].values())
    outcome.not_collected = list(missing)
    for line in tables[1].values():
        outcome.patched += line["patched"]
        outcome.stored += line["stored"]
        outcome.refused.update(line["refused"])
        outcome.fallbacks.update(line["fallbacks"])
    for test in dict.fromkeys([*tables[0], *tables[1]]):
        before, after = (table.get(test) for table in tables)
        if before is None or after is None:
            outcome.differences.append(f"{test}: not run {SIDES[before is not None]}")
            continue
        ties, others = outcome.ties, len(outcome.other_ids)
        _compare_ids(test, before["calls"], after["calls"], outcome)
        if (before["outcome"], before["where"]) != (after["outcome"], after["where"]):
            tied = outcome.ties > ties and len(outcome.other_ids) == others
            where = outcome.after_ties if tied else outcome.differences
            where.append(f"{test}: {_told(before)} unpatched, {_told(after)} patched")
    return outcome


def _told(line: dict[str, Any]) -> str:
    if line["outcome"] != "failed":
        return str(line["outcome"])
    return f"failed ({line['where']}: {line['error']})"


def _compare_ids(test: str, before: list[dict[str, Any]], after: list[dict[str, Any]], outcome: Outcome) -> None:
    for number, (left, right) in enumerate(zip(before, after, strict=False), 1):
        if left["ids"] is None or right["ids"] is None:
            continue
        outcome.compared += 1
        if left["ids"] == right["ids"]:
            continue
        what = f"{test}: call {number} of generate() ({left['model']}, {left['dtype']})"
        if [len(row) for row in left["ids"]] != [len(row) for row in right["ids"]]:
            outcome.other_ids.append(f"{what}: another number of ids")
            continue
        for index, (one, other) in enumerate(zip(left["ids"], right["ids"], strict=True)):
            if one == other:
                continue
            column = next(place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
            gap = _gap(left, index, column)
            if gap is not None and gap <= TIE:
                outcome.ties += 1
            else:
                known = "" if gap is None else f", the two best scores {gap:.2g} apart"
                outcome.other_ids.append(f"{what}: row {index} has another id at {column} of {len(one)}{known}")
                break


def _gap(call: dict[str, Any], row: int, column: int) -> float | None:
    """By how much the best score exceeded the second where this id was chosen; None where no single choice was made by
    the best score: in samples, beams and look-ahead."""
    gaps = call["gaps"]
    step = column - (len(call["ids"][row]) - len(gaps))
    if not call["plain_greedy"] or not 0 <= step < len(gaps) or len(gaps[step]) != len(call["ids"]):
        return None
    return float(gaps[step][row])


def render(outcome: Outcome) -> str:
    """The result in words."""
    text = []
    for side in SIDES:
        counts = outcome.counts[side]
        text.append(f"{side:<9} " + ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")))
    text += [f"not collected, {line}" for line in outcome.not_collected]
    text.append(f"tests that differ: {len(outcome.differences)}")
    text += [f"  {line}" for line in outcome.differences]
    text.append(f"tests that differ after a tie, not counted: {len(outcome.after_ties)}")
    text += [f"  {line}" for line in outcome.after_ties]
    text.append(
        f"generate() calls compared: {outcome.compared}, with other ids: {len(outcome.other_ids)} "
        f"(ties within {TIE:g}, not counted: {outcome.ties})"
    )
    text += [f"  {line}" for line in outcome.other_ids]
    text.append(f"models patched: {outcome.patched}, with blocks in use: {outcome.stored}")
    text.append(f"models refused: {outcome.refused.total()}")
    text += [f"  {times} times: {reason}" for reason, times in sorted(outcome.refused.items())]
    text.append(f"fallbacks: {outcome.fallbacks.total()}")
    text += [f"  {times} times: {reason}" for reason, times in outcome.fallbacks.most_common()]
    return "\n".join(text)


def _files(folder: Path, families: Sequence[str] | None, files: Sequence[str] | None) -> list[str]:
    from .measure import UsageError

    if not (folder / "tests").is_dir():
        raise UsageError(f"{folder} has no folder tests; give a checkout of Transformers")
    if files:
        found = [folder / name for name in files]
        if missing := [str(path) for path in found if not path.exists()]:
            raise UsageError(f"there is no {', '.join(missing)}")
    else:
        patterns = [f"tests/models/{name}/test_modeling_*.py" for name in families or ("*",)]
        found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
        if not found:
            raise UsageError(f"{folder} has no {', '.join(patterns)}")
    return [str(path) for path in found]


def _run_side(folder: Path, files: list[str], report: Path, options: list[str], jobs: int) -> list[dict[str, Any]]:
    """Run pytest in a process of its own; the lines of its report, of however many workers."""
    settings = report.parent / "pytest.ini"
    settings.write_text("[pytest]\n")  # the checkout's own settings ask for plugins that need not be there
    package = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join([package, *(entry for entry in sys.path if entry and entry != package)])
    command = [sys.executable, "-m", "pytest", "-p", "hf_paged.commands.library_plugin", "-p", "no:cacheprovider"]
    command += ["-c", str(settings), "--rootdir", str(folder), "--continue-on-collection-errors", "-q"]
    command += ["--junitxml", str(report.with_suffix(".xml")), "--hf-paged-report", str(report), *options]
    command += ["-n", str(jobs)] if jobs > 1 else []
    log = report.with_suffix(".log")
    # Whatever pytest this process runs in (its options, its number as a worker) is none of that one's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = path
    with log.open("w") as out:
        done = subprocess.run([*command, *files], cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode not in (0, 1, 5):
        print(f"pytest ended with {done.returncode}; see {log}", file=sys.stderr)
    parts = sorted(report.parent.glob(report.name + "*"))
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


def run(
    folder: str,
    families: Sequence[str] | None = None,
    files: Sequence[str] | None = None,
    tests: str = "",
    without: str = WITHOUT,
    early: bool = False,
    block_size: int = 4,
    seconds: float = 120.0,
    jobs: int = 1,
    output: str | None = None,
) -> int:
    """The command.

    Args:
        folder: a checkout of Transformers.
        families: folders in its `tests/models`; None: all.
        files: test files relative to `folder` instead.
        tests, without: regular expressions over names of tests: those to run, and those not to.
        early: patch each model already where it is put into evaluation mode, so that tests of `forward` see it patched.
        block_size: tokens per block; small, because the tests' prompts are.
        seconds: time limit of a test, 0 for none.
        jobs: processes at a time, with pytest-xdist.
        output: folder for the reports of both sides (JSON lines and JUnit's XML); None: a temporary one, deleted.

    Returns:
        1 if a test or an id differs, ties and what follows from them apart, or a test was not run on one side; else 0.

    Raises:
        UsageError: if there are no such tests, none passes unpatched, or pytest is missing.
    """
    from .measure import UsageError, versions

    try:
        import pytest  # noqa: F401
    except ImportError:
        raise UsageError("the library's tests need pytest: pip install pytest parameterized") from None
    root = Path(folder).resolve()
    paths = _files(root, families, files)
    options = ["--hf-paged-tests", tests, "--hf-paged-without", without, "--hf-paged-seconds", str(seconds)]
    sides = {"unpatched": options, "patched": [*options, "--hf-paged-patch", "--hf-paged-block-size", str(block_size)]}
    if early:
        sides["patched"].append("--hf-paged-early")
    facts = versions()
    print(", ".join(f"{name} {facts[name]}" for name in ("hf_paged", "transformers", "torch", "python")), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        kept = Path(output).resolve() if output else Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        lines = []
        for side in SIDES:
            report = kept / f"{side}.jsonl"
            for old in kept.glob(report.name + "*"):
                old.unlink()
            lines.append(_run_side(root, paths, report, sides[side], jobs))
            if not any("test" in line for line in lines[-1]):
                problems = [line["error"] for line in lines[-1] if "not_collected" in line]
                log = (kept / f"{side}.log").read_text().strip().splitlines()[-5:]
                raise UsageError("no test was run: " + "; ".join(problems or log))
    outcome = compare(*lines)
    print(render(outcome))
    if not outcome.counts["unpatched"]["passed"]:
        raise UsageError("no test passes unpatched, so nothing is shown; is the checkout of about this version?")
    same = not outcome.differences and not outcome.other_ids
    print("the same failures on both sides" if same else "NOT the same")
    return 0 if same else 1
