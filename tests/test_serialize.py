"""A cache in a file and back: the content is equal, what does not fit is refused, and errors leave nothing behind."""

import copy
import gc
import json
import math
import os
import random
import subprocess
import sys
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


def rewrite(path, change=None, tensors=None, both=None, **metadata):
    """Save the file anew with its JSON content, tensors (or both) or metadata changed and the checksums right."""
    with safe_open(path, "pt") as file:
        text = file.metadata()
    content = json.loads(text["content"])
    held = {name: tensor.clone() for name, tensor in load_file(path).items()}  # not on top of what is read
    if tensors is not None:
        tensors(held)
    if both is not None:
        both(held, content)
    if tensors is not None or (both is not None and isinstance(content["checksums"], dict) and content["checksums"]):
        content["checksums"] = {
            name: zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else 0
            for name, tensor in held.items()
        }
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
    """Alike for a copy, patched or not; unlike for one changed value in any weight or buffer, or another dtype."""
    model = build("gpt_oss")
    digest = serialize.weights_fingerprint(model)
    assert digest == serialize.weights_fingerprint(hf_paged.patch(copy.deepcopy(model)))
    assert digest != serialize.weights_fingerprint(copy.deepcopy(model).to(torch.bfloat16))
    chosen = random.Random(0)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert any("inv_freq" in name for name, _ in tensors)  # which no checkpoint holds
    for name, tensor in tensors:
        place = tuple(chosen.randrange(size) for size in tensor.shape)
        before = tensor.data[place].clone()
        tensor.data[place] = math.nextafter(float(before), 1e9) + 1e-6
        assert digest != serialize.weights_fingerprint(model), (name, place)
        tensor.data[place] = before
    assert digest == serialize.weights_fingerprint(model)


def test_the_fingerprint_reads_in_pieces(monkeypatch):
    """However a tensor lies in memory and however large it is, and memory that two names share but once."""
    module = torch.nn.Module()
    module.first = torch.nn.Parameter(torch.arange(7 * 5 * 6.0).view(7, 5, 6))
    digest = serialize.weights_fingerprint(module)
    read = []
    whole = serialize._bytes
    monkeypatch.setattr(serialize, "_bytes", lambda tensor: read.append(tensor.nbytes) or whole(tensor))
    for limit in (4, 40, 150, 1 << 20):
        monkeypatch.setattr(serialize, "_CHUNK_BYTES", limit)
        for layout in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            order = [layout.index(dim) for dim in range(3)]
            module.first.data = module.first.data.permute(layout).contiguous().permute(order)
            read.clear()
            assert serialize.weights_fingerprint(module) == digest
            assert max(read) <= limit and sum(read) == module.first.nbytes
    module.second = module.first
    read.clear()
    serialize.weights_fingerprint(module)
    assert sum(read) == module.first.nbytes


def test_the_fingerprint_takes_tensors_apart():
    """Quantised weights are tensors made of tensors, or have scales that only the state_dict names."""
    two = pytest.importorskip("torch.testing._internal.two_tensor")
    module = torch.nn.Module()
    parts = torch.ones(3, 4), torch.ones(3, 4)
    module.weight = torch.nn.Parameter(two.TwoTensor(*parts), requires_grad=False)
    digests = {serialize.weights_fingerprint(module)}
    for part in parts:
        part[2, 3] += 1
        digests.add(serialize.weights_fingerprint(module))
    assert len(digests) == 3

    class Scaled(torch.nn.Module):
        scale = torch.ones(2)

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[prefix + "scale"] = self.scale

    module = torch.nn.Sequential(Scaled())
    before = serialize.weights_fingerprint(module)
    module[0].scale = torch.tensor([1.0, 2.0])
    assert before != serialize.weights_fingerprint(module)


