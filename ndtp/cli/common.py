"""Options that commands share, their spelling and their values, and the places where JSON and tables go."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ndtp.algebra.wire import Wire
from ndtp.dtypes import SHORT, name_of
from ndtp.errors import GridError
from ndtp.planner.fields import Kind, Number, Word, finite, integer, reason, shown, unwritable
from ndtp.planner.presets import FABRICS, MACHINES

WIDTH, NARROW = 100, 80
MAX_LOCAL_RANKS = 256  # processes on one machine; torchrun may have any number
MAX_COUNT = 10**6  # of rounds, steps, rows of a table
MAX_SIZE = 2**28  # of a tensor's dims where torch counts bytes: those of two dims and a thousand ranks stay in 64 bits


# ---------------------------------------------------------------------------------------------------------- options


def must_be(kind: Kind) -> Callable[[Any], Any]:
    """The callback of an option that takes values of a kind: each of them, where it may be repeated."""

    def check(value: object) -> Any:
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            if not kind.takes(each):
                raise typer.BadParameter(f"{shown(each)}; it must be {kind}")
        return value

    return check


def what_it_must_be(error: Exception) -> str:
    """Return what a value that is no number must be, where an error has the words of pydantic, by which typer reads
    numbers; "" of any other error.
    """
    found: list[dict[str, str]] = getattr(error.__cause__, "errors", list)()
    kind = {"int": "an integer", "float": "a number"}.get(found[0]["type"].partition("_")[0]) if found else None
    return f"{shown(found[0]['input'])}; it must be {kind}" if kind else ""


def one_of(*words: str) -> Callable[[object], object]:
    return must_be(Word(words))


def dtype_of(*names: str) -> Callable[[Any], Any]:
    """The callback of an option that takes dtypes by their long and short names, and gives them as `names` has them."""
    by_name = {name_of(name): name for name in names}
    others = [word for pair in SHORT.items() if by_name.keys() & {*pair} for word in pair if word not in names]

    def check(value: object) -> Any:
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            if name_of(each) not in by_name:
                raise typer.BadParameter(f"{shown(each)}; it must be {Word(names)}, or {', '.join(others)}")
        if isinstance(value, list):
            return [by_name[name_of(each)] for each in value]
        return value if value is None else by_name[name_of(value)]

    return check


def writable(*suffixes: str, stdout: bool = False) -> Callable[[Any], Any]:
    """The callback of an option that names a file to write: what cannot be written is said before any work is done."""

    def check(value: object) -> Any:
        if value is None or (stdout and value == "-") or not is_first_rank():
            return value
        if problem := unwritable(str(value), suffixes):
            raise typer.BadParameter(problem)
        return value

    return check


def at_least(least: int) -> Callable[[object], object]:
    """The callback of an option that counts something; the most that it may be is for the command to say."""

    def check(value: Any) -> Any:
        if value is not None and value < least:
            raise typer.BadParameter(f"{shown(value)}; it must be an integer of at least {least}")
        return value

    return check


def refuse_given(given: typer.Context, names: Sequence[str], where: str) -> None:
    """Refuse options that the command line gives, and that change nothing `where` it is.

    Raises:
        typer.BadParameter: names the first of them.
    """
    for option in given.command.params:
        source = given.get_parameter_source(str(option.name))
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"it has no effect {where}; fix: leave it out", param_hint=option.opts[0])


COUNT = must_be(Number(1, MAX_COUNT, integer=True))
COUNT_OR_NONE = must_be(Number(0, MAX_COUNT, integer=True))
SIZE = must_be(Number(1, MAX_SIZE, integer=True))
JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write one JSON object to FILE; - is standard output.",
        callback=writable(stdout=True),
    ),
]  # fmt: skip
RanksOption = Annotated[
    int | None,
    typer.Option("--ranks", callback=COUNT, help="Number of local ranks; torchrun's are joined. Default: 8."),
]


def _wire(text: str | None) -> str | None:
    """The callback of an option that names a wire."""
    try:
        Wire.of(text)
    except GridError as error:
        why = str(error).splitlines()[0].removeprefix(f"wire={text!r} ")
        raise typer.BadParameter(f"{shown(text)} {why}; take bf16, or weights=fp8,gradients=bf16") from None
    return text


WireOption = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE|KIND=DTYPE,..", callback=_wire,
        help="In which dtype tensors travel: bf16, fp8, int8, or weights=fp8,gradients=bf16. Default: as computed.",
    ),
]  # fmt: skip

PICTURES = (".png", ".svg", ".pdf")


def _presets() -> str:
    """Return the presets as the help of --hardware lists them: each device of several networks once."""
    networks = [f"-{name}" for name in FABRICS]
    names = [str(each["name"]) for each in MACHINES]
    devices = dict.fromkeys(name.rpartition("-")[0] for name in names if "-" in name)
    others = [name for name in names if "-" not in name]
    return (
        f"{', '.join(devices)} with {', '.join(networks)} behind it, like h100-ib; {', '.join(others)}; "
        "or a profile of `ndtp bench calibrate`"
    )


PRESETS = _presets()


def axis_sizes(text: str, option: str, axes: Sequence[str] | None = None) -> dict[str, int]:
    """The sizes in `z=2,x=2 y=2`.

    Args:
        axes: the names that there may be; default any.

    Raises:
        typer.BadParameter: another form, a size that is none, an axis that is not there or given twice.
    """
    sizes: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        axis, _, size = word.partition("=")
        number = integer(size)
        names = f"; axes: {' '.join(axes)}" if axes else ""
        if not number or axis in sizes or (axes and axis not in axes):
            what = f"{word!r} gives an axis twice" if axis in sizes else f"{word!r} is not an axis and its size"
            raise typer.BadParameter(f"{text!r}: {what}; write it like z=2,x=2,y=2{names}", param_hint=option)
        sizes[axis] = number
    return sizes


def numbers(text: str, option: str, example: str, count: int | None = None) -> tuple[int, ...]:
    """The positive integers in `16,8`.

    Raises:
        typer.BadParameter: another form, or another number of them than `count`.
    """
    words = text.replace(",", " ").split()
    found = [number for word in words if (number := integer(word)) and number <= 10**15]
    if not found or len(found) != len(words) or count not in (None, len(found)):
        raise typer.BadParameter(f"{text!r}; write it as positive integers, like {example}", param_hint=option)
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------ ranks


def _is_launched() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def environment_number(name: str, least: int = 1) -> int | None:
    """Return the number that a launcher gives in an environment variable.

    Raises:
        typer.BadParameter: no number.
    """
    if name not in os.environ:
        return None
    number = integer(os.environ[name])
    if number is None or number < least:
        raise typer.BadParameter(
            f"{shown(os.environ[name])} in the environment; a launcher sets it to a number of at least {least}",
            param_hint=name,
        )
    return number


def is_first_rank() -> bool:
    """False on the other ranks of a torchrun: one of them is enough to write files and print."""
    return not _is_launched() or os.environ["RANK"] == "0"


def world_size() -> int | None:
    """The number of ranks that torchrun started; None without it."""
    if not _is_launched():
        return None
    environment_number("RANK", 0)
    return environment_number("WORLD_SIZE")


def num_ranks(ranks: int | None, default: int = 8, least: int = 1) -> int:
    """The number of ranks to use: torchrun's where there is one, else as asked for.

    Raises:
        typer.BadParameter: torchrun has another number; more than a machine runs; fewer than the command needs.
    """
    world = world_size()
    if world is not None and ranks not in (None, world):
        raise typer.BadParameter(f"{ranks} ranks, but torchrun started {world}; leave it out", param_hint="--ranks")
    count = world or ranks or default
    if count < least:
        raise typer.BadParameter(
            f"{count} rank has nothing to communicate; fix: --ranks 2 or more", param_hint="--ranks"
        )
    if world is None and count > MAX_LOCAL_RANKS:
        raise typer.BadParameter(
            f"{count} processes on one machine; it must be at most {MAX_LOCAL_RANKS}, or torchrun's",
            param_hint="--ranks",
        )
    return count


# ----------------------------------------------------------------------------------------------------------- output


def console(json_file: str | None) -> Console:
    """Return the console for tables and progress: standard output, unless JSON is written there.

    As wide as the terminal, or as COLUMNS says.  Markup is off: names of files and profiles are printed as they are.
    """
    stderr = json_file == "-"
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH
    return Console(stderr=stderr, width=width, quiet=not is_first_rank(), markup=False)


def print_title(out: Console, *parts: str) -> None:
    """Parts of a title, as many on a line as fit; what is longer than a line breaks between words."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 1 + len(part) <= out.width:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    out.print("\n".join(lines) + "\n", highlight=False, style="bold")


