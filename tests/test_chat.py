"""`Chat`: the full history each turn, and only its new tokens computed."""

import pytest
import torch
from models import Computed, build, pair, run, tokenizer_of_words

import hf_paged


def row(length, seed):
    return torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(seed))


def shown(ids):
    """Without a mask the library takes every pad id for a pad, also one that was generated."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_turn_pays_for_its_new_tokens(family, prefix_caching):
    plain, paged = pair(family, block_size=4, prefix_caching=prefix_caching)
    chat = hf_paged.Chat(paged, max_new_tokens=5)
    count = Computed(paged)
    history = row(20, 1)
    for turn in range(4):
        expected = run(plain, shown(history), max_new_tokens=5)
        assert torch.equal(expected, chat.generate(history))
        if prefix_caching:
            assert count.since() == (20 if turn == 0 else 7) + 4
        history = torch.cat([expected, row(6, 10 + turn)], 1)
    chat.cache.check()
    chat.close()
    assert paged.paged_stats().used_blocks == 0


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_an_edited_history(family):
    plain, paged = pair(family, block_size=4)
    chat = hf_paged.Chat(paged, max_new_tokens=4)
    history = row(30, 1)
    for turn, cut in enumerate((30, 12, 12, 3, 1, 25)):
        history = torch.cat([history[:, :cut], row(4, 20 + turn)], 1)
        assert torch.equal(run(plain, shown(history), max_new_tokens=4), chat.generate(history))
        paged.paged_pool.check()
        history = torch.cat([history, row(20, 40 + turn)], 1)
    # Asked the same again: everything is there, one token is computed.
    for _ in range(2):
        assert torch.equal(run(plain, shown(history), max_new_tokens=4), chat.generate(history))


def test_beams_and_samples_use_the_index():
    plain, paged = pair("llama", block_size=4)
    chat = hf_paged.Chat(paged, max_new_tokens=4)
    history = row(20, 1)
    chat.generate(history)
    hits = paged.paged_stats().prefix_hit_tokens
    expected = run(plain, shown(history), max_new_tokens=4, num_beams=3)
    assert torch.equal(expected, chat.generate(history, num_beams=3))
    assert paged.paged_stats().prefix_hit_tokens == hits + 19


def test_weights_that_changed_between_turns():
    plain, paged = pair("llama", block_size=4)
    chat = hf_paged.Chat(paged, max_new_tokens=4)
    history = row(20, 1)
    chat.generate(history)
    other = build("llama", seed=5).state_dict()
    plain.load_state_dict(other), paged.load_state_dict(other)
    assert torch.equal(run(plain, shown(history), max_new_tokens=4), chat.generate(history))


def test_an_interrupted_turn_can_be_repeated():
    plain, paged = pair("llama", block_size=4)
    chat = hf_paged.Chat(paged, max_new_tokens=6)
    history = row(20, 1)
    chat.generate(history)

    def interrupt(ids, scores, **kwargs):
        if ids.shape[1] > 24:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    history = torch.cat([history, row(2, 2)], 1)
    with pytest.raises(KeyboardInterrupt):
        chat.generate(history, stopping_criteria=[interrupt])
    assert torch.equal(run(plain, shown(history), max_new_tokens=6), chat.generate(history))
    paged.paged_pool.check()


def test_messages():
    tokenizer = tokenizer_of_words()
    tokenizer.chat_template = (
        "{% for message in messages %}t7 {{ message['content'] }} t8 {% endfor %}"
        "{% if add_generation_prompt %}t9{% endif %}"
    )
    plain, paged = pair("llama", block_size=4)
    chat = hf_paged.Chat(paged, tokenizer, system="t11 t12", max_new_tokens=5)
    messages = [{"role": "system", "content": "t11 t12"}]
    for text in ("t20 t21 t22", "t30 t31"):
        messages.append({"role": "user", "content": text})
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = rendered["input_ids"]
        expected = run(plain, shown(ids), max_new_tokens=5)
        answer = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
        assert chat.send(text) == answer
        messages.append({"role": "assistant", "content": answer})
        assert chat.messages == messages
    assert paged.paged_stats().prefix_hit_tokens > 0 or chat.cache.get_seq_length() > 0


def test_what_it_refuses():
    _, paged = pair("llama")
    chat = hf_paged.Chat(paged)
    with pytest.raises(ValueError, match="one row"):
        chat.generate(torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one token"):
        chat.generate(torch.ones(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="chat template"):
        chat.send("hello")
    assert chat.messages == []
