"""The kernel's knowledge of this rank's connections: packets sent again, round trips, peers that do not answer.

TCP counts all of it for itself; reading it costs some microseconds a connection, and sends nothing.  Connections inside
of a machine cross no network, and are passed over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

# The start of Linux's `struct tcp_info`: eight bytes, and numbers of 32 and 64 bits; older kernels tell less of it.
_INFO = struct.Struct("8B24I4Q6I4Q2I2Q2I")
_RETRANSMITS, _PROBES, _UNACKED, _LAST_ACK, _RTT, _AGAIN, _LEAST_RTT, _SENT, _TWICE = 2, 3, 12, 20, 23, 31, 39, 41, 50


class PeerLink(NamedTuple):
    """The connections of this rank to one other machine, together.

    Attributes:
        sent: segments with data, since the connections were made; `again`: those that were lost and sent once more.
        rtt_ms: the mean round trip of late, of the connection that has the longest.
        least_rtt_ms: the shortest round trip of the last minutes.
        unanswered_s: for so long nothing has been acknowledged, of what was sent or asked.
    """

    sent: int
    again: int
    rtt_ms: float
    least_rtt_ms: float
    unanswered_s: float = 0.0


def own_links() -> tuple[set[str], dict[str, PeerLink]]:
    """Return this rank's addresses towards other machines, and its links by the address at the other end.

    Nothing where the system does not tell (Linux does).
    """
    addresses, found = set(), dict[str, PeerLink]()
    for own, other, connection in _connections():
        try:
            link = _link(connection)
        except OSError:  # it was closed meanwhile
            continue
        addresses.add(own)
        before = found.get(other)
        if before is not None:
            link = PeerLink(
                before.sent + link.sent,
                before.again + link.again,
                max(before.rtt_ms, link.rtt_ms),
                min(before.least_rtt_ms, link.least_rtt_ms),
                max(before.unanswered_s, link.unanswered_s),
            )
        found[other] = link
    return addresses, found


def ask_peers() -> None:
    """Have the kernel ask on idle connections, too, whether the other end is there, every second from now on.

    An idle connection to a machine that is gone looks like any other.  For a rank that has lost a peer already.
    """
    for *_, connection in _connections():
        with contextlib.suppress(OSError):
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 127)  # the most: it is not to end any
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _connections() -> Iterator[tuple[str, str, socket.socket]]:
    """Both ends' addresses of the connections that lead over a network."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return
    try:
        numbers = list(map(int, os.listdir("/proc/self/fd")))
    except OSError:  # no descriptor is left to look with
        return
    for number in numbers:
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=number)
        except OSError:  # it was closed meanwhile, or is no socket
            continue
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                continue
            own, other = connection.getsockname()[0], connection.getpeername()[0]
            if own != other:
                yield _plain(own), _plain(other), connection
        except OSError:  # one that listens
            continue
        finally:
            connection.detach()


def _plain(address: str) -> str:
    """The address of IPv4 that is written as one of IPv6."""
    return address.removeprefix("::ffff:")


def _link(connection: socket.socket) -> PeerLink:
    said = _INFO.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512).ljust(_INFO.size, b"\0"))
    waits = (said[_UNACKED] and said[_RETRANSMITS]) or said[_PROBES] > 1
    return PeerLink(
        sent=said[_SENT],
        # What came twice was late and not lost, as behind a machine that is busy; the other end says so (DSACK).
        again=max(0, said[_AGAIN] - said[_TWICE]),
        rtt_ms=said[_RTT] / 1e3,
        least_rtt_ms=said[_LEAST_RTT] / 1e3 if said[_LEAST_RTT] < 2**31 else said[_RTT] / 1e3,
        unanswered_s=said[_LAST_ACK] / 1e3 if waits else 0.0,
    )
