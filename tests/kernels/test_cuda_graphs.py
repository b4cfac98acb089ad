"""Decode steps as CUDA graphs, on `recording.Recording`, which replays launches as a GPU would."""

import copy
import gc
import inspect
import itertools
import threading
import weakref

import pytest
import torch
import transformers
from models import (
    VOCAB,
    Watch,
    assert_equal,
    build,
    cache_of,
    config_of,
    likely_eos,
    prompts,
    randomise,
    run,
    vouch_for,
    with_cache,
)
from triton.runtime.interpreter import GridExecutor

import hf_paged
from hf_paged import cuda_graphs, prefill
from hf_paged.backends import triton as backend
from hf_paged.triton_kernels.write import write_tokens

from .recording import NotAllowedWhileCapturing, Recording, RecordingDevice

pytestmark = pytest.mark.filterwarnings("ignore:hf_paged")


@pytest.fixture(autouse=True)
def _recorded(monkeypatch):
    """Graphs are recorded, and a few tokens are worth a wider table."""
    monkeypatch.setattr(GridExecutor, "__call__", one_at_a_time(GridExecutor.__call__))
    monkeypatch.setattr(cuda_graphs, "Device", RecordingDevice)
    monkeypatch.setattr(cuda_graphs, "LEAST_TOKENS", 8)


def one_at_a_time(launch):
    """The interpreter runs one kernel at a time."""
    lock = threading.RLock()

    def locked(*args, **kwargs):
        with lock:
            return launch(*args, **kwargs)

    return locked


def patched(plain, **options):
    options = {"block_size": 4, "prefix_caching": False, **options}
    return hf_paged.patch(copy.deepcopy(plain), backend="triton", cuda_graphs=True, **options)


# The interpreter is slow: one layer and one stored head where more would show nothing more.
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TINY = {"llama": {"num_hidden_layers": 1, **_HEADS}, "gemma3": _HEADS}


def pair(family, **options):
    plain = build(family, **TINY.get(family, {}))
    return plain, patched(plain, **options)


def counts(model):
    stats = model.paged_stats()
    return stats.graph_captures, stats.graph_steps


def reasons(model):
    start = "a decode step is not replayed as a CUDA graph: "
    return {reason.removeprefix(start): count for reason, count in model.paged_stats().fallbacks.items()}


MODES = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 4},
}


# -- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ids_are_those_without_graphs(family, mode):
    """Left pads, a batch of 3 in a bucket of 4, tables that beams permute, blocks copied on write, tables that outgrow
    a bucket, windows that drop blocks; with everything returned, and with ids alone."""
    plain = build(family, **(_HEADS if family == "gemma3" else {}))
    paged = patched(plain)
    inputs = prompts(*{"greedy": (3, 12, 5), "samples": (3, 12), "beams": (7,)}[mode])
    assert_equal(plain, paged, inputs, max_new_tokens=7, **MODES[mode])
    captures, steps = counts(paged)
    assert steps == 12 and captures <= 3
    assert reasons(paged) == {}
    if mode == "beams":
        assert paged.paged_stats().cow_copies


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gpt2"])
def test_softcap_sinks_and_windows(family):
    plain, paged = pair(family)
    assert_equal(plain, paged, prompts(3, 11), max_new_tokens=5)
    assert counts(paged)[1] == 8 and reasons(paged) == {}


def test_latent_attention():
    plain, paged = pair("deepseek_v3", packed_prefill=False)
    assert_equal(plain, paged, prompts(3, 11), max_new_tokens=5, num_beams=2)
    assert counts(paged)[1] == 8 and not any("CUDA" in reason for reason in paged.paged_stats().fallbacks)


