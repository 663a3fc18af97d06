"""Faults put into running ranks: who is named, and how long until all have ended.

    python bench/faults.py --each 100                    # kinds x places, a hundred times each; recorded
    python bench/faults.py --each 3 --places train --kinds killed --output /tmp/faults.json

A fault hits a random rank at a random step, in one of four gloo ranks of a pool of its own.  A rank that survives must
end with a `CommunicationError` that names the victim, and how it was lost (`named`).  Counted apart: wrong names
(`wrong`), other errors (`unnamed`), and ranks that did not end within the grid's timeout and ten seconds (`hung`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

import ndtp
from ndtp import Grid, ProcessGrid
from ndtp.collectives.last_words import tell_of
from ndtp.testing import RankError, RankPool

RANKS, STEPS = 4, 6
DEADLY_TIMEOUT_S, SILENT_TIMEOUT_S, MARGIN_S = 30.0, 2.0, 10.0
KINDS = ("killed", "exited", "out of memory", "stopped", "late")
HOW = {"killed": ("gone",), "exited": ("gone",), "out of memory": ("gone",), "stopped": ("stopped",),
       "late": ("behind",)}  # fmt: skip


def fail(kind: str) -> None:
    if kind == "killed" or kind == "out of memory":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exited":
        os._exit(3)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(600)


def train(kind: str, victim: int, at: int, timeout: float) -> None:
    mesh = ProcessGrid(Grid(x=2, y=2), timeout=timeout)
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="2d")
    optimizer = torch.optim.AdamW(block.parameters())
    x = torch.ones(block.in_layout.shard_shape((8, 8)))
    for step in range(STEPS):
        y = block(x)
        if step == at and mesh.rank == victim and at % 2:  # between forward and backward
            fail(kind)
        y.sum().backward()
        if step == at and mesh.rank == victim:
            fail(kind)
        ndtp.nn.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def generate(kind: str, victim: int, at: int, timeout: float) -> None:
    mesh = ProcessGrid(Grid(z=2, x=2), timeout=timeout)
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="3d")
    x = torch.ones(block.in_layout.shard_shape((8, 8)))
    with torch.no_grad():
        for step in range(STEPS * 4):
            if step == at and mesh.rank == victim:
                fail(kind)
            x = block(x)


def experts(kind: str, victim: int, at: int, timeout: float) -> None:
    mesh = ProcessGrid(Grid(e=2, x=2), timeout=timeout)
    moe = ndtp.nn.MoE(8, 16, experts=4, top_k=2, router="mixtral", mesh=mesh, scheme="1d-sp", expert_axis="e")
    x = torch.randn(moe.in_layout.shard_shape((16, 8)))
    for step in range(STEPS):
        if step == at and mesh.rank == victim:
            fail(kind)
        moe(x).sum().backward()


def pipeline(kind: str, victim: int, at: int, timeout: float) -> None:
    plan = ndtp.Pipeline([Grid(x=2), Grid(x=2)], (4, 8), scheme="1d-sp")
    mesh = plan.mesh(timeout=timeout)
    stage = ndtp.PipelineStage(ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d-sp"), plan)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, target: ((y - target) ** 2).sum())
    rows = stage.rows(torch.ones(16, 8), 4)
    for step in range(STEPS):
        if step == at and dist.get_rank() == victim:
            fail(kind)
        schedule.step(rows) if stage.is_first else schedule.step(target=rows)


def start(kind: str, victim: int, at: int, timeout: float) -> None:
    for step in range(STEPS):  # each of these makes groups of its own
        if step == at and dist.get_rank() == victim:
            fail(kind)
        ProcessGrid(Grid(x=2, y=2), timeout=timeout)


PLACES = {"train": train, "generate": generate, "experts": experts, "pipeline": pipeline, "start": start}


def until_the_end(place: str, kind: str, victim: int, at: int, timeout: float, folder: str) -> None:
    """What a program does: a rank that fails ends, and what it said stays."""
    try:
        PLACES[place](kind, victim, at, timeout)
        said = {"error": "none", "how": "", "ranks": [], "text": ""}
    except Exception as error:
        error = tell_of(error)  # as at the end of a program
        said = {"error": type(error).__name__, "how": getattr(error, "how", ""),
                "ranks": list(getattr(error, "ranks", ())), "text": str(error)}  # fmt: skip
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    os._exit(1)


def inject(place: str, kind: str, draw: random.Random) -> dict[str, object]:
    """One fault, and what came of it."""
    victim, at = draw.randrange(RANKS), draw.randrange(1, STEPS)
    timeout = SILENT_TIMEOUT_S if kind in ("stopped", "late") else DEADLY_TIMEOUT_S
    limit = timeout + MARGIN_S + (5.0 if place == "start" else 0.0)
    told: Counter[str] = Counter()
    with RankPool(RANKS) as pool, TemporaryDirectory() as folder:
        pool.run(os.getpid)  # they have started
        begin, said, pids = time.monotonic(), {}, pool.pids
        waiting = Thread(target=_run, args=(pool, place, kind, victim, at, timeout, folder, limit))
        waiting.start()
        others = set(range(RANKS)) - {victim}
        while time.monotonic() - begin < limit and any(Path(f"/proc/{pids[rank]}").exists() for rank in others):
            time.sleep(0.01)
        seconds = time.monotonic() - begin
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
        waiting.join()
        for rank in others:
            path = Path(folder) / f"{rank}.json"
            said[rank] = json.loads(path.read_text()) if path.exists() else None
    for rank, words in said.items():
        if words is None:
            told["hung"] += 1
        elif words["error"] != "CommunicationError":
            told["unnamed"] += 1
        elif words["ranks"] == [victim] and words["how"] in HOW[kind]:
            told["named"] += 1
        else:
            told["wrong"] += 1
        if words is not None and told["wrong"] + told["unnamed"]:
            print(f"{place}, {kind}, rank {victim} at {at}: rank {rank}: {words}", file=sys.stderr)
    return {"victim": victim, "at": at, "seconds": seconds, "told": told}


def _run(pool: RankPool, *arguments: object) -> None:
    *given, limit = arguments
    with contextlib.suppress(RankError):  # what ranks said they wrote down
        pool.run(until_the_end, *given, timeout=limit, wait_all=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=100, help="injections of each kind at each place")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "faults.json")
    given = parser.parse_args()
    draw, began = random.Random(given.seed), time.monotonic()
    table: dict[tuple[str, str], list[dict[str, object]]] = {}
    for _ in range(given.each):
        for place in given.places:
            for kind in given.kinds:
                if time.monotonic() - began < 60 * given.minutes:
                    table.setdefault((place, kind), []).append(inject(place, kind, draw))
    rows = []
    for (place, kind), runs in table.items():
        told = sum((run["told"] for run in runs), Counter())  # type: ignore[misc]
        longest = round(max(run["seconds"] for run in runs), 2)  # type: ignore[type-var]
        rows.append({"place": place, "kind": kind, "injections": len(runs), "survivors": dict(told),
                     "longest_s": longest})  # fmt: skip
        print(f"{place:10} {kind:14} x {len(runs):4}  {dict(told)}  longest {longest}")
    record = {"torch": torch.__version__, "ranks": RANKS, "seed": given.seed, "timeouts_s":
              {"deaths": DEADLY_TIMEOUT_S, "silence": SILENT_TIMEOUT_S}, "rows": rows}  # fmt: skip
    given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
