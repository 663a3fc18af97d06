"""The executor on real ranks: chunks, delays, gradients that arrive late, weights that are gathered ahead."""

from __future__ import annotations

import random
import time
from unittest import mock

import pytest
import torch
from products import mesh_of
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import CommMeter, Grid, Layout, MatMulPlan
from ndtp.collectives.recorder import Recorder
from ndtp.compute.gemm import KernelGemm, TorchGemm
from ndtp.testing import assert_equal, small_integers

GRIDS = [Grid(z=2, x=2, y=2), Grid(z=1, x=2, y=4), Grid(z=1, x=4, y=2), Grid(z=2, x=1, y=4), Grid(z=4, x=2, y=1)]
ROWS, HIDDEN, INNER = 64, 16, 32


def layouts(grid: Grid) -> tuple[Layout, Layout]:
    return Layout.parse(grid, "(z y) x"), Layout.parse(grid, "(x z) y")


def operands(plan: MatMulPlan, rank: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    a = plan.a.shard(small_integers((ROWS, HIDDEN), 0, dtype), rank).clone().requires_grad_()
    b = plan.b.shard(small_integers((HIDDEN, INNER), 1, dtype), rank).clone().requires_grad_()
    return a, b, plan.out.shard(small_integers((ROWS, INNER), 2, dtype), rank)


def chunked_product(grid, chunks, regather, dtype, delays):
    mesh = mesh_of(grid)
    plan = MatMulPlan(*layouts(grid), chunks=chunks, regather=regather)
    a, b, g = operands(plan, mesh.rank, dtype)
    start = mesh.collectives.launch
    if delays:  # ranks reach their collectives at different times, in the same order
        draws = random.Random(mesh.rank)

        def late(*arguments, **how):
            time.sleep(draws.choice((0.0, 0.0, 0.004)))
            return start(*arguments, **how)

        mesh.collectives.launch = late
    try:
        with CommMeter() as meter:
            c = ndtp.matmul(a, b, plan, mesh)
            c.backward(g)
    finally:
        mesh.collectives.launch = start
    expected = plan.volume((ROWS, HIDDEN, INNER), dtype)
    assert meter.volume == expected, f"{meter.volume} is not {expected}"
    assert not mesh.collectives.in_flight
    whole_a, whole_b = small_integers((ROWS, HIDDEN), 0, dtype), small_integers((HIDDEN, INNER), 1, dtype)
    whole_g = small_integers((ROWS, INNER), 2, dtype)
    assert_equal(c, plan.out.shard(whole_a @ whole_b, mesh.rank), "C")
    assert_equal(a.grad, plan.a.shard(whole_g @ whole_b.mT, mesh.rank), "dA")
    assert_equal(b.grad, plan.b.shard(whole_a.mT @ whole_g, mesh.rank), "dB")


def many_chunked_products(grid):
    """What is gathered again by turns: with each number of chunks on every other grid."""
    for turn, chunks in enumerate((1, 2, 4), GRIDS.index(grid)):
        chunked_product(grid, chunks, ((), ("a", "b"))[turn % 2], torch.float32, delays=False)
    chunked_product(grid, 4, ("a",), torch.float64, delays=True)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_chunks_change_no_bit_and_no_byte(ranks, grid):
    ranks(8).run(many_chunked_products, grid)


def own_parts():
    """Only a large product is worth another one for the part that need not be waited for; the result is the same."""
    for text_a, text_b in (("(z y) x", "(x z) y"), ("z (x y)", "(x y) z"), ("z x", "y (x z)")):
        mesh = mesh_of(Grid(z=2, x=2, y=2))
        transposed = {"transpose_b": True} if text_b == "y (x z)" else {}  # of the weight, rows are there
        plan = MatMulPlan(Layout.parse(mesh.grid, text_a), Layout.parse(mesh.grid, text_b), **transposed)
        a, b, _ = operands(plan, mesh.rank)
        if transposed:
            b = plan.b.shard(small_integers((INNER, HIDDEN), 1, torch.float32), mesh.rank)
        gathered = (ROWS // plan.grid.size(plan.orders["m"])) * HIDDEN * INNER // 8
        results, products = [], []
        for smallest in (0, gathered, 10 * gathered):
            mesh.programs.clear()  # decided where the product is bound
            with mock.patch.object(mesh.gemm, "own_part_from", smallest), Recorder(mesh) as recorder:
                results.append(ndtp.matmul(a, b, plan, mesh).detach())
            products.append(sum(each.name.startswith("gemm") for each in recorder.spans()))
        assert products[0] > products[2] == 1, products
        assert_equal(results[0], results[1], "own parts")
        assert_equal(results[0], results[2], "own parts")


def gradient_in_blocks():
    """Of a weight that is scattered along its columns: torch writes it whole, a kernel in the blocks that are sent."""
    grid, found = Grid(z=2, x=1, y=1), []
    plan = MatMulPlan(Layout.parse(grid, "(z y) x"), Layout.parse(grid, "y (x z)"), transpose_b=True)
    for in_blocks in (False, True):
        mesh, wanted = mesh_of(grid), []
        mesh.programs.clear()
        gemm, bound = mesh.gemm, mesh.gemm.bound

        def watched(letters, one, other, bound=bound, wanted=wanted, **how):
            if letters[2] == plan.b_letters:
                wanted.append(how.get("blocks"))
            return bound(letters, one, other, **how)

        a = plan.a.shard(small_integers((ROWS, HIDDEN), 0, torch.float32), mesh.rank)
        b = plan.b.shard(small_integers((INNER, HIDDEN), 1, torch.float32), mesh.rank).clone().requires_grad_()
        with mock.patch.multiple(gemm, bound=watched, gradients_in_blocks=in_blocks):
            ndtp.matmul(a, b, plan, mesh).sum().backward()
        assert wanted == [2 if in_blocks else None], wanted
        found.append(b.grad)
    assert_equal(found[0], found[1], "dB")


def test_torch_writes_a_gradient_whole_and_kernels_write_blocks(ranks):
    assert TorchGemm.gradients_in_blocks is False and KernelGemm.gradients_in_blocks is True
    ranks(2).run(gradient_in_blocks)


@pytest.mark.cpu
def test_only_large_products_do_the_ranks_own_part_first(ranks):
    ranks(8).run(own_parts)


def parts_in_place(grid: Grid, chunks: int, regather: tuple[str, ...]) -> dict[tuple[str, str], bool]:
    """Of every operand that a block gathers: whether this rank's own part was there already, in all of its chunks."""
    mesh = mesh_of(grid)
    block = ndtp.nn.MLP(16, 32, mesh=mesh, scheme="3d", chunks=chunks, regather=regather, seed=0, name="mlp")
    x = torch.randn(block.in_layout.shard_shape((32, 16))).requires_grad_()
    found: dict[tuple[str, str], bool] = {}
    launch = mesh.collectives.launch

    def watched(route, tensor, out=None, ahead=False):
        if route.kind == "all_gather":
            own = None if out is None else out.view(-1, *tensor.shape)[grid.index(mesh.rank, route.axes)]
            found[route.op] = found.get(route.op, True) and own is not None and own.data_ptr() == tensor.data_ptr()
        return launch(route, tensor, out, ahead)

    mesh.collectives.launch = watched
    try:
        block(x).sum().backward()
    finally:
        mesh.collectives.launch = launch
    return found


def in_place():
    """What is activated, or cut into chunks, is written where the parts of the others land, and not copied there."""
    for grid in (Grid(z=1, x=2, y=2), Grid(z=2, x=2, y=1), Grid(z=2, x=1, y=2), Grid(z=1, x=4, y=1)):
        for chunks in (1, 2):
            for regather in ((), ("a",)):
                found = parts_in_place(grid, chunks, regather)
                whole = {op for op, there in found.items() if not there}
                stored = {("mlp.up", "A"), ("mlp.down", "dC")} if chunks == 1 else set()
                weights = {("mlp.up", "B"), ("mlp.down", "B")}
                assert whole == (stored | weights) & set(found), (grid, chunks, regather, found)
                assert found, grid


@pytest.mark.cpu
def test_own_parts_are_made_where_they_are_gathered(ranks):
    ranks(4).run(in_place)


def interleaved():
    lay = Layout.over((2, 4, 2), ("x", "y", "interleaved_parallel"))
    whole = Layout.over((2, 4), ("x", "y"))
    mesh = mesh_of(Grid(x=2, y=4))
    plan = MatMulPlan(lay(("y", "interleaved_parallel"), "x"), whole("x", "y"))
    a, b, _ = operands(plan, mesh.rank)
    with CommMeter() as meter:
        c = ndtp.matmul(a, b, plan, mesh)
    assert [entry.calls for entry in meter.volume] == [2, 2], meter.volume
    dense = small_integers((ROWS, HIDDEN), 0, torch.float32) @ small_integers((HIDDEN, INNER), 1, torch.float32)
    assert_equal(c, plan.out.shard(dense, mesh.rank), "C")


def test_interleaved_parallel_cuts_the_shard_in_two(ranks):
    ranks(8).run(interleaved)


def stack(mesh, depth=3):
    """A chain of 3D products, weights as leaves, all with reductions over z."""
    grid = mesh.grid
    forth = MatMulPlan(*layouts(grid), name="forth")
    back = MatMulPlan(forth.out, Layout.parse(grid, "(y z) x"), name="back")
    plans = [(forth, back)[i % 2] for i in range(2 * depth)]
    sizes = (HIDDEN, INNER)
    weights = [
        plan.b.shard(small_integers((sizes[i % 2], sizes[1 - i % 2]), i, torch.float64, low=-1, high=1), mesh.rank)
        .clone()
        .requires_grad_()
        for i, plan in enumerate(plans)
    ]
    x = plans[0].a.shard(small_integers((ROWS, HIDDEN), 9, torch.float64, low=-1, high=1), mesh.rank).clone()

    def forward(x):
        for weight, plan in zip(weights, plans, strict=True):
            x = ndtp.matmul(x, weight, plan, mesh)
        return x

    return forward, weights, x.requires_grad_()


def gradients_of(forward, weights, x):
    gradients = torch.autograd.grad(forward(x).sum(), [*weights, x])
    return [gradient.clone() for gradient in gradients]


def late_gradients():
    mesh = mesh_of(GRIDS[0])
    forward, weights, x = stack(mesh)
    expected = gradients_of(forward, weights, x)

    def check(what):
        for weight, gradient in zip(weights, expected, strict=False):
            assert_equal(weight.grad, gradient, what)
            weight.grad = None
        assert not mesh.collectives.in_flight, what

    forward(x).sum().backward()
    check("backward")

    seen = {}

    def see(key, tensor):
        seen[key] = tensor.clone()

    hooks = [w.register_hook(lambda g, i=i: see(("tensor", i), g)) for i, w in enumerate(weights)]
    for i, weight in enumerate(weights):
        hooks.append(weight.register_post_accumulate_grad_hook(lambda w, i=i: see(("accumulated", i), w.grad)))
    forward(x).sum().backward()
    for i, gradient in enumerate(expected[:-1]):
        assert_equal(seen["tensor", i], gradient, "what a tensor hook sees")
        assert_equal(seen["accumulated", i], gradient, "what a post-accumulate hook sees")
    check("with hooks")
    for hook in hooks:
        hook.remove()

    for _ in range(3):
        forward(x).sum().backward()
    for weight in weights:
        weight.grad /= 3
    check("accumulated")

    y = forward(x).sum()
    y.backward(retain_graph=True)
    check("retained graph, once")
    y.backward()
    check("retained graph, twice")

    checkpoint(forward, x, use_reentrant=False).sum().backward()
    check("checkpoint")

    (dx,) = torch.autograd.grad(forward(x).sum(), [x])
    assert_equal(dx, expected[-1], "the input's gradient alone")
    assert not mesh.collectives.in_flight, "weights' gradients that nobody asked for were left in flight"


def test_late_gradients_are_finished_wherever_they_are_seen(ranks):
    ranks(8).run(late_gradients)


def weight_used_twice():
    mesh = mesh_of(GRIDS[0])
    plan = MatMulPlan(*layouts(mesh.grid))
    a, b, g = operands(plan, mesh.rank)
    (once,) = torch.autograd.grad(ndtp.matmul(a, b, plan, mesh), b, g)
    (ndtp.matmul(a, b, plan, mesh) + 2 * ndtp.matmul(a, b, plan, mesh)).backward(g)
    assert_equal(b.grad, 3 * once, "dB of a weight used twice")


def test_a_weight_used_twice_adds_up(ranks):
    ranks(8).run(weight_used_twice)


def exception_in_backward():
    mesh = mesh_of(GRIDS[0])
    forward, weights, x = stack(mesh)
    expected = gradients_of(forward, weights, x)

    def fail(_):
        raise ZeroDivisionError("in the middle of backward")

    hook = weights[3].register_hook(fail)
    try:
        forward(x).sum().backward()
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("the hook did not run")
    hook.remove()
    for weight in weights:
        weight.grad = None
    forward(x).sum().backward()
    for weight, gradient in zip(weights, expected, strict=False):
        assert_equal(weight.grad, gradient, "the step after an exception")


def test_an_exception_in_backward_spoils_nothing(ranks):
    ranks(8).run(exception_in_backward)


def order_of_waits():
    """A weight's gradient is waited for after the dgrad of the products before it, not at once."""
    mesh = mesh_of(GRIDS[0])
    forward, weights, x = stack(mesh, depth=3)
    events = []
    start = mesh.collectives.launch

    def noted(route, *tensors):
        events.append(("start", route.phase, route.op))
        return start(route, *tensors)

    hooks = [w.register_hook(lambda g, i=i: events.append(("arrive", i))) for i, w in enumerate(weights)]
    mesh.collectives.launch = noted
    try:
        y = forward(x).sum()
        events.clear()
        y.backward()
    finally:
        mesh.collectives.launch = start
        for hook in hooks:
            hook.remove()
    products = [i for i, event in enumerate(events) if event[0] == "start" and event[2][-1] == "dB"]
    arrivals = {event[1]: i for i, event in enumerate(events) if event[0] == "arrive"}
    last = len(weights) - 1
    assert len(products) == len(weights)
    assert arrivals[last] > products[1], "the last weight's gradient was waited for before the next product"
    assert arrivals[last] < products[-1], "the window does not bound the gradients that are held unreduced"


def test_reductions_of_weight_gradients_are_awaited_late_but_within_the_window(ranks):
    ranks(8).run(order_of_waits)


def names_of_gathers(mesh, run):
    """Which weights are gathered, in order, and how often a product found its weight on the way."""
    taken = []
    take = mesh.step.prefetch.take

    def noted(weight, owner, way):
        ahead = take(weight, owner, way)
        taken.append(ahead is not None)
        return ahead

    mesh.step.prefetch.take = noted
    try:
        with CommMeter() as meter:
            run()
    finally:
        del mesh.step.prefetch.take
    return taken, meter.volume.by("phase")["forward"]


def prefetch():
    mesh = ndtp.ProcessGrid(GRIDS[0])
    forward, weights, x = stack(mesh)
    first, bytes_first = names_of_gathers(mesh, lambda: forward(x))
    assert first == [False] * 6, f"nothing is known of the order yet: {first}"
    second, bytes_second = names_of_gathers(mesh, lambda: forward(x))
    assert second == [False] + [True] * 5, "every weight but the first is gathered ahead"
    assert bytes_first == bytes_second
    expected = forward(x).detach()

    with torch.no_grad():
        for weight in weights:
            weight.mul_(2)
    taken, bytes_third = names_of_gathers(mesh, lambda: assert_equal(forward(x), expected * 2**6, "stale weight"))
    assert taken == second and bytes_third == bytes_first, "nothing is gathered across an update"

    # A weight that is changed between its prefetch and its use is gathered anew, and not ahead again.
    half = x
    plans = [MatMulPlan(*layouts(mesh.grid))]
    plans.append(MatMulPlan(plans[0].out, Layout.parse(mesh.grid, "(y z) x")))
    half = ndtp.matmul(x, weights[0], plans[0], mesh)
    with torch.no_grad():
        weights[1].zero_()
    assert not ndtp.matmul(half, weights[1], plans[1], mesh).any(), "a stale gather was used"
    forward, weights, x = stack(mesh)  # other weights: learned like the first
    names_of_gathers(mesh, lambda: forward(x))
    names, _ = names_of_gathers(mesh, lambda: checkpoint(forward, x, use_reentrant=False).sum().backward())
    assert names[:6] == [False] + [True] * 5
    assert not any(names[6:]), "a checkpointed forward runs in another order"
    assert not mesh.collectives.in_flight


def test_weights_are_gathered_ahead_in_the_order_in_which_they_are_used(ranks):
    ranks(8).run(prefetch)
