"""The head of a model and its cross entropy as one, in chunks of rows: one chunk of logits exists at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.models.frame import Frame
from ndtp.models.hidden import Hidden, leave
from ndtp.models.kept_logits import KeptWeights
from ndtp.models.made_classes import made_class
from ndtp.models.noted import Noted
from ndtp.models.one_schedule import Notes, is_bare
from ndtp.models.pending import Pending
from ndtp.models.projections import Projection, products
from ndtp.nn.losses import loss_plan
from ndtp.ops.linear_losses import LinearLossPlan, linear_cross_entropy
from ndtp.ops.losses import dtype_of_loss
from ndtp.ops.products import chain
from ndtp.runtime.arrival import local_shard
from ndtp.split.tensor import SplitTensor


class HeadSchedule(Notes):
    """A head that is one with the loss, where the model was called for one."""

    def called(self, member: Projection, x: Tensor) -> Pending | Noted | None:
        if torch.compiler.is_compiling() or not self.may_wait(member, x) or not is_bare((member,)):
            return None
        options = {"loss": cross_entropy, "kept": KeptWeights((member,))}
        return self.noted(self.call_of((member,), x, plain_products, **options), member, x)

    def may_wait(self, member: Projection, x: Tensor) -> bool:
        return member.frame.has_labels


def plain_products(members: Sequence[Projection], x: Hidden) -> list[Tensor]:
    """Multiply by a head by itself; nothing was gathered ahead of weights that were kept, which are no layer's."""
    (head,) = members
    weight, bias = head.weight_and_bias()
    if weight is head.__dict__["_parameters"]["weight"] and isinstance(weight, torch.nn.Parameter):
        return products(members, x)
    given = (local_shard(weight),), (None if bias is None else local_shard(bias),)
    return [chain(leave(x), *given, (head.plan,), (None,), head.mesh)]


def cross_entropy(
    logits: Pending | Noted,
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
    call, head = logits.call, logits.call.members[0]
    if reduction not in ("mean", "sum") or size_average is not None or reduce is not None:
        return NotImplemented
    if not isinstance(target, Tensor) or isinstance(target, SplitTensor) or target.is_floating_point():
        return NotImplemented
    if tuple(target.shape) != logits.sizes_of_targets or not call.take():
        return NotImplemented
    frame, rows = head.frame, leave(call.source)
    key = (head.name, ignore_index, label_smoothing)
    plan = frame.losses.get(key)
    if plan is None:
        loss = loss_plan(head.plan.out, head.real_out, ignore_index, label_smoothing, 0.0, reduction, head.name)
        plan = frame.losses[key] = LinearLossPlan(head.plan, loss, frame.loss_rows)
    mine, grid, outside = logits.laid_targets(target, ignore_index), frame.mesh.grid, frame.outside.dims[0]
    every = target.new_full((grid.size(outside), len(mine)), ignore_index)  # others' are ignored, like padding
    every[grid.index(frame.mesh.rank, outside)] = mine
    with head.at_work():
        own, bias = head.weight_and_bias(rows)
        found = linear_cross_entropy(
            rows, own, bias, every.flatten(), plan, frame.mesh, reduction, weights=weight,
            between=lambda part: logits.formula({(0, None): part}), dtype=dtype_of_loss(logits.dtype, rows.device.type),
        )  # fmt: skip
    call.feeds_loss = True
    found = frame.mesh.step.made_whole(found, (target, weight, ignore_index, label_smoothing, reduction))
    return found if call.losses is None else call.losses.note_loss(found)


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
