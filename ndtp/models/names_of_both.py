"""Attributes of a layer that both a user's code and ndtp keep under one name: each of them sees its own.

A layer that is split keeps its attributes, and code may go by them: `layer.name` says to which task it belongs.  ndtp
keeps what it knows of the layer beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType

from torch import nn

from ndtp.models.made_classes import made_class

KEPT = (
    "frame", "mesh", "name", "lies", "seed", "settled", "dense_class", "plan", "schedule", "group", "core", "parts",
    "context", "turns", "real_in", "real_out", "given", "own", "product", "placed",
)  # fmt: skip
_THEIRS = "ndtp_theirs"


class OfBoth:
    """An attribute of a layer's class: of the layer itself for ndtp's code, and in a dict of its own for any other."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module, kind: type | None = None) -> object:
        found = _attributes(module)
        if self.name in found:
            return found[self.name]
        if found is vars(module):
            for each in type(module).__mro__:
                value = vars(each).get(self.name, self)
                if not isinstance(value, OfBoth):
                    return value.__get__(module, type(module)) if hasattr(value, "__get__") else value
        raise AttributeError(f"{type(module).__name__!r} has no attribute {self.name!r}")

    def __set__(self, module: nn.Module, value: object) -> None:
        _attributes(module)[self.name] = value

    def __delete__(self, module: nn.Module) -> None:
        del _attributes(module)[self.name]


def _attributes(module: nn.Module) -> dict[str, object]:
    """Return the attributes that are those of the code that asks, which may do so by `nn.Module`'s methods."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "torch.nn.modules.module":
        frame = frame.f_back
    asks = "" if frame is None else str(frame.f_globals.get("__name__"))
    own = vars(module)
    theirs: dict[str, object] = own[_THEIRS]
    return own if asks.startswith("ndtp.") else theirs


def keep_theirs(module: nn.Module) -> None:
    """Let a module that has attributes under names of ndtp's keep them, before ndtp puts its own there."""
    own = vars(module)
    theirs = {name: own.pop(name) for name in KEPT if name in own}
    if theirs:
        own[_THEIRS] = theirs
        module.__class__ = _class_with(type(module), tuple(theirs))


def _made_with(kind: type, names: tuple[str, ...]) -> type:
    named: dict[str, object] = {name: OfBoth(name) for name in names}
    made: type = made_class(kind.__name__, (kind,), {"__module__": kind.__module__} | named)
    return made


_class_with: Callable[..., type] = cache(_made_with)
