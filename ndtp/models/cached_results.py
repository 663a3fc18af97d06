"""Caches of functions (`functools.lru_cache`) that a run on tensors without memory has filled."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

LINK = "_lru_list_elem"  # an entry of a bounded cache


def forget_fake_results(model: nn.Module) -> None:
    """Empty each cache beside a model's code that holds such a tensor, rotary tables by length: a real run gets it."""
    for cache in _caches_beside(model):
        if _holds_fake(cache):
            cache.cache_clear()


def _caches_beside(model: nn.Module) -> Iterator[Any]:
    """Yield the caches of the modules that define its classes; `gc.get_objects` misses some, see `gc.freeze`."""
    seen: set[int] = set()
    for name in {kind.__module__ for part in model.modules() for kind in type(part).__mro__}:
        if name.partition(".")[0] in ("torch", "builtins", "ndtp"):
            continue
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            for each in (value, *(vars(value).values() if isinstance(value, type) else ())):
                yield from _caches_in(each, seen)


def _caches_in(function: Any, seen: set[int], depth: int = 3) -> Iterator[Any]:
    """A function's cache, that of what it wraps, and those that its closure holds."""
    if id(function) in seen or not callable(function) or isinstance(function, type):
        return
    seen.add(id(function))
    if type(function) is functools._lru_cache_wrapper:
        yield function
    elif depth:
        cells = getattr(function, "__closure__", None) or ()
        inner = [each for cell in cells for each in gc.get_referents(cell)]  # an empty cell has none
        for each in (*inner, getattr(function, "__wrapped__", None)):
            yield from _caches_in(each, seen, depth - 1)


def _holds_fake(cache: Any) -> bool:
    waiting: list[Any] = [cache]
    for _ in range(4):  # the cache, its entries, a result, and a tuple of several
        waiting = [x for each in waiting for x in gc.get_referents(each)]
        if any(isinstance(x, FakeTensor) for x in waiting):
            return True
        waiting = [x for x in waiting if type(x) in (dict, tuple, list) or type(x).__name__ == LINK]
    return False
