"""The form of a product: where its letters lie, its extra operands, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ndtp_kernels.errors import KernelError
from ndtp_kernels.operands import Matrix, batch_shape, matrix, shape_of
from ndtp_kernels.reference import ACTIVATIONS


class Form(NamedTuple):
    """The places of a product's letters: transposes, and blocks ("m", "k"; "k", "n") of A and B, and
    the number of blocks of columns as which C is written.
    """

    transpose_a: bool = False
    transpose_b: bool = False
    a_blocks: str | None = None
    b_blocks: str | None = None
    c_blocks: int = 1


class Product(NamedTuple):
    c: Tensor
    pre: Tensor | None = None  # the pre-activation


@dataclass(frozen=True)
class ProductRequest:
    """One product, checked: operands as the caller stores them, what comes beside them, what is to come back."""

    a: Tensor
    b: Tensor
    form: Form
    out_dtype: torch.dtype
    activation: str = "none"
    bias: Tensor | None = None
    pre: Tensor | None = None  # backward: what forward kept
    keep_pre: bool = False  # forward: also return the pre-activation
    out: Tensor | None = None
    accumulate: bool = False


class Read(NamedTuple):
    a: Matrix
    b: Matrix
    batch: tuple[int, ...]
    c_shape: list[int]


def read(op: str, a: Tensor, b: Tensor, form: Form, activation: str) -> Read:
    """Shapes of a product, checked; works on meta tensors.

    Raises:
        KernelError: the operands do not fit together, naming both.
    """
    check_activation(op, activation)
    if a.dtype != b.dtype:
        raise KernelError(op, f"A is {a.dtype} and B is {b.dtype}", "cast one of them")
    view_a = matrix(a, "mk", form.transpose_a, form.a_blocks, op=op, name="a")
    view_b = matrix(b, "kn", form.transpose_b, form.b_blocks, op=op, name="b")
    if view_a.cols != view_b.rows:
        raise KernelError(
            op,
            f"dim k of A is {view_a.cols} and dim k of B is {view_b.rows}: "
            f"A {tuple(a.shape)} (transpose_a={form.transpose_a}, a_blocks={form.a_blocks}), "
            f"B {tuple(b.shape)} (transpose_b={form.transpose_b}, b_blocks={form.b_blocks})",
            "operands that agree on k, or the other transpose",
        )
    batch = batch_shape(op, A=view_a, B=view_b)
    return Read(view_a, view_b, batch, shape_of(batch, view_a.rows, view_b.cols, form.c_blocks, op=op))


def check_activation(op: str, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise KernelError(op, f"activation {activation!r} is not known", f"one of {ACTIVATIONS}")
