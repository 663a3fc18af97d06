"""What a checkpoint that is written beside the steps takes of them.

    python bench/save_cost.py --rounds 12

Two ranks train a byte-level model.  Rounds with a save and rounds without take turns; a save is started at the first
step of its round and waited for when all ranks have written, as `ndtp train` does.  What a save adds to a round is
given as a share of 100 steps, between which `ndtp train` saves by default: of the processor time of the main thread, of
that of all threads (the one that writes among them), and of the clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ndtp
from ndtp import Grid, ProcessGrid
from ndtp.models.byte_model import ByteModel, ByteModelSizes
from ndtp.testing import RankPool

RANKS, SIZES, BATCH, CONTEXT, STEPS, BETWEEN = 2, ByteModelSizes(256, 1024, 4, 8), 8, 128, 12, 100
CLOCKS = {"main_thread": time.thread_time, "all_threads": time.process_time, "wall": time.perf_counter}


def measure(rounds: int, folder: str) -> dict[str, Any]:
    mesh = ProcessGrid(Grid(x=RANKS))
    torch.manual_seed(0)
    model = ByteModel(SIZES).to_grid(mesh, "1d-sp", 1)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(256, (BATCH, CONTEXT + 1))

    def run(saves: bool) -> dict[str, float]:
        dist.barrier()
        begin = {name: clock() for name, clock in CLOCKS.items()}
        saving = ndtp.checkpoint.start_save(model, optimizer, f"{folder}/run") if saves else None
        for _ in range(STEPS):
            model(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            flag = torch.tensor(int(saving is not None and not saving.is_written))
            dist.all_reduce(flag, dist.ReduceOp.MAX)  # in every round, as in every step of `ndtp train`
            if saving is not None and not flag:
                saving.wait()
                saving = None
        if saving is not None:
            saving.wait()
        return {name: clock() - begin[name] for name, clock in CLOCKS.items()}

    run(False), run(True)
    taken: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for turn in range(2 * rounds):
        taken[turn % 2 == 1].append(run(turn % 2 == 1))
    found: dict[str, Any] = {"parameters": sum(x.numel() for x in model.parameters())}
    for name in CLOCKS:
        without, with_save = (statistics.median(each[name] for each in taken[saves]) for saves in (False, True))
        extra = [mine[name] - theirs[name] for mine, theirs in zip(taken[True], taken[False], strict=True)]
        step = without / STEPS
        found[name] = {"step_ms": round(1e3 * step, 2), "save_ms": round(1e3 * (with_save - without), 2),
                       "share_of_100_steps": round((with_save - without) / (BETWEEN * step), 4),
                       "spread": round(statistics.stdev(extra) / len(extra) ** 0.5 / (BETWEEN * step), 4)}  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "save_cost.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RankPool(RANKS) as pool:
        by_rank = pool.run(measure, given.rounds, folder, timeout=3600)
    record = {"torch": torch.__version__, "ranks": RANKS, "rounds": given.rounds, "by_rank": by_rank}
    print(json.dumps(record, indent=1))
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
