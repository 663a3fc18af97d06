"""Every router on every (e, z, x, y) of eight ranks against loops over tokens and experts.

    python tests/nn/every_moe_grid.py [--json bench/results/moe_grids.json] [--routers mixtral gshard ...]

Output, losses and all gradients in fp64, bytes as predicted from the counts and as metered; for random routing, for
uneven routing that leaves experts empty, for that one in two chunks, and for experts that lie over all axes, those that
split attention's features among them.  Minutes on two cores.  `test_moe.py` runs a few of these on fewer ranks.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of `products`

import torch
from moe_case import EXPERTS, TOKENS, check

import ndtp
import ndtp.testing
from ndtp import Grid

LOSSES = {"balance": 0.1, "z_loss": 0.01}
ROUTERS = {
    "mixtral": {},
    "qwen": {},
    "switch": {},
    "gshard": {"groups": 2},
    "noisy": {},
    "deepseek": {},
    "deepseek, in groups": {"expert_groups": 4, "top_groups": 2},
}
# Rows that have much in common are for few experts.
AXES = ("e", "z", "x", "y")
CASES = {
    "random": {},
    "uneven": {"skew": 3.0},
    "uneven, in two chunks": {"skew": 3.0, "chunks": 2},
    "uneven, over all axes": {"skew": 3.0, "expert_axis": ("e", "x", "y", "z")},
}
RANKS = 8


def check_grid(grid: Grid, routers: list[str]) -> list[dict]:
    """What a rank found; the first difference is an error."""
    found = []
    for name in routers:
        for case, arguments in CASES.items():
            options = LOSSES | ROUTERS[name]
            row = check(grid, router=name.split(",")[0], options=options, **arguments)
            row["error"] = max(row.pop("errors").values())
            found.append({"router": name, "case": case, **row})
    return found


def merged(ranks: list[list[dict]]) -> list[dict]:
    """Of all ranks: the largest error, and the bytes of all."""
    rows = []
    for each in zip(*ranks, strict=True):
        row = {name: each[0][name] for name in ("router", "case", "loads")}
        row |= {name: sum(rank[name] for rank in each) for name in ("predicted", "metered")}
        rows.append(row | {"empty": row["loads"].count(0), "error": max(rank["error"] for rank in each)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", nargs="*", default=list(ROUTERS), choices=list(ROUTERS))
    parser.add_argument("--json", type=Path, help="the record")
    arguments = parser.parse_args()
    rows, failed = [], 0
    for grid in Grid.all(RANKS, AXES):
        try:
            found = merged(ndtp.testing.run(check_grid, RANKS, args=(grid, arguments.routers)))
        except ndtp.testing.RankError as error:
            failed += 1
            print(f"{grid!s:24} {str(error).splitlines()[0]}", flush=True)
            print(error, file=sys.stderr)
            continue
        rows += [{"grid": {axis: grid[axis] for axis in AXES}, **row} for row in found]
        empty, error = max(row["empty"] for row in found), max(row["error"] for row in found)
        print(f"{grid!s:24} {len(found)} agree, up to {empty} experts without rows, error {error:.1e}", flush=True)
    print(f"{len(rows)} cases agree" + f"; {failed} grids do not" * bool(failed))
    if arguments.json is not None:
        versions = {module.__name__: module.__version__ for module in (torch, ndtp)}
        about = {
            "date": str(date.today()), "versions": versions | {"python": platform.python_version()}, "ranks": RANKS,
            "dtype": "float64", "tokens": TOKENS, "experts": EXPERTS, "failed grids": failed,
        }  # fmt: skip
        text = ",\n  ".join(json.dumps(row) for row in rows)
        arguments.json.write_text(json.dumps(about, indent=1)[:-2] + f',\n "rows": [\n  {text}\n ]\n}}\n')
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
