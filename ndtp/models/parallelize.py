"""`parallelize`: split a model over a grid, in place, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import nn

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import BlockLayouts, block_layouts, known_scheme
from ndtp.algebra.wire import Wire
from ndtp.compute.traces import unrecorded
from ndtp.errors import LayoutError
from ndtp.models.any_model import AnyModel
from ndtp.models.asked_types import warn_of_asked_types
from ndtp.models.auto_whole import plan_whole
from ndtp.models.boundary import BoundaryLinear
from ndtp.models.chosen_meshes import best_for_products, mesh_of_all_ranks
from ndtp.models.compared_calls import compare_calls
from ndtp.models.computed import set_hooked_apart
from ndtp.models.first_call import FirstCall, can_wait, finish
from ndtp.models.held import Held
from ndtp.models.linear_pairs import pairs_by_name
from ndtp.models.named_plan import LAYOUTS, NamedPlan, named_layouts, schemes_in
from ndtp.models.not_replicated import not_replicated
from ndtp.models.observation import observe
from ndtp.models.pair_layers import axes_of_rows, replace_named
from ndtp.models.placing import stock_model
from ndtp.models.plain_gradients import sum_plain_gradients_of
from ndtp.models.profile import use_measured
from ndtp.models.rechecked import rechecked
from ndtp.models.refused_code import (
    refuse_layers_of_shards,
    refuse_lazy,
    refuse_scripts,
    refuse_shared_memory,
    refuse_wrapped,
)
from ndtp.models.report import Report
from ndtp.models.roles import is_linear
from ndtp.models.same_weights import check_same_weights
from ndtp.models.seen_by_ranks import seen_by_all
from ndtp.models.transformer import Split, is_recognised, is_transformer, split_before
from ndtp.nn.experts import EXACT, Buffers, known_buffers
from ndtp.planner.grid_plan import GridPlan
from ndtp.planner.hardware import Hardware
from ndtp.runtime.default_group import OwnRows
from ndtp.runtime.given_mesh import GivenWire, given_mesh
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.split import guard_backward_hooks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

P = ParamSpec("P")
R = TypeVar("R")


def _whatever_the_program_does(function: Callable[P, R]) -> Callable[P, R]:
    """Make trial inputs on the CPU, whatever the user's default device is, and let no profiler hold a weight."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"), unrecorded():
            return function(*args, **kwargs)

    return run


