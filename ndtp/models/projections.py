"""Products of a stock model on a grid: the Linears of its attention and MLPs, and those of a group as one product.

Layers that take the same input (q, k and v; gate and up) are one product, whose input is gathered once: this rank's
shards of their weights, one after the other, are its shard of a weight whose features are in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import BlockLayouts
from ndtp.compute.constants import constant_on
from ndtp.errors import LayoutError
from ndtp.models.adopted import Adopted, adopt, as_projection_input
from ndtp.models.frame import Frame, Passage, led_to
from ndtp.models.fused_order import order_of
from ndtp.models.hidden import Hidden, enter, leave
from ndtp.models.joint_product import Used, parts_of, side_by_side
from ndtp.models.settled import settled_product
from ndtp.models.shared_input import SharedInput
from ndtp.models.signatures import OF_TORCH, as_dense_input, input_by_name
from ndtp.models.whole_rows import takes_whole, whole_result
from ndtp.ops.products import chain, relayout
from ndtp.runtime.arrival import local_shard


class Schedule(Protocol):
    """The schedule in which several projections are one program."""

    def called(self, member: Projection, x: Tensor) -> Tensor | None:
        """Return the result that the model's code gets when it calls a projection; None where it is computed by
        itself.
        """


class Projection(Adopted):
    """An `nn.Linear`, or a Conv1D whose weight is [in, out], on a grid.

    Attributes:
        plan: of the product.
        width, out_width: its features with padding, in and out.
        sections: sizes of parts of its features, each of which is split by itself; none where they are one part.
        order: of its features, as the product has them; None where that is the dense one.
        gives: how its result lies.
        leads_into: how the result lies inside of an MLP or an attention that it leads into; None of another one.
        is_last: whether it takes hidden states and gives others, which no other layer is known to take: a head does.
        leads_in: whether it takes hidden states and gives what is inside of a block, or the other way.
        adapts: of an adapter's layer, the one beside it; `gives_features` is its second.
    """

    plan: MatMulPlan
    stored: Layout
    weight: nn.Parameter
    width: int
    out_width: int
    sections: tuple[int, ...]
    order: Tensor | None
    gives: Layout
    leads_into: Layout | None
    is_last: bool
    leads_in: bool
    is_conv: bool
    group: SharedInput | None
    schedule: Schedule | None
    core: Any
    loud: bool
    adapts: Projection | None
    gives_features: bool

    def forward(self, x: Any = None, **named: Any) -> Tensor:
        if named:
            x = input_by_name(self, x, named)
        if type(x) in OF_TORCH and (x.layout is not torch.strided or x.is_nested):
            x = as_dense_input(x, self.name)
        if self.core is not None:
            return self.core.projected(self, x)
        if takes_whole(self, x):
            return whole_result(self, x)
        if self.schedule is not None and (made := self.schedule.called(self, x)) is not None:
            return made
        if not isinstance(x, Hidden):
            x = self.taken(x)
        if self.group is not None:
            y = self.group.result(self, x)
        else:
            (y,) = self.product([self], x)
        return self.as_given(y, x.passage)

    def product(self, members: Sequence[Any], x: Tensor) -> list[Any]:
        """Return the results of several layers of one input, by one product."""
        return products(members, self.taken(x))

    def at_work(self) -> AbstractContextManager[None]:
        """A context in which the layer itself reads its parameters."""
        return nullcontext()

    def as_given(self, y: Tensor, given: Passage) -> Hidden:
        """Return the result as the model's code gets it, for an input that lay as `given`."""
        return enter(y.view_as(y), self.passage(given))

    def taken(self, x: Tensor) -> Hidden:
        """Return the input in the layout of the projection's plan.

        Raises:
            LayoutError: it has other features than the layer takes.
        """
        if not isinstance(x, Hidden) and x.dim() and x.shape[-1] != self.real_in:
            raise LayoutError(f"'{self.name}' takes {self.real_in} features, and got {tuple(x.shape)}")
        return as_projection_input(x, self.frame, self.plan, self.width, self.name)

    def passage(self, given: Passage) -> Passage:
        return led_to(self, given, self._led_to)

    def _led_to(self, given: Passage) -> Passage:
        count = len(self.sections) or 1
        return replace(
            given, layout=self.gives, features=self.real_out, width=self.out_width, sections=count,
            came_from=self.name, loud=self.loud,
        )  # fmt: skip

    @property
    def real_in(self) -> int:
        return self.lies["weight"].real[0 if self.is_conv else 1]

    @property
    def real_out(self) -> int:
        return self.lies["weight"].real[1 if self.is_conv else 0]

    def weight_and_bias(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias as the product takes them: DTensors, or shards that were reordered where stored
        otherwise.

        Args:
            rows: the input with which the weight is to be used, if that is to be checked.
        """
        weight, bias = self.held("weight"), self.held("bias")
        if rows is not None:
            self.checked("weight", weight, rows)
        if weight is None:
            raise self.lacks("weight")
        if self.stored == self.plan.b and self.order is None:
            return weight, bias
        mesh, dim = self.mesh, 1 if self.is_conv else 0
        order = slice(None) if self.order is None else constant_on(self.order, weight.device)
        shard = local_shard(weight)
        shard = shard.index_select(dim, order) if isinstance(order, Tensor) else shard
        shard = relayout(shard, self.stored, self.plan.b, mesh, f"{self.name}.weight", kind="weights")
        if bias is None:
            return shard, None
        one = Layout(mesh.grid, None)
        return shard, relayout(local_shard(bias)[order], one, self.plan.bias, mesh, f"{self.name}.bias")

    @property
    def features_dim(self) -> int:
        """Return the dim of the weight that holds the projection's own features."""
        return 1 if self.is_conv else 0

    @property
    def parts(self) -> int:
        """Return the number of parts into which the result is split where its weight is one."""
        return self.plan.out.num_splits(1) // self.plan.b.num_splits(self.features_dim)


def order_as(given: Layout, wanted: Layout, size: int) -> Tensor:
    """Features in such an order that a rank's part of them as `given` is, in the dense order, its part as `wanted`.

    Both split them over the same axes, of which one is major in the first and another in the second.
    """
    grid, axes = given.grid, wanted.dims[1]
    parts = torch.arange(size, device="cpu").view(*[grid[axis] for axis in axes], -1)
    return parts.permute(*[axes.index(axis) for axis in given.dims[1]], len(axes)).flatten()


def products(members: Sequence[Projection], x: Hidden) -> list[Tensor]:
    """Return [rows, features / y] of each projection, by one product."""
    rows, first = leave(x), members[0]
    settled = settled_product(members, rows)
    if settled is not None:
        return settled(rows)  # type: ignore[no-any-return]
    if len(members) == 1:
        weight, bias = first.weight_and_bias(rows)
        return [chain(rows, (weight,), (bias,), (first.plan,), (None,), first.mesh, (first,))]
    dim, parts, used = first.features_dim, first.parts, Used()
    both = [member.weight_and_bias(rows) for member in members]
    weights = [local_shard(weight) for weight, _ in both]
    bias = None
    if any(b is not None for _, b in both):
        biases = [w.new_zeros(w.shape[dim]) if b is None else local_shard(b)
                  for w, (_, b) in zip(weights, both, strict=True)]  # fmt: skip
        bias = side_by_side([b for _, b in both], biases, parts, 0, used)
    weight = side_by_side([w for w, _ in both], weights, parts, dim, used)
    y = chain(rows, (weight,), (bias,), (first.plan,), (None,), first.mesh)
    return list(parts_of(y, [w.shape[dim] // parts for w in weights], used))


def place_projection(
    module: nn.Module,
    name: str,
    frame: Frame,
    layouts: BlockLayouts,
    *,
    leads_in: bool,
    width: int,
    sections: Sequence[int] = (),
    order: Tensor | None = None,
    pad_to: int = 1,
    gives_hidden: bool = False,
    regather: tuple[str, ...] = (),
    chunks: int | str = 0,
    kind: type[Projection] | None = None,
) -> Projection:
    """Put a Linear or Conv1D on the grid.

    Args:
        width: of hidden states, with padding.
        sections: sizes of parts of its features, each of which is split by itself.
        order: of its features, where the product wants another than the dense one and that of sections.
        pad_to: what is inside of a block is padded to a multiple of this.
        gives_hidden: one that leads in gives hidden states again.
        regather, chunks: as for `ndtp.nn.Linear`.
        kind: the class that the layer becomes one of.
    """
    is_conv = not isinstance(module, nn.Linear)
    theirs: Any = module.weight
    inside = theirs.shape[1] if is_conv == leads_in else theirs.shape[0]
    inner = -(-inside // pad_to) * pad_to
    a, b, out = (layouts.input, layouts.up_weight, layouts.hidden) if leads_in else (
        layouts.hidden, layouts.down_weight, layouts.output
    )  # fmt: skip
    stored, gives = b, out
    order = order_of(sections, out.num_splits(1)) if order is None else order
    if gives_hidden and leads_in:
        gives = layouts.output
        if _is_product(a, b, gives):
            out = gives
        else:
            order = order_as(out, gives, inner)
    if order is not None:
        b, stored = used_and_stored(a, b, frame.mesh.mesh_axes)
    if is_conv:
        b, stored = Layout(b.grid, *reversed(b.dims)), Layout(b.grid, *reversed(stored.dims))
    plan = _plan(a, b, out, not is_conv, regather, chunks, name)
    shape = (inner, width) if leads_in != is_conv else (width, inner)
    layer: Projection = adopt(module, kind or Projection, frame, name)
    layer.plan, layer.stored, layer.leads_in, layer.is_conv = plan, stored, leads_in, is_conv
    layer.width, layer.out_width = (width, inner) if leads_in else (inner, width)
    layer.sections, layer.group, layer.core, layer.loud = tuple(sections), None, None, True
    layer.order, layer.gives, layer.leads_into = order, gives, None
    layer.is_last = leads_in and not gives_hidden
    layer.adapts, layer.gives_features, layer.schedule = None, False, None
    plan.check_divides({"m": 0, "k": layer.width, "n": layer.out_width})
    layer.placed("weight", stored, shape)
    bias = plan.bias if order is None else Layout(b.grid, None)
    layer.placed("bias", bias, (layer.out_width,), (layer.real_out,))
    return layer


@lru_cache(maxsize=256)
def _known_plan(
    a: Layout, b: Layout, out: Layout, transpose_b: bool, regather: tuple[str, ...], chunks: int | str
) -> MatMulPlan:
    """The plan of all projections that lie alike: what follows from their layouts is derived once."""
    plan = MatMulPlan(a, b, out, transpose_b=transpose_b, regather=regather, chunks=chunks)
    str(plan)
    return plan


def _is_product(a: Layout, b: Layout, out: Layout) -> bool:
    """Return whether a product of `a` and a weight [out, in] as `b` can give a result that lies as `out`."""
    try:
        MatMulPlan(a, b, out, transpose_b=True)
    except LayoutError:
        return False
    return True


def used_and_stored(a: Layout, b: Layout, mesh_axes: Sequence[str]) -> tuple[Layout, Layout]:
    """Return how a product of `a` uses a weight [out, in] that lies as `b` but for its order, and how it is stored."""
    in_order = [axis for axis in mesh_axes if axis in b.axes and axis not in a.dims[1]]
    used = Layout(b.grid, b.dims[0], tuple(axis for axis in b.dims[1] if axis in a.dims[1]))
    return used, Layout(b.grid, None, (*a.dims[1], *in_order))


def in_group(members: Sequence[Projection]) -> None:
    """Let projections of one input be one product."""
    group = SharedInput(members)
    for member in members:
        member.group = group


def _plan(
    a: Layout, b: Layout, out: Layout, transpose_b: bool, regather: tuple[str, ...], chunks: int | str, name: str
) -> MatMulPlan:
    """Return the plan of a product, whose errors name the layer."""
    try:
        return _known_plan(a, b, out, transpose_b, regather, chunks).named(name)
    except LayoutError:
        return MatMulPlan(a, b, out, transpose_b=transpose_b, regather=regather, chunks=chunks, name=name)
