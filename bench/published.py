"""Training steps that others published, beside what the planner predicts of them.

    python bench/published.py                      # every table: how near, and in the right order
    python bench/published.py --table llama3-4     # its rows, and what a step is made of
    python bench/published.py --rows mine.toml     # tables of your own, of the same form, judged alike
    python bench/published.py --markdown           # what docs/results.md shows
    python bench/published.py --choose             # grids that ndtp would have chosen instead

`bench/published.toml` and `bench/published_blind.toml` hold the rows with source, table and page.  Constants of presets
(`ndtp.planner.presets`) were fitted on the tables marked "fit"; the others judge them.  Mixtures of experts are
counted by themselves.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ndtp.errors import GridError
from ndtp.planner.hardware import Hardware
from ndtp.planner.model_sizes import Mixture
from ndtp.planner.training.choose import Question, choose
from ndtp.planner.training.memory import memory
from ndtp.planner.training.practice import Practice
from ndtp.planner.training.splits import RANK_ORDERS, Splits
from ndtp.planner.training.step import StepTime, TrainingJob
from ndtp.planner.training.transformer import Transformer

DATA = Path(__file__).with_suffix(".toml")
BLIND = DATA.with_name("published_blind.toml")  # tables that were read when the model had been finished
AXES = ("pp", "e", "z", "cp", "x", "y")
HALVES = ("fit", "judge", "experts, fit", "experts, judge")
SAME = 0.01  # published values nearer to each other than this have no order


@dataclass(frozen=True)
class Row:
    table: str
    half: str
    job: TrainingJob
    splits: Splits
    seconds: float
    marks: str = ""  # "m": from memory; "i": it influenced the model that it judges

    @cached_property
    def predicted(self) -> StepTime:
        return self.job.step(self.splits, RANK_ORDERS[0])

    @property
    def log(self) -> float:
        """Of predicted over published."""
        return math.log(float(self.predicted.total) / self.seconds)

    @property
    def filled(self) -> float:
        """The predicted memory over the device's: the run fitted, so more than 1 is wrong."""
        job = self.job
        return float(memory(job.model, job.batch, job.practice, self.splits).total) / 2**30 / job.hardware.memory_gib

    @property
    def name(self) -> str:
        job = self.job
        fp8 = " fp8" if job.practice.dtype == "float8" else ""
        run = f"{job.model.name}{fp8}, {int(self.splits.ranks)} x {job.hardware.name.split('-')[0]}, {self.splits}"
        return run + marked(self.marks)

    def utilisation(self, seconds: float) -> float:
        tokens = self.job.batch * self.job.model.sequence
        peak = self.job.hardware.peak(self.job.practice.dtype)
        return tokens * self.job.model.flops / (seconds * int(self.splits.ranks) * peak)


def load(path: Path | None = None) -> list[Row]:
    """Return the rows of a file of tables; without one, of all tables that are here.

    Raises:
        GridError: a value that is none of its kind; names it.
    """
    files = [tomllib.loads(each.read_text()) for each in (DATA, BLIND, *([path] if path else ()))]
    data = {key: {k: v for each in files for k, v in each.get(key, {}).items()} for key in ("models", "machines")}
    machines = {name: machine(name, **about) for name, about in data["machines"].items()}
    found = []
    for table in files[-1]["table"] if path else [table for each in files for table in each["table"]]:
        hardware = machines.get(table["machine"]) or Hardware.load(table["machine"])
        for cells in table["rows"]:
            given = dict(zip(table["columns"], cells, strict=True))
            found.append(row(table, {**table, **given}, data["models"][given["model"]], hardware, given))
    return found


def machine(name: str, preset: str, power: float = 1.0, **changes: Any) -> Hardware:
    """A preset, but for fields of its own; `intra_gbs` and `inter_gbs` are the bandwidths of its links."""
    of = Hardware.load(preset).limited(power)
    for link in ("intra", "inter"):
        if f"{link}_gbs" in changes:
            changes[link] = replace(getattr(of, link), bandwidth_gbs=changes.pop(f"{link}_gbs"))
    return replace(of, name=name, **changes)


