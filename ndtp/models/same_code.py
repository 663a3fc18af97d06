"""Do all ranks run the same code?  Versions of libraries, and a hash of the code that a model's layers run.

A patch that one rank alone has (another version of a file, a function or a `forward` that was replaced) computes
another model there, of which no weight and no input tells.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from zlib import crc32

import torch
from torch import nn

from ndtp.models.forward_code import function_below

_LIBRARIES = ("torch", "ndtp")  # their versions tell their code; of what the others call of them, one step is looked at


def code_of(model: nn.Module) -> dict[str, object]:
    """Return versions of what a model is made of, and a hash of the code of each class of its layers, by topic.

    The code of a class is its `forward`, with the functions that it calls by name, and those which these call.
    """
    hashes: dict[str, set[int]] = {}
    roots = set(_LIBRARIES)
    seen: dict[object, list[int]] = {}
    around: dict[str, set[str]] = {}
    for module in model.modules():
        own = vars(module).get("forward")
        for kind in type(module).__mro__[:-1]:
            roots.add(root := kind.__module__.partition(".")[0])
            if root != "ndtp" and kind is not nn.Module:
                found = hashes.setdefault(f"code of {kind.__qualname__}", set())
                if kind not in seen:
                    seen[kind] = list(_reached(kind, vars(kind).get("forward")))
                found.update(seen[kind])
        if own is not None:
            found = hashes.setdefault(f"code of {type(module).__qualname__}", set())
            around.setdefault(f"code around {type(module).__qualname__}", set()).update(_wrappers(own))
            found.update(_reached(type(module), getattr(own, "__func__", own)))
    versions = {f"version of {name}": version for name in sorted(roots) if (version := _version_of(name))}
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    texts = {topic: f"hash {crc32(repr(sorted(each)).encode()):x}" for topic, each in sorted(hashes.items()) if each}
    wrappers = {topic: ", ".join(sorted(names)) for topic, names in sorted(around.items()) if names}
    return {"version of Python": python, **versions, **texts, **wrappers}


def _version_of(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", ""))


def _wrappers(x: object) -> Iterator[str]:
    """Yield names of what is wrapped around a `forward` that one module has by itself, such as an autocast, each with
    the dtypes that it casts to.
    """
    x = getattr(x, "__func__", x)
    while (below := inspect.getattr_static(x, "__wrapped__", None)) is not None:
        owner = x if isinstance(x, FunctionType) else type(x)
        cells = getattr(x, "__closure__", None)
        held = getattr(x, "__dict__", {}).values() if cells is None else map(_content_of, cells)
        yield " ".join([owner.__qualname__, *sorted(filter(None, map(_cast, held)))])
        x = below


def _content_of(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _cast(value: object) -> str:
    """Return the dtype that a value is or casts to, in words; no other setting of a wrapper must be all ranks'."""
    if isinstance(value, torch.autocast):
        return f"to {value.fast_dtype} on {value.device}" if value._enabled else "off"
    return str(value) if isinstance(value, torch.dtype) else ""


def _reached(kind: type, entry: object) -> Iterator[int]:
    """Yield hashes of the functions that a method runs, found by the names that occur in their code."""
    methods = {
        name: x for each in reversed(kind.__mro__[:-1]) if each is not nn.Module for name, x in vars(each).items()
    }
    open_ones, known = [entry], set[int]()
    while open_ones:
        x = open_ones.pop()
        function = function_below(x)
        if function is None:
            if isinstance(x, BuiltinFunctionType):
                yield crc32(f"{x.__module__}.{x.__qualname__}".encode())
            continue
        if id(function.__code__) in known:
            continue
        known.add(id(function.__code__))
        yield _hash_of(function.__code__)
        if function.__module__ is None or function.__module__.partition(".")[0] not in _LIBRARIES:
            open_ones += _called(function, methods)


def _called(function: FunctionType, methods: dict[str, object]) -> Iterator[object]:
    space = function.__globals__
    names = _names_in(function.__code__)
    modules = [vars(x) for name in names if type(x := space.get(name)) is ModuleType]
    for name in names:
        for place in (space, methods, *modules):
            x = place.get(name)
            if isinstance(x, (FunctionType, BuiltinFunctionType, classmethod, staticmethod)):
                yield x


@cache
def _names_in(code: CodeType) -> tuple[str, ...]:
    inner = (name for x in code.co_consts if isinstance(x, CodeType) for name in _names_in(x))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@cache
def _hash_of(code: CodeType) -> int:
    """A hash of code that is the same in every process, without its file and lines."""
    return crc32(repr((code.co_code, code.co_names, code.co_varnames, _told(code.co_consts))).encode())


def _told(constant: object) -> object:
    if isinstance(constant, CodeType):
        return _hash_of(constant)
    if isinstance(constant, tuple):
        return tuple(map(_told, constant))
    if isinstance(constant, frozenset):  # Python orders texts anew in each process
        return sorted(repr(_told(x)) for x in constant)
    return repr(constant)
