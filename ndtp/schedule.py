"""A plan and a number of chunks become a list of tasks.  Pure: it prints, and is tested, without processes.

Products are cut along M, never along K: partial sums would be written to memory once a chunk.  Chunk i holds rows for
every peer, so that it is the whole problem with M / n rows, and the layouts' exact row order is kept: the rows of a
shard are seen as [blocks, n, rows], where the blocks are the common refinement of what is gathered and what is
scattered, and chunk i is [:, i, :].

While chunk i is multiplied, the gathers of the next chunks and the scatter of the last one fly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ndtp.relayout import Step

if TYPE_CHECKING:
    from torch import Tensor

    from ndtp.contraction import MatMulPlan

LOOKAHEAD = 2  # gathers in flight at a time: one that is waited for, and one behind it


@dataclass(frozen=True)
class Task:
    """Something that a rank does: start or wait for the moves of a tensor, or multiply to get one.

    "prefetch" starts the gather of the next product's B, if it is known.

    `chunk` is None where the whole tensor moves at once.
    """

    action: str
    tensor: str
    chunk: int | None = None

    def __str__(self) -> str:
        return f"{self.action} {self.tensor}" + ("" if self.chunk is None else f"[{self.chunk}]")


@cache
def forward_tasks(chunks: int) -> tuple[Task, ...]:
    """C = A . B.  B first: a weight needs no activation, and every chunk needs the whole of it."""
    waits = (Task("wait", "C", i) for i in range(chunks))
    return (Task("start", "B"), *_pipeline("A", "C", chunks, needs="B"), *waits)


@cache
def backward_tasks(chunks: int, dgrad: bool, wgrad: bool, bias: bool, regather: tuple[str, ...]) -> tuple[Task, ...]:
    """dA = dC . B^T and dB = A^T . dC, of one gather of dC.  dA's scatters fly while dB is multiplied.

    dB and the bias's gradient are started here, and waited for at the end of the whole backward pass.
    """
    return tuple(_backward_tasks(chunks, dgrad, wgrad, bias, regather))


def _backward_tasks(chunks: int, dgrad: bool, wgrad: bool, bias: bool, regather: tuple[str, ...]) -> Iterator[Task]:
    again_a, again_b = wgrad and "a" in regather, dgrad and "b" in regather
    if again_b:
        yield Task("start", "B")
    if dgrad:
        yield from _pipeline("dC", "dA", chunks, needs="B" if again_b else None)
    else:
        yield from (Task("start", "dC", i) for i in range(chunks))
        yield from (Task("wait", "dC", i) for i in range(chunks))
    if again_a:
        yield from (Task("start", "A", i) for i in range(chunks))
        yield from (Task("wait", "A", i) for i in range(chunks))
    if wgrad:
        yield Task("multiply", "dB")
        yield Task("start", "dB")
    if bias:
        yield Task("multiply", "dbias")
        yield Task("start", "dbias")
    if dgrad:
        yield from (Task("wait", "dA", i) for i in range(chunks))


def _pipeline(source: str, result: str, chunks: int, needs: str | None) -> Iterator[Task]:
    yield from (Task("start", source, i) for i in range(min(LOOKAHEAD, chunks)))
    if needs:
        yield Task("wait", needs)
    for i in range(chunks):
        yield Task("wait", source, i)
        if i + LOOKAHEAD < chunks:
            yield Task("start", source, i + LOOKAHEAD)
        if i == chunks - 1 and result == "C":
            yield Task("prefetch", "B")  # the next product's, behind all gathers of this one
        yield Task("multiply", result, i)
        yield Task("start", result, i)


@dataclass(frozen=True)
class RowChunks:
    """How the rows of the shards of A and C (and of dA and dC) are cut into `count` chunks."""

    count: int
    a_dim: int = 0
    a_blocks: int = 1
    c_dim: int = 0
    c_blocks: int = 1

    @classmethod
    def of(cls, plan: MatMulPlan, sizes: Mapping[str, int], wanted: int) -> RowChunks:
        """At most `wanted` chunks; fewer where the rows do not divide, one where the rows take other moves."""
        if wanted <= 1:
            return WHOLE
        a_dim, c_dim = plan.a_letters.index("m"), plan.c_letters.index("m")
        gathered = _ranks_that(plan, "A", a_dim, "all_gather")
        scattered = _ranks_that(plan, "C", c_dim, "reduce_scatter")
        if gathered is None or scattered is None:
            return WHOLE
        blocks = math.lcm(gathered, scattered)
        rows = sizes["m"] // plan.grid.size(plan.orders["m"])
        count = max((n for n in range(1, wanted + 1) if rows % (blocks * n) == 0), default=1)
        return cls(count, a_dim, blocks // gathered, c_dim, blocks // scattered) if count > 1 else WHOLE

    def cut(self, shard: Tensor, name: str, i: int) -> Tensor:
        """Chunk i of a shard of "A" or "dC"."""
        if self.count == 1:
            return shard
        dim, blocks = self.place(name)
        return shard.unflatten(dim, (blocks, self.count, -1)).select(dim + 1, i).flatten(dim, dim + 1)

    def paste(self, shard: Tensor, name: str, i: int, chunk: Tensor) -> None:
        """Write chunk i of a shard of "C" or "dA"."""
        dim, blocks = self.place(name)
        place = shard.unflatten(dim, (blocks, self.count, -1)).select(dim + 1, i)
        place.copy_(chunk.unflatten(dim, (blocks, -1)))

    def place(self, name: str) -> tuple[int, int]:
        """The dim of a tensor's rows, and into how many blocks its shard's rows fall."""
        return (self.a_dim, self.a_blocks) if name.endswith("A") else (self.c_dim, self.c_blocks)


WHOLE = RowChunks(1)


def _ranks_that(plan: MatMulPlan, tensor: str, dim: int, kind: str) -> int | None:
    """The ranks over which the rows are gathered or scattered; None if they are moved in any other way."""
    steps: list[Step] = [step for step in plan.relayouts[tensor] if dim in (step.dim, step.source)]
    if any(step.kind != kind for step in steps):
        return None
    return math.prod(plan.grid.size(step.axes) for step in steps)
