"""The `ndtp` command: one module a subcommand, and one place where wrong use becomes a line and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from functools import partial
from typing import Annotated, Any

import typer

from ndtp.cli.bench_calibrate import calibrate
from ndtp.cli.bench_gemm import gemm
from ndtp.cli.bench_overlap import overlap
from ndtp.cli.bench_step import step
from ndtp.cli.bench_volume import volume
from ndtp.cli.check import check
from ndtp.cli.common import what_it_must_be
from ndtp.cli.demo import demo
from ndtp.cli.export import export
from ndtp.cli.help import Command, CommandGroup
from ndtp.cli.info import info
from ndtp.cli.plan import plan
from ndtp.cli.show import show
from ndtp.cli.train import train
from ndtp.errors import GridError, LayoutError, MismatchError
from ndtp.planner.fields import reason

# Typer's own, whose base it does not export.
UsageError: Any = typer.BadParameter.__mro__[1]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST = 1000  # characters of a message: a number of a million digits is not repeated


class CommandLine(CommandGroup):
    """Wrong use, and output that finds a full disk, end with a line on standard error, and status 2; a
    rank that failed with its traceback, and status 1; Ctrl-C with status 130.  Anything else is a bug, and keeps its
    own traceback.
    """

    def main(self, args: Any = None, prog_name: Any = None, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        run = partial(super().main, args=args, prog_name=prog_name, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a file's name need not be text
                stream.reconfigure(errors="backslashreplace")
        try:
            status = run()
            sys.stdout.flush()
        except UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # whose message is the help
                print(error.format_message(), file=sys.stderr)
                sys.exit(2)
            error.message = what_it_must_be(error) or error.message
            _fail(error.format_message(), 2)
        except (GridError, LayoutError, MismatchError) as error:
            _fail(str(error), 2)
        except OSError as error:
            if error.errno not in FULL:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in memory is not written again at the end
            _fail(f"what was to be written does not fit: {reason(error)}; fix: make room, or write elsewhere", 2)
        except RuntimeError as error:
            from ndtp.testing import RankError

            if not isinstance(error, RankError):
                raise
            _fail(error.refusal or str(error), 2 if error.refusal else 1)
        sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> None:
    if status == 2 and len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


app = typer.Typer(
    name="ndtp",
    cls=CommandLine,
    help="""Tensor parallelism in one, two and three dimensions: check it, measure it, plan it.

    Example: ndtp plan --tokens 8192 --hidden 4096 --ffn 16384 --ranks 64
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
bench = typer.Typer(
    help="""Benchmarks: volume, step, overlap, calibrate, gemm.

    Example: ndtp bench step --grid z=2,x=2
    """,
    no_args_is_help=True,
)
app.add_typer(bench, name="bench", cls=CommandGroup)
app.add_typer(show, name="show", cls=CommandGroup)


def _say_version(wanted: bool) -> None:
    if wanted:
        from ndtp import __version__

        print(f"ndtp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for command in (demo, check, train, export, plan, info):
    app.command()(command)
for benchmark in (volume, step, overlap, calibrate, gemm):
    bench.command()(benchmark)
for each in (app, bench, show):
    for registered in each.registered_commands:
        registered.cls = Command
