"""Statistics that an optimizer was given whole, as `load_state_dict` of a dense run's state gives them.

They are split as their parameters are before the first step that uses them.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.runtime.arrival import is_plain, real_of, wrapped
from ndtp.runtime.grid_parts import part_of

_SEEN: WeakKeyDictionary[Optimizer, object] = WeakKeyDictionary()  # the states that were looked at, of each optimizer


@cache
def watch_states() -> None:
    """Look at what optimizers were given before they step, from the first parameter on a grid on."""
    register_optimizer_step_pre_hook(_before)  # type: ignore[no-untyped-call]


def _before(optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> None:
    # What is loaded is another mapping: one that was looked at has what the optimizer made of its parameters.
    if torch.compiler.is_compiling() or _SEEN.get(optimizer) is optimizer.state:
        return
    _SEEN[optimizer] = optimizer.state
    for parameter, state in optimizer.state.items():
        if hasattr(parameter, "_dtensor") and isinstance(state, dict):  # no DTensor of somebody else
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and is_plain(value) and value.shape == parameter.shape:
                    state[key] = _split(value, parameter)


@torch.no_grad()
def _split(value: Tensor, parameter: Any) -> Any:
    return wrapped(part_of(value.detach(), parameter._dtensor), parameter._spec, real_of(parameter))
