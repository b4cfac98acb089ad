"""Vision-language models: the text part alone is paged, image tokens are attended to as before, beams included."""

import copy

import pytest
import torch
import transformers
from models import _COMMON, Computed, assert_equal, paged_part, prompts, randomise, run

import hf_paged
from hf_paged import prefill
from hf_paged.cross import CrossLayer

IMAGE, START = 95, 96
_QWEN_VISION = dict(
    depth=2, num_heads=2, patch_size=2, spatial_merge_size=2, temporal_patch_size=1, in_channels=3,
)  # fmt: skip
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_QWEN = dict(image_token_id=IMAGE, video_token_id=94, vision_start_token_id=START, vision_end_token_id=93)


def build(name):
    torch.manual_seed(0)
    if name == "llava":
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(
                hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=4,
                patch_size=2,
            ),
            text_config=transformers.LlamaConfig(**_COMMON), image_token_id=IMAGE,
        )  # fmt: skip
        kind = "Llava"
    elif name == "gemma3":
        config = transformers.Gemma3Config(
            vision_config=transformers.SiglipVisionConfig(
                hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8,
                patch_size=2,
            ),
            text_config=transformers.Gemma3TextConfig(
                **{
                    **_COMMON, "num_hidden_layers": 3, "sliding_window": 8, "head_dim": 16,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                }
            ),
            mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=94,
        )  # fmt: skip
        kind = "Gemma3"
    elif name == "mllama":
        config = transformers.MllamaConfig(
            vision_config=dict(
                hidden_size=32, attention_heads=2, num_hidden_layers=2, num_global_layers=1, intermediate_size=32,
                vision_output_dim=64, image_size=8, patch_size=4, max_num_tiles=1, intermediate_layers_indices=[1],
                supported_aspect_ratios=[[1, 1]],
            ),
            text_config={
                **_COMMON, "num_hidden_layers": 4, "cross_attention_layers": [1, 3],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            image_token_index=IMAGE,
        )  # fmt: skip
        kind = "Mllama"
    elif name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[name]
        vision = {
            "qwen2_vl": dict(embed_dim=32, hidden_size=64),
            "qwen2_5_vl": dict(
                hidden_size=32, intermediate_size=32, out_hidden_size=64, fullatt_block_indexes=[1], window_size=8,
            ),
            "qwen3_vl": dict(
                hidden_size=32, intermediate_size=32, out_hidden_size=64, num_position_embeddings=16,
                deepstack_visual_indexes=[0],
            ),
        }[name]  # fmt: skip
        text = {**_COMMON, "rope_parameters": _ROPE, "head_dim": 16}
        if name != "qwen3_vl":
            del text["head_dim"]
        config = getattr(transformers, f"{kind}Config")(
            vision_config={**_QWEN_VISION, **vision}, text_config=text, **_QWEN
        )
    model = randomise(getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval())
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    if name == "mllama":
        for parameter_name, parameter in model.named_parameters():
            if "gate" in parameter_name and parameter.ndim == 1:
                parameter.data.fill_(0.7)  # zero at first: no image would be seen
    return model


def images(name, *lengths, seed=3):
    """A left-padded batch of prompts, each with one image somewhere in it."""
    inputs = prompts(*lengths, seed=seed)
    ids = inputs["input_ids"].clamp_(max=90)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = ids.shape
    if name == "mllama":
        ids[:, -3] = IMAGE
        inputs["pixel_values"] = torch.randn(rows, 1, 1, 3, 8, 8, generator=generator)
        inputs["aspect_ratio_ids"] = torch.ones(rows, 1, dtype=torch.long)
        inputs["aspect_ratio_mask"] = torch.ones(rows, 1, 1, dtype=torch.long)
        seen = torch.ones(rows, columns, 1, 1, dtype=torch.long)
        seen[:, : columns - 3] = 0  # tokens before the image do not see it
        inputs["cross_attention_mask"] = seen
        return inputs
    begin = columns - 7
    ids[:, begin - 1] = START
    ids[:, begin : begin + 4] = IMAGE
    if name in ("llava", "gemma3"):
        size = 4 if name == "llava" else 8
        inputs["pixel_values"] = torch.randn(rows, 3, size, size, generator=generator)
    else:
        inputs["pixel_values"] = torch.randn(rows * 16, 3 * 4, generator=generator)  # 4 by 4 patches, merged by 2 by 2
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * rows)
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return inputs


