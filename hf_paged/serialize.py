"""A filled cache in a file and back: what `PagedCache.save` and `PagedCache.load` do.

One safetensors file. `n` is the number of distinct blocks a layer group holds: a block that several rows share is
written once, and the tables name it as often as before.

    layer.<i>.keys     [num_kv_heads, n, block_size, key_dim]     zeros behind a row's last token
    layer.<i>.values   [num_kv_heads, n, block_size, value_dim]
    group.<g>.rows     [rows, 3] int64     start, length and number of blocks of each row's table
    group.<g>.blocks   [entries] int64     the rows' tables one after the other; blocks count in order of first mention
    real               [rows, columns] bool    which columns are tokens

The metadata are the name and version of the format, a JSON text (`content`: the model's identity, shapes, dtypes, the
rest of the cache's state, a CRC-32 per tensor) and the CRC-32 of that text.

Checksums tell damage, not intent: nothing in a file is believed. Every number is held against the others, the pool and
the model before it is used, and nothing is allocated that the bytes of the file do not warrant (`real` is written in
full for that reason: no number of columns without as many bytes). What does not fit is a ValueError that names the
file, and the pool is as it was.

A file names its model by what keys and values depend on: class, config and all bytes of all weights and buffers. To
know them both `save` and `load` read every weight once, at the speed of SHA-256 on one core: a long look at a large
model, and the only one that misses nothing.
"""

import enum
import hashlib
import json
import math
import os
import re
import uuid
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from . import compat
from .blocks import RowTables
from .config import PagedConfig
from .pool import KVPool
from .state import CacheState
from .store import LayerStore, Memory

if TYPE_CHECKING:
    from .cache import PagedCache

CacheT = TypeVar("CacheT", bound="PagedCache")

FORMAT = "hf_paged.cache"
VERSION = 2

_CHUNK_BYTES = 64 << 20  # the most that is brought from a device at once to be hashed
_DTYPES = ("float64", "float32", "float16", "bfloat16")  # of keys and values, as the model makes them


class _Row(NamedTuple):
    """One row's block table as the file spells it.

    Attributes:
        start, length: as in `BlockTable`.
        blocks: indices into the blocks of the file.
        known: blocks that the rows before have named; indices from here on are named first by this row.
    """

    start: int
    length: int
    blocks: list[int]
    known: int

    @property
    def fresh(self) -> int:
        return sum(block >= self.known for block in self.blocks)


class _Saved(NamedTuple):
    """A file that was read and found whole.

    Attributes:
        content: the JSON text.
        tensors: by name, on the CPU; perhaps the file itself, mapped, so what is kept of them is copied.
        tables: per layer group its rows.
    """

    content: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    tables: list[list[_Row]]


def save(cache: "PagedCache", path: str | os.PathLike[str], model: Any = None) -> None:
    """Write the content of a cache to a file; see `PagedCache.save`."""
    if cache.other_layers:
        kinds = sorted({kind for kind, arguments in cache.pool.layer_types if not compat.window_of(kind, arguments)[0]})
        raise ValueError(
            f"this cache cannot be saved: {len(cache.other_layers)} of its {len(cache)} layers ({', '.join(kinds)}) "
            "are the library's own and hold no blocks. Saving is implemented for caches whose layers are all paged."
        )
    columns = sorted({layer.columns for layer in cache.paged_layers})
    if len(columns) > 1:
        raise ValueError(
            f"the cache is in the middle of a forward, its layers hold {columns[0]} to {columns[-1]} tokens: save it "
            "when the forward has returned"
        )
    if columns == [0]:
        raise ValueError("the cache is empty, there is nothing to save: run a forward or generate() with it first")
    target = _model_of(cache, model)
    for layer in cache.paged_layers:
        layer.flush()
    tensors, content = _encode(cache)
    content["model"] = {**_identity(target, cache.pool), "weights": weights_fingerprint(target)}
    content["checksums"] = {name: _checksum(tensor) for name, tensor in tensors.items()}
    try:  # nothing is written that `load` would refuse
        _check_types(content)
        _fit_the_pool(_Saved(content, tensors, _tables_of(content, tensors)), target, cache.pool)
    except ValueError as error:
        raise ValueError(f"this cache cannot be saved to {path}, it contradicts itself: {error}") from error
    text = json.dumps(content)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "content": text,
        "crc32": str(zlib.crc32(text.encode())),
    }
    _write(path, tensors, metadata)


