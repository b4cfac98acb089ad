"""`python -m hf_paged bench trend`: how savings of memory and time grow with the prompt and the rows that share it.

Every cell of the grid runs generate() with the library's DynamicCache and with ours, in turn, and compares the ids.
Key-value bytes are those of `bench cpu`: the library's tensors at the last step, and all of our store tensors, spare
and null blocks and gather buffers included. A batch has prompts of one length that share nothing, so nothing is padded
and all that is saved is saved between the beams or samples of one prompt.
"""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure import (
    TimedRun,
    UsageError,
    megabytes,
    opening,
    rotated,
    same_ids,
    say,
    seconds_text,
    spread,
    timed_generate,
    writable,
    write_results,
)
from .prompts import ragged_prompts
from .real_model import load_real_model

Entry = dict[str, Any]
MODES = ("beams", "samples")
AXES: dict[str, tuple[int, ...]] = {"width": (2, 4, 8), "prompt": (128, 512, 2048), "batch": (1, 4)}
PLOT_FORMATS = ("svg", "png")


@dataclass(frozen=True)
class Cell:
    """One point of the grid: `width` beams or samples of each of `batch` prompts of `prompt` tokens."""

    mode: str
    width: int
    prompt: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.mode} width={self.width} prompt={self.prompt} batch={self.batch}"


CELLS = [
    Cell(mode, width, prompt, batch)
    for mode in MODES
    for batch in AXES["batch"]
    for prompt in AXES["prompt"]
    for width in AXES["width"]
]


def chosen(only: Sequence[str] | None) -> list[Cell]:
    """The cells that any of the descriptions in `only` fits; None: all of them.

    A description names what is fixed, such as "beams width=4 prompt=512"; what it leaves out may be anything.

    Raises:
        UsageError: for a word that is no mode and no value of an axis.
    """
    if not only:
        return list(CELLS)
    found: set[Cell] = set()
    for description in only:
        wanted: dict[str, Any] = {}
        for word in description.split():
            axis, _, value = word.partition("=")
            fixed: str | int
            if word in MODES:
                axis, fixed = "mode", word
            elif axis in AXES and value in map(str, AXES[axis]):
                fixed = int(value)
            else:
                values = ", ".join(f"{name}={'|'.join(map(str, entries))}" for name, entries in AXES.items())
                raise UsageError(f"no cell has {word!r}; --only takes {'|'.join(MODES)}, {values}")
            if wanted.setdefault(axis, fixed) != fixed:
                raise UsageError(f"--only {description!r} names two values of {axis}; give --only twice for both")
        if not wanted:
            raise UsageError("--only needs a description of cells, such as 'beams width=4 prompt=512'")
        found.update(cell for cell in CELLS if all(getattr(cell, axis) == value for axis, value in wanted.items()))
    return [cell for cell in CELLS if cell in found]


def measure_cell(model: Any, tokenizer: Any, cell: Cell, new_tokens: int, repeat: int) -> Entry:
    """Run one cell `repeat` times with each cache, in turn."""
    ids, mask = ragged_prompts(tokenizer, [cell.prompt] * cell.batch)
    inputs = {"input_ids": ids, "attention_mask": mask}
    options: dict[str, Any]
    if cell.mode == "beams":
        options = {"do_sample": False, "num_beams": cell.width}
    else:
        options = {"do_sample": True, "num_return_sequences": cell.width, "temperature": 0.8}
    runs: dict[str, list[TimedRun]] = {"DynamicCache": [], "hf_paged": []}
    for round_ in range(repeat):
        for kind in rotated(list(runs), round_):
            runs[kind].append(timed_generate(model, inputs, new_tokens, kind == "hf_paged", **options))
        times = ", ".join(f"{kind} {seconds_text(entries[-1].seconds)}" for kind, entries in runs.items())
        say(f"{cell.name} {round_ + 1}/{repeat}: {times}")
    theirs, ours = runs["DynamicCache"], runs["hf_paged"]
    their_seconds, *their_quartiles = spread([run.seconds for run in theirs])
    our_seconds, *our_quartiles = spread([run.seconds for run in ours])
    stats = ours[-1].stats
    return {
        "case": cell.name,
        "mode": cell.mode,
        "width": cell.width,
        "prompt": cell.prompt,
        "batch": cell.batch,
        "new_tokens": new_tokens,
        "repetitions": repeat,
        "baseline": "DynamicCache",
        "baseline_seconds": their_seconds,
        "baseline_quartiles": their_quartiles,
        "ours_seconds": our_seconds,
        "ours_quartiles": our_quartiles,
        "ratio": their_seconds / our_seconds,
        "identical": same_ids([run.ids for run in ours], [run.ids for run in theirs]),
        "baseline_kv_bytes": theirs[-1].kv_bytes,
        "ours_kv_bytes": ours[-1].kv_bytes,
        "kv_saving": 1 - ours[-1].kv_bytes / theirs[-1].kv_bytes,
        "fallbacks": stats.fallbacks if stats is not None else {},
    }


def _earlier(target: Path, facts: dict[str, Any], new_tokens: int) -> list[Entry]:
    """The cells in a result file.

    Raises:
        UsageError: if it is no result file of this command, or one of another machine, other versions or another number
            of new tokens, which must not stand in one table with what is measured now.
    """
    try:
        content = json.loads(target.read_text())
        versions, cells = content["versions"], list(content["cases"])
        tokens = {entry["new_tokens"] for entry in cells}
        known = all(entry["case"] and entry["mode"] in MODES for entry in cells)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--resume: {target} is no result file of `bench trend` ({error!r})") from None
    unlike = [f"{name} {versions.get(name)}" for name in facts if versions.get(name) != facts[name]]
    if tokens - {new_tokens}:
        unlike.append(f"--new-tokens {', '.join(map(str, sorted(tokens)))}")
    if unlike or not known:
        raise UsageError(
            f"--resume: {target} was measured with {', '.join(unlike) or 'something else'}; use another file"
        )
    return cells


