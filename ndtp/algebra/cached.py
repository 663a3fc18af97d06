"""`cached_property` without a lock: what a frozen object derives from itself, computed when it is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # named as that of functools, whose place it takes
    """A cached property that takes no lock, as `functools.cached_property` of Python 3.12 and later.

    The older one computes under a lock, which `torch.compile` does not enter.  Two threads that ask at once both
    compute here, and get equal values.  While a compiler traces, nothing is kept: what it is to leave behind in an
    object it would have to write down in bytecode.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = self.function(instance)
        if not _is_traced():
            instance.__dict__[self.name] = value  # found before this descriptor from now on; frozen classes let it pass
        return value


def _is_traced() -> bool:
    torch = sys.modules.get("torch")  # which the algebra does without
    return torch is not None and torch.compiler.is_compiling()
