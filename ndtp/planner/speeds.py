"""The speeds of a grid's links and products in a profile, in the form that `chunks="auto"` takes. Pure."""

from __future__ import annotations

from math import prod

import numpy as np

from ndtp.algebra.grid import Grid
from ndtp.planner.hardware import COLLECTIVES, Hardware
from ndtp.planner.time_model import Reach, cost_of
from ndtp.schedule.chunk_choice import LinkSpeed, Speeds


def speeds_of(hardware: Hardware, grid: Grid, dtype: str) -> Speeds | None:
    """Return the speeds of a grid whose ranks fill node by node; None where the profile has no rate for the dtype."""
    if dtype not in hardware.tflops:
        return None
    links, across = {}, set()
    for i, (axis, size) in enumerate(zip(grid.names, grid.shape, strict=True)):
        reach = Reach.of(size, prod(grid.shape[i + 1 :]), grid.num_ranks, hardware.ranks_per_node)
        if np.any(reach.nodes > 1):
            across.add(axis)
        for collective in COLLECTIVES:
            per_byte, latency = map(float, cost_of(hardware, collective, size, reach))
            links[collective, axis] = LinkSpeed(latency, per_byte)
    per_flop = 1 / hardware.flops_per_second(dtype)
    launch = hardware.launch_us * 1e-6
    return Speeds(links, per_flop, launch, hardware.contention, across=frozenset(across), host=hardware.host_lane)
