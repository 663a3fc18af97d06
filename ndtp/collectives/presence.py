"""Presence: a thread of every process that watches its peers, and tells them what happens to this process.

Peers on this machine are watched through the kernel, which tells of their end at once; of others a heartbeat through
the store tells.  A rank that loses a peer says so in the store before it leaves, so that those that lose it can tell
the cause from its consequences; to those on this machine it says so directly, for the store may be what they lose.
The thread alone talks to the store here, by a connection of its own: a store whose process is stopped answers nobody,
and the failure must be told all the same.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ndtp.collectives.answers import Answers
from ndtp.collectives.flight import DONE, NOTE, Flight
from ndtp.collectives.link_verdict import refined
from ndtp.collectives.link_watch import LinkWatch
from ndtp.collectives.liveness import Identity, own_identity
from ndtp.collectives.local_words import LocalWords
from ndtp.collectives.notices import Notices
from ndtp.collectives.peers import Peers
from ndtp.collectives.places import Places
from ndtp.collectives.store_links import is_with_first_rank, links_to, shut
from ndtp.collectives.told_to_end import OWN_WORDS_S, end_at_once, heed, heed_no_more
from ndtp.collectives.verdict import (
    CUT,
    DEPARTED,
    ENDED,
    LOST,
    RAISED,
    RECOVERED,
    SILENT,
    TOLD,
    UNKNOWN,
    Event,
    Facts,
    Verdict,
    Waiting,
    judge,
    never_begun,
)  # fmt: skip

T = TypeVar("T")
TICK_S = 1.0  # between heartbeats, of up to 500 ranks; more beat less often
MEETING_TICK_S = 0.05  # until all have come
LOCAL_PATIENCE_S, REMOTE_PATIENCE_S = 1.0, 4.0  # to find out who is to blame; the second in heartbeats
SILENCE_S = 2.5  # heartbeats: without one for so long a rank is silent
BREAK_S = 3.0  # after a death has been seen, a wait for the store is broken off
FAREWELL_S = 1.0  # at the end of the program, for the store to take it
LINGER_S = 2.0  # of the rank that has the store, when it fails: for ranks elsewhere to read why


class Presence:
    """This process among the ranks of the world.

    Args:
        store: torch's; it is cloned.
        serial: as for `Notices`.

    Attributes:
        flight: the last collectives of this process.
    """

    def __init__(self, rank: int, size: int, store: Any, serial: int) -> None:
        self.rank, self.size, self.flight = rank, size, Flight(rank, size)
        self.flight.try_folder()
        self._notices: Notices | None = None
        self._answers = Answers(rank, self.flight)
        me = own_identity(rank)
        self._local_words, self._connect = LocalWords(me, serial), lambda: self._clone(store, serial, me)
        self._own_links: set[int] = set()
        self._is_unanswered = False
        self._find_links = lambda: set(links_to(store)) - self._own_links
        self._host_is_first = is_with_first_rank(store)
        self._events: list[Event] = []
        self._told_count = self._last_count = 0  # of collectives
        self._said, self._lost_at = "", 0.0  # the last of LOST, CUT, TOLD, RAISED or ENDED
        self._lost_in: Waiting | None = None
        self._guards: list[float] = []
        places = Places()
        self.link_watch = LinkWatch(rank, size, places)
        self.on_grid, self.place = places.add, places.name_of
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self.owner, self._closed = os.getpid(), False
        self._beat_s = TICK_S * max(1.0, size / 500)
        self._poll = select.poll()
        self._peers = Peers(self._poll)
        for readable in (self._wake_read, self._local_words.descriptor):
            if readable is not None:
                self._poll.register(readable, select.POLLIN)
        self._thread = threading.Thread(target=self._watch, name="ndtp presence", daemon=True)
        self._was_told = threading.Event()
        self._heeds = heed(self._wake_write, lambda: self._said not in ("", TOLD), self._was_told)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- asked by other threads

    def lost(self, what: str, ranks: Sequence[int], cut: bool = False) -> Verdict:
        """Tell the others that this rank has lost one of `ranks`, write down the flight, and find out who is to blame.

        Args:
            cut: since a connection broke, not since time was up.

        It takes a second at most where all ranks are on this machine and say what they wait in, and some heartbeats
        elsewhere.
        """
        found: list[Verdict] = []
        answered = threading.Event()

        def consult() -> None:
            try:
                self._say(CUT if cut else LOST, what, ranks)
                self._consult(ranks, found)
            finally:
                answered.set()

        self.flight.write(what)
        self.link_watch.ask()
        self._do(consult)
        answered.wait(REMOTE_PATIENCE_S * self._beat_s + 1.0)
        # What the kernel of this machine knows is known without the store.
        verdict = found[-1] if found else judge(self.rank, ranks, self._local_facts())
        no_store = self.rank and self._host_is_first and (not answered.is_set() or self._is_unanswered)
        if no_store and (verdict.how == UNKNOWN or not (verdict.is_sure or 0 in self._peers.known)):
            verdict = Verdict(SILENT, (0,), "which has the store, and does not answer")
        verdict = refined(verdict, self.rank, self.link_watch.bad(), self.link_watch.sentence)
        if self._is_spread and self._host_is_first and self.rank == 0:
            time.sleep(LINGER_S)
        return verdict

    def never_begun(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the collectives in which these ranks wait for this one, that it has not begun; within a second."""
        told = self.ask(lambda store: (store.waiting(ranks), store.left_to_device(ranks)), 1.0)
        return {} if told is None else never_begun(self.rank, self.flight.counts, *told)

    def ask(self, question: Callable[[Notices], T], seconds: float) -> T | None:
        """Have the thread ask the store; None where no answer comes in time."""
        found: list[T] = []
        answered = threading.Event()

        def ask() -> None:
            if (store := self._store) is not None:
                found.append(question(store))
            answered.set()

        self._do(ask)
        return found[0] if answered.wait(seconds) and found else None

    def has_lost(self) -> bool:
        """Whether somebody left, and those who are stuck in a wait for them have had time to notice."""
        left = [event.when for event in list(self._events) if event.kind in (RAISED, ENDED, DEPARTED)]
        return any(time.monotonic() - when > BREAK_S for when in (*left, *list(self._peers.departed.values())))

    def raised(self, error: BaseException) -> None:
        """Tell the others that this rank leaves with an error of its own, and write down the flight."""
        text = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        self.flight.write(text)
        self._tell(RAISED, text)

    def _tell(self, kind: str, text: str) -> None:
        if self._said or self._closed:
            return
        told = threading.Event()

        def tell() -> None:
            self._say(kind, text)
            told.set()

        self._do(tell)
        told.wait(FAREWELL_S)

    @contextlib.contextmanager
    def guarding(self, seconds: float) -> Iterator[None]:
        """A wait for the store inside ends in time, or is broken off: soon after a death, or when its time is up."""
        until = time.monotonic() + seconds + 1.0
        self._guards.append(until)
        try:
            yield
        finally:
            self._guards.remove(until)

    def close(self, text: str = "its program ended") -> None:
        """Say goodbye and end the thread."""
        if self._closed or os.getpid() != self.owner:
            return
        self._tell(ENDED, text)
        self._closed = True
        atexit.unregister(self.close)  # which would keep it: a program may join a thousand worlds
        if self._heeds:
            heed_no_more()
        self._do(None)
        if threading.current_thread() is self._thread:
            return  # it collected garbage
        self._thread.join(FAREWELL_S)
        if self._thread.is_alive():  # the store does not answer
            shut(self._own_links)
            self._thread.join(FAREWELL_S)

    def _do(self, task: Callable[[], None] | None) -> None:
        self._tasks.put(task)
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")

    # -------------------------------------------------------------------------------------------------- in the thread

    def _clone(self, store: Any, serial: int, me: Identity) -> None:
        """A connection of its own to the store: it waits for as long as the store's timeout if the server is gone."""
        others = set(links_to(store))
        with contextlib.suppress(NotImplementedError):  # a store that cannot be cloned
            notices = Notices(store.clone(), serial, me, self.size)
            self._own_links = set(links_to(store)) - others
            notices.introduce()
            self._notices = notices

    def _watch(self) -> None:
        try:
            self._try(self._connect)
            next_tick, self._next_look = time.monotonic(), time.monotonic() + self.link_watch.every_s
            while True:
                self._look(max(0.0, next_tick - time.monotonic()))
                while not self._tasks.empty():
                    task = self._tasks.get()
                    if task is None:
                        return
                    self._try(task)
                if time.monotonic() >= next_tick:
                    self._try(self._tick)
                    meeting = self._notices is not None and not self._notices.all_came
                    next_tick = time.monotonic() + (MEETING_TICK_S if meeting else self._beat_s)
        finally:
            self._local_words.close()
            self._peers.close()
            for descriptor in (self._wake_read, self._wake_write):
                os.close(descriptor)

    def _try(self, task: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the store may be gone or shut, or no descriptor be left
            task()

    @property
    def _store(self) -> Notices | None:
        """None, too, where its process is known to be gone, which torch would tell at length, or does not answer."""
        return None if self._host_is_first and not self._peers.runs(0) else self._notices

    def _look(self, seconds: float) -> None:
        """See who has ended, for so long or until there is something to do."""
        ready = [descriptor for descriptor, _ in self._poll.poll(seconds * 1e3)]
        heard = self._answers.heard(self._local_words.heard())  # first: who has ended may have said why
        self._events += heard
        self._answer(heard)
        for descriptor in ready:
            if descriptor == self._wake_read:
                if signal.SIGTERM in os.read(self._wake_read, 4096):
                    self._end_as_told()
            elif descriptor != self._local_words.descriptor:
                self._note_departure(self._peers.ended(descriptor))

    def _end_as_told(self) -> None:
        """End as the launcher asks because another rank has failed, and name that rank."""
        if self._said:  # it is saying so itself
            time.sleep(OWN_WORDS_S)
        else:
            found: list[Verdict] = []
            entry = self.flight.waiting()
            ranks = [] if entry is None else entry[NOTE].ranks
            what = "its own work" if entry is None else entry[NOTE].text
            self._say(TOLD, what, ranks)  # whose answers count, and who ends now is not to blame
            self._consult(ranks or range(self.size), found)
            # Only a rank that waits can blame one that is late.
            is_known = found[-1].is_sure if entry is None else found[-1].how != UNKNOWN
            if is_known:
                text = f"rank {self.rank}{self.place(self.rank)} was ended by its launcher in {what}"
                words = f"{text}\n  {found[-1].sentence(self.place)}"
                self.flight.write(text)
                os.write(2, f"ndtp.errors.CommunicationError: {words}\n".encode())
        self._was_told.set()
        end_at_once()

    def _note_departure(self, rank: int) -> None:
        self._peers.depart(rank)
        if self._is_spread:
            self._try(lambda: self._log(Event(rank, DEPARTED, "", self._peers.departed[rank])))
        self._try(self._hear)

    def _tick(self) -> None:
        if self._guards and (time.monotonic() > min(self._guards) or self.has_lost()):
            shut(self._find_links())
        if (store := self._store) is None:
            return
        self._meet()
        waiting = self._answers.waiting_now(self._beat_s)
        if waiting is not None or self._said not in (LOST, CUT):
            store.tell_waiting(waiting)
        self._tell_left_to_device(store)
        if self._said in (LOST, CUT) and (done := self.flight.last_done()) is not None and done[DONE] > self._lost_at:
            self._said = ""
            self._log(Event(self.rank, RECOVERED, "", time.monotonic()))
        if self._is_spread:
            store.beat()
            self._hear()
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + self.link_watch.every_s
            self.link_watch.look(store)

    def _tell_left_to_device(self, store: Notices) -> None:
        before, self._last_count = self._last_count, self.flight.count
        if self._told_count != before == self._last_count:  # nothing was begun since the last beat
            self._told_count = before
            if begun := self._answers.left_to_device():
                store.tell_left_to_device(begun)

    def _meet(self) -> None:
        """Get to know those that came to this machine."""
        for who in [] if (store := self._store) is None else store.newcomers():
            if self._peers.meet(who):
                self._note_departure(who.rank)

    @property
    def _is_spread(self) -> bool:
        """Return whether ranks are on several machines, or have not come yet."""
        return len(self._peers.known) + 1 < self.size

    @property
    def _patience(self) -> float:
        return REMOTE_PATIENCE_S * self._beat_s if self._is_spread else LOCAL_PATIENCE_S

    def _say(self, kind: str, text: str, ranks: Sequence[int] = ()) -> None:
        self._said, self._lost_at, waiting = kind, time.monotonic(), self._answers.waiting_now()
        self._lost_in = waiting if waiting is not None and waiting.text == text else None
        event = Event(self.rank, kind, text, self._lost_at, [rank for rank in ranks if rank != self.rank])
        self._events.append(event)
        self._local_words.tell(event, list(self._peers.known.values()))
        if (store := self._store) is None:
            return
        with contextlib.suppress(RuntimeError):
            if ranks:
                store.tell_waiting(self._lost_in or Waiting(text, tuple(event.ranks)))
            store.log(event)

    def _log(self, event: Event) -> None:
        self._local_words.tell(event, list(self._peers.known.values()))
        if (store := self._store) is not None:
            store.log(event)

    def _hear(self) -> None:
        now, ours, store = time.monotonic(), {self.rank, *self._peers.known}, self._store
        # The monotonic clock is one of each machine: elsewhere it says nothing here, however well clocks are set.
        news = [] if store is None else store.news()  # in the order of the log, one for all
        for i, event in enumerate(news):
            self._events.append(event if event.rank in ours else event._replace(when=now + i * 1e-6))
        self._answer([event for event in news if event.rank not in ours])

    def _answer(self, events: Sequence[Event]) -> None:
        """Tell those that have lost a peer what this rank waits in: here directly, elsewhere through the store."""
        for rank in {event.rank for event in events if event.kind in (LOST, CUT, TOLD)}:
            if rank in self._peers.known:
                self._local_words.tell(self._answers.own(), [self._peers.known[rank]])
            elif self._said not in (LOST, CUT) and (store := self._store) is not None:
                with contextlib.suppress(RuntimeError):
                    store.tell_waiting(self._answers.waiting_now())

    def _local_facts(self) -> Facts:
        answers, since = self._answers, self._lost_at
        facts = Facts(list(self._events), self._peers.states(), dict(self._peers.departed))
        facts.waiting, facts.free, facts.own = answers.waiting(since), answers.free(since), self._lost_in
        return facts

    def _consult(self, ranks: Sequence[int], found: list[Verdict]) -> None:
        """Look again and again, until it is clear who left, or time is up: sooner if all that count have answered."""
        begin, pause = time.monotonic(), 0.002
        while True:
            facts = self._facts(ranks)
            found.append(judge(self.rank, ranks, facts))
            patience = self._patience if facts.prove(found[-1]) else REMOTE_PATIENCE_S * self._beat_s
            if found[-1].is_sure or time.monotonic() - begin > patience:
                return
            self._look(pause)
            pause = min(2 * pause, 0.1)

    def _facts(self, ranks: Sequence[int]) -> Facts:
        facts, self._is_unanswered = self._local_facts(), True
        with contextlib.suppress(RuntimeError):
            self._meet()
            self._hear()
            facts.events = list(self._events)
            if (store := self._store) is not None:
                store.look_into(facts, ranks, self._peers.known, SILENCE_S * self._beat_s)
                self._is_unanswered = False
        return facts
