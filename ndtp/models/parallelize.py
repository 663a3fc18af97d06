"""`parallelize`: swap the Linear pairs of a user's model for tensor-parallel ones, in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import BlockLayouts, block_layouts
from ndtp.algebra.steps import relayout as relayout_steps
from ndtp.algebra.volume import Volume, traffic
from ndtp.errors import LayoutError
from ndtp.models.auto import best_grid, best_layouts, request_for
from ndtp.models.between import Between, Passage, enter, leave
from ndtp.models.linear_pairs import Pair, find_pairs, pairs_by_name, refuse_unfit
from ndtp.nn.linear import Linear
from ndtp.nn.padding import (
    RowBlocks,
    pad_rows,
    pair_multiples,
    row_multiple,
    with_leading_dims,
    zero_padding,
    zero_padding_rows,
)
from ndtp.ops.products import relayout
from ndtp.planner.grid_plan import GridPlan
from ndtp.planner.hardware import Hardware
from ndtp.runtime.process_grid import ProcessGrid


@dataclass
class Report:
    """What `parallelize` did: `replaced` names each layer with its product, `kept` each Linear left alone and why."""

    replaced: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    layers: list[BoundaryLinear] = field(default_factory=list, repr=False)
    mesh: ProcessGrid | None = field(default=None, repr=False)

    def volume(self, tokens: int) -> Volume:
        """The exact traffic of a training step over `tokens` rows, boundaries included, in elements per rank."""
        return sum((layer.volume(tokens) for layer in self.layers), Volume())

    def __str__(self) -> str:
        lines = [f"replaced {name}: {product}" for name, product in self.replaced.items()]
        return "\n".join(lines + [f"kept     {name}: {reason}" for name, reason in self.kept.items()])


@dataclass(frozen=True)
class Boundary:
    """Where a layer stands between the rest of a model and what `parallelize` made of a pair, or of one layer.

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

    def forward(self, x: Tensor) -> Tensor:
        if self.boundary.enters:
            x, passage = self._enter(x)
        else:
            x, passage = self._inside(x)
        y = super().forward(x)
        if not self.boundary.leaves:
            return enter(zero_padding_rows(y, self.out_layout, self.mesh, passage.rows), passage)
        y = relayout(y, self.out_layout, self.boundary.outside, self.mesh, f"{self.name} output")
        y = y[: math.prod(passage.lead), : self.out_features]
        return with_leading_dims(y, passage.lead, f"parallelize: '{self.name}'")

    def _enter(self, x: Tensor) -> tuple[Tensor, Passage]:
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
        x = relayout(x, outside, self.in_layout, self.mesh, f"{self.name} input")
        return x, Passage(self.name, self.out_layout, outside, self.mesh, self.out_features, lead, rows)

    def _inside(self, x: Tensor) -> tuple[Tensor, Passage]:
        """What the other layer of the pair gave, and what became of it."""
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
        """As `Linear.volume`, with the conversions at the boundary."""
        outside = self.boundary.outside
        tokens += -tokens % (self.boundary.row_multiple * outside.num_splits(0))
        total = super().volume(tokens, dgrad)
        moves = []
        if self.boundary.enters and dgrad:
            moves.append(("dgrad", self.in_layout, outside, self.padded_in))
        if self.boundary.leaves:
            moves.append(("forward", self.out_layout, outside, self.padded_out))
        for phase, source, target, features in moves:
            steps = relayout_steps(self.mesh.grid, source.dims, target.dims)
            total += Volume.of(traffic(self.mesh.grid, steps, source.shard_shape((tokens, features)), phase))
        return total


def parallelize(
    model: nn.Module,
    mesh: ProcessGrid | None = None,
    plan: Mapping[str, str | Sequence[Layout]] | GridPlan | None = None,
    *,
    scheme: str = "3d",
    axes: Sequence[str] | None = None,
    pad: bool = True,
    regather: tuple[str, ...] = (),
    chunks: int | str = 0,
    tokens: int | None = None,
    hardware: str | Hardware = "h100-ib",
) -> nn.Module:
    """Replace `Linear -> activation -> Linear` pairs of a model by tensor-parallel ones, in place, keeping the weights.

    So are gated ones, `down(act(gate(x)) * up(x))`.
    Pairs are found by tracing the `forward` of the modules that hold them; state-dict keys stay.  The rest of the model
    keeps working: activations are whole outside of a pair, but for rows that other axes of the grid (`dp`) split.  What
    was and was not replaced, and why, is in `model.ndtp_report`.

    Args:
        plan: names instead of a search, with wildcards: `{"encoder.*.fc1": "up", "encoder.*.fc2": "down"}`, or layouts
            of one layer: `{"head": (in_layout, weight_layout, out_layout)}`, the last of which may be left out.  Rows
            that axes split in both activations and that split no weight stay split outside.
            Or what `ndtp.plan` returns, which gives the scheme.
        mesh: may be left out with scheme="auto", which then takes the best grid of all ranks; it is in
            `model.ndtp_report.mesh`.
        scheme, axes: as for `ndtp.nn.MLP`; "auto" takes the layouts by which a step on `mesh` takes least.
        tokens, hardware: what "auto" plans for: rows of a step, and a preset or profile of `ndtp.planner.hardware`.
        pad: pad sizes that do not divide; without it they are an error.
        regather, chunks: as for `ndtp.nn.Linear`.

    Raises:
        LayoutError: names that match nothing or do not pair up, or sizes that do not divide.
    """
    report = Report()
    if isinstance(plan, GridPlan):
        scheme, regather, plan = plan.scheme, plan.regather, None
    if plan is None:
        pairs, report.kept = find_pairs(model)
    else:
        pairs = pairs_by_name(model, {name: value for name, value in plan.items() if isinstance(value, str)})
    if scheme == "auto":
        mesh, layouts = _automatic(model, pairs, mesh, tokens, hardware)
    elif mesh is None:
        raise LayoutError("parallelize: give a mesh; only scheme='auto' makes one")
    else:
        layouts = block_layouts(mesh.grid, scheme, axes)
    report.mesh = mesh
    options = {"regather": regather, "chunks": chunks}
    for pair in pairs:
        _replace_pair(model, pair, mesh, report, pad, layouts.plans(pair.up), options)
    for name, value in (plan or {}).items():
        if not isinstance(value, str):
            _replace_one(model, name, value, mesh, report, pad, options)
    linears = (name for name, module in model.named_modules() if type(module) is nn.Linear)
    for name in linears:
        report.kept.setdefault(name, "not named in the plan")
    model.ndtp_report = report  # type: ignore[assignment]
    return model


