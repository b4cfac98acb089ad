"""Models that do not hand their attention to the attention interface in a form that reads blocks.

`install` binds functions of this module to their attention modules, over the class's own; `remove` takes them away. A
function that is asked for something it does not know calls the class's own.

- **Latent attention** (DeepSeek-V2 and V3, MiniCPM3, ...): the cache holds one latent vector a token, and the model
  expands all of them to keys and values at every step. Here the expansion moves to the query and the output
  (`latent.LatentHeads`), and attention reads the latents where they lie.
- **Falcon**: its own calls of scaled-dot-product attention, now made through the interface. With ALiBi it stays as it
  is.
"""

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from . import attention, compat
from .latent import LatentHeads
from .lazy import LazyKV

_MARK = "_hf_paged_adapted"


def install(model: PreTrainedModel) -> None:
    """Bind what this model's attention modules need; nothing for most models."""
    for module in model.modules():
        name, function = _adapter_of(module)
        if function is not None:
            module.__dict__[name] = MethodType(function, module)
            module.__dict__[_MARK] = name
            if function is _falcon_forward:
                # Its classes do not let it be set, and the masks of this implementation are the ones to have.
                module.config._attn_implementation_internal = attention.NAME


def remove(model: PreTrainedModel) -> None:
    """Take away what `install` has bound."""
    for module in model.modules():
        name = module.__dict__.pop(_MARK, None)
        if name is not None:
            module.__dict__.pop(name, None)


def bound(module: Any) -> bool:
    """Whether `install` has bound something to this module."""
    return _MARK in module.__dict__


def _adapter_of(module: Any) -> tuple[str, Any]:
    if hasattr(type(module), "expand_kv") and isinstance(getattr(module, "kv_b_proj", None), torch.nn.Module):
        return "expand_kv", _expand_kv
    if type(module).__name__ == "FalconAttention" and not module.config.alibi:
        return "forward", _falcon_forward
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
    """`FalconAttention.forward` with rotary embeddings. Gives no attention weights."""
    # [batch, q_len, heads, head_dim] each
    query, key, value = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    query, key = compat.function_beside(self, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    out, _ = attention.paged_attention_forward(self, query, key, value, attention_mask, scaling=self.head_dim**-0.5)
    return self.dense(out.flatten(2)), None
