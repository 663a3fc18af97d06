"""Products of few rows with weights that stay where they are: what decoding does, one token of each sequence a step.

    C = RS_x( AG_y(A) . [B1 | B2 | ..] )     AG of A and RS of C move few rows; no weight moves, and none is copied

`ndtp.ops.products` binds a program to the number of rows, cuts rows into chunks that overlap, and takes one weight a
product: layers that are one product (q, k, v; gate and up) copy their weights side by side for it, which is little
beside thousands of rows.  For few rows reading the weights is all of the time, so each is read once, as it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndtp.compute.epilogues import ACTIVATIONS, GATES
from ndtp.ops.moving import moved
from ndtp.runtime.arrival import local_of

if TYPE_CHECKING:
    from ndtp.algebra.matmul_plan import MatMulPlan
    from ndtp.runtime.process_grid import ProcessGrid

MOST_ROWS = 256  # of a rank; more are worth programs whose chunks overlap
WeightAndBias = tuple[Any, Any]  # weight and bias, DTensors or shards, as the plan lays them out


def takes_few_rows(rows: Tensor, plans: Sequence[MatMulPlan], mesh: ProcessGrid) -> bool:
    """Return whether products of these rows are computed here: no gradients, few rows, weights that stay.

    It is decided by what is the same on all ranks.
    """
    if torch.is_grad_enabled() or rows.dim() != 2 or rows.shape[0] > MOST_ROWS or mesh.check:
        return False
    if rows.is_meta or torch.compiler.is_compiling() or mesh.collectives.wire is not None:
        return False
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(rows.device.type):
        return False
    return not any(plan.relayouts["B"] for plan in plans)


def product(
    rows: Tensor, layers: Sequence[WeightAndBias], plan: MatMulPlan, mesh: ProcessGrid, parts: int = 1
) -> Tensor:
    """Return the products of some layers side by side: [rows, features / y] as `plan.out` lays them out.

    Args:
        rows: this rank's shard of A.
        layers: of one input.
        parts: into so many the result is split where a weight is one: each part of the result has some of all layers.
    """
    gathered = moved(rows, plan.relayouts["A"], mesh, plan.name, "forward")
    multiply = mesh.gemm.bound_product(False, plan.transpose_b, 2)
    made = [multiply(gathered, local_of(weight)) for weight, _ in layers]
    c = _side_by_side(made, parts)
    c = moved(c, plan.relayouts["C"], mesh, plan.name, "forward")
    if any(bias is not None for _, bias in layers):
        dim = -2 if plan.transpose_b else -1
        held = [w.new_zeros(local_of(w).shape[dim]) if b is None else local_of(b) for w, b in layers]
        bias = moved(_side_by_side(held, parts), plan.relayouts["bias"], mesh, plan.name, "forward")
        c = c + bias
    return c


def mlp(
    rows: Tensor,
    ups: Sequence[WeightAndBias],
    down: WeightAndBias,
    plans: tuple[MatMulPlan, MatMulPlan],
    mesh: ProcessGrid,
    activation: str,
    parts: int = 1,
    gate_first: bool = True,
) -> Tensor:
    """Return `down(activation(up(rows)))`; a gated activation multiplies the two halves of what the ups give.

    Args:
        gate_first: whether the gate is the first half.
    """
    pre = product(rows, ups, plans[0], mesh, parts)
    if activation in GATES:
        gate, up = pre.chunk(2, -1) if gate_first else pre.chunk(2, -1)[::-1]
        inside = ACTIVATIONS[GATES[activation]].forward(gate.contiguous()).mul_(up)
    else:
        inside = ACTIVATIONS[activation].forward(pre)
    return product(inside, (down,), plans[1], mesh)


def _side_by_side(made: Sequence[Tensor], parts: int) -> Tensor:
    if len(made) == 1:
        return made[0]
    if parts == 1:
        return torch.cat(list(made), -1)
    return torch.cat([x.unflatten(-1, (parts, -1)) for x in made], -1).flatten(-2)
