"""The functions of a bound chain: each acts on a list of slots, and does one step of one task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled

from ndtp.collectives.handles import Route
from ndtp.collectives.recorder import NOTHING, span
from ndtp.runtime.moves import Move, Pieces, Way
from ndtp.schedule.tasks import RowChunks

if TYPE_CHECKING:
    from ndtp.compute.gemm import Multiply

SlotList = list[Any]
Run = Callable[[SlotList], None]
Get = Callable[[SlotList], Tensor]

# The first slots of every phase: what a call brings beside its tensors.
STEP, WEIGHT, OWNER, HELD, DEFERS, LEAVES, FIRST = range(7)


class Place(NamedTuple):
    """Rows of the tensor in a slot."""

    slot: int
    start: int
    stop: int

    def of(self, slots: SlotList) -> Tensor:
        rows: Tensor = slots[self.slot][self.start : self.stop]
        return rows


def clear(slot: int) -> Run:
    def run(slots: SlotList) -> None:
        slots[slot] = None

    return run


# ----------------------------------------------------------------------------------------------------------- moves


def start(slot: int, source: int, way: Way, place: Place | None, is_last_use: bool) -> Run:
    """Send a tensor off; one that is used no more is the collective's to hold."""
    collectives, leg = way.collectives, way.legs[0]
    at_once = leg if len(way.legs) == 1 and isinstance(leg, Route) else None

    def run(slots: SlotList) -> None:
        out, x = None if place is None else place.of(slots), slots[source]
        if is_last_use:
            slots[source] = None
        slots[slot] = Move(way, x, out).start() if at_once is None else collectives.launch(at_once, x, out)

    return run


def wait(slot: int) -> Run:
    """Bring a tensor home."""

    def run(slots: SlotList) -> None:
        slots[slot] = slots[slot].wait()

    return run


def put(slot: int, source: int, place: Place) -> Run:
    def run(slots: SlotList) -> None:
        slots[slot] = place.of(slots).copy_(slots[source])

    return run


def start_gradient(slot: int, source: int, way: Way, name: tuple[int, str]) -> Run:
    """Send a gradient of a weight or bias off, which stops before an all-reduce if the call says so."""
    feeds = way.feeds_back

    def run(slots: SlotList) -> None:
        x, slots[source] = slots[source], None
        feed = slots[STEP].residuals.feed(slots[LEAVES].get(name), name) if feeds else None
        slots[slot] = Move(way, x, hold=name in slots[HELD], feed=feed).start()

    return run


def start_piece(slot: int, source: int, way: Way, whole: tuple[int, ...], rows: slice) -> Run:
    """Send rows of a gradient off, towards their place in the whole."""

    def run(slots: SlotList) -> None:
        x, slots[source] = slots[source], None
        if slots[slot] is None:
            slots[slot] = Pieces(x.new_empty(whole))
        slots[slot].add_piece(way, x, rows)

    return run


def start_next(slot: int, piece: int | None) -> Run:
    """The second collective of a gradient, or of a piece of it."""

    def run(slots: SlotList) -> None:
        move = slots[slot]
        (move if piece is None else move.moves[piece]).start_next()

    return run


def advance(slots: SlotList) -> None:
    """The second collectives of gradients that earlier chains left on their way."""
    slots[STEP].late.start_next()


def catch_up(slots: SlotList) -> None:
    """Do what the chain before it deferred."""
    slots[STEP].late.catch_up()


def defer(runs: Sequence[Run], needed: Sequence[int | None], title: tuple[str, str, str, str]) -> Run:
    """Do these later, with what is in the slots that they need by now; at once if the call defers nothing.

    Args:
        title: what a profiler calls the first of them.
    """
    product, *rest = runs

    def do(slots: Any, recorder: Any) -> None:
        watched = recorder is not None or _profiler_enabled()
        with span(recorder, *title) if watched else NOTHING:
            product(slots)
        for each in rest:
            each(slots)

    def run(slots: SlotList) -> None:
        step = slots[STEP]
        if not slots[DEFERS]:
            do(slots, step.recording.recorder)
            return
        kept = {slot: slots[slot] for slot in needed if slot is not None}
        step.late.defer(lambda: do(kept, step.recording.recorder))

    return run


