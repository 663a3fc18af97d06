"""`ndtp bench step`: wall time of a step across grids, on real ranks."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ndtp.cli.common import JsonOption, console, is_first_rank, write_json
from ndtp.errors import GridError
from ndtp.grid import Grid

if TYPE_CHECKING:
    from ndtp.bench.volume import Case, Shape

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
COMPARISONS = {"torch": ("torch Colwise/Rowwise", "torch sequence parallel"), "megatron": ("Megatron-style 1D",)}


def step(
    ranks: Annotated[int | None, typer.Option(help="Local ranks; under torchrun all of its ranks.")] = None,
    tokens: Annotated[int, typer.Option(help="Rows of the block.")] = 1024,
    hidden: Annotated[int, typer.Option(help="Features outside of the block.")] = 256,
    ffn: Annotated[int, typer.Option(help="Features inside of the block.")] = 1024,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    grids: Annotated[
        list[str] | None, typer.Option("--grid", metavar="'z=2 x=2 y=2'", help="Grids; default: the best by volume.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many grids, where none is named.")] = 6,
    rounds: Annotated[int, typer.Option(help="Steps of every grid, interleaved.")] = 10,
    warmup: Annotated[int, typer.Option(help="Rounds before these.")] = 2,
    hardware: Annotated[
        str, typer.Option(metavar="NAME|FILE.toml", help="Predict for this; `ndtp bench calibrate` measures it.")
    ] = "cpu",
    compare: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Rivals in the same run: torch, megatron.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time a training step of a block across grids on real ranks, checked against dense first.

    Ctrl-C keeps what was measured so far.

    Example: ndtp bench step --ranks 8 --tokens 4096 --hidden 512 --ffn 2048 --compare torch
    """
    from ndtp.bench.step import Job, num_rounds, read_log
    from ndtp.bench.volume import Shape
    from ndtp.hardware import Hardware

    world = int(os.environ.get("WORLD_SIZE", "0")) or None
    count = ranks or world or 4
    if world and ranks and ranks != world:
        raise GridError(f"bench step: --ranks {ranks} under a launcher of {world} ranks; leave --ranks out")
    for name, size in (("ranks", count), ("tokens", tokens), ("hidden", hidden), ("ffn", ffn), ("rounds", rounds)):
        if size < 1:
            raise GridError(f"bench step: --{name} {size} must be at least 1")
    if count < 2:
        raise GridError("bench step: one rank has nothing to compare; fix: --ranks 2 or more")
    if dtype not in DTYPES:
        raise GridError(f"bench step: --dtype {dtype} is not one of {', '.join(DTYPES)}")
    unknown = sorted(set(compare or []) - set(COMPARISONS))
    if unknown:
        raise GridError(f"bench step: --compare {unknown[0]} is not one of {', '.join(COMPARISONS)}")
    profile, shape = Hardware.load(hardware), Shape(tokens, hidden, ffn)
    chosen = choose(grids or [], count, shape, top)
    rivals = tuple(name for word in compare or [] for name in COMPARISONS[word])
    out = console(json_file)
    interrupted = False
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "rounds.jsonl")
        job = Job(tuple(chosen), shape, DTYPES[dtype], rounds, warmup, rivals, log, _device(world))
        first = is_first_rank()
        try:
            with _progress(out, rounds + warmup, lambda: num_rounds(log)) if first else _nothing():
                _run(job, count)
        except KeyboardInterrupt:
            interrupted = True
        if not first:
            return
        results = read_log(log)
    if not any(result.rounds or result.wrong for result in results):
        out.print("interrupted before anything was measured")
        raise typer.Exit(130)
    rows = describe(chosen, results, shape, DTYPES[dtype], profile)
    out.print(_table(rows, count, shape, dtype, profile.name))
    write_json(json_file, {
        "ranks": count, "tokens": tokens, "hidden": hidden, "ffn": ffn, "dtype": dtype, "hardware": profile.name,
        "rounds": rounds, "interrupted": interrupted, "rows": rows,
    })  # fmt: skip
    wrong = any(row["wrong"] for row in rows)
    raise typer.Exit(1 if wrong else 130 if interrupted else 0)


def choose(texts: list[str], ranks: int, shape: Shape, top: int) -> list[Case]:
    """The grids that were named, or the `top` ones by volume.

    Raises:
        GridError: a grid of another number of ranks, or text that names none.
    """
    from ndtp.bench.volume import Case, cases, natural_scheme

    if not texts:
        return [case for case in cases(ranks, shape, top) if case.scheme != "1d"][:top]
    chosen = []
    for text in texts:
        grid = grid_of(text, "bench step")
        if grid.num_ranks != ranks:
            raise GridError(f"bench step: --grid {text!r} has {grid.num_ranks} ranks, the run has {ranks}")
        case = Case(grid, natural_scheme(grid))
        case.predicted(shape, 1)  # raises where the sizes do not divide
        chosen.append(case)
    return chosen


