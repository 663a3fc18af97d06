"""Relayouts that sum over axes: values, gradients, gradients of gradients, and every byte as predicted."""

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import CommMeter, Grid, Layout, LayoutError
from ndtp.algebra.relayouts import MergePlan, RelayoutPlan
from ndtp.ops.reductions import merged, reduce, sum_over, used_over
from ndtp.testing import assert_equal, small_integers

SHAPE = (8, 12)
CUBE = Grid(z=2, y=2)

# source, target, partial, grad_partial
CASES = [
    ("None None", "None None", "y", ""),
    ("None None", "y None", "y", ""),
    ("None None", "None None", "", "y"),
    ("y None", "None None", "", "y"),
    ("z None", "(z y) None", "y", ""),
    ("(z y) None", "z None", "", "y"),
    ("z None", "None z", "y", "y"),
    ("None None", "None None", "z y", "y"),
    ("None z", "None None", "y", "z"),
]


def part(seed, rank, axes, grid):
    """A dense tensor of integers for every position along `axes`."""
    return small_integers(SHAPE, seed + 10 * grid.index(rank, axes), torch.float64)


def total(seed, axes, grid):
    return sum(small_integers(SHAPE, seed + 10 * i, torch.float64) for i in range(grid.size(axes)))


def check_cases(grid, compiled=False):
    mesh = mesh_of(grid)
    for source, target, partial, grad_partial in CASES[1:4:2] if compiled else CASES:
        plan = RelayoutPlan(
            *(Layout.parse(grid, text) for text in (source, target)),
            tuple(partial.split()),
            tuple(grad_partial.split()),
        )

        def run(x, plan=plan):
            return ndtp.relayout(x, plan.source, plan.target, mesh, "r", plan.partial, plan.grad_partial)

        # One rank compiles: what it exchanges with the other is the same.
        move = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled and mesh.rank == 1 else run
        x = plan.source.shard(part(1, mesh.rank, plan.partial, grid), mesh.rank).clone().requires_grad_()
        upstream = plan.target.shard(part(2, mesh.rank, plan.grad_partial, grid), mesh.rank)
        with CommMeter() as meter:
            y = move(x)
            y.backward(upstream)
        assert_equal(y, plan.target.shard(total(1, plan.partial, grid), mesh.rank), f"{plan}: forward")
        assert_equal(x.grad, plan.source.shard(total(2, plan.grad_partial, grid), mesh.rank), f"{plan}: gradient")
        assert meter.volume == plan.volume(SHAPE, "fp64"), f"{plan}: {meter.volume}"
    assert not mesh.collectives.in_flight, "handles left over"


@pytest.mark.parametrize("compiled", [False, True])
def test_values_gradients_and_bytes(ranks, compiled):
    grid = Grid(y=2) if compiled else CUBE
    ranks(grid.num_ranks).run(check_cases, grid, compiled)


def check_twice():
    """f = sum over ranks of w_r (S^2), S the sum of parts: its second derivatives, by hand."""
    mesh = mesh_of(Grid(x=2))
    whole = Layout(mesh.grid, None)
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * (mesh.rank + 1)
    x.requires_grad_()
    weight = torch.tensor([2.0, 5.0], dtype=torch.float64)
    s = sum_over(x, whole, ("x",), mesh)
    f = (weight[mesh.rank] * used_over(s, whole, ("x",), mesh) ** 2).sum()
    (first,) = torch.autograd.grad(f, x, create_graph=True)
    both = torch.tensor([3.0, 6.0, 9.0], dtype=torch.float64)
    assert_equal(first, 14 * both, "first: 2 (2 + 5) S")
    # Each rank uses its copy of the first derivative on its own, so the second is that of the sum of both uses.
    (second,) = torch.autograd.grad((first * (mesh.rank + 1)).sum(), x)
    assert_equal(second, torch.full((3,), 14.0 * 3, dtype=torch.float64), "second: 14 (1 + 2)")


def test_gradients_of_gradients(ranks):
    ranks(2).run(check_twice)


def check_merge(grid, axes):
    """A maximum is no sum, and needs no other collective."""
    mesh = mesh_of(grid)
    plan = MergePlan(grid, axes, 2, 1)
    for rows in (8, 7):
        x = small_integers((2, rows), 5 + mesh.rank, torch.float64)
        with CommMeter() as meter:
            y = merged(x, plan, lambda parts: parts.amax((0, 1)).unsqueeze(0), mesh, "max")
        group = grid.group(mesh.rank, plan.axes)
        expected = torch.stack([small_integers((2, rows), 5 + r, torch.float64) for r in group]).amax((0, 1))
        assert_equal(y, expected.unsqueeze(0), f"{axes}, {rows} rows")
        assert meter.volume == plan.volume(rows, "fp64"), meter.volume


def test_merges(ranks):
    for axes in (("y",), ("z", "y"), ("y", "z")):
        ranks(4).run(check_merge, CUBE, axes)


def refusals():
    mesh = mesh_of(Grid(x=2))
    other = ndtp.ProcessGrid(Grid(t=2))
    layout = Layout(mesh.grid, "x")
    messages = []
    for call in (
        lambda: sum_over(torch.ones(2), layout, ("x",), mesh),
        lambda: reduce(torch.ones(2), RelayoutPlan(layout, layout), other),
        lambda: ndtp.relayout(torch.ones(2, 2), layout, layout, mesh, grad_partial=("t",)),
        lambda: ndtp.relayout(torch.ones(3), Layout(mesh.grid, None), layout, mesh, partial=("x",)),
    ):
        try:
            call()
        except LayoutError as error:
            messages.append(str(error))
    return messages


def test_errors_are_the_same_on_every_rank(ranks):
    one, other = ranks(2).run(refusals)
    assert one == other and len(one) == 4, one
    for message, word in zip(
        one, ("a part of a sum", "process grid is t=2", "no axis 't'", "do not divide"), strict=True
    ):
        assert word in message, message
