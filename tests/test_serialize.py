"""A cache in a file and back: the content is equal, what does not fit is refused, and errors leave nothing behind."""

import copy
import gc
import json
import os
import weakref
import zlib

import pytest
import torch
import transformers
from models import assert_close, build, prompts, run, with_cache
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_paged
from hf_paged import KVPool, OutOfBlocks, PagedCache, PagedConfig, serialize
from hf_paged.store import LayerStore

pytestmark = pytest.mark.filterwarnings("ignore:hf_paged", "ignore:.*past_key_values")

FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss"]
EVERYTHING = {"max_new_tokens": 8, "min_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prefix.safetensors"


def fill(model, inputs, cache):
    """Run a prompt through the model, with the positions that `generate` would give."""
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(**inputs, position_ids=positions, **with_cache(cache))


def filled(family, *lengths, dtype=torch.float32, **options):
    """`(patched model, prompts, cache of all but the last column)`; options are `PagedConfig` fields."""
    options.setdefault("block_size", 4)
    model = hf_paged.patch(build(family).to(dtype), **options)
    inputs = prompts(*lengths)
    cache = PagedCache(model.config, pool=model.paged_pool)
    fill(model, {name: entry[:, :-1] for name, entry in inputs.items()}, cache)
    return model, inputs, cache


def spelled(tables):
    """Starts, lengths and blocks of the rows, blocks numbered in the order of first mention."""
    numbers = {}
    return [
        (row.start, row.length, [numbers.setdefault(block, len(numbers)) for block in row.blocks]) for row in tables
    ]


def assert_same(cache, other):
    """Two caches have equal content, and rows of the one share what rows of the other share."""
    assert len(cache) == len(other) and type(cache) is type(other)
    for left, right in zip(cache.layers, other.layers, strict=True):
        assert left.columns == right.columns and left.sliding_window == right.sliding_window
        for mine, theirs in ((left.keys, right.keys), (left.values, right.values)):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    for name in ("columns", "rows", "lead", "inner_pads", "finished", "recording", "blind"):
        assert getattr(cache.state, name) == getattr(other.state, name), name
    left, right = cache.state.real, other.state.real
    assert (left is None) == (right is None) and (left is None or torch.equal(left, right))
    for mine, theirs in zip(cache.state.tables, other.state.tables, strict=True):
        assert spelled(mine.rows) == spelled(theirs.rows)
        mine, theirs = ({block for row in entry.rows for block in row.blocks} for entry in (mine, theirs))
        assert len(mine) == len(theirs)
    for entry in (cache, other):
        entry.check()
        entry.pool.check()


def assert_goes_on_alike(model, inputs, cache, loaded, **options):
    """`generate` from a fork of the cache and from the loaded one: the same ids, logits within rounding."""
    expected = run(model, {**inputs, **with_cache(copy.deepcopy(cache))}, **EVERYTHING, **options)
    got = run(model, {**inputs, **with_cache(loaded)}, **EVERYTHING, **options)
    tolerance = 1e-4 if expected.logits[0].dtype == torch.float32 and model.dtype == torch.float32 else 0.25
    assert_close(expected, got, tolerance)
    loaded.check()
    loaded.pool.check()


def numbers(pool):
    """What a failed load must not change."""
    stats = pool.stats()
    return (
        stats.num_blocks,
        stats.used_blocks,
        stats.shared_blocks,
        stats.bytes_allocated,
        {layer: (id(store), id(store.memory)) for layer, store in pool.stores.items()},
    )


def rewrite(path, change=None, tensors=None, **metadata):
    """Save the file anew with its JSON content, tensors or metadata changed and the checksums right."""
    with safe_open(path, "pt") as file:
        text = file.metadata()
    content = json.loads(text["content"])
    held = {name: tensor.clone() for name, tensor in load_file(path).items()}  # not on top of what is read
    if tensors is not None:
        tensors(held)
        content["checksums"] = {name: zlib.crc32(tensor.numpy().tobytes()) for name, tensor in held.items()}
    if change is not None:
        change(content)
    text["content"] = json.dumps(content)
    text["crc32"] = str(zlib.crc32(text["content"].encode()))
    save_file(held, path, metadata={**text, **metadata})


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", [(6,), (22,), (5, 21, 12)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_cache_goes_on_like_the_original(family, lengths, block_size, path):
    """Left pads, lengths below and above the window of 8, own pool and the model's."""
    model, inputs, cache = filled(family, *lengths, block_size=block_size)
    used = cache.pool.stats().used_blocks
    cache.save(path)
    apart = PagedCache.load(path, model, pool=KVPool(model.config, PagedConfig(block_size=block_size)))
    assert_same(cache, apart)
    assert apart.stats().used_blocks == used and apart.stats().stored_tokens == cache.stats().stored_tokens
    assert apart.stats().fallbacks == {}
    beside = PagedCache.load(path, model)
    assert beside.pool is cache.pool and cache.pool.stats().used_blocks == 2 * used
    assert_same(cache, beside)
    assert_goes_on_alike(model, inputs, cache, beside)
    assert_goes_on_alike(model, inputs, cache, apart)
    assert_same(cache, PagedCache.load(path, model))  # nobody wrote into the original
    del apart, beside, cache
    gc.collect()
    assert model.paged_stats().used_blocks == 0
    model.paged_pool.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family, path):
    model, inputs, cache = filled(family, 9, 21, dtype=torch.bfloat16)
    cache.save(path)
    loaded = PagedCache.load(path, model)
    assert loaded.layers[0].keys.dtype == torch.bfloat16
    assert_same(cache, loaded)
    assert_goes_on_alike(model, inputs, cache, loaded)


