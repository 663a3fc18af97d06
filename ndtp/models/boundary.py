"""`BoundaryLinear`: a Linear of a pair that `parallelize` made, between the rest of the model and what is split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.volume import Volume
from ndtp.errors import LayoutError
from ndtp.models.between import Between, PairPassage, enter, leave
from ndtp.models.signatures import OF_TORCH, as_dense_input, input_by_name
from ndtp.nn.linear import Linear
from ndtp.nn.padding import RowBlocks, pad_rows, padded_tokens, with_leading_dims, zero_padding, zero_padding_rows
from ndtp.nn.sharded import volume_of
from ndtp.ops.products import relayout


@dataclass(frozen=True)
class Boundary:
    """The place of a layer between the rest of a model and the split part that `parallelize` made.

    Attributes:
        outside: how activations lie in the rest of the model: whole, but for the rows that other axes (`dp`) split.
        row_multiple: what the rows of a rank are padded to a multiple of inside.
        enters, leaves: whether the layer takes what lies outside, and whether it returns it.
    """

    outside: Layout
    row_multiple: int
    enters: bool = True
    leaves: bool = True


class BoundaryLinear(Linear):
    """A `Linear` whose input or output is converted from or to what its neighbours in the model expect.

    Inside of its `boundary` activations lie as the plan says, as [rows, features], padded where a size does not divide.
    """

    def __init__(self, *sizes: Any, boundary: Boundary, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.boundary = boundary

    def forward(self, x: Any = None, **named: Any) -> Tensor:
        if named:
            x = input_by_name(self, x, named)
        if type(x) in OF_TORCH:
            x = as_dense_input(x, self.name)
        if self.boundary.enters:
            x, passage = self._enter(x)
        else:
            x, passage = self._inside(x)
        y = super().forward(x)
        if not self.boundary.leaves:
            return enter(zero_padding_rows(y, self.out_layout, self.mesh, passage.rows), passage)
        y = relayout(y, self.out_layout, self.boundary.outside, self.mesh, f"{self.name} output", kind="activations")
        y = y[: math.prod(passage.lead), : self.out_features].contiguous()  # code may ask for a view
        return with_leading_dims(y, passage.lead, f"parallelize: '{self.name}'")

    def _enter(self, x: Tensor) -> tuple[Tensor, PairPassage]:
        """Rows of the whole features, as the plan has them, and what becomes of them."""
        if isinstance(x, Between):
            x.passage.refuse(f"'{self.name}', which is the first layer of a pair or alone,")
        if tuple(x.shape[-1:]) != (self.in_features,):
            raise LayoutError(
                f"parallelize: '{self.name}' takes {self.in_features} features, its input is of {tuple(x.shape)}"
            )
        lead, outside = tuple(x.shape[:-1]), self.boundary.outside
        count = math.prod(lead)
        x = x.reshape(count, self.in_features)
        x = pad_rows(x, self.boundary.row_multiple, self.padded_in - self.in_features)
        rows = RowBlocks.of(count, x)
        x = relayout(x, outside, self.in_layout, self.mesh, f"{self.name} input", kind="activations")
        return x, PairPassage(self.name, self.out_layout, outside, self.mesh, self.out_features, lead, rows)

    def _inside(self, x: Tensor) -> tuple[Tensor, PairPassage]:
        """Return what the pair's other layer gave, and how it lies."""
        if not isinstance(x, Between):
            raise LayoutError(
                f"parallelize: '{self.name}' is the second layer of a pair and got a tensor of the shape "
                f"{tuple(x.shape)} that does not come from the first through element-wise operations\n  fix: leave its "
                "pair out of the plan"
            )
        passage = x.passage
        if (passage.layout, passage.outside, passage.features) != (
            self.in_layout,
            self.boundary.outside,
            self.in_features,
        ):
            passage.refuse(f"'{self.name}', which belongs to another pair,")
        shard = zero_padding_rows(leave(x), self.in_layout, self.mesh, passage.rows)
        if self.padded_in != self.in_features:
            # An activation need not be zero at zero; its padding must be, or the weight's padding gets a gradient.
            shard = zero_padding(shard, self.in_layout, self.mesh, self.in_features)
        return shard, passage

    def volume(self, tokens: int, dgrad: bool = True) -> Volume:
        """Return the traffic of `Linear.volume` and of the conversions at the boundary."""
        outside = self.boundary.outside
        count = -(-tokens // outside.num_splits(0))
        x = torch.empty(count, self.in_features, dtype=self.weight.dtype, device="meta", requires_grad=dgrad)
        if not self.boundary.enters:
            rows = padded_tokens(tokens, self.boundary.row_multiple, outside)
            shape = self.in_layout.shard_shape((rows, self.padded_in))
            padded = RowBlocks(count or 1, rows // outside.num_splits(0) or 1)
            passage = PairPassage(self.name, self.in_layout, outside, self.mesh, self.in_features, (count,), padded)
            x = enter(torch.empty(shape, dtype=self.weight.dtype, device="meta", requires_grad=dgrad), passage)
        return volume_of(self, self.mesh, (x,), lambda y: leave(y) if isinstance(y, Between) else y)
