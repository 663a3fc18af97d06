"""Gradients of the products, in terms of the same products: letters change roles, blocks follow their letters.

    C[m, n] = A[m, k] . B[k, n]        dA[m, k] = dC[m, n] . B^T[n, k]        dB[k, n] = A^T[k, m] . dC[m, n]

Each gradient is written as its operand is stored, transposes and blocks included: no copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndtp_kernels.form import Form

Gemm = Callable[..., tuple[Tensor, Tensor, Tensor]]


class _Operand(NamedTuple):
    """A tensor of C = A . B, the letters of its last two dims as they are stored, and the one that lies in blocks."""

    tensor: Tensor
    letters: str
    blocks: str | None


def _operands(dc: Tensor, a: Tensor, b: Tensor, form: Form) -> tuple[_Operand, _Operand, _Operand]:
    return (
        _Operand(dc, "mn", form.c_blocks),
        _Operand(a, "km" if form.transpose_a else "mk", form.a_blocks),
        _Operand(b, "nk" if form.transpose_b else "kn", form.b_blocks),
    )


def _product_for(result: _Operand, dc: _Operand, other: _Operand) -> tuple[_Operand, _Operand, Form]:
    """The product that is the gradient of one operand, stored as that is: left and right, and their form.

    The left one has the letter of the result's rows, the right one that of its columns, both the one between.
    """
    row, column = result.letters[0], result.letters[1]
    left, right = (dc, other) if row in dc.letters else (other, dc)
    (between,) = set(left.letters) - {row}
    names: dict[str | None, str | None] = {row: "m", between: "k", column: "n", None: None}
    form = Form(
        left.letters[0] != row,
        right.letters[0] == column,
        names[left.blocks],
        names[right.blocks],
        names[result.blocks],
        result.tensor.shape[0] if result.blocks else 1,
    )
    return left, right, form


def gradient_a(
    run: Gemm, dc: Tensor, a: Tensor, b: Tensor, form: Form, residual: Tensor | None = None, dtype: Any = None
) -> Tensor:
    """dA [+ residual], stored as A is."""
    of_dc, of_a, of_b = _operands(dc, a, b, form)
    left, right, inner = _product_for(of_a, of_dc, of_b)
    gradient, _, _ = run(left.tensor, right.tensor, residual, inner, False, dtype or a.dtype)
    return _summed_to(gradient, a, form.a_blocks)


def gradient_b(
    run: Gemm, dc: Tensor, a: Tensor, b: Tensor, form: Form, row_sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """dB, stored as B is; with `row_sums` and a transposed B also the sums of dC over m, from the same pass."""
    if b.dim() == 2 + (form.b_blocks is not None) and a.dim() > 2 + (form.a_blocks is not None):
        # A weight: its gradient sums over the batch too, so batch and m are one long dim to contract.
        a, a_blocks = _tokens(a, form.transpose_a, form.a_blocks)
        dc, c_blocks = _tokens(dc, False, form.c_blocks)
        form = form._replace(transpose_a=False, a_blocks=a_blocks, c_blocks=c_blocks)
    of_dc, of_a, of_b = _operands(dc, a, b, form)
    left, right, inner = _product_for(of_b, of_dc, of_a)
    row_sums = row_sums and left is of_dc
    gradient, _, sums = run(left.tensor, right.tensor, None, inner, row_sums, b.dtype)
    return _summed_to(gradient, b, form.b_blocks), sums if row_sums else None


def _tokens(x: Tensor, transpose: bool, blocks: str | None) -> tuple[Tensor, str | None]:
    """Reshape [.., m, r] to [tokens, r]; blocks along m become ordinary rows, blocks along r stay in front."""
    x = x.mT if transpose else x
    if blocks == "m":
        x, blocks = x.movedim(0, -3).flatten(-3, -2), None
    return (x.flatten(0, -2), None) if blocks is None else (x.flatten(1, -2), blocks)


def _summed_to(gradient: Tensor, operand: Tensor, blocks: str | None) -> Tensor:
    """Add up what broadcasting repeated."""
    if gradient.shape == operand.shape:
        return gradient
    lead = 1 if blocks else 0
    missing = gradient.dim() - operand.dim()
    target = (*operand.shape[:lead], *(1,) * missing, *operand.shape[lead:])
    repeated = [d for d, (own, full) in enumerate(zip(target, gradient.shape, strict=True)) if own != full]
    if repeated:
        gradient = gradient.sum(repeated, keepdim=True)
    return gradient.reshape(operand.shape)


def bias_gradient(dc: Tensor, c_blocks: str | None) -> Tensor:
    """Sums of dC over everything but n, in fp32; torch's sum over a dim is deterministic."""
    if c_blocks != "n":
        return dc.flatten(0, -2).sum(0, dtype=sum_dtype(dc))
    return dc.flatten(1, -2).sum(1, dtype=sum_dtype(dc)).flatten()


def sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def stacked(first: Tensor, second: Tensor) -> Tensor | None:
    """Two equal tensors as one [2, ..], if they lie in one storage: halves of a packed weight, say."""
    if first.untyped_storage()._cdata != second.untyped_storage()._cdata or first.stride() != second.stride():
        return None
    step = second.storage_offset() - first.storage_offset()
    if step <= 0:
        return None
    return first.as_strided((2, *first.shape), (step, *first.stride()))
