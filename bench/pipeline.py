"""The bubble of a pipeline on a clock, under each of torch's schedules, beside (G - 1) / (M + G - 1).

    python bench/pipeline.py --out bench/results/pipeline.json

Stages sleep instead of computing, as a GPU would leave the processor free: a unit forward, one for the gradient of what
they take and one for that of their weights.  So local ranks, more than there are processors, keep the time of ranks of
their own.  Stages have unequal grids, and what passes between them moves by ndtp's messages.  A step is the median of
the slowest rank; its bubble is what is left of it beside the time that a rank sleeps.  Interleaved schedules have two
stages a rank, of half the time each.  Gradients are compared with those of one rank that runs all stages, first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import ndtp
from ndtp import Grid, Layout

SHAPE = (8, 16)
# Where its stages are: one a rank, in turns, or there and back.
SCHEDULES: dict[str, tuple[Any, str]] = {
    "GPipe": (ScheduleGPipe, "one"),
    "1F1B": (Schedule1F1B, "one"),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, "turns"),
    "interleaved zero bubble": (ScheduleInterleavedZeroBubble, "turns"),
    "zero bubble V": (ScheduleZBVZeroBubble, "back"),
}


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class PacedStage(nn.Module):
    """x + w, where w's gradient is a path of its own, as in a layer; the first stage's x has a gradient, too."""

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.unit_s = unit_s
        self.weight, self.before = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x + self.before
        return Sleep.apply(x, self.unit_s, self.unit_s) + Sleep.apply(self.weight, 0.0, self.unit_s)  # type: ignore[no-untyped-call]


def grids_of(ranks: int, groups: int, stages: int) -> tuple[list[Grid], list[tuple[Layout, Layout]]]:
    """Stages on grids of two kinds, of which one splits rows and the other features."""
    each = ranks // groups
    grids = [Grid({"xy"[i % groups % 2]: each}) for i in range(stages)]
    layouts = [Layout(g, "x", None) if "x" in g else Layout(g, None, "y") for g in grids]
    return grids, [(layout, layout) for layout in layouts]


def total(y: Tensor, target: Tensor) -> Tensor:
    return (y * target).sum()


def measure(name: str, groups: int, micro_batches: int, unit_s: float, repeats: int) -> list[float]:
    """Seconds of each step on this rank."""
    kind, where = SCHEDULES[name]
    count = groups * (1 if where == "one" else 2)
    grids, layouts = grids_of(dist.get_world_size(), groups, count)
    ranks = None
    if where == "back":
        each = dist.get_world_size() // groups
        there = [range(i * each, (i + 1) * each) for i in range(groups)]
        ranks = [*there, *reversed(there)]
        grids, layouts = ([*x[:groups], *reversed(x[:groups])] for x in (grids, layouts))
    pipeline = ndtp.Pipeline(grids, SHAPE, layouts=layouts, ranks=ranks, groups=groups if where == "turns" else None)
    share = groups / count
    stages = [ndtp.PipelineStage(PacedStage(unit_s * share), pipeline, i) for i in pipeline.stages_of(dist.get_rank())]
    schedule = kind(
        stages[0] if where == "one" else stages, n_microbatches=micro_batches, loss_fn=total, scale_grads=False
    )
    whole = torch.arange(float(micro_batches * SHAPE[0] * SHAPE[1])).view(-1, SHAPE[1])
    x = [stage.rows(whole, micro_batches) for stage in stages if stage.is_first]
    target = next((stage.rows(whole, micro_batches) for stage in stages if stage.is_last), None)
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        schedule.step(*x, target=target, return_outputs=False)
        times.append(time.perf_counter() - began)
    for stage in stages:
        mine = stage.rows(whole, micro_batches, stage.in_layout).sum() * (repeats + 1)
        torch.testing.assert_close(stage.submod.weight.grad, mine)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4], help="sets of ranks that stages are on")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--unit-ms", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    unit_s, rows = options.unit_ms / 1e3, []
    print(f"{'schedule':24} {'G':>2} {'v':>2} {'M':>3} {'step ms':>9} {'bubble':>7} {'(G-1)/(vM+G-1)':>15}")
    for groups in options.groups:
        for name in options.schedules:
            for count in options.micro_batches:
                by_rank = ndtp.testing.run(
                    measure, options.ranks, args=(name, groups, count, unit_s, options.repeats), timeout=600
                )
                step = statistics.median(max(each) for each in zip(*by_rank, strict=True))
                turns = 1 if SCHEDULES[name][1] == "one" else 2
                row = {
                    "schedule": name, "groups": groups, "stages_a_rank": turns, "micro_batches": count,
                    "step_ms": round(step * 1e3, 2),
                    "bubble": round(1 - 3 * unit_s * count / step, 4),
                    "formula": round((groups - 1) / (turns * count + groups - 1), 4),
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{name:24} {groups:2} {turns:2} {count:3} {row['step_ms']:9.1f} "
                    f"{row['bubble']:7.3f} {row['formula']:15.3f}"
                )
    if options.out:
        settings = {"date": str(date.today()), "ranks": options.ranks, "unit_ms": options.unit_ms}
        options.out.write_text(json.dumps({**settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
