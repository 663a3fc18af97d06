"""The load-balancing loss of a model with experts, where `dp` or `e` splits the batch: that of the whole batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.models.frame import Frame
from ndtp.models.hidden import Hidden
from ndtp.models.loss_terms import slopes
from ndtp.ops.products import relayout
from ndtp.split.tensor import SplitTensor

FORMULA = "load_balancing_loss_func"  # transformers', beside each model that has one
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


@dataclass(frozen=True)
class RouterLoss:
    """A forward hook.  The loss is no mean over tokens: a rank cannot take it of its own sequences.

    The model's formula is computed anew, from all ranks' logits: one number a token and expert.
    """

    frame: Frame

    def __call__(self, model: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        formula = getattr(sys.modules[type(model).__module__], FORMULA, None)
        logits = output.get("router_logits") if isinstance(output, Mapping) else None
        before = output.get("aux_loss") if isinstance(output, Mapping) else None
        sizes = [getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok")]
        if formula is None or not isinstance(before, Tensor) or not logits or None in sizes:
            return output  # what is left of it is averaged, see `DataLoss`
        mesh, outside = self.frame.mesh, self.frame.outside
        bare, mask = Layout(mesh.grid, None, None), kwargs.get("attention_mask")
        rows = [each.gathered() if isinstance(each, (Hidden, SplitTensor)) else each for each in logits]
        every = tuple(relayout(each, outside, bare, mesh, "router logits") for each in rows)
        if isinstance(mask, Tensor):
            mask = relayout(mask.to(every[0].dtype), outside, bare, mesh, "attention mask")
        loss = formula(every, *sizes, mask)
        self.frame.split_losses += [loss, before]  # of which nothing is left in the sum
        total = output.get("loss")
        if isinstance(total, Tensor):
            output["loss"] = total + coefficient(model, total, before) * (loss - before)
        output["aux_loss"] = loss
        return output


def coefficient(model: object, total: Tensor, part: Tensor) -> Any:
    """Return what a loss multiplies one of its terms by."""
    for name in COEFFICIENTS:
        if hasattr(model, name):
            return getattr(model, name)
    return slopes(total, [part])[0]


def whole_router_loss(model: nn.Module, frame: Frame) -> None:
    """Make the router's loss that of the whole batch, where the batch is split, and only there."""
    if frame.mesh.grid.nontrivial(frame.outside.dims[0]) and hasattr(sys.modules[type(model).__module__], FORMULA):
        model.register_forward_hook(RouterLoss(frame), with_kwargs=True)
