"""Functions bound to one object that they do not keep alive."""

import copy
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any


class Bound:
    """A method of one object, for that object's own `__dict__`.

    A `types.MethodType` there would be a reference cycle: the object and all its memory would wait for the garbage
    collector. This one holds its object weakly. In all else it is like one: it has `__func__` and `__self__`, a copied
    object gets one of its own, and it is pickled with its object.

    Args:
        function: called with the object and the arguments. One of a module, so that it can be pickled.
        owner: the object.
        name: the attribute that it is bound to. The signature is that of the class's own method, if there is one.
    """

    def __init__(self, function: Callable[..., Any], owner: Any, name: str):
        self.__func__ = function
        self._owner = weakref.ref(owner)
        self._name = name

    @property
    def __self__(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise ReferenceError(f"the model that {self._name}() belongs to is gone")
        return owner

    @property
    def __signature__(self) -> inspect.Signature:
        owner = self.__self__
        own = inspect.getattr_static(type(owner), self._name, None)
        return inspect.signature(MethodType(self.__func__, owner) if own is None else own.__get__(owner, type(owner)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("__func__", "_owner", "_name"):  # while it is being made
            raise AttributeError(name)
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<{self._name} of a {type(self._owner()).__name__}, bound by hf_paged>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bound):
            return NotImplemented
        return self.__func__ is other.__func__ and self._owner == other._owner

    def __hash__(self) -> int:
        return hash((self.__func__, id(self._owner())))

    def __deepcopy__(self, memo: dict) -> Any:
        owner = self.__self__
        copied = memo.get(id(owner))
        if copied is None:  # asked for alone: as with any method, the object is copied for it
            return MethodType(self.__func__, copy.deepcopy(owner, memo))
        return Bound(self.__func__, copied, self._name)

    def __copy__(self) -> "Bound":
        return Bound(self.__func__, self.__self__, self._name)

    def __reduce__(self) -> tuple:
        return Bound, (self.__func__, self.__self__, self._name)


def bind(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let `owner.name(...)` call `function(owner, ...)`, without a cycle."""
    owner.__dict__[name] = Bound(function, owner, name)
