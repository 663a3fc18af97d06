"""The head of a model and its cross entropy as one, in chunks of rows: one chunk of logits exists at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.compute.constants import indices_on
from ndtp.models.frame import Frame
from ndtp.models.hidden import Hidden, leave
from ndtp.models.kept_logits import KeptWeights
from ndtp.models.made_classes import made_class
from ndtp.models.pending import Pending, pending
from ndtp.models.projections import Projection, products
from ndtp.models.seen_weights import has_own_weights
from ndtp.models.waiting import Call
from ndtp.nn.hooks import has_hooks
from ndtp.nn.losses import loss_plan
from ndtp.ops.linear_losses import LinearLossPlan, linear_cross_entropy
from ndtp.ops.losses import dtype_of_loss
from ndtp.ops.products import chain
from ndtp.runtime.arrival import local_shard


class HeadSchedule:
    """A head that is one with the loss, where the model was called for one."""

    def called(self, member: Projection, x: Tensor) -> Hidden | None:
        if not member.frame.has_labels or torch.compiler.is_compiling():
            return None
        if has_hooks(member) or "forward" in member.__dict__ or not has_own_weights((member,)):
            return None
        call = Call((member,), member.taken(x), plain_products, x, cross_entropy, KeptWeights((member,)))
        return pending(call, member)


def plain_products(members: Sequence[Projection], x: Hidden) -> list[Tensor]:
    """Multiply by a head by itself; nothing was gathered ahead of weights that were kept, which are no layer's."""
    (head,) = members
    weight, bias = head.weight_and_bias()
    if weight is head.__dict__["_parameters"]["weight"] and isinstance(weight, torch.nn.Parameter):
        return products(members, x)
    given = (local_shard(weight),), (None if bias is None else local_shard(bias),)
    return [chain(leave(x), *given, (head.plan,), (None,), head.mesh)]


def cross_entropy(
    logits: Pending,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy` of logits that nobody has computed.

    What is made of them before (casts, a soft cap, a bias, rows that are picked) is made of each chunk.
    """
    call, passage = logits.call, logits.passage
    head, frame = call.members[0], passage.frame
    if head is not frame.head or reduction not in ("mean", "sum"):
        return NotImplemented
    if size_average is not None or reduce is not None or not isinstance(target, Tensor) or logits.dim() != 2:
        return NotImplemented
    if target.is_floating_point() or tuple(target.shape) != passage.lead or not call.take():
        return NotImplemented
    rows = leave(call.source)
    key = (passage.features, ignore_index, label_smoothing)
    plan = frame.losses.get(key)
    if plan is None:
        loss = loss_plan(
            head.plan.out, passage.features, ignore_index, label_smoothing, 0.0, reduction, passage.came_from or "loss"
        )
        plan = frame.losses[key] = LinearLossPlan(head.plan, loss, frame.loss_rows)
    own, bias = head.weight_and_bias(rows)
    dtype = dtype_of_loss(logits.dtype, rows.device.type)
    found = linear_cross_entropy(
        rows, own, bias, _all_targets(logits, target, ignore_index), plan, frame.mesh, reduction,
        weights=weight, between=lambda part: logits.formula({(0, None): part}), dtype=dtype,
    )  # fmt: skip
    found = frame.mesh.step.made_whole(found, (target, weight, ignore_index, label_smoothing, reduction))
    return frame.note_loss(found)


def _all_targets(logits: Pending, target: Tensor, ignore_index: int) -> Tensor:
    """Return targets [rows of all dp ranks] with this rank's own in place; the others' are ignored, like padding."""
    frame, given = logits.passage.frame, logits.call.source.passage
    outside = frame.outside.dims[0]
    grid = frame.mesh.grid
    whole = target.new_full((grid.size(outside), given.rows), ignore_index)
    mine = whole[grid.index(frame.mesh.rank, outside)]
    if logits.rows is None:
        mine[:] = given.laid(target, ignore_index)
    else:
        mine[indices_on(given.row_of(logits.rows), target.device)] = target
    return whole.flatten()


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class WholeModel(nn.Module):
    """The class of a model whose head is on a grid: while it runs with labels, logits are what the loss is made of."""

    ndtp_frame: Frame


def place_model(model: nn.Module, frame: Frame) -> None:
    """Let the head of a model know whether it is called with labels."""
    theirs: Any = type(model)
    model.__class__ = _whole(theirs, theirs.forward)
    model.ndtp_frame = frame  # type: ignore[assignment]


@functools.cache
def _whole(theirs: Any, forward_of_theirs: Any) -> Any:
    """The class of the split models of a class and its forward, which others may exchange; made once."""
    by_place = [p.name for p in inspect.signature(forward_of_theirs).parameters.values() if p.kind in POSITIONAL]
    place = by_place.index("labels") - 1 if "labels" in by_place else len(by_place)

    @functools.wraps(forward_of_theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, frame = self.ndtp_frame.has_labels, self.ndtp_frame
        frame.has_labels = kwargs.get("labels") is not None or (len(args) > place and args[place] is not None)
        try:
            return theirs.forward(self, *args, **kwargs)
        finally:
            frame.has_labels = before

    return made_class(theirs.__name__, (WholeModel, theirs), {"__module__": theirs.__module__, "forward": forward})
