"""A layer of torch that is a whole model by itself."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid

X = torch.linspace(-1, 1, 4 * 6 * 16, dtype=torch.float64).view(4, 6, 16)
LAYERS = {
    "linear": (lambda: nn.Linear(16, 24), (X,)),
    "table": (lambda: nn.Embedding(32, 16), (torch.arange(24).view(4, 6),)),
    "attention": (lambda: nn.MultiheadAttention(16, 4, batch_first=True), (X, X, X)),
    "convolution": (lambda: nn.Conv1d(16, 16, 3), (X.mT,)),
    "odd convolution": (lambda: nn.Conv1d(6, 10, 3), (X.mT[:, :6],)),
}


def check(kind, sizes):
    make, inputs = LAYERS[kind]
    torch.manual_seed(0)
    dense = make().double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(sizes)))
    if kind == "odd convolution":  # of which four ranks divide no dim, and each axis one
        assert model.weight._local_tensor.shape == (5, 3, 3)
    assert type(dense).__name__ == type(model).__name__ and set(model.state_dict()) == set(dense.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (dense, model)]
    for _ in range(2):
        results = [each(*inputs) for each in (dense, model)]
        expected, found = (result[0] if isinstance(result, tuple) else result for result in results)
        torch.testing.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, expected)
        for result, optimizer in zip((expected, found), optimizers, strict=True):
            optimizer.zero_grad()
            result.square().sum().backward()
            optimizer.step()
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor() if hasattr(mine, "full_tensor") else mine, theirs, msg=name)
    model.load_state_dict(dense.state_dict())


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_a_model(ranks, kind):
    ranks(4).run(check, kind, {"x": 2, "y": 2})
