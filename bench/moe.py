"""A layer of experts: bytes and time of expert parallelism by masking and all-reduce, and by rows sent to experts.

    python bench/slow_network.py --ranks 4 --rate 200mbit -- \
        python bench/moe.py --paced --rate 200mbit --out bench/results/moe.json

"masked" is what transformers does: every rank has all tokens, multiplies those of its own experts, and the results are
all-reduced, as is the gradient of the tokens in backward.  "rows" is `ndtp.nn.MoE` over the same ranks, which sends
each row to its expert and back; "in N chunks" overlaps this with the products of other chunks.  Rivals have the same
weights and routing, are checked against one another, take turns, and are metered in the same run; times are medians of
the slowest rank, forward and backward.

--paced: products take the time that a processor of their own would need for them (--gflops), and none of this
machine's: ranks that share processors cannot show overlap otherwise.  The rest of the step, from the router to the
sums over a token's experts, is computed as ever, on the processors that all ranks share.

What overlap can gain depends on the balance of products and communication, which is reported: at the sizes below and
200 Mbit/s it is 1 : 1 for a step, 2 : 3 forward and 4 : 3 backward, so that no schedule that keeps forward before
backward, nor any number of chunks, is more than 1.7 times as fast as the layer in one piece.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ndtp
from ndtp.compute import grouped
from ndtp.compute.grouped import Groups, grouped_product
from ndtp.measure.rivals import CopyIn, SumOut
from ndtp.measure.step import turns


def masked(moe: ndtp.nn.MoE, x: Tensor, choice: Tensor, gates: Tensor) -> Tensor:
    """The same layer where every rank has all tokens x [tokens, hidden]: its own experts' part, all-reduced."""
    x, gates = CopyIn.apply(x), CopyIn.apply(gates)
    mine = moe.plan.local_experts(moe.num_experts, moe.mesh.rank)
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in (moe.experts.up, moe.experts.down_proj)]
    places = [(choice == expert).nonzero() for expert in mine]
    token, which = torch.cat(places).unbind(1)
    sizes = [len(place) for place in places]
    gate, up = grouped_product(x[token], weights[0].flatten(1, 2), sizes).chunk(2, 1)
    y = grouped_product(torch.nn.functional.silu(gate) * up, weights[1], sizes)
    return SumOut.apply(torch.zeros_like(x).index_add(0, token, y * gates[token, which, None]))


@contextlib.contextmanager
def paced(gflops: float) -> Iterator[list[float]]:
    """Products of experts take their time, and give nothing; all else is as ever.  Gives the seconds of each."""
    naps: list[float] = []

    def nap(flops: float) -> None:
        naps.append(flops / (gflops * 1e9))
        time.sleep(naps[-1])

    def multiplied(x: Tensor, b: Tensor, groups: Groups) -> Tensor:
        nap(2.0 * x.shape[0] * b.shape[1] * b.shape[2])
        return x.new_zeros(x.shape[0], b.shape[2])

    def outer(grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
        nap(2.0 * x.shape[0] * x.shape[1] * grad.shape[1])
        return x.new_zeros(len(groups.sizes), grad.shape[1], x.shape[1])

    with mock.patch.multiple(grouped, multiplied=multiplied, outer=outer):
        yield naps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of all ranks")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--gflops", type=float, default=40.0, help="of a rank's processor, with --paced")
    parser.add_argument("--rate", help="of each rank's link, as given to slow_network.py: for the report")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")  # under torchrun, or slow_network.py
    ranks = dist.get_world_size()
    mesh = ndtp.ProcessGrid(ndtp.Grid(e=ranks))
    sizes = (arguments.hidden, arguments.inner, arguments.experts, arguments.top_k)
    layers = {n: ndtp.nn.MoE(*sizes, mesh=mesh, seed=1, chunks=n) for n in (1, *arguments.chunks)}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(arguments.tokens, arguments.hidden, generator=generator)
    upstream = torch.randn(arguments.tokens, arguments.hidden, generator=generator)
    shard, grad = (layers[1].in_layout.shard(each, mesh.rank).clone().contiguous() for each in (x, upstream))
    with torch.no_grad():
        scores, choice = (x @ whole(layers[1].router.weight).t()).softmax(-1).topk(arguments.top_k)
    gates = scores / scores.sum(-1, keepdim=True)

    def by_masking() -> Tensor:
        given = x.clone().requires_grad_()
        y = masked(layers[1], given, choice, gates.clone().requires_grad_())
        y.backward(upstream)
        return layers[1].in_layout.shard(torch.stack((y.detach(), given.grad)).movedim(0, 1).flatten(1), mesh.rank)

    def by_rows(layer: ndtp.nn.MoE) -> Callable[[], Tensor]:
        def step() -> Tensor:
            given = shard.clone().requires_grad_()
            mine = slice(mesh.rank * len(shard), (mesh.rank + 1) * len(shard))
            y = layer.experts(given, choice[mine], gates[mine].clone().requires_grad_())
            y.backward(grad)
            return torch.stack((y.detach(), given.grad), 1).flatten(1)

        return step

    rivals: dict[str, Callable[[], Tensor]] = {"masked": by_masking}
    rivals |= {"rows" if n == 1 else f"rows in {n} chunks": by_rows(layer) for n, layer in layers.items()}
    found = {name: rival() for name, rival in rivals.items()}
    error = max((each - found["masked"]).abs().max().item() for each in found.values())
    assert error < 1e-3, f"rivals differ by {error}"
    rows: dict[str, dict[str, float]] = {}
    for name, rival in rivals.items():
        with ndtp.CommMeter() as meter:
            rival()
        rows[name] = {"MiB": slowest(meter.volume.total) / 2**20}
    times: dict[str, list[float]] = {name: [] for name in rivals}
    with paced(arguments.gflops) if arguments.paced else contextlib.nullcontext([]) as naps:
        for round_ in range(arguments.rounds):
            for name in turns(rivals, round_):
                dist.barrier()
                naps.clear()
                start = time.perf_counter()
                rivals[name]()
                times[name].append(slowest(time.perf_counter() - start))
                rows[name]["products_ms"] = 1e3 * slowest(sum(naps))
    for name, row in rows.items():
        row["ms"] = 1e3 * statistics.median(times[name])
        if arguments.rate:
            row["communication_ms"] = 1e3 * row["MiB"] * 2**20 * 8 / bits(arguments.rate)
    if mesh.rank == 0:
        for name, row in rows.items():
            against = rows["rows"]
            print(
                f"{name:18} {row['MiB']:8.2f} MiB {row['ms']:8.1f} ms"
                f"   {row['MiB'] / against['MiB']:5.2f} x the bytes of rows, {against['ms'] / row['ms']:5.2f} x as fast"
            )
        if arguments.paced and arguments.rate:
            products, communication = against["products_ms"], against["communication_ms"]
            print(f"of rows: {products:.0f} ms of products, {communication:.0f} ms of communication")
        if arguments.out:
            settings = {name: value for name, value in vars(arguments).items() if name != "out"}
            report = {"ranks": ranks, **settings, "error": error, "rivals": rows, "processors": os.cpu_count()}
            arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    dist.destroy_process_group()


def whole(parameter: Any) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def bits(rate: str) -> float:
    """A second, of tc's 200mbit or 10gbit."""
    return float(rate.rstrip("kmgbit")) * {"k": 1e3, "m": 1e6, "g": 1e9}.get(rate.removesuffix("bit")[-1], 1.0)


def slowest(value: float) -> float:
    """The largest of all ranks."""
    found = torch.tensor([float(value)], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


if __name__ == "__main__":
    main()
