"""`cache.layers[i].keys` and `.values` in the hands of user code: read as any tensor; a write reaches the blocks."""

import copy
import io

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from models import build, cache_of, pair, prompts, run, vouch_for, with_cache

import hf_paged
from hf_paged import OutOfBlocks, PagedCache, PagedConfig, compat
from hf_paged.snapshot import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore:hf_paged")


def filled(model, columns=11, rows=2, **config):
    """A `PagedCache` and a `DynamicCache` with the same content; every row is the same, so with beams all is shared."""
    ids = prompts(*[columns])["input_ids"]
    ours = PagedCache(model.config, PagedConfig(block_size=4, **config))
    theirs = compat.DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in (ours, theirs):
            model(input_ids=ids, **with_cache(cache))
            cache.batch_repeat_interleave(rows)
    return ours, theirs


def same_content(ours, theirs):
    for left, right in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(left.keys.clone(), right.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(left.values.clone(), right.values, atol=1e-5, rtol=1e-5)


def same_step(model, ours, theirs):
    ids = torch.tensor([[5], [6]])
    with torch.no_grad():
        logits = [model(input_ids=ids, **with_cache(cache)).logits for cache in (ours, theirs)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


WRITES = {
    "a slice": lambda keys: keys.__setitem__((..., 3, slice(None)), 0),
    "an operator": lambda keys: keys.mul_(2),
    "a view": lambda keys: keys[1].transpose(0, 1)[2].zero_(),
    "views of an unbound one": lambda keys: [row.add_(1) for row in keys.unbind(0)],
    "a chunk": lambda keys: keys.chunk(2)[1].zero_(),
    "data": lambda keys: keys.data.mul_(3),
    "data of a view": lambda keys: keys[0].data[0].fill_(1),
    "detached": lambda keys: keys.detach().zero_(),
    "out=": lambda keys: torch.add(keys[0], 1, out=keys[1]),
    "copy_": lambda keys: keys.copy_(torch.ones_like(keys)),
    "several at once": lambda keys: torch._foreach_mul_([keys], 2.0),
    "a flag": lambda keys: torch.nn.functional.relu(keys, inplace=True),
    "an initialiser": lambda keys: torch.nn.init.ones_(keys),
    "a mask": lambda keys: keys.masked_fill_(keys > 0, 0),
    "indices": lambda keys: keys.index_fill_(2, torch.tensor([1, 4]), 0.5),
    "an operator by name": lambda keys: torch.ops.aten.mul_.Tensor(keys, torch.tensor(2.0)),
    "a Python function": lambda keys: keys.apply_(lambda number: number * 2),
    "nothing": lambda keys: keys.mul_(1),
}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_stored(name, context):
    model = build("llama")
    ours, theirs = filled(model)
    with context():
        for cache in (ours, theirs):
            WRITES[name](cache.layers[0].values)
            WRITES[name](cache.layers[1].keys)
    same_content(ours, theirs)
    assert (ours.stats().cow_copies > 0) == (name != "nothing")  # the rows shared all blocks
    same_step(model, ours, theirs)
    ours.check()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "deepseek_v3"])
def test_writes_in_every_kind_of_layer(family):
    model = build(family)
    ours, theirs = filled(model, columns=14)
    for cache in (ours, theirs):
        for layer in cache.layers:
            layer.keys[0, :, -3:].mul_(2)
            layer.values[1, :, 1] = 0
    same_content(ours, theirs)
    same_step(model, ours, theirs)
    for cache in (ours, theirs):
        for layer in cache.layers:
            layer.keys += 0.5
            layer.values = layer.values.clone() * 2  # assigned
    same_content(ours, theirs)
    same_step(model, ours, theirs)
    ours.check()


def test_only_blocks_that_change_are_copied():
    ours, _ = filled(build("llama"), columns=16)
    assert ours.stats().used_blocks == 4
    ours.layers[0].keys[1, :, 5] = 0
    assert ours.stats().used_blocks == 5 and ours.stats().cow_copies == 1
    ours.layers[1].values[1, :, 6] = 0  # the row is alone with it
    assert ours.stats().used_blocks == 5


def test_two_snapshots_see_each_other():
    ours, theirs = filled(build("llama"))
    for cache in (ours, theirs):
        view = cache.layers[0].keys[0]
        cache.layers[0].keys.zero_()
        view[:, 2] = 1
    same_content(ours, theirs)
    assert ours.layers[0].keys[0, 0, 1].sum() == 0


