"""`ndtp bench overlap`: where the time of a block's step goes on every rank, as a table, a trace and a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ndtp.algebra.schemes import SCHEMES
from ndtp.cli.bench_step import DTYPES, grid_of, named_case
from ndtp.cli.common import (
    COUNT,
    COUNT_OR_NONE,
    PICTURES,
    PRESETS,
    SIZE,
    JsonOption,
    console,
    dtype_of,
    is_first_rank,
    num_ranks,
    one_of,
    print_table,
    world_size,
    writable,
    write_json,
)
from ndtp.cli.overlap_plot import write_pictures
from ndtp.cli.progress import waiting
from ndtp.errors import GridError
from ndtp.planner.fields import integer

MAX_CHUNKS = 1024

if TYPE_CHECKING:
    from rich.console import Console

    from ndtp.measure.overlap_trace import RankTrace, TraceJob
    from ndtp.measure.volume import BlockShape, VolumeCase


TraceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json", help="Chrome trace, for ui.perfetto.dev or chrome://tracing.", callback=writable()
    ),
]
TimelineOption = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="Timeline of all ranks.", callback=writable(*PICTURES))
]


def overlap(
    ranks: Annotated[
        int | None,
        typer.Option(callback=COUNT, help="Local ranks; under torchrun all of its ranks. Default: the grid's, or 4."),
    ] = None,
    grid: Annotated[str | None, typer.Option(metavar="'z=2 x=2 y=2'", help="Default: the best by volume.")] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="1d, 1d-sp, 2d, 2d-features or 3d. Default: the one that uses all axes.", callback=one_of(*SCHEMES)
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(callback=SIZE, help="Rows of the block.")] = 1024,
    hidden: Annotated[int, typer.Option(callback=SIZE, help="Features outside of the block.")] = 256,
    ffn: Annotated[int, typer.Option(callback=SIZE, help="Features inside of the block.")] = 1024,
    chunks: Annotated[str, typer.Option(help="Chunks of rows that overlap, or auto.")] = "4",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.", callback=dtype_of(*DTYPES))] = "fp32",
    rounds: Annotated[int, typer.Option(callback=COUNT, help="Steps; the one of median time is shown.")] = 5,
    warmup: Annotated[int, typer.Option(callback=COUNT_OR_NONE, help="Steps before these.")] = 2,
    paced: Annotated[
        bool,
        typer.Option("--paced", help="Local work sleeps as long as a device would take; for bench/slow_network.py."),
    ] = False,
    balance: Annotated[
        float, typer.Option(help="With --paced: how many times as long as communication local work takes.")
    ] = 1.0,
    blocks: Annotated[int, typer.Option(callback=COUNT, help="With --paced: residual blocks in a row.")] = 1,
    hardware: Annotated[
        str, typer.Option(help=f"With --paced: the device whose ratio of arithmetic to memory counts. {PRESETS}.")
    ] = "h200-ib",
    trace: TraceOption = None,
    plot: TimelineOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure what hides behind what in forward and backward of a block, checked against dense first.

    Example: ndtp bench overlap --grid 'z=2 y=4' --chunks 4 --trace trace.json --plot timeline.png
    """
    from ndtp.measure import check_room
    from ndtp.measure.overlap_trace import TraceJob
    from ndtp.measure.volume import BlockShape, bytes_needed

    world = world_size()
    shape = BlockShape(tokens, hidden, ffn)
    case, device = choose(grid, scheme, ranks, shape), _device(world)
    if world is None:
        check_room("bench overlap", bytes_needed([case], shape, DTYPES[dtype]), "fewer --tokens, or smaller sizes")
    out = console(json_file)
    if paced:
        from ndtp.cli.paced import run_paced
        from ndtp.measure.paced import PacedJob

        timed = PacedJob(
            case, shape, DTYPES[dtype], chunks_of(chunks), rounds, warmup, blocks, checked_balance(balance), hardware
        )
        return run_paced(timed, dtype, out, trace, plot, json_file)
    _measure(
        TraceJob(case, shape, DTYPES[dtype], chunks_of(chunks), rounds, warmup, device), dtype, chunks, out, trace,
        plot, json_file,
    )  # fmt: skip