def where_deferred(is_deferred: bool, runs: Sequence[Run]) -> Run:
    """Do these only if the call leaves pieces of a gradient to the next chain, or only if it does not."""

    def run(slots: SlotList) -> None:
        if slots[DEFERS] is is_deferred:
            for each in runs:
                each(slots)

    return run


def multiply_rows_of_whole(
    slot: int, product: Multiply, one: Get, other: Get, whole: tuple[int, ...], rows: slice
) -> Run:
    """Rows of a gradient that is put together where it stays."""

    def run(slots: SlotList) -> None:
        x = one(slots)
        if slots[slot] is None:
            slots[slot] = Pieces(x.new_empty(whole), is_deferred=True)
        product(x, other(slots), out=slots[slot].tensor[rows])

    return run


def take_or_start(slot: int, source: int, way: Way, is_forward: bool) -> Run:
    """Take the gather of a weight over if it was started ahead."""

    def run(slots: SlotList) -> None:
        ahead = None
        if slots[OWNER] is not None:
            step = slots[STEP]
            order = step.prefetch if is_forward else step.prefetch_backward
            ahead = order.take(slots[WEIGHT], slots[OWNER], way)
        slots[slot] = way.start(slots[source]) if ahead is None else ahead

    return run


def start_following(is_forward: bool) -> Run:
    """Start the gather of the weight that follows the chain."""

    def run(slots: SlotList) -> None:
        if slots[OWNER] is not None:
            step = slots[STEP]
            (step.prefetch if is_forward else step.prefetch_backward).start(slots[OWNER])

    return run


# -------------------------------------------------------------------------------------------------------- products


def multiply(slot: int, product: Multiply, one: int, other: int) -> Run:
    def run(slots: SlotList) -> None:
        slots[slot] = product(slots[one], slots[other])

    return run


def multiply_own_rows(slot: int, shape: tuple[int, ...], product: Multiply, own: int, other: int, at: int) -> Run:
    """Multiply this rank's own rows into a new tensor for all rows."""

    def run(slots: SlotList) -> None:
        x = slots[own]
        slots[slot] = result = x.new_empty(shape)
        product(x, slots[other], out=result[at : at + x.shape[0]])

    return run


def multiply_rows(slot: int, product: Multiply, one: int, other: int, start: int, stop: int) -> Run:
    def run(slots: SlotList) -> None:
        product(slots[one][start:stop], slots[other], out=slots[slot][start:stop])

    return run


def multiply_arriving(slot: int, shape: tuple[int, ...], product: Multiply, handle: int, other: int) -> Run:
    """Rows of all ranks as they come, this rank's own first, into a new tensor for all of them."""

    def run(slots: SlotList) -> None:
        out = None
        for part, x in slots[handle].arriving():
            if out is None:
                slots[slot] = out = x.new_empty(shape)
            product(x, slots[other], out=out[part * x.shape[0] : (part + 1) * x.shape[0]])

    return run


def multiply_own_part(slot: int, product: Multiply, own: int, other: int, ranks: int) -> Run:
    """Multiply this rank's own part of a sum over the contracted dim, as one of several blocks."""

    def run(slots: SlotList) -> None:
        slots[slot] = product(slots[own].expand(ranks, -1, -1), slots[other])

    return run


def multiply_own_weight(slot: int, product: Multiply, one: int, own: int, ranks: int) -> Run:
    """Multiply this rank's own part of a sum over the contracted dim, where the weight is summed over by parts."""

    def run(slots: SlotList) -> None:
        slots[slot] = product(slots[one], slots[own].expand(ranks, -1, -1))

    return run


