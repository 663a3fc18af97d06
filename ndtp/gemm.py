"""The local products of a plan: forward, dgrad and wgrad of one rank, by torch's GEMM with fp32 accumulation."""

from __future__ import annotations

import torch
from torch import Tensor

from ndtp.contraction import Letters, MatMulPlan


def forward(plan: MatMulPlan, a: Tensor, b: Tensor) -> Tensor:
    """C[.., M, N] = A . B, for operands held as their roles ask."""
    return torch.matmul(a.mT if plan.transpose_a else a, b.mT if plan.transpose_b else b)


def dgrad(plan: MatMulPlan, grad: Tensor, b: Tensor) -> Tensor:
    """dA = dC . B^T, stored as A is, summed over batch dims that A lacks."""
    b_t = b if plan.transpose_b else b.mT
    product = torch.matmul(b_t.mT, grad.mT) if plan.transpose_a else torch.matmul(grad, b_t)
    return _drop_batch(product, plan.a_letters, plan.batch_letters)


def wgrad(plan: MatMulPlan, grad: Tensor, a: Tensor) -> Tensor:
    """dB = A^T . dC, stored as B is, summed over batch dims that B lacks."""
    if plan.b.ndim == 2 and not plan.transpose_a and a.shape[:-1] == grad.shape[:-1]:
        a, grad = a.flatten(0, -2), grad.flatten(0, -2)  # one GEMM, not a batch of them
    a_t = a if plan.transpose_a else a.mT
    product = torch.matmul(grad.mT, a_t.mT) if plan.transpose_b else torch.matmul(a_t, grad)
    return _drop_batch(product, plan.b_letters, plan.batch_letters)


def _drop_batch(product: Tensor, letters: Letters, batch: tuple[str, ...]) -> Tensor:
    """Sum a product over the batch dims that its operand lacks or holds with size 1."""
    extra = product.dim() - len(letters)
    if extra > 0:
        product = product.sum(tuple(range(extra)))
    units = tuple(dim for dim, letter in enumerate(letters) if letter is None)
    return product.sum(units, keepdim=True) if units else product
