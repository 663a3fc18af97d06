"""The host of a device: for how long it works to issue each task of a program, which streams run when they can.  Pure.

A step is limited by the host where it issues tasks more slowly than the device runs them.  A CUDA graph that holds the
step issues it in one launch: then there is no such lane.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class HostLane:
    """Seconds for which the host works at each task of a program.

    Attributes:
        start: a collective, its call included.
        wait: to have a stream wait for a collective.
        multiply, activate: a product, or other work on the device, its launch included.
        gradient: of a weight, that travels, beside its starts: it is waited for at the end of backward.
        chain: a pass of a chain of products, forward or backward: autograd, and finding the program.
    """

    start: float
    wait: float
    multiply: float
    activate: float
    gradient: float
    chain: float

    def __post_init__(self) -> None:
        assert min(self.to_json()) >= 0, self

    def scaled(self, factor: float) -> HostLane:
        """Return the lane of a host that takes `factor` times as long."""
        return HostLane(*(factor * each for each in self.to_json()))

    def to_json(self) -> list[float]:
        """Return the seconds in the order of the fields."""
        return [getattr(self, each.name) for each in fields(self)]


# The library's own work: tasks as `bench/host_lane.py` times them, the rest fitted to whole steps of a quiet machine:
# 620 and 1370 us in 1 and 4 chunks on 2x2x2, 300 and 820 us on x=8 with sequence parallelism; see docs/gpus.md.
OWN = HostLane(*(each * 1e-6 for each in (19.7, 2.5, 4.3, 4.0, 69.0, 88.0)))
# A call of NCCL and a launch of a kernel, as known from others' measurements.
CALL, LAUNCH = 17e-6, 6e-6
EAGER = HostLane(OWN.start + CALL, OWN.wait, OWN.multiply + LAUNCH, OWN.activate + LAUNCH, OWN.gradient, OWN.chain)
