"""`ndtp bench step`: wall time of a step across grids, on real ranks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ndtp.algebra.grid import Grid
from ndtp.cli.common import (
    COUNT,
    COUNT_OR_NONE,
    PRESETS,
    SIZE,
    JsonOption,
    axis_sizes,
    console,
    dtype_of,
    is_first_rank,
    num_ranks,
    one_of,
    print_table,
    world_size,
    write_json,
)
from ndtp.cli.progress import Bar
from ndtp.errors import GridError, LayoutError
from ndtp.planner.fields import in_digits

if TYPE_CHECKING:
    from rich.console import Console

    from ndtp.measure.step import StepJob
    from ndtp.measure.volume import BlockShape, VolumeCase

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
COMPARISONS = {"torch": ("torch Colwise/Rowwise", "torch sequence parallel"), "megatron": ("Megatron-style 1D",)}


LocalRanksOption = Annotated[
    int | None, typer.Option(callback=COUNT, help="Local ranks; under torchrun all of its ranks.")
]
RivalsOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Rivals in the same run: torch, megatron.", callback=one_of(*COMPARISONS)),
]


def step(
    ranks: LocalRanksOption = None,
    tokens: Annotated[int, typer.Option(callback=SIZE, help="Rows of the block.")] = 1024,
    hidden: Annotated[int, typer.Option(callback=SIZE, help="Features outside of the block.")] = 256,
    ffn: Annotated[int, typer.Option(callback=SIZE, help="Features inside of the block.")] = 1024,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.", callback=dtype_of(*DTYPES))] = "fp32",
    grids: Annotated[
        list[str] | None, typer.Option("--grid", metavar="'z=2 x=2 y=2'", help="Grids; default: the best by volume.")
    ] = None,
    top: Annotated[int, typer.Option(callback=COUNT, help="How many grids, where none is named.")] = 6,
    rounds: Annotated[int, typer.Option(callback=COUNT, help="Steps of every grid, interleaved.")] = 10,
    warmup: Annotated[int, typer.Option(callback=COUNT_OR_NONE, help="Rounds before these.")] = 2,
    together: Annotated[
        int | None, typer.Option(callback=COUNT, help="Steps before a device is waited for; default: 20, on CPUs 1.")
    ] = None,
    hardware: Annotated[str, typer.Option(metavar="NAME|FILE.toml", help=f"Predict for this. {PRESETS}.")] = "cpu",
    compare: RivalsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time a training step of a block across grids on real ranks, checked against dense first.

    Ctrl-C keeps what was measured so far.

    Example: ndtp bench step --ranks 8 --tokens 4096 --hidden 512 --ffn 2048 --compare torch
    """
    from ndtp.measure import check_room
    from ndtp.measure.step import StepJob, read_log
    from ndtp.measure.volume import BlockShape, bytes_needed
    from ndtp.planner.hardware import Hardware

    world = world_size()
    count = num_ranks(ranks, grid_of(grids[0]).num_ranks if grids else 4, least=2)
    profile, shape = Hardware.load(hardware), BlockShape(tokens, hidden, ffn)
    profile.flops_per_second(DTYPES[dtype])  # raises where the profile has no rate for it
    chosen = choose(grids or [], count, shape, top)
    rivals = tuple(name for word in dict.fromkeys(compare or []) for name in COMPARISONS[word])
    if world is None:
        needed = bytes_needed(chosen, shape, DTYPES[dtype], bool(rivals))
        check_room("bench step", needed, "fewer --tokens, smaller sizes, or a smaller --top")
    out, device = console(json_file), _device(world)
    together = together or (20 if device == "cuda" else 1)
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "rounds.jsonl")
        job = StepJob(tuple(chosen), shape, DTYPES[dtype], rounds, warmup, rivals, log, device, together=together)
        interrupted = _is_interrupted(out, job, count)
        if not is_first_rank():
            return
        results = read_log(log)
    if not any(result.rounds or result.wrong for result in results):
        out.print("interrupted before anything was measured")
        raise typer.Exit(130)
    rows = describe(chosen, results, shape, DTYPES[dtype], profile)
    print_table(out, _table(rows, count, shape, dtype, profile.name))
    write_json(json_file, {
        "ranks": count, "tokens": tokens, "hidden": hidden, "ffn": ffn, "dtype": dtype, "hardware": profile.name,
        "rounds": rounds, "together": together, "interrupted": interrupted, "rows": rows,
    })  # fmt: skip
    raise typer.Exit(1 if any(row["wrong"] for row in rows) else 130 if interrupted else 0)


