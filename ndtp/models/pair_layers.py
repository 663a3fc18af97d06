"""Layers of pairs on a grid: Linears that take and give whole activations at the ends of each pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import BlockLayouts
from ndtp.compute.torch_calls import Keywords
from ndtp.errors import LayoutError
from ndtp.models.adopted import class_of
from ndtp.models.boundary import Boundary, BoundaryLinear
from ndtp.models.left_alone import why_left
from ndtp.models.linear_pairs import Pair, refuse_unfit
from ndtp.models.named_plan import product_of
from ndtp.models.opened_attention import leave_fast_path
from ndtp.models.report import Report
from ndtp.nn.padding import pair_multiples, row_multiple
from ndtp.nn.parameters import stand_in
from ndtp.runtime.process_grid import ProcessGrid


def _outside(layouts: Sequence[Layout], axes: Sequence[str]) -> Layout:
    """Whole, but for the rows that axes split in every layout."""
    rows = [axis for axis in axes if all(axis in layout.dims[0] for layout in layouts)]
    return Layout(layouts[0].grid, rows, None)


def axes_of_rows(model: nn.Module) -> tuple[str, ...]:
    """The axes that split rows everywhere outside of what was replaced.

    Raises:
        LayoutError: layers between which rows lie now so, now otherwise.
    """
    outsides = {m.name: m.boundary.outside for m in model.modules() if isinstance(m, BoundaryLinear)}
    found: dict[tuple[str, ...], str] = {}
    for name, outside in outsides.items():
        found.setdefault(outside.grid.nontrivial(outside.dims[0]), name)
    if len(found) > 1:
        (first, a), (second, b) = list(found.items())[:2]
        raise LayoutError(
            f"parallelize: outside of '{a}' rows are split over {list(first)}, outside of '{b}' over {list(second)}\n"
            "  fix: layouts whose weights are split over the same axes, or a grid each"
        )
    return next(iter(found), ())


def replace_named(
    model: nn.Module,
    mesh: ProcessGrid,
    pairs: Sequence[Pair],
    layouts: BlockLayouts,
    single: Mapping[str, Sequence[Layout]],
    report: Report,
    pad: bool,
    options: Keywords,
) -> None:
    """Replace the layers that a plan names, pairs and single ones by their layouts; all others stay as they are.

    Raises:
        LayoutError: sizes that do not divide without `pad`, or a layer that cannot be replaced.
    """
    for pair in pairs:
        _replace_pair(model, pair, mesh, report, pad, layouts.plans(pair.up), options)
    for name, own in single.items():
        _replace_one(model, name, own, mesh, report, pad, options)
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            report.kept.setdefault(name, "not named in the plan")
        reason = None if isinstance(module, BoundaryLinear) else why_left(module)
        if reason:
            report.kept.setdefault(name, reason)


def _replace_pair(
    model: nn.Module,
    pair: Pair,
    mesh: ProcessGrid,
    report: Report,
    pad: bool,
    plans: tuple[MatMulPlan, MatMulPlan],
    options: Mapping[str, object],
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
    options: Mapping[str, object],
) -> None:
    dense = dict(model.named_modules()).get(name)
    if type(dense) is not nn.Linear:
        raise LayoutError(f"parallelize: {name!r} is no nn.Linear of the model")
    refuse_unfit(model, [name])
    plan = product_of(name, layouts)
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
    options: Mapping[str, object],
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
    layer = _in_place_of(model.get_submodule(name), layer)
    parts = name.split(".")
    for depth in range(len(parts)):
        leave_fast_path(model.get_submodule(".".join(parts[:depth])))
    report.replaced[name] = str(layer.plan)
    report.layers.append(layer)


def _in_place_of(module: nn.Module, layer: BoundaryLinear) -> Any:
    """`module`, which becomes what `layer` is, and its parameters what those of `layer` are.

    What else it has, its hooks of state dicts among it, it keeps.
    """
    theirs: dict[str, Any] = module._parameters
    for name, made in list(layer._parameters.items()):
        if made is not None:
            lies = layer.lies[name]
            stand_in(theirs[name], made, lies.layout, layer.mesh, f"{layer.name}.{name}", lies.real)
            layer._parameters[name] = theirs[name]
    fresh = vars(nn.Module())
    own = {key: value for key, value in vars(layer).items() if key not in fresh or "hooks" not in key}
    module.__class__ = class_of(type(layer), type(module))  # `isinstance(m, nn.Linear)` holds as before
    vars(module).update(own)
    return module
