"""Measure the links and products of the ranks at hand, and fit a `Hardware` profile to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ndtp.algebra.grid import Grid
from ndtp.algebra.steps import Step
from ndtp.errors import GridError
from ndtp.planner.hardware import Hardware, Link
from ndtp.planner.time_model import gemm_seconds
from ndtp.runtime.process_grid import ProcessGrid

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class CalibrationJob:
    """The task of every rank in a calibration.

    Attributes:
        rank_bytes: sizes of a rank's share of a collective.
        dims: sizes of products, as long as m n k is at most `max_products`.
        sustain_seconds: for how long a product is repeated.
    """

    ranks_per_node: int
    dtype: str = "float32"
    rank_bytes: tuple[int, ...] = (2**12, 2**15, 2**18, 2**20)
    dims: tuple[int, ...] = (64, 256, 1024)
    max_products: int = 2**29
    repeats: int = 5
    device: str = "cpu"
    sustain_seconds: float = 0.1


@dataclass(frozen=True)
class LinkSample:
    """One collective over one axis: all groups of the axis at once, the slowest rank's time."""

    collective: str
    axis: str
    size: int
    stride: int
    received_bytes: int
    seconds: float


@dataclass(frozen=True)
class GemmSample:
    m: int
    n: int
    k: int
    seconds: float

    @property
    def shape_class(self) -> str:
        """The class of the sample's shape: the dims that are short."""
        longest = max(self.m, self.n, self.k)
        short = [name for name in ("m", "n", "k") if getattr(self, name) * 4 <= longest]
        return "short " + " ".join(short) if short else "square"


@dataclass(frozen=True)
class Samples:
    """`contention` as in `Hardware`, once for each collective that was tried beside products."""

    links: list[LinkSample]
    gemms: list[GemmSample]
    copy_gbs: float
    contention: tuple[float, ...] = (0.0,)


def measure(job: CalibrationJob) -> Samples:
    """Measure on every rank, which all return the same samples."""
    links = [sample for grid in _grids(dist.get_world_size()) for sample in _links(grid, job)]
    return Samples(links, list(_gemms(job)), _copies(job), tuple(_contention(job)))


