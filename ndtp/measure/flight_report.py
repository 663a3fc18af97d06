"""A report on the flight records of all ranks: who was behind, and where ranks disagree (`ndtp.collectives.flight`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ndtp.measure.flight_records import MESSAGES, FlightLine, FlightRecord

GroupKey = tuple[tuple[int, ...], tuple[str, ...]]  # of a group: its ranks and axes


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
    unfinished: dict[int, list[FlightLine]]
    behind: list[dict[str, Any]] = field(default_factory=list)
    differing: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        entries = {rank: [each.as_json() for each in found] for rank, found in self.unfinished.items()}
        return asdict(self) | {"unfinished": entries}


def report(flights: Mapping[int, FlightRecord]) -> FlightReport:
    """Compare the records of ranks: the n-th collective of a group on one rank is the n-th on another."""
    size = max(record.world_size for record in flights.values())
    unfinished = {rank: [entry for entry in record.collectives if not entry.done] for rank, record in flights.items()}
    found = FlightReport(size, sorted(set(range(size)) - set(flights)), unfinished)
    found.reasons = {rank: record.reason for rank, record in sorted(flights.items())}
    groups: dict[GroupKey, dict[int, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for rank, record in sorted(flights.items()):
        for entry in record.collectives:
            if entry.kind not in MESSAGES:
                groups[entry.ranks, entry.axes][rank][entry.nth] = entry.text
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
