"""A chain of products and a number of chunks become a list of tasks.  Pure: printed and tested without processes.

A chain is one product, or several with an activation between each and the next, as in a block.  Products are cut along
M, never along K: partial sums would be written to memory once a chunk.  Chunk i holds rows for every peer, so that it
is the whole problem with M / n rows, and the layouts' exact row order is kept: the rows of a shard are seen as
[blocks, n, rows], where the blocks are the common refinement of all that is gathered and scattered in the chain, and
chunk i is [:, i, :].

While chunk i is multiplied, the gathers of the next chunks, the scatter of the last one and the gather that it enters
in the next product fly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from ndtp.algebra.grid import divisors
from ndtp.algebra.steps import Step, apply

if TYPE_CHECKING:
    from ndtp.algebra.matmul_plan import MatMulPlan

LOOKAHEAD = 2  # gathers in flight at a time, at least: one that is waited for, and one behind it
WINDOW = 2  # chains of products whose weight gradients are on their way at a time in backward
SKEW = 2  # chunks by which a product is behind the one before it in a chain


class Action(str, Enum):
    """The kinds of action that a rank performs on a tensor."""

    START = "start"  # its moves
    START_NEXT = "start next"  # the second of its moves, when the first has had the time of a product
    ADVANCE = "advance"  # the same with what the chains before it left on its way
    WAIT = "wait"  # for its moves
    OWN = "own"  # multiply this rank's own part of an operand that is still on its way, towards this tensor
    MULTIPLY = "multiply"  # the rest of it, or all
    ACTIVATE = "activate"  # make "A" of the C before it, or "dC" of the dA behind it
    DEFER = "defer"  # multiply and start it, but in the next chain if backward goes on to one
    CATCH_UP = "catch up"  # with what the chain before it deferred
    PREFETCH = "prefetch"  # start the gather of the weight that follows the chain, if it is known
    RELEASE = "release"  # let go of an operand, unless backward wants it


class Task(NamedTuple):
    """Something that a rank does with a tensor of a product of the chain.

    `chunk` is None where the whole tensor moves at once.
    """

    action: Action
    tensor: str
    chunk: int | None = None
    product: int = 0

    def __str__(self) -> str:
        where = "" if self.chunk is None else f"[{self.chunk}]"
        return f"{self.action.value} {self.tensor}" + "'" * self.product + where


@dataclass(frozen=True)
class Wanted:
    """The work of one product of a chain in backward.

    Attributes:
        dgrad, wgrad, bias: the gradients that are wanted.
        regather: the operands ("a", "b") that are gathered again.
        whole: its wgrad is in one piece, see `pieces`.
    """

    dgrad: bool = True
    wgrad: bool = True
    bias: bool = False
    regather: tuple[str, ...] = ()
    whole: bool = False

    def again(self, operand: str) -> bool:
        """Return whether backward gathers "a" or "b" again: wgrad needs A, dgrad needs B."""
        return operand in self.regather and (self.wgrad if operand == "a" else self.dgrad)


@cache
def forward_tasks(
    chunks: int, biases: tuple[bool, ...] = (False,), rows_first: tuple[bool, ...] = ()
) -> tuple[Task, ...]:
    """C = A . B + bias for every product, from `biases`: which of them have one.

    B first: a weight needs no activation, and every chunk needs the whole of it; alone, where there are several, since
    links share what is sent at once.  But a product whose rows are there first, see `ndtp.schedule.arrivals`, follows
    the whole of the one before it, since its weight is there no sooner: it is sent behind the rows of that one, and
    until it comes all rows are multiplied by this rank's own part of it.
    """
    return tuple(_forward(chunks, biases, rows_first or (False,) * len(biases)))


def _forward(chunks: int, biases: Sequence[bool], rows_first: Sequence[bool]) -> Iterator[Task]:
    last, waited = len(biases) - 1, 0
    ahead = chunks if any(rows_first[1:2]) else _ahead(chunks)  # a weight that is sent behind all rows wants them soon
    yield Task(Action.START, "B")
    if chunks == 1:
        yield Task(Action.START, "A", 0)
    for p, i in _wavefront(chunks, range(last + 1), [chunks if first else SKEW for first in rows_first]):
        if i == chunks:
            yield Task(Action.RELEASE, "B", None, p)
        else:
            if i == 0:
                if biases[p]:
                    yield Task(Action.START, "bias", None, p)
                yield from _weight_arrives(chunks, p, rows_first[p], ahead)
            is_followed = p < last and rows_first[p + 1]
            if p == 0 and not rows_first[0]:
                until = chunks if is_followed and i >= _all_rows_at(chunks) else i + 1
                for j in range(waited, until):
                    yield Task(Action.WAIT, "A", j)
                    if j + ahead < chunks:
                        yield Task(Action.START, "A", j + ahead)
                waited = until
            elif not rows_first[p]:
                yield Task(Action.WAIT, "A", i, p)
            if p < last and i == (_all_rows_at(chunks) if is_followed and not rows_first[p] else 0):
                yield Task(Action.START, "B", None, p + 1)
            elif p == last and i == min(_behind(chunks), chunks // 4):  # early enough to be there when it is needed
                yield Task(Action.PREFETCH, "B", None, p)
            yield Task(Action.MULTIPLY, "C", i, p)
            yield Task(Action.RELEASE, "A", i, p)
            yield Task(Action.START, "C", i, p)
        if p < last and i > 0:
            yield from _enter("C", "A", i - 1, p, p + 1)
    yield from (Task(Action.WAIT, "C", i, last) for i in range(chunks))


def _weight_arrives(chunks: int, p: int, rows_first: bool, ahead: int) -> Iterator[Task]:
    """The weight of a product is waited for, and this rank's own part multiplied beside what is on its way."""
    for i in range(chunks if rows_first else 0):
        if p == 0 and chunks > 1:
            yield Task(Action.START, "A", i)
        yield Task(Action.WAIT, "A", i, p)
        yield Task(Action.OWN, "C", i, p)
    yield Task(Action.WAIT, "B", None, p)
    if not rows_first:
        if p == 0 and chunks > 1:
            yield from (Task(Action.START, "A", i) for i in range(min(ahead, chunks)))
        if p == 0 or chunks == 1:
            yield Task(Action.OWN, "C", 0, p)


