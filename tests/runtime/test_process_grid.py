"""ProcessGrid: bound to the whole world, or to a slice of a bigger mesh, in any order of axes."""

import contextlib
import copy
import logging
import sys

import pytest
import torch
import torch.distributed as dist
from products import mesh_of, message_of, product_on
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp
from ndtp import CommMeter, CommunicationError, Grid, GridError, Layout, MatMulPlan, ProcessGrid
from ndtp.collectives.backends import backends_by_device
from ndtp.testing import assert_equal, small_integers

pytestmark = pytest.mark.cpu


def advised_of(device_mesh):
    """Whether DTensor has advice about the dims of a mesh, when it sums over all of them."""
    heard, logger = [], logging.getLogger("torch.distributed.tensor._redistribute")
    handler = logging.Handler()
    handler.emit = heard.append
    logger.addHandler(handler)
    whole = DTensor.from_local(torch.ones(2), device_mesh, [Partial()] * 3).full_tensor()
    logger.removeHandler(handler)
    assert whole.tolist() == [8, 8]
    return bool(heard)


def check_advice():
    mesh = mesh_of(Grid(z=2, x=2, y=2))
    groups = [mesh.group((axis,)) for axis in mesh.mesh_axes]
    ranks = mesh.device_mesh.mesh
    theirs = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("a", "b", "c"))
    assert advised_of(theirs) and not advised_of(mesh.device_mesh)


def test_advice_about_a_grid_that_nobody_can_follow_is_not_given(ranks):
    ranks(8).run(check_advice)


def check_bound():
    for grid in (Grid(z=2, x=2, y=2), Grid(x=8), Grid(dp=2, x=1, y=4)):
        mesh = mesh_of(grid)
        assert mesh.rank == dist.get_rank() and mesh.coordinate == grid.coordinate(mesh.rank)
        in_order = sorted(grid.nontrivial(grid.names), key=["dp", "x", "y", "z"].index)
        assert mesh.mesh_axes == tuple(in_order), "an axis of one rank costs DTensor time, and says nothing"
        assert mesh.device_mesh.mesh_dim_names == mesh.mesh_axes and mesh.device_type == "cpu"
        assert mesh.backend == "gloo" and type(mesh.collectives).__name__ == "GlooCollectives"
        for axis in grid:
            members = dist.get_process_group_ranks(mesh.group((axis,)))
            assert tuple(members) == grid.group(mesh.rank, (axis,)), f"{grid}, {axis}: {members}"
            if axis in mesh.mesh_axes:
                assert mesh.device_mesh.get_group(axis) is mesh.group((axis,)), "one group an axis"
                assert mesh.device_mesh.get_local_rank(axis) == mesh.coordinate[axis], f"{grid}, {axis}"
        both = mesh.group(grid.names[:2])
        assert both is mesh.group(grid.names[:2]), "made once"
        assert tuple(dist.get_process_group_ranks(both)) == tuple(sorted(grid.group(mesh.rank, grid.names[:2])))
        assert copy.deepcopy(mesh) is mesh and str(grid) in repr(mesh)
    return mesh_of(Grid(z=2, x=2, y=2)).describe(("x",))


def test_bound_to_the_world(ranks):
    described = ranks(8).run(check_bound)
    assert described[5] == "rank 5 (z=1, x=0, y=1) waited for rank 7"


def check_slices():
    user = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp0", "tp1"))
    replica = user.get_local_rank("dp")
    weights = []
    slices = [
        (user["tp0", "tp1"], {"x": "tp0", "y": "tp1"}),
        (user["tp0", "tp1"], {"y": "tp1", "x": "tp0"}),
        (user["dp", "tp1"], {"x": "tp1", "y": "dp"}),
    ]
    for part, axes in slices:
        mesh = ProcessGrid.from_mesh(part, axes)
        assert mesh.grid == Grid(dict.fromkeys(axes, 2)), "slowest first, as axes has them"
        for axis, name in axes.items():
            assert mesh.coordinate[axis] == user.get_local_rank(name), f"{axes}: {axis}"
            assert mesh.group((axis,)) is user.get_group(name), "the user's own groups"
        a, b = small_integers((8, 8), replica), small_integers((8, 8), 5)
        plan = MatMulPlan(Layout(mesh.grid, "y", "x"), Layout(mesh.grid, "x", "y"))
        c = ndtp.matmul(plan.a.shard(a, mesh.rank), plan.b.shard(b, mesh.rank), plan, mesh)
        if "dp" not in axes.values():
            assert_equal(c, plan.out.shard(a @ b, mesh.rank), f"{axes}: C")
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh.group(("x", "y")))
        assert total.item() == 4, "a group over two axes of a slice"
    # The whole mesh, permuted: names of the user's own, order of ours.
    for axes in ({"z": "dp", "x": "tp0", "y": "tp1"}, {"z": "tp1", "x": "dp", "y": "tp0"}, None):
        mesh = ProcessGrid.from_mesh(user, axes)
        weights.append(product_on(mesh))
    with CommMeter() as meter:
        product_on(ProcessGrid.from_mesh(user, {"z": "tp0", "x": "tp1", "y": "dp"}, timeout=30))
    assert meter.volume.total > 0
    for weight in weights[:-1]:
        assert_equal(weight, weights[0], "one seed, one weight, whatever the order of ranks")
    return [
        message_of(lambda: ProcessGrid.from_mesh(user, {"x": "tp0"})),
        message_of(lambda: ProcessGrid.from_mesh(user, {"x": "tp0", "y": "tp1", "z": "nope"})),
        message_of(lambda: ProcessGrid.from_mesh(DeviceMesh("cpu", [3, 2, 1, 0, 7, 6, 5, 4], mesh_dim_names=("x",)))),
        message_of(lambda: ProcessGrid(Grid(x=4))),
        message_of(lambda: ProcessGrid(Grid(x=16))),
    ]


