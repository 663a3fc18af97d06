"""The number of chunks of rows for a chain that leaves it open: chosen with constants measured on the ranks at hand."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.steps import Step
from ndtp.collectives.handles import Watch
from ndtp.collectives.labels import Label
from ndtp.collectives.processors import shared_processors
from ndtp.collectives.turns import staying
from ndtp.compute.devices import kind_of
from ndtp.runtime.chunk_choices import Choice
from ndtp.schedule.chunk_choice import SETTLED, SMALL, LinkSpeed, Speeds, choose, is_small, settled

if TYPE_CHECKING:
    from ndtp.collectives.collectives import Collectives
    from ndtp.compute.gemm import TorchGemm
    from ndtp.runtime.process_grid import ProcessGrid

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
ROWS = 2**10  # of a rank, for which a weight is worth a measurement, where ranks may have other numbers of rows
CALLS = 8  # together, to see for how long one keeps the next from the link
SMALLER = 16  # than those that show a rate
MOST_BYTES = 2**28  # of a gathered probe: a long axis must not take the memory of the model
logger = logging.getLogger("ndtp")


def resolve(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    mesh: ProcessGrid,
    dtype: torch.dtype,
    device: torch.device,
    trains: bool = True,
    may_measure: bool = True,
) -> int:
    """The number of chunks for a chain of products that leave it open ("auto"), chosen once for each number of rows.

    The first choice that depends on speeds measures them, which all ranks of the grid do together.

    Args:
        trains: whether gradients are wanted; without, what was chosen with them holds, too.
        may_measure: whether that would be worth it.
    """
    if device.type == "meta":  # a dry run
        return 1
    choices, key = mesh.step.chunks, key_of(plans, sizes, mesh, dtype)
    choice = choices.find(key, trains)
    if choice is None:
        may_measure = may_measure and _measured_alike(plans, sizes, mesh, dtype, device)
        choice = ahead(plans, sizes, mesh, dtype, device.type)
        if choice is None:
            choice = _measured(plans, sizes, mesh, dtype, device) if may_measure else (1, "nothing was measured before")
        if mesh.rank == 0:
            level = logging.DEBUG if choice[1] in SETTLED else logging.INFO
            logger.log(level, "%s: chunks: %d, %s", ", ".join(plan.name for plan in plans), *choice)
    choices.add(key, trains, plans, sizes[0]["m"], choice)
    return choice[0]


def _measured_alike(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    mesh: ProcessGrid,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether a measurement may depend on the number of rows; if not, it is made here, where the weights are worth it.

    Ranks of `dp` may have other numbers of rows than this one, and must come to it at the same product.
    """
    if not any(step.kind == "all_reduce" for plan in plans for step in plan.relayouts["dB"]):
        return True
    usual = [{**size, "m": ROWS * mesh.grid.num_ranks} for size in sizes]
    if ahead(plans, usual, mesh, dtype, device.type) is None:
        _measured(plans, usual, mesh, dtype, device)
    return False


def key_of(
    plans: Sequence[MatMulPlan], sizes: Sequence[Mapping[str, int]], mesh: ProcessGrid, dtype: torch.dtype
) -> str:
    """All that a choice depends on, but for speeds: layers alike share one."""
    products = [
        f"{plan.equation} {sorted(plan.roles.items())} again {sorted(plan.regather)} of {sorted(size.items())}"
        for plan, size in zip(plans, sizes, strict=True)
    ]
    return f"{mesh.grid}, {_name(dtype)}: " + "; then ".join(products)


