"""The tasks of one phase of a chain, bound: each becomes closures over numbered slots.

All that a task would look up, compare or work out when it runs is decided here, once: which slots it reads and fills,
which collectives it starts, where their results go, which product multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.compute.devices import kind_of
from ndtp.compute.gemm import Multiply
from ndtp.runtime import closures
from ndtp.runtime.finishes import Finishes
from ndtp.runtime.moves import is_matrix
from ndtp.runtime.slots import Key, letters_of
from ndtp.schedule.arrivals import weight_in_parts
from ndtp.schedule.tasks import Action, Task

if TYPE_CHECKING:
    from ndtp.collectives.handles import Shape

# What profiles call it.
COMPUTE = {Action.OWN: "gemm own", Action.MULTIPLY: "gemm", Action.ACTIVATE: "activate"}
OPERAND = {"C": "A", "dA": "dC"}  # of which a result takes its rows


class Phase(Finishes):
    """Forward or backward of a chain, while it is bound; see `Slots`."""

    def add(self, tasks: Sequence[Task]) -> None:
        bind = {
            Action.START: self.start,
            Action.START_NEXT: self.start_next,
            Action.ADVANCE: self.advance,
            Action.DEFER: self.defer,
            Action.CATCH_UP: self.catch_up,
            Action.WAIT: self.wait_unless_finished,
            Action.OWN: self._own,
            Action.MULTIPLY: self._multiply,
            Action.ACTIVATE: self.activate,
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
    ) -> Multiply:
        """See `TorchGemm.bound`."""
        letters, weight = letters_of(self.stages[p].plan, name), self.shapes[self.tensors[p, "B", None]]
        return self.gemm.bound(letters, operand, weight, blocks=blocks, parts=parts, accumulate=accumulate)

    def _own(self, p: int, name: str, i: int | None) -> None:
        """Multiply this rank's part of chunk i, or chunk i by its part of the weight, while the others are coming."""
        key = (p, "B", None) if (p, "B", None) in self.moving else (p, OPERAND[name], i)
        if key in self.moving and self.moving[key].way.is_coded:
            return  # what the others have of it is another
        if key[1] == "B":
            self._own_weight(p, name, i)
        else:
            self._own_operand(p, name, i)

    def _own_weight(self, p: int, name: str, i: int | None) -> None:
        plan, operand, own = self.stages[p].plan, self.tensors.get((p, OPERAND[name], i)), self.stored[p, "B"]
        axes = weight_in_parts(plan)
        if operand is None or (p, OPERAND[name], i) in self.moving or not axes or not self.gemm.sums_parts(self.dtype):
            return
        rows = self.shapes[operand]
        if len(rows) != 2 or rows[0] * prod(self.shapes[own]) < self._least_own_part():
            return
        ranks, me = plan.grid.size(axes), plan.grid.index(self.collectives.groups.rank, axes)
        begun, blocks = self.result_of(p, name, self.chunks), self.blocks_of(p, name)
        weight = (ranks, *self.shapes[own])
        first, rest = (
            self.gemm.bound(letters_of(plan, name), rows, weight, blocks=blocks, parts=parts, accumulate=accumulate)
            for parts, accumulate in (((me,), False), (tuple(j for j in range(ranks) if j != me), True))
        )
        self.runs.append(closures.multiply_own_weight(begun, first, operand, own, ranks))
        self.begun[p, name, i] = begun
        self.rest[begun] = rest

    def _least_own_part(self) -> int:
        """Multiply-adds from which on a part of its own is worth a product of its own."""
        least = self.gemm.own_part_from
        return kind_of(self.collectives.groups.device_type).own_part_from if least is None else least

    def _own_operand(self, p: int, name: str, i: int | None) -> None:
        plan, operand = self.stages[p].plan, OPERAND[name]
        gathered, own = own_axis(plan, name), self.tensors.get((p, operand, i))
        if gathered is None or own is None or (p, operand, i) not in self.moving:
            return
        dim, axes = gathered
        weight, ranks, shape = self.tensors[p, "B", None], plan.grid.size(axes), self.shapes[own]
        contracted = shape[-1] * (ranks if dim else 1)
        if prod(shape) * prod(self.shapes[weight]) < self._least_own_part() * contracted:
            return
        me, blocks = plan.grid.index(self.collectives.groups.rank, axes), self.blocks_of(p, name)
        if dim == 0 and blocks == 1:
            begun, product = self.result_of(p, name, self.chunks), self._product(p, name, shape, blocks=1)
            whole, at = self.shapes[begun], me * shape[0]
            if self.collectives.arrives_in_parts:
                moving = self.moving[p, operand, i].slot
                self.runs.append(closures.multiply_arriving(begun, whole, product, moving, weight))
                self.complete.add(begun)
            else:
                self.runs.append(closures.multiply_own_rows(begun, whole, product, own, weight, at))
        elif dim == 1 and self.gemm.sums_parts(self.dtype):
            begun = self.result_of(p, name, self.chunks)
            product = self._product(p, name, (ranks, *shape), blocks=blocks, parts=(me,))
            self.runs.append(closures.multiply_own_part(begun, product, own, weight, ranks))
        else:
            return
        self.begun[p, name, i] = begun

    def _multiply(self, p: int, name: str, i: int | None) -> None:
        if name == "dB" and i is not None:
            self.multiply_piece(p, i)
        elif name == "dB":
            self.tensors[p, "dB", None] = self.wgrad(p)
        elif name == "dbias":
            self.tensors[p, "dbias", None] = self.bias_gradient(p)
        elif (begun := self.begun.pop((p, name, i), None)) is not None:
            self._complete(p, name, self.tensors[p, OPERAND[name], i], begun)
            self.tensors[p, name, i] = begun
        elif not self.multiply_finished(p, name, i):
            blocks = self.blocks_of(p, name)
            operand, weight = self.tensors[p, OPERAND[name], i], self.tensors[p, "B", None]
            product = self._product(p, name, self.shapes[operand], blocks=blocks if blocks > 1 else None)
            self.tensors[p, name, i] = result = self.result_of(p, name, self.chunks)
            self.runs.append(closures.multiply(result, product, operand, weight))

    def _complete(self, p: int, name: str, operand: int, begun: int) -> None:
        """The parts of the others, beside or on top of this rank's own."""
        if begun in self.complete:
            return  # they were multiplied as they came
        plan, weight, shape = self.stages[p].plan, self.tensors[p, "B", None], self.shapes[operand]
        if (rest := self.rest.pop(begun, None)) is not None:
            self.runs.append(closures.multiply_others(begun, rest, operand, weight))
            return
        dim, axes = own_axis(plan, name) or (0, ())
        ranks, me = plan.grid.size(axes), plan.grid.index(self.collectives.groups.rank, axes)
        if dim == 1:
            others = tuple(j for j in range(ranks) if j != me)
            blocks = self.blocks_of(p, name)
            product = self._product(p, name, shape, blocks=blocks, parts=others, accumulate=True)
            self.runs.append(closures.multiply_others(begun, product, operand, weight))
            return
        rows = shape[0] // ranks
        for start, stop in ((0, me * rows), ((me + 1) * rows, shape[0])):
            if start < stop:
                product = self._product(p, name, (stop - start, *shape[1:]), blocks=1)
                self.runs.append(closures.multiply_rows(begun, product, operand, weight, start, stop))

    # ------------------------------------------------------------------------------------------ between the phases

    def kept(self) -> dict[Key, int]:
        """Return the slots that backward needs of forward, by key."""
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
