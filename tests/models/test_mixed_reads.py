"""Model code that takes a layer's weight for a plain tensor: named, with a fix that works."""

import ast
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
from ndtp import Grid, LayoutError


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
    """What each is told, and that what it is told helps."""
    mesh, ids = mesh_of(Grid(x=1, y=2)), torch.arange(24).view(4, 6)
    told = {}
    for name, kind in READERS.items():
        dense, keep = read_by(name, kind), []
        for _ in range(3):
            model = ndtp.parallelize(read_by(name, kind), mesh, scheme="2d", keep=keep)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of what is gathered for a layer that is whole
                told.setdefault(name, model.ndtp_report.kept.get(name, "")) if "self_attn" in name else None
                try:
                    loss = model(input_ids=ids, labels=ids).loss
                    break
                except LayoutError as error:
                    told.setdefault(name, str(error))
                    keep += ast.literal_eval(re.search(r"keep=(\[.*?\])", str(error))[1])
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


def check_pairs():
    torch.manual_seed(0)
    names = {"pair.up": "up", "pair.down": "down"}
    model = ndtp.parallelize(PairThatIsRead(), mesh_of(Grid(x=2)), names, scheme="1d")
    with pytest.raises(LayoutError) as error:
        model(torch.randn(4, 8))
    torch.manual_seed(0)
    dense, x = PairThatIsRead(), torch.randn(4, 8)
    kept = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d", keep=["pair.up"], strict=False)
    torch.testing.assert_close(kept(x), dense(x))
    return str(error.value)


def test_what_is_read_is_named_and_the_fix_helps(ranks):
    told = ranks(2).run(check_models)[0]
    line = r" which is split over ranks, in \w+ beside tensors that are not.*\n  at .*test_mixed_reads.py, line \d+\n"
    assert set(told) == set(READERS) - {"model"}  # its norm, on x=1, is whole on every rank: a plain tensor
    assert not told["model.layers.1.self_attn"]  # its trial fails, so that the model is observed; it is split, too
    read = r"MLPThatReads reads 'model.layers.0.mlp.gate_proj.weight' \(.*\),"
    text = told["model.layers.0.mlp"]
    assert re.search(read + line + r"  fix: call the layer .* keep=\['model\.", text), text


def test_of_a_pair(ranks):
    told = ranks(2).run(check_pairs)[0]
    assert "PairThatIsRead reads 'pair.up.weight' (" in told
    assert told.endswith("or parallelize(..., keep=['pair.up']), which leaves it whole")


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
