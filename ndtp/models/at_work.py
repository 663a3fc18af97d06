"""The root of a model on the grid: while its forward runs, code finds parameters that it can compute with."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ndtp.models.frame import Frame
from ndtp.runtime.versions import refuse_changed


class AtWork:
    """The class of such a root."""


def reads_parameters(model: nn.Module, frame: Frame) -> None:
    """Let the forward of a model note which parameters its code reads; a backward after they changed is refused."""
    theirs: Any = type(model)
    if isinstance(model, AtWork):
        return

    @functools.wraps(theirs.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        read: list[Any] = []
        frame.running.append(read)
        try:
            given = theirs.forward(self, *args, **kwargs)
        finally:
            frame.running.pop()
        if read and not torch.compiler.is_compiling():
            for x in tree_leaves(given):
                if isinstance(x, Tensor) and x.grad_fn is not None:
                    x.grad_fn.register_prehook(functools.partial(_refuse_changed, read))
        return given

    made = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__, "forward": forward}
    model.__class__ = type(theirs.__name__, (AtWork, theirs), made)


def _refuse_changed(read: list[Any], _: Any) -> None:
    for each in read:
        refuse_changed(*each)
