"""ProcessGrid: bound to the whole world, or to a slice of a bigger mesh, in any order of axes."""

import copy
import gc
import os
import subprocess
import sys
import textwrap
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from products import mesh_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ndtp
from ndtp import CommMeter, CommunicationError, Grid, GridError, Layout, MatMulPlan, ProcessGrid
from ndtp.algebra.steps import Step
from ndtp.collectives.direct_exchange import past_of
from ndtp.testing import assert_equal, small_integers


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


def product_on(mesh):
    """A 3D product on whatever the axes are called."""
    z, x, y = mesh.grid.names
    plan = MatMulPlan(Layout(mesh.grid, (z, y), x), Layout(mesh.grid, (x, z), y))
    a, b = small_integers((8, 8), 0), small_integers((8, 8), 1)
    b_shard = plan.b.shard(b, mesh.rank).clone().requires_grad_()
    c = ndtp.matmul(plan.a.shard(a, mesh.rank), b_shard, plan, mesh)
    assert_equal(c, plan.out.shard(a @ b, mesh.rank), f"{mesh}: C")
    c.sum().backward()
    assert_equal(b_shard.grad, plan.b.shard(a.mT @ torch.ones(8, 8), mesh.rank), f"{mesh}: dB")
    if z != "z":
        return None  # DTensor has no order for K_xz of axes by other names
    layer = ndtp.nn.Linear(8, 8, mesh=mesh, in_layout=plan.a, weight_layout=Layout(mesh.grid, y, (x, z)), seed=1)
    return layer.to_dense().weight


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


def message_of(call):
    try:
        call()
    except GridError as error:
        return str(error)
    raise AssertionError("no error")


def test_slices_of_a_bigger_mesh(ranks):
    messages = ranks(8).run(check_slices)
    assert all(m == messages[0] for m in messages)
    for message, word in zip(messages[0], ["slice the mesh", "nope", "ascend", "8 ranks", "from_mesh"], strict=True):
        assert word in message


def check_uneven_groups():
    """Ranks that are in different numbers of groups of the user's own still find each other."""
    half = DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
    outside = dist.get_rank() > 1
    try:
        part = ProcessGrid.from_mesh(half)
        assert not outside and part.rank == dist.get_rank()
    except GridError as error:
        assert outside and "not part of the mesh" in str(error), error
    mesh = ProcessGrid(Grid(z=1, x=2, y=2), timeout=60)
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.group(("x", "y")))
    assert total.item() == 4, "a group over two axes"
    product_on(mesh)


def test_users_groups_may_be_uneven(ranks):
    ranks(4).run(check_uneven_groups, timeout=100)
    ranks(4).close()  # torch names groups that their members make alone by how many they have: no more of those here


def test_one_rank_needs_nothing():
    mesh = ProcessGrid(Grid(x=1, y=1))
    assert not dist.is_initialized() and mesh.device_mesh is None and mesh.rank == 0
    with pytest.raises(GridError, match="init_process_group first"):
        ProcessGrid(Grid(x=2))
    with pytest.raises(GridError, match="no process groups"):
        mesh.group(("x",))


