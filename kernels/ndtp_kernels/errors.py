"""Errors that name the op, the tensor, the sizes and the fix; and warnings that are given once."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator


class KernelError(ValueError):
    """A product that cannot be computed as asked; the message says which tensor, which sizes, and what would work."""

    def __init__(self, op: str, problem: str, fix: str) -> None:
        super().__init__(f"{op}: {problem}\n  fix: {fix}")


class KernelFallback(UserWarning):
    """A kernel that was asked for is not the one that runs."""


@functools.cache
def warn_once(message: str) -> None:
    """Warn of a fallback the first time that exactly this message comes up in the process."""
    warnings.warn(message, KernelFallback, stacklevel=3)


@contextlib.contextmanager
def fallbacks_raise() -> Iterator[None]:
    """Inside, every fallback raises `KernelFallback`: torch must not be timed under a kernel's name."""
    warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelFallback)
        yield
