"""What hangs on a user's parameters and layers when they are put on a grid, and ranks that made different models."""

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid, LayoutError, MismatchError
from ndtp.models.report import _grouped

pytest.importorskip("transformers")
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it
from architectures import build, inputs
from test_transformers_whole import check_gradients

LLAMA = "LlamaForCausalLM"
SPLIT, WHOLE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.extra"


def pairs():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.Tanh()).double()


def with_hooks(model, name, calls):
    parameter = model.get_parameter(name)
    parameter.my_attr = "mine"
    handles = [
        parameter.register_hook(lambda grad: grad * 2),
        parameter.register_hook(lambda grad: calls.append("removed")),
        parameter.register_post_accumulate_grad_hook(lambda p: calls.append(tuple(p.grad.shape))),
    ]
    owner = model.get_submodule(name.rpartition(".")[0])
    owner.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    owner.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    owner.note = "the layer's"
    return handles, owner


def check_carried():
    mesh = mesh_of(Grid(x=2))
    cases = [
        (lambda: build(LLAMA), SPLIT, lambda model: model(**inputs(LLAMA)).loss),
        (pairs, "0.weight", lambda model: model(torch.ones(4, 6, dtype=torch.float64)).sum()),
    ]
    for make, name, loss in cases:
        found = []
        for on_grid in (False, True):
            model, calls = make(), []
            handles, owner = with_hooks(model, name, calls)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            before = list(model.parameters())
            if on_grid:  # half way: with a state, and a gradient
                loss(model).backward()
                handles[1].remove()
                optimizer.step()
                loss(model).backward()
                ndtp.parallelize(model, mesh, scheme="1d")
            else:
                loss(model).backward()
                handles[1].remove()
                optimizer.step()
                loss(model).backward()
            assert all(x is y for x, y in zip(model.parameters(), before, strict=True))
            parameter = model.get_parameter(name)
            assert parameter.my_attr == "mine" and model.get_submodule(name.rpartition(".")[0]) is owner, name
            assert owner.note == "the layer's"
            del calls[:]
            loss(model).backward()
            optimizer.step()
            shape = tuple(parameter.shape)
            model.load_state_dict(model.state_dict())
            assert calls == [shape, "saved", "load"], (name, calls)
            found.append([p.full_tensor() if on_grid and hasattr(p, "full_tensor") else p for p in model.parameters()])
            if on_grid:
                text = str(model.ndtp_report)
                assert "the state that AdamW has of" in text and "2 hooks" in text, text
        for mine, theirs in zip(found[1], found[0], strict=True):
            mine = mine[tuple(slice(0, size) for size in theirs.shape)]
            torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-4, msg=name)


def test_what_hangs_on_parameters_and_layers_comes_along(ranks):
    ranks(2).run(check_carried)


def check_optimizer_that_cannot():
    mesh = mesh_of(Grid(x=2))
    model = build(LLAMA)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(**inputs(LLAMA)).loss.backward()
    optimizer.step()
    with pytest.raises(LayoutError, match=r"Adafactor was built before .* state 'row_var' of 'model.embed_tokens"):
        ndtp.parallelize(model, mesh, scheme="1d")
    assert type(model.get_parameter(SPLIT)) is nn.Parameter
    model(**inputs(LLAMA)).loss.backward()  # nothing has changed


def check_different_models():
    mesh = mesh_of(Grid(x=2))
    messages = []
    for name in (SPLIT, "model.norm.weight"):
        model = build(LLAMA)
        model.get_parameter(name).data[-1] += mesh.rank * 1e-12
        with pytest.raises(MismatchError, match=f"of '{name}' .* rank 1 other values\n  fix: the same seed") as caught:
            ndtp.parallelize(model, mesh, scheme="1d")
        assert type(model.get_parameter(name)) is nn.Parameter
        messages.append(str(caught.value))
    torch.manual_seed(mesh.rank)
    with pytest.raises(MismatchError, match=r"of '0\.weight'"):
        ndtp.parallelize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), mesh, scheme="1d")
    with pytest.raises(MismatchError, match=r"of '0\.weight' .* instead of"):
        ndtp.parallelize(nn.Sequential(nn.Linear(4, 4 + mesh.rank)), mesh, scheme="1d")
    bank = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        bank[0].weight.fill_(1)
        bank[0].bias.fill_(1)
    bank.register_buffer("at", torch.full((1,), mesh.rank), persistent=False)  # as torch.empty may have it
    with pytest.raises(MismatchError, match=r"of 'at' .*\n  fix: .*; model.get_buffer\('at'\).zero_\(\)"):
        ndtp.parallelize(bank, mesh, scheme="1d")
    check_optimizer_that_cannot()
    check_second_call(mesh)
    check_used_twice(mesh)
    return messages


def check_used_twice(mesh):
    """One layer in two places, and parts of it frozen."""
    models = [build(LLAMA, use_cache=False) for _ in range(2)]
    for model in models:
        model.model.layers[1] = model.model.layers[0]
        model.model.layers[0].self_attn.q_proj.requires_grad_(False)
    dense, model = models
    ndtp.parallelize(model, mesh, scheme="1d-sp")
    assert model.model.layers[1] is model.model.layers[0]
    assert list(model.state_dict()) == list(dense.state_dict())
    for each in models:
        each(**inputs(LLAMA)).loss.backward()
    check_gradients(model, dense, "used twice")


def check_second_call(mesh):
    """It keeps what the first one reported."""
    torch.manual_seed(0)
    two = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for name in "ab"})
    ndtp.parallelize(two, mesh, {"a.0": "up", "a.2": "down"}, scheme="1d")
    ndtp.parallelize(two, mesh, {"b.0": "up", "b.2": "down"}, scheme="1d")
    report = two.ndtp_report
    assert list(report.replaced) == ["a.0", "a.2", "b.0", "b.2"] and not report.kept and report.linears == (4, 4)
    model = ndtp.parallelize(build(LLAMA), mesh, scheme="1d")
    text = str(model.ndtp_report)
    assert ndtp.parallelize(model, mesh, scheme="1d") is model and str(model.ndtp_report) == text
    with pytest.raises(LayoutError, match="split already"):
        ndtp.parallelize(model, mesh_of(Grid(y=2)), scheme="1d")


def test_ranks_with_different_models_are_refused(ranks):
    messages = ranks(2).run(check_different_models)
    assert messages[0] == messages[1]


def test_like_layers_are_one_line():
    """Only where all that the line names are alike."""
    named = {f"layers.{i}.experts.{j}.up": "split" for i in range(2) for j in range(3)}
    assert _grouped(named) == ["layers.{0-1}.experts.{0-2}.up: split"]
    del named["layers.1.experts.2.up"]
    assert _grouped({**named, "head": "whole"}) == [
        "layers.0.experts.{0-2}.up: split", "layers.1.experts.{0-1}.up: split", "head: whole",
    ]  # fmt: skip
