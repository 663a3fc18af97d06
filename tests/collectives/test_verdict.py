"""Who is to blame, from what is known: a table of cases, without a process."""

from pathlib import Path

import pytest

from ndtp.collectives.last_words import is_cut
from ndtp.collectives.liveness import GONE, RUNNING, STOPPED, own_identity, state_of
from ndtp.collectives.verdict import (
    APART,
    BEHIND,
    CUT,
    DEPARTED,
    ENDED,
    LINK,
    LOST,
    RAISED,
    RECOVERED,
    SILENT,
    TOLD,
    UNKNOWN,
    Event,
    Facts,
    Waiting,
    judge,
    never_begun,
)


def waits(*ranks):
    return Waiting("all_gather", ranks)


def at(text, nth):
    """The n-th collective of all three ranks."""
    return Waiting(text, (0, 1, 2), (0, 1, 2), ("x",), nth)


CASES = {
    "one is dead": (Facts(states={3: GONE}, departed={3: 5.0}), GONE, (3,)),
    "the first of two": (Facts(departed={1: 6.0, 3: 5.0}), GONE, (3,)),
    "who lost it left, too, before it was seen": (
        Facts([Event(1, LOST, "", 5.1)], departed={1: 5.0, 3: 5.2}), GONE, (3,),
    ),
    "it said why": (Facts([Event(3, RAISED, "KeyError: 'x'", 4.0)], departed={3: 5.0}), RAISED, (3,)),
    "what others say of its end does not undo why": (
        Facts([Event(3, RAISED, "KeyError: 'x'", 4.0), Event(3, DEPARTED, "", 5.0)]), RAISED, (3,),
    ),
    "it left by itself": (Facts([Event(2, ENDED, "its program ended", 4.0)]), ENDED, (2,)),
    "elsewhere, as a witness saw": (Facts([Event(7, DEPARTED, "", 4.0)]), GONE, (7,)),
    "stopped, and others gone for it": (Facts(states={3: STOPPED}, departed={1: 5.0}), STOPPED, (3,)),
    "no heartbeat": (Facts(silent=[2]), SILENT, (2,)),
    "late": (Facts(states={1: RUNNING}, waiting={1: waits(0, 2)}), BEHIND, (2,)),
    "late, by way of one that waits": (Facts(waiting={1: waits(3), 2: waits(0, 1)}), BEHIND, (3,)),
    "one that waits for nobody of these is no matter": (Facts(waiting={1: waits(2), 2: waits(4)}), BEHIND, (4,)),
    "one that recovered and was killed later": (
        Facts([Event(3, LOST, "", 1.0), Event(3, RECOVERED, "", 2.0)], departed={3: 9.0}), GONE, (3,),
    ),
    "consequences alone": (
        Facts([Event(1, LOST, "", 1.0)], departed={1: 2.0}, waiting={2: waits(1)}), LINK, (),
    ),
    "groups cannot be made, and all ranks are alive": (
        Facts([Event(1, LOST, "making of the group (start-up) over axis x", 1.0, [0])], waiting={2: waits(0, 1)}),
        LINK, (),
    ),
    "a connection broke, and another rank has not noticed": (
        Facts([Event(1, CUT, "", 1.0)], departed={1: 2.0}, waiting={1: waits(2)}), LINK, (),
    ),
    "a connection broke, since one died": (Facts([Event(0, CUT, "", 2.1)], departed={2: 2.0}), GONE, (2,)),
    "a connection broke, since one had waited in vain": (
        Facts([Event(0, CUT, "", 2.1), Event(1, LOST, "", 1.0, [2])], departed={1: 2.0}), BEHIND, (2,),
    ),
    "a connection was closed by one whose time was up, a little before it said so": (
        Facts([Event(0, CUT, "", 2.1), Event(1, LOST, "", 2.2, [2])]), BEHIND, (2,),
    ),
    "one that was told to end, as this one is": (
        Facts([Event(0, TOLD, "", 1.0), Event(1, TOLD, "", 1.0)], departed={1: 2.0}, waiting={1: waits(2)}),
        BEHIND, (2,),
    ),
    "one that was told to end, since another died": (
        Facts([Event(0, TOLD, "", 1.0), Event(1, TOLD, "", 1.0)], departed={1: 1.1, 2: 2.0}), GONE, (2,),
    ),
    "one that alone was told to end": (Facts([Event(1, TOLD, "", 1.0)], departed={1: 2.0}), ENDED, (1,)),
    "one that was told to end, and one that left later without a word that came here": (
        Facts([Event(2, TOLD, "", 1.0)], departed={2: 2.0, 1: 2.1}), ENDED, (2,),
    ),
    "and both seen at once": (Facts([Event(2, TOLD, "", 1.0)], departed={2: 2.0, 1: 2.0}), ENDED, (2,)),
    "two that were told at once, in any order": (
        Facts([Event(1, TOLD, "", 1.0), Event(2, TOLD, "", 1.0)], departed={2: 2.0, 1: 2.0}), ENDED, (1,),
    ),
    "one that died, for which a launcher has told another one to end": (
        Facts([Event(1, TOLD, "", 2.2)], departed={2: 2.0, 1: 2.3}), GONE, (2,),
    ),
    "one that is in another collective at the same place": (
        Facts(waiting={1: at("norm", 3), 2: at("sum", 3)}, own=at("sum", 3)), APART, (1,),
    ),
    "two stages between which a message does not come": (
        Facts(waiting={1: at("receive 1/4 of h", 3)}, own=at("send 1/4 of h", 3)), BEHIND, (2,),
    ),
    "and all of them": (
        Facts(waiting={1: at("receive 1/4 of h", 3), 2: waits(0)}, own=at("send 1/4 of h", 3)), UNKNOWN, (),
    ),
    "one that is ahead": (Facts(waiting={1: at("norm", 4), 2: at("sum", 3)}, own=at("sum", 3)), UNKNOWN, ()),
    "all wait for each other": (Facts(waiting={1: waits(0, 2), 2: waits(0, 1)}), UNKNOWN, ()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_right_one_is_named(case):
    facts, how, ranks = CASES[case]
    verdict = judge(0, (1, 2), facts)
    assert (verdict.how, verdict.ranks) == (how, ranks), verdict
    assert all(f"rank {rank}" in verdict.sentence() for rank in ranks)
    assert how != STOPPED or verdict.sentence().startswith("stopped: rank"), "the word of `error.how`"


def test_where_all_are_alive_it_is_said_what_they_are_in():
    """They wait for each other over different axes, say, so that no two are at one place."""
    waiting = {rank: waits(*({0, 1, 2, 3, 4, 5, 6} - {rank})) for rank in range(1, 7)}
    said = judge(0, (1,), Facts(waiting=waiting)).sentence()
    assert "every rank is alive: they wait for each other, or cannot reach each other; rank 1 is in all_gather" in said
    assert said.endswith("rank 4 is in all_gather; and 2 more")


def test_who_has_not_answered_is_not_known_to_be_behind():
    """A rank that waits tells of it when asked; until then nothing is known of it."""
    verdict = judge(0, (1, 2), facts := Facts(waiting={1: waits(0, 2)}))
    assert verdict.ranks == (2,) and not facts.prove(verdict)
    facts.free = [2]
    assert facts.prove(verdict)
    assert Facts().prove(judge(0, (1, 2), Facts(departed={1: 5.0})))


@pytest.mark.parametrize(
    ("text", "cut"),
    [("Gloo connectFullMesh failed with [..] Software caused connection abort", True),
     ("[..] Connection closed by peer [127.0.0.1]:29101", True), ("rank 1 have ended: Broken pipe", True),
     ("[..] Timed out waiting 3000ms for recv operation to complete", False),
     ("wait timeout after 60000ms, keys: /default_pg/0", False), ("ranks [1] have not come in 20 s", False),
     ("ranks are not connected: timed out after 20 s", False)],
)  # fmt: skip
def test_what_failed_before_time_was_up_is_a_connection(text, cut):
    assert is_cut(text) == cut


def test_this_process_runs(monkeypatch):
    """Linux marks a process that is about to end before it closes its connections: who sees these close knows."""
    assert state_of(me := own_identity(0)) == RUNNING
    before, _, after = Path("/proc/self/stat").read_text().rpartition(")")
    fields = after.split()
    fields[6] = str(int(fields[6]) | 0x4)
    monkeypatch.setattr(Path, "read_text", lambda path: f"{before}) {' '.join(fields)}")
    assert state_of(me) == GONE


def test_who_waits_in_vain():
    """A slow rank waits in what all have begun; one that is elsewhere waits in what the others have not."""
    begun = {((0, 1), ("x",)): 4, ((0, 2), ("y",)): 7}
    for nth, found in ((4, {}), (5, {1: "all_gather of up"})):
        assert never_begun(0, begun, {1: Waiting("all_gather of up", (0,), (0, 1), ("x",), nth)}) == found
    assert never_begun(0, begun, {2: Waiting("all_reduce", (3,), (2, 3), ("x",), 9)}) == {}
    assert never_begun(0, begun, {3: Waiting("all_reduce", (0,))}) == {}
    on_device = [Waiting(f"all_gather {nth}", (0,), (0, 1), ("x",), nth) for nth in (3, 4, 5, 6)]
    assert never_begun(0, begun, {}, {1: on_device}) == {1: "all_gather 5"}
    assert never_begun(0, begun, {}, {1: on_device[:2]}) == {}
    assert never_begun(0, begun, {1: Waiting("a sum", (0,), (0, 1), ("x",), 9)}, {1: on_device}) == {1: "a sum"}