def test_the_fingerprint_of_frequencies_that_follow_the_length():
    """A long call leaves other frequencies behind in a dynamic rotary embedding; the model is the same."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", max_position_embeddings=16, rope_parameters=rope)
    digest, before = serialize.weights_fingerprint(model), model.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        model(torch.ones(1, 40, dtype=torch.int64))
    assert not torch.equal(before, model.model.rotary_emb.inv_freq)
    assert digest == serialize.weights_fingerprint(model)
    model.model.rotary_emb.original_inv_freq[1] *= 2
    assert digest != serialize.weights_fingerprint(model)


def test_offloaded_weights(path, tmp_path):
    """Read where accelerate keeps them in host memory; on disk they are out of reach, and that is said."""
    accelerate = pytest.importorskip("accelerate")
    model, _, cache = filled("llama", 5, 12)
    cache.save(path)
    kept = accelerate.cpu_offload(build("llama"), execution_device="cpu")
    assert next(kept.parameters()).is_meta
    assert_same(cache, PagedCache.load(path, kept, pool=KVPool(model.config, PagedConfig(block_size=4))))
    cache.save(path, kept)
    assert_same(cache, PagedCache.load(path, model))
    other = accelerate.cpu_offload(build("llama", seed=1), execution_device="cpu")
    with pytest.raises(ValueError, match="weights of fingerprint"):
        PagedCache.load(path, other)
    away = accelerate.disk_offload(build("llama"), tmp_path / "weights", execution_device="cpu")
    with pytest.raises(ValueError, match=r"prefix\.safetensors cannot be compared.*out of reach.*device_map"):
        PagedCache.load(path, away)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"out of reach.*device_map"):
        cache.save(path, away)
    assert path.read_bytes() == before


CHANGES = {
    "epsilon": ({"rms_norm_eps": 1e-3}, r"config with rms_norm_eps 1e-06 in the file, 0\.001 here\."),
    "activation": ({"hidden_act": "relu"}, r'config with hidden_act "silu" in the file, "relu" here\.'),
    "rope": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        r"rope_parameters\.factor absent in the file, 2\.0 here; .*rope_type \"default\" in the file, \"linear\" here",
    ),
    "window": ({"sliding_window": 16}, r"2 sliding_attention of 8\) in the file.*sliding_attention of 16\) here"),
    "several": (
        {"rms_norm_eps": 1e-3, "hidden_act": "relu", "max_position_embeddings": 9, "attention_dropout": 0.5},
        r"config with attention_dropout 0\.0 in the file, 0\.5 here; hidden_act .*; max_position.* 9 here; and 1 more",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_same_weights_under_another_config_are_refused(what, path):
    changed, message = CHANGES[what]
    model, _, cache = filled("mistral", 5, 12)
    cache.save(path)
    other = build("mistral", **changed)
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=message) as caught:
        PagedCache.load(path, other)
    assert str(path) in str(caught.value)


def test_a_single_weight_or_frequency_that_changed_is_refused(path):
    model, _, cache = filled("llama", 5, 12)
    cache.save(path)
    before = numbers(model.paged_pool)
    for tensor in (model.lm_head.weight, model.model.layers[1].mlp.up_proj.weight, model.model.rotary_emb.inv_freq):
        value = tensor.data.view(-1)[-7].clone()
        tensor.data.view(-1)[-7] *= 1.001
        with pytest.raises(ValueError, match="another model: weights of fingerprint") as caught:
            PagedCache.load(path, model)
        assert str(path) in str(caught.value) and numbers(model.paged_pool) == before
        tensor.data.view(-1)[-7] = value
    assert_same(cache, PagedCache.load(path, model))


def test_what_a_config_keeps_for_others_does_not_matter(path):
    model, _, cache = filled("llama", 5, 12)
    cache.save(path)
    other = build("llama")
    other.config.update({"use_cache": False, "_name_or_path": "somewhere/else", "architectures": ["Llama"]})
    other.config.update({"pad_token_id": 7, "eos_token_id": [3, 4], "id2label": {0: "a", 1: "b", 2: "c"}})
    other.config.update({"top_k": 5, "temperature": 0.5})  # as old configs carry them
    other.set_attn_implementation("eager")
    pool = KVPool(other.config, PagedConfig(block_size=4))
    assert_same(cache, PagedCache.load(path, other, pool=pool))
    assert_same(cache, PagedCache.load(path, copy.deepcopy(model)))


def test_the_same_model_in_another_process(path, tmp_path):
    """Loaded from its folder there: neither addresses nor the order of sets are in what names it."""
    model, _, cache = filled("gemma2", 5, 12)
    cache.save(path)
    model.save_pretrained(tmp_path / "model")
    script = (
        "import sys, transformers, hf_paged\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "cache = hf_paged.PagedCache.load(sys.argv[2], model)\n"
        "cache.check()\n"
        "print(cache.get_seq_length())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "5"}
    command = [sys.executable, "-c", script, str(tmp_path / "model"), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == cache.get_seq_length()


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
        r"another model: config with rope_parameters\.rope_theta 10000.* in the file, 500000.* here\. Give",
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
    _model, _, cache = filled("llama", 5, 12)
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
    _model, _, cache = filled("mistral", 5, 12)
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


def _put(*keys, value):
    """A change of the JSON content at these keys."""

    def change(tensors, content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def _rows(*rows):
    return lambda tensors, content: tensors.update({"group.0.rows": torch.tensor(rows)})


def _reshape(change, *names):
    """A change of the keys and values of every layer, or those named, said in the content too."""

    def apply(tensors, content):
        for name in [name for name in tensors if name.startswith(names or ("layer.",))]:
            _, layer, part = name.split(".")
            tensors[name] = change(tensors[name]).contiguous()
            content["layers"][layer][part] = list(tensors[name].shape)

    return apply


def _cast(dtype):
    def apply(tensors, content):
        for name in [name for name in tensors if name.startswith("layer.")]:
            tensors[name] = tensors[name].to(dtype)
        for entry in content["layers"].values():
            entry["made"] = entry["stored"] = [str(dtype).removeprefix("torch.")] * 2

    return apply


def _longer(columns):
    """More columns, and a mask as long, in which all of them are tokens."""

    def apply(tensors, content):
        tensors["real"] = torch.nn.functional.pad(tensors["real"], (0, columns - content["columns"]), value=True)
        content["columns"] = columns

    return apply


def _begin_at_16(tensors, content):
    tensors["group.0.rows"][1] = torch.tensor([8, 11, 1])
    tensors["group.0.blocks"] = tensors["group.0.blocks"][[0, 1]]
    _reshape(lambda held: held[:, [0, 3]] if held.shape[1] == 4 else held[:, [0, 1]])(tensors, content)


def _swap_groups(tensors, content):
    content["groups"] = content["groups"][::-1]


def _move(*keys, by):
    """Add to every number in a list of the content."""

    def apply(tensors, content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = [entry + by for entry in content[keys[-1]]]

    return apply


def _finish(row, release):
    """Call a row finished; take its blocks from the table, or leave them."""

    def apply(tensors, content):
        content["finished"][row] = True
        if release:
            tensors["group.0.rows"][row, 2] = 0

    return apply


def _everything_finished_and_wide(tensors, content):
    """No token, so no tensor warrants a number: heads of any size."""
    content["finished"] = [True, True]
    tensors["group.0.rows"].zero_()
    tensors["group.0.blocks"] = tensors["group.0.blocks"][:0]
    _reshape(lambda held: torch.empty(1 << 20, 0, 4, 1 << 20))(tensors, content)


def _add(name, tensor):
    return lambda tensors, content: tensors.update({name: tensor})


def _in_a_list(depth):
    return lambda tensors, content: content["model"]["config"].update(hidden_act=json.loads("[" * depth + "]" * depth))


HOSTILE = {
    # numbers of other types and out of their range
    **{
        f"{name} {value!r}": ("llama", _put(name, value=value))
        for name, values in {
            "rows": (0, -1, 3, 2.0, True, "2", None, 10**13, 2**80),
            "columns": (0, -1, 10, 12, 48, 11.0, "11", None, 10**13, 2**80, float("nan"), float("inf")),
            "block_size": (0, -4, 3, 8, 4.0, True, "4", None, 2**80, [4]),
            "kv_dtype": ("int8", 4, None, ["auto"], "bfloat16"),
            "masked": (-1, 6.0, True, "11", 12, 10**13, 3, None),
            "lead": ([-3, 0], ["x", 0], [7.0, 0], [False, 0], [7], [7, 0, 0], [6, 0], [0, 0], {"0": 7}, 7, None),
            "finished": ([0, 0], ["", ""], [None, None], [False], [False] * 3, {}, False, None),
            "inner_pads": (True, 0, None, "false"),
            "recording": (0, None, "true"),
            "blind": (1, None, []),
            "groups": ([], [[0]], [[0, 1], []], [[0, 0, 1]], [[1, 0]], [[False, True]], [[0, 1.0]], [["0", "1"]], 7),
            "layers": ({}, [], None),
            "checksums": ({}, [], None),
            "model": ({}, [], None),
        }.items()
        for value in values
    },
    "a checksum of another type": ("llama", lambda tensors, content: content.update(checksums=None)),
    "a field too many": ("llama", _put("more", value=1)),
    "another window in the identity": ("mistral", _put("model", "layers", 0, 1, value=9)),
    "no class": ("llama", _put("model", "class", value=["LlamaForCausalLM"])),
    "layers of no kind": ("llama", _put("model", "layers", value=[[1, 2, 3]])),
    "no config": ("llama", _put("model", "config", value=[])),
    "a config nested deeply": ("llama", _in_a_list(600)),
    # layers
    "a layer 99": (
        "llama",
        lambda tensors, content: (
            content["layers"].update({"99": content["layers"]["0"]}),
            tensors.update({f"layer.99.{name}": tensors[f"layer.0.{name}"].clone() for name in ("keys", "values")}),
        ),
    ),
    "a layer missing": ("llama", lambda tensors, content: content["layers"].pop("1")),
    "a layer under another name": (
        "llama",
        lambda tensors, content: content["layers"].update({"01": content["layers"].pop("1")}),
    ),
    "groups the other way round": ("gemma2", _swap_groups),
    "a tensor nobody knows": ("llama", _add("extra.ids", torch.ones(3))),
    # shapes and dtypes
    "fewer kv heads": ("llama", _reshape(lambda held: held[:1])),
    "fewer kv heads in one layer": ("llama", _reshape(lambda held: held[:1], "layer.1")),
    "fewer kv heads for the values": ("llama", _reshape(lambda held: held[:1], "layer.0.values", "layer.1.values")),
    "heads that the config names in other words": ("falcon", _reshape(lambda held: held.repeat(7, 1, 1, 9))),
    "one layer unlike the others": ("falcon", _reshape(lambda held: held.repeat(2, 1, 1, 1), "layer.1")),
    "no kv heads": ("llama", _reshape(lambda held: held[:0])),
    "another key dim": ("llama", _reshape(lambda held: held[..., :8], "layer.0.keys", "layer.1.keys")),
    "no value dim": ("gpt2", _reshape(lambda held: held[..., :0], "layer.0.values", "layer.1.values")),
    "keys of five dims": ("llama", _reshape(lambda held: held[..., None])),
    "half as many dims": ("gpt2", _reshape(lambda held: held[..., :8])),
    "float64": ("llama", _cast(torch.float64)),
    "float16 of a float32 model that has run": ("llama", _cast(torch.float16)),
    "integers": ("llama", _cast(torch.int32)),
    "8 bits": ("llama", _cast(torch.float8_e4m3fn)),
    "made in no dtype": ("llama", _put("layers", "0", "made", value=["float", "float"])),
    "made in one dtype": ("llama", _put("layers", "0", "made", value=["float32"])),
    "made in another dtype than stored": ("llama", _put("layers", "0", "made", value=["float16", "float32"])),
    "a shape of bools": ("llama", _put("layers", "0", "keys", value=[True, 5, 4, 16])),
    "wide heads, and no token": ("gpt2", _everything_finished_and_wide),
    "latents whose keys and values differ": ("deepseek_v3", _reshape(lambda held: held * 2, "layer.0.keys")),
    "latents taken for heads": ("deepseek_v3", _reshape(lambda held: held.repeat(4, 1, 1, 1))),
    "something behind the last token": ("llama", lambda tensors, content: tensors["layer.0.keys"].fill_(float("nan"))),
    # pads
    "a mask of numbers": ("llama", _add("real", torch.ones(2, 11))),
    "a mask of other columns": ("llama", _add("real", torch.ones(2, 10, dtype=torch.bool))),
    "a mask of another number of rows": ("llama", _add("real", torch.ones(0, 11, dtype=torch.bool))),
    "a mask of bytes": ("llama", _add("real", torch.full((2, 11), 3, dtype=torch.uint8).view(torch.bool))),
    "no pads at all": ("llama", lambda tensors, content: tensors["real"].fill_(True)),
    "nothing but pads": ("llama", lambda tensors, content: tensors["real"].fill_(False)),
    "no mask": ("llama", lambda tensors, content: tensors.pop("real")),
    "a pad after a token": ("llama", lambda tensors, content: tensors["real"][1, 3].fill_(False)),
    "more columns than tokens": ("llama", _longer(48)),
    "more columns than tokens of a window": ("mistral", _longer(48)),
    # tables
    "negative numbers": ("llama", _rows([-4, 4, 2], [0, 11, 3])),
    "a table too long": ("llama", _rows([0, 4, 2], [0, 11, 3])),
    "a count below zero": ("llama", _rows([0, 4, -1], [0, 11, 5])),
    "a huge length": ("llama", _rows([0, 2**62, 1], [0, 11, 3])),
    "a huge count": ("llama", _rows([0, 4, 2**62], [0, 11, 3])),
    "tables of floats": ("llama", lambda tensors, content: tensors.update({"group.0.rows": torch.ones(2, 3)})),
    "tables of no columns": ("llama", _add("group.0.rows", torch.ones(1 << 40, 0, dtype=torch.int64))),
    "blocks in two dims": ("llama", lambda tensors, content: tensors["group.0.blocks"].unsqueeze_(0)),
    "a row that begins late": ("llama", _begin_at_16),
    "a block at two places": ("llama", _add("group.0.blocks", torch.tensor([0, 1, 0, 2]))),
    "a block twice in a row": ("llama", lambda tensors, content: tensors["group.0.blocks"].fill_(0)),
    "a finished row that holds blocks": ("llama", _finish(1, release=False)),
    "a finished row that holds a length": ("llama", _finish(0, release=True)),
}  # fmt: skip


@pytest.mark.parametrize("where", ["its own pool", "a new pool"])
@pytest.mark.parametrize("what", HOSTILE)
def test_contents_that_lie(what, where, path):
    """The checksums fit and the content does not: a ValueError that names the file, and nothing else has happened."""
    family, change = HOSTILE[what]
    model, _, cache = filled(family, 5, 12)
    if where == "a new pool":
        if what == "float16 of a float32 model that has run":
            pytest.skip("under autocast a model may make them")
        hf_paged.unpatch(model)
        pool = KVPool(model.config, PagedConfig(block_size=4))
    else:
        pool = model.paged_pool
    cache.save(path, model)
    rewrite(path, both=lambda tensors, content: None)
    assert_same(cache, PagedCache.load(path, model, pool=pool))
    rewrite(path, both=change)
    before = numbers(pool)
    with pytest.raises(ValueError) as caught:
        PagedCache.load(path, model, pool=pool)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert numbers(pool) == before
    pool.check()


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"rows": ' + "9" * 10_000 + "}", "1" * 5000, '"\\ud800"', "null", "NaN"]
)
def test_a_text_that_no_parser_likes(text, path):
    _model, _, cache = filled("llama", 5, 12)
    cache.save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, metadata={**metadata, "content": text, "crc32": str(zlib.crc32(text.encode()))})
    with pytest.raises(ValueError, match=r"prefix\.safetensors is no saved cache"):
        PagedCache.load(path, build("llama"))


def test_a_window_that_is_not_all_there(path):
    """A sliding row may have lost what no later token sees, and no more."""
    model, _, cache = filled("mistral", 22)
    with torch.no_grad():
        model(torch.tensor([[5]]), **with_cache(cache))
    start = cache.state.tables[0].rows[0].start
    assert start == 12  # of 22 tokens; the next one looks back to 15
    cache.save(path)

    def later(tensors, content):
        tensors["group.0.rows"][0] = torch.tensor([start + 4, 22, 2])
        tensors["group.0.blocks"] = tensors["group.0.blocks"][:2]
        _reshape(lambda held: held[:, 1:])(tensors, content)

    def earlier(tensors, content):
        tensors["group.0.rows"][0, 0] -= 4
        tensors["group.0.rows"][0, 2] += 1
        tensors["group.0.blocks"] = torch.arange(4)
        _reshape(lambda held: torch.cat([held[:, :1], held], 1))(tensors, content)

    rewrite(path, both=earlier)
    PagedCache.load(path, model).check()
    cache.save(path)
    rewrite(path, both=later)
    with pytest.raises(ValueError, match="begins at token 16, and the next one looks back to 15"):
        PagedCache.load(path, model)


def test_a_cache_that_breaks_an_invariant_is_not_handed_out(path, monkeypatch):
    """The last resort: what the checks of the file let through, the cache's own check may not."""
    model, _, cache = filled("llama", 5, 12)
    cache.save(path)
    before = numbers(model.paged_pool)[1:]

    def broken(self):
        assert not self.columns, "broken"

    monkeypatch.setattr(type(cache.state), "check", broken)
    with pytest.raises(ValueError, match=r"prefix\.safetensors .*broken"):
        PagedCache.load(path, model)
    assert numbers(model.paged_pool)[1:] == before
    model.paged_pool.check()


