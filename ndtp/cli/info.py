"""`ndtp info`: what a bug report needs."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import ndtp
from ndtp.cli.bench_gemm import DTYPES, choice_table, sizes_of
from ndtp.cli.common import JsonOption, console, dtype_of, print_table, write_json

MOST_NAMED = 64  # ranks that left no record


def info(
    gemm: Annotated[
        tuple[int, int, int] | None,
        typer.Option(metavar="M N K", help="Show which kernel multiplies these sizes, and why."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="With --gemm: bfloat16, float16 or float32.", callback=dtype_of(*DTYPES))
    ] = "bfloat16",
    flight: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Compare the records that ranks left there when they failed (NDTP_FLIGHT)."),
    ] = None,
    torch_folder: Annotated[
        Path | None,
        typer.Option("--torch", metavar="OUT", help="With --flight: write the records there for torch's own analyser."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Show versions, devices, backends and kernels: what a bug report needs.

    Example: ndtp info --json -; ndtp info --gemm 8192 14336 4096
    """
    if flight is not None:
        return _show_flight(flight, torch_folder, json_file)
    if torch_folder is not None:
        raise typer.BadParameter("needs --flight DIR, where the records are", param_hint="--torch")
    if gemm is not None:
        choice, report = choice_table(sizes_of(",".join(map(str, gemm)), "--gemm"), dtype)
        print_table(console(json_file), choice)
        return write_json(json_file, report)
    found = environment()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for topic, entries in found.items():
        for i, (name, value) in enumerate(entries.items()):
            table.add_row(topic if i == 0 else "", f"{name}: {_text(value)}")
    console(json_file).print(table, highlight=False)
    write_json(json_file, found)


def _show_flight(folder: Path, torch_folder: Path | None, json_file: str | None) -> None:
    from ndtp.measure.flight_records import FlightError, read_flights
    from ndtp.measure.flight_report import report
    from ndtp.measure.torch_flights import write_for_torch

    try:
        found = report(flights := read_flights(folder))
    except FlightError as error:
        raise typer.BadParameter(str(error), param_hint="--flight") from None
    out = console(json_file)
    say = partial(out.print, highlight=False, soft_wrap=True)
    say(f"records of {found.world_size - len(found.missing)} of {found.world_size} ranks", style="bold")
    if found.missing:
        more = f" and {len(found.missing) - MOST_NAMED} more" if len(found.missing) > MOST_NAMED else ""
        names = ", ".join(map(str, found.missing[:MOST_NAMED]))
        say(f"no record of rank {names}{more}: a rank that is killed leaves none")
    for rank, entries in sorted(found.unfinished.items()):
        for entry in entries:
            state = "waited in" if entry.waited else "had started"
            say(f"rank {rank} {state} {entry.text}, of ranks {list(entry.ranks)}")
    for each in found.behind:
        say(f"behind: rank {each['rank']} had not started {each['lacks']}, of ranks {each['ranks']}, by {each['by']}")
    for each in found.differing:
        say(f"ranks {each['ranks']} disagree on their collective number {each['number']}:")
        for rank, text in each["by rank"].items():
            say(f"  rank {rank}: {text}")
    if torch_folder is not None:
        try:
            paths = write_for_torch(flights, torch_folder)
        except FlightError as error:
            raise typer.BadParameter(str(error), param_hint="--torch") from None
        partly = " --allow-incomplete-ranks" * bool(found.missing)
        say(
            f"{len(paths)} records written: python -m torch.distributed.flight_recorder.fr_trace {torch_folder}{partly}"
        )
    write_json(json_file, found.as_json())


def environment() -> dict[str, dict[str, object]]:
    """Return the environment by topic. Devices are asked for their names, and nothing is started on them."""
    import torch
    import torch.distributed as dist

    from ndtp.collectives.backends import GLOO, NCCL

    return {
        "versions": {
            "ndtp": ndtp.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **{name: _version(name) for name in ("triton", "numpy", "typer", "rich", "matplotlib")},
        },
        "system": {
            "os": platform.platform(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "torch threads": torch.get_num_threads(),
            "interpreter": sys.implementation.name,
        },
        "devices": _devices(),
        "backends": {
            GLOO.name: dist.is_available() and dist.is_gloo_available(),
            NCCL.name: _nccl(),
            "mpi": dist.is_available() and dist.is_mpi_available(),
        },
        "kernels": _kernels(),
    }


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, object]:
    import torch

    if not torch.cuda.is_available():
        return {"cpu": platform.processor() or platform.machine(), "gpus": []}
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append(
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
        )
    return {
        "cpu": platform.processor() or platform.machine(),
        "gpus": names,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def _nccl() -> str | bool:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return False
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # a build with NCCL but without its library
        return f"not loadable: {error}"


def _kernels() -> dict[str, object]:
    """Importable means found: importing them is left to who uses them, since Triton reads its settings then."""
    return {name: importlib.util.find_spec(name) is not None for name in ("ndtp_kernels", "triton")}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return "not installed" if value is None else str(value)
