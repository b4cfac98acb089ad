"""LangChain: chains over `HuggingFacePipeline`, one question at a time, as a batch, and as a stream."""

from langchain_core.prompts import PromptTemplate
from langchain_huggingface import HuggingFacePipeline
from transformers import pipeline

from .shared import header, in_turn, real_pair, version_of

QUESTIONS = (
    "What is the report about?",
    "Who wrote it?",
    "Name one decision in it.",
    "Is anything said about money?",
)


def main() -> None:
    plain, paged, tokenizer = real_pair()
    prompt = PromptTemplate.from_template("{document}\n\nQuestion: {question}\nAnswer:")

    def chain(model):
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer, return_full_text=False)
        options = {"max_new_tokens": 16, "do_sample": False}
        return prompt | HuggingFacePipeline(pipeline=generate, pipeline_kwargs=options, batch_size=4)

    chains = [chain(plain), chain(paged)]
    asked = [{"document": header(250), "question": question} for question in QUESTIONS]
    others = [{"document": header(400), "question": question} for question in QUESTIONS]
    streamed = [{"document": header(300), "question": question} for question in QUESTIONS]
    name = version_of("langchain-huggingface")
    for what, work, items in (
        ("invoke, 4 questions about one document", lambda chain: chain.invoke, asked),
        ("batch of 4 questions", lambda chain: chain.batch, [others]),
        ("stream, 4 questions", lambda chain: lambda item: list(chain.stream(item)), streamed),
    ):
        in_turn(name, what, *map(work, chains), items, paged)


if __name__ == "__main__":
    main()
