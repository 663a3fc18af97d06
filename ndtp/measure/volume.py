"""Communication volume across grids: predicted by the algebra, metered on a fake process group, and on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ndtp.algebra.grid import Grid
from ndtp.algebra.schemes import block_layouts, scheme_of
from ndtp.algebra.volume import Volume
from ndtp.algebra.wire import Wire
from ndtp.collectives.backends import FAKE
from ndtp.collectives.meter import CommMeter
from ndtp.dtypes import SIZES, Dtype
from ndtp.errors import GridError, LayoutError
from ndtp.planner.block_cost import AXES as COST_AXES
from ndtp.planner.block_cost import Block, Grids, memory
from ndtp.runtime.process_grid import ProcessGrid

AXES = ("z", "x", "y")


@dataclass(frozen=True)
class BlockShape:
    tokens: int
    hidden: int
    ffn: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.hidden} x {self.ffn}"

    def products(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(M, K, N) of up and down."""
        return (self.tokens, self.hidden, self.ffn), (self.tokens, self.ffn, self.hidden)


@dataclass(frozen=True)
class VolumeCase:
    """A grid under a scheme."""

    grid: Grid
    scheme: str

    def __str__(self) -> str:
        axes = self.grid.nontrivial(self.grid.names)
        return " ".join(f"{axis}={self.grid[axis]}" for axis in axes) or "one rank"

    def predicted(self, shape: BlockShape, dtype: Dtype = "float32", wire: Wire | None = None) -> Volume:
        """Bytes per rank of a forward and backward as they travel, by the algebra.

        Raises:
            LayoutError: sizes that the grid does not divide.
        """
        up, down = block_layouts(self.grid, self.scheme).plans()
        first, second = shape.products()
        return up.volume(first, dtype, wire) + down.volume(second, dtype, wire)


