"""What commands share: where JSON and tables go, and how an option is spelt."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

WIDTH = 100

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write one JSON object to FILE; - is standard output.")
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Number of local ranks; torchrun's are joined. Default: 8.")
]


def _is_launched() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def is_first_rank() -> bool:
    """False on the other ranks of a torchrun: one of them is enough to write files and print."""
    return not _is_launched() or os.environ["RANK"] == "0"


def num_ranks(ranks: int | None, default: int = 8) -> int:
    """The number of ranks to use: torchrun's where there is one, else as asked for.

    Raises:
        typer.BadParameter: torchrun has another number.
    """
    if not _is_launched():
        return ranks or default
    world_size = int(os.environ["WORLD_SIZE"])
    if ranks not in (None, world_size):
        raise typer.BadParameter(f"{ranks} ranks, but torchrun started {world_size}.", param_hint="--ranks")
    return world_size


def console(json_file: str | None) -> Console:
    """Where tables and progress go: standard output, unless JSON is written there."""
    stderr = json_file == "-"
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDTH, quiet=not is_first_rank())


def write_json(json_file: str | None, result: dict[str, Any]) -> None:
    if json_file is None or not is_first_rank():
        return
    text = json.dumps(result, indent=2)
    if json_file == "-":
        print(text)
    else:
        Path(json_file).write_text(text + "\n")
