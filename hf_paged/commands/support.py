"""`python -m hf_paged support`: every class the installed Transformers can generate with, or why not.

For each a tiny random model is made (`tiny_models`) and generates with and without the paged cache, in float32: greedy,
beams and samples of left-padded rows, prompt lookup, rows that end early; of models with an encoder also decoder
prompts of several tokens. Each is put in one class:

- `paged`: the same tokens and logits, and attention never left the blocks;
- `dense`: the same, some or all of it by a dense path, as counted in `fallbacks`;
- `refused`: `patch()` raises, with the reason;
- `not built`: no tiny model came about, or the unpatched one does not generate;
- `wrong`: anything else. There should be none.

Every model has a process of its own, so a crash or an endless loop costs that model's line only.
"""

import contextlib
import copy
import json
import multiprocessing
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CLASSES = ("paged", "dense", "refused", "not built", "wrong")
TIME_LIMIT = 120  # seconds of a processor for one model; five times that on the clock
MEMORY_LIMIT = 6 << 30  # bytes of address space beside what the parent has
TOLERANCE = 1e-4

# Fallbacks that cost a saving and leave attention on the blocks.
_SAVINGS = (
    "pads are computed",
    "the prompt is computed once per beam or sample",
    "a source is read once per beam or sample",
)


@dataclass
class Line:
    """What came out for one class.

    Attributes:
        model: model type, as in `config.model_type` or the library's own mapping.
        architecture: class name.
        task: text, text to text, speech, images (a generating model that also takes images), other or pairs.
        kind: one of `CLASSES`; called `class` in JSON.
        reason: why it is not simply `paged`, or which saving it goes without.
        modes: mode of generation → "exact", or why the unpatched model does not do it.
        seconds: time it took; not in JSON, so that two runs can be compared.
    """

    model: str
    architecture: str
    task: str
    kind: str = "not built"
    reason: str = ""
    modes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        entry = asdict(self)
        entry["class"] = entry.pop("kind")
        order = ("model", "class", "reason", "architecture", "task", "modes")
        return {name: entry[name] for name in order}


class _Wrong(Exception):
    """The paged model does something else than the unpatched one."""


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _generate(model: Any, inputs: Any, seed: int = 5, **options: Any) -> Any:
    import torch

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        return model.generate(**own, **options)


def _ask(model: Any, inputs: Any) -> tuple[dict[str, Any], Any]:
    """Keywords with which a model gives its logits, or else with which it generates, and what comes out."""
    everything = {"return_dict_in_generate": True, "output_logits": True}
    with contextlib.suppress(Exception):
        first = _generate(model, inputs, max_new_tokens=4, **everything)
        if getattr(first, "logits", None) is not None:
            return everything, first
    options = {"return_dict_in_generate": True}
    try:
        return options, _generate(model, inputs, max_new_tokens=4, **options)
    except Exception as error:
        with contextlib.suppress(Exception):
            return {}, _generate(model, inputs, max_new_tokens=4)
        raise error


def _same_ids(left: Any, right: Any) -> bool:
    """Whether the ids are the same; some models return more than was asked for, and some no ids."""
    one, other = (_tensors(getattr(output, "sequences", output)) for output in (left, right))
    return len(one) == len(other) and not any(_differ(*pair) for pair in zip(one, other, strict=True))