@cache
def backward_tasks(chunks: int, wanted: tuple[Wanted, ...] = (Wanted(),)) -> tuple[Task, ...]:
    """dA = dC . B^T and dB = A^T . dC for every product, last first, of one gather of dC.

    dA's scatters fly while dB is multiplied, and what moves dB's first rows while its last ones are: in as many pieces
    as there are chunks.  dB and the bias's gradient are started here, and waited for at the end of the whole backward.

    The last pieces of the last dB are left to the next chain, half of them, where they fill what its first gather
    takes: what else could be multiplied waits for that.  The others hide the last scatter of this one.
    """
    return tuple(_with_second_moves(chunks, wanted, _backward(chunks, wanted)))


def _with_second_moves(chunks: int, wanted: Sequence[Wanted], tasks: Iterator[Task]) -> Iterator[Task]:
    """Return the tasks with the second collective of a gradient, behind one whole product after the first was sent.

    Nobody can ask a collective whether it is done and start the next one on the answer: ranks would start theirs in
    different orders, and hold different memory.  So this has a place in the order of tasks.  Waiting there costs
    nothing where products take as long as what moves their results; earlier it would where links are the slower ones,
    and what comes later leaves a link idle where they are the faster ones.  What is still owed where the chain ends is
    done so far into the next one.  Of a gradient in one piece it is where the next product begins with its own: at the
    same place among these, whatever the number of chunks.
    """
    work, owed = 0, [(chunks, Task(Action.ADVANCE, "dB", None, len(wanted) - 1))]
    whole: list[Task] = []
    for task in tasks:
        is_end = task.tensor in ("dB", "dbias") or task.action is Action.RELEASE
        while is_end and whole and whole[0].product > task.product:
            yield whole.pop(0)
        yield task
        if task.action is Action.START and task.tensor == "dB" and wanted[task.product].whole:
            whole.append(task._replace(action=Action.START_NEXT))
        elif task.action is Action.START and task.tensor == "dB":
            owed.append((work + chunks, task._replace(action=Action.START_NEXT)))
        elif task.action is Action.MULTIPLY and task.tensor != "dbias":
            work += 1 if task.chunk is not None else chunks
            while owed and owed[0][0] <= work:
                yield owed.pop(0)[1]


