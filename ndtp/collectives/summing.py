"""`SummingCollectives`: low precision is summed in fp32, of parts that ranks exchange, and not rounded at each hop."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ndtp.collectives.collectives import Collectives
from ndtp.collectives.handles import Begin, Channel, Route, Shape, Started
from ndtp.collectives.sums import LOW_PRECISION, Sum


class SummingCollectives(Collectives):
    """Collectives whose sums of fp16 and bf16 are fp32 inside, in the order of the ranks, and rounded once.

    A reduce-scatter is an all-to-all of the parts and a sum of what has arrived, an all-reduce that and an all-gather:
    the same bytes as a ring's.
    """

    def _legs(self, bind: Callable[[], Route], shape: Shape, dtype: torch.dtype) -> tuple[Route, ...]:
        """An all-reduce in low precision is a reduce-scatter and an all-gather."""
        route, count = bind(), math.prod(shape)
        if route.kind != "all_reduce":
            return (route,)
        ranks = self.groups.grid.size(route.axes)
        if (at_once := self._in_one_exchange(route.channel, ranks, shape, count)) is not None:
            route.begin = at_once
            return (route,)
        if self.sums_everywhere(dtype):
            return (route,)
        # Of the flat tensor, padded: the same volume.
        padded = count + -count % ranks
        gather = bind()
        to, reduce = gather.channel, self._reduce(route.channel, ranks, (padded // ranks,))
        route.shape, gather.follows = (padded // ranks,), True

        def begin(x: Tensor, out: Tensor | None) -> Started:
            flat = self.ring.borrow((padded,), x)
            flat[:count].view(shape).copy_(x.detach())
            flat[count:].zero_()
            work, finish, held, borrowed = reduce(flat, None)
            return work, finish, held, (flat, *borrowed)

        def begin_gather(x: Tensor, out: Tensor | None) -> Started:
            gathered = x.new_empty((padded,))

            def finish() -> Tensor:
                summed = gathered[:count].view(shape)
                return summed if out is None else out.copy_(summed)

            return self._gather(gathered, x, to), finish, (x, gathered), ()

        route.begin, gather.begin = begin, begin_gather
        return route, gather

    def _in_one_exchange(self, to: Channel, ranks: int, shape: Shape, count: int) -> Begin | None:
        """Return how to begin an all-reduce that takes no more than one exchange, if there is such a way."""
        return None

    def sums_everywhere(self, dtype: torch.dtype) -> bool:
        """Return whether an all-reduce is left to `_sum_everywhere`."""
        return dtype not in LOW_PRECISION

    def _reduce(self, to: Channel, ranks: int, shape: Shape) -> Begin:
        exchanged, at_once = self._reduce_all(to, ranks, shape), super()._reduce(to, ranks, shape)

        def begin(sent: Tensor, out: Tensor | None) -> Started:
            return (exchanged if sent.dtype in LOW_PRECISION else at_once)(sent, out)

        return begin

    def _reduce_all(self, to: Channel, ranks: int, shape: Shape) -> Begin:
        def begin(sent: Tensor, out: Tensor | None) -> Started:
            received = self.ring.borrow(sent.shape, sent)
            work = self._exchange(received, sent, to)
            return work, Sum(received.view(ranks, *shape), out), (sent, received), (received,)

        return begin
