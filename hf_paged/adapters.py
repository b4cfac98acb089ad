"""Models that do not hand their attention to the attention interface in a form that reads blocks.

`install` binds functions of this module to their attention modules, over the class's own; `remove` takes them away. A
function that is asked for something it does not know calls the class's own.

- **Latent attention** (DeepSeek-V2 and V3, MiniCPM3, ...): the cache holds one latent vector a token, and the model
  expands all of them to keys and values at every step. Here the expansion moves to the query and the output
  (`latent.LatentHeads`), and attention reads the latents where they lie.
- **ALiBi** (bloom, mpt): their own attention, whose bias is a slope per head times the key's position. Over blocks the
  bias is the backend's; the tensor that the model has made of it is left aside. Dense calls stay the class's own.
- **Falcon**: its own calls of scaled-dot-product attention, now made through the interface. With ALiBi it stays as it
  is: it rounds each product of slope and position to bfloat16, so that its bias is not linear in the position.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from . import attention, compat, implementations, traced
from .binding import bind
from .cache import PagedCache
from .latent import LatentHeads
from .lazy import LazyKV, LazyMask
from .traced import TracedKV, TracedMask

_MARK = "_hf_paged_adapted"
_ALIBI = "_hf_paged_slopes"
_WEIGHTS = "_hf_paged_weights"  # on an attention module, while it is asked for its weights


def install(model: PreTrainedModel) -> None:
    """Bind what this model's attention modules need; nothing for most models."""
    compat.admit(model, implementations.NAME)
    for module in model.modules():
        if hasattr(module, "layer_idx") or "Attention" in type(module).__name__:
            traced.name(module)
        name, function = _adapter_of(module)
        if function is not None:
            bind(module, name, function)
            if function in _SLOPES:
                _slopes_on(module, _SLOPES[function], next(module.parameters()).device)
            module.__dict__[_MARK] = name
            if name == "forward" and function is not _mpt_block_forward:
                # Their classes do not let it be set, and the masks of this implementation are the ones to have.
                config = getattr(module, "config", None) or model.config.get_text_config(decoder=True)
                config._attn_implementation_internal = implementations.NAME


def remove(model: PreTrainedModel) -> None:
    """Take away what `install` has bound."""
    for module in model.modules():
        module.__dict__.pop(traced.HANDLE, None)
        name = module.__dict__.pop(_MARK, None)
        if name is not None:
            module.__dict__.pop(name, None)
            module.__dict__.pop(_ALIBI, None)


def bound(module: Any) -> bool:
    """Whether `install` has bound something to this module."""
    return _MARK in module.__dict__


def _adapter_of(module: Any) -> tuple[str, Any]:
    if hasattr(type(module), "expand_kv") and isinstance(getattr(module, "kv_b_proj", None), torch.nn.Module):
        return "expand_kv", _expand_kv
    if type(module).__name__ == "FalconAttention" and not module.config.alibi:
        return "forward", _falcon_forward
    if type(module).__name__ == "BloomAttention" and not (module.pretraining_tp > 1 and module.slow_but_exact):
        return "forward", _bloom_forward
    if type(module).__name__ == "MptAttention":
        return "forward", _mpt_forward
    if type(module).__name__ == "MptBlock":
        return "forward", _mpt_block_forward
    return "", None


