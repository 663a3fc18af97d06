"""Which Linear pairs are found in models of all shapes, and what is said of the others."""

import operator
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ndtp import LayoutError
from ndtp.models.linear_pairs import Pair, find_pairs, pairs_by_name


class TwoLayers(nn.Module):
    """fc1, fc2 as attributes; what lies between is given."""

    def __init__(self, between, **modules):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)
        self.between = between
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return x + self.fc2(self.between(self, self.fc1(x)))


class ConvolutionLike(nn.Module):
    """The MLP of GPT-2 as others write it with Linear: c_fc, act, c_proj, dropout."""

    def __init__(self):
        super().__init__()
        self.c_fc, self.act, self.c_proj, self.dropout = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GatedOtherwise(Gated):
    """The result of `way` enters `down_proj`."""

    def __init__(self, way):
        super().__init__()
        self.way, self.norm, self.act = way, nn.LayerNorm(4), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.way(self, x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), ConvolutionLike()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        if x.abs().sum() >= 0:  # decided by values, though always alike
            x = -x
        return self.fc2(self.fc1(x).relu())


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x))) + self.fc2(F.relu(self.fc1(-x)))


FC = [Pair("fc1", "fc2")]


@pytest.mark.parametrize(
    "between",
    [
        lambda self, h: F.gelu(h, approximate="tanh"),
        lambda self, h: h.relu(),
        lambda self, h: torch.relu(h).square(),
        lambda self, h: F.relu(input=h) ** 2,
        lambda self, h: torch.mul(input=F.silu(h), other=2),
        lambda self, h: h * 2 / 3,
        lambda self, h: 2 * h,
        lambda self, h: h * h,
        lambda self, h: h,
        lambda self, h: torch.pow(torch.sigmoid(h), 2.0),
    ],
)
def test_element_wise_operations_between(between):
    assert find_pairs(TwoLayers(between)) == (FC, {})


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda self, h: F.softmax(h, -1), "softmax"),
        (lambda self, h: h + 1, "add"),
        (lambda self, h: h * h.mean(), "used more than once"),
        (lambda self, h: torch.mul(h, other=self.scale), "mul"),
        (lambda self, h: torch.mul(input=h, other=self.scale), "mul"),
        (lambda self, h: self.scale * h, "mul"),
        (lambda self, h: operator.mul(h, self.scale), "mul"),
        (lambda self, h: self.norm(h), "LayerNorm (norm)"),
        (lambda self, h: F.dropout(h, 0.1), "dropout"),
        (lambda self, h: h.view(-1, 8), "view"),
    ],
)
def test_anything_else_between_is_a_reason(between, reason):
    model = TwoLayers(between, norm=nn.LayerNorm(8), scale=nn.Parameter(torch.ones(8)))
    pairs, reasons = find_pairs(model)
    assert pairs == [] and reason in reasons["fc1"] and set(reasons) == {"fc1", "fc2"}


def test_sequential_and_nested():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4), nn.Linear(4, 2))
    pairs, reasons = find_pairs(model)
    assert pairs == [Pair("0", "3")] and set(reasons) == {"4"}
    assert find_pairs(nn.Sequential(Block(), Block())) == (
        [Pair("0.mlp.c_fc", "0.mlp.c_proj"), Pair("1.mlp.c_fc", "1.mlp.c_proj")],
        {},
    )


def test_what_is_left_alone_says_why():
    pairs, reasons = find_pairs(nn.Sequential(Untraceable()))
    assert pairs == [] and set(reasons) == {"0.fc1", "0.fc2"} and "name the pair" in reasons["0.fc1"]
    pairs, reasons = find_pairs(UsedTwice())
    assert pairs == [] and "more than once" in reasons["fc1"]
    shared_dropout = nn.Dropout(0.1)
    # Each call of it draws the mask of what it is given.
    model = nn.Sequential(nn.Linear(4, 8), shared_dropout, nn.Linear(8, 4), shared_dropout)
    assert find_pairs(model) == ([Pair("0", "2")], {})


GATED = Pair("up_proj", "down_proj", "gate_proj")


@pytest.mark.parametrize(
    "way",
    [
        lambda m, x: F.silu(m.gate_proj(x)) * m.up_proj(x),
        lambda m, x: m.up_proj(x) * m.act(m.gate_proj(x)),
        lambda m, x: torch.mul(m.up_proj(x), m.gate_proj(x).sigmoid()),
        lambda m, x: m.act(m.gate_proj(x)).mul(m.up_proj(x)) * 2,
    ],
)
def test_gated_pairs(way):
    assert find_pairs(GatedOtherwise(way)) == ([GATED], {})


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (lambda m, x: F.silu(m.gate_proj(x)) * m.up_proj(m.norm(x)), "whose other factor"),
        (lambda m, x: F.silu(m.gate_proj(x)) * x.repeat(1, 2), "whose other factor"),
        (lambda m, x: F.silu(m.gate_proj(x)) * m.up_proj(x).cumsum(0), "whose other factor"),
        (lambda m, x: (h := m.up_proj(x)) * F.silu(m.gate_proj(x)) + h, "used more than once"),
        (lambda m, x: F.silu(m.gate_proj(x)) * m.up_proj(x) * m.norm(x).repeat(1, 2), "mul follows it"),
    ],
)
def test_gates_that_are_none(way, words):
    pairs, reasons = find_pairs(GatedOtherwise(way))
    assert pairs == [] and any(words in reason for reason in reasons.values()), reasons


