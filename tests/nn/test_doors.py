"""Doors by which something other than what a module made reaches its parts: loading, assigning, meta, widths."""

from collections import OrderedDict

import pytest
import torch
from products import mesh_of
from test_linear import dense_linear
from test_mlp import HIDDEN, INNER, ROWS, dense_block
from torch import nn as dense_nn
from torch.nn import functional as F

import ndtp
from ndtp import Grid, LayoutError
from ndtp.ops.products import local_shard
from ndtp.testing import assert_equal, small_integers


def whole(x, layout, mesh):
    return ndtp.relayout(x.detach(), layout, layout.with_dims(None, None), mesh)


def message(call, error=LayoutError):
    """What a refusal says, in one line."""
    with pytest.raises(error) as caught:
        call()
    return " ".join(str(caught.value).split())


# ---- loading ----


def dense_into(kind, **arguments):
    """A module with other values, the dense one that is loaded into it, and a state dict of plain tensors."""
    if kind == "linear":
        return ndtp.nn.Linear(HIDDEN, INNER, seed=1, **arguments), dense_linear(HIDDEN, INNER)
    up, down = dense_block()
    if kind == "mlp":
        return ndtp.nn.MLP(HIDDEN, INNER, "relu", seed=1, **arguments), dense_nn.Sequential(
            OrderedDict(up=up, act=dense_nn.ReLU(), down=down)
        )
    torch.manual_seed(1)
    model = dense_nn.Sequential(dense_nn.Linear(HIDDEN, INNER), dense_nn.ReLU(), dense_nn.Linear(INNER, HIDDEN))
    return ndtp.parallelize(model, **arguments), dense_nn.Sequential(up, dense_nn.ReLU(), down)


def run_whole(module, x, mesh):
    if not hasattr(module, "in_layout"):
        return module(x)
    return whole(module(module.in_layout.shard(x, mesh.rank)), module.out_layout, mesh)


def check_dense_is_sharded(kind, scheme):
    mesh = mesh_of(Grid(x=2))
    for assign in (False, True):
        for device in (None, "meta") if kind != "model" else (None,):
            if device == "meta" and not assign:
                continue
            options = {"device": device} if device else {}
            module, dense = dense_into(kind, mesh=mesh, scheme=scheme, **options)
            state = {key: value.clone() for key, value in dense.state_dict().items()}
            given = dict(state)
            module.load_state_dict(state, assign=assign)
            assert all(state[key] is given[key] for key in given), "the caller's state dict stays as it is"
            x = small_integers((ROWS, HIDDEN), 5)
            assert_equal(run_whole(module, x, mesh), dense(x), f"{kind}, {scheme}, assign={assign}")
            for name, parameter in module.named_parameters():
                assert parameter.requires_grad and parameter.device_mesh == mesh.device_mesh, name
            # What a module gives it takes.
            own = module.state_dict()
            module.load_state_dict(own, assign=assign)
            assert_equal(run_whole(module, x, mesh), dense(x), f"{kind}, {scheme}, its own state")


@pytest.mark.parametrize("kind", ["linear", "mlp", "model"])
def test_a_dense_state_dict_is_sharded(ranks, kind):
    for scheme in ("1d", "1d-sp"):
        ranks(2).run(check_dense_is_sharded, kind, scheme)


def check_gated_and_padded():
    mesh = mesh_of(Grid(x=2))
    block, other = (ndtp.nn.GatedMLP(HIDDEN, INNER, mesh=mesh, scheme="1d", seed=seed) for seed in (1, 2))
    state = {key: value.full_tensor() for key, value in other.state_dict().items()}
    for assign in (False, True):
        block.load_state_dict(state, assign=assign)
        assert_equal(block.to_dense().gate.weight, other.to_dense().gate.weight, "gated")
        block.reset_parameters(1)
    layer, dense = ndtp.nn.Linear(5, 7, mesh=mesh, scheme="1d", pad=True, seed=3), dense_linear(5, 7)
    for assign in (False, True):
        layer.load_state_dict(dense.state_dict(), assign=assign)  # the padding is filled with zeros
        assert layer.weight.shape == (8, 5) and (layer.weight.full_tensor()[7:] == 0).all()
        assert_equal(layer.to_dense().weight, dense.weight, "without padding")
        layer.reset_parameters()
        padded = {"weight": F.pad(dense.weight, (0, 0, 0, 1)).detach(), "bias": F.pad(dense.bias, (0, 1)).detach()}
        layer.load_state_dict(padded, assign=assign)
        assert_equal(layer.to_dense().weight, dense.weight, "with padding")
    wider = dense_linear(5, 8)
    with torch.no_grad():
        wider.weight.fill_(1), wider.bias.fill_(1)
    said = [message(lambda a=a: layer.load_state_dict(wider.state_dict(), assign=a), RuntimeError) for a in (0, 1)]
    assert_equal(layer.to_dense().weight, dense.weight, "what was refused leaves the layer as it was")
    return said


