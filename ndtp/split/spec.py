"""The layout of an activation: the sizes of the whole, and the axes of the grid that split each dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.errors import warn
from ndtp.runtime.process_grid import ProcessGrid

Axes = tuple[str, ...]


@dataclass(frozen=True)
class ShardForm:
    """The way in which one split tensor lies, whatever its class is, without the tensor.

    Attributes:
        enter: makes a tensor with the sizes of the whole of a shard that lies so.
        shard: gives this rank's shard of another tensor, split or whole, to lie so.
    """

    enter: Callable[[Tensor], Tensor]
    shard: Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Context:
    """The facts that all split activations of one model share.

    Attributes:
        data: the axes over which the model is replicated and rows are the user's own (`dp`).  No activation's layout
            names them: a tensor that is whole is whole on its data-parallel rank.
        multiple: rows are padded to a multiple of this where a layer splits them.
        gathered: for each function that took a whole tensor, how often.
        losses: of a stock model, whose loss is that of the rows of all data-parallel ranks: what has `note_loss`, which
            is told of a loss that was taken so.
        attention: how queries of split sequences meet keys: "gather", "ring", "heads" or "auto", see
            `ndtp.algebra.attention_ways`.
        writes: how often memory was changed by writes that torch may not count, those of inference mode among them.
    """

    mesh: ProcessGrid
    data: Axes = ()
    multiple: int = 1
    gathered: dict[str, int] = field(default_factory=dict)
    losses: Any = None
    attention: str = "auto"
    writes: dict[int, int] = field(default_factory=dict)

    def note(self, who: str, spec: Spec, into_whole: bool = False) -> None:
        """Record that a function takes the whole of a split tensor, and warn of it once.

        Args:
            into_whole: the function writes to a tensor that every rank has whole.
        """
        key = f"{who} of what '{spec.origin}' gave"
        if not any(known.startswith(f"{who} of what ") for known in self.gathered):
            why, fix = "has no rule for", "ndtp.register_rule"
            if into_whole:
                why = "writes into a tensor that every rank has whole, beside"
                fix = "a function that gives a new tensor (x + y, torch.where, torch.cat)"
            warn(
                f"ndtp: {who} {why} {spec}, which '{spec.origin}' gave, and takes it whole, gathered\n"
                f"  fix: {fix}, see docs/models.md"
            )
        self.gathered[key] = self.gathered.get(key, 0) + 1


@dataclass(frozen=True)
class Spec:
    """The layout of one tensor on a grid.

    Attributes:
        sizes: of the whole.
        layout: the axes that split each dim; those of one rank are left out.
        padded: the size of each dim with its padding, which stands at its end.  A dim that no axis splits has none.
        sections: sizes of consecutive parts of the last dim, each of which is split by itself; none where it is one.
        origin: the module that gave the tensor, for reports.
    """

    context: Context
    sizes: tuple[int, ...]
    layout: Layout
    padded: tuple[int, ...]
    sections: tuple[int, ...] = ()
    origin: str = field(default="", compare=False)

    @property
    def dims(self) -> tuple[Axes, ...]:
        return self.layout.dims

    @property
    def axes(self) -> Axes:
        """All axes that split the tensor."""
        return self.layout.axes

    @property
    def mesh(self) -> ProcessGrid:
        return self.context.mesh

    @property
    def local(self) -> tuple[int, ...]:
        """The sizes of a rank's shard."""
        return tuple(size // self.layout.num_splits(dim) for dim, size in enumerate(self.padded))

    @property
    def split_dims(self) -> tuple[int, ...]:
        return tuple(dim for dim, axes in enumerate(self.dims) if axes)

    @property
    def is_padded(self) -> bool:
        return self.sizes != self.padded

    def here(self, dim: int) -> range:
        """Return the indices of a dim that this rank has, padding included."""
        count = self.padded[dim] // self.layout.num_splits(dim)
        start = self.mesh.grid.index(self.mesh.rank, self.dims[dim]) * count
        return range(start, start + count)

    def lying(self, dims: Sequence[Axes], padded: Sequence[int] | None = None) -> Spec:
        """The tensor with other axes at its dims; padding stays where a dim stays split."""
        if padded is None:
            padded = [was if axes else size for axes, was, size in zip(dims, self.padded, self.sizes, strict=True)]
        sections = self.sections if dims and dims[-1] == self.dims[-1] else ()
        return replace(self, layout=layout_of(self.mesh, tuple(dims)), padded=tuple(padded), sections=sections)

    def __str__(self) -> str:
        letters = [f"{size}" for size in self.sizes]
        return f"[{self.layout.label(letters)}]"


@lru_cache(maxsize=4096)
def _layout(grid: Grid, dims: tuple[Axes, ...]) -> Layout:
    return Layout(grid, *dims)


def layout_of(mesh: ProcessGrid, dims: Sequence[Axes]) -> Layout:
    """The layout with these axes at its dims, made once."""
    return _layout(mesh.grid, tuple(dims))


def spec_of(
    context: Context, sizes: Sequence[int], dims: Sequence[Axes], padded: Sequence[int] | None = None, origin: str = ""
) -> Spec:
    """A spec of a tensor of these sizes; sizes that do not divide are padded to the next that do."""
    layout = layout_of(context.mesh, dims)
    if padded is None:
        padded = layout.padded_shape(sizes)
    return Spec(context, tuple(sizes), layout, tuple(padded), origin=origin)
