"""`parallelize`: swap the Linear pairs of a user's model for tensor-parallel ones, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import BlockLayouts, block_layouts, known_scheme
from ndtp.errors import LayoutError
from ndtp.models.any_model import AnyModel
from ndtp.models.auto import best_grid, best_layouts, request_for
from ndtp.models.auto_whole import plan_whole
from ndtp.models.boundary import Boundary, BoundaryLinear
from ndtp.models.held import Held
from ndtp.models.left_alone import why_left
from ndtp.models.linear_pairs import Pair, find_pairs, pairs_by_name, refuse_unfit
from ndtp.models.not_replicated import not_replicated
from ndtp.models.placing import Placing, is_named, stock_model
from ndtp.models.plain_gradients import sum_plain_gradients_of
from ndtp.models.profile import use_measured
from ndtp.models.rechecked import rechecked
from ndtp.models.recognised import is_recognised
from ndtp.models.report import Report
from ndtp.models.roles import is_linear
from ndtp.models.same_calls import compare_calls
from ndtp.models.same_weights import check_same_weights
from ndtp.models.torch_stacks import TorchSplit, find_stacks
from ndtp.models.transformer import Split, is_transformer, split_before
from ndtp.nn.padding import pair_multiples, row_multiple
from ndtp.nn.parameters import stand_in
from ndtp.planner.grid_plan import GridPlan
from ndtp.planner.hardware import Hardware
from ndtp.runtime.given_mesh import given_mesh
from ndtp.runtime.process_grid import ProcessGrid

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

P = ParamSpec("P")
R = TypeVar("R")


def _whatever_the_default_device(function: Callable[P, R]) -> Callable[P, R]:
    """Make trial inputs on the CPU, whatever the user's default device is."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run


