"""`NamedRead`: what waits for other ranks while torch's own collectives bring a tensor of a grid together has a name.

Code that sums, prints or gathers a parameter on one rank alone waits for ranks that never come to it.  They learn of it
at their next point (`ndtp.runtime.points`), within a second; and the rank that waits says for whom.

Ranks that read in different orders, over a set of parameters, wait for nobody: their collectives bring parts of
different parameters together.  So the order of reads is compared at the next point of a model, too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor

from ndtp.collectives.flight import DONE, NOTE, STARTED, WAITED, FlightEntry, Note
from ndtp.collectives.labels import Label
from ndtp.collectives.own_presence import presence
from ndtp.collectives.watch import failure
from ndtp.runtime.caller import caller
from ndtp.runtime.dtensor_rules import lacks_rule
from ndtp.runtime.facts import Fact

_MOST = 1000  # reads that are kept by name


class _Reads:
    """The reads of one thread since they were last taken, of tensors that are split over the same axes of one mesh."""

    def __init__(self) -> None:
        self.last: list[str] = []
        self.count = 0

    def note(self, what: str) -> None:
        if len(self.last) >= _MOST:  # of a program that calls no model
            what += f", behind others of a hash {crc32(repr(self.last).encode()):08x}"
            self.last = []
        self.last.append(what)
        self.count += 1


# By thread, and by axes and the hash of a mesh: torch's caches give results the mesh of an earlier grid that is equal.
_READS: WeakKeyDictionary[Any, dict[tuple[int, tuple[str, ...]], _Reads]] = WeakKeyDictionary()


def reads_since(mesh: Any, axes: Collection[str]) -> list[tuple[int, str]]:
    """Return what this thread has read of tensors on a mesh since it last asked: a number, and what it was.

    Args:
        axes: those over which a tensor must be split, or ranks may read it that others leave alone.
    """
    if not _READS or not (own := _READS.get(me := caller())):
        return []
    found: list[tuple[int, str]] = []
    for key in [key for key in own if key[0] == hash(mesh)]:
        reads = own.pop(key)
        if {*axes} <= {*key[1]}:
            found += list(enumerate(reads.last, reads.count - len(reads.last) + 1))
    if not own:
        del _READS[me]  # most calls find that nobody has read anything
    return found


def facts_of_reads(reads: Sequence[tuple[int, str]], rows: tuple[str, ...]) -> list[Fact]:
    """Return reads, each as a fact that ranks with the same rows have alike."""
    since = "of split tensors since the last call or backward"
    return [Fact(f"read {number} {since}", what, rows) for number, what in reads]


class NamedRead:
    """A collective on a DTensor, inside of which this rank waits for others.

    Args:
        dtensor: whose parts ranks have; nothing is noted where every rank has the whole.
        what: the operation; `name`: that of the parameter.

    Raises:
        CommunicationError: says who did not come, in the place of torch's error of the process group.
    """

    __slots__ = ("_dtensor", "_entry", "_what")

    def __init__(self, dtensor: Any, what: str, name: str) -> None:
        self._dtensor, self._what = dtensor, (what, name or "a parameter")
        self._entry: FlightEntry | None = None

    def __enter__(self) -> None:
        here = None if torch.compiler.is_compiling() else presence()
        split = _split_dims(self._dtensor)
        mesh = self._dtensor.device_mesh
        is_fake = isinstance(self._dtensor._local_tensor, FakeTensor)
        if here is not None and split and not is_fake and mesh.get_coordinate() is not None:
            axes = tuple([_names(mesh)[dim] for dim in split])
            what, name = self._what
            waits = mesh.device_type == "cpu"
            note = Note((name,), "read", what, axes, "", _peers(mesh, split), waits=waits)
            self._entry = here.flight.start(note, 0)
            self._entry[WAITED] = self._entry[STARTED]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._entry is None:
            return
        # torch's errors of a process group; others, such as a lack of memory, are what they are.
        lost = error if type(error) is RuntimeError or isinstance(error, dist.DistError) else None
        if lost is None or lacks_rule(lost):
            self._entry[DONE] = time.monotonic()
            key = hash(self._dtensor.device_mesh), self._entry[NOTE].axes
            _READS.setdefault(caller(), {}).setdefault(key, _Reads()).note("{} of '{}'".format(*self._what))
            return
        note: Note = self._entry[NOTE]
        label = Label(note.op, note.phase, note.kind, note.axes)
        raise failure(label, partial(_describe, self._dtensor.device_mesh, note.ranks), lost, note.ranks) from lost


def _split_dims(dtensor: Any) -> tuple[int, ...]:
    """Return the dims of the mesh over which ranks have parts."""
    sizes = dtensor.device_mesh.shape
    return tuple([i for i, p in enumerate(dtensor.placements) if not p.is_replicate() and sizes[i] > 1])


def _names(mesh: Any) -> Sequence[str]:
    return mesh.mesh_dim_names or [f"dim {i}" for i in range(mesh.ndim)]  # type: ignore[no-any-return]


def _peers(mesh: Any, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks of the world that have the other parts of what this rank has a part of, and this one."""
    here = mesh.get_coordinate()
    place = tuple(slice(None) if i in dims else here[i] for i in range(mesh.ndim))
    return tuple(mesh.mesh[place].flatten().tolist())


def _describe(mesh: Any, ranks: Sequence[int], axes: Sequence[str]) -> str:
    """Return this rank and its coordinate, and for whom it waited."""
    me, here = mesh.get_rank(), mesh.get_coordinate()
    where = ", ".join(f"{axis}={position}" for axis, position in zip(_names(mesh), here, strict=True))
    others = [str(rank) for rank in ranks if rank != me]
    return f"rank {me} ({where}) waited for rank{'s' * (len(others) > 1)} {', '.join(others)}"
