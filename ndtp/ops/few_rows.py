"""Products of few rows with weights that stay where they are: what decoding does, one token of each sequence a step.

    C = RS_x( AG_y(A) . [B1 | B2 | ..] )     AG of A and RS of C move few rows; no weight moves, and none is copied

`ndtp.ops.products` binds a program to the number of rows, cuts rows into chunks that overlap, and takes one weight a
product: layers that are one product (q, k, v; gate and up) copy their weights side by side for it, which is little
beside thousands of rows.  For few rows reading the weights is all of the time, so each is read once, as it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ndtp.ops.moving import way_of

if TYPE_CHECKING:
    from ndtp.algebra.matmul_plan import MatMulPlan
    from ndtp.runtime.grid_like import GridLike
    from ndtp.runtime.moves import Way

MOST_ROWS = 256  # of a rank; more are worth programs whose chunks overlap


def is_inference(x: Tensor, mesh: GridLike) -> bool:
    """Return whether a call with this tensor keeps nothing and is not looked at: no gradients, no cast, no check."""
    if torch.is_grad_enabled() or mesh.check or mesh.collectives.wire is not None or torch.compiler.is_compiling():
        return False
    if x.is_meta:  # a device without autocast, which is refused where it is asked for
        return False
    return not (torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type))


def takes_few_rows(rows: Tensor, plans: Sequence[MatMulPlan], mesh: GridLike) -> bool:
    """Return whether products of these rows are computed here: no gradients, few rows, weights that stay.

    It is decided by what is the same on all ranks.

    Args:
        plans: of the first product and of the last one.
    """
    shape = rows.shape
    if len(shape) != 2 or shape[0] > MOST_ROWS or not is_inference(rows, mesh):
        return False
    return not plans[0].relayouts["B"] and not plans[-1].relayouts["B"]


class FewRows:
    """A product of few rows of one shape by layers that share their input; the ways of A and C are found once.

    Args:
        parts: into so many the result is split where a weight is one: each part of the result has some of all layers.
    """

    def __init__(self, plan: MatMulPlan, mesh: GridLike, parts: int = 1) -> None:
        self._plan, self._mesh, self._parts = plan, mesh, parts
        self._multiply = mesh.gemm.bound_product(False, plan.transpose_b, 2)
        self._ways: dict[str, Way] = {}

    def __call__(self, rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
        """Return the products side by side: [rows, features / y] as `plan.out` lays them out.

        Args:
            rows: this rank's shard of A.
            weights, biases: this rank's shards of the layers' parameters, as the plan lays them out.
        """
        gathered = self._moved(rows, "A")
        multiply = self._multiply
        c = self._side_by_side([multiply(gathered, weight) for weight in weights])
        c = self._moved(c, "C")
        for bias in biases:
            if bias is not None:
                return c + self._moved(self._side_by_side(self._all(weights, biases)), "bias")
        return c

    def _all(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the biases, with zeros for layers that have none."""
        dim = -2 if self._plan.transpose_b else -1
        return [w.new_zeros(w.shape[dim]) if b is None else b for w, b in zip(weights, biases, strict=True)]

    def _moved(self, x: Tensor, name: str) -> Tensor:
        way = self._ways.get(name)
        if way is None:
            steps = self._plan.relayouts[name]
            way = self._ways[name] = way_of(x, steps, self._mesh, self._plan.name, "forward")
        return way.carried(x) if way.legs else x

    def _side_by_side(self, made: Sequence[Tensor]) -> Tensor:
        if len(made) == 1:
            return made[0]
        if self._parts == 1:
            return torch.cat(list(made), -1)
        return torch.cat([x.unflatten(-1, (self._parts, -1)) for x in made], -1).flatten(-2)