def row(table: dict[str, Any], about: dict[str, Any], sizes: dict[str, Any], hardware: Hardware, given: Any) -> Row:
    mixture = sizes.get("mixture")
    sizes = sizes if mixture is None else {**sizes, "mixture": Mixture(**mixture)}
    model = Transformer(**sizes, sequence=about["sequence"], name=about["model"])
    features = {key: given[key] for key in given if key in Practice.__dataclass_fields__}
    types = Practice.__dataclass_fields__
    features = {key: bool(value) if types[key].type == "bool" else value for key, value in features.items()}
    practice = Practice(**{**table["software"], **features})
    sizes_of = {axis: about.get(axis, 1) for axis in AXES}
    dp, rest = divmod(about["ranks"], math.prod(sizes_of.values()))
    if rest:
        raise GridError(f"published: {sizes_of} do not divide {about['ranks']} ranks")
    splits = Splits(dp=dp, micro=about.get("micro", 1), virtual=about.get("v", 1), **sizes_of)
    job = TrainingJob(model, about["batch"], hardware, practice)
    if about.get("grid") == "chosen":
        open_ones = {"pp": 1, "e": 1, "cp": 1, "virtual": 1}
        question = Question(
            model, job.batch, about["ranks"], hardware, practice, recompute=(practice.recompute,), fixed=open_ones
        )
        splits = choose(question, 1)[0].splits
    return Row(table["id"], table.get("half", "judge"), job, splits, seconds_of(about, model), marks_of(table, given))


def marks_of(table: dict[str, Any], given: dict[str, Any]) -> str:
    """Return the marks of one row of a table."""
    rows = table.get("from_memory_rows", {})
    remembered = "from_memory" in table and all(given[column] in values for column, values in rows.items())
    return "m" * remembered + "i" * ("influenced" in table)


def marked(marks: str) -> str:
    return f" ({', '.join(sorted(marks))})" if marks else ""


def seconds_of(about: dict[str, Any], model: Transformer) -> float:
    """Of a step, from what was published in the table's unit."""
    value, ranks, tokens = about["value"], about["ranks"], about["batch"] * model.sequence
    if about["unit"] == "seconds":
        return float(value)
    if about["unit"] == "tokens":
        return tokens / (value * ranks)
    if about["unit"] == "tflops":
        return tokens * model.flops / (value * 1e12 * ranks)
    if about["unit"] == "causal":
        half = 6.0 * model.layers * model.heads * model.head * model.sequence
        return tokens * (model.flops - half) / (value * 1e12 * ranks)
    if about["unit"] == "megatron":  # Narayanan et al., equation 3, with recomputation
        s, layers, h = model.sequence, model.layers, model.hidden
        flops = 96 * tokens * layers * h**2 * (1 + s / (6 * h) + model.vocabulary / (16 * layers * h))
        return float(flops / (value * 1e12 * ranks))
    raise GridError(f"published: unit {about['unit']!r} is not one of seconds, tokens, tflops, causal, megatron")


@dataclass(frozen=True)
class Verdict:
    """How near the predictions of some rows are.

    Attributes:
        middle: the median of |log(predicted / published)|.
        within: the part of rows that are within 30 %.
        ordered: the part of pairs of a table whose order of step times is right.
        ranked: so, of utilisation, which sizes of models and batches do not tell.
        above: rows whose predicted memory is more than the device's, though they ran.
    """

    rows: int
    middle: float
    within: float
    ordered: float
    ranked: float
    ratio: float
    above: int


def judge(rows: Sequence[Row]) -> Verdict:
    logs = [each.log for each in rows]
    time = [_in_order(a.seconds, b.seconds, _total(a), _total(b)) for a, b in _pairs(rows)]
    use = [_in_order(*_uses(a, b)) for a, b in _pairs(rows)]
    return Verdict(
        len(rows), median(map(abs, logs)), sum(abs(x) <= math.log(1.3) for x in logs) / len(rows),
        _part(time), _part(use), math.exp(median(logs)), sum(each.filled > 1 for each in rows),
    )  # fmt: skip


def _uses(a: Row, b: Row) -> tuple[float, float, float, float]:
    return (a.utilisation(a.seconds), b.utilisation(b.seconds), a.utilisation(_total(a)), b.utilisation(_total(b)))


def _total(row: Row) -> float:
    return float(row.predicted.total)


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    return [(a, b) for a, b in combinations(rows, 2) if a.table == b.table]


def _in_order(one: float, other: float, predicted: float, predicted_other: float) -> bool | None:
    if abs(math.log(one / other)) < SAME:
        return None
    return (one < other) == (predicted < predicted_other)


def _part(each: Iterable[bool | None]) -> float:
    known = [x for x in each if x is not None]
    return sum(known) / len(known) if known else 1.0


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for each in rows:
        found.setdefault(each.table, []).append(each)
    return found


