"""The flash-attn backend: attention over block tables by FlashAttention's own paged kernels, one call a layer.

FlashAttention 3 (`flash_attn_interface`, Hopper) takes any block size, FlashAttention 2 (`flash_attn`) multiples of
256. Both take strides and ask only that the last one is 1, so the head-major store goes in as a permuted view:

    store [num_kv_heads, blocks, block_size, dim]  ──►  view [blocks, block_size, num_kv_heads, dim]

What they have no arguments for (sinks, values of another dim, float32, pads behind tokens) goes to the Triton backend,
or to PyTorch's where there is no Triton. Not measured yet: nothing chooses this backend but its name.
"""

import functools
import importlib
import importlib.util
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from ..plan import GroupPlan
from ..store import Memory
from . import Attend, AttentionCall, torch_strided

FA2_BLOCK = 256
WIDEST_HEAD = 256
DTYPES = (torch.float16, torch.bfloat16)
DEVICES = ("cuda",)


@dataclass(frozen=True)
class Library:
    """The installed FlashAttention.

    Attributes:
        version: 2 or 3.
        module: what the functions are in.
    """

    version: int
    module: Any


@functools.cache
def library() -> Library | None:
    """FlashAttention 3 where it is installed and made for the chip, else 2, else None."""
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
    for version, name in ((3, "flash_attn_interface"), (2, "flash_attn")):
        if version == 3 and not hopper:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "flash_attn_with_kvcache"):
            return Library(version, module)
    return None


def needed(block_size: int) -> None:
    """Raise unless FlashAttention is installed and takes blocks of `block_size` tokens.

    Raises:
        RuntimeError: saying what to install or which setting to change.
    """
    found = library()
    if found is None:
        raise RuntimeError(
            "backend='flash_attn' needs the package flash-attn and finds none that can be imported: "
            "pip install 'flash-attn>=2.6' (or FlashAttention 3 on Hopper), or choose another backend"
        )
    if found.version == 2 and block_size % FA2_BLOCK:
        raise RuntimeError(
            f"backend='flash_attn' with FlashAttention 2 needs blocks of a multiple of {FA2_BLOCK} tokens, and "
            f"block_size is {block_size}: set block_size={FA2_BLOCK}, install FlashAttention 3 (Hopper), which takes "
            "any, or choose another backend"
        )


def attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    memory: Memory,
    plan: GroupPlan,
    call: AttentionCall,
) -> torch.Tensor:
    """See `hf_paged.backends`."""
    found = library()
    if found is None or not _knows(query, memory, plan, call, found):
        return _other(query)(query, key, value, memory, plan, call)
    batch, num_heads, q_len, dim = query.shape
    rows = _rows_on(plan, query.device)
    if not rows.longest:
        return query.new_zeros(batch, q_len, num_heads, memory.value_dim)
    keys, values = (tensor.permute(1, 2, 0, 3) for tensor in (memory.keys, memory.values))
    band = _band(plan, call, q_len)
    options: dict[str, Any] = dict(
        softmax_scale=call.scale,
        causal=True,
        window_size=(-1, -1) if band is None else (band - 1, 0),
        softcap=call.softcap or 0.0,
    )
    kvcache = found.module.flash_attn_with_kvcache
    if plan.offsets is None:
        # [batch, q_len, num_heads, dim]; the row of a pad's query sees nothing and gives zeros.
        table = {"page_table" if found.version == 3 else "block_table": rows.table}
        return kvcache(query.transpose(1, 2), keys, values, cache_seqlens=rows.lengths, **table, **options)
    packed = query.transpose(1, 2).reshape(batch * q_len, num_heads, dim)
    if found.version == 3:
        out = kvcache(
            packed,
            keys,
            values,
            cache_seqlens=rows.lengths,
            page_table=rows.table,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=max(plan.new),
            **options,
        )
    else:
        out = found.module.flash_attn_varlen_func(
            packed,
            keys,
            values,
            rows.cu_seqlens_q,
            rows.cu_seqlens_k,
            max(plan.new),
            rows.longest,
            block_table=rows.table,
            **options,
        )
    return out.view(batch, q_len, num_heads, memory.value_dim)


def _knows(query: torch.Tensor, memory: Memory, plan: GroupPlan, call: AttentionCall, found: Library) -> bool:
    q_len = query.shape[2]
    windowed = plan.window is not None or call.band is not None
    return (
        query.device.type in DEVICES
        and query.dtype in DTYPES
        and query.dtype == memory.keys.dtype == memory.values.dtype
        and memory.key_dim == memory.value_dim <= WIDEST_HEAD
        and memory.key_dim % 8 == 0  # other dims it pads, by a copy of the whole store
        and (found.version == 3 or memory.block_size % FA2_BLOCK == 0)
        and call.sinks is None
        and call.slopes is None
        and call.bias is None
        and (plan.suffix or (q_len == 1 and not windowed))  # else a query does not end where its row does
        # What a windowed layer holds is as good as a band only where each query is bounded by one, or is alone.
        and (plan.window is None or q_len == 1 or (call.band is not None and call.band <= plan.window))
    )


def _band(plan: GroupPlan, call: AttentionCall, q_len: int) -> int | None:
    """Tokens each query sees, itself included; None: all."""
    bounds = [width for width in (call.band, plan.window if q_len == 1 else None) if width is not None]
    return min(bounds, default=None)


def _other(query: torch.Tensor) -> Attend:
    """What computes the calls that FlashAttention does not take."""
    if query.is_cuda and importlib.util.find_spec("triton") is not None:
        from . import triton

        return triton.attend
    return torch_strided.attend


@dataclass(frozen=True)
class _Rows:
    """The rows of a forward on the device, all counted from the first slot of each row's table.

    Attributes:
        table: block ids, [batch, width] int32.
        lengths: tokens each row attends to, the new ones included; 0 where it is finished, [batch] int32.
        cu_seqlens_q: where each row's queries begin and end, [batch + 1] int32.
        cu_seqlens_k: the running sum of `lengths`, [batch + 1] int32.
        longest: tokens of the longest row.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    longest: int


def _rows_on(plan: GroupPlan, device: torch.device) -> _Rows:
    """Sent once a forward, by its first layer; the others find it in the plan."""
    key = ("flash_attn rows", device)
    if key not in plan.scratch:
        held = plan.tables.rows
        lengths = [
            past + new - row.start if live else 0
            for past, new, row, live in zip(plan.past, plan.new, held, plan.live, strict=True)
        ]
        width = max(1, *(len(row.blocks) for row in held))
        table = [row.blocks + [0] * (width - len(row.blocks)) for row in held]
        queries = [*plan.offsets, plan.q_len] if plan.offsets is not None else [0] * (plan.batch + 1)
        sums = list(itertools.accumulate(lengths, initial=0))

        def sent(numbers: list) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)

        plan.scratch[key] = _Rows(sent(table), sent(lengths), sent(queries), sent(sums), max(lengths))
    return plan.scratch[key]
