"""Operations on parameters whose sizes ranks do not divide, and their gradients: padding counts nowhere."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import ndtp
from ndtp import Grid

OPERATIONS = {
    "gram": lambda p: p @ p.T,
    "three products": lambda p: p @ p.T @ p,
    "orthogonality": lambda p: (p @ p.T - torch.eye(len(p), dtype=p.dtype)).square().sum(),
    "what was multiplied, beside itself": lambda p: 2 * (p @ p.T) + (p @ p.T) @ (p @ p.T),
    "the largest": lambda p: p.norm(float("inf")),
    "the least of columns": lambda p: p.exp().amin(0),
    "by the mean of columns": lambda p: p.square().mean(0).rsqrt() * p,
    "a quantile": lambda p: torch.quantile(p.exp(), 0.3),
    "no dims, which are all": lambda p: p.exp().sum([], keepdim=True),
    "whole": lambda p: (p @ p.T).full_tensor().exp() if isinstance(p, DTensor) else (p @ p.T).exp(),
    "the mean of a loss": lambda p: F.mse_loss(p, p.detach() / 2) + F.smooth_l1_loss(p, torch.zeros_like(p)),
    "a loss beside a plain tensor": lambda p: F.huber_loss(p, torch.ones(p.shape, dtype=p.dtype)),
    "the largest of all": lambda p: p.amax() + p.abs().amax((0, 1)),
    "what is small, in place": lambda p: (p @ p.T @ p).clone().mul_(p),
    "equal": lambda p: p * float(torch.equal(p + 1, p + 1) and torch.equal(p / p, torch.ones_like(p))),
    "whole, beside itself": lambda p: whole(p) * p,
    "moved, then added up": lambda p: (
        p.redistribute(placements=[Replicate()] * p.device_mesh.ndim) if isinstance(p, DTensor) else p
    ).cumsum(0),
    "moved": lambda p: (
        (2 * p).redistribute(placements=[Replicate()] * p.device_mesh.ndim).mean(0)
        if isinstance(p, DTensor)
        else (2 * p).mean(0)
    ),
    "a quantile that skips": lambda p: torch.nanquantile(p.flatten()[:2].exp(), 0.3),
    "between others": lambda p: torch.lerp(p, p.detach() / 2, p @ p.T @ p).clamp(min=p.detach() - 1),
    "rows added in place": lambda p: (p + 1).unsqueeze_(0).squeeze_(0).t_().exp(),
}
AS_DENSE = {
    "a plain product": lambda p: torch.ones(3, len(p), dtype=p.dtype) @ p,
    "a plain vector": lambda p: torch.arange(len(p), dtype=p.dtype) @ p,
    "a loss beside a plain one": lambda p: F.mse_loss(p, torch.ones(p.shape, dtype=p.dtype)),
    "rows by number": lambda p: p.index_select(0, torch.tensor([1, 0, 1])),
    "joined": lambda p: torch.cat([p, torch.ones(2, p.shape[1], dtype=p.dtype)]).exp(),
}


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 3)).double()


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(name, operation, mine, dense):
    given, expected = operation(mine), operation(dense)
    torch.testing.assert_close(whole(given), expected, rtol=1e-10, atol=1e-12, msg=name)
    factor = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    (theirs,) = torch.autograd.grad((expected * factor).sum(), dense)
    (grad,) = torch.autograd.grad((whole(given) * factor).sum(), mine)
    torch.testing.assert_close(whole(grad), theirs, rtol=1e-10, atol=1e-12, msg=f"gradient of {name}")


def check_operations(sizes, scheme):
    dense, model = made(), ndtp.parallelize(made(), mesh_of(Grid(sizes)), scheme=scheme)
    for i in (0, 2, 4):
        for name, operation in OPERATIONS.items():
            compare(f"{name}, {i}", operation, model[i].weight, dense[i].weight)
        with ndtp.nn.as_dense():
            for name, operation in {**OPERATIONS, **AS_DENSE}.items():
                compare(f"{name}, {i}, as dense", operation, model[i].weight, dense[i].weight)


def orthogonal(gradient):
    """As Muon does: five steps of Newton and Schulz."""
    x = gradient / (gradient.norm() + 1e-7)
    x = x.T if len(gradient) > gradient.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if len(gradient) > gradient.shape[1] else x


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p))
            moment.mul_(0.9).add_(p.grad)
            p.add_(orthogonal(moment) if p.dim() == 2 else moment, alpha=-0.1)


class Shampoo(torch.optim.Optimizer):
    """Of rows alone; its statistics are plain tensors."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        with ndtp.nn.as_dense():
            for p in self.param_groups[0]["params"]:
                rows = p.grad.reshape(len(p), -1)
                known = self.state[p].setdefault("rows", 0.1 * torch.eye(len(p), dtype=p.dtype))
                values, vectors = torch.linalg.eigh(known.add_(rows @ rows.T))
                p.add_((vectors @ torch.diag(values**-0.5) @ vectors.T @ rows).view(p.shape), alpha=-0.1)


