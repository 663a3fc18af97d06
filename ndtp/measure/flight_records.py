"""Reads the flight records of ranks (`ndtp.collectives.flight`), which somebody else may have written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MESSAGES = ("send", "receive")  # of two ranks; each of them has an order of its own
MOST_SHOWN = 500  # characters of a path in an error
MOST_BYTES = 2**26  # of a file: a record of 512 collectives has some hundred kilobytes
MOST_NESTED = 10**5  # lists and objects of a file: three for each collective
MOST_RANKS = 2**20
_MOST_SECONDS = 2.0**40
_MOST = 2**63 - 1


class FlightError(ValueError):
    """A folder without records, or a file that is none."""


@dataclass(frozen=True)
class FlightLine:
    """A collective, as a rank has recorded it.

    Attributes:
        number: the how many-th of all that the rank has started.
        nth: the how many-th of these ranks over these axes.
        ranks: of the world, that take part; the one that recorded it is one of them.
        started, waited, done: seconds of the clock; None where it was not.
    """

    number: int
    nth: int
    op: str
    phase: str
    kind: str
    axes: tuple[str, ...]
    part: str
    ranks: tuple[int, ...]
    num_bytes: int
    started: float
    waited: float | None
    done: float | None

    @property
    def text(self) -> str:
        """Return its name in errors, and its bytes."""
        name = " ".join(filter(None, (self.kind, self.part)))
        return f"{name} of {self.op} ({self.phase}) over axis {' '.join(self.axes)}, {self.num_bytes} bytes"

    def as_json(self) -> dict[str, Any]:
        """Return the entry as the file has it."""
        return {
            "number": self.number, "of its group": self.nth, "op": self.op, "phase": self.phase, "kind": self.kind,
            "axes": list(self.axes), "part": self.part, "ranks": list(self.ranks), "bytes": self.num_bytes,
            "started": self.started, "waited": self.waited, "done": self.done,
        }  # fmt: skip


@dataclass(frozen=True)
class FlightRecord:
    """The last collectives of a rank, oldest first, and why it wrote them down."""

    rank: int
    world_size: int
    reason: str
    collectives: tuple[FlightLine, ...]


def read_flights(folder: Path) -> dict[int, FlightRecord]:
    """Return the records in a folder, by rank.

    Raises:
        FlightError: there is none, or a file that cannot be read or is no record; names the file.
    """
    found: dict[int, FlightRecord] = {}
    try:
        paths = sorted(folder.glob("flight_*.json"))
    except OSError as error:
        raise FlightError(f"{error.strerror}: {str(folder)[:MOST_SHOWN]}") from None
    for path in paths:
        try:
            record = _record(_parsed(path))
            if record.rank in found:
                raise ValueError(f"another file has rank {record.rank}, too")
        except (OSError, ValueError, RecursionError) as error:
            raise FlightError(f"{path} is no record of collectives: {error}") from None
        found[record.rank] = record
    if not found:
        raise FlightError(f"{folder} has no flight_RANK.json\n  fix: NDTP_FLIGHT={folder} in the environment of a run")
    return found


def _parsed(path: Path) -> object:
    if not path.is_file():
        raise ValueError("it is no regular file")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    text = path.read_text(encoding="utf-8")
    if text.count("[") + text.count("{") > MOST_NESTED:
        raise ValueError(f"it has more than {MOST_NESTED} lists and objects")
    return json.loads(text)


def _record(values: Any) -> FlightRecord:
    rank = _integer(values, "rank", 0, MOST_RANKS - 1)
    size = _integer(values, "world_size", rank + 1, MOST_RANKS)
    entries = tuple(_line(each, rank, size) for each in _list(values, "collectives", dict))
    return FlightRecord(rank, size, str(values.get("reason", "")), entries)


def _line(values: dict[str, Any], rank: int, size: int) -> FlightLine:
    kind, ranks = _text(values, "kind"), tuple(_list(values, "ranks", int))
    distinct = set(ranks)
    if rank not in distinct or len(distinct) != len(ranks) or min(distinct) < 0 or max(distinct) >= size:
        raise ValueError(f"'ranks' of a collective of rank {rank} of {size} are {list(ranks)!r:.100}")
    if kind in MESSAGES and len(ranks) != 2:
        raise ValueError(f"'ranks' of a {kind} are {list(ranks)!r:.100}")
    return FlightLine(
        _integer(values, "number", 0), _integer(values, "of its group", 1), _text(values, "op"),
        _text(values, "phase"), kind, _axes(values), _text(values, "part"), ranks,
        _integer(values, "bytes", 0), _seconds(values, "started") or 0.0, _seconds(values, "waited"),
        _seconds(values, "done"),
    )  # fmt: skip


def _axes(values: dict[str, Any]) -> tuple[str, ...]:
    found = _list(values, "axes", str)
    if not all(each.isprintable() for each in found):
        raise ValueError(f"'axes' are {found!r:.100}, not names")
    return tuple(found)


def _value(values: object, name: str) -> Any:
    if not isinstance(values, dict) or name not in values:
        raise ValueError(f"it lacks '{name}'")
    return values[name]


def _integer(values: object, name: str, least: int, most: int = _MOST) -> int:
    if type(found := _value(values, name)) is not int or not least <= found <= most:
        raise ValueError(f"'{name}' is {found!r:.100}, not a whole number from {least} to {most}")
    return found


def _text(values: object, name: str) -> str:
    if not isinstance(found := _value(values, name), str) or not found.isprintable():
        raise ValueError(f"'{name}' is {found!r:.100}, not a text of one line")
    return found


def _list(values: object, name: str, kind: type) -> list[Any]:
    found = _value(values, name)
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise ValueError(f"'{name}' is {found!r:.100}, not a list of {kind.__name__}")
    return found


def _seconds(values: Any, name: str) -> float | None:
    found = _value(values, name)
    if found is None:
        return None
    if type(found) not in (int, float) or not -_MOST_SECONDS < found < _MOST_SECONDS:  # NaN is not, either
        raise ValueError(f"'{name}' is {found!r:.100}, not seconds")
    return float(found)
