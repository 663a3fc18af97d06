"""Ranks of a run of `ndtp train` are killed at random times; it goes on from its last checkpoint, to the same losses.

    python bench/restarts.py --kills 20 --steps 200

The run has two ranks, a checkpoint every five steps, written beside the steps, and `--restarts`.  Its losses, step by
step, are compared with those of a run that nobody disturbs: equal to the last digit that the log has (nine).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ndtp.cli.app import app
from ndtp.cli.train_log import LOG, read_log
from ndtp.testing.pool import shared_pool

RANKS = 2
SMALL = ("--batch", "8", "--context", "16", "--layers", "1", "--width", "32", "--heads", "4", "--grid", "dp=2")


def train(output: Path, steps: int, *words: str) -> Any:
    return CliRunner().invoke(app, ["train", *SMALL, "--output", str(output), "--steps", str(steps), *words])


def losses(output: Path) -> list[str]:
    return [row["loss"] for row in read_log(output / LOG)]


def killed_run(output: Path, steps: int, kills: int, save_every: int, draw: random.Random) -> dict[str, Any]:
    """A run whose ranks are killed: each time one of them, when so many steps more were logged, and a moment later."""
    done, at, ended = 0, [], threading.Event()

    def kill() -> None:
        nonlocal done
        for turn in range(kills):
            due = (turn + 1) * steps // (kills + 2)
            while not ended.is_set() and len(losses(output)) < due:
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.05))
            pids: list[int] = []
            while not ended.is_set() and not (pids and all(pids)):  # none between two starts
                pids = shared_pool(RANKS).pids
                time.sleep(0.001)
            if ended.is_set():
                return
            before = len(losses(output))
            os.kill(draw.choice(pids), signal.SIGKILL)
            done += 1
            at.append(before)
            while not ended.is_set() and shared_pool(RANKS).pids == pids:
                time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    words = ("--restarts", str(kills), "--save-every", str(save_every), "--resume", "auto")
    result = train(output, steps, *words)
    ended.set()
    killer.join()
    return {"exit": result.exit_code, "kills": done, "logged_when_killed": at, "stderr": result.stderr}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "restarts.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone, disturbed = Path(folder) / "alone", Path(folder) / "disturbed"
        assert train(alone, given.steps).exit_code == 0
        found = killed_run(disturbed, given.steps, given.kills, given.save_every, random.Random(given.seed))
        print(found.pop("stderr")[-2000:])
        expected, got = losses(alone), losses(disturbed)
        again = train(disturbed, given.steps + 1, "--grid", "x=2")  # the last checkpoint, on another grid
    record = {"ranks": RANKS, "steps": given.steps, "save_every": given.save_every, "seed": given.seed, **found,
              "losses_equal": expected == got, "steps_compared": len(got),
              "goes_on_on_another_grid": again.exit_code == 0}  # fmt: skip
    print(json.dumps(record, indent=1))
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
