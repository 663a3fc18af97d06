"""Caches of functions, `functools.lru_cache`, that a run on tensors without memory has filled."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

LINK = "_lru_list_elem"  # an entry of a bounded cache


@contextmanager
def forgotten_fake_results(model: nn.Module) -> Iterator[None]:
    """Empty each cache beside a model's code that a run on such tensors inside has filled, rotary tables by length: a
    real run gets it.
    """
    try:
        yield
    finally:
        for cache in _caches_beside(model):
            if holds_fake(cache):
                cache.cache_clear()


def _caches_beside(model: nn.Module) -> Iterator[Any]:
    """Yield the caches of the modules that define its classes; `gc.get_objects` misses some, see `gc.freeze`.

    A layer may have one of its own, which its copies share.
    """
    seen: set[int] = set()
    for name in {kind.__module__ for part in model.modules() for kind in type(part).__mro__}:
        if name.partition(".")[0] in ("torch", "builtins", "ndtp"):
            continue
        found = vars(sys.modules[name]) if name in sys.modules else {}
        for value in [value for key, value in found.items() if key != "__builtins__"]:
            for each in (value, *(vars(value).values() if issubclass(type(value), type) else ())):
                yield from _caches_in(each, seen)
    for part in model.modules():
        for each in list(vars(part).values()):
            yield from _caches_in(each, seen)


def _caches_in(function: object, seen: set[int], depth: int = 3) -> Iterator[object]:
    """A function's cache, that of what it wraps, and those that its closure holds."""
    if id(function) in seen or not callable(function) or issubclass(type(function), type):
        return
    seen.add(id(function))
    if type(function) is functools._lru_cache_wrapper:
        yield function
    elif depth:
        cells = getattr(function, "__closure__", None) or ()
        inner = [each for cell in cells for each in gc.get_referents(cell)]  # an empty cell has none
        for each in (*inner, getattr(function, "__wrapped__", None)):
            yield from _caches_in(each, seen, depth - 1)


def _is_fake(x: Any) -> bool:
    kind = type(x)  # not `isinstance`, which runs code of objects that pass for others
    return issubclass(kind, FakeTensor) or (issubclass(kind, Tensor) and x.is_meta)


def holds_fake(cache: object, depth: int = 4) -> bool:
    waiting: list[Any] = [cache]
    for _ in range(depth):  # the cache, its entries, a result, and a tuple of several
        waiting = [x for each in waiting if not issubclass(type(each), Tensor) for x in gc.get_referents(each)]
        if any(map(_is_fake, waiting)):
            return True
        waiting = [x for x in waiting if type(x) in (dict, tuple, list) or type(x).__name__ == LINK]
    return False