@_whatever_the_program_does
def parallelize(
    model: nn.Module,
    mesh: ProcessGrid | Grid | DeviceMesh | None = None,
    plan: Mapping[str, str | Sequence[Layout] | None] | GridPlan | None = None,
    *,
    scheme: str = "3d",
    axes: Sequence[str] | None = None,
    pad: bool = True,
    regather: tuple[str, ...] = (),
    chunks: int | str = "auto",
    wire: GivenWire = None,
    recipe: str | None = None,
    tokens: int | None = None,
    hardware: str | Hardware = "h100-ib",
    keep: Sequence[str] = (),
    expert_axis: str | Sequence[str] | None = None,
    expert_buffers: Buffers = EXACT,
    fuse: bool = True,
    strict: bool = True,
    example: Any = None,
    check: bool | None = None,
    check_every: int = 100,
    recheck: float = 0.0,
    attention: str = "auto",
    double_backward: bool = False,
) -> nn.Module:
    """Split a model over a grid, in place, keeping its weights, names and code.

    A model of transformers whose layers are recognised is split from end to end: see `ndtp.models.transformer`.  Any
    other model runs once on tensors without memory, which shows what its layers share and what follows what.  Each
    layer that divides, or can be padded, is split then, and activations stay split between layers: see docs/models.md.
    State-dict keys stay.  What was and was not replaced, and why, is in `model.ndtp_report`.

    Args:
        plan: what becomes of layers, by their names or by patterns of these: the name of a scheme; None for one that
            stays whole; or its layouts, `(input, weight, output)`.  A name of a module stands for all layers in it, "*"
            for all that nothing else names, and the last entry that matches a layer counts:
            `{"*": "2d", "blocks.*.attn": "1d", "head": None}`.  `report.plan` is such a plan.
            Or names of pairs alone: `{"encoder.*.fc1": "up", "encoder.*.fc2": "down"}`, and layers by their layouts;
            all others stay whole.  Rows that axes split in both activations and that split no weight stay split
            outside.  Or what `ndtp.plan` returns, which gives the scheme and the axes of experts.
        mesh: a `ProcessGrid`; or a `Grid` or a `DeviceMesh` with named dims, of which one is made, which is in
            `model.ndtp_report.mesh`.  Where it is left out, all ranks are on the scheme's axes, whose sizes are as
            equal as their number allows; scheme="auto" takes the best grid of all ranks.
        scheme, axes: as for `ndtp.nn.MLP`; "auto" takes the layouts by which a step on `mesh` takes least.
        tokens, hardware: what "auto" plans for: rows of a step, and a preset or profile of `ndtp.planner.hardware`.
            By a profile that was measured (`ndtp bench calibrate`) numbers of chunks are chosen, too.
        pad: pad parameters whose sizes do not divide; without it they are an error, which leaves the model split.  Rows
            that do not divide are padded in each call, but for named pairs without `pad`, which refuse them.
        regather, chunks, wire: as for `ndtp.nn.Linear`.  A plan of `ndtp.plan` may name a wire, too.
        recipe: "bf16" or "fp8-rowwise": in which dtypes tensors travel and products multiply, see docs/wire.md.
        keep: names of layers that stay whole, with wildcards, as None says in `plan`.  What is recognised (attention,
            an MLP) stays whole with each of its layers.
        expert_axis: the axes that split the experts of a transformer, as for `ndtp.nn.MoE`; "auto" chooses them where
            none are given.
        expert_buffers: as `buffers` of `ndtp.nn.MoE`; "worst-case": experts read no number in the host.
        fuse: whether the products of an MLP run as one schedule, and the head with the loss in chunks of rows, where a
            whole model's code puts nothing between them that forbids it.
        strict: nothing to replace is an error.
        example: what the model is called with, a tensor, a tuple or a mapping, where it is none that is recognised:
            one run with it, on tensors without memory, shows what shares an input and what is added to what.  Where
            there is none, inputs are made up; where the model does not run with them, its first call decides, and it
            stays dense until then.
        check: whether all ranks compare what they call the model with, and the steps of its optimizers.  True looks at
            more in every call, and at all weights after every step.  Default: yes.  See docs/same-on-all-ranks.md.
        check_every: optimizer steps from one comparison of all weights to the next one.
        recheck: of all products, the fraction that another rank computes again, see `ndtp.recheck`.
        attention: how queries meet keys where sequences are split over ranks (a batch that the ranks do not divide, one
            long sequence): "gather", "ring" or "heads"; "auto" takes what moves and keeps least.  See
            docs/long-sequences.md.
        double_backward: whether all layers have gradients that can be differentiated again, `create_graph=True`: such
            layers do not overlap, and `fuse` is without effect.  Without it those have them that are asked for in the
            model's own code, or by an input: see docs/models.md.

    Raises:
        LayoutError: names that match nothing (with the nearest ones) or do not pair up, sizes that do not divide,
            nothing was replaced, layers of `ndtp.nn` in the model, or code that could take a shard for the whole
            (TorchScript, torch.func).
        MismatchError: ranks have different weights.
    """
    if isinstance(plan, str):
        raise LayoutError(f"parallelize: plan is {plan!r}, which is no plan\n  fix: scheme={plan!r}, by its name")
    if scheme != "auto":
        known_scheme(scheme)
    if isinstance(plan, GridPlan):
        expert_axis = plan.expert_axis if expert_axis is None else expert_axis
        wire = plan.request.wire if wire is None and recipe is None else wire
        scheme, regather, plan = plan.scheme, plan.regather, None
    wire = Wire.of(wire, recipe)
    mesh = None if mesh is None else given_mesh(mesh, "parallelize", makes=True, wire=wire)
    names = NamedPlan.given(plan, keep, scheme)
    if names.names_pairs and double_backward:
        raise LayoutError(
            "parallelize: double_backward=True, and the plan names pairs, whose products have one derivative\n"
            '  fix: a plan that names schemes, such as {"encoder.*.fc*": "3d", "*": None}'
        )
    values = {} if names.names_pairs else names.values(model)
    schemes = schemes_in(values, model)
    scheme = next(iter(schemes)) if len(schemes) == 1 and LAYOUTS not in schemes else names.scheme
    is_mixed = len(schemes) > 1 or LAYOUTS in schemes
    left = [name for name, value in values.items() if value is None]
    refuse_scripts(model)
    refuse_lazy(model)
    refuse_wrapped(model)
    refuse_shared_memory(model)
    warn_of_asked_types(model)
    set_hooked_apart(model)
    guard_backward_hooks()
    report, held = Report(plan=names.as_dict()), Held(model)
    count = sum(isinstance(m, (nn.Linear, BoundaryLinear)) or is_linear(m) for m in model.modules())
    wrapped: Any = model  # perhaps one of peft
    inner = wrapped.get_base_model() if hasattr(type(model), "get_base_model") else model
    known = (vars(each).get("ndtp_report") for each in (stock_model(model), inner, model) if each is not None)
    earlier: Report | None = next(filter(None, known), None)
    if earlier is not None and earlier.split is not None:
        check_same_weights(model, earlier.mesh)  # type: ignore[arg-type]
        report = split_before(model, mesh, earlier)
        report.rows = earlier.rows
        report.carried += held.bring(report.mesh)  # type: ignore[arg-type]
        report.count(model, count, earlier.split.linears)
        model.ndtp_report = report  # type: ignore[assignment]
        return rechecked(model, recheck)
    if mesh is None and scheme != "auto":
        mesh = mesh_of_all_ranks(scheme, axes, wire)
        report.planned = f"no mesh was given: all ranks on grid {mesh.grid}"
    known_buffers(expert_buffers, "parallelize")
    options: dict[str, Any] = {"regather": regather, "chunks": chunks}
    further = {"pad": pad, "fuse": fuse, "attention": attention, "double_backward": double_backward}
    made_by = _said(names.scheme if len(report.plan) == 1 else f"{report.plan}", options | further)

    def whole_model(mesh: ProcessGrid, layouts: BlockLayouts, **others: Any) -> nn.Module:
        """Split the model from end to end."""
        refuse_layers_of_shards(model)
        check_same_weights(model, mesh)
        use_measured(mesh, hardware)
        placing = {**options, "fuse": fuse and not double_backward, "attention": attention, "pad": pad, **others}
        split: Split | AnyModel
        is_known = not is_mixed and not double_backward and is_transformer(model)
        if is_known and is_recognised(model, mesh, layouts, left, **placing):
            split = Split(model, mesh, layouts, left, **placing)
            split.run()
            report.rows = split.frame.outside.dims[0]
            finish(split, report, held, count, strict)
        else:
            by_name = named_layouts(values, model, mesh.grid, axes) if is_mixed else {}
            split = AnyModel(model, mesh, layouts, left, by_name=by_name, double_backward=double_backward, **placing)
            report.rows = split.frame.outside.dims[0]
            with OwnRows(mesh, report.rows, type(model).__name__).while_running():
                seen = observe(model, example)
            if example is not None:
                seen = seen_by_all(seen, model, mesh, report.rows, "run with example=")
            if seen is None and example is None and can_wait(model):
                FirstCall(split, report, count, strict).wait()
            else:
                split.place_by(seen)
                finish(split, report, held, count, strict)
        compare_calls(model, mesh, report.rows, made_by, check, check_every)
        return rechecked(model, recheck, mesh)

    if is_mixed and scheme == "auto":
        raise LayoutError(
            "parallelize: scheme='auto' plans for a whole model, and the plan names schemes of layers\n"
            '  fix: name the scheme of all others, plan={"*": "2d", ...}'
        )
    if not names.names_pairs and is_transformer(model) and (mesh is not None or scheme == "auto"):
        split_by = (expert_axis,) if isinstance(expert_axis, str) else expert_axis
        if scheme == "auto":
            mesh, layouts, split_by, report.planned = plan_whole(model, mesh, tokens, hardware, split_by, wire)
        else:
            layouts = block_layouts(mesh.grid, scheme, axes)  # type: ignore[union-attr]
        assert mesh is not None
        return whole_model(mesh, layouts, expert_axes=split_by, expert_buffers=expert_buffers)
    pairs = pairs_by_name(model, names.roles) if names.names_pairs else []
    if scheme == "auto":
        mesh, layouts = best_for_products(model, pairs, mesh, tokens, hardware, wire)
    else:
        layouts = block_layouts(mesh.grid, scheme, axes)  # type: ignore[union-attr]
    assert mesh is not None
    if not names.names_pairs:
        return whole_model(mesh, layouts)
    check_same_weights(model, mesh)
    use_measured(mesh, hardware)
    replace_named(model, mesh, pairs, layouts, names.layouts, report, pad, options)
    report.carried, report.was_dense = held.bring(mesh), held.was_dense
    report.of(model, mesh, count, len(report.replaced), strict)
    not_replicated(model)
    report.rows = axes_of_rows(model)
    OwnRows(mesh, report.rows, type(model).__name__).watch(model)
    report.plain = sum_plain_gradients_of(model, mesh, report.rows)
    compare_calls(model, mesh, report.rows, made_by, check, check_every)
    return rechecked(model, recheck)


def _said(scheme: str, options: Mapping[str, object]) -> str:
    """Return how a model is split, for a comparison of ranks: each option that is not what it is by default."""
    usual = signature(parallelize).parameters
    return ", ".join([scheme, *(f"{key}={value}" for key, value in options.items() if value != usual[key].default)])
