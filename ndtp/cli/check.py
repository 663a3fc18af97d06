"""`ndtp check`: every grid, scheme and form of product against dense, with every byte counted."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ndtp.algebra.grid import Grid
from ndtp.algebra.schemes import SCHEMES
from ndtp.cli.chaos import chaos
from ndtp.cli.common import (
    JsonOption,
    RanksOption,
    console,
    dtype_of,
    is_first_rank,
    num_ranks,
    one_of,
    print_table,
    write_json,
)
from ndtp.cli.progress import Runner

if TYPE_CHECKING:
    from ndtp.cli.cases import Case, Result

DTYPES = ("float32", "float64", "bfloat16", "float16")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MAX_SHOWN = 10


@dataclass(frozen=True)
class Outcome:
    """A case, and what all ranks say about it."""

    case: Case
    grid: Grid
    by_rank: tuple[Result, ...]

    @property
    def failure(self) -> str | None:
        return next((result.failure for result in self.by_rank if result.failure), None)

    @property
    def max_error(self) -> float:
        return max(result.max_error for result in self.by_rank)

    @property
    def bytes(self) -> tuple[int, int]:
        """Predicted and measured, on the rank where they differ, if on any."""
        pairs = [(result.predicted_bytes, result.measured_bytes) for result in self.by_rank]
        return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])

    def as_json(self) -> dict[str, Any]:
        predicted, measured = self.bytes
        case = self.case
        return {
            "name": case.name(self.grid),
            "ok": self.failure is None,
            "max_error": self.max_error,
            "predicted_bytes": predicted,
            "measured_bytes": measured,
            "grid": {axis: self.grid[axis] for axis in self.grid},
            "scheme": case.scheme,
            "dtype": case.dtype,
            "kind": case.kind,
            **({} if self.failure is None else {"failure": self.failure}),
        }


def check(
    ranks: RanksOption = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(SCHEMES)}; may be repeated. Default: all.", callback=one_of(*SCHEMES)),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(DTYPES)}; may be repeated. Default: float32.", callback=dtype_of(*DTYPES)
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One grid of each kind, products in one form: some seconds.")
    ] = False,
    is_chaos: Annotated[
        bool, typer.Option("--chaos", help="Let one rank do something else in every way there is; all must name it.")
    ] = False,
    kind: Annotated[
        list[str] | None, typer.Option(help="With --chaos: one kind of disagreement; may be repeated. Default: all.")
    ] = None,
    json_file: JsonOption = None,
    broken: Annotated[
        str | None, typer.Option("--break-collective", hidden=True, callback=one_of(*COLLECTIVES))
    ] = None,
    is_unchecked: Annotated[bool, typer.Option("--unchecked", hidden=True)] = False,
) -> None:
    """Compare every parallel product with the dense one, bytes included.

    Runs every grid of the ranks (x, y, z) under every scheme: both products of
    the block, operands transposed or not, batched or not, with a bias or
    without, and the whole block, plain and padded. Output and all gradients must
    be bit-equal to dense on integers, and within a tolerance on real numbers:
    four times the error of the dense result of the same dtype against fp64.
    Measured bytes must equal the predicted ones.

    Exit status: 0 when all is well, 1 when a case fails, 2 on wrong use.

    --quick takes one grid for each choice of axes, the evenest, and operands as
    modules store them; everything else is as ever.

    --chaos trains a small model on 2 ranks, one of which is given something
    else: other inputs, another learning rate, a skipped backward. All ranks must
    name it. --scheme is 3d there unless given.

    Example: ndtp check --ranks 8 --scheme 3d --scheme 2d --dtype bfloat16
    """
    if kind and not is_chaos:
        raise typer.BadParameter("kinds of disagreement; fix: add --chaos", param_hint="--kind")
    if is_chaos:
        if quick or dtype:
            raise typer.BadParameter(
                "it trains one model in float32; fix: leave out --dtype and --quick", param_hint="--chaos"
            )
        return chaos(
            console(json_file), ranks, scheme or ["3d"], kind or [], False if is_unchecked else None, json_file
        )
    schemes, dtypes = (tuple(dict.fromkeys(words)) for words in (scheme or SCHEMES, dtype or ["float32"]))
    compare(console(json_file), num_ranks(ranks), schemes, dtypes, quick, broken, json_file)


def compare(
    out: Console,
    ranks: int,
    schemes: tuple[str, ...],
    dtypes: tuple[str, ...],
    quick: bool,
    broken: str | None,
    json_file: str | None,
) -> None:
    """Run all cases, print what came of them, and end the program with status 1 if one fails."""
    from ndtp.cli.cases import cases, check_grid, exact_up_to
    from ndtp.testing import RankError

    for name in dtypes:
        if ranks > exact_up_to(name):
            raise typer.BadParameter(
                f"{name} is exact for the sums of {exact_up_to(name)} ranks, not of {ranks}; fix: fewer, or float32",
                param_hint="--dtype",
            )
    start = time.monotonic()
    grids = one_of_each_kind(Grid.all(ranks)) if quick else Grid.all(ranks)
    outcomes: list[Outcome] = []
    try:
        with Runner(out, ranks, total=len(grids) * len(schemes) * len(dtypes)) as runner:
            for grid in grids:
                sizes = {axis: grid[axis] for axis in grid}
                by_rank = runner.run(f"grid {grid}", check_grid, sizes, schemes, dtypes, broken, quick, axes=sizes)
                done = [case for pair in product(schemes, dtypes) for case in cases(*pair, quick)]
                for case, *results in zip(done, *by_rank, strict=True):
                    outcomes.append(Outcome(case, grid, tuple(results)))
    except RankError as error:
        if is_first_rank():
            print(f"check failed: {error}", file=sys.stderr)
        finished = [outcome.as_json() for outcome in outcomes]
        write_json(json_file, {"ok": False, "ranks": ranks, "error": str(error), "cases": finished})
        raise typer.Exit(1) from None
    failed = [outcome for outcome in outcomes if outcome.failure]
    seconds = time.monotonic() - start
    _print_table(out, outcomes, schemes, ranks, seconds)
    result = {
        "ok": not failed,
        "ranks": ranks,
        "seconds": round(seconds, 3),
        "cases": [outcome.as_json() for outcome in outcomes],
    }
    write_json(json_file, result)
    if failed:
        _name_failures(failed, len(outcomes))
        raise typer.Exit(1)


def one_of_each_kind(grids: Sequence[Grid]) -> list[Grid]:
    """Return, of grids with the same axes of more than one rank, the grid whose sizes differ least."""
    best: dict[tuple[str, ...], Grid] = {}
    for grid in grids:
        axes = grid.nontrivial(grid.names)
        if axes not in best or max(grid.shape) < max(best[axes].shape):
            best[axes] = grid
    return list(best.values())


def _print_table(out: Console, outcomes: Sequence[Outcome], schemes: Sequence[str], ranks: int, seconds: float) -> None:
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[str(outcome.grid), outcome.case.scheme].append(outcome)
    table = Table(title=f"Parallel against dense on {ranks} ranks: cases that agree", title_justify="left")
    table.add_column("grid", no_wrap=True)
    for scheme in schemes:
        table.add_column(scheme, justify="right")
    table.add_column("max error", justify="right")
    table.add_column("KiB predicted", justify="right")
    table.add_column("measured", justify="right")
    for grid in dict.fromkeys(str(outcome.grid) for outcome in outcomes):
        cells: list[Text] = []
        of_grid = [outcome for scheme in schemes for outcome in groups[grid, scheme]]
        for scheme in schemes:
            bad = sum(outcome.failure is not None for outcome in groups[grid, scheme])
            count = len(groups[grid, scheme])
            cells.append(Text(f"{count - bad} of {count}", "red") if bad else Text(f"{count}", "green"))
        predicted, measured = (sum(outcome.bytes[i] for outcome in of_grid) / 1024 for i in (0, 1))
        colour = "green" if all(outcome.bytes[0] == outcome.bytes[1] for outcome in of_grid) else "red"
        error = max(outcome.max_error for outcome in of_grid)
        table.add_row(grid, *cells, f"{error:.1e}", f"{predicted:,.1f}", Text(f"{measured:,.1f}", colour))
    print_table(out, table)
    bad = sum(outcome.failure is not None for outcome in outcomes)
    verdict = (f"{bad} of {len(outcomes)} cases fail", "red") if bad else (f"all {len(outcomes)} cases agree", "green")
    rest = f", forward and all gradients, on integers and on real numbers, in {seconds:.0f} s"
    out.print(Text.assemble(verdict, rest))


def _name_failures(failed: Sequence[Outcome], total: int) -> None:
    if not is_first_rank():
        return
    print(f"{len(failed)} of {total} cases fail:", file=sys.stderr)
    for outcome in failed[:MAX_SHOWN]:
        print(f"  {outcome.case.name(outcome.grid)}\n    {outcome.failure}", file=sys.stderr)
    if len(failed) > MAX_SHOWN:
        print(f"  and {len(failed) - MAX_SHOWN} more; --json names them all", file=sys.stderr)
