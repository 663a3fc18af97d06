"""Many programs on the ranks of a pool, what fails among them, and the smallest program that still fails."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from execute import run_programs
from language import Language, draw_language
from program import Program, Step, Unit, check_legal, draw

from ndtp import LayoutError
from ndtp.testing import RankError, RankPool, RankTimeout

CHUNK = 10  # programs in one call
SECONDS = 40.0  # that a program may take; hundreds of times what it takes, for machines that are busy


@dataclass
class Failure:
    seed: int
    what: str
    alone: bool  # it fails on fresh ranks, too
    smallest: Program | Language | None = None

    def __str__(self) -> str:
        after = "" if self.alone else " (only after the programs before it)"
        small = "" if self.smallest is None else f"\n  smallest: {concise(self.smallest)}"
        return f"{self.what}{after}{small}"


class Campaign:
    """Programs of consecutive seeds.

    Args:
        shrink: look for the smallest program that fails, for each that does.
        seconds: that a program may take.
        without: features that are taken out of the programs, see `stripped`.
        only: "stacks" or "languages"; else every other program is a language.
        report: called with a line whenever there is something to say.
    """

    def __init__(
        self,
        ranks: int,
        *,
        shrink: bool = False,
        seconds: float = SECONDS,
        without: Collection[str] = (),
        only: str = "",
        report: Callable[[str], None] = print,
    ) -> None:
        self.ranks, self.shrink, self.seconds, self.report = ranks, shrink, seconds, report
        self.without, self.only = set(without), only
        self.num_run = self.num_compared = 0
        self.features: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self._folder = tempfile.TemporaryDirectory()
        self._progress = os.path.join(self._folder.name, "seed")

    def run(self, seeds: range, deadline: float = float("inf")) -> None:
        """Run the programs of `seeds`, or as many as the clock allows."""
        if self.only != "stacks":
            with contextlib.suppress(ImportError):
                import transformers.models.llama.modeling_llama  # noqa: F401  # so that ranks are forked with it
        with RankPool(self.ranks) as pool:
            waiting = list(seeds)
            while waiting and time.monotonic() < deadline:
                programs = [self.drawn(seed) for seed in waiting[:CHUNK]]
                failed = self._call(pool, programs)
                done = programs if failed is None else programs[: programs.index(failed[0]) + 1]
                self._count(done)
                del waiting[: len(done)]
                if failed is not None:
                    self._add(pool, *failed)

    def drawn(self, seed: int) -> Program | Language:
        if self.only == "languages" or (not self.only and seed % 2):
            return draw_language(seed, self.ranks)
        return stripped(draw(seed, self.ranks), self.without)

    def _call(
        self, pool: RankPool, programs: Sequence[Program | Language], patience: int = 1
    ) -> tuple[Program | Language, str] | None:
        """The first program that fails, and how."""
        Path(self._progress).write_text(str(programs[0].seed))
        timeout = patience * self.seconds * (1 + len(programs) / 10)
        try:
            compared = pool.run(run_programs, programs, self._progress, timeout=timeout)
        except RankError as error:
            if isinstance(error, RankTimeout) and patience == 1:  # a busy machine, or a hang?
                return self._call(pool, programs, 4)
            seed = int(Path(self._progress).read_text())
            return next(p for p in programs if p.seed == seed), what_happened(error)
        self.num_compared += sum(compared[0])
        return None

    def _count(self, programs: Sequence[Program | Language]) -> None:
        self.num_run += len(programs)
        for program in programs:
            self.features.update(program.features() if isinstance(program, Language) else features(program))

    def _add(self, pool: RankPool, program: Program | Language, what: str) -> None:
        again = self._call(pool, [program])
        failure = Failure(program.seed, what, again is not None)
        if self.shrink and again is not None:
            failure.smallest = self.smallest(pool, program, kind_of(again[1]))
        self.failures.append(failure)
        command = f"python tests/fuzz --ranks {self.ranks} --seed {program.seed} --programs 1"
        without = f" --without '{','.join(sorted(self.without))}'" if self.without else ""
        without += f" --only {self.only}" if self.only else ""
        self.report(f"{failure}\n  reproduce: {command}{without}")

    def smallest(self, pool: RankPool, program: Program | Language, kind: str) -> Program | Language:
        """Take away one thing after another for as long as what is left fails in the same way."""
        progress = True
        while progress:
            progress = False
            for simpler in program.simpler() if isinstance(program, Language) else simpler_ones(program):
                try:
                    if isinstance(simpler, Program):
                        check_legal(simpler)
                except (LayoutError, ValueError, IndexError):
                    continue
                failed = self._call(pool, [simpler])
                if failed is not None and kind_of(failed[1]) == kind:
                    program, progress = simpler, True
                    break
        return program


def what_happened(error: RankError) -> str:
    """The finding itself, or where the ranks were."""
    if isinstance(error, RankTimeout):
        return str(error).splitlines()[0]
    text = error.errors[error.rank]
    return text[text.rfind("execute.Finding: ") :].removeprefix("execute.Finding: ").strip() or str(error)


def kind_of(what: str) -> str:
    """What sort of failure a text tells of: ranks that lost each other, an exception by its type, or wrong results."""
    if any(word in what for word in ("still running", "killed by", "CommunicationError")):
        return "lost"
    if "the dense program is at fault" in what:
        return "dense"
    error = re.match(r"seed \d+ on \d+ ranks: (\w+): ", what)
    return error[1] if error else "records" if "records differ" in what else "wrong"


def simpler_ones(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest things first."""
    steps = program.steps
    for i in reversed(range(len(steps))):
        yield replace(program, steps=steps[:i] + steps[i + 1 :])
    for i in reversed(range(len(program.uses))):
        uses = program.uses[:i] + program.uses[i + 1 :]
        kept = sorted(set(uses))
        renamed = tuple(kept.index(use) for use in uses)
        yield replace(program, uses=renamed, units=tuple(program.units[use] for use in kept))
    for name in ("noise", "frozen"):
        for i in range(len(getattr(program, name))):
            yield replace(program, **{name: getattr(program, name)[:i] + getattr(program, name)[i + 1 :]})
    for name, value in (("options", ()), ("lead", 0), ("dtype", "float64"), ("rows", program.ranks)):
        if getattr(program, name) != value:
            yield replace(program, **{name: value})
    if all(unit.grid == 0 for unit in program.units) and len(program.grids) > 1:
        yield replace(program, grids=program.grids[:1], _grids=[])
    for g, sizes in enumerate(program.grids):
        small = tuple((axis, size) for axis, size in sizes if size > 1)
        if small and small != sizes:
            yield replace(program, grids=(*program.grids[:g], small, *program.grids[g + 1 :]), _grids=[])
    for i, step in enumerate(steps):
        for flag in step.how:
            yield _with_step(program, i, replace(step, how=tuple(f for f in step.how if f != flag)))
        if step.micros > 2:
            yield _with_step(program, i, replace(step, micros=2))
        if step.model != "online":
            yield _with_step(program, i, replace(step, model="online"))
    default = Unit("")
    for i, unit in enumerate(program.units):
        if unit.kind in ("gated", "pair") and program.family == "stack":
            yield _with_unit(program, i, replace(unit, kind="mlp"))
        for spec in fields(Unit):
            value = getattr(default, spec.name)
            if spec.name not in ("kind", "layouts", "inner") and getattr(unit, spec.name) != value:
                yield _with_unit(program, i, replace(unit, **{spec.name: value}))
        if unit.chunks not in (0, 2):
            yield _with_unit(program, i, replace(unit, chunks=2))
        if unit.inner != program.ranks:
            yield _with_unit(program, i, replace(unit, inner=program.ranks))


