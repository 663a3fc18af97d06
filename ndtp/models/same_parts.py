"""A model's modules and parameters, and how they are at one moment, as ranks compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import is_not
from typing import Any

from torch import nn

from ndtp.nn.hooks import OF_A_MODULE
from ndtp.nn.sharded import Sharded
from ndtp.runtime.facts import digest
from ndtp.runtime.versions import Versions

# Who keeps numbers, under which names, and the numbers.
Numbered = tuple[list[dict[str, Any]], list[str], list[Any]]


@dataclass
class Parts:
    """A model's modules and parameters, in the order of its tree, and how they are at one moment.

    Attributes:
        owns: the attributes of each module.
        hooked: for each of them, whether it has hooks.
        names: of the classes of modules, and of those on the grid with their seeds.
        named: a digest of `names`.
        keepers, keys: of the numbers that modules were made with, such as the probability of a dropout.
        numbers: these numbers.
        changed: which of them have changed since ranks were compared last: a module may keep an average of what its own
            rank sees.  None: ranks are compared for the first time, and the numbers are.
        parameters: those that there are.
        counts: of the changes of each parameter.
        trains: for each module, whether it is in training.
        wants, lacks: for each parameter, whether it wants a gradient, and whether it has none.
        stale: the numbers of parameters whose gradient was there before the last step.
        written: how often others than optimizers have written to a parameter since the last call, by its number.
        in_all: for each parameter, how often anybody has written to it since it was looked at last.
        is_part: whether `trains` and `wants` alone are of this moment.
    """

    owns: list[dict[str, Any]] = field(default_factory=list)
    hooked: bytearray = field(default_factory=bytearray)
    names: list[Any] = field(default_factory=list)
    named: int = 0
    keepers: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    changed: tuple[int, ...] | None = None
    parameters: list[nn.Parameter] = field(default_factory=list)
    counts: Versions = field(default_factory=lambda: Versions(()))
    trains: bytes = b""
    wants: bytes = b""
    lacks: bytes = b""
    stale: tuple[int, ...] = ()
    written: dict[int, int] = field(default_factory=dict)
    in_all: list[int] = field(default_factory=list)
    is_part: bool = False

    def told(self, before: Numbered | None) -> tuple[object, ...]:
        """Return what all ranks have alike of it.

        Args:
            before: the numbers that they had when they were compared last.
        """
        keepers, keys, then = before or (None, None, [])
        self.changed = None
        if keys == self.keys and not any(map(is_not, self.keepers, keepers or ())):
            self.changed = _changed(then, self.numbers)
        return (
            self.named,
            digest(self.numbers) if self.changed is None else self.changed,
            self.trains,
            bytes(self.hooked),
            self.wants,
            self.lacks,
            self.stale,
            self.written,
            self.in_all,
        )


def _changed(before: Sequence[Any], now: Sequence[Any]) -> tuple[int, ...]:
    """Return the places of the numbers that have changed."""
    if now == before:
        return ()
    return tuple(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a is not b and a != b)


def walk(module: nn.Module, parts: Parts, is_root: bool = False) -> None:
    """Add a module and those inside of it to `parts`, in the order of the tree."""
    own = module.__dict__
    parts.owns.append(own)
    parts.hooked.append(not is_root and any(own[kind] for kind in OF_A_MODULE))
    is_sharded = isinstance(module, Sharded)
    parts.names.append((type(module).__name__, *(own.get(key) for key in ("name", "seed") if is_sharded)))
    for name in numbers_of(module):
        parts.keepers.append(own)
        parts.keys.append(name)
    parts.parameters += [p for p in own["_parameters"].values() if isinstance(p, nn.Parameter)]
    for child in own["_modules"].values():
        if child is not None:
            walk(child, parts)


def numbers_of(module: nn.Module) -> dict[str, float]:
    """Return the real numbers that a module keeps under the names of its constructor's arguments: the probability of a
    dropout, the epsilon of a norm.
    """
    kind: Any = type(module)
    own = vars(module)
    return {name: own[name] for name in _arguments_of(kind) if isinstance(own.get(name), float)}


@cache
def _arguments_of(kind: Any) -> tuple[str, ...]:
    """Names of the arguments of the constructors of a class and of its bases."""
    made_by = (vars(each).get("__init__") for each in kind.__mro__ if issubclass(each, nn.Module))
    codes = (made.__code__ for made in made_by if hasattr(made, "__code__"))
    names = (name for code in codes for name in code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    return tuple(dict.fromkeys(names))
