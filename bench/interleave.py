"""Parts of a batch in turns (`mesh.interleave`) against the whole batch in chunks, on a clock.

    python bench/slow_network.py --ranks 8 --rate 200mbit -- \\
        python bench/interleave.py --rate 200mbit --out bench/results/interleave.json

Four residual blocks (MatMul, GELU, MatMul), and a stock Llama of two layers with its loss, whose attention between the
projections is not cut in chunks.  Products, activations, sums and attention sleep for as long as a device would take,
all together `--balance` times as long as the communication of the whole batch; communication is real.  The rivals take
turns, step by step; median of the slowest rank.  "bound" is the longer of work and communication of the whole batch,
forward and backward each: what no schedule beats that ends the one before the other begins, and no part moves less.
Before, bytes are compared with those of micro-batches, and what collectives were for on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ndtp
from ndtp.algebra.volume import Volume
from ndtp.cli.bench_step import grid_of
from ndtp.collectives.recorder import Recorder
from ndtp.measure.pace import Clock, PacedCollectives, PacedGemm, wake_up_in_time
from ndtp.measure.paced import KINDS, links_of
from ndtp.planner.hardware import Hardware
from ndtp.schedule.chunk_choice import Speeds

GRIDS = ("1d-sp:x=8", "3d:z=4,x=1,y=2")
ATTENTION_BACKWARD = 2.5  # times the products of forward
Model = tuple[ndtp.ProcessGrid, Callable[..., None], Sequence[Sequence[Any]]]


class Rival(NamedTuple):
    """A step of the whole batch, or of its parts in turns."""

    chunks: int | str
    parts: int = 1

    def __str__(self) -> str:
        cut = "auto" if self.chunks == "auto" else f"{self.chunks} chunk{'s' * (self.chunks != 1)}"
        return f"{self.parts} parts in turns, {cut}" if self.parts > 1 else cut


RIVALS = (Rival(1), Rival(4), Rival("auto"), Rival(1, 2), Rival(2, 2), Rival(1, 4))
MOST_PARTS = max(rival.parts for rival in RIVALS)


class PacedAttention(torch.autograd.Function):
    """The time of an attention's products, causal, and no numbers."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, clock: Clock) -> Tensor:
        ctx.clock, ctx.shapes = clock, (q.shape, k.shape, v.shape)
        ctx.flops = 2.0 * q.numel() * k.shape[-2]
        clock.multiply(ctx.flops)
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.multiply(ATTENTION_BACKWARD * ctx.flops)
        return (*(grad.new_zeros(shape) for shape in ctx.shapes), None)


def paced_mesh(grid: ndtp.Grid, clock: Clock) -> ndtp.ProcessGrid:
    mesh = ndtp.ProcessGrid(grid)
    mesh.gemm = PacedGemm(clock)
    mesh.collectives = PacedCollectives(mesh.groups, mesh.ring, mesh.step.recording)
    mesh.collectives.clock = clock
    return mesh


def blocks(grid: ndtp.Grid, scheme: str, chunks: int | str, clock: Clock, arguments: argparse.Namespace) -> Model:
    mesh = paced_mesh(grid, clock)
    layers = nn.ModuleList(
        ndtp.nn.MLP(arguments.hidden, arguments.inner, mesh=mesh, scheme=scheme, bias=False, chunks=chunks, seed=0)
        for _ in range(arguments.blocks)
    )
    shape = layers[0].in_layout.shard_shape((arguments.tokens, arguments.hidden))

    def step(x: Tensor, grad: Tensor) -> None:
        y = x = x.detach().requires_grad_()
        for layer in layers:
            y = y + layer(y)
        y.backward(grad)

    return mesh, step, (torch.zeros(shape), torch.zeros(shape))


def llama(grid: ndtp.Grid, scheme: str, chunks: int | str, clock: Clock, arguments: argparse.Namespace) -> Model:
    import transformers

    mesh = paced_mesh(grid, clock)
    if arguments.tokens // arguments.length % (MOST_PARTS * grid.num_ranks):
        raise ValueError(
            f"--length {arguments.length}: sequences of a part are padded to one a rank; fix: shorter ones"
        )
    config = transformers.LlamaConfig(
        hidden_size=arguments.hidden, intermediate_size=arguments.inner, num_hidden_layers=arguments.layers,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=arguments.vocabulary, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ndtp.parallelize(model, mesh, scheme=scheme, chunks=chunks)
    ids = torch.zeros(arguments.tokens // arguments.length, arguments.length, dtype=torch.long)

    def paced(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        result: Tensor = PacedAttention.apply(q, k, v, clock)  # type: ignore[no-untyped-call]
        return result

    F.scaled_dot_product_attention = paced  # as long as the program runs

    def step(ids: Tensor, labels: Tensor) -> None:
        model(input_ids=ids, labels=labels).loss.backward()

    return mesh, step, (ids, ids)


MODELS = {"blocks": blocks, "llama": llama}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=64, help="of a sequence of the Llama")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--balance", type=float, default=1.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--hardware", default="h200-ib", help="whose ratio of arithmetic to memory counts")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--grids", nargs="*", default=list(GRIDS))
    parser.add_argument("--rate", default="as given to slow_network.py", help="noted in the result")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wake_up_in_time()
    attention = F.scaled_dot_product_attention
    try:
        measure(arguments)
    finally:
        F.scaled_dot_product_attention = attention
    dist.barrier()
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace) -> None:
    found: dict[str, Any] = {}
    for case in arguments.grids:
        scheme, _, axes = case.partition(":")
        grid = grid_of(axes)
        wire = links_of(ndtp.ProcessGrid(grid), torch.empty(1))
        for name in arguments.models:
            found[f"{name} {case}"] = measured(name, grid, scheme, wire, arguments)
            if dist.get_rank() == 0:
                report(f"{name} {case}", found[f"{name} {case}"])
                write(found, arguments)


