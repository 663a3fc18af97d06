"""The last collectives of this rank, always: what each was for, when it started, was waited for and was done.

A failure writes them down, `flight_RANK.json` in the folder that the environment's NDTP_FLIGHT names; `ndtp info
--flight FOLDER` compares those of all ranks.  An entry costs less than a microsecond.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from ndtp.errors import warn

LENGTH = 512  # of the last collectives that are kept
LEFT = 16  # of those that were left to the device and are told to others
FOLDER = "NDTP_FLIGHT"
VERSION = 1


class Note(NamedTuple):
    """The description of a collective, settled when it was bound. It holds no group and no grid.

    Attributes:
        ranks: of the world, that take part.
        received: elements.
        waits: the host waits for its end, not a stream of the device, of which the host learns nothing.
    """

    op: tuple[str, ...]
    phase: str
    kind: str
    axes: tuple[str, ...]
    part: str
    ranks: tuple[int, ...]
    received: int = 0
    waits: bool = True

    @property
    def text(self) -> str:
        """Return the name of the collective in errors: "all_gather 2/4 of mlp.up A (forward) over axis y"."""
        what = f"{self.kind} {self.part}".rstrip()
        return f"{what} of {' '.join(self.op)} ({self.phase}) over axis {' '.join(self.axes)}"


# What, bytes, when it was started, waited for and done (seconds of the monotonic clock, 0 where it was not), and the
# how many-th it is of those ranks over those axes, which all of them count alike.
FlightEntry = list[Any]
NOTE, BYTES, STARTED, WAITED, DONE, NTH = range(6)


class Flight:
    """A ring of the last collectives of this process."""

    __slots__ = ("count", "counts", "entries", "rank", "size")

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.entries: list[FlightEntry | None] = [None] * LENGTH
        self.count = 0
        self.counts: dict[tuple[Any, ...], int] = {}

    def start(self, note: Note, num_bytes: int) -> FlightEntry:
        key = note.ranks, note.axes
        self.counts[key] = nth = self.counts.get(key, 0) + 1
        entry: FlightEntry = [note, num_bytes, time.monotonic(), 0.0, 0.0, nth]
        count = self.count
        self.entries[count % LENGTH] = entry
        self.count = count + 1
        return entry

    def last(self) -> list[FlightEntry]:
        """Oldest first."""
        at = self.count % LENGTH
        return [entry for entry in (*self.entries[at:], *self.entries[:at]) if entry is not None]

    def waiting(self) -> FlightEntry | None:
        """Return the collective that has been waited for the longest."""
        open_ones = [entry for entry in self.entries if entry is not None and entry[WAITED] and not entry[DONE]]
        return min(open_ones, key=lambda entry: entry[WAITED], default=None)

    def left_to_device(self) -> list[FlightEntry]:
        """Return the last collectives for whose end a stream waits, oldest first: one of them may hold the host."""
        return [entry for entry in self.last() if not entry[NOTE].waits][-LEFT:]

    def last_done(self) -> FlightEntry | None:
        return max((e for e in self.entries if e is not None and e[DONE]), key=lambda entry: entry[DONE], default=None)

    def as_dict(self, reason: str = "") -> dict[str, Any]:
        last = self.last()
        first = self.count - len(last)
        wall = time.time() - time.monotonic()  # a clock that was set meanwhile moves all times alike
        return {
            "version": VERSION,
            "rank": self.rank,
            "world_size": self.size,
            "written": time.time(),
            "reason": reason,
            "collectives": [
                {
                    "number": first + i,
                    "of its group": nth,
                    "op": " ".join(note.op),
                    "phase": note.phase,
                    "kind": note.kind,
                    "axes": list(note.axes),
                    "part": note.part,
                    "ranks": list(note.ranks),
                    "bytes": num_bytes,
                    "started": wall + started,
                    "waited": wall + waited if waited else None,
                    "done": wall + done if done else None,
                }
                for i, (note, num_bytes, started, waited, done, nth) in enumerate(last)
            ],
        }

    def try_folder(self) -> None:
        """Warn at the start where no record could be written at the end, as on a file system that is read-only."""
        if not (folder := os.environ.get(FOLDER)):
            return
        path = Path(folder) / f"flight_{self.rank}.{os.getpid()}.part"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            path.unlink()
        except OSError as error:
            why = f"no record of collectives can be written there: {error.strerror}"
            warn(f"ndtp: {FOLDER}={folder}: {why}", RuntimeWarning)

    def write(self, reason: str = "", folder: str | None = None) -> str | None:
        """Write the ring to the folder, or to the one that the environment names.  Returns its path.

        Beside, and renamed: a rank that is killed meanwhile leaves the file before it, or none.
        """
        folder = folder or os.environ.get(FOLDER)
        if not folder:
            return None
        path = Path(folder) / f"flight_{self.rank}.json"
        beside = path.with_suffix(f".{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(self.as_dict(reason)) + "\n", encoding="utf-8")
            os.replace(beside, path)
        except OSError:  # a full disk must not hide what failed
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            return None
        return str(path)
