"""`end_of`: where autograd adds up the gradient of a parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndtp.compute.torch_calls import AutogradContext


class _Edge(torch.autograd.Function):
    """Depends on a parameter, and computes nothing with it."""

    @staticmethod
    def forward(ctx: AutogradContext, leaf: Tensor) -> Tensor:
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Any) -> None:
        return None


def end_of(leaf: Tensor) -> Any:
    """Return the node of autograd that adds up a parameter's gradient.

    torch's `get_gradient_edge` computes with the parameter, as code outside of the layers does, and that has gradients
    of another kind.
    """
    with torch.enable_grad():
        edge = _Edge.apply(leaf)  # type: ignore[no-untyped-call]
        return edge.grad_fn.next_functions[0][0]  # of a tensor that still lives: torch 2.11 asks for that
