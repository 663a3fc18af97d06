"""Custom ops for what follows a scatter: blocks added up, with the epilogues forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ndtp_kernels import reductions
from ndtp_kernels.autograd import gradients
from ndtp_kernels.errors import KernelError
from ndtp_kernels.form import Product


def in_order(op: torch.library.CustomOpDef, **named: Any) -> tuple[Any, ...]:
    """One value for each argument of `op`, None where none is named: what a backward returns."""
    names = argument_names(op)
    if unknown := sorted(named.keys() - set(names)):
        raise TypeError(f"{op} has no argument {unknown}")
    return tuple(named.get(name) for name in names)


@functools.cache
def argument_names(op: torch.library.CustomOpDef) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._opoverload._schema.arguments)


def empty(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return like.new_empty((0,), dtype=dtype)


def triple(done: Product) -> tuple[Tensor, Tensor, Tensor]:
    sums = empty(done.c) if done.column_sums is None else done.column_sums
    return done.c, sums, empty(done.c, done.c.dtype) if done.pre is None else done.pre


def fake_backward(
    pre: Tensor, n: int, gated: bool, column_sums: bool, recompute: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    c = pre.new_empty(pre.shape, dtype=dtype)
    sums = pre.new_empty(((2, n) if gated else (n,)) if column_sums else (0,), dtype=gradients.sum_dtype(pre))
    return c, sums, c.new_empty((pre.shape[1:] if gated else pre.shape) if recompute else (0,))


@torch.library.custom_op("ndtp_kernels::reduce_blocks", mutates_args=())
def reduce_blocks(
    x: Tensor, bias: Tensor | None, bias2: Tensor | None, residual: Tensor | None, activation: str, gated: bool,
    keep_pre: bool, out_dtype: torch.dtype | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Blocks added in fp32, then bias, activation, gate, residual; and the pre-activation."""
    done = reductions.reduce(
        "reduce_blocks", x, gated=gated, bias=bias, bias2=bias2, residual=residual, activation=activation,
        keep_pre=keep_pre, out_dtype=out_dtype, backend=backend,
    )  # fmt: skip
    return done.c, empty(x, done.c.dtype) if done.pre is None else done.pre


@reduce_blocks.register_fake
def _(x, bias, bias2, residual, activation, gated, keep_pre, out_dtype, backend):  # type: ignore[no-untyped-def]
    shape = reductions.read_blocks("reduce_blocks", x, gated, activation)[1]
    c = x.new_empty(shape, dtype=out_dtype or x.dtype)
    return c, c.new_empty(((2, *shape) if gated else shape) if keep_pre else (0,))


def _save_reduce(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = dict(zip(argument_names(reduce_blocks), inputs, strict=True))
    ctx.set_materialize_grads(False)
    if not given["keep_pre"]:
        ctx.mark_non_differentiable(output[1])
    ctx.activation, ctx.gated, ctx.backend = given["activation"], given["gated"], given["backend"]
    ctx.kept = given["keep_pre"]
    beside = (given[name] for name in ("bias", "bias2", "residual"))
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in beside]
    ctx.shape, ctx.dtype = given["x"].shape, given["x"].dtype
    ctx.save_for_backward(output[1])


def _backward_reduce(ctx: Any, dc: Tensor | None, dpre: Tensor | None) -> tuple[Any, ...]:
    (pre,) = ctx.saved_tensors
    needs, gated = ctx.needs_input_grad, ctx.gated
    dresidual = dc.to(ctx.dtypes[2]) if dc is not None and needs[3] else None
    inner = dc
    if dc is not None and (gated or ctx.activation != "none"):
        if not ctx.kept:
            raise KernelError("reduce_blocks", "backward needs the pre-activation, which was not kept", "keep_pre=True")
        inner = reduce_blocks_backward(
            dc.unsqueeze(0), pre, activation=ctx.activation, gated=gated, column_sums=False, recompute=False,
            out_dtype=torch.promote_types(ctx.dtype, dc.dtype), backend=ctx.backend,
        )[0]  # fmt: skip
    if dpre is not None:
        inner = dpre if inner is None else inner + dpre
    if inner is None:
        return in_order(reduce_blocks)
    biases: list[Tensor | None] = [None, None]
    for index, part in enumerate(inner if gated else (inner,)):
        if needs[1 + index] and ctx.dtypes[index] is not None:
            biases[index] = gradients.bias_gradient(part, None).to(ctx.dtypes[index])
    # Every block received the same gradient: a view, not p copies.
    dx = inner.to(ctx.dtype).unsqueeze(1 if gated else 0).expand(ctx.shape)
    return in_order(reduce_blocks, x=dx, bias=biases[0], bias2=biases[1], residual=dresidual)


reduce_blocks.register_autograd(_backward_reduce, setup_context=_save_reduce)


@torch.library.custom_op("ndtp_kernels::reduce_blocks_backward", mutates_args=())
def reduce_blocks_backward(
    x: Tensor, pre: Tensor, activation: str, gated: bool, column_sums: bool, recompute: bool,
    out_dtype: torch.dtype | None, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Blocks of a gradient added in fp32, times act'(pre); column sums; the recomputed activation."""
    done = reductions.reduce_backward(
        "reduce_blocks_backward", x, pre, activation=activation, gated=gated, column_sums=column_sums,
        recompute=recompute, out_dtype=out_dtype, backend=backend,
    )  # fmt: skip
    return triple(done)


@reduce_blocks_backward.register_fake
def _(x, pre, activation, gated, column_sums, recompute, out_dtype, backend):  # type: ignore[no-untyped-def]
    return fake_backward(pre, pre.shape[-1], gated, column_sums, recompute, out_dtype or pre.dtype)