def print_table(out: Console, table: Table) -> None:
    """A table, or, where it does not fit, each row as lines of heading and value.

    Wide terminals may break text between words; columns squeezed below their words and numbers are not readable.
    """
    natural = Measurement.get(out, out.options.update(max_width=10**4), table)
    if (natural.minimum if out.width >= NARROW else natural.maximum) <= out.width:
        return out.print(table)
    if table.title:
        out.print(table.title, style="italic")
    headings = [str(column.header).replace("\n", " ") for column in table.columns]
    margin = max(map(len, headings))
    for row in zip(*(column.cells for column in table.columns), strict=True):
        out.print()
        lines = Table.grid(padding=(0, 2, 0, 0))
        lines.add_column(width=margin, style="bold", no_wrap=True)
        lines.add_column(overflow="fold")
        for heading, cell in zip(headings, row, strict=True):
            if str(cell):
                lines.add_row(heading, cell)
        out.print(lines)
    if table.caption:
        out.print()
        out.print(table.caption, style="dim")
    return None


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """A disk that is full by now, say: `writable` has found nothing wrong."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {reason(error)}") from None


def write_json(json_file: str | None, result: dict[str, Any]) -> None:
    if json_file is None or not is_first_rank():
        return
    text = json.dumps(finite(result), indent=2, allow_nan=False)
    if json_file == "-":
        print(text)
    else:
        with writing(json_file):
            Path(json_file).write_text(text + "\n", encoding="utf-8")
