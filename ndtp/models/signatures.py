"""The signatures of methods that are called for each layer of each step: found once."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


def signature_of(method: Any) -> inspect.Signature:
    """Return the signature of a bound method, without `self`, or of a function."""
    function = getattr(method, "__func__", None)
    return inspect.signature(method) if function is None else _without_self(function)


@cache
def _without_self(function: Any) -> inspect.Signature:
    whole = inspect.signature(function)
    return whole.replace(parameters=list(whole.parameters.values())[1:])
