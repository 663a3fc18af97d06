"""`Point`: where a rank is in its program, and what it has there; all ranks of a grid compare theirs.

A point comes before the collectives that depend on it: ranks that mean different things learn of it there, each with
what all others have, instead of waiting for one another in collectives of different sizes.
"""

from __future__ import annotations

import json
import marshal
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from ndtp.algebra.grid import Grid
from ndtp.collectives.axis_groups import AxisGroups
from ndtp.collectives.board import ROW, Row
from ndtp.collectives.conversation import Conversation, HeldElsewhere
from ndtp.collectives.labels import Label
from ndtp.collectives.watch import failure
from ndtp.errors import MismatchError
from ndtp.runtime.caller import caller
from ndtp.runtime.facts import COARSE, NOT_KNOWN, SUMMARY, Fact, Fingerprint, hash_of_bytes
from ndtp.runtime.fixes import ELSEWHERE, FIXES

_CELL = struct.Struct(f"<2Q4d{ROW - 48}x")  # two hashes, the sums of `numbers`, the factor
SHOWN = 6  # kinds of topics of an error


class Compared(Protocol):
    """The part of a `ProcessGrid` that points use."""

    grid: Grid
    global_ranks: list[int] | None
    groups: AxisGroups

    def describe(self, axes: Sequence[str] = ()) -> str: ...


@dataclass(slots=True)
class Point:
    """A point of the program at which ranks are compared.

    Attributes:
        what: the place in the program.
        alike: what all ranks have alike; by its values where all are plain, else by its `repr`.
        of_rows: what ranks have alike which have the same rows.
        numbers: values that are compared up to rounding, by topic, among ranks that have the same rows.
        factor: the number by which all ranks scale their gradients; NaN where a rank cannot tell.
        facts: all of it in words; made where a rank has something else.
        tolerance: how near `numbers` are that differ by rounding, as a share of their norm.
        apart: what begins the topics in which ranks with other rows may differ, of which `compare` tells.
    """

    what: str
    alike: object
    of_rows: object = None
    numbers: dict[str, Fingerprint] = field(default_factory=dict)
    factor: float = math.nan
    facts: Callable[[], list[Fact]] = list
    tolerance: float = COARSE
    apart: tuple[str, ...] = ()

    def row(self, rows_differ: bool = True) -> Row:
        """Return the row that the point shows to other ranks: hashes, and numbers.

        Args:
            rows_differ: whether ranks may have rows of their own; else one hash is of all.
        """
        apart = self.of_rows if rows_differ else None
        alike = hash_of_bytes(_plain((self.what, self.alike, None if rows_differ else self.of_rows)))
        of_rows = hash_of_bytes(_plain(apart)) if apart else 0
        numbers = self.numbers.values()
        if len(numbers) > 1:
            numbers = [sum(numbers, Fingerprint())]  # type: ignore[assignment]
        first, second, square = next(iter(numbers), (0.0, 0.0, 0.0))
        return _CELL.pack(alike, of_rows, first, second, square, self.factor)

    def told(self) -> str:
        """All of it, for ranks that have another."""
        return json.dumps(
            {
                "what": self.what,
                "facts": [(fact.topic, _text(fact.value), fact.may_differ) for fact in self.facts()],
                "numbers": self.numbers,
                "factor": self.factor,
                "tolerance": self.tolerance,
            }
        )


def _plain(value: Any) -> bytes:
    """The bytes of a value, the same in every process where it is the same."""
    try:
        return marshal.dumps(value, 2)  # of later versions, what Python has interned has other bytes
    except ValueError:
        return repr(value).encode()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def compare(mesh: Compared, conversation: Conversation, point: Point, rows_differ: Sequence[str] = ()) -> bool:
    """Compare a point with those of all ranks of the grid, in what is `Speaking`.

    Args:
        rows_differ: the axes along which ranks have rows of their own.

    Returns:
        Whether ranks with other rows differ in topics in which they may.

    Raises:
        MismatchError: names all that differs, on every rank.
        CommunicationError: names ranks that have ended, or come to no point until the timeout.
    """
    own = point.row(bool(rows_differ))
    try:
        rows = conversation.exchange(own)
    except RuntimeError as error:
        raise _failed(mesh, conversation, error, point.what) from error
    if rows.count(own) == len(rows) or _is_alike(rows, _places(mesh, conversation, rows_differ), point.tolerance):
        return False
    told = [json.loads(text) for text in _heard(mesh, conversation, point)]
    of_all = told, mesh.grid, _ranks(mesh, conversation), tuple(rows_differ)
    found = differences(*of_all)
    if found or not any(NOT_KNOWN in fact for each in told for fact in each["facts"]):
        if point.apart and found and not differences(_with_apart(told, point.apart, rows_differ), *of_all[1:]):
            return True
        raise MismatchError(message(*of_all))
    return False


