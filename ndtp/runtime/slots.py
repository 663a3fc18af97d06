"""The slots of one phase of a chain while it is bound, and how tensors move between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from ndtp.algebra.matmul_plan import Letters, MatMulPlan
from ndtp.algebra.steps import phase_of
from ndtp.algebra.wire import KINDS
from ndtp.compute.gemm import ConjugateGemm
from ndtp.runtime import closures
from ndtp.runtime.closures import FIRST, Get, Place, Run
from ndtp.runtime.moves import Way, blocks_of_result, gathers_columns, is_matrix, scatters_columns
from ndtp.schedule.tasks import Action, RowChunks, Task, Wanted

if TYPE_CHECKING:
    from ndtp.collectives.collectives import Collectives
    from ndtp.collectives.handles import Shape
    from ndtp.compute.gemm import Multiply, TorchGemm

Key = tuple[int, str, int | None]  # product, tensor, chunk
Title = tuple[str, str, str, str]  # kind, tensor, part, product


@dataclass(frozen=True)
class Stage:
    """One product of a chain.

    Attributes:
        plan: bound to the shapes of its operands.
        sizes: letter -> global size.
        activation: of the C of this product, by name; None for the last product.
    """

    plan: MatMulPlan
    sizes: Mapping[str, int]
    activation: str | None = None

    def held(self, letters: Letters, chunks: int = 1) -> Shape:
        """The shape of a tensor with these letters while it is multiplied, or of a chunk of its rows."""
        return self.plan.held_shape(letters, {**self.sizes, "m": self.sizes["m"] // chunks})


class Setting(NamedTuple):
    """The setting to which both phases of a chain are bound: the mesh and its options."""

    stages: tuple[Stage, ...]
    rows: tuple[RowChunks, ...]
    collectives: Collectives
    gemm: TorchGemm
    dtype: torch.dtype


class Moving(NamedTuple):
    """A tensor on its way, or a piece of one."""

    slot: int
    way: Way
    place: Place | None


class Slots:
    """The contents of slots at the point up to which a phase is bound, and the closures written so far.

    Args:
        stored: what comes in as it is stored: (product, tensor) -> shape.
        is_forward: whether this is forward, or backward.

    Attributes:
        tasks: what a profiler calls it, or None, and its closures.
        lines: the same to be read, see `Program.__str__`.
        shapes: of every slot; None for what is no tensor.
    """

    def __init__(
        self,
        setting: Setting,
        wanted: Sequence[Wanted],
        stored: Mapping[tuple[int, str], Shape],
        *,
        is_forward: bool,
    ) -> None:
        self.stages, self.rows, self.collectives, self.gemm, self.dtype = setting
        if self.dtype.is_complex and not is_forward:
            self.gemm = ConjugateGemm(self.gemm)  # type: ignore[assignment]
        self.last, self.chunks = len(self.stages) - 1, self.rows[0].count
        self.wanted, self.is_forward = wanted, is_forward
        self.tasks: list[tuple[Title | None, tuple[Run, ...]]] = []
        self.lines: list[str] = []
        self.runs: list[Run] = []
        self.shapes: list[Shape] = [()] * FIRST
        self.stored = {key: self.slot(shape) for key, shape in stored.items()}
        self.tensors: dict[Key, int] = {}
        self.moving: dict[Key, Moving] = {}
        self.landings: dict[Key, Place] = {}  # where what is gathered next lands, this rank's own part there already
        self.side_by_side: dict[tuple[int, str], int] = {}  # the gathered chunks of an operand
        self.begun: dict[Key, int] = {}  # results of which this rank's own part is multiplied
        self.finished: dict[Key, int] = {}  # operands that were made in one pass with the product before them
        self.complete: set[int] = set()  # those of them of which all parts are
        self.rest: dict[int, Multiply] = {}  # of those that a part of the weight began: the product by the others
        self.cut_operands: dict[int, str | None] = {}  # see `WeightGradients._cut_operand`
        self.cut_when_deferred: str | None = None  # the same of the one that takes no collectives
        self.deferred: int | None = None  # the product of which pieces of dB may be left to the next chain

    def end_of_task(self, line: str, title: Title | None = None) -> None:
        if self.runs:
            self.lines.append(line)
            self.tasks.append((title, tuple(self.runs)))
            self.runs = []

    # ------------------------------------------------------------------------------------------------------- slots

    def slot(self, shape: Shape) -> int:
        self.shapes.append(tuple(shape))
        return len(self.shapes) - 1

    def result_of(self, p: int, name: str, chunks: int) -> int:
        """A slot for a product, which falls into blocks of columns where it leaves so."""
        stage = self.stages[p]
        shape, blocks = stage.held(letters_of(stage.plan, name)[2], chunks), self.blocks_of(p, name)
        return self.slot((blocks, shape[0], shape[1] // blocks) if blocks > 1 else shape)

    def blocks_of(self, p: int, name: str) -> int:
        """Return the number of blocks of columns into which a product falls."""
        is_whole = name == "dB" and not self.gemm.gradients_in_blocks
        return 1 if is_whole else blocks_of_result(self.stages[p].plan, name)

    def is_transposed(self, p: int, name: str) -> bool:
        """Return whether the columns of a weight or of its gradient go as rows of its transpose, to save copies of the
        gathered weight: where they move, no product takes them as blocks, and no row travels with a scale of its own,
        of which columns would have others.
        """
        plan, wire = self.stages[p].plan, self.collectives.wire
        form = None if wire is None else wire.format(KINDS[name])
        moves = any(gathers_columns(step) or scatters_columns(step) for step in plan.relayouts[name])
        is_scaled = form is not None and form.is_scaled
        return is_matrix(plan) and moves and not is_scaled and not self.gemm.takes_blocks(self.dtype)

    def let_go(self, *slots: int | None) -> tuple[int, ...]:
        """Release slots that nothing stands for any more, and return these; what was passed in is the caller's."""
        needed = {*self.stored.values(), *self.tensors.values(), *self.side_by_side.values(), *self.begun.values()}
        return tuple({slot for slot in slots if slot is not None and slot not in needed})

    def clear(self, slots: Sequence[int]) -> None:
        self.runs += [closures.clear(slot) for slot in slots]

    def part(self, chunk: int | None) -> str:
        return "" if chunk is None or self.chunks == 1 else f"{chunk + 1}/{self.chunks}"

    # ------------------------------------------------------------------------------------------------------- moves

    def start(self, p: int, name: str, i: int | None) -> None:
        key = p, name, i
        if key in self.moving:
            return
        # A product on its way out, or an activated operand on its way in, of which this rank's own part is still used.
        stays = name in ("A", "dC")
        source = self.tensors.get(key) if stays else self.tensors.pop(key, None)
        if source is None:
            source = self.stored[p, name] if i is None else self._cut(p, name, i)
            if stays:
                self.tensors[key] = source  # this rank's own part, until all are there
        plan = self.stages[p].plan
        place = self._place(p, name, i, source)
        if not plan.relayouts[name] and place is None:
            self.tensors[key] = source  # it is where it is needed
            return
        way = self._way(p, name, i, source, place is not None)
        slot = self.slot(way.shape)
        self.moving[key] = Moving(slot, way, place)
        is_last_use = not stays and bool(self.let_go(source))
        landing = self.landings.pop(key, None)
        if name in ("dB", "dbias"):
            self.runs.append(closures.start_gradient(slot, source, way, (p, name)))
        elif landing is not None:
            self.runs.append(closures.start(slot, source, way, landing, is_last_use))
            self.clear(() if landing.slot in self.side_by_side.values() else (landing.slot,))
        elif way.legs:
            self.runs.append(closures.start(slot, source, way, place, is_last_use))
        elif place is not None:
            self.runs.append(closures.put(slot, source, place))
            self.clear((source,) if is_last_use else ())

    def _way(self, p: int, name: str, i: int | None, source: int, has_place: bool) -> Way:
        plan, shape, blocks = self.stages[p].plan, self.shapes[source], ""
        if is_matrix(plan):
            if name in ("B", "dB") and self.is_transposed(p, name):
                blocks = "transpose"
            elif name in ("A", "B", "dC"):
                blocks = "arrive" if self.gemm.takes_blocks(self.dtype) and not has_place else ""
            elif len(shape) == 3:
                blocks, shape = "leave", (shape[1], shape[0] * shape[2])
        op, steps = (plan.name, name), plan.relayouts[name]
        phase = phase_of(name, not self.is_forward, self.wanted[p].dgrad)
        return Way(self.collectives, steps, op, phase, shape, self.dtype, part=self.part(i), blocks=blocks)

    def own_place(self, p: int, name: str, i: int | None, source: int, like: int) -> Get | None:
        """Return a place for what is gathered next, so that it already lies among the parts of the other ranks.

        Args:
            source: its slot, without a tensor as yet.
            like: one with a tensor of its dtype and device.
        """
        plan, place = self.stages[p].plan, self._place(p, name, i, source, like)
        way = self._way(p, name, i, source, place is not None)
        # NCCL promises nothing of what lies in a landing before the gather has ended, and products read their own part.
        if not way.gathers_in_order or self.collectives.orders_by_stream:
            return None
        step, shape = plan.relayouts[name][0], self.shapes[source]
        ranks, me = plan.grid.size(step.axes), plan.grid.index(self.collectives.groups.rank, step.axes)
        if place is None:
            place = Place(self._made(way.shape, like), 0, way.shape[0])
        self.landings[p, name, i] = place
        return closures.get_own(place, (ranks, *shape), me)

    def wait(self, p: int, name: str, i: int | None) -> None:
        moving = self.moving.pop((p, name, i), None)
        if moving is None:  # it did not have to go anywhere
            return
        slot, way, _ = moving
        if way.legs:
            self.runs.append(closures.wait(slot))
        own = self.tensors.pop((p, name, i), None)
        self.tensors[p, name, i] = slot
        self.clear(self.let_go(own))

    def prefetch(self, p: int, name: str, i: int | None) -> None:
        # A chain is known by the weight that it needs first.
        if self.stages[0 if self.is_forward else self.last].plan.gathers_b:
            self.runs.append(closures.start_following(self.is_forward))

    def take_weight(self, p: int) -> None:
        """Start the gather of the first weight that the chain needs, or take it over if it was started ahead."""
        source = self.stored[p, "B"]
        way = self._way(p, "B", None, source, False)
        slot = self.slot(way.shape)
        self.runs.append(closures.take_or_start(slot, source, way, self.is_forward))
        self.moving[p, "B", None] = Moving(slot, way, None)
        self.end_of_task(f"{Task(Action.START, 'B', None, p)}: {way}")

    def release(self, p: int, name: str, i: int | None) -> None:
        """Let go of an operand, unless backward wants it."""
        want = self.wanted[p]
        kept = {"A": want.wgrad, "B": want.dgrad}.get(name, False) and not want.again(name.lower())
        if self.is_forward and kept:
            return
        chunks = (i,) if i is not None else (None, *range(self.chunks))
        gone = [self.tensors.pop((p, name, chunk), None) for chunk in chunks]
        if i is None:
            gone.append(self.side_by_side.pop((p, name), None))
        self.clear(self.let_go(*gone))

    # ----------------------------------------------------------------------------------------------- rows of chunks

    def _cut(self, p: int, name: str, i: int) -> int:
        """Chunk i of what is stored."""
        stored, rows = self.stored[p, name], self.rows[p]
        if rows.count == 1:
            return stored
        dim, shape = rows.place(name)[0], self.shapes[stored]
        chunk = self.slot((*shape[:dim], shape[dim] // rows.count, *shape[dim + 1 :]))
        self.runs.append(closures.cut(chunk, rows, stored, name, i, self.own_place(p, name, i, chunk, stored)))
        return chunk

    def _place(self, p: int, name: str, i: int | None, source: int, like: int | None = None) -> Place | None:
        """Return the place where chunk i is wanted, contiguous: beside the other gathered ones, or in the outgoing
        shard.

        Args:
            like: a slot with a tensor of the dtype and device; default: `source`.
        """
        plan, rows, shape = self.stages[p].plan, self.rows[p], self.shapes[source]
        if i is None or self.chunks == 1 or not is_matrix(plan) or rows.place(name)[0] != 0:
            return None
        like = source if like is None else like
        if name in ("A", "dC"):
            steps = plan.relayouts[name]
            if any(step.kind != "all_gather" or step.dim != 0 for step in steps) or not self.wanted[p].wgrad:
                return None
            if self.gemm.takes_codes and steps:
                return None  # what comes in fp8 stays so
            if name == "A" and self.is_forward and self.wanted[p].again("a"):
                return None  # each chunk goes when it is multiplied
            if not steps and rows.place(name)[1] == 1 and (p, name) in self.stored:
                return None  # the shard as it is
            height = shape[0] * prod(plan.grid.size(step.axes) for step in steps)
            if (p, name) not in self.side_by_side:
                self.side_by_side[p, name] = self._made((self.chunks * height, shape[1]), like)
            return Place(self.side_by_side[p, name], i * height, (i + 1) * height)
        if (p, name) not in ((self.last, "C"), (0, "dA")) or rows.place(name)[1] != 1:
            return None
        shard = self._shard(p, name, like)
        height = self.shapes[shard][0] // self.chunks
        return Place(shard, i * height, (i + 1) * height)

    def _made(self, shape: Shape, like: int) -> int:
        slot = self.slot(shape)
        self.runs.append(closures.new(slot, shape, like))
        return slot

    def _shard(self, p: int, name: str, like: int) -> int:
        """The shard that goes out, filled chunk by chunk."""
        if (p, name) not in self.stored:
            stage = self.stages[p]
            self.stored[p, name] = self._made(stage.plan.shard_shape("C" if name == "C" else "A", stage.sizes), like)
        return self.stored[p, name]

    def result(self, p: int, name: str) -> int:
        """The shard of "C" or "dA", its rows in the order in which it is stored."""
        if self.chunks == 1:
            return self.tensors[p, name, 0]
        chunks = [self.tensors[p, name, i] for i in range(self.chunks)]
        shard = self._shard(p, name, chunks[0])
        for i, chunk in enumerate(chunks):
            if self._place(p, name, i, chunk) is None:
                self.runs.append(closures.paste(shard, self.rows[p], name, i, chunk))
        return shard

    def whole(self, p: int, name: str) -> int | None:
        """All rows of a gathered operand, chunk by chunk: any one order serves a sum over rows.

        None where they lie as blocks of columns, in several chunks.
        """
        for key in ((p, name, None), *([(p, name, 0)] if self.chunks == 1 else [])):
            if key in self.tensors:
                return self.tensors[key]
        plan, rows = self.stages[p].plan, self.rows[p]
        shape, dim = self.shapes[self.tensors[p, name, 0]], rows.place(name)[0]
        if is_matrix(plan) and len(shape) == 3:
            return None
        if not plan.relayouts[name] and rows.place(name)[1] == 1 and (p, name) in self.stored:
            whole = self.stored[p, name]
        elif (p, name) in self.side_by_side:
            whole = self.side_by_side[p, name]
        else:
            chunks = [self.tensors[p, name, i] for i in range(self.chunks)]
            whole = self.slot((*shape[:dim], self.chunks * shape[dim], *shape[dim + 1 :]))
            self.runs.append(closures.join(whole, chunks, dim))
        self.tensors[p, name, None] = whole
        return whole

    def chunks_of(self, p: int, name: str) -> list[tuple[Shape, Get]]:
        """Shape and getter of every chunk of an operand."""
        whole, count, dim = self.tensors.get((p, name, None)), self.chunks, self.rows[p].place(name)[0]
        if whole is not None:
            shape = self.shapes[whole]
            chunk = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
            return [(chunk, closures.get_part(whole, dim, i * chunk[dim], chunk[dim])) for i in range(count)]
        slots = [self.tensors[p, name, i] for i in range(count)]
        return [(self.shapes[slot], closures.get(slot)) for slot in slots]


def letters_of(plan: MatMulPlan, name: str) -> tuple[Letters, Letters, Letters]:
    """Return the letters of both operands of a product, and of its result.

    "C"   C[.., M, N] = A . B       of A and B
    "dA"  dA = dC . B^T             of dC and B; stored as A is, summed over batch dims that A lacks
    "dB"  dB = A^T . dC             of dC and A; stored as B is, summed over batch dims that B lacks
    """
    a, b, c = plan.a_letters, plan.b_letters, plan.c_letters
    return {"C": (a, b, c), "dA": (c, b, a), "dB": (c, a, b)}[name]
