"""Models spread over devices, offloaded, split over processes, with adapters and other number formats.

Several devices on a machine without any: a split over "cpu" and "meta" takes accelerate's hooks through the same doors.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import assert_equal, build, pair, prompts, run

import hf_paged

HERE = Path(__file__).parent
accelerate = pytest.importorskip("accelerate")

MODES = {"greedy": {}, "beams": {"num_beams": 3}, "samples": {"do_sample": True, "num_return_sequences": 2}}


def same_in_all_modes(plain, paged):
    for options in MODES.values():
        assert_equal(plain, paged, prompts(5, 12), max_new_tokens=7, **options)
    assert paged.paged_stats().peak_used_blocks > 0


# -- one process ---------------------------------------------------------------------------------------------------


def split(model, tmp_path, places):
    """Dispatch the layers of a tiny llama to the places, in order; embeddings and head to the CPU."""
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{index}": place for index, place in enumerate(places)}
    return accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)


@pytest.mark.parametrize("order", ["patched first", "dispatched first"])
@pytest.mark.parametrize("places", [("cpu", "cpu"), ("cpu", "disk"), ("disk", "disk")], ids=str)
def test_layers_kept_elsewhere(places, order, tmp_path):
    """Hooks bring a layer's weights for its forward: keys and values lie where the layer computes."""
    plain, paged = build("llama"), build("llama")
    if order == "patched first":
        paged = split(hf_paged.patch(paged, block_size=4), tmp_path, places)
    else:
        paged = hf_paged.patch(split(paged, tmp_path, places), block_size=4)
    same_in_all_modes(plain, paged)
    assert {store.memory.keys.device.type for store in paged.paged_pool.stores.values()} == {"cpu"}
    stats = paged.paged_stats()
    if "disk" in places:  # their content cannot be read, so nothing is known of what they are now
        assert set(stats.stepped_aside) == {"weights_out_of_reach"}
        assert stats.prefix_hit_tokens == 0
    else:
        assert stats.fallbacks == {}
        assert stats.prefix_hit_tokens > 0


def test_weights_on_disk_that_are_vouched_for(tmp_path):
    plain, paged = build("llama"), hf_paged.patch(build("llama"), block_size=4, vouch=True)
    split(paged, tmp_path, ("cpu", "disk"))
    same_in_all_modes(plain, paged)
    assert paged.paged_stats().fallbacks == {}
    assert paged.paged_stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("kind", ["cpu_offload", "disk_offload"])
def test_offloaded_as_a_whole(kind, tmp_path):
    plain, paged = pair("gemma3", block_size=4)
    arguments = {"offload_dir": str(tmp_path)} if kind == "disk_offload" else {}
    getattr(accelerate, kind)(paged, execution_device=torch.device("cpu"), **arguments)
    same_in_all_modes(plain, paged)


def test_each_layer_has_a_store_of_its_own_on_its_device():
    """Tables go to each device once a step: the plan keeps one copy a device, whatever the number of layers."""
    _, paged = pair("llama", block_size=4)
    run(paged, prompts(5, 12), max_new_tokens=3)
    devices = {index: store.memory.keys.device for index, store in paged.paged_pool.stores.items()}
    assert devices == {index: layer.self_attn.k_proj.weight.device for index, layer in enumerate(paged.model.layers)}


def test_masks_and_tables_go_to_each_device_once():
    """A mask stays lazy on its way to another device, and what a plan has worked out is kept per device."""
    _, paged = pair("llama", block_size=4)
    begin, elsewhere, steps = hf_paged.state.CacheState.begin_step, torch.device("meta"), []

    def note(self, *arguments):
        step = begin(self, *arguments)
        for device in (torch.device("cpu"), elsewhere):
            rows = step.groups[0].rows_on(device, 2, 64)
            assert step.groups[0].rows_on(device, 2, 64) is rows and rows[1].device == device
        steps.append(step)
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_paged.state.CacheState, "begin_step", note)
        run(paged, prompts(5, 12), max_new_tokens=3)
    assert len(steps) == 3  # a plan a forward, whatever the number of layers

    padding = prompts(5, 12)["attention_mask"].bool()
    mask = hf_paged.lazy.LazyMask.make((2, 1, 1, 12), "cpu", 4, False, padding, lambda: torch.ones(2, 1, 1, 12).bool())
    moved = mask.to(elsewhere)
    assert type(moved) is hf_paged.lazy.LazyMask and moved.device == elsewhere
    assert (moved.window, moved.padding is padding) == (4, True)
    assert mask._dense is None
    assert mask.to("cpu") is mask
    assert mask.float().dtype == torch.float32  # anything else makes it dense
    assert moved.materialize("").device == elsewhere


