"""`norm`: layer norm and RMS norm of rows whose features are split; the moments of a token are merged over axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndtp.algebra.cached import cached_property
from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import MergePlan, RelayoutPlan
from ndtp.algebra.steps import Step
from ndtp.compute import norms as one_rank
from ndtp.compute.torch_calls import AutogradContext
from ndtp.errors import LayoutError
from ndtp.ops import compiled_layers
from ndtp.ops.moving import as_own, enter, moved, sent, taken, way_of
from ndtp.ops.reductions import merged, reduce, relayout_plan
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.versions import refuse_changed, version_of

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike


@dataclass(frozen=True)
class NormPlan:
    """The plan of a norm of rows `[M_zy, K_x]` over their features.

    Args:
        layout: of the rows, [M, K].
        features: how many of the features are no padding, which stands behind them; padding stays zero.
        width: the features, padding included.
        centred: layer norm, which subtracts the mean; else RMS norm.
        eps: what is added to the variance, or to the mean of squares.
        name: what errors and profiles call it.
        stored: the axes over which gain and bias are stored, the first ones of those that split the features; each rank
            takes its part.  Default: all.
    """

    layout: Layout
    features: int
    width: int
    centred: bool
    eps: float
    name: str = "norm"
    stored: tuple[str, ...] | None = None

    @cached_property
    def merge(self) -> MergePlan:
        numbers = 2 if self.centred else 1
        return MergePlan(self.layout.grid, self.layout.dims[-1], numbers, numbers)

    @cached_property
    def parameter(self) -> RelayoutPlan:
        """The relayout of a gain or bias [K], since each rank uses it for rows of its own."""
        used = Layout(self.layout.grid, self.layout.dims[-1])
        stored = used if self.stored is None else Layout(self.layout.grid, self.stored)
        return RelayoutPlan(stored, used, (), self.layout.grid.nontrivial(self.layout.dims[0]), self.name)

    @cached_property
    def reduction(self) -> tuple[Step, ...]:
        """The steps of sums over features."""
        return (Step("all_reduce", self.merge.axes),) if self.merge.axes else ()

    def real(self, rank: int) -> int:
        """Return how many of the features that a rank has are not padding."""
        local = self.width // self.layout.num_splits(-1)
        start = self.layout.grid.index(rank, self.layout.dims[-1]) * local
        return min(max(self.features - start, 0), local)

    def counts(self, rank: int) -> list[int]:
        """Return the numbers of features on the ranks along the axes that split them, in the order of `merge`."""
        return [self.real(peer) for peer in self.layout.grid.group(rank, self.merge.axes)]


@lru_cache(maxsize=256)
def with_eps(plan: NormPlan, eps: float | None, dtype: torch.dtype) -> NormPlan:
    """Return the plan of a norm that adds another epsilon; None is that of `nn.RMSNorm` for rows of a dtype."""
    return replace(plan, eps=default_eps(dtype) if eps is None else eps)


def default_eps(dtype: torch.dtype) -> float:
    """Return what `nn.RMSNorm` adds where it is given no epsilon: it computes in fp32 at least."""
    return float(torch.finfo(torch.promote_types(dtype, torch.float32)).eps)


def norm(
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    plan: NormPlan,
    mesh: GridLike,
    offset: float = 0.0,
) -> Tensor:
    """Normalize each row over all of its features.

        x        [M / (z y), K / x]     this rank's shard of X[M_zy, K_x]
        gain     [K / x]                of gain[K_x]; bias likewise
        returns  as x

        forward  y = (x - mean) rstd (offset + gain) + bias, with the moments of a row merged over x
        dgrad    two sums a row (one for RMS norm), AR over x
        wgrad    dgain = AR_zy( sum over rows of dy (x - mean) rstd ), late; dbias likewise

    Shapes are those of the 3D scheme.  Moments are centred and merged, in fp32 at least; the result has x's dtype.  A
    gain may be a DTensor parameter that lies as `plan.parameter.source`.

    Raises:
        LayoutError: shards that do not fit the plan.
    """
    enter(mesh, plan, x)
    local = plan.width // plan.layout.num_splits(-1)
    if x.dim() != 2 or x.shape[1] != local:
        raise LayoutError(
            f"'{plan.name}': x is a shard {tuple(x.shape)}; of [{plan.layout.label('MK')}] with {plan.width} features "
            f"a rank has [rows, {local}]"
        )
    bring = compiled_layers.taken if torch.compiler.is_compiling() else taken
    used = [None if p is None else bring(p, plan.parameter, mesh) for p in (gain, bias)]
    if offset and used[0] is not None:
        used[0] = used[0] + offset
    if torch.compiler.is_compiling():
        return compiled_layers.norm(
            x, used[0], used[1], mesh, layout=plan.layout, features=plan.features, real=plan.real(mesh.rank),
            centred=plan.centred, eps=plan.eps, name=plan.name,
        )  # fmt: skip
    if not torch.is_grad_enabled():  # decoding: a node of autograd would take a fifth of the time
        return bound_norm(x, plan, mesh)(x, used[0], used[1])
    # Autograd sees the gain's shard, on which changes of a DTensor do not count; with an offset it sees a copy.
    watched = None if gain is None or offset or is_plain(gain) else (gain, version_of(gain))
    result: Tensor = _Norm.apply(x, *used, plan, mesh, watched)  # type: ignore[no-untyped-call]
    return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: Tensor,
        gain: Tensor | None,
        bias: Tensor | None,
        plan: NormPlan,
        mesh: GridLike,
        watched: Any,
    ) -> Tensor:
        summed = partial(moved, steps=plan.reduction, mesh=mesh, name=plan.name, phase="forward")
        y, mean, scale = _normalised(x, gain, bias, plan, mesh, plan.real(mesh.rank), summed)
        ctx.save_for_backward(x, gain, mean, scale)
        ctx.plan, ctx.mesh, ctx.bias_dtype = plan, mesh, None if bias is None else bias.dtype
        ctx.watched = watched
        return as_own(y, x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, mesh = ctx.plan, ctx.mesh
        mesh.step.late.enter()
        if ctx.watched is not None:
            watched, seen = ctx.watched
            refuse_changed(watched, seen, f"the weight of '{plan.name}'")
        x, gain, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            bias = None if ctx.bias_dtype is None else x.new_zeros(x.shape[1], dtype=ctx.bias_dtype, requires_grad=True)
            return (*_gradients_again(grad, (x, gain, bias), ctx.needs_input_grad, plan, mesh), None, None, None)
        real = plan.real(mesh.rank)
        normal = _cut(one_rank.normalized(x, mean, scale), real)
        dy = _cut(grad.to(normal.dtype), real)
        dnormal = dy if gain is None else dy * gain
        finish = None
        if ctx.needs_input_grad[0]:
            sums = one_rank.gradient_sums(dnormal, normal, plan.centred)
            finish = sent(sums, plan.reduction, mesh, plan.name, "dgrad")
        # Gradients of parameters while the sums are on their way.
        dgain = (dy * normal).sum(0).to(gain.dtype) if ctx.needs_input_grad[1] else None
        dbias = dy.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        dx = None
        if finish is not None:
            dx = one_rank.input_gradient(dnormal, normal, finish(), scale, plan.features)
            dx = _cut(dx, real).to(x.dtype)
        return dx, dgain, dbias, None, None, None


def _gradients_again(
    grad: Tensor,
    operands: tuple[Tensor, Tensor | None, Tensor | None],
    needs: Sequence[bool],
    plan: NormPlan,
    mesh: GridLike,
) -> list[Tensor | None]:
    """The gradients of the rows, the gain and the bias, of which there are gradients again: of the norm by operations
    and sums that autograd knows.
    """
    x, gain, bias = operands
    real, axes, rows = plan.real(mesh.rank), plan.merge.axes, Layout(plan.layout.grid, plan.layout.dims[0])
    summed = relayout_plan(rows, rows, axes, axes, plan.name)
    total = lambda each: reduce(each.sum(1), summed, mesh).unsqueeze(1) / plan.features  # noqa: E731
    values = x[:, :real].to(one_rank.wide(x.dtype))
    if plan.centred:
        values = values - total(values)
    normal = values * (total(values.square()) + plan.eps).rsqrt()
    y = _cut(one_rank.scaled(torch.nn.functional.pad(normal, (0, x.shape[1] - real)), gain, bias, x.dtype), real)
    wanted = [p for p, is_needed in zip(operands, needs, strict=False) if p is not None and is_needed]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needs[:3]]


def bound_norm(x: Tensor, plan: NormPlan, mesh: GridLike, offset: float = 0.0) -> Callable[..., Tensor]:
    """Return a norm of rows of one shape, without gradients: takes the rows, and the shards of gain and bias."""
    real = plan.real(mesh.rank)
    way = way_of(one_rank.sum_of_squares(x), plan.reduction, mesh, plan.name, "forward")

    def run(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        gain = gain + offset if offset and gain is not None else gain
        return _normalised(x, gain, bias, plan, mesh, real, way.carried)[0]

    return run


def _normalised(
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    plan: NormPlan,
    mesh: GridLike,
    real: int,
    summed: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the normalised rows, and their statistics.

    Args:
        real: how many of this rank's features are no padding.
        summed: adds up the sums of squares of an RMS norm over ranks.
    """
    mean, scale = _statistics(x if real == x.shape[1] else x[:, :real], plan, mesh, summed)
    normal = one_rank.normalized(x, mean, scale)
    return _cut(one_rank.scaled(normal, gain, bias, x.dtype), real), mean, scale


def _statistics(
    x: Tensor, plan: NormPlan, mesh: GridLike, summed: Callable[[Tensor], Tensor]
) -> tuple[Tensor | None, Tensor]:
    """The mean of each row, and by what its distances from it are multiplied."""
    if plan.centred:
        counts = plan.counts(mesh.rank)
        both = merged(
            one_rank.moments(x), plan.merge, lambda parts: one_rank.merge_moments(parts, counts), mesh, plan.name
        )
        mean, squares = both.unbind()
    else:
        mean, squares = None, summed(one_rank.sum_of_squares(x))[0]
    return mean, squares.div_(plan.features).add_(plan.eps).rsqrt_()  # nobody else has it


def _cut(x: Tensor, real: int) -> Tensor:
    """Padding is zero, whatever was computed of it."""
    if real == x.shape[1]:
        return x
    return torch.nn.functional.pad(x[:, :real], (0, x.shape[1] - real))
