"""The products without autograd: read the operands, choose, launch; or the same in torch.

`ops` wraps these in custom ops.  Every function returns what it computed; what is kept between calls is in `prepared`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ndtp_kernels import launch, prepared, torch_path, tracing
from ndtp_kernels.call import GemmCall
from ndtp_kernels.checks import check_fp8, check_like, check_scale, check_vector, scale_size
from ndtp_kernels.choice.problem import Config
from ndtp_kernels.choice.selection import Options, configuration
from ndtp_kernels.errors import KernelError, warn_once
from ndtp_kernels.form import Form, Product, ProductRequest, default_dtype, read
from ndtp_kernels.launch import triton_chip
from ndtp_kernels.operands import Matrix, matrix, merge_batch
from ndtp_kernels.reductions import add_up, halves, key_of, new_pre, place, places

NO_OPTIONS = Options()


def gemm(
    op: str,
    a: Tensor,
    b: Tensor,
    *,
    form: Form = Form(),  # noqa: B008
    b2: Tensor | None = None,
    bias: Tensor | None = None,
    bias2: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_b2: Tensor | None = None,
    activation: str = "none",
    keep_pre: bool = False,
    row_sums: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    options: Options = NO_OPTIONS,
) -> Product:
    """C = act(A . B + bias) + residual; with B2, C = act(A . B + bias) * (A . B2 + bias2) + residual.

    a         [.., M, K], or [p, .., M, K/p] in blocks (`form`)
    b, b2     [.., K, N] likewise
    returns   C [.., M, N], pre (with B2 [2, .., M, N]: gate and up), row sums of A in fp32
    """
    operands = (a, b, b2, out, None, residual, None, None, None, bias, bias2, scale_a, scale_b, scale_b2)
    gated = b2 is not None
    asked = key_of(options, operands, "gemm", form, activation, keep_pre, row_sums, accumulate, out_dtype)
    known = prepared.recall(asked)
    if known is not None and known.starts:
        return _gemm_again(known, operands, keep_pre)
    options.check(op)
    va, vb, batch, shape = read(op, a, b, form, activation)
    m, n = va.rows, vb.cols
    check_fp8(op, a, b, va, vb)
    bias, bias2 = check_vector(op, "bias", bias, n), check_vector(op, "bias2", bias2, n)
    scale_a, scale_b = (
        check_scale(op, "scale_a", scale_a, batch, m, False),
        check_scale(op, "scale_b", scale_b, batch, n, True),
    )
    scale_b2 = check_scale(op, "scale_b_up", scale_b2, batch, n, True)
    if b2 is not None and scale_size(scale_b) != scale_size(scale_b2):
        raise KernelError(op, "the scales of gate and up differ in form", "one number for each, or columns for each")
    if row_sums and scale_a is not None:
        raise KernelError(op, "row sums would be those of A without its scale", "sum A before it is quantized")
    check_like(op, "residual", residual, shape)
    if b2 is not None and (b2.shape != b.shape or b2.dtype != b.dtype):
        raise KernelError(op, f"b_gate is {tuple(b.shape)} and b_up is {tuple(b2.shape)}", "two weights of one shape")
    if out is not None:
        check_like(op, "out", out, shape)
        if keep_pre and not out.is_contiguous():
            raise KernelError(op, f"out has strides {out.stride()} and keeps a pre-activation", "a contiguous out")
    if accumulate and out is None:
        raise KernelError(op, "accumulate=True has nothing to accumulate into", "pass out")
    out_dtype = out.dtype if out is not None else default_dtype(a, out_dtype)
    request = ProductRequest(
        a=a, b=b, form=form, out_dtype=out_dtype, activation=activation, b2=b2, bias=bias, bias2=bias2,
        residual=residual, scale_a=scale_a, scale_b=scale_b, scale_b2=scale_b2, gated=gated,
        keep_pre=keep_pre, row_sums=row_sums, out=out, accumulate=accumulate,
    )  # fmt: skip
    chip = triton_chip(op, a, options.backend) if all(shape) else None  # nothing to launch for an empty C
    if chip is None or known is not None:
        with tracing.record("gemm", m, n, va.cols, batch, a, out_dtype, 1 + gated):
            return torch_path.gemm(request)
    if b2 is not None and b2.stride() != b.stride():
        b, b2 = b.contiguous(), b2.contiguous()
    a, b, b2, residual = _within_two_batch_dims(op, replace(request, b=b, b2=b2), batch)
    if residual is not None and form.c_blocks is not None:
        residual = residual.contiguous()
    c = torch.empty(shape, dtype=out_dtype, device=a.device) if out is None else out
    pre = new_pre(c, gated) if keep_pre else None
    first, second = halves(pre, gated)
    view = matrix(c, "mn", False, form.c_blocks, op=op, name="c")
    call = GemmCall(
        a=a, b=b, c=c, view_a=matrix(a, "mk", form.transpose_a, form.a_blocks, op=op, name="a"),
        view_b=matrix(b, "kn", form.transpose_b, form.b_blocks, op=op, name="b"), view_c=view,
        view_aux=None if residual is None else _like_c(op, "residual", residual, view, form),
        b2=b2, aux=residual, pre=first, pre2=second, bias=bias, bias2=bias2, scale_a=scale_a,
        scale_b=scale_b, scale_b2=scale_b2, activation=activation, gated=gated, accumulate=accumulate,
        row_sums=row_sums, precision=options.precision, fast_accumulation=options.fast_accumulation,
        sms_to_leave=options.sms_to_leave,
    )  # fmt: skip
    config = configuration(op, call.problem(), chip, options)
    with tracing.record("gemm", m, n, va.cols, batch, a, out_dtype, call.products):
        launches, (_, _, rows) = (
            launch.gemm_launches(call, config, chip) if config.kernel != "torch" else ([], [None] * 3)
        )
        if not launches or not _ran(op, launches, a.device, config):
            prepared.keep(asked, prepared.Known())
            return torch_path.gemm(request)
    tensors = (*operands[:3], c, None, operands[5], None, first, second, *operands[9:], None, None)
    known = prepared.prepared(
        launches, tensors, call.made, c_shape=tuple(shape), out_dtype=out_dtype, row_sums=place(rows, call.made),
        descriptors=config.kernel in ("tma", "gluon"), traced=(m, n, va.cols, batch, call.products),
    )  # fmt: skip
    prepared.keep(asked, known)
    return Product(c, pre, None, _rows_of(rows, m))


def _gemm_again(known: prepared.Known, operands: tuple[Tensor | None, ...], keep_pre: bool) -> Product:
    """A product that was prepared by an earlier call; `operands` in the order of the kernels' names."""
    a, b, b2, c, _, residual, _, _, _, bias, bias2, *scales = operands
    assert a is not None
    gated = b2 is not None
    if c is None:
        c = a.new_empty(known.c_shape, dtype=known.out_dtype)
    pre = new_pre(c, gated) if keep_pre else None
    first, second = halves(pre, gated)
    m, n, k, batch, count = known.traced
    with tracing.record("gemm", m, n, k, batch, a, known.out_dtype, count):
        made = known.run([a, b, b2, c, None, residual, None, first, second, bias, bias2, *scales, None, None], a)
    return Product(c, pre, None, None if known.row_sums is None else _rows_of(made[known.row_sums], m))