def test_stored_in_another_dtype_than_the_model_computes_in(path):
    model, inputs, cache = filled("llama", 9, 13, kv_dtype="bfloat16")
    cache.save(path)
    assert load_file(path)["layer.0.keys"].dtype == torch.bfloat16
    loaded = PagedCache.load(path, model)
    assert_same(cache, loaded)
    assert_goes_on_alike(model, inputs, cache, loaded)
    hf_paged.unpatch(model)
    assert PagedCache.load(path, model).pool.config.kv_dtype == "bfloat16"  # the file's, where nothing else is said


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_shared_blocks_are_stored_once_and_shared_again(family, path):
    model, inputs, cache = filled(family, 6, 15)
    single = path.with_name("single.safetensors")
    cache.save(single)
    cache.batch_repeat_interleave(3)
    cache.save(path)
    assert path.stat().st_size < 1.3 * single.stat().st_size
    stats = cache.pool.stats()
    assert stats.shared_blocks == stats.used_blocks > 0
    loaded = PagedCache.load(path, model, pool=KVPool(model.config, PagedConfig(block_size=4)))
    assert loaded.stats().used_blocks == stats.used_blocks and loaded.stats().shared_blocks == stats.shared_blocks
    assert_same(cache, loaded)
    assert_goes_on_alike(model, inputs, cache, loaded, num_beams=3)
    assert loaded.stats().cow_copies > 0  # and a write to a shared block copies it first


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_beam_search(family, path):
    """Tables that share a prefix and part ways, with blocks of some rows only partly filled."""
    model, inputs, cache = filled(family, 5, 14)
    run(model, {**inputs, **with_cache(cache)}, max_new_tokens=7, min_new_tokens=7, num_beams=3)
    cache.save(path)
    loaded = PagedCache.load(path, model, pool=KVPool(model.config, PagedConfig(block_size=4)))
    assert_same(cache, loaded)
    stats = loaded.stats()
    assert stats.used_blocks == model.paged_stats().used_blocks
    assert stats.shared_blocks == model.paged_stats().shared_blocks


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_right_pads(family, path):
    """Pads behind tokens: a sliding group stores them, a full one does not."""
    model = hf_paged.patch(build(family), block_size=4)
    cache = PagedCache(model.config, pool=model.paged_pool)
    inputs = prompts(6, 13, side="right")
    fill(model, inputs, cache)
    assert cache.state.inner_pads
    cache.save(path)
    loaded = PagedCache.load(path, model)
    assert_same(cache, loaded)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    step = {"input_ids": torch.tensor([[7], [9]]), "attention_mask": mask, "position_ids": torch.tensor([[6], [13]])}
    with torch.no_grad():
        expected, got = (model(**step, **with_cache(entry)).logits for entry in (cache, loaded))
    torch.testing.assert_close(expected, got, atol=1e-4, rtol=0)
    loaded.check()


