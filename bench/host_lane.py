"""What the host works to issue a block: the figures of `ndtp.schedule.host.OWN`, and how far the lane is from a step.

    python bench/host_lane.py [--out bench/results/host_lane.json]

One process, a fake process group (collectives return at once), products that compute nothing, no device: what is left
is the library's own work.  Processor time, so that other programs on the machine count for little.  Each kind of task
is timed inside of a step; the whole step, without such timing, is compared with what the lane says of its tasks.  A
call of NCCL and a launch of a kernel come on top where there is a device: `EAGER` adds what is known of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap import NoProducts
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp
from ndtp.algebra.schemes import block_layouts
from ndtp.runtime import program
from ndtp.schedule.chunk_choice import LinkSpeed, Speeds, products_of
from ndtp.schedule.clocks import replayed
from ndtp.schedule.host import OWN

GRIDS = {"3d": ndtp.Grid(z=2, x=2, y=2), "2d": ndtp.Grid(x=2, y=4), "1d-sp": ndtp.Grid(x=8)}
ROWS, SIZE = 256, 32
WORD = {"multiply": "multiply", "own": "multiply", "activate": "activate", "start": "start", "wait": "wait"}


class Bare(NoProducts):
    """Neither products nor activations compute anything."""

    def activate(self, pre: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        return torch.empty_like(pre) if out is None else out

    def activate_backward(self, grad: Tensor, pre: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        return torch.empty_like(pre) if out is None else out


def lane_microseconds(scheme: str, chunks: int) -> float:
    """The lane of the host: what it says of the tasks of the step."""
    grid = GRIDS[scheme]
    plans = block_layouts(grid, scheme).plans("block", chunks=chunks)
    sizes = [{"m": ROWS, "k": SIZE, "n": 4 * SIZE}, {"m": ROWS, "k": 4 * SIZE, "n": SIZE}]
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    speeds = Speeds({(kind, axis): LinkSpeed(1e-9, 0.0) for kind in kinds for axis in grid.names}, 1e-20, 1e-9)
    products = products_of(plans, sizes, 4, speeds, chunks, after=1e-9)
    return float(replayed(products, speeds, chunks, host=OWN).issued) * 1e6


def step_of(scheme: str, chunks: int) -> Callable[[], None]:
    mesh = ndtp.ProcessGrid(GRIDS[scheme], device_type="cpu", groups_per_axis=2)
    mesh.gemm = Bare()
    block = ndtp.nn.MLP(SIZE, 4 * SIZE, bias=False, mesh=mesh, scheme=scheme, chunks=chunks)
    x = block.in_layout.shard(torch.randn(ROWS, SIZE), 0).requires_grad_()
    parameters = list(block.parameters())

    def step() -> None:
        block(x).sum().backward()
        x.grad = None
        for each in parameters:
            each.grad = None

    return step


def microseconds(step: Callable[[], None], steps: int) -> float:
    """Processor time of all threads of a step: the least of several runs."""
    found = []
    for _ in range(5):
        begin = time.process_time_ns()
        for _ in range(steps):
            step()
        found.append((time.process_time_ns() - begin) / steps / 1e3)
    return min(found)


def by_task(step: Callable[[], None], steps: int) -> dict[str, tuple[float, float]]:
    """Kind of task -> how many there are in a step, and the microseconds of each."""
    spent: dict[str, list[int]] = defaultdict(list)
    lock, run_plainly = threading.Lock(), program._Runner.run

    def run(self: Any, slots: list[Any], recording: Any) -> None:
        for line, (_, runs) in zip(self.lines, self._tasks, strict=True):
            begin = time.thread_time_ns()
            for each in runs:
                each(slots)
            took = time.thread_time_ns() - begin
            with lock:
                spent[WORD.get(line.split()[0], "other")].append(took)

    program._Runner.run = run  # type: ignore[method-assign]
    try:
        for _ in range(steps):
            step()
    finally:
        program._Runner.run = run_plainly  # type: ignore[method-assign]
    empty = statistics.median(_nothing() for _ in range(200))
    return {
        kind: (len(times) / steps, max(0.0, statistics.median(times) - empty) / 1e3) for kind, times in spent.items()
    }


def _nothing() -> int:
    begin = time.thread_time_ns()
    return time.thread_time_ns() - begin


def measure(steps: int) -> dict[str, Any]:
    rows = {}
    for scheme in GRIDS:
        for chunks in (1, 4):
            step = step_of(scheme, chunks)
            for _ in range(20):
                step()
            tasks = by_task(step, steps)
            rows[f"{scheme} {chunks}"] = {
                "step_us": round(microseconds(step, steps), 1),
                "lane_us": round(lane_microseconds(scheme, chunks), 1),
                "tasks": {kind: [round(count, 1), round(each, 1)] for kind, (count, each) in sorted(tasks.items())},
            }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    rows = measure(arguments.steps)
    for name, row in rows.items():
        tasks = "  ".join(f"{kind} {count:g} x {each}" for kind, (count, each) in row["tasks"].items())
        print(f"{name:8} {row['step_us']:7.0f} us a step, by the lane {row['lane_us']:7.0f}   {tasks}")
    if arguments.out:
        cpu = platform.processor() or platform.machine()
        where = {"date": str(date.today()), "torch": torch.__version__, "cpu": cpu}
        record = {**where, "unit": "microseconds of processor time", "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
