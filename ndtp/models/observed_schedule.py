"""Layers of an observed model as one program: those of an MLP, and the head with its loss in chunks of rows.

What follows what element by element, and which layer's result a loss is taken of, one run has shown.  A call is checked
again by what its code does with a `Noted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ndtp.compute.constants import indices_on
from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.models.head_loss import plain_products
from ndtp.models.kept_logits import KeptWeights
from ndtp.models.noted import Noted, NotedCall, noted_result
from ndtp.models.one_schedule import activation_of, as_one
from ndtp.models.projections import products
from ndtp.models.seen_weights import has_own_weights
from ndtp.models.split_layers import ObservedLinear, as_rows
from ndtp.nn.hooks import has_hooks
from ndtp.nn.losses import loss_plan
from ndtp.ops.linear_losses import LinearLossPlan, linear_cross_entropy
from ndtp.ops.losses import dtype_of_loss
from ndtp.ops.products import mlp
from ndtp.runtime.of_turn import OfTurn
from ndtp.split.copies import state_of


def _is_bare(layers: Sequence[nn.Module]) -> bool:
    """Return whether nothing but a layer's forward runs when it is called, with the parameters of the layer."""
    return not any(has_hooks(each) or "forward" in each.__dict__ for each in layers) and has_own_weights(layers)


def _call_of(members: tuple[ObservedLinear, ...], x: Tensor, compute: object, **options: object) -> NotedCall:
    first = members[0]
    rows, features = first.axes_in
    shard, lies = as_rows(x, rows, features, first.width, first.context, first.name, bool(rows or first.rows_out))
    return NotedCall(members, shard, compute, x, rows=lies, **options)  # type: ignore[arg-type]


@dataclass(eq=False)
class ObservedMLP:
    """The layers of one MLP, whose products are one program where nothing but an activation stands between them."""

    ups: tuple[ObservedLinear, ...]
    down: ObservedLinear
    call = OfTurn()
    state = OfTurn()

    def called(self, member: ObservedLinear, x: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return None
        return self._led_back(x) if member is self.down else self._ahead(member, x)

    def _ahead(self, member: ObservedLinear, x: Tensor) -> Noted | None:
        if not _is_bare((*self.ups, self.down)):
            return None
        index, call, now = self.ups.index(member), self.call, state_of(x)
        if call is None or call.given is not x or self.state != now or index in call.asked or not call.is_now:
            call = self.call = _call_of(self.ups, x, products)
            self.state = now
            self.down.frame.shared[id(self)] = self
        made = noted_result(call, member, x.shape[:-1])
        if len(call.asked) == len(self.ups):
            self.call = None
        return made

    def forget(self) -> None:
        self.call = None

    def _led_back(self, x: Tensor) -> Any:
        if not isinstance(x, Noted) or x.call.members != self.ups or not x.is_open:
            return None
        call, down, ups = x.call, self.down, self.ups
        frame = down.frame
        if not x.is_same or x.sample.dtype != call.dtype or call.rows.is_vector:
            return None
        if x.key not in frame.activations:
            frame.activations[x.key] = activation_of(x)
        found = frame.activations[x.key]
        if found is None:
            return None
        with down.at_work():
            if len({each.needed("weight", call.source).dtype for each in (*ups, down)}) > 1:
                return None
        name, leaves = found
        if any(each.out_width * down.real_in != down.width * each.real_out for each in ups):
            return None  # its products do not meet in as many features: one of them has padding
        if down.width != down.real_in and ACTIVATIONS[name].forward(torch.zeros(2)).any():
            return None  # whose padding would not stay zero
        if not call.take():
            return None
        with down.at_work():
            (up_weight, up_bias), (weight, bias) = as_one(ups, leaves), down.weight_and_bias()
            plans = ups[0].plan, down.plan
            y = mlp(call.source, (up_weight, weight), plans, down.mesh, name, (up_bias, bias), (ups[0], down))
        return down.given(y, call.rows)


class ObservedHead:
    """A head whose loss is taken in chunks of rows."""

    def called(self, member: ObservedLinear, x: Tensor) -> Noted | None:
        if torch.compiler.is_compiling() or not _is_bare((member,)) or x.dim() < 2:
            return None
        call = _call_of((member,), x, plain_products, loss=cross_entropy, kept=KeptWeights((member,)))
        return noted_result(call, member, x.shape[:-1])


def cross_entropy(
    logits: Noted,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy` of logits that nobody has computed."""
    call, form = logits.call, logits.sample
    head: Any = call.members[0]
    if reduction not in ("mean", "sum") or size_average is not None or reduce is not None:
        return NotImplemented
    lead = (form.shape[0], *form.shape[2:]) if logits.is_turned else form.shape[:1]
    if form.dim() != 2 and not logits.is_turned:
        return NotImplemented
    if type(target) is not Tensor or target.is_floating_point() or tuple(target.shape) != tuple(lead):
        return NotImplemented
    if not call.take():
        return NotImplemented
    frame, context = head.frame, head.context
    key = (head.name, ignore_index, label_smoothing)
    plan = frame.losses.get(key)
    if plan is None:
        loss = loss_plan(head.plan.out, head.real_out, ignore_index, label_smoothing, 0.0, reduction, head.name)
        plan = frame.losses[key] = LinearLossPlan(head.plan, loss, frame.loss_rows)
    with head.at_work():
        own, bias = head.weight_and_bias(call.source)
        dtype = dtype_of_loss(form.dtype, own.device.type)
        found = linear_cross_entropy(
            call.source, own, bias, _all_targets(logits, target, ignore_index), plan, head.mesh, reduction,
            weights=weight, between=lambda part: logits.formula({(0, None): part}), dtype=dtype,
        )  # fmt: skip
    call.feeds_loss = True
    found = head.mesh.step.made_whole(found, (target, weight, ignore_index, label_smoothing, reduction))
    return found if context.losses is None else context.losses.note_loss(found)


def _all_targets(logits: Noted, target: Tensor, ignore_index: int) -> Tensor:
    """Return targets of all rows in the order in which the layer has them; those of rows nobody picked are ignored."""
    rows, head = logits.call.rows, logits.call.members[0]
    spec, dim = rows.spec, rows.dim
    lead, padded = spec.sizes[:-1], spec.padded[:-1]
    mine = target.new_full((torch.Size(lead).numel(),), ignore_index)
    mine[indices_on(logits.row_ids(), target.device)] = target
    mine = mine.view(lead)
    if padded[dim] != lead[dim]:
        mine = F.pad(mine, [0, 0] * (len(lead) - 1 - dim) + [0, padded[dim] - lead[dim]], value=ignore_index)
    mine = mine.movedim(dim, 0).flatten()
    grid, data = head.mesh.grid, head.frame.outside.dims[0]
    every = target.new_full((grid.size(data), mine.numel()), ignore_index)
    every[grid.index(head.mesh.rank, data)] = mine
    return every.flatten()
