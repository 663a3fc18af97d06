"""Faults put into running ranks: who is named, and how long until all have ended.

    nice -n 19 python bench/faults.py --minutes 60       # goes on with what bench/results/faults.jsonl has
    python bench/faults.py --each 3 --places train --kinds killed --log /tmp/faults.jsonl
    nice -n 19 python bench/faults.py --each 100 --slow 3 --onto bench/results/faults.json   # on a busy machine

Every kind of fault at every place in turn, at a random rank and time, in one of four gloo ranks that are forks of a
process which has torch; several such programs wait at once.  A rank that survives must end with a `CommunicationError`
that names the victim, and how it was lost (`named`); where the fault is none of theirs, with the numbers of a run that
nothing happened to.  Counted apart: wrong names or numbers (`wrong`), other errors (`unnamed`), and ranks that did not
end within the grid's timeout and ten seconds, and as long as the kernel says that they were ready to run and had no
processor (`hung`).  After each, nothing may be left: no process of a rank, no
shared memory, no port, and no word of C++ about how a process ended (`left`).  Each injection is a line of the log, and
the table over all lines is written beside it as JSON, and the injections of an earlier table, whose log is gone, are
counted in (`--onto`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fault_kinds import KINDS, LATEST_S, RANKS, STEPS, Plan
from fault_programs import PLACES, until_the_end
from starved import Starved

from ndtp.testing import RankError, RankPool
from ndtp.testing.process import traces

MARGIN_S, START_S, END_S = 10.0, 90.0, 5.0
RESULTS = Path(__file__).parent / "results"
LAST_WORDS = ("terminate called", "Fatal Python error", "pure virtual", "Assertion")


def inject(place: str, kind: str, seed: int, slow: float = 1.0) -> dict[str, Any]:
    """One fault, and what came of it.

    Args:
        slow: timeouts are so many times as long, on a machine that is so many times as slow.
    """
    draw = random.Random(seed)
    port = _free_port() if draw.random() < 0.5 else 0
    timeout = slow * (KINDS[kind].timeout if kind else 20.0)
    plan = Plan(kind, draw.randrange(RANKS), draw.randrange(STEPS), draw.uniform(0, LATEST_S), timeout, port)
    others = set(range(RANKS)) - ({plan.victim} if KINDS[kind].how[:1] else set())
    limit = timeout + MARGIN_S
    with RankPool(RANKS, echo=()) as pool, TemporaryDirectory(prefix="ndtp-faults-") as folder:
        pool.run(os.getpid)  # they have started
        begin, pids = time.monotonic(), pool.pids
        waiting = threading.Thread(target=_run, args=(pool, place, plan, folder))
        waiting.start()
        starved, short_of = Starved(pids), 0.0
        while time.monotonic() - begin < START_S + short_of and any(
            Path(f"/proc/{pids[rank]}").exists() for rank in others
        ):
            if (fault := Path(folder) / "fault").exists() and time.time() - fault.stat().st_mtime > limit + short_of:
                break
            short_of = starved.seconds()
            time.sleep(0.03 * slow)
        seconds = time.time() - fault.stat().st_mtime if fault.exists() else -1.0
        hung = [each for each in pool._ranks if each.index in others and Path(f"/proc/{each.pid}").exists()]
        where = traces(hung) if hung else {}
        for each in hung:
            each.signal(signal.SIGKILL)
        for each in list(pool._ranks):  # none where all have ended: others may have their numbers by now
            if each.index == plan.victim:
                each.signal(signal.SIGKILL)
        waiting.join()
        paths = {rank: Path(folder) / f"{rank}.json" for rank in others}
        said = {rank: json.loads(path.read_text()) if path.exists() else None for rank, path in paths.items()}
        own = Path(folder) / f"{plan.victim}.json"
        victim_said = json.loads(own.read_text()) if own.exists() else None
        left = _left(pids, Path(folder), plan)
    found = {rank: _judge(words, place, plan) for rank, words in said.items()}
    store = "tcp" if port else "file"
    line: dict[str, Any] = {"place": place, "kind": kind, "seed": seed, "store": store, "seconds": round(seconds, 2)}
    line["starved"] = round(short_of, 2)
    line["told"], line["left"] = dict(Counter(found.values())), left
    if set(found.values()) != {"named"}:
        line["victim"], line["said"], line["victim said"] = plan.victim, said, victim_said
        line["hung"] = {rank: where.get(rank, "")[-1500:] for rank, words in said.items() if words is None}
    return line


def _left(pids: list[int], folder: Path, plan: Plan) -> list[str]:
    """What is left of the ranks when all have ended."""
    until = time.monotonic() + END_S
    while (alive := _processes_of(pids)) and time.monotonic() < until:
        time.sleep(0.05)
    found = [f"process {pid}" for pid in alive]
    names = [f"torch_{pid}_" for pid in pids]
    found += [each for each in os.listdir("/dev/shm") if each.startswith(tuple(names))]
    if plan.port:
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                again.bind(("127.0.0.1", plan.port))
            except OSError:
                found.append(f"port {plan.port}")
    for path in folder.glob("*.stderr"):
        text = path.read_text(errors="replace")
        found += [f"rank {path.stem}: {text[text.index(each) :][:300]}" for each in LAST_WORDS if each in text]
    return found


def _processes_of(pids: list[int]) -> list[int]:
    """The processes of ranks, and those that they have started: each rank is the first of a group of processes."""
    found = []
    for each in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, _, group, *_ = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            if int(group) in pids and state != "Z":
                found.append(int(each))
    return found


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _judge(words: dict[str, Any] | None, place: str, plan: Plan) -> str:
    if words is None:
        return "hung"
    expected = KINDS[plan.kind].how if plan.kind else ()
    if not expected:
        return "named" if words["error"] == "none" and words["numbers"] in undisturbed(place) else "wrong"
    if words["error"] == "CheckpointError":  # what failed was said to all, and nobody died
        return "named" if f"rank {plan.victim}: " in words["text"] else "wrong"
    if words["error"] not in ("CommunicationError", ""):
        return "unnamed"
    if plan.kind == "cut" and words["how"] == "link":  # every process is alive then
        return "named"
    if plan.kind == "folder gone" and words["how"] == "raised":  # who comes to write there first
        return "named"
    how = (*expected, "absent")  # who had not come to the first grid yet
    if not words["ranks"]:
        return "unnamed"
    if plan.port and not plan.victim:  # it had the store: what it said goes with it, where it is not heard before
        how = (*how, "gone", "silent")
    return "named" if words["ranks"] == [plan.victim] and words["how"] in how else "wrong"


_ONE_AT_A_TIME = threading.Lock()


def undisturbed(place: str) -> set[str]:
    """The numbers of the ranks of a program that nothing happens to."""
    with _ONE_AT_A_TIME:
        return _undisturbed(place)


@cache
def _undisturbed(place: str) -> set[str]:
    with RankPool(RANKS, echo=()) as pool, TemporaryDirectory(prefix="ndtp-faults-") as folder:
        _run(pool, place, Plan("", 0, 0, 0.0, 20.0, 0), folder)
        return {json.loads(path.read_text())["numbers"] for path in Path(folder).glob("?.json")}


def _run(pool: RankPool, place: str, plan: Plan, folder: str) -> None:
    with contextlib.suppress(RankError):  # what ranks said they wrote down
        pool.run(until_the_end, place, plan, folder, timeout=2 * START_S, wait_all=True)


def table(lines: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each place and kind.

    Args:
        before: rows of an earlier table, whose injections are others.
    """
    rows = []
    for place, kind in itertools.product(PLACES, KINDS):
        old = [row for row in before if (row["place"], row["kind"]) == (place, kind)]
        mine = [line for line in lines if (line["place"], line["kind"]) == (place, kind)]
        if mine or old:
            told = _sum([*(line["told"] for line in mine), *(row["survivors"] for row in old)])
            longest = max([*(line["seconds"] for line in mine), *(row["longest_s"] for row in old)])
            count = len(mine) + sum(row["injections"] for row in old)
            left = sum(bool(line["left"]) for line in mine) + sum(row["left"] for row in old)
            rows.append({"place": place, "kind": kind, "injections": count, "survivors": told, "longest_s": longest,
                         "left": left})  # fmt: skip
    return rows