def test_gated_and_padded(ranks):
    said = ranks(2).run(check_gated_and_padded)
    assert said[0] == said[1]
    assert all("weight: " in m and "bias: " in m and "8 x 5" not in m and "not zero" in m for m in said[0]), said


def check_refused_states():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = mesh_of(Grid(x=2))
    said, other = [], init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    for assign in (False, True):
        block = ndtp.nn.MLP(HIDDEN, INNER, mesh=mesh, scheme="1d", seed=1)
        before = block.to_dense().state_dict()
        state = dict(block.state_dict())
        local = state["up.weight"].to_local()
        for value in (
            torch.zeros(INNER, HIDDEN + 1),
            local.clone(),  # a shard is no dense tensor
            DTensor.from_local(torch.zeros(INNER, HIDDEN // 2), other, [Shard(1)], run_check=False),
        ):
            wrong = state | {"up.weight": value}
            said.append(
                message(lambda block=block, w=wrong, a=assign: block.load_state_dict(w, assign=a), RuntimeError)
            )
        for key, value in block.to_dense().state_dict().items():
            assert_equal(value, before[key], key)
        turned = state["up.weight"].redistribute(placements=[Shard(1) if p.is_shard(0) else Shard(0) for p in
                                                             state["up.weight"].placements])  # fmt: skip
        block.load_state_dict(state | {"up.weight": 2 * turned}, assign=assign)  # of a twin that lies otherwise
        assert_equal(block.to_dense().state_dict()["up.weight"], 2 * before["up.weight"], "turned")
    return said


def test_states_that_do_not_fit_are_refused(ranks):
    said = ranks(2).run(check_refused_states)
    assert said[0] == said[1] and len(said[0]) == 6
    for words, each in zip(["size mismatch", "size mismatch", "redistribute"] * 2, said[0], strict=True):
        assert "up.weight" in each and words in each, each


def check_a_mean_of_states(widths):
    """Of stacked tensors, which is whole on every rank where a size is padded."""
    for width in widths:
        torch.manual_seed(0)
        made = [dense_nn.Linear(4, width) for _ in range(2)]
        states = [ndtp.parallelize(dense_nn.Sequential(each), mesh_of(Grid(x=2))).state_dict() for each in made]
        expected = (made[0].weight.full_tensor() + made[1].weight.full_tensor()) / 2
        again = ndtp.parallelize(dense_nn.Sequential(dense_nn.Linear(4, width)), mesh_of(Grid(x=2)))
        again.load_state_dict({key: torch.stack([each[key] for each in states]).mean(0) for key in states[0]})
        torch.testing.assert_close(again[0].weight.full_tensor(), expected)


def test_a_mean_of_states_is_loaded(ranks):
    ranks(2).run(check_a_mean_of_states, (6, 5))


# ---- what is assigned ----


def check_assigned(scheme):
    mesh = mesh_of(Grid(x=2))
    dense = dense_linear(HIDDEN, HIDDEN)
    layer = ndtp.nn.Linear.from_dense(dense, mesh=mesh, scheme=scheme)
    block = ndtp.nn.MLP.from_dense(*dense_block(), "relu", mesh=mesh, scheme=scheme)
    model = dense_nn.Sequential(dense_nn.Linear(6, 9), dense_nn.ReLU(), dense_nn.Linear(9, 6))
    ndtp.parallelize(model, mesh, {"0": "up", "2": "down"}, scheme=scheme)
    said = []
    for module, part, x in (
        (layer, layer, torch.ones(layer.in_layout.shard_shape((ROWS, HIDDEN)))),
        (block, block.up, torch.ones(block.in_layout.shard_shape((ROWS, HIDDEN)))),
        (block, block.down, torch.ones(block.in_layout.shard_shape((ROWS, HIDDEN)))),
        (model, model[0], torch.ones(ROWS, 6)),
    ):
        kept, bias = part.weight, part.bias
        part.weight = dense_nn.Parameter(kept.full_tensor().detach())
        said.append(message(lambda m=module, x=x: m(x)))
        part.weight = dense_nn.Parameter(local_shard(kept).detach().clone())
        part(x) if part is not block.down and part is not model[0] else None  # this rank's shard is taken as such
        part.weight = kept
        if bias.full_tensor().shape != local_shard(bias).shape:
            part.bias = dense_nn.Parameter(bias.full_tensor().detach())
            assert "bias" in message(lambda m=module, x=x: m(x))
            part.bias = bias
        module(x)
    state = {key: value.full_tensor() for key, value in block.state_dict().items()}
    x = torch.ones(block.in_layout.shard_shape((ROWS, HIDDEN)))
    assert torch.equal(torch.func.functional_call(block, state, x), block(x))  # whole, and no parameters: cut
    # A layer whose weight was cut down, though it still says otherwise.
    cut = dense_nn.Linear(HIDDEN, HIDDEN)
    cut.weight = dense_nn.Parameter(cut.weight[: HIDDEN // 2].detach())
    said.append(message(lambda: ndtp.nn.Linear.from_dense(cut, mesh=mesh, scheme=scheme)))
    return said


@pytest.mark.parametrize("scheme", ["1d", "1d-sp"])
def test_a_dense_parameter_is_not_taken_for_a_shard(ranks, scheme):
    said = ranks(2).run(check_assigned, scheme)
    assert said[0] == said[1]
    assert all("weight" in each and "fix: " in each for each in said[0][:-1]), said[0]
    assert "(8, 16)" in said[0][-1]


# ---- meta ----


def check_meta():
    mesh = mesh_of(Grid(x=2))
    said = []
    layer = ndtp.nn.Linear(HIDDEN, INNER, mesh=mesh, scheme="1d", device="meta")
    block = ndtp.nn.MLP(HIDDEN, INNER, mesh=mesh, scheme="1d", device="meta")
    model = dense_nn.Sequential(dense_nn.Linear(6, 9), dense_nn.ReLU(), dense_nn.Linear(9, 6)).to("meta")
    ndtp.parallelize(model, mesh, scheme="1d")
    for module, width in ((layer, HIDDEN), (block, HIDDEN), (model, 6)):
        said.append(message(lambda m=module, w=width: m(torch.ones(ROWS, w))))
    plan = layer.plan
    a, b = torch.ones(ROWS, HIDDEN), torch.ones(INNER // 2, HIDDEN)
    for operands in ((a, b.to("meta"), None), (a.to("meta"), b, None), (a, b, torch.ones(INNER // 2, device="meta"))):
        said.append(message(lambda o=operands: ndtp.matmul(o[0], o[1], plan, mesh, o[2])))
    half = ndtp.nn.MLP(HIDDEN, INNER, mesh=mesh, scheme="1d")
    half.down.to("meta")
    said.append(message(lambda: half(torch.ones(ROWS, HIDDEN))))
    assert block(torch.ones(ROWS, HIDDEN, device="meta")).is_meta, "shapes alone"
    return said


def test_parameters_without_memory_are_refused(ranks):
    said = ranks(2).run(check_meta)
    assert said[0] == said[1]
    for each in (*said[0][:3], said[0][-1]):
        assert "weight" in each and "meta" in each and "to_empty" in each and "load_state_dict" in each, each
    assert "'mlp.down'" in said[0][-1]
    for each, words in zip(said[0][3:6], ("B is on meta", "A is on meta", "bias is on meta"), strict=True):
        assert words in each, each


# ---- widths ----


def check_widths():
    mesh = mesh_of(Grid(x=2))
    said = []
    for scheme in ("1d", "1d-sp", "2d-features"):
        mesh = mesh_of(Grid(x=2) if scheme != "2d-features" else Grid(x=2, y=1))
        model = dense_nn.Sequential(dense_nn.Linear(5, 7), dense_nn.ReLU(), dense_nn.Linear(7, 5))
        ndtp.parallelize(model, mesh, scheme=scheme)
        for width in (0, 1, 4, 6, 8):
            said.append(message(lambda w=width, m=model: m(torch.ones(4, w))))
            assert "5" in said[-1] and str(width) in said[-1] and "'0'" in said[-1], said[-1]
        layer = ndtp.nn.Linear(5, 7, mesh=mesh, scheme=scheme, pad=True)
        block = ndtp.nn.MLP(5, 7, mesh=mesh, scheme=scheme, pad=True)
        for module, name in ((layer, "'linear'"), (block, "'mlp.up'")):
            width = module.in_layout.shard_shape((4, 6))[1] if scheme == "2d-features" else 5
            for wrong in (width - 1, width + 1):
                assert name in message(lambda m=module, w=wrong: m(torch.ones(4, w)))
    layout = ndtp.Layout(mesh.grid, None, None)
    single = ndtp.parallelize(
        dense_nn.Sequential(dense_nn.Linear(5, 7)), mesh, {"0": (layout, layout.with_dims("x", None))}
    )
    said.append(message(lambda: single(torch.ones(3, 6))))
    return said


def test_wrong_widths_are_refused(ranks):
    said = ranks(2).run(check_widths)
    assert said[0] == said[1]
