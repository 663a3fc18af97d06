"""Fused weights of experts, of which each rank has a part of both halves, are to everybody those of the dense model."""

import copy
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from products import mesh_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel

import ndtp
import ndtp.testing
from ndtp import Grid

pytest.importorskip("transformers")
from transformers import MixtralConfig, MixtralForCausalLM

IDS = torch.arange(32).view(4, 8)
FULL = StateDictOptions(full_state_dict=True)
FROM_ONE = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
UP = "model.layers.0.mlp.experts.gate_up_proj"
SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_hidden_layers": 1,
    "num_local_experts": 4, "experts_implementation": "eager",
}  # fmt: skip


def build(inner, seed=0):
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(intermediate_size=inner, **SIZES)).double()


def step(model, kind, **options):
    optimizer = kind(model.parameters(), **options)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def factored(model, other):
    step(model, torch.optim.Adafactor, lr=1e-2)  # means of rows and of columns


def fused(model, other):
    step(model, torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=True)


def orthogonalised(model, other):
    """One matrix an expert, as Muon has it."""
    model(input_ids=IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                x = p.grad / p.grad.norm(dim=(-2, -1), keepdim=True)
                p.add_(2.0 * (x @ x.mT) @ x, alpha=-0.01)


def initialised(model, other):
    torch.manual_seed(3)
    nn.init.xavier_uniform_(model.get_parameter(UP))


@torch.no_grad()
def combined(model, other):
    """Parameters beside dense tensors of the same sizes, and of some of their dims."""
    p, q = model.get_parameter(UP), other.get_parameter(UP)
    p.lerp_(q, 0.5)
    p.add_(q[0, :, :1]).mul_(q[0, 0])
    assert p.shape == (p * q).shape == q.shape
    p[1, 3:7] = 0.5
    p.add_((p * q).mean())


def averaged(model, other):
    average = AveragedModel(other)
    for _ in range(2):
        average.update_parameters(model)
    with torch.no_grad():
        for p, q in zip(model.parameters(), average.module.parameters(), strict=True):
            p.copy_(q)


def loaded(model, other):
    """By what torch has for one rank that reads, and the state of an optimizer of the dense model."""
    state = step(other, torch.optim.AdamW, lr=1e-2, eps=1e-3).state_dict()
    set_model_state_dict(model, other.state_dict(), options=FROM_ONE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    names = [name for name, _ in model.named_parameters()]
    named = {"state": {names[i]: x for i, x in state["state"].items()}, "param_groups": state["param_groups"]}
    named["param_groups"] = [{**group, "params": names} for group in named["param_groups"]]
    set_optimizer_state_dict(model, optimizer, named, options=FULL)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()


def assigned(model, other):
    model.model.layers[0].mlp.experts.gate_up_proj = nn.Parameter(other.get_parameter(UP).detach().clone())
    step(model, torch.optim.SGD, lr=0.1)


def loaded_alone(model, other):
    model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        set_model_state_dict(
            model, build(48 if model.config.intermediate_size == 49 else 49).state_dict(), options=FULL
        )


WAYS = (factored, fused, orthogonalised, initialised, combined, averaged, loaded, loaded_alone, assigned)
GRIDS = [({"x": 2}, "1d", 49), ({"z": 2}, "3d", 49), ({"x": 2}, "1d-sp", 48)]


def plain(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def check(sizes, scheme, inner):
    mesh = mesh_of(Grid(sizes))
    for way in WAYS:
        dense, other = build(inner), build(inner, seed=1)
        model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme=scheme)
        assert model.get_parameter(UP).shape == dense.get_parameter(UP).shape == (4, 2 * inner, 32)
        way(model, copy.deepcopy(other))
        way(dense, other)
        for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(plain(p), q, rtol=1e-5, atol=1e-6, msg=f"{way.__name__}: {name}")
    assert get_model_state_dict(model, options=FULL)[UP].shape == (4, 2 * inner, 32)


@pytest.mark.parametrize("grid", GRIDS)
def test_they_are_those_of_the_dense_model(ranks, grid):
    ranks(2).run(check, *grid)


def test_they_are_on_one_rank(ranks):
    ranks(1).run(check, {"x": 1}, "1d", 49)


def check_checkpoints(folder):
    """Torch's distributed checkpoint of one grid, read on another one, and by the dense model."""
    dense = build(49)
    for at, (sizes, scheme, _) in enumerate(GRIDS):
        model = ndtp.parallelize(build(49, seed=at), mesh_of(Grid(sizes)), scheme=scheme)
        if at:
            dcp.load({"model": (state := model.state_dict())}, checkpoint_id=folder)
            model.load_state_dict(state)
        else:
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q), f"{scheme}: {name}"
    other = build(49, seed=1)
    dcp.load({"model": (state := other.state_dict())}, checkpoint_id=folder)
    assert torch.equal(state[UP], dense.get_parameter(UP))


def test_distributed_checkpoints_have_both_halves(ranks):
    with tempfile.TemporaryDirectory() as folder:
        ranks(2).run(check_checkpoints, folder)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        y = self.model(inputs_embeds=x).logits
        return y.gathered() if hasattr(y, "gathered") else y


def check_comparison():
    """`ndtp.testing.assert_matches_dense` compares both halves, and names one that is wrong."""
    mesh = mesh_of(Grid(z=2))
    dense = build(48)
    model = Logits(ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="3d"))
    x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ndtp.testing.assert_matches_dense(model, Logits(dense), x, mesh, factor=1e6, floor_eps=1e9)
    with torch.no_grad():
        dense.get_parameter(UP)[1, 50, 3] += 1
    with pytest.raises(AssertionError, match=r"value of model\.model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        ndtp.testing.assert_matches_dense(model, Logits(dense), x, mesh)


def test_comparisons_with_dense_know_the_halves(ranks):
    ranks(2).run(check_comparison)
