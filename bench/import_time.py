"""How long it takes until Python has imported ndtp, and until the command line has answered.

    python bench/import_time.py [--out bench/results/import_time.json]

A process of its own each time, calls interleaved, medians.  What the interpreter takes to start is measured beside them
and taken off.  `tests/test_imports.py` holds what each call may load.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

EMPTY = "python -c pass"
CALLS = {
    EMPTY: ("-c", "pass"),
    "import ndtp": ("-c", "import ndtp"),
    "ndtp --help": ("-m", "ndtp", "--help"),
    "ndtp plan": ("-m", "ndtp", *["plan", "--tokens", "8192", "--hidden", "4096", "--ffn", "16384", "--ranks", "64"]),
    "import torch": ("-c", "import torch"),
    "import ndtp, ndtp.nn": ("-c", "import ndtp; ndtp.nn.MLP"),
}


def seconds(words: tuple[str, ...]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def measure(repetitions: int) -> dict[str, float]:
    """Median milliseconds a call; a first round, which reads files for the first time, is left out."""
    times: dict[str, list[float]] = {name: [] for name in CALLS}
    for repetition in range(-1, repetitions):
        for name, words in CALLS.items():
            took = seconds(words)
            if repetition >= 0:
                times[name].append(took * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    medians = measure(arguments.repetitions)
    print(f"{'ms':24} {'in all':>8} {'above an empty program':>24}")
    for name, value in medians.items():
        print(f"{name:24} {value:8.0f} {value - medians[EMPTY]:24.0f}")
    if arguments.out:
        result = {
            "date": str(date.today()),
            "python": platform.python_version(),
            "cpu": platform.processor() or platform.machine(),
            "unit": "median milliseconds of a process",
            "calls": {name: round(value, 1) for name, value in medians.items()},
        }
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
