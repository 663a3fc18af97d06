"""Measurements of collectives and products on the current ranks, alone and beside each other."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ndtp.algebra.steps import Step
from ndtp.algebra.wire import BACK
from ndtp.collectives.codecs import CODECS
from ndtp.collectives.labels import Label
from ndtp.collectives.symmetric.windows import machine
from ndtp.collectives.watch import Watch
from ndtp.compute.devices import DeviceKind, kind_of
from ndtp.schedule.chunk_choice import LinkSpeed, Speeds
from ndtp.schedule.host import EAGER, HostLane

if TYPE_CHECKING:
    from ndtp.collectives.collectives import Collectives
    from ndtp.compute.gemm import TorchGemm

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
CALLS = 8  # together, to see for how long one keeps the next from the link
SMALLER = 16  # than those that show a rate
MOST_BYTES = 2**28  # of a gathered probe: a long axis must not take the memory of the model
LASTING = 0.03  # seconds of products: several of a scheduler's turns, where ranks share processors
SHORTER = 4  # products of so many times fewer rows, to see what a product costs beside its arithmetic
BESIDE = ("all_gather", "reduce_scatter")  # these products: what schedules mostly send
MOST_BESIDE = 32  # of each of these
CODED = (256, 1024)  # the shape of a tensor that is quantised to see how long that takes


class Probe:
    """Times things on all ranks of a grid together.

    Args:
        like: a tensor of the dtype and device that count.
    """

    def __init__(self, collectives: Collectives, like: torch.Tensor, repeats: int = 3) -> None:
        self.collectives, self.like, self.repeats = collectives, like, repeats
        grid = collectives.groups.grid
        self.axes = grid.nontrivial(grid.names)

    def seconds(self, action: Callable[[], object]) -> float:
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

    def host(self, multiply: Callable[[], object]) -> HostLane:
        """The lane of the host, by what it takes, on the slowest rank, to start a collective and a product."""
        starts, products = [], []
        for _ in range(self.repeats + 1):
            starts.append(self.calls("all_gather", self.axes[-1], 64, CALLS) / CALLS)
            begin = time.perf_counter()
            for _ in range(CALLS):
                multiply()
            products.append((time.perf_counter() - begin) / CALLS)
        both = sum(self.slowest([median(starts[1:]), median(products[1:])]))
        return EAGER.scaled(both / (EAGER.start + EAGER.multiply))

    def across(self) -> frozenset[str]:
        """Return the axes along which some ranks are on another machine than this one or others."""
        named, groups, found = zlib.crc32(machine().encode()), self.collectives.groups, []
        for axis in self.axes:
            both = torch.tensor([named, -named], dtype=torch.int64, device=self.like.device)
            with Watch(groups.describe, Label(("speeds",), "forward", "all_reduce", (axis,))):
                dist.all_reduce(both, dist.ReduceOp.MAX, group=groups.group((axis,)))
            largest, smallest = both.tolist()
            found.append(float(largest != -smallest))
        return frozenset(axis for axis, each in zip(self.axes, self.slowest(found), strict=True) if each)

    def share(self, probe_bytes: int, axis: str) -> int:
        """Elements of a rank's share."""
        return min(probe_bytes, MOST_BYTES // self.collectives.groups.grid[axis]) // self.like.element_size()

    def links(
        self, probe_bytes: int, kinds: Sequence[str] = KINDS, axes: Sequence[str] | None = None
    ) -> dict[tuple[str, str], LinkSpeed]:
        """Measure the cost of each kind of collective over each axis, on the slowest rank.

        Args:
            probe_bytes: of a rank's share.
            axes: default: all.
        """
        keys = [(kind, axis) for axis in (self.axes if axes is None else axes) for kind in kinds]
        # Differences of what the slowest rank took, not the greatest difference of any: that is the noise of all.
        times = iter(self.slowest([time for key in keys for time in self._times(*key, probe_bytes)]))
        return {key: self._speed(*key, probe_bytes, list(islice(times, 6))) for key in keys}

    def _times(self, kind: str, axis: str, probe_bytes: int) -> list[float]:
        """Time on this rank: a call that moves next to nothing, a small one, several small ones, a large one, two
        large ones.

        And of the several, for how long the rank worked at each to start it; where streams do that, it multiplies.
        """
        elements, share = self.share(probe_bytes, axis), 1 if kind == "all_gather" else self._ranks(axis)
        few, started = elements // SMALLER, list[float]()

        def timed(count: int, calls: int) -> float:
            return self.seconds(lambda: started.append(self.calls(kind, axis, count * share, calls)))

        times = [timed(*each) for each in ((64, 1), (few, 1), (elements, 1), (elements, 2), (few, CALLS))]
        return [*times, 0.0 if self.collectives.orders_by_stream else median(started[-self.repeats :]) / CALLS]

    def _speed(self, kind: str, axis: str, probe_bytes: int, times: Sequence[float]) -> LinkSpeed:
        """Return the cost of a call, of a byte received, and of both where several calls are under way."""
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

    def coding(self) -> dict[str, tuple[float, float]]:
        """Measure for each format of the wire, on the slowest rank, the seconds to bring a number to it, and back."""
        wire = self.collectives.wire
        forms = [] if wire is None else [form for kind in BACK if (form := wire.format(kind)) is not None]
        used = [CODECS[name] for name in sorted({form.name for form in forms if form.itemsize < self.like.itemsize})]
        x = self.like.new_ones(CODED)
        sent = [torch.empty(codec.num_bytes(CODED), dtype=torch.uint8, device=x.device) for codec in used]
        times = []
        for codec, memory in zip(used, sent, strict=True):
            times.append(self.seconds(partial(codec.encode, x, memory)))
            times.append(self.seconds(partial(codec.decode, memory, CODED, x.dtype)))
        slowest = [each / x.numel() for each in self.slowest(times)] if times else []
        pairs = zip(slowest[::2], slowest[1::2], strict=True)
        return {codec.form.name: pair for codec, pair in zip(used, pairs, strict=True)}

    def lasting(self, multiply: Callable[[], Any], count: int, axis: str | None = None, every: int = 1) -> float:
        """Seconds of so many products, on the slowest rank.

        With an axis, collectives that move next to nothing are under way beside them, two more with every so many.

        What these add is what they cost the ranks' processors, all of it: to start them, to wait for them, and what
        threads, the network and other ranks on the same processors need for them.
        """

        def run() -> None:
            under_way: deque[Any] = deque()
            for i in range(count):
                if axis is not None and i % every == 0:
                    under_way.extend(self.start(kind, axis, 64 * self._ranks(axis)) for kind in BESIDE)
                multiply()
                while len(under_way) > 2 * len(BESIDE):
                    under_way.popleft().wait()
            for handle in under_way:
                handle.wait()

        return self.slowest([self.seconds(run)])[0]


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
    links = {} if known is None else dict(known.links)
    found = [axis for axis in axes if (KINDS[0], axis) not in links]
    links |= probe.links(figures.probe_bytes, axes=found)
    # Random: a chip that multiplies ones draws less power, and runs faster.  Not out of the user's own random numbers.
    generator = torch.Generator(device).manual_seed(0)
    big = torch.randn(side, side, generator=generator, device=device).to(like.dtype)

    def product_of(rows: int, inner: int) -> Callable[[], torch.Tensor]:
        a, b = big[:rows, :inner].contiguous(), big[:inner, :inner].contiguous()
        return partial(gemm.bound((("m", "k"), ("k", "n"), ("m", "n")), tuple(a.shape), tuple(b.shape)), a, b)

    multiply, multiply_less, multiply_tiny = (
        product_of(side, side),
        product_of(side // SHORTER, side),
        product_of(16, 16),
    )
    count = max(1, round(LASTING / probe.slowest([probe.seconds(multiply)])[0]))
    products, shorter = probe.lasting(multiply, count), probe.lasting(multiply_less, SHORTER * count)
    # As much as leaves arithmetic its part, whatever the noise.
    launch = min(shorter - products, (SHORTER - 1) / 2 * products) / (SHORTER - 1) / count
    per_flop = (products / count - max(0.0, launch)) / (2.0 * side**3)
    (launch,) = probe.slowest([max(launch, probe.seconds(multiply_tiny))])
    for axis in () if collectives.orders_by_stream else found:
        every = -(-count // MOST_BESIDE)
        added = probe.lasting(multiply, count, axis, every) - products
        overhead = added / (len(range(0, count, every)) * len(BESIDE))
        for key in ((kind, axis) for kind in KINDS):
            links[key] = links[key]._replace(overhead=max(links[key].overhead, overhead))
    coding = probe.coding() if axes else {}
    by_streams = bool(axes) and collectives.orders_by_stream
    host = probe.host(multiply_tiny) if by_streams else None
    across = probe.across() if by_streams else frozenset[str]()
    if known is not None or not axes:
        return Speeds(links, per_flop, launch, 0.0 if known is None else known.contention, coding, across, host)
    contention = _contention(probe, figures, multiply, per_flop * 2.0 * side**3)
    return Speeds(links, per_flop, launch, contention, coding, across, host)


def _contention(probe: Probe, figures: DeviceKind, multiply: Callable[[], torch.Tensor], product_s: float) -> float:
    """Return the share of a gather's time that products beside it do not hide, from 0 to 1.

    Args:
        product_s: the seconds that `multiply` takes alone.
    """
    axis = probe.axes[-1]
    elements = probe.share(figures.probe_bytes, axis)

    def together(num_gathers: int, num_products: int) -> float:
        def run() -> None:
            handles = [probe.start("all_gather", axis, elements) for _ in range(num_gathers)]
            for _ in range(num_products):
                multiply()
            for handle in handles:
                handle.wait()

        return probe.slowest([probe.seconds(run)])[0]

    # Long enough for what schedules processes to be fair: ranks may share processors.
    num_gathers = max(1, min(figures.probe_gathers, round(0.1 / together(1, 0))))
    gathers = together(num_gathers, 0)
    num_products = max(1, round(gathers / product_s))
    products, both = together(0, num_products), together(num_gathers, num_products)
    hidden = (gathers + products - both) / min(gathers, products)
    return min(1.0, max(0.0, 1 - hidden))
