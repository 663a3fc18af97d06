"""Whole models whose parts of a batch run in turns: a module's state between calls is that of its own part."""

from __future__ import annotations

import gc

import torch
from architectures import build, inputs
from products import mesh_of
from torch import nn
from turns import by_turns

import ndtp
from ndtp import CommMeter, Grid
from ndtp.collectives.turns import Turns

CASES = [("LlamaForCausalLM", Grid(z=2, x=1, y=2), 2), ("MixtralForCausalLM", Grid(dp=2, x=2), 1)]  # and layers


def check(name, grid, layers):
    mesh = mesh_of(grid)
    model = build(name, num_hidden_layers=layers)
    ndtp.parallelize(model, mesh)
    if name.startswith("Llama"):
        model.gradient_checkpointing_enable()
    model.train()
    given = inputs(name, batch=4 * grid.size(("dp",)) if "dp" in grid else 4)
    me = mesh.coordinate.get("dp", 0)
    ids, labels = (given[key].chunk(grid.size(("dp",)) if "dp" in grid else 1)[me] for key in ("input_ids", "labels"))

    def step(ids, labels):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        return loss

    def gradients():
        found = {key: p.grad.full_tensor() for key, p in model.named_parameters()}
        model.zero_grad()
        return found

    halves = list(zip(ids.chunk(2), labels.chunk(2), strict=True))
    with CommMeter() as expected:
        with mesh.accumulate():
            losses = [step(*halves[0])]
        losses.append(step(*halves[1]))
    wanted = gradients()
    with CommMeter() as meter:
        found = mesh.interleave(step, ids.chunk(2), labels.chunk(2))
    torch.testing.assert_close(found, [loss.detach() for loss in losses])
    torch.testing.assert_close(gradients(), wanted, rtol=1e-11, atol=1e-13)
    assert str(meter.volume) == str(expected.volume)
    assert not any(loss.requires_grad for loss in found)


def every_case():
    for case in by_turns(CASES, 2):
        check(*case)


def check_backward_alone():
    """Forward is called outside of what is interleaved; every part is at work with the others."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))]
    model = ndtp.parallelize(nn.Sequential(*layers), mesh_of(Grid(x=2)), scheme="1d")
    losses = [model(torch.ones(4, 8).requires_grad_()).square().sum() for _ in range(2)]
    model.ndtp_report.mesh.interleave(lambda loss: loss.backward(), losses)
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is Turns], "what has run in turns is not held"


def test_backward_alone(ranks):
    ranks(2).run(check_backward_alone)


def test_stock_models(ranks):
    ranks(4).run(every_case)
