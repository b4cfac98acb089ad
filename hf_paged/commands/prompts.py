"""Real prompts: one long document, instructions of unlike lengths, and left-padded batches.

The lengths a benchmark asks for are met exactly, in tokens. The texts are this project's own.
"""

import random
from collections.abc import Sequence
from importlib import resources

import torch
from transformers import PreTrainedTokenizerBase

from .instructions import ADDITIONS, AUDIENCES, COUNTS, PASSAGE_TASKS, TASKS, TOPICS

LONG_DOCUMENT: str = resources.files(__package__).joinpath("long_document.txt").read_text(encoding="utf-8").strip()
"""A report of about 2,400 words; 2,900 tokens of SmolLM2. No passage occurs twice."""

QUESTION = "Summarise the report above in five sentences, and name the decision that mattered most."

INSTRUCTIONS: tuple[str, ...] = (
    "Name three prime numbers.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Write a haiku about a lighthouse in fog.",
    "What is the difference between a comet and an asteroid?",
    "List five things that I should check before I buy a used bicycle.",
    "Explain to a child of seven why the moon seems to change its shape.",
    "Turn this sentence into the passive voice: The gardener planted two rows of onions yesterday.",
    "Give me a recipe for lentil soup that needs one pot and less than forty minutes.",
    "Compare renting a flat with buying one for somebody who expects to move to another city within about four years.",
    "Suggest a name and a one-line slogan for a small bakery that only sells bread made with rye flour.",
    "Write a polite email to a neighbour whose dog barks at night. Keep it short, friendly and free of accusations, "
    "and offer to meet.",
    "My train leaves at 9:42 and the walk to the station takes 17 minutes. When must I leave home at the latest?",
    "Sort these words by alphabet and then say which one does not belong with the others: pear, hammer, apple, "
    "cherry, plum, apricot, quince.",
    "A rectangular garden is 12 metres long and 7 metres wide, and a path one metre wide runs all around the "
    "outside. What is the area of the path?",
    "Write a Python function that takes a list of words and returns a dictionary from each first letter to the "
    "number of words that start with it. Add a docstring and an example.",
    "Tell a short story in which a clockmaker, a thief and a parrot are locked in a museum overnight. The parrot "
    "must be the one that solves the problem, and nobody may be hurt.",
    "Find the mistake in this argument and explain it in two sentences: All birds lay eggs. The platypus lays eggs. "
    "Therefore the platypus is a bird, whatever zoologists may say about it.",
    "Summarise in one sentence: The council met for three hours on Tuesday. Most of the time went on parking. Near "
    "the end, with four members already gone, it voted to close the swimming pool until a new boiler can be found.",
    "I have eggs, spinach, half a lemon, stale bread, an onion and some hard cheese. Plan a dinner for two from "
    "these alone, tell me in which order to do things so that everything is warm together, and say what I could make "
    "from what is left.",
    "You are the guide on a walking tour of an old harbour. Describe, in about one hundred words, what the visitors "
    "see when they come round the corner of the customs house at low tide: the boats, the mud, the birds, the smell, "
    "and the one thing that nobody expects to find there.",
    "Rewrite the following notice so that it is clear, kind and half as long: Residents are hereby reminded that, "
    "notwithstanding previous communications, the depositing of bulky items in the vicinity of the refuse area is "
    "not permitted under any circumstances whatsoever, and that offenders will be charged the full cost of removal "
    "together with an administrative fee, without further notice.",
    "A shop sells notebooks at 3.20 each, with a tenth off when you buy at least five, and pens at 1.50, with every "
    "fourth pen free. Mara needs seven notebooks and nine pens, and has a voucher worth 5.00 that only works on "
    "totals above 30.00. Work out step by step what she has to pay, and then tell her whether one more notebook "
    "would make the whole purchase cheaper or dearer.",
    "Act as an interviewer for a magazine about gardens. Prepare six questions for a woman who has spent twenty "
    "years turning a disused railway yard into a public orchard. The questions should build on one another, avoid "
    "anything that can be answered by yes or no, touch on failure as well as success, and end with one that looks "
    "ahead to the people who will pick the fruit when she is gone. After the questions, add a short note to the "
    "photographer that says which three pictures the article cannot do without, and at what time of day each of them "
    "should be taken.",
)
"""24 instructions without a chat template, shortest first: 5 to 115 tokens of SmolLM2, no two of one length."""


