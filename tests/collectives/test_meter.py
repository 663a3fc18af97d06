"""CommMeter counts what any program sends: ndtp's, c10d's, functional, DTensor's, hand-written tensor parallelism."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from products import mesh_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ndtp
from ndtp import CommMeter, Grid, Layout, MatMulPlan
from ndtp.algebra.volume import Volume

P = 4
FLOAT = 4


def measure(call):
    with CommMeter() as meter:
        call()
    return {(e.phase, e.collective, e.axes): (e.num_bytes, e.calls) for e in meter.volume}


def one(kind, amount, calls=1, phase="forward", axis="world"):
    return {(phase, kind, (axis,)): (amount, calls)} if amount else {}


def check_c10d():
    rank = dist.get_rank()
    x = torch.ones(8, 3)
    many = [torch.empty(8, 3) for _ in range(P)]
    rows = [[1, 2, 0, 3]] * P  # everyone sends 1 row to rank 0, 2 rows to rank 1, ...
    sent, received = rows[rank], [row[rank] for row in rows]

    def point_to_point():
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(torch.empty(8, 3), 0)

    cases = {
        "all_reduce": (lambda: dist.all_reduce(x.clone()), one("all_reduce", 2 * 3 * 6 * FLOAT)),
        "all_reduce of 5": (lambda: dist.all_reduce(torch.ones(5)), one("all_reduce", 2 * 3 * 2 * FLOAT)),
        "all_gather": (lambda: dist.all_gather(many, x), one("all_gather", 3 * 24 * FLOAT)),
        "all_gather_into_tensor": (
            lambda: getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(torch.empty(32, 3), x),
            one("all_gather", 3 * 24 * FLOAT),
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(torch.empty(2, 3), list(x.chunk(4))),
            one("reduce_scatter", 3 * 6 * FLOAT),
        ),
        "reduce_scatter_tensor": (
            lambda: getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(torch.empty(2, 3), x),
            one("reduce_scatter", 3 * 6 * FLOAT),
        ),
        "all_to_all_single": (lambda: dist.all_to_all_single(torch.empty(8, 3), x), one("all_to_all", 3 * 6 * FLOAT)),
        "uneven all_to_all_single": (
            lambda: dist.all_to_all_single(torch.empty(sum(received), 3), torch.empty(sum(sent), 3), received, sent),
            one("all_to_all", (sum(received) - received[rank]) * 3 * FLOAT),
        ),
        "broadcast": (lambda: dist.broadcast(x.clone(), 1), one("broadcast", 24 * FLOAT if rank != 1 else 0)),
        "scatter": (
            lambda: dist.scatter(torch.empty(2, 3), list(x.chunk(4)) if rank == 2 else None, 2),
            one("scatter", 6 * FLOAT if rank != 2 else 0),
        ),
        "gather": (
            lambda: dist.gather(x, many if rank == 0 else None, 0),
            one("gather", 3 * 24 * FLOAT if rank == 0 else 0),
        ),
        "reduce": (lambda: dist.reduce(x.clone(), 3), one("reduce", 24 * FLOAT if rank == 3 else 0)),
        "send and receive": (point_to_point, one("receive", 24 * FLOAT if rank == 1 else 0)),
        "barrier": (dist.barrier, {}),
        "asynchronous": (
            lambda: dist.all_reduce(x.clone(), async_op=True).wait(),
            one("all_reduce", 2 * 3 * 6 * FLOAT),
        ),
        "bf16, twice": (
            lambda: [dist.all_reduce(x.bfloat16()) for _ in range(2)],
            one("all_reduce", 2 * 2 * 3 * 6 * 2, calls=2),
        ),
    }
    for name, (call, expected) in cases.items():
        found = measure(call)
        assert found == expected, f"{name}: {found}, not {expected}"


def check_functional():
    group = dist.group.WORLD
    x = torch.ones(8, 3)
    cases = {
        "all_reduce": (lambda: funcol.all_reduce(x, "sum", group).wait(), one("all_reduce", 2 * 3 * 6 * FLOAT)),
        "all_gather": (
            lambda: funcol.all_gather_tensor(x, 0, group).wait(),
            one("all_gather", 3 * 24 * FLOAT),
        ),
        "all_gather on dim 1": (
            lambda: funcol.all_gather_tensor(x, 1, group).sum(),
            one("all_gather", 3 * 24 * FLOAT),
        ),
        "reduce_scatter": (
            lambda: funcol.reduce_scatter_tensor(x, "sum", 0, group).wait(),
            one("reduce_scatter", 3 * 6 * FLOAT),
        ),
        "all_to_all": (
            lambda: funcol.all_to_all_single(x, None, None, group).wait(),
            one("all_to_all", 3 * 6 * FLOAT),
        ),
        "uneven all_to_all": (
            lambda: funcol.all_to_all_single(torch.ones(6, 3), *uneven(dist.get_rank()), group).wait(),
            one("all_to_all", (sum(uneven(dist.get_rank())[0]) - uneven(dist.get_rank())[0][dist.get_rank()]) * 12),
        ),
        "broadcast": (
            lambda: funcol.broadcast(x, 1, group).wait(),
            one("broadcast", 24 * FLOAT if dist.get_rank() != 1 else 0),
        ),
    }
    for name, (call, expected) in cases.items():
        found = measure(call)
        assert found == expected, f"{name}: {found}, not {expected}"


def uneven(rank):
    """(rows received from each rank, rows sent to each rank)"""
    sends = [1, 2, 0, 3]
    return [sends[rank]] * P, sends


class Copy(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def check_programs():
    hidden, inner, rows = 8, 16, 4
    reduced = 2 * 3 * (rows * hidden // P) * FLOAT
    expected = one("all_reduce", reduced) | one("all_reduce", reduced, phase="backward")

    def megatron():
        x = torch.ones(rows, hidden, requires_grad=True)
        up, down = torch.ones(hidden, inner // P), torch.ones(inner // P, hidden)
        Reduce.apply(torch.relu(Copy.apply(x) @ up) @ down).sum().backward()

    found = measure(megatron)
    assert found == expected, f"Megatron: {found}"

    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("tp",))  # over all ranks: torch takes the world's group
    model = nn.Sequential(nn.Linear(hidden, inner), nn.ReLU(), nn.Linear(inner, hidden))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for _ in range(2):  # whether DTensor has cached its rules or not
        x = torch.ones(rows, hidden, requires_grad=True)
        found = measure(lambda: model(x).sum().backward())  # noqa: B023
        assert found == one("all_reduce", reduced) | one("all_reduce", reduced, phase="backward"), (
            f"torch's tensor parallelism: {found}"
        )

    whole = distribute_tensor(torch.ones(8, 12), mesh, [Shard(0)])
    found = measure(lambda: whole.redistribute(mesh, [Replicate()]).to_local())
    assert found == one("all_gather", 3 * 24 * FLOAT), f"DTensor, gathered: {found}"
    # On CPUs torch gathers and cuts; elsewhere it is an all-to-all of its own.
    found = measure(lambda: whole.redistribute(mesh, [Shard(1)]).to_local())
    assert found == one("all_gather", 3 * 24 * FLOAT), f"DTensor, moved: {found}"
    a = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(1)])
    b = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    found = measure(lambda: (a @ b).redistribute(mesh, [Replicate()]).to_local())
    assert found == one("all_reduce", 2 * 3 * 4 * FLOAT), f"DTensor, reduced: {found}"


@pytest.mark.parametrize("check", [check_c10d, check_functional, check_programs])
def test_programs_of_others(ranks, check):
    ranks(P).run(check)


def check_labels():
    mesh = mesh_of(Grid(z=1, x=2, y=2))
    plan = MatMulPlan(Layout(mesh.grid, "y", "x"), Layout(mesh.grid, "x", "y"), regather=("a",))
    a, b = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    with CommMeter() as outer:
        dist.all_reduce(torch.ones(4))
        with CommMeter() as inner:
            c = ndtp.matmul(a, b, plan, mesh)
        forward = inner.volume
        c.sum().backward()
        assert inner.volume == forward, "an inner meter stops with its block"
    assert {(e.phase, e.collective, e.axes, e.calls) for e in forward} == {
        ("forward", "all_gather", ("y",), 1),
        ("forward", "reduce_scatter", ("x",), 1),
    }, forward
    own = plan.volume((8, 8, 8))
    rest = [e for e in outer.volume if e.axes == ("world",)]
    assert [(e.collective, e.num_bytes) for e in rest] == [("all_reduce", 2 * 3 * 1 * FLOAT)], rest
    assert outer.volume.total == own.total + rest[0].num_bytes
    assert {e.phase for e in outer.volume} == {"forward", "dgrad", "wgrad"}
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    found = measure(lambda: dist.all_reduce(torch.ones(4), group=part.get_group()))
    assert found == one("all_reduce", 2 * 2 * FLOAT, axis="tp"), f"named by the mesh's dim: {found}"
    after = outer.volume
    dist.all_reduce(torch.ones(4))
    assert outer.volume == after, "a closed meter counts no more"


def test_labels_phases_and_nesting(ranks):
    ranks(P).run(check_labels)


def check_gathers_ahead():
    """What stands around one of three products counts that one's bytes, whichever product started their gathers."""
    mesh = ndtp.ProcessGrid(Grid(z=2, x=2))
    plan = MatMulPlan(Layout(mesh.grid, "z", None), Layout(mesh.grid, "z", "x"), Layout(mesh.grid, "z", None))
    weights = [torch.ones(4, 4, requires_grad=True) for _ in range(3)]
    forward = plan.volume((8, 8, 8), dgrad=False, wgrad=False)
    ahead = forward.by("axes")["z"]

    def step():
        """(what each product and the backward counted, what they counted as ahead, the same of a meter around all)"""
        x, one = torch.ones(4, 8), []
        with CommMeter() as outer:
            for weight in weights:
                with CommMeter() as meter:
                    x = ndtp.matmul(x, weight, plan, mesh)
                one.append((meter, meter.volume, meter.ahead.total))
            with CommMeter() as meter:
                x.sum().backward()
            one.append((meter, meter.volume, meter.ahead.total))
        assert not outer.ahead.total and not any(each.ahead.total for each, _, _ in one), "all were taken"
        assert sum((volume for _, volume, _ in one), start=Volume()) == outer.volume
        assert all(meter.volume == volume for meter, volume, _ in one), "what was counted stays"
        return [volume for _, volume, _ in one], [count for _, _, count in one], outer.volume

    first, none, whole = step()
    assert none == [0] * 4 and first[0] == first[1] == first[2] == forward
    again, started, all_of_it = step()
    assert started == [ahead, ahead, 0, 0], started
    assert again == first and all_of_it == whole, "calls and bytes are those of gathers in place"

    with CommMeter() as outer:
        with CommMeter() as meter:
            x = ndtp.matmul(torch.ones(4, 8), weights[0], plan, mesh)
        assert meter.ahead.total == ahead and meter.volume == first[0]
        with CommMeter() as other:  # another product comes than the one that was expected
            ndtp.matmul(x, weights[2], plan, mesh)
    assert other.volume.total == first[0].total + ahead, "it was received, and nobody else will count it"
    assert outer.volume.total == 2 * first[0].total + ahead and not outer.ahead.total


def test_a_gather_ahead_counts_where_its_product_comes(ranks):
    ranks(P).run(check_gathers_ahead)


def test_dtensor_all_to_all_on_accelerators_is_counted():
    """torch runs it inside of one C++ op, below the dispatcher; no CPU backend takes that path."""
    from ndtp.collectives.meter import RULES

    rule = RULES["_dtensor"]["shard_dim_alltoall"]
    assert rule((torch.ones(8, 3), 0, 1, "group"), P, 0) == ("all_to_all", 3 * 6 * FLOAT)
