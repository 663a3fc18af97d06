"""The local products of a plan: forward, dgrad and wgrad of one rank, with fp32 accumulation.

One small interface, two implementations: torch's GEMM, and the kernels of `ndtp_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndtp.contraction import Letters, MatMulPlan
from ndtp.epilogues import KernelEpilogues, TorchEpilogues


class TorchGemm(TorchEpilogues):
    """Products by `torch.matmul`; what follows them by `ndtp.epilogues`."""

    def product(self, a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
        """A . B, whose two last dims may each be stored swapped."""
        return torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)

    def forward(self, plan: MatMulPlan, a: Tensor, b: Tensor) -> Tensor:
        """C[.., M, N] = A . B, for operands held as their roles ask."""
        return self.product(a, b, plan.transpose_a, plan.transpose_b)

    def dgrad(self, plan: MatMulPlan, grad: Tensor, b: Tensor) -> Tensor:
        """dA = dC . B^T, stored as A is, summed over batch dims that A lacks."""
        if plan.transpose_a:
            product = self.product(b, grad, plan.transpose_b, True)
        else:
            product = self.product(grad, b, False, not plan.transpose_b)
        return _drop_batch(product, plan.a_letters)

    def wgrad(self, plan: MatMulPlan, grad: Tensor, a: Tensor) -> Tensor:
        """dB = A^T . dC, stored as B is, summed over batch dims that B lacks."""
        if plan.b.ndim == 2 and not plan.transpose_a and a.shape[:-1] == grad.shape[:-1]:
            a, grad = a.flatten(0, -2), grad.flatten(0, -2)  # one GEMM, not a batch of them
        if plan.transpose_b:
            product = self.product(grad, a, True, plan.transpose_a)
        else:
            product = self.product(a, grad, not plan.transpose_a, False)
        return _drop_batch(product, plan.b_letters)


class KernelGemm(KernelEpilogues, TorchGemm):
    """Products by `ndtp_kernels.gemm`: Triton on a GPU, torch where a kernel cannot run.

    Args:
        options: `ndtp_kernels.Options`, such as the backend, or the number of SMs to leave to collectives.
    """

    def __init__(self, **options: Any) -> None:
        import ndtp_kernels

        self.gemm, self.options = ndtp_kernels.gemm, ndtp_kernels.Options(**options)

    def product(self, a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
        if a.dtype is torch.float64:  # the kernels have no such form
            return super().product(a, b, transpose_a, transpose_b)
        return self.gemm(a, b, transpose_a=transpose_a, transpose_b=transpose_b, options=self.options)


def _drop_batch(product: Tensor, letters: Letters) -> Tensor:
    """Sum a product over the batch dims that its operand lacks or holds with size 1."""
    extra = product.dim() - len(letters)
    if extra > 0:
        product = product.sum(tuple(range(extra)))
    units = tuple(dim for dim, letter in enumerate(letters) if letter is None)
    return product.sum(units, keepdim=True) if units else product