def _measure(
    job: TraceJob, dtype: str, chunks: str, out: Console, trace: Path | None, plot: Path | None, json_file: str | None
) -> None:
    from ndtp.measure.overlap_trace import num_chunks

    case, shape = job.case, job.shape
    with waiting(out, f"measuring {case.grid.num_ranks} ranks"):
        traces = _run(job)
    if not is_first_rank():
        return
    rows = [each.summary for each in traces]
    wrong = traces[0].wrong
    real = num_chunks(traces)
    cut = f"chunks {real}" + f" of {chunks} asked for" * (str(real) != chunks)
    title = f"{case.scheme} on {case}, block {shape}, {dtype}, {cut}"
    if wrong:
        out.print(f"{title}: {wrong} elements differ from the dense block; nothing was measured")
    else:
        print_table(out, _table(rows, title))
        write_pictures(out, traces, title, trace, plot)
    write_json(json_file, {
        "grid": {axis: case.grid[axis] for axis in case.grid}, "scheme": case.scheme, "ranks": case.grid.num_ranks,
        "tokens": shape.tokens, "hidden": shape.hidden, "ffn": shape.ffn, "dtype": dtype, "chunks_asked": chunks,
        "chunks": real, "rounds": job.rounds, "device": job.device, "wrong": wrong, "rows": [] if wrong else rows,
    })  # fmt: skip
    raise typer.Exit(1 if wrong else 0)


def chunks_of(text: str) -> int | str:
    """The value of --chunks.

    Raises:
        GridError: neither a number of chunks nor auto.
    """
    if text == "auto":
        return text
    number = integer(text)
    if not number or number > MAX_CHUNKS:
        raise GridError(f"bench overlap: --chunks {text} is neither a number from 1 to {MAX_CHUNKS} nor auto")
    return number


def checked_balance(balance: float) -> float:
    """Check the ratio of products to communication.

    Raises:
        GridError: no ratio, or one so extreme that nothing is left to hide.
    """
    if not 0.01 <= balance <= 100:
        raise GridError(f"bench overlap: --balance {balance:g} is not a ratio from 0.01 to 100")
    return balance


def choose(text: str | None, scheme: str | None, ranks: int | None, shape: BlockShape) -> VolumeCase:
    """The grid that was named, or the best by volume of as many ranks.

    Raises:
        GridError: a grid of another number of ranks than the launcher's or --ranks, one rank, or text that names none.
        LayoutError: a scheme that is not there or does not fit the grid, or sizes that do not divide.
    """
    from ndtp.measure.volume import cases

    count = num_ranks(ranks, 4 if text is None else grid_of(text).num_ranks, least=2)
    if text is None:
        found = [case for case in cases(count, shape, count**2) if scheme in (None, case.scheme)]
        if not found:
            raise GridError(
                f"bench overlap: no grid of {count} ranks for --scheme {scheme} was found; name one by --grid"
            )
        return found[0]
    return named_case("bench overlap", text, count, shape, scheme)


def _device(world: int | None) -> str:
    import torch

    return "cuda" if world and torch.cuda.is_available() else "cpu"


def _run(job: TraceJob) -> list[RankTrace]:
    import ndtp.testing
    from ndtp.measure.overlap_trace import measure

    if job.device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return ndtp.testing.run(measure, job.case.grid.num_ranks, args=(job,), timeout=3600)


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", padding=(0, 1), pad_edge=False)
    table.add_column("rank")
    for heading in ("step\nms", "compute\nms", "in flight\nms", "exposed\nwait ms", "other\nms", "hidden"):
        table.add_column(heading, justify="right")
    for row in rows:
        where = " ".join(f"{axis}={at}" for axis, at in row["coordinate"].items())
        times = [row[key] for key in ("step_ms", "compute_ms", "in_flight_ms", "exposed_ms", "other_ms")]
        hidden = row["hidden_fraction"]
        table.add_row(
            f"{row['rank']}: {where}", *(f"{time:.2f}" for time in times), "-" if hidden is None else f"{hidden:.0%}"
        )
    table.caption = (
        "The step of median time.  In flight: some collective was under way, from its issue to its completion, late "
        "peers included; exposed: the rank waited for one; other: neither computing nor waiting, such as the host's "
        "own work; hidden: the part of the time in flight in which the rank did not wait."
    )
    return table
