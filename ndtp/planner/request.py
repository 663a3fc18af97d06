"""`Request`: what is to be planned, and what may be asked.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ndtp.algebra.wire import Wire
from ndtp.dtypes import SIZES
from ndtp.errors import GridError
from ndtp.planner import block_cost
from ndtp.planner.block_cost import AXES, EXPERT_AXES, LARGEST_SIZE, Block
from ndtp.planner.fields import Entries, Kind, Number, Word
from ndtp.planner.hardware import MAX_RANKS, Hardware

MIB, GIB = 2**20, 2**30
OBJECTIVES = ("time", "volume", "memory")
SIZE = Number(1, LARGEST_SIZE, integer=True)
AXIS = Number(1, MAX_RANKS, integer=True)

# What may be asked.  Each chunk is a task that the model replays, which bounds them; layers are multiplied by.
FIELDS: dict[str, Kind] = {
    "ranks": AXIS,
    "layers": Number(1, 10**6, integer=True),
    "chunks": Number(1, 1024, integer=True),
    "objective": Word(OBJECTIVES),
    "dtype": Word(tuple(SIZES)),
    "optimizer": Word(tuple(block_cost.OPTIMIZERS)),
}
TIMES = FIELDS["layers"]
OPTIONAL: dict[str, Kind] = {
    "memory_limit_gib": Number(1e-6, 1e12),
    "experts": Number(1, 10**6, integer=True), "heads": SIZE, "kv_heads": SIZE, "head_size": SIZE, "limit": SIZE,
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A request to the planner: the blocks, the ranks, the hardware and the constraints.

    Attributes:
        blocks: the blocks of a layer, which all run on one grid.
        layers: how often the sequence of blocks is repeated, each block as often as it says.
        dtype, objective, ...: as for `ndtp.plan`.

    Raises:
        GridError: a size that is none, or a word that is not one of those known.
    """

    blocks: tuple[Block, ...]
    ranks: int
    hardware: Hardware
    _: KW_ONLY
    layers: int = 1
    dtype: str = "bfloat16"
    objective: str = "time"
    optimizer: str = "adamw"
    memory_limit_gib: float | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)
    tp_within_node: bool = False
    pad: bool = True
    chunks: int = 1
    wire: Wire | None = None
    captured: bool = True

    def __post_init__(self) -> None:
        check_request(self)

    @property
    def main(self) -> Block:
        """The block that names the sizes in what is said: the last one of two products."""
        return next((block for block in reversed(self.blocks) if block.inner), self.blocks[-1])

    @property
    def has_experts(self) -> bool:
        return any(block.experts for block in self.blocks)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the request's grids."""
        return EXPERT_AXES if self.has_experts else AXES

    @property
    def itemsize(self) -> int:
        return SIZES[self.dtype]

    @property
    def bound(self) -> float:
        """Bytes of a step: twice the sum of the forward bounds of all products."""
        return 2 * self.layers * self.itemsize * sum(block.lower_bound(self.ranks) for block in self.blocks)


def check_arguments(sizes: Mapping[str, object], optional: Mapping[str, Any]) -> None:
    """Check arguments of a plan.

    Raises:
        GridError: a size that is not a positive integer, or an optional one that is neither that nor None.
    """
    for name, size in sizes.items():
        SIZE.check("plan", name, size)
    for name, value in optional.items():
        if value is not None:
            OPTIONAL[name].check("plan", name, value)
    heads, hidden = optional.get("heads"), sizes.get("hidden")
    if heads is not None and hidden is not None and optional.get("head_size") is None and heads > hidden:
        raise GridError(f"plan: heads={heads} of hidden={hidden} leave no size to a head; it must be at most hidden")


def check_request(request: Request) -> None:
    """Check a request.

    Raises:
        GridError: a size that is not a positive integer, or a word that is not known.
    """
    for block in request.blocks:
        inner = {"ffn": block.inner} if block.inner else {}
        check_arguments({"tokens": block.tokens, "hidden": block.hidden, **inner}, {})
        TIMES.check("plan", f"times of {block.name}", block.times)
        for size in (*block.outs, *block.heads, block.looked_up or 1):
            SIZE.check("plan", f"a size of {block.name}", size)
        if block.experts:
            check_arguments({}, {"experts": block.experts})
            Number(1, block.experts, integer=True).check("plan", "top_k", block.top_k)
    for name, kind in (*FIELDS.items(), ("fixed", Entries(Word(request.axes), AXIS, empty=True))):
        kind.check("plan", name, getattr(request, name))
    check_arguments({}, {"memory_limit_gib": request.memory_limit_gib})
    request.hardware.flops_per_second(request.dtype)