def multiply_others(slot: int, product: Multiply, one: int, other: int) -> Run:
    def run(slots: SlotList) -> None:
        product(slots[one], slots[other], out=slots[slot])

    return run


def multiply_chunks(slot: int, products: Sequence[Multiply], ones: Sequence[Get], others: Sequence[Get]) -> Run:
    """The sum of products of chunks."""

    def run(slots: SlotList) -> None:
        out = products[0](ones[0](slots), others[0](slots))
        for product, one, other in zip(products[1:], ones[1:], others[1:], strict=True):
            product(one(slots), other(slots), out=out)
        slots[slot] = out

    return run


def multiply_joined(slot: int, product: Multiply, one: Get, other: Get) -> Run:
    def run(slots: SlotList) -> None:
        slots[slot] = product(one(slots), other(slots))

    return run


def sum_rows(slot: int, chunks: Sequence[tuple[Get, bool]]) -> Run:
    """The gradient of a bias; chunks lie whole or as blocks of columns."""

    def run(slots: SlotList) -> None:
        sums = []
        for get, is_blocks in chunks:
            x = get(slots)
            sums.append(x.sum(1).flatten() if is_blocks else x.sum(tuple(range(x.dim() - 1))))
        slots[slot] = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)

    return run


# ------------------------------------------------------------------------------------------ activations and biases


def activate(slot: int, function: Callable[..., Tensor], operands: Sequence[int], name: str, out: Get | None) -> Run:
    """Forward of the pre-activation; backward of the gradient and the pre-activation.

    Args:
        out: where to put it.
    """

    def run(slots: SlotList) -> None:
        slots[slot] = function(*[slots[each] for each in operands], name, None if out is None else out(slots))

    return run


def add(slot: int, other: int) -> Run:
    def run(slots: SlotList) -> None:
        slots[slot].add_(slots[other])

    return run


# ------------------------------------------------------------------------------------------------------ rows of chunks


def new(slot: int, shape: tuple[int, ...], like: int) -> Run:
    def run(slots: SlotList) -> None:
        slots[slot] = slots[like].new_empty(shape)

    return run


def cut(slot: int, rows: RowChunks, stored: int, name: str, i: int, out: Get | None) -> Run:
    """Chunk i of a shard of "A" or "dC"; a copy if it is to be put somewhere, or lies in several blocks."""
    dim = rows.place(name)[0]

    def run(slots: SlotList) -> None:
        chunk = _rows_of_chunk(slots[stored], rows, name, i)
        if out is None:
            slots[slot] = chunk.flatten(dim, dim + 1)
        else:
            slots[slot] = place = out(slots)
            place.unflatten(dim, chunk.shape[dim : dim + 2]).copy_(chunk)

    return run


def paste(slot: int, rows: RowChunks, name: str, i: int, chunk: int) -> Run:
    """Write chunk i of a shard of "C" or "dA"."""

    def run(slots: SlotList) -> None:
        place = _rows_of_chunk(slots[slot], rows, name, i)
        place.copy_(slots[chunk].reshape(place.shape))

    return run


def _rows_of_chunk(shard: Tensor, rows: RowChunks, name: str, i: int) -> Tensor:
    """Return a view [.., blocks, rows, ..] of a chunk's rows."""
    dim, blocks = rows.place(name)
    return shard.unflatten(dim, (blocks, rows.count, -1)).select(dim + 1, i)


def join(slot: int, chunks: Sequence[int], dim: int) -> Run:
    def run(slots: SlotList) -> None:
        slots[slot] = torch.cat([slots[chunk] for chunk in chunks], dim)

    return run


def get(slot: int) -> Get:
    return lambda slots: slots[slot]


def get_own(landing: Place, parts: tuple[int, ...], me: int) -> Get:
    """Return this rank's part of a place into which all ranks' parts are gathered, [ranks, ..]."""
    return lambda slots: landing.of(slots).view(parts)[me]


def get_part(slot: int, dim: int, start: int, size: int) -> Get:
    return lambda slots: slots[slot].narrow(dim, start, size)