def test_finished_rows_and_later_pads_come_back(path):
    model, _, cache = filled("mistral", 6, 15, 11)
    cache.state.finish_rows([1])
    cache.save(path)
    loaded = PagedCache.load(path, model)
    assert loaded.state.finished == [False, True, False]
    assert_same(cache, loaded)
    cache.state.finish_rows([0, 2])
    cache.save(path)
    loaded = PagedCache.load(path, model)
    assert not any(row.blocks for tables in loaded.state.tables for row in tables.rows)
    assert_same(cache, loaded)


def test_a_recording_cache_can_still_be_cropped(path):
    """Assisted decoding: what has left the window is kept until the next crop."""
    model = hf_paged.patch(build("mistral"), block_size=2)
    cache = PagedCache(model.config, pool=model.paged_pool)
    fill(model, prompts(6), cache)
    cache.activate_past_recording()
    with torch.no_grad():
        for _ in range(7):
            model(torch.tensor([[5]]), **with_cache(cache))
    cache.save(path)
    loaded = PagedCache.load(path, model)
    assert_same(cache, loaded)
    for entry in (cache, loaded):
        entry.crop(-6)
    assert_same(cache, loaded)


def test_filled_without_a_known_mask(path):
    """Another attention implementation stores pads as tokens, and the file says so."""
    model = build("llama", attn="sdpa")
    cache = PagedCache(model.config, PagedConfig(block_size=4))
    fill(model, prompts(5, 12), cache)
    assert cache.state.blind
    cache.save(path, model)
    loaded = PagedCache.load(path, model)
    assert_same(cache, loaded)
    inputs = prompts(5, 12)
    inputs = {name: torch.cat([entry, torch.ones(2, 1, dtype=entry.dtype)], 1) for name, entry in inputs.items()}
    assert_goes_on_alike(model, inputs, cache, loaded)


def test_what_is_kept_aside_is_written_first(path):
    model = build("llama")
    cache = PagedCache(model.config, PagedConfig(block_size=4))
    states = torch.randn(2, 2, 7, 16)
    for index in range(2):
        cache.update(states, states, index)
    cache.save(path, model)
    loaded = PagedCache.load(path, model)
    assert torch.equal(loaded.layers[1].values, states)
    assert_same(cache, loaded)


def test_a_loaded_cache_can_be_saved_again(path):
    """Also over the file that it was loaded from."""
    model, _, cache = filled("gemma2", 6, 15)
    cache.save(path)
    with safe_open(path, "pt") as file:
        first = file.metadata()
    hf_paged.unpatch(model)
    loaded = PagedCache.load(path, model)
    assert loaded.pool.config == PagedConfig(block_size=4) and loaded.pool is not cache.pool
    loaded.save(path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == first  # checksums included
    assert_same(cache, PagedCache.load(str(path), model))


def test_slots_behind_the_last_token_are_zeros(path):
    """Whatever lies in the memory."""
    model, inputs, cache = filled("mistral", 6, 11)
    cache.reset()
    for store in model.paged_pool.stores.values():
        store.memory.keys[:, 1:] = store.memory.values[:, 1:] = 1e9
    fill(model, inputs, cache)
    cache.save(path)
    tensors = load_file(path)
    tokens = cache.stats().stored_tokens
    for layer in range(2):
        for name in ("keys", "values"):
            held = tensors[f"layer.{layer}.{name}"]
            assert held.max() < 1e6
            assert int((held != 0).any(3).any(0).sum()) == tokens < held.shape[1] * held.shape[2]
    assert_same(cache, PagedCache.load(path, model))


def test_further_tensors_of_the_state(path, monkeypatch):
    model, _, cache = filled("llama", 5, 9)
    ids = torch.arange(16).view(2, 8)
    seen = []
    monkeypatch.setattr(serialize, "_extra_tensors", lambda state: {"ids": ids.t()})
    monkeypatch.setattr(serialize, "_restore_extra_tensors", lambda state, extra: seen.append(extra))
    cache.save(path)
    PagedCache.load(path, model)
    assert list(seen[0]) == ["ids"] and torch.equal(seen[0]["ids"], ids.t())


# -- whose it is -------------------------------------------------------------------------------------------------------


def test_the_model_has_to_be_known(path):
    model = build("llama", attn="hf_paged")
    cache = PagedCache(model.config, PagedConfig(block_size=4))
    fill(model, prompts(5), cache)
    with pytest.raises(ValueError, match=r"cache\.save\(path, model\)"):
        cache.save(path)
    with pytest.raises(ValueError, match="other layers"):
        cache.save(path, build("mistral"))
    with pytest.raises(TypeError, match="generate"):
        cache.save(path, model.config)
    assert not path.exists()
    cache.save(path, model)
    assert_same(cache, PagedCache.load(path, model))


def test_patched_models_are_known(path):
    """By `patch`, by its deep copy, and by `generate` for a cache with a pool of its own; but not kept alive."""
    model = hf_paged.patch(build("llama"), block_size=4)
    other = copy.deepcopy(model)
    assert model.paged_pool.owner() is model and other.paged_pool.owner() is other
    cache = PagedCache(other.config, PagedConfig(block_size=8))
    run(other, {**prompts(5), **with_cache(cache)}, max_new_tokens=3)
    cache.save(path)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match=r"cache\.save\(path, model\)"):
        cache.save(path)
    assert_same(cache, PagedCache.load(path, hf_paged.unpatch(model)))


