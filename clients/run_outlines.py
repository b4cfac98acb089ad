"""outlines and xgrammar: answers that fit a JSON schema or a regular expression, by logits processors of theirs."""

import json
from typing import Literal

import outlines
import xgrammar
from pydantic import BaseModel
from xgrammar.contrib.hf import LogitsProcessor

from .shared import header, in_turn, real_pair, version_of

QUESTIONS = ("Describe it.", "Describe its author.", "Describe what is decided in it.")


class Summary(BaseModel):
    kind: Literal["report", "letter", "story"]
    pages: int
    public: bool


def main() -> None:
    plain, paged, tokenizer = real_pair()
    name = version_of("outlines")
    prompts = [f"{header(250)}\n\n{question} Answer as JSON.\n" for question in QUESTIONS]
    for what, output, items in (
        ("JSON schema, 3 questions about one document", Summary, prompts),
        ("JSON schema, a batch of 3", Summary, [[f"{header(300)}\n\n{question}\n" for question in QUESTIONS]]),
    ):
        generators = [outlines.Generator(outlines.from_transformers(m, tokenizer), output) for m in (plain, paged)]

        def work(generator):
            def call(item):
                answer = generator.batch if isinstance(item, list) else generator
                return answer(item, max_new_tokens=32, do_sample=False)

            return call

        for generator in generators:
            work(generator)("Hello")  # compiles what writes the mask
        in_turn(name, what, *map(work, generators), items, paged)

    size = plain.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(Summary.model_json_schema()))

    def constrained(model):
        def call(prompt):
            inputs = tokenizer(prompt, return_tensors="pt", padding=True)
            processors = [LogitsProcessor(grammar)]  # it keeps state, so each call has one of its own
            return model.generate(**inputs, max_new_tokens=32, do_sample=False, logits_processor=processors)

        return call

    others = [f"{header(350)}\n\n{question} Answer as JSON.\n" for question in QUESTIONS]
    what = "JSON schema, 3 questions and a batch of them"
    in_turn(version_of("xgrammar"), what, constrained(plain), constrained(paged), [*others, others], paged)


if __name__ == "__main__":
    main()
