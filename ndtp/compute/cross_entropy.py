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
    """The formula of a row's loss: its negative log-likelihood, with these options.

    Args:
        classes: how many there are, over all ranks.
        smoothing: of labels: this part of the target's weight goes to all classes alike.
        z: is multiplied with the square of the log of the sum of exponentials, and added.
    """

    classes: int
    smoothing: float = 0.0
    z: float = 0.0


NUMBERS = 3  # of the statistics of a part of the classes
MERGED = 2  # of those of all


def statistics(logits: Tensor, target: Tensor, form: LossForm, weights: Tensor | None = None) -> Tensor:
    """Return [3, rows]: the maximum, the sum of exponentials above it, and the target's logit or the weighted
    logits.

    Of no classes at all, which is what a rank has that holds nothing but padding: a maximum that never wins.

    Args:
        weights: of the classes of this part.
    """
    dtype = wide(logits.dtype)
    if logits.shape[1] == 0:
        found = logits.new_zeros((NUMBERS, logits.shape[0]), dtype=dtype)
        found[0] = -torch.inf
        return found
    logits = logits.to(dtype)
    top = logits.amax(1)
    # Rows of nothing but -inf have no distance from their maximum.
    exponentials = (logits - torch.where(top.isinf(), 0, top)[:, None]).exp().sum(1)
    place = target.clamp(min=0)
    off = torch.where(target >= 0, logits.gather(1, place[:, None])[:, 0], 0)
    if form.smoothing:
        off = off * (1 - form.smoothing)
    if weights is not None:
        off = off * weights[place]
    if form.smoothing:
        every = logits.sum(1) if weights is None else logits @ weights
        off = off + form.smoothing / form.classes * every
    return torch.stack((top, exponentials, off))


def merged(parts: Tensor) -> Tensor:
    """Merge the statistics of all parts, [ranks, 3, rows], to [2, rows]: the target's logit, and the log of the sum
    of exponentials.
    """
    tops, exponentials, off = parts.unbind(1)
    top = tops.amax(0)
    top = torch.where(top.isinf(), 0, top)
    return torch.stack((off.sum(0), top + (exponentials * (tops - top).exp()).sum(0).log()))


def row_weights(target: Tensor, form: LossForm, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row the weight of its target, and the sum of the weights of all of its labels."""
    own = weights[target.clamp(0, form.classes - 1)]
    return own, (1 - form.smoothing) * own + form.smoothing / form.classes * weights.sum()


def losses(off: Tensor, lse: Tensor, form: LossForm, labels: Tensor | None = None) -> Tensor:
    """Return the loss of each row, [rows].

    Args:
        labels: the weight of all labels of a row together; default: one.
    """
    loss = (lse if labels is None else lse * labels) - off
    return loss + form.z * lse.square() if form.z else loss


def gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    upstream: Tensor,
    form: LossForm,
    labels: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the logits from the gradient of each row's loss; `labels` and `weights` as in `losses`."""
    grad = (logits.to(lse.dtype) - lse[:, None]).exp_()
    if form.z or labels is not None:
        grad *= ((1 if labels is None else labels) + 2 * form.z * lse)[:, None]
    if form.smoothing:
        each = form.smoothing / form.classes
        grad -= each if weights is None else each * weights
    if grad.shape[1]:
        place = target.clamp(min=0)
        weight = (target >= 0).to(grad.dtype) * (form.smoothing - 1)
        weight = weight if weights is None else weight * weights[place]
        grad.scatter_add_(1, place[:, None], weight[:, None])
    return (grad * upstream[:, None]).to(logits.dtype)
