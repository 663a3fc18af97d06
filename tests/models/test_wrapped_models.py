"""Models that tools of torch have wrapped or split, before `parallelize` or while a model waits for its first call."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ndtp
from ndtp import Grid, LayoutError


class Scores(nn.Module):
    """Its argument is no tensor of numbers that could be made up, so that the first call decides."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, batch):
        return F.cross_entropy(self.head(self.up(self.table(batch["ids"])).relu()), batch["ids"])


def sharded(model, mesh):
    return fully_shard(model, mesh=mesh)


def sharded_layer(model, mesh):
    fully_shard(model.up, mesh=mesh)
    return model


def split_by_torch(model, mesh):
    return parallelize_module(model, mesh, {"head": ColwiseParallel()})


def copied(model, mesh):
    return nn.parallel.DistributedDataParallel(model)


WRAPPERS = (sharded, sharded_layer, split_by_torch, copied)


def wrapped_before(wrap):
    model = wrap(Scores(), init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),)))
    with pytest.raises(LayoutError, match=r"wrapped by torch's|of another tool"):
        ndtp.parallelize(model, Grid(x=2), scheme="1d")


def wrapped_while_it_waits(wrap):
    model = ndtp.parallelize(Scores(), Grid(x=2), scheme="1d")
    assert "waits" in str(model.ndtp_report)
    with pytest.raises(LayoutError, match=r"wrapped by torch's|of another tool|takes them for copies"):
        wrap(model, init_device_mesh(torch.get_default_device().type, (2,)))({"ids": torch.arange(8)})


@pytest.mark.parametrize("check", [wrapped_before, wrapped_while_it_waits])
def test_wrapped_models_are_refused_by_name(ranks, check):
    for wrap in WRAPPERS:
        ranks(2).run(check, wrap)
