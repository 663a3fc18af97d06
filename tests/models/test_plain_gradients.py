"""What `parallelize` leaves as it is, beside `dp`: gradients are those of all rows, whatever a program does."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import Grid


class Model(nn.Module):
    """A pair, and what stays: a table, norms, two branches, one of which may be left out."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=sparse)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.left, self.right = nn.Conv1d(8, 4, 1), nn.Conv1d(8, 4, 1)

    def forward(self, ids, order=("left", "right"), through=lambda f, x: f(x)):
        x = through(self.norm, self.table(ids))
        x = self.down(F.gelu(self.up(x))).transpose(1, 2)
        return sum((getattr(self, name)(x).square().sum() for name in order), x.sum())


PLAN = {"up": "up", "down": "down"}
PLAIN = ("table.weight", "norm.weight", "norm.bias", "left.weight", "left.bias", "right.weight", "right.bias")


def make(mesh=None, **options):
    torch.manual_seed(0)
    model = Model(**options).double()
    return model if mesh is None else ndtp.parallelize(model, mesh, plan=PLAN, scheme="2d")


def clamp_gradient(parameter):
    parameter.grad.clamp_(-0.5, 0.5)


def check(model, dense, where):
    for name in PLAIN:
        ours, theirs = model.get_parameter(name).grad, dense.get_parameter(name).grad
        assert (ours is None) == (theirs is None), f"{where}: {name}"
        if ours is not None:
            whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours.to_dense()
            torch.testing.assert_close(whole, theirs.to_dense(), rtol=1e-10, atol=1e-12, msg=f"{where}: {name}")


def check_programs():
    mesh = mesh_of(Grid(dp=2, x=1, y=1))
    me = mesh.coordinate["dp"]
    ids = torch.arange(12).reshape(2, 6) * 7 % 10
    mine = ids[me : me + 1]

    def both(step, where, **options):
        model, dense = make(mesh, **options), make(**options)
        step(model, [mine], me)
        step(dense, [ids[:1], ids[1:]], None)
        check(model, dense, where)
        return model

    def accumulated(model, parts, rank):
        for _ in range(2):
            for part in parts:
                model(part).backward()

    model = both(accumulated, "two backwards")
    before = [model.get_parameter(name).grad.full_tensor().clone() for name in PLAIN]
    ndtp.nn.sum_plain_gradients(model, mesh, ["dp"])
    after = [model.get_parameter(name).grad.full_tensor() for name in PLAIN]
    assert all(map(torch.equal, before, after))

    def in_another_order(model, parts, rank):
        for i, part in enumerate(parts):
            index = i if rank is None else rank
            model(part, ("left", "right") if index else ("right", "left")).backward()

    both(in_another_order, "branches in another order")

    def on_one_rank(model, parts, rank):
        for i, part in enumerate(parts):
            model(part, ("left", "right") if (i if rank is None else rank) else ("left",)).backward()

    both(on_one_rank, "a branch on one rank alone")
    both(lambda model, parts, rank: [model(part, ("left",)).backward() for part in parts], "a branch on no rank")

    def hooked(model, parts, rank):
        """All rows in one backward: what hooks see is the gradient of all."""
        for name in PLAIN:
            model.get_parameter(name).register_hook(lambda g: g.clamp(-0.5, 0.5))
        sum(model(part) for part in parts).backward()

    both(hooked, "hooks")

    def stepped(model, parts, rank):
        for name in PLAIN:
            model.get_parameter(name).register_post_accumulate_grad_hook(clamp_gradient)
        sum(model(part) for part in parts).backward()

    both(stepped, "hooks behind the gradient")

    def asked_for(model, parts, rank):
        parameters = [model.get_parameter(name) for name in PLAIN]
        found = torch.autograd.grad(sum(model(part) for part in parts), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient

    both(asked_for, "torch.autograd.grad")

    def thawed(model, parts, rank):
        model.table.requires_grad_(True)
        copied = copy.deepcopy(model)
        for part in parts:
            copied(part).backward()
        for name in PLAIN:
            model.get_parameter(name).grad = copied.get_parameter(name).grad

    both(thawed, "a copy")

    def broken_off(model, parts, rank):
        def break_off(gradient):
            raise KeyError("a hook of the user's")

        handle = model.table.weight.register_hook(break_off)
        for part in parts:
            with pytest.raises(KeyError):
                model(part).backward()
        handle.remove()
        model.zero_grad()
        for part in parts:
            model(part).backward()

    both(broken_off, "behind a backward that was broken off")

    def recomputed(model, parts, rank):
        for part in parts:
            model(part, through=lambda f, x: checkpoint(f, x, use_reentrant=True)).backward()

    both(recomputed, "a backward within another")
    both(accumulated, "sparse gradients", sparse=True)
    with mock.patch.object(mesh.groups, "kind", replace(mesh.groups.kind, sums_sparse=False)):
        both(accumulated, "sparse gradients, over a backend that knows none", sparse=True)

    early, dense = make(), make()
    for each in (early, dense):
        each.norm.weight.register_hook(lambda g: g.clamp(-0.5, 0.5))
    early.table.requires_grad_(False)
    ndtp.parallelize(early, mesh, plan=PLAN, scheme="2d")
    early.table.requires_grad_(True)
    early(mine).backward()
    (dense(ids[:1]) + dense(ids[1:])).backward()
    check(early, dense, "frozen, and with a hook, before")

    model = make(mesh)
    with pytest.raises(ndtp.LayoutError, match="create_graph"):
        F.layer_norm(model.norm.weight.square(), (8,)).sum().backward(create_graph=True)
    with pytest.raises(ndtp.LayoutError, match="DistributedDataParallel: parameters of this model are split"):
        nn.parallel.DistributedDataParallel(model)


@pytest.mark.real
def test_gradients_of_what_stays_are_those_of_all_rows(ranks):
    ranks(2).run(check_programs)
