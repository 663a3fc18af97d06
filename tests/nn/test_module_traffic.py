"""`volume` of modules: which tensors travel in which dtypes, on grids of any size, without a trace in the module."""

import pytest
import torch

import ndtp
from ndtp import Grid
from ndtp.algebra.wire import Wire
from ndtp.runtime.dry_grid import DryGrid

CUBE = Grid(z=2, x=2, y=2)


def test_statistics_travel_in_fp32_beside_bf16():
    norm = ndtp.nn.LayerNorm(64, mesh=DryGrid(CUBE), device="meta", dtype=torch.bfloat16)
    volume = norm.volume(32)
    rows = 32 // 4
    assert volume.by("dtype", "elements") == {"bfloat16": 2 * 2 * 3 * 32 // 4, "float32": 2 * 2 * rows}
    assert volume.by("dtype")["float32"] == 4 * volume.by("dtype", "elements")["float32"]
    assert volume.by("phase")["wgrad"] == 2 * volume.by("phase", "elements")["wgrad"]


def test_a_wire_says_which_dtype_travels():
    sizes = {"mesh": DryGrid(CUBE, wire=Wire.of({"weights": "fp8"})), "device": "meta", "bias": False}
    volume = ndtp.nn.MLP(64, 256, **sizes).volume(64)
    assert set(volume.by("dtype")) == {"float32", "fp8_e4m3"}
    gathers = {entry.tensor: entry.dtype for entry in volume.entries if entry.phase == "forward"}
    assert gathers["mlp.up B"] == gathers["mlp.down B"] == "fp8_e4m3" and gathers["mlp.up A"] == "float32"
    plain = ndtp.nn.MLP(64, 256, **{**sizes, "mesh": DryGrid(CUBE)}).volume(64)
    assert plain.elements == volume.elements and volume.total < plain.total == 4 * plain.elements
    assert plain.by("tensor") == sum((p.plan.volume(shape) for p, shape in parts(64)), start=type(plain)()).by("tensor")


def parts(tokens):
    mlp = ndtp.nn.MLP(64, 256, bias=False, mesh=DryGrid(CUBE), device="meta")
    return (mlp.up, (tokens, 64, 256)), (mlp.down, (tokens, 256, 64))


def test_experts_counts_and_routers_have_dtypes_of_their_own():
    options = {"balance": 0.01, "capacity": 1.0}
    moe = ndtp.nn.MoE(32, 64, 8, mesh=DryGrid(Grid(e=4, x=2)), device="meta", dtype=torch.bfloat16, options=options)
    volume = moe.volume(64)
    assert set(volume.by("dtype")) == {"bfloat16", "float32", "int32"}
    assert moe.volume(64, rank=5).total == volume.total, "even routing is even"
    logits = moe.router.volume(64)
    assert {"float32", "int32"} == set(logits.by("dtype")) and logits.total < volume.total


@pytest.mark.parametrize("is_training", [True, False])
def test_nothing_is_left_of_the_run(is_training):
    """Hooks are not called, no numbers are drawn, no parameter is noted as used; positions may be anything."""

    def refuses(*_):
        raise AssertionError("a hook of others")

    torch.manual_seed(1)
    mlp = ndtp.nn.MLP(64, 128, dropout=0.5, mesh=DryGrid(CUBE), device="meta").train(is_training)
    for part in (mlp, mlp.up):
        part.register_forward_hook(refuses), part.register_full_backward_hook(refuses)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert mlp.volume(64).backward > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not p._backward_hooks and p.grad is None for p in mlp.parameters())
    attention = ndtp.nn.Attention(32, 4, mesh=DryGrid(CUBE), device="meta", positions=refuses)
    assert attention.volume(4, 8).total > 0 and attention.positions is refuses


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(12, 20), torch.nn.Linear(20, 12)

    def forward(self, x):
        h = self.a(x)
        return self.b(h) + self.b(h * 2)


def bytes_of_steps():
    model, x = ndtp.parallelize(Twice(), ndtp.ProcessGrid(Grid(z=2))), torch.ones(6, 12)
    found = []
    for _ in range(3):
        with ndtp.CommMeter() as meter:
            model(x).sum().backward()
        found.append(meter.volume.by("collective")["all_gather"])
    return found, model.ndtp_report.volume(x).by("collective")["all_gather"]


def test_a_layer_that_is_called_twice_is_gathered_as_often_in_each_step(ranks):
    """No gather is started for a layer that comes only in the next step."""
    for found, predicted in ranks(2).run(bytes_of_steps):
        assert found == [predicted] * 3
