"""`python tests/split/programs.py`: random modules of torch's functions, split, against the same modules dense."""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from drawn import Program, computed, draw, smallest
from torch import Tensor, nn

import ndtp
from ndtp import Grid
from ndtp.split import Context, SplitTensor, cut, enter, guard_functions, spec_of, whole

GRIDS = {
    2: [("1d", Grid(x=2)), ("1d-sp", Grid(x=2)), ("3d", Grid(z=2))],
    3: [("1d", Grid(x=3)), ("2d", Grid(y=3))],
    4: [("2d", Grid(x=2, y=2)), ("1d-sp", Grid(x=4)), ("3d", Grid(z=2, y=2)), ("2d", Grid(x=4))],
    6: [("2d", Grid(x=2, y=3)), ("3d", Grid(z=3, x=2))],
    8: [("3d", Grid(z=2, x=2, y=2)), ("2d", Grid(x=4, y=2))],
}
CHANGED = ("has been modified by an inplace operation", "has been modified inplace")  # torch's own words
CLOSE = 1e-8  # of the largest number of a tensor; all are computed in float64


@functools.cache
def mesh_of(grid: Grid) -> ndtp.ProcessGrid:
    """One per grid and process: process groups are finite."""
    return ndtp.ProcessGrid(grid)


class Entered(nn.Module):
    """A program whose inputs are split before its code sees them, each as a seed says."""

    def __init__(self, program: Program, mesh: Any) -> None:
        super().__init__()
        self.inner, self.program, self.context = program.module(), program, Context(mesh)
        guard_functions()

    def forward(self, *inputs: Tensor) -> Any:
        rng = random.Random(self.program.seed)
        return self.inner(*(self.split(x, rng) if x.is_floating_point() else x for x in inputs))

    def split(self, x: Tensor, rng: random.Random) -> Tensor:
        axes = list(self.context.mesh.grid.nontrivial(self.context.mesh.grid.names))
        rng.shuffle(axes)
        dims: list[tuple[str, ...]] = [()] * x.dim()
        for axis in axes:
            at = rng.randrange(-1, x.dim())
            if at >= 0 and x.shape[at] > 1:
                dims[at] = (*dims[at], axis)
        spec = spec_of(self.context, tuple(x.shape), dims)
        return enter(cut(x, spec), spec) if spec.axes else x


@dataclass
class Result:
    """What became of programs.

    Attributes:
        wrong: programs whose results or gradients are not those of dense.
        broken: programs that raise what dense does not.
        refused: how many raise torch's own error of a tensor that is changed before its backward, since a rule keeps
            more for its backward than the dense function does; or that of a part of `unbind` whose whole was changed,
            which torch raises once a gradient is asked for, and a split tensor once the part is read.
    """

    compared: int = 0
    refused: int = 0
    wrong: list[tuple[int, str]] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)
    gathered: Counter[str] = field(default_factory=Counter)


def run_programs(seeds: list[int], ranks: int) -> Result:
    """The programs of some seeds on this rank."""
    torch.set_num_threads(1)
    found = Result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            what = compare(draw(seed), ranks, found)
            if any(text in what for text in CHANGED):
                found.refused += 1
            elif what:
                (found.broken if what.startswith("raises") else found.wrong).append((seed, what))
    return found


def compare(program: Program, ranks: int, found: Result | None = None) -> str:
    """How a program differs from dense; empty where it does not."""
    rng = random.Random(program.seed)
    scheme, grid = rng.choice(GRIDS[ranks])
    mesh = mesh_of(grid)
    expected, wanted = computed(program.module(), program.given(), program)
    inputs = program.given()
    context = None
    try:
        model: Any
        if program.layers and rng.random() < 0.7:
            model = program.module()
            ndtp.parallelize(model, mesh, scheme=scheme, example=[x.detach() for x in inputs], strict=False)
            split = model.ndtp_report.split
            context = getattr(split, "context", None)
        else:
            model = Entered(program, mesh)
            context = model.context
        results, grads = computed(model, inputs, program, whole)
    except Exception as error:  # whatever it is, it is a finding
        at = traceback.extract_tb(error.__traceback__)
        line = next((f"{each.filename.rpartition('/')[2]}:{each.lineno}" for each in reversed(at)), "")
        return f"raises {type(error).__name__} at {line}: {str(error)[:300]}"
    if found is not None and context is not None:
        found.gathered.update(key.partition(" of what")[0] for key in context.gathered)
    for kind, ours, theirs in (("output", results, expected), ("gradient", grads, wanted)):
        for i, (mine, dense) in enumerate(zip(ours, theirs, strict=True)):
            text = differs(mine, dense, kind == "gradient")
            if text:
                return "" if is_unstable(program, expected, wanted) else f"{kind} {i}: {text}"
    if found is not None:
        found.compared += len(results) + len(grads)
    return ""


