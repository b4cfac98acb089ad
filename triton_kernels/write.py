"""Write: keys and values of new tokens into their slots.

After vLLM's `reshape_and_cache`: the host gives one slot per token, the device does the rest in one launch a layer.
"""

import torch
import triton
import triton.language as tl

from . import config
from .common import alignment, check_store, padded, refuse_scales


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "key_token_stride",
        "key_head_stride",
        "value_token_stride",
        "value_head_stride",
        "keys_head_stride",
        "values_head_stride",
    ]
)
def _write_kernel(
    key,  # [num_tokens, num_kv_heads, key_dim], any strides with last 1
    value,  # [num_tokens, num_kv_heads, value_dim], likewise
    keys,  # [num_kv_heads, blocks, block_size, key_dim], the store
    values,  # [num_kv_heads, blocks, block_size, value_dim]
    slot_mapping,  # [num_tokens] int64
    num_tokens,
    key_token_stride,  # strides of what changes from call to call are divided by the alignment
    key_head_stride,
    value_token_stride,
    value_head_stride,
    keys_head_stride,
    values_head_stride,
    keys_block_stride: tl.constexpr,
    keys_slot_stride: tl.constexpr,
    values_block_stride: tl.constexpr,
    values_slot_stride: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGN: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)
    wanted = slots >= 0
    blocks = slots // BLOCK_SIZE
    offsets = slots % BLOCK_SIZE
    rows = tokens.to(tl.int64)

    dims = tl.arange(0, BLOCK_K)
    mask = wanted[:, None] & (dims < KEY_DIM)[None, :]
    source = key + head * key_head_stride * ALIGN + rows[:, None] * key_token_stride * ALIGN + dims[None, :]
    target = keys + head * keys_head_stride * ALIGN
    target += (blocks * keys_block_stride + offsets * keys_slot_stride)[:, None] + dims[None, :]
    tl.store(target, tl.load(source, mask=mask).to(keys.dtype.element_ty), mask=mask)

    dims = tl.arange(0, BLOCK_V)
    mask = wanted[:, None] & (dims < VALUE_DIM)[None, :]
    source = value + head * value_head_stride * ALIGN + rows[:, None] * value_token_stride * ALIGN + dims[None, :]
    target = values + head * values_head_stride * ALIGN
    target += (blocks * values_block_stride + offsets * values_slot_stride)[:, None] + dims[None, :]
    tl.store(target, tl.load(source, mask=mask).to(values.dtype.element_ty), mask=mask)


def write_tokens(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Put the keys and values of new tokens into their slots, cast to the store's dtype.

    Args:
        key: [num_tokens, num_kv_heads, key_dim]; any strides, 0 among them, with a last one of 1.
        value: [num_tokens, num_kv_heads, value_dim], likewise.
        keys, values: the store, [num_kv_heads, blocks, block_size, dim]; any strides with a last one of 1.
        slot_mapping: `block id * block_size + offset` of each token, [num_tokens] int64; negative: not stored. No slot
            may be named twice.
        k_scale, v_scale: room for quantised storage; not built.
    """
    refuse_scales(k_scale, v_scale)
    check_store(keys, values)
    num_tokens, num_kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    if (num_kv_heads, key_dim, value_dim) != (keys.shape[0], keys.shape[3], values.shape[3]):
        raise ValueError(f"{list(key.shape)} and {list(value.shape)} do not fit a store of {list(keys.shape)}")
    if value.shape[:2] != key.shape[:2] or slot_mapping.shape != (num_tokens,):
        raise ValueError(f"keys of {num_tokens} tokens, values {list(value.shape)}, slots {list(slot_mapping.shape)}")
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    if not num_tokens:
        return
    moving = (*key.stride()[:2], *value.stride()[:2], keys.stride(0), values.stride(0))
    align = alignment(*moving)
    block_k, block_v = padded(key_dim), padded(value_dim)
    narrowest = min(block_k * key.element_size(), block_v * value.element_size())
    block_t, num_warps = config.write_tile(key.device, num_tokens, narrowest)
    _write_kernel[(triton.cdiv(num_tokens, block_t), num_kv_heads)](
        key,
        value,
        keys,
        values,
        slot_mapping,
        num_tokens,
        *(stride // align for stride in moving),
        keys_block_stride=keys.stride(1),
        keys_slot_stride=keys.stride(2),
        values_block_stride=values.stride(1),
        values_slot_stride=values.stride(2),
        BLOCK_SIZE=keys.shape[2],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        ALIGN=align,
        num_warps=num_warps,
    )
