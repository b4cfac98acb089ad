"""Encoder-decoder models: the source is read and stored once, whatever the number of its beams and samples."""

import copy
import gc

import pytest
import torch
import transformers
from models import (
    BOS,
    EOS,
    PAD,
    VOCAB,
    Watch,
    assert_close,
    assert_equal,
    build,
    cache_of,
    observe,
    prompts,
    randomise,
    run,
    with_cache,
)
from transformers import StoppingCriteria

import hf_paged
from hf_paged import PagedCache, compat
from hf_paged.cross import CrossCache, CrossLayer, LazyCross

_T5 = dict(
    vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=PAD,
    eos_token_id=EOS, pad_token_id=PAD,
)  # fmt: skip


def make(family, seed=0, attn=None):
    """A tiny model of the family."""
    if family in ("t5", "bart"):
        return build(family, seed, attn)
    torch.manual_seed(seed)
    if family == "mt5":
        config = transformers.MT5Config(**_T5)
        kind = transformers.MT5ForConditionalGeneration
    else:
        config = transformers.WhisperConfig(
            vocab_size=VOCAB, num_mel_bins=8, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=12,
            max_target_positions=64, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=BOS,
            suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        kind = transformers.WhisperForConditionalGeneration
    if attn is not None:
        config._attn_implementation = attn
    return randomise(kind(config).eval(), seed)


def make_pair(family, attn=None, **options):
    plain = make(family, attn=attn)
    return plain, hf_paged.patch(copy.deepcopy(plain), block_size=4, **options)


def inputs_of(family, *lengths, seed=3):
    if family == "whisper":
        generator = torch.Generator().manual_seed(seed)
        return {"input_features": torch.randn(len(lengths), 8, 24, generator=generator)}
    return prompts(*lengths, seed=seed, side="right")


def assert_same(family, plain, paged, inputs, **options):
    """Ids and logits as the unpatched model's."""
    if family != "whisper":
        return assert_equal(plain, paged, inputs, **options)
    # Its own generate() cuts the ids it returns alone, and takes the cache it returns apart.
    everything = {"return_dict_in_generate": True, "output_logits": True}
    assert_close(run(plain, inputs, **options, **everything), run(paged, inputs, **options, **everything))
    assert torch.equal(run(plain, inputs, **options), run(paged, inputs, **options))
    paged.paged_pool.check()
    assert paged.paged_stats().used_blocks == 0


FAMILIES = ["t5", "bart", "whisper", "mt5"]
MODES = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "beams_all": {"num_beams": 3, "num_return_sequences": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beam_samples": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens(family, mode):
    plain, paged = make_pair(family)
    assert_same(family, plain, paged, inputs_of(family, 5, 12, 9), max_new_tokens=10, **MODES[mode])
    reasons = paged.paged_stats().fallbacks
    if family in ("t5", "mt5") and compat.CACHE_ARGUMENT != "cache":  # up to 5.23 it does its own attention
        assert reasons and all("for aten::" in each or "row: aten::" in each for each in reasons)
    else:
        assert reasons == {}


@pytest.mark.parametrize("mode", ["beams", "samples"])
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_models_that_were_eager(family, mode):
    plain, paged = make_pair(family, attn="eager")
    assert_same(family, plain, paged, inputs_of(family, 5, 9), max_new_tokens=8, **MODES[mode])


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_decoder_prompt_and_assistants(family):
    plain, paged = make_pair(family)
    decoder = torch.tensor([[1, 5, 9, 11, 5, 9], [1, 7, 7, 3, 7, 7]])
    inputs = {**prompts(5, 9, side="right"), "decoder_input_ids": decoder}
    assert_equal(plain, paged, inputs, max_new_tokens=10, num_beams=3)
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    assert_equal(plain, paged, one, max_new_tokens=12, prompt_lookup_num_tokens=3)


def bytes_of(cache):
    """Bytes of the keys and values of a cache of the library."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_four_rows_of_a_source_hold_a_quarter(family, options):
    """Exactly: the source's keys and values once, and no more of them at any step."""
    plain, paged = make_pair(family)
    inputs = inputs_of(family, 12, 12)
    seen = []

    class Crosses(StoppingCriteria):
        """Notes the bytes of the cross-attention of every living cache."""

        def __call__(self, input_ids, scores, **kwargs):
            caches = [each for each in gc.get_objects() if type(each) is compat.EncoderDecoderCache]
            seen.append({bytes_of(each.cross_attention_cache) for each in caches})
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    run(plain, inputs, max_new_tokens=6, stopping_criteria=[Crosses()], **options)
    (theirs,) = set.union(*seen)
    watch = Watch(paged)
    run(paged, inputs, max_new_tokens=6, stopping_criteria=[watch], **options)
    ours = {stats.cross_attention_bytes for stats in watch.seen}
    print(f"{family}: cross-attention of 2 sources, 4 rows each: {ours} of DynamicCache's {theirs} bytes")
    assert ours == {theirs // 4} and theirs % 4 == 0 < theirs
    assert paged.paged_stats().cross_attention_bytes == 0


def test_read_as_the_librarys_it_is_the_librarys():
    plain, paged = make_pair("bart")
    inputs = prompts(5, 12, side="right")
    kept = {"return_dict_in_generate": True, "max_new_tokens": 5, "num_beams": 3}
    expected, got = cache_of(run(plain, inputs, **kept)), cache_of(run(paged, inputs, **kept))
    for theirs, ours in zip(expected.cross_attention_cache.layers, got.cross_attention_cache.layers, strict=True):
        assert type(ours.keys) is LazyCross
        assert torch.equal(ours.keys[4], ours.keys[3]) and torch.equal(ours.keys[-1], (ours.keys + 0)[-1])
        torch.testing.assert_close(theirs.keys, ours.keys.clone(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(theirs.values, ours.values.clone(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_beam_steps_copy_nothing_of_the_source(family):
    """The very tensors of the first step are there after the last."""
    _, paged = make_pair(family)
    held = []
    update, select = CrossLayer.update, CrossLayer.select

    moved = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CrossLayer, "update", lambda self, *a, **k: (held.append(self), update(self, *a, **k))[1])
        patch.setattr(CrossLayer, "select", lambda self, rows: (moved.append(len(rows)), select(self, rows))[1])
        run(paged, inputs_of(family, 7, 12), num_beams=3, max_new_tokens=6)
    assert len(held) == 2  # each layer once
    assert len(moved) > 6  # a repeat, and every beam step
    for layer in held:
        assert layer._held[0].shape[0] == 2 and layer.source_of == [0, 0, 0, 1, 1, 1]


def test_the_source_is_read_once():
    """The keys of the source are computed for 2 rows, not for 8."""
    _, paged = make_pair("bart")
    rows = []
    projection = paged.model.decoder.layers[0].encoder_attn.k_proj
    observe(paged, projection, lambda args, kwargs: rows.append(args[0].shape[0]))
    run(paged, prompts(5, 12, side="right"), num_beams=4, max_new_tokens=4)
    assert rows == [2]


def test_what_cannot_be_shared_is_counted_and_right():
    plain, paged = make_pair("bart")
    inputs = prompts(5, 12, side="right")
    options = {"num_beams": 2, "max_new_tokens": 5, "return_dict_in_generate": True, "output_hidden_states": True}
    expected, got = run(plain, inputs, **options), run(paged, inputs, **options)
    assert torch.equal(expected.sequences, got.sequences)
    for left, right in zip(expected.decoder_hidden_states, got.decoder_hidden_states, strict=True):
        torch.testing.assert_close(left[-1], right[-1], atol=1e-4, rtol=1e-4)
    assert set(paged.paged_stats().fallbacks) == {
        "a source is read once per beam or sample: hidden states are asked for"
    }
    assert [layer._held[0].shape[0] for layer in cache_of(got).cross_attention_cache.layers] == [2, 2]  # stored once
    _, unlike = make_pair("bart", prompt_once=False)
    assert_equal(plain, unlike, inputs, num_beams=3, max_new_tokens=6)


def test_a_cache_of_the_user_is_wrapped():
    plain, paged = make_pair("bart")
    cache = PagedCache(paged.config, pool=paged.paged_pool)
    inputs = prompts(5, 12, side="right")
    got = run(paged, {**inputs, **with_cache(cache)}, num_beams=3, max_new_tokens=6)
    assert torch.equal(run(plain, inputs, num_beams=3, max_new_tokens=6), got)


def test_unequal_groups_are_counted_and_right():
    """Rows picked by hand: 2 of the first source, 1 of the second."""
    plain, paged = make_pair("bart")
    inputs = prompts(6, 6, side="right")
    wanted = torch.tensor([0, 0, 1])
    kept = {"return_dict_in_generate": True, "max_new_tokens": 3}
    outputs = []
    for model in (plain, paged):
        cache = cache_of(run(model, inputs, **kept))
        cache.batch_select_indices(wanted)
        states = model.get_encoder()(**inputs).last_hidden_state[wanted]
        ids = torch.tensor([[5], [6], [7]])
        with torch.no_grad():
            outputs.append(
                model(
                    encoder_outputs=(states,), attention_mask=inputs["attention_mask"][wanted], decoder_input_ids=ids,
                    **with_cache(cache),
                ).logits
            )  # fmt: skip
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
    (reason,) = paged.paged_stats().fallbacks
    assert reason.startswith("cross-attention repeated for every row")


# -- decoder prompts under models that only know eager attention -------------------------------------------------------

_SMALL = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, pad_token_id=PAD,
    bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=EOS, forced_eos_token_id=None,
)  # fmt: skip
# Their decoders' self-attention does not say that it is causal: the mask alone does.
EAGER_ONLY = {
    "PegasusX": {},
    "BigBirdPegasus": {"attention_type": "original_full"},
    "NllbMoe": {"num_experts": 2, "encoder_sparse_step": 0, "decoder_sparse_step": 0},
}


def small(family, **fields):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**_SMALL, **EAGER_ONLY.get(family, {}), **fields})
    return randomise(getattr(transformers, f"{family}ForConditionalGeneration")(config).eval())


def moved_by_a_later_token(model, **options):
    """How much the first position's logits change with the last token of a decoder prompt."""
    source = prompts(8, side="right")
    with torch.no_grad():
        first, other = (
            model(**source, decoder_input_ids=torch.tensor([[EOS, 7, 9, last]]), **options).logits[:, 0]
            for last in (11, 50)
        )
    return (first - other).abs().max().item()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", [*EAGER_ONLY, "Bart"])
def test_no_position_sees_a_later_one(family, use_cache):
    plain = small(family)
    assert moved_by_a_later_token(plain, use_cache=use_cache) < 1e-5
    assert moved_by_a_later_token(hf_paged.patch(plain), use_cache=use_cache) < 1e-5


@pytest.mark.parametrize("family", [*EAGER_ONLY, "Bart"])
def test_no_position_sees_a_later_one_where_nothing_was_before(family):
    """Loaded with our attention, a model has no implementation from before."""
    config = small(family).config
    config._attn_implementation = "hf_paged"
    model = randomise(getattr(transformers, f"{family}ForConditionalGeneration")(config).eval())
    assert model.config._attn_implementation == "hf_paged"
    assert moved_by_a_later_token(model, use_cache=True) < 1e-5
    assert moved_by_a_later_token(model, use_cache=False) < 1e-5


@pytest.mark.parametrize("family", EAGER_ONLY)
def test_decoder_prompts_of_models_that_were_eager(family):
    plain = small(family)
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    decoder = torch.tensor([[EOS, 5, 9, 11, 5, 9], [EOS, 7, 7, 3, 7, 7]])
    inputs = {**prompts(5, 9, side="right"), "decoder_input_ids": decoder}
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}):
        assert_equal(plain, paged, inputs, max_new_tokens=8, **options)
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    assert_equal(plain, paged, one, max_new_tokens=12, prompt_lookup_num_tokens=3)
    paged.paged_pool.fallbacks.clear()
    run(paged, inputs, max_new_tokens=8)
    assert not any("dense" in reason for reason in paged.paged_stats().fallbacks)  # over blocks


def decoder_masks(columns):
    """Masks of a decoder prompt of `columns` ids: shorter ones, and a whole one."""
    for length in (1, columns - 2, columns):
        mask = torch.ones(2, length, dtype=torch.long)
        yield mask
        mask = mask.clone()
        mask[0, 0] = 0
        yield mask


@pytest.mark.parametrize("attn", [None, "eager"])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_decoder_masks_shorter_than_the_ids(family, attn):
    """They hide the ids behind their end, until the ones that are appended in each step reach there."""
    plain = make(family, attn=attn)
    decoder = torch.tensor([[1, 5, 9, 11, 5, 9], [1, 7, 7, 3, 7, 7]])
    everything = {"return_dict_in_generate": True, "output_logits": True}
    for mask in decoder_masks(6):
        paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
        inputs = {**prompts(6, 9, side="right"), "decoder_input_ids": decoder, "decoder_attention_mask": mask}
        for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
            assert_equal(plain, paged, inputs, max_new_tokens=6, **options)
        dense = any("hides tokens" in reason for reason in paged.paged_stats().fallbacks)
        # Up to 5.23 T5 does its own attention, which stores every column.
        assert dense == (mask.shape[1] < 6 and not (family == "t5" and compat.CACHE_ARGUMENT != "cache"))
        outputs = []
        for model in (plain, paged):
            whole = {name: entry for name, entry in inputs.items() if name != "decoder_attention_mask"}
            first = run(model, whole, max_new_tokens=3, **everything)
            longer = torch.cat([first.sequences, first.sequences[:, -3:]], dim=1)
            again = {**inputs, "decoder_input_ids": longer, **with_cache(cache_of(first))}
            outputs.append(run(model, again, max_new_tokens=4, **everything))
        assert_close(*outputs)
        del first, again, outputs


# -- decoders behind an encoder of another family, with configs that count something else ------------------------------


def image_to_text(decoder):
    encoder = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8
    )
    torch.manual_seed(0)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = randomise(transformers.VisionEncoderDecoderModel(config=config).eval())
    settings = {"decoder_start_token_id": BOS, "bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}
    for name, number in settings.items():
        setattr(model.generation_config, name, number)
        setattr(model.config, name, number)
    return model


def mbart_decoder(layers, encoder_layers):
    """The library's own conversion of Donut leaves `encoder_layers` at its default, and counts by it."""
    return transformers.MBartConfig(
        **{**_SMALL, "decoder_layers": layers, "encoder_layers": encoder_layers}, is_decoder=True,
        add_cross_attention=True,
    )  # fmt: skip


def gpt2_decoder():
    return transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True, is_decoder=True,
    )  # fmt: skip


