"""Notices of ranks in the store: who they are, that they live, whom they wait for, why they leave."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ndtp.collectives.liveness import Identity
from ndtp.collectives.verdict import Event, Facts, Waiting


class Notices:
    """The notices of one world, as one of its ranks reads and writes them.

    For one thread: a store whose server is stopped answers nobody, and takes no timeout for most of what it is asked.

    Args:
        store: a clone that nobody else uses.
        serial: of the world, among those of this process: the store may outlive a world.

    Attributes:
        num_came: of the ranks that were here so far.
    """

    def __init__(self, store: dist.Store, serial: int, me: Identity, size: int) -> None:
        self._store, self._prefix, self._me, self.size = store, f"ndtp/presence/{serial}", me, size
        self.num_came = self._num_met = self._num_here = self._num_read = 0
        self._told_waiting = ""
        self._beats: dict[int, tuple[bytes, float]] = {}

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    def _get(self, *parts: object) -> bytes | None:
        """None where nothing was said: a wait for it would be one for ever."""
        key = self._key(*parts)
        return self._store.get(key) if self._store.check([key]) else None

    def introduce(self) -> None:
        number = self._store.add(self._key(self._me.machine, "count"), 1)
        self._store.set(self._key(self._me.machine, number), json.dumps(self._me.as_dict()))
        self._store.set(self._key("here", self._me.rank), "")
        self.num_came = self._store.add(self._key("came"), 1)

    @property
    def all_came(self) -> bool:
        return self.num_came >= self.size

    def newcomers(self) -> list[Identity]:
        """Return the ranks on this machine that were not known before."""
        if self._num_met and self.all_came and self._num_met == self._num_here:
            return []
        self.num_came = self._store.add(self._key("came"), 0)
        self._num_here = self._store.add(self._key(self._me.machine, "count"), 0)
        found = []
        while self._num_met < self._num_here:
            said = self._get(self._me.machine, self._num_met + 1)
            if said is None:
                break
            self._num_met += 1
            found.append(Identity(**json.loads(said)))
        return [who for who in found if who.rank != self._me.rank]

    def absent(self, ranks: Iterable[int]) -> list[int]:
        return [] if self.all_came else [rank for rank in ranks if not self._store.check([self._key("here", rank)])]

    # --------------------------------------------------------------------------------------------------------- the log

    def log(self, event: Event) -> None:
        number = self._store.add(self._key("log", "count"), 1)
        self._store.set(self._key("log", number), json.dumps(event))

    def news(self) -> list[Event]:
        """Return the events that were logged since the last call."""
        count, found = self._store.add(self._key("log", "count"), 0), []
        while self._num_read < count and (said := self._get("log", self._num_read + 1)) is not None:
            self._num_read += 1
            found.append(Event(*json.loads(said)))
        return found

    # ------------------------------------------------------------------------------------------------ who waits, beats

    def tell_waiting(self, waiting: Waiting | None) -> None:
        text = "" if waiting is None else json.dumps(waiting)
        if text != self._told_waiting:
            self._told_waiting = text
            self._store.set(self._key("waits", self._me.rank), text)

    def waiting(self, ranks: Sequence[int]) -> dict[int, Waiting]:
        """Return the waits of these ranks, of the ranks that they wait for, and so on."""
        known: dict[int, Waiting] = {}
        todo, seen = list(ranks), {self._me.rank}
        while todo:
            rank = todo.pop()
            if rank not in seen and (said := self._get("waits", rank)):
                known[rank] = _waiting(json.loads(said))
                todo += known[rank].ranks
            seen.add(rank)
        return known

    def tell_left_to_device(self, begun: Sequence[Waiting]) -> None:
        self._store.set(self._key("device", self._me.rank), json.dumps(begun))

    def left_to_device(self, ranks: Sequence[int]) -> dict[int, list[Waiting]]:
        """Return what these ranks have said that they have begun, and may wait in on their devices."""
        said = {rank: self._get("device", rank) for rank in ranks}
        return {rank: [_waiting(each) for each in json.loads(text)] for rank, text in said.items() if text}

    # ----------------------------------------------------------------------------------------------------- their links

    def tell_links(self, text: str) -> None:
        self._store.set(self._key("links", self._me.rank), text)

    def links_of(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return what these ranks have said of their links."""
        said = ((rank, self._get("links", rank)) for rank in ranks)
        return {rank: text for rank, text in said if text is not None}

    def is_first_to_tell(self, what: str) -> bool:
        """Return whether nobody has asked so before: of all ranks that find something, one tells of it."""
        return bool(self._store.add(self._key("told", what), 1) == 1)

    def look_into(self, facts: Facts, ranks: Sequence[int], local: Collection[int], patience_s: float) -> None:
        """Add what the store knows of these ranks, and of those that they wait for, to the facts.

        Args:
            local: ranks that are watched otherwise.
        """
        facts.waiting = {**facts.waiting, **self.waiting(ranks)}
        facts.free = set(facts.free) - set(facts.waiting)
        others = {*ranks, *(rank for each in facts.waiting.values() for rank in each.ranks)} - {self._me.rank}
        facts.absent = self.absent(others)
        facts.silent = self.silent(others - set(local), patience_s)

    def beat(self) -> None:
        self._store.set(self._key("beat", self._me.rank), str(time.monotonic()))

    def silent(self, ranks: Iterable[int], patience_s: float) -> list[int]:
        """Return those of these ranks whose heartbeat has been watched for so long and has not changed."""
        silent, now = [], time.monotonic()
        for rank in ranks:
            beat = self._get("beat", rank)
            before, since = self._beats.get(rank, (None, now))
            if beat is None or beat != before:
                self._beats[rank] = beat or b"", now
            elif now - since > patience_s:
                silent.append(rank)
        return silent


def _waiting(said: Sequence[Any]) -> Waiting:
    what, others, members, axes, nth = said
    return Waiting(what, tuple(others), tuple(members), tuple(axes), nth)
