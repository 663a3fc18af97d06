"""The time of a training step of a block: collectives by latency and bandwidth, products by a roof. Pure.

The costs of single collectives and products are here; `ndtp.schedule.clocks` puts them into the schedule that is
executed. The order of the axes on the ranks decides which collectives leave a node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, permutations

import numpy as np

from ndtp.algebra.wire import KINDS, Wire
from ndtp.dtypes import SIZES
from ndtp.planner.block_cost import AXES, EXPERT_AXES, Block, Grids, gemms, messages, padded
from ndtp.planner.grids import PerGrid
from ndtp.planner.hardware import DTYPE_BYTES, Hardware
from ndtp.schedule.clocks import LaneSpan, Messages, TimedProduct, step_seconds
from ndtp.schedule.host import HostLane

# What a step of a product may move.
MOVES = (
    ("forward", "A"), ("forward", "B"), ("forward", "C"), ("dgrad", "dC"), ("dgrad", "B"), ("dgrad", "dA"),
    ("wgrad", "A"), ("wgrad", "dB"),
)  # fmt: skip

# Rank orders of the axes, slowest first; of equally fast ones the first wins.
ORDERS = tuple(permutations(AXES))
EXPERT_ORDERS = tuple(permutations(EXPERT_AXES))


def strides(g: Grids, order: Sequence[str]) -> dict[str, PerGrid]:
    """Axis -> the distance in ranks of two neighbours on it."""
    stride = np.ones_like(np.asarray(g.ranks))
    found = {}
    for axis in reversed(order):
        found[axis] = stride
        stride = stride * getattr(g, axis)
    return found


@dataclass(frozen=True)
class Reach:
    """The place of an axis's group on the nodes: its members on one node, and the number of nodes that it spans."""

    local: PerGrid
    nodes: PerGrid

    @classmethod
    def of(cls, size: PerGrid, stride: PerGrid, ranks: PerGrid, per_node: int) -> Reach:
        """Return the reach of an axis.

        Where groups straddle node boundaries unevenly, the worst group counts.
        """
        aligned = (per_node % (size * stride) == 0) | (np.asarray(ranks) <= per_node)
        fits = np.maximum(1, np.minimum(size, per_node // stride))
        # Members that seem to fit, but not aligned to nodes: some group is cut in two.
        uneven = np.where(fits == size, np.maximum(1, size // 2), fits)
        local = np.where(aligned, size, np.where(size == 1, 1, uneven))
        return cls(local, -(-size // local))


def cost_of(hardware: Hardware, collective: str, size: PerGrid, reach: Reach) -> tuple[PerGrid, PerGrid]:
    """Seconds per byte received, and seconds of latency, of a collective over groups of a size.

    Across nodes the members on one node share the traffic between nodes over all of their links.
    """
    intra, inter = hardware.intra, hardware.inter
    times = 2 if collective == "all_reduce" else 1
    side = size / np.maximum(1, size - 1)  # the larger side, per byte received
    per_byte = inter.seconds_per_byte(collective, size)
    # What a node gathers or sums is the same for its members; in an all-to-all each has bytes of its own.
    shared = 1 if collective == "all_to_all" else reach.local
    between = side * (reach.nodes - 1) / reach.nodes / shared * per_byte
    inside = (reach.local > 1) * intra.seconds_per_byte(collective, size)
    across = inter.latency_us + times * ((reach.nodes - 1) * inter.hop_us + (reach.local - 1) * intra.hop_us)
    latency = np.where(reach.nodes > 1, across, intra.latency_us + times * (size - 1) * intra.hop_us)
    return np.maximum(between, inside), latency * 1e-6


@dataclass(frozen=True)
class Network:
    """The axes of many grids in one rank order, on one machine; of sets of axes (`Grids.splits`) what these make."""

    shares = False  # of many grids, collectives are timed one after the other

    g: Grids
    hardware: Hardware
    reach: dict[str, Reach]
    sizes: dict[str, PerGrid] = field(default_factory=dict, repr=False)
    costs: dict[tuple[str, str], tuple[object, object]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, g: Grids, order: Sequence[str], hardware: Hardware) -> Network:
        steps = strides(g, order)
        per_node = hardware.ranks_per_node
        return cls(g, hardware, {a: Reach.of(getattr(g, a), steps[a], g.ranks, per_node) for a in order})

    def reach_of(self, axis: str) -> Reach:
        if axis not in self.reach:
            local: object = 1
            nodes: object = 1
            for each, size in self.g.splits(axis).items():
                one, is_in = self.reach[each], np.asarray(size) > 1
                local, nodes = local * np.where(is_in, one.local, 1), nodes * np.where(is_in, one.nodes, 1)
            self.reach[axis] = Reach(local, nodes)
        return self.reach[axis]

    def size(self, axis: str) -> PerGrid:
        if axis not in self.sizes:
            self.sizes[axis] = math.prod(self.g.splits(axis).values())
        return self.sizes[axis]

    def cost(self, collective: str, axis: str) -> tuple[PerGrid, PerGrid]:
        """`cost_of` a collective over an axis."""
        key = (collective, axis)
        if key not in self.costs:
            self.costs[key] = cost_of(self.hardware, collective, self.size(axis), self.reach_of(axis))
        return self.costs[key]

    def seconds(self, collective: str, axis: str, received: PerGrid) -> PerGrid:
        """A collective in which every rank receives that many bytes; none at all for no bytes."""
        per_byte, latency = self.cost(collective, axis)
        return received * per_byte + (np.asarray(received) > 0) * latency

    def occupied(self, collective: str, axis: str, received: object) -> PerGrid:
        """Return the seconds until the link is free.

        A profile does not say which part of a latency overlaps with other bytes.
        """
        return self.seconds(collective, axis, received)

    def summed(self, collective: str, axis: str, received: object) -> float:
        """Nothing: sums are a part of a profile's collectives."""
        return 0.0

    def overhead(self, collective: str, axis: str) -> float:
        """Nothing: streams start them."""
        return 0.0

    def crosses(self, axis: str) -> PerGrid:
        """Return whether the groups of an axis leave their node."""
        return self.reach_of(axis).nodes > 1

    def inside_node(self, axes: Sequence[str]) -> PerGrid:
        """Return whether every group of these axes lies on one node."""
        return np.logical_and.reduce([self.reach[axis].nodes == 1 for axis in axes])


def gemm_seconds(hardware: Hardware, m: PerGrid, n: PerGrid, k: PerGrid, dtype: str, count: object = 1.0) -> PerGrid:
    """Local products: the roof of their arithmetic, less where dims are short, and of the memory they touch."""
    m, n, k = _real(m), _real(n), _real(k)
    half = hardware.half(dtype)
    rate = hardware.flops_per_second(dtype) / ((1 + half / m) * (1 + half / n) * (1 + half / k))
    touched = (m * k + k * n + m * n) * DTYPE_BYTES[dtype] / (hardware.memory_gbs * 1e9)
    return np.maximum(2.0 * m * n * k / rate, touched) * count + hardware.launch_us * 1e-6


def _real(x: object) -> PerGrid:
    """Return x as floats.

    Products of sizes may leave 64 bits, and times need no more precision than floats hold.
    """
    return np.asarray(x, dtype=np.float64)


@dataclass(frozen=True)
class Time:
    """Seconds of a step: of the `total`, `gemm` multiplies, `elementwise` activates and adds up, `exposed` waits."""

    total: PerGrid
    gemm: PerGrid
    elementwise: PerGrid
    communication: PerGrid

    @property
    def exposed(self) -> PerGrid:
        return np.maximum(0.0, self.total - self.gemm - self.elementwise)


@dataclass(frozen=True)
class BlockWork:
    """A layer of blocks on many grids: what does not depend on the order of the axes on the ranks.

    Attributes:
        segments: products of blocks that are repeated together, and how often in a layer.
    """

    segments: tuple[tuple[int, tuple[TimedProduct, ...]], ...]
    contention: float
    layers: int
    chunks: int
    regather: bool
    host: HostLane | None = None

    @classmethod
    def of(
        cls,
        blocks: Sequence[Block],
        g: Grids,
        hardware: Hardware,
        dtype: str,
        *,
        layers: int = 1,
        chunks: int = 1,
        regather_a: PerGrid = 0,
        regather_b: PerGrid = 0,
        wire: Wire | None = None,
        captured: bool = True,
    ) -> BlockWork:
        """Return the work of these blocks on these grids.

        Args:
            chunks: pieces of rows whose collectives run beside their products, as in `MatMulPlan(chunks=)`.
            captured: a graph issues the step; else the host does, task by task.
        """
        segments = []
        for times, alike in groupby(blocks, lambda block: block.times):
            products: list[TimedProduct] = []
            for block in alike:
                products += _products(block, g, hardware, dtype, chunks, regather_a, regather_b, wire)
            segments.append((times, tuple(products)))
        regather, host = bool(np.any(regather_a) or np.any(regather_b)), None if captured else hardware.host_lane
        return cls(tuple(segments), hardware.contention, layers, chunks, regather, host)

    @property
    def products(self) -> tuple[TimedProduct, ...]:
        return tuple(product for _, products in self.segments for product in products)

    def time(self, network: Network) -> Time:
        """Forward and backward of all layers.  From the second layer on each adds what the second one adds."""
        total: PerGrid = 0.0
        communication: PerGrid = 0.0
        gemm: object = 0.0
        elementwise: object = 0.0
        for times, products in self.segments:
            times *= self.layers
            how = network, self.chunks, self.regather, self.contention, None, self.host
            one = step_seconds(products, *how)
            total = total + one
            if times > 1:
                two = step_seconds(products * 2, *how)
                total = total + (times - 1) * (two - one)
            for product in products:
                for moves in product.messages.values():
                    communication = communication + times * sum(network.seconds(*move) for move in moves)
            gemm = gemm + times * (3 * sum(product.gemm for product in products))
            elementwise = elementwise + times * sum(4 * product.after + product.copy for product in products)
        return Time(total, gemm, elementwise, communication)

    def spans(self, network: Network, product: int | None = None) -> list[LaneSpan]:
        """Return the spans of a step of one layer, or of one of its products, on a single grid."""
        kept: list[LaneSpan] = []
        products = self.products if product is None else self.products[product : product + 1]
        step_seconds(products, network, self.chunks, self.regather, self.contention, kept, self.host)
        return kept


def _products(
    block: Block,
    g: Grids,
    hardware: Hardware,
    dtype: str,
    chunks: int,
    regather_a: object,
    regather_b: object,
    wire: Wire | None,
) -> Iterator[TimedProduct]:
    itemsize = float(SIZES[dtype])
    moved: dict[str, dict[tuple[str, str], Messages]] = {name: {key: [] for key in MOVES} for name in ("up", "down")}
    for message in messages(block, g, regather_a, regather_b):
        name, tensor = message.tensor.split()
        entry = (message.collective, message.axis, _real(message.num_bytes(SIZES[dtype], wire)))
        moved[name][message.phase, tensor].append(entry)
    s, i = padded(block, g), g.inside(block.experts)
    # Of products one by one.
    count: PerGrid = _real(block.experts) / _real(g.over(block.experts)) if block.experts else 1.0
    rows = _real(s.tokens) * block.top_k / _real(g.ranks)
    # Forward reads what enters the activation and writes what leaves it; nothing follows the second product, but that
    # rows from experts are put in order and added up.
    activation = (_real(s.up + s.inner) * rows, 4 * _real(s.hidden) * rows * bool(block.experts))
    own = [np.where((size > 1) & (not block.experts), 1 / size, 0.0) for size in (_real(i.y), _real(i.x))]
    # Of what is quantised the others have other numbers than its owner: its own part waits for theirs.
    forms = [None if wire is None else wire.format(KINDS[name]) for name in ("A", "dC")]
    a_whole, c_whole = (form is None or form.itemsize >= SIZES[dtype] for form in forms)
    per_element = itemsize / (hardware.memory_gbs * 1e9)
    for name, (m, n, k), elements in zip(("up", "down"), gemms(block, g) or [(0, 0, 0)], activation, strict=False):
        yield TimedProduct(
            moved[name],
            gemm_seconds(hardware, m, n, k, dtype, count) if block.outs else 0.0,
            gemm_seconds(hardware, _real(m) / chunks, n, k, dtype, count) if block.outs else 0.0,
            elements * per_element,
            # Weights [out, in] are gathered over z along their last dim; low precision joins the blocks before it sums.
            2 * count * _real(n) * _real(k) * per_element * ((i.z > 1) & (itemsize < 4)),
            # Rows of A come from y and of dC from x in the first product; the other way round in the second.
            (own[name != "up"] * a_whole, own[name == "up"] * c_whole),
            chained=name == "up" and len(block.outs) == 1 and bool(block.inner) and not block.experts,
        )
