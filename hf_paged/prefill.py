"""The prefill of one generate() call: no token is computed that is there already, none twice, and no pad.

What `patching` calls in place of the library's `_prefill`, for a cache that is still empty:

1. equal rows (the copies of a prompt for beams and samples, or equal prompts) are computed once;
2. what the prefix index has of a row is shared;
3. what is left goes, where the model allows it, as one *packed* forward `[1, total tokens]` with a position per token:
   no pads. A long prefix that all rows have in common goes first, as one row. Where the model does not allow it the
   library's own prefill runs, on the columns that are not there for all rows.
"""

import copy
import hashlib
import secrets
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from . import compat, implementations, latent
from .blocks import common_prefix
from .cache import PagedCache
from .generation.call import Call
from .generation.identity import Begun
from .generation.soundness import Shortcut
from .generation.transfer import on_host

# Tokens that all rows must have in common before they are computed ahead of the rest.
LONG_PREFIX = 32
# Model types whose forward takes its positions from `position_ids` alone, or has none but what attention adds (ALiBi),
# so that rows can be packed. The tests compare each with its unpacked prefill.
PACKED_TYPES = frozenset(
    (
        "apertus", "arcee", "biogpt", "bitnet", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5",
        "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode",
        "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral",
        "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe",
        "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
    )
)  # fmt: skip
# Model types that count positions anew in each forward, pads in the cache included.
_CUT_MATTERS = frozenset(("kosmos-2", "kosmos-2.5"))
# Composite models (images, sound) around one of these whose own forward leaves positions and masks to the text model.
# The family sweep compares each (`python -m hf_paged support`).
PACKED_COMPOSITES = frozenset(
    (
        "audioflamingo3", "aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "glmasr", "got_ocr2",
        "granite_speech", "granite_speech_plus", "idefics2", "idefics3", "internvl", "lighton_ocr", "llava",
        "llava_next", "llava_next_video", "llava_onevision", "mistral3", "musicflamingo", "omniasr", "ovis2",
        "qianfan_ocr", "qwen3_asr", "gemma3", "smolvlm", "video_llava", "vipllava", "voxtral",
    )
)  # fmt: skip
# Models whose prompts with images are computed once for their beams or samples: what a row gives depends on it and its
# images alone, and nothing of them is kept in the model. The tests compare each.
IMAGES_ONCE = frozenset(("gemma3", "llava"))
# Keywords of a prefill with images; `mm_encoder_outputs` are what the vision tower has made of them.
_IMAGE_KEYWORDS = frozenset(("mm_encoder_outputs", "pixel_values", "token_type_ids"))
# Keywords of a prefill that say nothing of the content but ids and mask. (Tokenizers are for the criteria.)
KNOWN_KEYWORDS = frozenset(
    (
        "assistant_tokenizer", "attention_mask", "cache", "logits_to_keep", "output_attentions", "output_hidden_states",
        "past_key_values", "position_ids", "return_dict", "tokenizer", "use_cache",
    )
)  # fmt: skip

# Keys the fingerprints of embeddings, so that nobody can look for two that have the same one.
_fingerprint_key = secrets.token_bytes(32)


def fingerprints(embeds: torch.Tensor) -> torch.Tensor:
    """Numbers that stand for the vectors of `inputs_embeds` as ids stand for tokens: equal bits, equal number.

    BLAKE2b of 64 bits under a key of this process. Two unlike vectors get one number with probability 2**-64.

    Args:
        embeds: [rows, columns, hidden size].

    Returns:
        [rows, columns] int64 on the CPU.
    """
    rows, columns = embeds.shape[:2]
    raw = embeds.detach().cpu().contiguous().view(torch.uint8).numpy()
    numbers = [
        int.from_bytes(hashlib.blake2b(vector, digest_size=8, key=_fingerprint_key).digest(), "little", signed=True)
        for row in raw
        for vector in row
    ]
    return torch.tensor(numbers, dtype=torch.int64).view(rows, columns)


