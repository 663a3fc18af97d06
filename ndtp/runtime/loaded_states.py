"""States that torch has distributed anew, put where the padded parameters of a grid lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ndtp.collectives.torch_patches import replaced
from ndtp.runtime.grid_parts import lying_as, part_of
from ndtp.runtime.whole_operations import wrote

_SEEN: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()  # the states when they were last looked at


@cache
def watch_loaded_states() -> None:
    """Look at the states of each optimizer at its first step after they were loaded, and at what one rank broadcasts.

    `set_optimizer_state_dict` of torch makes DTensors of the sizes without padding, which lie otherwise than a padded
    parameter, and which torch cannot combine with it.
    """
    register_optimizer_step_pre_hook(_put_on_grid)  # type: ignore[no-untyped-call]
    replaced("torch.distributed._state_dict_utils._distribute_tensors", _distributing)


def _distributing(given: Callable[..., None]) -> Callable[..., None]:
    """Wrap how torch cuts the tensors that it has broadcast (`StateDictOptions(broadcast_from_rank0=True)`)."""

    @wraps(given)
    @torch.no_grad()
    def distribute(states: dict[str, Any], keys: Sequence[str], *rest: Any, **named: Any) -> None:
        for key in keys:
            pair = states.get(key)
            own = pair[0] if isinstance(pair, (tuple, list)) else None
            if getattr(own, "is_padded", False) and not own.is_meta:
                own._local_tensor.copy_(part_of(pair[1], own._dtensor))
                wrote(type(own), own)
                states[key] = own
        given(states, keys, *rest, **named)

    return distribute


def _put_on_grid(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or _SEEN.get(optimizer) is optimizer.state:
        return
    _SEEN[optimizer] = optimizer.state
    for parameter, states in optimizer.state.items():
        own: Any = parameter
        if not getattr(own, "is_padded", False) or not isinstance(states, dict):
            continue
        for name, state in states.items():
            if type(state) is DTensor and state.shape == own.shape:
                local = part_of(state.full_tensor(), own._dtensor)
                states[name] = type(own)(lying_as(local, own._dtensor), False, own.ndtp_real)
