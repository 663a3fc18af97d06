"""A ring's step against the longer of attention and transfer, on a clock: attention sleeps, links are real.

    python bench/slow_network.py --ranks 4 --rate 50mbit --burst 80kb --timeout 300 -- \\
        python bench/ring.py --rate 50mbit --out bench/results/ring.json

Each rank has a part of one causal sequence.  Its local attention sleeps for as long as a device would take, so that no
processor is to blame: half as long as the transfers of the phase, as long, and twice.  The links' own rate is measured
by one message before.  Each number is the median of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ndtp
from ndtp.algebra.ring_plan import RingPlan
from ndtp.compute import partial_attention
from ndtp.measure.pace import wake_up_in_time
from ndtp.ops.moving import sent
from ndtp.ops.ring_attention import ring_attention

AIM = 1.15


def slowest(seconds: float) -> float:
    """Return the largest of all ranks' times."""
    found = torch.tensor(seconds)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def sleeping(seconds_per_pair: dict[str, float], heads: int) -> None:
    """Let attention, forward and backward, take its time for its share of the heads, and compute nothing."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, part: Any, mask: Any = None) -> Any:
        time.sleep(part.work * seconds_per_pair["forward"] * q.shape[-3] / heads)
        return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1])

    def back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, scale: float, part: Any, _: Any) -> Any:
        time.sleep(part.work * seconds_per_pair["dgrad"] * q.shape[-3] / heads)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    partial_attention.attend, partial_attention.attend_backward = attend, back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"length": 4096, "heads": 4, "features": 64, "repetitions": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--balances", type=float, nargs="*", default=[0.5, 1.0, 2.0])
    parser.add_argument("--rate", required=True, help="of the links, as given to slow_network.py")
    parser.add_argument("--out", type=Path, help="JSON; other rates in it are kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wake_up_in_time()
    ranks = dist.get_world_size()
    mesh = ndtp.ProcessGrid(ndtp.Grid(x=ranks))
    part = arguments.length // ranks
    plan = RingPlan(mesh.grid, ("x",), arguments.length, part, True)
    q, k, v = (torch.zeros(1, arguments.heads, part, arguments.features, requires_grad=True) for _ in range(3))
    block = torch.cat([k.detach().flatten(), v.detach().flatten()])
    sent(block, (plan.pass_on,), mesh, "probe", "forward")()
    passes = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        sent(block, (plan.pass_on,), mesh, "probe", "forward")()
        passes.append(slowest(time.perf_counter() - start))
    rate = block.nbytes / statistics.median(passes)
    moved = plan.volume(q.shape, k.shape, v.shape, 4, 4).by("phase")
    pairs = sum(plan.work(mesh.grid.index(mesh.rank, ("x",))))
    rows = []
    for balance in arguments.balances:
        transfer = {phase: amount / rate for phase, amount in moved.items()}
        sleeping({phase: balance * seconds / pairs for phase, seconds in transfer.items()}, arguments.heads)
        times: dict[str, list[float]] = {"forward": [], "dgrad": []}
        for _ in range(arguments.repetitions):
            dist.barrier()
            start = time.perf_counter()
            out = ring_attention(q, k, v, plan, mesh)
            times["forward"].append(slowest(time.perf_counter() - start))
            dist.barrier()
            start = time.perf_counter()
            out.sum().backward()
            times["dgrad"].append(slowest(time.perf_counter() - start))
        took = {phase: statistics.median(each) for phase, each in times.items()}
        bound = sum(max(1.0, balance) * seconds for seconds in transfer.values())
        over = {phase: took[phase] / (max(1.0, balance) * transfer[phase]) for phase in took}
        row = {"balance": balance, "step_ms": sum(took.values()) * 1e3, "bound_ms": bound * 1e3}
        rows.append(row | {"over_bound": sum(took.values()) / bound, **{f"{key}_over": x for key, x in over.items()}})
        if dist.get_rank() == 0:
            print("  ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    if dist.get_rank() == 0 and arguments.out is not None:
        path: Path = arguments.out
        kept = json.loads(path.read_text()) if path.exists() else {"runs": {}}
        kept |= {"date": str(date.today()), "torch": torch.__version__, "aim": f"over_bound at most {AIM}"}
        kept["runs"][f"{arguments.rate}, {ranks} ranks"] = {"part": part, "MB/s measured": rate / 1e6, "rows": rows}
        path.write_text(json.dumps(kept, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
