"""What a `ProcessGrid` refuses, whatever it runs on: before any group is made, with the value in the message."""

import math
import os
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndtp import Grid, GridError, ProcessGrid
from ndtp.collectives import backends, groups, nccl
from ndtp.collectives.axis_groups import AxisGroups
from ndtp.collectives.collectives import Collectives
from ndtp.collectives.grid_options import GridOptions, sms_to_leave
from ndtp.collectives.thread_blocks import ThreadBlocks, ctas_that_fit
from ndtp.runtime import process_grid
from ndtp.runtime.dry_grid import DryGrid


@pytest.mark.parametrize("timeout", [0, 0.0, 1e-9, 0.0009, -1, math.inf, math.nan, True, "60", 1e10, timedelta(1)])
def test_a_timeout_is_a_number_of_seconds_that_torch_can_count(timeout):
    with pytest.raises(GridError) as caught:
        ProcessGrid(Grid(x=1), timeout=timeout)
    assert f"timeout={timeout!r}" in str(caught.value) and "0.001" in str(caught.value)


@pytest.mark.parametrize("timeout", [0.001, 1, 60.5, 1e9, torch.tensor(3).item()])
def test_timeouts_that_are_taken(timeout):
    assert ProcessGrid(Grid(x=1), timeout=timeout).timeout == timeout


@pytest.mark.parametrize(
    "options",
    [
        {"free_sms": -1, "gemm": "kernels"},
        {"free_sms": 1.5, "gemm": "kernels"},
        {"free_sms": True, "gemm": "kernels"},
        {"max_ctas": 0},
        {"max_ctas": True},
        {"max_ctas": "4"},
        {"ring_bytes": -1},
        {"ring_bytes": 1e6},
        {"ring_bytes": None},
        {"groups_per_axis": True},
        {"groups_per_axis": 0},
        {"groups_per_axis": "2"},
        {"gemm": "cublas"},
        {"gemm": None},
        {"collectives": "nccl"},
        {"collectives": None},
        {"sums": "fp64"},
        {"free_sms": 8, "device_type": "cpu"},
        {"check": "no"},
        {"high_priority": 1},
        {"register_buffers": 0},
        {"device_type": "gpu"},
        {"device_type": "cpu:0"},
        {"device_type": ""},
        {"device_type": torch.device("cpu")},
    ],
    ids=lambda options: "-".join(f"{name}={value!r}" for name, value in options.items()),
)
def test_options_that_make_no_sense(options):
    with pytest.raises(GridError) as caught:
        ProcessGrid(Grid(x=1), **options)
    name, value = next(iter(options.items()))
    assert f"{name}={value!r}" in str(caught.value)


class NcclOptions:
    """What `ProcessGroupNCCL.Options` has, with torch's defaults."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, default_pg_timeout
        self.config = SimpleNamespace()


@pytest.fixture
def nccl_world(monkeypatch):
    """torch's own way to a group of NCCL, up to the communicator: (options, timeout then) of every group."""
    made = []

    class Kind(type):
        def __instancecheck__(cls, backend):
            return isinstance(backend, dist.ProcessGroupGloo)

    class Nccl(metaclass=Kind):
        Options = NcclOptions

        def __new__(cls, store, rank, size, options):
            made.append((options, options._timeout))
            return dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)

    for module in (dist, c10d):
        monkeypatch.setattr(module, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    monkeypatch.setattr(c10d, "default_pg_nccl_timeout", default_pg_timeout)
    monkeypatch.setattr(nccl, "device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.delenv(nccl.ORDER, raising=False)
    nccl.keep_order.cache_clear()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(hours=2))
    yield made
    dist.destroy_process_group()
    nccl.keep_order.cache_clear()


@pytest.mark.filterwarnings("error")  # torch warns where options and argument differ
@pytest.mark.parametrize(("seconds", "expected"), [(7.5, timedelta(seconds=7.5)), (None, timedelta(seconds=120))])
def test_the_timeout_reaches_the_communicator(nccl_world, seconds, expected):
    """torch overwrites that of the options by the argument of `new_group`, or by its default; not so the others."""
    groups = AxisGroups(Grid(x=1), [0], GridOptions(timeout=seconds, device_type="cuda", max_ctas=4), "nccl")
    held = [groups.group(("x",), way) for way in ("gather", "scatter")]
    held.append(groups.parameters_group("x"))
    (_, of_world), *own = nccl_world
    assert of_world == timedelta(hours=2) and len(own) == (2 if seconds is None else 3)
    assert {timeout for _, timeout in own} == {expected}, "DTensor's own traffic, too"
    for options, _ in own:
        assert options.is_high_priority_stream and options.config.max_ctas == 4
    assert all(group.bound_device_id == torch.device("cuda", 3) for group in held), "made at once, not at first use"


def test_nccl_is_told_to_keep_the_order_of_issue(nccl_world):
    AxisGroups(Grid(x=1), [0], GridOptions(device_type="cuda"), "nccl").group(("x",))
    assert os.environ[nccl.ORDER] == "1"
    assert nccl_world and dist.group.WORLD.bound_device_id is None, "before the first communicator"


@pytest.mark.parametrize(
    ("version", "cuda", "bound", "said"),
    [((2, 21, 5), "12.9", False, "NCCL 2.21.5 with CUDA 12.9"), ((2, 28, 9), "12.1", False, "with CUDA 12.1"),
     ((2, 28, 9), "12.9", True, "NCCL was started before ndtp")],
)  # fmt: skip
def test_where_nccl_cannot_keep_the_order_it_is_said_once(nccl_world, monkeypatch, version, cuda, bound, said):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(nccl, "_bound_device", lambda: torch.device("cuda", 0) if bound else None)
    with pytest.warns(UserWarning, match=said) as caught:
        for _ in range(2):
            nccl.keep_order()
    assert len(caught) == 1 and "fix: import ndtp before init_process_group" in str(caught[0].message)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_started", [True, False])
def test_a_communicator_that_a_collective_has_made_comes_too_early(nccl_world, monkeypatch, is_started):
    """The world was told no device, and has a communicator since its first collective."""
    asked = []
    backend = SimpleNamespace(_is_initialized=lambda: asked.append(1) or is_started)
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: backend)
    monkeypatch.setattr(dist.ProcessGroup, "_device_types", [torch.device("cuda")])
    with pytest.warns(UserWarning, match="NCCL was started before ndtp") if is_started else nullcontext():
        for _ in range(2):
            nccl.keep_order()
    assert len(asked) == 1, "it is said once"
    assert (nccl.ORDER in os.environ) is not is_started