def load(
    kind: type[CacheT],
    path: str | os.PathLike[str],
    model: Any,
    paged_config: PagedConfig | None = None,
    pool: KVPool | None = None,
) -> CacheT:
    """A cache of class `kind` with the content of a file; see `PagedCache.load`."""
    target = compat.generating_model(model)
    saved = _read(path)
    if pool is None:
        pool = target.__dict__.get("paged_pool")
    if pool is None and paged_config is None:
        paged_config = PagedConfig(block_size=saved.content["block_size"], kv_dtype=saved.content["kv_dtype"])
    cache = kind(target.config, paged_config, pool)
    if cache.other_layers:
        raise ValueError(
            f"{path} cannot be loaded: {len(cache.other_layers)} of the {len(cache)} layers of {type(target).__name__} "
            "are the library's own, and files hold paged layers alone"
        )
    _compare(path, saved, target, cache.pool)
    try:
        _fit_the_pool(saved, target, cache.pool)
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    _compare_weights(path, saved, target)
    try:
        _restore(cache, saved, _layer_devices(target, list(cache.pool.group_of)))
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{path} cannot be loaded into this pool: {error}") from error
    if cache.pool.owner is None:
        cache.pool.owner = weakref.ref(target)
    return cache


# -- which model it was ------------------------------------------------------------------------------------------------


def weights_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256, as hex digits, of all that a model computes with: every byte of every parameter and buffer.

    Buffers count whether they are saved with a checkpoint or not, and so do tensors that modules put into their
    `state_dict` besides (scales of quantised weights). Tensors that are made of others are taken apart. Memory that
    several names share is read once. Which adapters are active or merged, and how strongly, counts too.

    Every byte is read: that takes as long as SHA-256 does, and tensors on a device come over in pieces.

    Raises:
        ValueError: if a weight is out of reach (on the meta device, or offloaded to disk).
    """
    digest = hashlib.sha256()
    known: dict[tuple, tuple[torch.Tensor, str]] = {}
    for name, tensor in _weights(model):
        digest.update(f"{name} {_digest(tensor, known)}\n".encode())
    for name, module in model.named_modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):  # a PEFT layer
            active = [] if module.disable_adapters else list(module.active_adapters)
            scaling = getattr(module, "scaling", None) or {}
            merged = list(getattr(module, "merged_adapters", []))
            digest.update(f"{name} {[(adapter, scaling.get(adapter)) for adapter in active]} {merged}\n".encode())
    return digest.hexdigest()


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of all parameters and buffers and of what else is in the `state_dict`.

    Of weights that accelerate keeps in host memory these, instead of the empty ones that stand for them.
    """
    seen = set()
    for path, module in model.named_modules():
        follows_length = _frequencies_that_follow_the_length(module)
        for key, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is None or key in follows_length:
                continue
            name = f"{path}.{key}" if path else key
            seen.add(name)
            yield name, (_brought(module, key, name) if tensor.is_meta else tensor)
    for name, tensor in model.state_dict().items():
        if name not in seen and isinstance(tensor, torch.Tensor):
            if tensor.is_meta:
                raise _out_of_reach(name)
            yield name, tensor


def _frequencies_that_follow_the_length(module: torch.nn.Module) -> set[str]:
    """Buffers of a rotary embedding that each forward sets by its length (dynamic and longrope): what they are made
    from, `original_inv_freq` and the config, says what the model is; they say what it did last."""
    kinds = getattr(module, "rope_type", None)
    by_prefix = {"": kinds} if isinstance(kinds, str) else kinds if isinstance(kinds, dict) else {}
    return {
        f"{prefix}_inv_freq" if prefix else "inv_freq"
        for prefix, kind in by_prefix.items()
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
    }


