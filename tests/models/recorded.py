"""The parts that the campaigns share, `every_class.py` and `elsewhere.py`: bounds, verdicts, and what a row names."""

from __future__ import annotations

import subprocess
from pathlib import Path

from torch import Tensor

# How far off a tensor may be, relative to its largest number; and beyond that, how often as far as dense itself is.
CLOSE, DRIFT = 1e-4, 10.0
GOOD = ("equal", "drift")


def whole(x: Tensor) -> Tensor:
    """The whole of a split tensor, on every rank; another one as it is."""
    return x.gathered() if hasattr(x, "gathered") else x


def commit_of(folder: Path) -> str:
    """The commit of a checkout, with "+" where its files are not those of it; "unknown" of an installed package."""
    given = subprocess.run(
        ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"],
        check=False,
        capture_output=True,
        text=True,
    )
    return given.stdout.strip() or "unknown"


def said_by(error: Exception) -> str:
    """The line of an error of ranks that says what went wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line or "Timeout" in line] or lines
    return said[-1].strip()[:400]
