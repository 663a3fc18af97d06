"""Few rows without gradients are whole on every rank: what decoding does, one token of each sequence a step.

Weights stay where they lie, whatever axes split them.  Hidden states are plain tensors, the same on every rank: each
multiplies its part of their features by its shard of the weight, and one all-reduce makes the result whole.

    C[M, N] = AR( A[M, K_in] . B[N_out, K_in], at its place in zeros [M, N] )

Where the layer behind it wants its features split over the first axes that split this one's, as in an MLP and in an
attention, those axes are not summed over: C[M, N_t].  Norms and residuals are those of one rank.

Source: the weight-stationary layouts of Pope et al. 2022, "Efficiently scaling transformer inference".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.algebra.stationary import WHOLE_ROWS, Axes, in_common, summed_axes
from ndtp.algebra.steps import Step
from ndtp.compute.constants import constant_on, is_captured, zeros_on
from ndtp.models.frame import Frame, Passage, led_to
from ndtp.models.hidden import Hidden, enter, leave
from ndtp.models.settled import MOST_SETTLED, Settled, Settlements, settle
from ndtp.models.shared_input import SharedInput
from ndtp.nn.padding import zero_padding
from ndtp.nn.sharded import Lies
from ndtp.ops.few_rows import is_inference
from ndtp.ops.moving import way_of
from ndtp.runtime.grid_like import GridLike

if TYPE_CHECKING:
    from ndtp.runtime.moves import Way


class StationaryLayer(Protocol):
    """A projection of a stock model, see `ndtp.models.projections`."""

    name: str
    frame: Frame
    mesh: Any
    plan: MatMulPlan
    stored: Layout
    order: Tensor | None
    group: SharedInput | None
    leads_into: Layout | None
    is_last: bool
    core: Any
    loud: bool
    training: bool
    width: int
    out_width: int
    lies: dict[str, Lies]
    settled: Settlements
    _parameters: dict[str, Any]

    @property
    def real_in(self) -> int:
        """Return the features that it takes, without padding."""

    @property
    def real_out(self) -> int:
        """Return those that it gives."""

    @property
    def features_dim(self) -> int:
        """Return the dim of the weight that holds them."""

    def held(self, name: str) -> Tensor | None:
        """Return a parameter, or what was computed in its place."""

    def checked(self, name: str, value: Tensor | None, x: Tensor | None) -> Tensor | None:
        """Return what `held` gave, which is to be used with x."""


def are_few(x: Tensor, layer: Any) -> bool:
    """Return whether the rows of a plain tensor [.., features] are to stay whole in a layer.

    It is decided by what is the same on all ranks that share rows.
    """
    if x.__class__ is not Tensor or x.dim() < 2 or layer.training or x.is_meta:
        return False
    if not 0 < x.numel() <= WHOLE_ROWS * x.shape[-1]:
        return False
    frame: Frame = layer.frame
    return frame.decodes() or (not (frame.always_cuts or frame.draws) and is_inference(x, frame.mesh))


def takes_whole(layer: StationaryLayer, x: Tensor) -> bool:
    """Return whether a layer of no attention multiplies rows that are whole, and few."""
    if x.__class__ is Hidden:
        passage: Passage = x.passage  # type: ignore[attr-defined]
        known = vars(layer).get("ndtp_takes_whole")
        if known is None or known[0] is not passage:
            known = vars(layer)["ndtp_takes_whole"] = (passage, _fits(layer, passage))
        frame = layer.frame
        if (
            not known[1]
            or layer.training
            or not (frame.decodes() or (not frame.draws and is_inference(leave(x), frame.mesh)))
        ):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            dtype = x.dtype
    elif are_few(x, layer) and x.shape[-1] == layer.real_in:
        frame, dtype = layer.frame, x.dtype
    else:
        return False
    weight = layer._parameters.get("weight")
    if layer.core is not None or (weight is not None and weight.dtype is not dtype):
        return False
    if layer is frame.head and (frame.has_labels or x.shape[-2:-1] != (1,)):
        return False  # logits of a prompt stay split, as the loss takes them
    # The loss of what stays split is that of all ranks' rows.
    return not layer.is_last or frame.generates or frame.outside.num_splits(0) == 1


def _fits(layer: StationaryLayer, passage: Passage) -> bool:
    """Return whether activations have whole, few rows, and such features as the layer's weight begins with."""
    frame, grid = passage.frame, passage.layout.grid
    rows, axes = (grid.nontrivial(dims) for dims in passage.layout.dims)
    return (
        rows == grid.nontrivial(frame.outside.dims[0])
        and axes == _in_axes(layer)[: len(axes)]
        and (passage.sections, passage.across, passage.width) == (1, 0, layer.width)
        and 0 < passage.rows == math.prod(passage.lead) <= (0 if frame.always_cuts else WHOLE_ROWS)
    )


