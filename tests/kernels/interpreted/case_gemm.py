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
    got = products.gemm("gemm", a, b, form=Form(False, True), out=torch.empty(24, 40), options=triton_options(config)).c
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
    a, b = operands(12, 20, 72, True, False, batch_a=(2,))
    bias = integers(20)
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


def test_leaving_processors_free_changes_nothing():
    """Of 20 tiles on 3 processors: one program takes 4 of them, or two 8 together, and others a tile each."""
    a, b = operands(52, 72, 20, False, False)
    for config, leave in ((POINTER, 2), (TMA, 2), (TMA, 1)):
        got = products.gemm("gemm", a, b, options=triton_options(config, sms_to_leave=leave)).c
        assert torch.equal(got, a @ b)


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
    launched, _ = gemm_launches(call, replace(POINTER, split_k=4), INTERPRETER)
    launched.arguments |= {"C": space, "sc_split": 2**30}
    launched.run()
    parts = torch.stack([space[split * 2**30 :][:256].view(16, 16) for split in range(4)])
    want = torch.stack([a[:, part] @ b[:, part].mT for part in (slice(16 * at, 16 * at + 16) for at in range(4))])
    assert torch.equal(parts, want)
