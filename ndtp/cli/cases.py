"""The cases that `ndtp check` runs on every rank: products and blocks of every scheme against dense, with their
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.volume import Volume
from ndtp.collectives.meter import CommMeter
from ndtp.compute.activations import activation_named, width_of
from ndtp.nn import MLP
from ndtp.ops.products import matmul
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.testing import assert_matches_dense, small_integers
from ndtp.testing.dense import DenseResult

if TYPE_CHECKING:
    from ndtp.cli.progress import Counter
    from ndtp.collectives.collectives import Collectives
    from ndtp.collectives.handles import Route

TENSORS = ("C", "dA", "dB", "dbias")


@dataclass(frozen=True)
class Case:
    """One product of a scheme's block, or the block itself."""

    scheme: str
    dtype: str
    kind: str  # "up", "down", "block", "gated block" or "padded block"
    transpose_a: bool = False
    transpose_b: bool = True
    batched: bool = False
    bias: bool = True

    def name(self, grid: Grid) -> str:
        words = [name for name in ("transpose_a", "transpose_b", "batched", "bias") if getattr(self, name)]
        return " ".join([self.scheme, str(grid), self.dtype, self.kind, *(words if "block" not in self.kind else ())])


@dataclass(frozen=True)
class Result:
    """The result of one case on one rank. `max_error` is the error of real inputs against fp64."""

    max_error: float
    predicted_bytes: int
    measured_bytes: int
    failure: str | None = None


def cases(scheme: str, dtype: str, quick: bool = False) -> Iterator[Case]:
    """All forms of the products and the blocks; `quick` takes the products in the form that modules use alone."""
    for kind in ("up", "down"):
        for flags in product(*((False, True),) * 4) if not quick else [()]:
            yield Case(scheme, dtype, kind, *flags)
    for kind in ("block", "gated block", "padded block"):
        yield Case(scheme, dtype, kind)


def axes_of(grid: Grid, scheme: str) -> tuple[str, ...] | None:
    """2D uses x and y; where the grid has z as well, it splits rows, or a batch dim, as data parallelism does."""
    return ("x", "y") if scheme.startswith("2d") and grid["z"] > 1 else None


def check_grid(
    counter: Counter,
    sizes: Mapping[str, int],
    schemes: tuple[str, ...],
    dtypes: tuple[str, ...],
    broken: str | None,
    quick: bool = False,
) -> list[Result]:
    """All cases of a grid, in the order of `cases`; runs on every rank."""
    mesh = ProcessGrid(Grid(sizes))
    mesh.gemm.own_part_from = 0  # these products are tiny, and stand for large ones
    if broken:
        mesh.collectives = out_of_order(mesh.collectives, broken)
    results = []
    for scheme, dtype in product(schemes, dtypes):
        for case in cases(scheme, dtype, quick):
            try:
                results.append(_check_block(case, mesh) if "block" in case.kind else _check_product(case, mesh))
            except Exception as error:
                raise RuntimeError(f"case '{case.name(mesh.grid)}' stopped: {error}") from error
        counter.advance()
    _reference.cache_clear()
    plan_of.cache_clear()
    return results


# ------------------------------------------------------------------------------------------------------------ products


@cache
def plan_of(case: Case, grid: Grid) -> MatMulPlan:
    """The plan of a product of the scheme's block, its operands stored as the case says."""
    layouts = block_layouts(grid, case.scheme, axes_of(grid, case.scheme))
    a, b, c = (
        (layouts.input, layouts.up_weight, layouts.hidden)
        if case.kind == "up"
        else (layouts.hidden, layouts.down_weight, layouts.output)
    )
    # Weights are [out, in], which is what transpose_b means.
    a_dims = a.dims[::-1] if case.transpose_a else a.dims
    b_dims = b.dims if case.transpose_b else b.dims[::-1]
    stored = [a_dims, b_dims, c.dims]
    if case.batched:
        # z of a 2D scheme splits the batch dim instead of rows.
        batch = ("z",) if axes_of(grid, case.scheme) else ()
        stored = [(batch, *(tuple(axis for axis in axes if axis not in batch) for axes in dims)) for dims in stored]
    a, b, c = (Layout(grid, *dims) for dims in stored)
    return MatMulPlan(a, b, c, transpose_a=case.transpose_a, transpose_b=case.transpose_b, name=case.scheme)


