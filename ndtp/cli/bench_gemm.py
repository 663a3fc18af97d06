"""`ndtp bench gemm`, and the choice of kernels that `ndtp info --gemm` shows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ndtp.cli.common import JsonOption, console, dtype_of, numbers, print_table, write_json
from ndtp.errors import LayoutError

DTYPES = ("bfloat16", "float16", "float32")
LARGEST = 2**31 - 1  # of a dim: kernels index with 32 bits
DEFAULT_SHAPES = ["8192,14336,4096", "8192,4096,14336", "2048,14336,4096", "8192,6144,4096"]


def gemm(
    shape: Annotated[list[str] | None, typer.Option(metavar="M,N,K", help="Sizes of a product; repeatable.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.", callback=dtype_of(*DTYPES))] = "bfloat16",
    tune: Annotated[bool, typer.Option("--tune", help="Keep the winners in the user's cache; needs a GPU.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Measure the kernels' candidates against torch on the GPU at hand; without one, show what the model would choose.

    Example: ndtp bench gemm --shape 8192,14336,4096 --tune
    """
    import ndtp_kernels
    import torch

    shapes = [sizes_of(text, "--shape") for text in shape or DEFAULT_SHAPES]
    on_gpu = torch.cuda.is_available()
    if tune and not on_gpu:
        raise LayoutError("bench gemm --tune: there is no GPU to measure on\n  fix: run it where the training will run")
    out = console(json_file)
    if not on_gpu:
        reports = [ndtp_kernels.explain(*sizes, dtype) for sizes in shapes]
        table = Table(title=f"What the roof model chooses on {reports[0]['chip']}: estimates, not measured", box=None)
        for head in ("M,N,K", "choice", "estimated us", "bound by"):
            table.add_column(head, justify="left" if head in ("choice", "bound by") else "right")
        for sizes, report in zip(shapes, reports, strict=True):
            chosen = next(row for row in report["candidates"] if row["chosen"])
            name = ",".join(map(str, sizes))
            table.add_row(name, report["choice"], f"{chosen['estimated_us']:.1f}", chosen["bound"])
        print_table(out, table)
        return write_json(json_file, {"measured": False, "rows": reports})
    with tempfile.TemporaryDirectory() as folder:
        result = ndtp_kernels.tune(shapes, dtype, path=None if tune else Path(folder) / "gemm.json")
    table = Table(title=f"Measured on {result['chip']}, {dtype}", box=None)
    for head in ("product", "fastest", "TFLOP/s", "x torch"):
        table.add_column(head, justify="left" if head in ("product", "fastest") else "right")
    for row in result["rows"]:
        ratio = row.get("against_torch")
        rate = f"{row['tflops']:.0f}" if row["choice"] else "-"
        table.add_row(row["shape_class"], row["choice"] or "none runs", rate, f"{ratio:.2f}" if ratio else "-")
    print_table(out, table)
    if tune:
        out.print(f"kept in {result['path']}")
    write_json(json_file, {"measured": True, **result})


def choice_table(sizes: tuple[int, int, int], dtype: str) -> tuple[Table, dict[str, object]]:
    """Every candidate for a product with its estimate, and the choice."""
    import ndtp_kernels

    report = ndtp_kernels.explain(*sizes, dtype)
    title = f"{report['shape_class']} on {report['chip']}: {report['choice']} ({report['source']})"
    table = Table(title=title, box=None)
    for head in ("candidate", "estimated us", "TFLOP/s", "waves", "bound by"):
        table.add_column(head, justify="left" if head in ("candidate", "bound by") else "right")
    for row in report["candidates"]:
        table.add_row(
            ("> " if row["chosen"] else "  ") + row["config"],
            f"{row['estimated_us']:.1f}",
            f"{row['estimated_tflops']:.0f}",
            f"{row['waves']:.2f}",
            row["bound"],
        )
    return table, report


def sizes_of(text: str, option: str) -> tuple[int, int, int]:
    """Parse the three sizes of a product.

    Raises:

    typer.BadParameter: a text that is not three sizes.
    """
    m, n, k = numbers(text, option, "8192,14336,4096 (M,N,K)", 3)
    if max(m, n, k) > LARGEST:
        raise typer.BadParameter(f"{text}; a size of a product is at most {LARGEST:,}", param_hint=option)
    return m, n, k
