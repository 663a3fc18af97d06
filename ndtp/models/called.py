"""The modules by which a model is called: itself or, where it has no `forward`, its outermost parts that have one."""

from __future__ import annotations

from torch import nn


def is_called(model: nn.Module) -> bool:
    """Return whether a model has a `forward`; an `nn.ModuleDict` of networks has none, and is never called."""
    return "forward" in vars(model) or type(model).forward is not nn.Module.forward


def called_parts(model: nn.Module) -> list[nn.Module]:
    """Return the model itself, or the outermost parts that have a `forward` of one that has none."""
    if is_called(model):
        return [model]
    found = (each for child in model.children() for each in called_parts(child))
    return [*dict.fromkeys(found)]
