"""The `ndtp` command: one module a subcommand."""

from __future__ import annotations

import typer

from ndtp.cli.bench_calibrate import calibrate
from ndtp.cli.bench_gemm import gemm
from ndtp.cli.bench_overlap import overlap
from ndtp.cli.bench_step import step
from ndtp.cli.bench_volume import volume
from ndtp.cli.check import check
from ndtp.cli.demo import demo
from ndtp.cli.info import info
from ndtp.cli.plan import plan
from ndtp.cli.show import show

app = typer.Typer(
    name="ndtp",
    help="Tensor parallelism in one, two and three dimensions: check it, measure it, plan it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
bench = typer.Typer(help="Benchmarks: volume, step, overlap, calibrate, gemm.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(show, name="show")


for command in (demo, check, plan, info):
    app.command()(command)
for benchmark in (volume, step, overlap, calibrate, gemm):
    bench.command()(benchmark)