def trained(model, kind):
    x, optimizer = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6), kind(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [whole(p) for p in model.parameters()]


def check_pairs():
    """Two parameters of which one has padding where the other one has none, dims of one number too; lists of them."""
    makes = [nn.Linear(1, 2), nn.Linear(2, 1), nn.Linear(1, 2), nn.Linear(2, 1), nn.Linear(6, 7), nn.Linear(7, 6)]
    dense = nn.Sequential(*makes).double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), {
        "0": "up", "1": "down", "2": "up", "3": "down", "4": "up", "5": "down"}, scheme="1d")  # fmt: skip
    mine, theirs = list(model.parameters()), list(dense.parameters())
    for i, j in itertools.product(range(len(mine)), repeat=2):
        try:
            expected = theirs[i] * theirs[j]
        except RuntimeError:
            continue
        found = mine[i] * mine[j]
        torch.testing.assert_close(whole(found), expected, msg=f"{tuple(theirs[i].shape)} {tuple(theirs[j].shape)}")
        torch.testing.assert_close(whole(torch.where(found > 0, found, mine[j])), torch.where(
            expected > 0, expected, theirs[j]))  # fmt: skip
    for p, q in zip(torch._foreach_mul(mine, 2.0), theirs, strict=True):
        torch.testing.assert_close(whole(p), 2 * q)
    squares = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)).double()
    rows, columns = ndtp.parallelize(copy.deepcopy(squares), mesh_of(Grid(x=2)), {"0": "up", "1": "down"}, scheme="1d")
    expected = squares[0].weight + 2 * squares[1].weight
    torch.testing.assert_close(whole(rows.weight + 2 * columns.weight), expected)
    with torch.no_grad():
        torch._foreach_add_([rows.weight, rows.bias], [columns.weight, columns.bias], alpha=2.0)
    torch.testing.assert_close(whole(rows.weight), expected)


def check_writes_as_dense():
    """Writes to split tensors beside plain ones, of which lists have some."""
    dense, plain = made(), nn.Parameter(torch.ones(3, dtype=torch.float64))
    for options in ({"foreach": True}, {"fused": True}, {}):
        model, other = ndtp.parallelize(made(), mesh_of(Grid(x=2)), scheme="1d"), copy.deepcopy(dense)
        steps = []
        for each in (model, other):
            own = nn.Parameter(plain.detach().clone())
            optimizer = torch.optim.AdamW([own, *each.parameters()], lr=0.1, **options)
            with ndtp.nn.as_dense():
                (each(torch.ones(2, 6, dtype=torch.float64)).square().sum() + own.sum()).backward()
                torch.nn.utils.clip_grad_norm_([own, *each.parameters()], 0.1, foreach=options.get("foreach"))
                optimizer.step()
                for p in each.parameters():
                    p.data[1] = torch.full(p.shape[1:], 2.0, dtype=p.dtype)
                    p.data += torch.ones(p.shape, dtype=p.dtype)
                    torch.add(p.data, torch.ones(p.shape, dtype=p.dtype), out=p.data)
            steps.append([own, *map(whole, each.parameters())])
        for found, expected in zip(*steps, strict=True):
            torch.testing.assert_close(found, expected, msg=str(options))


def check_optimizers(sizes, scheme):
    for kind in (Muon, Shampoo):
        model = ndtp.parallelize(made(), mesh_of(Grid(sizes)), scheme=scheme)
        for mine, theirs in zip(trained(model, kind), trained(made(), kind), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10, msg=f"{kind.__name__} on {sizes}")


