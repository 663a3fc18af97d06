"""Copies of a weight that kernels without a fixed order of sums let drift apart: brought together, and said so."""

import math
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import ndtp
from ndtp import Grid, MismatchError, ProcessGrid
from ndtp.models import same_steps


class Jitter(torch.autograd.Function):
    """A gradient that each rank rounds in its own way, as atomics do."""

    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + ctx.size * dist.get_rank()), None


class Net(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size, self.table, self.norm = size, nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, ids):
        h = Jitter.apply(self.norm(self.table(ids)), self.size)
        return (h + self.down(self.act(self.up(h)))).square().mean()


def trained(size, is_cpu=False, writes=False):
    """How many calls there were, the warnings, the error, and the sums of the tables."""
    with mock.patch.object(same_steps, "may_drift", lambda device_type: not is_cpu):
        return trained_here(size, writes)


def trained_here(size, writes):
    mesh = ProcessGrid(Grid(x=2))
    torch.manual_seed(0)
    model = ndtp.parallelize(Net(size), mesh, {"up": "up", "down": "down"}, scheme="1d")
    optimizer, calls, error = torch.optim.SGD(model.parameters(), lr=0.1), 0, ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for _ in range(4):
                loss = model(torch.arange(16).view(2, 8))
                calls += 1
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if writes and mesh.rank == 1 and calls == 1:
                    model.up.weight.to_local().data.zero_()
        except MismatchError as found:
            error = str(found)
    said = [str(each.message) for each in said if "drifted" in str(each.message)]
    return calls, said, error, [float(model.table.weight.to_local().double().sum()), float(loss)]


def test_copies_that_rounding_moved_are_brought_together(ranks):
    of_ranks = ranks(2).run(trained, 1e-3)
    for rank, (calls, said, error, _) in enumerate(of_ranks):
        assert calls == 4 and not error
        assert len(said) == (rank == 0), "it is said once"
    (text,) = of_ranks[0][1]
    assert "'table.weight' and 2 more" in text and "use_deterministic_algorithms(True)" in text
    assert math.isclose(of_ranks[0][3][1], of_ranks[1][3][1], rel_tol=1e-3)


def test_copies_that_are_further_apart_are_an_error_and_stay_as_they_are(ranks):
    for calls, said, error, _ in ranks(2).run(trained, 1e3):
        assert calls == 1 and not said
        assert "disagree at the weights before call 2" in error and "'table.weight'" in error


def test_a_shard_that_one_rank_has_changed_is_no_drift(ranks):
    for calls, said, error, _ in ranks(2).run(trained, 1e-3, writes=True):
        assert calls == 1 and not said and "'up.weight' since the last step: rank 1 has changed" in error


def test_cpus_repeat_their_sums(ranks):
    for calls, said, error, _ in ranks(2).run(trained, 1e-3, is_cpu=True):
        assert calls == 1 and not said and "disagree at the weights before call 2" in error
