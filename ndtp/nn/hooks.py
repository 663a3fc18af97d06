"""Checks that a call of a module runs its forward and nothing else, since a fused block does not call its parts."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

OF_A_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook runs with this module's forward or backward, global hooks of torch included."""
    own = [getattr(module, kind) for kind in OF_A_MODULE]
    return any(own + [getattr(torch_module, f"_global{kind}") for kind in OF_A_MODULE])


def runs_alone(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a call of `module` runs `kind.forward` and nothing else: no hook, no other forward, no
    subclass.
    """
    return type(module).forward is kind.forward and "forward" not in module.__dict__ and not has_hooks(module)