def test_a_model_on_the_meta_device_is_not_taken_for_another():
    """Weights that are offloaded have no address; versions and ids still tell them apart."""
    plain, paged = pair("llama", block_size=4)
    accelerate.cpu_offload(paged, execution_device=torch.device("cpu"))
    assert_equal(plain, paged, prompts(12), max_new_tokens=4)
    for model in (plain, paged):
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        model.load_state_dict(build("llama", seed=2).state_dict(), assign=model is paged)
    assert_equal(plain, paged, prompts(12), max_new_tokens=4)


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_two_processes(tmp_path):
    """Tensor parallel: ranks agree without talking. Data parallel: the recipe of docs/recipes.md."""
    sys.path.insert(0, str(HERE))
    from parallel_worker import MODES as modes

    plain = build("llama", vocab_size=98)  # even, so that the head can be split, too
    plain.save_pretrained(tmp_path / "model")
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        str(HERE / "parallel_worker.py"), str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    tensor, data = (
        [json.loads((tmp_path / f"{kind}{rank}.json").read_text()) for rank in range(2)] for kind in ("tensor", "data")
    )

    first, second = tensor
    assert first["heads"] == second["heads"] == 1  # of 2: each rank keeps its share
    for name, options in modes.items():
        expected = run(plain, prompts(5, 12, 9), max_new_tokens=8, **options)
        assert first[name]["ids"] == second[name]["ids"] == expected.tolist(), name
        # Block ids follow from the tokens, so they are the same everywhere.
        assert first[name]["tables"] == second[name]["tables"], name
        assert any(blocks for step in first[name]["tables"] for rows in step for blocks in rows)
    assert first["stats"] == second["stats"]
    # Prefixes stand aside: what a rank would find must not depend on that rank's weights alone.
    assert first["stats"] == [0, 0, {"weights_out_of_reach": len(modes)}]

    assert sorted(int(row) for rows in data for row in rows) == list(range(5)) and all(data)
    batch = prompts(5, 12, 9, 7, 11)
    for rows in data:
        mine = [int(row) for row in rows]
        expected = run(plain, {name: each[mine] for name, each in batch.items()}, max_new_tokens=8, num_beams=2)
        assert [rows[str(row)] for row in mine] == expected.tolist()


# -- adapters and formats ----------------------------------------------------------------------------------------------


def test_adapters_switched_between_calls():
    """Each adapter's keys are its own: what one has stored is not found under the other, and found again by itself."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], r=4)
    plain = peft.get_peft_model(build("llama"), config, adapter_name="one")
    plain.add_adapter("two", config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    plain.eval()
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4, num_blocks=64)
    seen, hits = {}, []
    for name in ("one", "two", "one", "two"):
        for model in (plain, paged):
            model.set_adapter(name)
        before = paged.get_base_model().paged_stats().prefix_hit_tokens
        for options in ({}, {"num_beams": 2}):
            got = run(paged, prompts(12, 12), max_new_tokens=6, **options)
            assert torch.equal(run(plain, prompts(12, 12), max_new_tokens=6, **options), got)
        hits.append(paged.get_base_model().paged_stats().prefix_hit_tokens - before)
        seen.setdefault(name, got)
    assert not torch.equal(seen["one"], seen["two"])
    assert 0 < hits[0] < hits[2] and 0 < hits[1] < hits[3]
    for model in (plain, paged):
        model.merge_adapter()
    assert torch.equal(run(plain, prompts(12), max_new_tokens=6), run(paged, prompts(12), max_new_tokens=6))


class EightBits(torch.nn.Module):
    """A linear layer with weights in eight bits, a scale a row: what weight-only quantisation computes."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


