"""Words among ranks of one machine that do without the store, whose process may be the one that is gone.

A message goes into a socket that the kernel keeps for the receiver: it is there when the sender is not any more, and
so is read before its end is seen.  The socket has no file and no port, and goes with its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterable

from ndtp.collectives.liveness import Identity
from ndtp.collectives.verdict import Event

_CREDENTIALS = struct.Struct("iII")  # process, user, group; filled in by the kernel
_LONGEST, _MOST_RANKS = 2**14, 1000  # of a message, and of those it waits for that it names


class LocalWords:
    """This rank's socket, and those of its peers; nothing is told or heard where the system has none.

    Args:
        serial: of the world, among those of this process; ranks make worlds together.
    """

    def __init__(self, me: Identity, serial: int) -> None:
        self._serial = serial
        self._socket: socket.socket | None = None
        with contextlib.suppress(AttributeError, OSError):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                made.bind(self._name(me))
                made.setblocking(False)
                self._socket = made
            except OSError:
                made.close()

    def _name(self, who: Identity) -> bytes:
        return f"\0ndtp/{who.machine}/{who.pid}/{who.begun}/{self._serial}".encode()

    @property
    def descriptor(self) -> int | None:
        """Readable when there is something to hear."""
        return None if self._socket is None else self._socket.fileno()

    def tell(self, event: Event, peers: Iterable[Identity]) -> None:
        """Peers that are gone, or have more to read already than a kernel keeps, do not hear it."""
        text = json.dumps(event._replace(text=event.text[: _LONGEST // 8], ranks=event.ranks[:_MOST_RANKS])).encode()
        for who in peers:
            with contextlib.suppress(OSError):
                if self._socket is not None:
                    self._socket.sendto(text, self._name(who))

    def heard(self) -> list[Event]:
        """Return the events that came since the last call, from processes of the same user."""
        found: list[Event] = []
        while self._socket is not None:
            try:
                text, extra, *_ = self._socket.recvmsg(_LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:  # nothing more
                break
            users = [_CREDENTIALS.unpack(value)[1] for *_, value in extra if len(value) == _CREDENTIALS.size]
            with contextlib.suppress(ValueError, TypeError):
                if users == [os.getuid()]:
                    rank, kind, said, when, ranks = json.loads(text)
                    found.append(Event(int(rank), str(kind), str(said), float(when), [int(each) for each in ranks]))
        return found

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
