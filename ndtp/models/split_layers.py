"""Layers of any model on a grid: the same objects, which take and give split tensors, wherever they stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.compute.traces import is_autocast_on, refuse_traces
from ndtp.errors import LayoutError
from ndtp.models.adopted import Adopted
from ndtp.models.code_reads import note_read
from ndtp.models.projections import Projection, products
from ndtp.models.signatures import OF_TORCH, as_dense_input, input_by_name
from ndtp.models.table_settings import refused_setting
from ndtp.ops.lookup import LookupPlan, look_up
from ndtp.ops.moving import taken
from ndtp.runtime.eagerly import as_it_is
from ndtp.runtime.memories import stands_for
from ndtp.runtime.waiting_calls import settle_calls_of
from ndtp.split.elementwise import without_padding
from ndtp.split.moving import brought, moved
from ndtp.split.spec import Axes, Context, Spec, layout_of
from ndtp.split.tensor import SplitTensor, enter


@dataclass(frozen=True)
class Rows:
    """The way in which the leading dims of a layer's input become its rows.

    Attributes:
        spec: of the input as the layer takes it.
        dim: which of the leading dims the rows' axes split; it comes first in the rows.
        is_vector: whether the input had no leading dim.
    """

    spec: Spec
    dim: int
    is_vector: bool = False


def row_dim(x: Tensor, rows: Axes, context: Context) -> int:
    """Return the leading dim that the axes of rows split: one already split, one that they divide, or the longest."""
    lead = tuple(x.shape[:-1])
    if isinstance(x, SplitTensor):
        for dim, axes in enumerate(x.spec.dims[:-1]):
            if set(axes) & set(rows):
                return dim
    taken = {dim for dim, axes in enumerate(x.spec.dims[:-1]) if axes} if isinstance(x, SplitTensor) else set()
    free = [dim for dim in range(len(lead)) if dim not in taken]
    fitting = [dim for dim in free if lead[dim] > 1 and lead[dim] % context.multiple == 0]
    if fitting:
        return fitting[0]
    return max(free or range(len(lead)), key=lambda dim: (lead[dim], -dim))


def as_rows(
    x: Tensor, rows: Axes, features: Axes, width: int, context: Context, name: str, is_cut: bool
) -> tuple[Tensor, Rows]:  # fmt: skip
    """The shard [rows, features] of an activation, as a product takes it; padding is zero.

    Args:
        is_cut: whether rows are split in front of the product or behind it.
    """
    is_vector = x.dim() == 1
    x = x.unsqueeze(0) if is_vector else x
    count = x.dim()
    dim = row_dim(x, rows, context)
    size = x.shape[dim]
    held = x.spec.padded[dim] if isinstance(x, SplitTensor) and x.spec.dims[dim] else size
    padded, dims = list(x.shape), [*[()] * (count - 1), features]
    dims[dim] = rows
    wanted = -(-held // context.multiple) * context.multiple if is_cut else held
    if rows:
        padded[dim] = wanted
    if features:
        padded[-1] = width
    shard = brought(x, context, dims, padded, ())
    spec = Spec(context, tuple(x.shape), layout_of(context.mesh, dims), tuple(padded), (), name)
    if spec.is_padded:
        shard = without_padding(shard, spec, spec.split_dims)
    if not rows and wanted != size:  # what the product gives is split by rows
        shard = torch.nn.functional.pad(shard, [0, 0] * (count - 1 - dim) + [0, wanted - size])
        spec = replace(spec, padded=(*padded[:dim], wanted, *padded[dim + 1 :]))
    if not features and shard.shape[-1] != width:
        shard = torch.nn.functional.pad(shard, (0, width - shard.shape[-1]))
    if dim:
        shard = shard.movedim(dim, 0)
    return shard.reshape(-1, shard.shape[-1]), Rows(spec, dim, is_vector)


def from_rows(
    y: Tensor, given: Rows, rows: Axes, features: Axes, size: int, sections: tuple[int, ...], name: str
) -> Tensor:
    """The activation of which a product gave the shard [rows, features]."""
    spec, dim = given.spec, given.dim
    lead = list(spec.sizes[:-1])
    padded = list(spec.padded[:-1])
    if not rows:
        padded[dim] = lead[dim]
    splits = spec.mesh.grid.size(rows)
    local = [padded[dim] // splits, *(n for d, n in enumerate(padded) if d != dim)]
    if not rows and spec.padded[dim] != lead[dim]:
        local[0] = spec.padded[dim]
    wide = y.shape[-1] * spec.mesh.grid.size(features)
    y = y.view(*local, y.shape[-1])
    if dim:
        y = y.movedim(0, dim)
    if not rows and y.shape[dim] != lead[dim]:
        y = y.narrow(dim, 0, lead[dim])
    if not features and wide != size:
        y = y[..., :size]
        wide = size
    dims = [rows if d == dim else () for d in range(len(lead))] + [features]
    made = Spec(
        spec.context, (*lead, size), layout_of(spec.mesh, dims), (*padded, wide), sections if features else (), name
    )
    out: Tensor = enter(y.view_as(y), made)
    return out.squeeze(0) if given.is_vector else out


class ReadAsSplit(Adopted):
    """A layer whose parameters other code may read: it finds split tensors, which lie as the parameters do."""

    context: Context

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        running = self.frame.running if name in self.__dict__["_parameters"] and name in self.lies else ()
        if not running or running[-1] is None or value is None:
            return value
        lies = self.lies[name]
        settle_calls_of(value)
        reads, _ = note_read(running, value, f"'{self.name}.{name}'")
        plan = RelayoutPlan(lies.layout, lies.layout, (), self.context.data, f"{self.name}.{name}", "weights")
        layout = layout_of(self.mesh, [self.mesh.grid.nontrivial(axes) for axes in lies.layout.dims])
        shard, own = taken(value, plan, self.mesh), f"{self.name}.{name}"
        padded = tuple(n if axes else m for n, m, axes in zip(lies.shape, lies.real, layout.dims, strict=True))
        here = shard[
            tuple(slice(n) if not axes else slice(None) for n, axes in zip(lies.real, layout.dims, strict=True))
        ]
        made = enter(here.view_as(here), Spec(self.context, tuple(lies.real), layout, padded, (), own))
        if isinstance(value, nn.Parameter):
            stands_for(made, value)
            reads.carry_attributes(value, made)
        return made

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A context in which the layer itself reads its parameters."""
        self.frame.running.append(None)
        try:
            yield
        finally:
            self.frame.running.pop()


