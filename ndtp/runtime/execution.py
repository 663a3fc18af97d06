"""The executor: runs the tasks of a schedule on this rank's tensors."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.collectives.recorder import is_observed, span
from ndtp.compute.gemm import joined
from ndtp.runtime.moves import Move, blocks_of_result, is_matrix, move_of
from ndtp.schedule.tasks import RowChunks, Task, Wanted, backward_tasks, forward_tasks

if TYPE_CHECKING:
    from ndtp.runtime.process_grid import ProcessGrid
    from ndtp.runtime.weight_prefetch import WeightPrefetch

Key = tuple[int, str, int | None]  # product, tensor, chunk

FORWARD = {"A": "forward", "B": "forward", "C": "forward", "bias": "forward"}
BACKWARD = {"dC": "dgrad", "dA": "dgrad", "B": "dgrad", "A": "wgrad", "dB": "wgrad", "dbias": "wgrad"}
COMPUTE = {"own": "gemm own", "multiply": "gemm", "activate": "activate"}  # what profiles call it
OPERAND = {"C": "A", "dA": "dC"}  # of which a result takes its rows


@dataclass(frozen=True)
class Stage:
    """One product of a chain.

    Attributes:
        plan: bound to the shapes of its operands.
        sizes: letter -> global size.
        activation: of the C of this product, by name; None for the last product.
        weight: B as it was passed, if its gather may be started ahead.
        owner: by what the order of weights is known, see `ndtp.runtime.weight_prefetch.owner_of`.
    """

    plan: MatMulPlan
    sizes: Mapping[str, int]
    activation: str | None = None
    weight: Tensor | None = None
    owner: Any = None


class Execution:
    """A chain of products on one grid: forward once, backward as often as autograd asks.

    Args:
        chunks: at most so many; fewer where the rows do not divide.
    """

    def __init__(self, stages: Sequence[Stage], mesh: ProcessGrid, chunks: int) -> None:
        self.stages, self.mesh, self.last = stages, mesh, len(stages) - 1
        self.rows = RowChunks.of([stage.plan for stage in stages], [stage.sizes for stage in stages], chunks)
        self.chunks = self.rows[0].count
        self._clear()

    def _clear(self) -> None:
        self._phases = FORWARD
        self._wanted: Sequence[Wanted] = ()
        self._held: Container[tuple[int, str]] = ()  # gradients that stop before an all-reduce
        self._stored: dict[tuple[int, str], Tensor] = {}  # what comes in or goes out, as it is stored
        self._moves: dict[Key, Move] = {}
        self._tensors: dict[Key, Tensor] = {}
        self._side_by_side: dict[tuple[int, str], Tensor] = {}  # the gathered chunks of an operand
        self._begun: dict[Key, Tensor] = {}  # results of which this rank's own part is multiplied

    def forward(
        self, a: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], wanted: Sequence[Wanted]
    ) -> tuple[Tensor, dict[Key, Tensor]]:
        """Returns C of the last product as it is stored, and what backward needs for the gradients that are wanted."""
        self._clear()
        self._wanted, self._stored[0, "A"] = wanted, a
        for p, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            self._stored[p, "B"] = weight
            if bias is not None:
                self._stored[p, "bias"] = bias
        self._take_weight(0, self.mesh.step.prefetch)
        self._run(forward_tasks(self.chunks, tuple(bias is not None for bias in biases)))
        c = self._result(self.last, "C")
        if (bias := self._bias(self.last)) is not None:
            c.add_(bias)
        kept = {key: tensor for key, tensor in self._tensors.items() if key[1] == "pre"}
        for p, want in enumerate(wanted):
            if want.dgrad:
                kept[p, "B", None] = weights[p] if want.again("b") else self._tensors[p, "B", None]
            if want.again("a"):
                kept |= {(0, "A", None): a} if p == 0 else {}  # further ones are activated again
            elif want.wgrad:
                whole = self._whole(p, "A")
                kept |= {(p, "A", None): whole} if whole is not None else self._chunks_of(p, "A")
        self._clear()
        return c, kept

    def backward(
        self,
        grad: Tensor,
        kept: dict[Key, Tensor],
        wanted: Sequence[Wanted],
        held: Container[tuple[int, str]] = (),
    ) -> tuple[Tensor | None, list[Move | None], list[Move | None]]:
        """dA of the first product as it is stored; of every product the moves of dB and dbias, not waited for.

        Empties `kept`: what is used up must not live until the end of the chain.

        Args:
            held: gradients (product, "dB" or "dbias") whose moves stop before an all-reduce.
        """
        self._clear()  # an earlier backward may have ended in an exception
        self._phases, self._wanted, self._held = BACKWARD, wanted, held
        self._stored[self.last, "dC"] = grad
        for p, name, i in tuple(kept):
            if name.lower() in wanted[p].regather:
                self._stored[p, name] = kept.pop((p, name, i))
            else:
                self._tensors[p, name, i] = kept.pop((p, name, i))
        if wanted[self.last].again("b"):
            self._take_weight(self.last, self.mesh.step.prefetch_backward)
        self._run(backward_tasks(self.chunks, tuple(wanted)))
        products = range(self.last + 1)
        db, dbias = ([self._moves.pop((p, name, None), None) for p in products] for name in ("dB", "dbias"))
        da = self._result(0, "dA") if wanted[0].dgrad else None
        self._clear()
        return da, db, dbias

    # ------------------------------------------------------------------------------------------------------ tasks

    def _run(self, tasks: Sequence[Task]) -> None:
        watched = is_observed(self.mesh)
        for task in tasks:
            run = _ACTIONS[task.action]
            if watched and task.action in COMPUTE:
                stage = self.stages[task.product]
                with span(self.mesh, COMPUTE[task.action], task.tensor, self._part(task.chunk), stage.plan.name):
                    run(self, task.product, task.tensor, task.chunk)
            else:
                run(self, task.product, task.tensor, task.chunk)

    def _part(self, chunk: int | None) -> str:
        return "" if chunk is None or self.chunks == 1 else f"{chunk + 1}/{self.chunks}"

    def _start(self, p: int, name: str, i: int | None) -> None:
        key = p, name, i
        if key in self._moves:
            return
        # A product on its way out, or an activated operand on its way in, of which this rank's own part is still used.
        tensor = self._tensors.get(key) if name in ("A", "dC") else self._tensors.pop(key, None)
        if tensor is None:
            tensor = self._stored[p, name]
            tensor = tensor if i is None else self.rows[p].cut(tensor, name, i)
            if name in ("A", "dC"):
                self._tensors[key] = tensor  # this rank's own part, until all are there
        plan, part = self.stages[p].plan, self._part(i)
        out = None if i is None or self.chunks == 1 else self._place(p, name, i, tensor)
        if not plan.relayouts[name] and out is None and name not in ("dB", "dbias"):
            self._tensors[key] = tensor  # it is where it is needed
            return
        # dC is gathered once, for the first phase that needs it.
        phase = "wgrad" if name == "dC" and not self._wanted[p].dgrad else self._phases[name]
        move = move_of(plan, name, tensor, self.mesh, phase, part, out, (p, name) in self._held)
        self._moves[key] = move.start()

    def _wait(self, p: int, name: str, i: int | None) -> None:
        move = self._moves.pop((p, name, i), None)
        if move is None:  # it did not have to go anywhere
            return
        tensor = move.finish()
        if move.out is not None and tensor is not move.out:
            tensor = move.out.copy_(tensor)
        self._tensors[p, name, i] = tensor

    def _own(self, p: int, name: str, i: int | None) -> None:
        """Multiply this rank's part of chunk i while the parts of the others are on their way."""
        stage, operand = self.stages[p], OPERAND[name]
        gathered, own = _own_axis(stage.plan, name), self._tensors.get((p, operand, i))
        if gathered is None or own is None or (p, operand, i) not in self._moves:
            return
        dim, axes = gathered
        ranks = self.mesh.grid.size(axes)
        contracted = own.shape[-1] * (ranks if dim else 1)
        if own.numel() * self._tensors[p, "B", None].numel() < self.mesh.gemm.own_part_from * contracted:
            return
        me, blocks = self.mesh.grid.index(self.mesh.rank, axes), blocks_of_result(stage.plan, name)
        if dim == 0 and blocks == 1:
            column = (stage.plan.c_letters if name == "C" else stage.plan.a_letters)[1] or ""
            width = stage.sizes[column] // self.mesh.grid.size(stage.plan.orders[column])
            rows = own.shape[0]
            begun = own.new_empty((ranks * rows, width))
            self._product(p, name, own, out=begun[me * rows : (me + 1) * rows])
        elif dim == 1 and self.mesh.gemm.sums_parts(own.dtype):
            begun = self._product(p, name, own.expand(ranks, -1, -1), blocks=blocks, parts=(me,))
        else:
            return
        self._begun[p, name, i] = begun

    def _multiply(self, p: int, name: str, i: int | None) -> None:
        if name == "dB":
            self._tensors[p, "dB", None] = self._wgrad(p)
        elif name == "dbias":
            self._tensors[p, "dbias", None] = self._bias_gradient(p)
        elif (begun := self._begun.pop((p, name, i), None)) is not None:
            self._tensors[p, name, i] = self._complete(p, name, self._tensors[p, OPERAND[name], i], begun)
        else:
            blocks = blocks_of_result(self.stages[p].plan, name)
            how = {"blocks": blocks} if blocks > 1 else {}
            self._tensors[p, name, i] = self._product(p, name, self._tensors[p, OPERAND[name], i], **how)

    def _activate(self, p: int, name: str, i: int | None) -> None:
        gemm, tensors = self.mesh.gemm, self._tensors
        before = p - 1 if name == "A" else p
        activation = self.stages[before].activation or "identity"
        if name == "dC":
            tensors[p, "dC", i] = gemm.activate_backward(
                tensors.pop((p + 1, "dA", i)), tensors.pop((p, "pre", i)), activation
            )
        elif self._phases is BACKWARD:
            pre = tensors[before, "pre", i] if self._wanted[p].dgrad else tensors.pop((before, "pre", i))
            tensors[p, "A", i] = gemm.activate(pre, activation)
        else:
            pre = tensors.pop((before, "C", i))
            if (bias := self._bias(before)) is not None:
                pre.add_(bias)
            if self._wanted[p].dgrad or self._wanted[p].again("a"):
                tensors[before, "pre", i] = pre
            tensors[p, "A", i] = gemm.activate(pre, activation)

    def _prefetch(self, p: int, name: str, i: int | None) -> None:
        # A chain is known by the weight that it needs first.
        forward = self._phases is FORWARD
        if (owner := self.stages[0 if forward else self.last].owner) is not None:
            step = self.mesh.step
            (step.prefetch if forward else step.prefetch_backward).start(owner, self.mesh)

    def _release(self, p: int, name: str, i: int | None) -> None:
        """Let go of an operand, unless backward wants it."""
        want = self._wanted[p]
        kept = {"A": want.wgrad, "B": want.dgrad}.get(name, False) and not want.again(name.lower())
        if self._phases is FORWARD and kept:
            return
        chunks = (i,) if i is not None else (None, *range(self.chunks))
        for chunk in chunks:
            self._tensors.pop((p, name, chunk), None)
        if i is None:
            self._side_by_side.pop((p, name), None)

    # --------------------------------------------------------------------------------------------------- products

    def _product(self, p: int, name: str, operand: Tensor, **how: Any) -> Tensor:
        gemm, plan = self.mesh.gemm, self.stages[p].plan
        return (gemm.forward if name == "C" else gemm.dgrad)(plan, operand, self._tensors[p, "B", None], **how)

    def _complete(self, p: int, name: str, operand: Tensor, begun: Tensor) -> Tensor:
        """The parts of the others, beside or on top of this rank's own."""
        dim, axes = _own_axis(self.stages[p].plan, name) or (0, ())
        ranks, me = self.mesh.grid.size(axes), self.mesh.grid.index(self.mesh.rank, axes)
        if dim == 1:
            others = tuple(j for j in range(ranks) if j != me)
            blocks = blocks_of_result(self.stages[p].plan, name)
            return self._product(p, name, operand, out=begun, blocks=blocks, parts=others, accumulate=True)
        rows = operand.shape[0] // ranks
        for start, stop in ((0, me * rows), ((me + 1) * rows, operand.shape[0])):
            if start < stop:
                self._product(p, name, operand[start:stop], out=begun[start:stop])
        return begun

    def _wgrad(self, p: int) -> Tensor:
        gemm, plan = self.mesh.gemm, self.stages[p].plan
        blocks = blocks_of_result(plan, "dB")
        how: dict[str, Any] = {"blocks": blocks} if blocks > 1 else {}
        a, grad = self._whole(p, "A"), self._whole(p, "dC")
        if a is not None and grad is not None:
            return gemm.wgrad(plan, grad, a, **how)
        operands = [list(self._chunks_of(p, name).values()) for name in ("dC", "A")]
        if not gemm.sums_parts(operands[0][0].dtype):
            dims = (self.rows[p].place(name)[0] for name in ("dC", "A"))
            whole = [torch.cat([joined(c) for c in chunks], dim) for chunks, dim in zip(operands, dims, strict=True)]
            return gemm.wgrad(plan, *whole, **how)
        pairs = list(zip(*operands, strict=True))
        out = gemm.wgrad(plan, *pairs[0], **how)
        for pair in pairs[1:]:
            gemm.wgrad(plan, *pair, out=out, accumulate=True, blocks=blocks)
        return out

    def _bias_gradient(self, p: int) -> Tensor:
        whole = self._whole(p, "dC")
        chunks = self._chunks_of(p, "dC").values() if whole is None else (whole,)
        matrix = is_matrix(self.stages[p].plan)
        sums = [c.sum(1).flatten() if matrix and c.dim() == 3 else c.sum(tuple(range(c.dim() - 1))) for c in chunks]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)

    def _bias(self, p: int) -> Tensor | None:
        if (p, "bias", None) in self._moves:
            self._wait(p, "bias", None)
        return self._tensors.get((p, "bias", None))

    def _take_weight(self, p: int, prefetch: WeightPrefetch) -> None:
        """Take over the gather of the first weight that the chain needs, if it was started ahead."""
        stage, stored = self.stages[p], self._stored[p, "B"]
        if stage.plan.gathers_b and stage.weight is not None and stage.weight.dtype == stored.dtype:
            ahead = prefetch.take(stage.weight, stage.owner, stage.plan)
            if ahead is not None:
                self._moves[p, "B", None] = ahead

    # ----------------------------------------------------------------------------------------------- rows of chunks

    def _place(self, p: int, name: str, i: int, chunk: Tensor) -> Tensor | None:
        """Where chunk i is wanted, contiguous: beside the other gathered ones, or in the shard that goes out."""
        plan, rows = self.stages[p].plan, self.rows[p]
        if not is_matrix(plan) or rows.place(name)[0] != 0:
            return None
        if name in ("A", "dC"):
            steps = plan.relayouts[name]
            if any(step.kind != "all_gather" or step.dim != 0 for step in steps) or not self._wanted[p].wgrad:
                return None
            if name == "A" and self._phases is FORWARD and self._wanted[p].again("a"):
                return None  # each chunk goes when it is multiplied
            if not steps and rows.place(name)[1] == 1 and (p, name) in self._stored:
                return None  # the shard as it is
            height = chunk.shape[0] * prod(self.mesh.grid.size(step.axes) for step in steps)
            if (p, name) not in self._side_by_side:
                self._side_by_side[p, name] = chunk.new_empty((self.chunks * height, chunk.shape[1]))
            return self._side_by_side[p, name][i * height : (i + 1) * height]
        if (p, name) not in ((self.last, "C"), (0, "dA")) or rows.place(name)[1] != 1:
            return None
        shard = self._shard(p, name, chunk)
        return shard[i * (shard.shape[0] // self.chunks) : (i + 1) * (shard.shape[0] // self.chunks)]

    def _shard(self, p: int, name: str, like: Tensor) -> Tensor:
        """The shard that goes out, filled chunk by chunk."""
        if (p, name) not in self._stored:
            stage = self.stages[p]
            shape = stage.plan.shard_shape("C" if name == "C" else "A", stage.sizes)
            self._stored[p, name] = like.new_empty(shape)
        return self._stored[p, name]

    def _result(self, p: int, name: str) -> Tensor:
        """The shard of "C" or "dA", its rows in the order in which it is stored."""
        chunks = list(self._chunks_of(p, name).values())
        if len(chunks) == 1:
            return chunks[0]
        shard = self._shard(p, name, chunks[0])
        for i, chunk in enumerate(chunks):
            if self._place(p, name, i, chunk) is None:
                self.rows[p].paste(shard, name, i, chunk)
        return shard

    def _whole(self, p: int, name: str) -> Tensor | None:
        """All rows of a gathered operand, chunk by chunk: any one order serves a sum over rows.

        None where they lie as blocks of columns, in several chunks.
        """
        for key in ((p, name, None), *([(p, name, 0)] if self.chunks == 1 else [])):
            if key in self._tensors:
                return self._tensors[key]
        plan, rows = self.stages[p].plan, self.rows[p]
        if is_matrix(plan) and self._tensors[p, name, 0].dim() == 3:
            return None
        if not plan.relayouts[name] and rows.place(name)[1] == 1 and (p, name) in self._stored:
            whole = self._stored[p, name]
        elif (p, name) in self._side_by_side:
            whole = self._side_by_side[p, name]
        else:
            whole = torch.cat(list(self._chunks_of(p, name).values()), rows.place(name)[0])
        self._tensors[p, name, None] = whole
        return whole

    def _chunks_of(self, p: int, name: str) -> dict[Key, Tensor]:
        whole = self._tensors.get((p, name, None))
        if whole is not None:
            chunks = whole.chunk(self.chunks, self.rows[p].place(name)[0])
            return {(p, name, i): chunk for i, chunk in enumerate(chunks)}
        return {(p, name, i): self._tensors[p, name, i] for i in range(self.chunks)}


_ACTIONS = {
    name: getattr(Execution, "_" + name)
    for name in ("start", "wait", "own", "multiply", "activate", "prefetch", "release")
}


@lru_cache(maxsize=4096)
def _own_axis(plan: MatMulPlan, name: str) -> tuple[int, tuple[str, ...]] | None:
    """The dim and the axes over which the operand of a result is gathered; None where a rank has no part of its own."""
    steps = plan.relayouts[OPERAND[name]]
    letters, result = (plan.a_letters, plan.c_letters) if name == "C" else (plan.c_letters, plan.a_letters)
    if not is_matrix(plan) or len(steps) != 1 or steps[0].kind != "all_gather":
        return None
    dim = steps[0].dim or 0
    is_row = dim == 0 and letters[0] == result[0] == "m"
    is_summed = dim == 1 and letters[1] not in result
    return (dim, steps[0].axes) if is_row or is_summed else None
