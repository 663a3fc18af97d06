"""`ndtp.profile`: what every rank computes, waits for and has in flight in one step of a program.

profile = ndtp.profile(step)            # on every rank
print(profile)                          # a line a rank: computing, in flight, exposed, hidden
profile.save("step.json")               # for ui.perfetto.dev or chrome://tracing
profile.draw("step.png")                # ranks over time
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ndtp.collectives.backends import backend_of
from ndtp.collectives.recorder import Recorder, Span
from ndtp.errors import GridError
from ndtp.measure.overlap_trace import RankTrace, chrome_trace
from ndtp.runtime.process_grid import ProcessGrid

HEADINGS = ("rank", "step ms", "compute ms", "in flight ms", "exposed ms", "other ms", "hidden")


@dataclass(frozen=True)
class StepProfile:
    """One step of every rank, the same object on all of them.

    Attributes:
        traces: by rank: products, other local work, flights of collectives and waits, named by module and phase.
    """

    traces: tuple[RankTrace, ...]
    rank: int = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Milliseconds of each rank by kind, and `hidden_fraction`: of the time in flight, the part not waited for."""
        return [trace.summary for trace in self.traces]

    def save(self, path: str | Path) -> None:
        """Write a trace in Chrome's format: a process a rank, a thread a lane.  Rank 0 writes."""
        if self.rank == 0:
            Path(path).write_text(json.dumps(chrome_trace(self.traces)))

    def draw(self, path: str | Path, title: str = "one step") -> None:
        """Write a picture, of the kind that the suffix says: a panel a rank, a row a lane.  Rank 0 writes.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        if self.rank == 0:
            from ndtp.measure.overlap_picture import draw

            draw(self.traces, title, path)

    def __str__(self) -> str:
        lines = [HEADINGS, *self._cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
        aligned = [[line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))] for line in lines]  # noqa: B905
        return "\n".join("  ".join(line).rstrip() for line in aligned)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
        rows = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in self._cells())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"

    def _cells(self) -> list[tuple[str, ...]]:
        cells = []
        for trace, row in zip(self.traces, self.rows, strict=True):
            times = [f"{row[f'{kind}_ms']:.2f}" for kind in ("step", "compute", "in_flight", "exposed", "other")]
            hidden = row["hidden_fraction"]
            cells.append((trace.name, *times, "-" if hidden is None else f"{hidden:.0%}"))
        return cells


def profile(
    step: Callable[[], object],
    mesh: ProcessGrid | Sequence[ProcessGrid] | None = None,
    *,
    warmup: int = 1,
) -> StepProfile:
    """Call `step` once more than `warmup` times and record the last call on every rank.  A collective.

    Recording costs time of its own: compare the parts of a step, and time steps without it.

    Args:
        step: what is looked at: forward, backward, optimizer.
        mesh: whose work is recorded; the default is every process grid of this program.
        warmup: calls before, in which programs are bound and numbers of chunks are found.

    Raises:
        GridError: there is no process grid.
    """
    meshes = _grids() if mesh is None else [mesh] if isinstance(mesh, ProcessGrid) else list(mesh)
    # Grids over the same ranks share their groups, and may share who looks on.
    meshes = list({id(each.collectives.recording): each for each in meshes}.values())
    if not meshes:
        raise GridError("profile: there is no process grid in this program\n  fix: make it before, or pass mesh=")
    for _ in range(warmup):
        step()
    in_group = dist.is_initialized() and dist.get_world_size() > 1 and backend_of().has_peers
    on_device = any(each.device_type == "cuda" for each in meshes)
    if on_device:
        torch.cuda.synchronize()
    if in_group:
        dist.barrier()
    with ExitStack() as stack:
        begin = time.perf_counter()
        recorders = [stack.enter_context(Recorder(each)) for each in meshes]
        step()
        if on_device:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    seen = [recorder.spans() for recorder in recorders]
    spans: list[Span] = sorted((s for each in seen for s in each), key=lambda s: (s.start, s.end))
    # A program may hold grids of which the step used none: ranks are named by one that worked.
    at_work = [mesh for mesh, each in zip(meshes, seen, strict=True) if each]
    widest = max(at_work or meshes, key=lambda each: each.grid.num_ranks)
    mine = RankTrace(dist.get_rank() if in_group else 0, dict(widest.coordinate), 0, seconds, tuple(spans))
    traces = [mine]
    if in_group:
        traces = [mine] * dist.get_world_size()
        dist.all_gather_object(traces, mine)
    return StepProfile(tuple(traces), mine.rank)


def _grids() -> list[ProcessGrid]:
    return [each for each in gc.get_objects() if isinstance(each, ProcessGrid)]
