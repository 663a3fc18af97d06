"""Schedules and nothing else: the steps of blocks whose local work is a clock's, behind real links.

How long products would take is chosen by how long the communication does, which is measured first: so many times as
long.  What a step takes beyond the longer of the two, phase by phase, no device and no processor is to blame for.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.collectives.recorder import Recorder
from ndtp.measure.overlap_trace import RankTrace
from ndtp.measure.pace import Clock, PacedCollectives, PacedGemm, wake_up_in_time
from ndtp.measure.volume import BlockShape, VolumeCase, meter_step
from ndtp.nn import MLP
from ndtp.planner.hardware import Hardware
from ndtp.runtime.probe import Probe
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.schedule.chunk_choice import LinkSpeed, Speeds, messages_of, products_of
from ndtp.schedule.clocks import replayed

PROBE_BYTES = 2**22  # received in a collective that shows the rate of a link: many times what idle links let through
KINDS = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class PacedJob:
    """The task of every rank on the paced bed.

    Attributes:
        blocks: one block alone, or residual ones in a row.
        balance: how long products take, activations and sums included, where communication takes 1.
        hardware: the device whose ratio of arithmetic to memory counts, by name.
    """

    case: VolumeCase
    shape: BlockShape
    dtype: str
    chunks: int | str
    rounds: int
    warmup: int
    blocks: int = 1
    balance: float = 1.0
    hardware: str = "h200-ib"


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of a phase: how long a rank worked, how long its link did, what the timeline says, what it took."""

    products: float
    communication: float
    predicted: float
    measured: float

    @property
    def bound(self) -> float:
        """No schedule that keeps to the phases is shorter."""
        return max(self.products, self.communication)

    @property
    def exposed(self) -> float:
        """The time that is not local work."""
        return max(0.0, self.measured - self.products)


@dataclass(frozen=True)
class Paced:
    """A step on its clock, on one rank.

    Attributes:
        wrong: what is not as it must be: bytes, the order of collectives, or handles.
        trace: of a step of its own, while a recorder looked on.
    """

    job: PacedJob
    chunks: int
    forward: PhaseTimes
    backward: PhaseTimes
    step: float
    wrong: tuple[str, ...]
    trace: RankTrace

    @property
    def bound(self) -> float:
        return self.forward.bound + self.backward.bound

    @property
    def predicted(self) -> float:
        return self.forward.predicted + self.backward.predicted

    @property
    def summary(self) -> dict[str, object]:
        """Milliseconds, and the two ratios that count."""
        phases = {
            name: {key: 1e3 * value for key, value in (*asdict(x).items(), ("exposed", x.exposed), ("bound", x.bound))}
            for name, x in (("forward", self.forward), ("backward", self.backward))
        }
        return {
            "chunks": self.chunks, "step_ms": self.step * 1e3, "bound_ms": self.bound * 1e3,
            "predicted_ms": self.predicted * 1e3, "over_bound": self.step / self.bound,
            "over_predicted": self.step / self.predicted, "phases_ms": phases, "wrong": list(self.wrong),
        }  # fmt: skip


class _Model(torch.nn.Module):
    """One block, or residual ones; on a grid of its own, which gathers ahead what it has seen to come next."""

    def __init__(self, job: PacedJob, chunks: int | str, clock: Clock) -> None:
        super().__init__()
        self.mesh = mesh = ProcessGrid(job.case.grid, device_type="cpu")
        mesh.gemm = PacedGemm(clock)
        mesh.collectives = PacedCollectives(mesh.groups, mesh.ring, mesh.step.recording)
        mesh.collectives.clock = clock
        dtype, self.blocks = getattr(torch, job.dtype), torch.nn.ModuleList()
        for i in range(job.blocks):
            block = MLP(
                job.shape.hidden, job.shape.ffn, bias=False, mesh=mesh, scheme=job.case.scheme, chunks=chunks,
                dtype=dtype, seed=0, name=f"mlp{i}",
            )  # fmt: skip
            self.blocks.append(block)
        shape = block.in_layout.shard_shape((job.shape.tokens, job.shape.hidden))
        self.x, self.grad = torch.zeros(shape, dtype=dtype, requires_grad=True), torch.zeros(shape, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.blocks) == 1:
            return self.blocks[0](x)  # type: ignore[no-any-return]
        for block in self.blocks:
            x = x + block(x)
        return x

    def step(self, clock: Clock) -> tuple[float, float, float, float]:
        """Seconds of forward and backward, and the work of each."""
        self.zero_grad(set_to_none=True)
        self.x.grad = None
        dist.barrier()
        clock.work = 0.0
        begin = time.perf_counter()
        y = self(self.x)
        between, done = time.perf_counter(), clock.work
        y.backward(self.grad)
        return between - begin, time.perf_counter() - between, done, clock.work - done


