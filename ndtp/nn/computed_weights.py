"""Weights of layers that code has computed, on a grid whose ranks have rows of their own (dp).

A layer gives the gradient of its weight as the sum of all ranks.  Where the weight was computed from the layer's own
parameters by torch alone, as a weight norm does it, the sum goes on to these, and is their gradient.  Whatever else may
have made the weight sums over ranks itself: another layer, a parameter that the model's code reads.  Each of n ranks
gives such code an n-th of the sum, which code and layers add up again.  That is right where all ranks have computed the
same weight; weights that differ are found by their fingerprints, and refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndtp.errors import LayoutError
from ndtp.ops.gradients import all_reduce
from ndtp.runtime.arrival import local_of
from ndtp.runtime.facts import FINE, projection_of
from ndtp.runtime.grid_autograd import PutInPlace
from ndtp.runtime.handed_out import hand_out
from ndtp.runtime.process_grid import ProcessGrid

_MOVES = PutInPlace.__module__  # has functions that move gradients as they are


def as_computed(weight: Any, mesh: ProcessGrid, where: str) -> Any:
    """Return a weight that code has computed, whose gradient sums up to that of all ranks where it is summed again.

    Args:
        where: the layer and the name, for errors.

    Raises:
        LayoutError: some of what it is computed from takes the sum of all ranks alone, and some is summed again.
    """
    axes = mesh.step.row_axes
    if not axes or weight.grad_fn is None or not weight.requires_grad:
        return weight
    leaves, is_summed = _sources(weight.grad_fn)
    leaves = [leaf for leaf in leaves if "ndtp_summed_over" in vars(leaf)]  # others are none of a split model
    if not is_summed and not any(vars(x).get("ndtp_is_read") or "ndtp_set_aside" in vars(x) for x in leaves):
        return weight
    for leaf in leaves:
        if not hand_out(leaf):
            raise LayoutError(
                f"{where} {tuple(weight.shape)} is computed from '{leaf.ndtp_name}', of the layer itself, and from "
                "what other code computes with, on a grid whose ranks have rows of their own (dp): the gradient would "
                "be summed twice\n  fix: compute it from the one or from the other; or z in the place of dp"
            )
    return _OfRanks.apply(weight, mesh, axes, where)  # type: ignore[no-untyped-call]


def _sources(node: Any) -> tuple[list[Any], bool]:
    """Return the parameters to which a gradient goes as it is, and whether it comes to code that sums gradients."""
    seen, waiting, leaves, is_summed = set(), [node], [], False
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
            continue
        module = getattr(getattr(type(node), "_forward_cls", None), "__module__", "")
        if module.partition(".")[0] == "ndtp" and module != _MOVES:
            is_summed = True
        else:
            waiting += [after for after, _ in node.next_functions]
    return leaves, is_summed


class _OfRanks(torch.autograd.Function):
    """A weight that all ranks have computed alike: its gradient is divided by their number."""

    @staticmethod
    def forward(ctx: Any, weight: Any, mesh: ProcessGrid, axes: Sequence[str], where: str) -> Any:
        ctx.mesh, ctx.axes, ctx.where = mesh, axes, f"{where} {tuple(weight.shape)}"
        ctx.found = projection_of(local_of(weight).detach())
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None, None]:
        _compare(torch.as_tensor(ctx.found, dtype=torch.float64), ctx.mesh, ctx.axes, ctx.where)
        return grad / ctx.mesh.grid.size(ctx.axes), None, None, None


@torch.no_grad()
def _compare(found: Tensor, mesh: ProcessGrid, axes: Sequence[str], where: str) -> None:
    """Refuse weights that ranks have computed otherwise, on every rank of the grid; a collective."""
    if found.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    mean = found.clone()
    all_reduce([(f"{where}: fingerprints", mean)], mesh, axes)
    mean /= mesh.grid.size(axes)
    away = ((found - mean)[:2].abs().max() > FINE * mean[2].abs().sqrt()).to(found.dtype).reshape(1)
    all_reduce([(f"{where}: fingerprints", away)], mesh, mesh.grid.nontrivial(tuple(mesh.grid)))
    if away.item():
        raise LayoutError(
            f"{where} was computed, and ranks along {', '.join(axes)} have computed others, of rows of their own: the "
            "layer's gradient would be the sum of all of theirs\n"
            "  fix: torch.nn.functional with the computed weight in the place of the layer; or z in the place of dp"
        )
