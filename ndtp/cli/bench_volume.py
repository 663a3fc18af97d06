"""`ndtp bench volume`: what grids move, predicted and metered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ndtp.algebra.wire import Wire
from ndtp.cli.common import (
    COUNT,
    PICTURES,
    SIZE,
    JsonOption,
    WireOption,
    axis_sizes,
    console,
    dtype_of,
    must_be,
    num_ranks,
    print_table,
    world_size,
    writable,
    write_json,
)
from ndtp.cli.volume_files import Line, draw, write_csv
from ndtp.planner.fields import Number, in_digits

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ndtp.algebra.volume import Volume
    from ndtp.measure.volume import Analysis, BlockShape, VolumeCase

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MAX_RANKS = 2**16  # on a fake group
REAL_LIMIT = 8  # ranks that are started as processes unless asked otherwise


NumRanksOption = Annotated[
    int,
    typer.Option(callback=must_be(Number(1, MAX_RANKS, integer=True)), help="Number of ranks; thousands take seconds."),
]
TokensOption = Annotated[
    int | None,
    typer.Option(callback=SIZE, help="Rows of the block: 8192; of a model, over all ranks: a sequence for each."),
]
ModelOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="A transformers config.json: the whole model, instead of a block.")
]
FixOption = Annotated[
    list[str] | None, typer.Option(metavar="AXIS=SIZE", help="Of a model: an axis that is given: dp=4.")
]
RealOption = Annotated[
    bool | None, typer.Option("--real/--no-real", help="Meter real local ranks too; default: up to 8.")
]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="Meter torch's Colwise/Rowwise plan and a Megatron-style layer too.")
]
CsvOption = Annotated[
    Path | None,
    typer.Option("--csv", metavar="FILE.csv", help="Bytes of each grid, by axes.", callback=writable(".csv")),
]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="A bar for each grid, by axes.", callback=writable(*PICTURES))
]


def volume(
    ranks: NumRanksOption = 64,
    tokens: TokensOption = None,
    hidden: Annotated[int | None, typer.Option(callback=SIZE, help="Features outside of the block: 4096.")] = None,
    ffn: Annotated[int | None, typer.Option(callback=SIZE, help="Features inside of the block: 16384.")] = None,
    model: ModelOption = None,
    sequence: Annotated[
        int | None, typer.Option(callback=SIZE, help="Length of a model's sequences: 2048, or what its config allows.")
    ] = None,
    target: Annotated[int | None, typer.Option(callback=SIZE, help="Length of its decoder's, if other.")] = None,
    fix: FixOption = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.", callback=dtype_of(*DTYPES))] = "bf16",
    wire: WireOption = None,
    top: Annotated[int, typer.Option(callback=COUNT, help="Grids to show, beside the best of each scheme.")] = 8,
    real: RealOption = None,
    compare: CompareOption = False,
    json_file: JsonOption = None,
    csv_file: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Communication volume of a block across grids: predicted == metered, or exit status 1.

    Metered on a fake process group, and for small counts on real ranks with a smaller block.  With --model, of a whole
    model of transformers, as its report says on each grid; the last row is then Megatron's 1D, in which each rank keeps
    hidden states whole.

    Example: ndtp bench volume --ranks 4096 --tokens 131072 --hidden 8192 --ffn 32768
    """
    if model is not None:
        from ndtp.cli.model_volume import of_model
        from ndtp.planner.grids import EXPERT_AXES

        if hidden is not None or ffn is not None or real or compare:
            message = "it gives the sizes; leave out --hidden, --ffn, --real and --compare"
            raise typer.BadParameter(message, param_hint="--model")
        axes = axis_sizes(" ".join(fix or []), "--fix", EXPERT_AXES)
        return of_model(
            model, ranks, tokens, sequence, target, DTYPES[dtype], Wire.of(wire), top, axes,
            json_file, csv_file, plot,
        )  # fmt: skip
    if fix or target is not None:
        raise typer.BadParameter("--fix and --target are for --model", param_hint="--fix")
    sizes = (tokens or 8192, hidden or 4096, ffn or 16384)
    _of_block(sizes, ranks, dtype, wire, top, real, compare, console(json_file), json_file, csv_file, plot)