def _automatic(
    model: nn.Module, pairs: Sequence[Pair], mesh: ProcessGrid | None, tokens: int | None, hardware: str | Hardware
) -> tuple[ProcessGrid, BlockLayouts]:
    """The mesh and the layouts that the planner would take."""
    if tokens is None:
        raise LayoutError("parallelize: scheme='auto' plans for a number of rows; give tokens=, those of a step")
    ups = [model.get_submodule(pair.up) for pair in pairs]
    sizes = [(up.in_features, up.out_features, pair.gate is not None) for up, pair in zip(ups, pairs, strict=True)]
    dtype = str(ups[0].weight.dtype).removeprefix("torch.") if ups else "float32"
    ranks = mesh.grid.num_ranks if mesh else dist.get_world_size() if dist.is_initialized() else 1
    request = request_for(sizes, tokens, ranks, hardware, dtype)  # type: ignore[arg-type]
    mesh = mesh or ProcessGrid(best_grid(request))
    return mesh, best_layouts(request, mesh.grid)


def _outside(layouts: Sequence[Layout], axes: Sequence[str]) -> Layout:
    """Whole, but for the rows that axes split in every layout."""
    rows = [axis for axis in axes if all(axis in layout.dims[0] for layout in layouts)]
    return Layout(layouts[0].grid, rows, None)


def _replace_pair(
    model: nn.Module,
    pair: Pair,
    mesh: ProcessGrid,
    report: Report,
    pad: bool,
    plans: tuple[MatMulPlan, MatMulPlan],
    options: Mapping[str, Any],
) -> None:
    up, down = plans
    # Rows that every activation splits and no weight uses are data parallel; they stay split outside.
    used = {axis for plan in plans for axis in plan.b.axes}
    rows = [axis for axis in up.a.dims[0] if axis not in used]
    outside = _outside((up.a, down.out), rows)
    enters, inside, leaves = pair_multiples(up, down, pad)
    multiple = row_multiple(plans, outside) if pad else 1
    first, second = (Boundary(outside, multiple, enters=first, leaves=not first) for first in (True, False))
    layers = [(name, up, (enters, inside), first) for name in pair.ups] + [(pair.down, down, (inside, leaves), second)]
    for name, plan, padding, boundary in layers:
        layer = _boundary_linear(model.get_submodule(name), name, plan, mesh, padding, boundary, options)
        _put(model, name, layer, report)


def _replace_one(
    model: nn.Module,
    name: str,
    layouts: Sequence[Layout],
    mesh: ProcessGrid,
    report: Report,
    pad: bool,
    options: Mapping[str, Any],
) -> None:
    dense = dict(model.named_modules()).get(name)
    if type(dense) is not nn.Linear:
        raise LayoutError(f"parallelize: {name!r} is no nn.Linear of the model")
    refuse_unfit(model, [name])
    a, b, out = (*layouts, None, None)[:3]
    if a is None or b is None:
        raise LayoutError(f"parallelize: give {name!r} an input and a weight layout")
    plan = MatMulPlan(a, b, out, transpose_b=True, name=name)
    rows = [axis for axis in plan.a.dims[0] if axis not in plan.b.axes]
    outside = _outside((plan.a, plan.out), rows)
    boundary = Boundary(outside, row_multiple((plan,), outside) if pad else 1)
    _put(model, name, _boundary_linear(dense, name, plan, mesh, pad, boundary, options), report)


def _boundary_linear(
    dense: Any,
    name: str,
    plan: MatMulPlan,
    mesh: ProcessGrid,
    pad: bool | tuple[int, int],
    boundary: Boundary,
    options: Mapping[str, Any],
) -> BoundaryLinear:
    layer = BoundaryLinear.from_dense(
        dense, mesh=mesh, in_layout=plan.a, weight_layout=plan.b, out_layout=plan.out,
        pad=pad, name=name, boundary=boundary, **options,
    )  # fmt: skip
    assert isinstance(layer, BoundaryLinear)
    return layer.train(dense.training)


def _put(model: nn.Module, name: str, layer: BoundaryLinear, report: Report) -> None:
    if not name:
        raise LayoutError("parallelize: the model is a single Linear; use ndtp.nn.Linear.from_dense")
    model.set_submodule(name, layer)
    parts = name.split(".")
    for depth in range(len(parts)):
        _leave_fast_paths(model.get_submodule(".".join(parts[:depth])))
    report.replaced[name] = str(layer.plan)
    report.layers.append(layer)


def _leave_fast_paths(module: nn.Module) -> None:
    """Make torch's encoder call its layers: its fast path for inference reads their weights instead."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0  # "an activation that the fast path does not have"
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False
