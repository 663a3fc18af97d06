"""The schedule of a block, or of one of its products, on the clocks of a machine.  Pure."""

from __future__ import annotations

from ndtp.algebra.grid import Grid
from ndtp.errors import GridError
from ndtp.planner import block_cost
from ndtp.planner.block_cost import AXES, Block, Grids
from ndtp.planner.hardware import Hardware
from ndtp.planner.request import Request
from ndtp.planner.search import timeline
from ndtp.schedule.clocks import LaneSpan

PRODUCTS = ("block", "up", "down")


def schedule(
    grid: Grid,
    sizes: tuple[int, int, int],
    hardware: Hardware,
    *,
    dtype: str = "bfloat16",
    chunks: int = 1,
    product: str = "block",
    captured: bool = True,
) -> list[LaneSpan]:
    """Return the spans of a training step: what a rank computes, and what the link of each axis carries, in seconds.

    Args:
        grid: axes out of dp, z, x and y.
        sizes: tokens, hidden and ffn.
        chunks: pieces of rows whose collectives run beside their products.
        product: "block", or "up" or "down" alone.
        captured: a graph issues the step; else the host does, in a lane of its own.

    Raises:
        GridError: another axis; sizes that the grid, or the chunks, do not divide; names what would do.
    """
    unknown = [axis for axis in grid if axis not in AXES]
    if unknown:
        raise GridError(f"schedule: grid {grid} has an axis {unknown[0]!r}; a block uses {', '.join(AXES)}")
    if product not in PRODUCTS:
        raise GridError(f"schedule: product={product!r} is not one of {', '.join(PRODUCTS)}")
    block = Block.mlp(*sizes)
    request = Request((block,), grid.num_ranks, hardware, dtype=dtype, chunks=chunks, captured=captured)
    g = Grids(**(dict.fromkeys(AXES, 1) | dict(zip(grid.names, grid.shape, strict=True))))
    padded = block_cost.padded(block, g)
    wanted = {"tokens": padded.tokens, "hidden": padded.hidden, "ffn": padded.inner}
    for (name, multiple), size in zip(wanted.items(), sizes, strict=True):
        if multiple != size:
            raise GridError(f"schedule: grid {grid} does not divide {name}={size}\n  fix: {name}={multiple}")
    rows = block.tokens // block_cost.row_multiple(g)
    if rows % chunks:
        # 1 divides, and so there is one below; beyond twice as many chunks none is near.
        sides = range(chunks - 1, 0, -1), range(chunks + 1, min(rows, 2 * chunks) + 1)
        near = [next((n for n in side if rows % n == 0), 0) for side in sides]
        nearest = [n for n in near if n]
        raise GridError(
            f"schedule: {chunks} chunks do not divide the {rows} rows that a rank exchanges with each other\n"
            f"  fix: {' or '.join(map(str, nearest))} chunks"
        )
    return timeline(request, grid, None if product == "block" else PRODUCTS.index(product) - 1)
