"""Code of torch that would take a model whose parameters are split for a dense one: it is refused, or kept away."""

from __future__ import annotations

import sys

from torch import nn

from ndtp.compute.traces import TORCHSCRIPT
from ndtp.errors import LayoutError
from ndtp.models.adopted import class_of


class NotReplicated:
    """A model with parameters of its own on every rank, which DDP would take for copies, and TorchScript for all."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> object:
        """DDP looks for this first, and TorchScript before it traces; to others it is not there."""
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if asks == "torch._jit_internal":
            raise LayoutError(f"torch.jit: {TORCHSCRIPT}")
        if asks != "torch.nn.parallel.distributed":
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise LayoutError(
            "DistributedDataParallel: parameters of this model are split over a grid, and it takes them for copies\n"
            "  fix: an axis for data parallelism, Grid(dp=2, ...), whose gradients ndtp sums; no wrapper"
        )

    def __prepare_scriptable__(self) -> object:
        """Refuse torch.jit.script, which asks every module for this first."""
        raise LayoutError(f"torch.jit: {TORCHSCRIPT}")


def not_replicated(model: nn.Module) -> None:
    """Let a model refuse what takes its parameters for whole ones, and no recurrent layer move its weights.

    On a GPU `flatten_parameters`, which such a layer also calls by itself when its weights are other tensors than
    before, asks where the memory of each weight lies.  Of a weight on a grid this rank has a shard.
    """
    if not isinstance(model, NotReplicated):
        model.__class__ = class_of(NotReplicated, type(model))
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _nothing_to_flatten  # type: ignore[method-assign]


def _nothing_to_flatten() -> None:
    """Stand in for `flatten_parameters`: each call has whole weights of its own, which it would move every time."""
