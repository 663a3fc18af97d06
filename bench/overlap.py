"""How much of the communication of a block is hidden: torch's tensor parallelism, AxoNN-like layers, ndtp.

    python bench/slow_network.py --ranks 8 --rate 500mbit -- python bench/overlap.py --out bench/results/overlap.json

Forward and backward of MatMul -> GELU -> MatMul on every grid of the ranks at hand, one grid after another, each
interleaved with torch, and on 3D grids without dp with layers that all-reduce activations and gather weights over z;
median of the slowest rank.  `--blocks 4`: four residual ones.  Each rival is checked against the dense blocks first.
"compute" is the same step with collectives that move nothing, "communication" the same step with products that compute
nothing, "busy" what all processors of the machine would need for the step if they never idled, the network's share
included: ranks that share processors cannot be faster.  Wire bytes are read from the link's own counter, headers
included.

    python bench/slow_network.py --ranks 8 --rate 200mbit --timeout 3600 -- \
        python bench/overlap.py --blocks 4 --grids 1d-sp:x=8 3d:z=2,x=2,y=2 3d:z=4,x=1,y=2 --rate 200mbit \
        --out bench/results/overlap-blocks-200.json

    python bench/slow_network.py --ranks 8 --rate 200mbit --timeout 5400 -- \
        python bench/overlap.py --paced --rate 200mbit --out bench/results/paced.json

`--paced`: see `paced.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import axonn_layers  # beside this file
import torch
import torch._dynamo  # DTensor would, in each of the processes that are forked
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ndtp
from ndtp.cli.bench_step import grid_of
from ndtp.collectives.collectives import Collectives
from ndtp.collectives.direct_exchange import exchange
from ndtp.compute.gemm import TorchGemm
from ndtp.measure.rivals import wait_until_there
from ndtp.measure.step import turns
from ndtp.measure.whole_activations import WholeBlocks3D

# Where DTensor looks up its reduce-scatter, which torch 2.13 renamed.
functional = torch.distributed._functional_collectives
RENAMED = "reduce_scatter_single" if hasattr(functional, "reduce_scatter_single") else "reduce_scatter_tensor"
TORCH = "torch sequence parallel"
TORCH_WITH_OURS = "  with ndtp's reduce-scatter"
WHOLE = "AxoNN-like 3D"
PROCESSORS = Path("/proc/stat")
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
Step = Callable[[], None]


class Sizes(NamedTuple):
    tokens: int
    hidden: int
    inner: int
    blocks: int


Rows = dict[str, dict[str, float | None]]


class NoCommunication(Collectives):
    """Collectives that allocate what they would return, and move nothing."""

    def launch(self, route, tensor, out=None, ahead=False):
        return _Done(tensor.new_zeros(route.shape) if out is None else out)


class NoProducts(TorchGemm):
    """Products that allocate their result, and compute nothing."""

    def bound_product(self, transpose_a, transpose_b, dims):
        return lambda a, b: a.new_empty(a.shape[int(transpose_a)], b.shape[int(not transpose_b)])

    def product_of_blocks(self, a, b, transpose_a, transpose_b, *, out=None, blocks=1, parts=None, accumulate=False):
        if out is not None:
            return out
        rows, columns = size_of(a, int(transpose_a)), size_of(b, int(not transpose_b)) // blocks
        return a.new_empty((blocks, rows, columns) if blocks > 1 else (rows, columns))


def size_of(matrix: Tensor, dim: int) -> int:
    """The size of a dim of a matrix, or of one that lies as blocks of columns [p, rows, columns / p]."""
    blocks = matrix.shape[0] if matrix.dim() == 3 and dim == 1 else 1
    return matrix.shape[dim - 2] * blocks


class _Done:
    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


class Blocks(nn.ModuleList):
    """One block, or residual ones in a row."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x) if len(self) > 1 else block(x)
        return x


def dense_blocks(sizes: Sizes) -> Blocks:
    torch.manual_seed(0)
    wide, narrow = (sizes.hidden, sizes.inner), (sizes.inner, sizes.hidden)
    return Blocks(nn.Sequential(nn.Linear(*wide), nn.GELU(), nn.Linear(*narrow)) for _ in range(sizes.blocks))


