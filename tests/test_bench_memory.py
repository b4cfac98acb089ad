"""The benchmarks of memory: what they count is what is there, and what they say about requests is true."""

import json
import random
import re
import statistics
from types import SimpleNamespace

import pytest
from models import PAD, VOCAB, build, prompts

import hf_paged
from hf_paged.blocks import BlockPool, RowTables
from hf_paged.cli import main
from hf_paged.commands import bench_memory, bench_trend
from hf_paged.commands.bench_memory import contiguous, reserved_slots, run_requests
from hf_paged.commands.bench_trend import CELLS, Cell, chosen, measure_cell
from hf_paged.commands.measure import UsageError
from hf_paged.commands.prompts import instruction_prompts
from hf_paged.commands.trace import BlockCounts, Recorder, RequestTrace, replay
from hf_paged.commands.workload import WORKLOADS, Lengths

PROMPTS = (7, 16, 3, 17)
NEW_TOKENS = (12, 5, 20, 2)


class Words:
    """A tokenizer that makes each word and each mark one token, with ids below `vocab`."""

    pad_token_id = PAD

    def __init__(self, vocab=1 << 30):
        self.ids, self.vocab = {}, vocab

    def __call__(self, text, add_special_tokens=True):
        assert not add_special_tokens
        ids = [self._encode(entry) for entry in text] if isinstance(text, list) else self._encode(text)
        return SimpleNamespace(input_ids=ids)

    def _encode(self, text):
        return [
            3 + self.ids.setdefault(word, len(self.ids)) % (self.vocab - 3)
            for word in re.findall(r"\w+|[^\w\s]|\n", text)
        ]


