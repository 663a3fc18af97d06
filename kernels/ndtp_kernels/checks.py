"""Checks of a product's extra operands: vectors, scales, tensors of C's shape. Each error names a fix."""

from __future__ import annotations

from torch import Tensor

from ndtp_kernels.errors import KernelError
from ndtp_kernels.form import FP8
from ndtp_kernels.operands import Matrix


def check_vector(op: str, name: str, vector: Tensor | None, size: int) -> Tensor | None:
    if vector is not None and tuple(vector.shape) != (size,):
        raise KernelError(
            op, f"{name} has shape {tuple(vector.shape)}, dim n is {size}", f"a {name} of shape ({size},)"
        )
    return None if vector is None else vector.contiguous()


def check_like(op: str, name: str, tensor: Tensor | None, shape: list[int]) -> None:
    if tensor is not None and list(tensor.shape) != shape:
        raise KernelError(op, f"{name} has shape {tuple(tensor.shape)}, C has {tuple(shape)}", f"{name} of C's shape")


def check_scale(
    op: str, name: str, scale: Tensor | None, batch: tuple[int, ...], size: int, turned: bool
) -> Tensor | None:
    """A number, or one for each row of A ([.., M, 1]) or column of B ([.., 1, N]): as the kernel stores them."""
    if scale is None or scale.numel() == 1:
        return scale if scale is None else scale.float().reshape(1)
    wanted = (1, size) if turned else (size, 1)
    if tuple(scale.shape[-2:]) != wanted:
        raise KernelError(
            op, f"{name} has shape {tuple(scale.shape)}", f"one number, or [.., {wanted[0]}, {wanted[1]}]"
        )
    return scale.float().expand(*batch, *wanted).contiguous()


def scale_size(scale: Tensor | None) -> int:
    return 0 if scale is None else scale.numel()


def check_fp8(op: str, a: Tensor, b: Tensor, va: Matrix, vb: Matrix) -> None:
    if a.dtype == FP8 and not ((va.stride_col == 1 or va.cols <= 1) and (vb.stride_row == 1 or vb.rows <= 1)):
        raise KernelError(
            op,
            f"fp8 products want dim k contiguous in both operands; strides are A {a.stride()}, B {b.stride()}",
            "store B as [N, K] and pass transpose_b=True",
        )