def cases(ranks: int, shape: BlockShape, top: int) -> list[VolumeCase]:
    """The grids of `ranks` ranks that divide the shape: the `top` ones by volume, and the best of each scheme.

    Raises:
        GridError: none does.
    """
    found: list[tuple[int, int, VolumeCase]] = []
    for grid in Grid.all(ranks, AXES):
        schemes = [scheme_of(grid)]
        schemes += ["1d"] * (schemes == ["1d-sp"])
        for scheme in schemes:
            case = VolumeCase(grid, scheme)
            try:
                found.append((case.predicted(shape).total, len(found), case))
            except LayoutError:
                continue
    if not found:
        sizes = [size // ranks * ranks or ranks for size in (shape.tokens, shape.hidden, shape.ffn)]
        raise GridError(
            f"bench: no grid of {ranks} ranks divides {shape} (tokens x hidden x ffn)\n"
            f"  fix: multiples of {ranks}, such as {' x '.join(map(str, sizes))}"
        )
    ranked = [case for *_, case in sorted(found)]
    first = {scheme: next((c for c in ranked if c.scheme == scheme), None) for scheme in ("1d", "1d-sp", "2d", "3d")}
    return [case for i, case in enumerate(ranked) if i < top or case in first.values()]


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """A process group of `ranks` ranks of which only rank 0 exists; what it receives is never written.

    Raises:
        GridError: the program already is in a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise GridError("bench volume: meters on a process group of its own; run it outside of torchrun")
    dist.init_process_group(FAKE.name, store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def meter(
    case: VolumeCase, shape: BlockShape, dtype: torch.dtype, device: str = "meta", wire: Wire | None = None
) -> Volume:
    """Return what this rank receives in a forward and backward of `ndtp.nn.MLP`, in the current process group."""
    from ndtp.nn import MLP

    mesh = ProcessGrid(case.grid, device_type="cpu", wire=wire)
    mlp = MLP(shape.hidden, shape.ffn, bias=False, mesh=mesh, scheme=case.scheme, device=device, dtype=dtype, seed=0)
    x = torch.ones(mlp.in_layout.shard_shape((shape.tokens, shape.hidden)), device=device, dtype=dtype)
    return meter_step(mlp, x.requires_grad_())


def meter_step(module: torch.nn.Module, x: Tensor) -> Volume:
    with CommMeter() as metered:
        y = module(x)
        y.backward(torch.ones_like(y))
    return metered.volume


def meter_real(
    cases: Sequence[VolumeCase],
    shape: BlockShape,
    dtype_name: str,
    run: Callable[..., list[list[Volume]]],
    wire: Wire | None = None,
) -> list[list[Volume]]:
    """Measure on every real rank, which `run` (`ndtp.testing.run`) starts: `[rank][case]`. The caller compares the
    ranks.
    """
    return run(_meter_all, cases[0].grid.num_ranks, args=(list(cases), shape, dtype_name, wire))


def _meter_all(cases: Sequence[VolumeCase], shape: BlockShape, dtype_name: str, wire: Wire | None) -> list[Volume]:
    return [meter(case, shape, getattr(torch, dtype_name), "cpu", wire) for case in cases]


def bytes_needed(cases: Sequence[VolumeCase], shape: BlockShape, dtype: str, rivals: bool = False) -> int:
    """Return the bytes that all ranks hold of these cases at once, and of the whole weights that rivals begin with."""
    block, itemsize = Block.mlp(shape.tokens, shape.hidden, shape.ffn), SIZES[dtype]
    kept, working = 0, 0  # weights and their gradients of all cases; what one of them at a time works on
    for case in cases:
        g = Grids(**(dict.fromkeys(COST_AXES, 1) | dict(zip(case.grid.names, case.grid.shape, strict=True))))
        if case.scheme == "1d":  # activations whole on every rank
            g = Grids(1, 1, case.grid.num_ranks, 1)
        found = memory(block, g, itemsize, "none")
        kept += int(found.weights + found.gradients)
        working = max(working, int(found.activations + found.working))
    whole = itemsize * block.parameters if rivals else 0
    return cases[0].grid.num_ranks * (kept + working + whole)


def scaled_down(shape: BlockShape, ranks: int, elements: int = 2**24) -> BlockShape:
    """The shape, halved until a product has few enough terms for a CPU; still a multiple of what grids divide by."""
    sizes = original = [shape.tokens, shape.hidden, shape.ffn]
    while sizes[0] * sizes[1] * sizes[2] > elements:
        halves = [i for i, size in enumerate(sizes) if size % (2 * ranks) == 0]
        if not halves:
            break
        largest = max(halves, key=lambda i: sizes[i] / original[i])
        sizes = [size // 2 if i == largest else size for i, size in enumerate(sizes)]
    return BlockShape(*sizes)


# -------------------------------------------------------------------------------------- the published table


@dataclass(frozen=True)
class Analysis:
    """A row of MindSpore's table, in numbers: shares of the dense block that one rank holds or computes."""

    case: VolumeCase
    computation: float
    parameters: float
    activations: float
    published: int
    forward: int
    backward: int


def analysis(case: VolumeCase, shape: BlockShape) -> Analysis:
    """Computation, memory and communication of a case; `published` is the document's formula, forward, in elements.

    Source: MindSpore documentation, "High Dimension Tensor Parallel": 1D 2 (P-1) b s h / P, 2D
    2 b s [e (x-1) + h (y-1)] / (x y), 3D 2 [b s e (x-1) + b s h (y-1) + h e (z-1)] / (x y z).
    """
    layouts = block_layouts(case.grid, case.scheme)
    plans = layouts.plans()
    flops = weights = dense_flops = dense_weights = 0
    for plan, (m, k, n) in zip(plans, shape.products(), strict=True):
        _, rows, inner, columns = plan.gemm_shape((m, k, n))
        flops += rows * inner * columns
        weights += k * n // (plan.b.num_splits(0) * plan.b.num_splits(1))
        dense_flops += m * k * n
        dense_weights += k * n
    t, h, e = shape.tokens, shape.hidden, shape.ffn
    stored = [(layouts.input, h), (layouts.hidden, e), (layouts.output, h)]
    held = sum(t * width // (layout.num_splits(0) * layout.num_splits(1)) for layout, width in stored)
    x, y, z = (case.grid[axis] for axis in ("x", "y", "z"))
    ranks = case.grid.num_ranks
    if case.scheme == "1d":
        published = 2 * (ranks - 1) * t * h // ranks
    else:
        published = 2 * (t * e * (x - 1) + t * h * (y - 1) + h * e * (z - 1)) // ranks
    volume = case.predicted(shape)
    forward = volume.by("phase", "elements").get("forward", 0)
    return Analysis(
        case, flops / dense_flops, weights / dense_weights, held / (t * (2 * h + e)), published, forward,
        volume.elements - forward,
    )  # fmt: skip
