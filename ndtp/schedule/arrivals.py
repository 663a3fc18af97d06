"""The operand of a product that arrives first, its rows or its weight. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ndtp.algebra.volume import traffic

if TYPE_CHECKING:
    from ndtp.algebra.matmul_plan import MatMulPlan


def rows_first(plans: Sequence[MatMulPlan], sizes: Sequence[Mapping[str, int]]) -> tuple[bool, ...]:
    """Return, for every product of a chain, whether its rows are where they are needed before its weight is.

    The weight is gathered, and more of it than of the rows of the product before: else these are there later.
    """
    return tuple(
        not plan.relayouts["A"]
        and (p == 0 or not plans[p - 1].relayouts["C"])
        and _received(plan, sizes[p], "B") > (_received(plans[p - 1], sizes[p - 1], "A") if p else 0)
        for p, plan in enumerate(plans)
    )


def _received(plan: MatMulPlan, sizes: Mapping[str, int], operand: str) -> int:
    """Elements that bring an operand to a rank."""
    return sum(
        each.elements
        for each in traffic(plan.grid, plan.relayouts[operand], plan.start_shape(operand, sizes), "forward")
    )


def weight_in_parts(plan: MatMulPlan) -> tuple[str, ...]:
    """The axes over which a weight is gathered along what C is summed over, if C may be begun with this rank's part.

    Of ranks with the same rows each would begin with another part, and round otherwise: the axes split the rows.
    """
    steps, letters = plan.relayouts["B"], plan.b_letters
    alone = len(plan.c_letters) == 2 and len(steps) == 1 and (steps[0].kind, steps[0].dim) == ("all_gather", 1)
    axes = steps[0].axes if alone and letters[1] not in plan.c_letters else ()
    return axes if all(plan.roles.get(axis) == "m" for axis in axes) else ()
