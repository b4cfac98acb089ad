"""LangChain: chains over `HuggingFacePipeline`, one question at a time, as a batch, and as a stream."""

from typing import Any

from langchain_core.prompts import PromptTemplate
from langchain_huggingface import HuggingFacePipeline
from transformers import pipeline

from .shared import header, in_turn, real_pair, version_of

QUESTIONS = ("What is the report about?", "Who wrote it?", "Name one decision in it.")


def main() -> None:
    plain, paged, tokenizer = real_pair()
    prompt = PromptTemplate.from_template("{document}\n\nQuestion: {question}\nAnswer:")

    def chain(model: Any) -> Any:
        # The pipeline is given the options itself: LangChain passes on its own `pipeline_kwargs` only when it makes it.
        options = {"max_new_tokens": 16, "do_sample": False, "return_full_text": False}
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer, **options)
        return prompt | HuggingFacePipeline(pipeline=generate, batch_size=len(QUESTIONS))

    chains = [chain(plain), chain(paged)]

    def asked(words: int) -> list[dict[str, str]]:
        return [{"document": header(words), "question": question} for question in QUESTIONS]

    name = version_of("langchain-huggingface")
    for what, work, items in (
        ("invoke, 3 questions about one document", lambda chain: chain.invoke, asked(250)),
        ("batch of 3 questions", lambda chain: chain.batch, [asked(400)]),
        ("stream, 3 questions", lambda chain: lambda item: list(chain.stream(item)), asked(300)),
    ):
        in_turn(name, what, *map(work, chains), items, paged)


if __name__ == "__main__":
    main()