def test_peft(path):
    """Adapters are weights too: the file fits the model with the same ones switched on."""
    peft = pytest.importorskip("peft")
    plain = build("llama")
    model = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    model = hf_paged.patch(model.eval(), block_size=4)
    base = model.get_base_model()
    inputs = prompts(5, 12)
    cache = PagedCache(base.config, pool=base.paged_pool)
    fill(model, {name: entry[:, :-1] for name, entry in inputs.items()}, cache)
    cache.save(path)
    loaded = PagedCache.load(path, model)
    assert_same(cache, loaded)
    assert_goes_on_alike(model, inputs, cache, loaded)
    with model.disable_adapter(), pytest.raises(ValueError, match="weights"):
        PagedCache.load(path, model)
    with pytest.raises(ValueError, match="weights"):
        PagedCache.load(path, plain)
    cache.save(path, model)
    assert_same(cache, PagedCache.load(path, base))


def test_the_fingerprint():
    """Alike for a copy, patched or not; unlike for any weight changed as a whole, renamed, or cast."""
    model = build("gpt_oss")
    digest = serialize.weights_fingerprint(model)
    assert digest == serialize.weights_fingerprint(hf_paged.patch(copy.deepcopy(model)))
    assert digest != serialize.weights_fingerprint(copy.deepcopy(model).to(torch.bfloat16))
    for name, _ in model.named_parameters():
        other = copy.deepcopy(model)
        other.get_parameter(name).data.mul_(1.01).add_(1e-3)
        assert digest != serialize.weights_fingerprint(other), name
    wide = torch.nn.Linear(64, 64)  # a column that a stride of the row length would miss
    before = serialize.weights_fingerprint(wide)
    wide.weight.data[:, 5] += 1
    assert before != serialize.weights_fingerprint(wide)


# -- refusals ----------------------------------------------------------------------------------------------------------


