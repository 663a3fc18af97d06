"""How long a training step of a block takes: collectives by latency and bandwidth, products by a roof.  Pure.

A model, with the schedule that `ndtp.schedule` executes: the gathers of A and B fly together, what a product reduces is
waited for, and backward's reduction of dA flies while the weight gradient is computed.  The order of the axes on the
ranks decides which collectives leave a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np

from ndtp.block_cost import AXES, Block, Grids, gemms, messages, padded
from ndtp.hardware import DTYPES, Hardware

# Rank orders of the four axes, slowest first; of equally fast ones the first wins.
ORDERS = tuple(permutations(AXES))


def strides(g: Grids, order: Sequence[str]) -> dict[str, Any]:
    """Axis -> the distance in ranks of two neighbours on it."""
    stride: Any = np.ones_like(np.asarray(g.ranks))
    found = {}
    for axis in reversed(order):
        found[axis] = stride
        stride = stride * getattr(g, axis)
    return found


@dataclass(frozen=True)
class Reach:
    """How the group of an axis lies on the nodes: members on one node, and the nodes that it spans."""

    local: Any
    nodes: Any

    @classmethod
    def of(cls, size: Any, stride: Any, ranks: Any, per_node: int) -> Reach:
        """Where a group straddles node boundaries unevenly, the worst group counts."""
        aligned = (per_node % (size * stride) == 0) | (np.asarray(ranks) <= per_node)
        fits = np.maximum(1, np.minimum(size, per_node // stride))
        # Members that seem to fit, but not aligned to nodes: some group is cut in two.
        uneven = np.where(fits == size, np.maximum(1, size // 2), fits)
        local = np.where(aligned, size, np.where(size == 1, 1, uneven))
        return cls(local, -(-size // local))


@dataclass(frozen=True)
class Network:
    """The axes of many grids in one rank order, on one machine."""

    g: Grids
    hardware: Hardware
    reach: dict[str, Reach]
    costs: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, g: Grids, order: Sequence[str], hardware: Hardware) -> Network:
        steps = strides(g, order)
        per_node = hardware.ranks_per_node
        return cls(g, hardware, {a: Reach.of(getattr(g, a), steps[a], g.ranks, per_node) for a in AXES})

    def cost(self, collective: str, axis: str) -> tuple[Any, Any]:
        """Seconds per byte received, and seconds of latency, of a collective over an axis.

        Across nodes the members on one node share the traffic between nodes over all of their links.
        """
        key = (collective, axis)
        if key not in self.costs:
            size, reach = getattr(self.g, axis), self.reach[axis]
            intra, inter = self.hardware.intra, self.hardware.inter
            times = 2 if collective == "all_reduce" else 1
            side = size / np.maximum(1, size - 1)  # the larger side, per byte received
            between = side * (reach.nodes - 1) / reach.nodes / reach.local * inter.seconds_per_byte(collective)
            inside = (reach.local > 1) * intra.seconds_per_byte(collective)
            across = inter.latency_us + times * ((reach.nodes - 1) * inter.hop_us + (reach.local - 1) * intra.hop_us)
            latency = np.where(reach.nodes > 1, across, intra.latency_us + times * (size - 1) * intra.hop_us)
            self.costs[key] = np.maximum(between, inside), latency * 1e-6
        return self.costs[key]

    def seconds(self, collective: str, axis: str, received: Any) -> Any:
        """A collective in which every rank receives that many bytes; none at all for no bytes."""
        per_byte, latency = self.cost(collective, axis)
        return received * per_byte + (np.asarray(received) > 0) * latency

    def inside_node(self, axes: Sequence[str]) -> Any:
        """Whether every group of these axes lies on one node."""
        return np.logical_and.reduce([self.reach[axis].nodes == 1 for axis in axes])


def gemm_seconds(hardware: Hardware, m: Any, n: Any, k: Any, dtype: str) -> Any:
    """A local product: the roof of its arithmetic, less where dims are short, and of the memory it touches."""
    half = hardware.gemm_half
    rate = hardware.flops_per_second(dtype) / ((1 + half / m) * (1 + half / n) * (1 + half / k))
    touched = (m * k + k * n + m * n) * DTYPES[dtype] / (hardware.memory_gbs * 1e9)
    return np.maximum(2.0 * m * n * k / rate, touched) + hardware.launch_us * 1e-6


@dataclass(frozen=True)
class Time:
    """Seconds of a step: of the `total`, `gemm` multiplies, `elementwise` activates and adds up, `exposed` waits."""

    total: Any
    gemm: Any
    elementwise: Any
    communication: Any

    @property
    def exposed(self) -> Any:
        return self.total - self.gemm - self.elementwise

    def __add__(self, other: Time) -> Time:
        return Time(
            self.total + other.total,
            self.gemm + other.gemm,
            self.elementwise + other.elementwise,
            self.communication + other.communication,
        )


@dataclass(frozen=True)
class Work:
    """What does not depend on the order of the axes: the messages of a step, its products and its passes over memory.

    `messages` maps (product, phase, tensor) to the (collective, axis, bytes) that move it, one after another.
    """

    hardware: Hardware
    messages: dict[tuple[str, str, str], list[tuple[str, str, Any]]]
    gemms: dict[str, Any]
    elementwise: Any

    @classmethod
    def of(
        cls, block: Block, g: Grids, hardware: Hardware, dtype: str, regather_a: Any = 0, regather_b: Any = 0
    ) -> Work:
        itemsize = DTYPES[dtype]
        moved: dict[tuple[str, str, str], list[tuple[str, str, Any]]] = {}
        for message in messages(block, g, regather_a, regather_b):
            product, tensor = message.tensor.split()
            entry = (message.collective, message.axis, message.elements * float(itemsize))
            moved.setdefault((product, message.phase, tensor), []).append(entry)
        products = {
            name: gemm_seconds(hardware, *shape, dtype)
            for name, shape in zip(("up", "down"), gemms(block, g), strict=True)
        }
        s = padded(block, g)
        # Forward reads and writes the activations once, backward thrice; a reduction reads p parts and writes one.
        reduced = (s.tokens * s.up * g.x + 2 * s.tokens * s.hidden * g.y) / g.ranks
        touched = (4 * (s.up + s.inner) * s.tokens / g.ranks + reduced) * itemsize
        return cls(hardware, moved, products, touched / (hardware.memory_gbs * 1e9))

    def time(self, network: Network, chunks: int = 1) -> Time:
        """Forward and backward of the block.

        Args:
            chunks: pieces into which activations are cut so that their collectives run beside the products; 1 is what
                the executor does where it does not overlap.
        """
        total: Any = self.elementwise
        communication: Any = 0.0
        for name, gemm in self.gemms.items():
            t = {}
            for phase, tensor in PHASES:
                seconds = sum(network.seconds(*entry) for entry in self.messages[name, phase, tensor])
                t[phase, tensor] = seconds
                communication = communication + seconds
            # Two gathers in flight share the rank's links: their times add up.
            forward = overlapped(chunks, self.hardware, gemm, t["forward", "A"], t["forward", "C"])
            dgrad = overlapped(chunks, self.hardware, gemm, t["dgrad", "dC"])
            wgrad = np.maximum(t["dgrad", "dA"], t["wgrad", "A"] + gemm)
            total = total + t["forward", "B"] + forward + t["dgrad", "B"] + dgrad + wgrad + t["wgrad", "dB"]
        return Time(total, 3 * sum(self.gemms.values()), self.elementwise, communication)


PHASES = (
    ("forward", "A"), ("forward", "B"), ("forward", "C"), ("dgrad", "dC"), ("dgrad", "B"), ("dgrad", "dA"),
    ("wgrad", "A"), ("wgrad", "dB"),
)  # fmt: skip


def overlapped(chunks: int, hardware: Hardware, gemm: Any, *communication: Any) -> Any:
    """A product and the collectives before and after it, cut into chunks that pass through all of them in turn."""
    if chunks == 1:
        return gemm + sum(communication)
    longest = np.maximum.reduce([np.asarray(gemm + 0.0), *map(np.asarray, communication)])
    rest = gemm + sum(communication) - longest
    fixed = (chunks - 1) * (hardware.launch_us + hardware.intra.latency_us) * 1e-6
    return np.minimum(longest + rest / chunks + fixed, gemm + sum(communication))
