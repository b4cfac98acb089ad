"""The benchmark of model families: what it measures is comparable, and what it says of a family is true."""

import json

import pytest
import torch
import transformers

from hf_paged.cli import main
from hf_paged.commands import bench_families
from hf_paged.commands.measure import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:hf_paged")
CASES = {"ragged4", "beams4", "greedy"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench_families, "_SIZES", {**bench_families._SIZES, "hidden_size": 128, "num_hidden_layers": 2})


def run(tmp_path, *arguments):
    file = tmp_path / "families.json"
    short = ("--prompt-tokens", "24", "--new-tokens", "3", "--repeat", "2", "--json", str(file))
    code = main(["bench", "families", *short, *arguments])
    return code, json.loads(file.read_text())


def test_every_case_of_a_family_is_timed_and_compared(tmp_path, capsys):
    code, written = run(tmp_path, "--only", "bloom")
    assert code == 0
    assert {entry["case"] for entry in written["cases"]} == CASES
    for entry in written["cases"]:
        assert entry["family"] == "bloom" and entry["identical"] and entry["ratio"] > 0 and entry["repetitions"] == 2
        assert entry["class"] == "paged" and entry["fallbacks"] == {}
    assert written["versions"]["transformers"] == transformers.__version__
    assert "slowest" in capsys.readouterr().out


def test_a_family_that_stays_dense_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench_families.FAMILIES, "falcon", {"head_dim": None, "alibi": True})
    code, written = run(tmp_path, "--only", "falcon")
    assert code == 0
    for entry in written["cases"]:
        assert entry["class"] == "dense" and any("made dense" in reason for reason in entry["fallbacks"])
    assert "dense: " in capsys.readouterr().out


def test_other_tokens_are_an_error(tmp_path, monkeypatch):
    timed = bench_families.timed_generate

    def wrong(model, inputs, new_tokens, paged, **options):
        run = timed(model, inputs, new_tokens, paged, **options)
        run.ids = run.ids + int(paged)
        return run

    monkeypatch.setattr(bench_families, "timed_generate", wrong)
    code, written = run(tmp_path, "--only", "llama")
    assert code == 1 and not any(entry["identical"] for entry in written["cases"])


@pytest.mark.parametrize("family", bench_families.FAMILIES)
def test_every_family_can_be_made(family):
    """Under the sizes of the benchmark, without their memory."""
    with torch.device("meta"):
        model = bench_families.build(family)
    assert model.config.num_hidden_layers == 2 and model.can_generate()


def test_what_cannot_be_run_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match=r"no family named lama; there are llama, "):
        bench_families.run(only=["lama"])
    with pytest.raises(UsageError, match="--repeat must be at least 1"):
        bench_families.run(repeat=0)
    assert main(["bench", "families", "--json", str(tmp_path / "nowhere" / "file.json")]) == 2
