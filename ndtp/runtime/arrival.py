"""The arrival of gradients: as shards of DTensors, or as late gradients that are waited for at the end of backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ndtp.compute.torch_calls import AutogradContext
from ndtp.errors import LayoutError
from ndtp.runtime.dtensor_rules import dtensor_of
from ndtp.runtime.gradient_ends import end_of

if TYPE_CHECKING:
    from ndtp.runtime.arrival_numbers import ArrivalNumbers
    from ndtp.runtime.joint_leaves import JointLeaves
    from ndtp.runtime.late_gradients import LateGradient


def local_shard(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, differentiable; any other tensor as it is."""
    if is_plain(x):
        return x
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return x._local_tensor.detach()  # type: ignore[attr-defined, no-any-return]
    if torch.compiler.is_compiling():  # a gradient that is built by hand, as `_Arrival` does, cannot be traced
        return x.to_local(grad_placements=x.placements)  # type: ignore[attr-defined, no-any-return]
    return _Arrival.apply(x, None)  # type: ignore[no-any-return, no-untyped-call]


def local_of(x: Any) -> Tensor:
    """This rank's shard of a DTensor, its memory; any other tensor as it is."""
    return x if is_plain(x) else x._local_tensor  # type: ignore[no-any-return]


def is_plain(x: Tensor) -> bool:
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return True
    from ndtp.runtime.grid_tensor import KINDS

    return not isinstance(x, KINDS)


def plain_of(x: Any) -> Tensor:
    """A DTensor that every rank has whole, as a plain tensor; differentiable.

    Raises:
        LayoutError: it is split, and what reads it takes it for whole.
    """
    if any(not placement.is_replicate() for placement in x.placements):
        from ndtp.runtime.reads_beside_plain import refused

        raise refused("an operation", x, ())
    return x.full_tensor()  # whose gradient is no layer's, which would be the sum of all ranks


def stored_shape(x: Any) -> torch.Size:
    """The global shape with padding."""
    return x.shape if is_plain(x) else x._spec.shape  # type: ignore[no-any-return]


def real_of(x: object) -> Any:
    """The global shape of a parameter on a grid, where its gradient is to have that; None where it is a bare DTensor.

    That of a number is such: several of the grid would add up to a plain one.
    """
    own = vars(x)
    real = own.get("ndtp_real")
    return real if real or own.get("ndtp_is_handed") else None


def wrapped(local: Tensor | None, spec: object, real: Any = None) -> Any:
    """A DTensor that lies as the one with this `_spec` does, on the grid where it is given its sizes as `real`; outside
    of autograd.
    """
    if local is None:
        return None
    made = dtensor_of(local, spec)
    if real is None:
        return made
    from ndtp.runtime.grid_tensor import GridTensor

    return GridTensor(made, False, real)


def arrived(grad: Tensor | None, x: Any) -> Any:
    """The gradient that a layer gives of a tensor on the grid: a shard, summed over all ranks that have other rows.

    Where code outside of layers computes with the parameter, too, this part of the gradient does not go through
    autograd, which would add up what is summed and what is to be (`ndtp.models.plain_gradients`).
    """
    made = wrapped(grad, x._spec, real_of(x))
    set_aside = vars(x).get("ndtp_set_aside")
    return made if made is None or set_aside is None else set_aside(made)


class Deferred:
    """One use of a weight, whose gradient takes collectives and arrives late.

    Attributes:
        leaf: the parameter whose gradient it is, if autograd ends there.
        joint: the parameters of which the weight was made, if it was.
        late: the gradient on its way, from the product's backward until it arrives.
    """

    def __init__(self, weight: Tensor) -> None:
        self.leaf = weight if weight.is_leaf else None
        self.joint: JointLeaves | None = None if weight.is_leaf else getattr(weight, "ndtp_leaves", None)
        self.late: LateGradient | None = None

    @property
    def holder(self) -> Tensor | JointLeaves | None:
        """The parameters whose gradient may wait for its sum until backward ends, or a later one comes."""
        return self.joint if self.leaf is None else self.leaf

    def accumulates(self, arrival: Any) -> bool:
        """Return whether the current backward adds the gradient to the `.grad` of parameters.

        Not so where `torch.autograd.grad` asks for it, or nobody does.

        Args:
            arrival: the node of autograd at which it arrives.
        """
        leaves = [] if self.leaf is None else [self.leaf]
        if self.joint is not None:
            leaves = [leaf for _, leaf in self.joint.wanted()]
        if not leaves or not torch._C._will_engine_execute_node(arrival):  # type: ignore[attr-defined]
            return False
        try:
            return any(torch._C._will_engine_execute_node(end_of(leaf)) for leaf in leaves)  # type: ignore[attr-defined]
        except RuntimeError:  # torch's answer for a leaf that `torch.autograd.grad` was given
            return False

    def is_dropped(self, arrival: Any) -> bool:
        """Return whether nobody takes the gradient in the current backward, as by `backward(inputs=...)`."""
        return self.holder is not None and not torch._C._will_engine_execute_node(arrival)  # type: ignore[attr-defined]


