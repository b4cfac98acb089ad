"""The command that runs the library's own generation tests on both sides, on a stand-in for a checkout."""

import textwrap

import pytest

from hf_paged.cli import main
from hf_paged.commands import library_tests

MIXIN = """
    import random

    import torch
    from transformers import DynamicCache
    from transformers.testing_utils import is_flaky

    global_rng = random.Random()  # as in the library's test helpers: never seeded there


    class GenerationTesterMixin:
        def model(self):
            return self.make().eval()

        def inputs(self):
            return torch.tensor([[global_rng.randint(3, 90) for _ in range(9)] for _ in range(2)])

        def test_greedy(self):
            output = self.model().generate(self.inputs(), max_new_tokens=5, do_sample=False)
            self.assertEqual(output.shape, (2, 14))

        def test_sample(self):
            self.model().generate(self.inputs(), max_new_tokens=5, do_sample=True, num_return_sequences=2)

        def test_beams(self):
            self.model().generate(self.inputs(), max_new_tokens=5, num_beams=2)

        def test_fails_the_same(self):
            self.model().generate(self.inputs(), max_new_tokens=2)
            self.assertTrue(False)

        def test_of_compilation(self):
            self.assertTrue(False)

        @is_flaky
        def test_marked_as_flaky(self):
            self.assertFalse(hasattr(self, "tried"))
            self.tried = True
            self.model().generate(self.inputs(), max_new_tokens=2)

        def test_only_forward(self):
            self.model()(self.inputs())
"""
TINY = """
    import unittest

    from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

    from ...generation.test_utils import GenerationTesterMixin

    SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, initializer_range=0.2, eos_token_id=None)


    class Unrelated(unittest.TestCase):
        def test_greedy(self):
            raise AssertionError("not a generation test")
"""
LLAMA = """
    class LlamaTest(GenerationTesterMixin, unittest.TestCase):
        def make(self):
            return LlamaForCausalLM(LlamaConfig(intermediate_size=48, num_attention_heads=4, **SIZES))

        def test_of_its_own(self):
            raise AssertionError("not a generation test")

        def test_beams(self):  # instead of the library's
            super().test_beams()
"""
MAMBA = """
    class MambaTest(GenerationTesterMixin, unittest.TestCase):
        def make(self):
            return MambaForCausalLM(MambaConfig(**SIZES))
"""
# Tests and a model that behave in another way where the model is patched.
DIFFERING = """
    class OtherIds(LlamaForCausalLM):
        def forward(self, *arguments, **options):
            output = super().forward(*arguments, **options)
            if self.config._attn_implementation == "hf_paged":
                output.logits = -output.logits
            return output


    class DifferingTest(GenerationTesterMixin, unittest.TestCase):
        kind = LlamaForCausalLM

        def make(self):
            return self.kind(LlamaConfig(intermediate_size=48, num_attention_heads=4, **SIZES))

        def test_fails_the_same(self):  # but not here
            model = self.model()
            model.generate(self.inputs(), max_new_tokens=2)
            if "paged_pool" in vars(model):
                self.assertTrue(False)
            self.assertTrue(False)

        def test_beams(self):
            model = self.model()
            model.generate(self.inputs(), max_new_tokens=2, num_beams=2)
            self.assertNotIn("paged_pool", vars(model))

        def test_greedy(self):
            self.kind = OtherIds
            super().test_greedy()
"""


def checkout(folder, **families):
    """A folder laid out like a checkout: `tests/models/<family>/test_modeling_<family>.py`."""
    files = {"generation/test_utils.py": MIXIN}
    for name, text in families.items():
        files[f"models/{name}/test_modeling_{name}.py"] = TINY + text
    for name, text in files.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True)
        path.write_text(textwrap.dedent(text))
    for path in [folder / "tests", *(folder / "tests").rglob("*")]:
        if path.is_dir():
            (path / "__init__.py").touch()
    return str(folder)


