"""Whether calling a module runs its forward and nothing else: a block that fuses its parts calls none of them."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

OF_A_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook runs with this module's forward or backward, those that torch runs with every module included."""
    own = [getattr(module, kind) for kind in OF_A_MODULE]
    return any(own + [getattr(torch_module, f"_global{kind}") for kind in OF_A_MODULE])


def runs_alone(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling `module` is `kind.forward` and no more: no hooks, no other forward, no other module."""
    return type(module).forward is kind.forward and "forward" not in module.__dict__ and not has_hooks(module)