def eight_bits(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and name != "lm_head":
                setattr(module, name, EightBits(child))
    return model


def test_weights_of_eight_bits():
    """In buffers, not in parameters; other weights in the same buffers are noticed."""
    plain = eight_bits(build("llama"))
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    same_in_all_modes(plain, paged)
    for model in (plain, paged):
        model.model.layers[0].self_attn.k_proj.scale.mul_(1.5)
    same_in_all_modes(plain, paged)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_scales_of_a_whole_batch_are_refused():
    model = torch.ao.quantization.quantize_dynamic(build("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="scale by the largest value of a whole batch"):
        hf_paged.patch(model)


def torchao_pair(config):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    reference = build("llama", hidden_size=128, head_dim=32)
    plain = copy.deepcopy(reference)
    quantization.quantize_(plain, getattr(quantization, config)())
    return reference, plain, hf_paged.patch(copy.deepcopy(plain), block_size=4)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_torchao_weights():
    _, plain, paged = torchao_pair("Int8WeightOnlyConfig")
    same_in_all_modes(plain, paged)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_torchao_activations():
    """Rounding to eight bits turns a last bit into a step, so ids may differ where a 16-bit model's may: the logits are
    no further from the unquantised model's than without us."""
    reference, plain, paged = torchao_pair("Int8DynamicActivationInt8WeightConfig")
    kept = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    for seed in range(3):
        right, theirs, ours = (run(each, prompts(5, 12, seed=seed), **kept) for each in (reference, plain, paged))
        distance = [(each.logits[0] - right.logits[0]).abs().mean().item() for each in (theirs, ours)]
        assert 0 < distance[1] <= 1.25 * distance[0], distance


def test_bitsandbytes_weights_of_four_bits():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def quantised():
        model = build("llama")
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is torch.nn.Linear and name != "lm_head":
                    new = bitsandbytes.nn.Linear4bit(
                        child.in_features, child.out_features, bias=False, compute_dtype=torch.float32,
                        quant_type="nf4",
                    )  # fmt: skip
                    new.weight = bitsandbytes.nn.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                    setattr(module, name, new)
        return model.to("cpu")

    same_in_all_modes(quantised(), hf_paged.patch(quantised(), block_size=4))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
def test_autocast(options):
    """Keys may be float32 where values are bfloat16: each is stored as it comes."""
    plain, paged = pair("llama", block_size=4)
    kept = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    reference = run(plain, prompts(5, 12), **kept, **options)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = run(plain, prompts(5, 12), **kept, **options)
        ours = run(paged, prompts(5, 12), **kept, **options)
    distance = [(each.logits[0].float() - reference.logits[0]).abs().mean().item() for each in (theirs, ours)]
    assert distance[1] <= 1.5 * distance[0] + 1e-3, distance
    del ours
    # What was stored under autocast is not found without.
    assert_equal(plain, paged, prompts(5, 12), max_new_tokens=6, **options)


@pytest.mark.parametrize("family", ["llama", "gemma3", "bart"])
def test_a_model_in_training_mode_generates_as_before(family):
    """Without dropout exactly, and with all savings: training mode alone costs nothing."""
    plain, paged = pair(family, block_size=4)
    for model in (plain, paged):
        model.train()
        for module in model.modules():
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
            for name in ("activation_dropout", "attention_dropout", "layerdrop"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
    inputs = prompts(5, 12, side="right" if family == "bart" else "left")
    assert_equal(plain, paged, inputs, max_new_tokens=6)
    assert_equal(plain, paged, inputs, max_new_tokens=6, num_beams=2)
    stats = paged.paged_stats()
    assert stats.stepped_aside == {}
    assert (stats.prefix_hit_tokens > 0) == (family != "bart")


def test_dropout_in_a_cached_forward_is_dense_and_counted():
    """Which weights are dropped must be the library's own draw."""
    plain, paged = pair("llama", overrides={"attention_dropout": 0.5}, block_size=4)
    for model in (plain, paged):
        model.train()
    expected = run(plain, prompts(9), max_new_tokens=5)
    assert torch.equal(expected, run(paged, prompts(9), max_new_tokens=5))
    assert "dense attention: dropout" in paged.paged_stats().fallbacks


def test_gradient_checkpointing_is_left_alone():
    """The library switches the cache off while it trains so; a gradient through the cache is refused."""
    plain, paged = pair("llama", block_size=4)
    for model in (plain, paged):
        model.gradient_checkpointing_enable()
        model.train()
        loss = model(**prompts(9), labels=prompts(9)["input_ids"], use_cache=True).loss
        loss.backward()
    for left, right in zip(plain.parameters(), paged.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, atol=1e-6, rtol=1e-5)
    paged.gradient_checkpointing_disable()
    with pytest.raises(RuntimeError, match="outside the autograd graph"):
        paged(**prompts(9), use_cache=True, **{hf_paged.compat.CACHE_ARGUMENT: hf_paged.PagedCache(paged.config)})
