"""`auto` chooses as well as what programs have issued would have it, by a clock that knows nothing of its tasks."""

from dataclasses import replace

import pytest
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
from ndtp.schedule.chunk_choice import choose, seconds_of
from ndtp.schedule.host import EAGER
from ndtp.testing import RecordedCuda
from ndtp.testing.cuda.multiprocessors import Operation
from ndtp.testing.cuda.recorded_clock import RecordedClock

SMALLER = 16  # every size, so that bytes are 16^2 and products 16^3 times fewer
COUNTS = (1, 2, 4, 8)
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


@pytest.mark.parametrize(
    ("scheme", "grid", "sizes"),
    [
        ("3d", Grid(z=2, x=2, y=2), (8192, 4096, 16384)),
        ("3d", Grid(z=4, x=2, y=2), (32768, 4096, 16384)),
        ("2d", Grid(x=4, y=4), (32768, 8192, 32768)),
        ("1d-sp", Grid(x=8), (32768, 4096, 16384)),
    ],
    ids=str,
)
def test_the_choice_of_auto_is_within_a_twentieth_of_the_best(scheme, grid, sizes):
    """On H200 and B200, links that cost products something and that do not, eager and captured."""
    traces = {chunks: trace(grid, scheme, sizes, chunks) for chunks in COUNTS}
    tokens, hidden, inner = sizes
    plans = block_layouts(grid, scheme).plans("block", chunks="auto")
    letters = [{"m": tokens, "k": hidden, "n": inner}, {"m": tokens, "k": inner, "n": hidden}]
    chosen = set()
    for name in ("h200-ib", "b200-ib"):
        for contention in (None, 0.0):
            machine = Hardware.load(name)
            machine = machine if contention is None else replace(machine, contention=contention)
            for is_eager in (True, False):
                speeds = speeds_of(machine, grid, "bfloat16")
                speeds = speeds if is_eager else replace(speeds, host=None)
                times = {n: clock(machine, grid, is_eager, len(found)).step(found) for n, found in traces.items()}
                count, _ = choose(plans, letters, 2, speeds)
                assert times[count] <= 1.05 * min(times.values()), (name, contention, is_eager, count, times)
                for n in COUNTS:  # and it knows how long each number takes
                    assert seconds_of(plans, letters, 2, speeds, n) == pytest.approx(times[n], rel=0.15)
                chosen.add(count)
    assert len(chosen) > 1 or sizes[0] == 8192, "the choice depends on something"


def test_the_clock_by_hand():
    """Two kernels with a collective beside the second; a host that is slower than both; one that is ahead."""
    operations = [
        Operation(1, 1, "a", {}), Operation(2, 1, "gather", {1: 1}, (0, 1)), Operation(1, 2, "b", {1: 1}),
        Operation(1, 3, "c", {1: 2, 2: 1}),
    ]  # fmt: skip
    device = {"a": 1.0, "gather": 3.0, "b": 2.0, "c": 1.0}
    assert RecordedClock(lambda each: device[each.name]).step(operations) == 5.0
    assert RecordedClock(lambda each: device[each.name], contention=0.5).step(operations) == 5.5
    assert RecordedClock(lambda each: device[each.name], lambda each: 2.0).step(operations) == 8.0
    assert RecordedClock(lambda each: device[each.name], lambda each: 0.5).step(operations) == 5.0
