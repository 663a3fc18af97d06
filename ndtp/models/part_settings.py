"""All that the code of a layer can read besides its parameters: layers that differ in none of it are proven at once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.models.same_weights import fingerprint

PLACES = ("layer", "idx", "index", "block")  # in the name of an attribute that tells which layer a module is
PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), slice, range, torch.dtype, torch.device,
         type, FunctionType, BuiltinFunctionType, ModuleType)  # fmt: skip
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
ENGINES = ("torch", "logging")  # whose objects are not looked into
MOST = 1 << 16  # numbers of a tensor that are looked at
DEEPEST = 6


class PartSettings:
    """The settings of one model's parts, each object's found once.

    Objects that nothing is known of are settings by themselves: layers that have other ones differ.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # with the object, whose number nobody else has then

    def of(self, module: nn.Module, name: str) -> dict[str, Any]:
        """Return the settings of a module, except the number of its layer, in a form that can be compared."""
        numbers = {int(part) for part in name.split(".") if part.isdigit()}
        place = {k for k, x in vars(module).items() if type(x) is int and x in numbers and any(w in k for w in PLACES)}
        own = {k: self._form(x) for k, x in vars(module).items() if k not in OF_EVERY_MODULE and k not in place}
        return own | {k: self._form(x) for k, x in module._buffers.items() if x is not None}

    def _form(self, x: object, depth: int = DEEPEST) -> object:
        if type(x) in PLAIN or isinstance(x, type):
            return type(x).__name__, repr(x) if isinstance(x, (slice, float)) else x  # NaN is itself, -0.0 is not 0.0
        if id(x) not in self._known:
            self._known[id(x)] = (x, ("object", id(self), id(x)))  # where it holds itself, and where it is too deep
            if depth:
                self._known[id(x)] = (x, self._made(x, depth - 1))
        return self._known[id(x)][1]

    def _made(self, x: Any, depth: int) -> Any:
        each = lambda y: self._form(y, depth)  # noqa: E731
        if isinstance(x, Tensor):
            is_plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_quantized
            is_read = is_plain and not x.is_meta and x.numel() <= MOST
            return "tensor", tuple(x.shape), x.dtype, fingerprint(x) if is_read else 0
        if isinstance(x, functools.partial):
            return "partial", each(x.func), each(x.args), each(x.keywords)
        if isinstance(x, MethodType):
            return "method", x.__func__, each(x.__self__)
        if isinstance(x, Mapping):
            return type(x), tuple((each(key), each(value)) for key, value in x.items())
        if isinstance(x, (tuple, list)):
            return type(x), tuple(map(each, x))
        if isinstance(x, Set):
            return type(x), frozenset(map(each, x))
        if isinstance(x, nn.Module) or type(x).__module__.partition(".")[0] in ENGINES:
            return self._known[id(x)][1]
        slots = [name for kind in type(x).__mro__ for name in _slots_of(kind) if hasattr(x, name)]
        own = vars(x) if hasattr(x, "__dict__") else {}
        if not own and not slots:
            return self._known[id(x)][1]
        of_slots = tuple((name, each(getattr(x, name))) for name in slots)
        return type(x), tuple((key, each(value)) for key, value in own.items()), of_slots


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__")]
