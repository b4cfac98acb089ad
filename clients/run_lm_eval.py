"""lm-evaluation-harness: `generate_until` and multiple choice behind a few-shot header, one row and six at a time."""

import json
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from .shared import close, in_turn, real_pair, version_of

SHOTS = {
    "France": "Paris",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Cuba": "Havana",
    "Iran": "Tehran",
    "Chile": "Santiago",
}
ASKED = {
    "Germany": "Berlin",
    "Portugal": "Lisbon",
    "Sweden": "Stockholm",
    "Poland": "Warsaw",
    "Ireland": "Dublin",
    "Denmark": "Copenhagen",
}
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
GENERATE = """
task: hf_paged_generate
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 16
  do_sample: false
metric_list:
  - metric: exact_match
"""
CHOOSE = """
task: hf_paged_choose
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
"""


def documents() -> list[dict]:
    """Questions behind one header of about 250 tokens, each with its answer and two wrong ones."""
    shots = "\n\n".join(f"Q: What is the capital of {a}?\nA: The capital of {a} is {b}." for a, b in SHOTS.items())
    head, capitals = f"Answer the question with one short sentence.\n\n{shots}", list(ASKED.values())
    return [
        {
            "question": f"{head}\n\nQ: What is the capital of {land}?\nA:",
            "answer": f" The capital of {land} is {capital}.",
            "choices": [f" {capitals[(number + step) % len(capitals)]}" for step in (0, 2, 4)],
            "gold": 0,
        }
        for number, (land, capital) in enumerate(ASKED.items())
    ]


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    data = folder / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, documents())))
    for name, task in {"generate": GENERATE, "choose": CHOOSE}.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(data=data) + task)
    plain, paged, tokenizer = real_pair()

    def evaluate(model, task: str, batch: int):
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, device="cpu")
        tasks = TaskManager(include_path=str(folder), include_defaults=False)
        result = lm_eval.simple_evaluate(
            model=harness, tasks=[task], task_manager=tasks, bootstrap_iters=0, log_samples=True
        )
        samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
        return result["results"][task], [sample["resps"] for sample in samples]

    for task, what in {"hf_paged_generate": "generate_until", "hf_paged_choose": "multiple choice"}.items():
        for batch in (1, len(ASKED)):
            in_turn(
                version_of("lm_eval"),
                f"{what}, {len(ASKED)} questions, batches of {batch}",
                lambda _, task=task, batch=batch: evaluate(plain, task, batch),
                lambda _, task=task, batch=batch: evaluate(paged, task, batch),
                [None],
                paged,
                close,
            )


if __name__ == "__main__":
    main()
