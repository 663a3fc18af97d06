"""`Layout`: how a tensor lies on a grid.  An injective partial map from axes to dims, and nothing but data.

Source of the notion: Mesh-TensorFlow (Shazeer et al. 2018); the call form `over(...)` is MindSpore's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, ClassVar

from ndtp.algebra import html, picture
from ndtp.algebra.grid import Grid
from ndtp.errors import LayoutError

DimSpec = str | None | Sequence[str]
INTERLEAVED = "interleaved_parallel"


def subscript(axes: Sequence[str]) -> str:
    """Axes as the notation has them: `zy` for one-letter names, `(dp z)` otherwise."""
    return "".join(axes) if all(len(axis) == 1 for axis in axes) else f"({' '.join(axes)})"


def _axes_of(spec: DimSpec) -> tuple[str, ...]:
    if spec is None or spec == "None":
        return ()
    return (spec,) if isinstance(spec, str) else tuple(spec)


@dataclass(frozen=True, init=False)
class Layout:
    """The layout of a tensor: for each dim, the grid axes that split it, major to minor.

    `Layout(grid, ("z", "y"), "x")` splits dim 0 over z and then y, and dim 1 over x; `None` (or `"None"`) leaves a dim
    whole; an axis that is not named replicates.  `chunks=(dim, n)` asks for the local shard to be worked on in `n`
    micro-slices along `dim`; it changes no shard.

    Raises:
        LayoutError: an axis that the grid lacks, or that splits more than one dim.
    """

    grid: Grid
    dims: tuple[tuple[str, ...], ...]
    chunks: tuple[int, int] | None
    _splits: ClassVar[tuple[int, ...]]  # of each dim into how many parts: an instance's own, and no field

    def __init__(self, grid: Grid, *dims: DimSpec, chunks: tuple[int, int] | None = None) -> None:
        split = tuple(_axes_of(spec) for spec in dims)
        used = [axis for axes in split for axis in axes]
        for axis in used:
            if axis not in grid:
                raise LayoutError(f"Layout {_text(split)}: grid {grid} has no axis {axis!r}; axes: {', '.join(grid)}")
            if used.count(axis) > 1:
                raise LayoutError(f"Layout {_text(split)}: axis {axis} is named twice; an axis splits at most one dim")
        if chunks is not None and not (0 <= chunks[0] < len(split) and chunks[1] >= 1):
            raise LayoutError(f"Layout {_text(split)}: chunks={chunks} does not name a dim and a count of at least 1")
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "dims", split)
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "_splits", tuple([grid.size(axes) for axes in split]))

    @classmethod
    def parse(cls, grid: Grid, text: str) -> Layout:
        """Read the einops-like form, one word or bracket a dim: `"(z y) x"`, `"None (x y)"`; `()` is `None`.

        It reads what `str(layout)` prints.

        Raises:
            LayoutError: brackets that do not match, or axes that make no layout.
        """
        text = text.strip().strip("'\"")
        words = re.findall(r"\([^()]*\)|[^\s(),]+", text)
        if re.sub(r"\([^()]*\)|[^\s(),]+|[\s,]", "", text):
            raise LayoutError(f"Layout {text!r}: brackets do not match; write it like '(z y) x'")
        return cls(grid, *(re.findall(r"[^\s,]+", word[1:-1]) if word[0] == "(" else word for word in words))

    @staticmethod
    def over(sizes: Sequence[int], names: Sequence[str]) -> Callable[..., Layout]:
        """MindSpore's two-step form: `lay = Layout.over((2, 4), ("x", "y")); lay("None", ("x", "y"))`.

        A last alias `"interleaved_parallel"` is no axis of the grid: its size is the number of micro-slices into which
        the local shard is cut along the dim that names it, so that communication and computation overlap.

        Raises:
            LayoutError: as many sizes as names are needed; `interleaved_parallel` must be the last.
        """
        sizes, names = tuple(sizes), tuple(names)
        if len(sizes) != len(names) or len(set(names)) != len(names) or INTERLEAVED in names[:-1]:
            raise LayoutError(
                f"Layout.over({sizes}, {names}): give each name once, with a size, and {INTERLEAVED!r} only as the last"
            )
        count = sizes[-1] if INTERLEAVED in names else 1
        num_axes = len(names) - (INTERLEAVED in names)
        grid = Grid(dict(zip(names[:num_axes], sizes[:num_axes], strict=True)))

        def layout(*dims: DimSpec) -> Layout:
            split = [_axes_of(spec) for spec in dims]
            cut = [dim for dim, axes in enumerate(split) if INTERLEAVED in axes]
            if len(cut) > 1 or any(INTERLEAVED in axes[:-1] for axes in split) or (cut and INTERLEAVED not in names):
                raise LayoutError(
                    f"Layout {_text(split)}: {INTERLEAVED!r} must be an alias of the grid and may be named once, as "
                    "the minor axis of a dim"
                )
            return Layout(
                grid,
                *(tuple(axis for axis in axes if axis != INTERLEAVED) for axes in split),
                chunks=(cut[0], count) if cut else None,
            )

        return layout

    # ------------------------------------------------------------------------------------------------ structure

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split a dim."""
        return tuple(axis for axes in self.dims for axis in axes)

    def dim_of(self, axis: str) -> int | None:
        """The dim that an axis splits; None where it replicates."""
        return next((dim for dim, axes in enumerate(self.dims) if axis in axes), None)

    def num_splits(self, dim: int) -> int:
        return self._splits[dim]

    def with_dims(self, *dims: DimSpec) -> Layout:
        """Another layout over the same grid."""
        return Layout(self.grid, *dims)

    def refine(self, **axes: Sequence[int]) -> Layout:
        """Return the layout of the same shards over `grid.refine(**axes)`."""
        parts = {axis: Grid.parts(axis, len(sizes)) for axis, sizes in axes.items()}
        dims = (tuple(part for axis in dim for part in parts.get(axis, (axis,))) for dim in self.dims)
        return Layout(self.grid.refine(**axes), *dims)

    # --------------------------------------------------------------------------------------------------- shards

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The least shape, dim by dim, that divides evenly."""
        self._check_ndim(shape)
        return tuple(-(-size // self.num_splits(dim)) * self.num_splits(dim) for dim, size in enumerate(shape))

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of every rank's shard of a tensor of the global `shape`.

        Raises:
            LayoutError: a dim that its axes do not divide; names the nearest size that they do.
        """
        self._check_ndim(shape)
        for dim, size in enumerate(shape):
            if size % self.num_splits(dim):
                raise LayoutError(
                    f"Layout {self}: dim {dim} of {tuple(shape)} has size {size}, which its axes "
                    f"{' '.join(f'{axis}={self.grid[axis]}' for axis in self.dims[dim])} do not divide\n"
                    f"  fix: pad dim {dim} to {self.padded_shape(shape)[dim]}, or split it by fewer ranks"
                )
        return tuple(size // self.num_splits(dim) for dim, size in enumerate(shape))

    def slices(self, rank: int, shape: Sequence[int], uneven: bool = False) -> tuple[slice, ...]:
        """Return the slices of the dense tensor, of the global `shape`, that the shard of `rank` holds.

        With `uneven=True` a dim need not divide: each axis, major to minor, cuts what it is given into blocks of
        ceil(size / ranks), so that the last ones are shorter or empty.  That is the rule of DTensor.

        Raises:
            LayoutError: as `shard_shape`, unless `uneven`.
        """
        self._check_ndim(shape)
        if not uneven:
            self.shard_shape(shape)
        coordinate = self.grid.coordinate(rank)
        result = []
        for axes, size in zip(self.dims, shape, strict=True):
            start = 0
            for axis in axes:
                block = -(-size // self.grid[axis])
                offset = min(block * coordinate[axis], size)
                start, size = start + offset, min(block, size - offset)
            result.append(slice(start, start + size))
        return tuple(result)

    def shard(self, dense: Any, rank: int) -> Any:
        """The shard of `rank`: a view of a NumPy array or a torch tensor."""
        block = (*self.slices(rank, dense.shape), ...)  # the ellipsis keeps a NumPy array of no dims an array
        return dense[block]

    def from_shards(self, shards: Sequence[Any]) -> object:
        """The dense array (NumPy or torch) of which `shards[rank]` is the shard of every rank.

        Raises:
            LayoutError: one shard a rank is needed, all of one shape; replicas that differ are named.
        """
        if len(shards) != self.grid.num_ranks or len({tuple(shard.shape) for shard in shards}) != 1:
            raise LayoutError(f"Layout {self}: give {self.grid.num_ranks} shards of one shape, one a rank")
        self._check_ndim(shards[0].shape)
        shape = tuple(size * self.num_splits(dim) for dim, size in enumerate(shards[0].shape))
        first = shards[0]
        dense = first.new_empty(shape) if hasattr(first, "new_empty") else type(first)(shape, first.dtype)
        written: dict[tuple[int, ...], int] = {}
        for rank, shard in enumerate(shards):
            where = self.slices(rank, shape)
            source = written.setdefault(tuple(s.start for s in where), rank)
            if source == rank:
                dense[where] = shard
            elif not bool(((shard == shards[source]) | ((shard != shard) & (shards[source] != shards[source]))).all()):
                raise LayoutError(f"Layout {self}: ranks {source} and {rank} hold replicas that differ")
        return dense

    from_slices = from_shards  # its name before it was said what it takes

    # -------------------------------------------------------------------------------------------------- DTensor

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The order of mesh dims on which DTensor can express this layout: rank order, but x before y, and z last.

        DTensor splits a dim by mesh dims in mesh order, so `K_xz` needs x before z and `M_zy` z before y.  The order
        is the default (dp, x, y, z) where that fits, else the nearest one that does.
        """
        return common_mesh_axes([self])

    @property
    def placements(self) -> tuple[Any, ...]:
        """DTensor placements on a mesh whose dims are `mesh_axes`."""
        return self.placements_on(self.mesh_axes)

    def placements_on(self, mesh_axes: Sequence[str]) -> tuple[Any, ...]:
        """DTensor placements on a mesh with the given order of dims.

        Raises:
            LayoutError: that order of mesh dims cannot express the order of axes in a dim.
        """
        from torch.distributed.tensor import Replicate, Shard

        for dim, axes in enumerate(self.dims):
            split = self.grid.nontrivial(axes)
            if [axis for axis in mesh_axes if axis in split] != list(split):
                raise LayoutError(
                    f"Layout {self}: DTensor splits dim {dim} in the order of mesh dims ({' '.join(mesh_axes)}), which "
                    f"cannot express ({' '.join(axes)})\n  fix: a mesh over ({' '.join(self.mesh_axes)})"
                )
        owners = [self.dim_of(axis) for axis in mesh_axes]
        return tuple(Replicate() if dim is None else Shard(dim) for dim in owners)

    @classmethod
    def from_placements(cls, grid: Grid, mesh_axes: Sequence[str], placements: Sequence[Any], ndim: int) -> Layout:
        """The layout of a DTensor with `placements` on a mesh whose dims are `mesh_axes`.

        Raises:
            LayoutError: a placement other than Shard and Replicate, or a dim that the tensor lacks.
        """
        dims: list[tuple[str, ...]] = [() for _ in range(ndim)]
        for axis, placement in zip(mesh_axes, placements, strict=True):
            if type(placement).__name__ == "Shard":
                if not -ndim <= placement.dim < ndim:
                    raise LayoutError(f"placement {placement} over axis {axis} names no dim of a tensor of {ndim} dims")
                dims[placement.dim % ndim] += (axis,)
            elif not placement.is_replicate():
                raise LayoutError(f"placement {placement} over axis {axis} has no layout; Shard and Replicate have")
        return cls(grid, *dims)

    # ------------------------------------------------------------------------------------------------- printing

    def label(self, letters: Sequence[str]) -> str:
        """Return the layout in letters: `M_zy, K_x`."""
        return ", ".join(
            f"{letter}_{subscript(axes)}" if axes else letter for letter, axes in zip(letters, self.dims, strict=True)
        )

    def show(self, shape: Sequence[int]) -> str:
        """A picture in plain ASCII of which ranks hold which block of a tensor of the global `shape`.

        Raises:
            LayoutError: a dim that its axes do not divide.
        """
        held = self.shard_shape(shape)
        owners: dict[tuple[picture.Edge, ...], list[int]] = {}
        for rank in range(self.grid.num_ranks):
            owners.setdefault(tuple((s.start, s.stop) for s in self.slices(rank, shape)), []).append(rank)
        return picture.blocks(f"{self} of {tuple(shape)} on grid {self.grid}; every rank holds {held}", owners)

    def _check_ndim(self, shape: Sequence[int]) -> None:
        if len(shape) != self.ndim:
            raise LayoutError(f"Layout {self} has {self.ndim} dims, the shape {tuple(shape)} has {len(shape)}")

    def __str__(self) -> str:
        return _text(self.dims)

    def _repr_html_(self) -> str:
        return html.layout_picture(self, f"{self} on grid {self.grid};")

    def __repr__(self) -> str:
        chunks = f", chunks={self.chunks}" if self.chunks else ""
        return f"Layout({self.grid}: {self}{chunks})"


def _text(dims: Sequence[Sequence[str]]) -> str:
    """The form that `Layout.parse` reads."""
    words = [axes[0] if len(axes) == 1 else f"({' '.join(axes)})" if axes else "None" for axes in dims]
    return "'" + " ".join(words) + "'"


def default_mesh_axes(grid: Grid) -> tuple[str, ...]:
    """The order of mesh dims where no layout asks for another: rank order, but x before y, and z last, (dp, x, y, z).

    So a table of `K_xyz` lies on grids of every rank order, such as those that a planner gives for the sake of links.
    """
    order = sorted(grid, key=lambda axis: axis == "z")
    if "x" in order and "y" in order and order.index("x") > order.index("y"):
        order[order.index("x")], order[order.index("y")] = "y", "x"
    return tuple(order)


def common_mesh_axes(layouts: Sequence[Layout]) -> tuple[str, ...]:
    """One order of mesh dims that expresses every layout, for tensors that share a DeviceMesh.

    The order is `default_mesh_axes` as far as the layouts leave it free.

    Raises:
        LayoutError: two layouts that ask for opposite orders.
    """
    grid = layouts[0].grid
    preferred = default_mesh_axes(grid)
    minors_after = TopologicalSorter({axis: set[str]() for axis in preferred})
    for layout in layouts:
        for axes in layout.dims:
            for major, minor in pairwise(grid.nontrivial(axes)):
                minors_after.add(minor, major)
    try:
        minors_after.prepare()
    except CycleError:
        raise LayoutError(
            f"layouts {', '.join(map(str, layouts))} ask for opposite orders of mesh dims; no one mesh expresses them "
            "all\n  fix: name the axes of a dim in the same order everywhere"
        ) from None
    order: list[str] = []
    ready: set[str] = set()
    while minors_after.is_active():
        ready |= set(minors_after.get_ready())
        order.append(min(ready, key=preferred.index))
        ready.remove(order[-1])
        minors_after.done(order[-1])
    return tuple(order)