def test_an_order_that_the_user_has_set_stays(nccl_world, monkeypatch):
    monkeypatch.setenv(nccl.ORDER, "0")
    nccl.keep_order()
    assert os.environ[nccl.ORDER] == "0"


@pytest.mark.parametrize(
    ("grid", "groups", "ctas"),
    [(Grid(z=2, x=2, y=2), 2, 3), (Grid(x=8), 2, 11), (Grid(x=1), 2, 33), (Grid(x=8), 1, 16), (Grid(dp=2, x=4), 2, 5),
     (Grid(dp=2, cp=2, e=2, z=2, x=2, y=2), 2, 2)],
)  # fmt: skip
def test_all_communicators_together_take_a_quarter_of_a_device(grid, groups, ctas):
    """Of an H100's 132 multiprocessors; so that kernels which wait for peers never fill a device."""
    assert ctas_that_fit(132, groups, grid) == ctas
    axes = sum(size > 1 for size in grid.shape)
    assert ctas * (groups * axes + min(axes, 3)) <= 33 and ctas_that_fit(4, groups, grid) == 1
    assert ctas_that_fit(132, groups, grid, others=1) <= ctas, "beside the messages of a pipeline"


def test_what_is_made_later_fits_however_much_there_is():
    blocks = ThreadBlocks(each=3, first=6, quarter=33)
    assert [blocks.of(number) for number in range(13)] == [3] * 6 + [3, 3, 3, 3, 1, 1, 1] and blocks.taken == 33
    assert blocks.of(0) == 3 and blocks.taken == 33, "it is asked again"
    with pytest.warns(UserWarning, match="14 communicators of a grid can take 34 multiprocessors .* 33") as caught:
        assert [blocks.of(number) for number in (13, 14)] == [1, 1]
    assert len(caught) == 1, "it is said once"


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_a_grid_with_a_timeout_has_communicators_for_parameters_too(timeout):
    options = GridOptions(timeout=timeout, others=1).dividing(132, Grid(z=2, x=2, y=2))
    first = 6 if timeout is None else 9
    assert options.thread_blocks.first == first
    assert options.max_ctas * (first + 3 + 1) <= 33 and options.thread_blocks.quarter == 33 - options.max_ctas


@pytest.mark.parametrize(
    "given,backend,max_ctas,groups,left",
    [
        (None, "nccl", 4, 2, 16),  # z and y: two axes of several ranks, two communicators each
        (None, "nccl", 4, 1, 8),
        (None, "gloo", None, 1, 0),
        (None, None, 4, 2, 0),
        (0, "nccl", 4, 2, 0),
        (7, "nccl", 4, 2, 7),
    ],
)
def test_gemms_leave_what_the_communicators_can_take(given, backend, max_ctas, groups, left):
    assert sms_to_leave(given, backend, max_ctas, groups, Grid(z=2, x=1, y=4)) == left


