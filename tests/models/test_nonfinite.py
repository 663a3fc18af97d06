"""The first NaN or Inf is named: by module, phase and rank; a scaler's skip is alike on all ranks."""

import pytest
import torch
from torch import nn

import ndtp
from ndtp import Grid, ProcessGrid


class Spoiled(torch.autograd.Function):
    """What it is given; NaN is put into a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, torch.nan)


class Spoils(nn.Module):
    def forward(self, x):
        return Spoiled.apply(x)


def test_a_dense_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2))
    x = torch.ones(3, 4)
    with ndtp.find_nonfinite(model) as watch:
        model(x).sum().backward()
        assert watch.first() is None
        with torch.no_grad():
            model[1][1].weight[0, 0] = torch.inf
        model(x).sum().backward()
        found = watch.first()
        assert (found.module, found.phase, found.ranks, found.what) == ("1.1", "forward", (0,), "its output")
        assert found.parameters == ("1.1.weight",) and "'1.1', forward, on rank 0" in str(found)
        model(torch.full((3, 4), torch.nan))
        assert (watch.first().module, watch.first()) == ("", None), "the input; each is read once"
    model(x)
    assert watch.first() is None and not model._forward_hooks
    model[1][1].reset_parameters()
    model[1][0] = Spoils()
    with ndtp.find_nonfinite(model) as watch:
        model(x).sum().backward()
    found = watch.first()
    assert (found.module, found.phase, found.what) == ("1.0", "backward", "the gradient of its input")
    with ndtp.find_nonfinite(model[2]) as watch:
        Spoiled.apply(model[2](x)).sum().backward()
    assert watch.first().what == "the gradient that comes to its output"


def names_module_and_rank():
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = ProcessGrid(Grid(x=2))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, num_hidden_layers=2, **sizes))
    ndtp.parallelize(model, mesh, scheme="1d-sp")
    ids = torch.arange(16).reshape(2, 8)
    expected = model(input_ids=ids, labels=ids).loss.item()
    with ndtp.find_nonfinite(model) as watch:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-6) and watch.first() is None
        weight = model.model.layers[1].mlp.down_proj.weight
        with torch.no_grad():
            weight.to_local()[0, 0] = torch.nan if mesh.rank == 1 else 0.0
        model(input_ids=ids, labels=ids).loss.backward()
        return watch.first()


def test_a_split_model(ranks):
    pytest.importorskip("transformers")
    first, second = ranks(2).run(names_module_and_rank, timeout=100)
    assert first == second and first.ranks == (1,), first
    assert first.phase == "forward" and "layers.1.mlp" in first.module, first
    assert first.parameters == ("model.layers.1.mlp.down_proj.weight",), first


def skips_alike(scheme):
    """An overflow in one shard of one gradient of one rank."""
    mesh = ProcessGrid(Grid(x=2))
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme=scheme)
    optimizer, scaler = torch.optim.SGD(block.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    before = {name: each.to_local().clone() for name, each in block.named_parameters()}
    scaler.scale(block(torch.ones(block.in_layout.shard_shape((4, 8)))).sum()).backward()
    if mesh.rank == 1:
        next(block.parameters()).grad.to_local().flatten()[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), all(
        torch.equal(before[name], each.to_local()) for name, each in block.named_parameters()
    )


def test_a_scaler_skips_on_all_ranks_or_on_none(ranks):
    for scheme in ("1d", "1d-sp"):
        assert ranks(2).run(skips_alike, scheme, timeout=60) == [(32.0, True)] * 2
