"""`ndtp show`: pictures of who holds what, and of what happens when.  Needs no process group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.cli.common import (
    PRESETS,
    JsonOption,
    at_least,
    axis_sizes,
    console,
    numbers,
    one_of,
    print_title,
    writable,
    write_json,
    writing,
)
from ndtp.cli.drawing import FORMATS, as_text, save
from ndtp.cli.panels import PHASES, Panel, plan_panels
from ndtp.dtypes import SHORT
from ndtp.errors import GridError

if TYPE_CHECKING:
    from ndtp.schedule.clocks import LaneSpan

MAX_RANKS = 4096
GAP = 4  # between pictures side by side

show = typer.Typer(
    help="""Draw who holds what: a layout, a plan step by step, a schedule in time.

    Example: ndtp show layout --grid z=2,x=2,y=2 --layout "(z y) x"
    """,
    no_args_is_help=True,
)

GridOption = Annotated[str, typer.Option("--grid", metavar="Z=2,X=2,..", help="Axes and sizes, slowest axis first.")]
OutputOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw into an .svg or .png file as well.", callback=writable(*FORMATS)),
]


@show.command("layout")
def show_layout(
    grid: GridOption,
    layout: Annotated[str, typer.Option(help="Axes of each dim, such as '(z y) x' or 'None x'.")],
    shape: Annotated[
        str | None, typer.Option(metavar="N,..", help="Global sizes. Default: as small as can be.")
    ] = None,
    output: OutputOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show which ranks hold which block of a tensor of any number of dims.

    Example: ndtp show layout --grid z=2,x=2,y=2 --layout "(z y) x" --shape 16,8
    """
    parsed = Layout.parse(_grid(grid), layout)
    if not parsed.ndim:
        raise typer.BadParameter(f"{layout!r} has no dim; write it like '(z y) x' or 'None x'", param_hint="--layout")
    sizes = _sizes(shape) if shape is not None else (2 * parsed.grid.num_ranks,) * parsed.ndim
    parsed.shard_shape(sizes)
    title = f"{str(parsed)[1:-1]} of {'x'.join(map(str, sizes))} on grid {parsed.grid}"
    panel = Panel(title, parsed, sizes)
    _show([[panel]], [title], output, json_file, {"grid": _json(parsed.grid), **panel.as_json()})