@pytest.mark.slow
def test_the_same_failures_on_both_sides(tmp_path, capsys):
    folder = checkout(tmp_path, llama=LLAMA, mamba=MAMBA)
    assert main(["library-tests", folder, "--early", "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    # Of the seven tests of the mixin one is left out, six are run of each family, and one of them fails.
    assert "unpatched 10 passed, 2 failed, 0 skipped" in printed
    assert "patched   10 passed, 2 failed, 0 skipped" in printed
    assert "tests that differ: 0\n" in printed
    assert "calls compared: 10, with other ids: 0 (ties within 0.0001, not counted: 0)" in printed
    assert "models patched: 6, with blocks in use: 5\n" in printed  # by `forward` alone nothing is stored
    assert "models refused: 6\n  6 times: MambaForCausalLM: none of its layers keeps keys and values" in printed
    assert "fallbacks: 0\n" in printed  # what wraps generate() costs no saving
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"patched.jsonl", "patched.xml", "unpatched.xml"}


@pytest.mark.slow
def test_each_difference_is_named(tmp_path, capsys):
    folder = checkout(tmp_path, llama=LLAMA, differing=DIFFERING, broken="    import no_such_package\n")
    assert main(["library-tests", folder, "--family", "differing", "broken", "--jobs", "2"]) == 1
    printed = capsys.readouterr().out.splitlines()
    about = {line.split("::")[-1].split(":")[0]: line for line in printed if line.startswith("  tests/")}
    assert set(about) == {"test_fails_the_same", "test_beams", "test_greedy"}
    assert "passed unpatched, failed (tests/models/differing/test_modeling_differing.py:" in about["test_beams"]
    assert about["test_fails_the_same"].count("failed (tests/models/differing/") == 2
    assert "(OtherIds, float32): row 0 has another id at 9 of 14, the two best scores" in about["test_greedy"]
    assert "tests that differ: 2" in printed
    assert sum("ModuleNotFoundError" in line for line in printed) == 2  # once a side
    assert printed[-1] == "NOT the same"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--family", "no_such_family"], "has no tests/models/no_such_family/test_modeling_*.py"),
        (["--files", "tests/no_such_file.py"], "there is no"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, capsys, arguments, complaint):
    assert main(["library-tests", checkout(tmp_path, llama=LLAMA), *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert main(["library-tests", str(tmp_path / "empty")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern, complaint", [("no_such_test", "no test was run"), ("fails_the_same", "no test passes unpatched")]
)
def test_a_run_that_shows_nothing_is_no_success(tmp_path, capsys, pattern, complaint):
    assert main(["library-tests", checkout(tmp_path, llama=LLAMA), "--tests", pattern]) == 2
    assert complaint in capsys.readouterr().err


# -- laying the two sides beside each other ----------------------------------------------------------------------------


def line(test="a", outcome="passed", where="", **changes):
    call = {"model": "M", "plain_greedy": True, "dtype": "float32", "ids": [[5, 6, 7], [5, 8, 9]]}
    call["gaps"] = [[0.5, 0.5], [0.5, 0.5]]
    counts = {"patched": 1, "stored": 1, "refused": [], "fallbacks": {}, "error": "", "seconds": 0.1}
    return {"test": test, "outcome": outcome, "where": where, "calls": [{**call, **changes}], **counts}


def test_equal_sides_have_no_difference():
    found = library_tests.compare([line(), line("b", "failed", "x:1")], [line("b", "failed", "x:1"), line()])
    assert (found.differences, found.other_ids, found.ties, found.compared) == ([], [], 0, 2)
    assert found.counts["unpatched"] == found.counts["patched"] == {"passed": 1, "failed": 1}


def test_another_id_counts_unless_the_two_best_were_tied():
    other = line(ids=[[5, 6, 7], [5, 8, 4]])
    assert len(library_tests.compare([line()], [other]).other_ids) == 1
    tied = line(gaps=[[0.5, 0.5], [0.5, 1e-5]])
    found = library_tests.compare([tied], [other])
    assert (found.other_ids, found.ties) == ([], 1)
    elsewhere = line(gaps=[[0.5, 1e-5], [1e-5, 0.5]])  # another step, and another row
    assert len(library_tests.compare([elsewhere], [other]).other_ids) == 1
    # Where the best score does not choose alone, there are no ties.
    assert len(library_tests.compare([line(gaps=tied["calls"][0]["gaps"], plain_greedy=False)], [other]).other_ids) == 1


def test_a_test_that_differs_after_a_tie_is_named_apart():
    tied = line(gaps=[[0.5, 0.5], [0.5, 1e-5]])
    failed = {"outcome": "failed", "where": "x:1"}
    found = library_tests.compare([tied], [line(ids=[[5, 6, 7], [5, 8, 4]], **failed)])
    assert found.differences == [] and len(found.after_ties) == 1
    assert library_tests.compare([tied], [line(**failed)]).after_ties == []  # a tie that made no difference
    found = library_tests.compare([tied], [line(ids=[[5, 1, 7], [5, 8, 4]], **failed)])  # one id tied, one not
    assert len(found.differences) == 1 and found.after_ties == []


def test_what_follows_a_tie_is_not_held_against_anyone():
    tied = line(gaps=[[1e-5, 0.5], [0.5, 0.5]])
    found = library_tests.compare([tied], [line(ids=[[5, 1, 2], [5, 8, 9]])])
    assert (found.other_ids, found.ties) == ([], 1)
    prompt = library_tests.compare([tied], [line(ids=[[1, 6, 7], [5, 8, 9]])])
    assert len(prompt.other_ids) == 1  # an id that no step chose


@pytest.mark.parametrize(
    "after, told",
    [
        ([], "not run patched"),
        ([line(outcome="failed", where="x:1")], "passed unpatched, failed (x:1: ) patched"),
        ([line(outcome="skipped")], "passed unpatched, skipped patched"),
    ],
)
def test_another_outcome_is_a_difference(after, told):
    assert library_tests.compare([line()], after).differences == [f"a: {told}"]


def test_failing_at_another_place_is_a_difference():
    sides = [line(outcome="failed", where="x:1")], [line(outcome="failed", where="x:2")]
    assert len(library_tests.compare(*sides).differences) == 1


def test_another_number_of_ids_is_a_difference():
    assert "another number" in library_tests.compare([line()], [line(ids=[[5, 6]])]).other_ids[0]
