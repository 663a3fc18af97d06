"""Code that asks whether a tensor is of `torch.Tensor` itself: it goes another way where a split layer gave the tensor.

Python asks nobody what `type(x)` is, so nothing can answer there as for the dense model.
"""

from __future__ import annotations

import dis
import types
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

_REACH = 10  # instructions from `type` to `Tensor`
_KNOWN = ("torch.", "ndtp.", "transformers.")  # code that was tried, class by class


def warn_of_asked_types(model: nn.Module) -> None:
    """Warn of each place in the code of a model's forward that compares the type of something with `torch.Tensor`."""
    for kind in {type(module): None for module in model.modules()}:
        for code, line in _places(kind):
            warnings.warn(
                f"ndtp: the code of {kind.__name__} compares a type with torch.Tensor ({code.co_filename}, "
                f"line {line}); what a split layer gives is of a class that derives from it, so that this code may go "
                "another way than in the dense model\n  fix: isinstance(x, torch.Tensor)",
                stacklevel=3,
            )


def _places(kind: Any) -> Iterator[tuple[types.CodeType, int]]:
    """Yield where a class asks, in its forward and in the methods and functions beside it that this names."""
    waiting, seen = [getattr(kind, "forward", None)], set()
    while waiting:
        method: Any = waiting.pop()
        while hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        if not isinstance(method, types.FunctionType) or method in seen or method.__module__.startswith(_KNOWN):
            continue
        seen.add(method)
        for code in _parts(method.__code__):
            yield from ((code, line) for line in _lines(code))
            for name in code.co_names:
                beside = method.__globals__.get(name)
                is_beside = getattr(beside, "__module__", None) == method.__module__
                waiting += [getattr(kind, name, None), *([beside] if is_beside else [])]


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _parts(inner)


def _lines(code: types.CodeType) -> Iterator[int]:
    """Yield the lines in which code compares `type(x)` or `x.__class__`, or its name, with `Tensor`."""
    if "Tensor" not in (*code.co_names, *code.co_freevars, *code.co_consts):
        return
    steps = list(dis.get_instructions(code))
    for i, step in enumerate(steps):
        if step.argval != "Tensor" or not step.opname.startswith("LOAD"):
            continue
        before, after = steps[max(0, i - _REACH) : i], steps[i + 1 : i + 5]
        is_asked = any(each.argval in ("type", "__class__") for each in before if each.opname.startswith("LOAD"))
        is_one = after and (after[0].opname == "IS_OP" or (after[0].opname == "COMPARE_OP" and "=" in after[0].argrepr))
        if is_asked and (is_one or any(each.opname == "CONTAINS_OP" for each in after)):
            yield [line for offset, line in dis.findlinestarts(code) if offset <= step.offset][-1] or 0
