"""The number of tokens from which on a block's products take as long as its host needs to issue them.  Pure."""

from __future__ import annotations

from ndtp.algebra.grid import Grid
from ndtp.errors import GridError
from ndtp.planner.block_cost import Block, row_multiple
from ndtp.planner.grids import grids_of
from ndtp.planner.hardware import Hardware
from ndtp.planner.request import Request
from ndtp.planner.search import work_on
from ndtp.schedule.clocks import replayed

MOST_TOKENS = 2**24


def host_limit(
    grid: Grid,
    hidden: int,
    ffn: int,
    hardware: str | Hardware,
    *,
    dtype: str = "bfloat16",
    chunks: int = 1,
) -> int:
    """Return the tokens of a step, over all ranks, from which on a block computes as long as the host issues it.

    Below them the host limits an eager step, unless collectives take longer than either, and `ndtp.capture` helps.

    Args:
        chunks: pieces of rows whose collectives run beside their products: each costs the host its tasks.

    Raises:
        GridError: a profile without a host that issues, or a block that no number of tokens lets catch up.
    """
    machine = Hardware.load(hardware)
    lane = machine.host_lane
    if lane is None:
        raise GridError(f"host_limit: {machine.name!r} has no host beside what computes\n  fix: host = 1.0 in its file")
    unit = row_multiple(grids_of(grid)) * chunks

    def is_enough(count: int) -> bool:
        request = Request((Block.mlp(unit * count, hidden, ffn),), grid.num_ranks, machine, dtype=dtype, chunks=chunks)
        work, network = work_on(request, grid)
        computes = sum(3 * product.gemm + 4 * product.after for product in work.products)
        return bool(computes >= replayed(work.products, network, chunks, work.regather, host=lane).issued)

    most = 1
    while not is_enough(most):
        most *= 2
        if most * unit > MOST_TOKENS:
            raise GridError(f"host_limit: the host limits the block for any number of tokens up to {MOST_TOKENS:,}")
    least = most // 2
    while most - least > 1:
        middle = (most + least) // 2
        least, most = (least, middle) if is_enough(middle) else (middle, most)
    return most * unit