@_whatever_the_default_device
def parallelize(
    model: nn.Module,
    mesh: ProcessGrid | Grid | DeviceMesh | None = None,
    plan: Mapping[str, str | Sequence[Layout]] | GridPlan | None = None,
    *,
    scheme: str = "3d",
    axes: Sequence[str] | None = None,
    pad: bool = True,
    regather: tuple[str, ...] = (),
    chunks: int | str = "auto",
    tokens: int | None = None,
    hardware: str | Hardware = "h100-ib",
    keep: Sequence[str] = (),
    expert_axis: str | Sequence[str] | None = None,
    fuse: bool = True,
    strict: bool = True,
    example: Any = None,
    check: bool | None = None,
    check_every: int = 100,
    recheck: float = 0.0,
) -> nn.Module:
    """Split a model over a grid, in place, keeping its weights, names and code.

    A model of transformers is split as a whole: see `ndtp.models.transformer`.  Of any other, torch's own transformer
    layers and attention are split from end to end, and `Linear -> activation -> Linear` pairs are replaced by
    tensor-parallel ones.  So are gated ones, `down(act(gate(x)) * up(x))`.
    Pairs are found by tracing the `forward` of the modules that hold them; state-dict keys stay.  The rest of the model
    keeps working: activations are whole outside of a pair, but for rows that other axes of the grid (`dp`) split.  What
    was and was not replaced, and why, is in `model.ndtp_report`.

    Args:
        plan: names instead of a search, with wildcards: `{"encoder.*.fc1": "up", "encoder.*.fc2": "down"}`, or layouts
            of one layer: `{"head": (in_layout, weight_layout, out_layout)}`, the last of which may be left out.  Rows
            that axes split in both activations and that split no weight stay split outside.
            Or what `ndtp.plan` returns, which gives the scheme and the axes of experts.
        mesh: a `ProcessGrid`; or a `Grid` or a `DeviceMesh` with named dims, of which one is made, which is in
            `model.ndtp_report.mesh`.  It may be left out with scheme="auto", which takes the best grid
            of all ranks, and with "1d" or "1d-sp", which take all ranks as one axis.
        scheme, axes: as for `ndtp.nn.MLP`; "auto" takes the layouts by which a step on `mesh` takes least.
        tokens, hardware: what "auto" plans for: rows of a step, and a preset or profile of `ndtp.planner.hardware`.
            By a profile that was measured (`ndtp bench calibrate`) numbers of chunks are chosen, too.
        pad: pad sizes that do not divide; without it they are an error.
        regather, chunks: as for `ndtp.nn.Linear`.
        keep: names of layers that stay whole, with wildcards; what they belong to stays whole too.
        expert_axis: the axes that split the experts of a transformer, as for `ndtp.nn.MoE`; "auto" chooses them where
            none are given.
        fuse: whether the products of an MLP run as one schedule, and the head with the loss in chunks of rows, where a
            whole model's code puts nothing between them that forbids it.
        strict: nothing to replace is an error.
        example: what the model is called with, a tensor, a tuple or a mapping, where it is none that is recognised:
            one run with it, on tensors without memory, shows what shares an input and what is added to what.
        check: whether all ranks compare what they call the model with, and the steps of its optimizers.  True looks at
            more in every call.  Default: yes.  See docs/same-on-all-ranks.md.
        check_every: optimizer steps from one comparison of all weights to the next one.
        recheck: of all products, the fraction that another rank computes again, see `ndtp.recheck`.

    Raises:
        LayoutError: names that match nothing or do not pair up, sizes that do not divide, or nothing was replaced.
        MismatchError: ranks have different weights.
    """
    if isinstance(plan, str):
        raise LayoutError(f"parallelize: plan is {plan!r}, which is no plan\n  fix: scheme={plan!r}, by its name")
    mesh = None if mesh is None else given_mesh(mesh, "parallelize", makes=True)
    if scheme != "auto":
        known_scheme(scheme)
    report, held = Report(), Held(model)
    options: dict[str, Any] = {"regather": regather, "chunks": chunks}
    count = sum(isinstance(m, (nn.Linear, BoundaryLinear)) or is_linear(m) for m in model.modules())
    if isinstance(plan, GridPlan):
        expert_axis = plan.expert_axis if expert_axis is None else expert_axis
        scheme, regather, plan = plan.scheme, plan.regather, None
    wrapped: Any = model  # perhaps one of peft
    inner = wrapped.get_base_model() if hasattr(type(model), "get_base_model") else model
    earlier: Report | None = vars(stock_model(model) or inner).get("ndtp_report")
    if earlier is not None and earlier.split is not None:
        check_same_weights(model, earlier.mesh)  # type: ignore[arg-type]
        report = split_before(model, mesh, earlier)
        report.carried += held.bring(report.mesh)  # type: ignore[arg-type]
        report.count(model, count, earlier.split.linears)
        model.ndtp_report = report  # type: ignore[assignment]
        return rechecked(model, recheck)
    if mesh is None and scheme != "auto":
        mesh = _of_all_ranks(scheme, axes)
    if plan is None and is_transformer(model) and (mesh is not None or scheme == "auto"):
        split_by = (expert_axis,) if isinstance(expert_axis, str) else expert_axis
        if scheme == "auto":
            mesh, layouts, split_by, report.planned = plan_whole(model, mesh, tokens, hardware, split_by)
        else:
            layouts = block_layouts(mesh.grid, scheme, axes)  # type: ignore[union-attr]
        assert mesh is not None
        check_same_weights(model, mesh)
        use_measured(mesh, hardware)
        placing: dict[str, Any] = {**options, "fuse": fuse, "expert_axes": split_by}
        split: Placing
        if is_recognised(model, mesh, layouts, keep, **placing):
            split = Split(model, mesh, layouts, keep, **placing)
        else:
            split = AnyModel(model, mesh, layouts, keep, example=example, **placing)
        split.run()
        report.replaced, report.kept, report.split = split.replaced, split.kept, split
        report.carried = held.bring(mesh)
        sum_plain_gradients_of(model, mesh, split.frame.outside.dims[0], watches=False)
        _reported(model, mesh, report, count, split.linears, strict)
        compare_calls(model, mesh, split.frame.outside.dims[0], scheme, check, check_every)
        return rechecked(model, recheck)
    stacks = find_stacks(model) if plan is None else {}
    if plan is None:
        found, report.kept = find_pairs(model)
        in_pairs = sum(len(pair.ups) + 1 for pair in found)
        if mesh is not None and scheme != "auto" and not stacks and in_pairs < count:
            layouts = block_layouts(mesh.grid, scheme, axes)
            check_same_weights(model, mesh)
            use_measured(mesh, hardware)
            any_model = AnyModel(model, mesh, layouts, keep, fuse=fuse, example=example, **options)
            any_model.run()
            report.replaced, report.kept, report.split = any_model.replaced, any_model.kept, any_model
            report.carried = held.bring(mesh)
            sum_plain_gradients_of(model, mesh, any_model.frame.outside.dims[0], watches=False)
            _reported(model, mesh, report, count, any_model.linears, strict)
            compare_calls(model, mesh, any_model.context.data, scheme, check, check_every)
            return rechecked(model, recheck)
        pairs = [pair for pair in found if not any(_is_in(pair.up, name) for name in stacks)]
        for pair in [pair for pair in pairs if is_named(keep, *pair.ups, pair.down)]:
            report.kept |= dict.fromkeys((*pair.ups, pair.down), "as asked")
            pairs.remove(pair)
    else:
        pairs = pairs_by_name(model, {name: value for name, value in plan.items() if isinstance(value, str)})
    if scheme == "auto":
        mesh, layouts = _automatic(model, pairs, mesh, tokens, hardware)
    else:
        assert mesh is not None
        layouts = block_layouts(mesh.grid, scheme, axes)
    check_same_weights(model, mesh)
    use_measured(mesh, hardware)
    report.kept = {key: why for key, why in report.kept.items() if not any(_is_in(key, name) for name in stacks)}
    for name, stack in stacks.items():
        torch_split = TorchSplit(name, stack, mesh, layouts, keep, fuse=fuse, **options)
        torch_split.run()
        report.replaced |= torch_split.replaced
        report.kept |= torch_split.kept
        report.stacks.append(torch_split)
    for pair in pairs:
        _replace_pair(model, pair, mesh, report, pad, layouts.plans(pair.up), options)
    for name, value in (plan or {}).items():
        if not isinstance(value, str):
            _replace_one(model, name, value, mesh, report, pad, options)
    linears = (name for name, module in model.named_modules() if type(module) is nn.Linear)
    for name in linears:
        if not any(_is_in(name, stack) for stack in stacks):
            report.kept.setdefault(name, "not named in the plan")
    for name, module in model.named_modules():
        reason = None if isinstance(module, BoundaryLinear) else why_left(module)
        if reason and not any(_is_in(name, stack) for stack in stacks):
            report.kept.setdefault(name, reason)
    report.carried = held.bring(mesh)
    replaced = len(report.replaced) - sum(len(s.replaced) - s.linears for s in report.stacks)
    _reported(model, mesh, report, count, replaced, strict)
    not_replicated(model)
    rows = _axes_of_rows(model, report)
    report.plain = sum_plain_gradients_of(model, mesh, rows)
    compare_calls(model, mesh, rows, scheme, check, check_every)
    return rechecked(model, recheck)