def ids_of(lengths):
    batch = prompts(*lengths)
    return [row[keep.bool()].tolist() for row, keep in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


# -- recording and replaying ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("mode", ["beams", "samples"])
def test_a_replay_counts_what_the_running_cache_held(mode, width):
    """At the block size of the run, and at all others: what was recorded with one is true of a run with another."""
    model = build("llama")
    runs = {
        size: run_requests(model, ids_of(PROMPTS), NEW_TOKENS, mode, width, block_size=size) for size in (1, 2, 8, 16)
    }
    for size, (traces, counts, fallbacks) in runs.items():
        assert not fallbacks
        assert traces == runs[1][0]
        assert [trace.steps for trace in traces] == [tokens - 1 for tokens in NEW_TOKENS]
        for other in runs:
            assert [replay(trace, size) for trace in runs[other][0]] == counts
        assert all(entry.distinct_blocks < entry.unshared_blocks for entry in counts if entry.block_size == 1)
    parents = [entry for trace in runs[1][0] for entry in trace.parents]
    if mode == "samples":
        assert parents == [None] * len(parents)
    else:
        assert any(len(set(entry)) < width for entry in parents[1:]), "no beam was ever dropped"
    assert not hasattr(model, "paged_pool")


@pytest.mark.parametrize("mode", ["beams", "samples"])
def test_a_request_of_a_batch_moves_and_holds_what_it_does_alone(mode):
    model = build("llama")
    rows = ids_of(PROMPTS)
    together, held, _ = run_requests(model, rows, NEW_TOKENS, mode, 3, block_size=4)
    for index, row in enumerate(rows):
        alone, held_alone, _ = run_requests(model, [row], [NEW_TOKENS[index]], mode, 3, block_size=4)
        assert alone == [together[index]]
        assert held_alone == [held[index]]


def test_the_recorder_refuses_a_prompt_that_is_stored_once_per_row():
    model = build("llama")
    rows = prompts(9)
    with (
        hf_paged.patched(model, prompt_once=False),
        Recorder(model, [9], [4], 2) as recorder,
        pytest.raises(RuntimeError, match="were expected"),
    ):
        model.generate(**rows, num_beams=2, do_sample=False, max_new_tokens=4, min_new_tokens=4)
    assert recorder.traces[0].steps == 0


def test_recording_keeps_no_block_of_the_cache():
    model = hf_paged.patch(build("llama"), block_size=4)
    with Recorder(model, [9], [6], 3):
        model.generate(**prompts(9), num_beams=3, do_sample=False, max_new_tokens=6, min_new_tokens=6)
    assert model.paged_stats().used_blocks == 0


# -- counting by hand -------------------------------------------------------------------------------------------------


def test_a_tiny_trace_by_hand():
    """A prompt of 3 tokens, two rows; after the second step both continue row 0.

    Blocks of 2: step 1 [A C] [A B], full; step 2 [A C D] [A C E], D and E half full; step 3 the same, full.
    """
    trace = RequestTrace(prompt=3, width=2, parents=[None, [0, 0], None])
    counts = replay(trace, 2)
    assert counts == BlockCounts(
        2, steps=3, unshared_blocks=4 + 6 + 6, distinct_blocks=3 + 4 + 4, logical_tokens=8 + 10 + 12,
        stored_tokens=6 + 6 + 8,
    )  # fmt: skip
    assert counts.memory_saving == pytest.approx(5 / 16)
    assert counts.slots_wasted == pytest.approx(1 / 11)
    single = replay(trace, 1)
    assert (single.unshared_blocks, single.distinct_blocks, single.slots_wasted) == (30, 5 + 6 + 8, 0)
    # One block for all: the second row copies it before it writes.
    whole = replay(trace, 16)
    assert (whole.unshared_blocks, whole.distinct_blocks, whole.memory_saving) == (6, 6, 0)
    assert whole.stored_tokens == whole.logical_tokens == 30


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_stored_tokens_are_those_of_the_tables(block_size):
    tables = RowTables(BlockPool(), block_size)
    tables.add_rows(2)
    tables.append([5, 8])
    tables.repeat_interleave(3)
    for parents in ([0, 0, 1, 3, 4, 4], [1, 2, 2, 5, 5, 3], [0, 1, 2, 3, 4, 5]):
        tables.append([1] * 6)
        counts = BlockCounts(block_size)
        counts.add(tables.rows)
        assert counts.stored_tokens == tables.stored_tokens()
        assert counts.logical_tokens == tables.logical_tokens()
        assert counts.distinct_blocks == tables.pool.used_blocks
        tables.select(parents)
    counts = BlockCounts(block_size)
    counts.add(tables.rows)  # rows that share a partly filled block
    assert counts.stored_tokens == tables.stored_tokens()


def test_counts_of_unlike_block_sizes_do_not_add_up():
    with pytest.raises(ValueError, match="do not add up"):
        BlockCounts(1) + BlockCounts(2)
    assert BlockCounts(4, 1, 8, 6, 20, 18) + BlockCounts(4, 2, 4, 2, 12, 8) == BlockCounts(4, 3, 12, 8, 32, 26)
    assert BlockCounts(4).memory_saving == BlockCounts(4).slots_wasted == 0


def test_contiguous_reservations_by_hand():
    """The cache never holds the last new token; a power of two covers the output alone."""
    assert reserved_slots(19, 26, 2048) == {"oracle": 44, "power of two": 19 + 32, "maximum": 2048}
    assert reserved_slots(5, 9, 64)["power of two"] == 5 + 8
    assert reserved_slots(5, 10, 64)["power of two"] == 5 + 16
    assert reserved_slots(5, 2, 64) == {"oracle": 6, "power of two": 6, "maximum": 64}


def test_contiguous_slots_of_a_tiny_trace_by_hand():
    """Two rows of 4, 5 and 6 tokens, three steps: 30 slots filled."""
    kinds = contiguous([RequestTrace(3, 2, [None, [0, 0], None])], max_length=64)
    assert {kind: entry["slots_used"] for kind, entry in kinds.items()} == dict.fromkeys(kinds, 30)
    assert {kind: entry["slots_reserved"] for kind, entry in kinds.items()} == {
        "DynamicCache": 30,
        "oracle": 2 * 3 * 6,
        "power of two": 2 * 3 * (3 + 4),
        "maximum": 2 * 3 * 64,
    }


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mean_prompt", "mean_output"), [("alpaca", 19, 58), ("sharegpt", 161, 338)])
def test_lengths_have_the_published_means(name, mean_prompt, mean_output):
    for count, tolerance in ((16, 0.1), (100, 0.03), (1000, 0.01)):
        drawn_prompts, outputs = zip(*WORKLOADS[name].draw(count), strict=True)
        assert len(drawn_prompts) == count
        assert statistics.mean(drawn_prompts) == pytest.approx(mean_prompt, rel=tolerance)
        assert statistics.mean(outputs) == pytest.approx(mean_output, rel=tolerance)
        assert min(drawn_prompts) >= 1 and min(outputs) >= 2
        assert max(drawn_prompts) + max(outputs) <= 2048
    assert WORKLOADS[name].draw(50) == WORKLOADS[name].draw(50) != WORKLOADS[name].draw(50, seed=1)


def test_lengths_stay_within_their_bounds():

    lengths = Lengths(mean=12, sigma=2.0, low=3, high=40).draw(500, random.Random(0))
    assert min(lengths) == 3 and max(lengths) == 40
    assert statistics.mean(lengths) == pytest.approx(12, rel=0.03)


@pytest.mark.parametrize("name", ["alpaca", "sharegpt"])
def test_prompts_are_distinct_and_of_exactly_the_drawn_lengths(name):
    lengths = [prompt for prompt, _ in WORKLOADS[name].draw(120)]
    tokenizer = Words()
    made = instruction_prompts(tokenizer, lengths)
    assert [len(prompt) for prompt in made] == lengths
    assert len({tuple(prompt) for prompt in made}) == 120
    assert made == instruction_prompts(Words(), lengths)
    if name == "alpaca":  # nearly all are whole instructions
        ends = {tokenizer.ids[mark] + 3 for mark in ".?"}
        assert sum(prompt[-1] in ends for prompt in made) > 100


def test_prompts_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="unlike prompts of 1 tokens"):
        instruction_prompts(Words(), [1] * 500)
    with pytest.raises(ValueError, match="must be between"):
        instruction_prompts(Words(), [0])


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """The commands run a tiny random model."""
    model = build("llama")

    def load(progress):
        return model, Words(VOCAB)

    monkeypatch.setattr(bench_memory, "load_real_model", load)
    monkeypatch.setattr(bench_trend, "load_real_model", load)
    return model


