"""Flight records of ndtp in the form that torch's own analyser reads (`torch.distributed.flight_recorder.fr_trace`).

That form is a pickle for each rank.  They are written here, and ndtp reads none.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ndtp.measure.flight_records import MESSAGES, FlightError, FlightLine, FlightRecord
from ndtp.measure.flight_report import GroupKey

VERSION = "2.10"  # of the form: that of torch 2.9 to 2.13
# What torch calls each kind of collective.  In a permutation all ranks send and receive as in an all-to-all; of what it
# has no name for, such as the making of a process group, it learns that all ranks meet.
_NAMES = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all", "pass_on": "all_to_all", "swap_ends": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip


def write_for_torch(flights: Mapping[int, FlightRecord], folder: Path) -> list[Path]:
    """Write `rank_N` for each record, all or none of them.  Returns the paths.

    Raises:
        FlightError: the folder has such files already, or cannot be written; none of them is there then.
    """
    dumps = torch_dumps(flights)
    paths = {folder / f"rank_{rank}": dumped for rank, dumped in dumps.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if there := sorted(folder.glob("rank_*")):
            raise FlightError(f"{there[0]} is there already\n  fix: an empty folder")
        with ExitStack() as undone:
            beside = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in paths}
            for path, dumped in paths.items():
                undone.callback(beside[path].unlink, missing_ok=True)
                beside[path].write_bytes(pickle.dumps(dumped))
            for path in paths:
                undone.callback(path.unlink, missing_ok=True)
                os.replace(beside[path], path)
            undone.pop_all()
    except OSError as error:
        raise FlightError(f"{folder} cannot be written: {error.strerror}") from None
    return list(paths)


def torch_dumps(flights: Mapping[int, FlightRecord]) -> dict[int, dict[str, Any]]:
    """Return what torch's flight recorder would have dumped, of each rank.

    A group is the ranks and axes of a collective, and its collectives have the numbers that ndtp gave them.  Sizes are
    bytes: records tell what a rank received.  The analyser compares ranks from their first entries on, so what some
    ring has overflowed by is left out of all.  Messages go in groups of two ranks and one direction, which count their
    messages; they are left out, too, where a ring has overflowed.
    """
    full = any(record.collectives and record.collectives[0].number for record in flights.values())
    first = _first_of_groups(flights)
    groups = sorted(first)
    dumps = {}
    for rank, record in sorted(flights.items()):
        dumped: list[dict[str, object]] = []
        config: dict[str, dict[str, str]] = {}
        counts: dict[str, int] = {}
        for entry in record.collectives:
            ranks, nth = sorted(entry.ranks), entry.nth
            if entry.kind in MESSAGES:
                if full:
                    continue
                peer = next(each for each in ranks if each != rank)
                ends = (rank, peer) if entry.kind == "send" else (peer, rank)
                group, about = f"{ends[0]} to {ends[1]}", "messages"
                counts[group] = nth = counts.get(group, 0) + 1
                places = [ranks.index(each) for each in ends]
                title = "send {}->{}".format(*places) if entry.kind == "send" else "recv {1}<-{0}".format(*places)
            elif nth < first[_key(entry)] or len(ranks) < 2:
                continue
            else:
                axes = " ".join(entry.axes)
                group, about = f"{axes} {ranks}", f"axis {axes}"
                title = _NAMES.get(entry.kind, "barrier")
            config[group] = {"name": group, "desc": about, "ranks": str(ranks)}
            number = groups.index(_key(entry)) if _key(entry) in first else len(groups)
            dumped.append(_entry(entry, len(dumped), number, (group, about), nth, title, len(ranks)))
        dumps[rank] = {"version": VERSION, "pg_config": config, "entries": dumped}
    return dumps


def _key(entry: FlightLine) -> GroupKey:
    return entry.ranks, entry.axes


def _first_of_groups(flights: Mapping[int, FlightRecord]) -> dict[GroupKey, int]:
    """Return of each group the first collective that no rank's ring has lost."""
    first: dict[GroupKey, int] = {}
    last: dict[GroupKey, int] = {}  # that some rank has done
    for record in flights.values():
        for entry in _collectives(record):
            key, nth = _key(entry), entry.nth
            first.setdefault(key, 1)
            last[key] = max(last.get(key, 0), nth if entry.done else 0)
    for rank, record in flights.items():
        if not record.collectives or not record.collectives[0].number:
            continue
        kept: dict[GroupKey, int] = {}
        for entry in _collectives(record):
            kept.setdefault(_key(entry), entry.nth)
        for key in first:
            if rank in key[0]:  # what others have done, this one has done with them, though it knows of it no more
                first[key] = max(first[key], kept.get(key, last[key] + 1))
    return first


def _collectives(record: FlightRecord) -> Iterable[FlightLine]:
    return (entry for entry in record.collectives if entry.kind not in MESSAGES)


def _entry(
    entry: FlightLine, index: int, group: int, names: tuple[str, str], nth: int, title: str, ranks: int
) -> dict[str, object]:
    sent, received = _sizes(title, entry.num_bytes, ranks)
    started, done = (int(seconds * 1e9) if seconds else None for seconds in (entry.started, entry.done))
    return {
        "record_id": index, "op_id": index, "pg_id": group, "process_group": names, "collective_seq_id": nth,
        "p2p_seq_id": nth, "is_p2p": entry.kind in MESSAGES, "profiling_name": f"gloo:{title}",
        "input_sizes": [[sent]], "input_dtypes": ["Byte"], "output_sizes": [[received]], "output_dtypes": ["Byte"],
        "state": "completed" if entry.done else "started", "retired": bool(entry.done), "timeout_ms": 0,
        "time_created_ns": started, "time_discovered_started_ns": started,
        "time_discovered_completed_ns": done,
        "frames": [{"name": entry.text, "filename": "ndtp", "line": nth}],
    }  # fmt: skip


def _sizes(title: str, num_bytes: int, ranks: int) -> tuple[int, int]:
    """Return the bytes of the input and of the output, of a collective in which a rank received so many."""
    shard = num_bytes // (ranks - 1)
    if title == "all_gather":
        return shard, shard * ranks
    if title == "reduce_scatter":
        return shard * ranks, shard
    if title == "all_reduce":
        return shard // 2 * ranks, shard // 2 * ranks
    return (0, 0) if title == "barrier" else (num_bytes, num_bytes)
