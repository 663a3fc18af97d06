"""Thousands of steps with delays, checkpoints, evaluations and generation between: does anything grow, or change?

    nice python bench/soak.py --steps 10000 --starts 500

Two ranks train a small model twice.  One run is disturbed: random delays on each rank, a checkpoint beside the steps
every 500, an evaluation every 50, generation of a random length every 200.  The weights of both must be equal to the
last bit.  Memory, threads, descriptors, collectives in flight, process groups and bound programs of the disturbed run
are looked at every 1/100 of its steps; what the second half of them grows by, per thousand steps, is a regression's
slope, with its standard error.  Then ranks make a world, a grid and a model, make a step and end it all, so many times.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ndtp
from ndtp import Grid, ProcessGrid
from ndtp.collectives.presence import Presence
from ndtp.models.byte_model import ByteModel, ByteModelSizes
from ndtp.testing import RankPool

RANKS, SIZES, LENGTH = 2, ByteModelSizes(16, 32, 1, 4), 8
LENGTHS = (4, 8, 16)


def looked_at(mesh: ProcessGrid) -> dict[str, float]:
    """What a program has, that must not grow."""
    from torch.distributed.distributed_c10d import _world

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_kib": pages * resource.getpagesize() / 1024,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "in_flight": mesh.collectives.in_flight,
        "process_groups": len(_world.pg_map),
        "programs": len(mesh.programs),
    }


def slope(values: list[float]) -> tuple[float, float]:
    """Of a line through equally spaced values, by the place from 0 to 1, and its standard error."""
    y = torch.tensor(values, dtype=torch.float64)
    x = torch.linspace(0, 1, len(y), dtype=torch.float64)
    dx = x - x.mean()
    found = float((dx * y).sum() / dx.square().sum())
    rest = y - y.mean() - found * dx
    return found, float((rest.square().sum() / max(len(y) - 2, 1) / dx.square().sum()).sqrt())


def ids(step: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(step))


def train(steps: int, disturbed: bool, folder: str) -> dict[str, Any]:
    mesh = ProcessGrid(Grid(x=RANKS))
    torch.manual_seed(0)
    model = ByteModel(SIZES).to_grid(mesh, "1d-sp", 1)
    optimizer = torch.optim.AdamW(model.parameters())
    draw, together = random.Random(mesh.rank), random.Random(7)  # delays are each rank's own
    saving, seen, losses = None, [], hashlib.sha256()
    for step in range(steps):
        if disturbed and draw.random() < 0.05:
            time.sleep(draw.uniform(0, 0.004))
        batch = ids(step, 2, LENGTH + 1)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        ndtp.nn.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.update(repr(loss.item()).encode())
        if not disturbed:
            continue
        if step % 50 == 49:
            with torch.no_grad():
                model(batch[:, :-1], batch[:, 1:])
        if step % 200 == 199:
            text = ids(step, 2, together.choice(LENGTHS) + 1)
            with torch.inference_mode():
                model(text[:, :-1], text[:, 1:])
        if step % 500 == 499 or (steps < 500 and step % 20 == 19):
            if saving is not None:
                saving.wait()
            saving = ndtp.checkpoint.start_save(model, optimizer, folder, extra={"step": step})
        if step % max(steps // 100, 1) == 0:
            seen.append(looked_at(mesh))
    if saving is not None:
        saving.wait()
    weights = hashlib.sha256()
    for each in model.state_dict().values():
        weights.update(each.to_local().contiguous().view(torch.uint8).numpy().tobytes())
    return {"weights": weights.hexdigest(), "losses": losses.hexdigest(), "seen": seen}


def start_and_end(times: int, folder: str) -> list[dict[str, float]]:
    """A world, a grid, a model, a step, and the end of all of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    seen = []
    for turn in range(times):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{turn}", rank=rank, world_size=size)
        mesh = ProcessGrid(Grid(x=RANKS))
        block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d-sp")
        block(torch.ones(block.in_layout.shard_shape((4, 8)))).sum().backward()
        if turn % max(times // 100, 1) == 0:
            gc.collect()
            worlds = sum(isinstance(each, Presence) for each in gc.get_objects())
            seen.append({**looked_at(mesh), "worlds": worlds})
        del mesh, block
        dist.barrier()
        dist.destroy_process_group()
    return seen


def growth(seen: list[dict[str, float]], per: float) -> dict[str, Any]:
    """What the second half grows by: (slope, its standard error) for so many parts of it, and the last value."""
    half = seen[len(seen) // 2 :]
    table = {}
    for name in half[0]:
        found, error = slope([each[name] for each in half])
        table[name] = {"slope": round(found * per, 4), "error": round(error * per, 4), "last": half[-1][name]}
    return table


def soak(steps: int, starts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        with RankPool(RANKS, timeout=7200) as pool:
            alone = pool.run(train, steps, False, f"{folder}/alone")
        with RankPool(RANKS, timeout=7200) as pool:
            disturbed = pool.run(train, steps, True, f"{folder}/disturbed")
        with RankPool(RANKS, timeout=7200) as pool:
            ends = pool.run(start_and_end, starts, folder)
    equal = all(mine[key] == theirs[key] for mine, theirs in zip(alone, disturbed, strict=True)
                for key in ("weights", "losses"))  # fmt: skip
    return {"ranks": RANKS, "steps": steps, "starts": starts, "equal": equal,
            "per_1000_steps": [growth(each["seen"], 2000 / steps) for each in disturbed],
            "per_100_starts": [growth(each, 200 / starts) for each in ends]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--starts", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    given = parser.parse_args()
    record = soak(given.steps, given.starts)
    print(json.dumps(record, indent=1))
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
