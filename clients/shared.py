"""What all clients share: a model twice, the same work on both in turn, and a row of the table for it."""

import copy
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_paged
from hf_paged.commands.measure import say
from hf_paged.commands.prompts import LONG_DOCUMENT
from hf_paged.commands.real_model import load_real_model

transformers.logging.set_verbosity_error()

ROWS_FILE = "HF_PAGED_CLIENT_ROWS"
"""Environment variable: the file that a client appends its rows to, one JSON object a line."""

SAME, DIFFERENT, NOT_HERE = "yes", "NO", "not with this version"


@dataclass
class Row:
    """One line of the table.

    Attributes:
        client: distribution that was called, with its version.
        what: what it was asked to do.
        same: `SAME`; `DIFFERENT`; `NOT_HERE`: the unpatched model does not work with this version either.
        plain, paged: seconds of all its calls on the unpatched and the patched model; None: not measured.
        found, asked: prompt tokens found in the prefix index, of those looked up; None: not a question here.
        aside: code of the reason → calls that went without a saving.
        dense: reason → calls that took a dense path or went without a saving, in words.
        note: what a reader should know, in words: how it failed, or what the figures are of.
    """

    client: str
    what: str
    same: str
    plain: float | None = None
    paged: float | None = None
    found: int | None = None
    asked: int | None = None
    aside: dict[str, int] = field(default_factory=dict)
    dense: dict[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.same != DIFFERENT


def version_of(distribution: str) -> str:
    """Name and installed version, as the table shows them."""
    return f"{distribution} {metadata.version(distribution)}"


def report(row: Row) -> Row:
    """Print a row, and keep it for the table if the runner has asked for that."""
    measured = row.plain is not None and row.paged is not None
    times = f", {row.plain:.2f} s unpatched, {row.paged:.2f} s patched" if measured else ""
    found = "" if row.asked is None else f", {row.found} of {row.asked} tokens found"
    say(f"{row.client}: {row.what}: same: {row.same}{times}{found} {row.aside or ''} {row.note}".rstrip())
    if file := os.environ.get(ROWS_FILE):
        with Path(file).open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(asdict(row)) + "\n")
    return row


def real_pair() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerFast]:
    """SmolLM2-135M-Instruct, float32, twice: unpatched and patched, both warm; and its tokenizer."""
    plain, tokenizer = load_real_model(progress=say)
    paged = hf_paged.patch(copy.deepcopy(plain))
    warm(plain, paged)
    return plain, paged, tokenizer


def warm(*models: Any) -> None:
    """A few tokens of each, so that no first call of a process is timed."""
    ids = torch.arange(5, 13)[None]
    for model in models:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)


def header(words: int) -> str:
    """The first words of a document, as a system prompt or few-shot header that many prompts begin with."""
    return " ".join(LONG_DOCUMENT.split()[:words])


class Counts:
    """What a patched model has counted since this was made, whatever PEFT has wrapped around it."""

    def __init__(self, model: Any):
        self._model = model
        self._before = model.paged_stats()

    def into(self, row: Row) -> Row:
        """Put the counts into a row."""
        before, after = self._before, self._model.paged_stats()
        row.found = after.prefix_hit_tokens - before.prefix_hit_tokens
        row.asked = after.prefix_query_tokens - before.prefix_query_tokens
        row.aside = _more(before.stepped_aside, after.stepped_aside)
        row.dense = _more(before.fallbacks, after.fallbacks)
        return row


def _more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {key: count - before.get(key, 0) for key, count in after.items() if count > before.get(key, 0)}


def same(first: Any, second: Any) -> bool:
    """Whether two results are equal: tensors element by element, everything inside of lists, tuples and dicts."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def close(first: Any, second: Any) -> bool:
    """As `same`, but floats may be 1e-3 apart: scores are sums of log-probabilities in float32, and an attention kernel
    may add in another order."""
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) <= 1e-3 * max(1.0, abs(first))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(close(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(close, first, second))
    return same(first, second)


def in_turn(
    client: str,
    what: str,
    plain: Callable[[Any], Any],
    paged: Callable[[Any], Any],
    items: Sequence[Any],
    counted: Any,
    equal: Callable[[Any, Any], bool] = same,
    note: str = "",
    unlike: Sequence[tuple[int, int]] = (),
    may_be_broken: bool = False,
) -> Row:
    """Do the same work with the unpatched and the patched model, item by item, in alternating order; report a row.

    Args:
        plain, paged: the work, given an item. Seeded with the item's number before each call.
        items: inputs, one a call. Each is given once, so what is found is what unlike calls have in common.
        counted: the patched model, or what PEFT has wrapped around it.
        equal: compares two results.
        note: for the row.
        unlike: pairs of items whose results on the unpatched model have to differ, or the row tests nothing.
        may_be_broken: the client is known not to work with every version; if it raises with both, that is no failure.

    Returns:
        The row. A call that raises is no reason to stop; it is a failure, also where the unpatched model raises.
    """
    counts = Counts(counted)
    seconds = {"plain": 0.0, "paged": 0.0}
    results: dict[str, list[Any]] = {"plain": [], "paged": []}
    for number, item in enumerate(items):
        order = [("plain", plain), ("paged", paged)]
        for name, work in order if number % 2 == 0 else order[::-1]:
            torch.manual_seed(number)
            start = time.perf_counter()
            results[name].append(_attempt(work, item))
            seconds[name] += time.perf_counter() - start
    row = Row(client, what, SAME, seconds["plain"], seconds["paged"], note=note)
    raised = {name: [result for result in results[name] if isinstance(result, Exception)] for name in results}
    pairs = list(zip(results["plain"], results["paged"], strict=True))
    if may_be_broken and all(type(a) is type(b) and isinstance(a, Exception) for a, b in pairs):
        row.same, row.note = NOT_HERE, f"unpatched, too, it raises {said(raised['plain'][0])}"
    elif raised["plain"] or raised["paged"]:
        row.same = DIFFERENT
        row.note = ", ".join(f"{name} raises {said(errors[0])}" for name, errors in raised.items() if errors)
    elif differing := [number for number, pair in enumerate(pairs) if not equal(*pair)]:
        row.same = DIFFERENT
        row.note = f"items {differing} of {len(items)} differ: " + " / ".join(
            f"{r!r:.150}" for r in pairs[differing[0]]
        )
    elif alike := [pair for pair in unlike if equal(*(results["plain"][item] for item in pair))]:
        row.same, row.note = DIFFERENT, f"tests nothing: items {alike} have equal results on the unpatched model"
    return report(counts.into(row))


def _attempt(work: Callable[[Any], Any], item: Any) -> Any:
    try:
        return work(item)
    except Exception as error:
        traceback.print_exc(limit=-4)
        return error


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:150]}"