def unknown_keywords(model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], cache: PagedCache) -> list[str]:
    """Keywords of a prefill of which it is not known what they mean for each row."""
    understood = KNOWN_KEYWORDS
    if input_ids.shape[1] == 0 and not cache.get_seq_length() and packs(model):
        # Embeddings are the prompt where there are no ids; going on behind a hit is a forward of our own.
        understood = understood | {"inputs_embeds"}
    return sorted(
        name
        for name, entry in model_kwargs.items()
        if name not in understood and entry is not None and not (isinstance(entry, dict) and not entry)
    )


def why_not_shared(
    model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], cache: PagedCache
) -> str | None:
    """Why the rows of a prefill cannot be computed once for several, or continued from a prefix; None: they can."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models start from one decoder token"
    if asks_hidden_states(generation_config, model_kwargs):
        return "hidden states are asked for"
    if hasattr(model, "_reorder_cache"):
        return "the model reorders the cache itself"
    if model.config.model_type in _CUT_MATTERS:
        return "positions depend on how a prompt with pads is cut"
    if any(hasattr(module, "rope_deltas") for module in (model, getattr(model, "model", None))):
        return "the model keeps each row's position of its own"
    if unknown := unknown_keywords(model, input_ids, model_kwargs, cache):
        return f"the model is given {', '.join(unknown)}"
    embeds = model_kwargs.get("inputs_embeds")
    columns = input_ids.shape[1] if input_ids.shape[1] or embeds is None else embeds.shape[1]
    if columns == 0:
        return "the prompt is empty"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not cache.get_seq_length() and mask.shape != (input_ids.shape[0], columns):
        return "the attention mask has another shape than the ids"
    if any(not cache.can_move_rows(layer) for layer in cache.other_layers):
        return "some layers keep a state of their own"
    limit = compat.rope_limit(model.config)
    if limit is not None and columns > limit:
        return "the rotary embedding depends on the prompt's length"
    return None


def give_rows(model: Any, outputs: Any, rows: list[int]) -> None:
    """Give each row of a call what a forward has put out for the row it equals.

    Of a model with a decoding loop of its own that is everything, as nobody knows what it reads (Moshi and Pocket TTS
    take the last hidden state); of others the logits.

    Args:
        outputs: of a forward over the distinct rows; changed in place.
        rows: for each row of the call the distinct one it equals.
    """
    computed = outputs.logits.shape[0]

    def of(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(of(part) for part in entry)
        if isinstance(entry, torch.Tensor) and entry.ndim and entry.shape[0] == computed:
            return _rows_of(entry, rows)
        return entry

    methods = ("_sample", "_update_model_kwargs_for_generation")
    own = any(getattr(type(model), name) is not getattr(compat.GenerationMixin, name) for name in methods)
    for name in list(outputs) if own and isinstance(outputs, dict) else ["logits"]:
        setattr(outputs, name, of(getattr(outputs, name)))


def asks_hidden_states(generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether a prefill's hidden states are wanted, by the caller or by a decoding loop of the model's own, which asks
    for them as a keyword and reads them for each row (CSM)."""
    return bool(generation_config.output_hidden_states or model_kwargs.get("output_hidden_states"))


def packs(model: Any) -> bool:
    """Whether rows can be packed into one forward of this model: it takes positions from `position_ids` alone."""
    text = model.config.get_text_config(decoder=True)
    if text is not model.config and model.config.model_type not in PACKED_COMPOSITES:
        return False
    if text.model_type not in PACKED_TYPES or text._attn_implementation != implementations.NAME:
        return False
    return compat.latent_dims(text) is None or latent.all_fit(model)


