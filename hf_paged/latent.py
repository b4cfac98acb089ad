"""Latent attention (MLA) over blocks: DeepSeek-V2 and V3 and what follows them.

The cache holds, per token, one latent vector `c` (of which every head's key and value are linear images) and one
rotated key that all heads share. The model expands all of them to keys and values at every step. But

    (W_k c) · q = c · (W_kᵀ q)        and        Σ w (W_v c) = W_v (Σ w c)

so the query is brought to the latents instead, attention runs over them as over one head that all query heads share,
keys and values being the same memory, and what comes out is expanded once.
"""

from typing import Any

import torch


class LatentHeads:
    """What one attention module makes of latents.

    Args:
        module: an attention module with `kv_b_proj`, `kv_lora_rank`, `qk_nope_head_dim`, `v_head_dim` and `expand_kv`.
    """

    def __init__(self, module: Any):
        self.module = module
        self.rank: int = module.kv_lora_rank
        self.nope: int = module.qk_nope_head_dim

    @staticmethod
    def fits(module: Any) -> bool:
        """Whether `kv_b_proj` is a plain matrix that nothing hangs on (no adapter, no quantised weight, no hook)."""
        linear = module.kv_b_proj
        return (
            type(linear) is torch.nn.Linear
            and linear.bias is None
            and not linear._forward_hooks
            and not linear._forward_pre_hooks
            and not linear.weight.is_meta
        )

    def _weight(self) -> torch.Tensor:
        """[num_heads, nope + value_dim, rank]"""
        return self.module.kv_b_proj.weight.view(-1, self.nope + self.module.v_head_dim, self.rank)

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as the model makes them, [batch, num_heads, tokens, dim], of latents and rotated keys in one,
        [batch, 1, tokens, rank + rope]."""
        return type(self.module).expand_kv(self.module, latents[..., : self.rank], latents[..., self.rank :])

    def bring(self, query: torch.Tensor) -> torch.Tensor:
        """A query [batch, num_heads, q_len, nope + rope] as it meets the latents, [..., rank + rope]."""
        plain, rotated = query[..., : self.nope], query[..., self.nope :]
        return torch.cat([torch.matmul(plain, self._weight()[:, : self.nope].to(plain.dtype)), rotated], dim=-1)

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """What attention over the latents gave, [batch, q_len, num_heads, rank + rope], as values, [..., value_dim]."""
        weight = self._weight()[:, self.nope :].to(out.dtype)  # [num_heads, value_dim, rank]
        return torch.matmul(out[..., None, : self.rank], weight.transpose(1, 2)).squeeze(-2)


def all_fit(model: torch.nn.Module) -> bool:
    """Whether no attention module of a model with latent attention expands its latents by itself."""
    return all(LatentHeads.fits(module) for module in model.modules() if hasattr(type(module), "expand_kv"))