def _expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of a paged cache stay as they are: our attention function reads them."""
    if (
        isinstance(kv_nope, LazyKV)
        and isinstance(k_rot, LazyKV)
        and kv_nope.layer is k_rot.layer
        and kv_nope.layer.latent
        and LatentHeads.fits(self)
    ):
        return kv_nope, k_rot
    if isinstance(kv_nope, TracedKV) and isinstance(k_rot, TracedKV) and LatentHeads.fits(self):
        update, dims = kv_nope.update, (kv_nope.new.shape[3], k_rot.new.shape[3])
        alone = update.key.shape[1] == 1 and update.key.dtype == update.value.dtype
        if update is k_rot.update and alone and dims == update.cache.state.pool.latent:
            update.latent = True
            return kv_nope, k_rot
    return type(self).expand_kv(self, kv_nope, k_rot)


def _falcon_forward(
    self: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] = (),  # type: ignore[assignment]
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`FalconAttention.forward` with rotary embeddings. The class's own gives attention weights."""
    if output_attentions or self.config._attn_implementation != implementations.NAME:
        kwargs |= {"position_embeddings": position_embeddings}
        own = type(self).forward
        return own(
            self, hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache, output_attentions, **kwargs
        )
    if attention.implementation_before(self) == "sdpa":
        attention_mask = _of_sdpa(attention_mask)
    # [batch, q_len, heads, head_dim] each
    query, key, value = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    query, key = compat.function_beside(self, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    out, _ = attention.paged_attention_forward(self, query, key, value, attention_mask, scaling=self.head_dim**-0.5)
    return self.dense(out.flatten(2)), None


def _of_sdpa(mask: Any) -> Any:
    """What SDPA is given instead of a mask that is added to scores (`compat.adds_masks`)."""
    if isinstance(mask, TracedMask):
        return TracedMask(mask.shape, torch.bool, mask.window, mask.arguments, False) if mask.eager else mask
    if mask is None or mask.dtype == torch.bool:
        return mask
    if not isinstance(mask, LazyMask) or mask.written:
        return mask == 0
    if mask.plain and mask.shape[2] in (1, mask.shape[3]):
        return None
    if mask.of_sdpa is None:  # one object for all layers
        build = lambda: mask.materialize("") == 0  # noqa: E731
        mask.of_sdpa = LazyMask.make(tuple(mask.shape), mask.device, mask.window, mask.chunked, mask.padding, build)
    return mask.of_sdpa


class _Written:
    """Stands for a cache that has this forward's tokens already, before a function that would update it."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor):
        self.key, self.value = key, value

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key, self.value

    def get_seq_length(self) -> int:
        return self.key.shape[2]


def _over_blocks(
    module: Any,
    cache: PagedCache,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    scaling: float,
    slopes: torch.Tensor,
    by_column: bool,
) -> torch.Tensor | _Written:
    """Attention with ALiBi, [batch, q_len, num_heads * head_dim], or a cache for the class's own forward.

    Args:
        states: query, key and value of the new tokens, [batch, num_heads, q_len, head_dim] each.
        by_column: see `attention.alibi_attention`.
    """
    query, key, value = states
    key, value = cache.update(key, value, module.layer_idx)
    if isinstance(key, (LazyKV, TracedKV)):
        out = attention.alibi_attention(module, query, key, mask, scaling, slopes, by_column)
        if out is not None:
            return out.flatten(2)
        assert isinstance(key, LazyKV) and isinstance(value, LazyKV)  # of a traced forward there is always an answer
        key, value = key.materialize(""), value.materialize("")
    return _Written(key, value)


def _slopes_on(module: Any, make: Callable, device: torch.device) -> torch.Tensor:
    """ALiBi's slopes, [num_heads] float32, kept with the module: one tensor for all that have the same."""
    slopes = module.__dict__.get(_ALIBI)
    if slopes is None or slopes.device != device:
        slopes = module.__dict__[_ALIBI] = make(module, device)
    return slopes


def _bloom_slopes(module: Any, device: torch.device) -> torch.Tensor:
    return _bloom_slopes_of(compat.function_beside(module, "build_alibi_tensor"), module.num_heads, device)


@functools.cache
def _bloom_slopes_of(build: Callable, num_heads: int, device: torch.device) -> torch.Tensor:
    """By the modeling file's function: what it gives position 1."""
    return build(torch.ones(1, 2, device=device), num_heads, torch.float32)[:, 0, 1].contiguous()


def _bloom_forward(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`BloomAttention.forward`. Gives no attention weights where it attends over blocks."""
    if isinstance(layer_past, PagedCache) and not output_attentions and not self.training:
        states = self._reshape(self.query_key_value(hidden_states))
        slopes = _slopes_on(self, _bloom_slopes, hidden_states.device)
        out = _over_blocks(self, layer_past, states, attention_mask, self.inv_norm_factor, slopes, by_column=False)
        if isinstance(out, torch.Tensor):
            return self.dense(out) + residual, None
        layer_past = out
    own = type(self).forward
    return own(self, hidden_states, residual, alibi, attention_mask, layer_past, use_cache, output_attentions, **kwargs)


def _mpt_slopes(module: Any, device: torch.device) -> torch.Tensor:
    return _mpt_slopes_of(compat.function_beside(module, "build_mpt_alibi_tensor"), module.n_heads, device)


@functools.cache
def _mpt_slopes_of(build: Callable, num_heads: int, device: torch.device) -> torch.Tensor:
    """By the modeling file's function: what it takes off the last key but one."""
    return -build(num_heads, 2, device=device)[:, 0, 0].contiguous()


def _mpt_forward(
    self: Any, hidden_states: torch.Tensor, position_bias: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`MptAttention.forward`. Gives no attention weights where it attends over blocks."""
    cache = kwargs.get(compat.CACHE_ARGUMENT)
    asked = self.__dict__.get(_WEIGHTS, False)
    if isinstance(cache, PagedCache) and position_bias is not None and not self.training and not asked:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (part.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2))
        slopes = _slopes_on(self, _mpt_slopes, hidden_states.device)
        mask = kwargs.get("attention_mask")
        out = _over_blocks(self, cache, (query, key, value), mask, self.softmax_scale, slopes, by_column=True)
        if isinstance(out, torch.Tensor):
            return self.out_proj(out), None
        kwargs[compat.CACHE_ARGUMENT] = out
    return type(self).forward(self, hidden_states, position_bias, **kwargs)


def _mpt_block_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`MptBlock.forward`: alone it is told whether attention weights are asked for."""
    if not kwargs.get("output_attentions"):
        return type(self).forward(self, *args, **kwargs)
    self.attn.__dict__[_WEIGHTS] = True
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        self.attn.__dict__.pop(_WEIGHTS, None)


# Which of the functions above adds slopes, and what makes them.
_SLOPES: dict[Callable, Callable] = {_bloom_forward: _bloom_slopes, _mpt_forward: _mpt_slopes}
