"""The GEMM kernel in the interpreter: operand forms, sizes, dtypes."""

import itertools
import mmap
from dataclasses import replace

import pytest
import torch
from ndtp_kernels import products, reference
from ndtp_kernels.call import GemmCall
from ndtp_kernels.choice.chips import INTERPRETER
from ndtp_kernels.form import Form
from ndtp_kernels.launch import gemm_launches
from ndtp_kernels.operands import Matrix, matrix
from poisoned import POINTER, TMA, TMA_HALVES, assert_close, integers, surrounded, triton_options

TRANSPOSES = list(itertools.product((False, True), repeat=2))


def operands(m, n, k, transpose_a, transpose_b, dtype=torch.float32, batch_a=(), batch_b=(), make=integers):
    a = make(*batch_a, *((k, m) if transpose_a else (m, k)), dtype=dtype)
    b = make(*batch_b, *((n, k) if transpose_b else (k, n)), dtype=dtype)
    return a, b


@pytest.mark.parametrize("transposes", TRANSPOSES, ids=str)
@pytest.mark.parametrize(
    "size", [(1, 1, 1), (7, 129, 33), (16, 32, 48), (129, 7, 1), (32, 16, 0), (0, 4, 4), (5, 0, 3)], ids=str
)
def test_pointer_kernel_exact(size, transposes):
    """Odd and zero sizes, operands inside NaN."""
    a, b = operands(*size, *transposes)
    form = Form(*transposes)
    got = products.gemm("gemm", surrounded(a), surrounded(b), form=form, options=triton_options()).c
    want, _ = reference.gemm(a, b, transpose_a=transposes[0], transpose_b=transposes[1])
    assert torch.equal(got.double(), want)


@pytest.mark.parametrize("transposes", TRANSPOSES, ids=str)
@pytest.mark.parametrize("config", [TMA, TMA_HALVES], ids=str)
@pytest.mark.parametrize("size", [(8, 132, 36), (16, 32, 48), (36, 20, 4)], ids=str)
def test_descriptor_kernel_exact(size, transposes, config):
    """Tiles that stick out of the matrices on every side; strides in multiples of 16 bytes."""
    a, b = operands(*size, *transposes)
    got = products.gemm("gemm", surrounded(a), surrounded(b), form=Form(*transposes), options=triton_options(config)).c
    want, _ = reference.gemm(a, b, transpose_a=transposes[0], transpose_b=transposes[1])
    assert torch.equal(got.double(), want)


@pytest.mark.parametrize("config", [POINTER, TMA], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, config):
    a, b = operands(24, 40, 32, False, True, dtype, make=lambda *s, dtype: torch.randn(s).to(dtype))
    got = products.gemm("gemm", a, b, form=Form(False, True), out_dtype=torch.float32, options=triton_options(config)).c
    want, _ = reference.gemm(a, b, transpose_b=True)
    assert_close(got, want, dtype=torch.float32)
    rounded = products.gemm("gemm", a, b, form=Form(False, True), options=triton_options(config)).c
    assert rounded.dtype == dtype
    assert_close(rounded, want, dtype=dtype)


@pytest.mark.parametrize(
    "batches,config",
    [
        (((3,), ()), POINTER),
        (((2, 3), ()), POINTER),
        (((2, 3), (3,)), POINTER),
        (((2, 1), (3,)), POINTER),
        (((2, 1, 2), (1, 2, 1)), POINTER),
        (((0,), ()), POINTER),
        # A descriptor takes one stride for the batch, of A, of B or of both.
        (((3,), ()), TMA),
        (((3,), (3,)), TMA),
        (((), (3,)), TMA),
    ],
    ids=str,
)
def test_batches_broadcast(batches, config):
    """Leading dims broadcast as torch.matmul's do; strides of any kind, since both operands lie inside NaN."""
    a, b = operands(20, 8, 12, False, True, batch_a=batches[0], batch_b=batches[1])
    got = products.gemm("gemm", surrounded(a), surrounded(b), form=Form(False, True), options=triton_options(config)).c
    assert torch.equal(got.double(), torch.matmul(a.double(), b.double().mT))


def test_any_strides():
    """Every second row and column, and a batch dim that is not in front in memory."""
    a, b = integers(18, 3, 22)[::2].movedim(1, 0)[..., ::2], integers(3, 22, 26)[:, ::2, 1::2]
    got = products.gemm("gemm", a, b, options=triton_options()).c
    assert torch.equal(got.double(), torch.matmul(a.double(), b.double()))