def _with_apart(
    told: Sequence[Mapping[str, Any]], begins: tuple[str, ...], axes: Sequence[str]
) -> list[Mapping[str, object]]:
    """Return what ranks tell, where topics that begin so may differ along axes."""
    return [
        {
            **each,
            "facts": [(topic, text, axes if topic.startswith(begins) else own) for topic, text, own in each["facts"]],
        }
        for each in told
    ]


def compare_facts(mesh: Compared, what: str, facts: Sequence[Fact], details: Callable[[], list[Fact]]) -> None:
    """Compare facts that may differ along axes of their own.

    Args:
        details: the facts that name what differs.
    """
    conversation = mesh.groups.conversation()
    if conversation is None:
        return
    with Speaking(conversation, what):
        ranks = _ranks(mesh, conversation)
        for facts_of in (lambda: list(facts), details):
            told = [json.loads(text) for text in _heard(mesh, conversation, Point(what, None, facts=facts_of))]
            if not differences(told, mesh.grid, ranks, ()):
                return
    raise MismatchError(message(told, mesh.grid, ranks, ()))


def compare_once(mesh: Compared, point: Point, rows_differ: Sequence[str] = ()) -> None:
    """Compare a point outside of what is `Speaking`."""
    conversation = mesh.groups.conversation()
    if conversation is not None:
        with Speaking(conversation, point.what):
            compare(mesh, conversation, point, rows_differ)


class Speaking:
    """One thread of a rank at a time is in a call, or a backward, of those that a conversation belongs to.

    Parts of a batch that run in turns count as one thread, and what autograd runs in a thread of a device counts as run
    by the thread that asked for it.  What nobody holds any more has ended: a backward that broke off.

    Raises:
        MismatchError: another thread is.
    """

    __slots__ = ("_has_begun", "conversation", "what")

    def __init__(self, conversation: Conversation, what: str) -> None:
        self.conversation, self.what = conversation, what
        self._has_begun = False

    def __del__(self) -> None:
        self.end()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> None:
        conversation, me = self.conversation, caller()
        with conversation.lock:
            speaker = conversation.speaker
            if speaker is None:
                conversation.speaker = (me, self.what, 1)
                self._has_begun = True
                return
            if speaker[0] is not me and getattr(speaker[0], "is_alive", lambda: True)():
                raise MismatchError(
                    f"two threads call split models on one process group: one is at the {speaker[1]}, another one "
                    f"begins the {self.what}; their collectives would start in another order on every rank\n"
                    "  fix: call them one after the other, in one order on every rank, or give each thread's grid "
                    "groups of its own: ProcessGrid(grid, timeout=...)"
                )
            conversation.speaker = (me, self.what, speaker[2] + 1)
            self._has_begun = True

    def end(self) -> None:
        if not self._has_begun:
            return
        self._has_begun = False
        with self.conversation.lock:
            speaker = self.conversation.speaker
            if speaker is not None:
                self.conversation.speaker = (*speaker[:2], speaker[2] - 1) if speaker[2] > 1 else None


def _heard(mesh: Compared, conversation: Conversation, point: Point) -> list[str]:
    try:
        return conversation.texts(point.told())
    except RuntimeError as error:
        raise _failed(mesh, conversation, error, point.what) from error


def _failed(mesh: Compared, conversation: Conversation, error: RuntimeError, what: str) -> Exception:
    """Return the error for ranks that do not come to a point."""
    if isinstance(error, HeldElsewhere):
        where = [f"rank {_of(mesh, rank)} is in {text}" for rank, text in sorted(error.collectives.items())]
        me = mesh.groups.rank
        return MismatchError(
            f"ranks of grid {mesh.grid} are at different points: {', '.join(where)}, which rank {me} has not begun: "
            f"rank {me} is at the {what}\n  fix: {ELSEWHERE}"
        )
    label = Label((what,), "point", "comparison", mesh.grid.nontrivial(tuple(mesh.grid)))
    return failure(label, mesh.describe, error, conversation.members)


def _of(mesh: Compared, rank: int) -> int:
    """The rank on the grid of a rank of the world."""
    assert mesh.global_ranks is not None
    return mesh.global_ranks.index(rank)


def _ranks(mesh: Compared, conversation: Conversation) -> list[int]:
    """The rank on the grid of each member."""
    assert mesh.global_ranks is not None
    return [mesh.global_ranks.index(member) for member in conversation.members]


def _places(mesh: Compared, conversation: Conversation, axes: Sequence[str]) -> list[tuple[int, ...]]:
    coordinates = map(mesh.grid.coordinate, _ranks(mesh, conversation))
    return [tuple(coordinate[axis] for axis in axes) for coordinate in coordinates]


def _is_alike(rows: Sequence[Row], places: Sequence[tuple[int, ...]], tolerance: float) -> bool:
    first: dict[tuple[int, ...], tuple[int, Fingerprint]] = {}
    factors, known = [], _CELL.unpack(rows[0])[0]
    for row, place in zip(rows, places, strict=True):
        alike, seen, *numbers, factor = _CELL.unpack(row)
        of_rows, near = first.setdefault(place, (seen, Fingerprint(*numbers)))
        if alike != known or seen != of_rows or not near.is_near(Fingerprint(*numbers), tolerance):
            return False
        factors.append(factor)
    return not _are_far(factors)