def _backward(chunks: int, wanted: Sequence[Wanted]) -> Iterator[Task]:
    last = len(wanted) - 1
    first = next((p for p in range(last, 0, -1) if not wanted[p].dgrad), 0)  # before it nothing is wanted
    if wanted[last].again("b"):
        yield Task(Action.START, "B", None, last)
    yield from (Task(Action.START, "dC", i, last) for i in range(min(_ahead(chunks), chunks)))
    yield Task(Action.CATCH_UP, "dB", None, last)
    for p, i in _wavefront(chunks, range(last, first - 1, -1)):
        enter = _enter("dA", "dC", i - 1, p, p - 1) if p > first and i > 0 else ()
        if i == chunks:
            # Either hides something: the gather into which the last chunk goes, or the scatter from which one comes.
            kept = first_deferred(chunks) if p == first and wanted[p].dgrad and not wanted[p].whole else chunks
            weights = _weight_gradients(chunks, wanted[p], p, kept)
            yield from (*enter, *weights) if chunks > 1 else (*weights, *enter)
        else:
            yield from _dgrad(chunks, wanted, p, i, first)
            yield from enter
    yield from (Task(Action.WAIT, "dA", i, first) for i in range(chunks) if wanted[first].dgrad)


def _dgrad(chunks: int, wanted: Sequence[Wanted], p: int, i: int, first: int) -> Iterator[Task]:
    """One chunk of dA, and what sets off meanwhile."""
    want, last = wanted[p], len(wanted) - 1
    if i == 0:
        if want.again("b"):
            yield Task(Action.WAIT, "B", None, p)
        if want.dgrad and (p == last or chunks == 1):
            yield Task(Action.OWN, "dA", 0, p)
    yield Task(Action.WAIT, "dC", i, p)
    if p == last and (following := i + _ahead(chunks)) < chunks:
        yield Task(Action.START, "dC", following, p)
    if i == 0 and p > first and wanted[p - 1].again("b"):
        yield Task(Action.START, "B", None, p - 1)
    behind = _behind(chunks)
    if want.again("a") and p > 0 and i < behind:
        yield Task(
            Action.ACTIVATE, "A", i, p
        )  # before chunk i of dA goes on its way into dC, and takes what it is made of
    if i == behind:
        for j in range(chunks if want.again("a") else 0):
            if p > 0 and j >= behind:
                yield Task(Action.ACTIVATE, "A", j, p)  # again, rather than kept
            yield Task(Action.START, "A", j, p)
        if p == first:
            yield Task(Action.PREFETCH, "B", None, p)
    if want.dgrad:
        yield Task(Action.MULTIPLY, "dA", i, p)
        yield Task(Action.START, "dA", i, p)


def first_deferred(chunks: int) -> int:
    """The piece of a weight's gradient from which on they may be left to the next chain; `chunks`: none."""
    return chunks - chunks // 2


def pieces(chunks: int, whole: bool = False) -> Sequence[int | None]:
    """Return the pieces of a weight's gradient, or None where the gradient is one piece.

    So it is of a gradient that is summed over ranks with rows of their own, `dp`: these may have other numbers of rows,
    which are cut into other numbers of chunks, and must come to the same collectives in the same order.
    """
    return (None,) if whole or chunks == 1 else range(chunks)


def _weight_gradients(chunks: int, want: Wanted, p: int, deferred: int) -> Iterator[Task]:
    if want.wgrad:
        if want.again("a"):
            yield from (Task(Action.WAIT, "A", j, p) for j in range(chunks))
        for j in pieces(chunks, want.whole)[:deferred]:
            yield Task(Action.MULTIPLY, "dB", j, p)
            yield Task(Action.START, "dB", j, p)
        yield from (Task(Action.DEFER, "dB", j, p) for j in range(deferred, chunks))
    if want.bias:
        yield Task(Action.MULTIPLY, "dbias", None, p)
        yield Task(Action.START, "dbias", None, p)
    yield from (Task(Action.RELEASE, operand, None, p) for operand in ("B", "A", "dC"))


def _wavefront(chunks: int, products: Sequence[int], skews: Sequence[int] | None = None) -> Iterator[tuple[int, int]]:
    """(product, chunk): each product is some chunks behind the one that feeds it; `chunks` stands for its end.

    So what links the two, a scatter and a gather, flies while either goes on with other chunks.

    Args:
        skews: how many behind the one before it each is; default: `SKEW`.
    """
    begins = [0, *accumulate((skews or [SKEW] * len(products))[1:])]
    for time in range(begins[-1] + chunks + 1):
        for begin, product in zip(begins, products, strict=True):
            if 0 <= (chunk := time - begin) <= chunks:
                yield product, chunk