@pytest.mark.parametrize("split,config", [(2, POINTER), (8, POINTER), (3, TMA_HALVES)], ids=str)
def test_split_k_exact(split, config):
    """More splits than K has tiles leave some with nothing to add; batched too."""
    a, b = operands(20, 36, 72, True, False, batch_a=(2,))
    bias = integers(36)
    options = triton_options(replace(config, split_k=split))
    got = products.gemm("gemm", a, b, form=Form(True, False), bias=bias, activation="relu", options=options).c
    want, _ = reference.gemm(a, b, bias, transpose_a=True, activation_name="relu")
    assert torch.equal(got.double(), want)


@pytest.mark.parametrize("config", [POINTER, TMA, replace(POINTER, split_k=2)], ids=str)
def test_accumulate_into_a_strided_output(config):
    """Weight gradients into fp32 main gradients: bf16 operands, fp32 sums, an output that is part of a larger one."""
    a, b = operands(24, 16, 40, True, False, torch.bfloat16)
    out = surrounded(integers(24, 16))
    want = out.double() + torch.matmul(a.double().mT, b.double())
    got = products.gemm("gemm", a, b, form=Form(True, False), out=out, accumulate=True, options=triton_options(config))
    assert got.c is out
    assert torch.equal(out.double(), want)


def test_row_sums_are_bias_gradients():
    """dB = dC^T . A with the sums of dC over tokens beside it, split or not, odd sizes."""
    dc, x = integers(37, 21), integers(37, 19)
    for config in (POINTER, replace(POINTER, split_k=2)):
        got = products.gemm("gemm", dc, x, form=Form(True, False), row_sums=True, options=triton_options(config))
        assert torch.equal(got.c, dc.mT @ x)
        assert torch.equal(got.row_sums, dc.sum(0))


@pytest.mark.parametrize("batches", [((), (2,)), ((2,), ()), ((2, 3), (3,))], ids=str)
def test_row_sums_count_every_product_of_a_batch(batches):
    """The kernel and torch agree where A is used by several products."""
    a, b = operands(9, 8, 7, False, False, batch_a=batches[0], batch_b=batches[1])
    ours = products.gemm("gemm", a, b, row_sums=True, options=triton_options()).row_sums
    torchs = products.gemm("gemm", a, b, row_sums=True).row_sums
    assert torch.equal(ours, torchs)
    assert torch.equal(ours, a.sum(-1).expand(*torch.broadcast_shapes(*batches), 9).reshape(-1, 9).sum(0))


def test_leaving_processors_free_changes_nothing():
    """Of 20 tiles on 3 processors: one program takes 4 of them, or two 8 together, and others a tile each."""
    a, b = operands(52, 72, 20, False, False)
    for config, leave in ((POINTER, 2), (TMA, 2), (TMA, 1)):
        got = products.gemm("gemm", a, b, options=triton_options(config, sms_to_leave=leave)).c
        assert torch.equal(got, a @ b)


