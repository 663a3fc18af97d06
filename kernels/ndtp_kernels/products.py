"""The products: read the operands, choose, launch; or the same in torch.

Every function returns what it computed; what is kept between calls is in `prepared`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ndtp_kernels import launch, prepared, torch_path, tracing
from ndtp_kernels.call import GemmCall
from ndtp_kernels.checks import check_like, check_vector
from ndtp_kernels.choice.chips import Chip
from ndtp_kernels.choice.selection import Options, configuration
from ndtp_kernels.errors import KernelError
from ndtp_kernels.form import Form, Product, ProductRequest, read
from ndtp_kernels.launch import triton_chip
from ndtp_kernels.operands import matrix, merge_batch
from ndtp_kernels.reductions import key_of

NO_OPTIONS = Options()
Tensors = Callable[[Tensor, "Tensor | None"], "list[Tensor | None]"]
Traced = tuple[int, int, int, tuple[int, ...]]  # M, N, K and the batch


def gemm(
    op: str,
    a: Tensor,
    b: Tensor,
    *,
    form: Form = Form(),  # noqa: B008
    bias: Tensor | None = None,
    activation: str = "none",
    keep_pre: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
    options: Options = NO_OPTIONS,
) -> Product:
    """C = act(A . B + bias).

    a         [.., M, K], or [p, .., M, K/p] in blocks (`form`)
    b         [.., K, N] likewise
    returns   C [.., M, N] and, with `keep_pre`, A . B + bias
    """
    asked = key_of(options, (a, b, out, bias), "gemm", form, activation, keep_pre, accumulate)

    def tensors(c: Tensor, pre: Tensor | None) -> list[Tensor | None]:
        return [a, b, c, None, pre, bias, None]

    known = prepared.recall(asked)
    if known is not None and known.starts:
        return _again(known, a, out, keep_pre, tensors)
    options.check(op)
    va, vb, batch, shape = read(op, a, b, form, activation)
    vector = check_vector(op, "bias", bias, vb.cols)
    if out is not None:
        check_like(op, "out", out, shape)
        if keep_pre and not out.is_contiguous():
            raise KernelError(op, f"out has strides {out.stride()} and keeps a pre-activation", "a contiguous out")
    if accumulate and out is None:
        raise KernelError(op, "accumulate=True has nothing to accumulate into", "pass out")
    request = ProductRequest(
        a=a, b=b, form=form, out_dtype=a.dtype if out is None else out.dtype, activation=activation,
        bias=vector, keep_pre=keep_pre, out=out, accumulate=accumulate,
    )  # fmt: skip
    traced = (va.rows, vb.cols, va.cols, batch)
    return _multiplied(op, request, torch_path.gemm, shape, tensors, options, asked, traced, known is not None)


def backward_gemm(
    op: str,
    a: Tensor,
    b: Tensor,
    pre: Tensor,
    *,
    form: Form = Form(),  # noqa: B008
    activation: str,
    options: Options = NO_OPTIONS,
) -> Product:
    """The dgrad of a second product with the first one's activation gradient in its epilogue.

    a        [.., M, K]      gradient after the second product
    b        [.., K, N]      its weight, turned by `form`
    pre      [.., M, N]      pre-activation
    returns  C = (A . B) * act'(pre), of pre's shape
    """
    asked = key_of(options, (a, b, pre), "backward", form, activation)

    def tensors(c: Tensor, _: Tensor | None) -> list[Tensor | None]:
        return [a, b, c, pre, None, None, None]

    known = prepared.recall(asked)
    if known is not None and known.starts:
        return _again(known, a, None, False, tensors)
    options.check(op)
    va, vb, batch, shape = read(op, a, b, form, activation)
    check_like(op, "pre", pre, shape)
    request = ProductRequest(a=a, b=b, form=form, out_dtype=a.dtype, activation=activation, pre=pre)
    traced = (va.rows, vb.cols, va.cols, batch)
    return _multiplied(op, request, torch_path.backward_gemm, shape, tensors, options, asked, traced, known is not None)


def _again(known: prepared.Known, a: Tensor, out: Tensor | None, keep_pre: bool, tensors: Tensors) -> Product:
    """A product that was prepared by an earlier call."""
    c = a.new_empty(known.c_shape, dtype=known.out_dtype) if out is None else out
    pre = torch.empty_like(c) if keep_pre else None
    m, n, k, batch = known.traced
    with tracing.record("gemm", m, n, k, batch, a, known.out_dtype):
        known.run(tensors(c, pre), a)
    return Product(c, pre)


def _multiplied(
    op: str,
    request: ProductRequest,
    in_torch: Callable[[ProductRequest], Product],
    shape: Sequence[int],
    tensors: Tensors,
    options: Options,
    asked: object,
    traced: Traced,
    is_known: bool,
) -> Product:
    """The product by a kernel, or in torch where torch is chosen, nothing is to be launched, or Triton refuses.

    Args:
        shape: the shape of the result.
        is_known: whether an earlier call has found that torch does it.
    """
    chip = triton_chip(op, request.a, options.backend) if all(shape) else None  # nothing to launch for an empty C
    if chip is None or is_known:
        with tracing.record("gemm", *traced, request.a, request.out_dtype):
            return in_torch(request)
    c = torch.empty(shape, dtype=request.out_dtype, device=request.a.device) if request.out is None else request.out
    pre = torch.empty_like(c) if request.keep_pre else None
    return _launched(op, request, chip, c, pre, tensors, options, asked, traced) or in_torch(request)


def _launched(
    op: str,
    request: ProductRequest,
    chip: Chip,
    c: Tensor,
    pre: Tensor | None,
    tensors: Tensors,
    options: Options,
    asked: object,
    traced: Traced,
) -> Product | None:
    """The product by a kernel, into `c` and `pre`; None where torch is chosen, or Triton refuses."""
    form, aux = request.form, None if request.pre is None else request.pre.contiguous()
    a, b = _within_two_batch_dims(op, request, traced[3])
    view = matrix(c, "mn", False, "n" if form.c_blocks > 1 else None, op=op, name="c")
    call = GemmCall(
        a=a, b=b, c=c, view_a=matrix(a, "mk", form.transpose_a, form.a_blocks, op=op, name="a"),
        view_b=matrix(b, "kn", form.transpose_b, form.b_blocks, op=op, name="b"), view_c=view, aux=aux, pre=pre,
        bias=request.bias, activation=request.activation, accumulate=request.accumulate,
        sms_to_leave=options.sms_to_leave,
    )  # fmt: skip
    config = configuration(op, call.problem(), chip, options)
    with tracing.record("gemm", *traced, request.a, request.out_dtype):
        launches = launch.gemm_launches(call, config, chip) if config.kernel != "torch" else []
        if not launches or not launch.ran(op, launches, a.device, config):
            prepared.keep(asked, prepared.Known())
            return None
    known = prepared.prepared(
        launches, tensors(c, pre), call.made, c_shape=tuple(c.shape), out_dtype=request.out_dtype,
        descriptors=config.kernel == "tma", traced=traced,
    )  # fmt: skip
    prepared.keep(asked, known)
    return Product(c, pre)


def _within_two_batch_dims(op: str, request: ProductRequest, batch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A and B.  The kernels know two batch dims: beyond that (after merging) they are copied in full."""
    a, b, form = request.a, request.b, request.form
    views = [
        matrix(a, "mk", form.transpose_a, form.a_blocks, op=op, name="a"),
        matrix(b, "kn", form.transpose_b, form.b_blocks, op=op, name="b"),
    ]
    if len(merge_batch([view.broadcast(batch) for view in views])[0].batch) <= 2:
        return a, b

    def full(x: Tensor, blocks: str | None) -> Tensor:
        lead = tuple(x.shape[:1]) if blocks else ()
        x = x.reshape(*lead, *(1,) * (len(batch) + 2 + len(lead) - x.dim()), *x.shape[len(lead) :])
        return x.expand(*lead, *batch, *x.shape[-2:]).contiguous()

    return full(a, form.a_blocks), full(b, form.b_blocks)