def test_a_graph_is_captured_once_for_each_bucket(monkeypatch):
    """8 tokens hold 2 blocks of 4: tables of 2, 4 and 8 blocks while one row grows from 5 to 17 tokens."""
    plain, paged = pair("llama", num_blocks=64)
    inputs = prompts(5)
    assert torch.equal(run(plain, inputs, max_new_tokens=13), run(paged, inputs, max_new_tokens=13))
    assert counts(paged) == (3, 12)
    assert torch.equal(run(plain, inputs, max_new_tokens=13), run(paged, inputs, max_new_tokens=13))
    assert counts(paged) == (3, 24), "captured before"
    for rows, captures in ((2, 1), (3, 1), (4, 0), (5, 1), (8, 0)):
        before = counts(paged)[0]
        inputs = prompts(*[3] * rows)
        assert torch.equal(run(plain, inputs, max_new_tokens=3), run(paged, inputs, max_new_tokens=3))
        assert counts(paged)[0] - before == captures, f"{rows} rows"


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"num_beams": 3}), ("gemma3", {"do_sample": True, "num_return_sequences": 2})],
    ids=str,
)
def test_a_prompt_that_rows_share_is_read_once(family, options, monkeypatch):
    """Its spans are numbers that are refilled; how deep they nest and how many there may be is the graph's."""
    monkeypatch.setattr(backend, "LONG_PREFIX", 4)
    shared = []
    attention = backend.shared_attention
    monkeypatch.setattr(
        backend, "shared_attention", lambda *given, **more: shared.append(given[5]) or attention(*given, **more)
    )
    plain, paged = pair(family, block_size=2, num_blocks=128)
    inputs = prompts(11, 6)
    assert_equal(plain, paged, inputs, max_new_tokens=5, **options)
    captures, steps = counts(paged)
    assert steps == 8 and captures <= 5 and reasons(paged) == {}
    assert len(shared) >= captures and {spans.layers for spans in shared} <= {1, 2, 4}


def test_rows_that_finish_early_give_their_blocks_back():
    plain = likely_eos(build("llama"), 3.0)
    paged = patched(plain)
    inputs = prompts(3, 6, 4, 5)
    watch = Watch(paged)
    expected = run(plain, inputs, max_new_tokens=12)
    got = run(paged, inputs, max_new_tokens=12, stopping_criteria=[watch])
    assert torch.equal(expected, got) and (expected == 2).any(1).sum() > 1
    used = [stats.logical_tokens for stats in watch.seen]
    assert any(later < before for before, later in itertools.pairwise(used)), "no row was freed"
    assert reasons(paged) == {}


def test_memory_that_has_moved_is_captured_again(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "LEAST_ROOM", 1)
    plain, paged = pair("llama", block_size=1)
    inputs = prompts(4)
    assert torch.equal(run(plain, inputs, max_new_tokens=12), run(paged, inputs, max_new_tokens=12))
    captures, steps = counts(paged)
    assert steps == 11 and 3 <= captures < 9, "a store that grows ahead moves seldom"
    assert reasons(paged) == {}
    store = paged.paged_pool.stores[0]
    store.ensure(200)  # as another cache of the pool would do it
    assert torch.equal(run(plain, inputs, max_new_tokens=3), run(paged, inputs, max_new_tokens=3))
    assert counts(paged)[0] > captures


def test_old_memory_is_not_kept_for_graphs():
    class Light(RecordingDevice):
        """Keeps no tensors, as a graph of CUDA keeps none."""

        def capture(self, function):
            return function(), function

    _, paged = pair("llama")
    paged._hf_paged.graphs.device = Light()
    run(paged, prompts(4), max_new_tokens=3)
    del paged._hf_paged.graphs._graphs[next(iter(paged._hf_paged.graphs._graphs))]
    run(paged, prompts(4), max_new_tokens=3)
    graphs = paged._hf_paged.graphs
    graphs._graphs = {key: (*entry[:3], None) for key, entry in graphs._graphs.items()}
    store = paged.paged_pool.stores[0]
    old = weakref.ref(store.memory)
    store.ensure(store.memory.num_blocks + 1)
    gc.collect()
    assert old() is None