@pytest.mark.parametrize("config", [POINTER, TMA], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_fp8_sums_are_moved_in_a_long_product(gated, config):
    """Two moves of 512 elements of K, and what is left; those of gate and up at different steps."""
    a, gate, up = (integers(*size).to(torch.float8_e4m3fn) for size in ((16, 1200), (16, 1200), (16, 1200)))
    got = products.gemm(
        "gemm", a, gate, form=Form(False, True), b2=up if gated else None, activation="relu", out_dtype=torch.float32,
        options=triton_options(config),
    ).c  # fmt: skip
    left, right = a.double() @ gate.double().mT, a.double() @ up.double().mT
    assert torch.equal(got.double(), torch.relu(left) * (right if gated else 1))


def test_split_sums_lie_beyond_four_gigabytes():
    """The third of four lies 2^31 elements behind the first: memory that is reserved and hardly used."""
    a, b = operands(16, 16, 64, False, True)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
    reserved = mmap.mmap(-1, 13 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    space = torch.frombuffer(reserved, dtype=torch.float32)
    call = GemmCall(
        a, b, space, matrix(a, "mk", False, None, op="t", name="a"), matrix(b, "kn", True, None, op="t", name="b"),
        Matrix(16, 16, 16, 1),
    )  # fmt: skip
    (launched, _), _ = gemm_launches(call, replace(POINTER, split_k=4), INTERPRETER)
    launched.arguments |= {"C": space, "sc_split": 2**30}
    launched.run()
    parts = torch.stack([space[split * 2**30 :][:256].view(16, 16) for split in range(4)])
    want = torch.stack([a[:, part] @ b[:, part].mT for part in (slice(16 * at, 16 * at + 16) for at in range(4))])
    assert torch.equal(parts, want)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("config", [POINTER, TMA, replace(POINTER, split_k=2)], ids=str)
def test_fp8_with_scales(rowwise, config):
    """torch._scaled_mm's contract: one scale for a tensor, or one for each row of A and column of B."""
    m, n, k = 20, 24, 48
    a, b = torch.randn(m, k).to(torch.float8_e4m3fn), torch.randn(n, k).to(torch.float8_e4m3fn)
    scale_a = torch.rand(m, 1) + 0.5 if rowwise else torch.tensor(0.75)
    scale_b = torch.rand(1, n) + 0.5 if rowwise else torch.tensor(1.5)
    bias = torch.randn(n)
    form = Form(False, True)
    got = products.gemm(
        "gemm", a, b, form=form, bias=bias, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32,
        options=triton_options(config),
    ).c  # fmt: skip
    want, _ = reference.gemm(a, b, bias, None, scale_a, scale_b, transpose_b=True)
    assert_close(got, want, dtype=torch.float32)


def quantized(*shape, by_rows, turned=False):
    """e4m3 operands, and their scale: a number, or one for each row (of B: column)."""
    x = torch.randn(shape).to(torch.float8_e4m3fn)
    if not by_rows:
        return x, torch.rand(()) + 0.5
    scale = torch.rand(shape[-2], 1) + 0.5
    return x, scale.mT if turned else scale


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("config", [POINTER, TMA_HALVES, replace(POINTER, split_k=2)], ids=str)
def test_fp8_gated_pair(by_rows, config):
    """Gate and up have scales of their own."""
    a, scale_a = quantized(20, 48, by_rows=by_rows)
    (gate, scale_g), (up, scale_u) = (quantized(36, 48, by_rows=by_rows, turned=True) for _ in range(2))
    bias = torch.randn(36)
    got = products.gemm(
        "gated", a, gate, form=Form(False, True), b2=up, bias=bias, bias2=-bias, scale_a=scale_a, scale_b=scale_g,
        scale_b2=scale_u, activation="silu", keep_pre=True, out_dtype=torch.float32, options=triton_options(config),
    )  # fmt: skip
    want, *pre = reference.gated_gemm(
        a, gate, up, bias, -bias, activation_name="silu", scale_a=scale_a, scale_b_gate=scale_g, scale_b_up=scale_u,
        transpose_b=True,
    )  # fmt: skip
    assert_close(got.c / 10, want / 10, dtype=torch.float32)
    assert_close(got.pre / 10, torch.stack(pre) / 10, dtype=torch.float32)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("config", [POINTER, TMA_HALVES, replace(POINTER, split_k=2)], ids=str)
def test_fp8_backward(by_rows, gated, config):
    """The activation's gradient after the scales: dgrad in e4m3, its result in bf16 or wider."""
    (dc, scale_a), (weight, scale_b) = (
        quantized(20, 48, by_rows=by_rows), quantized(36, 48, by_rows=by_rows, turned=True)
    )  # fmt: skip
    pre = torch.randn(*((2,) if gated else ()), 20, 36)
    got = products.backward_gemm(
        "backward", dc, weight, pre, form=Form(False, True), activation="silu", gated=gated, scale_a=scale_a,
        scale_b=scale_b, column_sums=True, out_dtype=torch.float32, options=triton_options(config),
    )  # fmt: skip
    d = (dc.double() @ weight.double().mT) * scale_a.double() * scale_b.double()
    gate, up = (pre[0], pre[1]) if gated else (pre, None)
    dx, dup, _ = reference.backward_epilogue(d, gate, up, activation_name="silu")
    want = torch.stack((dx, dup)) if gated else dx
    assert_close(got.c / 10, want / 10, dtype=torch.float32)
    assert_close(got.column_sums / 100, want.sum(-2) / 100, dtype=torch.float32)


@pytest.mark.parametrize("config", [POINTER, TMA, replace(POINTER, split_k=2)], ids=str)
def test_fp8_weight_gradients_accumulate_in_fp32(config):
    """Both operands transposed when they were quantized: tokens are contiguous."""
    (dc, scale_a), (x, scale_b) = quantized(24, 48, by_rows=False), quantized(16, 48, by_rows=False)
    out = torch.randn(24, 16)
    want = out.double() + (dc.double() @ x.double().mT) * scale_a.double() * scale_b.double()
    got = products.gemm(
        "wgrad", dc, x, form=Form(False, True), scale_a=scale_a, scale_b=scale_b, out=out, accumulate=True,
        options=triton_options(config),
    )  # fmt: skip
    assert got.c is out
    assert_close(out / 10, want / 10, dtype=torch.float32)
