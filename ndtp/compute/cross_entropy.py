"""Cross entropy of rows of which one rank has a part of the classes: statistics, losses and gradients.

Logits are [rows, classes]; statistics [numbers, rows], in fp32 at least.  A target is a class of this part, or -1 where
another rank has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ndtp.compute.norms import wide


@dataclass(frozen=True)
class LossForm:
    """What is computed of a row: its negative log-likelihood, with

    Args:
        classes: how many there are, over all ranks.
        smoothing: of labels: this part of the target's weight goes to all classes alike.
        z: is multiplied with the square of the log of the sum of exponentials, and added.
    """

    classes: int
    smoothing: float = 0.0
    z: float = 0.0

    @property
    def numbers(self) -> int:
        """Of the statistics of a part of the classes."""
        return 4 if self.smoothing else 3


def statistics(logits: Tensor, target: Tensor, form: LossForm) -> Tensor:
    """[3 or 4, rows]: the maximum, the sum of exponentials above it, the target's logit, and the sum of logits.

    Of no classes at all, which is what a rank has that holds nothing but padding: a maximum that never wins.
    """
    dtype = wide(logits.dtype)
    if logits.shape[1] == 0:
        found = logits.new_zeros((form.numbers, logits.shape[0]), dtype=dtype)
        found[0] = -torch.inf
        return found
    logits = logits.to(dtype)
    top = logits.amax(1)
    # Rows of nothing but -inf have no distance from their maximum.
    exponentials = (logits - torch.where(top.isinf(), 0, top)[:, None]).exp().sum(1)
    picked = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
    numbers = [top, exponentials, torch.where(target >= 0, picked, 0)]
    return torch.stack([*numbers, logits.sum(1)] if form.smoothing else numbers)


def losses(parts: Tensor, form: LossForm) -> Tensor:
    """[ranks, 3 or 4, rows] statistics of all parts -> [2, rows]: the loss, and the log of the sum of exponentials."""
    tops, exponentials, picked = parts.unbind(1)[:3]
    top = tops.amax(0)
    top = torch.where(top.isinf(), 0, top)
    lse = top + (exponentials * (tops - top).exp()).sum(0).log()
    loss = lse - (1 - form.smoothing) * picked.sum(0)
    if form.smoothing:
        loss = loss - form.smoothing / form.classes * parts[:, 3].sum(0)
    if form.z:
        loss = loss + form.z * lse.square()
    return torch.stack((loss, lse))


def gradient(logits: Tensor, target: Tensor, lse: Tensor, upstream: Tensor, form: LossForm) -> Tensor:
    """Of the logits, from that of each row's loss."""
    grad = (logits.to(lse.dtype) - lse[:, None]).exp_()
    if form.z:
        grad *= (1 + 2 * form.z * lse)[:, None]
    if form.smoothing:
        grad -= form.smoothing / form.classes
    if grad.shape[1]:
        weight = (target >= 0).to(grad.dtype) * (form.smoothing - 1)
        grad.scatter_add_(1, target.clamp(min=0)[:, None], weight[:, None])
    return (grad * upstream[:, None]).to(logits.dtype)