def _of_block(
    sizes: tuple[int, int, int],
    ranks: int,
    dtype: str,
    wire: str | None,
    top: int,
    real: bool | None,
    compare: bool,
    out: Console,
    json_file: str | None,
    csv_file: Path | None,
    plot: Path | None,
) -> None:
    """Meter a block on each grid, print what was found, and end the program."""
    import torch

    from ndtp.measure import check_room
    from ndtp.measure.volume import BlockShape, analysis, bytes_needed, cases, scaled_down

    shape, torch_dtype, sent = BlockShape(*sizes), getattr(torch, DTYPES[dtype]), Wire.of(wire)
    chosen = cases(ranks, shape, top)
    use_real = (ranks <= REAL_LIMIT if real is None else real) and ranks > 1
    small = scaled_down(shape, ranks) if use_real else None
    if small is not None and num_ranks(ranks) and world_size() is None:
        needed = bytes_needed(chosen[:1], small, DTYPES[dtype])
        check_room("bench volume", needed, "--no-real, or sizes that halve more often")
    predicted = [case.predicted(shape, torch_dtype, sent) for case in chosen]
    rows = _rows(chosen, predicted, shape, small, dtype, sent)
    rivals = _rivals(ranks, shape, torch_dtype) if compare else []
    print_table(out, _volumes(rows, rivals, ranks, shape, dtype + (f" as {sent}" if sent else ""), small))
    analysed = [analysis(case, shape) for case in _one_per_scheme(chosen)]
    print_table(out, _analysis(analysed))
    lines = [Line(str(case), case.scheme, want) for case, want in zip(chosen, predicted, strict=True)]
    write_csv(csv_file, lines)
    if plot is not None:
        draw(plot, f"{shape} (tokens x hidden x ffn), {dtype}, {ranks} ranks", lines)
    wrong = sum(not row["equal"] for row in rows)
    published = all(a.published == a.forward for a in analysed)
    out.print(
        f"{len(rows) - wrong} of {len(rows)} grids: predicted == metered, per phase, collective and axis"
        + ("" if published else "; a published formula differs")
    )
    write_json(json_file, {
        "ranks": ranks, "tokens": shape.tokens, "hidden": shape.hidden, "ffn": shape.ffn, "dtype": dtype, "wire": wire,
        "rows": rows, "real_shape": [small.tokens, small.hidden, small.ffn] if small else None, "rivals": rivals,
        "analysis": [_analysed(a) for a in analysed], "ok": not wrong and published,
    })  # fmt: skip
    raise typer.Exit(0 if not wrong and published else 1)


def _rows(
    chosen: Sequence[VolumeCase],
    predicted: Sequence[Volume],
    shape: BlockShape,
    small: BlockShape | None,
    dtype: str,
    sent: Wire | None,
) -> list[dict[str, Any]]:
    """Return the bytes of each grid, predicted and metered; of a smaller block on real ranks, too, if it is given."""
    import torch

    from ndtp.measure.volume import fake_group, meter, meter_real
    from ndtp.testing import run

    torch_dtype = getattr(torch, DTYPES[dtype])
    with fake_group(chosen[0].grid.num_ranks):
        metered = [meter(case, shape, torch_dtype, wire=sent) for case in chosen]
    rows = [
        {
            "grid": {axis: case.grid[axis] for axis in case.grid}, "scheme": case.scheme,
            "predicted_forward_bytes": want.forward, "predicted_backward_bytes": want.backward,
            "metered_bytes": got.total, "equal": want == got,
            "entries": {f"{entry}": entry.num_bytes for entry in want},
        }
        for case, want, got in zip(chosen, predicted, metered, strict=True)
    ]  # fmt: skip
    if small is not None:
        by_rank = meter_real(chosen, small, DTYPES[dtype], run, sent)
        for i, (case, row) in enumerate(zip(chosen, rows, strict=True)):
            want = case.predicted(small, torch_dtype, sent)
            row["real_bytes"] = max(ofrank[i].total for ofrank in by_rank)
            row["real_predicted_bytes"] = want.total
            row["equal"] = row["equal"] and all(ofrank[i] == want for ofrank in by_rank)
    return rows


