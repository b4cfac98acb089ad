"""A GPU that is not there: tensors that say they are on "cuda" and are computed on the CPU.

Every operation for which the host would have to wait for a real one is counted: a read of a number, a copy to the host
or from it that is not asked for without waiting, a result whose size depends on the content.
"""

import math
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch
from models import vouch_for
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hf_paged import checksum
from hf_paged.generation import identity

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
_READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
_SIZED_BY_CONTENT = (
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.repeat_interleave.Tensor,
)  # fmt: skip


class Faraway(torch.Tensor):
    """A tensor on the GPU that is not there; `inner` is where its numbers really are."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda, is_cpu, is_meta = DEVICE, True, False, False  # PyTorch itself takes it to be on "meta"

    def tolist(self):
        return self.cpu().tolist()

    def __setitem__(self, index, value):
        if isinstance(value, torch.Tensor):
            super().__setitem__(index, value)
        else:
            self[index].fill_(value)

    @staticmethod
    def of(inner):
        out = torch.Tensor._make_wrapper_subclass(
            Faraway, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="meta"
        )
        out.inner = inner
        return out

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of `Machine`")

    def __repr__(self):
        return f"Faraway({self.inner!r})"


def _is_gpu(device):
    return device is not None and torch.device(device).type in ("cuda", "meta")


def _where(condition, *choices, where=torch.where):
    """`torch.where`, which makes tensors of numbers before anybody can tell where they belong."""
    dtypes = [each.dtype for each in choices if isinstance(each, torch.Tensor)]

    def there(each):
        if isinstance(each, torch.Tensor) or not isinstance(condition, Faraway):
            return each
        return torch.full((), each, dtype=dtypes[0] if dtypes else None, device=DEVICE)

    return where(condition, *map(there, choices))


class Machine(TorchDispatchMode):
    """While active, what is made on "cuda" is a `Faraway`, and waits are noted.

    Attributes:
        waits: `(the package that asked, step, what, where)` of each.
        step: which step is on; raised by the test.
    """

    def __init__(self):
        super().__init__()
        self.waits = []
        self.step = 0

    def _wait(self, what):
        frame, package, where = sys._getframe(2), "?", "?"
        while frame is not None:
            name = frame.f_globals.get("__name__", "").split(".")[0]
            if name in ("hf_paged", "transformers"):
                package, where = name, f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
                break
            frame = frame.f_back
        self.waits.append((package, self.step, what, where))

    def tensor(self, data, *, device=None, make=torch.tensor, **kwargs):
        """`torch.tensor`, which does not get here for a device that is not there."""
        if not _is_gpu(device):
            return make(data, device=device, **kwargs)
        self._wait("blocking copy to the device")
        return Faraway.of(make(data, **kwargs))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        lazy = [kind for kind in types if kind not in (torch.Tensor, Faraway, torch.nn.Parameter)]
        if lazy:
            return lazy[0].__torch_dispatch__(func, types, args, kwargs)
        flat = [*args, *kwargs.values()]
        flat += [entry for each in flat if isinstance(each, (list, tuple)) for entry in each]
        far = [each for each in flat if isinstance(each, Faraway)]
        near = [each for each in flat if type(each) is torch.Tensor and each.ndim]
        target = kwargs.get("device")
        if func is aten._to_copy.default:
            source = args[0]
            goes = _is_gpu(target) if target is not None else isinstance(source, Faraway)
            if goes != isinstance(source, Faraway) and not kwargs.get("non_blocking"):
                self._wait("copy to the host" if isinstance(source, Faraway) else "blocking copy to the device")
        else:
            goes = _is_gpu(target) or bool(far)
            if func is aten.copy_.default:
                goes = isinstance(args[0], Faraway)
                mixed = goes != isinstance(args[1], Faraway)
                if mixed and args[1].ndim + args[0].ndim and not (len(args) > 2 and args[2]):
                    self._wait("blocking copy")
            elif far and (func in _READS or func in _SIZED_BY_CONTENT):
                self._wait(str(func))
            elif far and func in (aten.index.Tensor, aten.index_put_.default):
                chosen = [each for each in args[1] if each is not None]
                if any(each.dtype in (torch.bool, torch.uint8) for each in chosen):
                    self._wait("boolean index")
                elif any(not isinstance(each, Faraway) for each in chosen):
                    self._wait("index from the host")
            elif far and near:
                raise AssertionError(f"{func} of tensors on two devices")
        if func is aten._fused_sdp_choice.default:
            return 0  # by plain operators
        if "device" in kwargs and _is_gpu(target):
            kwargs["device"] = torch.device("cpu")
        inner_args, inner_kwargs = tree_map(
            lambda each: each.inner if isinstance(each, Faraway) else each, (args, kwargs)
        )
        inner_kwargs.pop("pin_memory", None)
        out = func(*inner_args, **inner_kwargs)
        if not goes:
            return out
        known = {id(each.inner): each for each in far}  # what was changed in place

        def outward(each):
            if not isinstance(each, torch.Tensor):
                return each
            return known[id(each)] if id(each) in known else Faraway.of(each)

        return tree_map(outward, out)


class Event:
    """What has been recorded is there one query later."""

    def __init__(self):
        self.asked = 0

    def query(self):
        self.asked += 1
        return self.asked > 1


@contextmanager
def machine(model):
    """The model's weights on the GPU that is not there. Gives the `Machine`."""
    here = Machine()
    vouch_for(model, Machine, Machine.tensor, _where)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "_lazy_init", lambda: None))
        stack.enter_context(mock.patch.object(torch.cuda, "device_of", lambda _: nullcontext()))
        stream = mock.Mock(record_event=Event)
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", lambda *_: stream))
        stack.enter_context(mock.patch.object(torch, "tensor", here.tensor))
        stack.enter_context(mock.patch.object(torch, "where", _where))
        stack.enter_context(mock.patch.object(identity, "_PLAIN", (*identity._PLAIN, Faraway)))
        stack.enter_context(mock.patch.object(identity, "_BOOKKEEPING", identity._BOOKKEEPING | {"inner"}))
        stack.enter_context(mock.patch.object(checksum, "begin", partial(_begin_checksum, begin=checksum.begin)))
        stack.enter_context(mock.patch.object(checksum, "num_bytes", lambda tensors: 0))
        stack.enter_context(torch.no_grad())
        stack.enter_context(here)
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and not isinstance(tensor, Faraway):
                        held[name] = Faraway.of(tensor.detach())
        yield here


