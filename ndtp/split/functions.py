"""`autograd.Function`s of other people: their code would see shards and take them for the whole, so it gets the whole.

`Function.apply` asks no `__torch_function__`.  It is wrapped once, when the first model is split.
"""

from __future__ import annotations

from typing import Any

from torch.autograd import Function

from ndtp.split.tensor import TABLE, split_in
from ndtp.split.whole import on_whole

_given = Function.apply


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    found = split_in(args)
    if not found:
        return _given.__func__(cls, *args, **kwargs)  # type: ignore[attr-defined]
    made = TABLE.get(cls)
    if made is not None:
        result = made(cls.apply, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return on_whole(_Named(cls), args, kwargs)


class _Named:
    """An `autograd.Function` on whole tensors, by its name."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.__name__ = kind, kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _given.__func__(self.kind, *args, **kwargs)  # type: ignore[attr-defined]


def guard_functions() -> None:
    """Let every `autograd.Function` that has no rule take split tensors whole."""
    if Function.apply.__func__ is not _apply:  # type: ignore[attr-defined]
        Function.apply = classmethod(_apply)  # type: ignore[assignment,method-assign]
