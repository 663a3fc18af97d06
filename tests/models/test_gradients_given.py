"""Gradients that code gives to a backward of a whole tensor, as reversible networks do, may be split."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid

FORMS = {
    "torch.autograd.backward": lambda y, p, grad: torch.autograd.backward([y], [grad]),
    "Tensor.backward": lambda y, p, grad: y.backward(grad),
    "torch.autograd.grad": lambda y, p, grad: setattr(p, "grad", torch.autograd.grad(y, p, grad)[0]),
}


def of_own():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


def stock():
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaModel(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes)).double()


@pytest.mark.filterwarnings("ignore")
def check(axes, make, form):
    torch.manual_seed(0)
    dense, x = make(), torch.randn(4, 6, 8, dtype=torch.float64)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(**axes)))
    found = []
    for net in (dense, model):
        grad = net(x) if make is of_own else net(inputs_embeds=x).last_hidden_state
        p = torch.ones(8, dtype=torch.float64, requires_grad=True)
        form(p * x, p, grad.detach())
        found.append(p.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("axes", [{"z": 2}, {"x": 2}], ids=str)
def test_gradients_of_whole_tensors_are_whole(ranks, axes, form):
    for make in (of_own, stock):
        ranks(2).run(check, axes, make, form)
