"""A rank that runs other code is named; what differs between processes that run the same code is not."""

import os
import subprocess
import sys
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ndtp
from ndtp import Grid, MismatchError, ProcessGrid
from ndtp.models.same_code import code_of


def activation(x):
    return F.gelu(x)


def relu(x):
    return F.relu(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def inner(self, x):
        return activation(self.up(x))

    def forward(self, x, how="plain"):
        if how in {"plain", "twice", "never"}:  # a set, which every process orders anew
            x = self.inner(x)
        return self.down(self.act(x))


def patched_helper(model, monkeypatch):
    monkeypatch.setitem(globals(), "activation", relu)


def patched_method(model, monkeypatch):
    monkeypatch.setattr(Block, "inner", lambda self, x: relu(self.up(x)))


def patched_torch(model, monkeypatch):
    monkeypatch.setattr(F, "gelu", relu)


def patched_layer_of_torch(model, monkeypatch):
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: relu(x))


def patched_instance(model, monkeypatch):
    model.act.forward = MethodType(lambda self, x: relu(x), model.act)


def wrapped_instance(model, monkeypatch):
    model.act.forward = torch.autocast("cpu", torch.bfloat16)(model.act.forward)


def replaced(model, monkeypatch):
    model.act = nn.ReLU()


PATCHES = [
    patched_helper,
    patched_method,
    patched_torch,
    patched_layer_of_torch,
    patched_instance,
    wrapped_instance,
    replaced,
]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__)
def test_other_code_has_another_hash(patch, monkeypatch):
    model = Block()
    before = code_of(model)
    assert before == code_of(Block())
    patch(model, monkeypatch)
    assert code_of(model) != before


def test_casts_of_a_wrapper_are_told():
    model = Block()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    before = code_of(model)
    assert before["code around Block"].endswith("to torch.bfloat16 on cpu")
    model.forward = torch.autocast("cpu", torch.float16)(Block.forward.__get__(model))
    assert code_of(model) != before
    model.forward = torch.autocast("cpu", torch.bfloat16, enabled=False)(Block.forward.__get__(model))
    assert code_of(model)["code around Block"].endswith("off")


def test_versions_come_first():
    found = code_of(Block())
    assert found["version of torch"] == torch.__version__ and found["version of ndtp"] == ndtp.__version__
    assert [topic.startswith("version") for topic in found][:3] == [True] * 3


def test_every_process_finds_the_same():
    program = "from tests.models.test_same_code import *; print(code_of(Block()))"
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    told = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True, check=True
        )
        told.add(done.stdout)
    assert len(told) == 1


def one_rank_differs(how):
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    torch.manual_seed(0)
    model = ndtp.parallelize(Block(), mesh)
    if mesh.rank == 1 and how == "replaced":
        model.act = nn.ReLU()
    elif mesh.rank == 1:
        model.act.forward = relu
    with pytest.raises(MismatchError) as raised:
        model(torch.ones(4, 8))
    return str(raised.value)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("replaced", "module of 'act': rank 1 has ReLU, rank 0 has GELU"),
        ("patched", "code of GELU: rank 1 has hash"),
    ],
)
def test_a_rank_with_other_code_is_named(ranks, how, named):
    assert all(named in text for text in ranks(2).run(one_rank_differs, how))