def test_a_step_grows_the_stores_ahead_but_not_beyond_the_call_or_the_pool():
    _, paged = pair("llama", block_size=1)
    run(paged, prompts(4, 4), max_new_tokens=5)
    memory = paged.paged_pool.stores[0].memory
    assert memory.num_blocks <= paged.paged_stats().num_blocks + 2 * (4 + 1)
    _, paged = pair("llama", block_size=4, num_blocks=5)
    run(paged, prompts(4), max_new_tokens=5)
    assert paged.paged_pool.stores[0].memory.num_blocks == 5


def test_rows_of_a_bucket_that_are_not_there_write_nowhere():
    _, paged = pair("llama")
    with torch.no_grad():
        cache = hf_paged.PagedCache(paged.config, pool=paged.paged_pool)
        inputs = prompts(5, 5, 5)
        output = run(paged, inputs, max_new_tokens=4, return_dict_in_generate=True, **with_cache(cache))
    assert counts(paged)[1] == 3
    cache = cache_of(output)
    for layer, store in paged.paged_pool.stores.items():
        held = {slot for plan in [cache.state.tables[0]] for row in plan.rows for slot in slots_of(row, 4)}
        slots = store.memory.key_slots
        others = [slot for slot in range(4, slots.shape[1]) if slot not in held]
        assert not slots[:, sorted(held)].isnan().any() and slots[:, others].isnan().all(), f"layer {layer}"
        assert not slots[:, :4].any(), "the null block"


def slots_of(row, size):
    return [row.blocks[place // size] * size + place % size for place in range(row.length)]


def test_a_prefix_that_is_found():
    """The last token of each row is left to compute: a step like any other."""
    plain, paged = pair("gemma3", prefix_caching=True, num_blocks=64)
    inputs = prompts(9, 9)
    for _ in range(2):
        assert torch.equal(run(plain, inputs, max_new_tokens=5), run(paged, inputs, max_new_tokens=5))
    assert paged.paged_stats().prefix_hit_tokens == 16 and counts(paged)[1] == 4 + 1 + 4


def test_a_filled_cache_goes_on_and_a_mask_may_hide_what_it_holds():
    plain, paged = pair("llama")
    for model in (plain, paged):
        make = transformers.DynamicCache if model is plain else hf_paged.PagedCache
        options = {"pool": paged.paged_pool} if model is paged else {}
        cache = make(config=model.config, **options)
        outs = []
        first = run(model, prompts(3, 6), max_new_tokens=3, **with_cache(cache))
        ids = torch.cat([first, torch.tensor([[7, 8], [9, 10]])], 1)
        mask = torch.cat([prompts(3, 6)["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)
        inputs = {"input_ids": ids, "attention_mask": mask}
        outs.append(run(model, inputs, max_new_tokens=3, **with_cache(cache)))
        mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], 1)
        mask[0, 4] = 0  # a token, until now
        inputs = {"input_ids": torch.cat([outs[0], outs[0][:, -1:]], 1), "attention_mask": mask}
        outs.append(run(model, inputs, max_new_tokens=3, **with_cache(cache)))
        if model is plain:
            right = outs
    assert all(torch.equal(*both) for both in zip(right, outs, strict=True))
    assert counts(paged)[1] == 4
    assert reasons(paged).get("the attention mask hides tokens") == 2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_assisted_decoding(family):
    """An assistant's steps are single tokens that are taken back; the model checks several at once."""
    plain, paged = pair(family)
    helper = patched(build(family, seed=7, **TINY[family]))
    helper.generation_config.num_assistant_tokens = 4
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    helper.generation_config.assistant_confidence_threshold = 0.0
    inputs = {"input_ids": prompts(9)["input_ids"]}
    expected = run(plain, inputs, max_new_tokens=9)
    assert torch.equal(expected, run(paged, inputs, max_new_tokens=9, assistant_model=helper))
    assert counts(helper)[1]


def test_under_inference_mode():
    plain, paged = pair("llama")
    inputs = prompts(3, 5)
    expected = run(plain, inputs, max_new_tokens=5)
    with torch.inference_mode():
        first = run(paged, inputs, max_new_tokens=5)
    assert torch.equal(expected, first)
    assert torch.equal(expected, run(paged, inputs, max_new_tokens=5))
    assert reasons(paged) == {}


def test_threads_take_turns():
    plain, paged = pair("llama")
    jobs = [prompts(3, 5), prompts(9), prompts(4, 2, 6)]
    expected = [run(plain, inputs, max_new_tokens=6) for inputs in jobs]
    got = [None] * len(jobs)

    def work(place):
        got[place] = paged.generate(**jobs[place], max_new_tokens=6)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*both) for both in zip(expected, got, strict=True))
    assert counts(paged)[1] == 15
    paged.paged_pool.check()


def test_a_pool_that_is_too_small_raises_as_without_graphs():
    _, paged = pair("llama", num_blocks=3)
    with pytest.raises(hf_paged.OutOfBlocks):
        run(paged, prompts(5), max_new_tokens=20)
    paged.paged_pool.check()
    gc.collect()
    assert paged.paged_stats().used_blocks == 0
    assert run(paged, prompts(5), max_new_tokens=4).shape[1] == 9


# Models that make or read a tensor on the host in each forward, and those that are given no positions.
NOT_CAPTURED = ("biogpt", "bloom", "falcon", "mpt")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(prefill.PACKED_TYPES))
def test_every_type_that_is_captured(model_type):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {model_type}")
    config = config_of(model_type)
    if hasattr(config, "sliding_window"):
        config = config_of(model_type, sliding_window=4)
    torch.manual_seed(0)
    plain = randomise(transformers.AutoModelForCausalLM.from_config(config).eval())
    paged = patched(plain)
    inputs = prompts(3, 5)
    assert torch.equal(run(plain, inputs, max_new_tokens=4), run(paged, inputs, max_new_tokens=4))
    assert counts(paged)[1] == (0 if model_type in NOT_CAPTURED else 3)
    assert len(reasons(paged)) == (model_type in NOT_CAPTURED)


