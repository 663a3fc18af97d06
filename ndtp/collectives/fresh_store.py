"""A store without what an earlier start of the same program left: torchrun keeps one for all of its restarts.

Under `torchrun --max-restarts` the agent's store outlives the ranks (pytorch issue 135712).  Ranks that are started
again would read where the ranks before them could be reached, and connect to ports that are gone.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

OF_AN_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_NAP_S = 0.01


def fresh(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a part of a store that no earlier start has written to; all ranks of the program come here together.

    Each says a word of its own.  The first rank repeats the words of all until all have found theirs in what it says,
    which none of an earlier start can have been; its own word names the part.

    Raises:
        RuntimeError: not all ranks came in time.
    """
    from torch.distributed import PrefixStore

    mine, until = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    store.set(f"ndtp/start/word/{rank}", mine)
    said = ""
    while True:
        words: list[str] = []
        if rank:
            if store.check(["ndtp/start/words"]):
                words = json.loads(store.get("ndtp/start/words"))
            if len(words) == size and words[rank] == mine:
                store.set(f"ndtp/start/{words[0]}/found/{mine}", "")
                break
        elif store.check(keys := [f"ndtp/start/word/{each}" for each in range(size)]):
            words = [store.get(key).decode() for key in keys]
            if said != (said := json.dumps(words)):
                store.set("ndtp/start/words", said)
            if all(store.check([f"ndtp/start/{mine}/found/{word}"]) for word in words[1:]):
                break
        if time.monotonic() > until:
            raise RuntimeError(f"not all of {size} ranks came to the store in {timeout.total_seconds():g} s")
        time.sleep(_NAP_S)
    return PrefixStore(f"ndtp/start/of/{words[0]}", store)


def meet_afresh() -> None:
    """Have `init_process_group` give ranks of torchrun a store without what ranks before a restart wrote there."""
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers  # its package has a function so named
    before = handlers["env"]
    if getattr(before, "is_of_ndtp", False):
        return

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **options: object) -> Iterator[object]:
        for store, rank, size in before(url, timeout=timeout, **options):
            is_shared = os.environ.get(OF_AN_AGENT) == "True"
            yield (fresh(store, rank, size, timeout) if is_shared else store), rank, size

    handler.is_of_ndtp = True  # type: ignore[attr-defined]
    handlers["env"] = handler