NAMES = ["llava", "gemma3", "mllama", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_with_an_image(name, mode):
    plain = build(name)
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    inputs = images(name, 10, 13)
    assert_equal(plain, paged, inputs, max_new_tokens=10, **MODES[mode])
    assert paged.paged_stats().peak_used_blocks > 0
    once = not any("once per beam" in reason for reason in paged.paged_stats().fallbacks)
    assert once == (mode == "greedy" or name in prefill.IMAGES_ONCE)
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
    kept = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True, **MODES[mode]}
    first, second = (run(model, each, **kept).logits[0] for model, each in ((plain, inputs), (paged, other)))
    assert (first - second).abs().max() > 1e-3  # another image makes other logits: it is seen


@pytest.mark.parametrize("name", sorted(prefill.IMAGES_ONCE))
def test_a_prompt_with_an_image_is_computed_once(name):
    """For its beams and its samples. The images of a batch are unlike, and each row keeps its own."""
    plain = build(name)
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    computed = Computed(paged, paged.model.language_model)
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 4}):
        inputs = images(name, 13, 13)
        run(paged, inputs, max_new_tokens=1, **options)
        assert computed.since() == 26
        assert_equal(plain, paged, inputs, max_new_tokens=8, **options)
        computed.since()
    off = hf_paged.patch(copy.deepcopy(plain), block_size=4, prompt_once=False)
    computed = Computed(off, off.model.language_model)
    assert_equal(plain, off, inputs, max_new_tokens=1, num_beams=3)
    assert computed.since() == 2 * 3 * 26


@pytest.mark.parametrize("counts", [(2, 2), (2, 1), (2, 0), (0, 1)], ids=str)
def test_rows_with_unlike_numbers_of_images(counts):
    """What the library does with them, which is not the same in all versions: also where beams share an image."""
    plain = build("llava")
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    inputs = prompts(20, 16)
    ids = inputs["input_ids"].clamp_(max=90)
    for row, count in enumerate(counts):
        for place in range(count):
            ids[row, 8 + 5 * place : 12 + 5 * place] = IMAGE
    inputs["pixel_values"] = torch.randn(sum(counts), 3, 4, 4, generator=torch.Generator().manual_seed(4))
    for options in MODES.values():
        assert_equal(plain, paged, inputs, max_new_tokens=6, **options)


@pytest.mark.parametrize("name", NAMES)
def test_without_an_image(name):
    """As a text model, prompt once and all."""
    plain = build(name)
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    inputs = prompts(5, 12)
    inputs["input_ids"].clamp_(max=90)
    for options in MODES.values():
        assert_equal(plain, paged, inputs, max_new_tokens=6, **options)


@pytest.mark.parametrize("name", NAMES)
def test_the_text_part_alone_is_patched(name):
    model = build(name)
    vision = model.config.vision_config._attn_implementation
    hf_paged.patch(model)
    assert model.config.get_text_config(decoder=True)._attn_implementation == "hf_paged"
    assert model.config.vision_config._attn_implementation == vision != "hf_paged"
    kinds = {
        type(module).__name__: module.config._attn_implementation
        for module in model.modules()
        if "Attention" in type(module).__name__ and hasattr(module, "config")
    }
    assert "hf_paged" in kinds.values() and set(kinds.values()) <= {"hf_paged", vision}


def test_the_image_of_mllama_is_no_block():
    """Its cross-attention layers hold the image beside the blocks, whatever the tokens are."""
    plain = build("mllama")
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    output = run(paged, images("mllama", 10, 13), max_new_tokens=4, return_dict_in_generate=True)
    cache = paged_part(output)
    assert [isinstance(layer, CrossLayer) for layer in cache.layers] == [False, True, False, True]
    assert paged.paged_stats().cross_attention_bytes == sum(
        t.nbytes for layer in cache.layers[1::2] for t in layer.tensors
    )
    assert paged.paged_stats().cross_attention_bytes > 0
    cache.check()
