"""The split of single sequences in a choice: over how many ranks, and in which way queries meet keys.  Pure."""

from __future__ import annotations

from math import lcm

from ndtp.algebra.attention_ways import AttentionWays
from ndtp.planner.training.choose import SplitChoice


def rows_axis(choice: SplitChoice) -> int:
    """Return the size of the axis z with which ndtp runs a choice: context-parallel ranks split rows and weights."""
    return int(choice.splits.z * choice.splits.cp)


def attention_of(choice: SplitChoice) -> AttentionWays | None:
    """Return the attention of sequences that ndtp splits over ranks; None where ranks have whole ones.

    As `ndtp.parallelize` does, which splits tokens where the ranks that split rows do not divide the sequences.
    """
    s, model = choice.splits, choice.question.model
    z, x, y = rows_axis(choice), int(s.x), int(s.y)
    sequences, ranks = int(s.micro * s.z), z * x
    if sequences % lcm(z * x, z * y) == 0 or ranks == 1 or s.pp > 1:
        return None
    rows = sequences * model.sequence // ranks
    heads, keys = model.heads // y, max(model.keys // y, 1)
    return AttentionWays(ranks, heads, keys, rows * heads * model.head, 2 * rows * keys * model.head)


def said(choice: SplitChoice) -> str:
    """Return the way of attention and the reason for it, in a sentence; nothing where ranks have whole sequences."""
    ways = attention_of(choice)
    if ways is None:
        return ""
    return f"Each sequence is split over {ways.ranks} ranks, with attention={ways.best()!r}: {ways.why()}."
