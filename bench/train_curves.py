"""Loss curves of `ndtp train` on every kind of grid, two and eight layers deep, and of runs that change theirs.

    python bench/train_curves.py [--json bench/results/train_curves.json] [--plot docs/train.png] [--keep FOLDER]

Each run is a call of `ndtp train` on eight local ranks, as a user makes it; the last one is two calls, of which the
second goes on from the checkpoint of the first, on another grid.  The losses are those of the log.csv that it writes,
the text is the source of Python's argparse.  With `--keep` runs that are there already are not made again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

import ndtp
from ndtp.cli.train_log import read_log
from ndtp.cli.train_plot import curves, distances, figure_of

# name of a run: the grids that it is on, one after the other
RUNS = {
    "dense": ("",),
    "1D": ("x=8",),
    "2D": ("x=2,y=4",),
    "3D": ("z=2,x=2,y=2",),
    "dp x 3D": ("dp=2,z=2,x=1,y=2",),
    "resumed": ("x=2,y=4", "z=4,x=1,y=2"),
}
STEPS = {2: 60, 8: 24}  # layers: steps
OPTIONS = "--width 64 --heads 8 --batch 8 --context 32 --seed 1"
CLOSE = 1e-5  # relative; each loss of a grid beside the dense one of the same step


def train(text: Path, layers: int, grids: tuple[str, ...], folder: Path) -> list[str]:
    """The commands of a run, made; on the last grid for what is left of the steps."""
    said = []
    for i, grid in enumerate(grids, 1):
        steps = STEPS[layers] * i // len(grids)
        words = [*OPTIONS.split(), "--layers", str(layers), "--steps", str(steps), *(["--grid", grid] if grid else [])]
        command = [sys.executable, "-m", "ndtp", "train", str(text), *words, "--output", str(folder)]
        if len(read_log(folder / "log.csv")) < steps:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        said.append(shlex.join(["ndtp", "train", text.name, *words]))
    return said


def losses(folder: Path) -> list[float]:
    return [float(row["loss"]) for row in read_log(folder / "log.csv")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--keep", type=Path, help="where the outputs of all runs are; default: nowhere")
    arguments = parser.parse_args()
    text = Path(argparse.__file__)
    with tempfile.TemporaryDirectory(prefix="ndtp-curves-") as temporary:
        top, rows = arguments.keep or Path(temporary), []
        for layers in STEPS:
            for name, grids in RUNS.items():
                folder = top / f"{layers} layers" / name
                commands = train(text, layers, grids, folder)
                mine, dense = losses(folder), losses(top / f"{layers} layers" / "dense")
                furthest = max(abs(a - b) / abs(b) for a, b in zip(mine, dense, strict=True))
                rows.append({"layers": layers, "run": name, "commands": commands, "furthest": furthest, "losses": mine})
                print(
                    f"{layers} layers, {name:8} {mine[0]:.4f} -> {mine[-1]:.4f}, {furthest:.2g} from dense", flush=True
                )
        if arguments.plot is not None:
            draw(arguments.plot, top)
    if arguments.json is not None:
        versions = {module.__name__: module.__version__ for module in (torch, ndtp)}
        content = text.read_bytes()
        about = {
            "date": str(date.today()),
            "versions": versions | {"python": platform.python_version()},
            "text": {"name": text.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
            "ranks": 8,
            "dtype": "float32",
        }
        lines = ",\n  ".join(json.dumps(row | {"furthest": float(f"{row['furthest']:.3g}")}) for row in rows)
        arguments.json.write_text(json.dumps(about, indent=1)[:-2] + f',\n "runs": [\n  {lines}\n ]\n}}\n')
    off = [row for row in rows if not row["furthest"] <= CLOSE]
    if off:
        raise SystemExit("; ".join(f"{row['layers']} layers, {row['run']}: {row['furthest']:.2g} off" for row in off))


def draw(path: Path, top: Path) -> None:
    figure = figure_of((12, 5.6))
    both = figure.subplots(2, len(STEPS), sharex="col", height_ratios=(2.4, 1))
    for (above, below), layers in zip(both.T, STEPS, strict=True):
        folders = [top / f"{layers} layers" / name for name in RUNS]
        curves(above, folders)
        distances(below, folders)
        above.set_title(f"{layers} layers", loc="left", fontweight="bold")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