class Unrepeated:
    """What generate() was given, before it repeated each row for beams or samples.

    Attributes:
        input_ids: [rows, columns].
        keywords: the model's keywords.
    """

    def __init__(self, input_ids: torch.Tensor, keywords: dict[str, Any]):
        self.input_ids, self.keywords = input_ids, dict(keywords)
        encoded = keywords.get("mm_encoder_outputs")
        if isinstance(encoded, dict):  # the library repeats what is inside in place
            self.keywords["mm_encoder_outputs"] = {name: copy.copy(entry) for name, entry in encoded.items()}

    def for_images(
        self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], copies: int
    ) -> dict[str, Any] | None:
        """The keywords of a prefill with images over the rows before they were repeated; None: that would not be the
        same.

        Args:
            input_ids, model_kwargs: of the repeated rows, as generate() prepared them.
            copies: how often each row was repeated.
        """
        rows = self.input_ids.shape[0]
        if not torch.equal(input_ids, self.input_ids.repeat_interleave(copies, 0)):
            return None
        keywords = dict(model_kwargs)
        for name, entry in model_kwargs.items():
            own = self.keywords.get(name)
            if name == "mm_encoder_outputs" and entry:
                keywords[name] = own
            elif isinstance(entry, torch.Tensor) and entry.ndim:
                if own is None or len(own) != rows or not torch.equal(entry, own.repeat_interleave(copies, 0)):
                    return None
                keywords[name] = own
        if keywords.get("pixel_values") is not None:
            # Images were repeated one by one, which is right only for one in each row.
            config = model.config
            token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
            counts = (self.input_ids == (-1 if token is None else token)).sum(1)
            if not bool((counts == counts[0]).all()) or not counts[0]:
                return None
        return keywords


def why_images_are_not_once(
    model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], cache: PagedCache
) -> str | None:
    """Why a prompt with images cannot be computed once for its beams or samples, beside the images."""
    if model.config.model_type not in IMAGES_ONCE or cache.get_seq_length():
        return "images"
    others = {name: entry for name, entry in model_kwargs.items() if name not in _IMAGE_KEYWORDS}
    return why_not_shared(model, input_ids, generation_config, others, cache)


def of_rows(model_kwargs: dict[str, Any], rows: int, chosen: list[int] | slice) -> dict[str, Any]:
    """The keywords of a call over `rows` rows for some of them."""

    def of(name: str, entry: Any) -> Any:
        if not isinstance(entry, torch.Tensor) or not entry.ndim:
            return entry
        dim = 1 if name == "position_ids" and entry.ndim == 3 else 0  # [3 or 4 kinds, rows, columns]
        if not dim and entry.shape[0] != rows:
            return entry
        if isinstance(chosen, list):
            return _rows_of(entry, chosen, dim)
        return entry[(slice(None),) * dim + (chosen,)].contiguous()  # as what generate() repeats is; models view it

    return {name: of(name, entry) for name, entry in model_kwargs.items()}


def sources(model_kwargs: dict[str, Any], rows: int, copies: int) -> dict[str, Any] | str:
    """The keywords of an encoder-decoder model's prefill for one row of each source, or why that cannot be.

    Args:
        model_kwargs: as generate() prepared them: everything repeated for `copies` beams or samples, side by side.
        rows: rows of the call, sources times copies.
    """
    if rows % copies:
        return "the rows are not copies of sources"

    def first(name: str, entry: Any) -> Any:
        if isinstance(entry, torch.Tensor) and entry.ndim:
            if entry.shape[0] != rows:
                if name == "attention_mask":
                    # Of the encoder, which is done. A decoder that looked at it would not get along with such a one:
                    # Whisper leaves it as it is when it repeats its audio, or goes on with a part of it.
                    return entry
                raise ValueError(f"{name} has not a row per copy")
            if not torch.equal(entry.unflatten(0, (-1, copies)), _repeated(entry, copies)):
                raise ValueError("the copies of a source are not equal")
            return entry[::copies].contiguous()  # as what generate() repeats is; models view it
        if isinstance(entry, dict):  # the encoder's output; what it has of its own layers is not repeated
            parts = {key: first(key, part) if isinstance(part, torch.Tensor) else part for key, part in entry.items()}
            return type(entry)(**parts)
        if entry is None or isinstance(entry, (bool, int, float, str, torch.Tensor, compat.Cache)):
            return entry
        if isinstance(entry, (tuple, list)) and not any(isinstance(part, torch.Tensor) for part in entry):
            return entry
        raise ValueError(f"the model is given {name}")

    try:
        return {name: first(name, entry) for name, entry in model_kwargs.items()}
    except ValueError as error:
        return str(error)


