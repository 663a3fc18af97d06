"""Losses of a program's own along `dp`, whose gradients are summed: one that nobody has divided is warned of."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid


class WithLoss(nn.Module):
    """As nanoGPT: its forward gives scores and a mean over the rows that it was given."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, ids):
        scores = self.head(self.up(self.table(ids)).relu())
        return scores, F.cross_entropy(scores.flatten(0, 1), ids.flatten())


def told(divide, steps=2):
    """What backwards of a rank's own rows warn of, where and of what; and a gradient."""
    torch.manual_seed(0)
    mesh = mesh_of(Grid(dp=2, x=2))
    ids = torch.arange(32).view(4, 8) % 16
    model = ndtp.parallelize(WithLoss(), mesh, scheme="1d", example=ids[:2])
    place = mesh.grid.coordinate(mesh.rank)["dp"]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            model.zero_grad()
            divide(model(ids[2 * place :][:2])[1]).backward()
    return [(str(each.message), each.filename) for each in found], model.up.weight.grad.full_tensor()


def half(loss):
    return loss / 2


def of_three_micro_batches(loss):
    return loss / 6


def scaled(loss):
    return loss * 2.0**10


def for_three_ranks(loss):
    return loss / 3


def as_it_is(loss):
    return loss


def compare():
    torch.manual_seed(0)
    dense = WithLoss()
    dense(torch.arange(32).view(4, 8) % 16)[1].backward()
    factors = {half: 1.0, of_three_micro_batches: 1 / 3, scaled: 2.0**11, for_three_ranks: 2 / 3, as_it_is: 2.0}
    for divide, factor in factors.items():
        found, gradient = told(divide)
        torch.testing.assert_close(gradient, factor * dense.up.weight.grad)
        if divide not in (for_three_ranks, as_it_is):
            assert not found, found
        else:
            ((said, where),) = found  # once, and not at the second step
            assert "divide a mean over a rank's rows by 2" in said and "fix: (loss / 2).backward()" in said
            assert where == __file__


def test_a_loss_that_nobody_has_divided_is_warned_of(ranks):
    ranks(4).run(compare)


def stock():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes))
    ids = torch.arange(16).view(2, 8)
    model = ndtp.parallelize(model, mesh_of(Grid(dp=2)), scheme="1d")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, labels=ids).loss.backward()


def test_a_stock_models_loss_is_not(ranks):
    ranks(2).run(stock)
