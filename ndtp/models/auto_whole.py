"""`scheme="auto"` for a whole model: its attention, MLPs, embedding and head planned together, on one grid."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import nn

from ndtp.algebra.schemes import BlockLayouts
from ndtp.errors import LayoutError
from ndtp.models.auto import best_grid, best_layouts, whole_request
from ndtp.models.roles import around_layers, features, find_attention, find_mlps, hidden_size
from ndtp.planner.block_cost import Block, Grids, volume
from ndtp.planner.hardware import Hardware
from ndtp.planner.request import Request
from ndtp.runtime.process_grid import ProcessGrid


def blocks_of(model: Any, tokens: int) -> list[Block]:
    """What the planner knows of a model's layers: of what stays whole, nothing."""
    hidden, modules = hidden_size(model), dict(model.named_modules())
    attention, _ = find_attention(model, hidden)
    taken = {name for role in attention for name in (*role.inputs.values(), role.output)}
    table = model.get_input_embeddings()
    embedded, around = around_layers(model, modules, hidden)
    blocks = [Block.vocabulary(tokens, embedded, table.num_embeddings)] if isinstance(table, nn.Embedding) else []
    blocks += [Block.attention(tokens, hidden, role.heads, role.kv_heads, role.head_dim) for role in attention]
    for mlp in find_mlps(model, hidden, taken | around):
        is_gated = len(mlp.ups) == 2 or bool(mlp.sections)
        blocks.append(Block.mlp(tokens, hidden, features(modules[mlp.down])[0], is_gated))
    return blocks


def plan_whole(
    model: nn.Module, mesh: ProcessGrid | None, tokens: int | None, hardware: str | Hardware
) -> tuple[ProcessGrid, BlockLayouts, str]:
    """The mesh, the layouts, and a line for the report.  The same on every rank: sizes alone decide.

    Raises:
        LayoutError: no number of rows to plan for; heads that nothing divides.
    """
    if tokens is None:
        raise LayoutError("parallelize: scheme='auto' plans for a number of rows; give tokens=, those of a step")
    ranks = mesh.grid.num_ranks if mesh else dist.get_world_size() if dist.is_initialized() else 1
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    request = whole_request(blocks_of(model, tokens), ranks, hardware, dtype)
    mesh = mesh or ProcessGrid(best_grid(request))
    layouts = best_layouts(request, mesh.grid, stays_split=True)
    return mesh, layouts, _said(request, mesh, layouts)


def _said(request: Request, mesh: ProcessGrid, layouts: BlockLayouts) -> str:
    grid = mesh.grid
    x, y = (grid.size(layout.dims[1]) for layout in (layouts.input, layouts.hidden))
    dp = grid["dp"] if "dp" in grid else 1
    sizes = Grids(dp, grid.num_ranks // (dp * x * y), x, y)
    moved = sum(volume(block, sizes) for block in request.blocks) * request.itemsize
    names = Counter(block.name for block in request.blocks)
    what = ", ".join(f"{count} {name}" for name, count in names.items())
    return (
        f"for {request.blocks[0].tokens} rows on {request.hardware.name}: {what} on grid {grid}, hidden states "
        f"[{layouts.input.label('MK')}]; {moved / 2**20:.1f} MiB received in a step"
    )