def ahead(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    mesh: ProcessGrid,
    dtype: torch.dtype,
    device_type: str,
) -> Choice | None:
    """What can be said without measuring: no collective, the same on every rank.

    What is given, by a profile or a checkpoint, holds for small products as well; what was measured does not, which
    would make them depend on what ran before.
    """
    choices = mesh.step.chunks
    if why := settled(plans, sizes):
        return 1, why
    if given := choices.given(mesh.grid, _name(dtype)):
        return choose(plans, sizes, dtype.itemsize, given)
    if is_small(plans, sizes, dtype.itemsize, kind_of(device_type).chunks_from):
        return 1, SMALL
    if mesh.backend == "fake":
        return 1, "a fake process group sends nothing"
    if torch.are_deterministic_algorithms_enabled():
        return 1, "deterministic algorithms: nothing is measured"
    if choices.crowd:
        return 1, _crowded(choices.crowd)
    measured = choices.measured.get((str(mesh.grid), _name(dtype)))
    return None if measured is None else choose(plans, sizes, dtype.itemsize, measured)


def _measured(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    mesh: ProcessGrid,
    dtype: torch.dtype,
    device: torch.device,
) -> Choice:
    choices = mesh.step.chunks
    with _unseen(mesh):
        if choices.crowd is None:
            may_share = mesh.backend == "gloo" and device.type == "cpu" and mesh.gemm.takes_processors
            choices.crowd = shared_processors(mesh.groups) if may_share else 0
        if choices.crowd:
            return 1, _crowded(choices.crowd)
        if mesh.rank == 0:
            logger.info("chunks: grid %s measures its links and its %s products", mesh.grid, _name(dtype))
        like = torch.empty(1, dtype=dtype, device=device)
        known = next(iter(choices.measured.values()), None)
        speeds = measure(mesh.collectives, mesh.gemm, like, known=known)
    choices.measured[str(mesh.grid), _name(dtype)] = speeds
    return choose(plans, sizes, dtype.itemsize, speeds)


@contextmanager
def _unseen(mesh: ProcessGrid) -> Iterator[None]:
    """Not a part of what a meter counts, or a recorder sees.

    And gloo hands a compiler's Python dispatcher on to its threads, which would wait for the interpreter's lock while
    this thread holds it and waits for them.
    """
    recording = mesh.step.recording
    recorder, recording.recorder = recording.recorder, None
    try:
        with _disable_current_modes(), no_python_dispatcher(), staying():
            yield
    finally:
        recording.recorder = recorder


