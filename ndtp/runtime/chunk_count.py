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


def measure(collectives: Collectives, gemm: TorchGemm, like: torch.Tensor, repeats: int = 3) -> Speeds:
    """Time small and large collectives over every axis, products, and both at once; on all ranks together.

    Of sizes that tell something on this kind of device (`ndtp.compute.devices`), by what multiplies here.

    Args:
        like: a tensor of the dtype and device that count.
    """
    figures = kind_of(like.device.type)
    elements, side = figures.probe_bytes // like.element_size(), figures.probe_side
    device, groups, grid = like.device, collectives.groups, collectives.groups.grid
    axes = grid.nontrivial(grid.names)

    def seconds(action: Callable[[], Any]) -> float:
        times = []
        for repeat in range(repeats + 1):
            if axes:
                dist.barrier(group=groups.group(axes[:1]))
            begin = time.perf_counter()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin if repeat else 0.0)
        return median(times[1:])

    def slowest(times: list[float]) -> list[float]:
        everywhere = torch.tensor(times, dtype=torch.float64, device=device)
        for axis in axes:  # the slowest rank along every axis in turn is the slowest of all
            dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=groups.group((axis,)))
        return everywhere.tolist()  # type: ignore[no-any-return]

    def start(kind: str, axis: str, count: int) -> Any:
        step = Step(kind, (axis,), None if kind == "all_reduce" else 0, 0)
        return collectives.start(step, like.new_zeros(count), ("speeds",), "forward")

    found: list[float] = []
    for axis in axes:
        ranks = grid[axis]
        for kind in KINDS:
            share = 1 if kind == "all_gather" else ranks
            small, large = (
                seconds(lambda kind=kind, axis=axis, count=count: start(kind, axis, count).wait())  # type: ignore[misc]
                for count in (64 * share, elements * share)
            )
            received = elements * like.element_size() * (ranks - 1) * (2 if kind == "all_reduce" else 1)
            found += [small, max(large - small, 0.0) / received]
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
            handles = [start("all_gather", axes[-1], elements) for _ in range(num_gathers)]
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
