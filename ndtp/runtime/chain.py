"""A chain of products is checked and bound, once for all that it depends on; eager and compiled code stand on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from ndtp.algebra.binding import bind
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.compute.gemm import TorchGemm
from ndtp.errors import LayoutError
from ndtp.runtime.program import Program
from ndtp.runtime.region import is_in_graph
from ndtp.runtime.slots import Setting, Stage
from ndtp.schedule.tasks import RowChunks, Wanted

if TYPE_CHECKING:
    from ndtp.collectives.handles import Shape
    from ndtp.runtime.grid_like import GridLike

TensorForm = tuple["Shape", torch.dtype, torch.device]
Forms = tuple["TensorForm | None", ...]


def program_of(
    forms: Forms,
    plans: tuple[MatMulPlan, ...],
    activations: tuple[str | None, ...],
    mesh: GridLike,
    needs: tuple[bool, ...],
    chunks: int | None = None,
    may_measure: bool = True,
) -> Program:
    """The bound chain for shards of these forms: found, or bound where they are met first.

    Ranks that run the same chains bind the same ones, at the same points: a number of chunks may be measured then, and
    process groups made.

    Args:
        forms: shape, dtype and device of A, the weights, and the biases or None.
        needs: of which of them gradients are wanted.
        chunks: at most so many; default: what the plans ask for.
        may_measure: whether a number of chunks that is left open is worth a measurement.

    Raises:
        LayoutError: shards that do not fit each other or the plans.
    """
    # What is named here is held here: no other plan can come to have the identity of one of these.
    by_graph = chunks is None and is_in_graph(mesh.collectives)  # where another number of chunks may be the best
    key = (plans, activations, forms, needs, chunks, mesh.gemm, mesh.collectives, by_graph)
    program = mesh.programs.find(key)
    if program is None:
        with _disable_current_modes(), no_python_dispatcher():  # while a compiler traces, too
            program = mesh.programs.add(key, _bind(forms, plans, activations, mesh, needs, chunks, may_measure))
    return program


def _bind(
    forms: Forms,
    plans: Sequence[MatMulPlan],
    activations: Sequence[str | None],
    mesh: GridLike,
    needs: Sequence[bool],
    chunks: int | None,
    may_measure: bool,
) -> Program:
    a, count = forms[0], len(plans)
    assert a is not None
    stages = _stages(forms, plans, activations, mesh)
    chunks = asked_of(plans) if chunks is None else chunks
    if chunks is None:
        from ndtp.runtime.chunk_count import resolve

        sizes = [stage.sizes for stage in stages]
        chunks = resolve(plans, sizes, mesh, *a[1:], trains=any(needs), may_measure=may_measure)
    rows = RowChunks.of([stage.plan for stage in stages], [stage.sizes for stage in stages], chunks)
    wanted = [
        Wanted(
            dgrad=any(needs[: p + 1]) or any(needs[count + 1 : count + 1 + p]),
            wgrad=needs[p + 1],
            bias=needs[count + 1 + p],
            regather=plan.regather,
            whole=any(step.kind == "all_reduce" for step in plan.relayouts["dB"]),
        )
        for p, plan in enumerate(plans)
    ]
    setting = Setting(tuple(stages), rows, mesh.collectives, mesh.gemm, a[1])
    return Program(setting, [None if form is None else tuple(form[0]) for form in forms], needs, wanted)


def asked_of(plans: Sequence[MatMulPlan]) -> int | None:
    """The number of chunks that the plans of a chain ask for; None where they leave it open."""
    numbers = [int(plan.chunks) for plan in plans if plan.chunks != "auto"]
    if len(numbers) < len(plans):  # one product of a chain may ask for chunks, none for one: it is every plan's default
        numbers = [number for number in numbers if number > 1]
    return min(numbers, default=None)


def _stages(
    forms: Forms, plans: Sequence[MatMulPlan], activations: Sequence[str | None], mesh: GridLike
) -> list[Stage]:
    """The products of a chain, bound to the shapes of the shards.

    Raises:
        LayoutError: shards that do not fit each other or the plans.
    """
    stages: list[Stage] = []
    a, *others = forms
    weights, biases = others[: len(plans)], others[len(plans) :]
    assert a is not None
    shape = a[0]
    for plan, b, bias, activation in zip(plans, weights, biases, activations, strict=True):
        assert b is not None
        if plan.grid != mesh.grid:
            raise LayoutError(
                f"MatMul '{plan.name}': the plan is for grid {plan.grid}, the process grid is {mesh.grid}"
            )
        fitted, sizes = bind(plan, tuple(shape), tuple(b[0]))
        _check_operands(fitted, a, b, bias, sizes)
        if activation is not None:
            shape = activated_shape(fitted.shard_shape("C", sizes), activation, fitted)
        stages.append(Stage(fitted, sizes, activation))
    return stages


def compare_chain(
    mesh: GridLike,
    tensors: Sequence[Any],
    plans: Sequence[MatMulPlan],
    activations: Sequence[str | None],
    needs: Sequence[bool] | None = None,
) -> None:
    """Compare what this rank is about to run across all ranks.

    Args:
        tensors: A, the weights, and the biases or None.
        needs: whose gradients are wanted, where the tensors themselves do not say.

    Raises:
        MismatchError: ranks run other chains, or give shards of other forms.
    """
    from ndtp.collectives.cross_check import cross_check

    a, count = tensors[0], len(plans)
    products = zip(plans, tensors[1 : count + 1], tensors[count + 1 :], activations, strict=True)
    signature = "; then ".join(_description(a, *product) for product in products) + _state(mesh, plans, needs)
    cross_check(mesh.groups, signature)


def _description(a: Tensor, plan: MatMulPlan, b: Tensor, bias: Tensor | None, activation: str | None) -> str:
    """All that decides what a product sends, and what it makes of it."""
    return (
        f"{plan.equation} on grid {plan.grid}, roles {sorted(plan.roles.items())}, "
        f"regather {sorted(plan.regather)}, chunks {plan.chunks}; "
        f"A {signature_of(a)}, B {signature_of(b)}, bias {signature_of(bias)}{'' if activation is None else '; '}"
        f"{activation or ''}"
    )


def _state(mesh: GridLike, plans: Sequence[MatMulPlan], needs: Sequence[bool] | None) -> str:
    """Return the state of a grid that decides collectives or bits, besides the arguments."""
    rests_on = f"; chunks by {mesh.step.chunks.standing}" if asked_of(plans) is None else ""
    return (
        f"; by {type(mesh.gemm).__name__}" * (type(mesh.gemm) is not TorchGemm)
        + rests_on
        + (f"; wire {mesh.wire}" if mesh.wire else "")
        + "; sums in fp32" * (mesh.collectives.groups.options.sums == "fp32")
        + "; accumulating" * mesh.step.partial_sums.is_accumulating
        + (f"; gradients wanted {list(needs)}" if needs is not None else "")
    )


def signature_of(x: Tensor | None) -> str:
    """A tensor's shape and dtype, and whether its gradient is wanted."""
    if x is None:
        return "None"
    # Whether a gradient is wanted decides which collectives backward runs.
    return f"{tuple(x.shape)} {x.dtype}{' requires_grad' * (x.requires_grad and torch.is_grad_enabled())}"


