"""A head and its cross entropy in chunks of rows: one chunk of logits exists at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ndtp.algebra.cached import cached_property
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.compute.norms import wide
from ndtp.compute.torch_calls import AutogradContext
from ndtp.compute.traces import own_graph, refuse_second
from ndtp.errors import LayoutError
from ndtp.ops.losses import LossPlan, check_weights, reduced, row_losses, totals, whole_targets
from ndtp.ops.moving import enter, taken
from ndtp.ops.products import matmul

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike


LogitsMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LinearLossPlan:
    """The plan of `cross_entropy(x W^T + b)` in chunks of rows.

    Args:
        head: of the product, which gives the logits.
        loss: of their cross entropy.
        chunk_rows: the most rows of logits that a rank holds at a time.

    The weight is gathered once, for all chunks.  Axes that split the same rows of x and of the logits, such as z and
    dp, have no part in a chunk: its product leaves them out, and the weight's gradient is summed over them in the end.
    """

    head: MatMulPlan
    loss: LossPlan
    chunk_rows: int

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """The axes whose ranks work on rows of their own throughout."""
        return tuple(axis for axis, role in self.head.roles.items() if role == "m")

    def _without(self, dims: tuple[tuple[str, ...], ...]) -> Layout:
        return Layout(self.head.grid, *(tuple(axis for axis in axes if axis not in self.apart) for axes in dims))

    @cached_property
    def product(self) -> MatMulPlan:
        """Return the plan of one chunk's product."""
        head, weight = self.head, self.head.need(self.head.b_letters)
        a, b, out = (self._without(dims) for dims in (head.a.dims, weight, head.out.dims))
        return MatMulPlan(a, b, out, transpose_b=head.transpose_b, name=head.name, chunks=1)

    @cached_property
    def weight(self) -> RelayoutPlan:
        """The relayout of the weight from how it is stored to how chunks use it."""
        head = self.head
        used = head.need(head.b_letters)
        parts = head.grid.nontrivial(self.apart)
        return RelayoutPlan(head.b, head.b.with_dims(*used), (), parts, head.name, "weights")

    @cached_property
    def bias(self) -> RelayoutPlan:
        layout = self.head.bias
        return RelayoutPlan(layout, layout, (), self.head.grid.nontrivial(self.apart), self.head.name)

    def chunks(self, rows: int) -> list[int]:
        """Return the sizes of the chunks of this rank's rows of x, which add up to `rows`."""
        held, given = (layout.num_splits(0) for layout in (self.product.a, self.product.out))
        step = given // math.gcd(held, given)  # so many rows of x at least, for whole rows of logits
        size = max(self.chunk_rows * given // held // step, 1) * step
        return [min(size, rows - start) for start in range(0, rows, size)]


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    plan: LinearLossPlan,
    mesh: GridLike,
    reduction: str,
    *,
    weights: Tensor | None = None,
    between: LogitsMap | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The cross entropy of `x W^T + b`, with gradients computed chunk by chunk as the logits come.

        x        [M / (z y), K / x]     this rank's shard of A[M_zy, K_x]
        weight   [V / y, K / (x z)]     of W[V_y, K_xz]; bias [V / y]
        targets  [M], or [M / (z y)]    all of them, or this rank's rows
        returns  the mean or the sum over all rows, the same on every rank

    Args:
        weights: [V], of all classes.
        between: what is made of the logits of a chunk, element by element, before their loss.
        dtype: of the loss; default: fp32, or that of `x` where it is wider.

    Raises:
        LayoutError: shards that do not fit.
        RangeError: targets that are no class.
    """
    check_weights(weights, plan.loss)
    enter(mesh, (plan, reduction), x)
    if x.dim() != 2:
        raise LayoutError(f"linear_cross_entropy '{plan.loss.name}': x is {tuple(x.shape)}; it takes [rows, features]")
    targets = whole_targets(targets, plan.head.a, x.shape[0], mesh, plan.loss.name)
    mine = Layout(mesh.grid, plan.head.out.dims[0]).shard(targets, mesh.rank)
    if torch.compiler.is_compiling():  # which cannot follow gradients that are computed in forward
        logits = matmul(x, weight, plan.head, mesh, bias)
        logits = logits if between is None else between(logits)
        each = row_losses(logits, mine, plan.loss, mesh, weights)
        return reduced(totals(each.double().sum(), mine, plan.loss, mesh, weights), reduction, each.dtype)
    weight = taken(weight, plan.weight, mesh)
    bias = None if bias is None else taken(bias, plan.bias, mesh)
    local: Tensor = _Chunks.apply(x, weight, bias, targets, plan, mesh, weights, between)  # type: ignore[no-untyped-call]
    return reduced(totals(local, mine, plan.loss, mesh, weights), reduction, dtype or wide(x.dtype))


class _Chunks(torch.autograd.Function):
    """The sum of the losses of this rank's rows; gradients are computed in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: LinearLossPlan,
        mesh: GridLike, class_weights: Tensor | None, between: LogitsMap | None,
    ) -> Tensor:  # fmt: skip
        needs = ctx.needs_input_grad[:3]
        head = weight.detach().requires_grad_(needs[1])
        added = None if bias is None else bias.detach().requires_grad_(needs[2])
        operands = (head, added)
        sums = [
            torch.zeros_like(p, dtype=wide(p.dtype)) if p is not None and p.requires_grad else None for p in operands
        ]
        dx = torch.empty_like(x) if needs[0] else None
        total = x.new_zeros((), dtype=torch.float64)
        by_rows = targets.view(plan.head.a.num_splits(0), x.shape[0])
        rows, start = Layout(mesh.grid, plan.head.out.dims[0]), 0
        for size in plan.chunks(x.shape[0]):
            part = x[start : start + size].detach().requires_grad_(needs[0])
            mine = rows.shard(by_rows[:, start : start + size].flatten(), mesh.rank)
            with torch.enable_grad(), own_graph():
                logits = matmul(part, head, plan.product, mesh, added)
                logits = logits if between is None else between(logits)
                loss = row_losses(logits, mine, plan.loss, mesh, class_weights).sum(dtype=torch.float64)
            del logits
            total += loss.detach()
            wanted = [p for p in (part, *operands) if p is not None and p.requires_grad]
            if wanted:
                found = iter(torch.autograd.grad(loss, wanted))
                if dx is not None:
                    dx[start : start + size] = next(found)
                for each in sums:
                    if each is not None:
                        each += next(found)
            start += size
        ctx.save_for_backward(dx, *sums)
        ctx.dtypes = [None if p is None else p.dtype for p in operands]
        return total

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second("linear_cross_entropy")
        dx, *sums = ctx.saved_tensors
        found = [None if s is None else (s * grad.to(s.dtype)).to(d) for s, d in zip(sums, ctx.dtypes, strict=True)]
        return None if dx is None else dx * grad.to(dx.dtype), *found, None, None, None, None, None
