"""Gradients of weights while backward of a chain is bound: whole, or in pieces of rows that go one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ndtp.compute.gemm import joined
from ndtp.runtime import closures
from ndtp.runtime.closures import Get, Run
from ndtp.runtime.moves import is_matrix
from ndtp.runtime.slots import Moving, Slots, letters_of
from ndtp.schedule.tasks import first_deferred

if TYPE_CHECKING:
    from ndtp.collectives.handles import Shape
    from ndtp.compute.gemm import Multiply


class WeightGradients(Slots):
    """The part of `ndtp.runtime.phase.Phase` for "dB" and "dbias"; see `Slots`."""

    def start(self, p: int, name: str, i: int | None) -> None:
        if name == "dB" and i is not None:
            self._start_piece(p, i)
        else:
            super().start(p, name, i)

    def _cut_operand(self, p: int) -> str | None:
        """Return the operand of dB whose columns make pieces of its rows; None where dB goes whole.

        Rows of its pieces are rows of the gradient: nothing on its way cuts or scatters them.
        """
        steps, wire = self.stages[p].plan.relayouts["dB"], self.collectives.wire
        if wire is not None and wire.error_feedback:
            return None  # what is left of a gradient is kept as a whole
        if not steps or any(0 in (step.dim, step.source) or step.kind != "reduce_scatter" for step in steps):
            return None
        return self._rows_operand(p)

    def _rows_operand(self, p: int) -> str | None:
        """Return the operand of dB whose columns are its rows; None where the rows are not cut."""
        plan = self.stages[p].plan
        if not is_matrix(plan) or self.stages[p].held(plan.b_letters)[0] % self.chunks:
            return None
        operands = [self.whole(p, name) for name in ("dC", "A")]
        if any(slot is None or len(self.shapes[slot]) != 2 for slot in operands):
            return None
        return "dC" if plan.b_letters[0] in plan.c_letters else "A"

    def _part(self, p: int, cut: str, start: int, stop: int, blocks: int | None) -> tuple[Multiply, Get, Get]:
        """A product that gives these pieces of dB, and its operands."""
        plan, slots = self.stages[p].plan, {name: self.tensors[p, name, None] for name in ("dC", "A")}
        shapes = {name: self.shapes[slot] for name, slot in slots.items()}
        gets = {name: closures.get(slot) for name, slot in slots.items()}
        dim = letters_of(plan, "dB")[cut == "A"].index(plan.b_letters[0])
        size = shapes[cut][dim] // self.chunks
        shapes[cut] = (*shapes[cut][:dim], (stop - start) * size, *shapes[cut][dim + 1 :])
        gets[cut] = closures.get_part(slots[cut], dim, start * size, (stop - start) * size)
        product = self._gradient(p, shapes["dC"], shapes["A"], blocks)
        return product, gets["dC"], gets["A"]

    def _gradient(self, p: int, grad: Shape, a: Shape, blocks: int | None) -> Multiply:
        """A product that gives dB, or rows of it: as the view of its transpose, where its columns go as rows."""
        one, other, result = letters_of(self.stages[p].plan, "dB")
        if not self.is_transposed(p, "dB"):
            return self.gemm.bound((one, other, result), grad, a, blocks=blocks)
        product = self.gemm.bound((one, other, result[::-1]), grad, a)
        return lambda grad, a: product(grad, a).mT

    def multiply_piece(self, p: int, j: int) -> None:
        if j == 0:
            self.cut_operands[p] = self._cut_operand(p)
        cut = self.cut_operands[p]
        if cut is None:
            if j == 0:
                self._multiply_whole(p)
            return
        plan = self.stages[p].plan
        rows, columns = self.stages[p].held(plan.b_letters)
        blocks = self.blocks_of(p, "dB")
        shape = (rows // self.chunks, columns)
        self.tensors[p, "dB", j] = result = self.slot((blocks, shape[0], columns // blocks) if blocks > 1 else shape)
        self.runs.append(
            closures.multiply_joined(result, *self._part(p, cut, j, j + 1, blocks if blocks > 1 else None))
        )

    def _start_piece(self, p: int, j: int) -> None:
        if self.cut_operands[p] is None:
            if j == 0:
                super().start(p, "dB", None)
            return
        if j == 0:  # the slot of them all, and the shape of the whole
            self.runs, runs = [], self.runs
            self.tensors[p, "dB", None] = self.result_of(p, "dB", 1)
            super().start(p, "dB", None)
            self.runs = runs
        slot, whole, _ = self.moving[p, "dB", None]
        source = self.tensors.pop((p, "dB", j))
        way = self._way(p, "dB", j, source, False)
        height = way.shape[0]
        self.moving[p, "dB", j] = Moving(slot, way, None)
        rows = slice(j * height, (j + 1) * height)
        self.runs.append(closures.start_piece(slot, source, way, whole.shape, rows))

    # ------------------------------------------------------------------------------------------ pieces that come later

    def _multiply_whole(self, p: int) -> None:
        """A gradient that takes no collectives: one product, or two, of which the second may come later."""
        plans = [stage.plan for stage in self.stages]
        waits = self.wanted[0].dgrad and (plans[0].relayouts["dA"] or plans[-1].relayouts["dC"])
        cut = self._rows_operand(p) if p == 0 and waits and not plans[p].relayouts["dB"] else None
        self.runs, runs = [], self.runs
        self.tensors[p, "dB", None] = self.wgrad(p)
        if cut is None:
            self.runs = runs + self.runs
            return
        self.cut_when_deferred = cut
        first = self._rows_of_whole(p, 0, first_deferred(self.chunks))
        self.runs = [*runs, closures.where_deferred(False, self.runs), closures.where_deferred(True, (first,))]

    def _rows_of_whole(self, p: int, start: int, stop: int) -> Run:
        assert self.cut_when_deferred is not None
        slot, shape = self.tensors[p, "dB", None], self.stages[p].held(self.stages[p].plan.b_letters)
        height = shape[0] // self.chunks
        product, one, other = self._part(p, self.cut_when_deferred, start, stop, blocks=1)
        return closures.multiply_rows_of_whole(slot, product, one, other, shape, slice(start * height, stop * height))

    def defer(self, p: int, name: str, j: int | None) -> None:
        """A piece, to the chain that follows; of what goes whole, all that comes later at once."""
        assert j is not None
        operands = [self.tensors.get((p, operand, None)) for operand in ("dC", "A")]
        title = "gemm", "dB", self.part(j), self.stages[p].plan.name
        self.runs, runs = [], self.runs
        if self.cut_operands[p] is not None:
            self.multiply_piece(p, j)
            self._start_piece(p, j)
            needed = [*operands, self.moving[p, "dB", None].slot]
            self.runs = [*runs, closures.defer(self.runs, needed, title)]
        elif self.cut_when_deferred is not None and j == first_deferred(self.chunks):
            rest = (self._rows_of_whole(p, j, self.chunks),)
            needed = [*operands, self.tensors[p, "dB", None]]
            self.runs = [*runs, closures.where_deferred(True, (closures.defer(rest, needed, title),))]
        else:
            self.runs = runs
            return
        self.deferred = p

    def catch_up(self, p: int, name: str, i: int | None) -> None:
        self.runs.append(closures.catch_up)

    # ---------------------------------------------------------------------------------------------------- on their way

    def start_next(self, p: int, name: str, i: int | None) -> None:
        """Start the next collective of a piece, or of the whole when this is the last piece."""
        is_cut = i is not None and self.cut_operands[p] is not None
        moving = self.moving.get((p, "dB", None))
        if moving is not None and moving.way.takes_several and (is_cut or i in (None, self.chunks - 1)):
            self.runs.append(closures.start_next(moving.slot, i if is_cut else None))

    def advance(self, p: int, name: str, i: int | None) -> None:
        self.runs.append(closures.advance)

    def wgrad(self, p: int) -> int:
        gemm, letters = self.gemm, letters_of(self.stages[p].plan, "dB")
        blocks = self.blocks_of(p, "dB")
        first = blocks if blocks > 1 else None
        result = self.result_of(p, "dB", 1)
        a, grad = self.whole(p, "A"), self.whole(p, "dC")
        if a is not None and grad is not None:
            product = self._gradient(p, self.shapes[grad], self.shapes[a], first)
            self.runs.append(closures.multiply(result, product, grad, a))
            return result
        grads, operands = (self.chunks_of(p, name) for name in ("dC", "A"))
        if not gemm.sums_parts(self.dtype):
            joint = [self._joint(chunks, self.rows[p].place(x)[0]) for chunks, x in ((grads, "dC"), (operands, "A"))]
            (grad_shape, joint_grad), (a_shape, joint_a) = joint
            product = self._gradient(p, grad_shape, a_shape, first)
            self.runs.append(closures.multiply_joined(result, product, joint_grad, joint_a))
            return result
        products = [
            gemm.bound(letters, one, other, blocks=blocks if j else first, accumulate=j > 0)
            for j, ((one, _), (other, _)) in enumerate(zip(grads, operands, strict=True))
        ]
        ones, others = ([get for _, get in chunks] for chunks in (grads, operands))
        self.runs.append(closures.multiply_chunks(result, products, ones, others))
        return result

    @staticmethod
    def _joint(chunks: Sequence[tuple[Shape, Get]], dim: int) -> tuple[Shape, Get]:
        """Chunks that may lie as blocks of columns, put together."""
        shape, getters = chunks[0][0], [get for _, get in chunks]
        matrix = (shape[1], shape[0] * shape[2]) if len(shape) == 3 else shape
        whole = (*matrix[:dim], len(chunks) * matrix[dim], *matrix[dim + 1 :])
        return whole, lambda slots: torch.cat([joined(get(slots)) for get in getters], dim)

    def bias_gradient(self, p: int) -> int:
        stage = self.stages[p]
        whole, matrix = self.whole(p, "dC"), is_matrix(stage.plan)
        chunks = self.chunks_of(p, "dC") if whole is None else [(self.shapes[whole], closures.get(whole))]
        result = self.slot(stage.held(("n",)))
        self.runs.append(closures.sum_rows(result, [(get, matrix and len(shape) == 3) for shape, get in chunks]))
        return result
