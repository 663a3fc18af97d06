"""Layers of an observed model as one program: those of an MLP, and the head with its loss in chunks of rows.

What follows what element by element, and which layer's result a loss is taken of, one run has shown.  A call is checked
again by what its code does with a `Noted`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ndtp.models.head_loss import HeadSchedule
from ndtp.models.noted import Noted, NotedCall, noted_result
from ndtp.models.one_schedule import MLPSchedule, Notes
from ndtp.models.projections import Projection
from ndtp.models.split_layers import ObservedLinear, as_rows
from ndtp.models.waiting import Call


class NotesOfRows(Notes):
    """The way in which layers wait whose inputs and results are split tensors."""

    def call_of(self, members: tuple[Projection, ...], x: Tensor, compute: object, **options: object) -> NotedCall:
        first = members[0]
        assert isinstance(first, ObservedLinear)
        rows, features = first.axes_in
        shard, lies = as_rows(x, rows, features, first.width, first.context, first.name, bool(rows or first.rows_out))
        return NotedCall(members, shard, compute, x, rows=lies, **options)  # type: ignore[arg-type]

    def noted(self, call: Call, member: Projection, x: Tensor) -> Noted:
        return noted_result(call, member, x.shape[:-1])  # type: ignore[arg-type]


class ObservedMLP(NotesOfRows, MLPSchedule):
    """The layers of one MLP of an observed model."""

    def pays(self, x: Tensor) -> bool:
        return True

    def fits(self, x: Any) -> bool:
        # Where the products do not meet in as many features, one of them has padding.
        alike = (each.out_width * self.down.real_in == self.down.width * each.real_out for each in self.ups)
        return x.is_same and not x.call.rows.is_vector and all(alike)

    def given(self, y: Tensor, x: Any) -> Tensor:
        return self.down.given(y, x.call.rows)  # type: ignore[operator, no-any-return]


class ObservedHead(NotesOfRows, HeadSchedule):
    """A head whose loss is taken in chunks of rows."""

    def may_wait(self, member: Projection, x: Tensor) -> bool:
        return x.dim() > 1
