"""What a step of the demo costs more because ranks compare their calls, backwards and optimizer steps.

    python bench/same_on_all_ranks.py [--ranks 2] [--steps 200] [--out bench/results/same_on_all_ranks.json]

Blocks of steps with the comparison and without it take turns on one model.  Two figures of processor time come out:

- `within`: what the thread spends in the comparison's own code, of all that the process spends in a step.  Other
  programs on the machine hardly change it.
- `apart`: how much more a step takes with the comparison than without.  It has the wakes of a rank that sleeps and all
  that is not in the comparison's code.  Each block of steps with it is compared with the mean of the blocks before and
  behind it, which have none; the median over all of them comes with its interval of 95 %, by resampling.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

import ndtp
import ndtp.testing
from ndtp.cli.demo_training import DemoTask
from ndtp.models import same_optimizers
from ndtp.models.byte_model import VOCABULARY, ByteModel
from ndtp.models.compared_calls import calls_of
from ndtp.models.same_calls import SameCalls
from ndtp.runtime.step_state import StepState

# All of the comparison's own code that a step of training enters: hooks of modules, of gradients and of optimizers, and
# what the grid notes of weights that are used.  `same_optimizers` has functions, which are put in place before torch
# takes them as hooks.
PLACES: list[tuple[Any, tuple[str, ...]]] = [
    (SameCalls, ("begin", "end", "_compare_backward", "_ended", "_expect_outside")),
    (same_optimizers, ("_before", "_after")),
    (StepState, ("note_uses",)),
]
GRIDS = {2: {"y": 2}, 4: {"x": 2, "y": 2}, 8: {"z": 2, "x": 2, "y": 2}}
BLOCK = 8  # steps, the first of which is left out: all weights may be compared there


class Watched:
    """Counts the processor time that a thread spends in the comparison's code, less what reading the clock takes."""

    def __init__(self) -> None:
        self.spent, self._depth = 0.0, 0
        self._kept: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Watched:
        for kind, names in PLACES:
            for name in names:
                self._kept.append((kind, name, getattr(kind, name)))
                setattr(kind, name, self._timed(getattr(kind, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for kind, name, method in self._kept:
            setattr(kind, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.thread_time

        def run(*arguments: Any, **named: Any) -> Any:
            # Read twice: a call of the clock takes longer here than where nothing else runs between two of them.
            first, begin, self._depth = clock(), clock(), self._depth + 1
            try:
                return method(*arguments, **named)
            finally:
                self._depth -= 1
                self.spent += 0 if self._depth else clock() - begin - (begin - first)

        return run


def measure(sizes: dict[str, int], steps: int) -> dict[str, Any]:
    """Milliseconds of processor time of a step on this rank: of each block of steps by the median, and within the
    comparison by the mean, since not every step is looked at whole.  Blocks of odd numbers are those without the
    comparison.
    """
    task = DemoTask.on(8, steps)
    torch.manual_seed(0)
    with Watched() as watched:
        mesh = ndtp.ProcessGrid(ndtp.Grid(sizes))
        model = ByteModel(task.sizes).to_grid(mesh, "3d")
        calls = calls_of(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        ids = torch.randint(VOCABULARY, (task.batch, task.context + 1), generator=torch.Generator().manual_seed(0))
        blocks: list[list[float]] = []
        within: list[float] = []
        for step in range(2 * steps + BLOCK):
            is_on = step // BLOCK % 2 == 0
            if step % BLOCK == 0:
                blocks.append([])
                calls.check = None if is_on else False
                # As where nobody has ever compared: no use of a weight is noted, and no loss is waited for.
                mesh.step.uses, mesh.step.expect_backward = [] if is_on else None, None
            begin, before = time.process_time(), watched.spent
            optimizer.zero_grad()
            model(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
            if step >= BLOCK and step % BLOCK:
                blocks[-1].append((time.process_time() - begin) * 1e3)
                within += [(watched.spent - before) * 1e3] if is_on else []
    return {"blocks": [statistics.median(block) for block in blocks[1:]], "within": statistics.mean(within)}


def apart(blocks: list[float]) -> tuple[float, tuple[float, float]]:
    """How much more percent blocks at odd places take than their neighbours, and the interval of 95 % of that."""
    more = [100 * (2 * blocks[i] / (blocks[i - 1] + blocks[i + 1]) - 1) for i in range(1, len(blocks) - 1, 2)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(more, k=len(more))) for _ in range(2000))
    return statistics.median(more), (medians[50], medians[-50])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=list(GRIDS), default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = GRIDS[arguments.ranks]
    found = ndtp.testing.run(measure, arguments.ranks, args=(sizes, arguments.steps), timeout=3600)
    blocks = [statistics.mean(of_ranks) for of_ranks in zip(*(rank["blocks"] for rank in found), strict=True)]
    step_off = statistics.median(blocks[::2])
    within = statistics.mean(rank["within"] for rank in found)
    more, (least, most) = apart(blocks)
    print(
        f"demo's model on {ndtp.Grid(sizes)}: a step takes {step_off:.1f} ms of a processor on each rank; "
        f"comparing takes {within:.2f} ms of it, {100 * within / step_off:.2f} %; "
        f"steps with it take {more:+.2f} % ({least:+.2f} to {most:+.2f})"
    )
    if arguments.out:
        result = {
            "date": str(date.today()),
            "torch": torch.__version__,
            "cpu": platform.machine(),
            "unit": "median milliseconds of processor time of a step, mean over ranks",
            "ranks": arguments.ranks,
            "grid": sizes,
            "steps": arguments.steps,
            "step_off": round(step_off, 3),
            "within": round(within, 3),
            "within_percent": round(100 * within / step_off, 3),
            "apart_percent": round(more, 3),
            "apart_percent_interval": [round(least, 3), round(most, 3)],
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
