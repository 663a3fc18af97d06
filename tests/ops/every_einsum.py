"""Thousands of random einsums on real ranks, against `torch.einsum`.

    python tests/ops/every_einsum.py [--count 4000] [--first 0] [--json bench/results/einsum.json]

Expressions of one and two operands, letters in any order, contracted, repeated or of size 1; mappings, mappings of
results and roles, on grids of four ranks.  Of what is legal by a reading of its own (`tests/legal.py`) values and all
gradients of integers are torch's to the last bit, and bytes as planned.  All else is refused with a fix before anything
moves.  The same seeds' draws of up to three operands on grids of up to nine ranks are simulated in one process.
`test_named_einsum.py` and `tests/algebra/test_einsum.py` run some of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).parents[1]))  # of `einsum_cases`

import torch
from einsum_cases import random_case
from test_named_einsum import check_random

import ndtp
import ndtp.testing
from ndtp import Grid

GRIDS = tuple(Grid(sizes) for sizes in ({"x": 4}, {"x": 2, "y": 2}, {"z": 2, "x": 2}, {"z": 2, "x": 1, "y": 2}))
AT_ONCE = 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", type=Path, help="the record")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.count)
    simulated = Counter(random_case(Random(seed)).check() for seed in seeds)
    print(f"simulated: {simulated[True]} are torch's, {simulated[False]} refused with a fix that works", flush=True)
    total = [0, 0, 0]
    for start in range(seeds.start, seeds.stop, AT_ONCE):
        part = range(start, min(start + AT_ONCE, seeds.stop))
        (found, *others) = ndtp.testing.run(check_random, 4, args=(part, GRIDS))
        assert all(other == found for other in others)
        total = [a + b for a, b in zip(total, found, strict=True)]
        print(f"to seed {part.stop}: {total[0]} are torch's, {total[1]} refused", flush=True)
    if arguments.json is not None:
        record = {
            "date": str(date.today()),
            "versions": {"torch": torch.__version__, "ndtp": ndtp.__version__, "python": platform.python_version()},
            "seeds": [seeds.start, seeds.stop], "grids": [str(grid) for grid in GRIDS], "dtype": "float64",
            "simulated": {"equal": simulated[True], "refused": simulated[False]},
            "on ranks": {"equal": total[0], "refused": total[1], "of three operands, left out": total[2]},
        }  # fmt: skip
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
