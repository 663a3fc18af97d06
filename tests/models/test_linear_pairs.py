"""Which pairs of Linears a plan of names means, and what is said of names that make none."""

import pytest
from torch import nn
from torch.nn import functional as F

from ndtp import LayoutError
from ndtp.models.linear_pairs import Pair, pairs_by_name


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


GATED = Pair("up_proj", "down_proj", "gate_proj")


def test_layers_that_cannot_be_swapped_alone():
    tied = TwoLayers(lambda self, h: F.relu(h), head=nn.Linear(4, 8))
    tied.head.weight = tied.fc1.weight
    hooked = TwoLayers(lambda self, h: F.relu(h))
    hooked.fc1.register_forward_hook(lambda *_: None)
    patched = TwoLayers(lambda self, h: F.relu(h))
    patched.fc1.forward = lambda x: 2 * nn.Linear.forward(patched.fc1, x)
    for model, why in ((tied, "shares a parameter"), (hooked, "has hooks"), (patched, "a forward of its own")):
        with pytest.raises(LayoutError, match=f"cannot be replaced: it .*{why}"):
            pairs_by_name(model, {"fc1": "up", "fc2": "down"})


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
