"""Functions that compilers leave to Python, and all that they call; without loading a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

# What the error of `fullgraph=True` says of models that were split as a whole.
WHY_EAGER = (
    "ndtp: a model that was parallelized as a whole runs eagerly: its hidden states have the sizes of the whole and "
    "the memory of a part, which no graph can hold. fix: leave out fullgraph=True, or build its layers of ndtp.nn, "
    "which compile into one graph"
)


def as_it_is(function: Any) -> None:
    """Have a compiler run a function, and all that it calls, as they are, where it comes to be called."""
    from torch._C._dynamo import eval_frame as frames

    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skipped)


def backwards_as_they_are() -> None:
    """Have compilers leave alone what autograd calls of ndtp's: compiled programs may call `backward` themselves."""
    for function in torch.autograd.Function.__subclasses__():
        if function.__module__.startswith("ndtp."):
            as_it_is(function.backward)


def eagerly(why: str) -> Callable[[Function], Function]:
    """A function at which graphs end: what is before it is compiled, and what is behind it; `backwards_as_they_are` for
    that of its gradients.

    `torch.compiler.disable` without the import of the compiler, which takes longer than that of torch.

    Args:
        why: what the error of `fullgraph=True` says.
    """

    def decorate(function: Function) -> Function:
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, why  # type: ignore[attr-defined]
        as_it_is(function)
        return function

    return decorate
