"""The checksum over weights: what changes it, what does not, and that each way of reading sees the same of both."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged import checksum
from hf_paged.cpu_kernels import library as compiled

WAYS = {
    "kernel": checksum.by_kernel,
    "kernel, short chunks": lambda found: checksum.by_kernel(found, 128),
    "xxhash": checksum.by_xxhash,
    "device": lambda found: tuple(checksum.device_numbers(torch.device("cpu"), found).tolist()),
}
FLOATS8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool]
DTYPES += [*FLOATS8, torch.complex64, torch.complex128]


@pytest.fixture(params=WAYS, scope="module")
def numbers(request):
    """`numbers(tensors)`: what this way of reading makes of their storages."""
    if request.param.startswith("kernel") and compiled.library() is None:
        pytest.skip("no C compiler here")
    way = WAYS[request.param]
    return lambda *tensors: way(checksum.storages(tensors))


@pytest.fixture(params=["kernel", "xxhash"])
def of(request, monkeypatch):
    """`of(*tensors)`: their checksum, host memory read by the kernel or by xxhash."""
    if request.param == "kernel" and compiled.library() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(checksum, "_host_function", lambda: WAYS[request.param])
    return lambda *tensors: checksum.finish(checksum.begin(tensors))


def bytes_of(seed: int, count: int) -> torch.Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def unaligned(content: torch.Tensor, ahead: int) -> torch.Tensor:
    """These bytes in a storage whose address is `ahead` behind a multiple of 64."""
    memory = np.zeros(len(content) + 128, dtype=np.uint8)
    first = -memory.ctypes.data % 64 + ahead
    memory[first : first + len(content)] = content.numpy()
    tensor = torch.from_numpy(memory[first : first + len(content)])
    assert tensor.untyped_storage().data_ptr() % 64 == ahead and tensor.untyped_storage().nbytes() == len(content)
    return tensor


# -- every way of reading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [*range(131), 255, 256, 257, 511, 512, 513, 1023, 4096 + 3])
def test_every_bit_counts(numbers, length):
    content = bytes_of(length, length)
    seen = {numbers(content)}
    places = (
        range(length) if length <= 130 else {0, 1, 63, 64, 127, 128, length // 2, length - 65, length - 2, length - 1}
    )
    for place, bit in itertools.product(places, range(8)):
        content[place] ^= 1 << bit
        seen.add(numbers(content))
        content[place] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(places)


def test_every_bit_counts_where_chunks_meet(numbers):
    content = bytes_of(0, 2 * checksum.CHUNK + 77)
    seen = {numbers(content)}
    edges = [0, checksum.CHUNK // 4, checksum.CHUNK, 2 * checksum.CHUNK, len(content)]
    places = {place for edge in edges for place in range(edge - 2, edge + 2) if 0 <= place < len(content)}
    for place, bit in itertools.product(places, (0, 7)):
        content[place] ^= 1 << bit
        seen.add(numbers(content))
        content[place] ^= 1 << bit
    assert len(seen) == 1 + 2 * len(places)


def test_zeros_of_unlike_lengths_differ(numbers):
    """But for the device's way, whose lengths are in the layout."""
    lengths = [1, 2, 3, 4, 63, 64, 65, 128, 255, 256, 257, 320]
    found = {numbers(torch.zeros(length, dtype=torch.uint8)) for length in lengths}
    if len(found) == 1:
        found = {checksum.finish(checksum.begin([torch.zeros(length, dtype=torch.uint8)])) for length in lengths}
    assert len(found) == len(lengths)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_two_places_that_change_their_content_show(numbers, data):
    """Elements, runs, and blocks as long as a stripe, a part of a chunk, a chunk."""
    size = data.draw(st.sampled_from([1, 2, 4, 8, 64, 128, 512]))
    count = data.draw(st.integers(2, 40))
    first, second = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    content = bytes_of(data.draw(st.integers(0, 9)), size * count).view(count, size)
    other = content.clone()
    other[[first, second]] = other[[second, first]]
    assert torch.equal(content, other) == (numbers(content) == numbers(other))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([0x80000000, 0x8000, 0x80008000, 1]), min_size=2, max_size=4), st.data())
def test_signs_of_a_few_elements_show(numbers, masks, data):
    words = bytes_of(3, 4 * 3000).view(torch.int32)
    before = numbers(words)
    places = data.draw(st.lists(st.integers(0, 2999), min_size=len(masks), max_size=len(masks), unique=True))
    for place, mask in zip(places, masks, strict=True):
        words[place] ^= mask - 2**32 if mask >= 2**31 else mask
    assert numbers(words) != before


