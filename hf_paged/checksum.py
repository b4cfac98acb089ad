"""A checksum over what is in a model's weights: whether they are still what computed a prefix.

Fused optimizers and writes through `tensor.data` change weights and move neither version counters nor addresses. So
every byte is read. Weights in host memory are read by a kernel in C (`cpu_kernels`), or by the package xxhash where
there is none. Weights on another device are read there, and nothing waits for it: `begin` gives what the host knows and
a tensor per device, `finish` reads those.

The result depends on the content, on its order and on how the tensors are laid out, on nothing else: not on addresses,
threads or the time. Which function reads host memory differs from process to process, and so may the numbers.
"""

import ctypes
import functools
import hashlib
import itertools
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import xxhash

from .cpu_kernels.library import library

# Bytes that a thread of the C kernel takes at a time.
CHUNK = 1 << 20
# Bytes below which waking other threads costs more than they save.
WORTH_THREADS = 4 << 20
# 32-bit words of a device's weights that PyTorch's operators take at a time: at 8 bytes each for the words, two keys
# and two temporary tensors it is 40 MB of scratch.
WORDS = 1 << 20

logger = logging.getLogger(__name__)


class Storage(NamedTuple):
    """Memory that one or several tensors lie in.

    Attributes:
        device: where it is.
        address: of its first byte.
        num_bytes: its size.
        held: keeps it alive.
    """

    device: torch.device
    address: int
    num_bytes: int
    held: torch.UntypedStorage


class Pending(NamedTuple):
    """A checksum that has begun.

    Attributes:
        host: what is known: a digest of the layout, and the numbers of all tensors in host memory.
        on_device: for each other device that holds weights, in the order of type and index: [2] int64 on that device,
            not waited for.
    """

    host: tuple[int, ...]
    on_device: list[torch.Tensor]


def begin(tensors: Sequence[torch.Tensor]) -> Pending:
    """Read all of these tensors' memory; what is not in host memory is read later, in the order of its device's stream.

    Whole storages are read, each once: of a view, what lies beside it as well.

    Args:
        tensors: plain strided tensors of any dtype, on any devices; on "meta" there is nothing to read.
    """
    found = _storages(tensors)
    layout = _layout(tensors, found)
    devices: dict[torch.device, list[Storage]] = {}
    for storage in found.values():
        if storage.device.type != "meta":
            devices.setdefault(storage.device, []).append(storage)
    on_host = [storage for device, own in devices.items() if device.type == "cpu" for storage in own]
    elsewhere = sorted((device for device in devices if device.type != "cpu"), key=_place)
    return Pending(
        (layout, *_host_function()(on_host)),
        [device_numbers(device, devices[device]) for device in elsewhere],
    )


def finish(pending: Pending, arrived: Sequence[torch.Tensor] | None = None) -> tuple[int, ...]:
    """The checksum, which compares and hashes.

    Args:
        arrived: host copies of `pending.on_device`; None: they are waited for and read here.
    """
    numbers = pending.on_device if arrived is None else arrived
    return (*pending.host, *itertools.chain.from_iterable(tensor.tolist() for tensor in numbers))


