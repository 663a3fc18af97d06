"""Where a tensor's gradient arrives: shards of DTensors, and gradients that are waited for late."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ndtp.moves import Move
from ndtp.relayout import Step

if TYPE_CHECKING:
    from ndtp.process_grid import ProcessGrid


def local_shard(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, differentiable; any other tensor as it is."""
    if is_plain(x):
        return x
    # A gradient that is built by hand, as `_Arrival` does, cannot be traced.
    return x.to_local() if torch.compiler.is_compiling() else _Arrival.apply(x, Deferred())  # type: ignore[attr-defined]


def is_plain(x: Tensor) -> bool:
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return True
    from torch.distributed.tensor import DTensor

    return not isinstance(x, DTensor)


class Deferred:
    """The gradient of one use of a weight, on its way: set by the product's backward, taken where it arrives.

    Attributes:
        parameter: whose gradient it is, if autograd ends there.
    """

    move: Move | None = None

    def __init__(self, parameter: Tensor | None = None) -> None:
        self._parameter = None if parameter is None or not parameter.is_leaf else weakref.ref(parameter)

    @property
    def parameter(self) -> Tensor | None:
        return None if self._parameter is None else self._parameter()

    def go_further(self) -> None:
        """Start the second collective, when the first has had the time of a chain of products."""
        if (move := self.move) is not None:
            move.go_further()
            if move.is_held:
                move.mesh.partial_sums.take_up(self.parameter, move)


class _Arrival(torch.autograd.Function):
    """Where the gradient of a weight arrives: waits for its reduction, as late as its sequence number says.

    A product must not return a gradient that is not finished, and must not wait for it either.  It returns a
    placeholder instead, and this node, between the weight and the product, waits.  There is one a use, so that
    gradients of several uses add up.  For a DTensor it is `to_local` at a third of the cost.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, deferred: Deferred) -> Tensor:
        ctx.deferred = deferred
        ctx.spec = None if is_plain(x) else (x.device_mesh, x.placements, x.shape, x.stride())
        local = x if ctx.spec is None else x._local_tensor
        return local.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        deferred = ctx.deferred
        move, deferred.move = deferred.move, None
        if move is not None:
            grad = move.finish()
            if move.is_held:
                grad = move.mesh.partial_sums.settle(deferred.parameter, move)
                if grad is None:
                    return None, None
        if ctx.spec is not None:
            from torch.distributed.tensor import DTensor

            mesh, placements, shape, stride = ctx.spec
            grad = DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride)
        return grad, None


def taken_in(
    x: Tensor, steps: Sequence[Step], mesh: ProcessGrid, parameter: Tensor | None
) -> tuple[Tensor, Deferred | None]:
    """The local shard of a weight, and where its gradient will arrive if it wants one that takes steps."""
    if not (x.requires_grad and torch.is_grad_enabled()) or (not steps and is_plain(x)):
        return local_shard(x), None
    deferred = Deferred(parameter)
    local = _Arrival.apply(x, deferred)
    # Backward goes by sequence numbers, highest first: wait when it has gone past the oldest product of the window.
    window = mesh.recent_products
    local.grad_fn._set_sequence_nr(window[0] if len(window) == window.maxlen else 0)
    return local, deferred
