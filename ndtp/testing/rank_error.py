"""The error of a call on ranks when one of them fails: whose failure came first, and what each of them says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ndtp.errors import GridError, LayoutError


class RankError(RuntimeError):
    """A rank raised, died or hung.

    Attributes:
        rank: the rank that failed first; one that died before those that raised, who may only have lost it.
        coordinates: its place on the grid, e.g. `{"z": 0, "x": 1, "y": 1}`; None unless the call named its `axes`.
        errors: rank -> traceback text, or how the process ended, of every rank that failed.
        exceptions: rank -> the exception itself, for those whose exception can be pickled.
        summaries: rank -> the last line of its traceback.
        stopped: ranks that had not finished and were killed.
        reports: rank -> pickled, what pytest shows of its exception; only in tests.
        printed: rank -> what it printed and was not shown; only in tests.
    """

    def __init__(
        self,
        rank: int,
        errors: Mapping[int, str],
        *,
        axes: Mapping[str, int] | None = None,
        exceptions: Mapping[int, BaseException] | None = None,
        summaries: Mapping[int, str] | None = None,
        stopped: Collection[int] = (),
        reports: Mapping[int, bytes] | None = None,
        printed: Mapping[int, str] | None = None,
    ) -> None:
        self.rank = rank
        self.errors = dict(errors)
        self._axes = axes
        self.coordinates = None if axes is None else coordinates_of(rank, axes)
        self.exceptions = dict(exceptions or {})
        self.summaries = dict(summaries or {})
        self.stopped = tuple(sorted(stopped))
        self.reports = dict(reports or {})
        self.printed = dict(printed or {})
        summary = self.summaries.get(rank, "failed")
        lines = [f"{self.name([rank])}: {summary}"]
        if self.errors[rank] != summary:
            lines.append(_indent(self.errors[rank]))
        others: dict[str, list[int]] = {}
        for other in sorted(set(self.errors) - {rank}):
            others.setdefault(self.summaries.get(other, "failed"), []).append(other)
        lines += [f"also {_name(ranks)}: {summary}" for summary, ranks in others.items()]
        if self.unfinished:
            lines.append(f"stopped before the end: {_name(self.unfinished)}")
        super().__init__("\n".join(lines))

    @property
    def unfinished(self) -> list[int]:
        """Ranks that were killed and have said nothing."""
        return sorted(set(self.stopped) - set(self.errors))

    @property
    def refusal(self) -> str | None:
        """The message, where all ranks have refused sizes or layouts alike: what was asked for is wrong."""
        found = [self.exceptions.get(rank) for rank in self.errors]
        if self.unfinished or not all(isinstance(each, (GridError, LayoutError)) for each in found):
            return None
        return str(found[0]) if len({*map(str, found)}) == 1 else None

    def name(self, ranks: Sequence[int]) -> str:
        """Name one rank or several; one with its coordinates, where they are known."""
        if len(ranks) > 1 or self._axes is None:
            return _name(ranks)
        place = " ".join(f"{axis}={i}" for axis, i in coordinates_of(ranks[0], self._axes).items())
        return f"{_name(ranks)} ({place})"


class RankTimeout(RankError):
    """Ranks were still running at the timeout; `errors` holds the Python stack where each of them was."""


def coordinates_of(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Grid coordinates of a rank, for axis sizes given slowest first."""
    coordinates = {}
    for axis in reversed(list(axes)):
        rank, coordinates[axis] = divmod(rank, axes[axis])
    return {axis: coordinates[axis] for axis in axes}


def _indent(text: str) -> str:
    return "".join(f"  {line}" for line in text.rstrip("\n").splitlines(keepends=True))


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
