"""Causal attention of parts of a sequence, cut into pieces that see all, or each other's diagonal.  Pure.

A rank has some positions of the queries and, for the time being, some of the keys.  Kernels know two forms: every query
sees every key, or query i sees the keys up to i.  `pieces` cuts any two lists of positions into these forms, and leaves
out what no query sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class AttentionPiece:
    """Some local queries and some local keys; `is_causal` where query i sees the keys up to i, else it sees all."""

    queries: slice
    keys: slice
    is_causal: bool

    @property
    def work(self) -> int:
        """Return the number of pairs of a query and a key that it sees."""
        rows, columns = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return rows * (rows + 1) // 2 if self.is_causal else rows * columns


def pieces(queries: Sequence[range], keys: Sequence[range], length: int, is_causal: bool) -> list[AttentionPiece]:
    """Return the pieces of queries and keys at these positions, in the order in which a rank has them.

    Args:
        length: of the sequence: what lies behind it is padding.
    """
    points = sorted(
        {each for spans in (queries, keys) for span in spans for each in (span.start, span.stop)} | {length}
    )
    mine, theirs = (_cut(spans, points if is_causal else [length], length) for spans in (queries, keys))
    found: list[AttentionPiece] = []
    for at, own in mine:
        seen: list[AttentionPiece] = []
        for place, other in theirs:
            if is_causal and other.start > own.start:
                continue
            is_diagonal = is_causal and other == own
            last = seen[-1] if seen else None
            if last and not last.is_causal and not is_diagonal and last.keys.stop == place:
                seen[-1] = AttentionPiece(last.queries, slice(last.keys.start, place + len(other)), False)
            else:
                seen.append(AttentionPiece(slice(at, at + len(own)), slice(place, place + len(other)), is_diagonal))
        found += seen
    return found


def _cut(spans: Sequence[range], points: Sequence[int], length: int) -> list[tuple[int, range]]:
    """Return the spans cut at these points, each behind the local index at which it begins; padding is left out."""
    found, at = [], 0
    for span in spans:
        stops = [point for point in points if span.start < point < min(span.stop, length)]
        bounds = [span.start, *stops, min(span.stop, length)]
        for start, stop in pairwise(bounds):
            if stop > start:
                found.append((at + start - span.start, range(start, stop)))
        at += len(span)
    return found
