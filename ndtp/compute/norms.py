"""Layer norm and RMS norm of rows of which one rank has a part of the features: local sums, and what follows from them.

Rows are [rows, features]; statistics [numbers, rows], in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def bound_on_one_rank(
    features: int,
    given: Sequence[torch.dtype | None],
    dtype: torch.dtype,
    centred: bool,
    eps: float,
    offset: float = 0.0,
) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """Return the norm of rows [.., features] that are whole, without gradients: a function of them, gain and bias.

    Args:
        given: dtypes of gain and bias, None where there is none; what lies behind `features` in them is padding.
        dtype: of the rows.
        centred, eps, offset: as of `ndtp.ops.norms`.
    """
    sizes, is_alike = (features,), {*given} <= {dtype, None}

    def normed(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        if gain is not None:
            gain = gain if gain.shape[0] == features else gain[:features]
            gain = gain + offset if offset else gain
        if bias is not None and bias.shape[0] != features:
            bias = bias[:features]
        if is_alike:  # torch's own round once, too
            return F.layer_norm(x, sizes, gain, bias, eps) if centred else torch.rms_norm(x, sizes, gain, eps)
        rows = x.reshape(-1, features)
        mean, squares = moments(rows).unbind() if centred else (None, sum_of_squares(rows)[0])
        scale = (squares / features + eps).rsqrt()
        return scaled(normalized(rows, mean, scale), gain, bias, dtype).view(x.shape)

    return normed


def gradient_sums(grad: Tensor, normal: Tensor, centred: bool) -> Tensor:
    """Return [1 or 2, rows]: the sums over features of grad * normal and, where rows were centred, of grad."""
    sums = [(grad * normal).sum(-1)] + ([grad.sum(-1)] if centred else [])
    return torch.stack(sums)


def input_gradient(grad: Tensor, normal: Tensor, sums: Tensor, scale: Tensor, features: int) -> Tensor:
    """Return `scale (grad - normal mean(grad normal) - mean(grad))`; `sums` are `gradient_sums` over all features."""
    means = sums / features
    dx = grad - normal * means[0][:, None]
    return (dx if len(means) == 1 else dx - means[1][:, None]) * scale[:, None]