def measured(name: str, grid: ndtp.Grid, scheme: str, wire: Speeds, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rivals on one grid."""
    clock = Clock.of(Hardware.load(arguments.hardware), "float32")
    models = {rival: MODELS[name](grid, scheme, rival.chunks, clock, arguments) for rival in RIVALS}
    (forward, backward), volume = work_and_volume(models[RIVALS[0]], clock)
    links = [seconds(volume, wire, phases) for phases in (("forward",), ("dgrad", "wgrad", "backward"))]
    clock.rate = agreed((forward + backward) / (arguments.balance * sum(links)))
    work = forward / clock.rate, backward / clock.rate
    for rival in RIVALS:
        if rival.parts > 1:
            check(models[rival], rival.parts)
    times: dict[Rival, list[float]] = {rival: [] for rival in RIVALS}
    for repetition in range(arguments.repetitions + 1):
        for rival in RIVALS:
            took = timed(models[rival], rival.parts)
            if repetition:  # of the first one weights are not gathered ahead
                times[rival].append(took)
    bound = sum(map(max, work, links))
    rows = {str(rival): statistics.median(took) for rival, took in times.items()}
    return {
        "work_ms": round(1e3 * sum(work), 1), "communication_ms": round(1e3 * sum(links), 1),
        "bound_ms": round(1e3 * bound, 1),
        "rivals": {rival: {"ms": round(1e3 * s, 1), "over_bound": round(s / bound, 3)} for rival, s in rows.items()},
    }  # fmt: skip


def work_and_volume(model: Model, clock: Clock) -> tuple[tuple[float, float], Volume]:
    """Of the whole batch in one chunk: flops forward and backward, and what is received."""
    _, step, batch = model
    marks: list[float] = []
    backward = torch.Tensor.backward

    def noted(*args: Any, **kwargs: Any) -> None:
        marks.append(clock.work)
        backward(*args, **kwargs)

    clock.work = 0.0
    torch.Tensor.backward = noted  # type: ignore[method-assign]
    try:
        with ndtp.CommMeter() as meter:
            step(*batch)
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    return (marks[0], clock.work - marks[0]), meter.volume


def seconds(volume: Volume, wire: Speeds, phases: Sequence[str]) -> float:
    """For which a rank's link works, without what calls cost."""
    rates = {(kind, axis): wire.links[kind if kind in KINDS else KINDS[0], axis].per_byte
             for entry in volume.entries for kind in (entry.collective,) for axis in entry.axes}  # fmt: skip
    return sum(
        entry.num_bytes * max(rates[entry.collective, axis] for axis in entry.axes)
        for entry in volume.entries
        if entry.phase in phases
    )


def cut(model: Model, parts: int) -> list[Sequence[Any]]:
    return [x.chunk(parts) for x in model[2]]


def check(model: Model, parts: int) -> None:
    """Parts in turns receive what micro-batches do, and start the same on every rank."""
    mesh, step, _ = model
    *others, last = zip(*cut(model, parts), strict=True)
    step(*last)  # what is measured, and what is made, the first time
    with ndtp.CommMeter() as expected:
        with mesh.accumulate():
            for part in others:
                step(*part)
        step(*last)
    with ndtp.CommMeter() as meter, Recorder(mesh) as recorder:
        mesh.interleave(step, *cut(model, parts))
    assert meter.volume == expected.volume, f"{meter.volume} in turns, {expected.volume} one after the other"
    order = [entry.name for entry in recorder.entries if entry.kind == "collective"]
    orders: list[list[str]] = [[] for _ in range(mesh.grid.num_ranks)]
    dist.all_gather_object(orders, order)
    assert all(other == order for other in orders), "ranks start their collectives in different orders"
    assert not mesh.collectives.in_flight


def timed(model: Model, parts: int) -> float:
    """Seconds of the slowest rank."""
    mesh, step, batch = model
    batches = cut(model, parts)
    dist.barrier()
    begin = time.perf_counter()
    if parts > 1:
        mesh.interleave(step, *batches)
    else:
        step(*batch)
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def agreed(value: float) -> float:
    shared = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def report(case: str, found: dict[str, Any]) -> None:
    print(f"{case}: work {found['work_ms']:.0f} ms, communication {found['communication_ms']:.0f} ms")
    for rival, row in found["rivals"].items():
        print(f"    {rival:28} {row['ms']:7.0f} ms  {row['over_bound']:5.2f} x the bound", flush=True)


def write(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.out is None:
        return
    sizes = ("tokens", "length", "hidden", "inner", "blocks", "layers", "vocabulary", "balance", "repetitions")
    results = {
        "date": str(date.today()), "torch": torch.__version__, "ranks": int(os.environ["WORLD_SIZE"]),
        "link": arguments.rate, **{name: getattr(arguments, name) for name in sizes},
        "unit": "ms, median of the slowest rank; local work asleep, gloo on CPUs", "cases": found,
    }  # fmt: skip
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