def _is_interrupted(out: Console, job: StepJob, count: int) -> bool:
    """Run a job, and return whether Ctrl-C ended it."""
    from ndtp.measure.step import num_rounds

    try:
        with Bar(out, "rounds", job.rounds + job.warmup) as bar, bar.following(lambda: num_rounds(job.log)):
            _run(job, count)
    except KeyboardInterrupt:
        return True
    return False


def choose(texts: list[str], ranks: int, shape: BlockShape, top: int) -> list[VolumeCase]:
    """The grids that were named, or the `top` ones by volume.

    Raises:
        GridError: a grid of another number of ranks, or that does not divide the sizes; no grid that divides them.
        typer.BadParameter: text that names none.
    """
    from ndtp.measure.volume import cases

    if not texts:
        found = [case for case in cases(ranks, shape, top) if case.scheme != "1d"][:top]
        if not found:
            raise GridError(
                f"bench step: no grid of {ranks} ranks divides the rows of {shape} (tokens x hidden x ffn); "
                f"fix: --tokens {-(-shape.tokens // ranks) * ranks}"
            )
        return found
    return [named_case("bench step", text, ranks, shape) for text in texts]


def named_case(command: str, text: str, ranks: int, shape: BlockShape, scheme: str | None = None) -> VolumeCase:
    """Return the grid that --grid names, which has as many ranks as the run and divides the sizes.

    Raises:
        GridError: it has not, or does not; names the options with which it would.
        typer.BadParameter: text that names none.
    """
    from ndtp.algebra.schemes import scheme_of
    from ndtp.measure.volume import BlockShape, VolumeCase

    grid = grid_of(text)
    if grid.num_ranks != ranks:
        fix = "a --grid of as many" if world_size() else f"--ranks {grid.num_ranks}"
        raise GridError(f"{command}: --grid {text!r} has {grid.num_ranks} ranks, the run has {ranks}; fix: {fix}")
    case = VolumeCase(grid, scheme or scheme_of(grid))
    near = BlockShape(*(-(-size // ranks) * ranks for size in vars(shape).values()))
    try:
        case.predicted(shape, 1)
    except LayoutError as error:
        why = str(error).splitlines()[0].removesuffix(".")
        options = " ".join(f"--{name} {size}" for name, size in vars(near).items() if size != getattr(shape, name))
        case.predicted(near, 1)  # raises where it is not the sizes
        raise GridError(f"{command}: --grid {text!r}: {why}\n  fix: {options}, or another --grid") from None
    return case


def grid_of(text: str) -> Grid:
    """The grid of dp, z, x and y that --grid names.

    Raises:
        typer.BadParameter: text that names none.
    """
    axes = ("dp", "z", "x", "y")
    return Grid(dict.fromkeys(axes, 1) | axis_sizes(text, "--grid", axes))


def _device(world: int | None) -> str:
    import torch

    return "cuda" if world and torch.cuda.is_available() else "cpu"


def _run(job: StepJob, ranks: int) -> None:
    import ndtp.testing
    from ndtp.measure.step import measure

    if job.device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ndtp.testing.run(measure, ranks, args=(job,), timeout=24 * 3600)


def describe(
    chosen: list[VolumeCase], results: list[Any], shape: BlockShape, dtype: str, profile: Any
) -> list[dict[str, Any]]:
    """Rows of the table: what was measured beside what was predicted."""
    from ndtp.measure.step import ranks_of
    from ndtp.planner.block_cost import Block
    from ndtp.planner.request import Request
    from ndtp.planner.search import predict

    count = chosen[0].grid.num_ranks
    block = Block.mlp(shape.tokens, shape.hidden, shape.ffn)
    request = Request((block,), count, profile, dtype=dtype, captured=False)
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
            "host_ms": result.host_ms,
            "algbw_gbs": result.received_bytes / result.step_ms / 1e6 if result.step_ms else None,
            "busbw_gbs": result.received_bytes / exposed / 1e6 if exposed else None,
            "local_ms": result.local_ms or None, "exposed_ms": exposed,
            "roof_ms": flops / profile.flops_per_second(dtype) * 1e3,
            "predicted_ms": want, "planner_rank": place, "measured_rank": real,
        })  # fmt: skip
    return rows


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
        cells = [in_digits(row["received_bytes"] / 2**20, 4), *map(_number, numbers), str(row["wrong"])]
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
