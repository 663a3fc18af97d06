"""A stage gives its outputs and errors in the form that schedules of torch want."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ndtp.compute.torch_calls import AutogradContext
from ndtp.errors import CommunicationError
from ndtp.ops.moving import as_own


@contextmanager
def as_it_was() -> Iterator[None]:
    """A lost peer is told as such, not as a stage that failed."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, CommunicationError):
            raise error.__cause__ from error.__cause__.__cause__
        raise


def no_view(x: Tensor) -> Tensor:
    """A stage's output as no view: a backward in parts detaches outputs in place, which torch does with no view."""
    return _Own.apply(x) if type(x) is Tensor and x._is_view() else x  # type: ignore[no-any-return, no-untyped-call]


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor) -> Tensor:
        return as_own(x.view_as(x))

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Tensor:
        return grad
