"""The tasks of one phase of a chain, bound: each becomes closures over numbered slots.

All that a task would look up, compare or work out when it runs is decided here, once: which slots it reads and fills,
which collectives it starts, where their results go, which product multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from ndtp.algebra.matmul_plan import Letters, MatMulPlan
from ndtp.algebra.steps import apply
from ndtp.compute.devices import kind_of
from ndtp.compute.gemm import Product, joined
from ndtp.runtime import closures
from ndtp.runtime.closures import Get
from ndtp.runtime.moves import blocks_of_result, is_matrix
from ndtp.runtime.slots import Key, Moving, Slots
from ndtp.schedule.tasks import Action, Task, cut_alike

if TYPE_CHECKING:
    from ndtp.collectives.handles import Shape

# What profiles call it.
COMPUTE = {Action.OWN: "gemm own", Action.MULTIPLY: "gemm", Action.ACTIVATE: "activate"}
OPERAND = {"C": "A", "dA": "dC"}  # of which a result takes its rows


class Phase(Slots):
    """Forward or backward of a chain, while it is bound; see `Slots`."""

    def add(self, tasks: Sequence[Task]) -> None:
        bind = {
            Action.START: self.start,
            Action.START_NEXT: self._start_next,
            Action.ADVANCE: self._advance,
            Action.WAIT: self.wait,
            Action.OWN: self._own,
            Action.MULTIPLY: self._multiply,
            Action.ACTIVATE: self._activate,
            Action.PREFETCH: self.prefetch,
            Action.RELEASE: self.release,
        }
        for task in tasks:
            action, tensor, chunk, p = task
            bind[action](p, tensor, chunk)
            if tensor == "dB" and self.cut_operands.get(p) is None:
                chunk, task = None, task._replace(chunk=None)  # it goes whole
            title, line = None, str(task)
            if action is Action.START and (p, tensor, chunk) in self.moving:
                line += f": {self.moving[p, tensor, chunk].way}"
            if action in COMPUTE:
                title = (COMPUTE[action], tensor, self.part(chunk), self.stages[p].plan.name)
            self.end_of_task(line, title)

    # --------------------------------------------------------------------------------------------------- products

    def _product(
        self,
        p: int,
        name: str,
        operand: Shape,
        blocks: int | None,
        parts: Sequence[int] | None = None,
        accumulate: bool = False,
    ) -> Product:
        """See `TorchGemm.bound`."""
        letters, weight = letters_of(self.stages[p].plan, name), self.shapes[self.tensors[p, "B", None]]
        return self.gemm.bound(letters, operand, weight, blocks=blocks, parts=parts, accumulate=accumulate)

    def _result_of(self, p: int, name: str, chunks: int) -> int:
        """A slot for a product, which falls into blocks of columns where it leaves so."""
        stage = self.stages[p]
        shape, blocks = stage.held(letters_of(stage.plan, name)[2], chunks), blocks_of_result(stage.plan, name)
        return self.slot((blocks, shape[0], shape[1] // blocks) if blocks > 1 else shape)

    def _own(self, p: int, name: str, i: int | None) -> None:
        """Multiply this rank's part of chunk i while the parts of the others are on their way."""
        plan, operand = self.stages[p].plan, OPERAND[name]
        gathered, own = own_axis(plan, name), self.tensors.get((p, operand, i))
        if gathered is None or own is None or (p, operand, i) not in self.moving:
            return
        dim, axes = gathered
        weight, ranks, shape = self.tensors[p, "B", None], plan.grid.size(axes), self.shapes[own]
        contracted = shape[-1] * (ranks if dim else 1)
        least = self.gemm.own_part_from
        if least is None:
            least = kind_of(self.collectives.groups.device_type).own_part_from
        if prod(shape) * prod(self.shapes[weight]) < least * contracted:
            return
        me, blocks = plan.grid.index(self.collectives.groups.rank, axes), blocks_of_result(plan, name)
        if dim == 0 and blocks == 1:
            begun, product = self._result_of(p, name, self.chunks), self._product(p, name, shape, blocks=1)
            whole, at = self.shapes[begun], me * shape[0]
            if self.collectives.arrives_in_parts:
                moving = self.moving[p, operand, i].slot
                self.runs.append(closures.multiply_arriving(begun, whole, product, moving, weight))
                self.complete.add(begun)
            else:
                self.runs.append(closures.multiply_own_rows(begun, whole, product, own, weight, at))
        elif dim == 1 and self.gemm.sums_parts(self.dtype):
            begun = self._result_of(p, name, self.chunks)
            product = self._product(p, name, (ranks, *shape), blocks=blocks, parts=(me,))
            self.runs.append(closures.multiply_own_part(begun, product, own, weight, ranks))
        else:
            return
        self.begun[p, name, i] = begun

    def _multiply(self, p: int, name: str, i: int | None) -> None:
        if name == "dB" and i is not None:
            self._multiply_piece(p, i)
        elif name == "dB":
            self.tensors[p, "dB", None] = self._wgrad(p)
        elif name == "dbias":
            self.tensors[p, "dbias", None] = self._bias_gradient(p)
        elif (begun := self.begun.pop((p, name, i), None)) is not None:
            self._complete(p, name, self.tensors[p, OPERAND[name], i], begun)
            self.tensors[p, name, i] = begun
        else:
            blocks = blocks_of_result(self.stages[p].plan, name)
            operand, weight = self.tensors[p, OPERAND[name], i], self.tensors[p, "B", None]
            product = self._product(p, name, self.shapes[operand], blocks=blocks if blocks > 1 else None)
            self.tensors[p, name, i] = result = self._result_of(p, name, self.chunks)
            self.runs.append(closures.multiply(result, product, operand, weight))

    def _complete(self, p: int, name: str, operand: int, begun: int) -> None:
        """The parts of the others, beside or on top of this rank's own."""
        if begun in self.complete:
            return  # they were multiplied as they came
        plan, weight, shape = self.stages[p].plan, self.tensors[p, "B", None], self.shapes[operand]
        dim, axes = own_axis(plan, name) or (0, ())
        ranks, me = plan.grid.size(axes), plan.grid.index(self.collectives.groups.rank, axes)
        if dim == 1:
            others = tuple(j for j in range(ranks) if j != me)
            blocks = blocks_of_result(plan, name)
            product = self._product(p, name, shape, blocks=blocks, parts=others, accumulate=True)
            self.runs.append(closures.multiply_others(begun, product, operand, weight))
            return
        rows = shape[0] // ranks
        for start, stop in ((0, me * rows), ((me + 1) * rows, shape[0])):
            if start < stop:
                product = self._product(p, name, (stop - start, *shape[1:]), blocks=1)
                self.runs.append(closures.multiply_rows(begun, product, operand, weight, start, stop))

    # ------------------------------------------------------------------------------- gradients of weights in pieces

    def start(self, p: int, name: str, i: int | None) -> None:
        if name == "dB" and i is not None:
            self._start_piece(p, i)
        else:
            super().start(p, name, i)

    def _cut_operand(self, p: int) -> str | None:
        """That operand of dB whose columns make pieces of its rows; None where dB goes whole.

        Rows of its pieces are rows of the gradient: nothing on its way cuts or scatters them.
        """
        plan, steps = self.stages[p].plan, self.stages[p].plan.relayouts["dB"]
        if not is_matrix(plan) or not steps or any(0 in (step.dim, step.source) for step in steps):
            return None
        if any(step.kind not in ("reduce_scatter", "all_reduce") for step in steps):
            return None
        shape = self.stages[p].held(plan.b_letters)
        operands = [self.whole(p, name) for name in ("dC", "A")]
        if shape[0] % self.chunks or any(slot is None or len(self.shapes[slot]) != 2 for slot in operands):
            return None
        reduced = [
            (prod(after), plan.grid.size(step.axes))
            for step, after, _ in apply(plan.grid, steps, shape)
            if step.kind == "all_reduce"
        ]
        if not cut_alike(reduced, self.chunks):
            return None
        return "dC" if plan.b_letters[0] in plan.c_letters else "A"

    def _multiply_piece(self, p: int, j: int) -> None:
        if j == 0:
            self.cut_operands[p] = self._cut_operand(p)
        cut = self.cut_operands[p]
        if cut is None:
            if j == 0:
                self.tensors[p, "dB", None] = self._wgrad(p)
            return
        if j == 0:  # what is held back is added to what was, whole
            self.runs, runs = [], self.runs
            self.tensors[p, "dB", None] = self._wgrad(p)
            self.runs = [*runs, closures.where_held((p, "dB"), True, self.runs)]
        plan, slots = self.stages[p].plan, {name: self.tensors[p, name, None] for name in ("dC", "A")}
        shapes = {name: self.shapes[slot] for name, slot in slots.items()}
        gets = {name: closures.get(slot) for name, slot in slots.items()}
        dim = letters_of(plan, "dB")[cut == "A"].index(plan.b_letters[0])
        size = shapes[cut][dim] // self.chunks
        shapes[cut] = (*shapes[cut][:dim], size, *shapes[cut][dim + 1 :])
        gets[cut] = closures.get_part(slots[cut], dim, j * size, size)
        rows, columns = self.stages[p].held(plan.b_letters)
        blocks = blocks_of_result(plan, "dB")
        shape = (rows // self.chunks, columns)
        self.tensors[p, "dB", j] = result = self.slot((blocks, shape[0], columns // blocks) if blocks > 1 else shape)
        product = self.gemm.bound(
            letters_of(plan, "dB"), shapes["dC"], shapes["A"], blocks=blocks if blocks > 1 else None
        )
        run = closures.multiply_joined(result, product, gets["dC"], gets["A"])
        self.runs.append(closures.where_held((p, "dB"), False, (run,)))

    def _start_piece(self, p: int, j: int) -> None:
        name = p, "dB"
        if self.cut_operands[p] is None:
            if j == 0:
                super().start(p, "dB", None)
            return
        if j == 0:
            self.runs, runs = [], self.runs
            super().start(p, "dB", None)
            self.runs = [*runs, closures.where_held(name, True, self.runs)]
        slot, whole, _ = self.moving[p, "dB", None]
        source = self.tensors.pop((p, "dB", j))
        way = self._way(p, "dB", j, source, False)
        height = way.shape[0]
        self.moving[p, "dB", j] = Moving(slot, way, None)
        piece = closures.start_piece(slot, source, way, whole.shape, slice(j * height, (j + 1) * height))
        self.runs.append(closures.where_held(name, False, (piece,)))

    def _start_next(self, p: int, name: str, i: int | None) -> None:
        """Of a piece, or of the whole when the last piece would."""
        name_of, is_cut = (p, "dB"), i is not None and self.cut_operands[p] is not None
        moving = self.moving.get((p, "dB", None))
        if moving is None or len(moving.way.legs) < 2:
            return
        runs = [(True, None)] * (i in (None, self.chunks - 1)) + [(False, i)] * is_cut
        for is_held, piece in runs:
            run = closures.start_next(moving.slot, piece)
            self.runs.append(closures.where_held(name_of, is_held, (run,)) if is_cut else run)

    def _advance(self, p: int, name: str, i: int | None) -> None:
        self.runs.append(closures.advance)

    def _wgrad(self, p: int) -> int:
        gemm, plan = self.gemm, self.stages[p].plan
        blocks, letters = blocks_of_result(plan, "dB"), letters_of(plan, "dB")
        first = blocks if blocks > 1 else None
        result = self._result_of(p, "dB", 1)
        a, grad = self.whole(p, "A"), self.whole(p, "dC")
        if a is not None and grad is not None:
            product = gemm.bound(letters, self.shapes[grad], self.shapes[a], blocks=first)
            self.runs.append(closures.multiply(result, product, grad, a))
            return result
        grads, operands = (self.chunks_of(p, name) for name in ("dC", "A"))
        if not gemm.sums_parts(self.dtype):
            joint = [self._joint(chunks, self.rows[p].place(x)[0]) for chunks, x in ((grads, "dC"), (operands, "A"))]
            (grad_shape, joint_grad), (a_shape, joint_a) = joint
            product = gemm.bound(letters, grad_shape, a_shape, blocks=first)
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

    def _bias_gradient(self, p: int) -> int:
        stage = self.stages[p]
        whole, matrix = self.whole(p, "dC"), is_matrix(stage.plan)
        chunks = self.chunks_of(p, "dC") if whole is None else [(self.shapes[whole], closures.get(whole))]
        result = self.slot(stage.held(("n",)))
        self.runs.append(closures.sum_rows(result, [(get, matrix and len(shape) == 3) for shape, get in chunks]))
        return result

    # ------------------------------------------------------------------------------------------------- activations

    def _activate(self, p: int, name: str, i: int | None) -> None:
        tensors, before = self.tensors, p - 1 if name == "A" else p
        activation = self.stages[before].activation or "identity"
        if name == "dC":
            grad, pre = tensors.pop((p + 1, "dA", i)), tensors.pop((p, "pre", i))
            tensors[p, "dC", i] = result = self.slot(self.shapes[pre])
            function = self.gemm.activate_backward
            self.runs.append(closures.activate_backward(result, function, grad, pre, activation))
            self.clear(self.let_go(grad, pre))
            return
        if self.is_forward:
            pre = tensors.pop((before, "C", i))
            self.add_bias(before, pre)
            if self.wanted[p].dgrad or self.wanted[p].again("a"):
                tensors[before, "pre", i] = pre
        else:
            pre = tensors[before, "pre", i] if self.wanted[p].dgrad else tensors.pop((before, "pre", i))
        width = self.stages[p].plan.shard_shape("A", self.stages[p].sizes)[-1]
        tensors[p, "A", i] = result = self.slot((*self.shapes[pre][:-1], width))
        self.runs.append(closures.activate(result, self.gemm.activate, pre, activation))
        self.clear(self.let_go(pre))

    def add_bias(self, p: int, tensor: int) -> None:
        if (p, "bias", None) in self.moving:
            self.wait(p, "bias", None)
        bias = self.tensors.get((p, "bias", None))
        if bias is not None:
            self.runs.append(closures.add(tensor, bias))

    # ------------------------------------------------------------------------------------------ between the phases

    def kept(self) -> dict[Key, int]:
        """What backward needs of forward: key -> slot."""
        kept = {key: slot for key, slot in self.tensors.items() if key[1] == "pre"}
        for p, want in enumerate(self.wanted):
            if want.dgrad:
                kept[p, "B", None] = self.stored[p, "B"] if want.again("b") else self.tensors[p, "B", None]
            if want.again("a"):
                kept |= {(0, "A", None): self.stored[0, "A"]} if p == 0 else {}  # further ones are activated again
            elif want.wgrad:
                whole = self.whole(p, "A")
                if whole is not None:
                    kept[p, "A", None] = whole
                else:
                    kept |= {(p, "A", i): self.tensors[p, "A", i] for i in range(self.chunks)}
        return kept

    def bring(self, key: Key, shape: Shape, is_stored: bool) -> None:
        """A tensor that forward kept, in the next slot: as it is stored, or as it was held."""
        if is_stored:
            self.stored[key[:2]] = self.slot(shape)
        else:
            self.tensors[key] = self.slot(shape)

    def outcome(self, p: int, name: str) -> int | None:
        """The slot of the gradient of a weight or bias: a tensor, or a move that is not waited for."""
        moving = self.moving.get((p, name, None))
        return self.tensors.get((p, name, None)) if moving is None else moving.slot


def letters_of(plan: MatMulPlan, name: str) -> tuple[Letters, Letters, Letters]:
    """Those of both operands of a product, and of its result.

    "C"   C[.., M, N] = A . B       of A and B
    "dA"  dA = dC . B^T             of dC and B; stored as A is, summed over batch dims that A lacks
    "dB"  dB = A^T . dC             of dC and A; stored as B is, summed over batch dims that B lacks
    """
    a, b, c = plan.a_letters, plan.b_letters, plan.c_letters
    return {"C": (a, b, c), "dA": (c, b, a), "dB": (c, a, b)}[name]


def own_axis(plan: MatMulPlan, name: str) -> tuple[int, tuple[str, ...]] | None:
    """The dim and the axes over which the operand of a result is gathered; None where a rank has no part of its own."""
    steps = plan.relayouts[OPERAND[name]]
    letters, _, result = letters_of(plan, name)
    if not is_matrix(plan) or len(steps) != 1 or steps[0].kind != "all_gather":
        return None
    dim = steps[0].dim or 0
    is_row = dim == 0 and letters[0] == result[0] == "m"
    is_summed = dim == 1 and letters[1] not in result
    return (dim, steps[0].axes) if is_row or is_summed else None
