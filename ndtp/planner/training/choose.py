"""The choice of a split of a training step among all splits, by predicted time and memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from ndtp.algebra.grid import divisors
from ndtp.errors import GridError
from ndtp.planner.fields import Entries, Number, Word, in_digits
from ndtp.planner.hardware import MAX_RANKS, Hardware
from ndtp.planner.training.memory import OPTIMIZERS, StepMemory, memory
from ndtp.planner.training.practice import PRACTICES, RECOMPUTE, Practice
from ndtp.planner.training.splits import RANK_ORDERS, STEP_AXES, Splits
from ndtp.planner.training.step import StepTime, TrainingJob
from ndtp.planner.training.transformer import Transformer

GIB = 2**30
MICROS = (1, 2, 4, 8, 16, 32, 64)
VIRTUAL = (1, 2, 3, 4, 5, 6, 8)
# What a device's memory has room for, beside its context, the collectives' buffers and holes between tensors.
ROOM = 0.9
MOST_X = 64
LEAST_PART = 1024  # tokens of a sequence on each of the ranks that share it
# Choices whose steps are this near to each other are as fast; less memory is better then.
TIE = 0.01


@dataclass(frozen=True)
class Question:
    """A question to the planner: the model to be trained, and the choices that are open.

    Attributes:
        batch: sequences of a step, over all ranks.
        recompute: what backward may make again; of practices that fit into memory the fastest one counts.
        context: whether sequences may be split (cp).
        runnable: only splits that ndtp runs, see `SplitChoice.runs`.
        fixed: sizes of axes that are given, such as {"pp": 4}, and of "micro" and "virtual".
        limit_gib: of a rank; None: what the device has, but a tenth.
        within_node: x and y stay inside of a node.

    Raises:
        GridError: a value that is none of its kind; names what it may be.
    """

    model: Transformer
    batch: int
    ranks: int
    hardware: Hardware
    practice: Practice = PRACTICES["ndtp"]
    optimizer: str = "adamw"
    recompute: tuple[str, ...] = ("none", "layer")
    context: bool = True
    runnable: bool = False
    fixed: Mapping[str, int] = field(default_factory=dict)
    limit_gib: float | None = None
    within_node: bool = False

    def __post_init__(self) -> None:
        size = Number(1, MAX_RANKS, integer=True)
        for name in ("batch", "ranks"):
            size.check("plan", name, getattr(self, name))
        Word(tuple(OPTIMIZERS)).check("plan", "optimizer", self.optimizer)
        for name in self.recompute:
            Word(tuple(RECOMPUTE)).check("plan", "recompute", name)
        Entries(Word((*STEP_AXES, "micro", "virtual")), size, empty=True).check("plan", "fixed", dict(self.fixed))
        if self.limit_gib is not None:
            Number(1e-6, 1e12).check("plan", "limit_gib", self.limit_gib)
        self.hardware.flops_per_second(self.practice.dtype)

    @property
    def splits_sequences(self) -> bool:
        """Whether sequences may be split (cp), with the number of stages that is given."""
        return self.context and not (self.runnable and self.fixed.get("pp", 1) > 1)

    @property
    def room(self) -> float:
        """Bytes."""
        return (self.limit_gib if self.limit_gib is not None else ROOM * self.hardware.memory_gib) * GIB


@dataclass(frozen=True)
class SplitChoice:
    """One split of the step, with the predictions for it."""

    question: Question
    splits: Splits
    practice: Practice
    order: tuple[str, ...]
    time: StepTime
    memory: StepMemory

    @property
    def seconds(self) -> float:
        return float(self.time.total)

    @property
    def tokens_per_second(self) -> float:
        return self.question.batch * self.question.model.sequence / self.seconds

    @property
    def utilisation(self) -> float:
        """The model FLOPs utilisation (MFU): the flops that a model needs, without recomputation, over the data
        sheet's rate.
        """
        peak = self.question.hardware.peak(self.practice.dtype)
        return self.tokens_per_second * self.question.model.flops / (peak * self.question.ranks)

    @property
    def micro_batches(self) -> int:
        s = self.splits
        return max(1, -(-self.question.batch // int(s.shares * s.micro)))

    @property
    def runs(self) -> bool:
        """Whether ndtp runs the split: it splits no sequences between the stages of a pipeline."""
        return int(self.splits.cp) == 1 or int(self.splits.pp) == 1


def choose(question: Question, limit: int | None = 10) -> list[SplitChoice]:
    """The fastest ways that fit into memory, best first, one for each set of sizes of axes.

    Raises:
        GridError: nothing fits; says what the least memory is, or which constraint leaves nothing.
    """
    splits = candidates(question)
    found: list[tuple[Any, ...]] = []
    least = np.inf
    for practice in _practices(question):
        needs = memory(question.model, question.batch, practice, splits, question.optimizer).total
        fits = needs <= question.room
        least = min(least, float(np.min(needs)))
        if not fits.any():
            continue
        some, needs = splits.take(fits), needs[fits]
        job = TrainingJob(question.model, question.batch, question.hardware, practice)
        for order in RANK_ORDERS:
            keep = np.ones(needs.shape, dtype=bool)
            if question.within_node:
                keep = some.network(order, question.hardware).inside_node(("x", "y"))
            seconds = np.where(keep, job.step(some, order).total, np.inf)
            best = np.argsort(seconds, kind="stable")[: 64 if limit is not None else None]
            found += [(float(seconds[i]), float(needs[i]), some.one(int(i)), practice, order)
                      for i in best if np.isfinite(seconds[i])]  # fmt: skip
    if not found:
        raise GridError(_nothing(question, least))
    fastest = min(seconds for seconds, *_ in found)
    found.sort(key=lambda each: (0.0 if each[0] <= fastest * (1 + TIE) else each[0], *_plainness(each), each[0]))
    chosen: dict[tuple[int, ...], SplitChoice] = {}
    for _, _, one, practice, order in found:
        sizes = tuple(getattr(one, axis) for axis in STEP_AXES)
        if sizes not in chosen and (limit is None or len(chosen) < limit):
            chosen[sizes] = weigh(question, one, practice, order)
    return list(chosen.values())


def _plainness(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a sort key for steps that are equally fast: no recomputation first, then few axes, then little memory."""
    _, needs, splits, practice, _ = found
    split = sum(getattr(splits, axis) > 1 for axis in STEP_AXES)
    return practice.recompute != "none", split, needs