def _rows_of(rows: Tensor | None, m: int) -> Tensor | None:
    """Return [batch, split, rows], where the batch may have become rows, as [rows]."""
    return None if rows is None else rows.sum((0, 1)).reshape(-1, m).sum(0)


def _ran(op: str, launches: list[launch.Launch], device: torch.device, config: Config) -> bool:
    """Launch; False, and a warning, if Triton refuses the configuration on this device."""
    try:
        launch.run(launches, device, config.kernel in ("tma", "gluon"))
    except Exception as error:
        if not launch.refused(error):
            raise
        warn_once(f"{op}: {config} does not run here, torch does instead: {str(error).splitlines()[0]}")
        return False
    return True


def _like_c(op: str, name: str, tensor: Tensor, view_c: Matrix, form: Form) -> Matrix:
    """The layout of a tensor of C's shape, in the same blocks."""
    view = matrix(tensor, "mn", False, form.c_blocks, op=op, name=name)
    if view.blocked != view_c.blocked:
        raise KernelError(op, f"blocks of {name} and of out lie differently", "contiguous ones")
    return view


def _within_two_batch_dims(
    op: str, request: ProductRequest, batch: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A, B, B2 and residual.  The kernels know two batch dims: beyond that (after merging) they are copied in full."""
    a, b, b2, residual, form = request.a, request.b, request.b2, request.residual, request.form
    views = [
        matrix(a, "mk", form.transpose_a, form.a_blocks, op=op, name="a"),
        matrix(b, "kn", form.transpose_b, form.b_blocks, op=op, name="b"),
    ]
    if residual is not None:
        views.append(matrix(residual, "mn", False, form.c_blocks, op=op, name="residual"))
    if len(merge_batch([view.broadcast(batch) for view in views])[0].batch) <= 2:
        return a, b, b2, residual

    def full(x: Tensor, blocks: str | None) -> Tensor:
        lead = tuple(x.shape[:1]) if blocks else ()
        x = x.reshape(*lead, *(1,) * (len(batch) + 2 + len(lead) - x.dim()), *x.shape[len(lead) :])
        return x.expand(*lead, *batch, *x.shape[-2:]).contiguous()

    return (
        full(a, form.a_blocks),
        full(b, form.b_blocks),
        None if b2 is None else full(b2, form.b_blocks),
        None if residual is None else residual.contiguous(),
    )


def backward_gemm(
    op: str,
    a: Tensor,
    b: Tensor,
    pre: Tensor,
    *,
    form: Form = Form(),  # noqa: B008
    activation: str,
    gated: bool,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    column_sums: bool = False,
    recompute: bool = False,
    out_dtype: torch.dtype | None = None,
    options: Options = NO_OPTIONS,
) -> Product:
    """The dgrad of a second product with the first one's activation gradient in its epilogue.

    a        [.., M, K]      gradient after the second product
    b        [.., K, N]      its weight, turned by `form`
    pre      [.., M, N]      pre-activation; gated [2, .., M, N]: gate and up
    returns  C = (A . B) * act'(pre), of pre's shape; column sums (bias gradients); pre = act(pre) [* up] if `recompute`
    """
    operands = (a, b, pre, scale_a, scale_b)
    asked = key_of(
        options, operands, "backward", form, activation, gated, column_sums, recompute, out_dtype
    )  # fmt: skip
    known = prepared.recall(asked)
    if known is not None and known.starts:
        c = torch.empty(known.c_shape, dtype=known.out_dtype, device=a.device)
        hidden = c.new_empty(known.c_shape[gated:]) if recompute else None
        m, n, k, batch, count = known.traced
        with tracing.record("gemm", m, n, k, batch, a, known.out_dtype, count):
            made = known.run(_backward_tensors(operands, c, hidden, gated), a)
        return Product(c, hidden, add_up(*(made[at] for at in known.sums)))
    options.check(op)
    va, vb, batch, shape = read(op, a, b, form, activation)
    n = vb.cols
    scale_a = check_scale(op, "scale_a", scale_a, batch, va.rows, False)
    scale_b = check_scale(op, "scale_b", scale_b, batch, n, True)
    check_like(op, "pre", pre, [2, *shape] if gated else shape)
    out_dtype = default_dtype(a, out_dtype)
    check_fp8(op, a, b, va, vb)
    request = ProductRequest(
        a=a, b=b, form=form, out_dtype=out_dtype, activation=activation, scale_a=scale_a, scale_b=scale_b, pre=pre,
        gated=gated, column_sums=column_sums, recompute=recompute,
    )  # fmt: skip
    chip = triton_chip(op, a, options.backend)
    if chip is None or known is not None:
        with tracing.record("gemm", va.rows, n, va.cols, batch, a, out_dtype, 1):
            return torch_path.backward_gemm(request)
    a, b, _, _ = _within_two_batch_dims(op, request, batch)
    pre = pre.contiguous()
    c = torch.empty(pre.shape, dtype=out_dtype, device=a.device)
    hidden = c.new_empty(shape) if recompute else None
    (first, second), (aux, aux2) = halves(c, gated), halves(pre, gated)
    assert first is not None
    view = matrix(first, "mn", False, form.c_blocks, op=op, name="c")
    call = GemmCall(
        a=a, b=b, c=first, c2=second, view_a=matrix(a, "mk", form.transpose_a, form.a_blocks, op=op, name="a"),
        view_b=matrix(b, "kn", form.transpose_b, form.b_blocks, op=op, name="b"), view_c=view, view_aux=view,
        aux=aux, aux2=aux2, pre=hidden, activation=activation, gated=gated,
        scale_a=scale_a, scale_b=scale_b, backward=True, column_sums=column_sums, precision=options.precision,
        fast_accumulation=options.fast_accumulation, sms_to_leave=options.sms_to_leave,
    )  # fmt: skip
    config = configuration(op, call.problem(), chip, options)
    with tracing.record("gemm", va.rows, n, va.cols, batch, a, out_dtype, 1):
        launches, (*sums, _) = (
            launch.gemm_launches(call, config, chip) if config.kernel != "torch" else ([], [None] * 3)
        )
        if not launches or not _ran(op, launches, a.device, config):
            prepared.keep(asked, prepared.Known())
            return torch_path.backward_gemm(request)
    known = prepared.prepared(
        launches, _backward_tensors(operands, c, hidden, gated), call.made, c_shape=tuple(c.shape), out_dtype=out_dtype,
        sums=places(sums, call.made), descriptors=config.kernel in ("tma", "gluon"),
        traced=(va.rows, n, va.cols, batch, 1),
    )  # fmt: skip
    prepared.keep(asked, known)
    return Product(c, hidden, add_up(*sums))


def _backward_tensors(
    operands: tuple[Tensor | None, ...], c: Tensor, hidden: Tensor | None, gated: bool
) -> list[Tensor | None]:
    """Return the tensors in the order of the kernels' names.

    The pre-activation is their `aux`, and `pre` is what is recomputed.
    """
    a, b, pre, scale_a, scale_b = operands
    first, second = halves(c, gated)
    aux, aux2 = halves(pre, gated)
    return [a, b, None, first, second, aux, aux2, hidden, None, None, None, scale_a, scale_b, None, None, None]
