"""The `Presence` of this process's world, which its threads share."""

from __future__ import annotations

import atexit
import os
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist

from ndtp.collectives.backends import backend_of
from ndtp.collectives.flight import Flight
from ndtp.collectives.presence import Presence

_PRESENT: WeakKeyDictionary[object, Presence] = WeakKeyDictionary()  # by the world
_SERIAL = [0]  # of the last world that had one; ranks make worlds together


def presence() -> Presence | None:
    """Return the presence of this process's world, which all ranks make at the first call; None without a world."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1 or not backend_of().has_peers:
        return None
    found = _PRESENT.get(world)
    if found is None or found.owner != os.getpid():
        from torch.distributed.distributed_c10d import _get_default_store

        _SERIAL[0] += 1
        found = Presence(dist.get_rank(), dist.get_world_size(), _get_default_store(), _SERIAL[0])
        _PRESENT[world] = found
        # The presence lives on in its thread; it holds the store, not the world.
        finalize(world, found.close, "it left its group").atexit = False  # type: ignore[misc]
        atexit.register(found.close)
    return found


def flight_of_world() -> Flight | None:
    """The record of this process's last collectives."""
    here = presence()
    return None if here is None else here.flight
