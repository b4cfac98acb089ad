"""What attends over blocks. Every backend is a function `attend(query, key, value, memory, plan, call)`:

query   [batch, num_heads, q_len, key_dim]
key     [batch, num_kv_heads, q_len, key_dim], this forward's, already in the store; None: read them there
value   [batch, num_kv_heads, q_len, value_dim], likewise
memory  the `Memory` of the layer, with this forward's tokens in it
plan    the group's `GroupPlan` of this forward
call    `AttentionCall`: what this attention call asks for
returns [batch, q_len, num_heads, value_dim], zeros for rows that see nothing

A backend may also store by kernels of its own: see `Writer`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass
class AttentionCall:
    """What one attention call asks for beside its tensors.

    Attributes:
        scale: factor on the scores.
        band: tokens each query sees, itself included (a sliding mask); None: no bound but the layer's own window.
        softcap: scores become `softcap * tanh(scores / softcap)`, after the scale, before any mask; None: not.
        sinks: a logit per head that takes part in the softmax and carries no value, [num_heads]; None: none.
        slopes: ALiBi: `slopes[h] * position` is added to the scores of head h after the softcap, [num_heads] float32,
            positions counted in the row's own stored tokens; None: none. What is alike for all keys of a row changes
            no softmax, so a backend may count from where it likes (from the row's end, the sums are the smallest).
            Not together with sinks, which would notice.
        bias: added to the scores after the scale, [1, num_heads, q_len, columns]; the last column is every row's last
            token. One object for all layers that have the same. For plans whose pads are all on the left. None: none.
    """

    scale: float
    band: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None


Attend = Callable[..., torch.Tensor]


class Writer(NamedTuple):
    """How a backend stores what attention will read.

    Attributes:
        write: `write(key, value, memory, plan) -> bool`: put a forward's tokens into their slots; False, and nothing
            done, if there is no kernel for them. `key`, `value`: [batch, num_kv_heads, q_len, dim]. Called with the
            store's lock held, once there is memory and blocks are copied.
        copy: `copy(stores, plan)`: make a forward's block copies in the stores of all layers of a group. Called with
            the locks of all of them held.
    """

    write: Callable[..., bool]
    copy: Callable[..., None]


class Backend(NamedTuple):
    """What attends, and what stores; writer None: `GroupPlan` and `LayerStore` do, by PyTorch's operators."""

    attend: Attend
    writer: Writer | None = None


def choose(name: str, block_size: int = 16) -> Backend:
    """The backend for a `PagedConfig.backend` name and `block_size`.

    Raises:
        RuntimeError: for "native" where its kernels cannot be compiled, for "triton" where there is no GPU, for
            "flash_attn" where it is not installed or does not take such blocks.
    """
    if name == "reference":
        from .reference import attend
    elif name == "triton":
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("backend='triton' needs a GPU, and PyTorch finds none; backend='auto' does without")
        from .triton import attend, writer

        return Backend(attend, writer)
    elif name == "flash_attn":
        from . import flash_attn

        flash_attn.needed(block_size)
        return Backend(flash_attn.attend)
    elif name == "torch":
        from .torch_strided import attend
    else:
        from ..cpu_kernels import library
        from .native import attend

        if name == "native":
            library.needed()
    return Backend(attend)