def check_penalty():
    """The gradient of a gradient, of what was taken whole."""
    dense, model = made(), ndtp.parallelize(made(), mesh_of(Grid(x=2)), scheme="1d")
    for p, q in ((model[i].weight, dense[i].weight) for i in (0, 4)):
        found = []
        for each in (p, q):
            loss = whole(each).exp().sum() + whole(each).pow(3).sum()
            (grad,) = torch.autograd.grad(loss, each, create_graph=True)
            (second,) = torch.autograd.grad(whole(grad).square().sum(), each)
            found.append(whole(second))
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def check_plain():
    """What was computed on the whole counts as a plain tensor, for NumPy and files, too."""
    dense, model = made(), ndtp.parallelize(made(), mesh_of(Grid(x=2)), scheme="1d")
    mine, theirs = (torch.linalg.svdvals(each[0].weight.detach()) for each in (model, dense))
    np.testing.assert_allclose(np.asarray(mine.cpu()), np.asarray(theirs.cpu()))
    loaded = pickle.loads(pickle.dumps(mine))
    assert type(loaded) is torch.Tensor and torch.allclose(loaded, theirs)
    moved = model[0].weight.detach().redistribute(placements=[Replicate()])
    assert moved.to_local().shape == dense[0].weight.shape  # without the padding, which nothing needs there
    moved.ndtp_is_read = True
    assert pickle.loads(pickle.dumps(moved)).shape == moved.shape == dense[0].weight.shape
    assert mine.tolist() == loaded.tolist() and torch.equal(
        torch.ones(len(mine)) + mine, torch.ones(len(mine)) + loaded
    )


def check_full_state(foreach):
    """Whole weights and states of an optimizer, out and in by torch's functions for them."""
    dense, model = made(), ndtp.parallelize(made(), mesh_of(Grid(x=2)), scheme="1d")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    given = copy.deepcopy(dense.state_dict())
    sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    full = StateDictOptions(full_state_dict=True, cpu_offload=False)
    weights, states = (
        get_model_state_dict(model, options=full),
        get_optimizer_state_dict(model, optimizer, options=full),
    )
    assert {name: x.shape for name, x in weights.items()} == {name: x.shape for name, x in dense.state_dict().items()}
    assert states["state"]["0.weight"]["exp_avg"].shape == dense[0].weight.shape
    set_model_state_dict(model, dense.state_dict(), options=full)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor(), dense.get_parameter(name).detach(), rtol=0, atol=0)
    set_optimizer_state_dict(model, optimizer, states, options=full)
    theirs = torch.optim.AdamW(dense.parameters(), foreach=foreach)
    for each, stepped in ((dense, theirs), (model, optimizer)):
        each.zero_grad()
        sum(p.square().sum() for p in each.parameters()).backward()
        if each is dense:
            stepped.step()  # makes its state, which is overwritten
            dense.load_state_dict({name: x.clone() for name, x in given.items()})
            set_optimizer_state_dict(dense, theirs, copy.deepcopy(states), options=full)
        stepped.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor(), dense.get_parameter(name).detach())


def check_torch():
    """A trap that `is_trusted` knows: torch's own answer is that of this rank alone, or an error."""
    x = torch.arange(8.0).view(4, 2)
    split = distribute_tensor(copy.deepcopy(x), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert split.sum([], keepdim=True).full_tensor().item() != x.sum()


@pytest.mark.parametrize("foreach", [False, True])
def test_full_states(ranks, foreach):
    ranks(2).run(check_full_state, foreach)


@pytest.mark.parametrize(("sizes", "scheme"), [({"x": 2}, "1d"), ({"x": 2, "y": 2}, "2d")])
def test_operations_and_their_gradients(ranks, sizes, scheme):
    ranks(2 * len(sizes)).run(check_operations, sizes, scheme)


def test_other_padding_beside_it(ranks):
    ranks(2).run(check_pairs)


def test_writes_beside_plain_tensors(ranks):
    ranks(2).run(check_writes_as_dense)


def test_optimizers_of_whole_matrices(ranks):
    ranks(2).run(check_optimizers, {"x": 2}, "1d")
    ranks(4).run(check_optimizers, {"x": 2, "y": 2}, "2d")


def test_gradients_of_gradients(ranks):
    ranks(2).run(check_penalty)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="tells when torch mends it")
def test_why_a_rule_is_not_trusted(ranks):
    ranks(2).run(check_torch)


def test_what_was_computed_on_the_whole(ranks):
    ranks(2).run(check_plain)
