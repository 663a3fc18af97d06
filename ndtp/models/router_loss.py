"""The load-balancing loss of a model with experts, where `dp` or `e` splits the batch: that of the whole batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.models.frame import Frame
from ndtp.ops.products import relayout

FORMULA = "load_balancing_loss_func"  # transformers', beside each model that has one


@dataclass(frozen=True)
class RouterLoss:
    """A forward hook.  The loss is no mean over tokens: a rank cannot take it of its own sequences.

    The model's formula is computed anew, from all ranks' logits: one number a token and expert.
    """

    frame: Frame

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        formula = getattr(sys.modules[type(model).__module__], FORMULA, None)
        logits = output.get("router_logits") if isinstance(output, Mapping) else None
        before = output.get("aux_loss") if isinstance(output, Mapping) else None
        if formula is None or not isinstance(before, Tensor) or not logits:
            return output
        mesh, outside = self.frame.mesh, self.frame.outside
        bare, mask = Layout(mesh.grid, None, None), kwargs.get("attention_mask")
        every = tuple(relayout(each, outside, bare, mesh, "router logits") for each in logits)
        if isinstance(mask, Tensor):
            mask = relayout(mask.to(every[0].dtype), outside, bare, mesh, "attention mask")
        loss = formula(every, model.num_experts, model.num_experts_per_tok, mask)
        if isinstance(output.get("loss"), Tensor):
            output["loss"] = output["loss"] + model.router_aux_loss_coef * (loss - before)
        output["aux_loss"] = loss
        return output


def whole_router_loss(model: nn.Module, frame: Frame) -> None:
    """Make the router's loss that of the whole batch, where the batch is split, and only there."""
    if frame.mesh.grid.nontrivial(frame.outside.dims[0]):
        model.register_forward_hook(RouterLoss(frame), with_kwargs=True)
