"""The rearrangement of tensors around collectives: blocks of a dim behind one another on dim 0, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ndtp.collectives.buffer_ring import BufferRing
    from ndtp.collectives.handles import Shape

# Where blocks arrive, how they get in line, and what was borrowed for that.
Landing = tuple[Tensor, Callable[[], Tensor], tuple[Tensor, ...]]


def copied_from(ring: BufferRing, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A borrowed, contiguous copy."""
    copy = ring.borrow(x.shape, x)
    copy.copy_(x.detach())
    return copy, (copy,)


def landing_of(ring: BufferRing, shape: Shape, dim: int, ranks: int) -> Callable[[Tensor, Tensor | None], Landing]:
    """Blocks of `shape` arrive behind one another on dim 0, and get in line on `dim`."""
    whole, stacked = with_size(shape, dim, ranks * shape[dim]), (ranks * shape[0], *shape[1:])
    if math.prod(shape[:dim]) == 1:  # they arrive in line

        def land_in_line(like: Tensor, out: Tensor | None) -> Landing:
            result = like.new_empty(whole) if out is None else out
            return result.view(stacked), lambda: result, ()

        return land_in_line

    def land(like: Tensor, out: Tensor | None) -> Landing:
        landing = ring.borrow(stacked, like)

        def finish() -> Tensor:
            result = like.new_empty(whole) if out is None else out
            result.unflatten(dim, (ranks, shape[dim])).copy_(landing.view(ranks, *shape).movedim(0, dim))
            return result

        return landing, finish, (landing,)

    return land


def check_out(out: Tensor, shape: Shape, like: Tensor) -> None:
    """Raises ValueError where a result of that shape, of the dtype of `like`, cannot be put into `out` as it is."""
    if out.shape != shape or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(
            f"a result {tuple(shape)} of {like.dtype} does not fit into `out`: {tuple(out.shape)} of {out.dtype}"
            + ", not contiguous" * (not out.is_contiguous())
        )


def with_size(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def real(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which process groups take."""
    return torch.view_as_real(x) if x.is_complex() else x
