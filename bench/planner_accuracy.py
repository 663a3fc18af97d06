"""Does the planner choose well, and predict well?  Every grid of the ranks at hand, measured and predicted.

    for rate in 200mbit 400mbit 600mbit; do
        python bench/slow_network.py --ranks 8 --rate $rate --burst 80kb -- \
            python bench/planner_accuracy.py --rate $rate --out bench/results/planner_accuracy.json
    done

Calibrates a profile on the ranks (the code of `ndtp bench calibrate`), then times a training step of each block on
every grid (the code of `ndtp bench step`: checked against dense first, grids interleaved, median of the slowest rank),
and compares with what the planner predicts from that profile, and with its first choice.  `--out` keeps the runs at
other rates that a file holds.  `--report FILE` prints the summary of a file, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ndtp.measure import calibrate, step
from ndtp.measure.volume import BlockShape, VolumeCase
from ndtp.planner.block_cost import Block
from ndtp.planner.grid_plan import GridPlan
from ndtp.planner.hardware import Hardware
from ndtp.planner.request import Request
from ndtp.planner.search import search

DTYPE = "float32"
SHAPES = "1024x512x2048,2048x256x1024,512x512x2048"  # neither dwarfs the other; activations do; weights do


def profile_of(arguments: argparse.Namespace) -> tuple[Hardware, list[calibrate.Fit], str]:
    """Every rank fits the same samples, and gets the same profile."""
    largest = int(arguments.largest * 2**20)
    job = calibrate.CalibrationJob(
        ranks_per_node=1,
        dtype=DTYPE,
        rank_bytes=tuple(largest >> shift for shift in (6, 4, 2, 0)),
        dims=(64, 256, 1024),
        max_products=2**28,
        repeats=arguments.repeats,
        sustain_seconds=arguments.sustain,
    )
    samples = calibrate.measure(job)
    hardware, fits = calibrate.fit(samples, job, arguments.rate)
    return hardware, fits, calibrate.to_toml(hardware, fits, samples)


def measure(shape: BlockShape, hardware: Hardware, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of each grid, in the planner's order, and how well it chose; on rank 0, elsewhere nothing."""
    block = Block.mlp(shape.tokens, shape.hidden, shape.ffn)
    plans = search(Request((block,), dist.get_world_size(), hardware, dtype=DTYPE))
    cases = tuple(VolumeCase(plan.grid, plan.scheme) for plan in plans)
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "rounds.jsonl")
        step.measure(step.StepJob(cases, shape, DTYPE, arguments.rounds, arguments.warmup, (), log, local=False))
        results = step.read_log(log)
    return judge(plans, results) if dist.get_rank() == 0 else {}


def judge(plans: list[GridPlan], results: list[step.StepResult]) -> dict[str, Any]:
    """
    Raises:
        SystemExit: a grid gave a wrong result; nothing was timed.
    """
    rows = []
    for plan, result in zip(plans, results, strict=True):
        if result.wrong or result.step_ms is None:
            raise SystemExit(f"planner_accuracy: {result.name} has {result.wrong} wrong elements")
        parts = {"gemm_ms": plan.gemm_ms, "exposed_ms": plan.exposed_ms}
        rows.append({
            "grid": result.name, "received_bytes": result.received_bytes, "predicted_ms": plan.step_ms,
            "measured_ms": result.step_ms, "ratio": plan.step_ms / result.step_ms, **parts,
        })  # fmt: skip
    best = min(rows, key=lambda row: row["measured_ms"])
    return {
        "first_choice": rows[0]["grid"],
        "best_measured": best["grid"],
        "first_over_best": rows[0]["measured_ms"] / best["measured_ms"],
        "within_25_percent": sum(abs(row["ratio"] - 1) <= 0.25 for row in rows) / len(rows),
        "rows": rows,
    }


def report(results: dict[str, Any]) -> None:
    print(f"{'rate':>9}  {'block':18} {'first choice':18} {'best measured':18} {'first/best':>10} {'within 25 %':>12}")
    within, count = 0, 0
    for rate, run in results["runs"].items():
        for name, found in run["blocks"].items():
            names = f"{found['first_choice']:18} {found['best_measured']:18}"
            shares = f"{found['first_over_best']:10.3f} {found['within_25_percent']:12.0%}"
            print(f"{rate:>9}  {name:18} {names} {shares}")
            within += sum(abs(row["ratio"] - 1) <= 0.25 for row in found["rows"])
            count += len(found["rows"])
    print(f"{within} of {count} steps predicted within 25 %")
    for rate, run in results["runs"].items():
        for name, found in run["blocks"].items():
            for row in found["rows"]:
                if abs(row["ratio"] - 1) > 0.25:
                    print(f"  miss: {rate} {name} {row['grid']}: ", end="")
                    print(f"{row['predicted_ms']:.0f} ms predicted, {row['measured_ms']:.0f} ms measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="of the links, as given to slow_network.py; names the run in the result")
    parser.add_argument("--shapes", default=SHAPES, help="blocks, as tokens x hidden x ffn; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each size in the calibration")
    parser.add_argument("--largest", type=float, default=1.0, help="MiB of a rank's largest share in the calibration")
    parser.add_argument("--sustain", type=float, default=0.1, help="seconds for which products are repeated there")
    parser.add_argument("--out", type=Path, help="JSON; other rates in it are kept")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the summary of a result")
    arguments = parser.parse_args()
    if arguments.report:
        return report(json.loads(arguments.report.read_text()))
    if not arguments.rate:
        parser.error("give --rate, the rate of the links")
    try:
        shapes = [BlockShape(*map(int, text.split("x"))) for text in arguments.shapes.split(",")]
    except (TypeError, ValueError):
        parser.error(f"--shapes {arguments.shapes}: write it like {SHAPES}")
    begin = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hardware, fits, toml = profile_of(arguments)
    if dist.get_rank() == 0:
        print(f"{toml}\ncalibrated in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    blocks = {}
    for shape in shapes:
        blocks[str(shape)] = measure(shape, hardware, arguments)
        if dist.get_rank() == 0:
            print(f"{shape} measured, {time.monotonic() - begin:.0f} s since the start", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        write(blocks, fits, toml, arguments)
    dist.barrier()
    dist.destroy_process_group()


def write(blocks: dict[str, Any], fits: list[calibrate.Fit], toml: str, arguments: argparse.Namespace) -> None:
    results: dict[str, Any] = {"runs": {}}
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text())
    results |= {
        "date": str(date.today()),
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "dtype": DTYPE,
        "unit": "ms of a training step, median of the slowest rank; gloo on CPUs, no NCCL figure",
    }
    run = {"rounds": arguments.rounds, "profile": toml, "fits": [asdict(fit) for fit in fits], "blocks": blocks}
    results["runs"][arguments.rate] = run
    for name, found in blocks.items():
        print(f"\n{name} at {arguments.rate}\n{'grid':20} {'MiB':>8} {'predicted':>10} {'measured':>10} {'ratio':>7}")
        for row in found["rows"]:
            times = f"{row['predicted_ms']:7.0f} ms {row['measured_ms']:7.0f} ms {row['ratio']:7.2f}"
            print(f"{row['grid']:20} {row['received_bytes'] / 2**20:8.2f} {times}")
    print()
    report(results)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
