"""What ranks of a machine tell each other when nobody has a store: heard after the end of who said it."""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ndtp.collectives.liveness import own_identity
from ndtp.collectives.local_words import LocalWords
from ndtp.collectives.verdict import LOST, RAISED, Event

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets without a file are Linux's")


def test_words_outlive_their_sender_and_go_to_one_world():
    me, peer = own_identity(0), replace(own_identity(1), begun=1)
    mine, its, of_another_world = LocalWords(me, 1), LocalWords(peer, 1), LocalWords(me, 2)
    said = [Event(1, LOST, "all_gather", 5.0, [0, 2]), Event(1, RAISED, "KeyError: 'x'", 6.0, [])]
    for event in said:
        its.tell(event, [me, replace(me, pid=2**22)])  # the second is gone
    its.close()
    assert its.descriptor is None and its.heard() == []
    assert mine.heard() == said and mine.heard() == [] and of_another_world.heard() == []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as foreign:
        for text in (b"no JSON", b"[1, 2]", b'["x", "lost", "", 1]'):
            foreign.sendto(text, mine._name(me))
    assert mine.heard() == []
    for _ in range(1000):  # nobody reads: it neither waits nor fails
        of_another_world.tell(said[0], [me])
    assert 0 < len(of_another_world.heard()) < 1000
    for words in (mine, of_another_world):
        words.close()
    sockets = Path("/proc/net/unix").read_text().splitlines()
    assert not any(f"/{os.getpid()}/" in line and "ndtp/" in line for line in sockets)
