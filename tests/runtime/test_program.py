"""A chain is bound once for all that it depends on, and what was bound never serves anything else."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import CommMeter, Grid, Layout, MatMulPlan, ProcessGrid
from ndtp.compute.gemm import TorchGemm
from ndtp.ops.products import mlp
from ndtp.runtime import chain, program
from ndtp.runtime.dry_grid import DryGrid
from ndtp.testing import assert_equal, small_integers

ONE = Grid(x=1)
WHOLE = Layout(ONE, None, None)
X, W = small_integers((4, 4), 0), small_integers((4, 4), 1)


def plan_of(**options):
    return MatMulPlan(WHOLE, WHOLE, **options)


def nothing_is_bound():
    return mock.patch.object(chain, "_bind", side_effect=AssertionError("bound again"))


def test_what_is_alike_is_bound_once():
    mesh, plan = ProcessGrid(ONE), plan_of()
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    for i in range(3):
        with nothing_is_bound() if i else nullcontext():
            y = ndtp.matmul(i * x, w, plan, mesh)
            y.sum().backward()
        assert_equal(y, i * X @ W, "C")
    assert len(mesh.programs) == 1
    assert_equal(x.grad, 3 * torch.ones(4, 4) @ W.mT, "dA")
    assert_equal(w.grad, 3 * X.mT @ torch.ones(4, 4), "dB")


def test_equal_shapes_of_other_plans_activations_dtypes_and_grids():
    meshes = [ProcessGrid(ONE) for _ in range(2)]
    plans = [plan_of(transpose_a=a, transpose_b=b) for a in (False, True) for b in (False, True)]
    for _ in range(2):
        for mesh in meshes:
            for plan in plans:
                for dtype in (torch.float32, torch.float64, torch.bfloat16):
                    a, b = X.to(dtype), W.to(dtype)
                    y = ndtp.matmul(a, b, plan, mesh)
                    assert_equal(y, (a.mT if plan.transpose_a else a) @ (b.mT if plan.transpose_b else b), str(plan))
            for activation, function in (("relu", torch.relu), ("identity", lambda x: x), ("tanh", torch.tanh)):
                y = mlp(X, (W, W), (plans[0], plans[1]), mesh, activation)
                assert_equal(y, function(X @ W) @ W.mT, activation)
    assert all(len(mesh.programs) == 4 * 3 + 3 for mesh in meshes)


def test_plans_that_are_gone_leave_nothing_to_those_that_come():
    """An identity is given again as soon as a plan is gone: here at once, since one program is kept at most."""
    mesh, identities = ProcessGrid(ONE), set()
    with mock.patch.object(program, "MOST_PROGRAMS", 1):
        for i in range(60):
            plan = plan_of(transpose_b=i % 2 == 1)
            identities.add(id(plan))
            assert_equal(ndtp.matmul(X, W, plan, mesh), X @ (W.mT if i % 2 else W), f"{i}")
            assert len(mesh.programs) == 1
    assert len(identities) < 60, "no identity came again: this shows nothing"


def test_the_least_recently_used_goes_first():
    mesh, plans = ProcessGrid(ONE), [plan_of(name=f"p{i}") for i in range(3)]
    with mock.patch.object(program, "MOST_PROGRAMS", 2):
        for plan in (plans[0], plans[1], plans[0], plans[2]):
            ndtp.matmul(X, W, plan, mesh)
        with nothing_is_bound():
            ndtp.matmul(X, W, plans[0], mesh)
            with pytest.raises(AssertionError, match="bound again"):
                ndtp.matmul(X, W, plans[1], mesh)


def test_gradients_autocast_and_gemm_are_those_of_the_call():
    mesh, plan = ProcessGrid(ONE), plan_of()
    w = W.clone().requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not ndtp.matmul(X, w, plan, mesh).requires_grad
        ndtp.matmul(X, w, plan, mesh).sum().backward()
        assert_equal(w.grad, X.mT @ torch.ones(4, 4), "the weight's gradient alone")
        w.grad = None
        x = X.clone().requires_grad_()
        ndtp.matmul(x, W, plan, mesh).sum().backward()
        assert_equal(x.grad, torch.ones(4, 4) @ W.mT, "the input's gradient alone")
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            y = ndtp.matmul(x, w, plan, mesh)
        y.sum().backward()
        assert y.dtype == torch.bfloat16 and w.grad.dtype == x.grad.dtype == torch.float32
        w.grad = None

    class Twice(TorchGemm):
        def bound(self, *arguments, **how):
            product = super().bound(*arguments, **how)
            return lambda *operands: 2 * product(*operands)

    own, mesh.gemm = mesh.gemm, Twice()
    assert_equal(ndtp.matmul(X, W, plan, mesh), 2 * X @ W, "another gemm")
    mesh.gemm = own
    assert_equal(ndtp.matmul(X, W, plan, mesh), X @ W, "its own again")


def test_a_grid_goes_with_its_programs():
    mesh = ProcessGrid(ONE)
    ndtp.matmul(X.clone().requires_grad_(), W, plan_of(), mesh).sum().backward()
    gone = weakref.ref(mesh)
    gc.disable()
    del mesh
    try:
        assert gone() is None, "held by a cycle"
    finally:
        gc.enable()


def checked_every_time():
    """check=True compares what is found as what is bound; and collectives go where the plan at hand sends them."""
    grid = Grid(x=2)
    mesh = ProcessGrid(grid, check=True)
    layouts = {text: Layout.parse(grid, text) for text in ("x None", "None x", "None None")}
    summed = MatMulPlan(layouts["None x"], layouts["x None"], layouts["None None"])
    scattered = MatMulPlan(layouts["None x"], layouts["x None"], layouts["x None"])
    x, w = summed.a.shard(X, mesh.rank), summed.b.shard(W, mesh.rank)
    for plan in (summed, scattered, summed, scattered):
        with CommMeter() as meter:
            y = ndtp.matmul(x, w, plan, mesh)
        assert_equal(y, plan.out.shard(X @ W, mesh.rank), str(plan))
        volume = meter.volume.by("phase")
        assert volume["check"] == 32 and volume["forward"] == (64 if plan is summed else 32), volume
    mine = (summed, scattered)[mesh.rank]
    with pytest.raises(ndtp.MismatchError, match=r"C\[M_x, N\]"):
        ndtp.matmul(x, w, mine, mesh)
    other = mesh_of(grid)  # of the same ranks, unchecked
    with CommMeter() as meter:
        assert_equal(ndtp.matmul(x, w, summed, other), X @ W, "another process grid")
    assert set(meter.volume.by("phase")) == {"forward"}


def test_ranks_are_compared_in_every_call(ranks):
    ranks(2).run(checked_every_time)


def test_a_program_says_what_it_runs():
    """The same tasks that run, with the collectives that they start; of a grid that nobody has."""
    grid = Grid(z=2, x=2, y=2)
    plan = MatMulPlan(*(Layout.parse(grid, text) for text in ("(z y) x", "(x z) y")))
    forms = tuple((shape, torch.float32, torch.device("meta")) for shape in ((4, 8), (4, 8)))
    with mock.patch.object(TorchGemm, "own_part_from", 0):
        bound = chain.program_of((*forms, None), (plan,), (None,), DryGrid(grid), (True, True, False), chunks=2)
    forward = ["start B: all_gather[z]", "wait B", *(f"start A[{i}]: all_gather[y]" for i in range(2))]
    forward += [
        "own C[0]",
        "wait A[0]",
        "prefetch B",
        "multiply C[0]",
        "start C[0]: reduce_scatter[x]",
        "wait A[1]",
        "multiply C[1]",
    ]
    forward += ["start C[1]: reduce_scatter[x]", "wait C[0]", "wait C[1]"]
    text = str(bound)
    assert text.startswith("\n  ".join(["forward", *forward]) + "\nbackward\n  "), text
    assert text.splitlines().count("  start dB: reduce_scatter[z]") == 1
    frozen = chain.program_of((*forms, None), (plan,), (None,), DryGrid(grid), (False,) * 3, chunks=2)
    assert "backward" not in str(frozen)