def measure_paced(job: PacedJob, wire: Speeds | None = None) -> Paced:
    """The measurement, as every rank runs it.

    Args:
        wire: what `links_of` has found, if the links were measured before.
    """
    wake_up_in_time()
    dtype = getattr(torch, job.dtype)
    clock = Clock.of(Hardware.load(job.hardware), job.dtype)
    whole = _Model(job, 1, clock)
    plans, sizes = _plans(whole), _sizes(job)
    wire = wire or links_of(whole.mesh, torch.empty(1, dtype=dtype))
    forward, backward = (
        job.blocks * _communication(plans, sizes, dtype.itemsize, wire, phases)
        for phases in (("forward",), ("dgrad", "wgrad"))
    )
    *_, forward_work, backward_work = whole.step(clock)
    clock.rate = _agreed((forward_work + backward_work) / (job.balance * (forward + backward)))
    model = _Model(job, job.chunks, clock)
    times = [model.step(clock)[:2] for _ in range(job.warmup + job.rounds)][job.warmup :]
    trace, wrong = _watched(model, clock, job)
    chosen = _chunks(model, job)
    predicted = _predicted(job, plans, sizes, dtype.itemsize, wire, clock, chosen)
    slowest = torch.tensor([(one, one + other) for one, other in times], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    first, both = (median(column) for column in slowest.mT.tolist())
    return Paced(
        job,
        chosen,
        PhaseTimes(forward_work / clock.rate, forward, predicted[0], first),
        PhaseTimes(backward_work / clock.rate, backward, predicted[1], both - first),
        both,
        wrong,
        trace,
    )


def _plans(model: _Model) -> tuple[MatMulPlan, ...]:
    block: Any = model.blocks[0]
    return block.up.plan, block.down.plan


def _sizes(job: PacedJob) -> tuple[dict[str, int], ...]:
    return tuple({"m": m, "k": k, "n": n} for m, k, n in job.shape.products())


def _chunks(model: _Model, job: PacedJob) -> int:
    plan = _plans(model)[0]
    return model.mesh.chunks_chosen(plan)[job.shape.tokens][0] if plan.chunks == "auto" else int(plan.chunks)


def _agreed(value: float) -> float:
    """Return the value of the first rank, on all ranks."""
    shared = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def links_of(mesh: ProcessGrid, like: Tensor) -> Speeds:
    """Return the measured speeds of the links; products take no time."""
    probe = Probe(mesh.collectives, like, repeats=5)
    links: dict[tuple[str, str], LinkSpeed] = {}
    for axis in probe.axes:
        links |= probe.links(PROBE_BYTES // (mesh.grid[axis] - 1), KINDS, (axis,))
    return Speeds(links)


def _communication(
    plans: tuple[MatMulPlan, ...],
    sizes: tuple[dict[str, int], ...],
    itemsize: int,
    wire: Speeds,
    phases: tuple[str, ...],
) -> float:
    """Seconds for which a rank's link works, without what calls cost beside it."""
    bare = Speeds({key: link._replace(latency=0.0) for key, link in wire.links.items()})
    return sum(
        bare.seconds(*message)
        for plan, size in zip(plans, sizes, strict=True)
        for (phase, _), messages in messages_of(plan, size, itemsize).items()
        for message in messages
        if phase in phases
    )


def _predicted(
    job: PacedJob,
    plans: tuple[MatMulPlan, ...],
    sizes: tuple[dict[str, int], ...],
    itemsize: int,
    wire: Speeds,
    clock: Clock,
    chunks: int,
) -> tuple[float, float]:
    """Return the timeline's prediction of forward and of backward."""
    links = dict(wire.links)
    for axis in job.case.grid.nontrivial(job.case.grid.names):
        ranks, key = job.case.grid[axis], ("reduce_scatter", axis)  # what was received is read, and the sum is written
        links[key] = links[key]._replace(sum_per_byte=(ranks + 1) / (ranks - 1) * clock.flops_per_byte / clock.rate)
    speeds = Speeds(links, 1 / clock.rate)
    elements = plans[0].out.shard_shape((job.shape.tokens, job.shape.ffn))
    after = 2 * itemsize * elements[0] * elements[1] * clock.flops_per_byte / clock.rate
    products = products_of(plans, sizes, itemsize, speeds, chunks, after)
    line = replayed(products * job.blocks, speeds, chunks)
    return float(line.forward), float(line.now - line.forward)


def _watched(model: _Model, clock: Clock, job: PacedJob) -> tuple[RankTrace, tuple[str, ...]]:
    """A step while a recorder looks on, one while a meter does, and what is not as it must be."""
    mesh = model.mesh
    wrong: list[str] = []
    dist.barrier()
    with Recorder(mesh) as recorder:
        step = sum(model.step(clock)[:2])
    order = [entry.name for entry in recorder.entries if entry.kind == "collective"]
    orders: list[list[str]] = [[] for _ in range(mesh.grid.num_ranks)]
    dist.all_gather_object(orders, order)
    if any(other != order for other in orders):
        wrong.append("ranks issue their collectives in different orders")
    spans = recorder.spans()
    begin = spans[0].start if spans else 0.0  # behind the barrier
    spans = [replace(span, start=span.start - begin, end=span.end - begin) for span in spans]
    predicted = job.blocks * job.case.predicted(job.shape, getattr(torch, job.dtype).itemsize).total
    if (metered := meter_step(model, model.x).total) != predicted:
        wrong.append(f"{metered} bytes were received, {predicted} predicted")
    if mesh.collectives.in_flight:
        wrong.append(f"{mesh.collectives.in_flight} collectives were never waited for")
    return RankTrace(mesh.rank, mesh.coordinate, len(wrong), step, tuple(spans)), tuple(wrong)
