"""torch.library custom ops over `products`, with fakes and autograd: the door for torch.compile and for autograd.

Optional results are empty tensors when they were not asked for.  How to run (`Options`) travels as a string, since an
op's schema knows no dataclasses; the table is always the default one here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ndtp_kernels import products
from ndtp_kernels.autograd import gradients
from ndtp_kernels.autograd.ops_reduce import (
    argument_names,
    empty,
    fake_backward,
    in_order,
    reduce_blocks_backward,
    triple,
)
from ndtp_kernels.choice.problem import Config
from ndtp_kernels.choice.selection import Options
from ndtp_kernels.errors import KernelError
from ndtp_kernels.form import Form, default_dtype, read


def encode(options: Options) -> str:
    """Encode options as plain text that Dynamo can build while it traces."""
    config = "" if options.config is None else options.config.code
    return f"{options.backend} {options.sms_to_leave} {options.precision} {int(options.fast_accumulation)} {config}"


@functools.lru_cache(maxsize=256)
def decode(text: str) -> Options:
    backend, sms, precision, fast, config = text.split(" ", 4)
    return Options(backend, Config.from_code(config) if config else None, None, int(sms), precision, fast == "1")


def encode_form(form: Form) -> str:
    """Two letters for the transposes, three for the blocks; the number of blocks may be symbolic and stays a number."""
    transposes = ("t" if form.transpose_a else "n") + ("t" if form.transpose_b else "n")
    return transposes + (form.a_blocks or "-") + (form.b_blocks or "-") + (form.c_blocks or "-")


def decode_form(text: str, num_c_blocks: int) -> Form:
    a, b, c = (None if letter == "-" else letter for letter in text[2:])
    return Form(text[0] == "t", text[1] == "t", a, b, c, num_c_blocks)


# ---------------------------------------------------------------------------------------------------------- gemm


@torch.library.custom_op("ndtp_kernels::gemm", mutates_args=())
def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    form: str,
    num_c_blocks: int,
    activation: str,
    keep_pre: bool,
    row_sums: bool,
    out_dtype: torch.dtype | None,
    options: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """C, pre-activation, row sums of A."""
    done = products.gemm(
        "gemm",
        a,
        b,
        form=decode_form(form, num_c_blocks),
        bias=bias,
        residual=residual,
        scale_a=scale_a,
        scale_b=scale_b,
        activation=activation,
        keep_pre=keep_pre,
        row_sums=row_sums,
        out_dtype=out_dtype,
        options=decode(options),
    )
    pre = empty(a, done.c.dtype) if done.pre is None else done.pre
    return done.c, pre, empty(a) if done.row_sums is None else done.row_sums


@gemm.register_fake
def _(a, b, bias, residual, scale_a, scale_b, form, num_c_blocks, activation, keep_pre, row_sums, out_dtype, options):  # type: ignore[no-untyped-def]
    found = read("gemm", a, b, decode_form(form, num_c_blocks), activation)
    c = a.new_empty(found.c_shape, dtype=default_dtype(a, out_dtype))
    pre = c.new_empty(found.c_shape if keep_pre else (0,))
    return c, pre, a.new_empty((found.a.rows if row_sums else 0,), dtype=torch.float32)


def _save_gemm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = _keep("gemm", gemm, ctx, inputs)
    ctx.mark_non_differentiable(*(output[2:] if ctx.kept else output[1:]))
    ctx.bias_dtype = None if given["bias"] is None else given["bias"].dtype
    ctx.save_for_backward(given["a"], given["b"], output[1])


def _keep(op: str, called: Any, ctx: Any, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Save for backward what every product's backward needs, and return the arguments by name."""
    given = dict(zip(argument_names(called), inputs, strict=True))
    if given["a"].dtype.itemsize == 1:
        raise KernelError(op, "fp8 operands have no gradient here", "differentiate in bf16, or detach the operands")
    ctx.set_materialize_grads(False)
    ctx.form, ctx.kept = decode_form(given["form"], given["num_c_blocks"]), given["keep_pre"]
    ctx.activation, ctx.options = given["activation"], given["options"]
    ctx.residual_dtype = None if given["residual"] is None else given["residual"].dtype
    return given


