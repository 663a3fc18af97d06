"""Inputs with which a model may run, made up from what its first layers take and how its arguments are called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ndtp.models.roles import features, is_linear


def guesses(model: nn.Module) -> Iterator[tuple[tuple[object, ...], dict[str, object]]]:
    """Inputs with which a model may run, by what its first layer takes and how its arguments are called.

    Those that are no ids have the dtype of its parameters.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    cast = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
    return (tree_map(cast, given) for given in _guesses(model))


def _guesses(model: nn.Module) -> Iterator[tuple[tuple[object, ...], dict[str, object]]]:
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, dict) and dummy:
        yield (), dict(dummy)
    required = [p for p in inspect.signature(model.forward).parameters.values()
                if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]  # fmt: skip
    names = [p.name for p in required] or [next(iter(inspect.signature(model.forward).parameters), "x")]
    for first in _first_inputs(model):
        yield (first, *(_by_name(name, first) for name in names[1:])), {}


def _first_inputs(model: nn.Module) -> Iterator[Tensor]:
    sizes = [getattr(o, n, None) for o in (model, getattr(model, "config", None)) for n in ("image_size", "img_size")]
    sides = [s if isinstance(s, int) else s[0] for s in sizes if isinstance(s, (int, tuple, list))]
    leaves = [m for m in model.modules() if not list(m.children()) and list(m.parameters())]
    for module in leaves[:4]:
        if isinstance(module, nn.Embedding):
            yield torch.zeros(2, 8, dtype=torch.long)
            yield torch.zeros(2, dtype=torch.long)
        elif isinstance(module, nn.Conv2d):
            for side in (*sides, 32, 64, 224, 28, 16):
                yield torch.zeros(2, module.in_channels, side, side)
        elif isinstance(module, nn.Conv1d):
            yield torch.zeros(2, module.in_channels, 64)
        elif is_linear(module, casts=True):
            count = features(module)[0]
            yield torch.zeros(2, 8, count)
            yield torch.zeros(2, count)
    for side in sides:
        yield torch.zeros(2, 3, side, side)


def _by_name(name: str, first: Tensor) -> object:
    if "mask" in name:
        return None
    if name.startswith(("t", "sigma", "time")):
        return torch.zeros(first.shape[0])
    if name.startswith(("y", "label", "class", "target")):
        return torch.zeros(first.shape[0], dtype=torch.long)
    return first.clone()