def _check_product(case: Case, mesh: ProcessGrid) -> Result:
    ranks = mesh.grid.num_ranks
    shape = (ranks,) * case.batched + (ranks, 2 * ranks, 3 * ranks)  # every dim divides by all ranks, none is the same
    plan = plan_of(replace(case, bias=True), mesh.grid)  # the bias needs no plan of its own
    dtype = getattr(torch, case.dtype)
    predicted = plan.volume(shape, dtype, bias=case.bias)
    measured, failure, largest = Volume(), None, 0.0
    layouts = {"A": plan.a, "B": plan.b, "bias": plan.bias, "C": plan.out}
    layouts |= {"dA": plan.a, "dB": plan.b, "dbias": plan.bias}
    for exact in (True, False):
        inputs, expected = _reference(shape, case.transpose_a, case.transpose_b, case.bias, dtype, exact)
        shards = {
            tensor: layouts[tensor].shard(inputs[tensor], mesh.rank).clone().requires_grad_()
            for tensor in ("A", "B", "bias")
            if tensor in inputs
        }
        meter = CommMeter()
        with meter if exact else nullcontext():
            c = matmul(shards["A"], shards["B"], plan, mesh, shards.get("bias"))
            gradients = torch.autograd.grad(c, list(shards.values()), layouts["C"].shard(inputs["dC"], mesh.rank))
        measured = meter.volume if exact else measured
        for tensor, shard in zip(TENSORS, (c, *gradients), strict=False):
            where = layouts[tensor].slices(mesh.rank, expected[tensor].dense.shape)
            try:
                error = expected[tensor].check(shard, where, tensor)
                largest = largest if exact else max(largest, error)
            except AssertionError as error_:
                failure = failure or f"{mesh.describe()}, {'integers' if exact else 'real numbers'}: {error_}"
    if measured != predicted:
        failure = failure or f"{mesh.describe()}: bytes measured: {measured}; predicted: {predicted}"
    return Result(largest, predicted.total, measured.total, failure)


def exact_up_to(dtype: str) -> int:
    """The most ranks whose products of the least integers, three terms a rank and a bias, a dtype sums exactly."""
    return int((2 / torch.finfo(getattr(torch, dtype)).eps - 1) / 3)


@cache
def _reference(
    shape: tuple[int, ...], transpose_a: bool, transpose_b: bool, bias: bool, dtype: torch.dtype, exact: bool
) -> tuple[dict[str, Tensor], dict[str, DenseResult]]:
    """Whole inputs, and the dense results with what they may be off by."""
    *batch, m, k, n = shape
    shapes = {
        "A": (*batch, k, m) if transpose_a else (*batch, m, k),
        "B": (*batch, n, k) if transpose_b else (*batch, k, n),
        **({"bias": (n,)} if bias else {}),
        "dC": (*batch, m, n),
    }
    for magnitude in (3, 2, 1):
        generator = torch.Generator().manual_seed(0)
        inputs = {
            tensor: small_integers(size, generator, dtype, low=-magnitude, high=magnitude)
            if exact
            else torch.randn(size, generator=generator).to(dtype)
            for tensor, size in shapes.items()
        }
        # Sums of magnitudes bound every partial sum; below this every integer is exact.
        bound = max(
            x.max().item() for x in _dense({t: x.double().abs() for t, x in inputs.items()}, transpose_a, transpose_b)
        )
        if not exact or bound <= 2 / torch.finfo(dtype).eps:
            break
    else:
        raise ValueError(f"sums of {max(shape)} products are not exact in {dtype}; fix: fewer ranks or --dtype float32")
    dense = _dense(inputs, transpose_a, transpose_b)
    fp64 = _dense({tensor: x.double() for tensor, x in inputs.items()}, transpose_a, transpose_b)
    pairs = zip(TENSORS, dense, fp64, strict=False)
    return inputs, {tensor: DenseResult(result, wide, exact) for tensor, result, wide in pairs}


