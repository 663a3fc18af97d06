"""`DistributedDataParallel` around a model whose parameters are split: refused by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from ndtp.errors import LayoutError
from ndtp.models.adopted import class_of


class NotReplicated:
    """A model with parameters of its own on every rank, which DDP would take for copies."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """DDP looks for this first, and nothing else does."""
        raise LayoutError(
            "DistributedDataParallel: parameters of this model are split over a grid, and it takes them for copies\n"
            "  fix: an axis for data parallelism, Grid(dp=2, ...), whose gradients ndtp sums; no wrapper"
        )


def not_replicated(model: nn.Module) -> None:
    if not isinstance(model, NotReplicated):
        model.__class__ = class_of(NotReplicated, type(model))
