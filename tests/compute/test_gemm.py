"""The local products against einsum, by either implementation."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import ndtp
from ndtp import Grid, GridError, Layout, MatMulPlan
from ndtp.algebra.binding import bind
from ndtp.compute.carved_gemm import CarvedGemm, can_carve_out
from ndtp.compute.gemm import KernelGemm, TorchGemm
from ndtp.runtime.slots import letters_of
from ndtp.testing import assert_equal, small_integers

ONE = Grid(x=1)
SHAPES = [((), ()), ((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 3), (3,)), ((1, 3), (2, 1))]


@pytest.mark.parametrize("gemm", [TorchGemm(), KernelGemm()], ids=["torch", "kernels"])
@pytest.mark.parametrize("a_batch,b_batch", SHAPES, ids=str)
@pytest.mark.parametrize("transpose_a,transpose_b", [*product((False, True), repeat=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_and_their_gradients(gemm, a_batch, b_batch, transpose_a, transpose_b, dtype):
    a = small_integers((*a_batch, *((6, 4) if transpose_a else (4, 6))), 0, dtype).requires_grad_()
    b = small_integers((*b_batch, *((5, 6) if transpose_b else (6, 5))), 1, dtype).requires_grad_()
    layouts = (Layout(ONE, *[None] * t.dim()) for t in (a, b))
    plan, _ = bind(MatMulPlan(*layouts, transpose_a=transpose_a, transpose_b=transpose_b), a.shape, b.shape)
    dense = torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)
    grad = small_integers(dense.shape, 2, dtype)
    dense.backward(grad)
    with torch.no_grad():
        for name, one, other, expected in (("C", a, b, dense), ("dA", grad, b, a.grad), ("dB", grad, a, b.grad)):
            multiply = gemm.bound(letters_of(plan, name), one.shape, other.shape)
            assert_equal(multiply(one, other), expected, name)


def in_blocks(matrix, count):
    """[rows, columns] as `count` blocks of columns."""
    return matrix if count == 1 else matrix.unflatten(1, (count, -1)).movedim(1, 0).contiguous()


@pytest.mark.parametrize("gemm", [TorchGemm(), KernelGemm()], ids=["torch", "kernels"])
@pytest.mark.parametrize("transpose_a,transpose_b", [*product((False, True), repeat=2)])
@pytest.mark.parametrize("a_blocks,b_blocks,c_blocks", [*product((1, 3), repeat=3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_operands_and_results_that_lie_as_blocks_of_columns(
    gemm, transpose_a, transpose_b, a_blocks, b_blocks, c_blocks, dtype
):
    a = small_integers((6, 3) if transpose_a else (3, 6), 0, dtype)
    b = small_integers((9, 6) if transpose_b else (6, 9), 1, dtype)
    how = {"transpose_a": transpose_a, "transpose_b": transpose_b, "blocks": c_blocks}
    dense = (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)
    a, b = in_blocks(a, a_blocks), in_blocks(b, b_blocks)
    want = in_blocks(dense, c_blocks)
    assert_equal(gemm.product_of_blocks(a, b, **how), want, "C")
    out = torch.full_like(want, torch.nan)
    assert gemm.product_of_blocks(a, b, out=out, **how) is out
    assert_equal(out, want, "C in its place")
    gemm.product_of_blocks(a, b, out=out, accumulate=True, **how)
    assert_equal(out, 2 * want, "C added to")


@pytest.mark.parametrize("own", range(3))
def test_the_own_part_of_a_sum_first_and_the_others_on_top(own):
    gemm, a, b = TorchGemm(), small_integers((4, 6), 0), small_integers((6, 5), 1)
    mine = in_blocks(a, 3)[own].expand(3, -1, -1)  # nothing of the others is there yet
    begun = gemm.product_of_blocks(mine, b, False, False, parts=(own,))
    others = [part for part in range(3) if part != own]
    done = gemm.product_of_blocks(in_blocks(a, 3), b, False, False, out=begun, parts=others, accumulate=True)
    assert_equal(done, a @ b, "C")


def test_a_process_grid_multiplies_by_the_gemm_it_was_given():
    calls = []

    class Counting(KernelGemm):
        def product(self, *arguments, **how):
            calls.append(arguments)
            return super().product(*arguments, **how)

        def bound_finish(self, *how):
            return self.counted(super().bound_finish(*how))

        def bound_finish_backward(self, *how):
            return self.counted(super().bound_finish_backward(*how))

        def counted(self, run):
            return lambda *arguments: calls.append(arguments) or run(*arguments)

    mesh = ndtp.ProcessGrid(ONE, gemm="kernels")
    assert type(mesh.gemm) is KernelGemm
    mesh.gemm = Counting()
    block = ndtp.nn.MLP(8, 16, mesh=mesh)
    block(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert len(calls) == 6, "two products, each with dgrad and wgrad"


def test_an_unknown_gemm_is_refused():
    with pytest.raises(GridError, match="torch, kernels"):
        ndtp.ProcessGrid(ONE, gemm="cublas")


def test_products_of_torch_leave_multiprocessors_where_a_device_can():
    """Inside of a product alone, whatever the user has set, and after an error, too."""
    seen, letters = [], (("m", "k"), ("k", "n"), ("m", "n"))

    class Watched(CarvedGemm):
        def bound_product(self, *how):
            return lambda a, b: seen.append(torch._C._get_sm_carveout_experimental()) or torch.mm(a, b)

    product = Watched(16).bound(letters, (2, 3), (3, 4))
    for users in (None, 4):
        torch._C._set_sm_carveout_experimental(users)
        try:
            assert torch.equal(product(torch.ones(2, 3), torch.ones(3, 4)), torch.full((2, 4), 3.0))
            with pytest.raises(RuntimeError):
                product(torch.ones(2, 3), torch.ones(4, 4))
            assert torch._C._get_sm_carveout_experimental() == users
        finally:
            torch._C._set_sm_carveout_experimental(None)
    assert seen == [16] * 4
    assert not can_carve_out("cpu")
