"""`assert_matches_dense`: a parallel module against the dense one it stands for, in anybody's CI."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.runtime.halves import as_it_lies
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.testing.compare import assert_equal, small_integers

OF_PARAMETER = "gradient of parameter "
MAX_SHOWN = 8  # failures of all ranks in one message

Results = dict[str, Tensor | None]


@dataclass(frozen=True)
class DenseResult:
    """The references of a comparison: the dense result, and the same result computed in fp64.

    The tolerance is `factor` times the largest error of the dense result, but at least `floor_eps` times eps of the
    dtype times the largest magnitude: of the whole tensor, so that it does not depend on which shard is looked at.
    With `exact` every bit must agree with the dense result.
    """

    dense: Tensor
    fp64: Tensor
    exact: bool = False
    factor: float = 4.0
    floor_eps: float = 4.0

    @cached_property
    def tolerance(self) -> float:
        if self.exact or not self.dense.numel():
            return 0.0
        floor = self.floor_eps * torch.finfo(self.dense.dtype).eps * self.fp64.abs().max().item()
        return max(self.factor * (self.dense.double() - self.fp64).abs().max().item(), floor)

    def check(self, shard: Tensor, where: tuple[slice, ...], what: str) -> float:
        """Compare a shard with its place in the dense result; returns the largest error, against fp64.

        Raises:
            AssertionError: names the tensor, both values and their index in the whole tensor.
        """
        dense, exact = self.dense[where], self.fp64[where]
        if self.exact or shard.shape != dense.shape or shard.dtype != dense.dtype:
            assert_equal(shard, dense, f"{what}, elements {_place(where)} of {tuple(self.dense.shape)}")
        error = (shard.detach().double() - exact).abs()
        wrong = ~(error <= self.tolerance)  # also where it is NaN
        if not self.exact and bool(wrong.any()):
            local = tuple(int(i) for i in (wrong & error.isnan() if error.isnan().any() else wrong).nonzero()[0])
            index = tuple(part.start + i for part, i in zip(where, local, strict=True))
            dense_error = (self.dense.double() - self.fp64).abs().max().item()
            raise AssertionError(
                f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are off by more than {self.tolerance:.3g}; "
                f"first at {index} of {tuple(self.dense.shape)}: {shard[local].item()!r} instead of "
                f"{exact[local].item()!r} (the dense {self.dense.dtype} result is off by {dense_error:.3g} at most)"
            )
        return error.max().item() if error.numel() else 0.0


def assert_matches_dense(
    parallel: nn.Module,
    dense: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    mesh: ProcessGrid,
    *,
    exact: bool = False,
    factor: float = 4.0,
    floor_eps: float = 4.0,
    names: Mapping[str, str] | None = None,
    seed: int = 0,
) -> float:
    """A parallel module gives the output, input gradients and parameter gradients of the dense one.

    Call it on every rank, with the same dense module and inputs everywhere:

        def check_block():
            mesh = ndtp.ProcessGrid(ndtp.Grid(z=2, x=2, y=2))
            dense = nn.Sequential(OrderedDict(up=nn.Linear(64, 256), act=nn.GELU(), down=nn.Linear(256, 64)))
            block = ndtp.nn.MLP.from_dense(dense.up, dense.down, mesh=mesh)
            ndtp.testing.assert_matches_dense(block, dense, torch.randn(32, 64), mesh)

        ndtp.testing.run(check_block, ranks=8)

    A module with `in_layout` and `out_layout` gets its shard of the first input (as [rows, features], padded with zeros
    where the module pads its features).  Any other one, a `parallelize`d model say, gets the whole inputs, or its rows
    of them where axes of the grid (`dp`) split rows.  Both sides get the same seeded gradient of the
    output, as of the loss `sum(output * weights)`.  No `.grad` is touched.

    Args:
        inputs: whole, the same on every rank; those of a floating dtype get a gradient.
        exact: every bit must agree; for integer-valued parameters and inputs, see `small_integers`.
        factor, floor_eps: the tolerance, as multiples of the error of the same-dtype dense result against fp64, and of
            eps; see `assert_close_to_dense`.
        names: parameter of `parallel` -> parameter of `dense`, for those of which the names differ.
        seed: of the gradient of the output.

    Returns:
        The largest error of a tensor on this rank, against fp64.

    Raises:
        AssertionError: on every rank alike; names each tensor that is wrong, the rank and coordinates that hold it, and
            the place in the whole tensor.
    """
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    comparison = _Comparison(mesh)
    ours = _by_dense_names(parallel, dense, dict(parallel.named_parameters()), names or {})
    theirs = _counterparts(ours, dense, names or {})
    for name, parameter in ours.items():
        value = theirs[name][1].detach()
        comparison.add(f"value of {name}", *_local(parameter, mesh), DenseResult(value, value.double(), exact=True))
    comparison.results_follow()
    _compare_runs(comparison, parallel, dense, inputs, theirs, (exact, factor, floor_eps), seed)
    comparison.conclude()
    return comparison.largest


def _compare_runs(
    comparison: _Comparison,
    parallel: nn.Module,
    dense: nn.Module,
    inputs: Sequence[Tensor],
    theirs: Mapping[str, tuple[str, Tensor]],
    tolerance: tuple[bool, float, float],
    seed: int,
) -> None:
    """Run both modules forward and backward, and compare outputs and gradients."""
    mesh, (exact, factor, floor_eps) = comparison.mesh, tolerance
    expected = _run(dense, inputs, partial(_weights, exact=exact, seed=seed))
    whole = expected["output"]
    assert whole is not None
    upstream = _weights(whole, exact, seed)
    fp64_inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    expected_fp64 = _run(copy.deepcopy(dense).double(), fp64_inputs, lambda _: upstream.double())
    ends = _Ends(parallel, mesh)
    shards = [ends.shard(what, x) for what, x in _named_inputs(inputs)]
    actual = _run(parallel, shards, lambda _: ends.shard("output", upstream))
    found = {what.removeprefix(OF_PARAMETER): x for what, x in actual.items() if what.startswith(OF_PARAMETER)}
    given = {what: x for what, x in actual.items() if not what.startswith(OF_PARAMETER)}
    names = {name: own for name, (own, _) in theirs.items()}
    gradients = _by_dense_names(parallel, dense, found, names)
    actual = given | {OF_PARAMETER + name: x for name, x in gradients.items()}
    for what, result in actual.items():
        name = what.removeprefix(OF_PARAMETER)
        key = OF_PARAMETER + theirs[name][0] if name != what else what
        dense_result, fp64_result = expected[key], expected_fp64[key]
        if result is None or dense_result is None or fp64_result is None:
            comparison.add_missing(what, result, dense_result)
            continue
        layout = ends.layout(what, dense_result.dim())
        shard, layout = (result, layout) if layout else _local(result, mesh)
        pair = (
            (dense_result, fp64_result) if layout is None else (_fit(dense_result, layout), _fit(fp64_result, layout))
        )
        comparison.add(what, shard, layout, DenseResult(*pair, exact, factor, floor_eps))


def _weights(output: Tensor, exact: bool, seed: int) -> Tensor:
    """Draw the gradient of an output; integers where every bit must agree."""
    drawn = small_integers(output.shape, seed)
    return (drawn if exact else drawn + 0.25 * torch.sin(drawn.cumsum(-1))).to(output)


class _Comparison:
    """Collects what is wrong on this rank, and raises on every rank what is wrong on any."""

    def __init__(self, mesh: ProcessGrid) -> None:
        self.mesh = mesh
        self.values: list[str] = []
        self.failures: list[str] = []
        self.largest = 0.0

    def add(self, what: str, shard: Tensor, layout: Layout | None, result: DenseResult) -> None:
        if layout is not None and result.dense.dim() < layout.ndim:
            halves = as_it_lies(result.dense, layout.ndim), as_it_lies(result.fp64, layout.ndim)
            result = replace(result, dense=halves[0], fp64=halves[1])
        try:
            local, where = _real_part(shard.detach(), layout, self.mesh, result.dense.shape, what)
            self.largest = max(self.largest, result.check(local, where, what))
        except AssertionError as error:
            self.failures.append(f"{self.mesh.describe()}: {error}")

    def add_missing(self, what: str, actual: Tensor | None, expected: Tensor | None) -> None:
        if (actual is None) != (expected is None):
            side = "parallel" if actual is None else "dense"
            self.failures.append(f"{self.mesh.describe()}: {what}: the {side} module gives none")

    def results_follow(self) -> None:
        """Mark the values compared so far as parameters: where they differ, a difference of results means nothing."""
        self.values, self.failures, self.largest = self.failures, [], 0.0

    def conclude(self) -> None:
        both = (self.values, self.failures)
        axes = self.mesh.grid.nontrivial(self.mesh.grid.names)
        if axes:
            everyones = [both] * self.mesh.grid.num_ranks
            dist.all_gather_object(everyones, both, group=self.mesh.group(axes))
            both = tuple([text for one in everyones for text in one[i]] for i in (0, 1))  # type: ignore[assignment]
        failures = both[0] or both[1]
        if failures:
            rest = [f"and {len(failures) - MAX_SHOWN} more"] if len(failures) > MAX_SHOWN else []
            raise AssertionError(
                f"not the dense result on grid {self.mesh.grid}:\n  " + "\n  ".join(failures[:MAX_SHOWN] + rest)
            )


class _Ends:
    """The form in which a module takes its inputs and returns its output: whole, as its layouts say, or split by
    rows.
    """

    def __init__(self, parallel: nn.Module, mesh: ProcessGrid) -> None:
        self.mesh = mesh
        self.layouts: dict[str, Layout] = {}
        self.widths: dict[str, int] = {}
        self.rows: tuple[str, ...] = ()
        if hasattr(parallel, "in_layout") and hasattr(parallel, "out_layout"):
            first, last = getattr(parallel, "up", parallel), getattr(parallel, "down", parallel)
            self.layouts = {"input 0": parallel.in_layout, "output": parallel.out_layout}  # type: ignore[dict-item]
            for what, end, attribute in (("input 0", first, "padded_in"), ("output", last, "padded_out")):
                if hasattr(end, attribute):
                    self.widths[what] = getattr(end, attribute)
        else:
            report = getattr(parallel, "ndtp_report", None)
            self.rows = () if report is None else mesh.grid.nontrivial(report.rows)

    def layout(self, what: str, ndim: int) -> Layout | None:
        """Return the layout of an input, its gradient, or the output; None for a whole tensor."""
        what = what.removeprefix("gradient of ")
        if self.rows and (what == "output" or what.startswith("input")):
            return Layout(self.mesh.grid, self.rows, *[None] * (ndim - 1))
        return self.layouts.get(what)

    def shard(self, what: str, x: Tensor) -> Tensor:
        layout = self.layout(what, x.dim())
        if layout is None:
            return x
        x = _fit(x, layout)
        x = F.pad(x, (0, self.widths[what] - x.shape[-1])) if what in self.widths else x
        return layout.shard(x, self.mesh.rank).contiguous()


def _run(module: nn.Module, inputs: Sequence[Tensor], upstream: Callable[[Tensor], Tensor]) -> Results:
    """The output, and the gradients of inputs and parameters, by name."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    output = module(*leaves)
    if not isinstance(output, Tensor):
        raise TypeError(f"assert_matches_dense: the module returns {type(output).__name__}; wrap it to return a tensor")
    targets = {f"gradient of {what}": x for what, x in _named_inputs(leaves) if x.requires_grad}
    targets |= {OF_PARAMETER + name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(output, list(targets.values()), upstream(output), allow_unused=True)
    return {"output": output.detach(), **dict(zip(targets, gradients, strict=True))}


def _named_inputs(inputs: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"input {i}", x) for i, x in enumerate(inputs)]