def equal_neighbours(model_kwargs: dict[str, Any], input_ids: torch.Tensor) -> int:
    """How many rows side by side are alike throughout, in all that an encoder-decoder model is given; 1 if not as many
    everywhere. (Whisper repeats its input for samples by itself.)"""
    rows = input_ids.shape[0]
    flat = [input_ids, *model_kwargs.values(), *(model_kwargs.get("encoder_outputs") or {}).values()]
    same = torch.ones(rows - 1, dtype=torch.bool, device=input_ids.device)
    for entry in flat:
        if isinstance(entry, torch.Tensor) and entry.ndim and entry.shape[0] == rows:
            same &= (entry[1:] == entry[:-1]).flatten(1).all(1).to(same.device)
    starts = [0, *((~same).nonzero().flatten() + 1).tolist()]
    count = rows // len(starts)
    return count if starts == list(range(0, rows, count)) else 1


def _repeated(entry: torch.Tensor, copies: int) -> torch.Tensor:
    """The first of each `copies` rows, as often: [rows // copies, copies, ...], without a copy."""
    return entry[::copies].unsqueeze(1).expand(-1, copies, *entry.shape[1:])


def _rows_of(tensor: torch.Tensor, rows: list[int], dim: int = 0) -> torch.Tensor:
    """Those rows of a tensor, along `dim`. (Indexing with a list waits for the device.)"""
    return tensor.index_select(dim, torch.tensor(rows).to(tensor.device, non_blocking=True))