def _dense(inputs: Mapping[str, Tensor], transpose_a: bool, transpose_b: bool) -> list[Tensor]:
    """C, dA, dB and, with a bias, dbias."""
    leaves = {tensor: x.clone().requires_grad_() for tensor, x in inputs.items() if tensor != "dC"}
    a = leaves["A"].mT if transpose_a else leaves["A"]
    b = leaves["B"].mT if transpose_b else leaves["B"]
    c = a @ b + leaves["bias"] if "bias" in leaves else a @ b
    return [c.detach(), *torch.autograd.grad(c, list(leaves.values()), inputs["dC"])]


# -------------------------------------------------------------------------------------------------------------- blocks


def _check_block(case: Case, mesh: ProcessGrid) -> Result:
    ranks, dtype = mesh.grid.num_ranks, getattr(torch, case.dtype)
    pad, gated = case.kind == "padded block", case.kind == "gated block"
    hidden, inner = (2 * ranks - 1, 3 * ranks + 1) if pad else (2 * ranks, 3 * ranks)
    largest, failure = 0.0, None
    predicted = measured = Volume()
    # Two products in a row leave the integers that low precision holds.
    integers, real = (True,) * (dtype.itemsize >= 4), (False,) * (not pad or dtype.itemsize < 4)
    for exact in integers + real:
        activation = ("reglu" if exact else "swiglu") if gated else "relu" if exact else "gelu"
        dense = _DenseBlock(hidden, inner, activation, exact).to(dtype)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(ranks, hidden, generator=generator).to(dtype)
        x = small_integers((ranks, hidden), generator, dtype) if exact else x
        block = MLP.from_dense(
            dense.up, dense.down, activation,
            mesh=mesh, scheme=case.scheme, axes=axes_of(mesh.grid, case.scheme), pad=pad,
        )  # fmt: skip
        try:
            error = assert_matches_dense(block, dense, x, mesh, exact=exact)
            largest = largest if exact else error
        except AssertionError as error_:
            failure = failure or f"{'integers' if exact else 'real numbers'}: {error_}"
    shard = torch.zeros(block.in_layout.shard_shape((ranks, block.up.padded_in)), dtype=dtype, requires_grad=True)
    with CommMeter() as meter:
        block(shard).sum().backward()
    measured, predicted = meter.volume, block.volume(ranks)
    if measured != predicted:
        failure = failure or f"{mesh.describe()}: bytes measured: {measured}; predicted: {predicted}"
    return Result(largest, predicted.total, measured.total, failure)


class _DenseBlock(nn.Module):
    def __init__(self, hidden: int, inner: int, activation: str, integers: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.activation = activation_named(activation)
        self.up, self.down = nn.Linear(hidden, width_of(activation) * inner), nn.Linear(inner, hidden)
        for parameter in self.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            parameter.data = small_integers(parameter.shape, generator) if integers else drawn

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


# -------------------------------------------------------------------------------------------------- broken collectives


def out_of_order(whole: Collectives, kind: str) -> Collectives:
    """Collectives of which one kind delivers its result out of order on the last rank: for the test of the check."""

    class OutOfOrder(type(whole)):  # type: ignore[misc]
        def launch(self, route: Route, *arguments: Any) -> Any:
            handle = super().launch(route, *arguments)
            is_last = self.groups.rank == self.groups.grid.num_ranks - 1
            return _OutOfOrder(handle) if route.kind == kind and is_last else handle

    return OutOfOrder(whole.groups, whole.ring, whole.recording)


class _OutOfOrder:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def wait(self) -> Tensor:
        result = self.handle.wait()
        return result.flatten().roll(1).view_as(result)
