"""Decode steps as CUDA graphs: `PagedConfig.cuda_graphs`.

A decode step launches a few kernels a layer, and launching them one by one takes longer than they run. A graph launches
all of them at once, on the same memory as when it was captured. So whatever changes from step to step lies in tensors
that stay where they are (`StaticStep`), sized by buckets: rows, and the width of each layer group's block table. Rows
that a bucket has too many are finished rows: they write nowhere and attend to nothing.

    plan the step (blocks, copy-on-write)  ─►  refill the static tensors  ─►  replay  ─►  logits, a copy
       CacheState.begin_step                     one transfer, and the             [batch, 1, vocabulary]
                                                 table entries that changed

What is captured is the model's own forward with a cache that stands in for the real one (`_StaticCache`): it has no
content and no length, writes and attends by the static tensors alone. A graph is good as long as the stores lie where
they lay; stores grow ahead, so that this is seldom. What cannot be captured runs as it did, counted in `fallbacks`.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from . import adapters, compat, prefill
from .backends import AttentionCall
from .backends.triton import WIDEST_HEAD, StaticRows, StaticSize, power_of_two
from .cache import PagedCache
from .generation.soundness import hooks_before
from .lazy import LazyKV
from .plan import StepPlan
from .pool import KVPool
from .state import CacheState
from .store import Memory
from .triton_kernels.shared import members_per_tile

# Tokens that the narrowest block table holds; wider ones double.
LEAST_TOKENS = 256
# Blocks that a store grows by at least, beyond what is needed now.
LEAST_ROOM = 64

_KEYWORDS = prefill.KNOWN_KEYWORDS | {"input_ids"}
# The library's hooks on models that were asked for hidden states once; they do nothing where none are asked for.
_IDLE_HOOKS = "transformers.utils.output_capturing"


class Device:
    """All that is asked of CUDA, in one place. One for a patched model."""

    def __init__(self) -> None:
        self._memory: Any = None  # of all graphs: only one runs at a time
        self._last: torch.cuda.Stream | None = None

    def why_not(self, device: torch.device) -> str | None:
        """Why nothing can be captured on this device; None: it can."""
        return None if device.type == "cuda" else f"they need a CUDA device, and the model is on {device.type}"

    def forget(self) -> None:
        """All graphs are gone."""
        self._memory = None

    def order(self) -> None:
        """Let what this thread launches next come after what the last thread that replayed a graph has launched."""
        stream = torch.cuda.current_stream()
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture what a function launches.

        It runs twice before, for what is made once: compiled kernels, workspaces.

        Returns:
            Its result, whose tensors have content after a replay, and what replays.
        """
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        current.wait_stream(side)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # The outer stream is for captures that fail: PyTorch leaves theirs the current one.
        with torch.cuda.stream(current), torch.cuda.graph(graph, self._memory, capture_error_mode="thread_local"):
            result = function()
        return result, graph.replay


class StaticStep:
    """The inputs of a decode step in tensors that stay where they are.

    Args:
        sizes: of each layer group.

    Attributes:
        ids, positions: [rows, 1] int64; 0 in rows beyond the batch.
        groups: the rows as each layer group sees them.
    """

    def __init__(self, sizes: Sequence[StaticSize], pool: KVPool, device: torch.device):
        with torch.inference_mode(False):
            self.ids, self.positions = torch.zeros(2, sizes[0].rows, 1, dtype=torch.int64, device=device)
            windows = [group.window for group in pool.groups]
            counts = [StaticRows.count(size, window) for size, window in zip(sizes, windows, strict=True)]
            self._numbers = torch.zeros(sum(counts), dtype=torch.int32, device=device)
            self.groups = [
                StaticRows(numbers, size, window, pool.config.block_size)
                for numbers, size, window in zip(self._numbers.split(counts), sizes, windows, strict=True)
            ]

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, step: StepPlan) -> None:
        """Take a step's content: one transfer, and one per group whose tables have changed.

        Args:
            ids: [batch, 1] int.
            positions: [batch, 1] or [1, 1] int.
        """
        with torch.inference_mode(False):
            batch = len(ids)
            self.ids[:batch].copy_(ids)
            self.positions[:batch].copy_(positions)
            self.ids[batch:].zero_()
            self.positions[batch:].zero_()
            numbers = [
                number for rows, plan in zip(self.groups, step.groups, strict=True) for number in rows.update(plan)
            ]
            self._numbers.copy_(torch.tensor(numbers, dtype=torch.int32), non_blocking=True)


