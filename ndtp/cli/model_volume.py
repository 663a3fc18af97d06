"""`ndtp bench volume --model`: what a whole model moves on grids side by side, by its config alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ndtp.algebra.volume import Volume
from ndtp.algebra.wire import Wire
from ndtp.cli.common import console, print_table, write_json
from ndtp.cli.planned_model import length_at
from ndtp.cli.progress import Bar
from ndtp.cli.volume_files import Line, draw, write_csv
from ndtp.errors import GridError, LayoutError
from ndtp.planner.fields import in_digits

if TYPE_CHECKING:
    from ndtp.measure.model_volume import GridCandidate

LONGEST = 2048  # tokens of a sequence where nobody says how many


def of_model(
    path: str,
    ranks: int,
    tokens: int | None,
    sequence: int | None,
    target: int | None,
    dtype: str,
    wire: Wire | None,
    top: int,
    fixed: Mapping[str, int],
    json_file: str | None,
    csv_file: Path | None,
    plot: Path | None,
) -> None:
    """Runs the model's own code on ranks that are not there, once for each grid.

    Raises:
        GridError: no transformers, no model that can be planned, rows that are no number of sequences, or sequences
            that are longer than the model takes.
    """
    import torch

    from ndtp.measure.model_volume import ModelVolume, candidates
    from ndtp.measure.volume import fake_group
    from ndtp.models.counted import count_config, is_installed
    from ndtp.planner.hardware import Hardware
    from ndtp.planner.model_config import read_file
    from ndtp.planner.request import Request

    if not is_installed():
        raise GridError("bench volume: --model runs the model's own code\n  fix: pip install transformers")
    config, what = read_file(path)
    sequence, longest, tokens = _sizes(path, ranks, tokens, sequence)
    sequences = _sequences(tokens, sequence)
    counted, hardware = count_config(config, what), Hardware.load("h100-ib")
    request = Request(counted.blocks(tokens), ranks, hardware, dtype=dtype, fixed=dict(fixed), wire=wire)
    chosen = candidates(request, top)
    out, rows, lines = console(json_file), list[dict[str, Any]](), list[Line]()
    with fake_group(ranks), Bar(out, "grids", total=len(chosen)) as bar:
        volume_of = ModelVolume(config, what, getattr(torch, dtype), sequence, target, wire)
        for i, candidate in enumerate(chosen):
            row = _described(candidate)
            try:
                with _of_length(sequence, longest, counted.kind):
                    volume = volume_of.on(candidate, sequences)
            except LayoutError as error:
                rows.append(row | {"refused": str(error)})
            else:
                lines.append(Line(str(candidate), candidate.scheme, volume))
                rows.append(row | _in_bytes(volume))
            bar.update(i + 1)
    title = (
        f"{counted.kind}, {sequences} sequences of {sequence}, {dtype}{f' as {wire}' if wire else ''}, {ranks} ranks"
    )
    print_table(out, _table(title, chosen, rows))
    _write(out, title, lines, csv_file, plot)
    write_json(json_file, {
        "model": counted.kind, "ranks": ranks, "tokens": tokens, "sequence": sequence, "target": target,
        "dtype": dtype, "wire": wire and str(wire), "rows": rows, "ok": bool(lines),
    })  # fmt: skip


def _write(out: Any, title: str, lines: list[Line], csv_file: Path | None, plot: Path | None) -> None:
    write_csv(csv_file, lines)
    if plot is not None:
        draw(plot, title, lines)
    for file in filter(None, (csv_file, plot)):
        out.print(f"wrote {file}")


def _table(title: str, chosen: list[Any], rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"MiB received per rank and step\n{title}", title_justify="left", caption_justify="left")
    for heading in ("grid", "scheme"):
        table.add_column(heading)
    for heading in ("forward", "backward", "step", "x least"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("most of it")
    least = min((row["bytes"] for row in rows if "bytes" in row), default=0)
    for candidate, row in zip(chosen, rows, strict=True):
        if "refused" in row:
            table.add_row(str(candidate), candidate.scheme, "", "", "refused", "", row["refused"].splitlines()[0])
            continue
        axes, part = max(row["by_axes"].items(), key=lambda each: each[1], default=("nothing", 0))
        sizes = [row[key] / 2**20 for key in ("forward_bytes", "backward_bytes", "bytes")]
        cells = [f"{mib:,.0f}" if mib >= 100 else in_digits(mib) for mib in sizes]
        most = f"{part / max(1, row['bytes']):.0%} over {axes}"
        table.add_row(str(candidate), candidate.scheme, *cells, f"{row['bytes'] / max(1, least):.2f}", most)
    table.caption = "As model.ndtp_report.volume says on these grids: loss, norms and embedding included."
    if chosen[-1].keeps_whole:
        table.caption += (
            "\nThe last row is Megatron's 1D: each rank keeps hidden states whole, and sums them by all-reduces."
        )
    return table


def _sizes(path: str, ranks: int, tokens: int | None, sequence: int | None) -> tuple[int, int, int]:
    """Return the length of the sequences, how long they may be by the model's config, and the rows of a step."""
    longest = length_at(path)
    length = sequence or min(LONGEST, longest)
    return length, longest, tokens or ranks * length


@contextmanager
def _of_length(sequence: int, longest: int, kind: str) -> Iterator[None]:
    """Name the length of the sequences in an error of the model's own code, where its config allows shorter ones."""
    try:
        yield
    except LayoutError:
        raise
    except (RuntimeError, IndexError) as error:
        from ndtp.models.counted import first_line

        if sequence <= longest:
            raise
        raise GridError(
            f"bench volume: {kind} takes no sequences of {sequence}: {first_line(error)}\n"
            f"  fix: --sequence {longest}, as its config says"
        ) from None


def _sequences(tokens: int, length: int) -> int:
    if tokens % length:
        raise GridError(
            f"bench volume: {tokens} rows are no number of sequences of {length}\n"
            f"  fix: --tokens {max(1, tokens // length) * length}, or another --sequence"
        )
    return tokens // length


def _described(candidate: GridCandidate) -> dict[str, object]:
    from ndtp.measure.model_volume import family_of

    return {
        "grid": {axis: candidate.grid[axis] for axis in candidate.grid}, "scheme": candidate.scheme,
        "kind": candidate.plan.kind, "family": family_of(candidate.plan),
    }  # fmt: skip


def _in_bytes(volume: Volume) -> dict[str, object]:
    return {
        "forward_bytes": volume.forward, "backward_bytes": volume.backward, "bytes": volume.total,
        "by_axes": volume.by("axes"), "entries": {f"{entry}": entry.num_bytes for entry in volume},
    }  # fmt: skip
