"""`transformers serve` with a model that is patched as it is loaded, or not; told what to do by lines on its input.

    python -m clients.serving plain|patched FOLDER PORT [--continuous-batching]

Answers each line with one JSON line: `stats` with what the patched model has counted, `unload` with how the model was
freed when it was unloaded: at once, or only when a garbage collection found it.
"""

import gc
import json
import sys
import time
import weakref
from dataclasses import asdict
from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager

import hf_paged


class Freed:
    """How a model went, in the attribute `how`.

    The library collects garbage when it unloads, which would hide that a reference cycle kept the model.
    """

    def __init__(self, model: Any):
        self.how = "not at all"
        self._collecting = False
        gc.callbacks.append(self._collection)
        weakref.finalize(model, self._gone)

    def _collection(self, phase: str, info: dict[str, int]) -> None:
        self._collecting = phase == "start"

    def _gone(self) -> None:
        self.how = "by the garbage collector" if self._collecting else "at once"


def main(mode: str, folder: str, port: str, *options: str) -> None:
    load = ModelManager._load_model

    def load_patched(self: ModelManager, *args: Any, **keywords: Any) -> Any:
        return hf_paged.patch(load(self, *args, **keywords))

    if mode == "patched":
        ModelManager._load_model = load_patched
    server = Serve(
        force_model=folder,
        device="cpu",
        host="127.0.0.1",
        port=int(port),
        continuous_batching="--continuous-batching" in options,
        log_level="error",
        non_blocking=True,
    )
    loaded = server._model_manager.loaded_models
    freed = Freed(next(iter(loaded.values())).model)
    for line in sys.stdin:
        answer: Any = None
        if line.strip() == "stats" and mode == "patched":
            answer = asdict(next(iter(loaded.values())).model.paged_stats())
        elif line.strip() == "unload":
            next(iter(loaded.values())).delete_model()
            time.sleep(0.5)
            answer = freed.how
        print(json.dumps({"answer": answer}), flush=True)
    server.kill_server()


if __name__ == "__main__":
    main(*sys.argv[1:])