def test_a_backend_is_one_record(monkeypatch):
    """A grid takes the device, the groups and the options of a backend from its record, and a dry run is one of it."""
    monkeypatch.setitem(backends.KNOWN, "toy", backends.Backend("toy", device_type="xpu", groups_per_axis=2))
    served = {"cpu": "gloo", "xpu": "toy"}
    options = GridOptions().on(served, Grid(x=2))
    assert options.device_type == "xpu" and options.max_ctas is None
    with pytest.raises(GridError, match="the backend is toy"):
        GridOptions(max_ctas=4).on(served, Grid(x=2))
    assert AxisGroups(Grid(x=1), None, options, "toy").groups_per_axis == 2
    assert isinstance(DryGrid(Grid(x=2), backend="toy").collectives, Collectives)


def test_the_grid_tells_its_gemms(monkeypatch):
    """As the grid would be made on NCCL, with a communicator of one rank: no axis is busy."""
    asked = []
    monkeypatch.setattr(process_grid, "sms_to_leave", lambda *arguments: asked.append(arguments) or 12)
    mesh = ProcessGrid(Grid(x=1), gemm="kernels", max_ctas=4)
    assert mesh.gemm.options.sms_to_leave == 12
    assert asked == [(None, None, 4, mesh.groups_per_axis, mesh.grid)]


def test_one_split_makes_the_groups_of_all_ranks_along_an_axis(monkeypatch):
    """Of 64 ranks: 6 calls, where groups by their ranks take 96; each with the axis in its name and the options."""
    split, made = [], []

    def split_group(split_ranks, group_desc, timeout):
        split.append((group_desc, timeout))
        assert sorted(rank for ranks in split_ranks for rank in ranks) == list(range(64))
        mine = next(ranks for ranks in split_ranks if 0 in ranks)
        return new_group(mine, group_desc=group_desc, use_local_synchronization=True)

    def new_group(*ranks, **options):
        made.append(options["group_desc"])
        return real(*ranks, **options)

    class Splitting(backends.Backend):
        def can_split(self):
            return True

    real = dist.new_group
    # A world with peers, of which this process is the only one: all ranks would make all groups along an axis.
    kind = Splitting("fake", groups_per_axis=2)
    monkeypatch.setitem(backends.KNOWN, "fake", kind)
    monkeypatch.setattr(groups, "_know_as_many", lambda *_: None)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "split_group", split_group)
    options = GridOptions(device_type="cpu")
    for can_split, calls in ((True, 6), (False, 96)):
        monkeypatch.setattr(Splitting, "can_split", lambda _, can=can_split: can)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
        try:
            made.clear()
            along = AxisGroups(Grid(z=4, x=4, y=4), list(range(64)), options, "fake")
            held = [along.group((axis,), way) for way in ("gather", "scatter") for axis in "zxy"]
            assert len(made) == calls and len(split) == 6
            assert [group.group_desc for group in held] == [f"ndtp_{axis}_4_ranks" for axis in "zxyzxy"]
            assert all(group.size() == 4 for group in held)
        finally:
            dist.destroy_process_group()
    assert all(timeout == timedelta(seconds=120) for _, timeout in split)
    assert along.kind is kind


@pytest.mark.parametrize(
    ("bound", "config", "able", "splits"),
    [(True, "cuda:nccl", True, True), (False, "cuda:nccl", True, False), (True, "cpu:gloo,cuda:nccl", True, False),
     (True, "cuda:nccl", False, False)],
)  # fmt: skip
def test_nccl_splits_a_world_that_was_told_its_device(nccl_world, monkeypatch, bound, config, able, splits):
    monkeypatch.setattr(nccl, "_bound_device", lambda: torch.device("cuda", 3) if bound else None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    backend = SimpleNamespace(supports_splitting=able)
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: backend)
    assert backends.NCCL.can_split() is splits
    assert not backends.GLOO.can_split()


def test_the_name_of_a_group_has_its_axes(nccl_world):
    along = AxisGroups(Grid(z=1, x=1), [0], GridOptions(device_type="cuda"), "nccl")
    held = [along.group(("x",)), along.group(("z", "x"), "scatter")]
    assert [group.group_desc for group in held] == ["ndtp_x_1_ranks", "ndtp_z_x_1_ranks"]


def test_graphs_keep_the_priorities_of_streams():
    """The variable is set when ndtp is imported, unless the user has set it."""
    show = "import os, ndtp; print(os.environ['CUDA_GRAPHS_USE_NODE_PRIORITY'])"
    for given, expected in (({}, "1"), ({"CUDA_GRAPHS_USE_NODE_PRIORITY": "0"}, "0")):
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_GRAPHS_USE_NODE_PRIORITY"}
        ran = subprocess.run([sys.executable, "-c", show], env=kept | given, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == expected
