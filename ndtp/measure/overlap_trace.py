"""The time of a block's step on every rank, as measured: products, flights of collectives, and waits."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ndtp.collectives.recorder import Recorder, Span
from ndtp.measure.step import count_wrong
from ndtp.measure.volume import BlockShape, VolumeCase
from ndtp.nn import MLP
from ndtp.runtime.process_grid import ProcessGrid

Interval = tuple[float, float]


@dataclass(frozen=True)
class TraceJob:
    """The task of every rank: forward and backward of MatMul -> GELU -> MatMul, `rounds` times after `warmup`."""

    case: VolumeCase
    shape: BlockShape
    dtype: str
    chunks: int | str
    rounds: int
    warmup: int
    device: str = "cpu"


@dataclass(frozen=True)
class RankTrace:
    """One step of one rank; times in seconds since the barrier before the step.

    Attributes:
        wrong: elements, over all ranks, that differ from the dense block; nothing was timed if there are any.
        step: until the rank had all gradients.
    """

    rank: int
    coordinate: dict[str, int]
    wrong: int
    step: float = 0.0
    spans: tuple[Span, ...] = ()

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({', '.join(f'{axis}={at}' for axis, at in self.coordinate.items())})"

    def intervals(self, kind: str) -> list[Interval]:
        """Return the intervals in which something of that kind went on, without overlaps, in order."""
        return merged((span.start, span.end) for span in self.spans if span.kind == kind)

    @property
    def summary(self) -> dict[str, object]:
        """Milliseconds, and the fraction of the time in flight in which the rank did not wait; None without flights."""
        computing, flying, waiting = (self.intervals(kind) for kind in ("compute", "collective", "wait"))
        in_flight, exposed = total(flying), total(waiting)
        covered = total(waiting) + total(flying) - total(merged(waiting + flying))
        return {
            "rank": self.rank,
            "coordinate": self.coordinate,
            "step_ms": self.step * 1e3,
            "compute_ms": total(computing) * 1e3,
            "in_flight_ms": in_flight * 1e3,
            "exposed_ms": exposed * 1e3,
            "other_ms": max(0.0, self.step - total(merged(computing + waiting))) * 1e3,
            "hidden_fraction": 1 - covered / in_flight if in_flight else None,
        }


def measure(job: TraceJob) -> RankTrace:
    """The measurement, as every rank runs it: the round whose slowest rank took the median time."""
    mesh = ProcessGrid(job.case.grid, device_type=job.device)
    where = mesh.rank, mesh.coordinate
    if wrong := count_wrong(job.case, mesh, job.shape, job.device, job.chunks):
        return RankTrace(*where, wrong)
    dtype, shape = getattr(torch, job.dtype), job.shape
    mlp = MLP(
        shape.hidden, shape.ffn, mesh=mesh, scheme=job.case.scheme, chunks=job.chunks, dtype=dtype, device=job.device,
        seed=0,
    )  # fmt: skip
    x = torch.randn(mlp.in_layout.shard_shape((shape.tokens, shape.hidden)), dtype=dtype, device=job.device)
    grad = torch.randn(mlp.out_layout.shard_shape((shape.tokens, shape.hidden)), dtype=dtype, device=job.device)
    x.requires_grad_()
    traces = []
    for _ in range(job.warmup + job.rounds):
        mlp.zero_grad(set_to_none=True)
        x.grad = None
        dist.barrier()
        with Recorder(mesh) as recorder:
            begin = time.perf_counter()
            mlp(x).backward(grad)
            if job.device == "cuda":
                torch.cuda.synchronize()
            step = time.perf_counter() - begin
        traces.append(RankTrace(*where, 0, step, tuple(recorder.spans())))
    slowest = torch.tensor([trace.step for trace in traces[job.warmup :]], device=job.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return traces[job.warmup + int(slowest.argsort()[(job.rounds - 1) // 2])]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint ones in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def num_chunks(traces: Sequence[RankTrace]) -> int:
    """Return the number of chunks that the block ran in, from the names of its collectives and products."""
    parts = (re.search(r" \d+/(\d+)\b", span.name) for trace in traces for span in trace.spans)
    return max((int(part[1]) for part in parts if part), default=1)


def phase_of(name: str) -> str:
    """The phase of local work by what comes out of it: "gemm dB mlp.up" is of wgrad; "" where the name does not say."""
    made = {"dA": "dgrad", "dB": "wgrad", "C": "forward"}
    return next((made[word] for word in name.split() if word in made), "")


def lanes(trace: RankTrace) -> list[tuple[str, list[Span]]]:
    """(name, spans) of a rank's lanes: what it computes and waits for, then every axis.

    An axis with several collectives in flight has as many lanes, so that spans of one lane never overlap.
    """
    busy = [span for span in trace.spans if span.kind != "collective"]
    found = [("compute", busy)]
    flights = [span for span in trace.spans if span.kind == "collective"]
    for axes in dict.fromkeys(span.axes for span in sorted(flights, key=lambda span: span.axes)):
        mine: list[list[Span]] = []
        for span in (span for span in flights if span.axes == axes):
            free = next((lane for lane in mine if lane[-1].end <= span.start), None)
            if free is None:
                mine.append([span])
            else:
                free.append(span)
        found += [(f"axis {' '.join(axes)}", lane) for lane in mine]
    return found


def chrome_trace(traces: Sequence[RankTrace]) -> dict[str, object]:
    """A trace in Chrome's format, for Perfetto or chrome://tracing: a process a rank, a thread a lane, microseconds.

    Source: Trace Event Format, complete events ("X") and metadata events ("M").
    """
    events = []
    for trace in traces:
        pid = trace.rank
        events.append(_named("process_name", pid, 0, name=trace.name))
        events.append(_named("process_sort_index", pid, 0, sort_index=pid))
        for tid, (lane, spans) in enumerate(lanes(trace)):
            events.append(_named("thread_name", pid, tid, name=lane))
            events.append(_named("thread_sort_index", pid, tid, sort_index=tid))
            for span in spans:
                start, end = round(span.start * 1e6, 3), round(span.end * 1e6, 3)
                args = {"phase": span.phase or phase_of(span.name), "axes": " ".join(span.axes)}
                args = {key: value for key, value in args.items() if value}
                event = {"ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": tid, "args": args}
                events.append({**event, "ts": start, "dur": round(end - start, 3)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