def test_a_fork_keeps_what_it_had():
    ours, theirs = filled(build("llama"))
    forks = [copy.deepcopy(cache) for cache in (ours, theirs)]
    before = ours.layers[0].keys
    fork = copy.deepcopy(ours)
    before.zero_()  # taken before the fork: it still shows the cache
    theirs.layers[0].keys.zero_()
    same_content(ours, theirs)
    same_content(*forks)
    same_content(fork, forks[1])


def test_what_was_taken_before_a_step_is_its_holders():
    model = build("llama")
    ours, theirs = filled(model)
    taken = [cache.layers[0].keys for cache in (ours, theirs)]
    same_step(model, ours, theirs)
    for keys in taken:
        keys.zero_()
    same_content(ours, theirs)
    assert taken[0].shape == (2, 2, 11, 16)


def test_a_snapshot_keeps_no_blocks():
    ours, _ = filled(build("llama"))
    pool, keys = ours.pool, ours.layers[0].keys
    del ours, _
    assert pool.stats().used_blocks == 0
    assert keys.mul_(2).shape == (2, 2, 11, 16)


def test_what_was_written_to_is_never_found_as_a_prefix():
    plain, paged = pair("llama", block_size=4, num_blocks=64)
    inputs = prompts(14)
    expected = run(plain, inputs, max_new_tokens=8)
    for write in (False, True):
        cache = PagedCache(paged.config, pool=paged.paged_pool)
        run(paged, {**inputs, **with_cache(cache)}, max_new_tokens=1)
        hits = paged.paged_stats().prefix_hit_tokens
        if write:
            cache.layers[0].values.mul_(3)
            longer = torch.cat([inputs["input_ids"], torch.tensor([[5, 6, 7, 8, 9]])], dim=1)
            run(paged, {"input_ids": longer, **with_cache(cache)}, max_new_tokens=8)
        else:
            assert cache.layers[0].values.sum() and cache.layers[1].keys.shape
        del cache
        got = run(paged, inputs, max_new_tokens=8)
        assert torch.equal(expected, got)
        assert paged.paged_stats().prefix_hit_tokens - hits == 13  # what was stored before is found as it was
        paged.paged_pool.check()
    after = run(plain, {"input_ids": longer}, max_new_tokens=8)
    assert torch.equal(after, run(paged, {"input_ids": longer}, max_new_tokens=8))


def test_in_the_middle_of_generate():
    """A processor that writes to the cache of the call it is in."""
    plain, paged = pair("llama", block_size=4)

    class Steering(transformers.LogitsProcessor):
        def __init__(self, cache):
            self.cache = cache

        def __call__(self, input_ids, scores):
            self.cache.layers[1].values[:, :, 2] = 0.25
            return scores

    outputs = []
    vouch_for(paged, Steering)
    for model, cache in (
        (plain, compat.DynamicCache(config=plain.config)),
        (paged, PagedCache(paged.config, pool=paged.paged_pool)),
    ):
        inputs = {**prompts(9), **with_cache(cache)}
        outputs.append(run(model, inputs, max_new_tokens=8, logits_processor=[Steering(cache)]))
    assert torch.equal(*outputs)
    assert torch.equal(run(plain, prompts(9), max_new_tokens=8), run(paged, prompts(9), max_new_tokens=8))


# -- reading -----------------------------------------------------------------------------------------------------------


def test_it_is_read_as_a_tensor():
    ours, theirs = filled(build("llama"))
    keys, plain = ours.layers[0].keys, theirs.layers[0].keys
    assert (keys.shape, keys.dtype, keys.device, keys.ndim) == (plain.shape, plain.dtype, plain.device, 4)
    assert keys.is_contiguous() and not keys.requires_grad and len(keys) == 2
    for result in (
        keys + 1,
        torch.cat([keys, keys], dim=2),
        keys.clone(),
        keys.sum(),
        keys.half(),
        copy.deepcopy(keys),
    ):
        assert type(result) is torch.Tensor
    assert type(keys[0]) is type(keys.view(-1)) is Snapshot  # for what is written to them
    torch.testing.assert_close(keys, plain, atol=1e-5, rtol=1e-5)
    assert torch.equal(keys, ours.layers[0].keys) and keys.tolist() == keys.clone().tolist()
    assert torch.zeros_like(plain).copy_(keys).equal(keys)
    file = io.BytesIO()
    torch.save({"keys": keys, "row": keys[0]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded["row"]) is torch.Tensor and torch.equal(loaded["keys"], keys)
    assert safetensors.torch.load(safetensors.torch.save({"keys": keys}))["keys"].equal(keys)
    array = keys.numpy()
    assert np.array_equal(array, np.asarray(keys)) and np.array_equal(np.from_dlpack(keys), array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    compiled = torch.compile(lambda tensor: tensor * 2 + 1, backend="eager")
    assert torch.equal(compiled(keys), keys * 2 + 1)
    assert ours.stats().cow_copies == 0 and ours.state.known.identity is None


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda layer: setattr(layer, "keys", layer.keys[:, :, :3]), ValueError, "crop"),
        (lambda layer: setattr(layer, "values", layer.values[:1]), ValueError, "batch_select_indices"),
        (lambda layer: setattr(layer, "keys", layer.keys.half()), ValueError, "float16"),
        (lambda layer: setattr(layer, "keys", None), ValueError, "NoneType"),
        (lambda layer: layer.keys.set_(torch.zeros(3)), RuntimeError, "assign them"),
        (lambda layer: layer.keys.resize_(2, 2), RuntimeError, "assign them"),
        (lambda layer: layer.keys.transpose_(1, 2), RuntimeError, "assign them"),
        (lambda layer: setattr(layer.keys, "data", torch.zeros(2, 2, 11, 16)), RuntimeError, "assign them"),
    ],
)
def test_what_cannot_be_stored_is_refused(change, error, words):
    ours, theirs = filled(build("llama"))
    with pytest.raises(error, match=words):
        change(ours.layers[0])
    same_content(ours, theirs)