def torch_sequence_parallel(sizes: Sizes) -> tuple[Step, Callable[[Tensor], Tensor]]:
    """torch's ColwiseParallel and RowwiseParallel, activations split by tokens outside of the blocks."""
    ranks, model = dist.get_world_size(), dense_blocks(sizes)
    styles = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    for block in model:
        parallelize_module(block, init_device_mesh("cpu", (ranks,)), styles)
    x = torch.randn(sizes.tokens // ranks, sizes.hidden, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        y = model(x)
        y.backward(grad)
        wait_until_there(y, x.grad)

    return step, lambda whole: model(whole.chunk(ranks)[dist.get_rank()])


def whole_activations(mesh: ndtp.ProcessGrid, sizes: Sizes) -> tuple[Step, Callable[[Tensor], Tensor], WholeBlocks3D]:
    model = WholeBlocks3D([tuple(block) for block in dense_blocks(sizes)], mesh)
    x = model.shard(torch.randn(sizes.tokens, sizes.hidden)).requires_grad_()
    grad = torch.randn_like(x)

    def step() -> None:
        model(x).backward(grad)
        model.finish()

    return step, lambda whole: model(model.shard(whole)), model


def reduce_scatter_by_all_to_all(x: Tensor, reduce_op: str, scatter_dim: int, group, tag: str = "") -> Tensor:
    """What ndtp does on gloo, whose own reduce-scatter moves twice the bytes, in the place of torch's."""
    mesh, dim = group
    ranks = mesh.size(dim)
    blocks = x.detach().unflatten(scatter_dim, (ranks, -1)).movedim(scatter_dim, 0).contiguous()
    received = torch.empty_like(blocks)
    exchange(mesh.get_group(dim), blocks.unbind(), received.unbind()).wait()
    return received.sum(0)


@contextlib.contextmanager
def ndtps_reduce_scatter() -> Iterator[None]:
    """torch's DTensor with ndtp's reduce-scatter: which part of a gain is that alone."""
    with mock.patch.object(functional, RENAMED, reduce_scatter_by_all_to_all):
        yield


def ndtp_blocks(
    mesh: ndtp.ProcessGrid, scheme: str, chunks: int | str, sizes: Sizes
) -> tuple[Step, Callable[[Tensor], Tensor], Blocks]:
    how = {"mesh": mesh, "scheme": scheme, "chunks": chunks}
    model = Blocks(ndtp.nn.MLP.from_dense(up, down, **how) for up, _, down in dense_blocks(sizes))
    layout = model[0].in_layout
    x = torch.randn(layout.shard_shape((sizes.tokens, sizes.hidden)), requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        model(x).backward(grad)

    return step, lambda whole: model(layout.shard(whole, mesh.rank)), model


def check(forward: Callable[[Tensor], Tensor], mine: Callable[[Tensor], Tensor], sizes: Sizes) -> None:
    """The rival's shard of the result is that of the dense blocks."""
    whole = torch.randn(sizes.tokens, sizes.hidden, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(forward(whole), mine(dense_blocks(sizes)(whole)), rtol=1e-4, atol=1e-4)


def timed(step: Step) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    step()
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def wire_bytes(step: Step) -> int | None:
    """Bytes that this rank put on its link in a step, headers and acknowledgements included."""
    if not COUNTER.exists():
        return None
    dist.barrier()
    time.sleep(0.2)
    before = int(COUNTER.read_text())
    step()
    time.sleep(0.2)
    return int(COUNTER.read_text()) - before


def busy_seconds(step: Step, repetitions: int) -> float | None:
    """How long all processors of the machine would work at a step, if they never idled: no schedule is shorter."""
    if not PROCESSORS.exists():
        return None
    dist.barrier()
    before = [int(word) for word in PROCESSORS.read_text().split("\n")[0].split()[1:9]]
    for _ in range(repetitions):
        step()
    dist.barrier()
    after = [int(word) for word in PROCESSORS.read_text().split("\n")[0].split()[1:9]]
    spent = [end - begin for begin, end in zip(before, after, strict=True)]
    idle = spent[3] + spent[4]  # idle, and waiting for a disk
    return (sum(spent) - idle) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1) / repetitions


def alone(step: Step, model: Blocks, repetitions: int) -> dict[str, float]:
    """Medians of the step with collectives that move nothing, and with products that compute nothing."""
    mesh = model[0].mesh
    collectives, mesh.collectives = mesh.collectives, NoCommunication(mesh.groups, mesh.ring, mesh.step.recording)
    try:
        compute = statistics.median(timed(step) for _ in range(repetitions))
    finally:
        mesh.collectives = collectives
    products, mesh.gemm = mesh.gemm, NoProducts()
    activation = model[0].activation_name
    for mlp in model:
        mlp.activation_name = "identity"
    try:
        communication = statistics.median(timed(step) for _ in range(repetitions))
    finally:
        mesh.gemm = products
        for mlp in model:
            mlp.activation_name = activation
    return {"compute": compute, "communication": communication}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--grids", nargs="*", default=[], help="only these, such as 1d-sp:x=8 3d:z=4,x=1,y=2")
    parser.add_argument("--rate", default="as given to slow_network.py", help="noted in the result")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--paced", action="store_true", help="local work is a clock's: schedules and nothing else")
    parser.add_argument("--balances", type=float, nargs="*", default=[1.0, 0.5, 2.0], help="with --paced")
    parser.add_argument("--blocks", type=int, nargs="*", help="residual ones in a row; default: 1, with --paced 1 4")
    arguments = parser.parse_args()
    arguments.blocks = arguments.blocks or ([1, 4] if arguments.paced else [1])
    _store, rank, ranks = next(dist.rendezvous("env://"))  # whoever serves it, torchrun or rank 0, serves all grids
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if arguments.paced:
        import paced  # beside this file

        paced.main(arguments, rank, in_a_process_of_its_own)
        return
    cases = dict.fromkeys(arguments.grids or [f"1d-sp:x={ranks}", *(f"3d:{named(g)}" for g in ndtp.Grid.all(ranks))])
    found: dict[str, Rows] = {}
    cases = [f"{case} in {count} blocks" if count > 1 else case for count in arguments.blocks for case in cases]
    for i, case in enumerate(cases):
        found[case] = in_a_process_of_its_own(case, arguments, measured)
        if rank == 0:
            write(found, arguments)  # what was measured is kept if the rest is interrupted
            print(f"{case}: {i + 1} of {len(cases)}", file=sys.stderr, flush=True)
    if rank == 0:
        report(found)


def in_a_process_of_its_own(
    case: str, arguments: argparse.Namespace, measured: Callable[[str, argparse.Namespace], Any]
) -> Any:
    """gloo's threads of groups that idle would cost processor time: they go with the process."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sender.send(measured(case, arguments)), daemon=True)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        sys.exit(f"overlap: {case} failed, see above")
    finally:
        process.join()


def measured(case: str, arguments: argparse.Namespace) -> Rows:
    """All rivals on one grid."""
    torch.set_num_threads(1)
    store, rank, ranks = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=dist.PrefixStore(case, store), rank=rank, world_size=ranks)
    named_grid, _, count = case.removesuffix(" blocks").partition(" in ")
    sizes = Sizes(arguments.tokens, arguments.hidden, arguments.inner, int(count or 1))
    torch_step, forward = torch_sequence_parallel(sizes)
    steps = {TORCH: torch_step, TORCH_WITH_OURS: ndtps_reduce_scatter()(torch_step)}
    for around in (contextlib.nullcontext, ndtps_reduce_scatter):
        with around():
            check(forward, lambda y: y.chunk(ranks)[rank], sizes)
    scheme, _, axes = named_grid.partition(":")
    grid = grid_of(axes)
    if scheme == "3d" and grid["dp"] == 1:
        steps[WHOLE], forward, whole = whole_activations(ndtp.ProcessGrid(grid), sizes)
        check(forward, whole.shard, sizes)
        dense = [tuple(block) for block in dense_blocks(sizes)]
        for name, model in axonn_layers.rivals(dense, grid):
            check(model.of_whole, model.shard, sizes)
            steps[name] = model.step_of(sizes.tokens, sizes.hidden)
    models: dict[str, Blocks] = {}
    for kind, chunks in (("plain", 1), ("overlapped", arguments.chunks), ("auto", "auto")):
        name = f"{scheme} {grid}, {kind}"
        mesh = ndtp.ProcessGrid(grid)  # of its own: a grid gathers ahead what it expects to come next
        steps[name], forward, model = ndtp_blocks(mesh, scheme, chunks, sizes)
        check(forward, lambda y, layout=model[0].out_layout: layout.shard(y, rank), sizes)
        models[name] = model
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(arguments.repetitions):
        for name in turns(steps, round_):
            times[name].append(timed(steps[name]))
    base, whole_s = (statistics.median(times[name]) if name in times else None for name in (TORCH, WHOLE))
    rows: Rows = {}
    for name, step in steps.items():
        step_s = statistics.median(times[name])
        row: dict[str, float | None] = {"step_ms": step_s * 1e3, "speedup": base / step_s, "wire": wire_bytes(step)}
        if whole_s is not None:
            row["speedup_over_whole"] = whole_s / step_s
        if (model := models.get(name)) is not None:
            row["predicted"] = sum(mlp.volume(arguments.tokens).total for mlp in model)
            plan, mesh = model[0].up.plan, model[0].mesh
            row["chunks"] = mesh.chunks_chosen(plan)[arguments.tokens][0] if plan.chunks == "auto" else plan.chunks
            parts = alone(step, model, 3)
            exposed = max(0.0, step_s - parts["compute"])
            row |= {f"{part}_ms": value * 1e3 for part, value in parts.items()}
            row["hidden_fraction"] = max(0.0, 1 - exposed / parts["communication"]) if parts["communication"] else 1.0
            row["over_bound"] = step_s / max(parts.values())
            busy = busy_seconds(step, 3)
            row["busy_ms"] = busy and busy * 1e3
        rows[name] = {key: value if value is None else round(value, 3) for key, value in row.items()}
    dist.barrier()
    dist.destroy_process_group()
    return rows


def named(grid: ndtp.Grid) -> str:
    return ",".join(f"{axis}={grid[axis]}" for axis in grid)


def report(grids: dict[str, Rows]) -> None:
    heads = ("step", "compute", "comm.", "busy", "hidden", "speedup", "/ AxoNN"), ("wire/predicted", "chunks")
    print(" " * 34, *(f"{head:>{width}}" for width, group in zip((8, 15), heads, strict=True) for head in group))
    for name, row in (item for rows in grids.values() for item in rows.items()):
        wire = f"{row['wire'] / row['predicted']:.3f}" if row["wire"] and row.get("predicted") else "-"
        parts = [row.get(key) for key in ("compute_ms", "communication_ms", "busy_ms")]
        times = " ".join(f"{'-':>8}" if part is None else f"{part:8.0f}" for part in parts)
        hidden = f"{row['hidden_fraction']:8.0%}" if "hidden_fraction" in row else f"{'-':>8}"
        chunks, whole = row.get("chunks", "-"), row.get("speedup_over_whole")
        ratios = f"{row['speedup']:7.2f}x {'-' if whole is None else f'{whole:.2f}x':>8}"
        print(f"{name:34} {row['step_ms']:8.0f} {times} {hidden} {ratios} {wire:>15} {chunks:>15}")


def write(grids: dict[str, Rows], arguments: argparse.Namespace) -> None:
    """The grids of the same block that a file holds already are kept."""
    if not arguments.out:
        return
    results = {
        "torch": torch.__version__,
        "ranks": int(os.environ["WORLD_SIZE"]),
        "link": arguments.rate,
        "block": [arguments.tokens, arguments.hidden, arguments.inner],
        "dtype": "float32",
        "repetitions": arguments.repetitions,
        "unit": "ms, median of the slowest rank; gloo on CPUs, no NCCL figure",
    }
    earlier = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    alike = all(earlier.get(key) == value for key, value in results.items())
    results["grids"] = (earlier["grids"] if alike else {}) | grids
    arguments.out.write_text(json.dumps({"date": str(date.today()), **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
