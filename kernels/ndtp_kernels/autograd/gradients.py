"""Gradients of the products, in terms of the same products: letters change roles, blocks follow their letters.

    C[m, n] = A[m, k] . B[k, n]        dA[m, k] = dC[m, n] . B^T[n, k]        dB[k, n] = A^T[k, m] . dC[m, n]

Each gradient is written as its operand is stored, transposes and blocks included: no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ndtp_kernels.form import Form

Gemm = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _renamed(letter: str | None, names: Mapping[str, str]) -> str | None:
    return None if letter is None else names[letter]


def gradient_a(
    run: Gemm, dc: Tensor, a: Tensor, b: Tensor, form: Form, residual: Tensor | None = None, dtype: Any = None
) -> Tensor:
    """dA [+ residual], stored as A is."""
    if form.transpose_a:
        inner = Form(
            form.transpose_b,
            True,
            _renamed(form.b_blocks, {"k": "m", "n": "k"}),
            _renamed(form.c_blocks, {"n": "k", "m": "n"}),
            _renamed(form.a_blocks, {"k": "m", "m": "n"}),
            a.shape[0] if form.a_blocks else 1,
        )
        left, right = b, dc
    else:
        inner = Form(
            False,
            not form.transpose_b,
            _renamed(form.c_blocks, {"m": "m", "n": "k"}),
            _renamed(form.b_blocks, {"k": "n", "n": "k"}),
            _renamed(form.a_blocks, {"m": "m", "k": "n"}),
            a.shape[0] if form.a_blocks else 1,
        )
        left, right = dc, b
    gradient, _, _ = run(left, right, residual, inner, False, dtype or a.dtype)
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
    if form.transpose_b:
        inner = Form(
            True,
            form.transpose_a,
            _renamed(form.c_blocks, {"n": "m", "m": "k"}),
            _renamed(form.a_blocks, {"m": "k", "k": "n"}),
            _renamed(form.b_blocks, {"n": "m", "k": "n"}),
            b.shape[0] if form.b_blocks else 1,
        )
        left, right = dc, a
    else:
        inner = Form(
            not form.transpose_a,
            False,
            _renamed(form.a_blocks, {"m": "k", "k": "m"}),
            _renamed(form.c_blocks, {"m": "k", "n": "n"}),
            _renamed(form.b_blocks, {"k": "m", "n": "n"}),
            b.shape[0] if form.b_blocks else 1,
        )
        left, right = a, dc
        row_sums = False
    gradient, _, sums = run(left, right, None, inner, row_sums, b.dtype)
    return _summed_to(gradient, b, form.b_blocks), sums if row_sums else None


def _tokens(x: Tensor, transpose: bool, blocks: str | None) -> tuple[Tensor, str | None]:
    """[.., m, r] -> [tokens, r]; blocks along m become ordinary rows, blocks along r stay in front."""
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