def sums(rows: list[dict[str, Any]], by: str) -> dict[str, Any]:
    every: dict[str, Any] = {}
    for name in dict.fromkeys(row[by] for row in rows):
        mine = [row for row in rows if row[by] == name]
        every[name] = {"injections": sum(row["injections"] for row in mine),
                       "survivors": _sum([row["survivors"] for row in mine]),
                       "longest_s": max(row["longest_s"] for row in mine),
                       "left": sum(row["left"] for row in mine)}  # fmt: skip
    return every


def _sum(told: list[dict[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, told), Counter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=10**6, help="injections of each kind, over its places")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no more after so many")
    parser.add_argument("--at-once", type=int, default=4, help="programs of four ranks")
    parser.add_argument("--log", type=Path, default=RESULTS / "faults.jsonl", help="one line an injection; goes on")
    parser.add_argument("--slow", type=float, default=1.0, help="timeouts are so many times as long")
    parser.add_argument("--onto", type=Path, help="an earlier table, whose injections are counted in")
    given = parser.parse_args()
    before = json.loads(given.onto.read_text())["rows"] if given.onto else []
    lines = [json.loads(line) for line in given.log.read_text().splitlines()] if given.log.exists() else []
    lines = [line for line in lines if line["seconds"] >= 0]
    until, written = time.monotonic() + 60 * given.minutes, threading.Lock()
    done = Counter((line["place"], line["kind"]) for line in lines)
    done.update({(row["place"], row["kind"]): row["injections"] for row in before})
    todo = ((turn, place, kind) for turn in itertools.count() for kind in given.kinds for place in given.places
            if place in KINDS[kind].places)  # fmt: skip
    most = {kind: -(-given.each // len(each.places)) for kind, each in KINDS.items()}
    turns = (each for each in itertools.takewhile(lambda each: each[0] < given.each, todo) if each[0] < most[each[2]])

    def work() -> None:
        while time.monotonic() < until:
            with written:
                each = next((t for t in turns if t[0] >= done[t[1:]]), None)
            if each is None:
                return
            turn, place, kind = each
            line = inject(place, kind, random.Random(f"{place} {kind} {turn}").randrange(2**32), given.slow)
            with written, given.log.open("a") as log:
                log.write(json.dumps(line) + "\n")
                if line["seconds"] >= 0:  # else the port was taken meanwhile, and no fault was put in
                    lines.append(line)

    with ThreadPoolExecutor(given.at_once) as workers:
        for each in [workers.submit(work) for _ in range(given.at_once)]:
            each.result()
    rows = table(lines, before)
    for row in rows:
        print(f"{row['place']:10} {row['kind']:14} x {row['injections']:4}  {row['survivors']}  {row['longest_s']}")
    timeouts = {kind: each.timeout for kind, each in KINDS.items()}
    said = [{"place": line["place"], "kind": line["kind"], "left": line["left"]} for line in lines if line["left"]]
    record = {"torch": torch.__version__, "ranks": RANKS, "timeouts_s": timeouts, "slow": given.slow,
              "injections": sum(row["injections"] for row in rows), "by_kind": sums(rows, "kind"),
              "by_place": sums(rows, "place"), "rows": rows, "left": said}  # fmt: skip
    given.log.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
