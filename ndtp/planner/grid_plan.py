"""`GridPlan`: a grid for a request, what it costs, and why it: one sentence, from the same numbers that ranked it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ndtp.algebra import html
from ndtp.algebra.grid import Grid
from ndtp.planner import block_cost
from ndtp.planner.fields import in_digits
from ndtp.planner.grids import Grids, grids_of
from ndtp.planner.request import Request

SOURCES = {
    "x": "activations inside the block, over x",
    "y": "activations outside the block, over y",
    "z": "weights, over z",
    "dp": "weight gradients, over dp",
    "data": "weight gradients, over dp and e",
    "experts": "rows on their way to experts and back",
    "counts": "numbers of rows",
    "rows": "gradients of routers",
    "scores": "what routers say, for every rank",
    "gates": "gradients of what routers say",
}


@dataclass(frozen=True)
class GridPlan:
    """A grid for a request, and what a training step costs on it, per rank.

    Attributes:
        grid: axes in rank order, slowest first: what `ndtp.ProcessGrid` takes.
        scheme: the scheme of `ndtp.nn.MLP` and `ndtp.parallelize` that uses the grid so.
        kind: what the field calls it: 1D, 2D, 3D, FSDP, data parallel.
        regather: operands that backward gathers again, to save memory.
        volume_bytes: received in forward and backward.
        memory_bytes: weights, gradients, optimizer state, activations and the largest temporary operands.
        bound_ratio: `volume_bytes` over twice the sum of the products' lower bounds, a reference: it assumes that
            gathered tensors are kept.
        step_ms: predicted, of which `gemm_ms` compute and `exposed_ms` wait for communication.
        expert_axis: the axes that split experts; None where there are none.
    """

    grid: Grid
    scheme: str
    kind: str
    regather: tuple[str, ...]
    pad: bool
    volume_bytes: int
    memory_bytes: int
    bound_ratio: float
    step_ms: float
    gemm_ms: float
    exposed_ms: float
    comm_ms: float
    request: Request = field(repr=False)
    expert_axis: tuple[str, ...] | None = None

    def _repr_html_(self) -> str:
        rows = {
            "grid": self.grid, "scheme": f"{self.scheme} ({self.kind})", "step": f"{self.step_ms:,.3f} ms predicted",
            "products": f"{self.gemm_ms:,.3f} ms", "exposed communication": f"{self.exposed_ms:,.3f} ms",
            "received": f"{self.volume_bytes / 2**20:,.1f} MiB a step and rank",
            "memory": f"{self.memory_bytes / 2**20:,.0f} MiB a rank", "why": self.why,
        }  # fmt: skip
        return html.table(("plan", ""), rows.items())

    @property
    def grid_text(self) -> str:
        """The axes of more than one rank, and what is gathered again."""
        axes = self.grid.nontrivial(self.grid.names)
        text = " ".join(f"{axis}={self.grid[axis]}" for axis in axes) or "one rank"
        folded = [axis for axis in self.expert_axis or () if axis != "e"]
        text += f" experts {' '.join(self.expert_axis or ())}" * bool(folded)
        return text + (f" regather {''.join(self.regather)}" if self.regather else "")

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `ndtp.nn.MLP` and `ndtp.parallelize`; with experts for `ndtp.nn.MoE` and the latter."""
        sent = {} if self.request.wire is None else {"wire": str(self.request.wire)}
        if self.expert_axis is not None:
            again = {"regather": self.regather} if self.regather else {}
            return {"scheme": self.scheme, "expert_axis": self.expert_axis, **again, **sent}
        return {"scheme": self.scheme, "regather": self.regather, "pad": self.pad, **sent}

    @property
    def why(self) -> str:
        """The reasons for the plan: its volume beside 1D's, where that comes from, what is waited for, and the price
        of memory.
        """
        request = self.request
        if request.ranks == 1:
            return "One rank moves nothing."
        parts = [f"{self.kind} receives {_mib(self.volume_bytes)} a step and rank, {_against_1d(self)}"]
        axis, share = _largest_part(self)
        parts.append(f"{share:.0%} of it {SOURCES[axis]}")
        if self.expert_axis is not None:
            parts.append(_inside_experts(self))
        waited = self.exposed_ms / self.step_ms
        parts.append(f"{waited:.0%} of the step waits for it on {request.hardware.name}")
        if request.wire is not None:
            parts.append(f"tensors travel as {request.wire}")
        if self.regather:
            operands = " and ".join({"a": "activations", "b": "weights"}[operand] for operand in self.regather)
            parts.append(f"backward gathers {operands} again to save memory")
        if self.pad:
            parts.append("sizes are padded")
        return "; ".join(parts) + "."

    def as_dict(self) -> dict[str, Any]:
        """The form of `ndtp plan --json`; the keys of `grid` are in rank order, slowest first."""
        return {
            "grid": {axis: self.grid[axis] for axis in self.grid},
            "volume_bytes": self.volume_bytes,
            "step_ms": self.step_ms,
            "memory_bytes": self.memory_bytes,
            "bound_ratio": self.bound_ratio,
            "why": self.why,
        }


def _inside_experts(plan: GridPlan) -> str:
    over = plan.expert_axis or ()
    inside = [axis for axis in ("x", "y") if plan.grid[axis] > 1 and axis not in over]
    where = f"experts lie over {' '.join(over)}" if over else "every rank has a part of every expert"
    if not inside:
        return f"{where}, no tensor parallelism inside of them" if over else "every rank has all experts"
    return f"{where}, and inside of each tensors over {' '.join(inside)}"


def _mib(count: float) -> str:
    return f"{in_digits(count / 2**20)} MiB" if count < 1000 * 2**20 else f"{in_digits(count / 2**30)} GiB"


def _against_1d(plan: GridPlan) -> str:
    """Against the better of splitting everything over y (Megatron's 1D) or over x."""
    volume = min(_total(plan, Grids(1, 1, *pair)) for pair in ((1, plan.request.ranks), (plan.request.ranks, 1)))
    if plan.volume_bytes == volume:
        return "as 1D does" if not plan.kind.startswith("1D") or "+" in plan.kind else "the 1D optimum"
    times = volume / max(1, plan.volume_bytes)
    share = f"{abs(1 / times - 1):.0%} {'less' if times > 1 else 'more'}"
    change = share if times < 2 else f"{in_digits(times)} times less"
    return f"{change} than 1D's {_mib(volume)}"


def _largest_part(plan: GridPlan) -> tuple[str, float]:
    """The axis that carries the most, and its share."""
    g = grids_of(plan.grid, plan.expert_axis)
    by_axis: dict[str, int] = dict.fromkeys(SOURCES, 0)
    for block in plan.request.blocks:
        for message in block_cost.messages(block, g, int("a" in plan.regather), int("b" in plan.regather)):
            by_axis[message.axis] += block.times * int(message.num_bytes(plan.request.itemsize, plan.request.wire))
    axis = max(by_axis, key=lambda name: by_axis[name])
    return axis, by_axis[axis] / max(1, sum(by_axis.values()))


def _total(plan: GridPlan, g: Grids) -> int:
    request = plan.request
    size = request.itemsize
    moved = (block.times * int(block_cost.num_bytes(block, g, size, wire=request.wire)) for block in request.blocks)
    return sum(moved) * request.layers
