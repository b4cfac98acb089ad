"""What people do to a model, each by its name: done to one model or to all at once, and undone.

A disturbance is a context manager over a model. `code` is the reason that stepping aside is counted under; None: the
shortcuts go on, because all that has changed is part of what prefixes are found by.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, NamedTuple
from unittest import mock

import peft
import pytest
import torch
import transformers
from models import build, prompts, randomise
from torch.nn.modules import module as every_module
from transformers.models.llama import modeling_llama
from transformers.utils.generic import can_return_tuple

import hf_paged
from hf_paged import compat


class Disturbance(NamedTuple):
    """
    Attributes:
        apply: a context manager over a model.
        code: of the reason for stepping aside; None: nothing steps aside.
        base: which of `BASES` it is done to.
        shared: it is done once to what all models share: a class, a function, a setting.
        shows: the unpatched model's tokens differ by it.
    """

    apply: Callable[[Any], Any]
    code: str | None
    base: str
    shared: bool
    shows: bool


TABLE: dict[str, Disturbance] = {}


def disturbance(
    code: str | None = None, base: str = "llama", shared: bool = False, shows: bool = True
) -> Callable[[Any], Any]:
    """Put a generator function over a model into the table."""

    def register(function: Any) -> Any:
        TABLE[function.__name__] = Disturbance(contextmanager(function), code, base, shared, shows)
        return function

    return register


@contextmanager
def disturbed(name: str, *models: Any) -> Iterator[None]:
    """Within the block all these models are disturbed."""
    case = TABLE[name]
    with ExitStack() as stack:
        for model in models[:1] if case.shared else models:
            stack.enter_context(case.apply(model))
        yield


# -- models -----------------------------------------------------------------------------------------------------------


def _lora(seed: int) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(seed)
    return config


def _adapted() -> Any:
    model = peft.get_peft_model(build("llama"), _lora(1), "one")
    torch.manual_seed(2)
    model.add_adapter("two", _lora(2))
    model.set_adapter("one")  # by which its name is kept as it is from now on
    return model.eval()


BASES: dict[str, Callable[[], Any]] = {
    "llama": lambda: build("llama"),
    "gpt2": lambda: build("gpt2"),
    "lora": _adapted,
}


def decoder(model: Any) -> Any:
    """The decoder of a Llama model, inside of PEFT or not."""
    return compat.generating_model(model).model


def middle(model: Any) -> Any:
    """The first layer: what is done to it reaches the keys of the second."""
    return decoder(model).layers[0]


VECTOR = torch.randn(64, generator=torch.Generator().manual_seed(9)) * 1.5


def _hidden(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A layer's output with other hidden states."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _at_the_last_token(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden.clone()
    hidden[:, -1] += VECTOR
    return hidden


def _by_row(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + torch.arange(1.0, len(hidden) + 1)[:, None, None] * VECTOR


# -- hooks ------------------------------------------------------------------------------------------------------------


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def steer(module, args, output):
    return _hidden(output, lambda hidden: hidden + VECTOR)


@disturbance("unknown_hook")
def a_hook_adds_a_vector(model):
    with _removed(middle(model).register_forward_hook(steer)):
        yield


@disturbance("unknown_hook")
def a_hook_adds_a_vector_at_the_last_token(model):
    with _removed(middle(model).register_forward_hook(lambda m, a, out: _hidden(out, _at_the_last_token))):
        yield


@disturbance("unknown_hook")
def a_hook_has_a_strength_per_row(model):
    with _removed(middle(model).register_forward_hook(lambda m, a, out: _hidden(out, _by_row))):
        yield


@disturbance("unknown_hook", shows=False)
def a_hook_only_looks(model):
    with _removed(middle(model).register_forward_hook(lambda m, a, out: None)):
        yield


@disturbance("unknown_hook")
def a_pre_hook_changes_what_goes_in(model):
    with _removed(middle(model).register_forward_pre_hook(lambda m, args: (args[0] + VECTOR, *args[1:]))):
        yield


def _hide_old_tokens(module, args, kwargs):
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        mask = mask.clone()
        mask[:, :-4] = 0
        kwargs["attention_mask"] = mask
    return args, kwargs


@disturbance("unknown_hook")
def a_pre_hook_hides_old_tokens(model):
    with _removed(model.register_forward_pre_hook(_hide_old_tokens, with_kwargs=True)):
        yield


@disturbance("unknown_hook", shared=True)
def a_global_hook(model):
    def change(module, args, output):
        return output + VECTOR if isinstance(module, modeling_llama.LlamaMLP) else None

    with _removed(every_module.register_module_forward_hook(change)):
        yield


@disturbance("unknown_hook", shared=True)
def a_global_pre_hook(model):
    def change(module, args):
        return (args[0] + VECTOR,) if isinstance(module, modeling_llama.LlamaMLP) else None

    with _removed(every_module.register_module_forward_pre_hook(change)):
        yield


# -- classes ----------------------------------------------------------------------------------------------------------


@contextmanager
def _of_class(module: Any, **methods: Any) -> Iterator[None]:
    """Make a module an object of a subclass with these methods."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), methods)
    try:
        yield
    finally:
        module.__class__ = kind


