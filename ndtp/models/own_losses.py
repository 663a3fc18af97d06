"""Losses of a program's own on a grid whose ranks have rows of their own: their gradients are summed over these ranks.

A loss of torch's `DistributedDataParallel` is a mean over a rank's rows, and its gradients are averaged.  Here ranks
whose losses are such means divide them.  A program that does not, trains with a multiple of the gradient, which an
optimizer such as Adam hides.
"""

from __future__ import annotations

from torch import Tensor, nn

from ndtp.errors import warn


def warn_of_own_losses(model: nn.Module, ranks: int, begin: Tensor) -> None:
    """Warn of losses that nobody seems to have divided; a model whose loss is that of all ranks' rows has none.

    Args:
        ranks: how many have rows of their own.
        begin: the gradient of a loss that the model gave, or that was made of its split activations.
    """
    said = getattr(vars(model).get("ndtp_report"), "losses", "")
    if not said or begin.is_meta:
        return
    factor = abs(begin.item())
    if not 0 < factor <= 1:  # the scale of a GradScaler, which tells nothing of a divisor
        return
    micro_batches = 1 / (factor * ranks)
    if round(micro_batches) and abs(micro_batches - round(micro_batches)) < 1e-3:
        return
    warn(
        f"ndtp: {said}; torch's DistributedDataParallel averages them\n  fix: (loss / {ranks}).backward() where the "
        "loss is a mean and is not divided yet; nothing where it is a sum, or is divided"
    )
