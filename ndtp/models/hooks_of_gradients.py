"""`hook_first` and `is_seen`: who has a gradient first, and whether anybody else has it before a backward ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ndtp.runtime.gradient_ends import end_of


def hook_first(parameter: nn.Parameter, hook: Any) -> None:
    """Register a hook before all others, which must see the dense model's gradient; frozen parameters get one, too."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_hook(hook)
    parameter.requires_grad_(is_trained)
    hooks: Any = parameter._backward_hooks
    others = [(key, value) for key, value in hooks.items() if key != handle.id]
    for key, value in others:  # torch goes by when they were put in
        del hooks[key]
        hooks[key] = value


def is_seen(parameter: nn.Parameter) -> bool:
    """Return whether anybody reads this gradient before backward ends: a hook, or a call of `torch.autograd.grad`."""
    if len(parameter._backward_hooks or ()) > 1 or parameter._post_accumulate_grad_hooks:  # type: ignore[arg-type]
        return True
    try:
        return not torch._C._will_engine_execute_node(end_of(parameter))  # type: ignore[attr-defined]
    except RuntimeError:  # torch's answer for a leaf that `torch.autograd.grad` was given
        return True
