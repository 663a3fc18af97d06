"""Every kernel in plain torch: the contract that tests and benchmarks compare with, and what runs without Triton.

`compute` is the dtype of product and epilogue: float64 for a reference.  None stands for what a user would write in
torch today: the product in the operands' dtype (cuBLAS accumulates in fp32), the epilogue in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "relu2", "silu", "tanh", "sigmoid")


def activation(x: Tensor, name: str) -> Tensor:
    match name:
        case "none":
            return x
        case "gelu":
            return torch.nn.functional.gelu(x)
        case "gelu_tanh":
            return torch.nn.functional.gelu(x, approximate="tanh")
        case "relu":
            return torch.relu(x)
        case "relu2":
            return torch.relu(x).square()
        case "silu":
            return torch.nn.functional.silu(x)
        case "tanh":
            return torch.tanh(x)
        case "sigmoid":
            return torch.sigmoid(x)
    raise ValueError(f"activation {name!r} is not one of {ACTIVATIONS}")


def activation_gradient(x: Tensor, name: str) -> Tensor:
    """Return the activation's derivative at x, by torch's own backward formulas."""
    one = torch.ones_like(x)
    match name:
        case "gelu":
            return torch.ops.aten.gelu_backward(one, x)
        case "gelu_tanh":
            return torch.ops.aten.gelu_backward(one, x, approximate="tanh")
        case "relu":
            return (x > 0).to(x.dtype)
        case "relu2":
            return 2 * torch.relu(x)
        case "silu":
            return torch.ops.aten.silu_backward(one, x)
        case "tanh":
            return torch.ops.aten.tanh_backward(one, torch.tanh(x))
        case "sigmoid":
            return torch.ops.aten.sigmoid_backward(one, torch.sigmoid(x))
    return one


def join(x: Tensor, blocks: str | None, first_letter: str) -> Tensor:
    """Join blocks [p, .., r, c] along a letter to [.., r, c]; `first_letter` is the letter of the dim before the
    last.
    """
    if blocks is None:
        return x
    return torch.cat(x.unbind(0), dim=-2 if blocks == first_letter else -1)


def cut(x: Tensor, blocks: int) -> Tensor:
    """Cut [.., m, n] into blocks of columns [p, .., m, n/p]; one block is the matrix itself."""
    return x if blocks == 1 else torch.stack(x.chunk(blocks, dim=-1))


def operand(x: Tensor, letters: str, transpose: bool, blocks: str | None) -> Tensor:
    stored = letters[::-1] if transpose else letters
    x = join(x, blocks, stored[0])
    return x.mT if transpose else x


def product(a: Tensor, b: Tensor, compute: torch.dtype | None) -> Tensor:
    """A . B in `compute`, or in the operands' dtype; then fp32 or wider."""
    c = torch.matmul(a, b) if compute is None else torch.matmul(a.to(compute), b.to(compute))
    return c if compute is not None or c.dtype == torch.float64 else c.float()


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    a_blocks: str | None = None,
    b_blocks: str | None = None,
    c_blocks: int = 1,
    activation_name: str = "none",
    compute: torch.dtype | None = torch.float64,
) -> tuple[Tensor, Tensor]:
    """C = act(A . B + bias), and the pre-activation; both in `compute`, in C's blocks."""
    left, right = operand(a, "mk", transpose_a, a_blocks), operand(b, "kn", transpose_b, b_blocks)
    pre = cut(product(left, right, compute), c_blocks)
    if bias is not None:
        pre = pre + column_vector(bias.to(pre.dtype), c_blocks, pre.dim())
    return activation(pre, activation_name), pre


def column_vector(x: Tensor, c_blocks: int, dims: int) -> Tensor:
    """A vector over n, shaped to broadcast with a C in blocks."""
    if c_blocks == 1:
        return x
    return x.view(c_blocks, *(1,) * (dims - 2), -1)
