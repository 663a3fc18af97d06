"""State beside a model's modules that its code changes, and that a run which only observes the model leaves as it was.

Globals, attributes of classes, of functions and of other objects, variables of closures, default arguments: a copy of
the model shares them all.  What the code of the model's classes names is looked at, and what that names in turn.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import random
import sys
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import is_not
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ndtp.models.forward_code import parts_of

_FOREIGN = {"torch", "builtins", "ndtp", "numpy", "typing", "collections", "functools", "abc", "math", "os", "sys"}
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NUMBERS = (*_PLAIN, tuple, frozenset)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_MOST, _MOST_LOOKED_INTO = 100_000, 1000  # entries of a container
_LARGEST = 1 << 20  # elements of a tensor
_GONE = object()
_LINK = "_lru_list_elem"  # an entry of a bounded cache


@contextmanager
def kept_beside(model: nn.Module) -> Iterator[None]:
    """A context after which the state beside a model's modules is what it was before, without results of no numbers."""
    kept = _Kept()
    packages = {kind.__module__.partition(".")[0] for part in model.modules() for kind in type(part).__mro__}
    kept.packages = packages - _FOREIGN
    for part in model.modules():
        for kind in type(part).__mro__:  # also those behind a class of somebody else's
            kept.look_at(kind)
        kept.namespace(vars(part))  # which code may find by a closure, in the place of a copy
        for each in list(vars(part).values()):
            kept.look_at(each)
    try:
        yield
    finally:
        kept.put_back()


class _Kept:
    """The state that was found, and how each part of it is put back."""

    packages: set[str]

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # which keeps it, so that nothing else has its id

    def put_back(self) -> None:
        for undo in self._undo:
            with suppress(Exception):  # of a class of somebody else's that forbids it: all others go back
                undo()

    def look_at(self, value: object) -> None:
        """Keep the state that a value has, or that its code names."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if id(value) in self._seen or type(value) in _PLAIN:
                continue
            self._seen[id(value)] = value
            waiting += self._parts(value)

    def _parts(self, value: Any) -> list[Any]:
        """Keep what a value holds; return what is to be looked at because of it."""
        kind = type(value)  # not `isinstance`, which runs code of objects that pass for others
        if kind in _CONTAINERS:
            return self._container(value)
        if issubclass(kind, (tuple, frozenset)):
            return [*value][:_MOST_LOOKED_INTO]
        if kind is Tensor:
            self._tensor(value)
        elif issubclass(kind, _GENERATORS):
            self._undo.append(_state_of(value))
        elif kind is types.MethodType:
            return [value.__func__]
        elif kind is functools._lru_cache_wrapper:
            self._undo.append(partial(_without_fakes, value))
            return [value.__wrapped__]
        elif kind is property:
            return [value.fget]
        elif kind in (functools.partial, functools.partialmethod):
            return [value.func, *value.args, *value.keywords.values()]
        elif not self._is_own(value):
            return []
        elif kind is types.FunctionType:
            return self._function(value)
        elif issubclass(kind, type):
            self.namespace(vars(value), partial(type.__setattr__, value), partial(type.__delattr__, value))
            found = [x.__func__ if type(x) in (staticmethod, classmethod) else x for x in vars(value).values()]
            return [*found, *value.__bases__]
        else:
            own = _attributes_of(value)
            if own is not None and not issubclass(kind, nn.Module):
                self.namespace(own)
            return [kind, *(own or {}).values()]
        return []

    def _is_own(self, value: object) -> bool:
        """Return whether a function, a class or an object is of the packages that define the model, or of a script."""
        owner = value if issubclass(type(value), (type, types.FunctionType)) else type(value)
        package = str(getattr(owner, "__module__", "")).partition(".")[0]
        return package in self.packages or (package not in _FOREIGN and _is_of_a_script(package))

    def _function(self, function: types.FunctionType) -> list[object]:
        found: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self.namespace(vars(function))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # an empty one
                continue
            found.append(value)
            if _is_state(value):
                self._undo.append(partial(setattr, cell, "cell_contents", value))
        known, names = function.__globals__, {name for code in parts_of(function.__code__) for name in code.co_names}
        first = {name: known.get(name, _GONE) for name in names}

        def undo() -> None:
            for name, value in first.items():
                now = known.get(name, _GONE)
                if now is value or not ((_is_state(value) and _is_state(now)) or holds_fake(now)):
                    continue
                if value is _GONE:
                    del known[name]
                else:
                    known[name] = value

        self._undo.append(undo)
        return [*found, *(value for value in first.values() if value is not _GONE)]

    def namespace(
        self, own: Any, put: Callable[[str, Any], None] | None = None, drop: Callable[[str], None] | None = None
    ) -> None:
        """Keep the numbers, texts and containers that a namespace has; those that come later go.

        Args:
            put, drop: set and delete an entry, where the namespace itself cannot be written to.
        """
        first = {key: value for key, value in own.items() if _is_state(value)}
        put, drop = put or own.__setitem__, drop or own.__delitem__

        def undo() -> None:
            for key, value in list(own.items()):
                if key not in first and _is_state(value) and not key.startswith("__"):
                    drop(key)
            for key, value in first.items():
                if own.get(key, _GONE) is not value and not key.startswith("__"):
                    put(key, value)

        self._undo.append(undo)

    def _container(self, value: Any) -> list[object]:
        if len(value) > _MOST:
            return []
        held = lambda: [*value, *(value.values() if isinstance(value, dict) else ())]  # noqa: E731
        first, copied = held(), copy.copy(value)

        def undo() -> None:
            now = held()
            if len(now) != len(first) or any(map(is_not, now, first)):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(copied)

        self._undo.append(undo)
        return first if len(first) <= _MOST_LOOKED_INTO else []

    def _tensor(self, x: Tensor) -> None:
        if x.numel() > _LARGEST or x.is_meta or x.layout is not torch.strided or x.is_inference() or x._is_view():
            return  # a view has the memory of another one
        version, numbers = x._version, x.detach().clone()

        def undo() -> None:
            if x._version != version:
                with torch.no_grad():
                    x.copy_(numbers)

        self._undo.append(undo)


def _attributes_of(value: object) -> dict[str, object] | None:
    """Return the attributes of an object, if it has a dict of them."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:  # there is none, or it is a property, which may raise anything
        return None
    return own if type(own) is dict else None


