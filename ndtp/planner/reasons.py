"""Why a grid: one sentence, from the same numbers that ranked it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ndtp.planner import block_cost
from ndtp.planner.block_cost import Grids

if TYPE_CHECKING:
    from ndtp.planner.search import GridPlan

SOURCES = {
    "x": "activations inside the block, over x",
    "y": "activations outside the block, over y",
    "z": "weights, over z",
    "dp": "weight gradients, over dp",
}


def why(plan: GridPlan) -> str:
    """How the volume compares with 1D's, where it comes from, what is waited for, and what was paid for memory."""
    request = plan.request
    if request.ranks == 1:
        return "One rank moves nothing."
    parts = [f"{plan.kind} receives {mib(plan.volume_bytes)} a step and rank, {against_1d(plan)}"]
    axis, share = largest_part(plan)
    parts.append(f"{share:.0%} of it {SOURCES[axis]}")
    waited = plan.exposed_ms / plan.step_ms
    parts.append(f"{waited:.0%} of the step waits for it on {request.hardware.name}")
    if plan.regather:
        operands = " and ".join({"a": "activations", "b": "weights"}[operand] for operand in plan.regather)
        parts.append(f"backward gathers {operands} again to save memory")
    if plan.pad:
        parts.append("sizes are padded")
    return "; ".join(parts) + "."


def mib(count: float) -> str:
    return f"{count / 2**20:.3g} MiB" if count < 1000 * 2**20 else f"{count / 2**30:.3g} GiB"


def against_1d(plan: GridPlan) -> str:
    """Against the better of splitting everything over y (Megatron's 1D) or over x."""
    volume = min(_total(plan, Grids(1, 1, *pair)) for pair in ((1, plan.request.ranks), (plan.request.ranks, 1)))
    if plan.volume_bytes == volume:
        return "as 1D does" if not plan.kind.startswith("1D") or "+" in plan.kind else "the 1D optimum"
    times = volume / max(1, plan.volume_bytes)
    change = f"{abs(1 / times - 1):.0%} {'less' if times > 1 else 'more'}" if times < 2 else f"{times:.3g} times less"
    return f"{change} than 1D's {mib(volume)}"


def largest_part(plan: GridPlan) -> tuple[str, float]:
    """The axis that carries the most, and its share."""
    g = Grids(*(plan.grid[axis] for axis in block_cost.AXES))
    by_axis: dict[str, int] = dict.fromkeys(block_cost.AXES, 0)
    for block in plan.request.blocks:
        for message in block_cost.messages(block, g, int("a" in plan.regather), int("b" in plan.regather)):
            by_axis[message.axis] += int(message.elements)
    axis = max(by_axis, key=lambda name: by_axis[name])
    return axis, by_axis[axis] / max(1, sum(by_axis.values()))


def _total(plan: GridPlan, g: Grids) -> int:
    request = plan.request
    return int(sum(block_cost.volume(block, g) for block in request.blocks)) * request.itemsize * request.layers
