"""Claims of ranks on what they have to themselves, told through torch's store, since they share no collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ndtp.collectives.backends import backend_of


def claimed_by(topic: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """Claim a topic for some ranks of the world, until it ends.

    One of them asks; ranks that are all of the world have nobody to fear, and nothing is asked.

    Returns:
        Ranks that have claimed it before and are none of these, whose it stays; nothing if it is these ranks' now.
    """
    if not dist.is_initialized() or len(ranks) == dist.get_world_size() or not backend_of().has_peers:
        return ()
    store = _get_default_store()
    key, own = f"ndtp/claims/{topic}", " ".join(map(str, ranks))
    before = store.compare_set(key, "", own).decode()
    theirs = tuple(map(int, before.split()))
    if not set(theirs) & set(ranks):
        return theirs
    if before != own:
        store.set(key, own)
    return ()
