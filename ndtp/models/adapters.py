"""Low-rank adapters around layers of a stock model: `base(x) + B(A(x)) * scaling`, as peft writes them.

A wrapper has the layer as `base_layer`, and adapters by name in `lora_A` and `lora_B`.  The layer is split as it would
be alone, and the wrapper's own code adds what the adapters give.  These lie so that nothing is gathered for them: with
the base's input [M_zy, K_x] and output [M_zx, N_y]

    A [r, K_x]   [M_zy, K_x] . A^T -> [M_zx, r]      a sum over x of r numbers a row
    B [N_y, r]   [M_zx, r]   . B^T -> [M_zx, N_y]    nothing moves

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.models.adopted import adopt, is_placed
from ndtp.models.projections import Projection
from ndtp.models.roles import is_wrapper
from ndtp.nn.parameters import expressible


def adapters_of(wrapper: Any) -> list[tuple[str, Any, Any]]:
    """(name, A, B) of each adapter that is not on the grid yet."""
    return [
        (name, first, wrapper.lora_B[name])
        for name, first in wrapper.lora_A.items()
        if type(first) is nn.Linear and not is_placed(first.weight)  # type: ignore[arg-type]
    ]


def reason_against(modules: dict[str, nn.Module], name: str) -> str | None:
    """Return the reason why the adapters around a layer cannot be split with it, if there is one."""
    wrapper: Any = modules[name.removesuffix(".base_layer")]
    if not name.endswith(".base_layer"):
        return None
    for kind, each in (("A", wrapper.lora_A), ("B", wrapper.lora_B)):
        for adapter, layer in each.items():
            if not isinstance(layer, nn.Linear):
                return f"lora_{kind}.{adapter} around it is a {type(layer).__name__}, no nn.Linear"
    variants = getattr(wrapper, "lora_variant", None) or {}
    if variants:
        return f"the adapter around it is a variant of LoRA, {type(next(iter(variants.values()))).__name__}"
    if any(getattr(wrapper, "merged_adapters", None) or ()):
        return "an adapter is merged into it; unmerge it first"
    return None


def place_adapters(wrapper: Any, prefix: str, base: Projection) -> Iterator[Projection]:
    """Put the adapters around a layer that is on the grid beside it."""
    grid, plan = base.plan.grid, base.plan
    between = Layout(grid, plan.out.dims[0], None)
    for name, first, second in adapters_of(wrapper):
        rank = first.out_features
        a = _place(first, f"{prefix}.lora_A.{name}", base, MatMulPlan(
            plan.a, Layout(grid, None, plan.a.dims[1]), between, transpose_b=True, name=f"{prefix}.lora_A.{name}"
        ), (rank, base.width), (), None)  # fmt: skip
        b = _place(second, f"{prefix}.lora_B.{name}", base, MatMulPlan(
            between, Layout(grid, plan.out.dims[1], None), plan.out, transpose_b=True, name=f"{prefix}.lora_B.{name}"
        ), (base.out_width, rank), base.sections, base.order if base.gives == plan.out else None)  # fmt: skip
        a.core = base.core
        b.core = base.core if base.leads_in else None
        b.gives_features = True
        yield from (a, b)


def _place(
    layer: Any, name: str, base: Projection, plan: MatMulPlan, shape: tuple[int, int], sections: tuple[int, ...],
    order: Tensor | None,
) -> Projection:  # fmt: skip
    placed: Projection = adopt(layer, Projection, base.frame, name)
    # As stored no dim is in parts, and in an order that DTensor has.
    rows = () if order is not None else expressible(plan.b.dims[0], base.mesh)
    stored = Layout(plan.grid, rows, expressible(plan.b.dims[1], base.mesh))
    placed.plan, placed.stored, placed.leads_in, placed.is_conv = plan, stored, base.leads_in, False
    placed.out_width, placed.width = shape
    placed.sections, placed.group, placed.core, placed.loud = sections, None, None, True
    placed.gives_features, placed.schedule = False, None
    # No child of it: peft turns the gradients of an adapter's modules on and off, and leaves those of the base.
    vars(placed)["adapts"] = base
    placed.order, placed.gives, placed.leads_into, placed.is_last = order, plan.out, None, False
    plan.check_divides({"m": 0, "k": placed.width, "n": placed.out_width})
    placed.placed("weight", stored, shape)
    bias = plan.bias if stored == plan.b else Layout(plan.grid, None)
    placed.placed("bias", bias, shape[:1], (placed.real_out,))
    return placed


def wrappers_in(modules: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the wrappers whose layer is on a grid and some of whose adapters are not."""
    for name, module in modules.items():
        if is_wrapper(module) and isinstance(module.base_layer, Projection) and adapters_of(module):
            yield name, module
