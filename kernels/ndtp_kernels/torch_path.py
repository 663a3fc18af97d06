"""The kernels' results by torch alone, on CPUs and wherever the vendor's library is the better choice.

Products run in the operands' dtype and accumulate as the library does; an activation takes the rounded sums.
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
    form, out_dtype = request.form, request.out_dtype
    left = reference.operand(request.a, "mk", form.transpose_a, form.a_blocks)
    right = reference.operand(request.b, "kn", form.transpose_b, form.b_blocks)
    if request.activation == "none" and not request.keep_pre and request.bias is None:
        product = reference.cut(_product(left, right, out_dtype), form.c_blocks)
        return Product(_into(product, request))
    bias = request.bias
    if bias is not None and left.dim() == right.dim() == 2 and form.c_blocks == 1:
        pre = torch.addmm(bias.to(left.dtype), left, right)  # the library's own epilogue
    else:
        pre = reference.cut(torch.matmul(left, right), form.c_blocks)
        if bias is not None:
            pre += reference.column_vector(bias.to(pre.dtype), form.c_blocks, pre.dim())
    c = reference.activation(pre, request.activation)
    # Its own copy: without an activation C may be the very tensor.
    kept = pre.to(out_dtype, copy=c is pre) if request.keep_pre else None
    return Product(_into(c, request), kept)


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
    product = reference.cut(torch.matmul(left, right), form.c_blocks)
    return Product(_gradient(product, request.pre, request.activation).to(request.out_dtype))


def _gradient(grad: Tensor, pre: Tensor, activation: str) -> Tensor:
    return grad * reference.activation_gradient(pre.to(grad.dtype), activation)


def _accumulated(x: Tensor) -> Tensor:
    """Sum of the blocks in fp32, in order."""
    return x.sum(0, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def reduce(
    x: Tensor, *, bias: Tensor | None, activation: str, pairs: bool, keep_pre: bool, out_dtype: torch.dtype
) -> Product:
    pre = _accumulated(x)
    pre = pre if bias is None else pre + bias.to(pre.dtype)
    c = reference.activation(pre[..., 0::2] if pairs else pre, activation)
    c = c * pre[..., 1::2] if pairs else c
    return Product(c.to(out_dtype), pre.to(out_dtype, copy=True) if keep_pre else None)


def reduce_backward(x: Tensor, pre: Tensor, *, activation: str, pairs: bool, out_dtype: torch.dtype) -> Product:
    grad = _accumulated(x)
    if not pairs:
        return Product(_gradient(grad, pre, activation).to(out_dtype))
    gate, up = pre[..., 0::2].to(grad.dtype), pre[..., 1::2].to(grad.dtype)
    both = torch.stack((_gradient(grad * up, gate, activation), grad * reference.activation(gate, activation)), -1)
    return Product(both.flatten(-2).to(out_dtype))