def long_prompt(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> torch.Tensor:
    """A chat prompt of exactly `num_tokens` tokens: the start of the document, then a question about it.

    Args:
        tokenizer: has a chat template.
        num_tokens: length of the whole prompt in tokens, template and question included.

    Returns:
        Token ids `[1, num_tokens]`, int64. Without padding, so no mask is needed.

    Raises:
        ValueError: `num_tokens` leaves no room for the document, or is more than the document can fill.
    """
    place = "[[document]]"
    messages = [{"role": "user", "content": f"{place}\n\n{QUESTION}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, after = text.split(place)
    head, tail, document = (_encode(tokenizer, part) for part in (before, after, LONG_DOCUMENT))
    room = num_tokens - len(head) - len(tail)
    if not 1 <= room <= len(document):
        lowest = len(head) + len(tail) + 1
        raise ValueError(
            f"num_tokens is {num_tokens}; this tokenizer makes prompts of {lowest} to {lowest - 1 + len(document)} "
            "tokens from the document and the question."
        )
    return torch.tensor([head + document[:room] + tail])


def ragged_prompts(tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A left-padded batch of passages of the document whose lengths are exactly those asked for.

    Each row starts at a place of its own and with a token of its own, so that no two rows share a prefix. A row that
    reaches the end of the document goes on at its beginning.

    Args:
        tokenizer: has a padding token.
        lengths: real tokens of each row, in any order.

    Returns:
        Token ids `[len(lengths), max(lengths)]`, int64, and their attention mask of the same shape, int64: 0 on the
        left where a row is padded, 1 on its real tokens.

    Raises:
        ValueError: a length is not between 1 and the tokens of the document, there are more rows than the document has
            different tokens to start with, or the tokenizer has no padding token.
    """
    document = _encode(tokenizer, LONG_DOCUMENT)
    if not lengths or not all(1 <= length <= len(document) for length in lengths):
        raise ValueError(f"lengths must be between 1 and {len(document)} tokens, one a row; got {list(lengths)}.")
    if len(lengths) > len(set(document)):
        raise ValueError(f"{len(lengths)} rows asked for; at most {len(set(document))} can start with unlike tokens.")
    if tokenizer.pad_token_id is None:
        raise ValueError("The tokenizer has no padding token; set tokenizer.pad_token.")

    starts = _starts(document, len(lengths))
    rows = [_passage(document, start, length) for start, length in zip(starts, lengths, strict=True)]
    return left_padded(rows, tokenizer.pad_token_id)


def left_padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A left-padded batch of token ids.

    Returns:
        Token ids `[len(rows), longest row]`, int64, and their attention mask of the same shape, int64.
    """
    input_ids = torch.full((len(rows), max(len(row) for row in rows)), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        input_ids[index, -len(row) :] = torch.tensor(row)
        attention_mask[index, -len(row) :] = 1
    return input_ids, attention_mask


def instruction_prompts(tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Instructions of exactly the lengths asked for, without a chat template, no two of them equal.

    A length that an instruction made from the word lists has is met by a whole instruction. A greater one is met by a
    task and as much of a passage of the long document as fits, each from a place of its own; any other by an
    instruction cut short.

    Args:
        tokenizer: turns the texts into tokens.
        lengths: tokens of each prompt, in any order.
        seed: of the order in which words are combined.

    Returns:
        Token ids, one list per length, in the order of `lengths`.

    Raises:
        ValueError: a length is not between 1 and the tokens of the document, or there are too few unlike prompts of it.
    """
    document = _encode(tokenizer, LONG_DOCUMENT)
    if not all(1 <= length <= len(document) for length in lengths):
        raise ValueError(f"lengths must be between 1 and {len(document)} tokens; got {list(lengths)}.")
    texts = _instructions(random.Random(seed))
    encoded = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids]
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for ids in encoded:
        by_length.setdefault(len(ids), []).append(ids)
    tasks = [_encode(tokenizer, f"{task}\n\n") for task in PASSAGE_TASKS]
    taken: set[tuple[int, ...]] = set()
    prompts = []
    for index, length in enumerate(lengths):
        candidates: list[tuple[int, ...]] = by_length.get(length, [])
        prompt = next((ids for ids in candidates if ids not in taken), None)
        task = tasks[index % len(tasks)]
        if prompt is None and length >= 2 * len(task):
            start = index * len(document) // len(lengths)
            prompt = (*task, *_passage(document, start, length - len(task)))
        if prompt is None or prompt in taken:
            cut = (ids[:length] for ids in encoded if len(ids) > length)
            prompt = next((ids for ids in cut if ids not in taken), None)
        if prompt is None:
            raise ValueError(f"there are too few instructions for that many unlike prompts of {length} tokens.")
        taken.add(prompt)
        prompts.append(list(prompt))
    return prompts


def _instructions(generator: random.Random, count: int = 4000) -> list[str]:
    """`count` instructions from the word lists, no two equal, the same for a generator of the same seed."""
    texts: dict[str, None] = {}
    while len(texts) < count:
        topic, other = generator.sample(TOPICS, 2)
        task = generator.choice(TASKS) + "".join(generator.sample(ADDITIONS, generator.randrange(3)))
        words = {"audience": generator.choice(AUDIENCES), "count": generator.choice(COUNTS)}
        texts[task.format(topic=topic, other=other, **words)] = None
    return list(texts)


def _passage(document: list[int], start: int, length: int) -> list[int]:
    """`length` tokens of the document from `start`; its beginning follows its end."""
    return (document[start:] + document[:start])[:length]


def _starts(document: list[int], num_rows: int) -> list[int]:
    """`num_rows` places in the document, about evenly spread, with a different token at each."""
    starts: list[int] = []
    taken: set[int] = set()
    for row in range(num_rows):
        start = row * len(document) // num_rows
        while document[start] in taken:
            start = (start + 1) % len(document)
        starts.append(start)
        taken.add(document[start])
    return starts


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a part of a prompt; special tokens come from the template alone."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)
