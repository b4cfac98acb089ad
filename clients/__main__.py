"""Run clients one after another, each in a process of its own, and print one table.

    python -m clients [NAME ...]

The exit code is 0 if every client ended well and every row passed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hf_paged.commands.measure import opening
from hf_paged.commands.real_model import load_real_model

from .shared import DIFFERENT, ROWS_FILE, Row

CLIENTS = ("trl", "peft", "lm_eval", "whisper", "outlines", "langchain", "serve")
"""Modules `run_NAME` of this folder, in the order in which they run."""

LIMIT = 900.0  # seconds for one client; the longest takes a third of it


def main(names: list[str]) -> int:
    if unknown := sorted(set(names) - set(CLIENTS)):
        print(f"No client named {', '.join(unknown)}; there are: {' '.join(CLIENTS)}.")
        return 2
    facts = opening()
    load_real_model()  # converted here, once, if it was not yet
    start, rows = time.monotonic(), []
    for name in names or CLIENTS:
        print(f"\n== {name}", flush=True)
        rows += run(name)
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"\n{table(rows)}")
    failed = [row for row in rows if not row.passed]
    minutes = (time.monotonic() - start) / 60
    print(f"\n{len(rows) - len(failed)} passed, {len(failed)} failed, in {minutes:.1f} minutes")
    return 1 if failed else 0


def run(name: str) -> list[Row]:
    """Run one client; its rows, and one more if its process did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        environment = os.environ | {ROWS_FILE: str(file), "PYTHONWARNINGS": "ignore"}
        try:
            code = subprocess.run(
                [sys.executable, "-m", f"clients.run_{name}"], env=environment, timeout=LIMIT
            ).returncode
            end = f"its process ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            end = f"stopped after {LIMIT:.0f} s"
        rows = [Row(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    if end or not rows:
        rows.append(Row(name, "the whole client", DIFFERENT, note=end or "it has reported nothing"))
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, and below it what stepped aside or failed, in words."""
    lines = [
        "| client | what | same | unpatched | patched | tokens found | stepped aside |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    words = []
    for row in rows:
        seconds = ["" if value is None else f"{value:.2f} s" for value in (row.plain, row.paged)]
        found = "" if row.asked is None else f"{row.found:,} of {row.asked:,}"
        aside = ", ".join(f"`{code}` {count}" for code, count in row.aside.items())
        mark = ""
        if row.note or row.dense:
            mark = f" [{len(words) + 1}]"
            counted = "; ".join(f"{reason} ({count})" for reason, count in row.dense.items())
            words.append(f"[{len(words) + 1}] " + ". ".join(part for part in (row.note, counted) if part))
        lines.append(f"| {row.client} | {row.what}{mark} | {row.same} | {' | '.join(seconds)} | {found} | {aside} |")
    return "\n".join([*lines, "", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