def weigh(question: Question, splits: Splits, practice: Practice, order: Sequence[str] = RANK_ORDERS[0]) -> SplitChoice:
    """Return the choice with its predictions for one split."""
    job = TrainingJob(question.model, question.batch, question.hardware, practice)
    needs = memory(question.model, question.batch, practice, splits, question.optimizer)
    return SplitChoice(question, splits, practice, tuple(order), job.step(splits, order), needs)


def _practices(question: Question) -> Iterator[Practice]:
    for again, regather in product(question.recompute, (False, True)):
        yield replace(question.practice, recompute=again, regather=regather)


def candidates(question: Question) -> Splits:
    """All that fit the sizes of the model and of the batch.

    Raises:
        GridError: there is none.
    """
    rows = [each for sizes in _axes(question) for each in _micros(question, sizes)]
    if not rows:
        raise GridError(_nothing(question, None))
    columns = np.array(rows, dtype=np.int64).T
    return Splits(**dict(zip((*STEP_AXES, "micro", "virtual"), columns, strict=True)))


def _may(question: Question) -> dict[str, Callable[[int], bool]]:
    """Return, for each axis, which sizes it may have by what it splits."""
    model, mixture = question.model, question.model.mixture
    length = model.sequence
    return {
        "y": lambda n: model.heads % n == 0 and (model.keys * model.head) % n == 0 and model.ffn % n == 0,
        "x": lambda n: model.hidden % n == 0 and n <= MOST_X,
        "pp": lambda n: n <= model.layers,
        "cp": lambda n: n == 1 or (question.splits_sequences and length % (2 * n) == 0 and length // n >= LEAST_PART),
        "e": lambda n: n == 1 or (mixture is not None and mixture.count % n == 0),
        **dict.fromkeys(("dp", "z"), lambda n: question.batch % n == 0),
    }


def _axes(question: Question) -> Iterator[dict[str, int]]:
    """Sizes of the axes: products of `ranks`, of which each divides what it splits."""
    fixed, ranks, may = question.fixed, question.ranks, _may(question)

    def sizes(axis: str, left: int) -> list[int]:
        options = [fixed[axis]] if axis in fixed else divisors(left)
        return [n for n in options if left % n == 0 and may[axis](n)]

    for y in sizes("y", ranks):
        for x in sizes("x", ranks // y):
            for pp in sizes("pp", ranks // (y * x)):
                for cp in sizes("cp", ranks // (y * x * pp)):
                    if question.runnable and cp > 1 < pp:
                        continue
                    for e in sizes("e", ranks // (y * x * pp * cp)):
                        for z in sizes("z", ranks // (y * x * pp * cp * e)):
                            dp = ranks // (y * x * pp * cp * e * z)
                            if fixed.get("dp", dp) == dp and question.batch % (dp * e * z) == 0:
                                yield {"pp": pp, "dp": dp, "e": e, "z": z, "cp": cp, "x": x, "y": y}


def _micros(question: Question, sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    fixed, layers, pp = question.fixed, question.model.layers, sizes["pp"]
    share = question.batch // (sizes["dp"] * sizes["e"] * sizes["z"])
    for micro in (fixed["micro"],) if "micro" in fixed else MICROS:
        if share % micro or share // micro < pp:  # a pipeline has a micro-batch for each of its stages
            continue
        turns = [v for v in VIRTUAL if v == 1 or (pp > 1 and -(-layers // pp) % v == 0 and (share // micro) % pp == 0)]
        for virtual in (fixed["virtual"],) if "virtual" in fixed else turns:
            if layers >= pp * virtual:  # a layer for each stage
                yield (*(sizes[axis] for axis in STEP_AXES), micro, virtual)


def _given_in_vain(question: Question) -> str | None:
    """Return what is wrong with the sizes of axes that are given, whatever the others are; None for nothing."""
    ranks, sizes = question.ranks, {axis: size for axis, size in question.fixed.items() if axis in STEP_AXES}
    given, product = " ".join(f"{axis}={size}" for axis, size in sizes.items()), math.prod(sizes.values())
    if ranks % product or (len(sizes) == len(STEP_AXES) and product != ranks):
        some = divisors(ranks)
        listed = ", ".join(map(str, some if len(some) <= 9 else [*some[:4], "...", *some[-4:]]))
        takes = f"a multiple of {product}" if len(sizes) < len(STEP_AXES) else str(product)
        return (
            f"plan: {given} takes {takes} ranks, and there are {ranks}\n"
            f"  fix: sizes whose product divides {ranks} (one of {listed})"
        )
    model, may = question.model, _may(question)
    what = {
        "y": f"{model.heads} heads, {model.keys * model.head} features of keys and {model.ffn} inside; it divides each",
        "x": f"{model.hidden} features; it divides them, and is at most {MOST_X}",
        "pp": f"{model.layers} layers; each stage has one",
        "cp": f"sequences of {model.sequence}; each rank has {LEAST_PART} tokens of one at least, in two equal parts"
        if question.splits_sequences
        else "sequences here; ndtp splits none between the stages of a pipeline",
        "e": f"{model.mixture.count} experts; it divides them" if model.mixture else "experts; the model has none",
        **dict.fromkeys(("dp", "z"), f"a batch of {question.batch} sequences; it divides them"),
    }
    wrong = next((axis for axis, size in sizes.items() if not may[axis](size)), None)
    return wrong and f"plan: {wrong}={sizes[wrong]} cannot split {what[wrong]}\n  fix: another size, or leave it open"


def _nothing(question: Question, least: float | None) -> str:
    given = " ".join(f"{axis}={size}" for axis, size in question.fixed.items())
    if least is None:
        return _given_in_vain(question) or (
            f"plan: no way to share {question.ranks} ranks divides a batch of {question.batch} sequences, "
            f"{question.model.heads} heads and {question.model.layers} layers" + f", with {given}" * bool(given)
            + "\n  fix: a batch that is a multiple of the ranks, or fewer axes that are given"
        )  # fmt: skip
    return (
        f"plan: nothing fits into {in_digits(question.room / GIB)} GiB a rank on {question.ranks} ranks\n"
        f"  fix: the least that any way needs is {in_digits(least / GIB)} GiB; more ranks, or --memory-limit"
    )