def _in_axes(layer: StationaryLayer) -> Axes:
    return layer.mesh.grid.nontrivial(layer.stored.dims[1 - layer.features_dim])


def _out_axes(layer: StationaryLayer) -> Axes:
    return layer.mesh.grid.nontrivial(layer.stored.dims[layer.features_dim])


def result_axes(layer: StationaryLayer) -> Axes:
    """Return the axes that split the features of a result with whole rows: the first ones that split the layer's own,
    as far as what it leads into has its features split over them.
    """
    into = layer.leads_into
    if layer.order is not None or into is None:
        return ()
    known = vars(layer).get("ndtp_result_axes")
    if known is None or known[0] is not into:
        axes = in_common(_out_axes(layer), layer.mesh.grid.nontrivial(into.dims[1]))
        known = vars(layer)["ndtp_result_axes"] = into, axes
    return known[1]  # type: ignore[no-any-return]


def with_rows(frame: Frame, axes: Axes) -> Layout:
    """Return the layout of activations with whole rows, and features that these axes split."""
    return Layout(frame.mesh.grid, frame.outside.dims[0], axes)


def passage_of(frame: Frame, x: Tensor) -> Passage:
    """Return how an activation lies; one with whole rows has the padding that ranks which split them would have."""
    if x.__class__ is Hidden:
        return x.passage  # type: ignore[attr-defined, no-any-return]
    key = x.shape
    found = frame.whole.get(key)
    if found is None:
        if len(frame.whole) >= MOST_SETTLED:
            frame.whole.clear()
        lead, features = tuple(key[:-1]), key[-1]
        rows, across = frame.rows_of(lead)
        found = Passage(frame, frame.outside, lead, rows, features, features, across=across)
        frame.whole[key] = found
    return found


def whole_products(members: Sequence[StationaryLayer], x: Tensor) -> Sequence[Tensor]:
    """Return [rows, features] of layers of one input with whole rows, as `result_axes` splits the features."""
    if x.__class__ is not Hidden:
        return product_of_rows(members, x.reshape(-1, x.shape[-1]), ())
    passage: Passage = x.passage  # type: ignore[attr-defined]
    rows, layout = leave(x), passage.layout
    if passage.width != passage.features:
        rows = zero_padding(rows, layout, members[0].mesh, passage.features)
    known = passage.__dict__.get("_feature_axes")
    if known is None:
        known = passage.__dict__["_feature_axes"] = layout.grid.nontrivial(layout.dims[1])
    return product_of_rows(members, rows, known)


def product_of_rows(members: Sequence[StationaryLayer], rows: Tensor, axes: Axes) -> Sequence[Tensor]:
    """Return [rows, features] of layers, of rows [rows, features] whose features `axes` split."""
    first = members[0]
    key = ("whole", axes, rows.shape, rows.dtype, first.mesh.collectives, *members)
    return (first.settled.found(key) or _settle(members, rows, axes, key))(rows)  # type: ignore[no-any-return]


def is_alone(layer: StationaryLayer) -> bool:
    """Return whether nothing is sent for a layer's result with whole rows, so that no other one shares it."""
    known = vars(layer).get("ndtp_is_alone")
    if known is None:
        known = not summed_axes(layer.mesh.grid, _out_axes(layer), result_axes(layer), _in_axes(layer))
        vars(layer)["ndtp_is_alone"] = known
    return known  # type: ignore[no-any-return]


def whole_result(layer: StationaryLayer, x: Tensor) -> Tensor:
    """Return a layer's result with whole rows as the model's code gets it: a plain tensor, where its features are
    whole.
    """
    group = layer.group
    if group is None or is_alone(layer):
        (y,) = whole_products((layer,), x)
    else:
        y = group.result(layer, x, whole_products)  # type: ignore[arg-type]
    if not result_axes(layer):
        return _as_plain(y, layer, x.passage.lead if x.__class__ is Hidden else x.shape[:-1])  # type: ignore
    given = passage_of(layer.frame, x)
    return enter(y, led_to(layer, given, lambda given: _led_to(layer, given)))


