"""What a profile says of one grid's links and products, as `chunks="auto"` takes it.  Pure."""

from __future__ import annotations

from math import prod

from ndtp.algebra.grid import Grid
from ndtp.planner.hardware import COLLECTIVES, Hardware
from ndtp.planner.time_model import Reach, cost_of
from ndtp.schedule.chunk_choice import Speeds


def speeds_of(hardware: Hardware, grid: Grid, dtype: str) -> Speeds | None:
    """Of the axes of a grid whose ranks fill node by node; None where the profile has no rate for the dtype."""
    if dtype not in hardware.tflops:
        return None
    latency, per_byte = {}, {}
    for i, (axis, size) in enumerate(zip(grid.names, grid.shape, strict=True)):
        reach = Reach.of(size, prod(grid.shape[i + 1 :]), grid.num_ranks, hardware.ranks_per_node)
        for collective in COLLECTIVES:
            costs = cost_of(hardware, collective, size, reach)
            per_byte[collective, axis], latency[collective, axis] = map(float, costs)
    per_flop = 1 / hardware.flops_per_second(dtype)
    return Speeds(latency, per_byte, per_flop, hardware.launch_us * 1e-6, hardware.contention)