def activated_shape(shape: Sequence[int], activation: str, plan: MatMulPlan) -> tuple[int, ...]:
    """The shape of the shard that an activation leaves of a product's.

    Raises:
        LayoutError: a gated activation of an odd number of columns.
    """
    width = ACTIVATIONS[activation].width
    if shape[-1] % width:
        raise LayoutError(
            f"mlp: '{plan.name}' leaves shards of {shape[-1]} columns, {activation} takes {width} for each that it "
            f"gives\n  fix: a multiple of {width * plan.out.num_splits(-1)} features"
        )
    return (*shape[:-1], shape[-1] // width)


def _check_operands(
    plan: MatMulPlan, a: TensorForm, b: TensorForm, bias: TensorForm | None, sizes: Mapping[str, int]
) -> None:
    (_, dtype, device), others = a, [b] if bias is None else [b, bias]
    if any(each[2] != device for each in others):
        devices = ", ".join(
            f"{name} is on {each[2]}" for name, each in zip(("A", "B", "bias"), (a, *others), strict=False)
        )
        raise LayoutError(
            f"MatMul '{plan.name}': {devices}\n"
            "  fix: bring the operands to one device; one on meta has no values yet: to_empty, then load or draw them"
        )
    if any(each[1] != dtype for each in others):
        raise LayoutError(
            f"MatMul '{plan.name}': A is {dtype}, B is {b[1]}"
            + (f", bias is {bias[1]}" if bias is not None else "")
            + "; fix: cast them to one dtype, or use torch.autocast"
        )
    if bias is not None and tuple(bias[0]) != plan.bias.shard_shape((sizes["n"],)):
        raise LayoutError(
            f"MatMul '{plan.name}': the bias shard has shape {tuple(bias[0])}; bias[{plan.bias.label('N')}] of "
            f"{sizes['n']} elements has shards of {plan.bias.shard_shape((sizes['n'],))}"
        )