class ObservedLinear(ReadAsSplit, Projection):
    """A Linear or Conv1D that takes and gives split tensors with any leading dims.

    Attributes:
        context: of the model.
        turns: whether what it gives is to lie as what it takes, since the model adds one to the other.
        own_forward: of a class of the model's own, which may take inputs of another dtype than the weight's.
        is_own_under_autocast: whether that gives something else there than a Linear does.
        is_twice: whether the model's own code differentiates its gradients again.
        has_own_weight: whether code finds the layer's weight as that of a Linear.
    """

    context: Context
    turns: bool
    group: Any
    own_forward: Any = None
    is_own_under_autocast = False
    is_twice = False
    has_own_weight = True

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        theirs = next((kind for kind in cls.__mro__ if "forward" in vars(kind) and not issubclass(kind, Adopted)), None)
        if theirs is not None and issubclass(cls, nn.Linear) and theirs is not nn.Linear:
            cls.own_forward = vars(theirs)["forward"]

    def forward(self, x: Any = None, **named: Any) -> Tensor:
        if named:
            x = input_by_name(self, x, named)
        if type(x) in OF_TORCH:
            x = as_dense_input(x, self.name)
        if x.dim() < 1 or x.shape[-1] != self.real_in:
            raise LayoutError(f"'{self.name}' takes {self.real_in} features, its input is of {tuple(x.shape)}")
        refuse_traces(f"'{self.name}'", exports=False)
        if self.own_forward is not None and self._is_of_another_dtype(x):
            return self.own_forward(x)  # type: ignore[no-any-return]
        running = self.frame.running
        is_twice = self.is_twice or (bool(running) and running[0] is not None and running[0].wants_inputs)
        if is_twice and running and running[-1] is not None and self.has_own_weight:  # where code reads the weight
            return self._by_rule(x)
        if self.schedule is not None and (made := self.schedule.called(self, x)) is not None:
            return made
        with self.at_work():
            y, rows = self.group.result(self, x) if self.group is not None else self.product([self], x)[0]
        return self.given(y, rows)

    def _by_rule(self, x: Tensor) -> Tensor:
        """Multiply by the rule for activations, whose gradients can be differentiated any number of times."""
        if not self.is_conv:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        y = x @ self.weight
        return y if self.bias is None else y + self.bias

    def _is_of_another_dtype(self, x: Tensor) -> bool:
        weight = self._parameters.get("weight")
        is_other = weight is not None and x.dtype != weight.dtype
        if is_autocast_on(x.device.type):  # which leaves fp64 alone
            return self.is_own_under_autocast or (is_other and x.dtype is torch.float64)
        return is_other

    def given(self, y: Tensor, rows: Rows) -> Tensor:
        """Return the result as the model's code gets it, for an input whose leading dims became `rows`."""
        result = from_rows(
            y,
            rows,
            self.rows_out,
            self.mesh.grid.nontrivial(self.gives.dims[1]),
            self.real_out,
            self.sections,
            self.name,
        )
        return self.as_input(result) if self.turns else result

    def product(self, members: Sequence[Any], x: Tensor) -> list[tuple[Tensor, Rows]]:
        rows, features = self.axes_in
        shard, lies = as_rows(x, rows, features, self.width, self.context, self.name, bool(rows or self.rows_out))
        return [(y, lies) for y in products(members, shard)]  # type: ignore[arg-type]

    @property
    def axes_in(self) -> tuple[Axes, Axes]:
        grid, a = self.mesh.grid, self.plan.a
        return tuple(x for x in grid.nontrivial(a.dims[0]) if x not in self.context.data), grid.nontrivial(a.dims[1])

    @property
    def rows_out(self) -> Axes:
        grid, data = self.mesh.grid, self.context.data
        return tuple(axis for axis in grid.nontrivial(self.plan.out.dims[0]) if axis not in data)

    def as_input(self, y: Tensor) -> Tensor:
        """Return a result brought to lie as the input of this layer."""
        rows, features = self.axes_in
        if not isinstance(y, SplitTensor):
            return y
        dim = next((d for d, axes in enumerate(y.spec.dims[:-1]) if axes), 0)
        return moved(y, [rows if d == dim else features if d == y.dim() - 1 else () for d in range(y.dim())])


