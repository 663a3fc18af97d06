"""The ranks that write or read files together: who they are, how they agree, and that nobody else writes there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ndtp.collectives.claims import claimed_by
from ndtp.collectives.cross_check import differing_among, gather_texts
from ndtp.collectives.labels import Label
from ndtp.errors import CheckpointError, CommunicationError
from ndtp.runtime.process_grid import ProcessGrid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def failure_of(step: Callable[[], object]) -> str:
    """Run a step, and return its error as a text, or "" if there is none.

    Errors of every class count.  The other ranks wait in the collective that follows, in which they hear of this one.
    """
    try:
        step()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Crew:
    """Ranks in one group; or this process alone.

    Args:
        group: None: alone.
        names: what errors call its members, in its order; the least of them writes what one rank writes.
        axes: what the group spans, for errors.

    Attributes:
        topic: what they are about to do, such as "save: run".
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        names: Sequence[int] = (0,),
        device_type: str = "cpu",
        axes: Sequence[str] = (),
    ) -> None:
        self.group, self.names, self.device_type, self.axes = group, list(names), device_type, tuple(axes)
        self.topic = "files"
        self.rank = self.names[0 if group is None else dist.get_rank(group)]

    @property
    def is_first(self) -> bool:
        return self.rank == min(self.names)

    def gather(self, x: object) -> dict[int, Any]:
        """Gather a JSON value from every rank; a collective."""
        if self.group is None:
            said = [json.dumps(x)]
        else:
            said = gather_texts(self.group, self.device_type, json.dumps(x), self._describe, self._label)
        return {rank: json.loads(text) for rank, text in zip(self.names, said, strict=True)}

    def differing(self, text: str) -> dict[int, str] | None:
        """Return every rank's text if the texts differ, else None; a collective."""
        if self.group is None:
            return None
        said = differing_among(self.group, self.device_type, text, self._describe, self._label)
        return None if said is None else dict(sorted(zip(self.names, said, strict=True)))

    @property
    def _label(self) -> Label:
        return Label((self.topic,), "agreement", "all_gather", self.axes)

    def _describe(self, axes: Sequence[str]) -> str:
        return f"rank {self.rank} waited for the others of {sorted(self.names)}"

    def agree(self, failure: str, frame: str = "{}") -> None:
        """Raise on all ranks the failures of some ranks; a collective.

        Raises:
            CheckpointError: names a rank, where not all say the same, and what it said.
        """
        by_rank = self.differing(failure) or {0: failure}
        for rank, text in by_rank.items():
            if text:
                raise CheckpointError(frame.format(f"rank {rank}: {text}" if len(by_rank) > 1 else text))

    def agree_on(self, text: str, what: str, fix: str) -> None:
        """Raise on all ranks where they say different things; a collective.

        Raises:
            CheckpointError: what each rank said.
        """
        by_rank = self.differing(text)
        if by_rank is not None:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in by_rank.items())
            raise CheckpointError(f"{what} different things: {said}\n  fix: {fix}")

    def raise_everywhere(self, failure: str, what: str) -> None:
        """Raise on all ranks an error of the machine, such as a full disk; a collective.

        Raises:
            CommunicationError: names a rank and what it said.
        """
        for rank, text in (self.differing(failure) or {0: failure}).items():
            if text:
                raise self.failed(rank, f"{what}; rank {rank}: {text}")

    def alone(self, step: Callable[[], T], what: str) -> T | None:
        """Run a step on the first rank, and raise its error, of whatever class, on all ranks; a collective.

        Returns:
            what the step returns, on the first rank.

        Raises:
            CommunicationError: names the first rank and what it said.
        """
        found: list[T] = []
        self.raise_everywhere(failure_of(lambda: found.append(step())) if self.is_first else "", what)
        return found[0] if found else None

    def gather_done(self, failure: str, done: Any, what: str) -> list[Any]:
        """Gather what each rank has done, a JSON value, in the order of ranks; a collective.

        Raises:
            CommunicationError: a rank has failed; names it and what it said.
        """
        said = sorted(self.gather([failure, done]).items())
        for rank, (text, _) in said:
            if text:
                raise self.failed(rank, f"{what}; rank {rank}: {text}")
        return [each for _, (_, each) in said]

    def failed(self, rank: int, text: str) -> CommunicationError:
        """The error of what a rank of these has said that it could not do."""
        error = CommunicationError(text)
        members = [0] if self.group is None else dist.get_process_group_ranks(self.group)
        error.how, error.ranks = "raised", (members[self.names.index(rank)],)
        return error

    def only_writer(self, folder: Path) -> str:
        """Return what forbids these ranks to write to a folder, on the first rank: other ranks are writing there.

        Two that write there at once, each as if alone, give their files the same names: who is faster loses them, and
        who fails leaves its peers elsewhere waiting.  A collective for nobody.
        """
        if not self.is_first or not dist.is_initialized():
            return ""
        ranks = [dist.get_rank()] if self.group is None else sorted(dist.get_process_group_ranks(self.group))
        others = claimed_by(str(Path(folder).resolve()), ranks)
        if not others:
            return ""
        return (
            f"{folder}: ranks {_some(others)} write their model there; that of ranks {_some(ranks)} would spoil it\n"
            "  fix: a folder for each; for stages of one model, give the stages instead of their modules: "
            "ndtp.checkpoint.save(stages, optimizer, folder), export_safetensors(stages, folder)"
        )


def crew_of(mesh: ProcessGrid | None) -> Crew:
    """The ranks of a grid."""
    if mesh is None or mesh.grid.num_ranks == 1:
        return Crew()
    axes = mesh.grid.nontrivial(mesh.grid.names)
    group = mesh.groups.group(axes)
    where: Any = mesh.groups.global_ranks
    names = [where.index(member) for member in dist.get_process_group_ranks(group)]
    return Crew(group, names, mesh.device_type, axes)


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{min(ranks)} to {max(ranks)} ({len(ranks)} of them)"
