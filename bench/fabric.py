"""Exposed communication against chunk count on one GPU, with an emulated fabric.

    python bench/fabric.py --out bench/results/fabric.json

EMULATION: there is one rank and no network.  This GPU computes the local products of one rank of an 8-rank grid; a
collective is replaced by a copy inside its memory that moves the bytes that the rank would receive, takes as long as
the link's latency and bandwidth say, and keeps as many thread blocks busy.  Collectives of one process group queue on
one side stream, as NCCL's do.  The numbers say what the schedule hides, not how fast any network is.

Forward and backward of MatMul -> GELU -> MatMul, bf16.  "compute" is the step in one chunk with collectives that do
nothing, exposed is what a step takes beyond it, "link" is the sum of the collectives of the busiest group.  Host time
is what issuing a step takes; `host_us` is what one more chunk of one product adds to it in one pass.

Needs a CUDA device: exit status 2 without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

import ndtp
from ndtp.algebra.steps import received
from ndtp.collectives.collectives import Collectives
from ndtp.planner.hardware import Hardware, Link

RANKS = 8
PASSES = 2 * 2  # products of a block, forward and backward
# Words that a thread block copies at a time, and its warps; of smaller tensors only the time is emulated.  Each of 1024
# threads holds 64 words at once, and a block all registers of an SM: no other one fits beside it, as none to speak of
# fits beside one of NCCL's (640 threads of 96 registers).  A copy that shared its SMs would slow products down less.
TILE, WARPS = 2**16, 32
LABEL = "EMULATION on one GPU: paced device copies in place of collectives; no network was measured"


@triton.jit(do_not_specialize=["target_tiles", "source_tiles", "tiles", "duration_ns"])
def paced_copy(target, source, target_tiles, source_tiles, tiles, duration_ns, TILE: tl.constexpr):
    """Copy `tiles` tiles of words, evenly over `duration_ns`; source and target begin again where they end."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    start = globaltimer()
    duration = duration_ns.to(tl.int64)
    words = tl.arange(0, TILE)
    for tile in range(program, tiles, programs):
        origin = source + (tile % source_tiles).to(tl.int64) * TILE
        tl.store(target + (tile % target_tiles).to(tl.int64) * TILE + words, tl.load(origin + words))
        due = start + duration * tile // tiles
        now = globaltimer()
        while now < due:
            now = globaltimer()
    now = globaltimer()
    while now < start + duration:
        now = globaltimer()


def received_bytes(kind: str, output: Tensor, source: Tensor, ranks: int) -> int:
    """What each rank receives in a collective, given its tensors on this one."""
    return received(kind, max(output.numel(), source.numel()), ranks) * output.element_size()


def duration_ns(link: Link, kind: str, num_bytes: int, ranks: int) -> int:
    """How long a collective by which every rank receives that many bytes takes on a link."""
    fixed = (link.latency_us + (ranks - 1) * link.hop_us) * 1e-6
    return round(1e9 * (fixed + num_bytes * link.seconds_per_byte(kind, ranks)))


class Fabric:
    """What torch's collectives are replaced by.

    Args:
        link: None: collectives do nothing at all.
        ctas: thread blocks of a collective.
    """

    def __init__(self, link: Link | None, ctas: int) -> None:
        self.link, self.ctas = link, ctas
        self.streams: dict[Any, torch.cuda.Stream] = {}
        self.busy_ns: dict[Any, int] = {}  # by group

    def transfer(self, kind: str, output: Tensor, source: Tensor, group: Any) -> _Arrival | None:
        if self.link is None:
            return None
        num_bytes = received_bytes(kind, output, source, group.size())
        duration = duration_ns(self.link, kind, num_bytes, group.size())
        self.busy_ns[group] = self.busy_ns.get(group, 0) + duration
        if group not in self.streams:
            self.streams[group] = torch.cuda.Stream(priority=-1)
        stream = self.streams[group]
        stream.wait_stream(torch.cuda.current_stream())
        target, origin = _words(output), _words(source)
        target_tiles, source_tiles = target.numel() // TILE, origin.numel() // TILE
        tiles = num_bytes // (4 * TILE) if target_tiles and source_tiles else 0
        with torch.cuda.stream(stream):
            paced_copy[(self.ctas,)](
                target, origin, target_tiles, source_tiles, tiles, duration, TILE=TILE, num_warps=WARPS
            )
        return _Arrival(stream.record_event(), (output, source))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of torch's collectives, where `Collectives` hands over to them."""

        def handed_over(kind: str) -> Callable[..., Any]:
            return lambda owner, output, source, to: self.transfer(kind, output, source, to.group)

        def all_reduce(owner: Collectives, x: Tensor, to: Any) -> Any:
            return self.transfer("all_reduce", x, x, to.group)

        in_place = {
            "_gather": handed_over("all_gather"),
            "_scatter": handed_over("reduce_scatter"),
            "_exchange": handed_over("all_to_all"),
            "_sum_everywhere": all_reduce,
        }
        with patch.multiple(Collectives, **in_place):
            yield


