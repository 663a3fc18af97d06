"""What collectives and products cost, as it is measured."""

from __future__ import annotations

import time
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from products import mesh_of

from ndtp import Grid
from ndtp.compute.devices import KINDS
from ndtp.compute.gemm import TorchGemm
from ndtp.runtime.probe import BESIDE, MOST_BESIDE, SHORTER, SMALLER, Probe, measure

pytestmark = pytest.mark.cpu


class Watched(TorchGemm):
    """What multiplies, and with what."""

    def __init__(self):
        self.operands = {}

    def bound(self, letters, one, other, **how):
        product = super().bound(letters, one, other, **how)

        def run(a, b):
            self.operands[id(a)] = a
            return product(a, b)

        return run


class Modelled(Probe):
    """Of links that cost what LogGP says: a call 2 ms, 0.5 behind another; a byte 10 ns, 8 behind another's.

    Of these 2 ms a rank itself works for 0.3.

    Args:
        early: by how much this rank is there before others where one small call is timed.
        beside: the times of another rank.
    """

    def __init__(self, early=0.0, beside=None):
        collectives = Mock(groups=Mock(grid=Grid(x=4, y=2)), orders_by_stream=False)
        super().__init__(collectives, torch.empty(1))
        self.early, self.beside, self.times = early, beside, None

    def calls(self, kind, axis, count, calls):
        self.asked = axis, count, calls
        return 3e-4 * calls

    def seconds(self, action):
        for _ in range(self.repeats):
            action()
        axis, count, calls = self.asked
        received = 4 * count * (self.collectives.groups.grid[axis] - 1)
        is_early = (count, calls) == (self.share(2**20, axis) // SMALLER, 1)
        return 2e-3 + 1e-8 * received + (calls - 1) * (5e-4 + 8e-9 * received) - is_early * self.early

    def slowest(self, times):
        self.times = times
        return times if self.beside is None else list(map(max, times, self.beside))


def test_links_are_told_by_calls_alone_and_together():
    """A rank that is early at a single call has a greater difference to several: that is no gap of the link."""
    early = Modelled(early=1e-3)
    early.links(2**20, ("all_gather",))
    probe = Modelled(beside=early.times)
    links = probe.links(2**20, ("all_gather",))
    assert list(links) == [("all_gather", "x"), ("all_gather", "y")]
    for link in links.values():
        assert link == pytest.approx((2e-3, 1e-8, 5e-4, 8e-9, 0.0, 3e-4), rel=0.02)
    early.collectives.orders_by_stream = True
    assert all(link.overhead == 0 for link in early.links(2**20, ("all_gather",)).values()), "streams start calls"


def starting():
    """A rank works at a call until it is on its way, and not while it is waited for."""
    mesh = mesh_of(Grid(x=2))
    probe, launch = Probe(mesh.collectives, torch.empty(1)), mesh.collectives.launch

    def slow(*arguments, **how):
        time.sleep(0.005)
        return launch(*arguments, **how)

    with mock.patch.object(mesh.collectives, "launch", slow):
        ((_, link),) = probe.links(2**16, ("all_gather",)).items()
    assert 0.005 <= link.overhead < 0.05, link


def test_how_long_a_rank_works_to_start_a_call(ranks):
    ranks(2).run(starting)


def test_products_are_measured_as_they_are_multiplied():
    """By the grid's own GEMM, of random numbers that nobody misses; and of sizes for the device."""
    mesh, gemm, before = mesh_of(Grid(x=1)), Watched(), torch.get_rng_state()
    speeds, side = measure(mesh.collectives, gemm, torch.empty(1, dtype=torch.bfloat16)), KINDS["cpu"].probe_side
    assert speeds.per_flop > 0 and speeds.launch > 0
    assert {x.shape[0] for x in gemm.operands.values()} == {16, side // SHORTER, side}
    assert all(x.dtype == torch.bfloat16 and x.unique().numel() > 20 for x in gemm.operands.values())
    assert torch.equal(torch.get_rng_state(), before)


class Lasting(Probe):
    """Where products take a millisecond and a nanosecond a flop, and a small collective 5 ms of a rank's time."""

    def calls(self, kind, axis, count, calls):
        return 0.0

    def seconds(self, action):
        action()
        return 1e-4

    def lasting(self, multiply, count, axis=None, every=1):
        a, b = multiply.args
        calls = 0 if axis is None else len(BESIDE) * len(range(0, count, every))
        assert calls <= len(BESIDE) * MOST_BESIDE
        return count * (1e-3 + 1e-9 * 2 * a.numel() * b.shape[1]) + calls * 5e-3


def check_costs_beside_products():
    """What small collectives add to products that last, is what they cost: threads, network, other ranks included."""
    mesh, side = mesh_of(Grid(x=2)), KINDS["cpu"].probe_side
    with mock.patch("ndtp.runtime.probe.Probe", Lasting):
        speeds = measure(mesh.collectives, mesh.gemm, torch.empty(1))
        assert (speeds.per_flop, speeds.launch) == pytest.approx((1e-9, 1e-3))
        assert {round(link.overhead, 6) for link in speeds.links.values()} == {5e-3}
        with mock.patch.object(type(mesh.collectives), "orders_by_stream", True):
            speeds = measure(mesh.collectives, mesh.gemm, torch.empty(1))
        assert {link.overhead for link in speeds.links.values()} == {0.0}, "a device's streams start them"
        with mock.patch.object(
            Lasting, "lasting", lambda self, multiply, *_: 1e-3 + (multiply.args[0].shape[0] != side)
        ):
            speeds = measure(mesh.collectives, mesh.gemm, torch.empty(1))
        assert speeds.per_flop > 0 and speeds.launch > 0, "noise"


def check_lasting():
    """Collectives are under way while ranks multiply, and none is left."""
    mesh, beside = mesh_of(Grid(x=2)), []
    probe = Probe(mesh.collectives, torch.empty(1), repeats=1)
    probe.lasting(lambda: beside.append(mesh.collectives.in_flight), 5, "x")
    assert beside == [2, 4, 6, 6, 6] * 2 and mesh.collectives.in_flight == 0
    beside.clear()
    probe.lasting(lambda: beside.append(mesh.collectives.in_flight), 5, "x", 3)
    assert beside == [2, 2, 2, 4, 4] * 2
    beside.clear()
    probe.lasting(lambda: beside.append(mesh.collectives.in_flight), 5)
    assert beside == [0] * 10


@pytest.mark.parametrize("check", [check_costs_beside_products, check_lasting], ids=lambda check: check.__name__)
def test_collectives_beside_products(check, ranks):
    ranks(2).run(check)
