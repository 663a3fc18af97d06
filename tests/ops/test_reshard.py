"""`reshard` on real ranks: values, gradients and bytes; sequences of grids that the planner chose, run as it says."""

from itertools import product

import pytest
import torch
from products import mesh_of, turned_mesh

import ndtp
from ndtp import CommMeter, Grid, GridError, Layout, LayoutError
from ndtp.algebra.resharding import ReshardPlan
from ndtp.planner.block_cost import Block
from ndtp.planner.hardware import Hardware, Link
from ndtp.planner.request import Request
from ndtp.testing import assert_equal, small_integers

SQUARE, LINE, MIXED = Grid(z=2, x=2), Grid(y=4), Grid(x=2, y=1, z=2)

# source's grid and layout, target's, global shape
CASES = [
    (SQUARE, "z x", LINE, "None y", (8, 12)),
    (SQUARE, "(x z) None", SQUARE, "z x", (8, 12)),  # z is major in the one and minor in the other
    (LINE, "y None", MIXED, "None x", (7, 5)),  # uneven, to replicas
    (SQUARE, "None x", LINE, "y None", (6, 3)),  # from replicas; of the last rank's block nothing is left
    (MIXED, "z None x", LINE, "None y None", (4, 6, 2)),
    (SQUARE, "None None", LINE, "y None", (8, 4)),  # a slice
    (SQUARE, "", LINE, "", ()),
]


def shard_of(layout, dense, rank):
    return dense[(*layout.slices(rank, dense.shape, uneven=True), ...)].clone()


def check_cases(dtypes=(torch.float64, torch.bfloat16)):
    for i, (one, source, other, target, shape) in enumerate(CASES):
        mesh, to = mesh_of(one), mesh_of(other)
        source, target = Layout.parse(one, source), Layout.parse(other, target)
        plan, dtype = ReshardPlan(source, target, shape), dtypes[i % len(dtypes)]
        dense, upstream = (small_integers(shape, seed, dtype) for seed in (i, i + 1))
        x = shard_of(source, dense, mesh.rank).requires_grad_()
        with CommMeter() as meter:
            y = ndtp.reshard(x, source, target, mesh, to, shape=shape)
            y.backward(shard_of(target, upstream, to.rank))
        assert_equal(y, shard_of(target, dense, to.rank), f"{plan}: forward")
        assert_equal(x.grad, shard_of(source, upstream, mesh.rank), f"{plan}: gradient")
        assert meter.volume == plan.volume(mesh.rank, dtype=x.dtype), f"{plan}: {meter.volume}"
        assert not mesh.collectives.in_flight


def check_dtypes():
    meshes, to = (turned_mesh(SQUARE), mesh_of(SQUARE)), mesh_of(LINE)
    source, target = Layout.parse(SQUARE, "z x"), Layout.parse(LINE, "None y")
    for mesh, dtype in product(meshes, (torch.bool, torch.int64, torch.complex64, torch.uint8)):
        dense = small_integers((8, 8), 3, torch.int64).to(dtype)
        found = ndtp.reshard(source.shard(dense, mesh.rank), source, target, mesh, to)
        assert found.dtype == dtype and bool((found == target.shard(dense, to.rank)).all())


def check_twice_differentiable():
    mesh = mesh_of(SQUARE)
    source, target = Layout.parse(SQUARE, "z x"), Layout.parse(SQUARE, "(x z) None")
    dense = small_integers((4, 4), 0, torch.float64)
    x = source.shard(dense, mesh.rank).clone().requires_grad_()
    (grad,) = torch.autograd.grad((ndtp.reshard(x, source, target, mesh) ** 3).sum(), x, create_graph=True)
    grad.sum().backward()
    assert_equal(x.grad, 6 * x.detach(), "the second derivative of a cube")


def check_refusals():
    mesh, to = mesh_of(SQUARE), mesh_of(LINE)
    source, target = Layout.parse(SQUARE, "z x"), Layout.parse(LINE, "None y")
    with pytest.raises(LayoutError, match="the process grid is"):
        ndtp.reshard(torch.zeros(4, 4), target, source, mesh, to)
    with pytest.raises(LayoutError, match=r"of \(9, 4\) as 'z x' it holds.*\n  fix: pass shape="):
        ndtp.reshard(torch.zeros(2, 2), source, target, mesh, to, shape=(9, 4))
    with pytest.raises(LayoutError, match="the shard has 1 dims"):
        ndtp.reshard(torch.zeros(4), source, target, mesh, to)
    with pytest.raises(GridError, match="two grids over the same ranks"):
        ndtp.reshard(torch.zeros(4, 4), source, Layout(Grid(x=1), None, None), mesh, ndtp.ProcessGrid(Grid(x=1)))


def check_all():
    check_cases()
    check_dtypes()
    check_twice_differentiable()
    check_refusals()


def test_reshard(ranks):
    ranks(4).run(check_all)


# A narrow block and a wide one, whose best grids of four ranks differ.
LINK = Link(1.0, 0.0, 0.0)
MACHINE = Hardware("flat", 64, LINK, LINK, {"float32": 1e6}, gemm_half=0.0, memory_gbs=1e9, launch_us=0.0)
BLOCKS = [Block.mlp(64, 64, 16), Block.mlp(64, 64, 256)]


def run_sequence():
    found = ndtp.plan_sequence(BLOCKS, Request((), 4, MACHINE, dtype="float32", objective="volume"), candidates=100)
    meshes = [mesh_of(plan.grid) for plan in found.plans]
    mlps = [
        ndtp.nn.MLP(64, block.inner, activation="relu", mesh=mesh, scheme=plan.scheme, seed=i)
        for i, (block, mesh, plan) in enumerate(zip(BLOCKS, meshes, found.plans, strict=True))
    ]
    x = small_integers((64, 64), 0)
    shard = mlps[0].in_layout.shard(x, meshes[0].rank).clone().requires_grad_()
    y = mlps[0](shard)
    with CommMeter() as meter:
        between = ndtp.reshard(y, mlps[0].out_layout, mlps[1].in_layout, *meshes)
        torch.autograd.grad(between, y, torch.ones_like(between), retain_graph=True)
    out = mlps[1](between)
    out.sum().backward()
    dense_x = x.clone().requires_grad_()
    dense = mlps[1].to_dense()(mlps[0].to_dense()(dense_x))
    dense.sum().backward()
    torch.testing.assert_close(out, mlps[1].out_layout.shard(dense.detach(), meshes[1].rank))
    torch.testing.assert_close(shard.grad, mlps[0].in_layout.shard(dense_x.grad, meshes[0].rank))
    phases = meter.volume.by("phase")
    return found.relayout_bytes, [(plan.grid, plan.scheme) for plan in found.plans], phases


def test_a_planned_sequence_of_grids_runs(ranks):
    results = ranks(4).run(run_sequence)
    (planned, (one, other), _), *_ = results
    assert one != other and planned[0] > 0, "the grids are to differ"
    most = sum(max(phases.get(phase, 0) for _, _, phases in results) for phase in ("forward", "dgrad"))
    assert (most,) == planned
