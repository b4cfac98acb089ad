"""`PagedCache` and `PagedLayer`: the Transformers cache contract over paged storage, nothing else."""

import copy
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from . import compat, serialize
from .blocks import OutOfBlocks
from .config import PagedConfig
from .cross import CrossLayer
from .generation import salts
from .lazy import LazyKV, LazyMask, LazySnapshot
from .plan import GroupPlan, StepPlan
from .pool import KVPool
from .snapshot import Root, Snapshot
from .state import UNKNOWN_PADDING, CacheState, UnknownPadding
from .stats import PagedStats
from .store import LayerStore
from .traced import NO_GRADIENTS, Handle, traced_update

__all__ = ["OutOfBlocks", "PagedCache", "PagedLayer"]

CacheT = TypeVar("CacheT", bound="PagedCache")


class PagedLayer(compat.CacheLayerMixin):
    """One attention layer of a `PagedCache`.

    `update` keeps the new keys and values aside and returns two lazy tensors. They are written by `commit`, which our
    attention function calls once it has seen the mask, or which happens with the first other use.

    Args:
        state: the cache's content, shared by its layers.
        index: layer index in the model.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = True
    captured = False  # see `cuda_graphs`

    def __init__(self, state: CacheState, index: int):
        self.state = state
        self.index = index
        self.group = state.pool.group_of[index]
        group = state.pool.groups[self.group]
        window = group.window
        self.chunk = window if group.chunked else None  # tokens of a chunk
        self.is_sliding = window is not None
        self.sliding_window = window
        self.columns = 0  # the library's length of this layer, pads and the pending step included
        self.steps = 0
        self.content = 0  # changes of what the snapshots of this layer show
        self._shown: dict[tuple[int, int, int], weakref.ref[Root]] = {}  # of snapshots in use, by what they show
        self._encoder_decoder = state.pool.model_config.is_encoder_decoder
        self._peeked = state.pool.has_cross_layers and window is None
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._store: LayerStore | None = None

    # -- what the library reads -------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        return self.columns > 0

    @property
    def record_past(self) -> bool:
        return self.state.recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.state.recording = value

    @property
    def keys(self) -> torch.Tensor | None:
        """A dense snapshot, [batch, num_kv_heads, visible tokens, key_dim], zeros at pads; None while empty.

        It is read as any tensor. What is written to it in place, or to a view of it, is stored (see `snapshot`) as long
        as the cache has not changed since; blocks that others share are copied before. What is written at pads is
        left aside. Keys may also be assigned, a tensor of the same shape, dtype and device. A cache that was written to
        is not found again as a prefix.

        Raises:
            ValueError: on assigning a tensor of another shape, dtype or device.
            RuntimeError: on writing in the middle of a forward, where blocks are shared.
            OutOfBlocks: on writing, if the pool has no room for copies.
        """
        return self._snapshot(0)

    @keys.setter
    def keys(self, tensor: torch.Tensor) -> None:
        self._assign(0, tensor)

    @property
    def values(self) -> torch.Tensor | None:
        """A dense snapshot, [batch, num_kv_heads, visible tokens, value_dim], zeros at pads; None while empty. Written
        to as `keys` are."""
        return self._snapshot(1)

    @values.setter
    def values(self, tensor: torch.Tensor) -> None:
        self._assign(1, tensor)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: storage is made by the pool with the first step."""

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(kv_length, kv_offset)` of the tensors that `update` will return for `query_length` new tokens."""
        if self.sliding_window is None:
            return self.columns + query_length, 0
        offset = max(self.columns - self.sliding_window + 1, 0)
        return self.columns - offset + query_length, offset

    # -- writing ----------------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new keys and values of this layer.

        Args:
            key_states: [batch, num_kv_heads, q_len, key_dim]
            value_states: [batch, num_kv_heads, q_len, value_dim]

        Returns:
            Two lazy tensors of everything this layer sees, [batch, num_kv_heads, visible tokens, dim].

        Raises:
            RuntimeError: if a gradient would have to flow through the cache.
            ValueError: if the shapes do not fit each other or the cache.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(NO_GRADIENTS)
        *sizes, key_dim = key_states.shape
        *value_sizes, value_dim = value_states.shape
        if len(sizes) != 3 or sizes != value_sizes:
            raise ValueError(
                "keys and values must be [batch, kv heads, tokens, dim] with the same first three sizes, got "
                f"{tuple(key_states.shape)} and {tuple(value_states.shape)}"
            )
        if self._pending is not None:
            self.commit(UNKNOWN_PADDING)
        unwrapped = self._encoder_decoder and not self.state.wrapped
        if unwrapped and self.columns == self.state.columns and self.state.first_of_a_step:
            # Cross-attention is about to write where self-attention has just written.
            raise self._out_of_step(self.columns)
        batch, heads, q_len = sizes
        dims = self.state.pool.latent
        if dims is not None and dims == (key_dim, value_dim) and heads == 1 and key_states.dtype == value_states.dtype:
            # Latent attention: both are kept as one, which attention reads as keys and as values.
            key_states = value_states = torch.cat([key_states, value_states], dim=3)
        visible = self.columns + q_len
        if self.sliding_window is not None:
            visible -= max(self.columns - self.sliding_window + 1, 0)
        self.columns += q_len
        self.steps += 1
        self.content += 1
        self._pending = (key_states, value_states)
        return (
            LazyKV.make(self, 0, self.steps, (batch, heads, visible, key_dim), key_states),
            LazyKV.make(self, 1, self.steps, (batch, heads, visible, value_dim), value_states),
        )

    def commit(self, padding: torch.Tensor | UnknownPadding | None) -> tuple[GroupPlan, bool] | None:
        """Write what `update` kept aside.

        Args:
            padding: see `CacheState.begin_step`.

        Returns:
            The group's plan of this step and whether the mask hides stored tokens; None if there was nothing to write.

        Raises:
            OutOfBlocks: the cache is as it was before `update`.
        """
        if self._pending is None:
            return None
        key, value = self._pending
        self._pending = None
        state, q_len = self.state, key.shape[2]
        step = state.step
        if step is None or self.columns != step.end or q_len != step.q_len:
            step = self._begin(key, value, padding)
        plan = step.groups[self.group]
        store = self._store
        if store is None or state.pool.stores.get(self.index) is not store:
            store = self._store = state.pool.store_of(self.index, key, value)
        with store.lock:
            plan.write(store, key, value)
        state.wrote()
        return plan, step.hides

    def _begin(self, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor | UnknownPadding | None) -> StepPlan:
        """Plan this forward: this layer is the first to write in it. If that fails, all is as before `update`."""
        before = self.columns - key.shape[2]
        try:
            if before != self.state.columns:
                raise self._out_of_step(before)
            step = self.state.begin_step(self.index, key, value, padding)
        except BaseException:
            self.columns = before
            raise
        self.state.pool.copy_ahead(step)
        return step

    def _out_of_step(self, columns: int) -> RuntimeError:
        return RuntimeError(
            f"layer {self.index} is out of step: it has {columns} tokens, the cache {self.state.columns}. Every layer "
            "must be updated once per forward. An encoder-decoder model needs "
            "EncoderDecoderCache(PagedCache(config), DynamicCache(config=config))."
        )

    # -- reading ----------------------------------------------------------------------------------------------------

    def dense(self, index: int, step: int, reason: str) -> torch.Tensor:
        """Dense keys (0) or values (1) of step `step`, [batch, heads, visible tokens, dim], contiguous."""
        if self.state.packed is not None or (self.state.step is not None and self.state.step.groups[0].offsets):
            raise RuntimeError("a packed prefill was not attended to over blocks; set PagedConfig.packed_prefill=False")
        if step != self.steps:
            raise RuntimeError(
                "these keys or values belong to an earlier step of the cache; read or clone() them before its "
                "next update"
            )
        q_len = self._pending[0].shape[2] if self._pending is not None else None
        self.commit(UNKNOWN_PADDING)
        if q_len is None:
            assert self.state.step is not None or self.sliding_window is None
            q_len = self.state.step.q_len if self.state.step is not None else 0
        if reason:
            self.state.pool.count_fallback(
                f"keys and values made dense for {reason}: this model or attention implementation does not read blocks",
                self.state.fallbacks,
            )
        first = 0 if self.sliding_window is None else max(self.columns - q_len - self.sliding_window + 1, 0)
        return self._gather(index, first)

    @property
    def latent(self) -> bool:
        """Keys and values are one latent vector and one rotated key, kept in one (see `latent`)."""
        if self._store is not None:
            return self._store.once
        return self._pending is not None and self._pending[0] is self._pending[1] and self.state.pool.latent is not None

    def _snapshot(self, index: int) -> torch.Tensor | None:
        if self.columns == 0:
            return None
        if self._peeked and self._store is not None and self._pending is None:
            # mllama asks every layer in every step whether it holds anything: a shape is enough for that.
            heads, *dims, key_dtype, value_dtype, device = self._store.signature
            like = torch.empty(0, dtype=(key_dtype, value_dtype)[index], device=device)
            shape = (self.state.rows, heads, self.columns, dims[index])
            return LazySnapshot.make(self, index, self.steps, shape, like)
        self.commit(UNKNOWN_PADDING)
        return self.snapshot(index)

    @property
    def _first_shown(self) -> int:
        """The first column of a snapshot."""
        if self.sliding_window is None or self.state.recording:
            return 0
        return max(self.columns - self.sliding_window + 1, 0)

    def snapshot(self, index: int) -> torch.Tensor:
        """Dense keys (0) or values (1) of what is written, as user code gets them.

        In the same memory as long as some of it is in use and nothing changes, so that two see each other's writes.
        """
        first = self._first_shown
        if torch.compiler.is_compiling():
            return self._gather(index, first)
        known = self._shown.get((index, self.content, first))
        root = None if known is None else known()
        with torch.inference_mode(False), torch.no_grad():
            if root is None:
                root = Root(self._gather(index, first), self, index)
                self._shown = {key: ref for key, ref in self._shown.items() if ref() is not None}
                self._shown[index, self.content, first] = weakref.ref(root)
            return Snapshot.make(root)

    def _assign(self, index: int, tensor: torch.Tensor) -> None:
        name = ("keys", "values")[index]
        if self.columns == 0:
            raise ValueError(f"layer {self.index} is empty: fill it by a forward, or by update(), before its {name}")
        self.commit(UNKNOWN_PADDING)
        assert self._store is not None
        heads, *dims, key_dtype, value_dtype, device = self._store.signature
        if self.latent:
            dims = list(self.state.pool.latent or dims)
        wanted = (self.state.rows, heads, self.columns - self._first_shown, dims[index])
        dtype = (key_dtype, value_dtype)[index]
        if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype, tensor.device) != (
            wanted, dtype, device,
        ):  # fmt: skip
            got = type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                got = f"{list(tensor.shape)}, {tensor.dtype}, {tensor.device}"
            raise ValueError(
                f"{name} of layer {self.index} are {list(wanted)}, {dtype}, {device}; got {got}. For other rows or "
                "fewer tokens call the cache's batch_select_indices(), batch_repeat_interleave() or crop()."
            )
        with torch.no_grad():
            self.rewrite(index, tensor.detach())
        if not isinstance(tensor, Snapshot):
            self.content += 1  # snapshots of before are their holders' own

    def rewrite(self, index: int, dense: torch.Tensor) -> None:
        """Store dense keys (0) or values (1) in place of what is there, as far as they differ.

        Args:
            dense: the last tokens of each row, as a snapshot of now has them.
        """
        first = self.columns - dense.shape[2]
        with torch.inference_mode(False), torch.no_grad():
            dense = dense.as_subclass(torch.Tensor)
            slots = self.state.dense_slots(self.group, first, self.columns)
            changed = (dense != self._gather(index, first)).any(3).any(1).cpu() & (slots > 0)
            if not bool(changed.any()):
                return
            self.state.make_own(self.group, slots, changed)
            store = self._store
            assert store is not None
            with store.lock:
                memory = store.ensure(self.state.pool.groups[self.group].blocks.num_blocks)
                held = (memory.key_slots, memory.value_slots)[index]
                if self.latent:
                    rank, _ = self.state.pool.latent or (0, 0)
                    held = held[..., :rank] if index == 0 else held[..., rank:]
                slots = self.state.dense_slots(self.group, first, self.columns)[changed].to(held.device)
                held[:, slots] = dense.transpose(0, 1)[:, changed.to(held.device)].to(held.dtype)

    def _gather(self, index: int, first: int) -> torch.Tensor:
        store = self._store
        assert store is not None
        step = self.state.step
        if step is not None and self.columns < step.end:
            # Other layers are ahead in this forward: the tables name blocks that this layer has not made yet.
            with store.lock:
                step.groups[self.group].prepare(store)
        memory = store.memory
        slots = self.state.dense_slots(self.group, first, self.columns)
        held = (memory.key_slots, memory.value_slots)[index]
        if self.latent:
            rank, _ = self.state.pool.latent or (0, 0)
            held = held[..., :rank] if index == 0 else held[..., rank:]
        dense = held.index_select(1, slots.flatten().to(held.device)).unflatten(1, slots.shape)
        return dense.transpose(0, 1).contiguous().to(store.signature[3 + index])

    def flush(self) -> None:
        """Write what is still kept aside."""
        self.commit(UNKNOWN_PADDING)

    # -- the batch is the cache's, not a layer's --------------------------------------------------------------------

    def _whole_cache_only(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "layers of a PagedCache share their block tables: call this method on the cache, not on one of its layers"
        )

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = reset = _whole_cache_only
    offload = prefetch = _whole_cache_only

    def activate_past_recording(self) -> None:
        self.state.recording = True

    def forget_step(self) -> None:
        self.steps += 1

    def follow(self, state: CacheState) -> "PagedLayer":
        """This layer over a forked state."""
        other = PagedLayer(state, self.index)
        other.columns, other._store = self.columns, self._store
        return other


_RECURRENT_STATE = (
    "conv_states", "recurrent_states", "is_conv_states_initialized", "is_recurrent_states_initialized",
    "has_previous_state", "conv_kernel_size", "device", "dtype",
)  # fmt: skip


class PagedHybridLayer(compat.LinearAttentionLayer, PagedLayer):
    """A layer with attention and a recurrent part side by side (Falcon-H1): keys and values in blocks, the state
    as the library keeps it.

    Args:
        state, index: as for `PagedLayer`.
        number_of_states: recurrent states of this layer.
    """

    is_compileable = False

    def __init__(self, state: CacheState, index: int, number_of_states: int):
        PagedLayer.__init__(self, state, index)
        recording = state.recording
        compat.LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        state.recording = recording  # the library's constructor clears it

    # Of what both parents have (crop, reset, reorder_cache, ...) the state's is taken; the cache does the rest.

    def get_max_length(self) -> int:
        return PagedLayer.get_max_length(self)

    def follow(self, state: CacheState) -> "PagedHybridLayer":
        other = PagedHybridLayer(state, self.index, self.number_of_states)
        other.columns, other._store = self.columns, self._store
        for name in _RECURRENT_STATE:
            setattr(other, name, copy.deepcopy(getattr(self, name)))
        return other


class PagedCache(compat.DynamicCache):
    """A key-value cache in blocks, for `model.generate(..., past_key_values=cache)` and for forward calls.

    Layers that hold no keys and values (recurrent, convolution, placeholders) are the library's own.

    Args:
        config: the model's config, `model.config`.
        paged_config: settings; None: those of `pool`, or the defaults.
        pool: the `KVPool` to take blocks from; None: a pool of its own.
        prefix_salt: the namespace in which a patched model's calls with this cache find and store prefixes; the call's
            own keyword counts before it. None: what the call says. What was stored under one salt and goes on under
            another is not stored.

    Attributes:
        reset_if_stale: `generate` of a patched model begins anew if the content is not what the model would compute now
            of the history it is given, instead of going on as with the library's caches (`Chat`).

    Raises:
        TypeError: if `config` is not a Transformers config, or `prefix_salt` not a string.
        ValueError: if `pool` and `paged_config` contradict each other, or the pool is of another model.
    """

    reset_if_stale = False

    def __init__(
        self,
        config: Any,
        paged_config: PagedConfig | None = None,
        pool: KVPool | None = None,
        prefix_salt: str | None = None,
    ):
        self.prefix_salt = salts.checked(prefix_salt)
        if not isinstance(config, compat.PreTrainedConfig):
            raise TypeError(
                f"PagedCache needs the model's config, PagedCache(model.config), got {type(config).__name__}. It "
                "cannot be filled from tensors; run a forward, or use DynamicCache for that."
            )
        if pool is None:
            pool = KVPool(config, paged_config)
        elif paged_config is not None and paged_config != pool.config:
            raise ValueError("paged_config differs from the pool's: leave it out, or give the cache a pool of its own")
        elif pool.layer_types != compat.reads_layer_types(config):
            raise ValueError("the pool was made for a model with other layers; make one with KVPool(model.config)")
        self._attach(CacheState(pool))

    def _attach(self, state: CacheState, layers: list | None = None) -> None:
        self.state = state
        self.handle = Handle(self)
        self.compiled_masks: dict[int | None, LazyMask] = {}  # of this forward, by window (see `compiling`)
        if layers is None:
            layers = []
            for index, (layer_type, arguments) in enumerate(state.pool.layer_types):
                if layer_type == compat.CROSS_ATTENTION:
                    layers.append(CrossLayer(state.pool))
                elif index not in state.pool.group_of:
                    layers.append(compat.library_layer(layer_type, arguments))
                elif states := compat.states_of(layer_type, arguments):
                    layers.append(PagedHybridLayer(state, index, states))
                else:
                    layers.append(PagedLayer(state, index))
        compat.Cache.__init__(self, layers=layers)

    @property
    def pool(self) -> KVPool:
        return self.state.pool

    @property
    def paged_layers(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @property
    def other_layers(self) -> list:
        """Layers that keep something of the library's own: recurrent states, also beside keys and values in blocks."""
        return [
            layer for layer in self.layers if not isinstance(layer, PagedLayer) or isinstance(layer, PagedHybridLayer)
        ]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new keys and values of layer `layer_idx`; see `PagedLayer.update`.

        In a forward that is compiled the graph takes them when it runs, with the layer's attention (see `traced`).
        """
        if torch.compiler.is_compiling() and isinstance(self.layers[layer_idx], PagedLayer):
            return traced_update(self, layer_idx, key_states, value_states)  # type: ignore[return-value]
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    # -- a step that is written elsewhere ---------------------------------------------------------------------------

    def begin_decode(self) -> StepPlan:
        """Plan a forward of one token for each row, whose keys and values somebody else writes in all layers.

        Every layer has a store and all columns of the cache. `KVPool.copy_ahead` is left to the caller. What follows is
        `end_decode`, or a forward, whose layers then join this step.

        Raises:
            OutOfBlocks: the cache is as it was.
        """
        layers, state = self.paged_layers, self.state
        for layer in layers:
            layer.flush()
        first, rows = layers[0], state.rows
        assert rows is not None
        heads, key_dim, value_dim, key_dtype, value_dtype, device = self.pool.stores[first.index].signature
        key, value = (
            torch.empty((), dtype=dtype, device=device).expand(rows, heads, 1, dim)
            for dtype, dim in ((key_dtype, key_dim), (value_dtype, value_dim))
        )
        trusted, state.trusted = state.trusted, True
        try:
            return state.begin_step(first.index, key, value, None)
        finally:
            state.trusted = trusted

    def end_decode(self, step: StepPlan) -> None:
        """Every layer has been written."""
        for layer in self.paged_layers:
            layer.columns = step.end
            layer._store = self.pool.stores[layer.index]
            layer.forget_step()
            self.state.wrote()

    # -- numbers ----------------------------------------------------------------------------------------------------

    def stats(self) -> PagedStats:
        """Numbers of this cache's rows; blocks and bytes are the pool's, which may hold other caches too."""
        stats = self.pool.stats([self.state.tables])
        stats.fallbacks = dict(self.state.fallbacks)
        return stats

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Usable after any step."""
        self.state.check()
        for layer in self.paged_layers:
            pending = 0 if layer._pending is None else layer._pending[0].shape[2]
            assert layer.columns - pending in (0, self.state.columns), (
                f"layer {layer.index} has {layer.columns} columns, the cache {self.state.columns}"
            )

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[tuple]:
        """Dense keys, values and window of each layer."""
        for layer in self.layers:
            window = getattr(layer, "sliding_window", None)
            yield layer.keys, layer.values, None if window is None else torch.tensor(window)

    # -- the batch --------------------------------------------------------------------------------------------------

    def _settle(self, changes: bool = True) -> None:
        """Write what is still kept aside; lazy tensors handed out before are no longer valid.

        Args:
            changes: what the cache holds is about to change, so snapshots are their holders' own from now on.
        """
        for layer in self.paged_layers:
            layer.flush()
            layer.forget_step()
            layer.content += changes

    def set_columns(self, columns: int) -> None:
        """Take what the tables hold for `columns` columns of the library; for whoever fills them without a forward."""
        self._settle()
        self.state.columns, self.state.step = columns, None
        for layer in self.paged_layers:
            layer._store = layer._store or self.pool.stores.get(layer.index)  # may be read before it is written to
            if layer._store is not None:  # the model may have fewer layers than its config says
                layer.columns = columns

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was ([batch], any int dtype, any device). Only tables change.

        Tables are the host's, so indices on a device are waited for: once a step of beam search.
        """
        self._settle()
        self.state.select(beam_idx.tolist())
        for layer in self.other_layers:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep the rows `indices`, in that order; rows may repeat. A boolean mask [batch] is taken as one."""
        if isinstance(indices, torch.Tensor):
            indices = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            chosen = indices.tolist()
        else:
            chosen = list(indices)
        self._settle()
        self.state.select(chosen)
        self._move_states(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, side by side. The copies share all blocks."""
        self._settle()
        rows = self.state.rows or 0
        self.state.repeat_interleave(repeats)
        self._move_states([row for row in range(rows) for _ in range(repeats)])

    @staticmethod
    def can_move_rows(layer: Any) -> bool:
        """Whether rows of one of the library's layers can be repeated and dropped."""
        return isinstance(layer, compat.LinearAttentionLayer) or hasattr(layer, "batch_select_indices")

    def _move_states(self, rows: list[int]) -> None:
        """Let the state of row i be what that of row `rows[i]` was, in the library's layers."""
        index = torch.tensor(rows, dtype=torch.int64)
        for layer in self.other_layers:
            if isinstance(layer, compat.LinearAttentionLayer):
                layer.reorder_cache(index)  # which takes any rows; it has no other method for them
            else:
                layer.batch_select_indices(index)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (0 or negative, as the library counts) from every row.

        Raises:
            ValueError: for a positive number.
            RuntimeError: if a sliding layer no longer holds what comes back into its window.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding hands over a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes 0 or a negative number, the tokens to remove; got {tokens_to_remove}. "
                "To keep n tokens, call cache.crop(n - cache.get_seq_length())."
            )
        self._settle()
        self.state.crop(-tokens_to_remove)
        for layer in self.paged_layers:
            layer.columns = min(layer.columns, self.state.columns)
        for layer in self.other_layers:
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Give back every block; the cache is empty and can be used again."""
        for layer in self.paged_layers:
            layer._pending = None
            layer.columns = 0
            layer.content += 1
            layer.forget_step()
        self.state.reset()
        for layer in self.other_layers:
            layer.reset()

    def activate_past_recording(self) -> None:
        self.state.recording = True
        for layer in self.other_layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def fork(self) -> "PagedCache":
        """The same content as a cache of its own that shares every block until one of the two writes."""
        self._settle(changes=False)
        state = self.state.fork()
        other = object.__new__(type(self))
        other.prefix_salt, other.reset_if_stale = self.prefix_salt, self.reset_if_stale
        layers = [
            layer.follow(state) if isinstance(layer, PagedLayer) else copy.deepcopy(layer) for layer in self.layers
        ]
        other._attach(state, layers)
        return other

    def __deepcopy__(self, memo: dict) -> "PagedCache":
        other = self.fork()
        memo[id(self)] = other
        return other

    def __copy__(self) -> "PagedCache":
        return self.fork()

    # -- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Write the content (tokens, keys, values, pads, windows) to a safetensors file, each block once.

        The file also says which model the content is of: class, layers, dtype, a fingerprint of the weights and
        adapters as they are now. It is written beside `path` and moved there whole.

        Args:
            path: the file; one that exists is replaced.
            model: the model that filled the cache, or a PEFT model around it; None: the one that was patched.

        Raises:
            ValueError: if the cache is empty, has layers that are not paged, or its model is not known.
            TypeError: if `model` is no Transformers model with generate().
            OSError: if the file cannot be written; what was there before is still there.
        """
        serialize.save(self, path, model)

    @classmethod
    def load(
        cls: type[CacheT],
        path: str | os.PathLike[str],
        model: Any,
        paged_config: PagedConfig | None = None,
        pool: KVPool | None = None,
    ) -> CacheT:
        """A new cache with the content of a file that `save` has written.

        `generate` goes on from it as from the cache that was saved. Rows share blocks as they did. After an error the
        pool is as before; only the number of blocks that a `memory_budget` comes to may have been worked out.

        Args:
            path: the file.
            model: the model the file was saved from, patched or not, or a PEFT model around it.
            paged_config: settings; None: those of the pool, or of a new pool those the file was saved under.
            pool: the pool to take blocks from; None: that of a patched model, else a pool of its own.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged or another one, or of another model, other weights, dtype, block size or
                stored dtype: it names what differs. Also if `pool` and `paged_config` contradict each other.
            TypeError: if `model` is no Transformers model with generate().
            OutOfBlocks: if the pool has too few blocks.
        """
        return serialize.load(cls, path, model, paged_config, pool)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a PagedCache cannot be pickled: its blocks belong to a pool. Use copy.deepcopy(cache) to fork it, "
            "cache.save(path) to store it, or save the dense tensors of [(layer.keys, layer.values) for layer in "
            "cache.layers]."
        )