def _tensors(output: Any) -> list[Any]:
    """All tensors that a generate() returned, caches left out."""
    import torch

    if isinstance(output, torch.Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _differ(left: Any, right: Any) -> bool:
    """Whether two tensors are other ids, or numbers further apart than the tolerance."""
    import torch

    if left.shape != right.shape or not left.is_floating_point():
        return not torch.equal(left, right)
    scale = max(1.0, left.abs().max().item()) if left.numel() else 1.0
    return not torch.allclose(left, right, rtol=0, atol=TOLERANCE * scale, equal_nan=True)


def _compare(expected: Any, got: Any, mode: str) -> None:
    import torch

    if getattr(expected, "logits", None) is None:
        pairs = zip(_tensors(expected), _tensors(got), strict=True)
        if any(_differ(left, right) for left, right in pairs):
            raise _Wrong(f"{mode}: other results")
        return
    if not torch.equal(expected.sequences, got.sequences):
        raise _Wrong(f"{mode}: other tokens")
    for step, (left, right) in enumerate(zip(expected.logits or (), got.logits or (), strict=True)):
        scale = max(1.0, left[left.isfinite()].abs().max().item())
        difference = (left - right)[left.isfinite()].abs().max().item()
        if not difference <= TOLERANCE * scale:
            raise _Wrong(f"{mode}: logits of step {step} are {difference:.2g} apart")


def _rows(inputs: dict[str, Any], rows: slice) -> dict[str, Any]:
    import torch

    return {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _repeating(inputs: dict[str, Any]) -> dict[str, Any]:
    """One row, whose text repeats itself where it is text: something to look up."""
    rows = _rows(inputs, slice(-1, None))
    for name in ("input_ids", "decoder_input_ids"):
        ids = rows.get(name)
        if ids is not None and ids.shape[1] >= 8 and int(ids.max()) < 250:
            half = ids.shape[1] // 2
            rows[name] = ids[:, :half].repeat(1, 2)
            for mask in ("attention_mask", "decoder_attention_mask"):
                if mask in rows and name.startswith("decoder") == mask.startswith("decoder"):
                    rows[mask] = rows[mask][:, : 2 * half]
    return rows


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 12},
    "beams": {"num_beams": 3, "max_new_tokens": 6},
    "samples": {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 6},
    "early end": {"max_new_tokens": 10},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "max_new_tokens": 10},
}
# Beside these, of models with an encoder.
DECODER_MODES: dict[str, dict[str, Any]] = {
    "source padded on the left": {"max_new_tokens": 6},
    "decoder prompt": {"max_new_tokens": 6},
    "decoder prompt, beams": {"num_beams": 3, "max_new_tokens": 5},
    "decoder prompt, samples": {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 5},
    "decoder prompt, lookup": {"prompt_lookup_num_tokens": 3, "max_new_tokens": 8},
    "ragged decoder prompts": {"max_new_tokens": 6},
    "ragged decoder prompts, beams": {"num_beams": 3, "max_new_tokens": 5},
}


