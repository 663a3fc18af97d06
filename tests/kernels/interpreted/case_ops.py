"""The public interface through the kernels: gradients, batches, blocks; and whole blocks of a network."""

import ndtp_kernels
import pytest
import torch
from ndtp_kernels import products, reference
from ndtp_kernels.errors import KernelFallback
from poisoned import INTERPRETED, integers


def leaves(*shapes):
    return [integers(*shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"a_blocks": "k", "c_blocks": "n", "num_c_blocks": 2},
        {"a_blocks": "m", "b_blocks": "k", "c_blocks": "m", "num_c_blocks": 3},
    ],
    ids=str,
)
def test_gradients_run_in_the_kernels(form):
    """relu keeps small integers exact, so forward and backward are compared with ==."""
    a_shape = {None: (2, 12, 10), "k": (2, 2, 12, 5), "m": (2, 2, 6, 10)}[form.get("a_blocks")]
    b_shape = {None: (14, 10), "k": (2, 14, 5)}[form.get("b_blocks")]
    tensors = leaves(a_shape, b_shape, (14,))
    ours = ndtp_kernels.gemm(*tensors, transpose_b=True, activation="relu", options=INTERPRETED, **form)
    theirs, _ = reference.gemm(*tensors, transpose_b=True, activation_name="relu", **form)
    assert torch.equal(ours.double(), theirs)
    upstream = integers(*ours.shape)
    got = torch.autograd.grad(ours, tensors, upstream)
    want = torch.autograd.grad(theirs, tensors, upstream.double())
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_a_gated_pair(packed):
    a, both, bias = integers(9, 10).requires_grad_(), integers(2, 14, 10), integers(14).requires_grad_()
    gate, up = both.unbind(0) if packed else (both[0].clone(), both[1].clone())
    inputs = (a, gate.detach().requires_grad_(), up.detach().requires_grad_(), bias)
    ours = ndtp_kernels.gated_gemm(*inputs, activation="relu", transpose_b=True, options=INTERPRETED)
    theirs, _, _ = reference.gated_gemm(*inputs, activation_name="relu", transpose_b=True)
    assert torch.equal(ours.double(), theirs)
    upstream = integers(*ours.shape)
    got = torch.autograd.grad(ours, inputs, upstream)
    want = torch.autograd.grad(theirs, inputs, upstream.double())
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)


def test_gradients_after_a_scatter():
    x, bias, residual = leaves((3, 5, 10), (10,), (5, 10))
    ours = ndtp_kernels.reduce_blocks(x, bias, activation="relu2", residual=residual, backend="triton")
    theirs = torch.relu(x.sum(0) + bias) ** 2 + residual
    assert torch.equal(ours, theirs)
    upstream = integers(5, 10)
    got = torch.autograd.grad(ours, (x, bias, residual), upstream)
    want = torch.autograd.grad(theirs, (x, bias, residual), upstream)
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)


def test_empty_products():
    """No tokens, no features, nothing to contract: shapes and zeros, never what was in memory."""
    for m, n, k in [(0, 4, 3), (4, 0, 3), (4, 3, 0)]:
        a, b, bias = leaves((m, k), (k, n), (n,))
        c = ndtp_kernels.gemm(a, b, bias, activation="silu", options=INTERPRETED)
        torch.testing.assert_close(c, torch.nn.functional.silu(a @ b + bias))
        for gradient in torch.autograd.grad(c.sum(), (a, b, bias)):
            assert not gradient.isnan().any()
    got = ndtp_kernels.gemm(integers(5, 4), integers(5, 0), transpose_a=True, return_row_sums=True, options=INTERPRETED)
    assert not got.row_sums.isnan().any()


def test_a_kernel_that_the_compiler_refuses(monkeypatch):
    """torch takes over, and says so; any other error is the caller's."""
    a, b = integers(6, 8), integers(8, 10)

    def refuse(*_):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(products.launch, "run", refuse)
    with pytest.warns(KernelFallback, match="does not run here, torch does instead: PassManager"):
        assert torch.equal(ndtp_kernels.gemm(a, b, options=INTERPRETED), a @ b)

    def fail(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(products.launch, "run", fail)
    assert torch.equal(ndtp_kernels.gemm(a, b, options=INTERPRETED), a @ b), "what was refused once is not tried again"
    a, b = integers(6, 9), integers(9, 10)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ndtp_kernels.gemm(a, b, options=INTERPRETED)