# -- what is not captured ---------------------------------------------------------------------------------------------


def falls_back(plain, paged, reason, inputs=None, **options):
    """The same ids, no step replayed, and every step counted under a reason."""
    inputs = prompts(3, 5) if inputs is None else inputs
    before = counts(paged)[1]
    expected = run(plain, inputs, max_new_tokens=4, **options)
    got = run(paged, inputs, max_new_tokens=4, **options)
    for output in (expected, got):
        assert torch.is_tensor(output) or output.sequences is not None
    assert torch.equal(getattr(expected, "sequences", expected), getattr(got, "sequences", got))
    assert counts(paged)[1] == before
    found = [(entry, count) for entry, count in reasons(paged).items() if reason in entry]
    assert found and found[0][1] == 3, reasons(paged)


def test_hidden_states():
    plain, paged = pair("llama")
    options = {"return_dict_in_generate": True, "output_hidden_states": True}
    falls_back(plain, paged, "output_hidden_states is asked for", **options)
    run(paged, prompts(3, 5), max_new_tokens=4)
    assert counts(paged)[1] == 3, "the library's idle hooks do not matter"


def test_encoder_decoders():
    plain, paged = pair("bart")
    falls_back(plain, paged, "encoder-decoder")


def test_keywords_that_are_not_known():
    plain, paged = pair("gpt2")
    with pytest.warns(UserWarning, match="not replayed as a CUDA graph: the model is given token_type_ids"):
        paged.generate(**prompts(3, 5), token_type_ids=torch.ones(2, 5).long(), max_new_tokens=4)
    inputs = {**prompts(3, 5), "token_type_ids": torch.ones(2, 5, dtype=torch.long)}
    falls_back(plain, patched(plain), "the model is given token_type_ids", inputs)