def test_a_gate_that_cannot_be_swapped_holds_its_pair_back():
    model = Gated()
    model.gate_proj.register_forward_hook(lambda *_: None)
    pairs, reasons = find_pairs(model)
    assert pairs == [] and "gate_proj, which belongs to it" in reasons["up_proj"]


def test_layers_that_cannot_be_swapped_alone():
    tied = TwoLayers(lambda self, h: F.relu(h), head=nn.Linear(4, 8))
    tied.head.weight = tied.fc1.weight
    pairs, reasons = find_pairs(tied)
    assert pairs == [] and "shares a parameter" in reasons["fc1"] and "shares a parameter" in reasons["head"]
    tied = TwoLayers(lambda self, h: F.relu(h), head=nn.Linear(8, 4))
    tied.head.weight = tied.fc2.weight
    assert "fc2, which belongs to it, cannot be replaced" in find_pairs(tied)[1]["fc1"]
    hooked = TwoLayers(lambda self, h: F.relu(h))
    hooked.fc1.register_forward_hook(lambda *_: None)
    assert "hooks" in find_pairs(hooked)[1]["fc1"]
    patched = TwoLayers(lambda self, h: F.relu(h))
    patched.fc1.forward = lambda x: 2 * nn.Linear.forward(patched.fc1, x)
    assert "a forward of its own" in find_pairs(patched)[1]["fc1"]
    for model in (tied, hooked, patched):
        with pytest.raises(LayoutError, match="cannot be replaced"):
            pairs_by_name(model, {"fc1": "up", "fc2": "down"})


def test_subclasses_are_not_linears():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert find_pairs(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Scaled(8, 4)))[0] == []


def test_by_name():
    model = nn.Sequential(Block(), Block(), Untraceable())
    assert pairs_by_name(model, {"*.c_fc": "up", "*.c_proj": "down"}) == [
        Pair("0.mlp.c_fc", "0.mlp.c_proj"),
        Pair("1.mlp.c_fc", "1.mlp.c_proj"),
    ]
    assert pairs_by_name(model, {"2.fc1": "up", "2.fc2": "down"}) == [Pair("2.fc1", "2.fc2")]
    assert pairs_by_name(Gated(), {"gate*": "gate", "up*": "up", "down*": "down"}) == [GATED]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"*.c_fc": "up"}, "every up needs a down"),
        ({"nothing": "up", "*.c_proj": "down"}, "matches 0 layers"),
        ({"*.c_fc": "left"}, "'gate', 'up' or 'down'"),
        ({"*.c_fc": "up", "*.mlp.*": "down"}, "every up needs a down"),
        ({"*.c_proj": "up", "*.c_fc": "down", "2.fc1": "up", "2.fc2": "down"}, None),
        ({"2.fc1": "up", "0.mlp.c_fc": "down"}, "takes 4"),
        ({"0.*.c_fc": "gate", "*.c_fc": "up", "*.c_proj": "down"}, "needs a gate of its own"),
        ({"2.fc2": "gate", "2.fc1": "up", "0.*.c_proj": "down"}, "2.fc2 gives 4 features"),
    ],
)
def test_names_that_make_no_pairs(plan, words):
    model = nn.Sequential(Block(), Block(), Untraceable())
    if words is None:
        assert len(pairs_by_name(model, plan)) == 3
        return
    with pytest.raises(LayoutError, match=words):
        pairs_by_name(model, plan)


def noted(model, h):
    model.calls += 1
    model.notes["calls"] += 1
    model.seen.append(h.mean())
    model.fc2.last = h
    return h.relu() * (2 if torch.rand(()).item() + random.random() + np.random.rand() < 1.5 else 3)


class Noting(TwoLayers):
    """Its code notes its calls in all places, and draws."""

    def __init__(self):
        super().__init__(noted)
        self.register_buffer("calls", torch.zeros(()))
        self.notes, self.seen = {"calls": 0}, []


def test_nobody_sees_that_code_was_traced():
    model = Noting()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    _, reasons = find_pairs(model)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert not any("cannot be traced" in why for why in reasons.values()), reasons
    assert not model.calls and not model.notes["calls"] and not model.seen and not hasattr(model.fc2, "last")


def test_a_model_that_cannot_be_copied():
    model = TwoLayers(lambda self, h: h.relu())
    model.lock = threading.Lock()
    assert find_pairs(model)[0] == [Pair("fc1", "fc2")]
