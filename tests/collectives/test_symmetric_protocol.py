"""The order of symmetric memory's copies and signals: no deadlock, no early read, in any interleaving; pure."""

import random

import pytest
from model_checker import Fault, Step, check, every_order

from ndtp.collectives.symmetric.protocol import SLOTS, Act, Do, arrivals, departures, pulling, staging

KINDS = (False, True)  # of exchanges: all-gathers, and such with a part for each peer
LONG = [(a, b, c, not b, a) for a in KINDS for b in KINDS for c in KINDS]  # every slot is used twice, or more often


def steps_of(rank, act, number, parted, slots):
    """What an act touches and signals.  Every part that arrives is signalled to the product that waits for it."""
    peer, slot = act.peer, number % slots
    owner = rank if act.do in (Do.STAGE, Do.PUT_READY) else peer
    of = (peer if owner == rank else rank) if parted else "all"
    window, part = ("window", owner, slot, of), (owner, of, number)
    arrived = [
        Step("write", ("landing", rank, number, peer), peer),
        Step("put", ("arrived", rank, number, peer)),
    ]
    computed = [Step("take", ("computed", rank, number, peer)), Step("read", ("partial", rank, number, peer), peer)]
    return {
        Do.WAIT_FREE: [Step("take", ("free", peer, rank, slot))],
        Do.STAGE: [*(computed if parted else []), Step("write", window, part)],
        Do.PUT_READY: [Step("put", ("ready", rank, peer, slot))],
        Do.KEEP: [*(computed if parted else []), *arrived],
        Do.WAIT_READY: [Step("take", ("ready", peer, rank, slot))],
        Do.PULL: [Step("read", window, part), *arrived],
        Do.PUT_FREE: [Step("put", ("free", rank, peer, slot))],
    }[act.do]


def product_of(rank, ranks, number, parted):
    """A product of gathered rows reads them as they arrive; one whose rows are scattered gives them as they leave."""
    if parted:
        for peer in departures(rank, ranks):
            yield Step("write", ("partial", rank, number, peer), peer)
            yield Step("put", ("computed", rank, number, peer))
    for peer in arrivals(rank, ranks):
        yield Step("take", ("arrived", rank, number, peer))
        yield Step("read", ("landing", rank, number, peer), peer)


def threads_of(ranks, kinds, slots=SLOTS, apart=False, change=lambda rank, acts: acts, product=product_of):
    """The threads of all ranks, and the signals that are up: each rank has its copies, and its products.

    Args:
        apart: either half of the exchanges has a thread of its own, as in the host; else one stream does both.
        change: breaks a half of an exchange.
    """
    threads = {}
    for rank in range(ranks):
        first, second = threads[rank, "stage"], threads[rank, "pull"] = [], []
        if not apart:
            del threads[rank, "pull"]
            second = first
        for number, parted in enumerate(kinds):
            for half, acts in ((first, staging(rank, ranks, parted)), (second, pulling(rank, ranks))):
                fresh = True
                for act in change(rank, acts):
                    if act.do is Do.STAGE and fresh:  # parts lie elsewhere than in the last exchange: over all of it
                        fresh = False
                        for of in (*range(ranks), "all"):
                            half.append(Step("write", ("window", rank, number % slots, of), ("over", number)))
                    half += steps_of(rank, act, number, parted, slots)
        threads[rank, "product"] = [step for e, parted in enumerate(kinds) for step in product(rank, ranks, e, parted)]
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    return threads, [("free", a, b, slot) for a, b in pairs for slot in range(slots)]


