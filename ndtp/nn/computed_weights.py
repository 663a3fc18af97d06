"""Weights of layers that code has computed, on a grid whose ranks have rows of their own (dp).

A layer gives the gradient of its weight as the sum of all ranks.  Where the weight was computed from the layer's own
parameters by torch alone, as a weight norm does it, the sum goes on to these, and is their gradient.  Whatever else may
have made the weight sums over ranks itself: another layer, a parameter that the model's code reads, one that is in a
penalty as well.  Each of n ranks gives such code an n-th of the sum, which code and layers add up again.

That is right where all ranks have computed the same weight.  Weights that differ are found by their fingerprints at the
end of backward, and refused; those that are equal by chance, as of a maker that gives zeros yet, are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.checkpoint import CheckpointFunction

from ndtp.compute.torch_calls import AutogradContext
from ndtp.errors import LayoutError
from ndtp.ops.gradients import all_reduce
from ndtp.runtime.arrival import local_of
from ndtp.runtime.caller import callers
from ndtp.runtime.facts import projection_of
from ndtp.runtime.grid_autograd import PutInPlace
from ndtp.runtime.handed_out import hand_out
from ndtp.runtime.process_grid import ProcessGrid

_MOVES = PutInPlace.__module__  # has functions that move gradients as they are
_MOST_FRAMES = 48  # between the backward of a checkpoint and a layer
_NEAR = 1e-12  # of fp64: how near fingerprints are, as a share of their norm; others are within four last bits


def as_computed(weight: Tensor, mesh: ProcessGrid, where: str) -> Any:
    """Return a weight that code has computed, whose gradient sums up to that of all ranks where it is summed again.

    Args:
        where: the layer and the name, for errors.

    Raises:
        LayoutError: some of what it is computed from takes the sum of all ranks alone, and some is summed again; or a
            checkpoint runs the layer again, and what has made the weight is not in its graph.
    """
    axes = mesh.step.row_axes
    if not axes or not weight.requires_grad or weight.is_meta:
        return weight
    where = f"{where} {tuple(weight.shape)}"
    leaves, is_summed = ([weight], False) if weight.grad_fn is None else _sources(weight.grad_fn)
    others = [leaf for leaf in leaves if not (getattr(leaf, "ndtp_of_model", 0) or hasattr(leaf, "ndtp_summed_over"))]
    if others and any(frame.f_code is CheckpointFunction.backward.__code__ for frame in callers(_MOST_FRAMES)):
        raise LayoutError(
            f"{where} was computed before the checkpoint that runs its layer again, on a grid whose ranks have rows of "
            f"their own ({', '.join(axes)}): its gradient would be summed twice\n"
            "  fix: checkpoint(..., use_reentrant=False), or compute the weight inside of the checkpoint"
        )
    leaves = [leaf for leaf in leaves if not any(leaf is other for other in others)]
    if weight.grad_fn is None:
        return weight
    if not leaves and not is_summed:
        return weight  # of what is no part of a split model
    if is_summed or any(own.get("ndtp_is_read") or own.get("ndtp_is_handed") for own in map(vars, leaves)):
        _hand_out(leaves, where)
    return _OfRanks.apply(weight, mesh, axes, where, leaves, is_summed)  # type: ignore[no-untyped-call]


def _hand_out(leaves: Sequence[object], where: str) -> None:
    """Have what code gives of parameters summed."""
    for leaf in leaves:
        if not hand_out(leaf):
            raise LayoutError(
                f"{where} is computed from '{getattr(leaf, 'ndtp_name', 'a parameter')}', of the layer itself, and "
                "from what other code computes with, on a grid whose ranks have rows of their own (dp): the gradient "
                "would be summed twice\n  fix: compute it from the one or from the other; or z in the place of dp"
            )


def _sources(node: Any) -> tuple[list[object], bool]:
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
    """A weight that all ranks have computed alike: its gradient is divided by their number where it is summed again."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        weight: Tensor,
        mesh: ProcessGrid,
        axes: Sequence[str],
        where: str,
        leaves: Any,
        is_summed: bool,
    ) -> Any:
        ctx.mesh, ctx.axes, ctx.where, ctx.leaves, ctx.is_summed = mesh, axes, where, leaves, is_summed
        local = local_of(weight).detach()
        found = torch.as_tensor(projection_of(local), dtype=torch.float64, device=local.device)
        ctx.found = torch.cat([found, found.new_tensor([max(4 * torch.finfo(local.dtype).eps, _NEAR)])])
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        nothing = (None,) * 5
        # A penalty may compute with a parameter since the forward.
        if not ctx.is_summed and not any("ndtp_set_aside" in vars(leaf) for leaf in ctx.leaves):
            return grad, *nothing
        if not _goes_on(torch._C._current_autograd_node()):  # type: ignore[attr-defined]
            return grad, *nothing  # to who asks for the gradient of the weight itself
        _hand_out(ctx.leaves, ctx.where)
        _note(ctx.mesh, ctx.axes, ctx.where, ctx.found)
        return grad / ctx.mesh.grid.size(ctx.axes), *nothing


def _goes_on(node: Any) -> bool:
    """Return whether the gradient that comes to a node goes on to a parameter in the current backward."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        for after, _ in node.next_functions:
            if after is None or after in seen:
                continue
            seen.add(after)
            try:
                runs = torch._C._will_engine_execute_node(after)  # type: ignore[attr-defined]
            except RuntimeError:  # torch's answer for a leaf that `torch.autograd.grad` was given
                return True
            if runs and hasattr(after, "variable"):
                return True
            waiting += [after] if runs else []
    return False


def _note(mesh: ProcessGrid, axes: Sequence[str], where: str, found: Tensor) -> None:
    """Have a weight's fingerprint compared with those of other ranks when the backward ends."""
    noted = mesh.step.computed
    task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
    if task not in noted:
        noted.clear()  # of a backward that was broken off
        noted[task] = []
        Variable._execution_engine.queue_callback(partial(_compare, mesh, tuple(axes), task))  # type: ignore[attr-defined]
    noted[task].append((where, found))


@torch.no_grad()
def _compare(mesh: ProcessGrid, axes: Sequence[str], task: int) -> None:
    """Refuse weights that ranks have computed otherwise, on every rank of the grid; a collective."""
    noted = mesh.step.computed.pop(task)
    found = torch.stack([each.to(noted[0][1].device) for _, each in noted])
    if found.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    mean = found.clone()
    all_reduce([("fingerprints of computed weights", mean)], mesh, axes)
    mean /= mesh.grid.size(axes)
    away = ((found - mean)[:, :2].abs().amax(1) > mean[:, 3] * mean[:, 2].abs().sqrt()).to(found.dtype)
    all_reduce([("fingerprints of computed weights", away)], mesh, mesh.grid.nontrivial(tuple(mesh.grid)))
    said = (
        f"was computed, and ranks along {', '.join(axes)} have computed others, of rows of their own: the layer's "
        "gradient would be the sum of all of theirs\n"
        "  fix: torch.nn.functional with the computed weight in the place of the layer; or z in the place of dp"
    )
    if found.device.type != "cpu":  # which nobody waits for
        torch._assert_async(away.sum() == 0, f"{noted[0][0]}, or another weight, {said}")
        return
    for (where, _), is_away in zip(noted, away.tolist(), strict=True):
        if is_away:
            raise LayoutError(f"{where} {said}")
