"""States that torch distributes anew, put where the padded parameters of a grid lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

from torch import Tensor

from ndtp.collectives.torch_patches import replaced
from ndtp.runtime.grid_parts import lying_as, part_of


@cache
def watch_loaded_states() -> None:
    """Let `set_model_state_dict` and `set_optimizer_state_dict` of torch put whole states where padded ones lie.

    Torch cuts them by the sizes without padding: such parts lie otherwise than those of a padded parameter.
    """
    replaced("torch.distributed.checkpoint.state_dict._distribute_state_dict", _distributing)
    replaced("torch.distributed._state_dict_utils._distribute_tensors", _distributing_broadcast)


def _is_for_padded(own: Any, whole: object) -> bool:
    return getattr(own, "is_padded", False) and not own.is_meta and isinstance(whole, Tensor) and whole.dim() > 0


def _placed_as(own: Any, whole: Tensor) -> object:
    """Return a whole tensor as this rank's part of one that lies as another one of the grid; one of other sizes, which
    `load_state_dict` refuses, as it is.
    """
    if whole.shape != own.shape:
        return whole
    local = part_of(whole.detach().to(own.device), own._dtensor)
    return type(own)(lying_as(local, own._dtensor), False, own.ndtp_real)


def _distributing(given: Callable[..., None]) -> Callable[..., None]:
    """Wrap how torch cuts what every rank has read."""

    @wraps(given)
    def distribute(full: dict[str, Any], states: dict[str, object], *rest: object, **named: object) -> None:
        padded = [key for key, x in full.items() if _is_for_padded(states.get(key), x)]
        for key in padded:
            states[key] = _placed_as(states[key], full[key])
        given({key: x for key, x in full.items() if key not in padded}, states, *rest, **named)

    return distribute


def _distributing_broadcast(given: Callable[..., None]) -> Callable[..., None]:
    """Wrap how torch cuts what one rank has read and sent (`StateDictOptions(broadcast_from_rank0=True)`)."""

    @wraps(given)
    def distribute(states: dict[str, object], keys: Sequence[str], *rest: object, **named: object) -> None:
        for key in keys:
            pair = states.get(key)
            if isinstance(pair, (tuple, list)) and len(pair) == 2 and _is_for_padded(*pair):
                states[key] = _placed_as(*pair)
        given(states, keys, *rest, **named)

    return distribute
