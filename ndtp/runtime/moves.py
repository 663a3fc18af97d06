"""A tensor on its way through the steps of a relayout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from ndtp.algebra.steps import Step

if TYPE_CHECKING:
    from ndtp.algebra.matmul_plan import MatMulPlan
    from ndtp.collectives.collectives import Handle
    from ndtp.runtime.process_grid import ProcessGrid


class Move:
    """`start` sends a tensor off as far as it goes without waiting; `finish` brings it home.

    The operands and results of a product of matrices go by columns without a copy: an operand that is gathered along
    its last dim arrives as blocks of columns [p, rows, columns / p], and a result that is scattered along it leaves so.

    Args:
        op: what errors and profiles call it, such as ("mlp.up", "A").
        phase: "forward", "dgrad" or "wgrad".
        part: which chunk of how many, such as "2/4", for profiles.
        out: where the last step puts its result, if it is a collective.
        blocks: "arrive" or "leave" if the tensor does, where its last step or first step is such.
        hold: stop before an all-reduce, until `release_hold`.
        ahead: it is started for a product yet to come.
    """

    def __init__(
        self,
        tensor: Tensor,
        steps: Sequence[Step],
        mesh: ProcessGrid,
        op: tuple[str, ...],
        phase: str,
        part: str = "",
        out: Tensor | None = None,
        blocks: str = "",
        hold: bool = False,
        ahead: bool = False,
    ) -> None:
        self.tensor: Tensor | None = tensor
        self.steps, self.mesh, self.op, self.phase = steps, mesh, op, phase
        self.part, self.out, self.blocks, self.hold, self.ahead = part, out, blocks, hold, ahead
        self.taken = 0
        self.handle: Handle | None = None

    def start(self) -> Move:
        """Take the local steps and start the first collective."""
        while self.handle is None and self.taken < len(self.steps):
            if self.is_held:
                break
            step, tensor = self.steps[self.taken], self.tensor
            assert tensor is not None
            self.taken += 1
            if step.kind == "slice":
                self.tensor = _slice(tensor, step, self.mesh)
            else:
                self.tensor = None  # the collective holds what it needs of it
                last = self.taken == len(self.steps)
                self.handle = self.mesh.collectives.start(
                    step,
                    tensor,
                    self.op,
                    self.phase,
                    part=self.part,
                    out=self.out if last else None,
                    blocks=(self.blocks == "arrive" and last and self.out is None and gathers_columns(step))
                    or (self.blocks == "leave" and self.taken == 1 and scatters_columns(step)),
                    ahead=self.ahead,
                )
                self.ahead = False  # further steps follow where it is waited for
        return self

    def finish(self) -> Tensor:
        """Run all steps that are left, up to one that is held back, and return the tensor."""
        while self.start().handle is not None:
            handle, self.handle = self.handle, None
            self.tensor = handle.wait()  # type: ignore[union-attr]
        assert self.tensor is not None
        return self.tensor

    def start_next(self) -> None:
        """Wait for the collective under way and start the next one, if there is one and it is not held back."""
        if self.handle is not None and self.taken < len(self.steps):
            handle, self.handle = self.handle, None
            self.tensor = handle.wait()
            self.start()

    @property
    def is_held(self) -> bool:
        """Whether an all-reduce comes next, and is held back."""
        return self.hold and self.taken < len(self.steps) and self.steps[self.taken].kind == "all_reduce"

    def add(self, other: Tensor) -> None:
        """Add to what is held back."""
        self.tensor = self.finish() + other

    def take(self) -> Tensor:
        """`finish`, and keep no reference to the result: who gets it may be the only one to have it."""
        tensor, self.tensor = self.finish(), None
        return tensor

    def resume(self, tensor: Tensor) -> Move:
        """Go on with another tensor from where `take` left off."""
        self.tensor = tensor
        return self

    def release_hold(self) -> Move:
        self.hold = False
        return self


def move_of(
    plan: MatMulPlan,
    name: str,
    tensor: Tensor,
    mesh: ProcessGrid,
    phase: str,
    part: str = "",
    out: Tensor | None = None,
    hold: bool = False,
    ahead: bool = False,
) -> Move:
    """The move of one of a plan's tensors, by its name in `plan.relayouts`."""
    blocks = ""
    if is_matrix(plan):
        is_operand = name in ("A", "B", "dC")
        blocks = "leave" if not is_operand else "arrive" if mesh.gemm.takes_blocks(tensor.dtype) else ""
    return Move(tensor, plan.relayouts[name], mesh, (plan.name, name), phase, part, out, blocks, hold, ahead)


def is_matrix(plan: MatMulPlan) -> bool:
    """Whether a product has no batch dims."""
    return len(plan.c_letters) == 2


def gathers_columns(step: Step) -> bool:
    """Whether a step of a matrix is a gather along its last dim."""
    return step.kind == "all_gather" and step.dim == 1


def scatters_columns(step: Step) -> bool:
    """Whether a step of a matrix is a reduce-scatter along its last dim."""
    return step.kind == "reduce_scatter" and step.dim == 1


@lru_cache(maxsize=4096)
def blocks_of_result(plan: MatMulPlan, name: str) -> int:
    """Into how many blocks of columns a product falls, for the scatter that follows."""
    steps = plan.relayouts[name]
    return plan.grid.size(steps[0].axes) if is_matrix(plan) and steps and scatters_columns(steps[0]) else 1


def _slice(tensor: Tensor, step: Step, mesh: ProcessGrid) -> Tensor:
    dim = step.dim or 0
    size = tensor.shape[dim] // mesh.grid.size(step.axes)
    return tensor.narrow(dim, mesh.grid.index(mesh.rank, step.axes) * size, size)
