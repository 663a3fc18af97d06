"""The steps of a program, the same code for either side; what they record is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import updates
from program import Step
from sides import REFUSAL, Dense
from torch import Tensor, nn
from training import backward, forward, is_all_sharded, train


def perform(side: Dense, step: Step, index: int) -> None:
    STEPS[step.kind](side, step, f"{index} {step.kind}")


def evaluate(side: Dense, step: Step, label: str) -> None:
    with torch.inference_mode() if "inference" in step.how else torch.no_grad():
        for i in range(2):
            x = side.cut(side.values(side.shape(), step.seed + i), side.start)
            side.record(f"{label} output {i}", side.models[step.model](x), side.end)


def drop(side: Dense, step: Step, label: str) -> None:
    """A forward without a backward, whose graph goes when the rank's garbage goes."""
    graphs = forward(side, side.models[step.model], {"input grad"}, step.seed, label)
    side.keep(*graphs)


def between(side: Dense, step: Step, label: str) -> None:
    """A weight is changed in place between forward and backward: it raises, or differentiates the forward.

    A layer that saved a copy of the weight, such as a gated pair as one product, has them where torch has an error.
    """
    model = side.models[step.model]
    model.zero_grad()
    graphs = forward(side, model, set(step.how), step.seed, label)
    weights = [p for name, p in model.named_parameters() if p.dim() > 1]
    if not weights or any(unit.checkpoint or unit.computed or unit.compiled for unit in side.program.units):
        return  # a checkpoint computes with the new weight, in both; compiled code does not see the change of a DTensor
    weight = weights[step.seed % len(weights)]
    with torch.no_grad():
        if "foreach" in step.how and is_all_sharded(side):
            torch._foreach_mul_([weight], 0.5)
        else:
            weight.mul_(0.5)
    try:
        backward(side, model, set(), graphs, label)
        side.record(f"{label} ends in", "gradients")
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        side.record(f"{label} ends in", "an error or gradients" if type(side) is Dense else "an error")
        _differentiate_unchanged(side, model, step, weight)
    for name, parameter in model.named_parameters():
        side.record_gradient(f"{label} gradient of {name}", name, parameter.grad)
    side.discard()
    model.zero_grad()


def _differentiate_unchanged(side: Dense, model: nn.Module, step: Step, weight: Tensor) -> None:
    """The gradients of the forward before `between` halved the weight."""
    side.discard()
    model.zero_grad()
    with torch.no_grad():
        weight.mul_(2.0)
    recorded = len(side.records)
    graphs = forward(side, model, set(step.how), step.seed, "")
    del side.records[recorded:]
    backward(side, model, set(), graphs, "")
    with torch.no_grad():
        weight.mul_(0.5)


def create_graph(side: Dense, step: Step, label: str) -> None:
    """A gradient of a gradient: as dense has it, or refused at the first backward; a stack of ndtp's layers refuses."""
    model, is_model = side.models[step.model], side.program.family == "model"
    model.zero_grad()
    if type(side) is Dense and not is_model:
        return
    units = [side.program.units[use] for use in side.program.uses]
    if not any(unit.kind in ("mlp", "gated", "pair", "linear", "matmul", "sequential", "residual") for unit in units):
        return
    if any(unit.checkpoint or unit.compiled for unit in units):
        return  # torch itself refuses some, and what is compiled when it is differentiated again
    x = side.cut(side.values(side.shape(), step.seed), side.start).requires_grad_()
    loss = side.loss(model(x).pow(2).sum())
    try:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        if is_model:
            side.record(f"{label} second gradient", torch.autograd.grad(first.pow(2).sum(), x)[0], side.start)
        else:
            side.record(f"{label} was not refused", "")
    except RuntimeError as error:
        if "create_graph" not in str(error):
            raise
        if is_model:
            side.record(f"{label} second gradient", REFUSAL)
    side.discard()


def refused(side: Dense, step: Step, label: str) -> None:
    """An input of the wrong width, on every rank: an error, and nothing is left behind."""
    x = side.cut(side.values(side.shape(), step.seed), side.start)
    if side.program.units[side.program.uses[0]].kind not in ("mlp", "gated", "pair", "linear", "head", "sequential"):
        return
    try:
        side.models[step.model](torch.cat([x, x], -1))
    except (RuntimeError, ValueError):
        side.record(f"{label} ends in", "an error")
    else:
        side.record(f"{label} ends in", "an output")


def interrupted(side: Dense, step: Step, label: str) -> None:
    """An exception leaves `accumulate`, from within a backward or not: what follows is exact."""
    model, how = side.models[step.model], set(step.how)
    model.zero_grad()
    with contextlib.suppress(KeyError), side.accumulate():
        graphs = forward(side, model, {"input grad"}, step.seed, label)
        if "in backward" in how:
            graphs[0][0].register_hook(_raises)
        backward(side, model, set(), graphs, label)
        raise KeyError
    if "in backward" not in how and "reduce" in how:  # nothing was broken off: what is held is a gradient
        side.reduce()
        for name, parameter in model.named_parameters():
            side.record_gradient(f"{label} gradient of {name}", name, parameter.grad)
    side.discard()
    model.zero_grad()


def _raises(gradient: Tensor) -> None:
    raise KeyError


STEPS: dict[str, Callable[[Dense, Step, str], None]] = {
    "train": train,
    "optimizer": updates.optimizer,
    "ema": updates.ema,
    "copy": updates.copy,
    "mul": updates.mul,
    "load": updates.load,
    "swap": updates.swap,
    "tie": updates.tie,
    "deepcopy": updates.deepcopy,
    "to": updates.to,
    "freeze": updates.freeze,
    "eval": evaluate,
    "drop": drop,
    "between": between,
    "create graph": create_graph,
    "refused": refused,
    "interrupted": interrupted,
}
