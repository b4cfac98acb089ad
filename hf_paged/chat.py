"""A conversation that pays for its new tokens only."""

import copy
from typing import Any

import torch

from . import compat
from .blocks import common_prefix
from .cache import PagedCache
from .generation import salts
from .patching import patch, pool_of


class Chat:
    """A conversation with a model. Each turn passes the whole history; what is in the cache already is not computed.

    ```python
    chat = hf_paged.Chat(model, tokenizer, max_new_tokens=200)
    print(chat.send("Name three rivers."))
    print(chat.send("Which of them is the longest?"))
    ```

    The history may be edited between turns (`chat.messages`), and a chat template may render it otherwise than before:
    the cache is cut back to what the two have in common. The blocks of a conversation are its own until `close()`, or
    until it is collected; then they stay findable for others as long as the pool has no need of them.

    Args:
        model: a Transformers model, patched if it is not yet (`hf_paged.patch(model)`).
        tokenizer: its tokenizer, for `send`; None: only `generate` can be used.
        system: a system message to begin with.
        prefix_salt: the namespace in which its prefixes are found and stored, see `hf_paged.prefix_salt`; None: that of
            the call or of the thread.
        generate_options: passed on to every `model.generate`.

    Raises:
        TypeError: if `prefix_salt` is not a string.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        system: str | None = None,
        prefix_salt: str | None = None,
        **generate_options: Any,
    ):
        self.prefix_salt = salts.checked(prefix_salt)
        self.model = patch(model)
        self.tokenizer = tokenizer
        self.options = generate_options
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.cache: PagedCache | None = None

    def send(self, text: str, **options: Any) -> str:
        """Add a message of the user, generate the answer, add it and return it.

        Args:
            text: the message.
            options: for this turn, over the conversation's own.

        Raises:
            ValueError: without a tokenizer that has a chat template.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(
                "Chat.send needs a tokenizer with a chat template; pass token ids to Chat.generate instead"
            )
        messages = [*copy.deepcopy(self.messages), {"role": "user", "content": text}]
        inputs = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = inputs["input_ids"].to(self.model.device)
        output = self.generate(ids, **options)
        sequences = getattr(output, "sequences", output)
        answer = self.tokenizer.decode(sequences[0, ids.shape[1] :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """`model.generate` behind a whole history.

        Args:
            input_ids: the history, the new tokens included, [1, tokens] int64, no pads.
            options: for this turn, over the conversation's own.

        Returns:
            What `model.generate` returns.

        Raises:
            ValueError: for a batch.
        """
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            raise ValueError(f"a conversation is one row of at least one token, got {tuple(input_ids.shape)}")
        options = {**self.options, **options}
        options.setdefault("attention_mask", torch.ones_like(input_ids))
        if self.prefix_salt is not None:
            options.setdefault("prefix_salt", self.prefix_salt)
        if any((options.get(name) or 1) > 1 for name in ("num_beams", "num_return_sequences")):
            return self.model.generate(input_ids, **options)  # the cache would become many rows; the index serves them
        cache = self._cut_to(input_ids)
        try:
            return self.model.generate(input_ids, **{compat.CACHE_ARGUMENT: cache}, **options)
        except BaseException:
            self.close()
            raise

    def _cut_to(self, input_ids: torch.Tensor) -> PagedCache:
        """The conversation's cache, with nothing in it but what the new history begins with."""
        pool = pool_of(self.model)
        cache = self.cache
        if cache is None or cache.pool is not pool:
            self.cache = cache = PagedCache(pool.model_config, pool=pool)
            cache.reset_if_stale = True
        known = cache.state.known
        columns = cache.get_seq_length()
        if columns:
            if known.identity is not None and known.columns == columns and known.real is None:
                same = min(common_prefix(known.row(0), input_ids[0].tolist()), input_ids.shape[1] - 1)
                try:
                    cache.crop(same - columns)
                except RuntimeError:  # a sliding window has let go of what would come back
                    cache.reset()
            else:
                cache.reset()
        return cache

    def close(self) -> None:
        """Give the conversation's blocks back; the next turn begins anew."""
        if self.cache is not None:
            self.cache.reset()
        self.cache = None
