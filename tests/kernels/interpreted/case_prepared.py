"""Calls that repeat an earlier one: its launches, other tensors."""

from dataclasses import replace

import pytest
import torch
from ndtp_kernels import prepared, products, reductions
from ndtp_kernels.form import Form
from poisoned import POINTER, TMA, integers, triton_options

NT = Form(False, True)


def known():
    return [each for each in prepared._known.values() if each.starts]


@pytest.mark.parametrize("config", [POINTER, TMA], ids=str)
def test_other_operands_are_multiplied(config):
    """At first both operands are one tensor; what is kept must not take them for one."""
    options = triton_options(config)
    for count in range(3):
        a = integers(16, 16)
        b = a if count == 0 else integers(16, 16)
        got = products.gemm("gemm", a, b, form=NT, options=options).c
        assert torch.equal(got, a @ b.mT)
        assert len(known()) == 1


def test_everything_beside_a_product():
    """Split K, scratch of its own in each call, pre-activation; a vector in other memory."""
    for _ in range(2):
        a, b, bias = integers(20, 64), integers(36, 64), integers(36)
        got = products.gemm(
            "gemm", a, b, form=NT, bias=bias, activation="relu", keep_pre=True,
            options=triton_options(replace(POINTER, split_k=2)),
        )  # fmt: skip
        assert torch.equal(got.pre, a @ b.mT + bias)
        assert torch.equal(got.c, torch.relu(got.pre))
    assert len(known()) == 1


def test_backward_and_sums_of_blocks():
    for _ in range(2):
        dc, weight, pre, blocks = integers(20, 24), integers(24, 36), integers(20, 36), integers(3, 20, 36)
        got = products.backward_gemm("b", dc, weight, pre, activation="relu", options=triton_options()).c
        assert torch.equal(got, (dc @ weight) * (pre > 0))
        total = reductions.reduce_backward("r", blocks, pre, activation="relu", backend="triton").c
        assert torch.equal(total, blocks.sum(0) * (pre > 0))
        summed = reductions.reduce("r", blocks, activation="relu", keep_pre=True, backend="triton")
        assert torch.equal(summed.c, torch.relu(summed.pre)) and torch.equal(summed.pre, blocks.sum(0))
        pairs = reductions.reduce("r", blocks, activation="relu", pairs=True, keep_pre=True, backend="triton")
        gate, up = summed.pre[:, 0::2], summed.pre[:, 1::2]
        assert torch.equal(pairs.c, torch.relu(gate) * up) and torch.equal(pairs.pre, summed.pre)
        grad = reductions.reduce_backward("r", pairs.c[None], pre, activation="relu", pairs=True, backend="triton").c
        gate, up = pre[:, 0::2], pre[:, 1::2]
        assert torch.equal(grad[:, 0::2], pairs.c * up * (gate > 0)) and torch.equal(
            grad[:, 1::2], pairs.c * gate.relu()
        )
    assert len(known()) == 5


def test_what_differs_is_prepared_anew():
    """Other strides, alignment, options, activation, or a wish for more: none may run what another one left."""
    a, b = integers(16, 16), integers(16, 16)
    room = integers(1, 16 * 16 + 1).flatten()
    shifted = room[1:].view(16, 16)  # four bytes off
    calls = [
        (a, b, NT, {}), (a, b, Form(), {}), (a.mT, b, NT, {}), (shifted, b, NT, {}), (a, b, NT, {"activation": "relu"}),
        (a, b, NT, {"keep_pre": True}), (a, b, NT, {"bias": integers(16)}),
        (a, b, NT, {"out": integers(16, 16).half()}), (a, b, NT, {"out": integers(16, 16)}),
    ]  # fmt: skip
    for count, (left, right, form, more) in enumerate(calls, 1):
        got = products.gemm("gemm", left, right, form=form, options=triton_options(), **more).c
        want = left @ (right.mT if form.transpose_b else right) + more.get("bias", 0)
        want = torch.relu(want) if "activation" in more else want
        assert torch.equal(got.float(), want)
        assert len(known()) == count


def test_a_copied_operand_is_copied_again():
    """A bias with gaps is made contiguous: its copy must not be what the next call adds."""
    a, b = integers(16, 16), integers(16, 16)
    for _ in range(2):
        bias = integers(1, 32).flatten()[::2]
        got = products.gemm("gemm", a, b, form=NT, bias=bias, options=triton_options()).c
        assert torch.equal(got, a @ b.mT + bias)
    assert not known()


def test_no_tensor_is_kept_alive():
    a, b = integers(16, 16), integers(16, 16)
    products.gemm("gemm", a, b, form=NT, options=triton_options())
    (each,) = known()
    assert not any(isinstance(value, torch.Tensor) for start in each.starts for value in start.values)


def test_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(prepared, "LIMIT", 2)
    for rows in (1, 2, 3):
        products.gemm("gemm", integers(rows, 4), integers(4, 4), form=NT, options=triton_options())
    assert len(prepared._known) == 1