def _analysed(a: Analysis) -> dict[str, object]:
    return {
        "scheme": a.case.scheme, "grid": str(a.case), "computation": a.computation, "parameters": a.parameters,
        "activations": a.activations, "published_elements": a.published, "forward_elements": a.forward,
        "backward_elements": a.backward,
    }  # fmt: skip


def _rivals(ranks: int, shape: BlockShape, dtype: torch.dtype) -> list[dict[str, object]]:
    import torch

    from ndtp.measure.rivals import RIVALS, DenseBlock
    from ndtp.measure.volume import fake_group, meter_step

    found = []
    for name, (build, rows_split) in RIVALS.items():
        with fake_group(ranks):
            block = build(DenseBlock(shape.hidden, shape.ffn, dtype, "meta"), "cpu")
            rows = shape.tokens // ranks if rows_split else shape.tokens
            got = meter_step(block, torch.ones(rows, shape.hidden, dtype=dtype, device="meta").requires_grad_())
        found.append({"name": name, "forward_bytes": got.forward, "backward_bytes": got.backward})
    return found


def _one_per_scheme(chosen: list[Any]) -> list[Any]:
    """1D, the best 2D and the best 3D grid, in the order of the published table."""
    first = {scheme: next((case for case in chosen if case.scheme == scheme), None) for scheme in ("1d", "2d", "3d")}
    return [case for case in first.values() if case is not None]


def _mib(count: int) -> str:
    return in_digits(count / 2**20, 4) if count < 2**30 * 9 else f"{count / 2**20:,.0f}"


def _volumes(
    rows: Sequence[dict[str, Any]],
    rivals: Sequence[dict[str, Any]],
    ranks: int,
    shape: BlockShape,
    dtype: str,
    small: BlockShape | None,
) -> Table:
    table = Table(title=f"MiB received per rank, {shape} (tokens x hidden x ffn), {dtype}, {ranks} ranks")
    table.title_justify = "left"
    for heading in ("grid", "scheme"):
        table.add_column(heading)
    for heading in ("forward", "backward", "step", "metered"):
        table.add_column(heading, justify="right")
    if small is not None:
        table.add_column("real ranks*", justify="right")
        table.caption, table.caption_justify = f"* {small}, metered on {ranks} local gloo ranks", "left"
    table.add_column("equal", justify="right")
    for row in rows:
        grid = " ".join(f"{axis}={size}" for axis, size in row["grid"].items() if size > 1) or "one rank"
        forward, backward = row["predicted_forward_bytes"], row["predicted_backward_bytes"]
        cells = [grid, row["scheme"], _mib(forward), _mib(backward), _mib(forward + backward)]
        cells.append(_mib(row["metered_bytes"]))
        cells += [_mib(row["real_bytes"])] if small is not None else []
        table.add_row(*cells, "yes" if row["equal"] else Text("NO", "red"))
    for rival in rivals:
        forward, backward = rival["forward_bytes"], rival["backward_bytes"]
        cells = [rival["name"], "", "-", "-", "-", _mib(forward + backward)]
        table.add_row(*cells, *([""] if small is not None else []), "")
    return table


def _analysis(rows: list[Any]) -> Table:
    title = "Shares of a rank, and elements received; formula: MindSpore's published one, forward"
    table = Table(title=title, title_justify="left", padding=(0, 0), pad_edge=False)
    for heading in ("scheme", "grid"):
        table.add_column(heading)
    for heading in ("computation", "parameters", "activations", "formula", "forward", "backward"):
        table.add_column(heading, justify="right", no_wrap=True)
    for a in rows:
        shares = (f"1/{in_digits(1 / share, 4)}" for share in (a.computation, a.parameters, a.activations))
        table.add_row(a.case.scheme, str(a.case), *shares, f"{a.published:,}", f"{a.forward:,}", f"{a.backward:,}")
    return table
