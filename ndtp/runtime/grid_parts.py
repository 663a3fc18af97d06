"""Tensors of a grid and tensors that every rank has: the whole of one, and this rank's part of the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ndtp.runtime.dtensor_rules import box_of
from ndtp.runtime.halves import as_it_lies, dense_part, laid_sizes
from ndtp.runtime.reads import NamedRead


def dense_of(x: Tensor) -> Tensor:
    """Return the whole of a split activation, a collective; or a tensor that every rank has, as it is."""
    gathered: Callable[[], Tensor] | None = getattr(x, "gathered", None)
    return x if gathered is None else gathered()


def part_of(dense: Tensor, like: Any) -> Tensor:
    """This rank's shard of a tensor that every rank has, with padding or without, to lie as a DTensor does."""
    dense = as_it_lies(dense_of(dense), like.dim())
    start, shape = box_of(like)
    inside = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
    mine = dense[inside]
    if mine.shape == torch.Size(shape):
        return mine.clone()  # with memory of its own: that of the whole goes
    whole = dense.new_zeros(shape)
    whole[tuple(map(slice, mine.shape))] = mine
    return whole


def lying_as(local: Tensor, like: Any) -> Any:
    """A DTensor of a shard, that lies as another one does."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def on_every_rank(x: Tensor, like: Any) -> Any:
    """A DTensor of the numbers of a tensor that every rank has, on the mesh of another one."""
    x = x if torch.is_grad_enabled() else x.detach()  # or torch 2.11 has no rule for what autograd does of it
    return DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


@torch.no_grad()
def full_of(x: Any, what: str = "whole") -> Tensor:
    """The whole without padding, on every rank; a collective, of which errors say what it is."""
    own = getattr(x, "_dtensor", x).detach()  # or torch 2.11 has no rule for what autograd does of it
    with NamedRead(own, what, getattr(x, "ndtp_name", "")):
        # Gloo has no integers of 16 bits.
        whole = own.full_tensor() if own.dtype is not torch.int16 else own.int().full_tensor().short()
    return dense_part(whole, getattr(x, "ndtp_real", whole.shape))


def boxes_of(like: object, local: Tensor, real: Sequence[int]) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return the parts of the whole, without padding, that a shard has of it: where each begins, and its memory.

    Args:
        like: a DTensor that lies as the shard's.
        real: the sizes of the whole.
    """
    start, shape = box_of(like)
    laid = laid_sizes(real, len(start))
    start = tuple(min(a, n) for a, n in zip(start, laid, strict=True))
    inside = local[tuple(slice(min(n - a, m)) for a, n, m in zip(start, laid, shape, strict=True))]
    if len(laid) == len(real):
        return [(start, inside)]
    first, half, *rest = start
    boxes = [((first, (half + i) * laid[2] + rest[0], *rest[1:]), x) for i, x in enumerate(inside.unbind(1))]
    return [(start, x) for start, x in boxes if x.numel()]  # an empty one may lie where that of another rank does


def clear(x: Any) -> None:
    """Write zeros behind the sizes of the whole."""
    start, _ = box_of(x._dtensor)
    local = x._local_tensor.detach()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(x._local_tensor):  # type: ignore[attr-defined]
        for dim, (first, real) in enumerate(zip(start, laid_sizes(x.ndtp_real, local.dim()), strict=True)):
            inside = min(max(real - first, 0), local.shape[dim])
            if inside < local.shape[dim]:
                local.narrow(dim, inside, local.shape[dim] - inside).zero_()
