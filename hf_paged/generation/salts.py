"""Namespaces of prefixes: tenants of one model that must not find each other's prompts.

A salt belongs to a call (`generate(prefix_salt=...)`), to a cache or a `Chat`, or to what one thread does within
`with prefix_salt(...)`; the first of these that is there counts. None says nothing, `""` says "shared" on purpose.
Until the process has used a salt, a call without one is in the shared namespace. From then on it is in none: a call
whose salt was forgotten, or was set in another thread, must not find what others have asked.
"""

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_salt: contextvars.ContextVar[str | None] = contextvars.ContextVar("hf_paged_prefix_salt", default=None)
_used = threading.Event()

SHARED = ""


@contextmanager
def prefix_salt(salt: str) -> Iterator[None]:
    """Within the `with` block prefixes are found only if they were stored under the same salt.

    Keeps tenants of one model from finding out, by the time a call takes, what others have asked. It holds for the
    calls of this thread: a thread that is started inside of the block is not in it, so a server passes
    `generate(..., prefix_salt=...)` instead. From the first salt on, calls without any neither find nor store prefixes.

    Args:
        salt: the namespace; "": the shared one.

    Raises:
        TypeError: if it is not a string.
    """
    token = _salt.set(checked(salt))
    try:
        yield
    finally:
        _salt.reset(token)


def checked(salt: str | None, where: str = "prefix_salt") -> str | None:
    """A salt that a caller has given; from the first one on, calls without a salt are in no namespace.

    Raises:
        TypeError: if it is neither a string nor None.
    """
    if salt is not None and not isinstance(salt, str):
        raise TypeError(f"{where} must be a string, or None for none, got {type(salt).__name__}")
    if salt:
        _used.set()
    return salt


def in_force(*given: str | None) -> str | None:
    """The namespace of a call; None: it has none, and neither finds nor stores prefixes.

    Args:
        given: salts of the call and of its cache, the first that is not None counts before that of the thread.
    """
    for salt in (*given, _salt.get()):
        if salt is not None:
            return salt
    return None if _used.is_set() else SHARED
