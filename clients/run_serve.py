"""`transformers serve`, in a process of its own, asked over HTTP on 127.0.0.1: turns, streams, a client that leaves."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from hf_paged.commands.measure import say
from hf_paged.commands.real_model import MODEL_NAME, load_real_model
from hf_paged.folders import cache_folder

from .shared import DIFFERENT, SAME, Row, header, report, version_of

NAME = version_of("transformers")
FASTER = 8.0  # the second turn's first piece, patched, has to come this many times as early
WORDS = 1100  # of the document that the conversation is about; about 1,400 tokens
NEW_TOKENS = 16
ERROR = "error: "  # begins what stands for an answer where the server gave none
FREED = ("at once", "by the garbage collector", "not at all")  # best first
STARTS, WAITS = 120.0, 180.0  # seconds until a server has to answer, and an answer has to come
QUESTIONS = ("What is the report about?", "Who wrote it?", "What was decided?")


@dataclass
class Seen:
    """What one server did: its answers by name, and seconds, until the first piece where a stream was asked for."""

    answers: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    stats: dict[str, Any] | None = None
    freed: str = ""


class Server:
    """A server in a process of its own; a context manager that stops it."""

    def __init__(self, mode: str, *options: str):
        self.folder = str(cache_folder() / MODEL_NAME)
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "clients.serving", mode, self.folder, str(port), *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"}, **pipes)

    def __enter__(self) -> "Server":
        end = time.monotonic() + STARTS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                httpx.get(f"{self.url}/health", timeout=1)
                return self
            except httpx.HTTPError:
                time.sleep(0.2)
        self.__exit__()
        raise RuntimeError("the server did not start")

    def __exit__(self, *error: Any) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def tell(self, line: str) -> Any:
        """Have it do something that HTTP has no way to ask for, and give back its answer."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        while reply := self.process.stdout.readline():
            if reply.startswith('{"answer"'):
                return json.loads(reply)["answer"]
        raise RuntimeError("the server has ended")

    def chat(self, messages: list[dict[str, str]], **options: Any) -> str:
        """One answer, as a whole; what the server said instead, if it did not answer."""
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=self._body(messages, options), timeout=WAITS)
        if reply.status_code != 200:
            return f"{ERROR}{reply.status_code} {reply.text[:200]}"
        return reply.json()["choices"][0]["message"]["content"]

    def stream(self, messages: list[dict[str, str]], leave: bool = False, **options: Any) -> tuple[str, float]:
        """One answer piece by piece, and the seconds until its first piece; leave after that if asked to."""
        text, first, start = "", 0.0, time.perf_counter()
        body = self._body(messages, options | {"stream": True})
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=WAITS) as reply:
            if reply.status_code != 200:
                return f"{ERROR}{reply.status_code}", time.perf_counter() - start
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line.removeprefix("data: "))
                if "error" in piece:
                    return f"{ERROR}{str(piece['error'])[:200]}", time.perf_counter() - start
                text += (piece.get("choices") or [{"delta": {}}])[0]["delta"].get("content") or ""
                if text and not first:
                    first = time.perf_counter() - start
                if text and leave:
                    break
        return text, first

    def _body(self, messages: list[dict[str, str]], options: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.folder,
            "messages": messages,
            "max_tokens": NEW_TOKENS,
            "temperature": 0.0,
        } | options


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def converse(mode: str, *options: str) -> Seen:
    """The same conversation with any server."""
    seen = Seen()
    with Server(mode, *options) as server:
        server.chat([{"role": "user", "content": "Hello"}], max_tokens=2)  # warm
        talk = [{"role": "user", "content": f"{header(WORDS)}\n\n{QUESTIONS[0]}"}]
        first = list(talk)
        for turn, question in enumerate((*QUESTIONS[1:], ""), 1):
            answer, seconds = server.stream(talk)
            seen.answers[f"turn {turn}"], seen.seconds[f"turn {turn}"] = answer, seconds
            say(f"{mode} {' '.join(options)} turn {turn}: first piece after {seconds:.2f} s: {answer!r:.100}")
            talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        start = time.perf_counter()
        seen.answers["whole"] = server.chat(first)
        seen.seconds["whole"] = time.perf_counter() - start
        server.stream(first, leave=True, max_tokens=100)
        start = time.perf_counter()
        seen.answers["after one who left"] = server.chat(first)
        seen.seconds["after one who left"] = time.perf_counter() - start
        seen.stats = server.tell("stats")
        seen.freed = server.tell("unload")
    return seen


def compare(what: str, options: tuple[str, ...]) -> None:
    try:
        plain, paged = converse("plain", *options), converse("patched", *options)
    except Exception as error:
        report(Row(NAME, what, DIFFERENT, note=f"{type(error).__name__}: {str(error)[:200]}"))
        return

    def row(title: str, *names: str) -> Row:
        pairs = {name: (plain.answers[name], paged.answers[name]) for name in names}
        alike = all(a == b and not a.startswith(ERROR) for a, b in pairs.values())
        seconds = [sum(seen.seconds[name] for name in names) for seen in (plain, paged)]
        unlike = [f"{name}: {a!r:.100} / {b!r:.100}" for name, (a, b) in pairs.items() if a != b]
        note = "; ".join(unlike) or ("" if alike else f"both say {pairs[names[0]][0]}")
        return Row(NAME, f"{what}, {title}", SAME if alike else DIFFERENT, *seconds, note=note)

    turns = row("3 streamed turns about a report, seconds to the first pieces", "turn 1", "turn 2", "turn 3")
    if paged.stats is not None:
        turns.found, turns.asked = paged.stats["prefix_hit_tokens"], paged.stats["prefix_query_tokens"]
        turns.aside, turns.dense = paged.stats["stepped_aside"], paged.stats["fallbacks"]
        turns.note = f"tokens found in all of the conversation. {turns.note}".rstrip()
    report(turns)
    second = row("second turn, seconds to its first piece", "turn 2")
    if not options:
        ratio = second.plain / second.paged
        second.note = f"{ratio:.1f} times as early; it has to be {FASTER:.0f}. {second.note}".rstrip()
        if ratio < FASTER:
            second.same = DIFFERENT
    report(second)
    report(row("an answer as a whole", "whole"))
    report(row("an answer after a client that left", "after one who left"))
    note = f"unpatched {plain.freed}, patched {paged.freed}"
    same = SAME if FREED.index(paged.freed) <= FREED.index(plain.freed) else DIFFERENT
    report(Row(NAME, f"{what}, model freed when unloaded", same, note=note))


def main() -> None:
    load_real_model(progress=say)
    compare("serve", ())
    compare("serve --continuous-batching", ("--continuous-batching",))


if __name__ == "__main__":
    main()
