"""The executor: runs a plan's relayouts and local products, forward, dgrad and wgrad.

The two gathers of a phase fly together, and dgrad's collectives fly while wgrad's GEMM runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ndtp import gemm
from ndtp.contraction import MatMulPlan
from ndtp.relayout import Step

if TYPE_CHECKING:
    from ndtp.collectives import Handle
    from ndtp.process_grid import ProcessGrid


class Move:
    """A tensor on its way through the steps of a relayout.

    `start` sends it off as far as it goes without waiting; `finish` brings it home.
    """

    def __init__(self, tensor: Tensor, steps: Sequence[Step], mesh: ProcessGrid, op: str, phase: str) -> None:
        self.tensor, self.steps, self.mesh, self.op, self.phase = tensor, list(steps), mesh, op, phase
        self.handle: Handle | None = None

    def start(self) -> Move:
        """Take the local steps and start the first collective."""
        while self.steps and self.handle is None:
            step = self.steps.pop(0)
            if step.kind == "slice":
                self.tensor = _slice(self.tensor, step, self.mesh)
            else:
                self.handle = self.mesh.collectives.start(step, self.tensor, self.op, self.phase)
        return self

    def finish(self) -> Tensor:
        """Run all steps that are left and return the tensor."""
        while self.start().handle is not None:
            handle, self.handle = self.handle, None
            self.tensor = handle.wait()  # type: ignore[union-attr]
        return self.tensor


def _slice(tensor: Tensor, step: Step, mesh: ProcessGrid) -> Tensor:
    dim = step.dim or 0
    size = tensor.shape[dim] // mesh.grid.size(step.axes)
    return tensor.narrow(dim, mesh.grid.index(mesh.rank, step.axes) * size, size)


class Execution:
    """One product of one plan on one grid."""

    def __init__(self, plan: MatMulPlan, mesh: ProcessGrid) -> None:
        self.plan, self.mesh = plan, mesh

    def move(self, name: str, tensor: Tensor, phase: str) -> Move:
        return Move(tensor, self.plan.relayouts[name], self.mesh, f"{self.plan.name} {name}", phase)

    def forward(self, a_shard: Tensor, b_shard: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns C as it is stored, and A and B as they were multiplied."""
        # B first: a weight does not depend on the layer before, so a schedule of several layers can start it earlier.
        b_move = self.move("B", b_shard, "forward").start()
        a_move = self.move("A", a_shard, "forward").start()
        b, a = b_move.finish(), a_move.finish()
        c = self.move("C", gemm.forward(self.plan, a, b), "forward").finish()
        return c if bias is None else c + self.move("bias", bias, "forward").finish(), a, b

    def backward(
        self, grad_shard: Tensor, a: Tensor | None, b: Tensor | None, bias: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dA, dB and dbias as A, B and the bias are stored.

        `a` is given where dB is wanted, `b` where dA is: gathered, or as stored where the plan gathers it again.
        """
        phase = "dgrad" if b is not None else "wgrad"
        b_move = self.move("B", b, phase).start() if b is not None and "b" in self.plan.regather else None
        grad = self.move("dC", grad_shard, phase).finish()
        moves: list[Move | None] = [None, None, None]
        if b is not None:
            moves[0] = self.move("dA", gemm.dgrad(self.plan, grad, b_move.finish() if b_move else b), "dgrad").start()
        if a is not None:
            a = self.move("A", a, "wgrad").finish() if "a" in self.plan.regather else a
            moves[1] = self.move("dB", gemm.wgrad(self.plan, grad, a), "wgrad").start()
        if bias:
            moves[2] = self.move("dbias", grad.sum(tuple(range(grad.dim() - 1))), "wgrad").start()
        da, db, dbias = (move.finish() if move else None for move in moves)
        return da, db, dbias