def test_an_empty_layer_takes_no_keys():
    cache = PagedCache(build("llama").config)
    assert cache.layers[0].keys is None
    with pytest.raises(ValueError, match="empty"):
        cache.layers[0].keys = torch.zeros(1, 2, 3, 16)


def test_no_room_for_copies():
    ours, theirs = filled(build("llama"), columns=12, num_blocks=4)
    with pytest.raises(OutOfBlocks):
        ours.layers[0].keys.zero_()
    same_content(ours, theirs)
    ours.check()
    ours.layers[0].keys[0, :, 1] = 0  # room for one
    theirs.layers[0].keys[0, :, 1] = 0
    same_content(ours, theirs)


def test_in_the_middle_of_a_forward():
    """What nobody shares can be written to; for the rest there would be copies that other layers know nothing of."""
    model = build("llama")
    for rows in (1, 2):
        ours, theirs = filled(model, rows=rows)
        handle = model.model.layers[1].register_forward_pre_hook(
            lambda *_, cache=ours: cache.layers[0].keys.__setitem__((0, slice(None), 2), 0)
        )
        step = {"input_ids": torch.tensor([[5]] * rows), **with_cache(ours)}
        with torch.no_grad():
            if rows == 2:
                with pytest.raises(RuntimeError, match="between two forwards"):
                    model(**step)
            else:
                model(**step)
                assert ours.layers[0].keys[0, :, 2].abs().sum() == 0
        handle.remove()
        del theirs


# -- what update() and the mask function give --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_update_returns_may_be_written_to_through_a_view(family, monkeypatch):
    plain = build(family)
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4, shortcuts=False)
    for kind in (compat.DynamicCache, PagedCache):

        def update(self, *args, own=kind.update, **kwargs):
            keys, values = own(self, *args, **kwargs)
            values[:, :, 2] = 0
            keys[:, :, 1].mul_(2)
            return keys, values

        monkeypatch.setattr(kind, "update", update)
    everything = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 12}
    expected, got = run(plain, prompts(9, 9), **everything), run(paged, prompts(9, 9), **everything)
    assert torch.equal(expected.sequences, got.sequences)
    torch.testing.assert_close(torch.stack(expected.logits), torch.stack(got.logits), atol=1e-4, rtol=1e-4)
    assert cache_of(got).layers[0].values[:, :, 2].abs().sum() >= 0


def test_what_update_returns_is_not_written_to_as_a_whole():
    cache = PagedCache(build("llama").config)
    keys, _ = cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
    with pytest.raises(RuntimeError, match="clone"):
        keys.mul_(2)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("writes", [True, False])
def test_a_mask_that_the_model_writes_to(attn, writes):
    plain = build("llama", attn=attn)
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)

    def hide(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        if mask is not None:
            lowest = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
            (mask if writes else mask.clone())[..., 4] = lowest

    for model in (plain, paged):
        model.model.layers[0].self_attn.register_forward_pre_hook(hide, with_kwargs=True)
    everything = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
    inputs = prompts(9, 7)
    expected, got = (run(model, inputs, **everything) for model in (plain, paged))
    torch.testing.assert_close(torch.stack(expected.logits), torch.stack(got.logits), atol=1e-4, rtol=1e-4)
    dense = any("custom attention mask" in reason for reason in paged.paged_stats().fallbacks)
    assert dense == writes