def _brought(module: torch.nn.Module, key: str, name: str) -> torch.Tensor:
    """The weight that accelerate's hooks would bring for a forward, if they hold it in host memory."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", [hook]):
        weights = getattr(each, "weights_map", None)
        loader = getattr(weights, "dataset", weights)
        kept = getattr(loader, "state_dict", None) or loader
        held = kept.get(getattr(weights, "prefix", "") + key) if isinstance(kept, dict) else None
        if isinstance(held, torch.Tensor) and not held.is_meta:
            return held
    raise _out_of_reach(name)


def _out_of_reach(name: str) -> ValueError:
    return ValueError(
        f"the weight {name} is out of reach (on the meta device: offloaded to disk, or not loaded yet), and a saved "
        "cache is told by all bytes of its model's weights. Load the model with a device_map that keeps them on "
        "devices or in host memory, then save or load the cache."
    )


def _digest(tensor: torch.Tensor, known: dict[tuple, tuple[torch.Tensor, str]]) -> str:
    """Shape, dtype and SHA-256 of the values of a tensor, in the order of its indices, however they lie in memory.

    Args:
        known: digests of memory that was read already; filled. It keeps the tensors, so that no address is used again.
    """
    head = f"{tuple(tensor.shape)} {tensor.dtype}"
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors: torchao, quanto, DTensor
        names, context = tensor.__tensor_flatten__()
        parts = [f"{name} {_digest(getattr(tensor, name), known)}" for name in names]
        return f"{head} {type(tensor).__name__} {json.dumps(_plain(context))} [{'; '.join(parts)}]"
    with torch.no_grad():
        tensor = tensor.detach()
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        if not tensor.numel():
            return head
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
        if place not in known:
            digest = hashlib.sha256()
            for piece in _pieces(tensor):
                digest.update(_bytes(piece))
            known[place] = (tensor, digest.hexdigest())
    return f"{head} {known[place][1]}"


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in parts of at most `_CHUNK_BYTES`, in the order of its indices."""
    size = tensor.numel() * tensor.element_size()
    if size <= _CHUNK_BYTES or tensor.ndim == 0:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK_BYTES // tensor.element_size())
    elif (rows := _CHUNK_BYTES * len(tensor) // size) > 0:
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from _pieces(row)


# Fields of a config that cannot change what a model makes of tokens, given its weights.
_BOOKKEEPING = frozenset(
    (
        # where it came from
        "_commit_hash", "_name_or_path", "architectures", "auto_map", "name_or_path", "transformers_version",
        # has a line of its own in the identity
        "dtype", "torch_dtype",
        # what a forward hands out, and whether it keeps a cache
        "output_attentions", "output_hidden_states", "return_dict", "use_cache", "use_return_dict",
        # how attention is computed: another kernel rounds otherwise, and computes the same
        "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "attn_implementation",
        "_experts_implementation", "_experts_implementation_internal", "experts_implementation",
        # how weights are drawn that are there already
        "initializer_factor", "initializer_range",
        # heads for classification and tasks
        "finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
        # which ids mean what to generate(): commonly set after loading
        "bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id",
        "pad_token_id", "sep_token_id",
        # defaults of generate() that old configs carry
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "length_penalty", "max_length",
        "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
        "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature",
        "top_k", "top_p", "typical_p",
    )
)  # fmt: skip


def _fields(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a config that count, nested ones as `outer.inner`, as JSON has them."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in _BOOKKEEPING and (not prefix or "model_type" in config):  # of a config, or of one inside
            continue
        if isinstance(value, Mapping) and value:
            found.update(_fields(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """A value as JSON has it, alike in every process; of an object that JSON has nothing for the class."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # not equal to itself, or not JSON
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(entry)) for entry in value)
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _identity(model: Any, pool: KVPool) -> dict[str, Any]:
    """What must agree beside the weights for stored keys and values to be this model's, as JSON has it."""
    config = model.config
    text = config.get_text_config(decoder=True)
    outer = {} if text is config else _fields(config.to_dict())
    return {
        "class": type(model).__name__,
        "type": config.model_type,
        "layers": [[kind, compat.window_of(kind, arguments)[1]] for kind, arguments in pool.layer_types],
        "dtype": _dtype_name(model.dtype),
        "config": _fields(text.to_dict()),
        # Of a composite model what the other parts make is given to the text part; how they are joined counts.
        "outer": {
            name: value for name, value in outer.items() if "." not in name and not isinstance(value, list | dict)
        },
    }


# Key of the identity -> what it is called, and what to do where it differs.
_MEANING = {
    "class": ("class", "Load it with the model it was saved from."),
    "type": ("model_type", "Load it with the model it was saved from."),
    "layers": ("cache of", "Load it with the model it was saved from; the windows must agree too."),
    "dtype": ("dtype", "Load the model in the file's dtype, or fill a new cache."),
    "config": ("config with", "Give the model the file's config, or fill a new cache."),
    "outer": ("config with", "Give the model the file's config, or fill a new cache."),
}


def _compare(path: str | os.PathLike[str], saved: _Saved, model: Any, pool: KVPool) -> None:
    """Raise ValueError, saying what differs, unless this model, but for its weights, in this pool can go on from the
    file."""
    content = saved.content
    here = _identity(model, pool)
    for key, (what, advice) in _MEANING.items():
        there = content["model"][key]
        if there != here[key]:
            raise ValueError(
                f"{path} was saved from another model: {what} {_difference(key, there, here[key])}. {advice}"
            )
    if content["groups"] != [group.layers for group in pool.groups]:
        raise ValueError(f"{path} groups the layers {_said(content['groups'])}, this version of hf_paged does not")
    size = content["block_size"]
    if size != pool.config.block_size:
        raise ValueError(
            f"{path} holds blocks of {size} tokens, but this pool has a block_size of {pool.config.block_size}. Load "
            f"it with settings or a pool of block_size={size}: patch(model, block_size={size}) for a patched model, "
            f"or pool=KVPool(model.config, PagedConfig(block_size={size}))."
        )
    for layer, entry in content["layers"].items():
        kv_dtype = pool.config.kv_dtype
        wanted = entry["made"] if kv_dtype == "auto" else [kv_dtype, kv_dtype]
        if entry["stored"] != wanted:
            raise ValueError(
                f"{path} stores the keys and values of layer {layer} as {' and '.join(entry['stored'])}, but this "
                f"pool, of kv_dtype={kv_dtype!r}, as {' and '.join(wanted)}. Load it with settings or a pool of "
                f"kv_dtype={content['kv_dtype']!r}."
            )


def _compare_weights(path: str | os.PathLike[str], saved: _Saved, model: Any) -> None:
    """Raise ValueError unless the file was saved with these weights. Comes last, because it reads all of them."""
    try:
        here = weights_fingerprint(model)
    except ValueError as error:
        raise ValueError(f"{path} cannot be compared with this model: {error}") from error
    there = saved.content["model"]["weights"]
    if there != here:
        raise ValueError(
            f"{path} was saved from another model: weights of fingerprint {there[:12]} in the file, {here[:12]} here. "
            "Keys and values are of use to the weights, buffers and adapters that made them alone: load the "
            "checkpoint, and activate the adapters, that the file was saved with, or fill a new cache."
        )


def _difference(key: str, there: Any, here: Any) -> str:
    """What the file says and what is here; of configs the first fields that differ."""
    if key == "layers":
        return f"{_kinds(there)} in the file, {_kinds(here)} here"
    if not isinstance(here, dict):
        return f"{_bare(there)} in the file, {_bare(here)} here"
    absent = object()
    names = sorted(name for name in there.keys() | here.keys() if there.get(name, absent) != here.get(name, absent))
    told = []
    for name in names[:3]:
        ours, theirs = (_said(fields[name]) if name in fields else "absent" for fields in (here, there))
        told.append(f"{_bare(name)} {theirs} in the file, {ours} here")
    return "; ".join(told) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


def _said(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:  # a file may nest what it likes
        return "something deeply nested"
    return text if len(text) <= 80 else text[:77] + "..."


def _bare(name: str) -> str:
    return _said(name).strip('"')


def _kinds(layers: list[list[Any]]) -> str:
    counts = Counter(kind if window is None else f"{kind} of {window}" for kind, window in layers)
    return f"{len(layers)} layers ({', '.join(f'{count} {kind}' for kind, count in counts.items())[:300]})"


def _model_of(cache: "PagedCache", model: Any) -> Any:
    if model is None:
        owner = cache.pool.owner
        model = owner() if owner is not None else None
        if model is None:
            raise ValueError(
                "this cache does not know its model, and the file must say which weights its keys and values are of: "
                "call cache.save(path, model)"
            )
    target = compat.generating_model(model)
    if compat.reads_layer_types(target.config) != cache.pool.layer_types:
        raise ValueError(
            f"{type(target).__name__} has other layers than this cache: pass the model that filled it, "
            "cache.save(path, model)"
        )
    return target


# -- writing -----------------------------------------------------------------------------------------------------------


def _encode(cache: "PagedCache") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of the file, contiguous and on the CPU, and its JSON content as far as the cache knows it."""
    state, pool = cache.state, cache.pool
    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, Any] = {}
    for index, tables in enumerate(state.tables):
        bounds = [[row.start, row.length, len(row.blocks)] for row in tables.rows]
        ids = list(dict.fromkeys(chain.from_iterable(row.blocks for row in tables.rows)))
        place = {block: position for position, block in enumerate(ids)}
        spelled = [place[block] for row in tables.rows for block in row.blocks]
        tensors[f"group.{index}.rows"] = torch.tensor(bounds, dtype=torch.int64).view(-1, 3)
        tensors[f"group.{index}.blocks"] = torch.tensor(spelled, dtype=torch.int64)
        # [n, block_size]: slots that hold no token of this cache, whatever memory they have
        unused = _unused(tables.rows, ids, tables.block_size)
        for number in pool.groups[index].layers:
            store = cache.layers[number]._store
            memory = store.memory
            layers[str(number)] = {
                "made": [_dtype_name(dtype) for dtype in store.signature[3:5]],
                "stored": [_dtype_name(memory.keys.dtype), _dtype_name(memory.values.dtype)],
            }
            for name, held in (("keys", memory.keys), ("values", memory.values)):
                chosen = held.index_select(1, torch.tensor(ids, dtype=torch.int64, device=held.device))
                chosen = chosen.to("cpu").contiguous().masked_fill_(unused[None, :, :, None], 0)
                tensors[f"layer.{number}.{name}"] = chosen
                layers[str(number)][name] = list(chosen.shape)
    tensors["real"] = state._real_columns(state.columns).clone(memory_format=torch.contiguous_format)
    content = {
        "block_size": pool.config.block_size,
        "kv_dtype": pool.config.kv_dtype,
        "groups": [group.layers for group in pool.groups],
        "layers": layers,
        "rows": state.rows,
        "columns": state.columns,
        "masked": None if state.real is None else state.real.shape[1],
        "lead": state.lead,
        "finished": state.finished,
        "inner_pads": state.inner_pads and state._has_inner_pads(),  # the row that had them may be gone
        "recording": state.recording,
        "blind": state.blind,
    }
    return tensors, content


def _unused(rows: Iterable[Any], ids: Iterable[int], size: int) -> torch.Tensor:
    """[n, block_size] bool: slots of the blocks `ids` behind the last token of every row that holds them.

    Args:
        rows: anything with the start, length and blocks of a `BlockTable`.
    """
    tokens = dict.fromkeys(ids, 0)
    for row in rows:
        position = row.start
        for block in row.blocks:
            tokens[block] = max(tokens[block], min(size, row.length - position))
            position += size
    return torch.arange(size) >= torch.tensor(list(tokens.values()), dtype=torch.int64)[:, None]


def _write(path: str | os.PathLike[str], tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write the file beside its place and move it there whole; if that fails, what was there stays."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        raise IsADirectoryError(f"cannot save to {path}: it is a folder, name a file in it")
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"cannot save to {path}: the folder {folder} does not exist")
    temporary = os.path.join(folder, f".hf_paged-{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, temporary, metadata=metadata)
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except SafetensorError as error:
        raise OSError(f"cannot save to {path}: {error}") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(path: str | os.PathLike[str]) -> _Saved:
    """Read a file and see that it is whole, and that its parts fit each other.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is cut short, damaged, or not of this format and version.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no saved cache at {path}")
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; name the file that cache.save(path) has written")
    if not os.path.isfile(path):
        raise ValueError(f"{path} is no file, but a device or a pipe")
    with open(path, "rb"):
        pass  # what the system has against it is said as the system says it
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            content = _content_of(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        return _Saved(content, tensors, _tables_of(content, tensors))
    except _NotOurs as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # a parser's errors are its own: JSON that nests too deep is a RecursionError
        raise ValueError(
            f"{path} is no saved cache, or is damaged or cut short: {str(error)[:300]}. Save it again with "
            "cache.save(path)."
        ) from error


class _NotOurs(Exception):
    """A whole safetensors file of another kind."""


def _content_of(metadata: dict[str, str]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise _NotOurs("it is a safetensors file, but not one that cache.save(path) has written")
    version = metadata["version"]
    if version == "1":
        raise _NotOurs(
            "it is of version 1 of the format, which does not say enough of its model: this hf_paged reads version "
            f"{VERSION}. Fill the cache and save it again with this hf_paged."
        )
    if version != str(VERSION):
        raise _NotOurs(
            f"it is of version {version[:20]} of the format, this hf_paged reads version {VERSION}. Use the "
            "hf_paged that saved it, or save it again with this one."
        )
    text = metadata["content"]
    _whole(metadata["crc32"] == str(zlib.crc32(text.encode())), "the checksum of the metadata does not fit")
    content = json.loads(text, parse_constant=str)
    _check_types(content)
    return content


_CONTENT = frozenset(
    (
        "block_size", "blind", "checksums", "columns", "finished", "groups", "inner_pads", "kv_dtype", "layers", "lead",
        "masked", "model", "recording", "rows",
    )
)  # fmt: skip


def _check_types(content: Any) -> None:
    """See that the JSON content has all its fields and no others, each of its type and in its range."""
    _whole(isinstance(content, dict) and content.keys() == _CONTENT, "fields of the content are missing or were added")
    try:
        _whole(type(content["block_size"]) is int, "the block size is no number")
        PagedConfig(block_size=content["block_size"], kv_dtype=content["kv_dtype"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"it holds blocks that no pool has: {error}") from error
    rows, columns = content["rows"], content["columns"]
    _whole(_is_count(rows, 1) and _is_count(columns, 1), "it holds no token")
    _whole(_all(content["lead"], _is_count) and len(content["lead"]) == rows, "the leading pads do not fit the rows")
    _whole(
        _all(content["finished"], _is_bool) and len(content["finished"]) == rows,
        "which rows have finished does not fit the rows",
    )
    _whole(content["masked"] is None or _is_count(content["masked"]), "the columns with a known mask are no number")
    for name in ("inner_pads", "recording", "blind"):
        _whole(_is_bool(content[name]), f"{name} is neither true nor false")
    groups = content["groups"]
    _whole(_all(groups, lambda group: _all(group, _is_count)), "the groups are no lists of layers")
    layers = content["layers"]
    listed = [str(layer) for group in groups for layer in group]
    _whole(len(listed) == len(set(listed)), "a layer is in two groups")
    _whole(isinstance(layers, dict) and layers.keys() == set(listed), "the layers are not those of the groups")
    for layer, entry in layers.items():
        fits = isinstance(entry, dict) and entry.keys() == {"made", "stored", "keys", "values"}
        fits = fits and all(
            _all(entry[name], lambda dtype: dtype in _DTYPES) and len(entry[name]) == 2 for name in ("made", "stored")
        )
        fits = fits and all(_all(entry[name], _is_count) and len(entry[name]) == 4 for name in ("keys", "values"))
        _whole(fits, f"shape or dtype of layer {layer} is none")
        kv_dtype = content["kv_dtype"]
        wanted = entry["made"] if kv_dtype == "auto" else [kv_dtype, kv_dtype]
        _whole(entry["stored"] == wanted, f"layer {layer} is stored in another dtype than the file says")
    _whole(
        isinstance(content["checksums"], dict) and _all(list(content["checksums"].values()), _is_count),
        "the checksums are no numbers",
    )
    model = content["model"]
    _whole(isinstance(model, dict) and model.keys() == {*_MEANING, "weights"}, "the model is not named in full")
    _whole(all(type(model[name]) is str for name in ("class", "type", "dtype", "weights")), "the model has no name")
    _whole(all(isinstance(model[name], dict) for name in ("config", "outer")), "the model has no config")
    kinds = model["layers"]
    _whole(
        _all(kinds, lambda kind: isinstance(kind, list) and len(kind) == 2 and type(kind[0]) is str)
        and all(window is None or _is_count(window) for _, window in kinds),
        "the layers of the model are no list of kinds and windows",
    )


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _all(values: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether this is a list whose every entry fits."""
    return isinstance(values, list) and all(map(fits, values))


def _tables_of(content: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[list[_Row]]:
    """The rows of every group, once all parts of the file are found to fit each other.

    Args:
        content: seen by `_check_types`.
        tensors: of any shape and dtype.
    """
    groups = content["groups"]
    names = {"real"}
    names.update(f"group.{index}.{name}" for index in range(len(groups)) for name in ("rows", "blocks"))
    names.update(f"layer.{layer}.{name}" for layer in content["layers"] for name in ("keys", "values"))
    _whole(content["checksums"].keys() == tensors.keys() == names, "tensors are missing or were added")
    rows, columns, size = content["rows"], content["columns"], content["block_size"]
    _expect(tensors, "real", [rows, columns], "bool")
    for index in range(len(groups)):
        _expect(tensors, f"group.{index}.rows", [rows, 3], "int64")
        _expect(tensors, f"group.{index}.blocks", [None], "int64")
    for layer, entry in content["layers"].items():
        for place, name in enumerate(("keys", "values")):
            _expect(tensors, f"layer.{layer}.{name}", entry[name], entry["stored"][place])
    for name, tensor in tensors.items():
        _whole(_checksum(tensor) == content["checksums"][name], f"the checksum of {name} does not fit")
    real = tensors["real"]
    _whole(bool((real.view(torch.uint8) <= 1).all()), "a mask that is neither true nor false")
    _check_pads(content, real)
    tables = []
    for index, layers in enumerate(groups):
        group, known = _rows_of(tensors[f"group.{index}.rows"], tensors[f"group.{index}.blocks"], columns, size)
        for row, done in zip(group, content["finished"], strict=True):
            _whole(not done or row[:3] == (0, 0, []), "a finished row holds tokens")
        tables.append(group)
        unused = _unused(group, range(known), size)
        shapes = set()
        for layer in layers:
            keys, values = (tensors[f"layer.{layer}.{name}"] for name in ("keys", "values"))
            shapes.add((*keys.shape, values.shape[3]))
            _whole(keys.shape[:3] == values.shape[:3], f"keys and values of layer {layer} do not fit each other")
            _whole(list(keys.shape[1:3]) == [known, size], f"blocks of layer {layer} do not fit the block tables")
            _whole(min(keys.shape[0], keys.shape[3], values.shape[3]) > 0, f"layer {layer} has no keys or no values")
            for held in (keys, values):
                _whole(not held[:, unused].any(), f"layer {layer} holds something behind the last tokens")
        _whole(len(shapes) <= 1, f"the layers of group {index} have keys and values of unlike shapes")
    return tables


def _expect(tensors: dict[str, torch.Tensor], name: str, shape: list[int | None], dtype: str) -> None:
    """See that a tensor has this shape (None: any size) and dtype."""
    tensor = tensors[name]
    fits = _dtype_name(tensor.dtype) == dtype and tensor.ndim == len(shape)
    fits = fits and all(want is None or want == size for want, size in zip(shape, tensor.shape, strict=True))
    _whole(fits, f"shape or dtype of {name} does not fit")


def _check_pads(content: dict[str, Any], real: torch.Tensor) -> None:
    """See that what the content says of pads is what `real` shows; see `CacheState` for the meaning."""
    columns, masked = content["columns"], content["masked"]
    any_token = real.any(1)
    leads = torch.where(any_token, real.to(torch.uint8).argmax(1), columns).tolist()
    counts = real.sum(1).tolist()
    _whole(content["lead"] == leads, "the leading pads are not those of the mask")
    inner = any(columns - lead != count for lead, count in zip(leads, counts, strict=True))
    _whole(content["inner_pads"] == inner, "pads behind tokens are not those of the mask")
    _whole((masked or 0) <= columns and bool(real[:, masked or 0 :].all()), "a pad lies behind the known mask")


def _rows_of(bounds: torch.Tensor, spelled: torch.Tensor, columns: int, size: int) -> tuple[list[_Row], int]:
    """The rows of one group and the number of distinct blocks they name."""
    names = spelled.tolist()
    rows, begin = [], 0
    places: list[int] = []  # position of the first slot of every block named so far
    for start, length, count in bounds.tolist():
        known = len(places)
        blocks = names[begin : begin + max(count, 0)]
        row = _Row(start, length, blocks, known)
        fresh = [block for block in blocks if block >= known]
        _whole(
            0 <= start <= length <= columns
            and start % size == 0
            and count == len(blocks) == len(set(blocks)) == -(-length // size) - start // size
            and (not blocks or min(blocks) >= 0)
            and fresh == list(range(known, known + len(fresh))),
            "a block table does not fit its row",
        )
        places.extend(start + place * size for place, block in enumerate(blocks) if block >= known)
        _whole(
            all(places[block] == start + place * size for place, block in enumerate(blocks)),
            "rows share a block at unlike positions",
        )
        begin += count
        rows.append(row)
    _whole(begin == len(names), "the block tables do not fit their rows")
    return rows, len(places)


def _whole(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(what)


def _fit_the_pool(saved: _Saved, model: Any, pool: KVPool) -> None:
    """Raise ValueError unless every table fits its group's window, and keys and values are such as the model makes."""
    content, tensors = saved.content, saved.tensors
    counts = tensors["real"].sum(1).tolist()
    for group, rows in zip(pool.groups, saved.tables, strict=True):
        # Once a pad follows a token, a sliding group stores pads, too: see `CacheState`.
        with_pads = group.window is not None and content["inner_pads"]
        for row, done, count, lead in zip(rows, content["finished"], counts, content["lead"], strict=True):
            held = content["columns"] - lead if with_pads else count
            _whole(done or row.length == held, f"a row of {held} tokens has {row.length} in its block table")
            first = 0 if group.window is None else max(row.length - group.window + 1, 0)
            _whole(row.start <= first, f"a row begins at token {row.start}, and the next one looks back to {first}")
    made = _shapes_made(model, pool)
    parameters = list(model.parameters())
    widest = max((size for parameter in parameters for size in parameter.shape), default=0)
    dtype = _dtype_name(model.dtype)
    dtypes = {dtype, "float32", *(_dtype_name(parameter.dtype) for parameter in parameters)}
    if dtype == "float32" or getattr(model.config, "quantization_config", None) is not None:
        dtypes.update(("bfloat16", "float16"))  # autocast, or what quantised weights are computed in
    for name, entry in content["layers"].items():
        heads, _, _, key_dim = entry["keys"]
        shape = (heads, key_dim, entry["values"][3])
        store = pool.stores.get(int(name))
        allowed = made or (None if store is None else [store.signature[:3]])
        _whole(
            allowed is None or shape in allowed,
            f"layer {name} has (kv heads, key dim, value dim) = {shape} in the file, and not {allowed} as the model "
            "makes them",
        )
        for place, made_as in enumerate(entry["made"]):
            possible = dtypes if store is None else {dtype, _dtype_name(store.signature[3 + place])}
            _whole(
                made_as in possible,
                f"layer {name} has keys or values that were made as {made_as}, where this model makes "
                f"{' or '.join(sorted(possible))}",
            )
        # Where neither says what they are: some weight of the model is as wide as what it makes.
        _whole(
            heads * max(shape[1:]) <= widest,
            f"layer {name} has keys and values of {heads} heads of {max(shape[1:])}, wider than the model's weights",
        )
        if _is_latent(pool, shape):
            keys, values = tensors[f"layer.{name}.keys"], tensors[f"layer.{name}.values"]
            _whole(
                content["checksums"][f"layer.{name}.keys"] == content["checksums"][f"layer.{name}.values"]
                and torch.equal(keys.view(torch.uint8), values.view(torch.uint8)),
                f"keys and values of layer {name}, which are one in this model, differ",
            )


# A config that speaks of heads in other words means something else by the usual ones, or has layers that differ.
_SPEAKS_OF_HEADS = re.compile("head|kv|query|attn_config|per_layer")
_USUAL_HEADS = frozenset(
    (
        "decoder_attention_heads", "encoder_attention_heads", "head_dim", "n_head", "num_attention_heads",
        "num_decoder_attention_heads", "num_encoder_attention_heads", "num_heads", "num_key_value_heads",
        "query_pre_attn_scalar",
    )
)  # fmt: skip


def _shapes_made(model: Any, pool: KVPool) -> list[tuple[int, int, int]] | None:
    """(kv heads, key dim, value dim) of a layer as the config says it, where it can be taken at its word; None: it
    does not say, or not for all layers alike."""
    if not type(model).__module__.startswith("transformers.") or (getattr(model, "_tp_size", None) or 1) > 1:
        return None  # code of somebody else; or heads that several processes have divided among them
    if pool.latent is not None:
        rank, rotated = pool.latent
        return [(1, rank + rotated, rank + rotated), (1, rank, rotated)]
    text = model.config.get_text_config(decoder=True)
    if any(_SPEAKS_OF_HEADS.search(name) and name not in _USUAL_HEADS for name in text.to_dict()):
        return None
    try:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    except Exception:  # configs whose layers differ raise errors of their own
        return None
    return [(heads, dim, dim)] if _is_count(heads) and _is_count(dim) else None


def _is_latent(pool: KVPool, shape: tuple[int, int, int]) -> bool:
    """Whether keys and values of this shape lie in the same memory, as `KVPool` decides it."""
    return pool.latent is not None and shape == (1, sum(pool.latent), sum(pool.latent))


def _restore(cache: "PagedCache", saved: _Saved, devices: dict[int, torch.device]) -> None:
    """Fill an empty cache: blocks of its pool, the stores' memory, and the state. All of it or nothing.

    Raises:
        OutOfBlocks: if the pool has too few blocks.
        ValueError: if the pool holds tokens of another shape, dtype or device.
        AssertionError: if the cache that came out breaks an invariant.
    """
    state, pool = cache.state, cache.pool
    content, tensors = saved.content, saved.tensors
    layers = [int(layer) for layer in content["layers"]]
    with pool.locked(), ExitStack() as locks:
        stores = dict(pool.stores)
        memories: list[tuple[LayerStore, Memory]] = []
        try:
            for layer in layers:
                pool.adopt(layer, *_examples(saved, layer, devices[layer]))
            for tables, rows in zip(state.tables, saved.tables, strict=True):
                tables.pool.require(sum(row.fresh for row in rows))
            ids = [_take(state, tables, rows) for tables, rows in zip(state.tables, saved.tables, strict=True)]
            for layer in layers:
                store, group = pool.stores[layer], pool.group_of[layer]
                # Held until the end: what another thread wrote meanwhile would be lost with the memory we go back from.
                locks.enter_context(store.lock)
                memories.append((store, store.memory))
                memory = store.ensure(state.tables[group].pool.num_blocks)
                for name, held in (("keys", memory.keys), ("values", memory.values)):
                    targets = torch.tensor(ids[group], dtype=torch.int64, device=held.device)
                    held.index_copy_(1, targets, tensors[f"layer.{layer}.{name}"].to(held.device))
                cache.layers[layer].columns, cache.layers[layer]._store = content["columns"], store
            state.columns, state.rows = content["columns"], content["rows"]
            state.lead, state.finished = list(content["lead"]), list(content["finished"])
            masked = content["masked"]
            state.real = None if masked is None else tensors["real"][:, :masked].clone()
            state.inner_pads, state.recording, state.blind = (content[k] for k in ("inner_pads", "recording", "blind"))
            cache.check()
        except BaseException:
            for store, memory in memories:
                store.memory = memory
            for tables in state.tables:
                tables.release_all()
            pool.stores.update(stores)
            for layer in pool.stores.keys() - stores.keys():
                del pool.stores[layer]
            raise


def _examples(saved: _Saved, layer: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of no token, as the model makes them for this layer: [1, num_kv_heads, 0, dim]."""
    made = saved.content["layers"][str(layer)]["made"]
    keys, values = (
        torch.empty(1, held.shape[0], 0, held.shape[3], dtype=getattr(torch, dtype), device=device)
        for held, dtype in zip(
            (saved.tensors[f"layer.{layer}.{name}"] for name in ("keys", "values")), made, strict=True
        )
    )
    return keys, values


def _take(state: CacheState, tables: RowTables, rows: list[_Row]) -> list[int]:
    """Take the blocks of one group and fill its empty tables with them, each shared as often as in the file.

    Returns:
        The id of every block of the file.
    """
    tables.add_rows(len(rows))
    room = state.room(tables, [row.length for row in rows])
    spread = room if len(rows) > 1 else 0
    taken = tables.pool.allocate_rows([row.fresh for row in rows], [None] * len(rows), spread, room)
    ids = list(chain.from_iterable(taken))
    for table, row in zip(tables.rows, rows, strict=True):
        tables.pool.share([ids[block] for block in row.blocks if block < row.known])
        table.extend([ids[block] for block in row.blocks])
        table.start, table.length = row.start, row.length
    return ids


def _layer_devices(model: Any, layers: list[int]) -> dict[int, torch.device]:
    """The device each cache layer's keys and values are made on: that of the module of this layer's weights."""
    found: dict[int, torch.device] = {}
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index not in found and (device := _device_of(module)) is not None:
            found[index] = device
    if found.keys() >= set(layers):
        return found
    device = _device_of(model) or model.device
    return {layer: found.get(layer, device) for layer in layers}


def _device_of(module: torch.nn.Module) -> torch.device | None:
    """Where a module computes: where its first weight is, or is brought to if it is offloaded; None: not known."""
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if parameter.device.type != "meta":
                return parameter.device
        hook = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            if (device := getattr(each, "execution_device", None)) is not None:
                return torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
    return None


# -- small things ------------------------------------------------------------------------------------------------------


def _bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor, as an array of them."""
    flat = tensor.detach().resolve_conj().resolve_neg().to("cpu").reshape(-1)
    if not flat.is_contiguous() or flat.stride(0) != 1:  # a single value may have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(_bytes(tensor)) if tensor.numel() else 0


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