class _Arrival:
    """As NCCL's work: waiting blocks the current stream."""

    def __init__(self, event: torch.cuda.Event, held: tuple[Tensor, ...]) -> None:
        self.event, self.held = event, held

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def _words(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.int32)


def block(grid: ndtp.Grid, chunks: int, sizes: Sequence[int], device: str = "cuda") -> Callable[[], None]:
    """A step of one rank of the grid, bf16."""
    tokens, hidden, inner = sizes
    mesh = ndtp.ProcessGrid(grid, device_type=device, groups_per_axis=2)
    mlp = ndtp.nn.MLP(hidden, inner, bias=False, mesh=mesh, chunks=chunks, device=device, dtype=torch.bfloat16, seed=0)
    shape = mlp.in_layout.shard_shape((tokens, hidden))
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        mlp.zero_grad(set_to_none=True)
        mlp(x).backward(grad)

    return step


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of the GPU, and of the host to issue the step."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    issued = time.perf_counter()
    step()
    issued = time.perf_counter() - issued
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), issued * 1e3


def measure(grid: ndtp.Grid, links: dict[str, Link], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    sizes = arguments.tokens, arguments.hidden, arguments.inner
    fabrics = {"compute": Fabric(None, arguments.ctas)}
    fabrics |= {name: Fabric(link, arguments.ctas) for name, link in links.items()}
    steps = {chunks: block(grid, chunks, sizes) for chunks in arguments.chunks}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for repetition in range(-3, arguments.repetitions):  # the first three warm up
        for name, fabric in fabrics.items():
            for chunks, step in steps.items():
                fabric.busy_ns.clear()
                with fabric.installed():
                    measured = timed(step)
                if repetition >= 0:
                    times.setdefault((name, chunks), []).append(measured)
    step_ms, host_ms = (
        {key: statistics.median(pair[i] for pair in values) for key, values in times.items()} for i in range(2)
    )
    rows = []
    for name, fabric in list(fabrics.items())[1:]:
        for chunks in arguments.chunks:
            fabric.busy_ns.clear()
            with fabric.installed():
                steps[chunks]()
            torch.cuda.synchronize()
            gpu_ms, compute_ms = step_ms[name, chunks], step_ms["compute", min(arguments.chunks)]
            rows.append(
                {
                    "grid": str(grid),
                    "link": name,
                    "chunks": chunks,
                    "step_ms": gpu_ms,
                    "compute_ms": compute_ms,
                    "busiest_link_ms": max(fabric.busy_ns.values(), default=0) / 1e6,
                    "exposed_ms": max(0.0, gpu_ms - compute_ms),
                    "host_ms": host_ms[name, chunks],
                    "host_us": host_us({c: host_ms[name, c] for c in arguments.chunks}),
                }
            )
    return rows


def host_us(host_ms: dict[int, float]) -> float | None:
    """Microseconds of host time that one more chunk of one product takes in one pass; chunks -> ms of a step."""
    if len(host_ms) < 2:
        return None
    return statistics.linear_regression(list(host_ms), list(host_ms.values())).slope * 1e3 / PASSES


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=16384)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--hardware", default="h200-ib", help="profile whose links are emulated: a preset or .toml file"
    )
    parser.add_argument("--ctas", type=int, default=16, help="thread blocks that a collective keeps busy")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("bench/fabric.py: needs a CUDA device and there is none; nothing was measured", file=sys.stderr)
        return 2
    from torch.testing._internal.distributed.fake_pg import FakeStore

    profile = Hardware.load(arguments.hardware)
    links = {"intra": profile.intra, "inter": profile.inter}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    print(LABEL)
    print(f"{'grid':16} {'link':6} {'chunks':>6} {'step':>8} {'compute':>8} {'link':>8} {'exposed':>8} {'host':>8}  ms")
    rows = []
    for grid in ndtp.Grid.all(RANKS):
        for row in measure(grid, links, arguments):
            rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
            times = (row[f"{key}_ms"] for key in ("step", "compute", "busiest_link", "exposed", "host"))
            print(f"{row['grid']:16} {row['link']:6} {row['chunks']:6}", *(f"{ms:8.3f}" for ms in times))
    if arguments.out:
        result = {
            "label": LABEL,
            "date": str(date.today()),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "hardware": profile.name,
            "ctas": arguments.ctas,
            "block": [arguments.tokens, arguments.hidden, arguments.inner],
            "dtype": "bfloat16",
            "unit": "ms, median; host_us: us of host time a chunk, product and pass",
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