def test_memory_prints_and_writes_what_it_measured(tiny, tmp_path, capsys):
    file = tmp_path / "memory.json"
    assert main(["bench", "memory", "--requests", "3", "--widths", "2", "--block-sizes", "4", "1", "--json",
                 str(file)]) == 0  # fmt: skip
    written = json.loads(file.read_text())
    assert [entry["case"] for entry in written["cases"]] == ["alpaca samples width=2", "alpaca beams width=2"]
    assert written["versions"]["hf_paged"] == hf_paged.__version__
    for entry in written["cases"]:
        assert entry["replay_equals_live"] and not entry["fallbacks"]
        assert [counts["block_size"] for counts in entry["replayed"]] == [4, 1]
        assert entry["live"]["block_size"] == 16
        assert entry["contiguous"]["DynamicCache"]["slots_reserved"] == entry["live"]["logical_tokens"]
        assert entry["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    out = capsys.readouterr().out
    assert "alpaca beams width=2" in out and "maximum (2048)" in out and "log-normal" in out


def test_memory_keeps_the_finished_cases_when_interrupted(tiny, tmp_path, capsys, monkeypatch):
    case = bench_memory._case
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return case(*args)

    monkeypatch.setattr(bench_memory, "_case", interrupted)
    file = tmp_path / "memory.json"
    assert bench_memory.run(requests=2, widths=[2], block_sizes=[4], json_file=str(file)) == 130
    assert [entry["case"] for entry in json.loads(file.read_text())["cases"]] == ["alpaca samples width=2"]
    assert "interrupted after 1 cases" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("mode", ["beams", "samples"])
def test_a_cell_compares_with_the_library(tiny, mode):
    entry = measure_cell(tiny, Words(VOCAB), Cell(mode, 3, 40, 2), new_tokens=5, repeat=2)
    assert entry["identical"] and not entry["fallbacks"]
    # The library's cache at the last step: 44 tokens of 6 rows, 2 layers of 2 heads of 16, in float32.
    assert entry["baseline_kv_bytes"] == 6 * 44 * 2 * 2 * 2 * 16 * 4
    assert entry["kv_saving"] == 1 - entry["ours_kv_bytes"] / entry["baseline_kv_bytes"]
    assert not hasattr(tiny, "paged_pool")


def test_cells_are_chosen_by_what_is_named():
    assert chosen(None) == CELLS and len(CELLS) == 2 * 3 * 3 * 2
    assert chosen(["beams width=4 prompt=512"]) == [Cell("beams", 4, 512, 1), Cell("beams", 4, 512, 4)]
    both = chosen(["samples width=2 prompt=128 batch=1", "batch=1 prompt=128 width=2"])
    assert both == [Cell("beams", 2, 128, 1), Cell("samples", 2, 128, 1)]


def test_trend_prints_and_writes_its_cells(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_trend, "chosen", lambda only: [Cell("beams", 2, 20, 1), Cell("samples", 2, 20, 1)])
    file = tmp_path / "trend.json"
    assert main(["bench", "trend", "--repeat", "1", "--new-tokens", "3", "--json", str(file)]) == 0
    assert [entry["identical"] for entry in json.loads(file.read_text())["cases"]] == [True, True]
    assert "samples width=2 prompt=20 batch=1" in capsys.readouterr().out


def test_trend_goes_on_where_it_was_interrupted(tiny, tmp_path, capsys, monkeypatch):
    cells = [cell for cell in CELLS if cell.prompt == 128 and cell.width == 2 and cell.batch == 1]
    monkeypatch.setattr(bench_trend, "chosen", lambda only: cells)
    measure, measured = bench_trend.measure_cell, []

    def interrupted(*args):
        measured.append(args[2])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(bench_trend, "measure_cell", interrupted)
    file = tmp_path / "trend.json"
    command = ["bench", "trend", "--repeat", "1", "--new-tokens", "3", "--resume", "--json", str(file)]
    assert main(command) == 130
    assert main(command) == 0
    assert measured == [cells[0], cells[1], cells[1]]
    assert [entry["case"] for entry in json.loads(file.read_text())["cases"]] == [cell.name for cell in cells]
    assert main(command) == 0 and len(measured) == 3, "nothing is left to do"
    capsys.readouterr()
    before = file.read_text()
    assert main([*command, "--new-tokens", "4"]) == 2 and "--new-tokens 3" in capsys.readouterr().err
    file.write_text(before.replace(hf_paged.__version__, "0.0.0"))
    assert main(command) == 2 and "hf_paged 0.0.0" in capsys.readouterr().err
    file.write_text("[]")
    assert main(command) == 2 and "no result file" in capsys.readouterr().err
    assert main(command[:-2]) == 2 and "--json" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_trend_is_drawn(tmp_path, ending):
    pytest.importorskip("matplotlib")
    entries = [
        {"mode": cell.mode, "width": cell.width, "prompt": cell.prompt, "batch": cell.batch, "new_tokens": 16,
         "kv_saving": 1 - 1 / cell.width, "ratio": 1.0 + cell.prompt / 2048}
        for cell in CELLS
    ]  # fmt: skip
    target = tmp_path / f"trend.{ending}"
    bench_trend.draw(entries, target)
    assert target.read_bytes().startswith(b"<?xml" if ending == "svg" else b"\x89PNG")
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("memory --dataset dolly", "there are alpaca, sharegpt and both"),
        ("memory --requests 0", "--requests must be at least 1"),
        ("memory --block-sizes 16 0", "--block-sizes must be at least 1"),
        ("memory --block-sizes -8", "--block-sizes must be at least 1"),
        ("memory --widths 1 4", "--widths must be at least 2"),
        ("memory --max-length 100", "--max-length must hold the longest sequence"),
        ("memory --json nowhere/at/all.json", "there is no folder"),
        ("memory --json .", "it is a folder"),
        ("trend --only rows=4", "no cell has 'rows=4'"),
        ("trend --only beams --only width=3", "no cell has 'width=3'"),
        ("trend --new-tokens 1", "--new-tokens must be at least 2"),
        ("trend --repeat 0", "--repeat must be at least 1"),
        ("trend --json nowhere/at/all.json", "there is no folder"),
        ("trend --plot trend.pdf", "--plot writes .svg or .png"),
    ],
)
def test_bad_arguments_are_said_before_the_model_is_loaded(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(bench_memory, "load_real_model", None)
    monkeypatch.setattr(bench_trend, "load_real_model", None)
    assert main(["bench", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("description", ["", "beams samples", "width=2 width=4", "prompt=", "width=two"])
def test_a_description_that_fits_no_cell_is_refused(description):
    with pytest.raises(UsageError):
        chosen([description])


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(bench_trend.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench_trend, "load_real_model", None)
    assert main(["bench", "trend", "--plot", "trend.svg"]) == 2
    assert "pip install 'hf-paged[plot]'" in capsys.readouterr().err