def _with_step(program: Program, i: int, step: Step) -> Program:
    return replace(program, steps=(*program.steps[:i], step, *program.steps[i + 1 :]))


def _with_unit(program: Program, i: int, unit: Unit) -> Program:
    return replace(program, units=(*program.units[:i], unit, *program.units[i + 1 :]))


def stripped(program: Program, without: Collection[str]) -> Program:
    """A program without some of its features, such as "step between", "flag grad", "noise cycle" or "module hooks"."""
    if not without:
        return program
    steps = tuple(
        replace(step, how=tuple(flag for flag in step.how if f"flag {flag}" not in without))
        for step in program.steps
        if f"step {step.kind}" not in without
    )
    units = tuple(
        replace(
            unit,
            hooks=() if "module hooks" in without else unit.hooks,
            compiled=unit.compiled and "compiled" not in without,
            chunks=0 if "chunks" in without else unit.chunks,
            regather=() if "regather" in without else unit.regather,
        )
        for unit in program.units
    )
    noise = tuple(kind for kind in program.noise if f"noise {kind}" not in without)
    return replace(program, steps=steps, units=units, noise=noise)


def features(program: Program) -> set[str]:
    """What a program has in it, for the record of a campaign."""
    found = {program.family, program.dtype, *(f"step {step.kind}" for step in program.steps)}
    found |= {f"flag {flag}" for step in program.steps if step.kind == "train" for flag in step.how}
    found |= {f"noise {noise}" for noise in program.noise}
    found |= {f"grid {name}={value}" for name, value in program.options}
    found |= {"no rows"} if not program.rows else set()
    found |= {"two grids"} if len(program.grids) > 1 else set()
    found |= {"shared unit"} if len(set(program.uses)) < len(program.uses) else set()
    for unit in program.units:
        found |= {f"unit {unit.kind}", f"chunks {unit.chunks or 1}", f"regather {'+'.join(unit.regather) or 'none'}"}
        if unit.kind in ("mlp", "gated", "pair") or program.family == "model":
            found.add(f"scheme {unit.scheme}")
        found |= {f"checkpoint {unit.checkpoint}"} if unit.checkpoint else set()
        found |= {"axes"} if unit.axes else set()
        found |= {"compiled"} if unit.compiled else set()
        found |= {"module hooks"} if unit.hooks else set()
    return found


def concise(thing: object) -> str:
    """A description without what is at its default."""
    if isinstance(thing, Program | Language | Unit | Step):
        told = ((spec.name, spec, getattr(thing, spec.name)) for spec in fields(thing) if spec.repr)
        shown = [f"{name}={concise(value)}" for name, spec, value in told if value != spec.default]
        return f"{type(thing).__name__}({', '.join(shown)})"
    if isinstance(thing, tuple):
        return "(" + "".join(concise(each) + ", " for each in thing).rstrip() + ")"
    return repr(thing)