DECODERS = {
    "2 layers of 5": lambda: mbart_decoder(2, 5),
    "1 layer of 5": lambda: mbart_decoder(1, 5),
    "2 layers": lambda: mbart_decoder(2, 2),
    "gpt2": gpt2_decoder,  # views what it is given of the encoder
}


@pytest.mark.parametrize("decoder", DECODERS)
def test_image_to_text(decoder):
    plain = image_to_text(DECODERS[decoder]())
    paged = hf_paged.patch(copy.deepcopy(plain), block_size=4)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    task = {"decoder_input_ids": torch.tensor([[BOS, 9, 11]] * 2)}
    for options in MODES.values():
        assert_equal(plain, paged, {"pixel_values": pixels}, max_new_tokens=8, **options)
        assert_equal(plain, paged, {"pixel_values": pixels, **task}, max_new_tokens=8, **options)
    assert paged.paged_stats().fallbacks == {}  # sources once, over blocks


def test_layers_that_update_twice_in_a_forward_are_named():
    """Self- and cross-attention in one cache, that nobody has wrapped."""
    model = small("Bart", decoder_layers=3)
    with pytest.raises(RuntimeError, match="EncoderDecoderCache"), torch.no_grad():
        decoder = {"decoder_input_ids": torch.tensor([[EOS]]), "use_cache": True}
        model(**prompts(8), **decoder, **with_cache(PagedCache(model.config)))