def _grids(ranks: int) -> list[Grid]:
    """Two axes: y has neighbouring ranks, x those `y` apart."""
    return [Grid(x=ranks // y, y=y) for y in range(2, ranks + 1) if ranks % y == 0]


def _links(grid: Grid, job: CalibrationJob) -> Iterator[LinkSample]:
    mesh = ProcessGrid(grid, device_type=job.device)
    dtype = getattr(torch, job.dtype)
    for axis in grid.nontrivial(grid.names):
        size, stride = grid[axis], grid["y"] if axis == "x" else 1
        for collective in COLLECTIVES:
            for share in job.rank_bytes:
                count = max(size, share // dtype.itemsize // size * size)
                whole = collective != "all_gather"
                tensor = torch.randn(count * size if whole else count, dtype=dtype, device=job.device)
                step = Step(collective, (axis,), None if collective == "all_reduce" else 0, 0)

                def action(tensor: Tensor = tensor, step: Step = step) -> None:
                    mesh.collectives.start(step, tensor, ("calibrate",), "forward").wait()

                received = count * (size - 1) * dtype.itemsize * (2 if collective == "all_reduce" else 1)
                yield LinkSample(collective, axis, size, stride, received, timed(action, job))


def _contention(job: CalibrationJob) -> Iterator[float]:
    """Products beside a collective that takes as long as they do: what of that time they do not hide.

    Above 1, overlapping costs more than it hides; that is taken as hiding nothing.
    """
    ranks = dist.get_world_size()
    mesh = ProcessGrid(Grid(x=ranks), device_type=job.device)
    a, b = (torch.randn(max(job.dims), max(job.dims), device=job.device) for _ in "ab")
    product = sustained(lambda: a @ b, job)
    for collective in ("all_gather", "reduce_scatter"):
        share = max(job.rank_bytes) // 4 // ranks * ranks
        tensor = torch.randn(share if collective == "all_gather" else share * ranks, device=job.device)

        def start(collective: str = collective, tensor: Any = tensor) -> Any:
            return mesh.collectives.start(Step(collective, ("x",), 0, 0), tensor, ("calibrate",), "forward")

        alone = timed(lambda start=start: start().wait(), job)  # type: ignore[misc]
        count = max(1, round(alone / product))

        def beside(start: Callable[[], Any] = start, count: int = count) -> None:
            handle = start()
            for _ in range(count):
                a @ b
            handle.wait()

        hidden = alone + count * product - timed(beside, job)
        yield float(np.clip(1 - hidden / min(alone, count * product), 0, 1))


def _gemms(job: CalibrationJob) -> Iterator[GemmSample]:
    dtype = getattr(torch, job.dtype)
    for m in job.dims:
        for n in job.dims:
            for k in job.dims:
                if m * n * k <= job.max_products:
                    a, b = (torch.randn(shape, dtype=dtype, device=job.device) for shape in ((m, k), (n, k)))
                    seconds = sustained(lambda a=a, b=b: a @ b.mT, job)  # type: ignore[misc]
                    yield GemmSample(m, n, k, seconds)


def _copies(job: CalibrationJob) -> float:
    """GB/s read and written by an operation that computes nothing to speak of, new memory for its result included.

    Several results are held at once, as a step holds them: memory that one result leaves to the next is not new.
    """
    x, held = torch.randn(2**21 if job.device == "cpu" else 2**26, device=job.device), 4
    return held * 2 * x.numel() * 4 / sustained(lambda: [x.relu() for _ in range(held)], job) / 1e9


def sustained(action: Callable[[], object], job: CalibrationJob) -> float:
    """Seconds of an action among many of its kind, on all ranks at once.

    One short action alone is over before ranks that share processors get in each other's way.
    """
    count = math.ceil(job.sustain_seconds / timed(action, job))

    def many() -> None:
        for _ in range(count):
            action()

    return timed(many, job) / count


def timed(action: Callable[[], object], job: CalibrationJob) -> float:
    """Median over repeats of the slowest rank's seconds.  All ranks at once: they share what they share in a step."""
    times = []
    for repeat in range(-1, job.repeats):
        dist.barrier()
        begin = time.perf_counter()
        action()
        if job.device == "cuda":
            torch.cuda.synchronize()
        if repeat >= 0:
            times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times, dtype=torch.float64, device=job.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return median(slowest.tolist())


# -------------------------------------------------------------------------------------------------------- fitting


@dataclass(frozen=True)
class Fit:
    """The relative errors of the model on the samples that it was fitted to."""

    what: str
    samples: int
    median_error: float
    worst_error: float

    @classmethod
    def of(cls, what: str, predicted: Any, measured: Any) -> Fit:
        errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
        return cls(what, len(errors), float(np.median(errors)), float(errors.max()))


def fit(samples: Samples, job: CalibrationJob, name: str) -> tuple[Hardware, list[Fit]]:
    """A profile, and the quality of each of its parts."""
    fits: list[Fit] = []
    found: dict[str, Link] = {}
    for which in ("intra", "inter"):
        chosen = [s for s in samples.links if (s.size * s.stride <= job.ranks_per_node) == (which == "intra")]
        if chosen:
            found[which], quality = fit_link(chosen, which)
            fits += quality
    peak, half, launch, quality_gemm = fit_gemm(samples, job.dtype)
    hardware = Hardware(
        name=name,
        ranks_per_node=job.ranks_per_node,
        intra=found.get("intra") or found["inter"],
        inter=found.get("inter") or found["intra"],
        tflops={job.dtype: peak / 1e12},
        gemm_half=half,
        memory_gib=_memory_gib(job),
        memory_gbs=samples.copy_gbs,
        launch_us=launch * 1e6,
        contention=median(samples.contention),
        source="measured by ndtp bench calibrate",
    )
    return hardware, [*fits, *quality_gemm]


def fit_link(samples: Sequence[LinkSample], what: str) -> tuple[Link, list[Fit]]:
    """Latency, hops, and seconds a byte of each collective and group size, by least squares, none below zero.

    Errors are relative, and weigh more for what takes longer: a step spends its time there.
    """
    names = [name for name in COLLECTIVES if any(s.collective == name for s in samples)]
    kinds = sorted({(s.collective, s.size) for s in samples}, key=lambda kind: (names.index(kind[0]), kind[1]))
    rows = []
    for s in samples:
        hops = (s.size - 1) * (2 if s.collective == "all_reduce" else 1)
        rows.append([1.0, hops, *(s.received_bytes * ((s.collective, s.size) == kind) for kind in kinds)])
    measured, matrix = np.array([s.seconds for s in samples]), np.array(rows)
    weights = np.sqrt(measured / measured.max())
    solution = _nonnegative(matrix * (weights / measured)[:, None], weights)
    per_byte = np.maximum(solution[2:], 1e-13)  # at most 10 TB/s: samples too small to tell
    fastest = per_byte.min()
    efficiency: dict[str, dict[int, float]] = {}
    for (name, size), each in zip(kinds, per_byte, strict=True):
        efficiency.setdefault(name, {})[size] = float(fastest / each)
    link = Link(float(1e-9 / fastest), float(solution[0] * 1e6), float(solution[1] * 1e6), efficiency)
    predicted = matrix @ np.concatenate([solution[:2], per_byte])
    fits = []
    for name in names:
        of = [i for i, s in enumerate(samples) if s.collective == name]
        fits.append(Fit.of(f"{what} {name}", predicted[of], measured[of]))
    return link, fits


def _nonnegative(matrix: Any, target: Any) -> Any:
    """Least squares without negative parts: drop the most negative unknown until there is none."""
    free = list(range(matrix.shape[1]))
    while True:
        part, *_ = np.linalg.lstsq(matrix[:, free], target, rcond=None)
        if (part >= 0).all() or len(free) == 1:
            break
        free.pop(int(part.argmin()))
    solution = np.zeros(matrix.shape[1])
    solution[free] = np.maximum(part, 0.0)
    return solution


def fit_gemm(samples: Samples, dtype: str) -> tuple[float, float, float, list[Fit]]:
    """(flop/s, half size, launch seconds): for each half size the best other two; then the best of them.

    Errors are relative, and weigh more for larger products, which is where a step spends its time: ranks that share
    processors slow each other down in those, and hardly in small ones.
    """
    measured = np.array([g.seconds for g in samples.gemms])
    shapes = np.array([(g.m, g.n, g.k) for g in samples.gemms], dtype=float)
    weights = np.sqrt(shapes.prod(1) / shapes.prod(1).max())
    best: tuple[float, float, float, float] | None = None
    for half in (0.0, *np.geomspace(1, 512, 28)):
        arithmetic = 2 * shapes.prod(1) * (1 + half / shapes).prod(1)
        matrix = np.stack([arithmetic, np.ones(len(measured))], 1) * (weights / measured)[:, None]
        per_flop, launch = _nonnegative(matrix, weights)
        error = float(np.abs(matrix @ [per_flop, launch] - weights).mean())
        if per_flop > 0 and (best is None or error < best[0]):
            best = error, 1 / per_flop, float(half), float(launch)
    if best is None:
        raise GridError(
            f"bench calibrate: products with dims up to {shapes.max():.0f} took no longer than small ones\n"
            "  fix: a quiet machine and more --repeats, or larger dims in the CalibrationJob"
        )
    _, peak, half, launch = best
    probe = Hardware(
        "probe", 1, Link(1), Link(1), {dtype: peak / 1e12},
        gemm_half=half, memory_gbs=samples.copy_gbs, launch_us=launch * 1e6,
    )  # fmt: skip
    predicted = [float(gemm_seconds(probe, g.m, g.n, g.k, dtype)) for g in samples.gemms]
    fits = []
    for shape_class in sorted({g.shape_class for g in samples.gemms}):
        of = [i for i, g in enumerate(samples.gemms) if g.shape_class == shape_class]
        fits.append(Fit.of(f"GEMM {shape_class}", [predicted[i] for i in of], measured[of]))
    return peak, half, launch, fits


def rates_by_class(samples: Samples) -> dict[str, float]:
    """Shape class -> median TFLOP/s."""
    rates: dict[str, list[float]] = {}
    for g in samples.gemms:
        rates.setdefault(g.shape_class, []).append(2 * prod((g.m, g.n, g.k)) / g.seconds / 1e12)
    return {name: median(found) for name, found in sorted(rates.items())}


def _memory_gib(job: CalibrationJob) -> float:
    import os

    if job.device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory / 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / job.ranks_per_node


def to_toml(hardware: Hardware, fits: Sequence[Fit], samples: Samples) -> str:
    """A profile that `Hardware.load` reads, with what was measured and how well the fit holds, for the reader."""
    lines = [hardware.to_toml(), "[measured]"]
    lines += [f'"{name} TFLOP/s" = {rate:.4g}' for name, rate in rates_by_class(samples).items()]
    lines += ["", "[measured.fit]"]
    for each in fits:
        errors = (
            f"samples = {each.samples}, median_error = {each.median_error:.3f}, worst_error = {each.worst_error:.3f}"
        )
        lines.append(f'"{each.what}" = {{ {errors} }}')
    lines += ["", "[measured.axes]"]
    for size, stride in sorted({(s.size, s.stride) for s in samples.links}):
        cells = []
        for name in COLLECTIVES:
            of = [s for s in samples.links if (s.size, s.stride, s.collective) == (size, stride, name)]
            small, large = min(of, key=lambda s: s.received_bytes), max(of, key=lambda s: s.received_bytes)
            cells.append(
                f"{name}_us = {small.seconds * 1e6:.4g}, {name}_gbs = {large.received_bytes / large.seconds / 1e9:.4g}"
            )
        lines.append(f'"{size} ranks, {stride} apart" = {{ {", ".join(cells)} }}')
    return "\n".join(lines) + "\n"