def summary(rows: Sequence[Row]) -> str:
    """As Markdown."""
    lines = [
        "| table | half | rows | predicted / published, median | median distance | within 30 % "
        "| order of step times | order of utilisation | above the memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    groups = [*tables(rows).items()]
    groups = [(name + marked("".join({mark for x in some for mark in x.marks})), some) for name, some in groups]
    for half in HALVES:
        of_half = [x for x in rows if x.half == half]
        groups.append((f"**all, {half}**", of_half))
        if any(x.marks for x in of_half):
            groups.append((f"**all, {half}, but for marked rows**", [x for x in of_half if not x.marks]))
    for name, some in groups:
        if some:
            v = judge(some)
            lines.append(
                f"| {name} | {some[0].half} | {v.rows} | {v.ratio:.2f} | {v.middle:.1%} | {v.within:.0%} "
                f"| {v.ordered:.0%} | {v.ranked:.0%} | {v.above} |"
            )
    return "\n".join(lines)


def details(rows: Sequence[Row]) -> str:
    """As Markdown: each row, and the largest parts of its step."""
    lines = [
        "| run | published, s | predicted, s | predicted / published | MFU | made of |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for each in rows:
        time = each.predicted
        total = float(time.total)
        parts = sorted(time.parts().items(), key=lambda item: -item[1])[:4]
        made = ", ".join(f"{name} {part / total:.0%}" for name, part in parts if part >= 0.005 * total)
        lines.append(
            f"| {each.name} | {each.seconds:.4g} | {total:.4g} | {total / each.seconds:.2f} "
            f"| {each.utilisation(each.seconds):.0%} | {made} |"
        )
    return "\n".join(lines)


def choices(rows: Sequence[Row]) -> str:
    """As Markdown: what ndtp would have chosen with the same software, and what that would have gained, predicted."""
    lines = [
        "| run | its grid | predicted, s | ndtp's choice | predicted, s | gain | where it comes from |",
        "|---|---|---:|---|---:|---:|---|",
    ]
    for each in rows:
        job = each.job
        question = Question(
            job.model, job.batch, int(each.splits.ranks), job.hardware, job.practice,
            recompute=(job.practice.recompute,), limit_gib=job.hardware.memory_gib,
        )  # fmt: skip
        best = choose(question, 1)[0]
        mine, theirs = best.time.parts(), each.predicted.parts()
        saved = sorted(((theirs[name] - mine[name], name) for name in mine), reverse=True)[:2]
        total = _total(each)
        where = ", ".join(f"{name} {part / total:.0%}" for part, name in saved if part > 0.005 * total) or "nothing"
        lines.append(
            f"| {each.name} | {_described(each.splits)} | {total:.3g} | {_described(best.splits)} | {best.seconds:.3g} "
            f"| {total / best.seconds:.2f} x | {where} |"
        )
    return "\n".join(lines)


def _described(splits: Splits) -> str:
    more = [f"{name} {getattr(splits, key)}" for key, name in (("micro", "micro-batch"), ("virtual", "virtual")) if
            getattr(splits, key) > 1]  # fmt: skip
    return f"{splits}" + "".join(f", {each}" for each in more)


# (table, position of the row): runs whose authors chose a grid.
CHOSEN = (
    ("narayanan-1", 6), ("narayanan-1", 8), ("narayanan-1", 9), ("korthikanti-5", 3), ("korthikanti-5", 7),
    ("megascale-2-megatron", 3), ("llama3-4", 1), ("torchtitan-h100", 12), ("nemo-24.07", 6), ("bridge-h100", 2),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="tables of the same form, instead")
    parser.add_argument("--table", help="the rows of one table")
    parser.add_argument("--markdown", action="store_true", help="all of it, as docs/results.md has it")
    parser.add_argument("--choose", action="store_true", help="grids that ndtp would have chosen")
    arguments = parser.parse_args()
    rows = load(arguments.rows)
    if arguments.table:
        print(details([each for each in rows if each.table == arguments.table]))
    elif arguments.choose:
        of = tables(rows)
        print(choices([of[name][position] for name, position in CHOSEN] if not arguments.rows else rows))
    else:
        print(summary(rows))
        for name, some in tables(rows).items() if arguments.markdown else ():
            print(f"\n**{name}**\n\n{details(some)}")


if __name__ == "__main__":
    try:
        main()
    except GridError as error:
        sys.exit(str(error))
