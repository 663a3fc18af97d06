"""Products of experts in the interpreter, against a loop over experts: uneven and empty ones, tails, dtypes, tiles."""

from dataclasses import replace

import ndtp_kernels as kernels
import pytest
import torch
from ndtp_kernels import grouped
from ndtp_kernels.choice.chips import INTERPRETER
from ndtp_kernels.choice.problem import Config
from ndtp_kernels.errors import KernelError
from poisoned import POINTER, TMA, TMA_HALVES, integers, surrounded, triton_options

SIZES = [(7, 0, 17, 1), (0, 5, 0)]
OTHER_K = replace(TMA_HALVES, block_m=32, block_k=32)  # a step of K that no expert's rows fill


def offsets_of(sizes):
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32)


def loop(a, b, sizes):
    """In fp64."""
    parts = [rows.double() @ one.double() for rows, one in zip(a.split(list(sizes)), b, strict=True)]
    return torch.cat(parts)


def outer_loop(a, b, sizes):
    split = zip(a.split(list(sizes)), b.split(list(sizes)), strict=True)
    return torch.stack([left.double().mT @ right.double() for left, right in split])


@pytest.mark.parametrize("config", [POINTER, TMA, OTHER_K], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_expert_multiplies_its_rows_alone(sizes, config):
    """Tails of N and K; weights as they are stored and turned; what lies beside an operand is NaN."""
    rows, n, k = sum(sizes), 36, 20
    for transpose_b in (True, False):
        a, b = integers(rows, k), integers(len(sizes), *((n, k) if transpose_b else (k, n)))
        how = {"transpose_b": transpose_b, "options": triton_options(config)}
        got = kernels.grouped_gemm(surrounded(a), surrounded(b), offsets_of(sizes), **how)
        assert torch.equal(got.double(), loop(a, b.mT if transpose_b else b, sizes))
    left, right = integers(rows, n), integers(rows, k)
    got = kernels.grouped_wgrad(surrounded(left), surrounded(right), offsets_of(sizes), options=triton_options(config))
    assert torch.equal(got.double(), outer_loop(left, right, sizes))


@pytest.mark.parametrize("config", [POINTER, OTHER_K], ids=str)
def test_nothing_of_one_expert_reaches_another(config):
    """The first expert's rows and weights are NaN, and so are its results, and no others."""
    sizes = (5, 0, 37, 6)
    a, b, grad = integers(48, 20), integers(4, 36, 20), integers(48, 36)
    clean = [loop(a, b.mT, sizes), outer_loop(grad, a, sizes)]
    for tensor, of in ((a, slice(0, 5)), (b, 0), (grad, slice(0, 5))):
        tensor[of] = torch.nan
    offsets, options = offsets_of(sizes), triton_options(config)
    c = kernels.grouped_gemm(a, b, offsets, transpose_b=True, options=options)
    d = kernels.grouped_wgrad(grad, a, offsets, options=options)
    assert c[:5].isnan().all() and torch.equal(c[5:].double(), clean[0][5:])
    assert d[0].isnan().all() and torch.equal(d[1:].double(), clean[1][1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_and_gradients(dtype):
    """Forward, dgrad and wgrad; an expert without rows has a gradient of zeros."""
    sizes = (9, 0, 24)
    a, b, grad = integers(33, 16, dtype=dtype), integers(3, 24, 16, dtype=dtype), integers(33, 24, dtype=dtype)
    offsets, how = offsets_of(sizes), {"options": triton_options(TMA)}
    y = kernels.grouped_gemm(a, b, offsets, transpose_b=True, **how)
    assert y.dtype == dtype and torch.equal(y.double(), loop(a, b.mT, sizes))
    assert torch.equal(kernels.grouped_gemm(grad, b, offsets, **how).double(), loop(grad, b, sizes))
    db = kernels.grouped_wgrad(grad, a, offsets, **how)
    assert torch.equal(db.double(), outer_loop(grad, a, sizes)) and not db[1].any()


def test_the_offsets_stay_where_they_are(monkeypatch):
    """Another routing of as many rows is another launch of the same kernel: the host sees no number of it."""
    seen = []
    monkeypatch.setattr(grouped.launch, "run", lambda launches, *_: seen.extend(launches))
    for sizes in ((40, 0, 8), (1, 46, 1)):
        kernels.grouped_gemm(torch.ones(48, 16), torch.ones(3, 16, 16), offsets_of(sizes), options=triton_options(TMA))
    first, second = seen
    assert first.grid == second.grid <= INTERPRETER.num_sms and first.constants == second.constants
    numbers = [{k: v for k, v in each.arguments.items() if isinstance(v, int)} for each in seen]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("config", [POINTER, Config("pointer", 16, 32, 16, 1, 1, group_m=1)], ids=str)
def test_strides_of_any_kind(config):
    """Columns of a wider matrix, and operands that are stored turned."""
    sizes = (10, 3)
    a, b = integers(20, 13).mT, integers(2, 18, 20)[:, 1:, :].mT
    got = kernels.grouped_gemm(a, b, offsets_of(sizes), options=triton_options(config))
    assert torch.equal(got.double(), loop(a, b, sizes))
    got = kernels.grouped_wgrad(a, integers(13, 40)[:, ::2], offsets_of(sizes), options=triton_options(config))
    assert got.shape == (2, 20, 20) and got.isfinite().all()


def test_no_rows_at_all_and_what_does_not_fit():
    none = torch.zeros(3, dtype=torch.int32)
    assert kernels.grouped_gemm(torch.ones(0, 8), torch.ones(2, 8, 4), none, options=triton_options()).shape == (0, 4)
    got = kernels.grouped_wgrad(torch.ones(0, 8), torch.ones(0, 4), none, options=triton_options())
    assert torch.equal(got, torch.zeros(2, 8, 4))
    with pytest.raises(KernelError, match=r"A \(4, 8\), B \(2, 4, 8\)"):
        kernels.grouped_gemm(torch.ones(4, 8), torch.ones(2, 4, 8), none)
    with pytest.raises(KernelError, match="offsets are"):
        kernels.grouped_wgrad(torch.ones(4, 8), torch.ones(4, 8), none.long())
