"""A 3D layer as AxoNN has it, written out for benchmarks: activations all-reduced whole, weights gathered over z.

Source: Singh et al., "A 4D hybrid algorithm to scale parallel training to thousands of GPUs", 2023 (what is sent, and
the three overlaps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ndtp.compute.torch_calls import AutogradContext
from ndtp.runtime.process_grid import ProcessGrid

# torch 2.13 renamed these two.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class _Step:
    """The state of a step: gathers of weights ahead of their products, and reductions of gradients until the end."""

    gathers: dict[Whole3D, tuple[Any, Tensor]] = field(default_factory=dict)
    reductions: list[tuple[nn.Parameter, Any, Tensor]] = field(default_factory=list)


class Whole3D(nn.Module):
    """A layer y = x W^T + b on axes x, y, z, of which two trade places from layer to layer.

        x       [tokens / z, in / k]          the same on all ranks along n
        weight  [out / n / z, in / k]         gathered over z for its product
        y       [tokens / z, out / n]         summed over k by an all-reduce, the same along k

    Backward all-reduces dx over n beside the product of dW, which is scattered over z and waited for in `finish`.

    Args:
        k, n: the axes that split the features of x, and of y.
        step: shared by all layers of a model.
    """

    def __init__(self, dense: nn.Linear, mesh: ProcessGrid, k: str, n: str, step: _Step) -> None:
        super().__init__()
        at = mesh.coordinate
        self.over_k, self.over_n, self.over_z = (mesh.group((axis,)) for axis in (k, n, "z"))
        self.ranks = {axis: mesh.grid[axis] for axis in (k, n, "z")}
        self.k, self.n, self.step = k, n, step
        ours = dense.weight.detach().chunk(mesh.grid[n], 0)[at[n]].chunk(mesh.grid[k], 1)[at[k]]
        self.weight = nn.Parameter(ours.chunk(mesh.grid["z"], 0)[at["z"]].clone())
        self.bias = (
            nn.Parameter(dense.bias.detach().chunk(mesh.grid[n])[at[n]].clone()) if dense.bias is not None else None
        )
        self.next: Whole3D | None = None

    def gather(self) -> None:
        """Start to gather the weight, unless that is under way."""
        if self not in self.step.gathers:
            rows, columns = self.weight.shape
            whole = self.weight.new_empty(rows * self.ranks["z"], columns)
            work = (
                _all_gather(whole, self.weight.detach(), group=self.over_z, async_op=True)
                if self.ranks["z"] > 1
                else None
            )
            self.step.gathers[self] = work, whole if work else self.weight.detach()

    def gathered(self) -> Tensor:
        """The whole weight; the next layer's is sent for."""
        self.gather()
        if self.next is not None:
            self.next.gather()
        work, whole = self.step.gathers.pop(self)
        if work:
            work.wait()
        return whole

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.bias, self)  # type: ignore[no-any-return,no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Whole3D) -> Tensor:
        whole = layer.gathered()
        ctx.save_for_backward(x, whole)
        ctx.layer = layer
        y = F.linear(x, whole)
        if layer.ranks[layer.k] > 1:
            dist.all_reduce(y, group=layer.over_k)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x, whole), layer = ctx.saved_tensors, ctx.layer
        dx = grad @ whole
        work = dist.all_reduce(dx, group=layer.over_n, async_op=True) if layer.ranks[layer.n] > 1 else None
        dw = grad.T @ x
        late = layer.step.reductions
        if layer.ranks["z"] > 1:
            own = torch.empty_like(layer.weight)
            late.append((layer.weight, _reduce_scatter(own, dw, group=layer.over_z, async_op=True), own))
        else:
            late.append((layer.weight, None, dw))
        if layer.bias is not None:
            db = grad.sum(0)
            over_z = dist.all_reduce(db, group=layer.over_z, async_op=True) if layer.ranks["z"] > 1 else None
            late.append((layer.bias, over_z, db))
        if work:
            work.wait()
        return dx, None, None, None


class WholeBlock3D(nn.Module):
    """up, activation, down; x and y trade places between the two, so that a block ends as it began."""

    def __init__(self, up: nn.Linear, down: nn.Linear, activation: Any, mesh: ProcessGrid, step: _Step) -> None:
        super().__init__()
        self.up, self.down = Whole3D(up, mesh, "x", "y", step), Whole3D(down, mesh, "y", "x", step)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]


class WholeBlocks3D(nn.Module):
    """Blocks in a row, residual ones if there is more than one.

    Args:
        blocks: (up, activation, down) of each, dense.
    """

    def __init__(self, blocks: Sequence[tuple[nn.Linear, Any, nn.Linear]], mesh: ProcessGrid) -> None:
        super().__init__()
        self.step, self.mesh = _Step(), mesh
        self.blocks = nn.ModuleList(WholeBlock3D(up, down, act, mesh, self.step) for up, act, down in blocks)
        layers = [layer for block in self.blocks for layer in (block.up, block.down)]
        for layer, following in pairwise(layers):
            vars(layer)["next"] = following  # no submodule
        self.is_residual = len(blocks) > 1

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) if self.is_residual else block(x)
        return x

    def finish(self) -> None:
        """Wait for the gradients of the weights; the end of a backward."""
        for parameter, work, gradient in self.step.reductions:
            if work:
                work.wait()
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.step.reductions.clear()

    def shard(self, whole: Tensor) -> Tensor:
        """Return the rows and features that this rank has of an input or a result."""
        at, grid = self.mesh.coordinate, self.mesh.grid
        return whole.chunk(grid["z"], 0)[at["z"]].chunk(grid["x"], 1)[at["x"]].contiguous()
