"""Sums of blocks with an epilogue after a scatter, and the key under which calls are kept."""

from __future__ import annotations

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


def key_of(options: Options | str, operands: tuple[Tensor | None, ...], *how: object) -> object:
    """Return the key under which a call is kept, if a kernel may run it."""
    a = operands[0]
    assert a is not None
    backend = options if isinstance(options, str) else options.backend
    if backend == "torch" or not (a.is_cuda or backend == "triton"):
        return None
    return prepared.key(operands, options, *how)


def reduce(
    op: str,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    pairs: bool = False,
    keep_pre: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Product:
    """Add p blocks in fp32, in order, after a scatter; then apply bias and activation.

    x        [p, .., M, N]; p = 1 after a reduce-scatter that has added already; with `pairs` N is 2 columns for each
    out      where C goes; contiguous
    returns  C [.., M, N] and, with `keep_pre`, the sums with the bias
    """
    asked = key_of(backend, (x, bias, out), "reduce", activation, pairs, keep_pre)
    known = prepared.recall(asked)
    if known is not None:
        return _again("reduce", known, x, out, keep_pre, None, bias)
    shape, m, n = read_blocks(op, x, activation, pairs)
    vector = check_vector(op, "bias", bias, n)
    result = [*shape[:-1], n // 2] if pairs else shape
    dtype = _dtype_of(op, out, result, x.dtype)
    with tracing.record_pass("reduce", m, n, x, dtype):
        if triton_chip(op, x, backend) is None:
            done = torch_path.reduce(
                x, bias=vector, activation=activation, pairs=pairs, keep_pre=keep_pre, out_dtype=dtype
            )
            return done if out is None else done._replace(c=out.copy_(done.c))
        c = torch.empty(result, dtype=dtype, device=x.device) if out is None else out
        pre = torch.empty(shape, dtype=dtype, device=x.device) if keep_pre else None
        return _run(asked, x, c, (m, n), activation, pairs, aux=None, pre=pre, given=bias, bias=vector)


def reduce_backward(
    op: str,
    x: Tensor,
    pre: Tensor,
    *,
    activation: str,
    pairs: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Product:
    """Add p blocks in fp32 after dgrad's scatter; then apply the activation's gradient.

    x        [p, .., M, N]   blocks of the gradient of act(pre)
    pre      [.., M, N]; with `pairs` [.., M, 2 N]: gate and up in turns
    out      where C goes; contiguous
    returns  C of pre's shape
    """
    asked = key_of(backend, (x, pre, out), "reduce backward", activation, pairs)
    known = prepared.recall(asked)
    if known is not None:
        return _again("reduce_backward", known, x, out, False, pre, None)
    shape, m, n = read_blocks(op, x, activation)
    shape = [*shape[:-1], 2 * n] if pairs else shape
    check_like(op, "pre", pre, shape)
    dtype = _dtype_of(op, out, shape, pre.dtype)
    with tracing.record_pass("reduce_backward", m, n, x, dtype):
        if triton_chip(op, x, backend) is None:
            done = torch_path.reduce_backward(x, pre, activation=activation, pairs=pairs, out_dtype=dtype)
            return done if out is None else done._replace(c=out.copy_(done.c))
        c = torch.empty(shape, dtype=dtype, device=x.device) if out is None else out
        return _run(asked, x, c, (m, n), activation, pairs, aux=pre, pre=None, given=None, bias=None)


def _run(
    asked: object,
    x: Tensor,
    c: Tensor,
    size: tuple[int, int],
    activation: str,
    pairs: bool,
    *,
    aux: Tensor | None,
    pre: Tensor | None,
    given: Tensor | None,
    bias: Tensor | None,
) -> Product:
    """One launch, and what is kept of it.

    Args:
        aux: backward: the pre-activation.
        given: the bias as the caller has it, of which `bias` may be a copy.
    """
    blocks, kept = x.contiguous(), None if aux is None else aux.contiguous()
    if pairs:
        rows, columns = size
        columns = columns if kept is not None else columns // 2
        reduction = launch.pairs_launch(blocks, c, kept, pre, bias, rows, columns, activation)
    else:
        view = Matrix(*size, size[1], 1)
        call = GemmCall(
            a=c, b=c, c=c, view_a=view, view_b=view, view_c=view, bias=bias, pre=pre, activation=activation, aux=kept
        )
        reduction = launch.reduce_launch(call, blocks, view, x.shape[0], size[0] * size[1])
    launch.run([reduction], x.device, False)
    known = prepared.prepared(
        [reduction], [None, None, c, aux, pre, given, x], (), c_shape=tuple(c.shape), out_dtype=c.dtype, traced=size,
        pre_shape=() if pre is None else tuple(pre.shape),
    )  # fmt: skip
    prepared.keep(asked, known)
    return Product(c, pre)


def _again(
    name: str,
    known: prepared.Known,
    x: Tensor,
    out: Tensor | None,
    keep_pre: bool,
    aux: Tensor | None,
    bias: Tensor | None,
) -> Product:
    """A sum that was prepared by an earlier call."""
    c = x.new_empty(known.c_shape, dtype=known.out_dtype) if out is None else out
    pre = x.new_empty(known.pre_shape, dtype=known.out_dtype) if keep_pre else None
    m, n = known.traced
    with tracing.record_pass(name, m, n, x, known.out_dtype):
        known.run([None, None, c, aux, pre, bias, x], x)
    return Product(c, pre)


def _dtype_of(op: str, out: Tensor | None, shape: list[int], otherwise: torch.dtype) -> torch.dtype:
    """Return the result's dtype; raise KernelError for an `out` that does not fit."""
    if out is not None:
        check_like(op, "out", out, shape)
    if out is not None and not out.is_contiguous():
        raise KernelError(op, f"out has strides {out.stride()}", "a contiguous out")
    return otherwise if out is None else out.dtype


def read_blocks(op: str, x: Tensor, activation: str, pairs: bool = False) -> tuple[list[int], int, int]:
    """The shape of one block, and that shape as a matrix: all dims before the last are rows."""
    check_activation(op, activation)
    if x.dim() < 2 or (pairs and x.shape[-1] % 2):
        raise KernelError(op, f"x has shape {tuple(x.shape)}", "[blocks, .., N]" + ", N even" * pairs)
    shape = list(x.shape[1:])
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return shape, rows, shape[-1]