OTHERS = {
    "weights": (lambda: build("llama", seed=1), r"another model: weights of fingerprint .*load the checkpoint"),
    "class": (lambda: build("mistral"), r"another model: class LlamaForCausalLM in the file, MistralForCausalLM here"),
    "layers": (lambda: build("llama", num_hidden_layers=3), r"another model: cache of 2 layers .* 3 layers"),
    "dtype": (
        lambda: build("llama").to(torch.bfloat16),
        r"another model: dtype float32 in the file, bfloat16 here.*Load",
    ),
    "positions": (
        lambda: build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        r"another model: position settings .*10000.*500000",
    ),
    "block_size": (
        lambda: hf_paged.patch(build("llama"), block_size=8),
        r"blocks of 4 tokens.* block_size of 8.*patch\(model, block_size=4\)",
    ),
    "kv_dtype": (
        lambda: hf_paged.patch(build("llama"), block_size=4, kv_dtype="bfloat16"),
        r"as float32 and float32, but this pool, of kv_dtype='bfloat16'.*kv_dtype='auto'",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_not_this_models_is_refused(what, path):
    _, _, cache = filled("llama", 5, 12)
    cache.save(path)
    make, message = OTHERS[what]
    model = make()
    pool = model.__dict__.get("paged_pool") or KVPool(model.config, PagedConfig(block_size=4))
    before = numbers(pool)
    with pytest.raises(ValueError, match=message) as caught:
        PagedCache.load(path, model, pool=pool)
    assert str(path) in str(caught.value)
    assert numbers(pool) == before
    pool.check()
    if what in ("class", "weights"):
        with pytest.raises(ValueError, match=message):
            PagedCache.load(path, model)


def test_another_window_is_refused(path):
    _, _, cache = filled("mistral", 5, 12)
    cache.save(path)
    with pytest.raises(ValueError, match=r"2 sliding_attention of 8\) in the file.*sliding_attention of 16\) here"):
        PagedCache.load(path, build("mistral", sliding_window=16))


def test_a_fitting_fingerprint_of_another_model_type_is_refused(path):
    model, _, cache = filled("llama", 5)
    cache.save(path)
    rewrite(path, lambda content: content["model"].update(type="gemma"))
    with pytest.raises(ValueError, match="another model: model_type gemma in the file, llama here"):
        PagedCache.load(path, model)


def test_wrong_arguments(path):
    model, _, cache = filled("llama", 5)
    cache.save(path)
    with pytest.raises(ValueError, match="paged_config differs"):
        PagedCache.load(path, model, PagedConfig(block_size=8))
    with pytest.raises(ValueError, match="other layers"):
        PagedCache.load(path, model, pool=KVPool(build("mistral").config, PagedConfig(block_size=4)))
    with pytest.raises(ValueError, match="block_size of 16"):
        PagedCache.load(path, hf_paged.unpatch(model), PagedConfig())
    for wrong in (model.config, None, torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match="generate"):
            PagedCache.load(path, wrong)


def test_nothing_to_save(path):
    model, _, cache = filled("llama", 5)
    cache.crop(-cache.get_seq_length())
    for empty in (cache, PagedCache(model.config, pool=model.paged_pool)):
        with pytest.raises(ValueError, match="the cache is empty"):
            empty.save(path)
    cache.reset()
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.save(path)
    assert not path.exists()


def test_in_the_middle_of_a_forward(path):
    model, _, cache = filled("llama", 5)
    states = torch.randn(1, 2, 3, 16)
    cache.update(states, states, 0)
    with pytest.raises(ValueError, match="middle of a forward, its layers hold 4 to 7 tokens"):
        cache.save(path)
    cache.update(states, states, 1)
    cache.save(path)
    assert_same(cache, PagedCache.load(path, model))


def test_layers_that_are_not_paged(path):
    config = transformers.Qwen3NextConfig(num_hidden_layers=4)
    cache = PagedCache(config)
    assert cache.other_layers
    with pytest.raises(ValueError, match=r"3 of its 4 layers \(linear_attention\).*layers are all paged"):
        cache.save(path)
    assert os.listdir(path.parent) == []


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_cut_short(path):
    model, _, cache = filled("gemma2", 5, 12)
    cache.save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    before = numbers(model.paged_pool)
    for length in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged or cut short") as caught:
            PagedCache.load(path, model)
        assert str(path) in str(caught.value), length
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="damaged"):
        PagedCache.load(path, model)
    assert numbers(model.paged_pool) == before
    path.write_bytes(whole)
    assert_same(cache, PagedCache.load(path, model))


def test_a_changed_byte(path):
    """Anywhere: in the header, in the metadata, in the tables, among keys and values."""
    model, _, cache = filled("llama", 5, 12)
    cache.save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [0, 3, *range(8, header, 29), *range(header, len(whole), 997), len(whole) - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError) as caught:
            PagedCache.load(path, model)
        assert str(path) in str(caught.value), place
    model.paged_pool.check()


def _set(name, value):
    return lambda content: content.update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        {"change": _set("rows", 3)},
        {"change": _set("columns", 2)},
        {"change": _set("lead", [0])},
        {"change": _set("checksums", {})},
        {"change": lambda content: content.pop("finished")},
        {"change": lambda content: content["layers"]["0"].update(keys=[2, 1, 4, 16])},
        {"change": lambda content: content["layers"]["0"].update(stored=["float16", "float32"])},
        {"tensors": lambda tensors: tensors["group.0.rows"].fill_(3)},
        {"tensors": lambda tensors: tensors["group.0.blocks"].add_(1)},
        {"tensors": lambda tensors: tensors["group.0.blocks"].fill_(0)},
        {"tensors": lambda tensors: tensors["group.0.blocks"].neg_()},
        {"tensors": lambda tensors: tensors.pop("layer.1.values")},
        {"tensors": lambda tensors: tensors.update(real=torch.ones(1, 99, dtype=torch.bool))},
        {"tensors": lambda tensors: tensors.update(real=torch.ones(2, 3))},
    ],
)
def test_parts_that_do_not_fit_each_other(change, path):
    model, _, cache = filled("llama", 5, 12)
    cache.save(path)
    rewrite(path)
    assert_same(cache, PagedCache.load(path, model))
    rewrite(path, **change)
    before = numbers(model.paged_pool)
    with pytest.raises(ValueError, match="damaged") as caught:
        PagedCache.load(path, model)
    assert str(path) in str(caught.value)
    assert numbers(model.paged_pool) == before