def check_sharing():
    """Grids share groups of the same ranks, whatever their axes are called, and do not get into each other's way."""
    grids = [Grid(z=2, x=2, y=2), Grid(dp=2, z=1, x=4, y=1), Grid(x=8), Grid(z=2, x=2, y=2)]
    one, other, whole, again = meshes = [ProcessGrid(grid) for grid in grids]
    assert one.group(("x", "y")) is other.group(("x",)) and one.group(("z",)) is other.group(("dp",))
    assert all(one.group((axis,)) is again.group((axis,)) for axis in "zxy")
    distinct = {mesh.group(axes) for mesh in meshes for axes in [*((axis,) for axis in mesh.grid), mesh.grid.names]}
    assert len(distinct) == 6, "of 2 (three times), 4 and 8 ranks, and of one"
    own = ProcessGrid(Grid(x=8), timeout=30)
    assert own.group(("x",)) is not whole.group(("x",)), "a timeout is of the group"

    def gather(mesh):
        value = torch.full((2,), float(mesh.rank + 100 * meshes.index(mesh)))
        return mesh.collectives.start(Step("all_gather", ("z",), 0), value, ("test",), "forward")

    def expect(mesh, handle):
        peers = mesh.grid.group(mesh.rank, ("z",))
        values = [float(rank + 100 * meshes.index(mesh)) for rank in peers for _ in range(2)]
        assert handle.wait().tolist() == values, f"{mesh}"

    first, second = gather(one), gather(again)
    expect(again, second)
    expect(one, first)
    dropped = gather(one)
    del dropped
    expect(again, gather(again))
    expect(one, gather(one))
    assert not past_of(one.group(("z",))).given_up


def test_groups_are_shared(ranks):
    ranks(8).run(check_sharing)


def check_directions():
    """With two groups an axis gathers take one and everything else the other; both are there before the first use."""
    mesh = ProcessGrid(Grid(z=2, x=2, y=2), groups_per_axis=2)
    made = dict(mesh.groups.made)
    assert len(made) == 6 and len(set(made.values())) == 6, "two for every axis"
    for axis in mesh.grid:
        gather, scatter = mesh.group((axis,)), mesh.group((axis,), "scatter")
        assert gather is not scatter and dist.get_process_group_ranks(gather) == dist.get_process_group_ranks(scatter)
        assert mesh.device_mesh.get_group(axis) is gather
    used = set()
    group = mesh.groups.group

    def noted(axes, direction):
        used.add((axes, direction))
        return group(axes, direction)

    mesh.groups.group = noted
    product_on(mesh)
    unused = (("y",), "scatter")  # would reduce the gradient of A, which nobody wants
    assert used == set(made) - {unused}, f"gathers and scatters along every axis: {used}"
    assert mesh.groups.made == made
    user = init_device_mesh("cpu", (2, 4), mesh_dim_names=("y", "x"))
    mesh = ProcessGrid.from_mesh(user["x"], groups_per_axis=2)
    assert mesh.group(("x",)) is user.get_group("x") and mesh.group(("x",), "scatter") is not user.get_group("x")
    assert len(mesh.groups.made) == 2
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.group(("x",), "scatter"))
    assert total.item() == 4
    one = ProcessGrid(Grid(x=8))
    assert one.group(("x",), "scatter") is one.group(("x",)) and len(one.groups.made) == 1, "gloo needs no second one"
    return [name.group_name for name in made.values()], [
        message_of(lambda: ProcessGrid(Grid(x=8), max_ctas=4)),
        message_of(lambda: ProcessGrid(Grid(x=8), register_buffers=True)),
        message_of(lambda: ProcessGrid(Grid(x=8), groups_per_axis=3)),
        message_of(lambda: ProcessGrid(Grid(x=8), free_sms=8)),
    ]


def test_gathers_and_scatters_may_have_groups_of_their_own(ranks):
    names, messages = zip(*ranks(8).run(check_directions), strict=True)
    assert all(mine == messages[0] for mine in messages), "every rank says the same"
    for message, word in zip(messages[0], ["gloo", "gloo", "neither 1 nor 2", "gemm='kernels'"], strict=True):
        assert word in message
    for place in zip(*names, strict=True):  # groups along one axis, of which a rank is in one
        numbers = sorted({int(name) for name in place})
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "made in one order on every rank"


def held():
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def held_again(before):
    """Whether there are no more than before: a thread that has ended is still listed for a moment."""
    deadline = time.monotonic() + 20
    while any(now > then for now, then in zip(held(), before, strict=True)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def train_on(mesh):
    """All that a grid is used for: products both ways, gathers by DTensor."""
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="2d")
    block(torch.ones(block.in_layout.shard_shape((8, 8)), requires_grad=True)).sum().backward()
    block.to_dense()