def _as_plain(y: Tensor, layer: StationaryLayer, lead: Sequence[int]) -> Tensor:
    width = layer.real_out
    return (y if y.shape[1] == width else y[:, :width]).reshape(*lead, width)


def _led_to(layer: StationaryLayer, given: Passage) -> Passage:
    return replace(
        given, layout=with_rows(layer.frame, result_axes(layer)), rows=math.prod(given.lead), across=0,
        features=layer.real_out, width=layer.out_width, sections=1, came_from=layer.name, loud=layer.loud,
    )  # fmt: skip


def rows_of_rank(y: Tensor, layer: StationaryLayer, passage: Passage, inner: Layout) -> Tensor:
    """Return what a rank has of a projection's result with whole rows: its sequences, and the features of its heads.

    Args:
        passage: of the projection's input.
        inner: the layout of [rows, features] between an attention's projections.
    """
    known = vars(layer).get("ndtp_rows_of_rank")
    if known is None or known[0] is not passage:
        known = vars(layer)["ndtp_rows_of_rank"] = (passage, bound_rows(layer, passage, inner))
    return known[1](y)  # type: ignore[no-any-return]


def bound_rows(layer: StationaryLayer, passage: Passage, inner: Layout) -> Callable[[Tensor], Tensor]:
    """Return `rows_of_rank` of this passage, as a function of y alone."""
    grid, rank, axes = inner.grid, layer.mesh.rank, inner.grid.nontrivial(inner.dims[1])
    order, here = layer.order, replace(passage, layout=inner).rows_here
    rest = axes if order is not None else axes[len(result_axes(layer)) :]
    count, index = grid.size(rest), grid.index(rank, rest)
    is_laid = passage.rows != math.prod(passage.lead) or passage.across > 1
    is_part = len(here) < passage.rows

    def taken(y: Tensor) -> Tensor:
        if count > 1 or order is not None:
            columns = _block(y.shape[1] if order is None else len(order), count, index)
            if order is not None:
                y = y.index_select(1, constant_on(order, y.device)[columns.start : columns.stop])
            else:
                y = y[:, columns.start : columns.stop]
        y = passage.laid(y) if is_laid else y
        return (y[here.start : here.stop] if is_part else y).contiguous()

    return taken


def led_back(rows: Tensor, layer: StationaryLayer, given: Passage, inner: Layout) -> Tensor:
    """Return hidden states with whole rows, of what the ranks made of their heads.

    Args:
        rows: a rank's [rows, features], as `inner` lays them out.
        layer: the projection that leads back.
        given: how the attention's input lies.
    """
    rows, axes = with_all_rows(rows, layer, given, inner)
    return _as_plain(product_of_rows([layer], rows, axes)[0], layer, given.lead)


def with_all_rows(rows: Tensor, layer: StationaryLayer, given: Passage, inner: Layout) -> tuple[Tensor, Axes]:
    """Return a rank's rows with those of the others, and the axes that split their features; as `led_back`."""
    known = vars(layer).get("ndtp_with_all_rows")
    if known is None or known[0] is not inner:
        axes = in_common(inner.grid.nontrivial(inner.dims[1]), _in_axes(layer))
        plan = RelayoutPlan(inner, with_rows(layer.frame, axes), name=f"{layer.name} rows")
        known = vars(layer)["ndtp_with_all_rows"] = (inner, axes, plan)
    _, axes, plan = known
    if plan.steps:
        key = "rows", rows.shape, rows.dtype, layer.mesh.collectives
        carried = layer.settled.found(key)
        if carried is None:
            way = way_of(rows, plan.steps, layer.mesh, plan.name, "forward")
            carried = layer.settled.add(key, Settled((), lambda rows, _: way.carried(rows)))
        rows = carried(rows)
    return given.in_order(rows) if given.across > 1 or len(rows) > math.prod(given.lead) else rows, axes


def _settle(members: Sequence[StationaryLayer], rows: Tensor, axes: Axes, key: Hashable) -> Settled:
    first = members[0]
    layers = [(member.checked("weight", member.held("weight"), rows), member.held("bias")) for member in members]
    return settle(members, layers, key, WholeProduct(members, axes, rows.shape[1], first.mesh))


