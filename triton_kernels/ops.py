"""The launchers as `torch.library` ops, `hf_paged::write_tokens` and so on, for code of one's own that is compiled.

Each has a fake implementation, so a graph goes through it, and says what it writes to. The backend calls the launchers
themselves: it runs eagerly, or inside of an op that a graph sees whole (`hf_paged.compiling`), and there the dispatch
of a second op would only add to each launch.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import copy, decode, prefill, shared, write

_library = torch.library.Library("hf_paged", "FRAGMENT")

_ATTENTION = "Tensor query, Tensor keys, Tensor values, Tensor table"
_OPTIONS = "Tensor? begins=None, Tensor? starts=None"
_SCORES = "SymInt? band=None, float? softcap=None, Tensor? sinks=None, Tensor? key_mask=None, SymInt? splits=None"


def _new_output(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """[num_queries, num_heads, value_dim] in the query's dtype, as `common.check_queries` makes it."""
    return query.new_empty(query.shape[0], query.shape[1], values.shape[3])


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Of an op that only writes."""


def _register(signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = signature[: signature.index("(")]
    _library.define(signature)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_paged::{name}", fake, lib=_library)


def _copy_blocks(stores: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See `copy.copy_blocks`; the sets of stores are made anew in each call."""
    copy.copy_blocks(copy.store_sets(stores), sources, targets)


def _shared_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    members: torch.Tensor,
    tiles: torch.Tensor,
    covered: torch.Tensor,
    layers: int,
    fullest: int,
    longest: int,
    longest_suffix: int,
    **options: Any,
) -> torch.Tensor:
    """See `shared.shared_attention`; the fields of its `SharedSpans` are arguments here."""
    spans = shared.SharedSpans(members, tiles, covered, layers, fullest, longest, longest_suffix)
    return shared.shared_attention(query, keys, values, table, lengths, spans, **options)


for _signature, _run, _fake in (
    (
        "write_tokens(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slot_mapping) -> ()",
        write.write_tokens,
        _nothing,
    ),
    (
        "copy_blocks(Tensor(a!)[] stores, Tensor sources, Tensor targets) -> ()",
        _copy_blocks,
        _nothing,
    ),
    ("update_table(Tensor(a!) table, Tensor entries) -> ()", copy.update_table, _nothing),
    (
        f"decode_attention({_ATTENTION}, Tensor lengths, *, float scale, SymInt longest, {_OPTIONS}, {_SCORES}) "
        "-> Tensor",
        decode.decode_attention,
        _new_output,
    ),
    (
        f"prefill_attention({_ATTENTION}, Tensor cu_seqlens_q, Tensor lengths, *, float scale, SymInt longest, "
        f"SymInt longest_query, {_OPTIONS}, Tensor? query_ends=None, {_SCORES}) -> Tensor",
        prefill.prefill_attention,
        _new_output,
    ),
    (
        f"shared_attention({_ATTENTION}, Tensor lengths, Tensor members, Tensor tiles, Tensor covered, SymInt layers, "
        "SymInt fullest, SymInt longest, SymInt longest_suffix, *, float scale, float? softcap=None, "
        "Tensor? sinks=None, SymInt? shared_splits=None, SymInt? splits=None) -> Tensor",
        _shared_attention,
        _new_output,
    ),
):
    _register(_signature, _run, _fake)
