"""`ndtp bench calibrate`: a hardware profile of the ranks at hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ndtp.cli.bench_step import LocalRanksOption
from ndtp.cli.common import (
    COUNT,
    JsonOption,
    console,
    dtype_of,
    environment_number,
    is_first_rank,
    must_be,
    num_ranks,
    print_table,
    world_size,
    writable,
    write_json,
    writing,
)
from ndtp.cli.progress import waiting
from ndtp.errors import GridError
from ndtp.planner.fields import Number, in_digits

if TYPE_CHECKING:
    from rich.console import Console

    from ndtp.measure.calibrate import Fit
    from ndtp.planner.hardware import Hardware

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def calibrate(
    output: Annotated[
        Path, typer.Option(metavar="FILE.toml", help="Where the profile goes.", callback=writable(".toml"))
    ] = Path("hardware.toml"),
    ranks: LocalRanksOption = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(callback=COUNT, help="Default: the launcher's LOCAL_WORLD_SIZE, else all ranks.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.", callback=dtype_of(*DTYPES))] = "fp32",
    repeats: Annotated[int, typer.Option(callback=COUNT, help="Measurements of each size; the median counts.")] = 5,
    largest: Annotated[
        float,
        typer.Option(
            metavar="MIB", help="A rank's largest share in a collective.", callback=must_be(Number(1e-3, 1024))
        ),
    ] = 1.0,
    json_file: JsonOption = None,
) -> None:
    """Measure latency and bandwidth per axis and collective, and GEMM rates, and write a hardware profile.

    Example: ndtp bench calibrate --ranks 8 --output mine.toml; then ndtp plan ... --hardware mine.toml
    """
    import ndtp.testing
    from ndtp.measure import check_room
    from ndtp.measure.calibrate import CalibrationJob, fit, measure, rates_by_class, to_toml

    world = world_size()
    count = num_ranks(ranks, 4, least=2)
    per_node = _ranks_per_node(ranks_per_node, count)
    if world is None:
        # Of each rank, all at once: the whole operand of a reduce-scatter, what is made of it, and what is sent.
        check_room("bench calibrate", 3 * largest * 2**20 * count**2, "a smaller --largest")
    import torch

    device = "cuda" if world and torch.cuda.is_available() else "cpu"
    sizes = tuple(int(largest * 2**20) >> shift for shift in (8, 5, 2, 0))
    scale = (64, 256, 1024, 4096) if device == "cuda" else (64, 256, 1024)
    limit = 2**36 if device == "cuda" else 2**29
    job = CalibrationJob(per_node, DTYPES[dtype], sizes, scale, limit, repeats, device, 0.02 * repeats)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    out = console(json_file)
    with waiting(out, f"measuring {count} ranks"):
        samples = ndtp.testing.run(measure, count, args=(job,), timeout=3600)[0]
    if not is_first_rank():
        return
    hardware, fits = fit(samples, job, output.stem.encode(errors="replace").decode())
    with writing(output):
        output.write_text(to_toml(hardware, fits, samples), encoding="utf-8")
    print_table(out, _table(f"fit of {output.stem}: {count} ranks, {per_node} a node, {dtype}", fits))
    _print_links(out, hardware)
    rates = ", ".join(f"{name} {in_digits(rate)}" for name, rate in rates_by_class(samples).items())
    out.print(f"TFLOP/s: {rates}; large products {in_digits(hardware.tflops[DTYPES[dtype]])}", highlight=False)
    out.print(f"wrote {output}")
    write_json(json_file, {
        "output": str(output), "ranks": count, "ranks_per_node": per_node, "dtype": DTYPES[dtype],
        "fits": [asdict(each) for each in fits], "tflops_by_class": rates_by_class(samples),
        "links": [asdict(sample) for sample in samples.links], "gemms": [asdict(sample) for sample in samples.gemms],
    })  # fmt: skip


def _print_links(out: Console, hardware: Hardware) -> None:
    for name in ("intra", "inter"):
        link = getattr(hardware, name)
        out.print(
            f"{name}: {in_digits(link.bandwidth_gbs, 4)} GB/s, {in_digits(link.latency_us, 4)} us a call, "
            f"{in_digits(link.hop_us, 4)} us a hop",
            highlight=False,
        )


def _ranks_per_node(given: int | None, count: int) -> int:
    per_node = given or environment_number("LOCAL_WORLD_SIZE") or count
    if per_node > count:
        near = [size for size in range(1, count + 1) if count % size == 0]
        raise GridError(f"bench calibrate: --ranks-per-node {per_node} of {count} ranks; take one of {near}")
    return per_node


def _table(title: str, fits: Sequence[Fit]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("model of")
    for heading in ("samples", "median error", "worst error"):
        table.add_column(heading, justify="right")
    for each in fits:
        table.add_row(each.what, str(each.samples), f"{each.median_error:.0%}", f"{each.worst_error:.0%}")
    return table
