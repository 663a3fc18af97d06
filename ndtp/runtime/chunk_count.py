"""The number of chunks of rows for a chain that leaves it open: chosen with constants measured on the ranks at hand."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.steps import Step
from ndtp.compute.devices import kind_of
from ndtp.schedule.chunk_choice import Speeds, choose

if TYPE_CHECKING:
    from ndtp.collectives.collectives import Collectives
    from ndtp.compute.gemm import TorchGemm
    from ndtp.runtime.step_state import StepState

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
logger = logging.getLogger("ndtp")


def resolve(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    collectives: Collectives,
    gemm: TorchGemm,
    step: StepState,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """The number of chunks for a chain of products that leave it open ("auto"), chosen once for each number of rows.

    The first choice of a grid measures its `Speeds`, which all its ranks do together.
    """
    each = zip(plans, sizes, strict=True)
    key = (dtype, *((plan.name, plan.equation, plan.regather, *size.items()) for plan, size in each))
    if key not in step.chunk_choices:
        if step.speeds is None:
            # Not a part of what a meter counts.  And gloo hands a compiler's Python dispatcher on to its threads, which
            # would wait for the interpreter's lock while this thread holds it and waits for them.
            with _disable_current_modes(), no_python_dispatcher():
                step.speeds = measure(collectives, gemm, torch.empty(1, dtype=dtype, device=device))
        step.chunk_choices[key] = choose(plans, sizes, dtype.itemsize, step.speeds)
        if collectives.groups.rank == 0:
            logger.info("%s: chunks: %d, %s", ", ".join(plan.name for plan in plans), *step.chunk_choices[key])
    for plan in plans:
        step.chunks_chosen.setdefault(plan, {})[sizes[0]["m"]] = step.chunk_choices[key]
    return step.chunk_choices[key][0]


class Probe:
    """Times things on all ranks of a grid together.

    Args:
        like: a tensor of the dtype and device that count.
    """

    def __init__(self, collectives: Collectives, like: torch.Tensor, repeats: int = 3) -> None:
        self.collectives, self.like, self.repeats = collectives, like, repeats
        grid = collectives.groups.grid
        self.axes = grid.nontrivial(grid.names)

    def seconds(self, action: Callable[[], Any]) -> float:
        """The median on this rank."""
        times, groups, device = [], self.collectives.groups, self.like.device
        for repeat in range(self.repeats + 1):
            if self.axes:
                dist.barrier(group=groups.group(self.axes[:1]))
            begin = time.perf_counter()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin if repeat else 0.0)
        return median(times[1:])

    def slowest(self, times: list[float]) -> list[float]:
        """The most that any rank has found."""
        everywhere = torch.tensor(times, dtype=torch.float64, device=self.like.device)
        for axis in self.axes:  # the slowest rank along every axis in turn is the slowest of all
            dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=self.collectives.groups.group((axis,)))
        return everywhere.tolist()  # type: ignore[no-any-return]

    def start(self, kind: str, axis: str, count: int) -> Any:
        """A collective of so many elements of this rank."""
        step = Step(kind, (axis,), None if kind == "all_reduce" else 0, 0)
        return self.collectives.start(step, self.like.new_zeros(count), ("speeds",), "forward")

    def links(self, probe_bytes: int, kinds: Sequence[str] = KINDS) -> list[float]:
        """On this rank, of each axis and kind of collective: seconds of a call, and those of a byte received.

        Args:
            probe_bytes: of a rank's share.
        """
        elements, found = probe_bytes // self.like.element_size(), []
        for axis in self.axes:
            ranks = self.collectives.groups.grid[axis]
            for kind in kinds:
                share = 1 if kind == "all_gather" else ranks
                small, large = (
                    self.seconds(lambda kind=kind, axis=axis, count=count: self.start(kind, axis, count).wait())  # type: ignore[misc]
                    for count in (64 * share, elements * share)
                )
                received = elements * self.like.element_size() * (ranks - 1) * (2 if kind == "all_reduce" else 1)
                found += [small, max(large - small, 0.0) / received]
        return found


def measure(collectives: Collectives, gemm: TorchGemm, like: torch.Tensor, repeats: int = 3) -> Speeds:
    """Time small and large collectives over every axis, products, and both at once; on all ranks together.

    Of sizes that tell something on this kind of device (`ndtp.compute.devices`), by what multiplies here.

    Args:
        like: a tensor of the dtype and device that count.
    """
    figures, probe = kind_of(like.device.type), Probe(collectives, like, repeats)
    side, device, axes = figures.probe_side, like.device, probe.axes
    elements, seconds, slowest = figures.probe_bytes // like.element_size(), probe.seconds, probe.slowest
    found = probe.links(figures.probe_bytes)
    # Random: a chip that multiplies ones draws less power, and runs faster.  Not out of the user's own random numbers.
    generator = torch.Generator(device).manual_seed(0)
    big, tiny = (torch.randn(n, n, generator=generator, device=device).to(like.dtype) for n in (side, 16))
    multiply_big, multiply_tiny = (
        partial(gemm.bound((("m", "k"), ("k", "n"), ("m", "n")), tuple(x.shape), tuple(x.shape)), x, x)
        for x in (big, tiny)
    )
    launch, product = seconds(multiply_tiny), seconds(lambda: [multiply_big() for _ in range(4)]) / 4
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
            handles = [probe.start("all_gather", axes[-1], elements) for _ in range(num_gathers)]
            for _ in range(num_products):
                multiply_big()
            for handle in handles:
                handle.wait()

        return slowest([seconds(run)])[0]

    # Long enough for what schedules processes to be fair: ranks may share processors.
    num_gathers = max(1, min(figures.probe_gathers, round(0.1 / together(1, 0))))
    gathers = together(num_gathers, 0)
    num_products = max(1, round(gathers / (per_flop * 2.0 * side**3)))
    products, both = together(0, num_products), together(num_gathers, num_products)
    hidden = (gathers + products - both) / min(gathers, products)
    return Speeds(latency, per_byte, per_flop, launch, min(1.0, max(0.0, 1 - hidden)))
