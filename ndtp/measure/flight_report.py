"""A report on the flight records of all ranks: who was behind, and where ranks disagree (`ndtp.collectives.flight`)."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_SHOWN = 500  # characters of a path in an error
MOST_BYTES = 2**26  # of a file: a record of 512 collectives has some hundred kilobytes
GroupKey = tuple[tuple[int, ...], tuple[str, ...]]  # of a group: its ranks and axes


class FlightError(ValueError):
    """A folder without records, or a file that is none."""


@dataclass
class FlightReport:
    """The findings in the flight records of all ranks.

    Attributes:
        world_size: that the records tell of.
        missing: ranks that left no record: a rank that is killed leaves none.
        unfinished: of each rank, the collectives that it had started and that were not done, oldest first.
        behind: ranks that had started fewer collectives of a group than others, and the first that they lack.
        differing: of each group, the first place at which ranks were in different collectives: what, by rank.
        reasons: why each rank wrote its record.
    """

    world_size: int
    missing: list[int]
    unfinished: dict[int, list[dict[str, Any]]]
    behind: list[dict[str, Any]] = field(default_factory=list)
    differing: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


def read_flights(folder: Path) -> dict[int, dict[str, Any]]:
    """The records in a folder, by rank.

    Raises:
        FlightError: there is none, or one that cannot be read.
    """
    found = {}
    try:
        paths = sorted(folder.glob("flight_*.json"))
    except OSError as error:
        raise FlightError(f"{error.strerror}: {str(folder)[:MOST_SHOWN]}") from None
    for path in paths:
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            record = json.loads(path.read_text(encoding="utf-8"))
            for entry in record["collectives"]:
                _ = what(entry), [int(rank) for rank in entry["ranks"]], entry["done"], int(entry["of its group"])
            found[int(record["rank"])] = record
            _ = int(record["world_size"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise FlightError(f"{path} is no record of collectives: {error}") from None
    if not found:
        raise FlightError(f"{folder} has no flight_RANK.json\n  fix: NDTP_FLIGHT={folder} in the environment of a run")
    return found


def what(entry: dict[str, Any]) -> str:
    """Return an entry's name in errors, and its bytes."""
    name = " ".join(filter(None, (entry["kind"], entry["part"])))
    return f"{name} of {entry['op']} ({entry['phase']}) over axis {' '.join(entry['axes'])}, {entry['bytes']} bytes"


def report(flights: dict[int, dict[str, Any]]) -> FlightReport:
    """Compare the records of ranks: the n-th collective of a group on one rank is the n-th on another."""
    size = max(int(record["world_size"]) for record in flights.values())
    unfinished = {
        rank: [entry for entry in record["collectives"] if not entry["done"]] for rank, record in flights.items()
    }
    found = FlightReport(size, sorted(set(range(size)) - set(flights)), unfinished)
    found.reasons = {rank: str(record.get("reason", "")) for rank, record in sorted(flights.items())}
    groups: dict[GroupKey, dict[int, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for rank, record in sorted(flights.items()):
        for entry in record["collectives"]:
            if entry["kind"] not in ("send", "receive"):  # these have an order of their own on each of two ranks
                key = tuple(entry["ranks"]), tuple(entry["axes"])
                groups[key][rank][entry["of its group"]] = what(entry)
    for key, by_rank in sorted(groups.items()):
        _compare(found, key, by_rank, [rank for rank in key[0] if rank in flights])
    return found


def _compare(found: FlightReport, key: GroupKey, by_rank: dict[int, dict[int, str]], there: list[int]) -> None:
    group = {"ranks": list(key[0]), "axes": list(key[1])}
    last = {rank: max(by_rank[rank]) if rank in by_rank else 0 for rank in there}
    most = max(last.values())
    furthest = by_rank[next(rank for rank in there if last[rank] == most)]
    for rank in there:
        if last[rank] < most:
            lacks = furthest.get(last[rank] + 1, "what is no longer in the record")
            found.behind.append({"rank": rank, **group, "lacks": lacks, "by": most - last[rank]})
    for nth in sorted(furthest):
        texts = {rank: entries[nth] for rank, entries in by_rank.items() if nth in entries}
        if len(set(texts.values())) > 1:
            found.differing.append({**group, "number": nth, "by rank": texts})
            return