def numbers_in(content, *keys):
    """`(container, key)` of every number in the content."""
    entries = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in entries:
        if isinstance(value, (dict, list)):
            yield from numbers_in(value)
        elif type(value) in (int, float):
            yield content, key


ODD = [0, 1, -1, 3, 16, 10**13, 2**63 - 1, 2**63, -(2**63), 2**200, 0.5, 1e300, True, False, None, "1", [], {}]


def mutated(whole, path, chosen):
    """Write a file with one change at random: of a number in the header, of a table, of a byte, or of its length."""
    kind = chosen.choice(["content", "content", "table", "byte", "byte", "short"])
    path.write_bytes(whole)
    if kind == "content":

        def change(content):
            holder, key = chosen.choice(list(numbers_in(content)))
            value = holder[key]
            holder[key] = chosen.choice([*ODD, value + 1, value - 1, value * 2, -value, float(value), str(value)])

        rewrite(path, change)
    elif kind == "table":

        def tables(tensors):
            # Not the blocks: which rows share one is content, like keys and values.
            flat = tensors[chosen.choice(["real", *[name for name in tensors if name.endswith("rows")]])].view(-1)
            place = chosen.randrange(len(flat))
            flat[place] = chosen.choice([0, 1, -1, int(flat[place]) + 1, int(flat[place]) + 4, 2**62, -(2**63)])

        rewrite(path, tensors=tables)
    elif kind == "byte":
        damaged = bytearray(whole)
        for _ in range(chosen.choice([1, 1, 1, 5])):
            damaged[chosen.randrange(len(damaged))] = chosen.randrange(256)
        path.write_bytes(damaged)
    else:
        path.write_bytes(whole[: chosen.randrange(len(whole))])
    return kind


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_files_changed_at_random(family, path):
    """Refused with a ValueError, or as good as the file that was saved; and no block is ever lost."""
    chosen = random.Random(family)
    model, _, cache = filled(family, 5, 9, 12)
    cache.batch_repeat_interleave(2)
    cache.state.finish_rows([3])
    cache.save(path)
    whole = path.read_bytes()
    dense = [(layer.keys, layer.values) for layer in cache.layers]
    before = numbers(model.paged_pool)
    accepted = 0
    for turn in range(300):
        kind = mutated(whole, path, chosen)
        try:
            loaded = PagedCache.load(path, model)
        except ValueError as error:
            assert str(path) in str(error), turn
        else:
            accepted += 1
            left, right = cache.state, loaded.state
            for name in ("columns", "rows", "lead", "finished", "inner_pads", "recording", "blind"):
                assert getattr(left, name) == getattr(right, name), (turn, kind, name)
            assert torch.equal(left._real_columns(left.columns), right._real_columns(left.columns))
            for layer, (keys, values) in zip(loaded.layers, dense, strict=True):
                assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values), (turn, kind)
            loaded.check()
            del loaded, right, layer
        model.paged_pool.check()
        assert model.paged_stats().used_blocks == before[1], turn
    assert 0 < accepted < 60
    cache.check()


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
    rewrite(path, version="3")
    with pytest.raises(ValueError, match="version 3 of the format, this hf_paged reads version 2"):
        PagedCache.load(path, model)
    rewrite(path, version="1")
    with pytest.raises(ValueError, match=r"version 1 of the format.*save it again"):
        PagedCache.load(path, model)


def test_a_pipe_is_not_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"prefix\.safetensors is no file"):
        PagedCache.load(path, build("llama"))


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
    _model, _, cache = filled("llama", 5)
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