class ObservedEmbedding(ReadAsSplit, nn.Embedding):
    """A table whose rows come as split tensors.

    Attributes:
        lookup: the plan of ids whose rows are split; `for_all` of ids that are the same for all samples.
        width: the features with padding.
    """

    context: Context
    lookup: LookupPlan
    for_all: LookupPlan
    width: int

    def forward(self, ids: Any = None, **named: Any) -> Tensor:  # type: ignore[override]
        if named:
            ids = input_by_name(self, ids, named)
        if self.max_norm or self.scale_grad_by_freq or self.sparse:
            raise refused_setting(self)
        refuse_traces(f"'{self.name}'", exports=False)
        with self.at_work():
            return self.found(ids.gathered() if isinstance(ids, SplitTensor) else ids)

    def found(self, ids: Tensor) -> Tensor:
        """The rows of ids that every rank has."""
        context, mesh = self.context, self.mesh
        lead = tuple(ids.shape)
        grid = mesh.grid
        count = grid.size(self.lookup.out.dims[0]) // grid.size(context.data)
        is_split = count > 1 and len(lead) > 0 and max(lead) >= count and (len(lead) > 1 or not self.is_position(ids))
        plan = self.lookup if is_split else self.for_all
        rows = tuple(a for a in grid.nontrivial(plan.out.dims[0]) if a not in context.data)
        features = grid.nontrivial(plan.out.dims[1])
        weight = self.needed("weight", None)
        dim = row_dim(ids.unsqueeze(-1), rows, context) if rows and lead else 0
        padded = list(lead)
        flat = ids.reshape(1) if not lead else ids
        if rows:
            padded[dim] = -(-lead[dim] // context.multiple) * context.multiple
            grow = [0, 0] * (len(lead) - 1 - dim) + [0, padded[dim] - lead[dim]]
            flat = torch.nn.functional.pad(flat, grow) if any(grow) else flat
            flat = flat.movedim(dim, 0)
        y = look_up(flat.reshape(-1), weight, plan, mesh, self.num_embeddings, self.padding_idx)  # type: ignore[arg-type]
        dims = [*(rows if d == dim else () for d in range(len(lead))), features]
        wide = self.width if features else self.embedding_dim
        sizes = (*lead, self.embedding_dim)
        spec = Spec(context, sizes, layout_of(mesh, dims), (*padded, wide), (), self.name)
        others = [n for d, n in enumerate(padded) if d != dim]
        y = y.view(*([padded[dim] // grid.size(rows), *others] if lead else []), y.shape[-1])
        y = y.movedim(0, dim) if rows and dim else y
        if not features and y.shape[-1] != self.embedding_dim:
            y = y[..., : self.embedding_dim]
        return enter(y.view_as(y), spec)

    def is_position(self, ids: Tensor) -> bool:
        """Return whether ids of one dim are the places of a sequence, whose rows go with every sample."""
        return ids.dim() == 1


for _layer in (ObservedLinear, ObservedEmbedding):
    as_it_is(_layer.forward)


@dataclass(frozen=True)
class AsStored:
    """A parameter of a module that is no layer known here: its code reads a split tensor, which lies as it is stored.

    It has the form of `ndtp.models.replicated.PartOfParameter`.
    """

    context: Context
    stored: Layout
    used: Layout
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    name: str

    def of(self, x: Tensor) -> Tensor:
        return enter(x.view_as(x), Spec(self.context, self.sizes, self.used, self.shape, (), self.name))
