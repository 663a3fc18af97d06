"""How many chunks of rows pay: the schedule's own tasks, timed with constants measured on the ranks at hand.

A chunk more hides more of the collectives behind the products, and costs the fixed part of its calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from ndtp.algebra.matmul_plan import Letters, MatMulPlan
from ndtp.algebra.steps import Step, apply
from ndtp.schedule.clocks import Product, step_seconds
from ndtp.schedule.tasks import RowChunks

if TYPE_CHECKING:
    from ndtp.runtime.process_grid import ProcessGrid

COUNTS = (1, 2, 3, 4, 6, 8)
WORTHWHILE = 0.97  # of the time in one chunk: predictions are not better than that
KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
logger = logging.getLogger("ndtp")


@dataclass(frozen=True)
class Speeds:
    """What a choice rests on, the same on every rank: seconds of the slowest one.

    Attributes:
        latency: (collective, axis) -> seconds of a call that moves next to nothing.
        per_byte: (collective, axis) -> seconds per byte received.
        per_flop, launch: of local products, all ranks at once; seconds of each, and of a product that is tiny.
        contention: how much of the time of a collective beside products these lose by it, from 0 to 1.
    """

    latency: Mapping[tuple[str, str], float]
    per_byte: Mapping[tuple[str, str], float]
    per_flop: float
    launch: float
    contention: float

    def seconds(self, collective: str, axes: Any, received: Any) -> float:
        """A collective over axes, of which the slowest counts; nothing where nothing moves."""
        if not received:
            return 0.0
        return max(self.latency[collective, axis] + received * self.per_byte[collective, axis] for axis in axes)

    def crosses(self, axes: Any) -> bool:
        return False  # every collective in one queue: axes mostly share a rank's link


def resolve(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    mesh: ProcessGrid,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """The number of chunks for a chain of products that leave it open ("auto"), chosen once for each number of rows.

    The first choice of a grid measures its `Speeds`, which all its ranks do together.
    """
    each = zip(plans, sizes, strict=True)
    key = (dtype, *((plan.name, plan.equation, plan.regather, *size.items()) for plan, size in each))
    step = mesh.step
    if key not in step.chunk_choices:
        if step.speeds is None:
            # Not a part of what a meter counts.  And gloo hands a compiler's Python dispatcher on to its threads, which
            # would wait for the interpreter's lock while this thread holds it and waits for them.
            with _disable_current_modes(), no_python_dispatcher():
                step.speeds = measure(mesh, torch.empty(1, dtype=dtype, device=device))
        step.chunk_choices[key] = choose(plans, sizes, dtype.itemsize, step.speeds)
        if mesh.rank == 0:
            logger.info("%s: chunks: %d, %s", ", ".join(plan.name for plan in plans), *step.chunk_choices[key])
    for plan in plans:
        step.chunks_chosen.setdefault(plan, {})[sizes[0]["m"]] = step.chunk_choices[key]
    return step.chunk_choices[key][0]


def choose(
    plans: Sequence[MatMulPlan], sizes: Sequence[Mapping[str, int]], itemsize: int, speeds: Speeds
) -> tuple[int, str]:
    """The best number of chunks of a forward and backward, and why; pure."""
    possible = [n for n in COUNTS if RowChunks.of(plans, sizes, n)[0].count == n]
    predicted = {n: _seconds(plans, sizes, itemsize, speeds, n) for n in possible}
    if not any(plan.steps for plan in plans):
        return 1, "nothing is communicated"
    if len(possible) == 1:
        return 1, "its rows cannot be cut for all ranks alike"
    best = min(predicted, key=lambda n: predicted[n])
    if predicted[best] < WORTHWHILE * predicted[1]:
        return best, f"a step in {predicted[best] * 1e3:.3g} ms, in one chunk {predicted[1] * 1e3:.3g} ms (predicted)"
    other = min((n for n in possible if n > 1), key=lambda n: predicted[n])
    return 1, f"overlap does not pay: {predicted[1] * 1e3:.3g} ms, in {other} chunks {predicted[other] * 1e3:.3g} ms"


def _seconds(
    plans: Sequence[MatMulPlan], sizes: Sequence[Mapping[str, int]], itemsize: int, speeds: Speeds, chunks: int
) -> float:
    products = []
    for i, (plan, size) in enumerate(zip(plans, sizes, strict=True)):
        local = {letter: size[letter] // plan.grid.size(plan.orders[letter]) for letter in plan.letters}
        flops = 2.0
        for extent in local.values():
            flops *= extent
        gemm = flops * speeds.per_flop
        products.append(
            Product(
                _messages(plan, size, local, itemsize),
                gemm + speeds.launch,
                gemm / chunks + speeds.launch,
                0.0,
                own=(_own(plan, "A"), _own(plan, "dC")),
                chained=i + 1 < len(plans),
            )
        )
    return float(step_seconds(products, speeds, chunks, any(plan.regather for plan in plans), speeds.contention))


def _messages(
    plan: MatMulPlan, sizes: Mapping[str, int], local: Mapping[str, int], itemsize: int
) -> dict[tuple[str, str], list[tuple[str, Any, int]]]:
    """(phase, tensor) -> (collective, axes, bytes received) of each of its steps."""

    def held(letters: Letters) -> tuple[int, ...]:
        return tuple(local[letter] if letter else 1 for letter in letters)

    again = {name: name in plan.regather for name in "ab"}
    begins = {
        ("forward", "A"): plan.shard_shape("A", sizes),
        ("forward", "B"): plan.shard_shape("B", sizes),
        ("forward", "C"): held(plan.c_letters),
        ("dgrad", "dC"): plan.shard_shape("C", sizes),
        ("dgrad", "B"): plan.shard_shape("B", sizes) if again["b"] else None,
        ("dgrad", "dA"): held(plan.a_letters),
        ("wgrad", "A"): plan.shard_shape("A", sizes) if again["a"] else None,
        ("wgrad", "dB"): held(plan.b_letters),
    }
    return {
        key: [
            (step.kind, step.axes, elements * itemsize)
            for step, _, elements in apply(plan.grid, plan.relayouts[key[1]], shape)
            if step.kind != "slice"
        ]
        if shape is not None
        else []
        for key, shape in begins.items()
    }


def _own(plan: MatMulPlan, operand: str) -> float:
    """The part of an operand that a rank multiplies while the others' are on their way."""
    steps = plan.relayouts[operand]
    return 1 / plan.grid.size(steps[0].axes) if len(steps) == 1 and steps[0].kind == "all_gather" else 0.0


