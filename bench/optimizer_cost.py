"""The host's cost of optimizers' steps, of clipping and of averages: parameters of a split model beside dense ones.

    python bench/optimizer_cost.py [--out bench/results/optimizer_cost.json]

A tiny Llama of four layers on the fake process group, whose collectives return at once; dense and split take turns, and
each number is the median processor time of a step.  torch's own DTensors are beside them: fully sharded parameters of
the same model (`fully_shard`), which torch's users have.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_host_cost import GRIDS, llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp


def average(parameters: list[Any]) -> Callable[[], None]:
    copies = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def run() -> None:
        for copy, p in zip(copies, parameters, strict=True):
            copy.lerp_(p, 0.1)

    return run


STEPS: dict[str, Callable[[list[Any]], Callable[[], Any]]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 1e-6).step,
    "SGD, momentum": lambda ps: torch.optim.SGD(ps, 1e-6, momentum=0.9).step,
    "AdamW": lambda ps: torch.optim.AdamW(ps, 1e-6).step,
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, 1e-6, foreach=True).step,
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, 1e-6, fused=True).step,
    "clip_grad_norm_": lambda ps: lambda: torch.nn.utils.clip_grad_norm_(ps, 1e9),
    "clip_grad_norm_, foreach": lambda ps: lambda: torch.nn.utils.clip_grad_norm_(ps, 1e9, foreach=True),
    "ndtp.nn.clip_grad_norm_": lambda ps: lambda: ndtp.nn.clip_grad_norm_(ps, 1e9),
    "an average of weights": average,
}


def trained(model: Any) -> list[Any]:
    """The parameters of a model, with gradients."""
    ids = torch.arange(8 * 16).view(8, 16) % 128
    model(input_ids=ids, labels=ids).loss.backward()
    return [*model.parameters()]


def models(scheme: str) -> dict[str, list[Any]]:
    grid = ndtp.Grid(GRIDS[scheme])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=grid.num_ranks)
    sharded = llama()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (grid.num_ranks,)))
    split = ndtp.parallelize(llama(), ndtp.ProcessGrid(grid), scheme=scheme)
    return {"dense": trained(llama()), "fully_shard": trained(sharded), "split": trained(split)}


def measure(scheme: str, rounds: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    parameters = models(scheme)
    for name, make in STEPS.items():
        runs = {who: make(ps) for who, ps in parameters.items() if who != "fully_shard" or "ndtp" not in name}
        times: dict[str, list[float]] = {who: [] for who in runs}
        for i in range(rounds + 2):
            for who, run in runs.items():
                begun = time.process_time()
                run()
                if i > 1:
                    times[who].append(1e3 * (time.process_time() - begun))
        rows[name] = {who: round(statistics.median(each), 3) for who, each in times.items()}
    dist.destroy_process_group()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure("3d", arguments.rounds)
    print("| step | dense, ms | fully_shard, ms | split, ms | split / dense |\n|---|---:|---:|---:|---:|")
    for name, row in rows.items():
        theirs = row.get("fully_shard", "")
        print(f"| {name} | {row['dense']} | {theirs} | {row['split']} | {row['split'] / row['dense']:.1f} |")
    if arguments.out:
        record = {"date": str(date.today()), "torch": torch.__version__, "cpu": platform.processor(), "rows": rows}
        arguments.out.write_text(json.dumps({**record, "unit": "median processor milliseconds"}, indent=1) + "\n")


if __name__ == "__main__":
    main()
