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


class Adjoint(torch.autograd.Function):
    """A layer whose gradients its own backward asks autograd for, and computes with, as solvers of equations do."""

    @staticmethod
    def forward(ctx, x, layer, *parameters):
        ctx.layer, ctx.parameters = layer, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.layer(x)
            [torch.as_strided(p, (), ()) for p in ctx.parameters]  # torchdiffeq's way around a bug of torch
            first, *others = torch.autograd.grad(y, (x, *ctx.parameters), grad)
        flat = torch.cat([each.reshape(-1) for each in others]) * 1.0
        parts = flat.split([p.numel() for p in ctx.parameters])
        return first, None, *(part.view(p.shape) for part, p in zip(parts, ctx.parameters, strict=True))


class Solved(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(Adjoint.apply(x, self.inside, *self.inside.parameters()))


def check_adjoint(sizes):
    torch.manual_seed(0)
    dense, mesh, x = Solved().double(), mesh_of(Grid(sizes)), torch.linspace(-1, 1, 48).double().view(8, 6)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, example=x)
    if "dp" in sizes:
        with pytest.raises(ndtp.LayoutError, match=r"backward of Adjoint asks .*'inside.weight'.*\n  fix: z in"):
            model(x).square().sum().backward()
        return
    for each in (model, dense):
        each(x).square().sum().backward()
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, q.grad)


@pytest.mark.parametrize("sizes", [{"z": 2}, {"dp": 2}], ids=str)
def test_gradients_that_a_backward_asks_for(ranks, sizes):
    ranks(2).run(check_adjoint, sizes)
