"""The code of a model's classes as it is written: functions below decorators, and the parts of which code consists."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator


def function_below(x: object) -> types.FunctionType | None:
    """Return the function that a method or a decorated function is; None for what is none.

    No code of `x` runs: what a class holds may answer any question, or raise.
    """
    x = x.__func__ if isinstance(x, (classmethod, staticmethod)) else x
    while (wrapped := inspect.getattr_static(x, "__wrapped__", None)) is not None:
        x = wrapped
    return x if isinstance(x, types.FunctionType) else None


def parts_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and that of the functions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from parts_of(each)


def functions_of(kind: type, known: tuple[str, ...] = ("torch.",), beside: bool = True) -> Iterator[types.FunctionType]:
    """Yield the forward of a class and the methods that it names, and what these name.

    Args:
        known: how the names of modules begin whose functions are left out.
        beside: whether functions of the same module, and those in closures, are among them.
    """
    waiting, seen = [inspect.getattr_static(kind, "forward", None)], set()
    while waiting:
        function = function_below(waiting.pop())
        if function is None or function in seen or str(function.__module__).startswith(known):
            continue
        seen.add(function)
        yield function
        names = dict.fromkeys(name for code in parts_of(function.__code__) for name in code.co_names)
        waiting += [inspect.getattr_static(kind, name, None) for name in names]
        if beside:
            waiting += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
            others = [function_below(function.__globals__.get(name)) for name in names]
            waiting += [each for each in others if each is not None and each.__module__ == function.__module__]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, types.FunctionType)
    except ValueError:  # of a name that has no value yet
        return False
