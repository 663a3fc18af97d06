"""Hooks on modules, the same on both sides: they scale what passes, which a shard can do as well as a whole tensor."""

from __future__ import annotations

from typing import Any

from sides import Dense
from torch import Tensor, nn


def register_module_hooks(side: Dense) -> None:
    for model in side.models.values():
        for i, unit in enumerate(side.program.units):
            for hook in unit.hooks:
                place, _, kind = hook.partition(" ")
                module = _module(model.units[i], place)  # type: ignore[index]
                if module is not None:
                    _register(module, kind)


def _module(unit: nn.Module, place: str) -> nn.Module | None:
    if place == "unit":
        return unit
    names = {"up": ("up", "fc1", "layers.0", "head"), "down": ("down", "fc2", "layers.2", "head")}[place]
    return next((module for name, module in unit.named_modules() if name in names), None)


def _register(module: nn.Module, kind: str) -> None:
    if kind == "pre":
        module.register_forward_pre_hook(lambda module, args: (args[0] * 0.9, *args[1:]))
    elif kind == "forward":
        module.register_forward_hook(lambda module, args, y: y * 1.2)
    elif kind == "backward":
        module.register_full_backward_hook(lambda module, into, out: _scaled(into))
    else:
        module.register_full_backward_pre_hook(lambda module, out: _scaled(out))


def _scaled(gradients: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else g * 0.75 for g in gradients)
