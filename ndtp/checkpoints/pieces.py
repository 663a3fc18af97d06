"""The pieces of a model that is written or read as one: a module on a grid, or stages on grids of their own.

A rank that has several stages is as several ranks that have one each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from ndtp.errors import CheckpointError
from ndtp.models.state_entries import Entry, entries_of, mesh_of_model
from ndtp.runtime.crew import Crew, crew_of
from ndtp.runtime.process_grid import ProcessGrid


@dataclass
class Piece:
    """A part of a model, on a grid.

    Attributes:
        index: of how many there are of the whole model.
        known_as: key -> the key of the same tensor in an earlier piece.
        shares_names: a name that an earlier piece has, too, is the same tensor; else it is refused.
        elsewhere: of the keys by which `entries` go, those that an earlier piece writes.
    """

    module: nn.Module
    mesh: ProcessGrid | None
    index: int = 0
    known_as: Mapping[str, str] = field(default_factory=dict)
    shares_names: bool = False
    elsewhere: set[str] = field(default_factory=set)
    _names: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.rank

    def entries(self) -> list[Entry]:
        """Return the entries of the module's state dict; a tensor that an earlier piece has goes by its keys first."""
        found = entries_of(self.module, self.mesh)
        return [entry._replace(keys=self._names.get(entry.keys[0], entry.keys)) for entry in found]


class Staged(Protocol):
    """A stage of a pipeline."""

    def whole(self, stages: Sequence[Any]) -> Whole: ...


class Whole:
    """A model, of which this rank has these pieces.

    Attributes:
        crew: the ranks that have all of it together.
        count: of pieces, on all ranks.
        settling: called when all pieces have got their first values: what makes equal what they share.
        keys: of every tensor of the whole model, of each all keys.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        crew: Crew,
        count: int = 1,
        settling: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.pieces, self.crew, self.count = list(pieces), crew, count
        self.settling = settling
        self.keys: list[tuple[str, ...]] = []

    def meet(self, what: str, one_folder: bool = False) -> None:
        """Learn the names of what others have.  A collective, where there are others.

        Args:
            one_folder: ranks write to the same one, which `what` names; those of several stages always do.

        Raises:
            CheckpointError: the ranks are about to do different things, or lack a piece, or two pieces have other
                tensors under the same name; the same on every rank.
        """
        self.crew.topic = what
        said: dict[int, list[Entry]] = {piece.index: piece.entries() for piece in self.pieces}
        by_rank = self.crew.differing(what) if one_folder or self.count > 1 else None
        if by_rank is not None:
            raise CheckpointError(
                f"ranks of one model are about to do different things: {'; '.join(dict.fromkeys(by_rank.values()))}\n"
                "  fix: one folder for all"
            )
        if self.count == 1:
            self.keys = [entry.keys for piece in self.pieces for entry in said[piece.index]]
            return
        every = self.per_piece(
            lambda piece: ([(e.keys, e.dense) for e in said[piece.index]], dict(piece.known_as), piece.shares_names)
        )
        missing = sorted(set(range(self.count)) - set(every))
        if missing:
            raise CheckpointError(f"{what}: stages {missing} are missing\n  fix: on each rank all stages that it has")
        known: dict[str, tuple[int, tuple[str, ...], tuple[int, ...]]] = {}
        for index, (entries, known_as, shares_names) in sorted(every.items()):
            for keys, dense in ((tuple(keys), tuple(dense)) for keys, dense in entries):
                there = next((known[k] for key in keys for k in (known_as.get(key, key),) if k in known), None)
                first, theirs, shape = there or (index, keys, dense)
                if first != index and (shape != dense or not (shares_names or set(keys) & set(known_as))):
                    raise CheckpointError(
                        f"{what}: stages {first} and {index} both have '{keys[0]}', {shape} and {dense}\n"
                        "  fix: names of their own, such as those of the layers in the whole model"
                    )
                names = (*theirs, *(key for key in keys if key not in theirs))
                known |= dict.fromkeys(names, (first, names, shape))
        self.keys = list(dict.fromkeys(names for _, names, _ in known.values()))
        for piece in self.pieces:
            for entry in said[piece.index]:
                first, names, _ = known[entry.keys[0]]
                piece._names[entry.keys[0]] = names
                piece.elsewhere |= {names[0]} if first != piece.index else set()

    def per_piece(self, said: Callable[[Piece], Any]) -> dict[int, Any]:
        """Return what the first rank of each piece says, in JSON, by the piece's number; a collective with several
        pieces.
        """
        if self.count == 1:
            return {piece.index: said(piece) for piece in self.pieces}
        every = self.crew.gather([(piece.index, said(piece)) for piece in self.pieces if piece.rank == 0])
        return {index: x for each in every.values() for index, x in each}


def whole_of(model: nn.Module | Staged | Sequence[Staged]) -> Whole:
    """Return the whole of a module on any grid, or on none, or of the pipeline stages that this rank has."""
    if isinstance(model, nn.Module):
        mesh = mesh_of_model(model)
        return Whole([Piece(model, mesh)], crew_of(mesh))
    stages = list(model) if isinstance(model, Sequence) else [model]
    if not stages or not all(hasattr(stage, "whole") for stage in stages):
        raise CheckpointError(f"{model!r:.100} is no module, nor are these stages of a pipeline")
    return stages[0].whole(stages)
