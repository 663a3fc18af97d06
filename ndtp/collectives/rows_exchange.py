"""All-to-alls, gathers and reduce-scatters of rows, of which every rank may have another number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ndtp.algebra.row_flow import RowMove
from ndtp.algebra.steps import Step
from ndtp.collectives.handles import Handle, Route, Started
from ndtp.collectives.labels import Label
from ndtp.collectives.sums import LOW_PRECISION

if TYPE_CHECKING:
    from ndtp.collectives.collectives import Collectives


def start_rows(
    x: Tensor, move: RowMove, collectives: Collectives, op: str, phase: str, part: str = "", kind: str = ""
) -> Handle:
    """Launch a move of rows `x` [rows, ..]; `wait` gives those that this rank has then.

    Messages have the sizes that the move says, and no padding: every byte that is sent is one of a row.  Sums are made
    in fp32 and rounded once, in the order of the ranks along the axes.

    Args:
        kind: of the rows, as `ndtp.Wire` has them; "": they travel as they are.
    """
    groups = collectives.groups
    step, (rows, *others) = Step(move.kind, move.axes, 0), x.shape
    assert rows == move.before, f"{rows} rows for {move}"
    group = groups.group(groups.grid.nontrivial(move.axes), "gather" if move.kind == "all_gather" else "scatter")
    width = math.prod(others)
    codec = collectives.codec((1, width), x.dtype, kind)
    sent_as = x.dtype if codec is None else codec.dtype
    channel = collectives.channel(group, Label((op,), phase, move.kind, move.axes, part), sent_as)
    route = Route(step, (op,), phase, part, channel)
    route.shape = (move.after, *others)
    route.received = move.received * width
    if codec is not None:
        route.codec, route.coded_bytes = codec, move.received * codec.num_bytes((1, width))
    ranks = groups.grid.size(move.axes)

    def begin(x: Tensor, out: Tensor | None) -> Started:
        assert out is None
        sent = x.detach().contiguous() if codec is None else codec.encode_rows(x.detach().reshape(rows, width))
        landing = sent.new_empty((sum(move.receives), *sent.shape[1:]))
        given = [sent] * ranks if move.kind == "all_gather" else sent.split(move.sends)
        taken = list(landing.split(move.receives))
        taken[move.me].copy_(given[move.me])
        nothing = sent.new_empty(0)
        parts, landings = ([nothing if i == move.me else x[i] for i in range(ranks)] for x in (given, taken))
        work = collectives.exchange_parts(landings, parts, channel)

        def finish() -> Tensor:
            wide = torch.float32 if x.dtype in LOW_PRECISION else x.dtype
            is_sum, arrived = move.kind == "reduce_scatter", landing
            if codec is not None:
                arrived = codec.decode_rows(landing, width, wide if is_sum else x.dtype).view(-1, *others)
            if not is_sum:
                return arrived
            blocks = arrived.view(ranks, move.after, *others)
            return blocks.sum(0, dtype=wide).to(x.dtype)

        return work, finish, (sent, landing), ()

    route.begin = begin
    return collectives.launch(route, x)
