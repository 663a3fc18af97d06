"""The executor: runs the tasks of a schedule on this rank's tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ndtp.contraction import MatMulPlan
from ndtp.relayout import Step
from ndtp.schedule import RowChunks, Task, backward_tasks, forward_tasks
from ndtp.spans import span

if TYPE_CHECKING:
    from ndtp.collectives import Handle
    from ndtp.process_grid import ProcessGrid

Product = Callable[[int | None], Tensor]


class Move:
    """A tensor on its way through the steps of a relayout.

    `start` sends it off as far as it goes without waiting; `finish` brings it home.
    """

    def __init__(
        self, tensor: Tensor, steps: Sequence[Step], mesh: ProcessGrid, op: tuple[str, ...], phase: str, part: str = ""
    ) -> None:
        self.tensor, self.mesh, self.op, self.phase, self.part = tensor, mesh, op, phase, part
        self.steps = iter(steps)
        self.handle: Handle | None = None

    def start(self) -> Move:
        """Take the local steps and start the first collective."""
        if self.handle is None:
            for step in self.steps:
                if step.kind != "slice":
                    self.handle = self.mesh.collectives.start(step, self.tensor, self.op, self.phase, self.part)
                    break
                self.tensor = _slice(self.tensor, step, self.mesh)
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
    """One product of one plan on one grid: forward once, backward as often as autograd asks.

    Args:
        sizes: letter -> global size.
        weight: B as it was passed: what is known about the order of weights is known by it.
    """

    def __init__(self, plan: MatMulPlan, mesh: ProcessGrid, sizes: dict[str, int], weight: Tensor) -> None:
        self.plan, self.mesh, self.weight = plan, mesh, weakref.ref(weight)
        self.rows = RowChunks.of(plan, sizes, plan.chunks)
        self._moves: dict[tuple[str, int | None], Move] = {}
        self._tensors: dict[tuple[str, int | None], Tensor] = {}

    def move(self, name: str, tensor: Tensor, phase: str, chunk: int | None = None) -> Move:
        return Move(tensor, self.plan.relayouts[name], self.mesh, (self.plan.name, name), phase, self._part(chunk))

    def _part(self, chunk: int | None) -> str:
        return "" if chunk is None or self.rows.count == 1 else f"{chunk + 1}/{self.rows.count}"

    def forward(
        self, a_shard: Tensor, b_shard: Tensor, bias: Tensor | None, keep_a: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns C as it is stored, and A (if `keep_a`) and B as they were multiplied, A's rows chunk by chunk."""
        weight = self.weight()
        if self.plan.gathers_b and weight is not None and weight.is_leaf and weight.dtype == b_shard.dtype:
            ahead = self.mesh.prefetch.take(weight, self.plan)
            if ahead is not None:
                self._moves["B", None] = ahead
        products: dict[str, Product] = {
            "C": lambda i: self.mesh.gemm.forward(self.plan, self._tensors["A", i], self._tensors["B", None])
        }
        self._run(forward_tasks(self.rows.count), {"A": a_shard, "B": b_shard}, products, "forward")
        a = self._joined("A", self.rows.a_dim) if keep_a and "a" not in self.plan.regather else None
        b, c = self._tensors["B", None], self._pasted("C")
        self._tensors.clear()
        return c if bias is None else c + self.move("bias", bias, "forward").finish(), a, b

    def backward(
        self, grad_shard: Tensor, a: Tensor | None, b: Tensor | None, bias: bool
    ) -> tuple[Tensor | None, Move | None, Move | None]:
        """dA as A is stored, and the moves of dB and dbias, started but not waited for.

        `a` is given where dB is wanted, `b` where dA is: gathered, or as stored where the plan gathers it again.
        """
        plan, tensors = self.plan, self._tensors
        tensors.clear()  # an earlier backward may have ended in an exception
        self._moves.clear()
        tasks = backward_tasks(self.rows.count, b is not None, a is not None, bias, plan.regather)
        stored = {"dC": grad_shard}
        for name, operand in (("A", a), ("B", b)):
            if operand is not None and name.lower() in plan.regather:
                stored[name] = operand
            elif operand is not None:
                tensors[name, None] = operand

        def wgrad(_: int | None) -> Tensor:
            kept = tensors.get(("A", None))
            left = self._joined("A", self.rows.a_dim) if kept is None else kept
            return self.mesh.gemm.wgrad(plan, self._grad(), left)

        products: dict[str, Product] = {
            "dA": lambda i: self.mesh.gemm.dgrad(plan, tensors["dC", i], tensors["B", None]),
            "dB": wgrad,
            "dbias": lambda _: self._grad().sum(tuple(range(grad_shard.dim() - 1))),
        }
        self._run(tasks, stored, products, "dgrad" if b is not None else "wgrad")
        db, dbias = self._moves.pop(("dB", None), None), self._moves.pop(("dbias", None), None)
        da = self._pasted("dA") if b is not None else None
        tensors.clear()
        return da, db, dbias

    def _run(
        self,
        tasks: Iterable[Task],
        stored: dict[str, Tensor],
        products: dict[str, Product],
        phase: str,
    ) -> None:
        for task in tasks:
            key = task.tensor, task.chunk
            if task.action == "start" and key not in self._moves:
                tensor = self._tensors.pop(key, None)  # a product on its way out, or else a stored tensor on its way in
                if tensor is None:
                    tensor = stored[task.tensor]
                    tensor = tensor if task.chunk is None else self.rows.cut(tensor, task.tensor, task.chunk)
                own_phase = {"dB": "wgrad", "dbias": "wgrad", "A": phase if phase == "forward" else "wgrad"}
                self._moves[key] = self.move(task.tensor, tensor, own_phase.get(task.tensor, phase), task.chunk).start()
            elif task.action == "wait":
                self._tensors[key] = self._moves.pop(key).finish()
            elif task.action == "prefetch":
                if (weight := self.weight()) is not None:
                    self.mesh.prefetch.start(weight, self.mesh)
            elif task.action == "multiply":
                with span(self.mesh, "gemm", task.tensor, self._part(task.chunk), self.plan.name):
                    self._tensors[key] = products[task.tensor](task.chunk)

    def _grad(self) -> Tensor:
        """The whole gathered dC, rows chunk by chunk."""
        if ("dC", None) not in self._tensors:
            self._tensors["dC", None] = self._joined("dC", self.rows.c_dim)
        return self._tensors["dC", None]

    def _joined(self, name: str, dim: int) -> Tensor:
        """Chunks of rows in the order of the chunks: any one order serves a sum over rows."""
        chunks = [self._tensors.pop((name, i)) for i in range(self.rows.count)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)

    def _pasted(self, name: str) -> Tensor:
        """Chunks of rows, put in the order in which the shard stores them."""
        chunks = [self._tensors.pop((name, i)) for i in range(self.rows.count)]
        if len(chunks) == 1:
            return chunks[0]
        dim, _ = self.rows.place(name)
        shape = list(chunks[0].shape)
        shape[dim] *= self.rows.count
        shard = chunks[0].new_empty(shape)
        for i, chunk in enumerate(chunks):
            self.rows.paste(shard, name, i, chunk)
        return shard