# -- the layer by itself -----------------------------------------------------------------------------------------------


def filled(rows=3):
    cache = CrossCache(1)
    key, value = torch.randn(2, rows, 4, 5, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    cache.update(key, value, 0)
    return cache, key, value


def test_a_cross_cache_behaves_as_the_librarys():
    cache, key, value = filled()
    library = compat.DynamicCache()
    library.update(key, value, 0)
    steps = [
        lambda each: each.batch_repeat_interleave(2),
        lambda each: each.reorder_cache(torch.tensor([1, 0, 2, 2, 5, 4])),
        lambda each: each.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0])),
        lambda each: each.batch_select_indices(torch.tensor([0, 3])),
        lambda each: each.update(key[:2], value[:2], 0),
        lambda each: each.crop(-2),
    ]
    for step in steps:
        step(cache), step(library)
        for ours, theirs in zip(
            (cache.layers[0].keys, cache.layers[0].values),
            (library.layers[0].keys, library.layers[0].values),
            strict=True,
        ):
            assert torch.equal(ours + 0, theirs)
        assert cache.get_seq_length() == library.get_seq_length()
        assert cache.get_mask_sizes(1, 0) == library.get_mask_sizes(1, 0)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.layers[0].keys is None


def test_sources_nobody_reads_are_dropped_and_copies_share():
    cache, key, _ = filled()
    cache.batch_repeat_interleave(2)
    other = copy.deepcopy(cache)
    assert other.layers[0]._held[0] is cache.layers[0]._held[0]
    cache.batch_select_indices(torch.tensor([4, 5, 0]))
    assert cache.nbytes * 3 == other.nbytes * 2
    assert torch.equal(cache.layers[0].keys + 0, key[[2, 2, 0]])
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert torch.equal(cache.layers[0].keys + 0, key[[2, 0]])
    assert torch.equal(other.layers[0].keys + 0, key.repeat_interleave(2, 0))
