"""The kernels' results by torch alone, on CPUs and wherever the vendor's library is the better choice.

Products run in the operands' dtype and accumulate as the library does; everything after them is fp32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndtp_kernels import reference
from ndtp_kernels.form import Product, ProductRequest


def _product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A . B, in fp32 where that is the result's dtype: a sum of weight gradients must not be rounded to bf16 first."""
    if out_dtype == left.dtype or left.dtype == torch.float64:
        return torch.matmul(left, right)
    if left.is_cuda and left.dim() == right.dim() == 2 and out_dtype == torch.float32 and left.element_size() == 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.matmul(left.float(), right.float())


def gemm(request: ProductRequest) -> Product:
    form, b, b2, out_dtype, keep_pre = request.form, request.b, request.b2, request.out_dtype, request.keep_pre
    left = reference.operand(request.a, "mk", form.transpose_a, form.a_blocks)

    def turned(weight: Tensor) -> Tensor:
        return reference.operand(weight, "kn", form.transpose_b, form.b_blocks)

    def cut(x: Tensor) -> Tensor:
        return reference.cut(x, form.c_blocks, form.num_c_blocks)

    sums = None
    if request.row_sums:
        batch = torch.broadcast_shapes(left.shape[:-2], turned(b).shape[:-2])
        each = left.sum(-1, dtype=torch.float32).expand(*batch, left.shape[-2])
        sums = each.reshape(-1, left.shape[-2]).sum(0)
    steps = (request.bias, request.bias2, request.residual, request.scale_a, request.scale_b, b2)
    if request.activation == "none" and not keep_pre and all(x is None for x in steps):
        return Product(_into(cut(_product(left, turned(b), out_dtype)), request), None, None, sums)

    def before(weight: Tensor, vector: Tensor | None, scale: Tensor | None) -> Tensor:
        pre = cut(reference.product(left, turned(weight), request.scale_a, scale, None))
        if vector is None:
            return pre
        return pre + reference.column_vector(vector.to(pre.dtype), form.c_blocks, form.num_c_blocks, pre.dim())

    pre = before(b, request.bias, request.scale_b)
    c = reference.activation(pre, request.activation)
    if b2 is not None:
        up = before(b2, request.bias2, request.scale_b2)
        c = c * up
        pre = torch.stack((pre, up)) if keep_pre else pre
    if request.residual is not None:
        c = c + request.residual.to(c.dtype)
    # Its own copy: without an activation C may be the very tensor.
    kept = pre.to(out_dtype, copy=True) if keep_pre else None
    return Product(_into(c, request), kept, None, sums)


def _into(c: Tensor, request: ProductRequest) -> Tensor:
    out = request.out
    if out is None:
        return c.to(request.out_dtype)
    if request.accumulate:
        return out.copy_(out.to(c.dtype) + c) if out.dtype != torch.float32 else out.add_(c)
    return out.copy_(c)


def backward_gemm(request: ProductRequest) -> Product:
    form = request.form
    assert request.pre is not None
    left = reference.operand(request.a, "mk", form.transpose_a, form.a_blocks)
    right = reference.operand(request.b, "kn", form.transpose_b, form.b_blocks)
    product = reference.product(left, right, request.scale_a, request.scale_b, None)
    return _backward(
        reference.cut(product, form.c_blocks, form.num_c_blocks), request.pre, activation=request.activation,
        gated=request.gated, column_sums=request.column_sums, recompute=request.recompute, out_dtype=request.out_dtype,
        blocks=form.c_blocks,
    )  # fmt: skip


def _backward(
    d: Tensor, pre: Tensor, *, activation: str, gated: bool, column_sums: bool, recompute: bool,
    out_dtype: torch.dtype, blocks: str | None,
) -> Product:  # fmt: skip
    gate, up = (pre[0], pre[1]) if gated else (pre, None)
    dx, dup, hidden = reference.backward_epilogue(d, gate, up, activation_name=activation)
    sums = reference.column_sum(dx, blocks) if column_sums else None
    if dup is not None:
        sums = torch.stack((sums, reference.column_sum(dup, blocks))) if sums is not None else None
        dx = torch.stack((dx, dup))
    return Product(dx.to(out_dtype), hidden.to(out_dtype) if recompute else None, sums)


def _accumulated(x: Tensor, dim: int) -> Tensor:
    """Sum of the blocks in fp32, in order."""
    return x.sum(dim, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def reduce(
    x: Tensor, *, gated: bool, bias: Tensor | None, bias2: Tensor | None, residual: Tensor | None, activation: str,
    keep_pre: bool, out_dtype: torch.dtype,
) -> Product:  # fmt: skip
    total = _accumulated(x, 1 if gated else 0)
    pre, up = (total[0], total[1]) if gated else (total, None)
    pre = pre if bias is None else pre + bias.to(pre.dtype)
    c = reference.activation(pre, activation)
    if up is not None:
        up = up if bias2 is None else up + bias2.to(up.dtype)
        c, pre = c * up, torch.stack((pre, up)) if keep_pre else pre
    if residual is not None:
        c = c + residual.to(c.dtype)
    return Product(c.to(out_dtype), pre.to(out_dtype, copy=True) if keep_pre else None)


def reduce_backward(
    x: Tensor, pre: Tensor, *, activation: str, gated: bool, column_sums: bool, recompute: bool,
    out_dtype: torch.dtype,
) -> Product:  # fmt: skip
    return _backward(
        _accumulated(x, 0), pre, activation=activation, gated=gated, column_sums=column_sums, recompute=recompute,
        out_dtype=out_dtype, blocks=None,
    )  # fmt: skip
