"""Layers that compute a parameter from others: weight norms, spectral norms, pruning and parametrizations of torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ndtp.models.made_classes import made_class
from ndtp.nn.sharded import Sharded


class Hooked:
    """A layer whose hooks compute a parameter, as those of `torch.nn.utils.weight_norm` and of pruning do."""


def set_hooked_apart(model: nn.Module) -> None:
    """Give layers whose hooks compute a parameter a class of their own, as torch gives one to a parametrized layer.

    Nothing takes them for the layers that they were made of.  Their code runs on whole tensors, and the parameters that
    they have are split.
    """
    for module in model.modules():
        tensors = [key for key, x in vars(module).items() if isinstance(x, Tensor)]
        sources = any(p.startswith(f"{key}_") for p in module._parameters for key in tensors)
        if sources and module._forward_pre_hooks and not isinstance(module, (Hooked, Sharded)):
            theirs: Any = type(module)
            made = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__}
            module.__class__ = made_class(f"Hooked{theirs.__name__}", (Hooked, theirs), made)


def plain_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the weight that a layer has as a parameter; one that is computed is not: to read it is to compute it."""
    return module._parameters.get("weight")


def is_computed(module: nn.Module) -> bool:
    """Return whether a layer computes a parameter of its own from others."""
    return isinstance(module, Hooked) or parametrize.is_parametrized(module)