def _are_far(factors: Sequence[float]) -> bool:
    known = [factor for factor in factors if math.isfinite(factor)]
    return bool(known) and max(known) - min(known) > 2e-2 * max(map(abs, known))


# ------------------------------------------------------------------------------------------------------------- naming


def differences(
    told: Sequence[Mapping[str, Any]], grid: Grid, ranks: Sequence[int], rows_differ: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the topics in which ranks differ, and which rank has which value."""
    order = sorted(range(len(told)), key=lambda i: ranks[i])
    told, ranks = [told[i] for i in order], [ranks[i] for i in order]
    whats = [each["what"] for each in told]
    if len(set(whats)) > 1:
        return [("what", _who(ranks, [f"the {what}" for what in whats], "is at", "are at"))]
    found = []
    tables = [{topic: (text, tuple(axes)) for topic, text, axes in each["facts"]} for each in told]
    for topic in dict.fromkeys(topic for table in tables for topic in table):
        axes = next(table[topic][1] for table in tables if topic in table)
        values = [table.get(topic, ("nothing", ()))[0] for table in tables]
        found += [] if NOT_KNOWN in values else _among(grid, ranks, axes, topic, values)
    for topic in dict.fromkeys(topic for each in told for topic in each["numbers"]):
        points = [Fingerprint(*each["numbers"].get(topic, (math.inf,) * 3)) for each in told]
        values = [_nearest(i, points, told[0]["tolerance"]) for i in range(len(points))]
        found += _among(grid, ranks, tuple(rows_differ), topic, values)
    factors = [each["factor"] for each in told]
    if _are_far(factors):
        texts = ["unknown" if math.isnan(each) else f"{each:.3g}" for each in factors]
        found.append(("factor of gradients between backward and the optimizer", _who(ranks, texts)))
    return found


def _nearest(i: int, points: Sequence[Fingerprint], tolerance: float) -> str:
    """Return the numbers that ranks with nearly the same numbers all print."""
    first = next(point for point in points if point.is_near(points[i], tolerance))
    return f"norm {math.sqrt(max(first.square, 0.0)):.6g} ({first.first:.4g}, {first.second:.4g})"


def _among(
    grid: Grid, ranks: Sequence[int], axes: Sequence[str], topic: str, values: Sequence[str]
) -> list[tuple[str, str]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, rank in enumerate(ranks):
        coordinate = grid.coordinate(rank)
        groups.setdefault(tuple(coordinate.get(axis, 0) for axis in axes), []).append(i)
    return [
        (topic, _who([ranks[i] for i in group], [values[i] for i in group]))
        for group in groups.values()
        if len({values[i] for i in group}) > 1
    ]


def _who(ranks: Sequence[int], values: Sequence[str], one: str = "has", more: str = "have") -> str:
    """Return which rank has which value, with the commonest value last."""
    common = [value for value, _ in Counter(values).most_common()][::-1]
    parts = []
    for value in common:
        own = [rank for rank, each in zip(ranks, values, strict=True) if each == value]
        parts.append(f"rank{'s' * (len(own) > 1)} {_spans(own)} {more if len(own) > 1 else one} {value}")
    return ", ".join(parts)


def _spans(ranks: Sequence[int]) -> str:
    """`0-2, 4`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _kind(topic: str) -> str:
    """Return the kind of a topic: its text without the name."""
    return re.sub(r"'.*?'|(group|read) \d+|[\w.\[\]]+(?=: values)", "", topic).strip()


def message(
    told: Sequence[Mapping[str, object]], grid: Grid, ranks: Sequence[int], rows_differ: tuple[str, ...]
) -> str:
    found = differences(told, grid, ranks, rows_differ)
    if not found:
        return f"ranks of grid {grid} disagree at the {told[0]['what']}, on what none of them can name"
    if found[0][0] == "what":
        return f"ranks of grid {grid} are at different points: {found[0][1]}\n  fix: {FIXES[-1][1]}"
    found = [entry for entry in found if not entry[0].startswith(SUMMARY)] or found
    kinds = Counter(_kind(topic) for topic, _ in found)
    firsts = {_kind(topic): f"  {topic}: {who}" for topic, who in reversed(found)}
    lines = [
        firsts[kind] + (f"\n    and {kinds[kind] - 1} more like it" if kinds[kind] > 1 else "")
        for kind in list(kinds)[:SHOWN]
    ]
    if len(kinds) > SHOWN:
        lines.append(f"  and {len(kinds) - SHOWN} other kinds")
    axes = " ".join(rows_differ) or "dp"
    fixes = (fix for topic, _ in found for begins, fix in FIXES if topic.startswith(begins))
    lines += [f"  fix: {fix.format(axes=axes)}" for fix in islice(fixes, 1)]
    return f"ranks of grid {grid} disagree at the {told[0]['what']}:\n" + "\n".join(lines)
