"""States of optimizers that were saved by a dense run, loaded where parameters are split."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import ndtp
from ndtp import Grid, LayoutError

KINDS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "statistics of rows": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def net():
    """Features that ranks do not divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 35), nn.GELU(), nn.Linear(35, 8)).double()


def train(model, optimizer, steps):
    x = torch.linspace(-1, 1, 64).double().view(8, 8)
    for _ in range(steps):
        (model(x) - 1).square().mean().backward()
        with ndtp.nn.as_dense():
            optimizer.step()
        optimizer.zero_grad()


def check_loaded(sizes):
    for name, kind in KINDS.items():
        dense = net()
        first = kind(dense.parameters())
        train(dense, first, 3)
        model = ndtp.parallelize(net(), mesh_of(Grid(**sizes)))
        model.load_state_dict(dense.state_dict())
        second = kind(model.parameters())
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(dense, first, 2)
        train(model, second, 2)
        for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, msg=name)
            for key, value in second.state[mine].items():
                expected = first.state[theirs][key]
                assert (value.shape != mine.shape or not value.dim()) or hasattr(value, "placements"), (name, key)
                if hasattr(value, "placements"):  # without the memory of the whole
                    local = value.to_local()
                    assert local.untyped_storage().nbytes() == local.numel() * local.itemsize, (name, key)
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                torch.testing.assert_close(value, expected, msg=f"{name} {key}")
        copy.deepcopy(second.state_dict())


@pytest.mark.parametrize("sizes", [{"x": 2}, {"z": 2}], ids=str)
def test_states_of_a_dense_run_are_split(ranks, sizes):
    ranks(2).run(check_loaded, sizes)


def check_of_others():
    """Parameters of torch's own parallelism are looked at by nobody."""
    mesh = mesh_of(Grid(x=2))
    ndtp.parallelize(net(), mesh)
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh.device_mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["mine"] = kept = torch.ones(4, 4)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["mine"] is kept


def test_optimizers_of_others_are_left_alone(ranks):
    ranks(2).run(check_of_others)


def check_mixed():
    """What writes to whole tensors and to split ones is no operation on whole ones."""
    model = ndtp.parallelize(net(), mesh_of(Grid(x=2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train(model, optimizer, 1)
    weight = model[0].weight
    optimizer.state[weight]["exp_avg"] = torch.zeros(weight.shape, dtype=torch.float64)
    with pytest.raises(
        LayoutError, match=r"_fused_adamw_ writes to split tensors and to whole ones of the same.*\n  fix: split"
    ):
        train(model, optimizer, 1)


def test_writes_to_whole_and_split_ones_are_refused(ranks):
    ranks(2).run(check_mixed)
