"""Model code that computes with a layer's weight, or with parameters that it keeps in lists: exact, and named once."""

import copy
import re
import warnings
from typing import NamedTuple

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it
from architectures import as_dense, build
from products import mesh_of
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaModel

import ndtp
from ndtp import Grid


class MLPThatReads(LlamaMLP):
    def forward(self, x):
        gate = F.linear(x, self.gate_proj.weight)
        return F.linear(self.act_fn(gate) * self.up_proj(x), self.down_proj.weight)


class AttentionThatReads(LlamaAttention):
    def forward(self, hidden_states, **others):
        y, scores = super().forward(hidden_states, **others)
        w = self.o_proj.weight.to(y.dtype)
        return y + (torch.ones(1, len(w), dtype=y.dtype) @ w).sum(), scores


class ModelThatReads(LlamaModel):
    def forward(self, *args, **others):
        out = super().forward(*args, **others)
        assert self.layers[0].mlp.up_proj.weight.dtype == torch.float64  # which tells no numbers
        out.last_hidden_state = out.last_hidden_state * self.norm.weight
        return out


READERS = {"model.layers.0.mlp": MLPThatReads, "model.layers.1.self_attn": AttentionThatReads, "model": ModelThatReads}


def read_by(name, kind):
    model = build("LlamaForCausalLM")
    model.get_submodule(name).__class__ = kind
    return model


def check_models():
    """What each is told."""
    mesh, ids = mesh_of(Grid(x=1, y=2)), torch.arange(24).view(4, 6)
    told = {}
    for name, kind in READERS.items():
        dense, model = read_by(name, kind), ndtp.parallelize(read_by(name, kind), mesh, scheme="2d")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loss = model(input_ids=ids, labels=ids).loss
        told[name] = [str(each.message) for each in warned if "That" in str(each.message)]
        expected = dense(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        for (key, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
            grad = as_dense(mine.grad.full_tensor(), theirs)
            torch.testing.assert_close(grad, theirs.grad, msg=lambda text, key=key: f"{key}: {text}")
    return told


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class PairThatIsRead(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def forward(self, x):
        return F.linear(self.pair(x), self.pair.up.weight)


def gradients_equal(dense, model, x, mesh):
    """Compare a step of a model, whose ranks along dp have rows of their own, with the dense one's."""
    ranks = 2 if "dp" in mesh.grid.names else 1
    here = mesh.grid.coordinate(mesh.rank).get("dp", 0)
    dense(x).square().mean().backward()
    mine = model(x.chunk(ranks)[here])
    torch.testing.assert_close(mine, dense(x).chunk(ranks)[here])
    (mine.square().mean() / ranks).backward()
    for (name, p), q in zip(dense.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=lambda text, name=name: f"{name}: {text}")


def check_pairs():
    for scheme in ("1d", "1d-sp"):
        mesh = mesh_of(Grid(x=2))
        torch.manual_seed(0)
        dense = PairThatIsRead()
        names = {"pair.up": "up", "pair.down": "down"}
        model = ndtp.parallelize(copy.deepcopy(dense), mesh, names, scheme=scheme)
        gradients_equal(dense, model, torch.randn(4, 8), mesh)


def test_what_is_read_is_exact_and_named_once(ranks):
    told = ranks(2).run(check_models)[0]
    gate, down = told["model.layers.0.mlp"]
    assert re.search(r"MLPThatReads reads 'model.layers.0.mlp.gate_proj.weight' \(.* split over ranks, beside", gate)
    assert "down_proj.weight" in down and re.search(r"\n  at .*test_mixed_reads.py, line \d+\n  fix: call the", down)
    assert not told["model.layers.1.self_attn"]  # its trial fails, so that the model is observed; it is split, too
    assert not told["model"]  # its norm, on x=1, is whole on every rank: a plain tensor


def test_of_a_pair(ranks):
    ranks(2).run(check_pairs)


class Kept(nn.Module):
    """Code that reaches parameters by a list, and puts them into a layer that is no part of the model."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.w, self.v, self.b = (nn.Parameter(torch.randn(*sizes)) for sizes in ((8, 16), (16, 8), (16,)))
        stray = nn.Linear(8, 16)
        stray._parameters.update(weight=None, bias=None)
        self.held, self.stray = (self.w, self.v, self.b, self.first.weight), (stray,)

    def forward(self, x):
        w, v, b, first = self.held
        y = self.first(x)
        y = (y @ w + b).relu() @ v + F.linear(x, first) + x[:, :1] * self.v.sum(0)
        self.stray[0]._parameters.update(weight=v, bias=b)
        y = y + self.stray[0](x[:, :1].expand(-1, 8)).mean(-1, keepdim=True)
        self.stray[0]._parameters.update(weight=None, bias=None)
        return self.last(y)


def check_kept():
    for sizes, scheme in (({"x": 2}, "1d"), ({"x": 2}, "1d-sp"), ({"dp": 2}, "3d"), ({"z": 2}, "3d")):
        mesh = mesh_of(Grid(sizes))
        torch.manual_seed(0)
        dense = Kept().double()
        torch.manual_seed(0)
        model = ndtp.parallelize(Kept().double(), mesh, scheme=scheme)
        gradients_equal(dense, model, torch.randn(8, 6, dtype=torch.float64), mesh)


def test_parameters_that_code_keeps_in_a_list(ranks):
    ranks(2).run(check_kept)  # along dp each rank's gradient of them was left its own


class WithMoreThanItUses(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 34), nn.Tanh(), nn.Linear(34, 2))
        self.unused = nn.Parameter(torch.tensor(0.3))


def by_closures(model):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(2)]


def check_gradients_in_one_vector():
    torch.manual_seed(0)
    dense = WithMoreThanItUses()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)))
    torch.testing.assert_close(by_closures(model), by_closures(dense), rtol=1e-4, atol=1e-6)


def test_gradients_beside_zeros_in_one_vector(ranks):
    ranks(2).run(check_gradients_in_one_vector)  # LBFGS puts zeros in the place of a gradient that there is none of


class Gained(nn.Module):
    """A norm behind which gains stand in a list, of which the list's owner reads them."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.gains = norm, nn.ParameterList([nn.Parameter(torch.full((8,), 1.5, dtype=torch.float64))])

    def forward(self, x):
        return self.norm(x) * torch.cat([gain.repeat(x.shape[-1] // 8) for gain in self.gains])


class Parts(NamedTuple):
    context: torch.Tensor
    scores: torch.Tensor


class AttentionWithNames(LlamaAttention):
    def forward(self, *args, **others):
        return Parts(*super().forward(*args, **others))


def with_lists_and_names():
    model = build("LlamaForCausalLM")
    model.model.norm = Gained(model.model.norm)
    model.model.layers[0].self_attn.__class__ = AttentionWithNames
    return model


def check_lists_and_names():
    ids, kinds = torch.arange(24).view(4, 6), []
    dense, model = (with_lists_and_names() for _ in range(2))
    ndtp.parallelize(model, mesh_of(Grid(x=2)), scheme="1d")
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda module, given, out: kinds.append(type(out)))
    ours, theirs = (each(input_ids=ids, labels=ids) for each in (model, dense))
    ours.loss.backward()
    theirs.loss.backward()
    torch.testing.assert_close(ours.loss, theirs.loss)
    gains = [each.model.norm.gains[0].grad for each in (model, dense)]
    torch.testing.assert_close(gains[0].full_tensor(), gains[1])
    return kinds


def test_lists_of_parameters_are_read_by_their_owners_and_results_keep_their_names(ranks):
    assert ranks(2).run(check_lists_and_names)[0] == [Parts]