def test_tensors_that_change_places_or_cut_elsewhere_show(numbers):
    a, b = bytes_of(1, 300), bytes_of(2, 300)
    whole = torch.cat([a, b])
    cuts = [whole[:100].clone(), whole[100:].clone()], [whole[:200].clone(), whole[200:].clone()]
    results = [numbers(a, b), numbers(b, a), numbers(a, a.clone()), numbers(a), numbers(*cuts[0]), numbers(*cuts[1])]
    assert len(set(results)) == len(results)
    tiny = [torch.tensor(value) for value in (1.0, 2.0, 3.0)]
    assert len({numbers(*order) for order in itertools.permutations(tiny)}) == 6


@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 4, 8, 31, 63])
def test_addresses_do_not_count(numbers, ahead):
    for length in (1, 7, 64, 129, 1000, 70001):
        content = bytes_of(length, length)
        assert numbers(unaligned(content, ahead)) == numbers(content)


def test_content_with_equal_halves_and_all_ones(numbers):
    """What the arithmetic multiplies is then 0, or the largest there is."""
    fills = (0, 1, -1, 2**31 - 1, -(2**31))
    results = set()
    for fill in fills:
        words = torch.full((2000,), fill, dtype=torch.int32)
        results.add(numbers(words))
        words[1234] ^= 1
        results.add(numbers(words))
    assert len(results) == 2 * len(fills)


def test_nothing_is_read_of_nothing(numbers):
    assert numbers() == numbers()
    assert numbers(torch.empty(0)) == numbers(torch.empty(3, 0, 2))
    content = bytes_of(0, 100)
    assert numbers(torch.empty(0), content)[:1] != numbers()[:1]


@pytest.mark.parametrize("name", ["kernel", "device"])
def test_threads_do_not_count(name, monkeypatch):
    if name == "kernel" and compiled.library() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(checksum, "WORTH_THREADS", 0)
    found = checksum.storages([bytes_of(seed, length) for seed, length in enumerate([5_000_001, 3, 64, 1_200_000])])
    results = set()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 2, 1):
            torch.set_num_threads(threads)
            results.add(WAYS[name](found))
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


# -- on a device -------------------------------------------------------------------------------------------------------


def slowly(found: list[checksum.Storage]) -> tuple[int, ...]:
    """`device_numbers`, word by word, in Python's numbers."""
    most = 2**64 - 1
    step, mix, between, first, second = (number & most for number in checksum.CONSTANTS)

    def fold(number: int, bits: int) -> int:
        return number ^ number >> bits

    position, sums = 0, [0, 0]
    for ordinal, storage in enumerate(found):
        content = bytes(torch.empty(0, dtype=torch.uint8).set_(storage.held).tolist())
        for begin in range(0, len(content), 4):
            word = int.from_bytes(content[begin : begin + 4].ljust(4, b"\0"), "little", signed=True)
            mixed = position * step + (ordinal + 1) * (checksum.STORAGE_STEP & most) & most
            mixed = fold(fold(mixed, 32) * mix & most, 29)
            sums[0] += word * (fold(mixed * first & most, 32) | 1)
            sums[1] += word * (fold((mixed ^ between) * second & most, 32) | 1)
            position += 1
    return tuple(checksum.signed(number) for number in sums)


@pytest.mark.parametrize("words", [checksum.WORDS, 100])
def test_what_is_computed_on_a_device_is_the_sum_of_words_times_keys(words, monkeypatch):
    monkeypatch.setattr(checksum, "WORDS", words)
    found = checksum.storages([bytes_of(seed, length) for seed, length in enumerate([1, 4, 0, 403, 6, 4000])])
    assert WAYS["device"](found) == slowly(found)
    found = checksum.storages([unaligned(bytes_of(1, 1003), 1), unaligned(bytes_of(2, 404), 4)])
    assert WAYS["device"](found) == slowly(found)


def test_numbers_of_devices_come_in_order_and_may_be_brought_over_by_the_caller(monkeypatch):
    weights = [torch.randn(3), torch.randn(4)]
    devices = [torch.device("cuda", 1), torch.device("cuda", 0)]
    parts = {
        (device, 64 + index, 8): checksum.Storage(device, 64 + index, 8, weight.untyped_storage())
        for index, (device, weight) in enumerate(zip(devices, weights, strict=True))
    }
    monkeypatch.setattr(checksum, "_storages", lambda tensors: parts)
    monkeypatch.setattr(checksum, "_layout", lambda tensors, found: 7)
    monkeypatch.setattr(checksum, "device_numbers", lambda device, found: torch.tensor([device.index, len(found)]))
    pending = checksum.begin([])
    assert pending.host[0] == 7
    assert checksum.finish(pending) == (*pending.host, 0, 1, 1, 1)
    assert checksum.finish(pending, [torch.tensor([5, 6]), torch.tensor([7, 8])]) == (*pending.host, 5, 6, 7, 8)


