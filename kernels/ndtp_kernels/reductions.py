"""Sums of blocks with an epilogue after a scatter, without autograd, and code that products and sums share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ndtp_kernels import launch, prepared, torch_path, tracing
from ndtp_kernels.call import GemmCall
from ndtp_kernels.checks import check_like, check_vector
from ndtp_kernels.choice.selection import Options
from ndtp_kernels.errors import KernelError
from ndtp_kernels.form import Product, check_activation
from ndtp_kernels.launch import triton_chip
from ndtp_kernels.operands import Matrix


def halves(both: Tensor | None, gated: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the halves of gate and of up; without a gate, the first is everything."""
    if both is None:
        return None, None
    return (both[0], both[1]) if gated else (both, None)


def new_pre(c: Tensor, gated: bool) -> Tensor:
    """Memory for the pre-activation beside C; of gate and up."""
    return c.new_empty((2, *c.shape)) if gated else torch.empty_like(c)


def add_up(sums: Tensor | None = None, sums2: Tensor | None = None) -> Tensor | None:
    """One row per tile -> column sums; the order is fixed, so the result is the same in every run."""
    if sums is None:
        return None
    return sums.sum(0) if sums2 is None else torch.stack((sums.sum(0), sums2.sum(0)))


def key_of(options: Options | str, operands: tuple[Tensor | None, ...], *how: object) -> object:
    """Return the key under which a call is kept, if a kernel may run it."""
    a = operands[0]
    assert a is not None
    backend = options if isinstance(options, str) else options.backend
    if backend == "torch" or not (a.is_cuda or backend == "triton"):
        return None
    return prepared.key(operands, options, *how)


def place(tensor: Tensor | None, made: list[Tensor]) -> int | None:
    return None if tensor is None else next(at for at, each in enumerate(made) if each is tensor)


def places(sums: Sequence[Tensor | None], made: list[Tensor]) -> tuple[int, ...]:
    found = (place(each, made) for each in sums)
    return tuple(at for at in found if at is not None)


