"""Named schemes: the layouts of the documented table, on any grid, with every other axis on the rows."""

import pytest

from ndtp import Grid, LayoutError
from ndtp.algebra.schemes import SCHEMES, block_layouts, scheme_of


def texts(grid, scheme, axes=None):
    b = block_layouts(grid, scheme, axes)
    return [str(layout).strip("'") for layout in (b.input, b.up_weight, b.hidden, b.down_weight, b.output)]


@pytest.mark.parametrize(
    ("scheme", "grid", "axes", "expected"),
    [
        ("1d", Grid(x=8), None, ["None None", "x None", "None x", "None x", "None None"]),
        ("1d", Grid(z=2, x=2, y=2), None, ["None None", "(x y z) None", "None (x y z)", "None (x y z)", "None None"]),
        ("1d", Grid(dp=2, x=4), None, ["dp None", "x None", "dp x", "None x", "dp None"]),
        ("1d", Grid(tp=4), None, ["None None", "tp None", "None tp", "None tp", "None None"]),
        ("1d-sp", Grid(dp=2, tp=4), None, ["(dp tp) None", "tp None", "dp tp", "None tp", "(dp tp) None"]),
        ("3d", Grid(dp=4), None, ["dp None", "None None", "dp None", "None None", "dp None"]),
        ("1d", Grid(x=2, y=4), ("y",), ["x None", "y None", "x y", "None y", "x None"]),
        ("1d-sp", Grid(dp=2, x=4), None, ["(dp x) None", "x None", "dp x", "None x", "(dp x) None"]),
        ("2d", Grid(x=2, y=4), None, ["y x", "y x", "x y", "x y", "y x"]),
        ("2d", Grid(z=2, x=2, y=2), ("x", "y"), ["(z y) x", "y x", "(z x) y", "x y", "(z y) x"]),
        ("2d", Grid(tp0=2, tp1=4), ("tp0", "tp1"), ["tp1 tp0", "tp1 tp0", "tp0 tp1", "tp0 tp1", "tp1 tp0"]),
        ("2d-features", Grid(x=2, y=4), None, ["None (x y)", "y x", "None (y x)", "x y", "None (x y)"]),
        ("3d", Grid(z=2, x=2, y=2), None, ["(z y) x", "y (x z)", "(z x) y", "x (y z)", "(z y) x"]),
        ("3d", Grid(x=2, y=4), None, ["y x", "y x", "x y", "x y", "y x"]),
        ("3d", Grid(dp=2, z=2, x=2, y=1), None, ["(dp z y) x", "y (x z)", "(dp z x) y", "x (y z)", "(dp z y) x"]),
    ],
)
def test_layouts(scheme, grid, axes, expected):
    assert texts(grid, scheme, axes) == expected


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_ranks", [1, 4, 8, 12])
def test_every_scheme_makes_a_block_that_ends_as_it_began(scheme, num_ranks):
    for grid in Grid.all(num_ranks):
        if scheme.startswith("2d") and grid["z"] > 1:
            with pytest.raises(LayoutError, match="z=1"):
                block_layouts(grid, scheme)
            continue
        layouts = block_layouts(grid, scheme)
        up, down = layouts.plans()
        assert up.out == layouts.hidden == down.a and down.out == layouts.output == layouts.input


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_the_plainest_name_of_the_3d_scheme(num_ranks):
    """What the planner weighs are 3D's layouts; the name under which it answers must give them."""
    for grid in Grid.all(num_ranks, ("dp", "z", "x", "y")):
        named, split = vars(block_layouts(grid, scheme_of(grid))), vars(block_layouts(grid, "3d"))
        for name, layout in named.items():
            assert [*map(grid.nontrivial, layout.dims)] == [*map(grid.nontrivial, split[name].dims)], (grid, name)
    assert [scheme_of(Grid(**sizes)) for sizes in ({"dp": 4}, {"y": 4}, {"x": 4}, {"x": 2, "y": 2}, {"z": 4})] == [
        "1d-sp", "1d-sp", "2d", "2d", "3d"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "axes", "words"),
    [("4d", None, "3d"), ("2d", ("x",), "2 axes"), ("3d", ("x", "y", "q"), "3 axes"), ("1d", ("q",), "axes")],
)
def test_errors(scheme, axes, words):
    with pytest.raises(LayoutError, match=words):
        block_layouts(Grid(x=2, y=2), scheme, axes)


@pytest.mark.parametrize(
    ("grid", "scheme", "fix"),
    [
        (Grid(tp=4), "3d", "scheme='1d'"),
        (Grid(tp=4), "2d-features", "scheme='1d'"),
        (Grid(a=2, b=2), "2d", r"axes=\('a', 'b'\)"),
        (Grid(a=2, b=2), "1d", r"axes=\('a', 'b'\)"),
        (Grid(dp=2, a=2), "3d", "dp"),
    ],
    ids=str,
)
def test_a_grid_without_the_axes_of_the_scheme_is_an_error_with_the_fix(grid, scheme, fix):
    """Its axes would split rows as data parallelism does, and nothing else."""
    with pytest.raises(LayoutError, match=f"(?s)has none of them.*fix: .*{fix}"):
        block_layouts(grid, scheme)