def _given(mode: str, model: Any, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The inputs of one mode; None: it is nothing for this model."""
    from . import tiny_models

    if mode == "prompt lookup":
        return _repeating(inputs)
    if mode == "source padded on the left":
        return tiny_models.padded_left(inputs)
    if mode not in DECODER_MODES:
        return inputs
    rows = len(next(iter(inputs.values())))
    prompts = tiny_models.decoder_prompts(model, (4, 2, 3)[:rows])
    if "ragged" in mode:
        return {**inputs, **prompts}
    if "lookup" in mode:
        inputs = _rows(inputs, slice(1))
        return {**inputs, "decoder_input_ids": prompts["decoder_input_ids"][:1].repeat(1, 3)}
    whole = tiny_models.decoder_prompts(model, (4, 4, 4)[:rows])
    return {**inputs, "decoder_input_ids": whole["decoder_input_ids"]}


def measure(task: str, model_type: str, class_name: str) -> Line:
    """Build one family's tiny model and compare. Never raises but for faults of its own."""
    import torch

    import hf_paged

    from ..generation.soundness import Reason
    from . import tiny_models

    line = Line(model_type, class_name, task)
    begin = time.perf_counter()

    def done(kind: str, reason: str) -> Line:
        line.kind, line.reason, line.seconds = kind, reason, round(time.perf_counter() - begin, 2)
        return line

    torch.set_num_threads(1)
    lengths = (5, 14, 12)
    for spread in (0.15, 0.04):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                plain = tiny_models.build(model_type, class_name, spread=spread)
        except Exception as error:
            return done("not built", _short(error))
        if not hasattr(plain, "generate"):
            return done("not built", "it has no generate()")
        settings = plain.generation_config
        settings.eos_token_id = tiny_models.END.get(class_name)
        settings.pad_token_id = tiny_models.PAD
        starts = plain.config.is_encoder_decoder or model_type.startswith("musicgen")
        if starts and settings.decoder_start_token_id is None:
            settings.decoder_start_token_id = tiny_models.BOS
        settings.forced_eos_token_id = settings.forced_bos_token_id = None
        try:
            patched = hf_paged.patch(copy.deepcopy(plain), block_size=4)
        except ValueError as error:
            return done("refused", " ".join(str(error).split()).split(" and be right: ")[-1])
        try:
            inputs = dict(tiny_models.inputs_for(plain, lengths))
            changed = dict(tiny_models.inputs_for(plain, lengths, changed=True))
            everything, first = _ask(plain, inputs)
            other = _generate(plain, changed, max_new_tokens=4, **everything)
        except Exception as error:
            return done("not built", f"the unpatched model does not generate: {_short(error)}")
        has_logits = "output_logits" in everything
        if not has_logits:
            break
        if not any(bool(step.isnan().any() or (step == torch.inf).any()) for step in first.logits):
            break
    else:
        return done("not built", "its logits are not finite")
    if not has_logits:  # sound or images, and no logits
        if not any(_differ(one, two) for one, two in zip(_tensors(first), _tensors(other), strict=True)):
            return done("not built", "what it generates does not depend on the prompt's first token")
    else:
        moved = [(one[0] - two[0]).abs() for one, two in zip(first.logits, other.logits, strict=True)]
        if not any(bool((step[step.isfinite()] > 1e-3).any()) for step in moved):
            return done("not built", "its logits do not depend on the prompt's first token")

    end: int | None = None
    modes = {**MODES, **DECODER_MODES} if plain.config.is_encoder_decoder else MODES
    for mode, options in modes.items():
        given = _given(mode, plain, inputs)
        if given is None:
            continue
        options = dict(options)
        if mode == "early end":
            if end is None:
                continue
            options["eos_token_id"] = end
        try:
            expected = _generate(plain, given, **options, **everything)
        except Exception as error:
            line.modes[mode] = _short(error)
            continue
        try:
            got = _generate(patched, given, **options, **everything)
            if has_logits and "lookup" in mode and not torch.equal(expected.sequences, got.sequences):
                greedy = _generate(plain, given, max_new_tokens=options["max_new_tokens"], **everything)
                if not torch.equal(expected.sequences, greedy.sequences):
                    _compare(greedy, got, mode)
                    line.modes[mode] = "as without, which the unpatched model's is not"
                    continue
            _compare(expected, got, mode)
            if has_logits:
                bare = _generate(patched, given, **options)
                if not _same_ids(expected, bare) and not _same_ids(_generate(plain, given, **options), bare):
                    raise _Wrong(f"{mode}, ids alone: other tokens")
            del got
            patched.paged_pool.check()
        except _Wrong as error:
            return done("wrong", str(error))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return done("wrong", f"{mode}: {_short(error)} ({Path(place.filename).name}:{place.lineno})")
        line.modes[mode] = "exact"
        if mode != "greedy" or not has_logits:
            continue
        ids = expected.sequences
        if ids.ndim == 2 and ids.shape[1] > len(expected.logits):  # of codebooks it has no end
            end = int(ids[0, -len(expected.logits) // 2])
    if "exact" not in line.modes.values():
        return done("not built", f"the unpatched model does not generate: {line.modes}")
    stats = patched.paged_stats()
    savings = (*_SAVINGS, *(reason.value for reason in Reason))
    dense = {reason: n for reason, n in stats.fallbacks.items() if not reason.startswith(savings)}
    if dense:
        return done("dense", "; ".join(sorted(dense)))
    if not stats.peak_used_blocks:
        return done("dense", "generate() made no cache that could be paged")
    return done("paged", "; ".join(sorted(stats.fallbacks)))


# -- running them ------------------------------------------------------------------------------------------------------


def _child(pipe: Any, entry: tuple[str, str, str]) -> None:
    with open("/dev/null", "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_LIMIT, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (TIME_LIMIT, TIME_LIMIT + 5))
        signal.alarm(5 * TIME_LIMIT)
        pipe.send(measure(*entry))


def sweep(chosen: Sequence[tuple[str, str, str]], jobs: int = 1, said: Any = None) -> list[Line]:
    """Measure these entries, each in a forked process, `jobs` at a time; results in the order given.

    Args:
        chosen: `(task, model type, class name)` each, from `tiny_models.entries()`.
        said: called with each `Line` when it is there.
    """
    import torch

    import hf_paged  # noqa: F401  (so that the forked processes need not)

    from . import tiny_models  # noqa: F401

    torch.set_num_threads(1)  # a process with running threads must not be forked
    context = multiprocessing.get_context("fork")
    lines: dict[int, Line] = {}
    running: dict[int, tuple[Any, Any]] = {}
    waiting = list(enumerate(chosen))[::-1]
    while waiting or running:
        while waiting and len(running) < jobs:
            index, entry = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, entry))
            process.start()
            theirs.close()
            running[index] = (process, ours)
        multiprocessing.connection.wait([pipe for _, pipe in running.values()])
        for index, (process, pipe) in list(running.items()):
            if not pipe.poll():
                continue
            try:
                line = pipe.recv()
            except EOFError:
                process.join()
                task, model_type, class_name = chosen[index]
                code = process.exitcode or 0
                late = code in (-signal.SIGALRM, -signal.SIGXCPU)
                how = f"it took more than {TIME_LIMIT} s" if late else f"its process died ({code})"
                line = Line(model_type, class_name, task, "wrong", how)
            process.join()
            del running[index]
            lines[index] = line
            if said is not None:
                said(line)
    return [lines[index] for index in range(len(chosen))]


def versions() -> dict[str, str]:
    """Versions the result depends on."""
    import platform

    import torch
    import transformers

    import hf_paged

    return {
        "hf_paged": hf_paged.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def render(results: Sequence[dict[str, Any]]) -> str:
    """The table of one or more results (one a Transformers version), as Markdown.

    Args:
        results: contents of the JSON files.
    """
    results = sorted(results, key=lambda result: _version_key(result["versions"]["transformers"]), reverse=True)
    names = [result["versions"]["transformers"] for result in results]
    text = [
        "# Model families",
        "",
        "<!-- Made by `python -m hf_paged support --markdown`; do not edit. -->",
        "",
        *_ABOUT,
        "",
        "| | " + " | ".join(f"Transformers {name}" for name in names) + " |",
        "| --- |" + " --- |" * len(names),
    ]
    for kind in CLASSES:
        counts = [sum(entry["class"] == kind for entry in result["models"]) for result in results]
        text.append(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    text.append("| all | " + " | ".join(str(len(result["models"])) for result in results) + " |")
    for result in results:
        made = result["versions"]
        text += ["", f"Transformers {made['transformers']}: torch {made['torch']}, Python {made['python']}."]
    by_version = [{(e["model"], e["architecture"]): e for e in result["models"]} for result in results]
    for task in dict.fromkeys(e["task"] for result in results for e in result["models"]):
        keys = sorted({key for table in by_version for key, entry in table.items() if entry["task"] == task})
        text += ["", f"## {_TITLES.get(task, task)}", ""]
        text.append("| model type | class | " + " | ".join(names) + " | notes |")
        text.append("| --- | --- |" + " --- |" * len(names) + " --- |")
        for key in keys:
            found = [table.get(key) for table in by_version]
            notes: dict[str, list[str]] = {}
            for name, entry in zip(names, found, strict=True):
                if entry is not None and entry["reason"]:
                    notes.setdefault(entry["reason"], []).append(name)
            present = sum(entry is not None for entry in found)
            parts = [note if len(where) == present else f"{', '.join(where)}: {note}" for note, where in notes.items()]
            cells = ["-" if entry is None else entry["class"] for entry in found]
            row = [f"`{key[0]}`", f"`{key[1]}`", *cells, "; ".join(parts).replace("|", "\\|")]
            text.append("| " + " | ".join(row) + " |")
    return "\n".join(text) + "\n"


_TITLES = {
    "text": "Text",
    "text to text": "Text to text",
    "speech": "Speech",
    "images": "Images and text",
    "other": "Other generating classes",
    "pairs": "Pairs of an encoder and a decoder",
}
_ABOUT = (
    "Every public class of the versions named that is a model and can generate: those of the mappings for causal",
    "language models, text to text, speech to text, and image and text to text, those that no mapping names, and",
    "the composite classes with every decoder that can attend to an encoder. Of each a tiny random model",
    "(float32, on the CPU) generates with and without the paged cache: greedy, beams, samples and rows that end",
    "early from left-padded prompts of 5, 14 and 12 tokens, and prompt lookup from one prompt, at block size 4",
    "and windows of 8 tokens. Models with an encoder are also given sources padded on the left, and decoder",
    "prompts of 4 tokens (greedy, beams, samples, lookup) or of 4, 2 and 3 with a mask (greedy, beams). Models",
    "that can be given images or sound, but need none, are given text alone here. What returns sound and no",
    "logits is compared by what it returns.",
    "",
    "- **paged**: the same tokens and logits (1e-4 of the largest), and attention never left the blocks;",
    "- **dense**: the same tokens and logits, some or all of the attention on dense copies of the blocks, counted in",
    "  `paged_stats().fallbacks`;",
    "- **refused**: `patch()` raises, with this reason;",
    "- **not built**: no tiny model came about, or the unpatched one does not generate, so nothing is known;",
    "- **wrong**: something else came out. There should be none.",
    "",
    "What the notes of dense models mean:",
    "",
    "- *`position_bias`*: a learned bias is added to every score, another one for each row. Keys and values are in",
    "  blocks; a decode step copies them together and hands them to PyTorch's attention with the bias.",
    "- *a custom attention mask*: the mask says more than pads, causal order, a window or chunks do, so attention runs",
    "  on dense copies with that mask. What left the window is given back all the same.",
    "- *made dense for …*: the model does its own attention, without the library's interface, on dense copies.",
    "- *made no cache that could be paged*: its `generate()` gives its text model none, or makes one inside a forward.",
)


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def run(
    only: Sequence[str] | None = None,
    quarter: bool = False,
    jobs: int = 1,
    json_file: str | None = None,
    markdown_file: str | None = None,
    read: Sequence[str] | None = None,
) -> int:
    """The command.

    Args:
        only: model types or class names; None: all.
        quarter: a quarter of them, see `tiny_models.quarter`.
        jobs: models at a time.
        json_file, markdown_file: where to write the results.
        read: JSON files of earlier runs; nothing is run then.

    Returns:
        1 if a class is wrong, or the whole sweep has not all that generate; else 0.

    Raises:
        UsageError: if nothing is left to run, or to write.
    """
    from .measure import UsageError

    if read:
        if not markdown_file:
            raise UsageError("--read needs --markdown FILE")
        results = [json.loads(Path(name).read_text()) for name in read]
        Path(markdown_file).write_text(render(results))
        return 0
    from . import tiny_models

    chosen = tiny_models.entries()
    if quarter:
        chosen = tiny_models.quarter(chosen)
    if only:
        chosen = [entry for entry in chosen if entry[1] in only or entry[2] in only]
    if not chosen:
        raise UsageError(f"the installed Transformers has no generating model of these names: {', '.join(only or ())}")
    begin = time.perf_counter()

    def say(line: Line) -> None:
        print(
            f"{line.model:<26} {line.architecture:<44} {line.kind:<10} {line.seconds:5.1f} s  {line.reason}", flush=True
        )

    lines = sweep(chosen, jobs, say)
    counts = {kind: sum(line.kind == kind for line in lines) for kind in CLASSES}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"in {time.perf_counter() - begin:.0f} s")
    missed = [] if quarter or only else tiny_models.missed()
    if missed:
        print("classes that generate and are no entry:", ", ".join(missed))
    content = {"versions": versions(), "models": [line.as_json() for line in lines]}
    if json_file:
        Path(json_file).write_text(json.dumps(content, indent=1) + "\n")
    if markdown_file:
        Path(markdown_file).write_text(render([content]))
    return 1 if counts["wrong"] or missed else 0