class _Prompt:
    """The distinct rows of a prefill.

    Attributes:
        ids, mask: [rows, columns] on the CPU; mask bool, or None: no pads.
        inputs: the ids where the model takes them; without columns where the prompt is given as embeddings.
        positions: `position_ids` of all rows of the call on the CPU; None: not given.
        embeds: [rows, columns, hidden size] where the prompt is given so, and `ids` are their fingerprints; else None.
        origin: for every row of the call the distinct row it equals.
        chosen: for every distinct row a row of the call that it stands for.
        arrived: what was read from devices together with them.
        tokens: the tokens of each distinct row, pads left out; None unless pads are all on the left and every row has
            a token.
        lead: pads in front of each row.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        merge: bool,
        embeds: torch.Tensor | None = None,
        arriving: Sequence[torch.Tensor] = (),
    ):
        if embeds is None:
            ids, given, self.positions, *arrived = on_host(inputs, mask, positions, *arriving)
        else:
            ids = fingerprints(embeds)
            given, self.positions, *arrived = on_host(mask, positions, *arriving)
        assert ids is not None
        self.arrived = [tensor for tensor in arrived if tensor is not None]
        if ids is inputs:
            ids = ids.clone()  # the caller may write to its own
        shown = None if given is None else given != 0
        shown = None if shown is None or bool(shown.all()) else shown
        rows = ids.tolist()
        # Rows are equal if all that the forward is given of them is.
        beside = [_by_row(tensor, len(rows)) for tensor in (given if shown is not None else None, self.positions)]
        seen: dict[Any, int] = {}
        self.origin: list[int] = []
        self.chosen: list[int] = []
        for place, row in enumerate(rows):
            key = (tuple(row), *(each[place] for each in beside)) if merge else place
            if key not in seen:
                seen[key] = len(self.chosen)
                self.chosen.append(place)
            self.origin.append(seen[key])
        whole = len(self.chosen) == len(rows)
        self.ids = ids if whole else ids[self.chosen]
        self.inputs = inputs if whole else _rows_of(inputs, self.chosen)
        self.embeds = embeds if embeds is None or whole else _rows_of(embeds, self.chosen)
        self.mask = shown if shown is None or whole else shown[self.chosen]
        self.columns = ids.shape[1]
        self.tokens: list[list[int]] | None = None
        distinct = [rows[place] for place in self.chosen]
        self.lead = [0] * len(distinct)
        if self.mask is not None:
            counts = self.mask.sum(1).tolist()
            self.lead = [self.columns - count for count in counts]
            left = all(bool(row[lead:].all()) for row, lead in zip(self.mask, self.lead, strict=True))
            if not left or not all(counts):
                return
        self.tokens = [row[lead:] for row, lead in zip(distinct, self.lead, strict=True)]


def _by_row(tensor: torch.Tensor | None, rows: int) -> list[Any]:
    """What a tensor says of each row, to be compared.

    Args:
        tensor: [rows, ...]; [1, ...], which tells no rows apart; or position ids, [kinds, rows, columns].
    """
    if tensor is None or tensor.ndim < 2:
        return [None] * rows
    if tensor.ndim == 3 and tensor.shape[1] == rows:
        tensor = tensor.transpose(0, 1)
    if tensor.shape[0] != rows:
        return [None] * rows
    return [tuple(row) for row in tensor.flatten(1).tolist()]


def _default_positions(prompt: _Prompt) -> bool:
    """Whether each token's position is its place among its row's tokens."""
    positions = prompt.positions
    if positions is None:
        return True
    if positions.ndim != 2 or positions.shape[1] != prompt.columns:
        return False
    expected = torch.arange(prompt.columns) - torch.tensor(prompt.lead)[:, None]
    if positions.shape[0] != 1:
        positions = positions[prompt.chosen]
    same = positions == expected
    return bool(same.all() if prompt.mask is None else same[prompt.mask].all())


def prefill(
    model: Any,
    call: Call,
    begun: Begun | None,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    library: Callable[[torch.Tensor, dict[str, Any]], Any],
) -> Any:
    """Fill a call's empty cache with a prompt, and give the logits behind it.

    Args:
        model: the patched model.
        call: its cache is empty; it has a row per row of the prompt afterwards, and its columns.
        begun: what prefixes are found by; None: none are found or stored.
        input_ids: [rows, columns]; without columns where `inputs_embeds` are among the keywords.
        model_kwargs: as generate() prepared them.
        library: the library's own prefill, for these ids and keywords.

    Returns:
        The model's output; its `logits` are [rows, 1 or more, vocabulary], the last those behind the prompt.
    """
    cache = call.cache
    config, pool, state = cache.pool.config, cache.pool, cache.state
    embeds = model_kwargs.get("inputs_embeds")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    merge = config.prompt_once and call.allows(Shortcut.EQUAL_ROWS)
    may_pack = config.packed_prefill and call.allows(Shortcut.PACKED)
    prompt = _Prompt(input_ids, mask, positions, merge, embeds, () if begun is None else begun.content.on_device)
    rows = len(prompt.origin)
    plain = prompt.tokens is not None and _default_positions(prompt)
    plain = plain and not pool.loose_windows and not cache.other_layers
    identity: Hashable = None
    if plain and begun is not None:
        identity = call.identity = begun.finish(prompt.arrived)
        identity = identity if embeds is None else (identity, "embeddings")
    salt = call.namespace
    try:
        with pool.locked():
            work = _Work(cache, prompt, None if identity is None or salt is None else (identity, salt))
            packed = plain and may_pack and work.packed_is_less(_common(prompt) if merge else 0)
            if embeds is not None:
                packed = packed or (plain and may_pack and any(work.done))
                if not packed:
                    work.index = None  # the library goes on from a filled cache with ids
            if packed and not packs(model):
                if prompt.mask is not None:
                    pool.count_fallback(f"pads are computed: prefill of {model.config.model_type} is not packed")
                packed = False
            if not packed and generation_config.prefill_chunk_size is not None:
                work.index = None  # not every version of the library goes on from a filled cache in chunks
            work.adopt(packed)
        outputs = None
        if packed:
            chunk = generation_config.prefill_chunk_size or config.max_packed_tokens
            outputs = _packed(model, cache, work, min(chunk, config.max_packed_tokens))
        if outputs is None:
            keywords = model_kwargs
            if len(prompt.chosen) < rows:
                keywords = of_rows(model_kwargs, rows, prompt.chosen)
            state.announced = prompt.mask
            if prompt.mask is None:
                state.announced = torch.ones(len(prompt.chosen), prompt.columns, dtype=torch.bool)
            outputs = library(prompt.inputs, keywords)
        if pool.loose_windows or state.rewritten or (state.blind and prompt.mask is not None):
            identity = None  # in the last case the model attends on its own, and pads are stored
        state.known.identity, state.known.salt, state.known.witness = identity, salt, call.witness
        if identity is not None:
            state.known.note(prompt.ids, prompt.mask)
            state.remember()
        if len(prompt.chosen) < rows:
            cache.batch_select_indices(prompt.origin)
            give_rows(model, outputs, prompt.origin)
    except BaseException:
        cache.reset()
        raise
    finally:
        state.announced = None
    return outputs


def goes_on(call: Call, begun: Begun | None, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether `input_ids` is the whole history of a call's filled cache whose tokens are known, and more behind it.

    From then on the cache is stored under the call's salt, if it has been filled under the same.
    """
    state = call.cache.state
    known, past = state.known, state.columns
    if begun is None or known.identity is None or known.ids is None:
        return False
    if known.columns != past or known.fed or input_ids.shape[1] <= past:
        return False
    if known.ids.shape[0] > input_ids.shape[0] or input_ids.shape[0] % known.ids.shape[0]:
        return False
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    prompt = _Prompt(input_ids, mask, positions, merge=False, arriving=begun.content.on_device)
    repeated = known.ids[:, :past].repeat_interleave(input_ids.shape[0] // known.ids.shape[0], 0)
    if (
        prompt.tokens is None
        or not torch.equal(repeated.cpu(), prompt.ids[:, :past])
        or not _default_positions(prompt)
        or known.identity != begun.finish(prompt.arrived)
    ):
        return False
    call.identity = known.identity
    known.witness = call.witness
    if known.salt != call.namespace:
        known.salt = None
    return True


def _common(prompt: _Prompt) -> int:
    """Leading tokens that all distinct rows share, one of each row left over."""
    tokens = prompt.tokens
    if tokens is None or len(tokens) < 2:
        return 0
    # The least and the greatest are the two that differ first.
    common = min(common_prefix(min(tokens), max(tokens)), min(map(len, tokens)) - 1)
    return common if common >= LONG_PREFIX else 0


class _Work:
    """What of a prompt is there, and what is left to do. Used with the pool's lock held.

    Attributes:
        done: tokens of each distinct row that are in the cache.
        common: tokens that the first row computes for all.
    """

    def __init__(self, cache: PagedCache, prompt: _Prompt, identity: Hashable):
        self.cache, self.prompt, self.identity = cache, prompt, identity
        self.index = cache.pool.index if identity is not None else None
        self.common = 0
        tokens = prompt.tokens or []
        self.done = [0] * len(prompt.chosen)
        if self.index is not None:
            self.done = [self.index.find(identity, row[:-1]).length for row in tokens]

    def packed_is_less(self, common: int) -> bool:
        """Whether a packed forward has fewer tokens to compute; `common`: leading tokens that all rows share."""
        tokens = self.prompt.tokens or []
        ahead = max(self.done)
        self.common = common if common - ahead >= LONG_PREFIX else 0
        left = sum(len(row) - max(done, self.common) for row, done in zip(tokens, self.done, strict=True))
        left += max(self.common - ahead, 0)
        covered = min(lead + done for lead, done in zip(self.prompt.lead, self.done, strict=True))
        return left < (self.prompt.columns - covered) * len(tokens)

    def adopt(self, packed: bool) -> None:
        """Share what the index has. Without packing, only the columns that are there for all rows."""
        state, prompt = self.cache.state, self.prompt
        tokens = prompt.tokens or []
        if not packed:
            self.common = 0
            covered, before = min(map(sum, zip(prompt.lead, self.done, strict=True))), -1
            while covered != before and self.index is not None:
                # A sliding group may lack what a shorter hit needs.
                before = covered
                keep = [max(covered - lead, 0) for lead in prompt.lead]
                self.done = [
                    self.index.find(self.identity, row[:count]).length for row, count in zip(tokens, keep, strict=True)
                ]
                if self.done != keep:
                    covered = min(
                        lead + done
                        for lead, done, want in zip(prompt.lead, self.done, keep, strict=True)
                        if done < want
                    )
            if self.index is None or not any(self.done):
                self._count([0] * len(tokens))
                return
        state.open(len(prompt.chosen))
        if self.index is not None:
            for row, (own, count) in enumerate(zip(tokens, self.done, strict=True)):
                self.index.find(self.identity, own[:count]).adopt(state.tables, row)
        if not packed:
            columns = covered
            state.lead = [min(lead, columns) for lead in prompt.lead]
            real = None if prompt.mask is None else prompt.mask[:, :columns]
            state.real = None if real is None or bool(real.all()) else real
            self.cache.set_columns(columns)
        self._count(self.done)

    def _count(self, hits: list[int]) -> None:
        if self.index is not None:
            pool = self.cache.pool
            pool.prefix_query_tokens += sum(map(len, self.prompt.tokens or []))
            pool.prefix_hit_tokens += sum(hits)


def _packed(model: Any, cache: PagedCache, work: _Work, chunk: int) -> Any:
    """Compute what is left of every distinct row in packed forwards of at most `chunk` tokens.

    None, and the cache empty again, if it turns out that this model's prompts must not be cut.
    """
    prompt, state = work.prompt, cache.state
    tokens, embeds = prompt.tokens or [], prompt.embeds
    device = prompt.inputs.device if embeds is None else embeds.device
    done = list(work.done)
    logits: list[torch.Tensor | None] = [None] * len(tokens)
    outputs: Any = None
    forwards = 0

    def forward(spans: list[tuple[int, int, int]]) -> None:
        nonlocal outputs, forwards
        if forwards and cache.pool.loose_windows:
            return
        forwards += 1
        counts = [0] * len(tokens)
        ids: list[int] = []
        positions: list[int] = []
        vectors: list[torch.Tensor] = []
        last: dict[int, int] = {}  # row -> column of its last token
        for row, begin, end in spans:
            counts[row] = end - begin
            ids.extend(tokens[row][begin:end])
            positions.extend(range(begin, end))
            if embeds is not None:
                vectors.append(embeds[row, prompt.lead[row] + begin : prompt.lead[row] + end])
            if end == len(tokens[row]):
                last[row] = len(ids) - 1
        state.packed = counts
        outputs = model(
            input_ids=torch.tensor([ids]).to(device, non_blocking=True) if embeds is None else None,
            inputs_embeds=torch.cat(vectors).unsqueeze(0) if vectors else None,
            position_ids=torch.tensor([positions]).to(device, non_blocking=True),
            use_cache=True,
            return_dict=True,
            logits_to_keep=torch.tensor(list(last.values()) or [0]).to(device, non_blocking=True),
            **{compat.CACHE_ARGUMENT: cache},
        )
        found = outputs.logits
        if found.shape[:2] == (1, len(ids)):  # all of them came back
            places = list(last.values())
        elif last and found.shape[:2] == (1, len(last)):
            places = list(range(len(last)))
        else:
            places = []  # nothing is known of what came back
        for place, row in zip(places, last, strict=False):
            logits[row] = found[0, place]

    def run(spans: list[tuple[int, int, int]]) -> None:
        """Rows ascend in `spans`; cut them into chunks."""
        batch: list[tuple[int, int, int]] = []
        room = chunk
        for row, begin, end in spans:
            while begin < end:
                count = min(end - begin, room)
                batch.append((row, begin, begin + count))
                begin += count
                room -= count
                if not room:
                    forward(batch)
                    batch, room = [], chunk
        if batch:
            forward(batch)

    if work.common:
        first = max(range(len(done)), key=done.__getitem__)
        run([(first, done[first], work.common)])
        state.copy_prefix(first, [row for row in range(len(done)) if row != first])
        done = [work.common] * len(done)
    run([(row, begin, len(own)) for row, (own, begin) in enumerate(zip(tokens, done, strict=True))])
    lost = any(entry is None for entry in logits)
    if lost or (cache.pool.loose_windows and (forwards > 1 or any(work.done))):
        cache.reset()
        return None
    state.lead, state.real = list(prompt.lead), prompt.mask
    cache.set_columns(prompt.columns)
    assert outputs is not None
    outputs.logits = torch.stack([entry for entry in logits if entry is not None]).unsqueeze(1)
    return outputs
