"""Checks of a product's operands: vectors, tensors of C's shape, gradients. Each error names a fix."""

from __future__ import annotations

import torch
from torch import Tensor

from ndtp_kernels.errors import KernelError


def check_vector(op: str, name: str, vector: Tensor | None, size: int) -> Tensor | None:
    if vector is not None and tuple(vector.shape) != (size,):
        raise KernelError(
            op, f"{name} has shape {tuple(vector.shape)}, dim n is {size}", f"a {name} of shape ({size},)"
        )
    return None if vector is None else vector.contiguous()


def check_like(op: str, name: str, tensor: Tensor | None, shape: list[int]) -> None:
    if tensor is None:
        raise KernelError(op, f"{name} is None, C has {tuple(shape)}", f"{name} of C's shape")
    if list(tensor.shape) != shape:
        raise KernelError(op, f"{name} has shape {tuple(tensor.shape)}, C has {tuple(shape)}", f"{name} of C's shape")


def check_gradients(op: str, *tensors: Tensor | None) -> None:
    """Refuse operands whose gradients autograd would miss: backward is called by name here."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise KernelError(
            op, "an operand requires a gradient, and the kernels have no autograd",
            "torch.no_grad() or detach(), and a backward by name: gemm, backward_gemm, reduce_blocks_backward",
        )  # fmt: skip
