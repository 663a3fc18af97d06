"""When the collectives of gradients start: decided by the order of products, not by that of arrivals."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from ndtp.runtime.arrival_numbers import ArrivalNumbers
from ndtp.runtime.late_gradients import LateGradients
from ndtp.runtime.partial_sums import PartialSums


class NotedMove:
    """A move of three collectives that notes which one it starts."""

    is_held = False

    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self.noted, self.started = name, noted, 1

    def start_next(self) -> None:
        if self.started < 3:
            self.started += 1
            self.noted.append(f"{self.started} of {self.name}")

    def wait(self) -> None:
        while self.started < 3:
            self.start_next()

    def take(self) -> torch.Tensor:
        return torch.zeros(())


@pytest.mark.parametrize("arrivals", list(permutations(["weight", "bias"])), ids="-".join)
def test_gradients_of_one_product_take_no_younger_ones_along_whichever_arrives_first(arrivals):
    """Autograd breaks the tie between a weight and its bias as it likes, and on each rank otherwise."""
    queue, noted, sums = LateGradients(), [], PartialSums()
    of_product = {}
    for product in ("second", "first"):  # as backward comes to them
        for name in ("weight", "bias"):
            move = NotedMove(f"{name} of {product}", noted)
            of_product[product, name] = queue.expect(move, None, sums)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            queue.defer(lambda: noted.append("rest of second"))
            queue.came_through([of_product["second", name] for name in ("weight", "bias")], None)
            queue.start_next()  # where the chain that follows has multiplied enough
            queue.came_through([of_product["first", name] for name in ("weight", "bias")], None)
            expected = ["rest of second", "2 of weight of second", "2 of bias of second"]
            assert noted == expected
            for name in arrivals:
                of_product["second", name].arrive()
            assert noted == [*expected, "3 of weight of second", "3 of bias of second"]
            noted.clear()
            return grad

    Backward.apply(torch.ones((), requires_grad=True)).backward()
    assert noted == [f"{i} of {name} of first" for i in (2, 3) for name in ("weight", "bias")]


def test_what_a_chain_defers_is_done_where_its_gradients_are_waited_for_and_no_earlier():
    """The window moves on at the end of every chain; what that one deferred is for the gather of the next."""
    queue, noted, sums = LateGradients(), [], PartialSums()

    def chain(name, defers=True):
        if defers:
            queue.defer(lambda: noted.append(f"rest of {name}"))
        queue.came_through([queue.expect(NotedMove(name, noted), None, sums)], None)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            chain("third", defers=False)
            chain("second", defers=False)
            chain("first")
            assert noted == ["2 of third", "3 of third"]
            for norm in ("its norm", "and that one's input"):  # weights of no product, which has nothing to fill
                chain(norm, defers=False)
            assert noted[4:] == ["rest of first", "2 of first", "3 of first"]
            return grad

    Backward.apply(torch.ones((), requires_grad=True)).backward()


def test_every_gradient_arrives_under_a_number_of_its_own():
    """It is one that an arrival of an earlier product has left, of the one before the last where that has some left."""
    numbers, given, own = ArrivalNumbers(), [], 10**6

    def product(weights):
        nonlocal own
        own += 100
        made = [numbers.exchange(own + i) for i in range(weights)]
        numbers.end_product()
        given.extend(made)
        return made

    first = product(2) + product(1)
    assert max(first) < 10**6, "there is no earlier one: any number that no node has"
    assert product(2) == [1000101, 1000100]
    assert product(1) == [1000200]
    assert product(1) == [1000301]
    assert product(3)[:2] == [1000400, 1000300], "more than that product has left"
    for _ in range(9):
        product(6)
    assert len(set(given)) == len(given)
