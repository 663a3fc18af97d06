"""When the collectives of gradients start: decided by the order of products, not by that of arrivals."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

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


def test_gradients_that_start_collectives_arrive_under_numbers_of_their_own():
    """Those that arrivals of earlier products have left: nodes of equal numbers come in another order on each rank."""
    queue = LateGradients()

    def product(sequence_number, *sends):
        numbers = [queue.number_of_arrival(each) for each in sends]
        queue.note_chain(sequence_number)
        return numbers

    assert product(10, False, False) == [0, 0], "there is no earlier one"
    assert product(20, False) == [0]
    assert product(30, True, True) == [9, 8]
    assert product(40, True, False, True) == [19, 19, None], "one number is left over, and its own is as good"
    assert product(50, True, True, True) == [29, 28, None]
    assert product(60, True) == [None] and product(70, True) == [None], "products that kept a number leave none"
    assert product(80, False) == [59] and product(90, True) == [None] and product(100, True) == [79]