def _runner(options: str) -> gradients.Gemm:
    def run(
        left: Tensor, right: Tensor, residual: Tensor | None, form: Form, row_sums: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        return gemm(
            left, right, bias=None, residual=residual, scale_a=None, scale_b=None, form=encode_form(form),
            num_c_blocks=form.num_c_blocks, activation="none", keep_pre=False, row_sums=row_sums, out_dtype=dtype,
            options=options,
        )  # fmt: skip

    return run


def _backward_gemm_op(ctx: Any, dc: Tensor | None, dpre: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    a, b, pre = ctx.saved_tensors
    form, needs = ctx.form, ctx.needs_input_grad
    dresidual = dc.to(ctx.residual_dtype) if needs[3] and dc is not None else None
    dbias = None
    if dc is not None and ctx.activation != "none":
        if not ctx.kept:
            raise KernelError("gemm", "backward needs the pre-activation, which was not kept", "keep_pre=True")
        joined = form.c_blocks != "n"
        dc, sums, _ = reduce_blocks_backward(
            dc.unsqueeze(0), pre, activation=ctx.activation, gated=False, column_sums=bool(needs[2] and joined),
            recompute=False, out_dtype=a.dtype, backend=decode(ctx.options).backend,
        )  # fmt: skip
        dbias = sums if needs[2] and joined else None
    if dpre is not None:  # the pre-activation was itself used
        dc, dbias = (dpre if dc is None else dc + dpre), None
    if dc is None:
        return in_order(gemm)
    dc = dc.to(a.dtype)
    run = _runner(ctx.options)
    da = gradients.gradient_a(run, dc, a, b, form) if needs[0] else None
    db = None
    if needs[1]:
        db, sums = gradients.gradient_b(run, dc, a, b, form, row_sums=bool(needs[2] and dbias is None))
        dbias = sums if dbias is None and sums is not None and sums.numel() else dbias
    if needs[2]:
        dbias = (gradients.bias_gradient(dc, form.c_blocks) if dbias is None else dbias).to(ctx.bias_dtype)
    return in_order(gemm, a=da, b=db, bias=dbias, residual=dresidual)


gemm.register_autograd(_backward_gemm_op, setup_context=_save_gemm)


@torch.library.custom_op("ndtp_kernels::gemm_out", mutates_args=("out",))
def gemm_out(
    a: Tensor, b: Tensor, out: Tensor, accumulate: bool, form: str, num_c_blocks: int, row_sums: bool, options: str
) -> Tensor:
    """Multiply into `out`, or add to it, as weight gradients are added to fp32 main gradients; return A's row sums."""
    done = products.gemm(
        "gemm_out", a, b, form=decode_form(form, num_c_blocks), out=out, accumulate=accumulate, row_sums=row_sums,
        options=decode(options),
    )  # fmt: skip
    return empty(a) if done.row_sums is None else done.row_sums


@gemm_out.register_fake
def _(a, b, out, accumulate, form, num_c_blocks, row_sums, options):  # type: ignore[no-untyped-def]
    found = read("gemm_out", a, b, decode_form(form, num_c_blocks), "none")
    return a.new_empty((found.a.rows if row_sums else 0,), dtype=torch.float32)


# --------------------------------------------------------------------------------------------------- gated pairs


@torch.library.custom_op("ndtp_kernels::gated_gemm", mutates_args=())
def gated_gemm(
    a: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b_gate: Tensor | None,
    scale_b_up: Tensor | None,
    form: str,
    num_c_blocks: int,
    activation: str,
    keep_pre: bool,
    out_dtype: torch.dtype | None,
    options: str,
) -> tuple[Tensor, Tensor]:
    """act(A . Bg + bg) * (A . Bu + bu) [+ residual], and [2, ..]: gate and up."""
    done = products.gemm(
        "gated_gemm",
        a,
        b_gate,
        form=decode_form(form, num_c_blocks),
        b2=b_up,
        bias=bias_gate,
        bias2=bias_up,
        residual=residual,
        scale_a=scale_a,
        scale_b=scale_b_gate,
        scale_b2=scale_b_up,
        activation=activation,
        keep_pre=keep_pre,
        out_dtype=out_dtype,
        options=decode(options),
    )
    return done.c, empty(a, done.c.dtype) if done.pre is None else done.pre


@gated_gemm.register_fake
def _(a, b_gate, b_up, bias_gate, bias_up, residual, scale_a, scale_b_gate, scale_b_up, form, *rest):  # type: ignore[no-untyped-def]
    num_c_blocks, activation, keep_pre, out_dtype, _ = rest
    found = read("gated_gemm", a, b_gate, decode_form(form, num_c_blocks), activation)
    c = a.new_empty(found.c_shape, dtype=default_dtype(a, out_dtype))
    return c, c.new_empty((2, *found.c_shape) if keep_pre else (0,))


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = _keep("gated_gemm", gated_gemm, ctx, inputs)
    if not ctx.kept:
        ctx.mark_non_differentiable(output[1])
    biases = (given["bias_gate"], given["bias_up"])
    ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
    ctx.save_for_backward(given["a"], given["b_gate"], given["b_up"], output[1])


def _backward_gated(ctx: Any, dc: Tensor | None, dpre: Tensor | None) -> tuple[Any, ...]:
    a, b_gate, b_up, pre = ctx.saved_tensors
    form, needs = ctx.form, ctx.needs_input_grad
    both, sums, dresidual = dpre, None, None
    if dc is not None:
        if not ctx.kept:
            raise KernelError("gated_gemm", "backward needs gate and up, which were not kept", "keep_pre=True")
        dresidual = dc.to(ctx.residual_dtype) if needs[5] else None
        from_c, sums, _ = reduce_blocks_backward(
            dc.unsqueeze(0), pre, activation=ctx.activation, gated=True, column_sums=form.c_blocks != "n",
            recompute=False, out_dtype=a.dtype, backend=decode(ctx.options).backend,
        )  # fmt: skip
        both = from_c if dpre is None else from_c + dpre
        sums = sums if dpre is None and form.c_blocks != "n" else None
    if both is None:
        return in_order(gated_gemm)
    run, both = _runner(ctx.options), both.to(a.dtype)
    plain = form.a_blocks is None and form.b_blocks is None and form.c_blocks is None
    da = None
    if needs[0]:
        pair = gradients.stacked(b_gate, b_up) if plain and b_gate.dim() == 2 and not form.transpose_a else None
        if pair is not None:
            # Gate and up are one product over 2 N: both operands in two blocks along the contracted dim.
            inner = Form(False, not form.transpose_b, "k", "k")
            da = run(both, pair, None, inner, False, a.dtype)[0]
        else:
            # The first half is kept in fp32, so that the sum is rounded once.
            half = gradients.gradient_a(run, both[0], a, b_gate, form, None, gradients.sum_dtype(a))
            da = gradients.gradient_a(run, both[1], a, b_up, form, half)
    db_gate = gradients.gradient_b(run, both[0], a, b_gate, form)[0] if needs[1] else None
    db_up = gradients.gradient_b(run, both[1], a, b_up, form)[0] if needs[2] else None
    biases: list[Tensor | None] = []
    for index, dtype in enumerate(ctx.bias_dtypes):
        if not needs[3 + index] or dtype is None:
            biases.append(None)
            continue
        own = sums[index] if sums is not None else gradients.bias_gradient(both[index], form.c_blocks)
        biases.append(own.to(dtype))
    return in_order(
        gated_gemm, a=da, b_gate=db_gate, b_up=db_up, bias_gate=biases[0], bias_up=biases[1], residual=dresidual
    )


gated_gemm.register_autograd(_backward_gated, setup_context=_save_gated)


# ------------------------------------------------------------------------------------------- backward epilogues


@torch.library.custom_op("ndtp_kernels::backward_gemm", mutates_args=())
def backward_gemm(
    a: Tensor, b: Tensor, pre: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, form: str, num_c_blocks: int,
    activation: str, gated: bool, column_sums: bool, recompute: bool, out_dtype: torch.dtype | None, options: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(A . B) * act'(pre): gradient of pre (gated [2, ..]), its column sums, the recomputed activation."""
    done = products.backward_gemm(
        "backward_gemm", a, b, pre, form=decode_form(form, num_c_blocks), activation=activation, gated=gated,
        scale_a=scale_a, scale_b=scale_b, column_sums=column_sums, recompute=recompute, out_dtype=out_dtype,
        options=decode(options),
    )  # fmt: skip
    return triple(done)


@backward_gemm.register_fake
def _(a, b, pre, scale_a, scale_b, form, num_c_blocks, activation, gated, column_sums, recompute, out_dtype, options):  # type: ignore[no-untyped-def]
    found = read("backward_gemm", a, b, decode_form(form, num_c_blocks), activation)
    return fake_backward(pre, found.b.cols, gated, column_sums, recompute, default_dtype(a, out_dtype))


# ------------------------------------------------------------------------------------------------------ flop counts


@register_flop_formula(torch.ops.ndtp_kernels.gemm)
def _gemm_flops(a_shape: Any, b_shape: Any, *args: Any, out_shape: Any = None, **keywords: Any) -> int:
    return _flops(a_shape, args[4], out_shape[0])


@register_flop_formula(torch.ops.ndtp_kernels.gated_gemm)
def _gated_flops(a_shape: Any, b_shape: Any, *args: Any, out_shape: Any = None, **keywords: Any) -> int:
    return 2 * _flops(a_shape, args[7], out_shape[0])


@register_flop_formula(torch.ops.ndtp_kernels.backward_gemm)
def _backward_flops(a_shape: Any, b_shape: Any, pre_shape: Any, *args: Any, **keywords: Any) -> int:
    form, gated = args[2], args[5]
    return _flops(a_shape, form, pre_shape[1:] if gated else pre_shape)


def _flops(a_shape: Any, form_text: str, c_shape: Any) -> int:
    """2 K for each element of C."""
    form = decode_form(form_text, 1)
    k = a_shape[-2] if form.transpose_a else a_shape[-1]
    if form.a_blocks == "k":
        k *= a_shape[0]
    total = 2 * k
    for size in c_shape:
        total *= size
    return total
