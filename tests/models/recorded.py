"""The parts that the campaigns share, `every_class.py` and `elsewhere.py`: bounds, verdicts, the record, the loop."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ndtp

# How far off a tensor may be, relative to its largest number; and beyond that, how often as far as dense itself is.
CLOSE, DRIFT = 1e-4, 10.0
GOOD, BAD = ("equal", "drift"), ("stopped", "wrong", "broken")
LEAST = 1e-2  # of the largest gradient of all: what is smaller is noise where gradients are none
RATE = 0.05  # of the optimizer's step, by which parameters differ as gradients do


def whole(x: Tensor) -> Tensor:
    """The whole of a split tensor, on every rank; another one as it is."""
    return x.gathered() if hasattr(x, "gathered") else x


@contextmanager
def using(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compared(
    mine: Mapping[str, Tensor], dense: Mapping[str, Tensor], also: Iterable[Mapping[str, Tensor]] = ()
) -> tuple[str, str, dict[str, float]]:
    """The verdict, the tensor that is furthest off, and how far outputs ("forward") and what has gradients are.

    Args:
        also: what dense gives with its weights off by their last bit.
    """
    worst, furthest, verdict = "", 0.0, "equal"
    off_by = {"forward": 0.0, "backward": 0.0}
    largest = max((float(x.abs().max()) for name, x in dense.items() if "gradient " in name and x.numel()), default=0.0)
    missing = next((name for name in [*dense, *mine] if name not in mine or name not in dense), None)
    if missing is not None:
        return "wrong", f"{missing}: {'missing' if missing in dense else 'dense has none'}", off_by
    for name, theirs in dense.items():
        is_gradient, is_parameter = "gradient " in name, name.startswith("parameter ")
        x = mine[name]
        x = x[tuple(map(slice, theirs.shape))] if is_gradient or is_parameter else x  # padding
        if x.shape != theirs.shape:
            return "wrong", f"{name}: {tuple(x.shape)}, not {tuple(theirs.shape)}", off_by
        finite = theirs.isfinite()
        differs = ~((x == theirs) | (x.isnan() & theirs.isnan()))
        differs &= finite | ~x.isfinite() | (x.abs() <= torch.finfo(x.dtype).max / 1e3)  # a sum that overflows
        if not differs.any():
            continue
        least = largest * LEAST * (1.0 if is_gradient else RATE if is_parameter else 0.0)
        scale = max(float(theirs[finite].abs().max()) if finite.any() else 0.0, least, 1e-30)
        distance = lambda y, t=theirs, d=differs: float((y - t)[d].abs().max())  # noqa: E731
        off = distance(x) / scale
        off = off if off == off else float("inf")
        kind = "backward" if is_gradient or is_parameter else "forward"
        off_by[kind] = max(off_by[kind], off)
        if off > furthest:
            worst, furthest = f"{name}: {off:.2g}", off
        if off <= CLOSE:
            continue
        drift = max((distance(y[name]) / scale for y in also if name in y), default=0.0)
        if off > DRIFT * drift:
            return "wrong", f"{name}: {off:.2g}", off_by
        verdict = "drift"
    return verdict, worst, off_by


def decided(asked: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """A comparison in fp32; where it says wrong, one in fp64, in which rounding is none, has the last word.

    Args:
        asked: compares in a dtype, with `moved` against what dense is off with other last bits of its weights.
    """
    row = asked(torch.float32, False)
    if row["verdict"] != "wrong":
        return row
    exact = asked(torch.float64, True)
    if exact["verdict"] in ("equal", "drift", "wrong"):
        return row | {**exact, "dtype": "float64"}
    return asked(torch.float32, True)  # it does not run in fp64


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


# ------------------------------------------------------------------------------------------------------- the campaign


def parser_of(about: str | None, scheme: str, timeout: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="x=2,y=2", help="axes and their sizes")
    parser.add_argument("--scheme", default=scheme)
    parser.add_argument("--timeout", type=int, default=timeout, help="seconds for each")
    parser.add_argument("--json", type=Path, help="the record, which is gone on with")
    parser.add_argument("--again", nargs="*", help="compare what the record has, too: all, or of these verdicts")
    parser.add_argument("--trace", action="store_true", help="print what a broken one raised")
    return parser


def axes_of(grid: str) -> dict[str, int]:
    return {name: int(size) for name, size in (each.split("=") for each in grid.split(","))}


def campaign(
    arguments: argparse.Namespace, kind: str, named: Iterable[tuple[str, Callable[[], dict[str, Any]]]],
    described: Callable[[str, dict[str, Any]], str], share: float, modules: Iterable[Any],
) -> int:  # fmt: skip
    """Compare what the record lacks, or what is asked for again, and record each; returns what the program exits with.

    Args:
        kind: what one is called in the record, "class" or "model".
        named: each by its name, and what compares it.
        described: a row as a line.
        share: of parameters that are split; how many have it is counted.
        modules: whose versions are recorded.
    """
    on, rows = f"{arguments.grid} {arguments.scheme}", {}
    if arguments.json is not None and arguments.json.exists():
        rows = {f"{row[kind]} on {row['on']}": row for row in json.loads(arguments.json.read_text())["rows"]}
    commit, verdicts = commit_of(Path(ndtp.__file__).parent), Counter[str]()
    versions = {module.__name__: module.__version__ for module in modules}
    for name, compare in named:
        known = rows.get(f"{name} on {on}")
        if not (known is None or arguments.again == [] or known["verdict"] in (arguments.again or ())):
            continue
        start = time.monotonic()
        try:
            row = compare()
        except (ndtp.testing.RankError, ndtp.testing.RankTimeout) as error:
            row = {"verdict": "broken", "error": said_by(error), "trace": str(error)}
        except Exception:
            row = {"verdict": "broken", "error": traceback.format_exc().splitlines()[-1]}
        trace = row.pop("trace", "")
        row = {kind: name, "on": on, "commit": commit, **row, "seconds": round(time.monotonic() - start, 1)}
        rows[f"{name} on {on}"] = row
        verdicts[row["verdict"]] += 1
        print(described(name, row), flush=True)
        if trace and arguments.trace:
            print(trace, file=sys.stderr, flush=True)
        if arguments.json is not None:
            write(arguments.json, rows, share, versions)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    return 1 if any(verdicts[bad] for bad in BAD) else 0


def write(path: Path, rows: Mapping[str, dict[str, Any]], share: float, versions: Mapping[str, str]) -> None:
    """All rows, one a line, and how many of each grid have which verdict."""
    counts: dict[str, dict[str, int]] = {}
    for row in rows.values():
        each = counts.setdefault(row["on"], {})
        each[row["verdict"]] = each.get(row["verdict"], 0) + 1
        if row["verdict"] in GOOD and row["split"] >= share:
            named = f"split to {share:.0%}".replace("%", " %")
            each[named] = each.get(named, 0) + 1
    about = {"date": str(date.today()), "versions": versions, "counts": counts}
    text = ",\n  ".join(json.dumps(rows[key]) for key in sorted(rows))
    path.write_text(json.dumps(about, indent=1)[:-2] + f',\n "rows": [\n  {text}\n ]\n}}\n')
