"""Does a subclass of `nn.Linear` with code of its own compute what an `nn.Linear` does?  It is tried on a few numbers.

Many libraries have such a class: one that begins with other numbers, or casts its weight to the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

_MOST_FEATURES = 64  # of a trial
_LEADS = ((5,), (2, 3))
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
_SCALES = (1e-3, 1.0, 1e3)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_FOUND: WeakKeyDictionary[type, dict[Any, bool]] = WeakKeyDictionary()


def computes_linear(module: nn.Linear) -> bool:
    """Return whether the code of a layer gives x W^T + b for all inputs of the weight's dtype, and the gradients of it.

    It may do something else with inputs of another dtype, which an `nn.Linear` refuses.
    """
    kind, own = type(module), vars(module)
    weight = own["_parameters"].get("weight")
    if weight is None or not own["_parameters"].keys() <= {"weight", "bias"} or own["_buffers"] or own["_modules"]:
        return False
    if tuple(weight.shape) != (module.out_features, module.in_features) or kind.__call__ is not nn.Module.__call__:
        return False
    if kind.forward is nn.Linear.forward:
        return True
    others = {key: value for key, value in own.items() if not key.startswith("_") and key != "training"}
    if not all(isinstance(value, _PLAIN) for value in others.values()):
        return False  # a trial could change what others hold
    key = (own["_parameters"].get("bias") is None, *others.items())
    found = _FOUND.setdefault(kind, {})
    if key not in found:
        found[key] = _is_linear_in_a_trial(module)
    return found[key]


def _is_linear_in_a_trial(module: nn.Linear) -> bool:
    """Run a layer of the same class and attributes, with numbers and few features of its own."""
    try:
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=()),
            torch.device("cpu"),
        ):
            return all(_is_same(*trial) for trial in _trials(module))
    except Exception:  # code that wants something else than a few rows on the CPU
        return False


def _trials(module: nn.Linear) -> Iterator[tuple[Any, Tensor, list[Tensor]]]:
    """Yield a layer, an input and the layer's parameters."""
    generator = torch.Generator().manual_seed(0)
    inside, outside = (min(n, _MOST_FEATURES) for n in (module.in_features, module.out_features))
    for dtype, scale, lead, training in product(_ROUNDING, _SCALES, _LEADS, (True, False)):
        shapes = [(outside, inside)] + [(outside,)] * (module.bias is not None)
        x, *parameters = (
            torch.randn(shape, generator=generator, dtype=torch.float64).mul(by).to(dtype).requires_grad_()
            for shape, by in zip([(*lead, inside), *shapes], (scale, 1.0, 1.0), strict=False)
        )
        layer = type(module).__new__(type(module))
        vars(layer).update(vars(nn.Module()) | {k: v for k, v in vars(module).items() if not k.startswith("_")})
        layer.in_features, layer.out_features, layer.training = inside, outside, training
        own: Any = dict(zip(("weight", "bias"), [*map(nn.Parameter, parameters), None], strict=False))
        vars(layer)["_parameters"] = own
        yield layer, x, [p for p in own.values() if p is not None]


def _is_same(layer: Any, x: Tensor, parameters: list[Tensor]) -> bool:
    """Return whether a layer gives what an `nn.Linear` with its parameters does, and leaves nothing behind."""
    before = dict(vars(layer))
    y, expected = layer.forward(x), F.linear(x, *parameters)
    if vars(layer).keys() != before.keys() or any(vars(layer)[key] is not value for key, value in before.items()):
        return False
    if type(y) is not Tensor or (y.shape, y.dtype) != (expected.shape, expected.dtype) or not y.requires_grad:
        return False
    slope = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    operands = [x, *parameters]
    mine, theirs = (torch.autograd.grad(each, operands, slope, allow_unused=True) for each in (y, expected))
    return all(a is not None and _is_near(a, b) for a, b in zip((y, *mine), (expected, *theirs), strict=True))


def _is_near(x: Tensor, expected: Tensor) -> bool:
    return bool((x - expected).abs().max() <= _ROUNDING[x.dtype] * expected.abs().max())
