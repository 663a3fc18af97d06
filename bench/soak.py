"""Thousands of steps with delays, checkpoints, evaluations and generation between: does anything grow, or change?

    nice python bench/soak.py --steps 10000 --starts 500 --ranks 8

Ranks train a small model twice.  One run is disturbed: random delays on each rank, a checkpoint beside the steps
every 500, an evaluation every 50, generation of a random length every 200.  Losses and weights of both must be equal to
the last bit.  Memory, threads, descriptors, collectives in flight, process groups and bound programs of the disturbed
run are looked at every 1/100 of its steps; what the second half of them grows by, per thousand steps, is a regression's
slope, with its standard error.  Then two ranks make a world, a grid and a model, make a step and end it all, so many
times; and as often a world of torch alone, which grows by itself.  What is seen goes into a file for each rank at once:
of a run that is ended early, the record tells how far it came.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import random
import resource
import sys
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

SIZES, LENGTH, LENGTHS = ByteModelSizes(16, 32, 1, 4), 8, (4, 8, 16)
GRIDS = {2: ("1d-sp", Grid(x=2)), 4: ("2d", Grid(x=2, y=2)), 8: ("3d", Grid(z=2, x=2, y=2))}


class MallInfo(ctypes.Structure):
    """What glibc knows of the memory of `malloc`, of all arenas, in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "in_use",
            "free",
            "keepcost",
        )
    )


def malloc_bytes() -> int:
    """Bytes that `malloc` has lent and that were not given back; 0 where glibc does not tell."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = MallInfo
    found = mallinfo2()
    return int(found.in_use + found.hblkhd)


def looked_at(mesh: ProcessGrid | None) -> dict[str, float]:
    """What a program has, that must not grow."""
    from torch.distributed.distributed_c10d import _world

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_kib": pages * resource.getpagesize() / 1024,
        "malloc_kib": malloc_bytes() / 1024,
        "python_blocks": sys.getallocatedblocks(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "in_flight": 0 if mesh is None else mesh.collectives.in_flight,
        "process_groups": len(_world.pg_map),
        "programs": 0 if mesh is None else len(mesh.programs),
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


def train(steps: int, disturbed: bool, folder: str) -> None:
    scheme, grid = GRIDS[dist.get_world_size()]
    mesh = ProcessGrid(grid)
    torch.manual_seed(0)
    model = ByteModel(SIZES).to_grid(mesh, scheme, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    draw, together = random.Random(mesh.rank), random.Random(7)  # delays are each rank's own
    saving, losses = None, hashlib.sha256()
    log = Path(folder, f"{'disturbed' if disturbed else 'alone'}-{mesh.rank}.jsonl")
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
        if disturbed and (step + 1) % min(50, steps // 8) == 0:
            with torch.no_grad():
                model(batch[:, :-1], batch[:, 1:])
        if disturbed and (step + 1) % min(200, steps // 10) == 0:
            text = ids(step, 2, together.choice(LENGTHS) + 1)
            with torch.inference_mode():
                model(text[:, :-1], text[:, 1:])
        if disturbed and (step + 1) % min(500, steps // 3) == 0:
            if saving is not None:
                saving.wait()
            saving = ndtp.checkpoint.start_save(model, optimizer, f"{folder}/run", extra={"step": step})
        if step % max(steps // 100, 5) == 0 or step == steps - 1:
            line = {"step": step, "losses": losses.hexdigest(), "weights": _digest(model), **looked_at(mesh)}
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
    if saving is not None:
        saving.wait()


def _digest(model: torch.nn.Module) -> str:
    weights = hashlib.sha256()
    for each in model.state_dict().values():
        weights.update(each.to_local().contiguous().view(torch.uint8).numpy().tobytes())
    return weights.hexdigest()


def start_and_end(times: int, folder: str, kind: str) -> None:
    """A world, a grid, a model, a step, and the end of all of it; of the kind "torch", a world alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    log, mesh, block = Path(folder, f"{kind}-{rank}.jsonl"), None, None
    for turn in range(times):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{kind}-{turn}", rank=rank, world_size=size)
        if kind != "torch":
            mesh = ProcessGrid(Grid(x=size))
            block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d-sp")
            block(torch.ones(block.in_layout.shard_shape((4, 8)))).sum().backward()
        if turn % (times // 50 if times >= 100 else 2) == 0:
            gc.collect()
            worlds = sum(isinstance(each, Presence) for each in gc.get_objects())
            with log.open("a") as file:
                file.write(json.dumps({"step": turn, "worlds": worlds, **looked_at(mesh)}) + "\n")
        mesh = block = None
        dist.barrier()
        dist.destroy_process_group()


def growth(seen: list[dict[str, Any]], per: int) -> dict[str, Any]:
    """What the second half grows by in so many steps: (slope, its standard error), and the last value."""
    half = [each for each in seen if each["step"] >= seen[-1]["step"] / 2]
    parts = per / max(half[-1]["step"] - half[0]["step"], 1)
    table = {}
    for name in half[0].keys() - {"step", "losses", "weights"}:
        found, error = slope([each[name] for each in half])
        table[name] = {"slope": round(found * parts, 4), "error": round(error * parts, 4), "last": half[-1][name]}
    return table


def summary(folder: str) -> dict[str, Any]:
    """What the files of a folder tell."""

    def seen(name: str) -> list[list[dict[str, Any]]]:
        paths = sorted(Path(folder).glob(f"{name}-*.jsonl"))
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]

    alone, disturbed, starts, bare = map(seen, ("alone", "disturbed", "starts", "torch"))
    pairs = [(mine, theirs) for one, other in zip(alone, disturbed, strict=False)
             for mine, theirs in zip(one, other, strict=False)]  # fmt: skip
    equal = bool(pairs) and all(mine[key] == theirs[key] for mine, theirs in pairs for key in ("weights", "losses"))
    return {"ranks": len(disturbed), "steps": min((each[-1]["step"] + 1 for each in disturbed), default=0),
            "compared_steps": min((each[-1]["step"] + 1 for each in alone), default=0), "equal": equal,
            "starts": min((each[-1]["step"] + 1 for each in starts), default=0),
            "per_1000_steps": [growth(each, 1000) for each in disturbed],
            "per_100_starts": [growth(each, 100) for each in starts],
            "per_100_starts_of_torch": [growth(each, 100) for each in bare]}  # fmt: skip


def soak(steps: int, starts: int, folder: str, ranks: int = 2) -> dict[str, Any]:
    with RankPool(ranks, timeout=36000) as pool:
        for disturbed in (True, False):  # in this order: what is looked at begins in new processes
            pool.run(train, steps, disturbed, folder)
    for kind in ("starts", "torch"):
        with RankPool(2, timeout=36000) as pool:
            pool.run(start_and_end, starts, folder, kind)
    return summary(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--starts", type=int, default=500)
    parser.add_argument("--ranks", type=int, choices=GRIDS, default=8)
    parser.add_argument("--seen", type=Path, help="a folder for what is seen; default: a temporary one")
    parser.add_argument("--only-summary", action="store_true", help="make the record of what --seen has")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(given.seen or temporary)
        Path(folder).mkdir(parents=True, exist_ok=True)
        record = summary(folder) if given.only_summary else soak(given.steps, given.starts, folder, given.ranks)
    print(json.dumps(record, indent=1))
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