def reduce(
    op: str,
    x: Tensor,
    *,
    gated: bool = False,
    bias: Tensor | None = None,
    bias2: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    keep_pre: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Product:
    """Add p blocks in fp32, in order, after a scatter; then apply bias, activation, gate and residual.

    x        [p, .., M, N]; gated [2, p, .., M, N]: gate and up.  p = 1 after a reduce-scatter that has added already.
    out      where C goes; contiguous
    returns  C [.., M, N], pre (gated [2, .., M, N])
    """
    operands = (x, bias, bias2, residual, out)
    asked = key_of(backend, operands, "reduce", gated, activation, keep_pre, out_dtype)
    known = prepared.recall(asked)
    if known is not None:
        c = torch.empty(known.c_shape, dtype=known.out_dtype, device=x.device) if out is None else out
        pre = new_pre(c, gated) if keep_pre else None
        m, n = known.traced
        with tracing.record_pass("reduce", m, n, x, known.out_dtype):
            known.run(_tensors(operands, c, pre, gated), x)
        return Product(c, pre)
    blocks, shape, m, n = read_blocks(op, x, gated, activation)
    bias, bias2 = check_vector(op, "bias", bias, n), check_vector(op, "bias2", bias2, n)
    check_like(op, "residual", residual, shape)
    out_dtype = _dtype_of(op, out, shape, out_dtype or x.dtype)
    with tracing.record_pass("reduce", m, n, x, out_dtype):
        if triton_chip(op, x, backend) is None:
            return _put(
                torch_path.reduce(
                    x, gated=gated, bias=bias, bias2=bias2, residual=residual, activation=activation,
                    keep_pre=keep_pre, out_dtype=out_dtype,
                ),
                out,
            )  # fmt: skip
        x = x.contiguous()
        c = torch.empty(shape, dtype=out_dtype, device=x.device) if out is None else out
        pre = new_pre(c, gated) if keep_pre else None
        first, second = halves(pre, gated)
        view = Matrix(m, n, n, 1)
        call = GemmCall(
            a=c, b=c, c=c, view_a=view, view_b=view, view_c=view, view_aux=view, bias=bias, bias2=bias2,
            aux=None if residual is None else residual.contiguous(), pre=first, pre2=second,
            activation=activation, gated=gated,
        )  # fmt: skip
        parts, parts2 = halves(x, gated)
        assert parts is not None
        reduction, _ = launch.reduce_launch(call, parts, parts2, view, blocks, m * n)
        launch.run([reduction], x.device, False)
    known = prepared.prepared(
        [reduction], _tensors(operands, c, pre, gated), call.made, c_shape=tuple(shape), out_dtype=out_dtype,
        traced=(m, n),
    )  # fmt: skip
    prepared.keep(asked, known)
    return Product(c, pre)


def _tensors(operands: tuple[Tensor | None, ...], c: Tensor, kept: Tensor | None, gated: bool) -> list[Tensor | None]:
    """Return the tensors in the order of the kernels' names."""
    x, bias, bias2, residual, _ = operands
    first, second = halves(kept, gated)
    parts, parts2 = halves(x, gated)
    return [None, None, None, c, None, residual, None, first, second, bias, bias2, None, None, None, parts, parts2]


def reduce_backward(
    op: str,
    x: Tensor,
    pre: Tensor,
    *,
    activation: str,
    gated: bool = False,
    column_sums: bool = True,
    recompute: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Product:
    """Add p blocks in fp32 after dgrad's scatter; then apply the activation's gradient, and compute the bias
    gradient.

    x        [p, .., M, N]   blocks of the gradient of act(pre) [* up]
    pre      [.., M, N]; gated [2, .., M, N]
    out      where C goes; contiguous
    returns  C of pre's shape; column sums [N] or [2, N]; pre = act(pre) [* up] if `recompute`
    """
    operands = (x, pre, out)
    asked = key_of(backend, operands, "reduce backward", gated, activation, column_sums, recompute, out_dtype)
    known = prepared.recall(asked)
    if known is not None:
        c = torch.empty(known.c_shape, dtype=known.out_dtype, device=x.device) if out is None else out
        hidden = c.new_empty(known.c_shape[gated:]) if recompute else None
        m, n = known.traced
        with tracing.record_pass("reduce_backward", m, n, x, known.out_dtype):
            made = known.run(_backward_tensors(operands, c, hidden, gated), x)
        return Product(c, hidden, add_up(*(made[at] for at in known.sums)))
    blocks, shape, m, n = read_blocks(op, x, False, activation)
    check_like(op, "pre", pre, [2, *shape] if gated else shape)
    out_dtype = _dtype_of(op, out, list(pre.shape), out_dtype or pre.dtype)
    with tracing.record_pass("reduce_backward", m, n, x, out_dtype):
        if triton_chip(op, x, backend) is None:
            return _put(
                torch_path.reduce_backward(
                    x, pre, activation=activation, gated=gated, column_sums=column_sums, recompute=recompute,
                    out_dtype=out_dtype,
                ),
                out,
            )  # fmt: skip
        x, pre = x.contiguous(), pre.contiguous()
        c = torch.empty(pre.shape, dtype=out_dtype, device=x.device) if out is None else out
        hidden = c.new_empty(shape) if recompute else None
        view = Matrix(m, n, n, 1)
        (first, second), (aux, aux2) = halves(c, gated), halves(pre, gated)
        assert first is not None
        call = GemmCall(
            a=c, b=c, c=first, c2=second, view_a=view, view_b=view, view_c=view, view_aux=view, aux=aux, aux2=aux2,
            pre=hidden, activation=activation, gated=gated, backward=True, column_sums=column_sums,
        )  # fmt: skip
        reduction, sums = launch.reduce_launch(call, x, None, view, blocks, m * n)
        launch.run([reduction], x.device, False)
    known = prepared.prepared(
        [reduction], _backward_tensors(operands, c, hidden, gated), call.made, c_shape=tuple(c.shape),
        out_dtype=out_dtype, sums=places(sums, call.made), traced=(m, n),
    )  # fmt: skip
    prepared.keep(asked, known)
    return Product(c, hidden, add_up(*sums))


def _backward_tensors(
    operands: tuple[Tensor | None, ...], c: Tensor, hidden: Tensor | None, gated: bool
) -> list[Tensor | None]:
    """Return the tensors in the order of the kernels' names."""
    x, pre, _ = operands
    first, second = halves(c, gated)
    aux, aux2 = halves(pre, gated)
    return [None, None, None, first, second, aux, aux2, hidden, *[None] * 6, x, None]


def _dtype_of(op: str, out: Tensor | None, shape: list[int], otherwise: torch.dtype) -> torch.dtype:
    """Return the result's dtype; raise KernelError for an `out` that does not fit."""
    check_like(op, "out", out, shape)
    if out is not None and not out.is_contiguous():
        raise KernelError(op, f"out has strides {out.stride()}", "a contiguous out")
    return otherwise if out is None else out.dtype


def _put(done: Product, out: Tensor | None) -> Product:
    return done if out is None else done._replace(c=out.copy_(done.c))


def read_blocks(op: str, x: Tensor, gated: bool, activation: str) -> tuple[int, list[int], int, int]:
    """Number of blocks, shape of one, and that shape as a matrix: all dims before the last are rows."""
    check_activation(op, activation)
    lead = 2 if gated else 1
    if x.dim() < lead + 1 or (gated and x.shape[0] != 2):
        raise KernelError(op, f"x has shape {tuple(x.shape)}", "[2, blocks, .., N]" if gated else "[blocks, .., N]")
    shape = list(x.shape[lead:])
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return x.shape[lead - 1], shape, rows, shape[-1]
