"""Views of hidden states that share no memory with them: what is written to one comes to the other.

Rows that are picked go to other ranks, and parts of features are copied, where torch's own are views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.compute.constants import indices_on
from ndtp.errors import LayoutError
from ndtp.models.frame import Passage
from ndtp.models.hidden import Hidden, enter, leave
from ndtp.models.rows import is_brought
from ndtp.ops.products import relayout
from ndtp.ops.reductions import used_over
from ndtp.split.copies import Tie


def standing_for(link: Tie, passage: Passage, strides: tuple[int, ...] | None = None) -> Hidden:
    """Return what a link has gathered of hidden states, in the place of a view of these.

    Args:
        strides: of the dense view; None where it is contiguous.
    """
    made = enter(link.gathered.view_as(link.gathered), passage)
    made.link, made.strides = link, strides
    return made


def rows_picked(shard: Tensor, ids: Tensor, passage: Passage, target: Passage) -> Tensor:
    """Return the shard of the rows `ids` of the whole, which lies as `target`: each rank gives those that it has."""
    frame, here = passage.frame, passage.rows_here
    local = indices_on(target.laid(passage.row_of(ids.flatten()), value=-1), shard.device) - here.start
    mine = (local >= 0) & (local < len(here))
    found = shard[local.clamp(0, len(here) - 1)] if len(here) else shard.new_zeros(target.rows, shard.shape[1])
    found = torch.where(mine[:, None], found, 0)
    outside = frame.outside.dims[0]
    held = Layout(frame.mesh.grid, outside, passage.layout.dims[1])
    inner = passage.layout.dims[0][len(outside) :]
    return relayout(found, held, passage.layout, frame.mesh, f"{passage.came_from} rows", partial=inner)


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


@dataclass(eq=False)
class PickedRows(Tie):
    """The link of rows that were picked.

    Attributes:
        ids: the indices of these rows, in the shape of their leading dims.
        passage: how they lie.
    """

    ids: Tensor
    passage: Passage

    def again(self) -> Tensor:
        return rows_picked(leave(self.base), self.ids, self.base.passage, self.passage)

    def bring_back(self) -> bool:
        """Each rank takes the rows that it has of the activation."""
        passage, given = self.base.passage, self.passage
        mesh, outside = passage.frame.mesh, passage.frame.outside.dims[0]
        all_rows = Layout(mesh.grid, outside, passage.layout.dims[1])
        now = self.gathered.view_as(self.gathered)
        rows = given.in_order(relayout(now, given.layout, all_rows, mesh, "rows written"))
        rows = used_over(rows, all_rows, passage.layout.dims[0][len(outside) :], mesh, "rows written")
        here = passage.rows_here
        at = passage.row_of(self.ids.flatten()) - here.start
        mine = ((at >= 0) & (at < len(here))).nonzero()[:, 0]
        leave(self.base)[indices_on(at[mine], rows.device)] = rows[indices_on(mine, rows.device)]
        return False


@dataclass(eq=False)
class PartOfFeatures(Tie):
    """The link of one of several parts of the features, the `place`th, where each part is split by itself."""

    place: int

    def _of(self, shard: Tensor) -> Tensor:
        width = self.gathered.shape[1]
        return shard.narrow(1, self.place * width, width)

    def again(self) -> Tensor:
        return self._of(leave(self.base))

    def bring_back(self) -> bool:
        self._of(leave(self.base)).copy_(self.gathered)
        return False


@dataclass(eq=False)
class Expanded(Tie):
    """The link of rows that every sequence has, which may not be written to."""

    sizes: tuple[Any, ...]

    def again(self) -> Tensor:
        found = expanded(leave(self.base), self.base.passage, *self.sizes)
        assert found is not None
        return found[0]

    def bring_back(self) -> bool:
        raise LayoutError(
            f"parallelize: a write in place to what expand{self.sizes} gave of {self.base.passage}, whose rows stand "
            "for several\n  fix: clone() before it, or write to the tensor that was expanded"
        )


@dataclass(eq=False)
class Feature(Tie):
    """The link of one feature of all rows, the one that `key` picks, whole on every rank."""

    key: Any

    def again(self) -> Tensor:
        return self.base[self.key]  # type: ignore[no-any-return]

    def bring_back(self) -> bool:
        self.base[self.key] = self.gathered.view_as(self.gathered)
        return False
