"""The script for a day with a GPU, run without one: every part with tiny sizes, and what becomes of parts that fail."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch):
    """The script as a module, in a dry run, on the kernels of this process."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--dry-run"])
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "load_ours", lambda: None)
    return module


def main(script, monkeypatch, path, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--dry-run", "--json", str(path), *arguments])
    return script.main(), json.loads(path.read_text())


@pytest.mark.slow
def test_every_part_runs_in_a_dry_run(tmp_path):
    """In a process of its own, from another folder: it finds this clone and its kernels by itself."""
    path = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--json", str(path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    found = json.loads(path.read_text())
    assert found["dry_run"] is True and found["goals"] == []
    assert "no figure above means anything" in result.stdout
    parts = found["parts"]
    assert len(parts) == 13 and {part["status"] for part in parts.values()} == {"passed"}
    assert all(part["results"] for part in parts.values())
    answers = [result for part in parts.values() for result in part["results"] if "right" in result]
    assert len(answers) > 30 and all(answer["right"] for answer in answers)
    assert not any("skipped" in result["name"] for part in parts.values() for result in part["results"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_measured(tmp_path):
    path = tmp_path / "found.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--json", str(path)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 2 and "no CUDA device: nothing was measured" in result.stdout
    found = json.loads(path.read_text())
    assert found["parts"] == {} and found["goals"] == [] and found["dry_run"] is False


def test_a_part_that_fails_or_errs_does_not_take_the_others_with_it(script, monkeypatch, tmp_path):
    def fails(run):
        run.record("before", us=1.0)
        raise RuntimeError("out of luck")

    def a_case_fails(run):
        with run.case("bad luck"):
            raise ValueError("bad luck")
        run.check("after", True)

    def errs(run):
        run.check("two and two", 2 + 2 == 5)

    parts = {"a": fails, "b": a_case_fails, "c": errs, "d": lambda run: run.check("fine", True)}
    monkeypatch.setattr(script, "PARTS", parts)
    status, found = main(script, monkeypatch, tmp_path / "found.json", "--parts", "a,b,c,d")
    assert status == 1
    assert [part["status"] for part in found["parts"].values()] == ["failed", "failed", "failed", "passed"]
    assert "out of luck" in found["parts"]["a"]["traceback"] and found["parts"]["a"]["results"]
    assert "bad luck" in found["parts"]["b"]["failures"][0]["traceback"] and found["parts"]["b"]["results"]
    assert found["parts"]["c"]["wrong"] == ["two and two"]
    monkeypatch.setattr(script, "PARTS", {"d": parts["d"]})
    assert main(script, monkeypatch, tmp_path / "found.json", "--parts", "d")[0] == 0


def test_a_wrong_kernel_is_noticed(script, monkeypatch, tmp_path):
    from hf_paged.triton_kernels import write

    right = write.write_tokens
    monkeypatch.setattr(write, "write_tokens", lambda *given: right(*given[:4], given[4].flip(0)))
    status, found = main(script, monkeypatch, tmp_path / "found.json", "--parts", "store_answers")
    assert status == 1 and any("write" in name for name in found["parts"]["store_answers"]["wrong"])


def test_parts_beyond_the_budget_are_skipped_and_said_so(script, monkeypatch, tmp_path, capsys):
    status, found = main(script, monkeypatch, tmp_path / "found.json", "--budget", "0", "--parts", "ceilings,flex")
    assert status == 0 and "skipped, the budget of 0 s is spent" in capsys.readouterr().out
    assert [part["status"] for part in found["parts"].values()] == ["skipped", "skipped"]


def test_parts_go_on_in_a_new_process_when_the_device_is_lost(script, monkeypatch, tmp_path):
    lost = []
    monkeypatch.setattr(script.Run, "usable", lambda run: not lost)
    monkeypatch.setitem(script.PARTS, "decode", lambda run: lost.append(1))
    path = tmp_path / "found.json"
    status, found = main(script, monkeypatch, path, "--parts", "decode,ceilings")
    assert status == 0 and list(found["parts"]) == ["decode", "ceilings"]
    assert [result["name"] for result in found["parts"]["ceilings"]["results"]] == ["copy", "matrix product"]


def test_a_process_that_dies_leaves_its_parts_failed(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "__file__", str(tmp_path / "no such script.py"))
    run = script.Run(60, None)
    assert script.elsewhere(run, ["decode"]) == ["decode"]
    assert run.results["parts"]["decode"]["status"] == "failed" and not script.summary(run)


def test_goals_are_judged_by_their_figures(script, monkeypatch):
    monkeypatch.setattr(script, "DRY", True)
    run = script.Run(60, None)
    run.goal("a", ">= 1", 2.0, True)
    assert run.results["goals"] == [], "none in a dry run"
    monkeypatch.setattr(script, "DRY", False)
    run.goal("a", ">= 1", 0.5, False)
    assert run.results["goals"] == [{"name": "a", "wanted": ">= 1", "got": 0.5, "met": False}]