def _enter(result: str, operand: str, chunk: int, product: int, following: int) -> Iterator[Task]:
    """A chunk of a product's result becomes one of the next product's operand, and sets off."""
    yield Task(Action.WAIT, result, chunk, product)
    yield Task(Action.ACTIVATE, operand, chunk, following)
    yield Task(Action.START, operand, chunk, following)


def _all_rows_at(chunks: int) -> int:
    """The chunk that waits for a weight sent after all rows.

    It is half way, since all of the weight arrives at once.
    """
    return chunks // 2


def _behind(chunks: int) -> int:
    """The chunk at which the last gather of rows is on its way: what comes after them may start."""
    return max(0, chunks - 1 - _ahead(chunks))


def _ahead(chunks: int) -> int:
    """Gathers of rows that are in flight at a time: of so many chunks three where there are eight."""
    return max(LOOKAHEAD, 3 * chunks // 8)


@dataclass(frozen=True)
class RowChunks:
    """The cut of the rows of one product's shards of A and C (and of dA and dC) into `count` chunks."""

    count: int
    a_dim: int = 0
    a_blocks: int = 1
    c_dim: int = 0
    c_blocks: int = 1

    @classmethod
    def of(cls, plans: Sequence[MatMulPlan], sizes: Sequence[Mapping[str, int]], wanted: int) -> tuple[RowChunks, ...]:
        """Return the cut for every product of a chain, from the global size of every letter.

        At most `wanted` chunks; fewer where the rows do not divide, or an all-reduce of a chunk would send more than
        its part of the whole one; one where the rows take other moves, or are not the rows of the next product.
        """
        whole = (WHOLE,) * len(plans)
        if wanted <= 1:
            return whole
        dims = [(plan.a_letters.index("m"), plan.c_letters.index("m")) for plan in plans]
        if any(c_dim != a_dim for (_, c_dim), (a_dim, _) in pairwise(dims)):
            return whole
        peers = []
        for plan, (a_dim, c_dim) in zip(plans, dims, strict=True):
            gathered = _ranks_that(plan, "A", a_dim, "all_gather")
            scattered = _ranks_that(plan, "C", c_dim, "reduce_scatter")
            if gathered is None or scattered is None:
                return whole
            peers.append((gathered, scattered))
        blocks = math.lcm(*(ranks for pair in peers for ranks in pair))
        held = {plan.held_shape(("m",), size) for plan, size in zip(plans, sizes, strict=True)}
        if len(held) > 1:
            return whole
        ((local,),) = held
        if not local or local % blocks:
            return whole
        reduced = [each for plan, size in zip(plans, sizes, strict=True) for each in _all_reduced(plan, size)]
        possible = [n for n in divisors(local // blocks) if n <= wanted and cut_alike(reduced, n)]
        count = max(possible)  # one is always
        if count == 1:
            return whole
        return tuple(
            cls(count, a_dim, blocks // gathered, c_dim, blocks // scattered)
            for (a_dim, c_dim), (gathered, scattered) in zip(dims, peers, strict=True)
        )

    def place(self, name: str) -> tuple[int, int]:
        """The dim of a tensor's rows, and into how many blocks its shard's rows fall."""
        return (self.a_dim, self.a_blocks) if name.endswith("A") else (self.c_dim, self.c_blocks)


WHOLE = RowChunks(1)


def _all_reduced(plan: MatMulPlan, sizes: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """(elements, ranks) of every all-reduce of C and dA."""
    for tensor in ("C", "dA"):
        for step, after, _ in apply(plan.grid, plan.relayouts[tensor], plan.start_shape(tensor, sizes)):
            if step.kind == "all_reduce":
                yield math.prod(after), plan.grid.size(step.axes)


def cut_alike(all_reduced: Sequence[tuple[int, int]], chunks: int) -> bool:
    """Return whether all-reduces send as much in chunks as whole: each rank's block is rounded up in both."""
    return all(chunks * -(-(elements // chunks) // ranks) == -(-elements // ranks) for elements, ranks in all_reduced)


def _ranks_that(plan: MatMulPlan, tensor: str, dim: int, kind: str) -> int | None:
    """The ranks over which the rows are gathered or scattered; None if they are moved in any other way."""
    steps: list[Step] = [step for step in plan.relayouts[tensor] if dim in (step.dim, step.source)]
    if any(step.kind != kind for step in steps):
        return None
    return math.prod(plan.grid.size(step.axes) for step in steps)
