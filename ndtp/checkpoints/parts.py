"""Boxes of a dense tensor: those that a rank has, which of them it writes, how they are filled from those in files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.errors import CheckpointError
from ndtp.models.state_entries import Entry
from ndtp.runtime.arrival import is_plain, stored_shape
from ndtp.runtime.halves import laid_sizes
from ndtp.runtime.process_grid import ProcessGrid

Shape = tuple[int, ...]


class Part(NamedTuple):
    """A tensor of the dense shape, of which this rank has boxes; padding is in none of them."""

    entry: Entry
    mesh: ProcessGrid | None

    @classmethod
    def of(cls, x: Any, mesh: ProcessGrid | None) -> Part:
        """Return the part of a tensor that is in no state dict of a model: whole on every rank, or a DTensor."""
        dense, layout, shape = tuple(x.shape), None, tuple(stored_shape(x))
        real = laid_sizes(dense, len(shape))
        if not is_plain(x) and mesh is not None:
            layout, x = Layout.from_placements(mesh.grid, mesh.mesh_axes, x.placements, len(shape)), x._local_tensor
        return cls(Entry((), x.detach(), layout, shape, real, dense), mesh)

    @property
    def shape(self) -> Shape:
        return self.entry.dense

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.local.dtype

    def boxes(self) -> list[tuple[Shape, Tensor]]:
        """Return the start of each box, and its memory."""
        found = self.entry.boxes(0 if self.mesh is None else self.mesh.rank)
        return [(start, box) for start, box in found if box.numel() or 0 in self.shape]

    def is_written_here(self, turn: int) -> bool:
        """Return whether this rank writes the boxes, of the ranks that have the same ones; the choice rotates with
        `turn`.
        """
        if self.mesh is None:
            return True
        grid, layout = self.mesh.grid, self.entry.layout
        replicas = [axis for axis in grid if layout is None or axis not in layout.axes]
        return grid.index(self.mesh.rank, replicas) == turn % grid.size(replicas)


class Source(Protocol):
    """A box of a tensor in a file."""

    @property
    def key(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def offset(self) -> Shape: ...

    def read(self, part: Sequence[slice], into: Tensor | None) -> None: ...


@dataclass
class Laid:
    """A tensor in the files of a checkpoint, box by box."""

    dtype: torch.dtype
    shape: Shape
    boxes: list[Any] = field(default_factory=list)

    def fill(self, key: str, part: Part) -> None:
        """This rank's boxes, from the files.

        Raises:
            CheckpointError: the files lack some of it, or are not what was written; names the key and the file.
        """
        for start, box in part.boxes():
            filled = 0
            for source, theirs, mine in self._overlaps(start, tuple(box.shape)):
                source.read(theirs, box[mine])
                filled += math.prod(each.stop - each.start for each in theirs)
            if filled != box.numel():
                raise CheckpointError(f"'{key}': the files have {filled} of {box.numel()} elements of {self.shape}")

    def _overlaps(self, start: Shape, shape: Shape) -> Iterator[tuple[Source, tuple[slice, ...], tuple[slice, ...]]]:
        """The boxes of files that a box has a part in: of each where that is, there and here."""
        for source in self.boxes:
            both = [
                slice(max(a, b), min(a + n, b + m))
                for a, n, b, m in zip(start, shape, source.offset, source.shape, strict=True)
            ]
            if all(each.stop > each.start for each in both):
                theirs, mine = (
                    tuple(slice(each.start - at, each.stop - at) for each, at in zip(both, origin, strict=True))
                    for origin in (source.offset, start)
                )
                yield source, theirs, mine


def laid_out(sources: Sequence[Source]) -> dict[str, Laid]:
    """The tensors of a checkpoint by key, put together of what its files have.

    Raises:
        CheckpointError: boxes of a tensor that are no parts of the same one.
    """
    found: dict[str, Laid] = {}
    for source in sources:
        end = tuple(a + n for a, n in zip(source.offset, source.shape, strict=True))
        laid = found.setdefault(source.key, Laid(source.dtype, end))
        if laid.dtype != source.dtype or len(laid.shape) != len(end):
            raise CheckpointError(f"'{source.key}': its boxes are of several dtypes or numbers of dims")
        laid.shape = tuple(map(max, laid.shape, end))
        laid.boxes.append(source)
    for key, laid in found.items():
        if sum(math.prod(each.shape) for each in laid.boxes) != math.prod(laid.shape):
            raise CheckpointError(f"'{key}': its boxes do not make up a tensor of {laid.shape}")
    return found
