"""Which attention implementation a config names, and which it named before `patch`.

Several models may share a config, each patched and unpatched in its turn, so a config that names `hf_paged` is held by
all of them: it names again what it named before when the last one lets it go.
"""

import threading
import weakref
from typing import Any

NAME = "hf_paged"


class _Held:
    """A config that names `hf_paged`.

    Attributes:
        config: the config.
        before: what it would name otherwise; None: nothing.
        holders: how many patched models have it.
        borrowers: who needs what it named before.
    """

    def __init__(self, config: weakref.ref, before: str | None):
        self.config = config
        self.before = before
        self.holders = 0
        self.borrowers: weakref.WeakSet[Any] = weakref.WeakSet()


# By identity: configs are not hashable.
_held: dict[int, _Held] = {}
_lock = threading.RLock()  # a config's finalizer may run within


def take(config: Any, before: str | None) -> None:
    """Let a config name `hf_paged`, for one patched model more.

    Args:
        before: what it named, if no other patched model has it already.
    """
    identity = id(config)
    with _lock:
        held = _find(config)
        if held is None:
            held = _held[identity] = _Held(weakref.ref(config, lambda _: _held.pop(identity, None)), before)
        held.holders += 1
        config._attn_implementation_internal = NAME


def retake(config: Any) -> bool:
    """Let a config name `hf_paged` again. Whatever it was set to since is what it named before.

    Returns:
        False, and nothing done, while it is lent.
    """
    with _lock:
        held = _find(config)
        if held is None or config._attn_implementation_internal == NAME:
            return True
        if not held.borrowers:
            held.before = config._attn_implementation_internal
            config._attn_implementation_internal = NAME
        return not held.borrowers


def lend(config: Any, borrower: Any = None) -> None:
    """Let a config name what it named before, until it is taken again.

    Args:
        borrower: an object that needs it so, until it is gone or has given it up (`take_from`).
    """
    with _lock:
        held = _find(config)
        if held is not None:
            if borrower is not None:
                held.borrowers.add(borrower)
            if config._attn_implementation_internal == NAME:
                config._attn_implementation_internal = held.before


def take_from(config: Any, borrower: Any) -> None:
    """A borrower has given a config up."""
    with _lock:
        held = _find(config)
        if held is not None:
            held.borrowers.discard(borrower)


def give_back(configs: list[Any]) -> None:
    """One patched model lets its configs go."""
    with _lock:
        for config in configs:
            held = _find(config)
            if held is None:
                continue
            held.holders -= 1
            if not held.holders:
                lend(config)
                del _held[id(config)]


def before(config: Any) -> str | None:
    """The attention implementation that a config named before `patch`; None: none, or not known."""
    held = _find(config)
    return held.before if held is not None else None


def _find(config: Any) -> _Held | None:
    held = _held.get(id(config))
    return held if held is not None and held.config() is config else None