def _of_all_ranks(scheme: str, axes: Sequence[str] | None) -> ProcessGrid:
    """The mesh where none is given: all ranks as one axis, where a scheme has but one."""
    if scheme not in ("1d", "1d-sp"):
        raise LayoutError(
            f"parallelize: no mesh is given, and scheme {scheme!r} does not say how many ranks its axes have\n  fix: "
            "parallelize(model, ndtp.Grid(x=2, y=2)), whose sizes multiply to the number of ranks; scheme='1d', which "
            "takes all ranks as one axis; or scheme='auto' with tokens=, the rows of a step"
        )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return ProcessGrid(Grid({axes[0] if axes else "x": ranks}))


def _is_in(name: str, stack: str) -> bool:
    """Return whether a module is a part of another."""
    return not stack or name == stack or name.startswith(f"{stack}.")


def _reported(
    model: nn.Module, mesh: ProcessGrid, report: Report, linears: int, replaced: int, strict: bool
) -> nn.Module:
    if strict:
        report.refuse_nothing(replaced)
    report.mesh = mesh
    report.count(model, linears, replaced)
    earlier = vars(model).get("ndtp_report")
    if earlier is not None:
        report.include(earlier)
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


def _axes_of_rows(model: nn.Module, report: Report) -> tuple[str, ...]:
    """The axes that split rows everywhere outside of what was replaced.

    Raises:
        LayoutError: layers between which rows lie now so, now otherwise.
    """
    outsides = {m.name: m.boundary.outside for m in model.modules() if isinstance(m, BoundaryLinear)}
    outsides |= {stack.name or "the model": stack.frame.outside for stack in report.stacks}
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
    layer = _in_place_of(model.get_submodule(name), layer)
    parts = name.split(".")
    for depth in range(len(parts)):
        _leave_fast_paths(model.get_submodule(".".join(parts[:depth])))
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
    module.__class__ = type(layer)
    vars(module).update(own)
    return module


def _leave_fast_paths(module: nn.Module) -> None:
    """Make torch's encoder call its layers: its fast path for inference reads their weights instead."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0  # "an activation that the fast path does not have"
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False