# -- what is shown ----------------------------------------------------------------------------------------------------


def _print_table(results: Sequence[Entry]) -> None:
    print(f"\n{'cell':<38} DynamicCache      ours  speed-up  same  key-value bytes, ours of DynamicCache's")
    for entry in results:
        print(
            f"{entry['case']:<38} {seconds_text(entry['baseline_seconds']):>12} "
            f"{seconds_text(entry['ours_seconds']):>9}  {entry['ratio']:7.2f}x  "
            f"{'yes' if entry['identical'] else 'NO':<4}  {megabytes(entry['ours_kv_bytes'])} of "
            f"{megabytes(entry['baseline_kv_bytes'])}, {100 * entry['kv_saving']:.1f} % saved"
        )


def _plot_target(file: str | None) -> Path | None:
    """The path of the plot; None for None.

    Raises:
        UsageError: if matplotlib is not installed, the ending is none that is known, or see `writable`.
    """
    target = writable(file)
    if target is None:
        return None
    if target.suffix.lower().lstrip(".") not in PLOT_FORMATS:
        raise UsageError(f"--plot writes .{' or .'.join(PLOT_FORMATS)}, got {file}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'hf-paged[plot]'")
    return target


def draw(results: Sequence[Entry], target: Path) -> None:
    """Draw saving and speed-up over prompt length, one line per mode and width, one column per batch size."""
    from matplotlib.figure import Figure

    batches = sorted({entry["batch"] for entry in results})
    widths = sorted({entry["width"] for entry in results})
    prompts = sorted({entry["prompt"] for entry in results})
    figure = Figure(figsize=(1.5 + 4.5 * len(batches), 8), layout="constrained")
    axes = figure.subplots(2, len(batches), squeeze=False, sharex=True, sharey="row")
    for column, batch in enumerate(batches):
        saving, speed = axes[0][column], axes[1][column]
        for mode, style in zip(MODES, ("-", "--"), strict=True):
            for color, width in enumerate(widths):
                points = sorted(
                    (entry["prompt"], 100 * entry["kv_saving"], entry["ratio"])
                    for entry in results
                    if (entry["mode"], entry["width"], entry["batch"]) == (mode, width, batch)
                )
                if points:
                    lengths, savings, ratios = zip(*points, strict=True)
                    line: dict[str, Any] = {
                        "linestyle": style,
                        "color": f"C{color}",
                        "marker": "o",
                        "label": f"{width} {mode}",
                    }
                    saving.plot(lengths, savings, **line)
                    speed.plot(lengths, ratios, **line)
        saving.set_title(f"batch of {batch}")
        speed.axhline(1, color="grey", linewidth=0.8)
        speed.set_xscale("log", base=2)
        speed.set_xticks(prompts, [str(prompt) for prompt in prompts])
        speed.set_xlabel("prompt, tokens")
        for panel in (saving, speed):
            panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("key-value bytes saved, %")
    axes[1][0].set_ylabel("speed-up of generate()")
    axes[0][-1].legend()
    new_tokens = ", ".join(str(count) for count in sorted({entry["new_tokens"] for entry in results}))
    figure.suptitle(f"hf_paged against DynamicCache, SmolLM2-135M-Instruct, {new_tokens} new tokens, CPU")
    partial = target.with_name(target.name + ".partial")
    figure.savefig(partial, format=target.suffix.lower().lstrip("."))
    partial.replace(target)


def run(
    only: Sequence[str] | None = None,
    new_tokens: int = 16,
    repeat: int = 3,
    json_file: str | None = None,
    plot_file: str | None = None,
    resume: bool = False,
) -> int:
    """Measure the cells, print a table, write the JSON after every cell and the plot at the end.

    Args:
        only: see `chosen`.
        new_tokens: tokens to generate per row.
        repeat: runs of each cell with each cache.
        json_file, plot_file: where to write the results, too.
        resume: keep the cells that `json_file` has from an earlier run, and measure the others only.

    Returns:
        0 if all ids were identical, else 1; 130 if it was interrupted.

    Raises:
        UsageError: for a cell that does not exist, a number that is too small, a file that cannot be written, or one to
            resume from that was measured otherwise.
    """
    cells = chosen(only)
    for option, value, least in (("--new-tokens", new_tokens, 2), ("--repeat", repeat, 1)):
        if value < least:
            raise UsageError(f"{option} must be at least {least}, got {value}")
    target, plot = writable(json_file), _plot_target(plot_file)

    if resume and target is None:
        raise UsageError("--resume needs --json FILE, the file to go on with")
    facts = opening()
    results = _earlier(target, facts, new_tokens) if resume and target is not None and target.exists() else []
    have = {entry["case"] for entry in results}
    cells = [cell for cell in cells if cell.name not in have]
    model, tokenizer = load_real_model(progress=say) if cells else (None, None)
    status = 0
    try:
        for cell in cells:
            results.append(measure_cell(model, tokenizer, cell, new_tokens, repeat))
            if target is not None:
                write_results(target, facts, results)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {len(results) - len(have)} of {len(cells)} cells", flush=True)
        status = 130
    places = {cell.name: place for place, cell in enumerate(CELLS)}
    results.sort(key=lambda entry: places.get(entry["case"], len(places)))
    _print_table(results)
    if plot is not None and results:
        draw(results, plot)
    return status or int(not all(entry["identical"] for entry in results))
