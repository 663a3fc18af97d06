"""Clipping and summing gradients where sharded parameters and plain ones live in one model."""

import pytest
import torch
from products import mesh_of
from torch import nn as dense_nn

import ndtp
from ndtp import CommMeter, Grid


def mixed(norm_type, max_norm):
    mesh = mesh_of(Grid(z=2, x=2, y=2))
    torch.manual_seed(0)
    dense = dense_nn.ModuleDict({"linear": dense_nn.Linear(8, 16), "norm": dense_nn.LayerNorm(8)})
    model = dense_nn.ModuleDict(
        {"linear": ndtp.nn.Linear.from_dense(dense["linear"], mesh=mesh), "norm": dense_nn.LayerNorm(8)}
    )
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        theirs.grad = torch.randn_like(theirs)
        ours.grad = theirs.grad.clone()
    layer = model["linear"]
    for parameter, layout in ((layer.weight, layer.plan.b), (layer.bias, layer.plan.bias)):
        shard = layout.shard(parameter.grad, mesh.rank).contiguous()
        parameter.grad = ndtp.nn.parameters.sharded(shard, layout, mesh)
    expected = torch.nn.utils.clip_grad_norm_(dense.parameters(), max_norm, norm_type)
    total = ndtp.nn.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    torch.testing.assert_close(total, expected)
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        grad = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        torch.testing.assert_close(grad, theirs.grad)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_equals_torch_on_the_dense_model(ranks, norm_type):
    for max_norm in (0.1, 1000.0):
        ranks(8).run(mixed, norm_type, max_norm)


def test_clip_without_gradients():
    assert ndtp.nn.clip_grad_norm_([dense_nn.Parameter(torch.ones(2))], 1.0) == 0


def test_clip_takes_one_tensor_and_refuses_what_is_not_finite():
    parameter = dense_nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert ndtp.nn.clip_grad_norm_(parameter, 1.0) == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    parameter.grad = torch.tensor([float("nan"), 1.0])
    with pytest.raises(RuntimeError, match="total norm"):
        ndtp.nn.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


def summed():
    mesh = mesh_of(Grid(dp=2, x=4))
    model = dense_nn.ModuleList([dense_nn.LayerNorm(4), ndtp.nn.Linear(4, 8, mesh=mesh, scheme="1d")])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, mesh.coordinate["dp"] + 1.0)
    with CommMeter() as meter:
        ndtp.nn.sum_plain_gradients(model, mesh, ["dp"])
    assert all((p.grad == 3).all() for p in model[0].parameters()), "1 + 2"
    for parameter in model[1].parameters():
        own = ndtp.ops.local_shard(parameter.grad)
        assert (own == mesh.coordinate["dp"] + 1).all(), "ndtp's own are summed already"
    assert meter.volume.by("collective") == {"all_reduce": 2 * 16}, meter.volume


def test_plain_gradients_are_summed(ranks):
    ranks(8).run(summed)