def differs(mine: Any, dense: Tensor, is_gradient: bool) -> str:
    mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
    if is_gradient:  # that of a parameter with padding
        mine = mine[tuple(map(slice, dense.shape))]
    if isinstance(mine, SplitTensor):
        return "is split"
    if mine.shape != dense.shape:
        return f"sizes {tuple(mine.shape)} instead of {tuple(dense.shape)}"
    if mine.dtype != dense.dtype and not is_gradient:
        return f"dtype {mine.dtype} instead of {dense.dtype}"
    if not dense.is_floating_point():
        return "" if torch.equal(mine, dense) else "other integers"
    off = (mine - dense).abs().max().item() if dense.numel() else 0.0
    most = dense.abs().max().item() if dense.numel() else 0.0
    return "" if off <= CLOSE * max(1.0, most) else f"off by {off:.3g} of {most:.3g}"


def is_unstable(program: Program, expected: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether the dense program itself gives something else for inputs that differ by rounding."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        inputs = [
            x + torch.randn(x.shape, generator=generator, dtype=x.dtype) * 1e-14 if x.is_floating_point() else x
            for x in program.given()
        ]
        inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
        results, grads = computed(program.module(), inputs, program)
        both = [*zip(results, expected, strict=True), *zip(grads, wanted, strict=True)]
        if any(differs(a, b, True) for a, b in both):
            return True
    return False


def shrunk(seed: int, ranks: int) -> tuple[str, str]:
    """The smallest program that fails as that of a seed does, and how."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = draw(seed)
        kind = compare(program, ranks)

        def same(text: str) -> bool:
            return bool(text) and text.split(maxsplit=1)[0] == kind.split(maxsplit=1)[0]

        small = smallest(program, lambda each: same(compare(each, ranks)))
        return str(small), compare(small, ranks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/split/programs.py", description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 3, 8, 6], choices=list(GRIDS))
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--chunk", type=int, default=50, help="programs of one call")
    parser.add_argument("--shrink", type=int, default=5, help="of how many failures the smallest program is looked for")
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    totals, began = Result(), time.monotonic()
    record: dict[str, Any] = {"torch": torch.__version__, "ranks": {}, "wrong": [], "broken": []}
    share = options.programs // len(options.ranks)
    for number, ranks in enumerate(options.ranks):
        first = options.seed + number * share
        waiting = list(range(first, first + share))
        with ndtp.testing.RankPool(ranks) as pool:
            while waiting:
                now, waiting = waiting[: options.chunk], waiting[options.chunk :]
                try:
                    made = pool.run(run_programs, now, ranks, timeout=60 + 5 * len(now))
                except ndtp.testing.RankError as error:
                    print(f"{ranks} ranks, seeds {now[0]}..{now[-1]}: {str(error)[:3000]}", flush=True)
                    record["broken"].append([ranks, now[0], str(error)[:300]])
                    continue
                for kind in ("wrong", "broken"):
                    for seed in sorted({seed for each in made for seed, _ in getattr(each, kind)}):
                        texts = [text for each in made for s, text in getattr(each, kind) if s == seed]
                        record[kind].append([ranks, seed, texts[0]])
                        print(f"{ranks} ranks, seed {seed}, {len(texts)} see it: {texts[0]}", flush=True)
                        if options.shrink > 0:
                            options.shrink -= 1
                            print(*pool.run(shrunk, seed, ranks, timeout=300)[0], sep="\n", flush=True)
                totals.compared += made[0].compared
                totals.refused += made[0].refused
                totals.gathered += made[0].gathered
        record["ranks"][str(ranks)] = [first, first + share]
    record |= {
        "programs": share * len(options.ranks), "tensors_compared": totals.compared, "refused": totals.refused,
        "seconds": round(time.monotonic() - began), "gathered": dict(totals.gathered.most_common()),
    }  # fmt: skip
    print(f"{record['programs']} programs, {totals.compared} tensors compared, {len(record['wrong'])} wrong, "
          f"{len(record['broken'])} broken, {record['seconds']} s")  # fmt: skip
    print("gathered:", totals.gathered.most_common(40))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(bool(record["wrong"] or record["broken"]))


if __name__ == "__main__":
    sys.exit(main())
