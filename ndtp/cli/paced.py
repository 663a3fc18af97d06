"""`ndtp bench overlap --paced`: steps whose local work is a clock's, against what no schedule can beat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from ndtp.cli.common import is_first_rank, print_table, write_json
from ndtp.cli.overlap_plot import write_pictures
from ndtp.cli.progress import waiting

if TYPE_CHECKING:
    from ndtp.measure.paced import Paced, PacedJob

COLUMNS = ("products", "communication", "exposed", "bound", "predicted", "measured")


def run_paced(
    job: PacedJob, dtype: str, out: Any, trace: Path | None, plot: Path | None, json_file: str | None
) -> None:
    """Measure, print and write; exit with 1 where bytes, orders or handles are not as they must be."""
    import ndtp.testing
    from ndtp.measure.paced import measure_paced

    count = job.case.grid.num_ranks
    with waiting(out, f"measuring {count} ranks"):
        found: list[Paced] = ndtp.testing.run(measure_paced, count, args=(job,), timeout=3600)
    if not is_first_rank():
        return
    first, summary = found[0], found[0].summary
    asked = f"chunks {first.chunks}" + f" of {job.chunks} asked for" * (str(first.chunks) != str(job.chunks))
    title = (
        f"{job.case.scheme} on {job.case}, {job.blocks} x {job.shape}, {dtype}, {asked}, "
        f"products {job.balance:g} x communication on a clock"
    )
    wrong = list(dict.fromkeys(line for each in found for line in each.wrong))
    print_table(out, _table(first, title))
    for line in wrong:
        out.print(f"wrong: {line}", highlight=False)
    if not wrong:
        write_pictures(out, [each.trace for each in found], title, trace, plot)
    write_json(json_file, {
        "grid": {axis: job.case.grid[axis] for axis in job.case.grid}, "scheme": job.case.scheme, "ranks": count,
        "tokens": job.shape.tokens, "hidden": job.shape.hidden, "ffn": job.shape.ffn, "dtype": dtype,
        "blocks": job.blocks, "balance": job.balance, "hardware": job.hardware, "chunks_asked": job.chunks,
        "rounds": job.rounds, **summary, "wrong": wrong,
    })  # fmt: skip
    raise typer.Exit(1 if wrong else 0)


def _table(found: Paced, title: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", padding=(0, 1), pad_edge=False)
    table.add_column("ms")
    for heading in (*COLUMNS, "measured\n/ bound", "measured\n/ predicted"):
        table.add_column(heading.replace("communication", "communi-\ncation"), justify="right")
    phases = found.forward, found.backward
    for name, parts in (("forward", phases[:1]), ("backward", phases[1:]), ("step", phases)):
        times = {column: 1e3 * sum(getattr(part, column) for part in parts) for column in COLUMNS}
        ratios = (times["measured"] / times[other] for other in ("bound", "predicted"))
        table.add_row(name, *(f"{times[column]:.1f}" for column in COLUMNS), *(f"{ratio:.2f}" for ratio in ratios))
    table.caption = (
        "Medians of the slowest rank.  Products: local work, asleep; communication: of one rank's link, measured on "
        "each axis alone; exposed: measured less products; bound: the longer of the two, which no schedule beats that "
        "ends forward before backward begins; predicted: by the tasks on two clocks."
    )
    return table