@functools.cache
def _is_of_a_script(package: str) -> bool:
    """Return whether a module lies where nothing is installed, beside the program."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return bool(file) and "site-packages" not in file and not file.startswith(str(Path(types.__file__).parent))


def _state_of(generator: Any) -> Callable[[], None]:
    """Return what sets a generator of random numbers to where it is now."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return partial(generator.set_state, generator.get_state())


def _is_state(value: object) -> bool:
    kind = type(value)
    return value is _GONE or kind in _NUMBERS or kind in _CONTAINERS or issubclass(kind, Tensor)


@contextmanager
def random_kept(devices: Iterable[object] = ()) -> Iterator[None]:
    """Restore the random states of torch, on the CPU and on these devices, of numpy and of Python when it is left."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def silent() -> Iterator[None]:
    """Silence torch's logs about code that fails on fake tensors, and the code's warnings: of a call of the user's that
    call gives them, and inputs that were made up are none of the user's.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # or those that torch gives once are spent
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_warn_always(always)
        logger.disabled = before


def _without_fakes(cache: Any) -> None:
    """Empty the cache of a function that has results without numbers, of which a real run would get one."""
    if holds_fake(cache):
        cache.cache_clear()


def _is_fake(x: Any) -> bool:
    kind = type(x)  # not `isinstance`, which runs code of objects that pass for others
    return issubclass(kind, FakeTensor) or (issubclass(kind, Tensor) and x.is_meta)


def holds_fake(cache: object, depth: int = 4) -> bool:
    waiting: list[Any] = [cache]
    for _ in range(depth):  # the cache, its entries, a result, and a tuple of several
        waiting = [x for each in waiting if not issubclass(type(each), Tensor) for x in gc.get_referents(each)]
        if any(map(_is_fake, waiting)):
            return True
        waiting = [x for x in waiting if type(x) in (dict, tuple, list) or type(x).__name__ == _LINK]
    return False
