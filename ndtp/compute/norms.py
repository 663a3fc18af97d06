"""Layer norm and RMS norm of rows of which one rank has a part of the features: local sums, and what follows from them.

Rows are [rows, features]; statistics [numbers, rows], in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.compute.constants import numbers_on


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics are computed."""
    return dtype if dtype == torch.float64 else torch.float32


def moments(x: Tensor) -> Tensor:
    """Return [2, rows]: the mean of each row, and its sum of squared distances from that mean.

    Two passes: the mean of squares less the square of the mean cancels where the mean is large.
    """
    if x.shape[-1] == 0:
        return x.new_zeros((2, x.shape[0]), dtype=wide(x.dtype))
    x = x.to(wide(x.dtype))
    mean = x.mean(-1)
    return torch.stack((mean, (x - mean[:, None]).square().sum(-1)))


def merge_moments(parts: Tensor, counts: Sequence[int]) -> Tensor:
    """Merge moments [ranks, 2, rows] of parts with `counts` features to [2, rows] of all features.

    Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    count = numbers_on(counts, parts.device, parts.dtype)[:, None]
    means, squares = parts.unbind(1)
    mean = (means * (count / sum(counts))).sum(0)
    return torch.stack((mean, (squares + count * (means - mean).square()).sum(0)))


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of squares of each row, [1, rows]."""
    return x.to(wide(x.dtype)).square().sum(-1)[None]


def normalized(x: Tensor, mean: Tensor | None, scale: Tensor) -> Tensor:
    """(x - mean) scale, row by row, in the dtype of the statistics."""
    x = x.to(scale.dtype)
    return (x if mean is None else x - mean[:, None]) * scale[:, None]


def scaled(normal: Tensor, gain: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `normal * gain + bias`, rounded once to `dtype`."""
    y = normal if gain is None else normal * gain
    return (y if bias is None else y + bias).to(dtype)


def on_one_rank(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, *, centred: bool, eps: float, offset: float = 0.0
) -> Tensor:
    """Return the norm of rows [.., features] that are whole, without gradients; arguments as of `ndtp.ops.norms`."""
    gain = gain + offset if offset and gain is not None else gain
    if all(p is None or p.dtype == x.dtype for p in (gain, bias)):
        sizes = x.shape[-1:]  # torch's own round once, too
        return F.layer_norm(x, sizes, gain, bias, eps) if centred else F.rms_norm(x, sizes, gain, eps)
    rows = x.reshape(-1, x.shape[-1])
    mean, squares = moments(rows).unbind() if centred else (None, sum_of_squares(rows)[0])
    scale = (squares / rows.shape[1] + eps).rsqrt()
    return scaled(normalized(rows, mean, scale), gain, bias, x.dtype).view(x.shape)


def gradient_sums(grad: Tensor, normal: Tensor, centred: bool) -> Tensor:
    """Return [1 or 2, rows]: the sums over features of grad * normal and, where rows were centred, of grad."""
    sums = [(grad * normal).sum(-1)] + ([grad.sum(-1)] if centred else [])
    return torch.stack(sums)


def input_gradient(grad: Tensor, normal: Tensor, sums: Tensor, scale: Tensor, features: int) -> Tensor:
    """Return `scale (grad - normal mean(grad normal) - mean(grad))`; `sums` are `gradient_sums` over all features."""
    means = sums / features
    dx = grad - normal * means[0][:, None]
    return (dx if len(means) == 1 else dx - means[1][:, None]) * scale[:, None]
