"""A filled cache in a file and back: what `PagedCache.save` and `PagedCache.load` do.

One safetensors file. `n` is the number of distinct blocks a layer group holds: a block that several rows share is
written once, and the tables name it as often as before.

    layer.<i>.keys     [num_kv_heads, n, block_size, key_dim]     zeros behind a row's last token
    layer.<i>.values   [num_kv_heads, n, block_size, value_dim]
    group.<g>.rows     [rows, 3] int64     start, length and number of blocks of each row's table
    group.<g>.blocks   [entries] int64     the rows' tables one after the other; blocks count in order of first mention
    real               [rows, m] bool      which of the first m columns are tokens; absent: all columns are
    extra.<name>                           see `_extra_tensors`

The metadata are the name and version of the format, a JSON text (`content`: the model's identity, shapes, dtypes, the
rest of the cache's state, a CRC-32 per tensor) and the CRC-32 of that text.
"""

import hashlib
import json
import os
import uuid
import weakref
import zlib
from collections import Counter
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
VERSION = 1

_SAMPLES = 64  # values, at least, that the fingerprint takes from a tensor that has as many


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
    content["model"] = _identity(target, cache.pool)
    content["checksums"] = {name: _checksum(tensor) for name, tensor in tensors.items()}
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
    _compare(path, saved, target, cache.pool)
    _restore(cache, saved, _layer_devices(target, list(cache.pool.group_of)))
    if cache.pool.owner is None:
        cache.pool.owner = weakref.ref(target)
    return cache


# -- what else a cache may hold ----------------------------------------------------------------------------------------


def _extra_tensors(state: CacheState) -> dict[str, torch.Tensor]:
    """Further tensors of a cache's state, by name; the file holds them as `extra.<name>`.

    The one place to write what the state gains: a line here, and a line in `_restore_extra_tensors` that reads it.
    """
    return {}


def _restore_extra_tensors(state: CacheState, extra: dict[str, torch.Tensor]) -> None:
    """Put back what `_extra_tensors` gave, where the file has it; CPU tensors."""


# -- which model it was ------------------------------------------------------------------------------------------------