class _StaticLayer(compat.CacheLayerMixin):
    """One layer of a forward that is captured. Its length is a fiction: that of the longest row there may be.

    Args:
        rows: the rows as its group sees them.
        memory: of its store.
        signature: of its store, see `LayerStore.signature_of`.
        window: of its group.
        latent: its store holds latents (`PagedLayer.latent`).
    """

    captured = True
    chunk = None
    steps = 0

    def __init__(self, rows: StaticRows, memory: Memory, signature: tuple, window: int | None, latent: bool):
        super().__init__()
        self.rows, self.memory, self.signature, self.latent = rows, memory, signature, latent
        self.is_sliding = window is not None
        self.sliding_window = window
        self.columns = rows.longest

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = 0 if self.sliding_window is None else max(self.columns - self.sliding_window + 1, 0)
        return self.columns - offset + query_length, offset

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write the new tokens, [rows, num_kv_heads, 1, dim] each. Returns lazy tensors, as `PagedLayer.update`."""
        dims = key_states.shape[3], value_states.shape[3]
        if self.latent:
            key_states = value_states = torch.cat([key_states, value_states], dim=3)
        found = (key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype, value_states.dtype)
        if key_states.shape[2] != 1 or found != self.signature[:5]:
            raise NotImplementedError(f"keys and values of {found}, {key_states.shape[2]} tokens at once")
        self.rows.write(key_states, value_states, self.memory)
        visible, _ = self.get_mask_sizes(1)
        shape = (*key_states.shape[:2], visible)
        return tuple(LazyKV.make(self, which, self.steps, (*shape, dim), key_states) for which, dim in enumerate(dims))

    def attend(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """[rows, num_heads, 1, key_dim] -> [rows, 1, num_heads, value_dim]"""
        return self.rows.attend(query, self.memory, call)

    def dense(self, index: int, step: int, reason: str) -> torch.Tensor:
        raise NotImplementedError(f"keys and values are read by {reason or 'dense attention'}")


class _StaticCache(compat.DynamicCache):
    """The cache that a captured forward is given."""

    def __init__(self, layers: list[_StaticLayer]):
        compat.Cache.__init__(self, layers=layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[layer_idx].update(key_states, value_states)


class Session:
    """One generate() call, as long as it runs.

    Attributes:
        state: of its cache.
        reason: why its steps cannot be captured; None: they can, or nobody has looked yet.
        looked: whether somebody has.
    """

    def __init__(self, state: CacheState):
        self.state = weakref.ref(state)
        self.reason: str | None = None
        self.looked = False

    def refuse(self, reason: str) -> None:
        """Capture nothing in this call."""
        self.reason, self.looked = reason, True


class Graphs:
    """The graphs of a patched model. Safe to use from several threads, one after the other.

    Args:
        pool: the model's; steps of caches of other pools are not captured.
    """

    def __init__(self, pool: KVPool):
        self.pool = pool
        self.device = Device()
        self._lock = threading.RLock()
        self._sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        # Size of each group -> inputs, kind of output, logits, what replays.
        self._graphs: dict[tuple[StaticSize, ...], tuple[StaticStep, type, torch.Tensor, Callable[[], None]]] = {}
        # What the graphs were captured for; they go when it has changed.
        self._memories: list[weakref.ref[Memory]] = []
        self._model: Any = None
        self._refused: str | None = None

    def open(self, cache: PagedCache) -> Session:
        """Begin a generate() call: the decode steps of this cache are replayed as long as the session is held."""
        session = Session(cache.state)
        self._sessions[id(cache.state)] = session
        return session

    def step(self, model: Any, forward: Callable[..., Any], keywords: dict[str, Any]) -> Any:
        """The model's output for a decode step of generate(); None, and nothing done that a forward does not go on
        from, if it is not one or cannot be replayed.

        Args:
            forward: the model's own.
            keywords: what it is called with.

        Raises:
            OutOfBlocks: the cache is as it was.
        """
        cache = keywords.get(compat.CACHE_ARGUMENT)
        if isinstance(cache, compat.EncoderDecoderCache):
            cache = cache.self_attention_cache
        if not isinstance(cache, PagedCache):
            return None
        state = cache.state
        session = self._sessions.get(id(state))
        if session is None or session.state() is not state or state.rows is None or state.packed is not None:
            return None
        ids = keywords.get("decoder_input_ids" if model.config.is_encoder_decoder else "input_ids")
        if ids is None or ids.ndim != 2 or ids.shape[1] != 1:
            return None
        with self._lock:
            if not session.looked:
                session.reason, session.looked = self._why_not(model), True
            reason = session.reason or self._refused or self._why_not_now(model, cache, keywords)
            output = None
            if reason is None:
                output = self._replay(model, forward, cache, keywords)
                reason = self._refused
            if output is None:
                reason = f"a decode step is not replayed as a CUDA graph: {reason}"
                self.pool.count_fallback(reason, state.fallbacks)
            return output

    # -- what can be captured ---------------------------------------------------------------------------------------

    def _why_not(self, model: Any) -> str | None:
        """Why the decode steps of this call cannot be captured; None: they can. Looked at once a call.

        Graphs of other weights or adapters are let go.
        """
        if model.config.is_encoder_decoder:
            return "encoder-decoder models are not captured"
        kinds = self.pool.layer_types
        if any(layer not in self.pool.group_of or compat.states_of(*kind) for layer, kind in enumerate(kinds)):
            return "some layers keep a state of their own"
        if compat.rope_limit(model.config) is not None:
            return "the rotary embedding depends on the length"
        if any(group.chunked for group in self.pool.groups):
            return "chunked attention is not captured"
        if not prefill.packs(model):
            return f"{model.config.model_type} is not known to take its positions from position_ids alone"
        if model.training:
            return "the model is in training mode"
        tensors = [*model.parameters(), *model.buffers()]
        devices = {tensor.device for tensor in tensors}
        if torch.device("meta") in devices:
            return "weights are offloaded"
        if len(devices) > 1:
            return "the model lies on several devices"
        if torch.nn.modules.module._has_any_global_hook():
            return "there are hooks on all modules"
        for name, module in model.named_modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if hasattr(module, "_hf_hook") or any(hook.__module__ != _IDLE_HOOKS for hook in hooks):
                return f"there are hooks on {type(module).__name__}"
            own = module.__dict__.get("forward")
            if own is not None and module is not model and not adapters.bound(module):
                return f"the forward of {type(module).__name__} is wrapped"
            compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
            if compiled or type(module).__module__.split(".")[0] == "bitsandbytes":
                return f"{name or 'the model'} is compiled, or a {type(module).__name__}"
        (device,) = devices
        reason = self.device.why_not(device)
        if reason is not None:
            return reason
        if torch.is_autocast_enabled(device.type):
            return "autocast is on"
        those = (tuple(tensor.data_ptr() for tensor in tensors), _adapters_of(model))
        if those != self._model:
            self._drop()
            self._model, self._refused = those, None
        return None

    def _why_not_now(self, model: Any, cache: PagedCache, keywords: dict[str, Any]) -> str | None:
        """Why this step cannot be captured; None: it can."""
        state = cache.state
        if cache.pool is not self.pool:
            return "the cache has a pool of its own"
        if any(hooks_before(model)):
            return "there are hooks on the model"
        for name in ("output_hidden_states", "output_attentions"):
            if keywords.get(name):
                return f"{name} is asked for"
        if keywords.get("return_dict") is False or keywords.get("use_cache") is False:
            return "return_dict or use_cache is off"
        unknown = sorted(name for name, entry in keywords.items() if name not in _KEYWORDS and _says_something(entry))
        if unknown:
            return f"the model is given {', '.join(unknown)}"
        ids: torch.Tensor = keywords["input_ids"]
        positions, mask = keywords.get("position_ids"), keywords.get("attention_mask")
        if positions is None or positions.ndim != 2 or positions.shape[0] not in (1, ids.shape[0]):
            return "there is not one position per row"
        if torch.is_grad_enabled():
            return "gradients are on"
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
            return "a custom attention mask"
        if state.rows != ids.shape[0] or any(layer.columns != state.columns for layer in cache.paged_layers):
            return "the cache is out of step"
        if any(layer not in self.pool.stores for layer in self.pool.group_of):
            return "some layers have no keys and values yet"
        if state.inner_pads and any(window is not None for window in state.windows):
            return "pads behind tokens in a sliding window"
        if state.blind:
            return "the cache was filled without its mask being known"
        if mask is not None and state.hidden_ahead(mask, 1):
            return "the attention mask hides tokens"
        return None

    # -- a step -----------------------------------------------------------------------------------------------------

    def _replay(
        self, model: Any, forward: Callable[..., Any], cache: PagedCache, keywords: dict[str, Any]
    ) -> Any | None:
        """One step; None, with `_refused` set and the step begun, if capturing fails."""
        pool, state = self.pool, cache.state
        ids, positions = keywords["input_ids"], keywords["position_ids"]
        step = cache.begin_decode()
        least = -(-LEAST_TOKENS // pool.config.block_size)
        key = tuple(
            StaticSize.of(plan, self._members(model, group, len(ids)), least) for group, plan in enumerate(step.groups)
        )
        try:
            with ExitStack() as locks, torch.cuda.device_of(ids), torch.inference_mode(False), torch.no_grad():
                self.device.order()
                self._grow(step, state)
                pool.copy_ahead(step)
                layers = [(pool.stores[layer], step.groups[pool.group_of[layer]]) for layer in sorted(pool.group_of)]
                for store, _ in layers:  # in the order of layers; no other thread moves a store while we launch
                    locks.enter_context(store.lock)
                memories = [plan.prepare(store) for store, plan in layers]
                if [ref() for ref in self._memories] != memories:
                    self._drop()
                    self._memories = [weakref.ref(memory) for memory in memories]
                if key in self._graphs:
                    static, kind, logits, replay = self._graphs[key]
                    static.fill(ids, positions, step)
                else:
                    static = StaticStep(key, pool, ids.device)
                    static.fill(ids, positions, step)
                    output, replay = self._capture(model, forward, static, memories)
                    kind, logits = type(output), output.logits
                    self._graphs[key] = static, kind, logits, replay
                replay()
                logits = logits[: len(ids)].clone()
        except Exception as error:
            if key in self._graphs:
                raise
            said = [*str(error).splitlines(), ""][0][:200]
            self._refused = f"capturing it failed ({type(error).__name__}: {said})"
            self._drop()
            return None
        cache.end_decode(step)
        pool.graph_steps += 1
        return kind(logits=logits, **{compat.CACHE_ARGUMENT: cache})

    def _capture(
        self, model: Any, forward: Callable[..., Any], static: StaticStep, memories: list[Memory]
    ) -> tuple[Any, Callable[[], None]]:
        pool = self.pool
        layers = []
        for layer, memory in zip(sorted(pool.group_of), memories, strict=True):
            group, store = pool.group_of[layer], pool.stores[layer]
            rows, window = static.groups[group], pool.groups[group].window
            layers.append(_StaticLayer(rows, memory, store.signature, window, store.once))
        keywords = {compat.CACHE_ARGUMENT: _StaticCache(layers), "use_cache": True, "return_dict": True}

        def run() -> Any:
            for rows in static.groups:
                rows.locate()
            output = forward(model, input_ids=static.ids, position_ids=static.positions, **keywords)
            given = {name for name, entry in output.items() if entry is not None} - {"logits", compat.CACHE_ARGUMENT}
            if given or output.logits.shape[:2] != static.ids.shape:
                raise NotImplementedError(f"the model gives {sorted(given) or tuple(output.logits.shape)}")
            return output

        captured = self.device.capture(run)
        pool.graph_captures += 1
        return captured

    def _members(self, model: Any, group: int, batch: int) -> int:
        """Rows whose queries a tile of a shared prefix holds; 0 where that is not known."""
        heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", None)
        memory = self.pool.stores[self.pool.groups[group].layers[0]].memory
        if not isinstance(heads, int) or heads % memory.kv_heads or max(memory.key_dim, memory.value_dim) > WIDEST_HEAD:
            return 0
        query = memory.keys[0, 0, 0].expand(power_of_two(batch), heads, memory.key_dim)
        return members_per_tile(query, memory.keys, memory.values)

    def _grow(self, step: StepPlan, state: CacheState) -> None:
        """Have memory for this step in all stores, and for more than that: graphs are good for one place only.

        That is half as many blocks again, but no more than this call may still fill.
        """
        pool = self.pool
        for group, plan in zip(pool.groups, step.groups, strict=True):
            room = max(plan.num_blocks // 2, LEAST_ROOM)
            if state.expected_columns is not None:
                left = max(state.expected_columns - state.columns, 0)
                room = min(room, len(plan.past) * (-(-left // pool.config.block_size) + 1))
            if group.blocks.max_blocks is not None:
                room = min(room, group.blocks.max_blocks - plan.num_blocks)
            for layer in group.layers:
                store = pool.stores[layer]
                if not self._graphs or store.memory.num_blocks < plan.num_blocks:
                    with store.lock:
                        store.ensure(plan.num_blocks + room)

    def _drop(self) -> None:
        self._graphs.clear()
        self._memories = []
        self.device.forget()


def _adapters_of(model: torch.nn.Module) -> Hashable:
    """The adapters that are active or merged, which a graph has been captured with."""
    adapters = []
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters"):
            scaling = getattr(module, "scaling", None)
            strengths = tuple(sorted(scaling.items())) if isinstance(scaling, dict) else ()
            active, merged = tuple(module.active_adapters), tuple(module.merged_adapters)
            adapters.append((name, active, merged, bool(module.disable_adapters), strengths))
    return tuple(adapters)


def _says_something(entry: Any) -> bool:
    return entry is not None and not (isinstance(entry, dict) and not entry)
