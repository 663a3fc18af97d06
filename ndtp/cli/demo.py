"""`ndtp demo`: real text through 1D, 2D and 3D tensor-parallel blocks on local ranks, against the dense model."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ndtp.algebra.grid import Grid
from ndtp.cli.common import (
    MAX_COUNT,
    JsonOption,
    RanksOption,
    console,
    is_first_rank,
    must_be,
    num_ranks,
    print_table,
    write_json,
    writing,
)
from ndtp.cli.progress import Runner
from ndtp.planner.fields import Number, reason, unwritable

if TYPE_CHECKING:
    from ndtp.cli.demo_training import DemoRun, DemoTask, GridRun


def demo(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the picture and the report go.")] = Path(
        "demo_output"
    ),
    steps: Annotated[
        int, typer.Option(callback=must_be(Number(2, MAX_COUNT, integer=True)), help="Training steps on each grid.")
    ] = 40,
    ranks: RanksOption = None,
    json_file: JsonOption = None,
) -> None:
    """Train on real text: dense against 1D, 2D and 3D tensor parallelism.

    A byte-level transformer learns the help topics of Python's standard library,
    with all of its layers on one grid of ranks after another: embedding, norms,
    attention, MLPs, head and loss. The loss curves must coincide with the dense
    one, and the bytes that each step moves must be those predicted. Writes
    demo.png and report.json.

    Exit status: 0 when all is well, 1 when a loss or a byte is off, 2 on wrong use.

    Example: ndtp demo --output demo_output --steps 100
    """
    from ndtp.cli.demo_training import LOSS_TOLERANCE, DemoTask, GridRun, train
    from ndtp.testing import RankError

    out = console(json_file)
    ranks = num_ranks(ranks)
    start = time.monotonic()
    task = DemoTask.on(ranks, steps)
    if is_first_rank():
        _make(output)
    choices = grids_for(ranks)
    _introduce(out, task, ranks)
    try:
        with Runner(out, ranks, total=steps * (len(choices) + 1)) as runner:
            dense: DemoRun = runner.run("dense", train, task, None, "")[0]
            runs = []
            for scheme, grid in choices:
                sizes = {axis: grid[axis] for axis in grid}
                by_rank = runner.run(f"{scheme.upper()} {grid}", train, task, sizes, scheme, axes=sizes)
                runs.append(GridRun(scheme, grid, tuple(by_rank), dense))
    except RankError as error:
        if is_first_rank():
            print(f"demo failed: {error}", file=sys.stderr)
        write_json(json_file, {"ok": False, "ranks": ranks, "error": str(error), "runs": []})
        raise typer.Exit(1) from None
    failed = [run for run in runs if run.failure]
    result = {
        "ok": not failed, "ranks": ranks, "steps": steps, "tokens_per_step": task.tokens, "tolerance": LOSS_TOLERANCE,
        "seconds": round(time.monotonic() - start, 3),
        "dense": {"step_ms": dense.median_ms, "losses": dense.losses}, "runs": [run.as_json() for run in runs],
    }  # fmt: skip
    _print_table(out, dense, runs)
    _write(out, output, result, dense, runs)
    write_json(json_file, result)
    if failed:
        for run in failed if is_first_rank() else ():
            print(f"demo: {run.name}: {run.failure}", file=sys.stderr)
        raise typer.Exit(1)


def _write(out: Console, output: Path, result: dict[str, object], dense: DemoRun, runs: Sequence[GridRun]) -> None:
    from ndtp.cli.demo_training import LOSS_TOLERANCE

    if is_first_rank():
        from ndtp.cli.demo_picture import draw

        with writing(output / "demo.png"):
            draw(output / "demo.png", dense, runs, LOSS_TOLERANCE)
        write_json(str(output / "report.json"), result)
        out.print(f"{output / 'demo.png'} and {output / 'report.json'} written, {result['seconds']:.0f} s in all")


def grids_for(ranks: int) -> list[tuple[str, Grid]]:
    """1D, 2D and 3D grids that show the difference: the most even ones, and a 3D one that leaves out x."""

    def most_even(names: str) -> Grid | None:
        grids = [grid for grid in Grid.all(ranks, names) if min(grid.shape) > 1 or len(names) == 1]
        return min(grids, key=lambda grid: (max(grid.shape), grid.shape), default=None)

    choices = [("1d", most_even("x")), ("2d", most_even("xy")), ("3d", most_even("zxy")), ("3d", most_even("zy"))]
    if ranks > 1 and not any(scheme == "3d" and grid for scheme, grid in choices):
        choices.append(("3d", most_even("z")))
    return [(scheme, grid) for scheme, grid in choices if grid]


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{directory} cannot be made: {reason(error)}", param_hint="--output") from None
    for name in ("demo.png", "report.json"):
        if problem := unwritable(str(directory / name)):
            raise typer.BadParameter(problem, param_hint="--output")


def _introduce(out: Console, task: DemoTask, ranks: int) -> None:
    out.print(
        f"A byte-level transformer, {task.layers} layers of width {task.sizes.width} with {task.heads} heads, "
        f"{task.tokens} tokens a step, AdamW, fp32:\n{task.steps} steps dense, then with all of its layers on grids "
        f"of {ranks} local ranks.",
        highlight=False,
    )


def _print_table(out: Console, dense: DemoRun, runs: Sequence[GridRun]) -> None:
    from ndtp.cli.demo_training import LOSS_TOLERANCE

    table = Table(title="A training step, and how far its losses are from dense", title_justify="left")
    table.add_column("layers on", no_wrap=True)
    for column in ("bytes predicted", "measured", "ms a step", "last loss", "largest deviation"):
        table.add_column(column, justify="right")
    table.add_row("one rank, dense", "", "", f"{dense.median_ms:.0f}", f"{dense.losses[-1]:.4f}", "")
    for run in runs:
        first = run.by_rank[0]
        equal, near = run.measured_bytes == first.predicted_bytes, run.deviation <= LOSS_TOLERANCE
        table.add_row(
            run.name,
            f"{first.predicted_bytes:,}",
            Text(f"{run.measured_bytes:,}", "green" if equal else "red"),
            f"{first.median_ms:.0f}",
            f"{first.losses[-1]:.4f}",
            Text(f"{run.deviation:.1e}", "green" if near else "red"),
        )
    print_table(out, table)
    least = min(runs, key=lambda run: run.measured_bytes)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    out.print(
        "Bytes are what each rank receives, from the embedding to the loss and back.\n"
        f"All ranks share {cores} cores here, so times tell nothing about GPUs.\n"
        f"{least.name} moves the fewest bytes for these sizes; `ndtp plan` finds the grid that does for yours.",
        highlight=False,
    )