def test_layers_with_a_state():
    arguments = dict(
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], vocab_size=VOCAB, hidden_size=64,
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = randomise(transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**arguments)).eval())
    falls_back(plain, patched(plain), "a state of their own")


def test_rotary_embeddings_that_depend_on_the_length():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    plain = build("llama", rope_parameters=rope)
    falls_back(plain, patched(plain), "the rotary embedding depends on the length")


def test_models_that_count_positions_for_themselves():
    plain, paged = pair("falcon_alibi")
    falls_back(plain, paged, "falcon is not known to take its positions from position_ids alone")


def test_hooks():
    plain, paged = pair("llama")
    handle = paged.model.layers[0].register_forward_hook(lambda *given: None)
    falls_back(plain, paged, "the model has a hook that hf_paged does not know")
    handle.remove()
    run(paged, prompts(3, 5), max_new_tokens=4)
    assert counts(paged)[1] == 3
    paged.model.layers[0].mlp.forward = type(paged.model.layers[0].mlp).forward.__get__(paged.model.layers[0].mlp)
    falls_back(plain, paged, "the forward of LlamaMLP is wrapped")


def test_offloaded_weights_and_hooks_that_come_later():
    accelerate = pytest.importorskip("accelerate")
    plain, paged = pair("llama")
    accelerate.cpu_offload(paged, execution_device=torch.device("cpu"))
    falls_back(plain, paged, "weights are offloaded")
    hf_paged.unpatch(paged)
    assert "forward" in paged.__dict__, "accelerate's own"
    inputs = prompts(3, 5)
    assert torch.equal(run(plain, inputs, max_new_tokens=4), run(paged, inputs, max_new_tokens=4))
    accelerate.hooks.remove_hook_from_module(paged, recurse=True)
    assert torch.equal(run(plain, inputs, max_new_tokens=4), run(paged, inputs, max_new_tokens=4))


def test_several_devices(monkeypatch):
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 1)

    plain, paged = pair("llama")
    paged.register_buffer("elsewhere", torch.ones(1).as_subclass(Elsewhere), persistent=False)
    falls_back(plain, paged, "the model lies on several devices")
    del paged.elsewhere
    run(paged, prompts(3, 5), max_new_tokens=4)
    assert counts(paged)[1] == 3


def test_compiled_modules():
    plain, paged = pair("llama")
    paged.model.norm.compile(backend="eager")
    falls_back(plain, paged, "model.norm is compiled, or a LlamaRMSNorm")


def test_training_mode_and_autocast():
    plain, paged = pair("llama")
    falls_back(plain.train(), paged.train(), "the model is in training mode")
    plain.eval(), paged.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(paged, prompts(3, 5), max_new_tokens=4)
    assert reasons(paged)["autocast is on"] == 3


def test_a_cache_with_a_pool_of_its_own():
    plain, paged = pair("llama")
    cache = hf_paged.PagedCache(paged.config, hf_paged.PagedConfig(backend="torch"))
    inputs = prompts(3, 5)
    expected = run(plain, inputs, max_new_tokens=4)
    assert torch.equal(expected, run(paged, inputs, max_new_tokens=4, **with_cache(cache)))
    assert reasons(paged) == {"the cache has a pool of its own": 3}


