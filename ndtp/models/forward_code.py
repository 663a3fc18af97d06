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