class WholeProduct:
    """A product of few whole rows by layers of one input, of one shape; see the module.

    Args:
        given: the axes that split the features of the input, with which those of the weights begin.
        features: of the input that this rank has.
    """

    def __init__(self, members: Sequence[StationaryLayer], given: Axes, features: int, mesh: GridLike) -> None:
        first, grid, self._mesh = members[0], mesh.grid, mesh
        here = lambda axes, size: _block(size, grid.size(axes), grid.index(mesh.rank, axes))  # noqa: E731
        into, out, self._name = result_axes(first), _out_axes(first), first.name
        own, seen = here(_in_axes(first), first.width), here(given, first.width)
        start, stop = own.start - seen.start, own.stop - seen.start
        self._padding = max(stop - features, 0)  # which no rank has of a whole activation
        self._columns = None if stop - start == features + self._padding else slice(start, stop)
        self._sums = summed_axes(grid, out, into, _in_axes(first))
        self._way: Way | None = None
        self._multiply = mesh.gemm.bound_product(False, first.plan.transpose_b, 2)
        self._widths, self._places, self._biases = [], [], []
        start = 0
        for member in members:
            wanted, made = here(into, member.out_width), here(out, member.out_width)
            axes = grid.nontrivial(member.lies["bias"].layout.dims[0]) if "bias" in member.lies else ()
            bias = here(axes, member.out_width)
            is_mine = all(grid.index(mesh.rank, (axis,)) == 0 for axis in self._sums if axis not in axes)
            at = range(max(bias.start, wanted.start), min(bias.stop, wanted.stop))
            moved = start - wanted.start
            self._widths.append(len(wanted))
            self._places.append(slice(made.start + moved, made.stop + moved))
            self._biases.append(
                (slice(at.start + moved, at.stop + moved), slice(at.start - bias.start, at.stop - bias.start))
                if is_mine and len(at) else None
            )  # fmt: skip
            start += len(wanted)
        self._is_filled = all(
            len(range(start)[place]) == n for place, n in zip(self._places, self._widths, strict=True)
        )
        # Columns without a product: before the first one, between each two of them, behind the last one.
        ends, begins = [0, *(place.stop for place in self._places)], [place.start for place in self._places]
        self._gaps = [begin - end for end, begin in zip(ends, [*begins, start], strict=True)]
        self._zeros: list[Tensor | None] | None = None
        self._is_one = len(members) == 1

    def __call__(self, rows: Tensor, shards: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the result of each layer, [rows, features].

        Args:
            shards: this rank's shard of each layer's weight and bias, as they are stored.
        """
        if self._padding:
            rows = F.pad(rows, (0, self._padding))
        if self._columns is not None:
            rows = rows[:, self._columns].contiguous()
        multiply, weights = self._multiply, shards[::2]
        if self._is_one:
            y = multiply(rows, shards[0])
            y = y if self._is_filled else self._in_zeros((y,))
        else:
            made = [multiply(rows, weight) for weight in weights]
            y = torch.cat(made, 1) if self._is_filled else self._in_zeros(made)
        for bias, place in zip(shards[1::2], self._biases, strict=True):
            if bias is not None and place is not None:
                y[:, place[0]] += bias[place[1]]
        if self._sums:
            if self._way is None:
                self._way = way_of(y, (Step("all_reduce", self._sums),), self._mesh, self._name, "forward")
            y = self._way.carried(y, is_own=True)
        return (y,) if self._is_one else [part.contiguous() for part in torch.split_with_sizes(y, self._widths, 1)]

    def _in_zeros(self, made: Sequence[Tensor]) -> Tensor:
        """Return the products side by side, each at its place in zeros."""
        like, zeros = made[0], self._zeros
        is_in_graph = like.is_cuda and is_captured(like.device)  # a graph may outlive this layer
        if zeros is None or is_in_graph:
            shapes = [(like.shape[0], gap) for gap in self._gaps]
            zeros = [zeros_on(shape, like.device, like.dtype) if shape[1] else None for shape in shapes]
            if not is_in_graph:
                self._zeros = zeros
        parts = [x for pair in zip(zeros, (*made, None), strict=True) for x in pair if x is not None]
        return torch.cat(parts, 1)


def _block(size: int, count: int, index: int) -> range:
    return range(size // count * index, size // count * (index + 1))