def test_pads_behind_tokens():
    """Under windows they cannot; elsewhere they can."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    inputs = {"input_ids": torch.randint(3, VOCAB, (2, 6)), "attention_mask": mask}
    plain, paged = pair("mistral")
    falls_back(plain, paged, "pads behind tokens in a sliding window", inputs)
    plain, paged = pair("llama")
    assert torch.equal(run(plain, inputs, max_new_tokens=4), run(paged, inputs, max_new_tokens=4))
    assert counts(paged)[1] == 3


def test_heads_without_a_kernel():
    plain = build("llama", head_dim=272)
    falls_back(plain, patched(plain), "capturing it failed (NotImplementedError: no kernel for torch.float32 and head")


def test_a_capture_that_fails_is_not_tried_again(monkeypatch):
    tried = []

    def capture(self, function):
        tried.append(function())  # half done: this step's tokens are written
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(RecordingDevice, "capture", capture)
    plain, paged = pair("llama")
    falls_back(plain, paged, "(RuntimeError: operation not permitted when stream is capturing)", num_beams=2)
    run(paged, prompts(4), max_new_tokens=4)
    assert len(tried) == 1
    paged.paged_pool.check()
    monkeypatch.undo()
    for parameter in paged.parameters():
        parameter.data = parameter.data.clone()
    run(paged, prompts(4), max_new_tokens=4)
    assert len(tried) == 1 and reasons(paged).popitem()[1] == 6 + 0


def test_a_model_that_reads_on_the_host(monkeypatch):
    plain, paged = pair("llama")
    own = type(paged.model).forward

    def reads(self, *args, **kwargs):
        assert kwargs["position_ids"].max().item() >= 0
        return own(self, *args, **kwargs)

    vouch_for(paged, reads)
    monkeypatch.setattr(type(paged.model), "forward", reads)
    falls_back(plain, paged, "NotAllowedWhileCapturing: _local_scalar_dense")


def test_without_a_gpu(monkeypatch):
    monkeypatch.undo()
    plain, paged = pair("llama")
    falls_back(plain, paged, "they need a CUDA device, and the model is on cpu")


# -- weights and adapters ---------------------------------------------------------------------------------------------


def test_weights_that_change_in_place_are_read_and_weights_that_move_are_captured_again():
    plain, paged = pair("llama")
    inputs = prompts(3, 5)
    run(paged, inputs, max_new_tokens=4)
    captures, _ = counts(paged)
    for model in (plain, paged):
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(-1.5)
    assert torch.equal(run(plain, inputs, max_new_tokens=4), run(paged, inputs, max_new_tokens=4))
    assert counts(paged)[0] == captures
    for model in (plain, paged):
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data = weight.data * 2
    assert torch.equal(run(plain, inputs, max_new_tokens=4), run(paged, inputs, max_new_tokens=4))
    assert counts(paged)[0] > captures


def test_adapters_that_are_switched():
    peft = pytest.importorskip("peft", exc_type=ImportError)

    def wrap(model):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config, adapter_name="one")
        torch.manual_seed(2)
        model.add_adapter("two", config)
        return model

    plain, paged = wrap(build("llama")), wrap(build("llama"))
    hf_paged.patch(paged, backend="triton", cuda_graphs=True, block_size=4)
    inputs = prompts(3, 5)
    seen = []
    for name in ("one", "two", "one"):
        plain.set_adapter(name), paged.set_adapter(name)
        seen.append(run(plain, inputs, max_new_tokens=4))
        assert torch.equal(seen[-1], run(paged, inputs, max_new_tokens=4))
    assert not torch.equal(seen[0], seen[1])
    assert counts(paged.get_base_model()) == (3, 9)


# -- patch and unpatch ------------------------------------------------------------------------------------------------


def test_unpatch_puts_the_forward_back_and_a_copy_has_graphs_of_its_own():
    plain, paged = pair("llama")
    assert inspect.signature(paged.forward) == inspect.signature(plain.forward)
    other = copy.deepcopy(paged)
    inputs = prompts(3, 5)
    expected = run(plain, inputs, max_new_tokens=4)
    assert torch.equal(expected, run(paged, inputs, max_new_tokens=4))
    assert counts(other) == (0, 0)
    assert torch.equal(expected, run(other, inputs, max_new_tokens=4))
    assert counts(other) == (1, 3) == counts(paged)
    hf_paged.unpatch(paged)
    assert "forward" not in paged.__dict__
    assert torch.equal(expected, run(paged, inputs, max_new_tokens=4))
    with hf_paged.patched(other, backend="torch"):
        assert "forward" not in other.__dict__
    assert torch.equal(expected, run(other, inputs, max_new_tokens=4))
    assert counts(other) == (1, 6), "those captured before"


def test_a_forward_without_generate_is_the_models_own():
    _, paged = pair("llama")
    inputs = prompts(4, 4)
    with torch.no_grad():
        cache = hf_paged.PagedCache(paged.config, pool=paged.paged_pool)
        for ids in (inputs["input_ids"], inputs["input_ids"][:, :1]):
            paged(ids, **with_cache(cache))
            paged(input_ids=ids, position_ids=torch.zeros_like(ids), **with_cache(cache))
    assert counts(paged) == (0, 0) and reasons(paged) == {}


def test_a_cache_that_outlives_its_call_is_not_replayed():
    _, paged = pair("llama")
    output = run(paged, prompts(4, 4), max_new_tokens=3, return_dict_in_generate=True)
    _, steps = counts(paged)
    with torch.no_grad():
        ids = torch.tensor([[5], [6]])
        paged(input_ids=ids, position_ids=torch.full((2, 1), 6), **with_cache(cache_of(output)))
    assert counts(paged)[1] == steps == 2


# -- the recording itself ---------------------------------------------------------------------------------------------


def test_a_recording_replays_launches_and_no_python():
    static = torch.tensor([1.0, 2.0])
    times = 2

    def function():
        calls.append(1)
        made = torch.empty(2)
        made[:1] = static[:1] * times
        made[1:].copy_(static[1:] + 1)
        return made.view(1, 2) + torch.zeros(1, 2)

    calls = []
    with Recording() as recording:
        result = function()
    for first, second in ((1.0, 2.0), (5.0, 7.0)):
        static.copy_(torch.tensor([first, second]))
        times = 100
        result.zero_()
        recording.replay()
        assert result.tolist() == [[first * 2, second + 1]]
    assert len(calls) == 1


def test_a_recording_replays_triton_launches():
    store = torch.full((1, 3, 2, 16), float("nan"))
    key, slots = torch.ones(2, 1, 16), torch.tensor([2, -1])
    with Recording() as recording:
        write_tokens(key * 2, key, store, store, slots)
    slots.copy_(torch.tensor([5, 3]))
    key.copy_(torch.full_like(key, 7.0))
    store.fill_(float("nan"))
    recording.replay()
    assert store.view(6, 16)[:, 0].nan_to_num(0.0).tolist() == [0, 0, 0, 7, 0, 7]


@pytest.mark.parametrize("forbidden", [
    lambda tensor: tensor.sum().item(), lambda tensor: bool(tensor.any()), lambda tensor: tensor.nonzero(),
    lambda tensor: tensor[tensor > 0], lambda tensor: torch.tensor([1, 2]), lambda tensor: tensor.tolist(),
])  # fmt: skip
def test_what_a_gpu_refuses_while_capturing_is_refused(forbidden):
    tensor = torch.ones(2)
    with pytest.raises(NotAllowedWhileCapturing), Recording():
        forbidden(tensor)


def test_a_number_of_one_step_that_is_baked_in_gives_other_tokens(monkeypatch):
    """The double is worth something: lengths taken from Python at capture are wrong in the next step."""
    update = backend.StaticRows.update

    def baked(self, plan):
        self.baked = [past + 1 for past in plan.past]
        return update(self, plan)

    def locate(self):
        last = self.baked[0] - 1
        slot = self.table.held[0][last // 4] * 4 + last % 4
        self._slots = torch.zeros(self.size.rows, dtype=torch.int64).fill_(slot)

    monkeypatch.setattr(backend.StaticRows, "update", baked)
    monkeypatch.setattr(backend.StaticRows, "locate", locate)
    plain, paged = pair("llama")
    expected = run(plain, prompts(5), max_new_tokens=4, output_logits=True, return_dict_in_generate=True)
    got = run(paged, prompts(5), max_new_tokens=4, output_logits=True, return_dict_in_generate=True)
    assert counts(paged)[1] == 3
    assert not torch.allclose(expected.logits[3], got.logits[3], atol=1e-3)
