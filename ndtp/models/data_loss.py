"""The loss of a model whose logits are whole, where `dp` splits the batch: the mean over all ranks of that axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.errors import LayoutError
from ndtp.models.frame import Frame
from ndtp.ops.products import relayout

IGNORED = -100


@dataclass(frozen=True)
class DataLoss:
    """A forward hook.  Losses of logits that are split are those of all sequences already.

    Others are means over the sequences of one dp rank: their mean is the loss, since each has as many, unless some
    labels do not count.
    """

    frame: Frame

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        has_split_loss, self.frame.has_split_loss = self.frame.has_split_loss, False
        named = dict(output) if isinstance(output, Mapping) else {}
        if isinstance(output, tuple):
            named = dict(zip(("loss", "logits"), output, strict=False))
        loss = named.get("loss")
        if not isinstance(loss, Tensor) or loss.dim():
            return output
        if has_split_loss:
            return output
        labels = kwargs.get("labels")
        if isinstance(labels, Tensor) and not labels.is_floating_point() and bool((labels == IGNORED).any()):
            raise LayoutError(
                f"parallelize: the loss of whole logits is a mean over labels, of which dp ranks may ignore "
                f"({IGNORED}) different numbers\n  fix: compute the loss of out.logits, or leave dp=1"
            )
        mesh, axes = self.frame.mesh, self.frame.mesh.grid.nontrivial(self.frame.outside.dims[0])
        bare = Layout(mesh.grid, None)
        part = (loss / mesh.grid.size(axes)).reshape(1)
        mean = relayout(part, bare, bare, mesh, "loss", partial=axes).reshape(())
        if isinstance(output, tuple):
            return (mean, *output[1:])
        output["loss"] = mean
        return output


def average_loss(model: nn.Module, frame: Frame) -> None:
    """Average the loss over `dp`, where the batch is split over it, and only there."""
    if frame.mesh.grid.nontrivial(frame.outside.dims[0]):
        model.register_forward_hook(DataLoss(frame), with_kwargs=True)
        # transformers' Trainer would have the loss divided by the labels it has seen, those of its own rows alone.
        found: Any = model
        base = found.get_base_model() if hasattr(type(model), "get_base_model") else found
        base.accepts_loss_kwargs = False