@show.command("plan")
def show_plan(
    grid: GridOption,
    a: Annotated[str, typer.Option(help="Layout of A, such as '(z y) x'.")],
    b: Annotated[str, typer.Option(help="Layout of B, such as '(x z) y'.")],
    out: Annotated[str | None, typer.Option(help="Layout of C. Default: the plan's own.")] = None,
    transpose_a: Annotated[bool, typer.Option("--transpose-a", help="A is stored as [K, M].")] = False,
    transpose_b: Annotated[bool, typer.Option("--transpose-b", help="B is stored as [N, K].")] = False,
    regather: Annotated[list[str] | None, typer.Option(help="a or b: backward gathers it again.")] = None,
    phase: Annotated[str, typer.Option(help=f"One of {', '.join(PHASES)}.", callback=one_of(*PHASES))] = "forward",
    shape: Annotated[
        str | None, typer.Option(metavar="M,K,N", help="Global sizes, batch sizes first. Default: small ones.")
    ] = None,
    output: OutputOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show a product step by step: stored shards, gathers, the scattered result.

    Example: ndtp show plan --grid z=2,x=2,y=2 --a "(z y) x" --b "(x z) y"
    """
    ranks = _grid(grid)
    plan = MatMulPlan(
        Layout.parse(ranks, a),
        Layout.parse(ranks, b),
        Layout.parse(ranks, out) if out is not None else None,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        regather=tuple(regather or ()),
    )
    sizes = _sizes(shape) if shape is not None else (2 * ranks.num_ranks,) * (len(plan.batch_letters) + 3)
    rows = plan_panels(plan, sizes, phase)
    volume = plan.volume(sizes)
    moved = volume.by("phase", "elements").get(phase, 0)
    product, made = plan.equation.split(" -> ")
    title = [f"{phase} of {product}", f"-> {made}", f"on grid {ranks}:", f"every rank receives {moved:,} elements"]
    result = {
        "grid": _json(ranks),
        "equation": plan.equation,
        "phase": phase,
        "shape": list(sizes),
        "received_elements": moved,
        "tensors": [
            {"tensor": row[0].title.split("[")[0], "stages": [panel.as_json() for panel in row]} for row in rows
        ],
    }
    _show(rows, title, output, json_file, result)


@show.command("schedule")
def show_schedule(
    grid: GridOption,
    tokens: Annotated[int, typer.Option(callback=at_least(1), help="Rows of the block.")] = 8192,
    hidden: Annotated[int, typer.Option(callback=at_least(1), help="Features outside of the block.")] = 4096,
    ffn: Annotated[int, typer.Option(callback=at_least(1), help="Features inside of the block.")] = 16384,
    product: Annotated[str, typer.Option(help="up, down, or block for both with what lies between.")] = "block",
    chunks: Annotated[
        int, typer.Option(callback=at_least(1), help="Pieces of rows whose collectives run beside products.")
    ] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")] = "bf16",
    hardware: Annotated[str, typer.Option(metavar="NAME|FILE.toml", help=f"Whose clocks. {PRESETS}.")] = "h100-ib",
    eager: Annotated[bool, typer.Option("--eager", help="With the host's lane: no graph issues the step.")] = False,
    tasks: Annotated[bool, typer.Option("--tasks", help="List every task with its time as well.")] = False,
    output: OutputOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show when a rank computes and when each axis's link is busy, forward and backward, as predicted.

    Example: ndtp show schedule --grid z=2,x=2,y=2 --tokens 8192 --hidden 4096 --ffn 16384 --chunks 4
    """
    from ndtp.cli.timeline_drawing import as_text, lanes_of
    from ndtp.cli.timeline_drawing import save as save_timeline
    from ndtp.planner.block_schedule import schedule
    from ndtp.planner.hardware import Hardware

    ranks = _grid(grid)
    spans = schedule(
        ranks, (tokens, hidden, ffn), Hardware.load(hardware), dtype=SHORT.get(dtype, dtype), chunks=chunks,
        product=product, captured=not eager,
    )  # fmt: skip
    end = max(span.end for span in spans)
    busy = {lane: sum(s.end - s.begin for s in spans if s.lane == lane) / end for lane in lanes_of(spans)}
    title = [f"{product} of {tokens} x {hidden} x {ffn}", f"on grid {ranks}, chunks={chunks}, {hardware}:"]
    took, out = f"{end * 1e3:.4g} ms", console(json_file)
    print_title(out, *title, f"{took}, predicted")
    for text in as_text(spans, out.width):
        out.print(text, highlight=False, no_wrap=True, overflow="ignore", crop=False)
    numbers = "0 up, 1 down" if product == "block" else f"0 {product}"
    out.print(
        f"Products: {numbers}; [i]: chunk i of its rows.  compute: the result that is multiplied; link: the tensor "
        "that moves; f: activation; copy: a tensor put in order; held: products slowed down by a collective.\n"
        "Busy: " + ", ".join(f"{lane} {share:.0%}" for lane, share in busy.items()),
        highlight=False,
        markup=False,
    )
    if tasks:
        for span in sorted(spans, key=lambda span: span.begin):
            line = f"{span.begin * 1e3:10.4f} {span.end * 1e3:10.4f} ms  {span.lane:8} {span}"
            out.print(line, highlight=False, markup=False)
    if output is not None:
        with writing(output):
            save_timeline(output, spans, " ".join([*title, took]))
        out.print(f"{output} written", highlight=False)
    write_json(json_file, {
        "grid": _json(ranks), "tokens": tokens, "hidden": hidden, "ffn": ffn, "product": product, "chunks": chunks,
        "dtype": SHORT.get(dtype, dtype), "hardware": hardware, "step_ms": end * 1e3, "busy": busy,
        "tasks": [_task(span) for span in spans],
    })  # fmt: skip


def _task(span: LaneSpan) -> dict[str, object]:
    return {
        "lane": span.lane, "begin_ms": span.begin * 1e3, "end_ms": span.end * 1e3, "phase": span.phase,
        "product": span.product, "tensor": span.tensor, "chunk": span.chunk, "what": span.what,
    }  # fmt: skip


def _show(
    rows: list[list[Panel]], title: list[str], output: Path | None, json_file: str | None, result: dict[str, object]
) -> None:
    out = console(json_file)
    if sum(map(len, rows)) > 1:
        print_title(out, *title)
    for row in rows:
        pictures = [as_text(panel, out.width) for panel in row]
        widths = [max(map(len, picture.plain.splitlines())) for picture in pictures]
        if len(row) > 1 and sum(widths) + GAP * (len(row) - 1) <= out.width:
            side_by_side = Table.grid(padding=(0, GAP, 0, 0))
            side_by_side.add_row(*pictures)
            out.print(side_by_side)
        else:
            for picture in pictures:
                out.print(picture, highlight=False, no_wrap=True, overflow="ignore", crop=False)
    if output is not None:
        with writing(output):
            save(output, rows, " ".join(title))
        out.print(f"{output} written", highlight=False)
    write_json(json_file, result)


def _grid(text: str) -> Grid:
    grid = Grid(axis_sizes(text, "--grid"))
    if grid.num_ranks > MAX_RANKS:
        raise GridError(f"grid {grid} has {grid.num_ranks} ranks; pictures of up to {MAX_RANKS} ranks can be drawn")
    return grid


def _sizes(text: str) -> tuple[int, ...]:
    return numbers(text, "--shape", "16,8")


def _json(grid: Grid) -> dict[str, int]:
    return {axis: grid[axis] for axis in grid}
