"""Named schemes: the layouts of a MatMul -> activation -> MatMul block in 1D, 2D and 3D.  Pure.

A scheme is nothing but five layouts; the rule of `ndtp.algebra.roles` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.steps import Dims
from ndtp.errors import LayoutError

TENSOR_AXES = ("x", "y", "z")
OTHER_AXES = ("dp", "e")  # by their names of data and of experts: no scheme splits weights over them


@dataclass(frozen=True)
class BlockLayouts:
    """Layouts of a block: activations are [tokens, features], weights [out, in] as `nn.Linear` has them."""

    input: Layout
    up_weight: Layout
    hidden: Layout
    down_weight: Layout
    output: Layout

    def plans(self, name: str = "mlp", **options: Any) -> tuple[MatMulPlan, MatMulPlan]:
        """The plans of the two products; `options` as for `MatMulPlan`: `regather`, `chunks`."""
        options["transpose_b"] = True
        up = MatMulPlan(self.input, self.up_weight, self.hidden, name=f"{name}.up", **options)
        down = MatMulPlan(self.hidden, self.down_weight, self.output, name=f"{name}.down", **options)
        return up, down

    def refine(self, **axes: Sequence[int]) -> BlockLayouts:
        """Return the layouts of the same shards over `grid.refine(**axes)`."""
        each = (self.input, self.up_weight, self.hidden, self.down_weight, self.output)
        return BlockLayouts(*(layout.refine(**axes) for layout in each))


def known_scheme(scheme: str) -> None:
    """Refuse the name of a scheme that does not exist.

    Raises:
        LayoutError: there is none; with the one that was meant.
    """
    if scheme in SCHEMES:
        return
    said = "".join(filter(str.isalnum, str(scheme).lower()))
    meant = {"".join(filter(str.isalnum, name)): name for name in SCHEMES}.get(said) or MEANT.get(said)
    fix = f"\n  fix: scheme={meant!r}" if meant else ""
    raise LayoutError(f"scheme {scheme!r} is not one of {', '.join(SCHEMES)}{fix}")


def block_layouts(grid: Grid, scheme: str, axes: Sequence[str] | None = None) -> BlockLayouts:
    """The layouts of a block under a named scheme.

    | scheme | input | up weight | hidden | down weight |
    |---|---|---|---|---|
    | `1d` | `[M, K]` | `[N_t, K]` | `[M, N_t]` | `[N, K_t]` |
    | `1d-sp` (sequence parallel) | `[M_t, K]` | `[N_t, K]` | `[M, N_t]` | `[N, K_t]` |
    | `2d` (row split) | `[M_y, K_x]` | `[N_y, K_x]` | `[M_x, N_y]` | `[N_x, K_y]` |
    | `2d-features` | `[M, K_xy]` | `[N_y, K_x]` | `[M, N_yx]` | `[N_x, K_y]` |
    | `3d` | `[M_zy, K_x]` | `[N_y, K_xz]` | `[M_zx, N_y]` | `[N_x, K_yz]` |

    The output lies as the input.  Every other axis of the grid (`dp`, say) splits the rows, in front.

    Args:
        axes: the axes to use.  1D: t, all of them together, default every one of x, y, z that the grid has.  2D and 3D:
            those that play x, y (and z), default the ones of these names; 2D then wants z=1.  In 1D the only axis of a
            grid, beside dp and e, is the axis, whatever its name.

    Raises:
        LayoutError: an unknown scheme, axes that are not there, a grid that has none of the scheme's axes, or a 2D
            scheme on a grid with z > 1.
    """
    known_scheme(scheme)
    count = {"1d": None, "2d": 2, "3d": 3}[scheme[:2]]
    if axes is None:
        named = [axis if axis in grid else None for axis in TENSOR_AXES]
        used = named[:count] if any(named) else _named_otherwise(grid, scheme, count)
        if count == 2 and named[2] and grid["z"] > 1:
            raise LayoutError(
                f"scheme {scheme!r} uses the axes x and y, and grid {grid} has z={grid['z']}\n"
                f"  fix: scheme '3d', a grid with z=1, or axes=('x', 'y') to split rows over z as data parallelism does"
            )
    else:
        if any(axis not in grid for axis in axes) or count not in (None, len(axes)):
            raise LayoutError(
                f"scheme {scheme!r}: axes={tuple(axes)} does not name "
                f"{'axes' if count is None else f'{count} axes'} of grid {grid}"
            )
        used = list(axes)
    rows = tuple(axis for axis in grid if axis not in used and (axes is not None or axis not in TENSOR_AXES))
    groups = [tuple(axis for axis in used if axis)] if count is None else [(axis,) if axis else () for axis in used]
    layouts = SCHEMES[scheme](*groups)
    # The rows of the three activations are split by the other axes first.
    return BlockLayouts(
        *(
            Layout(grid, rows + dims[0], *dims[1:]) if i % 2 == 0 else Layout(grid, *dims)
            for i, dims in enumerate(layouts)
        )
    )


def _named_otherwise(grid: Grid, scheme: str, count: int | None) -> Sequence[str | None]:
    """The axes of a grid that has none of the scheme's: in 1D the only one; none of a grid for data or experts alone.

    Raises:
        LayoutError: there are others, over which a user who named them so wants to split.
    """
    others = [axis for axis in grid if axis not in (*TENSOR_AXES, *OTHER_AXES)]
    if not grid.nontrivial(others):
        return [None] * (count or 0)
    if count is None and len(grid.nontrivial(others)) == 1:
        return [*grid.nontrivial(others)]
    names = ("x", "y", "z")[: count or 1]
    fix = f"axes={tuple(others)!r}" if count in (None, len(others)) else f"Grid({', '.join(f'{n}=..' for n in names)})"
    also = " or scheme='1d' or '1d-sp'," if len(others) == 1 else ""
    raise LayoutError(
        f"scheme {scheme!r} splits over axes named {', '.join(names)}, and grid {grid} has none of them: nothing would "
        f"be split\n  fix: {fix},{also} or the name dp for an axis that splits rows alone"
    )


def scheme_of(grid: Grid) -> str:
    """The scheme that uses all of a grid's axes x, y and z, by the plainest of its names.

    All of these are the 3D scheme with axes of one rank; 1D is the one in which y alone splits.
    """
    x, z = (grid[axis] if axis in grid else 1 for axis in "xz")
    return "3d" if z > 1 else "1d-sp" if x == 1 else "2d"


Axes = tuple[str, ...]


def _one(t: Axes) -> tuple[Dims, ...]:
    return ((), ()), (t, ()), ((), t), ((), t), ((), ())


def _one_sequence(t: Axes) -> tuple[Dims, ...]:
    return (t, ()), (t, ()), ((), t), ((), t), (t, ())


def _two_features(x: Axes, y: Axes) -> tuple[Dims, ...]:
    return ((), x + y), (y, x), ((), y + x), (x, y), ((), x + y)


def _three(x: Axes, y: Axes, z: Axes = ()) -> tuple[Dims, ...]:
    return (z + y, x), (y, x + z), (z + x, y), (x, y + z), (z + y, x)


SCHEMES: dict[str, Callable[..., tuple[Dims, ...]]] = {
    "1d": _one,
    "1d-sp": _one_sequence,
    "2d": _three,
    "2d-features": _two_features,
    "3d": _three,
}
MEANT = {  # by what other libraries and papers call them
    "megatron": "1d", "tp": "1d", "tensor": "1d", "sp": "1d-sp", "sequence": "1d-sp", "megatronsp": "1d-sp",
    "summa": "2d", "cube": "3d", "agarwal": "3d",
}  # fmt: skip


def unused_axes(axes: Mapping[str, int], scheme: str) -> list[str]:
    """Return the axes that no scheme knows by name: rows alone would be split over them, as over dp.

    The only axis of a 1D scheme, beside dp and e, has any name.
    """
    others = [axis for axis, size in axes.items() if axis not in (*TENSOR_AXES, *OTHER_AXES) and size > 1]
    is_the_only = scheme.startswith("1d") and len(others) == 1 and not any(axis in TENSOR_AXES for axis in axes)
    return [] if is_the_only else others


def usual_scheme(axes: Mapping[str, int]) -> str:
    """The scheme that axes suggest: 3D where there is z, 2D on a square, 1D sequence parallel on a line."""
    used = [axis for axis in TENSOR_AXES if axes.get(axis, 1) > 1]
    return "3d" if "z" in used else "2d" if len(used) == 2 else "1d-sp"
