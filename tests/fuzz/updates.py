"""What changes parameters in place, swaps, loads, copies or freezes them; the same code for either side."""

from __future__ import annotations

from typing import Any

import torch
from program import Step
from sides import Dense, copied
from torch import nn
from training import RATE, is_all_sharded, record_values, train


def optimizer(side: Dense, step: Step, label: str) -> None:
    """A step of an optimizer, by the gradients of a small training step."""
    model, how = side.models[step.model], set(step.how)
    model.zero_grad()
    train(side, Step("train", step.seed, step.model), label)
    parameters = [p for p in model.parameters() if p.grad is not None]
    if not parameters:
        return
    multi = is_all_sharded(side)
    if "clip" in how and multi:
        import ndtp

        norm = ndtp.nn.clip_grad_norm_(parameters, 0.5)
        side.record(f"{label} norm", norm)
    options: dict[str, Any] = {}
    if multi and "fused" in how and "adamw" in how:  # DTensor has no fused SGD
        options["fused"] = True
    elif multi and "foreach" in how:
        options["foreach"] = True
    if "adamw" in how:
        optimizer: Any = torch.optim.AdamW(parameters, lr=RATE, eps=0.1, **options)
    else:
        optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9, **options)
    optimizer.step()
    model.zero_grad()
    record_values(side, label)


def _both(side: Dense, step: Step) -> tuple[nn.Module, nn.Module]:
    names = ("online", "target") if "backwards" in step.how else ("target", "online")
    return side.models[names[0]], side.models[names[1]]


@torch.no_grad()
def ema(side: Dense, step: Step, label: str) -> None:
    theirs, ours = _both(side, step)
    pairs = list(zip(theirs.parameters(), ours.parameters(), strict=True))
    if pairs and "foreach" in step.how and is_all_sharded(side):
        torch._foreach_lerp_([old for old, _ in pairs], [new for _, new in pairs], 0.5)
        return
    for old, new in pairs:
        old.lerp_(new, 0.5)


@torch.no_grad()
def copy(side: Dense, step: Step, label: str) -> None:
    model = side.models[step.model]
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if (step.seed >> (i % 12)) % 2:
            whole = side.values(side.real_shape(step.model, name), step.seed + i) * 0.3
            parameter.copy_(side.as_parameter(name, parameter, whole))


@torch.no_grad()
def mul(side: Dense, step: Step, label: str) -> None:
    for i, parameter in enumerate(side.models[step.model].parameters()):
        if (step.seed >> (i % 12)) % 2:
            parameter.mul_(-0.8)


def load(side: Dense, step: Step, label: str) -> None:
    """Another model's state; with "assign" the two share their tensors from then on.  Or whole dense tensors."""
    theirs, ours = _both(side, step)
    if "dense" in step.how and not any(unit.kind in ("matmul", "batch") for unit in side.program.units):
        state = {}
        for i, (name, _) in enumerate(theirs.named_parameters(remove_duplicate=False)):
            state[name] = side.values(side.real_shape(step.model, name), step.seed + i) * 0.3
        theirs.load_state_dict(state, assign="assign" in step.how)
        return
    theirs.load_state_dict(ours.state_dict(), assign="assign" in step.how)


def swap(side: Dense, step: Step, label: str) -> None:
    """Parameters change places between the two models."""
    online, target = side.models.values()
    for i, name in enumerate([name for name, _ in online.named_parameters()]):
        if (step.seed >> (i % 12)) % 2:
            _exchange(online, name, target, name)


def tie(side: Dense, step: Step, label: str) -> None:
    """A parameter of one unit is that of another unit of the same kind, too."""
    model = side.models[step.model]
    units = side.program.units
    alike = [(i, j) for i in range(len(units)) for j in range(i) if units[i] == units[j]]
    if side.program.family != "stack" or not alike:
        return
    i, j = alike[step.seed % len(alike)]
    names = [name for name, _ in model.units[j].named_parameters()]  # type: ignore[index]
    if names:
        name = names[step.seed % len(names)]
        parent, _, leaf = f"units.{i}.{name}".rpartition(".")
        setattr(model.get_submodule(parent), leaf, model.get_parameter(f"units.{j}.{name}"))


def _exchange(one: nn.Module, first: str, other: nn.Module, second: str) -> None:
    values = one.get_parameter(first), other.get_parameter(second)
    for model, name, value in ((one, first, values[1]), (other, second, values[0])):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, value)


def deepcopy(side: Dense, step: Step, label: str) -> None:
    old, new = ("target", "online") if "backwards" in step.how else ("online", "target")
    side.models[new] = copied(side.models[old])
    side.models[new].zero_grad()  # of a DTensor torch copies the gradient, of a plain parameter it does not


def to(side: Dense, step: Step, label: str) -> None:
    side.forget()  # torch does not move a frozen DTensor that is in a graph
    side.move(torch.float32 if "float32" in step.how else torch.float64)


def freeze(side: Dense, step: Step, label: str) -> None:
    for i, parameter in enumerate(side.models[step.model].parameters()):
        if (step.seed >> (i % 12)) % 4 == 0:
            parameter.requires_grad_(not parameter.requires_grad)