class _Arrival(torch.autograd.Function):
    """The arrival of a weight's gradient, which waits for its reduction as late as its sequence number allows.

    A product must not return a gradient that is not finished, and must not wait for it either.  It returns a
    placeholder instead, and this node, between the weight and the product, waits.  There is one a use, so that
    gradients of several uses add up.  For a DTensor it is `to_local` at a third of the cost.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, deferred: Deferred | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.deferred = deferred
        ctx.spec, ctx.x = (None, None) if is_plain(x) else (x._spec, x)
        local = x if ctx.spec is None else x._local_tensor
        ctx.stride = local.stride()
        return local.detach()

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor | None) -> tuple[Any, None]:
        deferred = ctx.deferred
        if deferred is not None and deferred.late is not None:
            late, deferred.late = deferred.late, None
            grad = late.arrive()
        if grad is not None and ctx.spec is not None and not grad.is_sparse:  # which only a plain tensor is
            if grad.requires_grad:  # `create_graph=True`, of what no product has computed
                if axes := vars(ctx.x).get("ndtp_summed_over"):
                    raise no_second_sum(ctx.x.ndtp_name, ctx.x.shape, axes)
                return _of_shard(grad, ctx.x), None
            grad = arrived(_lying_as(grad, ctx.stride), ctx.x)
        return grad, None


def no_second_sum(name: str, shape: Sequence[int], axes: Sequence[str]) -> LayoutError:
    """Return the error for a gradient of a gradient of a parameter that ranks with rows of their own add up."""
    return LayoutError(
        f"parallelize: create_graph=True: the gradient of '{name}' {tuple(shape)} is summed over {', '.join(axes)}, "
        "and sums over ranks have no second derivative\n"
        "  fix: z in the place of dp, which splits rows, too; or create_graph=False"
    )


def _of_shard(grad: Tensor, x: Any) -> object:
    """A gradient that can be differentiated again."""
    from ndtp.runtime.grid_autograd import OfShard
    from ndtp.runtime.grid_tensor import GridTensor

    if not isinstance(x, GridTensor):
        spec = x._spec
        return DTensor.from_local(
            grad, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    return OfShard.apply(grad, x._spec, x.ndtp_real, type(x), False)  # type: ignore[no-untyped-call]


def _lying_as(grad: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A gradient in the order of its parameter's shard.

    Autograd sees to that for plain tensors.  Of a DTensor it sees the strides that the whole would have, and fused
    optimizers read both memories alike.  What code has expanded has one place for several elements.
    """
    if grad.stride() == stride or 0 in stride:
        return grad
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)


def taken_in(x: Tensor, numbers: ArrivalNumbers, parameter: Tensor) -> tuple[Tensor, Deferred]:
    """The local shard of a weight whose gradient takes steps, and where that will arrive: as late as it can."""
    deferred = Deferred(parameter)
    local: Tensor = _Arrival.apply(x, deferred)  # type: ignore[no-untyped-call]
    node: Any = local.grad_fn
    node._set_sequence_nr(numbers.exchange(node._sequence_nr()))
    return local, deferred


def tensors_in(x: object) -> list[Tensor]:
    """Return the tensors among the operands of a function, or its results, in lists, tuples and mappings as well."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        x = list(x.values())
    return [found for each in x for found in tensors_in(each)] if isinstance(x, (list, tuple)) else []
