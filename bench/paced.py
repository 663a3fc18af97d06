"""How far schedules are from what no schedule can beat: `bench/overlap.py --paced`, see `ndtp.measure.paced`.

    python bench/slow_network.py --ranks 8 --rate 200mbit --timeout 5400 -- \
        python bench/overlap.py --paced --rate 200mbit --out bench/results/paced.json

One block and four residual ones on four grids; products, activations and sums sleep for as long as a device would
take, all together half as long as the communication, as long, and twice.  "bound" is the longer of the two, phase by
phase; "timeline" is what the tasks on two clocks take with the links that were measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist

from ndtp.cli.bench_step import grid_of
from ndtp.measure.paced import PacedJob, links_of, measure_paced
from ndtp.measure.volume import BlockShape, VolumeCase
from ndtp.runtime.process_grid import ProcessGrid

GRIDS = ("1d-sp:x=8", "2d:x=2,y=4", "3d:z=4,y=2", "3d:z=2,x=2,y=2")
Rows = list[dict[str, Any]]


def main(arguments: argparse.Namespace, rank: int, in_a_process_of_its_own: Callable[..., Rows]) -> None:
    found: dict[str, Rows] = {}
    for case in arguments.grids or GRIDS:
        found[case] = in_a_process_of_its_own(case, arguments, measured)
        if rank == 0:
            report(case, found[case])
            write(found, arguments)
    wrong = [line for rows in found.values() for row in rows for line in row["wrong"]]
    if wrong:
        sys.exit(f"overlap: {'; '.join(wrong)}")


def measured(case: str, arguments: argparse.Namespace) -> Rows:
    """All balances and blocks on one grid."""
    torch.set_num_threads(1)
    store, rank, ranks = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=dist.PrefixStore(case, store), rank=rank, world_size=ranks)
    scheme, _, axes = case.partition(":")
    grid = grid_of(axes)
    wire = links_of(ProcessGrid(grid), torch.empty(1))
    rows = []
    for blocks in arguments.blocks:
        for balance in arguments.balances:
            job = PacedJob(
                VolumeCase(grid, scheme),
                BlockShape(arguments.tokens, arguments.hidden, arguments.inner),
                "float32",
                "auto",
                arguments.repetitions,
                warmup=1,
                blocks=blocks,
                balance=balance,
            )
            rows.append({"blocks": blocks, "balance": balance} | rounded(measure_paced(job, wire).summary))
    dist.barrier()
    dist.destroy_process_group()
    return rows


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def report(case: str, rows: Rows) -> None:
    print(f"{case:20} blocks  balance  chunks      step     bound  timeline  step/bound  step/timeline")
    for row in rows:
        times = " ".join(f"{row[key]:6.0f} ms" for key in ("step_ms", "bound_ms", "predicted_ms"))
        ratios = f"{row['over_bound']:11.2f} {row['over_predicted']:14.2f}"
        print(f"{'':20} {row['blocks']:6} {row['balance']:8} {row['chunks']:8} {times} {ratios}", flush=True)


def write(grids: dict[str, Rows], arguments: argparse.Namespace) -> None:
    if arguments.out is None:
        return
    results = {
        "date": str(date.today()),
        "torch": torch.__version__,
        "ranks": int(os.environ["WORLD_SIZE"]),
        "link": arguments.rate,
        "block": [arguments.tokens, arguments.hidden, arguments.inner],
        "dtype": "float32",
        "repetitions": arguments.repetitions,
        "unit": "ms, median of the slowest rank; local work asleep, gloo on CPUs",
        "grids": grids,
    }
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
