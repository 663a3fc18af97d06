"""Threads that touch memory and signal one another, run in every order that their signals leave.  Pure Python.

A thread is a list of steps without branches.  A signal is a flag that is put (when it is down) and taken (when it is
up), by one thread each: so a step that can be done stays so whatever other threads do, all orders do the same steps,
and which of two steps must come first is the same in all of them.  `Check.everything` follows that order:

    deadlock    no thread can go on: then none can in any order
    race        two threads touch one place, one of them writes, and neither must come first
    garbage     a place is read that nothing has been written to before, or another value than is meant

`every_order` does without that argument: it walks through all interleavings, one after another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """kind: "put", "take" (a signal), "write" or "read" (a value at a place).  `counts`: a put does not wait."""

    kind: str
    place: Hashable
    value: Hashable = None


Threads = Mapping[Hashable, Sequence[Step]]


class Fault(Exception):
    """What goes wrong, and in which thread."""


def check(threads: Threads, up: Sequence[Hashable] = (), capacity: int = 1) -> int:
    """All orders at once, by one run that keeps what must come before what (vector clocks).

    Args:
        up: signals that are up at the beginning.
        capacity: how often a signal can be put before it is taken.  Signals that count block nobody who puts, and
            order less: a protocol should hold with either.

    Returns:
        how many steps there are.

    Raises:
        Fault: a deadlock, a race or garbage, in some order; or a signal of two threads, for which this proves nothing.
    """
    _one_thread_each(threads)
    names = list(threads)
    at = dict.fromkeys(names, 0)
    clock = {name: dict.fromkeys(names, 0) for name in names}
    pending: dict[Hashable, list[dict[Hashable, int]]] = {signal: [dict.fromkeys(names, 0)] for signal in up}
    taken: dict[Hashable, list[dict[Hashable, int]]] = {}
    history: dict[Hashable, list[tuple[Hashable, int, Step]]] = {}
    moved = True
    while moved:
        moved = False
        for name in names:
            while at[name] < len(threads[name]):
                step, mine = threads[name][at[name]], clock[name]
                queue = pending.setdefault(step.place, []) if step.kind in ("put", "take") else []
                if (step.kind == "put" and len(queue) >= capacity) or (step.kind == "take" and not queue):
                    break
                mine[name] += 1
                if step.kind == "put":
                    freed = taken.get(step.place, [])
                    if freed:  # it could be put because it had been taken
                        _join(mine, freed.pop(0) if capacity == 1 else {})
                    queue.append(dict(mine))
                elif step.kind == "take":
                    _join(mine, queue.pop(0))
                    taken.setdefault(step.place, []).append(dict(mine))
                else:
                    _touch(name, mine, step, history.setdefault(step.place, []))
                at[name] += 1
                moved = True
    stuck = {name: threads[name][at[name]] for name in names if at[name] < len(threads[name])}
    if stuck:
        raise Fault(f"deadlock: {stuck}")
    return sum(map(len, threads.values()))


def every_order(threads: Threads, up: Sequence[Hashable] = ()) -> int:
    """All states that any interleaving comes through; how many there are.

    Raises:
        Fault: a state in which nobody can go on, or in which two steps could be next that must not meet, or garbage.
    """
    names = list(threads)
    begin = (tuple(0 for _ in names), frozenset(up), frozenset())
    seen, todo = {begin}, [begin]
    while todo:
        at, signals, memory = todo.pop()
        values = dict(memory)
        nexts = [(i, threads[name][at[i]]) for i, name in enumerate(names) if at[i] < len(threads[name])]
        able = [(i, step) for i, step in nexts if _can(step, signals)]
        if nexts and not able:
            raise Fault(f"deadlock: {nexts}")
        touching = [(i, step) for i, step in able if step.kind in ("read", "write")]
        for n, (i, one) in enumerate(touching):
            for j, other in touching[n + 1 :]:
                if one.place == other.place and "write" in (one.kind, other.kind):
                    raise Fault(f"race: {names[i]} {one}, {names[j]} {other}")
        for i, step in able:
            after, held = signals, memory
            if step.kind == "put":
                after = signals | {step.place}
            elif step.kind == "take":
                after = signals - {step.place}
            elif step.kind == "write":
                held = frozenset({**values, step.place: step.value}.items())
            elif values.get(step.place) != step.value:
                raise Fault(f"garbage: {names[i]} {step} finds {values.get(step.place)}")
            state = ((*at[:i], at[i] + 1, *at[i + 1 :]), after, held)
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return len(seen)


def _can(step: Step, signals: frozenset[Hashable]) -> bool:
    return {"put": step.place not in signals, "take": step.place in signals}.get(step.kind, True)


def _one_thread_each(threads: Threads) -> None:
    for kind in ("put", "take"):
        owners: dict[Hashable, Hashable] = {}
        for name, steps in threads.items():
            for step in steps:
                if step.kind == kind and owners.setdefault(step.place, name) != name:
                    raise Fault(f"signal {step.place} is {kind} by {owners[step.place]} and {name}")


def _join(clock: dict[Hashable, int], other: Mapping[Hashable, int]) -> None:
    for name, time in other.items():
        clock[name] = max(clock[name], time)


def _touch(
    name: Hashable, clock: Mapping[Hashable, int], step: Step, history: list[tuple[Hashable, int, Step]]
) -> None:
    for thread, time, earlier in _last(history):
        if "write" in (step.kind, earlier.kind) and thread != name and clock[thread] < time:
            raise Fault(f"race: {thread} {earlier} and {name} {step}")
    if step.kind == "read":
        written = next((earlier.value for _, _, earlier in reversed(history) if earlier.kind == "write"), None)
        if written != step.value:
            raise Fault(f"garbage: {name} {step} finds {written}")
    history.append((name, clock[name], step))


def _last(history: Sequence[tuple[Hashable, int, Step]]) -> Iterator[tuple[Hashable, int, Step]]:
    """Of each thread the last write and the last read: what came before is before those."""
    seen = set()
    for name, time, step in reversed(history):
        if (name, step.kind) not in seen:
            seen.add((name, step.kind))
            yield name, time, step
