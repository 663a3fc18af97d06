"""The table of compiled configurations in docs/kernels.md: written by `aot --page`, compared by `aot --compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- compiled configurations -->", "<!-- end of compiled configurations -->"
COLUMNS = ("registers", "spills", "shared_bytes", "scratch_bytes", "epilogue")
HEAD = "| kernel | configuration | registers | spills | shared | scratch | epilogue |"


def line(row: Mapping[str, Any]) -> str:
    """One configuration as it stands in the page."""
    cells = [row["kernel"], row["config"], *(str(row[name]) for name in COLUMNS)]
    return f"| {' | '.join(cells)} |"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All rows, a folded table for each target."""
    import triton

    parts = [f"Compiled by Triton {triton.__version__}.", ""]
    for target in dict.fromkeys(row["target"] for row in rows):
        own = [line(row) for row in rows if row["target"] == target]
        parts += [
            f"<details><summary>{target}: {len(own)} kernels</summary>",
            "",
            HEAD,
            "|---|---|---|---|---|---|---|",
        ]
        parts += [*own, "", "</details>", ""]
    return "\n".join(parts)


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put the table between the page's marks.

    Raises:
        ValueError: the page has no such marks.
    """
    before, found, rest = path.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{path} has no place for the table\n  fix: a line {BEGIN}, and below it {END}")
    path.write_text(f"{before}{BEGIN}\n{table(rows)}{END}{after}")


def lines(path: Path) -> tuple[str, dict[str, list[str]]]:
    """The version of Triton that the page's table names, and the lines of each target."""
    text = path.read_text().partition(BEGIN)[2].partition(END)[0]
    version = text.partition("Compiled by Triton ")[2].split()[0].rstrip(".")
    parts = text.split("<details><summary>")[1:]
    return version, {
        part.partition(":")[0]: [row for row in part.splitlines() if row.startswith("| ") and row != HEAD]
        for part in parts
    }


def other(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that the page shows with other numbers, or not at all; none where another Triton has made it."""
    import triton

    version, shown = lines(path)
    return [row for row in rows if version == triton.__version__ and line(row) not in shown.get(row["target"], ())]