# ------------------------------------------------------------------------------------------------------- measuring


def measure(mesh: ProcessGrid, like: torch.Tensor, elements: int = 2**17, repeats: int = 3) -> Speeds:
    """Time small and large collectives over every axis, products, and both at once; on all ranks together.

    Args:
        like: a tensor of the dtype and device that count.
        elements: of a rank's share of a large collective.
    """
    device = like.device
    axes = mesh.grid.nontrivial(mesh.grid.names)

    def seconds(action: Callable[[], Any]) -> float:
        times = []
        for repeat in range(repeats + 1):
            if axes:
                dist.barrier(group=mesh.group(axes[:1]))
            begin = time.perf_counter()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin if repeat else 0.0)
        return median(times[1:])

    def slowest(times: list[float]) -> list[float]:
        everywhere = torch.tensor(times, dtype=torch.float64, device=device)
        for axis in axes:  # the slowest rank along every axis in turn is the slowest of all
            dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=mesh.group((axis,)))
        return everywhere.tolist()  # type: ignore[no-any-return]

    def start(kind: str, axis: str, count: int) -> Any:
        step = Step(kind, (axis,), None if kind == "all_reduce" else 0, 0)
        return mesh.collectives.start(step, like.new_zeros(count), ("speeds",), "forward")

    found: list[float] = []
    for axis in axes:
        ranks = mesh.grid[axis]
        for kind in KINDS:
            share = 1 if kind == "all_gather" else ranks
            small, large = (
                seconds(lambda kind=kind, axis=axis, count=count: start(kind, axis, count).wait())  # type: ignore[misc]
                for count in (64 * share, elements * share)
            )
            received = elements * like.element_size() * (ranks - 1) * (2 if kind == "all_reduce" else 1)
            found += [small, max(large - small, 0.0) / received]
    side = 384 if device.type == "cpu" else 4096
    big, tiny = (torch.ones(n, n, dtype=like.dtype, device=device) for n in (side, 16))
    launch, product = seconds(lambda: tiny @ tiny), seconds(lambda: [big @ big for _ in range(4)]) / 4
    found = slowest([*found, product / (2.0 * side**3), launch])
    keys = [(kind, axis) for axis in axes for kind in KINDS]
    links = len(keys)
    latency = dict(zip(keys, found[: 2 * links : 2], strict=True))
    per_byte = dict(zip(keys, found[1 : 2 * links : 2], strict=True))
    per_flop, launch = found[2 * links :]
    if not axes:
        return Speeds(latency, per_byte, per_flop, launch, 0.0)

    def together(num_gathers: int, num_products: int) -> float:
        def run() -> None:
            handles = [start("all_gather", axes[-1], elements) for _ in range(num_gathers)]
            for _ in range(num_products):
                big @ big
            for handle in handles:
                handle.wait()

        return slowest([seconds(run)])[0]

    # Long enough for what schedules processes to be fair: ranks may share processors.
    num_gathers = max(1, min(16, round(0.1 / together(1, 0))))
    gathers = together(num_gathers, 0)
    num_products = max(1, round(gathers / (per_flop * 2.0 * side**3)))
    products, both = together(0, num_products), together(num_gathers, num_products)
    hidden = (gathers + products - both) / min(gathers, products)
    return Speeds(latency, per_byte, per_flop, launch, min(1.0, max(0.0, 1 - hidden)))
