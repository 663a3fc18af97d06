"""The choice of a number of chunks, by the schedule's own tasks timed with measured constants. Pure.

A chunk more hides more of the collectives behind the products, and costs the fixed part of its calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.wire import KINDS, Wire, coded_elements
from ndtp.schedule.arrivals import weight_in_parts
from ndtp.schedule.clocks import TimedProduct, step_seconds
from ndtp.schedule.host import HostLane
from ndtp.schedule.tasks import RowChunks

COUNTS = (1, 2, 3, 4, 6, 8)
WORTHWHILE = 0.97  # of the time in one chunk: predictions are not better than that
ALIKE = 1.005  # times the best: the fewest chunks of these

# Why one chunk is as good as any, whatever the speeds.
NOTHING = "nothing is communicated"
UNCUT = "its rows cannot be cut for all ranks alike"
SMALL = "too little to measure anything for"
SETTLED = frozenset((NOTHING, UNCUT, SMALL))


class LinkSpeed(NamedTuple):
    """The cost of a kind of collective over an axis, in seconds; bytes are those received.

    Source: Alexandrov et al., "LogGP", 1995.

    Attributes:
        latency: of a call that moves next to nothing.
        per_byte: of a call alone.
        gap: for which a call keeps the next one from the link, beside its bytes: of its latency what does not go by
            while another's bytes are moved; default: all.
        gap_per_byte: for which a byte keeps the next call from the link: messages of several peers share it better
            while more is on its way, and what a rank sums up is on its way no more; default: `per_byte`.
        sum_per_byte: in which the rank itself sums up what has arrived; default: a part of `per_byte`, as measured.
        overhead: for which a call keeps the rank from products, its start and all that shares its processors; 0 where
            it only tells a device to.
    """

    latency: float
    per_byte: float
    gap: float | None = None
    gap_per_byte: float | None = None
    sum_per_byte: float = 0.0
    overhead: float = 0.0


@dataclass(frozen=True)
class Speeds:
    """Measured speeds that a choice of chunks rests on, in seconds of the slowest rank, the same on every rank.

    Attributes:
        links: (collective, axis) -> what it costs.
        per_flop, launch: of local products, all ranks at once; seconds of each, and of a product that is tiny.
        contention: how much of the time of a collective beside products these lose by it, from 0 to 1.
        coding: format of the wire -> seconds to bring a number to it, and back from it.
        across: axes whose links leave the node, which are other ones than those inside.
        host: what issues the tasks of an eager step to a device; None where the processors compute themselves.
        shares: whether collectives over several axes share a link evenly (`SharedLink`), as connections do; else they
            have it one after another.
    """

    links: Mapping[tuple[str, str], LinkSpeed]
    per_flop: float = 0.0
    launch: float = 0.0
    contention: float = 0.0
    coding: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    across: frozenset[str] = frozenset()
    host: HostLane | None = None
    shares: bool = True

    @property
    def are_of_device(self) -> bool:
        """Return whether streams order the collectives: the rank only tells a device to start them."""
        return not any(link.overhead for link in self.links.values())

    def seconds(self, collective: str, axes: Any, received: Any) -> float:
        """A collective over axes, of which the slowest counts; nothing where nothing moves."""
        if not received:
            return 0.0
        return max(link.latency + received * link.per_byte for link in self._over(collective, axes))

    def occupied(self, collective: str, axes: Any, received: Any) -> float:
        """Return the seconds until the link is free for the next collective."""
        if not received:
            return 0.0
        return max(
            (link.latency if link.gap is None else link.gap)
            + received * (link.per_byte if link.gap_per_byte is None else link.gap_per_byte)
            for link in self._over(collective, axes)
        )

    def summed(self, collective: str, axes: Any, received: Any) -> float:
        """Return the seconds for which the rank sums up what has arrived."""
        return max((received * link.sum_per_byte for link in self._over(collective, axes)), default=0.0)

    def overhead(self, collective: str, axes: object) -> float:
        """Return the seconds for which the rank works to start the collective."""
        return max((link.overhead for link in self._over(collective, axes)), default=0.0)

    def crosses(self, axes: Any) -> bool:
        """Return whether the slowest of the axes leaves the node."""
        return not self.across.isdisjoint(axes)

    def to_json(self) -> dict[str, Any]:
        links = {" ".join(key): list(link) for key, link in self.links.items()}
        products = [self.per_flop, self.launch, self.contention]
        coding = {name: list(each) for name, each in self.coding.items()}
        more = {"coding": coding, "across": sorted(self.across), "host": self.host and self.host.to_json()}
        return {"links": links, "products": products} | {key: each for key, each in more.items() if each}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Speeds:
        # Files of earlier versions say less of each link.
        links = {(kind, axis): LinkSpeed(*link) for key, link in kept["links"].items() for kind, axis in [key.split()]}
        coding = {name: (float(there), float(back)) for name, (there, back) in kept.get("coding", {}).items()}
        per_flop, launch, contention = map(float, kept["products"])
        across, host = frozenset(kept.get("across", ())), kept.get("host")
        return cls(links, per_flop, launch, contention, coding, across, host and HostLane(*map(float, host)))

    def _over(self, collective: str, axes: Any) -> list[LinkSpeed]:
        return [self.links[collective, axis] for axis in axes]


def settled(plans: Sequence[MatMulPlan], sizes: Sequence[Mapping[str, int]]) -> str:
    """Return the reason why one chunk is right at any speeds, or "" where the choice depends on speeds."""
    if not any(plan.steps for plan in plans):
        return NOTHING
    return "" if len(_possible(plans, sizes)) > 1 else UNCUT


def is_small(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    itemsize: int,
    least: tuple[int, int],
    wire: Wire | None = None,
) -> bool:
    """Return whether a rank multiplies or receives so little that overlap cannot pay at any speeds.

    Args:
        least: multiply-adds of a forward, and bytes received in a forward and backward, that are worth a measurement.
    """
    products = sum(prod(plan.held_shape(plan.letters, size)) for plan, size in zip(plans, sizes, strict=True))
    if products < least[0]:
        return True
    moved = (messages_of(plan, size, itemsize, wire).values() for plan, size in zip(plans, sizes, strict=True))
    return sum(received for moves in moved for move in moves for _, _, received in move) < least[1]


def _possible(plans: Sequence[MatMulPlan], sizes: Sequence[Mapping[str, int]]) -> list[int]:
    return [n for n in COUNTS if RowChunks.of(plans, sizes, n)[0].count == n]


def choose(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    itemsize: int,
    speeds: Speeds,
    wire: Wire | None = None,
) -> tuple[int, str]:
    """The best number of chunks of a forward and backward, and why; pure.

    Devices may share a link evenly between communicators, or serve them one after another: which, is measured nowhere.
    It can be 4 % of a step.  The number is the one that is the least above the best one's time in the worse of both.
    """
    if why := settled(plans, sizes):
        return 1, why
    possible = _possible(plans, sizes)
    ways = [speeds, replace(speeds, shares=False)] if speeds.are_of_device else [speeds]
    predicted = [{n: seconds_of(plans, sizes, itemsize, way, n, wire=wire) for n in possible} for way in ways]
    worst = {n: max(times[n] / min(times.values()) for times in predicted) for n in possible}
    best = min(n for n in possible if worst[n] <= ALIKE * min(worst.values()))
    times = max(predicted, key=lambda times: times[1] / min(times.values()))
    if worst[best] < WORTHWHILE * worst[1]:
        return best, f"a step in {times[best] * 1e3:.3g} ms, in one chunk {times[1] * 1e3:.3g} ms (predicted)"
    other = min((n for n in possible if n > 1), key=times.__getitem__)
    return 1, f"overlap does not pay: {times[1] * 1e3:.3g} ms, in {other} chunks {times[other] * 1e3:.3g} ms"


def seconds_of(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    itemsize: int,
    speeds: Speeds,
    chunks: int,
    wire: Wire | None = None,
) -> float:
    """A forward and backward in so many chunks."""
    products = products_of(plans, sizes, itemsize, speeds, chunks, wire=wire)
    regather = any(plan.regather for plan in plans)
    return float(step_seconds(products, speeds, chunks, regather, speeds.contention, host=speeds.host))


def products_of(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    itemsize: int,
    speeds: Speeds,
    chunks: int,
    after: float = 0.0,
    wire: Wire | None = None,
) -> list[TimedProduct]:
    """The products of a chain, timed.

    Args:
        after: seconds of element by element work behind each but the last.
    """

    def own(plan: MatMulPlan, name: str) -> float:  # of what is quantised the others have other numbers
        form = None if wire is None else wire.format(KINDS[name])
        return _own(plan, name) if form is None or form.itemsize >= itemsize else 0.0

    products = []
    for i, (plan, size) in enumerate(zip(plans, sizes, strict=True)):
        gemm = 2.0 * prod(plan.held_shape(plan.letters, size)) * speeds.per_flop
        products.append(
            TimedProduct(
                messages_of(plan, size, itemsize, wire),
                gemm + speeds.launch,
                gemm / chunks + speeds.launch,
                after if i + 1 < len(plans) else 0.0,
                own=(own(plan, "A"), own(plan, "dC")),
                own_weight=own(plan, "B") if itemsize >= 4 and weight_in_parts(plan) else 0.0,
                chained=i + 1 < len(plans),
                coding=_coding(plan, size, itemsize, speeds, wire),
            )
        )
    return products


def messages_of(
    plan: MatMulPlan, sizes: Mapping[str, int], itemsize: int, wire: Wire | None = None
) -> dict[tuple[str, str], list[tuple[str, Any, int]]]:
    """(phase, tensor) -> (collective, axes, bytes received) of each of its steps, as they travel."""
    return {
        (move.phase, move.tensor): [(each.collective, each.axes, each.num_bytes) for each in plan.traffic_of(*rest)]
        for move in plan.moves()
        for rest in [(move, sizes, itemsize, wire)]
    }


def _coding(
    plan: MatMulPlan, sizes: Mapping[str, int], itemsize: int, speeds: Speeds, wire: Wire | None
) -> dict[tuple[str, str], tuple[float, float]]:
    """(phase, tensor) -> seconds to bring what travels in fewer bytes to the form of the wire, and back."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for move in plan.moves():
        form = None if wire is None else wire.format(KINDS[move.tensor])
        if form is not None and form.name in speeds.coding:
            elements = coded_elements(plan.grid, move.steps, plan.start_shape(move.tensor, sizes), itemsize, form)
            there, back = speeds.coding[form.name]
            found[move.phase, move.tensor] = elements[0] * there, elements[1] * back
    return found


def _own(plan: MatMulPlan, operand: str) -> float:
    """The part of an operand that a rank multiplies while the others' are on their way."""
    steps = plan.relayouts[operand]
    return 1 / plan.grid.size(steps[0].axes) if len(steps) == 1 and steps[0].kind == "all_gather" else 0.0
