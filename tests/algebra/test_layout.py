"""Layouts: written, parsed, cut, put together, drawn, and handed to DTensor and back."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations

import legal
import numpy as np
import pytest
import simulate
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout, common_mesh_axes, subscript
from ndtp.errors import LayoutError

CUBE = Grid(z=2, x=2, y=2)
quick = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def layouts(draw: st.DrawFn, min_ndim: int = 0) -> Layout:
    sizes = draw(st.lists(st.sampled_from((1, 2, 2, 3)), min_size=1, max_size=4))
    grid = Grid(dict(zip(draw(st.permutations(("x", "y", "z", "dp"))), sizes, strict=False)))
    ndim = draw(st.integers(min_ndim, 3))
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(grid.names)):
        where = draw(st.sampled_from((None, *range(ndim))))
        if where is not None:
            dims[where].append(axis)
    return Layout(grid, *dims)


# ------------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("(z y) x", (("z", "y"), ("x",))),
        ("None (x y)", ((), ("x", "y"))),
        ("( z , y ) , x", (("z", "y"), ("x",))),
        ("(z,y),x", (("z", "y"), ("x",))),
        ("() (x)", ((), ("x",))),
        ("'(z y) x'", (("z", "y"), ("x",))),
        ("x", (("x",),)),
        ("None None None", ((), (), ())),
        ("", ()),
    ],
)
def test_parse(text: str, dims: legal.Dims) -> None:
    layout = Layout.parse(CUBE, text)
    assert layout.dims == dims and layout == Layout(CUBE, *dims)


@quick
@given(layouts())
def test_parse_reads_what_str_prints(layout: Layout) -> None:
    assert Layout.parse(layout.grid, str(layout)) == layout


@quick
@given(st.text(alphabet="xyz(), N'o-ne\t", max_size=12))
def test_parse_of_anything_is_a_layout_or_a_layout_error(text: str) -> None:
    try:
        layout = Layout.parse(CUBE, text)
    except LayoutError:
        return
    assert set(layout.axes) <= set(CUBE) and Layout.parse(CUBE, str(layout)) == layout


def test_ways_to_say_whole_and_one_axis() -> None:
    assert Layout(CUBE, None, "x") == Layout(CUBE, "None", ("x",)) == Layout(CUBE, (), ["x"])
    assert len({Layout(CUBE, None, "x"), Layout(CUBE, "None", ("x",))}) == 1


def test_structure() -> None:
    layout = Layout(CUBE, ("z", "y"), None)
    assert layout.ndim == 2 and layout.axes == ("z", "y")
    assert [layout.dim_of(axis) for axis in "zxy"] == [0, None, 0]
    assert [layout.num_splits(dim) for dim in (0, 1)] == [4, 1]
    assert layout.with_dims("x").grid == CUBE
    assert layout.label("MK") == "M_zy, K" and Layout(Grid(dp=2, z=2), ("dp", "z")).label("M") == "M_(dp z)"
    assert subscript(("x",)) == "x" and subscript(("dp",)) == "(dp)"
    assert repr(layout) == "Layout(z=2 x=2 y=2: '(z y) None')"


def test_over_is_the_two_step_form() -> None:
    lay = Layout.over((2, 4), ("x", "y"))
    assert lay("None", ("x", "y")) == Layout(Grid(x=2, y=4), None, ("x", "y"))
    assert lay("x", "y").grid.num_ranks == 8 and lay("x", "y").chunks is None


def test_interleaved_parallel_is_chunks_and_no_axis() -> None:
    lay = Layout.over((2, 4, 2), ("x", "y", "interleaved_parallel"))
    layout = lay(("x", "interleaved_parallel"), "y")
    assert layout.grid == Grid(x=2, y=4) and layout.dims == (("x",), ("y",)) and layout.chunks == (0, 2)
    assert lay("x", "y").chunks is None
    assert lay("x", "interleaved_parallel").chunks == (1, 2)
    assert layout.shard_shape((8, 8)) == lay("x", "y").shard_shape((8, 8)) == (4, 2)
    assert "chunks=(0, 2)" in repr(layout)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Layout(CUBE, "w"), "has no axis 'w'; axes: z, x, y"),
        (lambda: Layout(CUBE, "x", "x"), "axis x is named twice"),
        (lambda: Layout(CUBE, ("x", "x")), "axis x is named twice"),
        (lambda: Layout(CUBE, "x", chunks=(1, 2)), "chunks=(1, 2)"),
        (lambda: Layout(CUBE, "x", chunks=(0, 0)), "chunks=(0, 0)"),
        (lambda: Layout.parse(CUBE, "(z y x"), "brackets do not match; write it like '(z y) x'"),
        (lambda: Layout.parse(CUBE, "z) x"), "brackets do not match"),
        (lambda: Layout.parse(CUBE, "((z y)) x"), "brackets do not match"),
        (lambda: Layout.over((2, 4), ("x",)), "each name once, with a size"),
        (lambda: Layout.over((2, 4), ("x", "x")), "each name once, with a size"),
        (lambda: Layout.over((2, 4), ("interleaved_parallel", "x")), "only as the last"),
        (lambda: Layout.over((2, 4), ("x", "y"))("x", "interleaved_parallel"), "must be an alias of the grid"),
        (
            lambda: Layout.over((2, 2), ("x", "interleaved_parallel"))(("interleaved_parallel", "x")),
            "the minor axis of a dim",
        ),
        (
            lambda: Layout.over((2, 2), ("x", "interleaved_parallel"))("interleaved_parallel", "interleaved_parallel"),
            "may be named once",
        ),
        (lambda: Layout(CUBE, "x").shard_shape((4, 4)), "has 1 dims, the shape (4, 4) has 2"),
        (lambda: Layout(CUBE, "x").slices(0, (4, 4), uneven=True), "has 1 dims, the shape (4, 4) has 2"),
        (
            lambda: Layout(CUBE, ("z", "y"), "x").shard_shape((6, 4)),
            "dim 0 of (6, 4) has size 6, which its axes z=2 y=2 do not divide\n  fix: pad dim 0 to 8",
        ),
        (lambda: Layout(CUBE, "x").from_shards([np.zeros(2)] * 7), "give 8 shards of one shape"),
        (lambda: Layout(CUBE, "x").from_shards([np.zeros(2)] * 7 + [np.zeros(3)]), "give 8 shards of one shape"),
    ],
)
def test_errors(build: object, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        build()  # type: ignore[operator]
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------------------- shards


@quick
@given(layouts(), st.lists(st.integers(0, 3), min_size=3, max_size=3), st.sampled_from(("numpy", "torch")))
def test_shards_are_the_blocks_and_make_the_dense_tensor_again(layout: Layout, factors: list[int], kind: str) -> None:
    grid = layout.grid
    shape = tuple(factor * layout.num_splits(dim) for dim, factor in zip(range(layout.ndim), factors, strict=False))
    dense = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    tensor = torch.from_numpy(dense) if kind == "torch" else dense
    shards = [layout.shard(tensor, rank) for rank in range(grid.num_ranks)]
    for rank, shard in enumerate(shards):
        assert tuple(shard.shape) == layout.shard_shape(shape)
        assert (np.asarray(shard) == simulate.shard(dense, grid, layout.dims, rank)).all()
    again = layout.from_shards(shards)
    assert type(again) is type(tensor) and again.dtype == tensor.dtype
    assert tuple(again.shape) == shape and bool((again == tensor).all())


def test_shards_are_views() -> None:
    dense = np.zeros((4, 4))
    Layout(CUBE, "x", "y").shard(dense, 0)[:] = 1
    assert dense.sum() == 4


def test_replicas_that_differ_are_named_but_nan_equals_nan() -> None:
    layout = Layout(Grid(x=2, y=2), "x")
    shards = [torch.tensor([1.0, float("nan")]) for _ in range(4)]
    assert layout.from_shards(shards).shape == (4,)
    shards[3][0] = 2
    with pytest.raises(LayoutError, match="ranks 2 and 3 hold replicas that differ"):
        layout.from_shards(shards)


@quick
@given(layouts(), st.lists(st.integers(0, 40), min_size=3, max_size=3))
def test_padded_shape_is_the_least_that_divides(layout: Layout, sizes: list[int]) -> None:
    shape = tuple(sizes[: layout.ndim])
    padded = layout.padded_shape(shape)
    layout.shard_shape(padded)
    assert all(
        size <= wide < size + layout.num_splits(dim) for dim, (size, wide) in enumerate(zip(shape, padded, strict=True))
    )


@quick
@given(layouts(min_ndim=1), st.lists(st.integers(0, 17), min_size=3, max_size=3))
def test_uneven_slices_are_torch_chunks_axis_by_axis(layout: Layout, sizes: list[int]) -> None:
    """Each axis cuts what the axis before left, by the rule of torch.chunk; blocks past the end are empty."""
    shape = tuple(sizes[: layout.ndim])
    dense = torch.arange(int(np.prod(shape))).reshape(shape)
    for rank in range(layout.grid.num_ranks):
        block = dense
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                position, chunks = layout.grid.coordinate(rank)[axis], block.chunk(layout.grid[axis], dim)
                block = chunks[position] if position < len(chunks) else block.narrow(dim, 0, 0)
        found = dense[layout.slices(rank, shape, uneven=True)]
        assert found.shape == block.shape and bool((found == block).all())


# ------------------------------------------------------------------------------------------------------ DTensor


@contextmanager
def as_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """torch.distributed as `rank` sees it, without any other: the fake backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("rank", range(8))
def test_dtensor_cuts_what_the_layout_cuts(rank: int) -> None:
    """A real DeviceMesh of the permuted ranks and real DTensors: all layouts of a matrix over three axes."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_tensor

    even, uneven = torch.arange(16 * 24).reshape(16, 24), torch.arange(5 * 13).reshape(5, 13)
    with as_rank(rank, 8):
        meshes = {}
        for order in permutations(CUBE.names):
            ranks = torch.arange(8).reshape(CUBE.shape).permute([CUBE.names.index(axis) for axis in order])
            meshes[order] = DeviceMesh("cpu", ranks.contiguous(), mesh_dim_names=order)
        for dims in legal.all_dims(CUBE.names, 2):
            layout = Layout(CUBE, *dims)
            mesh = meshes[layout.mesh_axes]
            for dense in (even, uneven):
                local = distribute_tensor(dense, mesh, layout.placements, src_data_rank=None).to_local()
                expected = dense[layout.slices(rank, dense.shape, uneven=True)]
                assert local.shape == expected.shape and bool((local == expected).all()), layout
            # From DTensor to a layout: on every mesh, whatever placements it has, and back.
            for order, other in meshes.items():
                placements = tuple(layout.placements[layout.mesh_axes.index(axis)] for axis in order)
                there = Layout.from_placements(CUBE, order, placements, 2)
                assert there.placements_on(order) == placements
                local = distribute_tensor(even, other, placements, src_data_rank=None).to_local()
                assert bool((local == there.shard(even, rank)).all())
                if order == layout.mesh_axes:
                    assert there == layout


def test_mesh_axes_of_the_design() -> None:
    """z stands after x and y for weights and before them for activations; without need, it is last."""
    assert Layout(CUBE, ("x", "z"), "y").mesh_axes == ("x", "y", "z")
    assert Layout(CUBE, ("y", "z"), "x").mesh_axes == ("x", "y", "z")
    assert Layout(CUBE, ("z", "y"), "x").mesh_axes == ("x", "z", "y")
    assert Layout(Grid(dp=2, z=2, x=2, y=2), None).mesh_axes == ("dp", "x", "y", "z")
    assert Layout(Grid(y=2, dp=2, z=2, x=2), None, ("x", "y", "z")).mesh_axes == ("x", "dp", "y", "z")
    assert Layout(Grid(z=1, x=2, y=2), ("z", "y"), "x").mesh_axes == ("x", "y", "z")  # a size of 1 needs no order


@quick
@given(st.lists(st.permutations(("x", "y", "z", "dp")), min_size=1, max_size=4), st.data())
def test_common_mesh_axes_express_all_layouts_or_say_why_not(orders: Sequence[list[str]], draw: st.DataObject) -> None:
    grid = Grid(dp=2, z=2, x=2, y=1)
    some = []
    for order in orders:
        cut = draw.draw(st.integers(0, 4))
        some.append(Layout(grid, order[:cut], draw.draw(st.sampled_from((None, order[cut:])))))
    fits = [
        mesh
        for mesh in permutations(grid.names)
        if all([g for g in mesh if g in axes] == list(axes) for lay in some for axes in map(grid.nontrivial, lay.dims))
    ]
    try:
        found = common_mesh_axes(some)
    except LayoutError as error:
        assert not fits and "ask for opposite orders of mesh dims" in str(error) and "fix:" in str(error)
        return
    assert found in fits
    for layout in some:
        layout.placements_on(found)
        back = Layout.from_placements(grid, found, layout.placements_on(found), 2)
        assert [grid.nontrivial(axes) for axes in back.dims] == [grid.nontrivial(axes) for axes in layout.dims]
    if ("dp", "x", "y", "z") in fits:
        assert found == ("dp", "x", "y", "z")


def test_layouts_that_no_one_mesh_expresses() -> None:
    with pytest.raises(LayoutError, match=r"opposite orders.*\n  fix: name the axes of a dim in the same order"):
        common_mesh_axes([Layout(CUBE, ("x", "z")), Layout(CUBE, ("z", "x"))])
    with pytest.raises(LayoutError, match=r"cannot express \(z x\)\n  fix: a mesh over \(y z x\)"):
        Layout(CUBE, ("z", "x")).placements_on(("x", "y", "z"))
    cycle = [Layout(CUBE, ("x", "y")), Layout(CUBE, ("y", "z")), Layout(CUBE, ("z", "x"))]
    with pytest.raises(LayoutError):
        common_mesh_axes(cycle)
    assert common_mesh_axes(cycle[:2]) == ("x", "y", "z")


def test_placements_without_a_layout_are_refused() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    grid = Grid(x=2, y=2)
    assert Layout.from_placements(grid, ("x", "y"), (Shard(-1), Replicate()), 2).dims == ((), ("x",))
    for placement in (Partial(), _StridedShard(0, split_factor=2)):
        with pytest.raises(LayoutError, match="over axis x has no layout; Shard and Replicate have"):
            Layout.from_placements(grid, ("x", "y"), (placement, Replicate()), 2)
    for dim in (2, -3):
        with pytest.raises(LayoutError, match="names no dim of a tensor of 2 dims"):
            Layout.from_placements(grid, ("x", "y"), (Shard(dim), Replicate()), 2)


# ----------------------------------------------------------------------------------------------------- pictures


def test_picture_of_a_matrix() -> None:
    assert Layout(CUBE, ("z", "y"), "x").show((8, 8)) == "\n".join(
        (
            "'(z y) x' of (8, 8) on grid z=2 x=2 y=2; every rank holds (2, 4)",
            "      0:4   4:8",
            "    +-----+-----+",
            "0:2 |  0  |  2  |",
            "    +-----+-----+",
            "2:4 |  1  |  3  |",
            "    +-----+-----+",
            "4:6 |  4  |  6  |",
            "    +-----+-----+",
            "6:8 |  5  |  7  |",
            "    +-----+-----+",
        )
    )


def test_pictures_of_other_tensors() -> None:
    assert "| 0,1 4,5 | 2,3 6,7 |" in Layout(CUBE, "x").show((4,))
    assert "| 0-7 |" in Layout(CUBE).show(()) and "| 0-7 |" in Layout(CUBE, None, None).show((3, 5))
    three = Layout(CUBE, "x", None, "y").show((2, 3, 4)).splitlines()
    assert three[1] == "[0:1]" and "| 0 4 | 1 5 |" in three[4] and three[6] == "[1:2]" and "| 2 6 | 3 7 |" in three[9]
    with pytest.raises(LayoutError, match="do not divide"):
        Layout(CUBE, "x").show((3,))


@quick
@given(layouts(), st.integers(0, 2))
def test_pictures_are_plain_and_name_every_rank(layout: Layout, factor: int) -> None:
    picture = layout.show([factor * layout.num_splits(dim) for dim in range(layout.ndim)])
    assert set(picture) <= set(string.printable) and not any(line != line.rstrip() for line in picture.splitlines())
    if factor and layout.grid.num_ranks <= 9:
        cells = [cell for line in picture.splitlines()[1:] if "|" in line for cell in line.split("|")[1:-1]]
        named = [rank for cell in cells for rank in _ranks(cell)]
        assert sorted(named) == list(range(layout.grid.num_ranks))


def _ranks(cell: str) -> Iterator[int]:
    for run in cell.split():
        first, _, last = run.partition("-")
        yield from range(int(first), int(last) + 1) if last else map(int, run.split(","))


def test_layouts_of_more_ranks_than_anyone_could_list() -> None:
    grid = Grid(dp=10**4, z=10**3, x=10**3, y=10**3)
    layout = Layout(grid, ("dp", "z", "y"), "x")
    shape = (10**11, 10**4)
    assert layout.shard_shape(shape) == (10, 10)
    assert layout.slices(grid.num_ranks - 1, shape) == (slice(10**11 - 10, 10**11), slice(9990, 10000))
    assert layout.mesh_axes == ("dp", "x", "z", "y")
