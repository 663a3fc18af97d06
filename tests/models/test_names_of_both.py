"""Layers keep the attributes that a user's code has put on them under names which ndtp's layers have, too."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ndtp
from ndtp import Grid
from ndtp.models.names_of_both import KEPT


class ByName(nn.Module):
    """Its code goes by an attribute of its layers."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attribute, self.factors = attribute, {"table": 2.0, "first": 0.5, "norm": 3.0, "last": 0.1}
        self.layers = nn.ModuleList([nn.Embedding(8, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)])
        for layer, name in zip(self.layers, self.factors, strict=True):
            setattr(layer, attribute, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.factors[getattr(layer, self.attribute)])
        return x


def dense_with(dense: ByName, attribute: str) -> ByName:
    setattr(dense.layers[1], attribute, "last")
    return dense


def check_by_name(grid: Grid) -> None:
    ids = torch.arange(8)
    for attribute in KEPT:
        dense = ByName(attribute)
        model: ByName = ndtp.parallelize(copy.deepcopy(dense), mesh_of(grid))  # type: ignore[assignment]
        for each in (dense, model):
            each(ids).square().mean().backward()
        for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=f"{attribute}: {ours.grad}")
        torch.testing.assert_close(copy.deepcopy(model)(ids).gathered(), dense(ids))
        assert [getattr(layer, attribute) for layer in model.layers] == list(model.factors)
        setattr(model.layers[1], attribute, "last")
        torch.testing.assert_close(model(ids).gathered(), dense_with(dense, attribute)(ids))


@pytest.mark.parametrize("grid", [Grid(x=2), Grid(x=2, y=2)], ids=str)
def test_code_that_goes_by_attributes_of_layers(ranks, grid):
    ranks(grid.num_ranks).run(check_by_name, grid)


def check_stock(grid: Grid) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
    for name, module in dense.named_modules():
        module.name = module.plan = f"mine: {name}"  # type: ignore[assignment]
    model, ids = copy.deepcopy(dense), torch.arange(16).view(2, 8)
    ndtp.parallelize(model, mesh_of(grid))
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, dense(input_ids=ids, labels=ids).loss)
    for name, module in model.named_modules():
        assert module.name == module.plan == f"mine: {name}"
    assert "replaced 8 of 8 Linears" in str(model.ndtp_report)


def test_layers_of_a_stock_model(ranks):
    ranks(2).run(check_stock, Grid(x=2))
