"""`ndtp.relayout` and what rests on it under `torch.compile`: one custom op; see `ndtp.ops.compiled`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.algebra.wire import BACK
from ndtp.collectives.meter import IMPLEMENTATIONS
from ndtp.ops.compiled import layout_text
from ndtp.ops.moving import enter, moved
from ndtp.runtime.grid_like import GridLike
from ndtp.runtime.process_grid import ProcessGrid, grid_named


def compiled_reduce(x: Tensor, plan: RelayoutPlan, mesh: GridLike) -> Tensor:
    """See `ndtp.ops.reductions.reduce`."""
    if plan.source == plan.target and not (plan.partial or plan.grad_partial):
        return x
    return _relayout(x, mesh.name, _text(plan), "forward")


def _text(plan: RelayoutPlan) -> str:
    """A line for each of the plan's fields, which `_read` reads."""
    layouts = layout_text(plan.source), layout_text(plan.target)
    axes = " ".join(plan.partial), " ".join(plan.grad_partial)
    return "\n".join([*layouts, *axes, plan.name.replace("\n", " "), plan.kind])


def _read(grid: str, text: str) -> tuple[ProcessGrid, RelayoutPlan]:
    mesh = grid_named(grid)
    source, target, partial, grad_partial, name, kind = text.split("\n")
    one, other = Layout.parse(mesh.grid, source), Layout.parse(mesh.grid, target)
    return mesh, RelayoutPlan(one, other, tuple(partial.split()), tuple(grad_partial.split()), name, kind)


def _run_relayout(x: Tensor, grid: str, text: str, phase: str) -> Tensor:
    """`x` along the relayout; always a tensor of its own."""
    mesh, plan = _read(grid, text)
    enter(mesh, plan, x)
    result = moved(x, plan.steps, mesh, plan.name, phase, plan.kind)
    is_own = result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    return result.contiguous() if is_own else result.clone(memory_format=torch.contiguous_format)


_relayout = torch.library.custom_op("ndtp::relayout", _run_relayout, mutates_args=())


@_relayout.register_fake
def _(x: Tensor, grid: str, text: str, phase: str) -> Tensor:
    _, plan = _read(grid, text)
    return x.new_empty(plan.target.shard_shape(plan.global_shape(x.shape)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.grid, ctx.text, _ = inputs


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    source, target, partial, grad_partial, name, kind = ctx.text.split("\n")
    back = "\n".join([target, source, grad_partial, partial, name, BACK.get(kind, "")])
    return _relayout(grad, ctx.grid, back, "dgrad"), None, None, None


_relayout.register_autograd(_differentiate, setup_context=_save)
IMPLEMENTATIONS["ndtp::relayout"] = _run_relayout