def test_slices_of_a_bigger_mesh(ranks):
    messages = ranks(8).run(check_slices)
    assert all(m == messages[0] for m in messages)
    for message, word in zip(messages[0], ["slice the mesh", "nope", "ascend", "8 ranks", "from_mesh"], strict=True):
        assert word in message


def test_one_rank_needs_nothing():
    mesh = ProcessGrid(Grid(x=1, y=1))
    assert not dist.is_initialized() and mesh.device_mesh is None and mesh.rank == 0
    with pytest.raises(GridError, match="init_process_group first"):
        ProcessGrid(Grid(x=2))
    with pytest.raises(GridError, match="no process groups"):
        mesh.group(("x",))


@pytest.mark.skipif(sys.platform != "linux", reason="looks for threads in /proc")
def test_multiprocessors_left_free_are_an_option_of_the_kernels():
    assert ProcessGrid(Grid(x=1), gemm="kernels", free_sms=8).gemm.options.sms_to_leave == 8
    assert ProcessGrid(Grid(x=1), gemm="kernels").gemm.options.sms_to_leave == 0
    assert not ProcessGrid(Grid(x=1), max_ctas=4, register_buffers=True).ring.waiting_bytes, (
        "one rank asks nothing of NCCL"
    )


def check_timeout():
    """The timeout is that of the grid's groups, not of the default group."""
    mesh = ProcessGrid(Grid(x=2), timeout=2.0)
    layout = Layout(mesh.grid, "x", None)
    if mesh.rank == 0:
        try:
            ndtp.relayout(torch.ones(2, 2), layout, layout.with_dims(None, None), mesh)
        except CommunicationError as error:
            message = str(error)
        else:
            raise AssertionError("a peer that never came was not noticed")
    dist.barrier()  # of the default group, whose timeout is long
    return message if mesh.rank == 0 else None


def test_timeout(ranks):
    (message, _) = ranks(2).run(check_timeout, timeout=60)
    assert "all_gather of relayout" in message and "over axis x" in message and "waited for rank 1" in message


@contextlib.contextmanager
def joined(*arguments, **options):
    """This process is of a process group for a while."""
    dist.init_process_group(*arguments, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_512_ranks_on_one_machine():
    """torch's fake backend and meta tensors: exact volumes of a machine that nobody has."""
    shape = (4096, 8192, 4096)
    with joined("fake", store=FakeStore(), rank=37, world_size=512):
        mesh = ProcessGrid(Grid(z=8, x=8, y=8))
        plan = MatMulPlan(Layout.parse(mesh.grid, "(z y) x"), Layout.parse(mesh.grid, "(x z) y"))
        a = torch.empty(plan.a.shard_shape(shape[:2]), device="meta", requires_grad=True)
        b = torch.empty(plan.b.shard_shape(shape[1:]), device="meta", requires_grad=True)
        with CommMeter() as meter:
            ndtp.matmul(a, b, plan, mesh).sum().backward()
        assert meter.volume == plan.volume(shape), meter.volume
        mlp = ndtp.nn.MLP(4096, 16384, mesh=mesh, device="meta")
        x = torch.empty(mlp.in_layout.shard_shape((8192, 4096)), device="meta", requires_grad=True)
        with CommMeter() as meter:
            mlp(x).sum().backward()
        assert meter.volume == mlp.volume(8192), meter.volume


def test_a_process_group_without_a_named_backend():
    """`init_process_group()` picks one per device; torch then calls the backend "undefined"."""
    with joined(store=dist.HashStore(), rank=0, world_size=1):
        assert dist.get_backend() != "gloo" and backends_by_device()["cpu"] == "gloo"
        assert ProcessGrid(Grid(x=1)).device_type in ("cpu", "cuda")
