"""`ndtp check --chaos`: one rank does something else, in every way there is, and all ranks must name it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ndtp.algebra.grid import Grid
from ndtp.cli.common import is_first_rank, num_ranks, print_table, write_json
from ndtp.cli.progress import Runner

if TYPE_CHECKING:
    from ndtp.cli.odd_rank import Disagreement

TIMEOUT_S = 30.0  # of ranks that wait for each other where nothing is named
SHOWN = 46  # characters of what is said of a kind


@dataclass(frozen=True)
class Answer:
    """The answers of all ranks where the rank `odd` does otherwise."""

    kind: Disagreement
    scheme: str
    odd: int
    said: tuple[str, ...]

    @property
    def is_silent(self) -> bool:
        from ndtp.cli.disagreements import NOTHING

        return all(text == NOTHING for text in self.said)

    @property
    def is_right(self) -> bool:
        """Named on all ranks; or by nobody, what is no disagreement."""
        says = self.kind.says
        return all(re.search(says, text, re.DOTALL) for text in self.said) if says else self.is_silent

    @property
    def line(self) -> str:
        """Return the first difference that an error names, on the rank that says something else than the others."""
        text = next((text for text in self.said if not re.search(self.kind.says, text, re.DOTALL)), self.said[0])
        lines = text.splitlines() or [text]
        return lines[1 if lines[0].endswith(":") and len(lines) > 1 else 0].strip()

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind.name,
            "scheme": self.scheme,
            "rank": self.odd,
            "ok": self.is_right,
            "expected": self.kind.says or None,
            "said": list(dict.fromkeys(self.said)),
        }


def chaos(
    out: Console,
    ranks: int | None,
    schemes: Sequence[str],
    only: Sequence[str],
    check: bool | None,
    json_file: str | None,
) -> None:
    """Inject every disagreement, print what becomes of it, and exit with 1 where one is not named on every rank."""
    from ndtp.cli.disagreements import KINDS, SILENT, run_kind
    from ndtp.testing import RankError

    count, start = num_ranks(ranks, default=2, least=2), time.monotonic()
    kinds = [*KINDS, *SILENT]
    for name in only:
        if name not in [kind.name for kind in kinds]:
            names = ", ".join(kind.name for kind in kinds)
            raise typer.BadParameter(f"{name!r}; it must be one of {names}", param_hint="--kind")
    kinds = [kind for kind in kinds if not only or kind.name in only]
    answers = []
    with Runner(out, count, total=len(kinds) * len(schemes)) as runner:
        for scheme in schemes:
            for index, kind in enumerate(kinds):
                sizes = {"dp": count} if kind.along_dp else sizes_of(scheme, count)
                odd = index % count  # each rank in turn
                try:
                    said = runner.run(kind.name, run_kind, sizes, scheme, kind.name, odd, check, TIMEOUT_S)
                except RankError as error:  # the ranks lost each other; the next kind has new ones
                    said = [f"{type(error).__name__}: {error}"] * count
                answers.append(Answer(kind, scheme, odd, tuple(said)))
    seconds = time.monotonic() - start
    _print(out, answers, count, seconds)
    wrong = [answer for answer in answers if not answer.is_right]
    result = {
        "ok": not wrong,
        "ranks": count,
        "seconds": round(seconds, 3),
        "kinds": [answer.as_json() for answer in answers],
    }
    write_json(json_file, result)
    if wrong:
        if is_first_rank():
            print(f"{len(wrong)} of {len(answers)} are not named as they should be:", file=sys.stderr)
            for answer in wrong:
                print(f"  {answer.kind.name}, {answer.scheme}, rank {answer.odd}: {answer.line}", file=sys.stderr)
        raise typer.Exit(1)


def sizes_of(scheme: str, ranks: int) -> dict[str, int]:
    """Return the sizes of the axes that a scheme uses, as even as they can be."""
    axes = ("x", "y", "z")[: int(scheme[0])]
    grids = [grid for grid in Grid.all(ranks) if set(grid.nontrivial(grid.names)) <= set(axes)]
    best = min(grids, key=lambda grid: max(grid.shape))
    return {axis: best[axis] for axis in axes if best[axis] > 1}


def _print(out: Console, answers: Sequence[Answer], ranks: int, seconds: float) -> None:
    for scheme in dict.fromkeys(answer.scheme for answer in answers):
        own = [answer for answer in answers if answer.scheme == scheme]
        title = f"One of {ranks} ranks does something else, scheme {scheme} on {Grid(sizes_of(scheme, ranks))}"
        table = Table(title=title, title_justify="left")
        for heading in ("what it has otherwise", "rank", "named", "what all ranks say"):
            table.add_column(heading, no_wrap=True)
        for answer in own:
            verdict, colour = ("yes" if answer.kind.says else "no need", "green") if answer.is_right else ("NO", "red")
            line = "" if answer.is_silent and answer.is_right else answer.line
            shown = line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."
            table.add_row(answer.kind.name, str(answer.odd), Text(verdict, colour), shown)
        print_table(out, table)
    wrong, total = sum(not answer.is_right for answer in answers), len(answers)
    told = (f"{wrong} of {total} are not named", "red") if wrong else (f"all {total} are as they should be", "green")
    out.print(Text.assemble(told, f", in {seconds:.0f} s"))