def check_groups_end_with_their_grid():
    user = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    make = {
        "whole world": lambda: ProcessGrid(Grid(x=2, y=2), timeout=60),
        "two groups an axis": lambda: ProcessGrid(Grid(x=2, y=2), timeout=60, groups_per_axis=2),
        "a part": lambda: ProcessGrid.from_mesh(user["x"], timeout=60),
        "never used": lambda: ProcessGrid(Grid(x=2, y=2), timeout=60),
        "shared": lambda: ProcessGrid(Grid(x=2, y=2)),
    }
    for name, kind in make.items():
        use = train_on if name in ("whole world", "two groups an axis", "shared") else (lambda mesh: None)
        mesh = kind()  # the shared groups of parameters are there after this
        use(mesh)
        del mesh
        gc.collect()  # torch's imports leave garbage that holds on to whoever was first
        gc.disable()
        before = held()
        for _ in range(5):
            mesh = kind()
            use(mesh)
            assert name == "shared" or held() > before
            del mesh
            assert held_again(before), f"{name}: threads and descriptors were {before}, are {held()}"
        gc.enable()
    # What was given up unfinished may be another rank's to finish: until the timeout has passed.
    before = held()
    for ended in (False, True):
        mesh = ProcessGrid(Grid(x=2, y=2), timeout=1)
        mesh.collectives.start(Step("all_gather", ("x",), 0), torch.ones(2), ("test",), "forward")
        del mesh
        dist.barrier()
        assert held() > before
        time.sleep(1 if ended else 0)
    ProcessGrid(Grid(x=2, y=2))  # when a grid comes or goes
    assert held_again(before)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for threads in /proc")
def test_groups_of_a_timeout_end_with_their_grid(ranks):
    """Without the garbage collector's help: it comes at different times on different ranks."""
    ranks(4).run(check_groups_end_with_their_grid)


def check_groups_may_end_at_any_time():
    """Ranks that have ended groups, and others that have not yet, find each other in new ones: also the members of a
    group alone, which torch names by how many groups they have."""
    user = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    kept, rank = [], dist.get_rank()
    for attempt in range(4):
        mesh, part = ProcessGrid(Grid(x=2, y=2), timeout=60), ProcessGrid.from_mesh(user["x"], timeout=60)
        product_on(ProcessGrid(Grid(z=2, x=2, y=1)))
        for each, axes in ((mesh, ("x", "y")), (part, ("x",))):
            value = torch.full((2,), float(each.rank))
            handle = each.collectives.start(Step("all_gather", axes[:1], 0), value, ("test",), "forward")
            if rank == attempt:
                dropped, handle = handle, None  # given up: the group goes with it all the same
                del dropped
            else:
                assert handle.wait().tolist()[-1] == float(each.grid.group(each.rank, axes[:1])[-1])
        if rank % 2 == attempt // 2:
            kept.append((mesh, part))
        alive = weakref.ref(mesh)
        del mesh, part, each, handle
        assert (alive() is None) == (rank % 2 != attempt // 2), "what was given up holds on to its grid"
    assert len(kept) == 2
    dist.barrier()


def test_groups_may_end_at_different_times(ranks):
    ranks(4).run(check_groups_may_end_at_any_time, timeout=60)


def check_parameters_outlive_their_grid():
    """DTensor takes equal meshes for one another, and keeps the first: no grid's groups of its own may be in there."""
    weights = []
    for _ in range(2):
        mesh = ProcessGrid(Grid(x=2, y=2), timeout=60)
        assert mesh.device_mesh.get_group("x") is not mesh.group(("x",))
        weights.append(ndtp.nn.Linear(8, 8, mesh=mesh, scheme="2d", seed=1).weight)
        del mesh
    assert_equal((weights[0] + weights[1]).full_tensor(), 2 * weights[1].full_tensor(), "gathered")


def test_parameters_outlive_their_grid(ranks):
    ranks(4).run(check_parameters_outlive_their_grid)


def check_a_new_world(path):
    """After `destroy_process_group` a grid makes its groups anew, even where the old ones still live somewhere."""
    rank, earlier = dist.get_rank(), ProcessGrid(Grid(x=4))
    for attempt in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(f"{path}{attempt}", 4), rank=rank, world_size=4)
        mesh = ProcessGrid(Grid(x=4))
        assert mesh.group(("x",)) is not earlier.group(("x",))
        product_on(ProcessGrid(Grid(z=1, x=2, y=2)))
        earlier = mesh


