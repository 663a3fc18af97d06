"""The choice of a grid for decoding: one token of each sequence a step, with weights that stay where they are.  Pure.

A step reads all weights and all cached keys and values once, and multiplies few rows: memory bounds it, and the latency
of collectives.  Up to `WHOLE_ROWS` sequences are whole on every rank, and weights stay in every scheme, see
`ndtp.algebra.stationary`.  Beyond, `1d` sends and receives whole hidden states of all sequences; with features split
over x and y (`2d-features`, `2d`) weights stay as well, and what moves shrinks with the root of the ranks; `3d` gathers
weights over z, which pays for thousands of rows (Pope et al. 2022, "Efficiently scaling transformer inference").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from ndtp.algebra.grid import Grid, divisors
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.stationary import WHOLE_ROWS
from ndtp.dtypes import SIZES
from ndtp.errors import GridError
from ndtp.planner.decode_calls import calls_of_step, pairs_of
from ndtp.planner.fields import Number, in_digits
from ndtp.planner.grids import Grids
from ndtp.planner.hardware import MAX_RANKS, Hardware
from ndtp.planner.time_model import Network, gemm_seconds
from ndtp.planner.training.transformer import Transformer

GIB = 2**30
ROOM = 0.9  # of a device's memory
SCHEMES = ("1d", "2d-features", "2d", "3d")
BATCHES = tuple(2**i for i in range(13))
TIE = 0.02  # plans whose steps are this near to each other are as fast; the plainer one is better then


@dataclass(frozen=True)
class DecodeQuestion:
    """A question to the planner: sequences of a model that are continued together.

    Attributes:
        model: its `sequence` is the number of tokens that a sequence has in the cache.
        batch: sequences, on all ranks.
        fixed: sizes of axes that are given.
        limit_gib: of a rank; None: what the device has, but a tenth.

    Raises:
        GridError: a value that is none of its kind.
    """

    model: Transformer
    batch: int
    ranks: int
    hardware: Hardware
    dtype: str = "bfloat16"
    fixed: Mapping[str, int] = field(default_factory=dict)
    limit_gib: float | None = None

    def __post_init__(self) -> None:
        size = Number(1, MAX_RANKS, integer=True)
        for name in ("batch", "ranks"):
            size.check("plan", name, getattr(self, name))
        self.hardware.flops_per_second(self.dtype)

    @property
    def room(self) -> float:
        """Bytes."""
        return (self.limit_gib if self.limit_gib is not None else ROOM * self.hardware.memory_gib) * GIB


@dataclass(frozen=True)
class DecodeChoice:
    """One grid and scheme, with the predictions for a step, in seconds and bytes of a rank.

    Attributes:
        products: products, which read the weights.
        cache: reading keys and values.
        moved, latency: collectives, by their bytes and by their number.
        weights, keys: memory.
    """

    question: DecodeQuestion
    scheme: str
    sizes: Mapping[str, int]
    products: float
    cache: float
    moved: float
    latency: float
    weights: float
    keys: float

    @property
    def seconds(self) -> float:
        return self.products + self.cache + self.moved + self.latency

    @property
    def memory(self) -> float:
        return self.weights + self.keys

    @property
    def tokens_per_second(self) -> float:
        return self.question.batch / self.seconds

    @property
    def limits(self) -> str:
        """Return what most of the step goes to."""
        parts = {
            "reading weights": self.products, "reading cached keys and values": self.cache,
            "bytes of collectives": self.moved, "latency of collectives": self.latency,
        }  # fmt: skip
        name = max(parts, key=lambda each: parts[each])
        return f"{name}, {parts[name] / self.seconds:.0%} of the step"

    def __str__(self) -> str:
        axes = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1]
        return f"{self.scheme} {' '.join(axes)}" if axes else "one rank"


def choose_decode(question: DecodeQuestion, limit: int | None = 10) -> list[DecodeChoice]:
    """The fastest grids and schemes that fit into memory, best first.

    Raises:
        GridError: nothing fits, or no grid divides the model; says what the least memory is.
    """
    every = [weigh_decode(question, scheme, sizes) for scheme, sizes in _candidates(question)]
    if not every:
        given = " ".join(f"{axis}={size}" for axis, size in question.fixed.items())
        raise GridError(
            f"plan: no scheme splits {question.model.heads} heads and a batch of {question.batch} over "
            f"{question.ranks} ranks" + f", with {given}" * bool(given) + "\n  fix: ranks that divide the heads, and a "
            "--batch that dp divides"
        )
    fits = [each for each in every if each.memory <= question.room]
    if not fits:
        least = min(each.memory for each in every)
        raise GridError(
            f"plan: nothing fits into {in_digits(question.room / GIB)} GiB a rank on {question.ranks} ranks\n"
            f"  fix: the least that any way needs is {in_digits(least / GIB)} GiB; more ranks, a smaller --batch, or "
            "--memory-limit"
        )
    fastest = min(each.seconds for each in fits)
    near = lambda each: each.seconds <= fastest * (1 + TIE)  # noqa: E731
    fits.sort(key=lambda each: (not near(each), SCHEMES.index(each.scheme) if near(each) else 0, each.seconds))
    return fits[:limit]


def winners(question: DecodeQuestion, batches: Sequence[int] = BATCHES) -> list[tuple[int, int, DecodeChoice]]:
    """Return for which batches each scheme is the fastest: (first batch, last batch, the choice at the first)."""
    found: list[tuple[int, int, DecodeChoice]] = []
    for batch in batches:
        try:
            best = choose_decode(
                DecodeQuestion(question.model, batch, question.ranks, question.hardware, question.dtype,
                               question.fixed, question.limit_gib), 1,
            )[0]  # fmt: skip
        except GridError:
            continue  # no memory for so many sequences, or none that divides
        if found and found[-1][2].scheme == best.scheme:
            found[-1] = (found[-1][0], batch, found[-1][2])
        else:
            found.append((batch, batch, best))
    return found


def _candidates(question: DecodeQuestion) -> Iterator[tuple[str, dict[str, int]]]:
    """Schemes and sizes of axes that divide what they split; replicas (dp) share the sequences."""
    model, fixed = question.model, question.fixed
    for dp in divisors(question.ranks):
        if question.batch % dp:
            continue
        left = question.ranks // dp
        for z in divisors(left):
            for x in divisors(left // z):
                y = left // z // x
                sizes = {"dp": dp, "z": z, "x": x, "y": y}
                if any(sizes.get(axis, 1) != size for axis, size in fixed.items()):
                    continue
                scheme: object
                for scheme in SCHEMES:
                    is_line = z == x == 1
                    if (scheme == "1d") != is_line or (scheme == "3d") != (z > 1 and not is_line):
                        continue
                    heads = x * y if scheme == "2d-features" else y
                    rows = {"1d": 1, "2d-features": 1, "2d": x * y, "3d": z * x * y}[scheme]
                    inner = model.heads * model.head
                    divides = model.heads % heads == 0 and model.hidden % (x * y * z) == 0 and inner % (x * y * z) == 0
                    if divides and (question.batch // dp) % rows == 0:
                        yield scheme, sizes


def weigh_decode(question: DecodeQuestion, scheme: str, sizes: Mapping[str, int]) -> DecodeChoice:
    """Return the choice with its predictions for one scheme on one grid, in the order of axes that is the fastest."""
    clock = _Clock(question, scheme, dict(sizes))
    split = [axis for axis, size in sizes.items() if size > 1]
    orders = ((*(axis for axis in sizes if axis not in split), *order) for order in permutations(split))
    moved, latency = min((clock.waits(order) for order in orders), key=sum)
    return DecodeChoice(
        question, scheme, dict(sizes), clock.products(), clock.cache_bytes / (question.hardware.memory_gbs * 1e9),
        moved, latency, clock.weight_bytes, clock.cache_bytes,
    )  # fmt: skip


class _Clock:
    def __init__(self, question: DecodeQuestion, scheme: str, sizes: Mapping[str, int]) -> None:
        self.question, self.sizes, model = question, dict(sizes), question.model
        self.grid = Grid(sizes)
        axes = ["y"] if scheme == "1d" else ["x", "y"] if scheme.startswith("2d") else None
        self.layouts = block_layouts(self.grid, scheme, axes)
        self.spread = sizes["x"] * sizes["y"] * sizes["z"]
        self.itemsize = SIZES.get(question.dtype, 1)
        heads = self.layouts.hidden.num_splits(1)
        rows = self.layouts.hidden.num_splits(0)
        keys = max(model.keys // heads, 1)
        reach = min(model.window or model.sequence, model.sequence)
        layer_bytes = question.batch / rows * reach * 2 * keys * model.head * max(self.itemsize, 1)
        self.cache_bytes = model.layers * layer_bytes
        parameters = sum(block.times * block.parameters for block in model.blocks(1)) + model.ends(1).parameters
        self.weight_bytes = parameters * self.itemsize / self.spread
        self.calls = calls_of_step(question.model, self.layouts, question.batch, sizes["dp"], self.itemsize)

    def products(self) -> float:
        """Return the seconds of all products of a step."""
        model = self.question.model
        up, down = self.layouts.plans()
        total: Any = 0.0
        for times, wide, inner, experts in pairs_of(model, self.question.batch):
            for plan, n, k in ((up, wide, model.hidden), (down, model.hidden, inner)):
                each, start = self._product(plan, n, k, experts), self.question.hardware.launch_us * 1e-6
                total += times * (experts * (each - start) + start)  # experts are one grouped product
        return float(total + self._product(up, model.vocabulary, model.hidden, 1))

    def _product(self, plan: MatMulPlan, n: int, k: int, experts: int) -> Any:
        held = {letter: plan.grid.size(plan.orders[letter]) for letter in "mnk"}
        if experts == 1 and self.question.batch <= WHOLE_ROWS * self.sizes["dp"]:  # on every rank
            held = {"m": self.sizes["dp"], "n": plan.b.num_splits(0), "k": plan.b.num_splits(1)}
        rows = max(self.question.batch / held["m"] / experts, 1.0)
        return gemm_seconds(self.question.hardware, rows, n / held["n"], k / held["k"], self.question.dtype)

    def waits(self, order: Sequence[str]) -> tuple[float, float]:
        """Return the seconds of all collectives of a step: of their bytes, and of their latency."""
        network = Network.of(Grids(**self.sizes), order, self.question.hardware)
        moved = latency = 0.0
        for (collective, axes, received), times in self.calls.items():
            for axis in axes:  # one after the other
                per_byte, once = network.cost(collective, axis)
                moved += times * received / len(axes) * float(per_byte)
                latency += times * float(once)
        return moved, latency