def weights_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256, as hex digits, that tells models of unlike weights or adapters apart without reading all of them.

    Of every parameter and persistent buffer it takes name, shape, dtype and some 64 to 128 values spread over it, so
    two checkpoints that differ in a few single values look alike. Of weights that are offloaded (on the meta device) it
    takes no values. Which adapters are active, and how strongly, counts too.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.numel() and tensor.device.type != "meta":
            # An odd stride, or it would visit one column of a matrix only.
            digest.update(_bytes(tensor.detach().reshape(-1)[:: tensor.numel() // _SAMPLES | 1]))
    for name, module in model.named_modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):  # a PEFT layer
            active = [] if module.disable_adapters else list(module.active_adapters)
            scaling = getattr(module, "scaling", None) or {}
            digest.update(f"{name} {[(adapter, scaling.get(adapter)) for adapter in active]}\n".encode())
    return digest.hexdigest()


def _identity(model: Any, pool: KVPool) -> dict[str, Any]:
    """What must agree for stored keys and values to be this model's, as JSON has it."""
    text = model.config.get_text_config(decoder=True).to_dict()
    identity = {
        "class": type(model).__name__,
        "type": model.config.model_type,
        "layers": [[kind, compat.window_of(kind, arguments)[1]] for kind, arguments in pool.layer_types],
        "dtype": _dtype_name(model.dtype),
        # Positions are in the keys and not in the weights.
        "positions": {name: text[name] for name in sorted(text) if "rope" in name or "rotary" in name},
        "weights": weights_fingerprint(model),
    }
    return json.loads(json.dumps(identity, default=str))


# Key of the identity -> what it is called, and what to do where it differs.
_MEANING = {
    "class": ("class", "Load it with the model it was saved from."),
    "type": ("model_type", "Load it with the model it was saved from."),
    "layers": ("cache of", "Load it with the model it was saved from; the windows must agree too."),
    "dtype": ("dtype", "Load the model in the file's dtype, or fill a new cache."),
    "positions": ("position settings", "Give the model's config the file's settings, or fill a new cache."),
    "weights": (
        "weights of fingerprint",
        "Keys and values are of use to the weights and adapters that made them alone: load the checkpoint, and "
        "activate the adapters, that the file was saved with, or fill a new cache.",
    ),
}


def _compare(path: str | os.PathLike[str], saved: _Saved, model: Any, pool: KVPool) -> None:
    """Raise ValueError, saying what differs, unless this model in this pool can go on from the file."""
    content = saved.content
    here = _identity(model, pool)
    for key, (what, advice) in _MEANING.items():
        there = content["model"][key]
        if there != here[key]:
            raise ValueError(
                f"{path} was saved from another model: {what} {_shown(key, there)} in the file, "
                f"{_shown(key, here[key])} here. {advice}"
            )
    if content["groups"] != [group.layers for group in pool.groups]:
        raise ValueError(f"{path} groups the layers {content['groups']}, this version of hf_paged does not")
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


def _shown(key: str, value: Any) -> str:
    if key == "layers":
        counts = Counter(kind if window is None else f"{kind} of {window}" for kind, window in value)
        return f"{len(value)} layers ({', '.join(f'{count} {kind}' for kind, count in counts.items())})"
    return value[:12] if key == "weights" else str(value)


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
        unused = torch.arange(tables.block_size) >= torch.tensor(_tokens_in(tables, ids), dtype=torch.int64)[:, None]
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
    if state.real is not None:
        tensors["real"] = state.real.clone(memory_format=torch.contiguous_format)
    for name, tensor in _extra_tensors(state).items():
        tensors[f"extra.{name}"] = tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
    content = {
        "block_size": pool.config.block_size,
        "kv_dtype": pool.config.kv_dtype,
        "groups": [group.layers for group in pool.groups],
        "layers": layers,
        "rows": state.rows,
        "columns": state.columns,
        "lead": state.lead,
        "finished": state.finished,
        "inner_pads": state.inner_pads,
        "recording": state.recording,
        "blind": state.blind,
    }
    return tensors, content


def _tokens_in(tables: RowTables, ids: list[int]) -> list[int]:
    """Tokens in each of the blocks `ids`: those of the row that fills it most."""
    tokens = dict.fromkeys(ids, 0)
    for row in tables.rows:
        position = row.start
        for block in row.blocks:
            tokens[block] = max(tokens[block], min(tables.block_size, row.length - position))
            position += tables.block_size
    return list(tokens.values())


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
    """Read a file and see that it is whole.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is cut short, damaged, or not of this format and version.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no saved cache at {path}")
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; name the file that cache.save(path) has written")
    with open(path, "rb"):
        pass  # what the system has against it is said as the system says it
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            content = _content_of(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        return _Saved(content, tensors, _tables_of(content, tensors))
    except _NotOurs as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    except (SafetensorError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no saved cache, or is damaged or cut short: {error}. Save it again with cache.save(path)."
        ) from error


class _NotOurs(Exception):
    """A whole safetensors file of another kind."""


def _content_of(metadata: dict[str, str]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise _NotOurs("it is a safetensors file, but not one that cache.save(path) has written")
    if metadata["version"] != str(VERSION):
        raise _NotOurs(
            f"it is of version {metadata['version']} of the format, this hf_paged reads version {VERSION}. Use the "
            "hf_paged that saved it, or save it again with this one."
        )
    text = metadata["content"]
    _whole(metadata["crc32"] == str(zlib.crc32(text.encode())), "the checksum of the metadata does not fit")
    return json.loads(text)


def _tables_of(content: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[list[_Row]]:
    """The rows of every group, once all parts of the file are found to fit each other."""
    _whole(content["checksums"].keys() == tensors.keys(), "tensors are missing or were added")
    for name, tensor in tensors.items():
        _whole(_checksum(tensor) == content["checksums"][name], f"the checksum of {name} does not fit")
    rows, columns, size = content["rows"], content["columns"], content["block_size"]
    _whole(rows > 0 and columns > 0 and size > 0, "it holds no token")
    _whole(len(content["lead"]) == len(content["finished"]) == rows, "the number of rows does not fit")
    if "real" in tensors:
        real = tensors["real"]
        _whole(real.dtype == torch.bool and real.ndim == 2, "the pads are not [rows, columns] of bools")
        _whole(real.shape[0] == rows and real.shape[1] <= columns, "the pads do not fit the columns")
    tables = []
    for index, layers in enumerate(content["groups"]):
        group, known = _rows_of(tensors[f"group.{index}.rows"], tensors[f"group.{index}.blocks"], columns, size)
        _whole(len(group) == rows, f"the number of rows of group {index} does not fit")
        tables.append(group)
        for layer in layers:
            for place, name in enumerate(("keys", "values")):
                tensor, entry = tensors[f"layer.{layer}.{name}"], content["layers"][str(layer)]
                fits = (
                    list(tensor.shape) == entry[name]
                    and list(tensor.shape[1:3]) == [known, size]
                    and _dtype_name(tensor.dtype) == entry["stored"][place]
                )
                _whole(fits, f"shape or dtype of layer.{layer}.{name} does not fit")
    return tables


def _rows_of(bounds: torch.Tensor, spelled: torch.Tensor, columns: int, size: int) -> tuple[list[_Row], int]:
    """The rows of one group and the number of distinct blocks they name."""
    names = spelled.tolist()
    rows, known, begin = [], 0, 0
    for start, length, count in bounds.tolist():
        blocks = names[begin : begin + count]
        row = _Row(start, length, blocks, known)
        fresh = [block for block in blocks if block >= known]
        _whole(
            0 <= length <= columns
            and count == len(blocks) == len(set(blocks)) == -(-length // size) - start // size
            and (not blocks or (0 <= start <= length and start % size == 0 and min(blocks) >= 0))
            and fresh == list(range(known, known + len(fresh))),
            "a block table does not fit its row",
        )
        known += len(fresh)
        begin += count
        rows.append(row)
    _whole(begin == len(names), "the block tables do not fit their rows")
    return rows, known


def _whole(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(what)


def _restore(cache: "PagedCache", saved: _Saved, devices: dict[int, torch.device]) -> None:
    """Fill an empty cache: blocks of its pool, the stores' memory, and the state. All of it or nothing.

    Raises:
        OutOfBlocks: if the pool has too few blocks.
        ValueError: if the pool holds tokens of another shape, dtype or device.
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
            state.real = tensors["real"].clone() if "real" in tensors else None
            state.inner_pads, state.recording, state.blind = (content[k] for k in ("inner_pads", "recording", "blind"))
            begin = len("extra.")
            extra = {name[begin:]: tensor.clone() for name, tensor in tensors.items() if name.startswith("extra.")}
            _restore_extra_tensors(state, extra)
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
        if not isinstance(index, int) or index in found:
            continue
        parameter = next(module.parameters(), None)
        if parameter is not None and parameter.device.type != "meta":
            found[index] = parameter.device
        elif (device := getattr(getattr(module, "_hf_hook", None), "execution_device", None)) is not None:
            found[index] = torch.empty(0, device=device).device  # offloaded weights; "cuda" becomes "cuda:0"
    return {layer: found.get(layer, model.device) for layer in layers}


# -- small things ------------------------------------------------------------------------------------------------------


def _bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor, as an array of them."""
    return tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(_bytes(tensor)) if tensor.numel() else 0


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