def test_a_new_world_has_new_groups(ranks, tmp_path):
    ranks(4).run(check_a_new_world, str(tmp_path / "store"))


def test_multiprocessors_left_free_are_an_option_of_the_kernels():
    assert ProcessGrid(Grid(x=1), gemm="kernels", free_sms=8).gemm.options.sms_to_leave == 8
    assert ProcessGrid(Grid(x=1), gemm="kernels").gemm.options.sms_to_leave == 0
    assert not ProcessGrid(Grid(x=1), max_ctas=4, register_buffers=True).ring.waiting_bytes, (
        "one rank asks nothing of NCCL"
    )


def check_timeout():
    """The timeout is that of the grid's groups, not of the default group."""
    mesh = ProcessGrid(Grid(x=2), timeout=4.0)
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


PROGRAM = """
    import torch, torch.distributed as dist, ndtp
    {init}
    mesh = ndtp.ProcessGrid(ndtp.Grid({axes}))
    plan = ndtp.MatMulPlan(ndtp.Layout.parse(mesh.grid, "{a}"), ndtp.Layout.parse(mesh.grid, "{b}"))
    shape = (4096, 8192, 4096)
    {body}
"""


def run_program(*launcher, **parts):
    text = textwrap.dedent(PROGRAM).format(**parts)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *launcher, *(() if launcher else ("-c", text))],
        capture_output=True, text=True, env=environ, timeout=200, check=False,
    )  # fmt: skip


def test_512_ranks_on_one_machine():
    """torch's fake backend and meta tensors: exact volumes of a machine that nobody has."""
    result = run_program(
        init="from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "dist.init_process_group('fake', store=FakeStore(), rank=37, world_size=512)",
        axes="z=8, x=8, y=8",
        a="(z y) x",
        b="(x z) y",
        body="a = torch.empty(plan.a.shard_shape(shape[:2]), device='meta', requires_grad=True)\n"
        "b = torch.empty(plan.b.shard_shape(shape[1:]), device='meta', requires_grad=True)\n"
        "with ndtp.CommMeter() as meter:\n"
        "    ndtp.matmul(a, b, plan, mesh).sum().backward()\n"
        "assert meter.volume == plan.volume(shape).in_bytes(4), meter.volume\n"
        "mlp = ndtp.nn.MLP(4096, 16384, mesh=mesh, device='meta')\n"
        "x = torch.empty(mlp.in_layout.shard_shape((8192, 4096)), device='meta', requires_grad=True)\n"
        "with ndtp.CommMeter() as meter:\n"
        "    mlp(x).sum().backward()\n"
        "assert meter.volume == mlp.volume(8192).in_bytes(4), meter.volume\n"
        "print('volumes agree')",
    )
    assert result.stdout == "volumes agree\n", result.stderr


def test_a_process_group_without_a_named_backend():
    """`init_process_group()` picks one per device; torch then calls the backend "undefined"."""
    result = run_program(
        init="dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)",
        axes="x=1",
        a="None x",
        b="x None",
        body="from ndtp.runtime.process_grid import backends_by_device\n"
        "assert dist.get_backend() != 'gloo' and backends_by_device()['cpu'] == 'gloo'\n"
        "print(mesh.device_type)",
    )
    assert result.stdout.strip() in ("cpu", "cuda"), result.stderr
