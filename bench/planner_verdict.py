"""Is the planner within 25 % of the clock?  A verdict on what `ndtp bench step` has measured and predicted.

    torchrun .. -m ndtp bench calibrate --output hardware.toml
    torchrun .. -m ndtp bench step --hardware hardware.toml --json planned.json
    python bench/planner_verdict.py planned.json

The prediction of each grid is that of `ndtp plan` for the measured hardware.  Without a GPU the file is read, and
nothing is judged.  Exit status: 0 every grid is within 25 %, 1 one is not, 2 nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

WITHIN = 0.25


def judged(rows: Sequence[dict[str, Any]]) -> tuple[bool, list[str]]:
    """Return whether every grid that was predicted and measured is within the goal, and a line for each.

    Raises:
        ValueError: no grid was both predicted and measured.
    """
    ratios = {
        row["name"]: row["predicted_ms"] / row["step_ms"] for row in rows if row["predicted_ms"] and row["step_ms"]
    }
    if not ratios:
        raise ValueError("no grid was both predicted and measured")
    lines = [
        f"{name:24} predicted / measured {ratio:.2f}: {'met' if abs(ratio - 1) <= WITHIN else 'MISSED'}"
        for name, ratio in ratios.items()
    ]
    return all(abs(ratio - 1) <= WITHIN for ratio in ratios.values()), lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="of `ndtp bench step --hardware PROFILE --json FILE`")
    found = json.loads(parser.parse_args(words).file.read_text())
    met, lines = judged(found["rows"])
    print(f"planned for {found['hardware']}, {found['tokens']} tokens", *lines, sep="\n")
    if not torch.cuda.is_available():
        print("planner_verdict: these are times of CPUs; nothing was measured on a GPU")
        return 2
    print("planner: " + ("met" if met else "MISSED"))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