def grid_of(text: str, command: str) -> Grid:
    """The grid of dp, z, x and y that --grid names.

    Raises:
        GridError: text that names none.
    """
    sizes = {"dp": 1, "z": 1, "x": 1, "y": 1}
    for word in text.replace(",", " ").split():
        axis, _, size = word.partition("=")
        if axis not in sizes or not size.isdigit():
            raise GridError(f"{command}: --grid {text!r}: write it like 'z=2 x=2 y=2'; axes: dp z x y")
        sizes[axis] = int(size)
    return Grid(sizes)


def _device(world: int | None) -> str:
    import torch

    return "cuda" if world and torch.cuda.is_available() else "cpu"


def _run(job: Any, ranks: int) -> None:
    import ndtp.testing
    from ndtp.bench.step import measure

    if job.device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ndtp.testing.run(measure, ranks, args=(job,), timeout=24 * 3600)


def describe(chosen: list[Case], results: list[Any], shape: Shape, dtype: str, profile: Any) -> list[dict[str, Any]]:
    """Rows of the table: what was measured beside what was predicted."""
    from ndtp.bench.step import ranks_of
    from ndtp.block_cost import Block
    from ndtp.planner import Request, predict

    count = chosen[0].grid.num_ranks
    request = Request((Block.mlp(shape.tokens, shape.hidden, shape.ffn),), count, profile, dtype=dtype)
    predicted: list[float | None] = [float(predict(request, case.grid).total) * 1e3 for case in chosen]
    predicted += [None] * (len(results) - len(chosen))
    schemes = [case.scheme for case in chosen] + [""] * (len(results) - len(chosen))
    measured = ranks_of(
        [result.step_ms if want is not None else None for result, want in zip(results, predicted, strict=True)]
    )
    flops = 12 * shape.tokens * shape.hidden * shape.ffn / count
    rows = []
    for result, scheme, want, place, real in zip(
        results, schemes, predicted, ranks_of(predicted), measured, strict=True
    ):
        exposed = result.exposed_ms
        rows.append({
            "name": result.name, "scheme": scheme, "received_bytes": result.received_bytes, "wrong": result.wrong,
            "rounds": result.rounds, "step_ms": result.step_ms, "slowest_ms": result.slowest_ms,
            "algbw_gbs": result.received_bytes / result.step_ms / 1e6 if result.step_ms else None,
            "busbw_gbs": result.received_bytes / exposed / 1e6 if exposed else None,
            "local_ms": result.local_ms or None, "exposed_ms": exposed,
            "roof_ms": flops / profile.flops_per_second(dtype) * 1e3,
            "predicted_ms": want, "planner_rank": place, "measured_rank": real,
        })  # fmt: skip
    return rows


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _progress(out: Any, total: int, done: Any) -> Iterator[None]:
    """A bar with the time left, fed from the log by a thread: the main one waits for the ranks."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    ended = threading.Event()
    with Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task("rounds", total=total)

        def follow() -> None:
            while not ended.wait(0.2):
                progress.update(task, completed=done())

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _table(rows: list[dict[str, Any]], ranks: int, shape: Any, dtype: str, hardware: str) -> Table:
    title = f"step of {shape} (tokens x hidden x ffn), {dtype}, {ranks} ranks; predicted for {hardware}"
    table = Table(title=title, title_justify="left", caption_justify="left", padding=(0, 0), pad_edge=False)
    table.add_column("grid")
    for heading in ("MiB", "ms", "algbw\nGB/s", "busbw\nGB/s", "#wrong", "local\nms", "exposed\nms", "roof\nms",
                    "predicted\nms", "rank\nplan/real"):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = [row[key] for key in ("step_ms", "algbw_gbs", "busbw_gbs")]
        times = [row[key] for key in ("local_ms", "exposed_ms", "roof_ms", "predicted_ms")]
        place = f"{row['planner_rank']}/{row['measured_rank'] or '-'}" if row["planner_rank"] else "-"
        cells = [f"{row['received_bytes'] / 2**20:.4g}", *map(_number, numbers), str(row["wrong"])]
        table.add_row(row["name"], *cells, *map(_number, times), place)
    done = max(row["rounds"] for row in rows)
    table.caption = (
        f"Medians of {done} rounds of the slowest rank.  MiB: received; algbw: over the step, busbw: over "
        "the exposed part; local: the same products without communication; exposed: the rest; roof: "
        "products at the profile's rate; rank: of the planner's prediction, and of the clock."
    )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
