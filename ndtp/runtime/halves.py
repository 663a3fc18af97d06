"""Parameters with halves, one behind the other in a dense model: gates and ups of experts in one weight.

[experts, 2 * inner, hidden] lies on a grid as [experts, 2, inner, hidden], so that each rank can have its part of both
halves.  To whoever holds the parameter its sizes are those of the dense model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

HALVES = 2  # the size of the second dim on the grid


def laid_sizes(real: Sequence[int], dims: int) -> tuple[int, ...]:
    """Return the sizes without padding of a tensor as it lies on the grid, in so many dims."""
    return tuple(real) if len(real) == dims else (real[0], HALVES, real[1] // HALVES, *real[2:])


def as_it_lies(dense: Tensor, dims: int) -> Tensor:
    """Give the halves of a dense tensor the dim that they have on the grid."""
    return dense if dense.dim() == dims else dense.unflatten(1, (HALVES, -1))


def dense_part(whole: Tensor, real: Sequence[int]) -> Tensor:
    """Return a tensor that lies as on the grid with the sizes of the dense one."""
    laid = laid_sizes(real, whole.dim())
    whole = whole if whole.shape == laid else whole[tuple(map(slice, laid))].clone()
    return whole if whole.dim() == len(real) else whole.flatten(1, 2)
