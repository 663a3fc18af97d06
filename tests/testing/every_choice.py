"""`auto` against every number of chunks, by a clock of recorded programs that knows nothing of the tasks of a plan.

    python tests/testing/every_choice.py [--json bench/results/chunk_choices.json]

A block is trained for two steps in a process that plays one rank of the grid, in each number of chunks that its rows
allow.  `RecordedCuda` records the second step, and `RecordedClock` times what is recorded with the figures of an H200
and a B200: eagerly and captured, with links that cost products something and that do not.  For each the program prints
how far the choice is from the best number.  It takes a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp
from ndtp import Grid, ProcessGrid
from ndtp.algebra.schemes import block_layouts
from ndtp.compute.gemm import TorchGemm
from ndtp.planner.hardware import Hardware
from ndtp.planner.speeds import speeds_of
from ndtp.planner.time_model import Reach, cost_of
from ndtp.schedule.chunk_choice import COUNTS, choose, seconds_of
from ndtp.schedule.host import EAGER
from ndtp.schedule.tasks import RowChunks
from ndtp.testing import RecordedClock, RecordedCuda

SMALLER = 16  # every size, so that bytes are 16^2 and products 16^3 times fewer
KINDS = {"_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}


class Noted(TorchGemm):
    """Products and activations that only say that they run, and how much they compute."""

    own_part_from = 0

    def __init__(self, cuda):
        self.cuda = cuda

    def bound_product(self, transpose_a, transpose_b, dims):
        def run(a, b):
            c = a.new_empty(*a.shape[:-2], a.shape[-1 if transpose_a else -2], b.shape[-2 if transpose_b else -1])
            return self.noted(a, b, c, 2 * c.numel() * a.shape[-2 if transpose_a else -1])

        return run

    def product_of_blocks(self, a, b, transpose_a, transpose_b, *, out=None, blocks=1, parts=None, accumulate=False):
        rows, inner = size_of(a, int(transpose_a)), size_of(a, int(not transpose_a))
        columns, cuts = size_of(b, int(not transpose_b)), a.shape[0] if a.dim() == 3 else b.shape[0]
        if out is None:
            out = a.new_empty((blocks, rows, columns // blocks) if blocks > 1 else (rows, columns))
        return self.noted(a, b, out, 2 * rows * columns * inner * (1 if parts is None else len(parts) / cuts))

    def noted(self, a, b, c, flops):
        self.cuda.kernel(f"product {flops}", [a, b], [c])
        return c

    def activate(self, pre, name, out=None):
        return self.passed([pre], out)

    def activate_backward(self, grad, pre, name, out=None):
        return self.passed([pre, grad], out)

    def passed(self, tensors, out):
        out = torch.empty_like(tensors[0]) if out is None else out
        self.cuda.kernel("activation", tensors, [out])
        return out


def size_of(matrix, dim):
    return matrix.shape[dim - 2] * (matrix.shape[0] if matrix.dim() == 3 and dim == 1 else 1)


def trace(grid, scheme, sizes, chunks):
    """The operations of the second step of a block."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=grid.num_ranks)
    try:
        with RecordedCuda(record=True) as cuda:
            mesh = ProcessGrid(grid, device_type="cpu", groups_per_axis=2)
            mesh.gemm = Noted(cuda)
            tokens, hidden, inner = (size // SMALLER for size in sizes)
            how = {"bias": False, "mesh": mesh, "scheme": scheme, "chunks": chunks, "dtype": torch.bfloat16}
            block = ndtp.nn.MLP(hidden, inner, **how)
            shape = block.in_layout.shard_shape((tokens, hidden))
            x = torch.empty(shape, dtype=torch.bfloat16).requires_grad_()
            for _ in range(2):
                begin = len(cuda.trace)
                block(x).backward(torch.empty_like(x))
                x.grad = None
                for parameter in block.parameters():
                    parameter.grad = None
        return cuda.trace[begin:]
    finally:
        dist.destroy_process_group()


def clock(machine, grid, is_eager, count):
    def reach_of(each):
        stride = each.members[1] - each.members[0]
        return Reach.of(len(each.members), stride, grid.num_ranks, machine.ranks_per_node)

    def device(each):
        if each.members is not None:
            ranks, num_bytes = len(each.members), SMALLER**2 * max(each.read_bytes, each.written_bytes)
            per_byte, latency = map(float, cost_of(machine, KINDS[each.name], ranks, reach_of(each)))
            return num_bytes * (ranks - 1) / ranks * per_byte + latency
        if each.name.startswith("product "):
            flops = SMALLER**3 * float(each.name.split()[1])
            return flops / machine.flops_per_second("bfloat16") + machine.launch_us * 1e-6
        return SMALLER**2 * (each.read_bytes + each.written_bytes) / (machine.memory_gbs * 1e9)

    def host(each):  # the two passes of the block are spread over all that they issue
        spread = 2 * EAGER.chain / count
        if each.members is not None:
            return EAGER.start + EAGER.wait + spread
        return (EAGER.multiply if each.name.startswith("product ") else EAGER.activate) + spread

    link = {"link": lambda each: str(reach_of(each).nodes > 1), "contention": machine.contention}
    return RecordedClock(device, host if is_eager else None, **link)


class Block(NamedTuple):
    """A block on a grid: the scheme, and tokens, hidden and inner features."""

    scheme: str
    grid: Grid
    sizes: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{self.scheme} {self.grid} {'x'.join(map(str, self.sizes))}"


CUBE, LARGE = Grid(z=2, x=2, y=2), Grid(z=4, x=4, y=4)
BLOCKS = [
    *[Block("3d", CUBE, (tokens, 4096, 14336)) for tokens in (2048, 8192, 32768)],
    Block("3d", CUBE, (12288, 4096, 16384)),
    Block("3d", CUBE, (32768, 8192, 32768)),
    Block("3d", Grid(z=4, x=2, y=2), (32768, 4096, 16384)),
    *[Block("3d", LARGE, (tokens, 8192, 32768)) for tokens in (16384, 32768, 65536)],
    *[Block("3d", LARGE, sizes) for sizes in ((32768, 4096, 16384), (131072, 8192, 28672))],
    Block("3d", Grid(z=2, x=4, y=8), (32768, 8192, 32768)),
    Block("3d", Grid(z=8, x=2, y=4), (65536, 4096, 16384)),
    Block("2d", Grid(x=2, y=4), (8192, 4096, 16384)),
    Block("2d", Grid(x=4, y=4), (32768, 8192, 32768)),
    Block("2d", Grid(x=8, y=8), (65536, 8192, 32768)),
    Block("2d-features", Grid(x=4, y=2), (8192, 4096, 16384)),
    *[Block("1d-sp", Grid(x=8), sizes) for sizes in ((32768, 4096, 16384), (2048, 8192, 32768))],
    Block("1d-sp", Grid(x=16), (12288, 4096, 16384)),
]


class Choice(NamedTuple):
    """The choice of one block on one machine.

    Attributes:
        where: the machine, and how the step is issued.
        chosen: by `auto`.
        times: number of chunks -> seconds of a step by the clock.
        predicted: number of chunks -> seconds of a step, by which `auto` chooses.
    """

    where: str
    chosen: int
    times: dict[int, float]
    predicted: dict[int, float]

    @property
    def above_best(self) -> float:
        """Return the time of the choice over that of the best number."""
        return self.times[self.chosen] / min(self.times.values())


def choices(block: Block) -> Iterator[Choice]:
    """On H200 and B200, links that cost products something and that do not, eager and captured."""
    scheme, grid, (tokens, hidden, inner) = block
    plans = block_layouts(grid, scheme).plans("block", chunks="auto")
    letters = [{"m": tokens, "k": hidden, "n": inner}, {"m": tokens, "k": inner, "n": hidden}]
    counts = [n for n in COUNTS if RowChunks.of(plans, letters, n)[0].count == n]
    traces = {n: trace(grid, scheme, block.sizes, n) for n in counts}
    for name in ("h200-ib", "b200-ib"):
        for contention in (None, 0.0):
            machine = Hardware.load(name)
            machine = machine if contention is None else replace(machine, contention=contention)
            for is_eager in (True, False):
                speeds = speeds_of(machine, grid, "bfloat16")
                assert speeds is not None
                speeds = speeds if is_eager else replace(speeds, host=None)
                times = {n: clock(machine, grid, is_eager, len(found)).step(found) for n, found in traces.items()}
                where = f"{name} contention {machine.contention:g} {'eager' if is_eager else 'captured'}"
                predicted = {n: seconds_of(plans, letters, 2, speeds, n) for n in counts}
                yield Choice(where, choose(plans, letters, 2, speeds)[0], times, predicted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record: dict[str, Any] = {}
    for block in BLOCKS:
        for each in choices(block):
            times = "  ".join(f"{n}: {seconds * 1e6:.0f}" for n, seconds in each.times.items())
            print(f"{block!s:40} {each.where:32} chose {each.chosen}, {each.above_best:.3f} of the best; us: {times}")
            record[f"{block}, {each.where}"] = {
                "chosen": each.chosen,
                "above_best": round(each.above_best, 4),
                "us": {n: round(seconds * 1e6, 1) for n, seconds in each.times.items()},
            }
    worst = max(each["above_best"] for each in record.values())
    print(f"{len(record)} cases, at most {worst:.3f} of the best")
    if arguments.json:
        arguments.json.write_text(json.dumps({"worst": worst, "cases": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