def _crowded(processors: int) -> str:
    return f"the ranks share {processors} processors: overlap takes from products what it hides"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
                with Watch(groups.describe, Label(("speeds",), "forward", "barrier", self.axes[:1])):
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
        groups = self.collectives.groups
        for axis in self.axes:  # the slowest rank along every axis in turn is the slowest of all
            with Watch(groups.describe, Label(("speeds",), "forward", "all_reduce", (axis,))):
                dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=groups.group((axis,)))
        return everywhere.tolist()  # type: ignore[no-any-return]

    def start(self, kind: str, axis: str, count: int) -> Any:
        """A collective of so many elements of this rank."""
        step = Step(kind, (axis,), None if kind == "all_reduce" else 0, 0)
        return self.collectives.start(step, self.like.new_zeros(count), ("speeds",), "forward")

    def calls(self, kind: str, axis: str, count: int, calls: int) -> float:
        """Collectives that are under way together, until all are done; the seconds in which all were started."""
        step, x = Step(kind, (axis,), None if kind == "all_reduce" else 0, 0), self.like.new_zeros(count)
        first, *others = self.collectives.routes(step, ("speeds",), "forward", tuple(x.shape), x.dtype)
        begin = time.perf_counter()
        handles = [self.collectives.launch(first, x) for _ in range(calls)]
        started = time.perf_counter() - begin
        for handle in handles:
            result = handle.wait()
            for route in others:
                result = self.collectives.launch(route, result).wait()
        return started

    def share(self, probe_bytes: int, axis: str) -> int:
        """Elements of a rank's share."""
        return min(probe_bytes, MOST_BYTES // self.collectives.groups.grid[axis]) // self.like.element_size()

    def links(
        self, probe_bytes: int, kinds: Sequence[str] = KINDS, axes: Sequence[str] | None = None
    ) -> dict[tuple[str, str], LinkSpeed]:
        """What each kind of collective costs over each axis, on the slowest rank.

        Args:
            probe_bytes: of a rank's share.
            axes: default: all.
        """
        keys = [(kind, axis) for axis in (self.axes if axes is None else axes) for kind in kinds]
        # Differences of what the slowest rank took, not the greatest difference of any: that is the noise of all.
        times = iter(self.slowest([time for key in keys for time in self._times(*key, probe_bytes)]))
        return {key: self._speed(*key, probe_bytes, list(islice(times, 6))) for key in keys}

    def _times(self, kind: str, axis: str, probe_bytes: int) -> list[float]:
        """On this rank: a call that moves next to nothing, a small one, several of these, a large one, two of these.

        And of the several, for how long the rank worked at each to start it; where streams do that, it multiplies.
        """
        elements, share = self.share(probe_bytes, axis), 1 if kind == "all_gather" else self._ranks(axis)
        few, started = elements // SMALLER, list[float]()

        def timed(count: int, calls: int) -> float:
            return self.seconds(lambda: started.append(self.calls(kind, axis, count * share, calls)))

        times = [timed(*each) for each in ((64, 1), (few, 1), (elements, 1), (elements, 2), (few, CALLS))]
        return [*times, 0.0 if self.collectives.orders_by_stream else median(started[-self.repeats :]) / CALLS]

    def _speed(self, kind: str, axis: str, probe_bytes: int, times: Sequence[float]) -> LinkSpeed:
        """Of a call, of a byte received, and of both where calls are under way together."""
        small, one, large, two, many, overhead = times
        elements = self.share(probe_bytes, axis)
        received = elements * self.like.element_size() * (self._ranks(axis) - 1) * (2 if kind == "all_reduce" else 1)
        per_byte, part = max(0.0, large - small) / received, (elements // SMALLER) / elements
        # What a call adds to those before it, of either size, is a gap and its bytes; these cost no more than alone.
        added, added_by_few = two - large, (many - one) / (CALLS - 1)
        behind = min(per_byte, max(0.0, (added - added_by_few) / (1 - part) / received))
        gap = min(small, max(0.0, added_by_few - behind * received * part))
        return LinkSpeed(small, per_byte, gap, behind, overhead=overhead)

    def _ranks(self, axis: str) -> int:
        return self.collectives.groups.grid[axis]


def measure(
    collectives: Collectives, gemm: TorchGemm, like: torch.Tensor, repeats: int = 3, known: Speeds | None = None
) -> Speeds:
    """Time small and large collectives over every axis, products, and both at once; on all ranks together.

    Of sizes that tell something on this kind of device (`ndtp.compute.devices`), by what multiplies here.

    Args:
        like: a tensor of the dtype and device that count.
        known: measured with another dtype, or on a grid of which this is a refinement: links are not measured twice.
    """
    figures, probe = kind_of(like.device.type), Probe(collectives, like, repeats)
    side, device, axes = figures.probe_side, like.device, probe.axes
    seconds, slowest = probe.seconds, probe.slowest
    links = {} if known is None else dict(known.links)
    links |= probe.links(figures.probe_bytes, axes=[axis for axis in axes if (KINDS[0], axis) not in links])
    # Random: a chip that multiplies ones draws less power, and runs faster.  Not out of the user's own random numbers.
    generator = torch.Generator(device).manual_seed(0)
    big, tiny = (torch.randn(n, n, generator=generator, device=device).to(like.dtype) for n in (side, 16))
    multiply_big, multiply_tiny = (
        partial(gemm.bound((("m", "k"), ("k", "n"), ("m", "n")), tuple(x.shape), tuple(x.shape)), x, x)
        for x in (big, tiny)
    )
    launch, product = seconds(multiply_tiny), seconds(lambda: [multiply_big() for _ in range(4)]) / 4
    per_flop, launch = slowest([product / (2.0 * side**3), launch])
    if known is not None or not axes:
        return Speeds(links, per_flop, launch, 0.0 if known is None else known.contention)
    elements = probe.share(figures.probe_bytes, axes[-1])

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
    return Speeds(links, per_flop, launch, min(1.0, max(0.0, 1 - hidden)))