def _by_dense_names(parallel: nn.Module, dense: nn.Module, ours: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """Return values of a module's parameters, or their gradients, by the names that they have in the dense module.

    A module that keeps several dense layers as one, such as a gate and what it scales, tells by its own `to_dense`
    which part is whose; the values are whole then.
    """
    theirs = {name for name, _ in dense.named_parameters()}
    if {names.get(name, name) for name in ours} == theirs or not hasattr(parallel, "to_dense"):
        return ours
    twin = copy.deepcopy(parallel)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            value = ours.get(name)
            parameter.zero_() if value is None else parameter.copy_(value)
        found = dict(twin.to_dense().named_parameters())  # type: ignore[operator]
    return {name: x.detach() for name, x in found.items()} if set(found) == theirs else ours


def _counterparts(
    parallel: Mapping[str, Any], dense: nn.Module, names: Mapping[str, str]
) -> dict[str, tuple[str, Tensor]]:
    """Name of a parallel parameter -> name and value of the dense one."""
    theirs = dict(dense.named_parameters())
    ours = [*parallel]
    unmatched = {names.get(name, name) for name in ours} ^ set(theirs)
    if unmatched:
        raise AssertionError(
            f"parameters without a counterpart: {', '.join(sorted(unmatched))}\n"
            f"  parallel has {', '.join(ours)}\n  dense has {', '.join(theirs)}\n"
            "  fix: names={'parallel name': 'dense name'}"
        )
    return {name: (names.get(name, name), theirs[names.get(name, name)]) for name in ours}


def _fit(x: Tensor, layout: Layout) -> Tensor:
    """Leading dims count as rows."""
    return x.flatten(0, x.dim() - layout.ndim) if x.dim() > layout.ndim else x


def _local(x: Tensor, mesh: ProcessGrid) -> tuple[Tensor, Layout | None]:
    """This rank's shard of a DTensor and its layout; any other tensor whole, as it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor):
        return x, None
    if x.device_mesh != mesh.device_mesh:
        return x.full_tensor(), None
    return x.to_local(), Layout.from_placements(mesh.grid, mesh.mesh_axes, x.placements, x._spec.ndim)


def _real_part(
    shard: Tensor, layout: Layout | None, mesh: ProcessGrid, shape: Sequence[int], what: str
) -> tuple[Tensor, tuple[slice, ...]]:
    """Return a shard without its padding, and the slices of that part in the dense tensor."""
    if layout is None or shard.dim() != layout.ndim:
        return shard, tuple(slice(0, size) for size in shape)
    padded = [size * layout.num_splits(dim) for dim, size in enumerate(shard.shape)]
    where = tuple(
        slice(min(part.start, size), min(part.stop, size))
        for part, size in zip(layout.slices(mesh.rank, padded), shape, strict=True)
    )
    real = shard[tuple(slice(0, part.stop - part.start) for part in where)]
    if any(have < size for have, size in zip(padded, shape, strict=True)):
        raise AssertionError(f"{what}: the shards make {tuple(padded)} instead of {tuple(shape)}")
    if real.numel() < shard.numel() and int(shard.count_nonzero()) != int(real.count_nonzero()):
        raise AssertionError(
            f"{what}: the shards make {tuple(padded)} instead of {tuple(shape)}, and what lies beyond is not zero"
        )
    return real, where


def _place(where: Sequence[slice]) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in where) + "]"
