"""Faults put into running ranks: who is named, and how long until all have ended.

    nice -n 19 python bench/faults.py --minutes 60       # goes on with what bench/results/faults.jsonl has
    python bench/faults.py --each 3 --places train --kinds killed --log /tmp/faults.jsonl

Every kind of fault at every place in turn, at a random rank and time, in one of four gloo ranks that are forks of a
process which has torch; several such programs wait at once.  A rank that survives must end with a `CommunicationError`
that names the victim, and how it was lost (`named`).  Counted apart: wrong names (`wrong`), other errors (`unnamed`),
and ranks that did not end within the grid's timeout and ten seconds (`hung`).  Each injection is a line of the log, and
the table over all lines is written beside it as JSON.
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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fault_programs import HOW, KINDS, LATEST_S, PLACES, RANKS, STEPS, Plan, until_the_end

from ndtp.testing import RankError, RankPool
from ndtp.testing.process import traces

DEADLY_TIMEOUT_S, SILENT_TIMEOUT_S, MARGIN_S, START_S = 20.0, 3.0, 10.0, 90.0
RESULTS = Path(__file__).parent / "results"
SILENT = ("stopped", "late")


def inject(place: str, kind: str, seed: int) -> dict[str, Any]:
    """One fault, and what came of it."""
    draw = random.Random(seed)
    port = _free_port() if draw.random() < 0.5 else 0
    timeout = SILENT_TIMEOUT_S if kind in SILENT else DEADLY_TIMEOUT_S
    plan = Plan(kind, draw.randrange(RANKS), draw.randrange(STEPS), draw.uniform(0, LATEST_S), timeout, port)
    others = set(range(RANKS)) - {plan.victim}
    limit = timeout + MARGIN_S
    with RankPool(RANKS, echo=()) as pool, TemporaryDirectory(prefix="ndtp-faults-") as folder:
        pool.run(os.getpid)  # they have started
        begin, pids = time.monotonic(), pool.pids
        waiting = threading.Thread(target=_run, args=(pool, place, plan, folder))
        waiting.start()
        while time.monotonic() - begin < START_S and any(Path(f"/proc/{pids[rank]}").exists() for rank in others):
            if (fault := Path(folder) / "fault").exists() and time.time() - fault.stat().st_mtime > limit:
                break
            time.sleep(0.03)
        seconds = time.time() - fault.stat().st_mtime if fault.exists() else -1.0
        hung = [each for each in pool._ranks if each.index in others and Path(f"/proc/{each.pid}").exists()]
        where = traces(hung) if hung else {}
        for each in hung:
            each.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[plan.victim], signal.SIGKILL)
        waiting.join()
        paths = {rank: Path(folder) / f"{rank}.json" for rank in others}
        said = {rank: json.loads(path.read_text()) if path.exists() else None for rank, path in paths.items()}
    found = {rank: _judge(words, plan) for rank, words in said.items()}
    store = "tcp" if port else "file"
    line: dict[str, Any] = {"place": place, "kind": kind, "seed": seed, "store": store, "seconds": round(seconds, 2)}
    line["told"] = dict(Counter(found.values()))
    if set(found.values()) != {"named"}:
        line["victim"], line["said"] = plan.victim, said
        line["hung"] = {rank: where.get(rank, "")[-1500:] for rank, words in said.items() if words is None}
    return line


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _judge(words: dict[str, Any] | None, plan: Plan) -> str:
    if words is None:
        return "hung"
    if words["error"] == "CheckpointError":  # what failed was said to all, and nobody died
        return "named" if f"rank {plan.victim}: " in words["text"] else "wrong"
    if words["error"] != "CommunicationError":
        return "unnamed"
    if plan.kind == "cut" and words["how"] == "link":  # every process is alive then
        return "named"
    how = (*HOW[plan.kind], "absent")  # who had not come to the first grid yet
    if not words["ranks"]:
        return "unnamed"
    if plan.port and not plan.victim:  # it had the store: what it said goes with it, where it is not heard before
        how = (*how, "gone", "silent")
    return "named" if words["ranks"] == [plan.victim] and words["how"] in how else "wrong"


def _run(pool: RankPool, place: str, plan: Plan, folder: str) -> None:
    with contextlib.suppress(RankError):  # what ranks said they wrote down
        pool.run(until_the_end, place, plan, folder, timeout=2 * START_S, wait_all=True)


def table(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for place, kind in itertools.product(PLACES, KINDS):
        mine = [line for line in lines if (line["place"], line["kind"]) == (place, kind)]
        if mine:
            told: Counter[str] = sum((Counter(line["told"]) for line in mine), Counter())
            longest = max(line["seconds"] for line in mine)
            rows.append({"place": place, "kind": kind, "injections": len(mine), "survivors": dict(told),
                         "longest_s": longest})  # fmt: skip
    return rows


def sums(lines: list[dict[str, Any]], by: str) -> dict[str, Any]:
    every: dict[str, Any] = {}
    for name in dict.fromkeys(line[by] for line in lines):
        mine = [line for line in lines if line[by] == name]
        told: Counter[str] = sum((Counter(line["told"]) for line in mine), Counter())
        every[name] = {"injections": len(mine), "survivors": dict(told)}
    return every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=10**6, help="injections of each kind at each place")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no more after so many")
    parser.add_argument("--at-once", type=int, default=4, help="programs of four ranks")
    parser.add_argument("--log", type=Path, default=RESULTS / "faults.jsonl", help="one line an injection; goes on")
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.log.read_text().splitlines()] if given.log.exists() else []
    lines = [line for line in lines if line["seconds"] >= 0]
    until, written = time.monotonic() + 60 * given.minutes, threading.Lock()
    done = Counter((line["place"], line["kind"]) for line in lines)
    todo = ((turn, place, kind) for turn in itertools.count() for place in given.places for kind in given.kinds)
    turns = itertools.takewhile(lambda each: each[0] < given.each, todo)

    def work() -> None:
        while time.monotonic() < until:
            with written:
                each = next((t for t in turns if t[0] >= done[t[1:]]), None)
            if each is None:
                return
            turn, place, kind = each
            line = inject(place, kind, random.Random(f"{place} {kind} {turn}").randrange(2**32))
            with written, given.log.open("a") as log:
                log.write(json.dumps(line) + "\n")
                if line["seconds"] >= 0:  # else the port was taken meanwhile, and no fault was put in
                    lines.append(line)

    with ThreadPoolExecutor(given.at_once) as workers:
        for each in [workers.submit(work) for _ in range(given.at_once)]:
            each.result()
    rows = table(lines)
    for row in rows:
        print(f"{row['place']:10} {row['kind']:14} x {row['injections']:4}  {row['survivors']}  {row['longest_s']}")
    record = {"torch": torch.__version__, "ranks": RANKS, "timeouts_s": {"deaths": DEADLY_TIMEOUT_S, "silence":
              SILENT_TIMEOUT_S}, "injections": len(lines), "by_kind": sums(lines, "kind"),
              "by_place": sums(lines, "place"), "rows": rows}  # fmt: skip
    given.log.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
