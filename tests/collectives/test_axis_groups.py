"""Process groups along the axes: who shares them, when they are made, and when they end."""

import contextlib
import gc
import importlib
import os
import threading
import time
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from products import message_of, product_on
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ndtp
from ndtp import Grid, GridError, ProcessGrid
from ndtp.algebra.steps import Step
from ndtp.collectives.direct_exchange import past_of
from ndtp.collectives.groups import _breakable, shared_group
from ndtp.testing import assert_equal


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


def check_groups_that_a_rank_made_alone():
    """Also where torch names a group by how many a rank has made, as torch 2.15 does, and counts all of them."""
    c10d = dist.distributed_c10d
    world, before = c10d._world, c10d._world.group_count

    def named(ranks, use_hashed_name):
        name = f"{list(ranks)} {world.group_count}" if use_hashed_name else str(world.group_count)
        world.group_count += 1
        return name

    try:
        with mock.patch.object(c10d, "_process_group_name", named):
            for _ in range(3 * dist.get_rank()):
                dist.new_group([dist.get_rank()], use_local_synchronization=True)
            made = world.group_count
            for name in ("one", "another"):
                total = torch.ones(1)
                dist.all_reduce(total, group=shared_group(((0, 1),), f"{name} of a test", True, dict, timeout=20))
                assert total.item() == 2 and world.group_count == made, "ranks count on as they did"
    finally:
        world.group_count = before


def test_a_rank_may_have_made_groups_alone(ranks):
    ranks(2).run(check_groups_that_a_rank_made_alone, timeout=60)
    ranks(2).close()


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
        for _ in range(3):
            mesh = kind()
            use(mesh)
            assert name == "shared" or held() > before
            del mesh
            assert held_again(before), f"{name}: threads and descriptors were {before}, are {held()}"
        gc.enable()
    # What was given up unfinished may be another rank's to finish: until the timeout has passed.
    ProcessGrid(Grid(x=2, y=2), timeout=1)  # groups of parameters are kept, those of each timeout
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


def check_nobody_keeps_the_world():
    """Torch's functions would, where DTensor is imported when there is one already: see `let_go_of_world`."""
    functional = importlib.reload(torch.distributed.nn.functional)
    world = dist.group.WORLD
    assert functional.all_reduce.__defaults__[-1] is world, "or torch has mended it"
    ProcessGrid(Grid(x=2))
    held = [name for name, each in vars(functional).items() if world in (getattr(each, "__defaults__", None) or ())]
    assert not held, held
    assert functional.all_reduce(torch.ones(())) == 2


def test_nobody_keeps_the_world(ranks):
    ranks(2).run(check_nobody_keeps_the_world)


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


def test_making_a_group_is_broken_off_when_a_rank_has_left():
    """gloo waits for connections, and a store of files for keys, as long as it takes."""
    came = threading.Event()
    here = SimpleNamespace(guarding=lambda seconds: contextlib.nullcontext(), has_lost=came.is_set)
    assert _breakable(lambda: "made", here, 60) == "made"
    with pytest.raises(ZeroDivisionError):
        _breakable(lambda: 1 / 0, here, 60)
    came.set()
    ends = threading.Event()
    with pytest.raises(RuntimeError, match="a rank has left"):
        _breakable(ends.wait, here, 60)
    ends.set()
