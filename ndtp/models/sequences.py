"""Hidden states of several sources as those of one sequence: a class token before patches, the same for every image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.models.frame import Passage
from ndtp.models.rows import is_brought


def expanded(shard: Tensor, passage: Passage, *sizes: Any) -> tuple[Tensor, Passage] | None:
    """`x.expand(batch, -1, -1)` of rows that every rank has for its features; None of what splits its rows.

    Args:
        shard: [rows, features / x] of an activation that lies as `passage`.
    """
    frame = passage.frame
    lead = tuple(torch.empty(passage.shape, device="meta").expand(*sizes).shape[:-1])
    if len(lead) != len(passage.lead) or frame.splits(passage.layout) > 1 or passage.across:
        return None
    rows = frame.padded(lead[0]) * math.prod(lead[1:])
    index = torch.arange(math.prod(passage.lead), device=shard.device).view(passage.lead).expand(lead).flatten()
    return shard[F.pad(index, (0, rows - len(index)))], replace(passage, lead=lead, rows=rows)


def joined(
    parts: Sequence[Tensor], dim: int, bring: Callable[[Tensor, Passage], Tensor]
) -> tuple[Tensor, Passage] | None:
    """`torch.cat` of sequences, [batch, .., features] each: every rank joins those that it has; None of anything else.

    Args:
        bring: what of a tensor belongs to the shard that lies as a passage says.
    """
    passages = [getattr(x, "passage", None) for x in parts]
    target: Passage = max(filter(None, passages), key=lambda each: each.frame.splits(each.layout))
    frame = target.frame
    is_sequence = dim in (1, -2) and all(x.dim() == 3 for x in parts)
    if not is_sequence or any(x.shape[::2] != parts[0].shape[::2] for x in parts):
        return None
    if (
        target.sections > 1
        or target.across
        or any(each is not None and not is_brought(each, target) for each in passages)
    ):
        return None
    batch, count = parts[0].shape[0], frame.padded(parts[0].shape[0])
    if count % frame.splits(target.layout):
        return None  # a rank has no whole sequences
    here, found = count // frame.splits(target.layout), []
    for x in parts:
        length = x.shape[1]
        shard = bring(x, replace(target, lead=(batch, length), rows=count * length))
        found.append(shard.expand(here * length, -1).unflatten(0, (here, length)))
    together = torch.cat(found, 1)
    length = together.shape[1]
    return together.flatten(0, 1), replace(target, lead=(batch, length), rows=count * length)