def _begin_checksum(tensors, begin):
    """The checksum of weights, there: its numbers are on the device, and not waited for."""
    layout, *numbers = begin([tensor.inner if isinstance(tensor, Faraway) else tensor for tensor in tensors]).host
    there = torch.Tensor([number % 2**20 for number in (*numbers, 0)][:2]).long()
    return checksum.Pending((layout,), [Faraway.of(there)])


def far(inputs):
    """Inputs of `generate()`, there."""
    return {name: Faraway.of(tensor) for name, tensor in inputs.items()}


# -- stand-ins for the launchers of the Triton backend: the same answers, by PyTorch on what the tensors hold ----------


def stand_ins(backend, patch):
    """Let module `backend` (`hf_paged.backends.triton`) launch nothing."""
    for name in ("write_tokens", "copy_blocks", "update_table"):
        patch.setattr(backend, name, globals()[name])
    patch.setattr(backend, "store_sets", lambda stores: [backend.StoreSet(tuple(stores), torch.zeros_like(stores[0]))])
    patch.setattr(backend, "decode_attention", decode_attention)
    patch.setattr(backend, "shared_attention", lambda *args, **options: decode_attention(*args[:5], **options))
    patch.setattr(backend, "prefill_attention", prefill_attention)
    patch.setattr(backend, "members_per_tile", lambda *_: 4)


def write_tokens(key, value, keys, values, slots):
    kept = slots.inner >= 0
    for new, store in ((key, keys), (value, values)):
        store.inner.flatten(1, 2)[:, slots.inner[kept]] = new.inner[kept].transpose(0, 1)


def copy_blocks(sets, sources, targets):
    for kind in sets:
        for store in kind.stores:
            store.inner[:, targets.inner] = store.inner[:, sources.inner]


def update_table(table, entries):
    row, column, block = entries.inner.long()
    table.inner[row, column] = block.int()


def decode_attention(query, keys, values, table, lengths, **options):
    cu_seqlens = Faraway.of(torch.arange(len(query) + 1))
    return prefill_attention(query, keys, values, table, cu_seqlens, lengths, **options)


def prefill_attention(
    query, keys, values, table, cu_seqlens, lengths, *, scale, begins=None, starts=None, band=None, query_ends=None,
    softcap=None, sinks=None, **_,
):  # fmt: skip
    assert query_ends is None and softcap is None and sinks is None
    bounds, ends = cu_seqlens.inner.tolist(), lengths.inner.tolist()
    begins = [0] * len(ends) if begins is None else begins.inner.tolist()
    starts = [0] * len(ends) if starts is None else starts.inner.tolist()
    out = torch.zeros(*query.shape[:2], values.shape[3])
    size, group = keys.shape[2], query.shape[1] // keys.shape[0]
    for row, end in enumerate(ends):
        first, last = bounds[row], bounds[row + 1]
        places = torch.arange(max(begins[row], starts[row]), end)
        if not len(places) or first == last:
            continue
        offsets = places - starts[row]
        slots = table.inner[row].long()[offsets // size] * size + offsets % size
        own_keys, own_values = (
            store.inner.flatten(1, 2)[:, slots].repeat_interleave(group, 0) for store in (keys, values)
        )
        seen = torch.arange(end - (last - first), end)[:, None]
        hidden = places > seen
        if band is not None:
            hidden |= places <= seen - band
        scores = query.inner[first:last].transpose(0, 1) @ own_keys.transpose(1, 2) * scale
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num()
        out[first:last] = (weights @ own_values).transpose(0, 1)
    return Faraway.of(out)