def test_where_the_gpus_kernel_fails_the_operators_do_its_work(monkeypatch):
    """Here there is none: entering the device fails as a kernel would."""
    monkeypatch.setattr(checksum, "_triton_failed", False)
    asked = []
    monkeypatch.setattr(checksum, "_device_numbers", lambda device, found, add_words: asked.append(add_words))
    monkeypatch.setattr(torch.cuda, "device", lambda device: 1 / 0)
    for _ in range(2):
        checksum.device_numbers(torch.device("cuda", 0), [])
    assert asked == [checksum.add_words_by_operators] * 2 and checksum._triton_failed


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_the_same_content_gives_the_same_and_hashes(of):
    weights = [torch.randn(5, 7), torch.randn(3), torch.tensor(2.0), torch.empty(0, 4)]
    once = of(*weights)
    assert once == of(*weights) == of(*(weight.clone() for weight in weights))
    assert all(type(number) is int for number in once) and hash(once)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(of, dtype):
    size = dtype.itemsize
    content = bytes_of(0, 24 * size)
    if dtype is torch.bool:
        content &= 1
    tensor = content.view(dtype).view(4, 6)
    before = of(tensor)
    content[5 * size] ^= 1
    assert of(tensor) != before
    assert of(content.view(torch.uint8)) != before, "what the bytes are counts"


def test_a_write_that_moves_no_counter_shows(of):
    weight = torch.nn.Parameter(torch.randn(100, 9))
    before, version = of(weight), weight._version
    weight.data[3, 4] += 1e-3
    weight.data.numpy()
    assert of(weight) != before and weight._version == version


def test_reading_leaves_tensors_as_they_are(of):
    weight = torch.nn.Parameter(torch.randn(100, 9))
    (weight * 2).sum().backward()
    version = weight._version, weight.grad._version
    once = of(weight, weight.grad)
    with torch.inference_mode():
        assert of(weight, weight.grad) == once
        made_here = torch.ones(8)
        ones = of(made_here)
    assert of(made_here) == of(torch.ones(8)) == ones
    assert version == (weight._version, weight.grad._version)
    assert not checksum.device_numbers(torch.device("cpu"), checksum.storages([weight])).requires_grad
    with torch.inference_mode():
        assert WAYS["device"](checksum.storages([weight, made_here]))


def test_how_tensors_lie_in_memory_counts(of):
    whole = torch.arange(24.0)
    views = [
        [whole], [whole.view(4, 6)], [whole.view(4, 6).T], [whole.view(4, 6)[1:]], [whole[::2]], [whole[1:13]],
        [whole, whole], [whole.clone(), whole.clone()], [whole.view(torch.int32)], [whole.expand(2, 24)],
        [whole[:12], whole[12:]], [whole[12:], whole[:12]],
    ]  # fmt: skip
    results = [of(*some) for some in views]
    assert len(set(results)) == len(results)
    number = torch.view_as_complex(torch.randn(3, 2))
    assert len({of(number), of(number.conj()), of(number.conj().imag)}) == 3


def test_what_is_between_and_behind_strided_elements_is_read_too(of):
    whole = torch.zeros(50)
    view = whole[5:40:7]
    before = of(view)
    whole[6] = 1
    assert of(view) != before


def test_tied_weights_are_read_once(of, monkeypatch):
    weight = torch.randn(1000)
    tied = [weight, weight.view(10, 100), weight[5:], weight.detach()]
    assert len(checksum.storages(tied)) == 1 and checksum.num_bytes(tied) == 4000
    assert of(*tied) != of(weight, weight.clone().view(10, 100), weight[5:], weight.detach())


def test_num_bytes_counts_storages():
    whole = torch.zeros(100)
    tensors = [whole[:10], whole[50:], torch.zeros(3, dtype=torch.bool), torch.empty(0), torch.zeros(2, device="meta")]
    assert checksum.num_bytes(tensors) == 400 + 3 + 0 + 8
    assert checksum.num_bytes([]) == 0


def test_weights_on_meta_have_a_layout_only(of):
    assert of(torch.empty(3, device="meta")) == of(torch.empty(3, device="meta")) != of(torch.empty(4, device="meta"))


def test_no_weights_at_all(of):
    assert of() == of()


def test_several_threads_at_once_get_the_same(of):
    weights = [torch.randn(300_000), torch.randn(7)]
    right, found = of(*weights), []
    threads = [threading.Thread(target=lambda: found.extend(of(*weights) for _ in range(5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [right] * 20


@pytest.mark.parametrize("there", [True, False])
def test_which_function_reads_is_chosen_once(there, monkeypatch):
    asked = []
    monkeypatch.setattr(checksum, "library", lambda: asked.append(1) or (object() if there else None))
    checksum._kernels.cache_clear()
    try:
        chosen = {checksum._host_function() for _ in range(3)}
    finally:
        checksum._kernels.cache_clear()
    assert chosen == {checksum.by_kernel if there else checksum.by_xxhash} and len(asked) == 1