@disturbance("unknown_code", shows=False)
def a_subclass_returns_all_logits(model):
    def forward(self, *args, logits_to_keep=0, **kwargs):
        return modeling_llama.LlamaForCausalLM.forward(self, *args, **kwargs)

    with _of_class(model, forward=forward):
        yield


@disturbance("unknown_code")
def a_subclass_looks_at_the_batch(model):
    def forward(self, hidden_states, *args, **kwargs):
        hidden_states = hidden_states + 0.5 * hidden_states.mean((0, 1))
        return modeling_llama.LlamaDecoderLayer.forward(self, hidden_states, *args, **kwargs)

    with _of_class(middle(model), forward=forward):
        yield


@contextmanager
def _wrapped(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let a function of a class or a file give something else, and look as before."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def wrapper(*args, **kwargs):
        return change(own(*args, **kwargs))

    with mock.patch.object(owner, name, wrapper):
        yield


def _other_logits(output: Any) -> Any:
    """The most likely token becomes another."""
    output.logits = output.logits.roll(1, -1)
    return output


@disturbance("unknown_code", shared=True)
def the_class_s_forward_is_wrapped(model):
    with _wrapped(modeling_llama.LlamaForCausalLM, "forward", _other_logits):
        yield


@disturbance("unknown_code", shared=True)
def a_layer_s_class_is_wrapped(model):
    with _wrapped(modeling_llama.LlamaDecoderLayer, "forward", lambda out: _hidden(out, _at_the_last_token)):
        yield


@disturbance("unknown_code", shared=True)
def attention_s_class_is_wrapped(model):
    with _wrapped(modeling_llama.LlamaAttention, "forward", lambda out: (_by_row(out[0]), *out[1:])):
        yield


@disturbance("unknown_code", shared=True)
def the_norm_s_class_is_wrapped(model):
    with _wrapped(modeling_llama.LlamaRMSNorm, "forward", lambda out: out * 1.5 + 0.1):
        yield


@disturbance("unknown_code", shared=True)
def torch_s_linear_is_wrapped(model):
    with _wrapped(torch.nn.Linear, "forward", lambda out: out * 1.1 + 0.05):
        yield


@disturbance("unknown_code", shared=True)
def torch_s_own_call_is_wrapped(model):
    own = torch.nn.Module._call_impl

    @functools.wraps(own)
    def wrapper(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        return out + VECTOR if isinstance(self, modeling_llama.LlamaMLP) else out

    with (
        mock.patch.object(torch.nn.Module, "_call_impl", wrapper),
        mock.patch.object(torch.nn.Module, "_wrapped_call_impl", wrapper),
        mock.patch.object(torch.nn.Module, "__call__", wrapper),
    ):
        yield


@disturbance("unknown_code", shared=True)
def the_rotation_is_wrapped(model):
    with _wrapped(modeling_llama, "apply_rotary_pos_emb", lambda both: (both[0] * 1.3, both[1].flip(-1))):
        yield


@disturbance("unknown_code", shared=True)
def a_function_below_the_rotation_is_wrapped(model):
    with _wrapped(modeling_llama, "rotate_half", lambda half: half * 2):
        yield


@disturbance("unknown_code", shared=True)
def a_function_s_code_is_swapped(model):
    def rotate_half(x):
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1) * 2

    own = modeling_llama.rotate_half
    code = own.__code__
    own.__code__ = rotate_half.__code__
    try:
        yield
    finally:
        own.__code__ = code


@disturbance("unknown_code", shared=True, shows=False)
def the_mask_s_function_is_wrapped(model):
    with _wrapped(modeling_llama, "create_causal_mask", lambda mask: mask):
        yield


# -- what generate() calls --------------------------------------------------------------------------------------------


def _inputs_that_hide(own: Any) -> Any:
    @functools.wraps(own)
    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = own(self, *args, **kwargs)
        return _hide_old_tokens(self, (), inputs)[1]

    return prepare_inputs_for_generation


@disturbance("unknown_code", shared=True)
def the_class_prepares_inputs_that_hide_old_tokens(model):
    kind = modeling_llama.LlamaForCausalLM
    with mock.patch.object(
        kind, "prepare_inputs_for_generation", _inputs_that_hide(kind.prepare_inputs_for_generation)
    ):
        yield


@disturbance("unknown_code")
def the_model_prepares_inputs_that_hide_old_tokens(model):
    before = model.__dict__.get("prepare_inputs_for_generation")
    own = type(model).prepare_inputs_for_generation
    model.prepare_inputs_for_generation = MethodType(_inputs_that_hide(own), model)
    yield
    if before is None:
        del model.prepare_inputs_for_generation
    else:
        model.prepare_inputs_for_generation = before


# -- a forward of the instance's own ----------------------------------------------------------------------------------


@contextmanager
def _forward_of(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _steered(layer: Any) -> Callable[..., Any]:
    own = layer.forward

    def forward(*args, **kwargs):
        return _hidden(own(*args, **kwargs), lambda hidden: hidden + VECTOR)

    return forward


@disturbance("unknown_code")
def a_forward_is_a_function(model):
    layer = middle(model)
    with _forward_of(layer, _steered(layer)):
        yield


@disturbance("unknown_code")
def a_forward_is_a_partial(model):
    def forward(strength, layer, *args, **kwargs):
        own = type(layer).forward(layer, *args, **kwargs)
        return _hidden(own, lambda hidden: hidden + strength * VECTOR)

    layer = middle(model)
    with _forward_of(layer, functools.partial(forward, 1.0, layer)):
        yield


@disturbance("unknown_code")
def a_forward_is_a_method(model):
    def forward(self, *args, **kwargs):
        return _hidden(type(self).forward(self, *args, **kwargs), _at_the_last_token)

    layer = middle(model)
    with _forward_of(layer, MethodType(forward, layer)):
        yield


@disturbance("unknown_code")
def a_forward_is_decorated_by_the_library(model):
    own = model.forward

    @can_return_tuple
    def forward(self, *args, **kwargs):
        return _other_logits(own(*args, **kwargs))

    with _forward_of(model, MethodType(forward, model)):
        yield


@disturbance("unknown_code")
def a_forward_is_decorated_by_torch(model):
    layer = middle(model)
    with _forward_of(layer, torch.no_grad()(_steered(layer))):
        yield


@disturbance("unknown_code")
def a_forward_is_an_object(model):
    class Forward:
        def __init__(self, own):
            self.own = own

        def __call__(self, *args, **kwargs):
            return _hidden(self.own(*args, **kwargs), _by_row)

    layer = middle(model)
    with _forward_of(layer, Forward(layer.forward)):
        yield


# -- modules of one's own ---------------------------------------------------------------------------------------------


class Control(torch.nn.Module):
    """A block and a vector added to what it gives, as activation steering has it."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return _hidden(self.block(*args, **kwargs), lambda hidden: hidden + VECTOR)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


class Leaky(torch.nn.Module):
    """An activation that looks at the whole batch."""

    def forward(self, x):
        return torch.nn.functional.silu(x) + x.amax((0, 1))


@contextmanager
def _instead(owner: Any, name: Any, entry: Any) -> Iterator[None]:
    """Another module or attribute, for a while."""
    before = owner[name] if isinstance(owner, torch.nn.ModuleList) else getattr(owner, name)

    def put(value: Any) -> None:
        if isinstance(owner, torch.nn.ModuleList):
            owner[name] = value
        else:
            setattr(owner, name, value)

    put(entry)
    try:
        yield
    finally:
        put(before)


@disturbance("unknown_code")
def a_layer_is_wrapped_in_a_module(model):
    layers = decoder(model).layers
    with _instead(layers, 0, Control(layers[0])):
        yield


@disturbance("unknown_code")
def an_activation_is_the_user_s(model):
    with _instead(middle(model).mlp, "act_fn", Leaky()):
        yield


@disturbance("unknown_code")
def an_activation_is_a_function(model):
    mlp = middle(model).mlp
    before = mlp.act_fn
    del mlp.act_fn
    mlp.act_fn = lambda x: torch.relu(x) + x.amax((0, 1))
    yield
    del mlp.act_fn
    mlp.act_fn = before


@disturbance()
def an_activation_is_another_of_the_library_s(model):
    with _instead(middle(model).mlp, "act_fn", transformers.activations.ACT2FN["relu2"]):
        yield


# -- below the modules ------------------------------------------------------------------------------------------------


@disturbance("unknown_code", shared=True)
def a_function_of_torch_is_wrapped(model):
    with _wrapped(torch.nn.functional, "silu", lambda out: out * 2 + 0.3):
        yield


@disturbance("unknown_code", shared=True)
def a_mode_changes_every_operation(model):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            return out * 2 + 0.3 if function is torch.nn.functional.silu else out

    with Mode():
        yield


@disturbance("unknown_code")
def a_weight_is_parametrised(model):
    class Double(torch.nn.Module):
        def forward(self, weight):
            return weight * 2

    linear = middle(model).mlp.up_proj
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Double())
    yield
    torch.nn.utils.parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)


@disturbance("unknown_code", shared=True)
def the_library_s_loop_is_wrapped(model):
    own = transformers.GenerationMixin._sample

    @functools.wraps(own)
    def wrapper(self, input_ids, logits_processor, *args, **kwargs):
        logits_processor.append(lambda ids, scores: scores + 3 * scores.roll(1, 0) + scores.mean(0))
        return own(self, input_ids, logits_processor, *args, **kwargs)

    with mock.patch.object(transformers.GenerationMixin, "_sample", wrapper):
        yield


def _own_attention(module, query, key, value, attention_mask, **kwargs):
    out, weights = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, **kwargs
    )
    return out + out[:, -1:].mean(0), weights  # of all rows, at a column that is no pad


@disturbance("unknown_code")
def attention_is_a_function_of_the_user_s(model):
    transformers.AttentionInterface.register("mine", _own_attention)
    transformers.masking_utils.AttentionMaskInterface.register("mine", transformers.masking_utils.sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("mine")
    yield
    model.set_attn_implementation(before)


@disturbance(shows=False)
def attention_is_eager(model):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation(before)


# -- adapters ---------------------------------------------------------------------------------------------------------


@disturbance(base="lora")
def an_adapter_is_switched(model):
    model.set_adapter("two")
    yield
    model.set_adapter("one")


@disturbance(base="lora")
def adapters_are_disabled(model):
    with model.disable_adapter():
        yield


@disturbance(base="lora")
def an_adapter_is_merged(model):
    saved = _content(model)
    model.merge_adapter(["two"])
    yield
    model.unmerge_adapter()
    _restore(model, saved)


@disturbance(base="lora")
def an_adapter_is_scaled(model):
    changed = [module for module in model.modules() if hasattr(module, "scaling") and isinstance(module.scaling, dict)]
    for module in changed:
        module.scaling["one"] *= -2
    yield
    for module in changed:
        module.scaling["one"] /= -2


@disturbance(base="lora")
def an_adapter_is_deleted_and_added_under_its_name(model):
    for seed in (7, 3):
        model.delete_adapter("two")
        config = _lora(seed)
        model.add_adapter("two", config)
        randomise_adapter(model, "two", seed)
        model.set_adapter("two")
        if seed == 7:
            model(**prompts(5))
    yield
    model.set_adapter("one")


def randomise_adapter(model: Any, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "lora" in key and f".{name}." in key:
            parameter.data.normal_(0, 0.3, generator=generator)


# -- weights ----------------------------------------------------------------------------------------------------------


def _content(model: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


def _restore(model: Any, content: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.copy_(content[key])


@contextmanager
def _weights_back(model: Any) -> Iterator[None]:
    saved = _content(model)
    try:
        yield
    finally:
        _restore(model, saved)


def _train(model: Any, make: Callable[..., Any], **options: Any) -> None:
    batch = prompts(12, seed=8)
    optimizer = make(model.parameters(), lr=0.05, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
        optimizer.step()
    optimizer.zero_grad()


def _optimizer(name: str, make: Callable[..., Any], **options: Any) -> None:
    def apply(model):
        with _weights_back(model):
            _train(model, make, **options)
            yield

    apply.__name__ = f"two_steps_of_{name}"
    disturbance()(apply)


_optimizer("sgd", torch.optim.SGD)
_optimizer("adamw", torch.optim.AdamW)
_optimizer("adamw_fused", torch.optim.AdamW, fused=True)
_optimizer("adamw_foreach", torch.optim.AdamW, foreach=True)


@disturbance()
def data_is_written(model):
    with _weights_back(model):
        for parameter in model.parameters():
            parameter.data.mul_(0.8)
        yield


@disturbance()
def one_number_is_written(model):
    with _weights_back(model):
        middle(model).mlp.down_proj.weight.data[3, 5] += 60.0
        yield


@disturbance()
def data_is_replaced(model):
    before = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.8
    yield
    for parameter, data in zip(model.parameters(), before, strict=True):
        parameter.data = data


@disturbance()
def memory_is_written_through_numpy(model):
    with _weights_back(model):
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.detach().numpy()[:] *= 0.8
        yield


@disturbance()
def weights_are_written_in_inference_mode(model):
    with _weights_back(model):
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.mul_(0.8)
        yield


@disturbance()
def a_state_dict_is_loaded(model):
    with _weights_back(model):
        model.load_state_dict({key: tensor * 0.8 for key, tensor in model.state_dict().items()})
        yield


@disturbance()
def a_state_dict_is_assigned(model):
    before = dict(model.state_dict())
    model.load_state_dict({key: tensor * 0.8 for key, tensor in before.items()}, assign=True)
    yield
    model.load_state_dict(before, assign=True)


@disturbance()
def two_rows_of_the_embedding_change_places(model):
    with _weights_back(model):
        weight = model.get_input_embeddings().weight
        with torch.no_grad():
            weight.copy_(weight.flip(0))
        yield


@disturbance()
def a_buffer_is_written(model):
    buffer = decoder(model).rotary_emb.inv_freq
    before = buffer.clone()
    buffer.mul_(3.0)
    yield
    buffer.copy_(before)


@disturbance()
def a_buffer_is_replaced(model):
    rotary = decoder(model).rotary_emb
    before = rotary.inv_freq
    rotary.inv_freq = before * 3.0
    yield
    rotary.inv_freq = before


# -- numbers, settings, order -----------------------------------------------------------------------------------------


@disturbance()
def attention_has_another_scale(model):
    with _instead(middle(model).self_attn, "scaling", 1.0):
        yield


@disturbance()
def a_norm_has_another_epsilon(model):
    with _instead(middle(model).post_attention_layernorm, "variance_epsilon", 30.0):
        yield


@disturbance()
def the_rotary_embedding_has_another_scale(model):
    with _instead(decoder(model).rotary_emb, "attention_scaling", 1.5):
        yield


@disturbance()
def layers_change_places(model):
    with _instead(decoder(model), "layers", torch.nn.ModuleList(reversed(decoder(model).layers))):
        yield


@disturbance()
def a_module_is_replaced(model):
    with _instead(middle(model), "mlp", randomise(copy.deepcopy(middle(model).mlp), seed=11)):
        yield


@disturbance(base="gpt2", shows=False)
def a_config_field_is_changed(model):
    config = model.transformer.h[0].attn.config
    # No GPT-2 forward reads it: the identity changes all the same, since a forward might.
    with _instead(config, "scale_attn_by_inverse_layer_idx", not config.scale_attn_by_inverse_layer_idx):
        yield


@disturbance("dropout", base="gpt2")
def training_mode_with_dropout(model):
    model.train()
    yield
    model.eval()


@disturbance(shows=False)
def training_mode_without_dropout(model):
    model.train()
    yield
    model.eval()


def pair_of(base: str, **options: Any) -> tuple[Any, Any]:
    """`(unpatched model, patched deep copy of it)`, in a pool that evicts nothing."""
    plain = BASES[base]()
    return plain, hf_paged.patch(copy.deepcopy(plain), **{"block_size": 4, "num_blocks": 400, **options})


def with_code() -> list[str]:
    """Disturbances that step aside."""
    return [name for name, case in TABLE.items() if case.code is not None]


def seen_by_content() -> list[str]:
    """Disturbances that the identity sees."""
    return [name for name, case in TABLE.items() if case.code is None]


needs_old_peft = pytest.mark.skipif(
    compat.CACHE_ARGUMENT == "cache", reason="PEFT 0.21 looks for the cache under its old name"
)
