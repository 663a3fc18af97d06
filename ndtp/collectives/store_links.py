"""The connections of this process to torch's store, which has waits without a timeout: they can be broken off."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable

import torch.distributed as dist


def links_to(store: dist.Store) -> list[int]:
    """Descriptors of the connections to the server of a `TCPStore`; none of other stores."""
    port = _port(store)
    if not port or not os.path.isdir("/proc/self/fd"):
        return []
    return [number for number in map(int, os.listdir("/proc/self/fd")) if _leads_to(number, port)]


def _leads_to(descriptor: int, port: int) -> bool:
    with contextlib.suppress(OSError), _duplicate(descriptor) as link:
        return bool(link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername()[1] == port)
    return False


def _duplicate(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def shut(descriptors: Iterable[int]) -> None:
    """Shut connections, so that whoever waits for an answer gets an error."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError), _duplicate(descriptor) as link:
            link.shutdown(socket.SHUT_RDWR)


def is_with_first_rank(store: dist.Store) -> bool:
    """Return whether rank 0 has the server of a `TCPStore`, as it does unless torchrun's agent has it."""
    return bool(_port(store)) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _port(store: dist.Store) -> int | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)