def test_foreign_files(path, tmp_path):
    model, _, cache = filled("llama", 5)
    with pytest.raises(FileNotFoundError, match=r"prefix\.safetensors"):
        PagedCache.load(path, model)
    with pytest.raises(IsADirectoryError, match="folder"):
        PagedCache.load(tmp_path, model)
    for foreign in (b"a text\n", b"\x80\x04K\x01.", b"{}" * 400):
        path.write_bytes(foreign)
        with pytest.raises(ValueError, match="is no saved cache") as caught:
            PagedCache.load(path, model)
        assert str(path) in str(caught.value)
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.ones(3)}, path, metadata=metadata)
        with pytest.raises(ValueError, match=r"not one that cache\.save") as caught:
            PagedCache.load(path, model)
        assert str(path) in str(caught.value)
    cache.save(path)
    rewrite(path, version="2")
    with pytest.raises(ValueError, match="version 2 of the format, this hf_paged reads version 1"):
        PagedCache.load(path, model)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("where", ["write", "safetensors", "replace", "interrupt"])
def test_a_failed_save_leaves_what_was_there(where, exists, path, monkeypatch):
    model, _, cache = filled("llama", 5, 12)
    if exists:
        cache.save(path)
    before = path.read_bytes() if exists else None
    error = {"safetensors": serialize.SafetensorError, "interrupt": KeyboardInterrupt}.get(where, OSError)

    def fail(*args, **kwargs):
        if where != "replace":
            with open(args[1], "wb") as file:
                file.write(b"half")
        raise error("no space left")

    if where == "replace":
        monkeypatch.setattr(serialize.os, "replace", fail)
    else:
        monkeypatch.setattr(serialize, "save_file", fail)
    numbers_before = numbers(model.paged_pool)
    with pytest.raises(OSError if where != "interrupt" else KeyboardInterrupt, match="no space left"):
        cache.save(path)
    assert os.listdir(path.parent) == ([path.name] if exists else [])
    assert numbers(model.paged_pool) == numbers_before
    monkeypatch.undo()
    if exists:
        assert path.read_bytes() == before
        assert_same(cache, PagedCache.load(path, model))
    cache.save(path)