@pytest.mark.parametrize("apart", [False, True], ids=["one stream", "two threads"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_order_of_steps_is_right(ranks, apart):
    """Signals as torch's, which are put when they are down, and as the host's, which count."""
    for kinds in LONG if ranks < 8 else LONG[2:5]:
        threads, up = threads_of(ranks, kinds, apart=apart)
        assert check(threads, up) == check(threads, up, capacity=1_000) == sum(map(len, threads.values()))


@pytest.mark.parametrize("kinds", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_interleaving_by_interleaving(kinds):
    """Two ranks and one slot, walked through state by state, with no argument about what may be left out."""
    assert every_order(*threads_of(2, kinds, slots=1)) > 500


def test_interleaving_by_interleaving_of_two_threads():
    """Of a gather, and what follows it: products, which are a third thread, are left out."""
    threads, up = threads_of(2, (False, False), slots=1, apart=True, product=lambda *_: ())
    assert every_order(threads, up) > 500


def without(do):
    return lambda rank, acts: [act for act in acts if act.do is not do]


def swapped(first, second):
    """Every `second` before the `first` that it should follow."""

    def change(rank, acts):
        acts = list(acts)
        for i in range(len(acts) - 1):
            if (acts[i].do, acts[i + 1].do) == (first, second):
                acts[i], acts[i + 1] = acts[i + 1], acts[i]
        return acts

    return change


def last_first(do, rank_that_errs=0):
    """One rank waits for its peers in another order than it is served: nothing goes wrong, but for time."""

    def change(rank, acts):
        if rank != rank_that_errs or acts[0].do is not Do.KEEP:
            return acts
        triples = [acts[i : i + 3] for i in range(1, len(acts), 3)]
        return [acts[0], *(act for triple in reversed(triples) for act in triple)]

    return change


def pulls_before_it_stages(rank, acts):
    """In one stream, what it sends behind what it receives."""
    return [Act(Do.WAIT_READY, peer) for peer in {act.peer for act in acts} - {rank}] + [
        act for act in acts if act.do is not Do.WAIT_READY
    ]


# How, what is found, and whether either half has a thread of its own: one behind the other, two slots are free in time
# even where nobody says so.
BROKEN = {
    "a slot is filled again too soon": (without(Do.WAIT_FREE), "deadlock|race|garbage", True),
    "a part is read before it is staged": (without(Do.WAIT_READY), "deadlock|race|garbage", True),
    "ready is said too soon": (swapped(Do.STAGE, Do.PUT_READY), "race|garbage", True),
    "free is said too soon": (swapped(Do.PULL, Do.PUT_FREE), "race|garbage", True),
    "free is not said": (without(Do.PUT_FREE), "deadlock", True),
    "ready is not said": (without(Do.PUT_READY), "deadlock", True),
    "all wait before they send": (pulls_before_it_stages, "deadlock", False),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name):
    """By both ways of looking, which shows that the quick one leaves nothing out that matters; and among eight."""
    change, fault, apart = BROKEN[name]
    with pytest.raises(Fault, match=fault):
        every_order(*threads_of(2, (True, False), slots=1, change=change))
    for ranks in (2, 4, 8):
        with pytest.raises(Fault, match=fault):
            check(*threads_of(ranks, (True, False, True, False), change=change, apart=apart))


def test_a_slot_is_free_when_all_have_let_go_of_it():
    """Each part as soon as its own reader has: of three ranks and more, another one still reads where it is put."""

    def one_by_one(rank, acts):
        waits = {act.peer: act for act in acts if act.do is Do.WAIT_FREE}
        order = [[waits[act.peer], act] if act.do is Do.STAGE and act.peer != rank else [act] for act in acts]
        return [act for pair in order for act in pair if pair[0].do is not Do.WAIT_FREE or len(pair) == 2]

    for ranks in (4, 8):
        with pytest.raises(Fault, match="race"):
            check(*threads_of(ranks, (True,) * 4, change=one_by_one, apart=True))


@pytest.mark.parametrize("parted", KINDS)
def test_a_product_that_does_not_wait_reads_too_early(parted):
    def hasty(rank, ranks, number, parted):
        return [step for step in product_of(rank, ranks, number, parted) if step.kind != "take"]

    for ranks in (2, 4, 8):
        with pytest.raises(Fault, match=r"race|garbage"):
            check(*threads_of(ranks, (parted,), product=hasty), capacity=2)
    with pytest.raises(Fault, match=r"race|garbage"):
        every_order(*threads_of(2, (parted,), product=hasty))


def test_another_order_of_arrival_is_slow_and_not_wrong():
    for ranks in (2, 4, 8):
        check(*threads_of(ranks, (False, True, False), change=last_first(Do.PULL)))


def test_the_walk_and_the_argument_agree_on_programs_by_chance():
    """Random small programs of two threads: the one finds a fault where the other does."""
    generator, found = random.Random(0), {"right": 0, "wrong": 0}
    for _ in range(400):
        signals = [(which, generator.random() < 0.5) for which in "abc"]  # put by the first, or by the second
        threads = {0: [], 1: []}
        for _ in range(6):
            if generator.random() < 0.5:
                which, first_puts = generator.choice(signals)
                mine = generator.randrange(2)
                threads[mine].append(Step("put" if (mine == 0) == first_puts else "take", which))
            else:
                threads[generator.randrange(2)].append(Step("write", generator.choice("xy"), 1))
        verdicts = []
        for look in (check, every_order):
            try:
                look(threads)
                verdicts.append("right")
            except Fault:
                verdicts.append("wrong")
        assert len(set(verdicts)) == 1, threads
        found[verdicts[0]] += 1
    assert min(found.values()) > 40, found


# ------------------------------------------------------------------------------------------------ the order of tiles


def seconds_of_gather(order, ranks, part, link):
    """A product of all parts, `part` seconds each, in that order; those of others arrive one after another."""
    there = {peer: distance * link for distance, peer in enumerate(arrivals(0, ranks))}
    now = 0.0
    for peer in order:
        now = max(now, there[peer]) + part
    return now


def seconds_of_scatter(order, ranks, part, link):
    """A product whose parts leave, each when it is computed and the link is free."""
    now = free = 0.0
    for peer in order:
        now += part
        if peer != 0:
            free = max(free, now) + link
    return max(now, free)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("link", [0.3, 1.0, 1.7])
def test_no_order_of_parts_is_faster(ranks, link):
    orders = all_orders(ranks)
    best = min(seconds_of_gather(order, ranks, 1.0, link) for order in orders)
    assert seconds_of_gather(arrivals(0, ranks), ranks, 1.0, link) == pytest.approx(best)
    best = min(seconds_of_scatter(order, ranks, 1.0, link) for order in orders)
    assert seconds_of_scatter(departures(0, ranks), ranks, 1.0, link) == pytest.approx(best)
    in_turn = seconds_of_gather(range(1, ranks), ranks, 1.0, link) + 1.0  # one's own last
    assert seconds_of_gather(arrivals(0, ranks), ranks, 1.0, link) < in_turn


def all_orders(ranks):
    from itertools import permutations

    return list(permutations(range(ranks)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_two_pull_from_one_peer_at_a_time(ranks):
    for distance in range(1, ranks):
        assert {arrivals(rank, ranks)[distance] for rank in range(ranks)} == set(range(ranks))
    for rank in range(ranks):
        *readers, own = departures(rank, ranks)
        assert own == rank == arrivals(rank, ranks)[0]
        assert [arrivals(reader, ranks).index(rank) for reader in readers] == list(range(1, ranks))
