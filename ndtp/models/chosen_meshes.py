"""The process grid of a model where the user gives none: all ranks on a scheme's axes, or what the planner chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from ndtp.algebra.grid import Grid
from ndtp.algebra.schemes import BlockLayouts
from ndtp.algebra.wire import Wire
from ndtp.errors import LayoutError
from ndtp.models.auto import best_grid, best_layouts, request_for
from ndtp.models.linear_pairs import Pair
from ndtp.models.opened_attention import INPUTS, can_open, projection
from ndtp.models.roles import features, is_linear
from ndtp.planner.hardware import Hardware
from ndtp.runtime.given_mesh import GivenWire, ranks_of_the_world
from ndtp.runtime.process_grid import ProcessGrid


def mesh_of_all_ranks(scheme: str, axes: Sequence[str] | None, wire: GivenWire) -> ProcessGrid:
    """The mesh where none is given: all ranks on the axes of a scheme."""
    names = tuple(axes or {"1d": "x", "2d": "xy", "3d": "xyz"}[scheme[:2]])
    return ProcessGrid(even_grid(ranks_of_the_world(), names[2:] + names[:2]), wire=wire)


def even_grid(num_ranks: int, names: Sequence[str]) -> Grid:
    """The grid over the named axes whose largest is smallest; of equal ones, that with the larger sizes last."""
    grids = Grid.all(num_ranks, names)
    return min(grids, key=lambda grid: (sorted(grid.shape, reverse=True), grid.shape))


def best_for_products(
    model: nn.Module,
    pairs: Sequence[Pair],
    mesh: ProcessGrid | None,
    tokens: int | None,
    hardware: str | Hardware,
    wire: GivenWire,
) -> tuple[ProcessGrid, BlockLayouts]:
    """The mesh and the layouts that the planner would take for products of pairs, or for all where there are none."""
    if tokens is None:
        raise LayoutError("parallelize: scheme='auto' plans for a number of rows; give tokens=, those of a step")
    ups: list[Any] = [model.get_submodule(pair.up) for pair in pairs]
    sizes = [(up.in_features, up.out_features, pair.gate is not None) for up, pair in zip(ups, pairs, strict=True)]
    if not pairs:
        sizes = _blocks(model)
    weights = [up.weight for up in ups] or [m.weight for m in model.modules() if is_linear(m, casts=True)]
    weights = weights or [p for p in model.parameters() if p.dim() > 1]
    dtype = str(weights[0].dtype).removeprefix("torch.") if weights else "float32"
    ranks = mesh.grid.num_ranks if mesh else ranks_of_the_world()
    used = mesh.wire if mesh else Wire.of(wire)
    request = request_for(sizes, tokens, ranks, hardware, dtype, used)  # type: ignore[arg-type]
    mesh = mesh or ProcessGrid(best_grid(request), wire=used)
    return mesh, best_layouts(request, mesh.grid)


def _blocks(model: nn.Module) -> list[tuple[int, int, bool]]:
    """All products, as pairs of products of the same two sizes, there and back."""
    counts: Counter[tuple[int, ...]] = Counter()
    for module in model.modules():
        if can_open(module):
            attention: Any = module
            parts = [projection(attention, each) for each in INPUTS]
            counts.update(tuple(sorted(features(part))) for part in (*parts, attention.out_proj))
        elif is_linear(module, casts=True):
            counts[tuple(sorted(features(module)))] += 1
    return [(small, large, False) for (small, large), n in counts.items() if small > 1 for _ in range(-(-n // 2))]