def storages(tensors: Sequence[torch.Tensor]) -> list[Storage]:
    """The distinct memory that tensors lie in, in the order in which it comes up."""
    return list(_storages(tensors).values())


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all distinct storages: what `begin` reads. Reads none of them."""
    return sum(size for _, _, size in _storages(tensors))


# -- what is read -----------------------------------------------------------------------------------------------------

_Key = tuple[torch.device, int, int]  # device, address, bytes


def _key(device: torch.device, storage: torch.UntypedStorage) -> _Key:
    return device, storage.data_ptr(), storage.nbytes()


def _storages(tensors: Sequence[torch.Tensor]) -> dict[_Key, Storage]:
    found: dict[_Key, Storage] = {}
    for tensor in tensors:
        held = tensor.untyped_storage()
        key = _key(tensor.device, held)
        if key not in found:
            found[key] = Storage(*key, held)
    return found


def _layout(tensors: Sequence[torch.Tensor], found: dict[_Key, Storage]) -> int:
    """Digest of how the tensors lie in their storages."""
    ordinals = {key: ordinal for ordinal, key in enumerate(found)}
    parts = [
        (
            ordinals[_key(tensor.device, tensor.untyped_storage())],
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            _name(tensor.dtype),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        for tensor in tensors
    ]
    sizes = [(_place(storage.device), storage.num_bytes) for storage in found.values()]
    return int.from_bytes(hashlib.blake2b(repr((parts, sizes)).encode(), digest_size=8).digest(), "little")


_name = functools.cache(str)


@functools.cache
def _place(device: torch.device) -> tuple[str, int]:
    return device.type, -1 if device.index is None else device.index


# -- host memory ------------------------------------------------------------------------------------------------------


@functools.cache
def _kernels() -> ctypes.CDLL | None:
    """The compiled kernels, if this process has them: asked for once, so that its numbers compare."""
    return library()


def _host_function() -> Callable[[Sequence[Storage]], tuple[int, ...]]:
    return by_xxhash if _kernels() is None else by_kernel


def by_kernel(found: Sequence[Storage], chunk_bytes: int = CHUNK) -> tuple[int, int]:
    """Two 64-bit numbers of what is in these storages, by the kernel in C, on as many threads as PyTorch has.

    Args:
        found: in host memory.
        chunk_bytes: a multiple of 64; the numbers depend on it.
    """
    kernels = _kernels()
    assert kernels is not None
    entries, chunks, total = array("Q"), 0, 0
    for storage in found:
        if storage.num_bytes:
            entries.extend((storage.address, storage.num_bytes, chunks))
            chunks += -(-storage.num_bytes // chunk_bytes)
            total += storage.num_bytes
    sums = array("Q", (0, 0))
    threads = torch.get_num_threads() if total > WORTH_THREADS else 1
    addresses = entries.buffer_info()[0], sums.buffer_info()[0]
    kernels.hf_paged_checksum(addresses[0], len(entries) // 3, chunk_bytes, chunks, threads, addresses[1])
    return sums[0], sums[1]


class Probe:
    """Reads a sample of what is in tensors' memory, again and again: a few places of each, in no time.

    It shows that weights were scaled, or others put in their place; not that a few elements were changed.

    Args:
        tensors: plain strided tensors in host memory.
    """

    PLACES = 4
    BYTES = 64

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._parts: list[Storage] = []
        for storage in storages(tensors):
            size = min(self.BYTES, storage.num_bytes)
            last = storage.num_bytes - size
            for address in sorted(
                {storage.address + last * place // (self.PLACES - 1) for place in range(self.PLACES)}
            ):
                self._parts.append(Storage(storage.device, address, size, storage.held))
        self._entries = array("Q")
        for chunk, part in enumerate(part for part in self._parts if part.num_bytes):
            self._entries.extend((part.address, part.num_bytes, chunk))

    def numbers(self) -> tuple[int, ...]:
        """What stands there now, as two 64-bit numbers or one of 128."""
        kernels = _kernels()
        if kernels is None:
            return by_xxhash(self._parts)
        sums, count = array("Q", (0, 0)), len(self._entries) // 3
        addresses = self._entries.buffer_info()[0], sums.buffer_info()[0]
        kernels.hf_paged_checksum(addresses[0], count, CHUNK, count, 1, addresses[1])
        return sums[0], sums[1]


def by_xxhash(found: Sequence[Storage]) -> tuple[int]:
    """A 128-bit number of what is in these storages, by the package xxhash, on one thread."""
    hasher = xxhash.xxh3_128()
    for storage in found:
        if storage.num_bytes:
            hasher.update(storage.num_bytes.to_bytes(8, "little"))
            hasher.update(memoryview((ctypes.c_char * storage.num_bytes).from_address(storage.address)))
    return (hasher.intdigest(),)


# -- another device ---------------------------------------------------------------------------------------------------

_triton_failed = False
_AddWords = Callable[[torch.Tensor, int, torch.Tensor, tuple[int, int, int, int, int]], None]


def device_numbers(device: torch.device, found: Sequence[Storage]) -> torch.Tensor:
    """Two 64-bit numbers of what is in these storages, [2] int64, computed where they are. Waits for nothing.

    A multilinear hash: the sum over all 32-bit words of word x key, modulo 2^64. A key is odd and belongs to a word's
    position in all of the device's storages and to its storage's ordinal, so a change of one word always shows; the two
    numbers have keys of their own.

    Args:
        device: of all storages; host memory will do as well.
    """
    global _triton_failed
    if device.type == "cuda" and not _triton_failed:
        try:
            from .triton_kernels.checksum import add_words

            with torch.cuda.device(device):
                return _device_numbers(device, found, add_words)
        except Exception as error:
            _triton_failed = True
            logger.info("no Triton kernel for checksums, PyTorch's operators do its work: %s", error)
    return _device_numbers(device, found, add_words_by_operators)


@torch.no_grad()
def _device_numbers(device: torch.device, found: Sequence[Storage], add_words: _AddWords) -> torch.Tensor:
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    position = 0
    for ordinal, storage in enumerate(found):
        content = torch.empty(0, dtype=torch.uint8, device=device).set_(storage.held)
        whole = storage.num_bytes // 4 * 4
        if whole:
            if storage.address % 4 == 0:
                add_words(content[:whole].view(torch.int32), key_start(ordinal, position), sums, CONSTANTS)
            else:  # a device reads words where words may lie
                for first in range(0, whole, 4 * WORDS):
                    words = content[first : min(first + 4 * WORDS, whole)].clone().view(torch.int32)
                    add_words(words, key_start(ordinal, position + first // 4), sums, CONSTANTS)
        position += whole // 4
        if whole < storage.num_bytes:
            last = torch.zeros(4, dtype=torch.uint8, device=device)
            last[: storage.num_bytes - whole] = content[whole:]
            add_words_by_operators(last.view(torch.int32), key_start(ordinal, position), sums)
            position += 1
    return sums


def signed(number: int) -> int:
    """A number modulo 2^64, as an int64 has it."""
    return (number + 2**63) % 2**64 - 2**63


# Of the keys, odd: steps from word to word and from storage to storage, and factors that mix.
STEP, STORAGE_STEP = signed(0x9E3779B97F4A7C15), signed(0xD1342543DE82EF95)
MIX, BETWEEN = signed(0xFF51AFD7ED558CCD), signed(0x243F6A8885A308D3)
FIRST, SECOND = signed(0xC4CEB9FE1A85EC53), signed(0xBF58476D1CE4E5B9)
CONSTANTS = (STEP, MIX, BETWEEN, FIRST, SECOND)


def key_start(ordinal: int, position: int) -> int:
    """What the keys of words are made of, from this position in all storages on, in the storage of this ordinal."""
    return signed(position * STEP + (ordinal + 1) * STORAGE_STEP)


def add_words_by_operators(
    words: torch.Tensor, start: int, sums: torch.Tensor, constants: tuple[int, int, int, int, int] = CONSTANTS
) -> None:
    """Add word x key to both sums, modulo 2^64, by PyTorch's operators. `triton_kernels.checksum` does the same, to the
    bit.

    Args:
        words: [num_words] int32
        start: of the first word's keys, see `key_start`.
        sums: [2] int64, on the words' device.
    """
    step, mix, between, first_factor, second_factor = constants
    for begin in range(0, len(words), WORDS):
        some = words[begin : begin + WORDS].long()
        mixed = torch.arange(len(some), device=words.device).mul_(step).add_(signed(start + begin * step))
        mixed = _fold(_fold(mixed, 32).mul_(mix), 29)
        sums[1].add_(_fold((mixed ^ between).mul_(second_factor), 32).bitwise_or_(1).mul_(some).sum())
        sums[0].add_(_fold(mixed.mul_(first_factor), 32).bitwise_or_(1).mul_(some).sum())


def _fold(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """numbers ^= numbers >> bits, as if they had no sign."""
    return numbers.bitwise_xor_((numbers >> bits).bitwise_and_((1 << (64 - bits)) - 1))