def test_places_that_cannot_be_written_to(tmp_path):
    _, _, cache = filled("llama", 5)
    with pytest.raises(IsADirectoryError, match="folder"):
        cache.save(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        cache.save(tmp_path / "none" / "prefix.safetensors")
    assert os.listdir(tmp_path) == []


def test_a_link_stays_a_link(path):
    model, _, cache = filled("llama", 5)
    link = path.with_name("link.safetensors")
    link.symlink_to(path)
    cache.save(link)
    assert link.is_symlink() and not path.is_symlink()
    assert_same(cache, PagedCache.load(link, model))


# -- pools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_pool_that_is_too_small(family, path):
    """Not one block, store or byte more than before; with one block more it fits."""
    model, inputs, cache = filled(family, 5, 12)
    run(model, {**inputs, **with_cache(cache)}, max_new_tokens=9, min_new_tokens=9)
    cache.save(path)
    needed = max(group.blocks.used_blocks for group in model.paged_pool.groups)
    assert [group.blocks.used_blocks == needed for group in model.paged_pool.groups][:-1] in ([], [False])
    small = KVPool(model.config, PagedConfig(block_size=4, num_blocks=needed - 1))
    before = numbers(small)
    with pytest.raises(OutOfBlocks, match="num_blocks") as caught:
        PagedCache.load(path, model, pool=small)
    assert (caught.value.needed, caught.value.free) == (needed, needed - 1)
    del caught
    assert numbers(small) == before and before[1] == 0 and small.stores == {}
    small.check()
    exact = KVPool(model.config, PagedConfig(block_size=4, num_blocks=needed))
    loaded = PagedCache.load(path, model, pool=exact)
    assert_same(cache, loaded)
    with pytest.raises(OutOfBlocks):
        PagedCache.load(path, model, pool=exact)
    assert_same(cache, loaded)
    del loaded
    gc.collect()
    assert exact.stats().used_blocks == 0


def test_a_pool_that_holds_other_caches(path):
    """Loading between them, growth of the stores included, changes nothing of theirs."""
    model, inputs, cache = filled("gemma2", 5, 12)
    cache.save(path)
    cache.reset()
    others = []
    for length in (3, 17, 9):
        others.append(PagedCache(model.config, pool=model.paged_pool))
        fill(model, prompts(length, seed=length), others[-1])
    del others[1]  # leaves a hole
    gc.collect()
    before = [[(layer.keys, layer.values) for layer in other.layers] for other in others]
    loaded = [PagedCache.load(path, model) for _ in range(4)]
    for entry in loaded[1:]:
        assert_same(loaded[0], entry)
    ids = [run(model, {**inputs, **with_cache(entry)}, max_new_tokens=5, min_new_tokens=5) for entry in loaded]
    assert all(torch.equal(ids[0], other) for other in ids)
    for other, held in zip(others, before, strict=True):
        other.check()
        for layer, (keys, values) in zip(other.layers, held, strict=True):
            assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    del loaded, entry, others, other, layer
    gc.collect()
    model.paged_pool.check()
    assert model.paged_stats().used_blocks == 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_load_that_fails_half_way(family, path, monkeypatch):
    """Out of memory in a later layer: blocks, stores and their memory are as before."""
    model, _, cache = filled(family, 5, 12)
    cache.save(path)
    pools = model.paged_pool, KVPool(model.config, PagedConfig(block_size=4))
    ensure, calls = LayerStore.ensure, []

    def fail(self, num_blocks):
        calls.append(num_blocks)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return ensure(self, num_blocks)

    for pool in pools:
        used, allocated, memories = pool.stats().used_blocks, pool.stats().bytes_allocated, numbers(pool)[-1]
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(LayerStore, "ensure", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                PagedCache.load(path, model, pool=pool)
        assert len(calls) == 2
        assert (pool.stats().used_blocks, pool.stats().bytes_allocated, numbers(pool)[-1]) == (
            used,
            allocated,
            memories,
        )
        pool.check()
        assert not any(store.lock.locked() for store in pool.stores.values())
        assert_same(cache, PagedCache.load(path, model, pool=pool))


def test_a_pool_of_another_dtype(path):
    """In use it is refused; idle, it lets go of its old stores as before a first forward."""
    model, _, cache = filled("llama", 5, 12)
    cache.save(path)
    pool = KVPool(model.config, PagedConfig(block_size=4))
    half = build("llama").to(torch.bfloat16)
    other = PagedCache(half.config, pool=pool)
    fill(half, prompts(5), other)
    before = numbers(pool)
    with pytest.raises(ValueError, match="pools of their own"):
        PagedCache.load(path, model, pool=pool)
    assert numbers(pool) == before
    other.check()
    other.reset()
    assert_same(cache, PagedCache.load(path, model, pool=pool))


def test_a_pool_with_a_memory_budget(path):
    """A token of this model takes 512 bytes: 20,000 bytes hold 8 blocks of 4 tokens and the null block."""
    model, _, cache = filled("llama", 9, 12)
    cache.save(path)
    pool = KVPool(model.config, PagedConfig(block_size=4, memory_budget=20_000))
    loaded = PagedCache.load(path, model, pool=pool)
    assert pool.stats().num_blocks == 8
    assert_same(cache, loaded)
    with pytest.raises(OutOfBlocks, match="memory_budget"):
        PagedCache.load(path, model, pool=pool)
    assert pool.stats().bytes_allocated <= 20_000
    with pytest.raises(ValueError, match="Raise memory_budget"):
        PagedCache.load(path, model, pool=KVPool(model.config, PagedConfig(block_size=4, memory_budget=1000)))
