"""The products of one rank's experts: rows sorted by expert, each expert's by its own weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of the rows of operands: what torch's grouped product asks for


def grouped_product(x: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """`y[i] = x[i] W_e^T` for the rows i of each expert e.

        x        [sum(sizes), K]     rows sorted by expert
        weights  [experts, N, K]
        returns  [sum(sizes), N]

    torch's grouped product where a device has it (bf16 on a GPU), else a loop over experts.  The weight of an expert
    without rows has a gradient of zeros.
    """
    result: Tensor = _Grouped.apply(x, weights, tuple(sizes))  # type: ignore[no-untyped-call]
    return result


def tally(x: Tensor, values: int) -> Tensor:
    """[values]: how often each of 0 to values - 1 occurs in x, which has no others; of no memory, none."""
    return x.new_empty(values) if x.is_meta else x.flatten().bincount(minlength=values)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.sizes = sizes
        return multiplied(x, weights.mT, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        wants_x, wants_weights, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        return (
            multiplied(grad, weights, ctx.sizes) if wants_x else None,
            outer(grad, x, ctx.sizes) if wants_weights else None,
            None,
        )


def multiplied(x: Tensor, b: Tensor, sizes: Sequence[int]) -> Tensor:
    """[rows, K] . [experts, K, N] -> [rows, N]"""
    if _fused(x, b):
        return torch._grouped_mm(x, b, offs=_ends(sizes, x.device))
    result = x.new_empty((x.shape[0], b.shape[2]))
    for rows, one, out in zip(x.split(list(sizes)), b.unbind(), result.split(list(sizes)), strict=True):
        if rows.shape[0]:
            torch.mm(rows, one, out=out)
    return result


def outer(grad: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """[rows, N], [rows, K] -> [experts, N, K]: `grad^T x` of each expert's rows; zeros where it has none."""
    if _fused(grad, x):
        result = torch._grouped_mm(grad.mT, x, offs=_ends(sizes, x.device))
        for out, size in zip(result.unbind(), sizes, strict=True):
            if not size:
                out.zero_()  # a product over nothing: nobody promises what is in it
        return result
    result = x.new_empty((len(sizes), grad.shape[1], x.shape[1]))
    for of_grad, rows, out in zip(grad.split(list(sizes)), x.split(list(sizes)), result.unbind(), strict=True):
        if rows.shape[0]:
            torch.mm(of_grad.mT, rows, out=out)
        else:
            out.zero_()
    return result


def _fused(a: Tensor, b: Tensor) -> bool:
    aligned = all(x.shape[-1] * x.element_size() % ALIGNMENT == 0 for x in (a, b, b.mT))
    return a.is_cuda and a.dtype == torch.bfloat16 and aligned and a.shape[0] > 0


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)
