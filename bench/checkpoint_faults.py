"""Checkpoints whose save is killed, and whose files are damaged: what `load` makes of them.

    python bench/checkpoint_faults.py [--kills 200] [--flips 1000] [--out bench/results/checkpoint_faults.json]

kills   a process saves one checkpoint after the other over the same folder, and is killed at a random moment; then the
        folder is loaded: all tensors are those of one save, the last that was finished or the one that was under way.
flips   a bit of a random byte of a random file of a checkpoint (of a 2x2 grid, four ranks: a manifest and four files)
        is flipped: `load` refuses, names the file (and the key, where the byte is a tensor's), and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import ndtp
import ndtp.testing
from ndtp.checkpoints.training_state import load, save
from ndtp.errors import CheckpointError

WIDTH = 128


def stack() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def save_on_and_on(folder: Path, first: int, told: int) -> None:
    model, optimizer = stack()
    for step in range(first, first + 10_000):
        fill(model, step)
        save(model, optimizer, folder, extra={"step": step})
        os.write(told, step.to_bytes(4, "little"))


def kills(count: int, seed: int) -> dict[str, int]:
    draw, seen, step = random.Random(seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        model, optimizer = stack()
        fill(model, 0)
        save(model, optimizer, folder, extra={"step": 0})
        for _ in range(count):
            here, there = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    save_on_and_on(folder, step + 1, there)
                finally:
                    os._exit(1)
            os.close(there)
            os.read(here, 4)  # one is finished
            time.sleep(draw.uniform(0.0, 0.02))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status)
            finished = step + 1
            while data := os.read(here, 4):
                finished = int.from_bytes(data, "little")
            os.close(here)
            fill(model, -1)
            try:
                step = load(model, optimizer, folder)["step"]
            except CheckpointError as error:
                print(f"lost: {error}")
                seen["lost"] += 1
                continue
            whole = all(bool((parameter == step).all()) for parameter in model.parameters())
            seen["mixed" if not whole else {0: "the last", 1: "the one under way"}.get(step - finished, "another")] += 1
    return dict(seen)


def write_on_a_grid(folder: Path) -> None:
    mesh = ndtp.ProcessGrid(ndtp.Grid(x=2, y=2))
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    ndtp.parallelize(model, mesh, scheme="2d")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 32)).square().sum().backward()
    optimizer.step()
    save(model, optimizer, folder, extra={"step": 1})


def flips(count: int, seed: int) -> dict[str, int]:
    draw, seen = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        ndtp.testing.run(write_on_a_grid, 4, args=(folder,))
        files = sorted(folder.iterdir())
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        optimizer = torch.optim.AdamW(model.parameters())
        before = [p.detach().clone() for p in model.parameters()]
        for i in range(count):
            path = files[i % len(files)]
            good = path.read_bytes()
            at = draw.randrange(len(good))
            damaged = bytearray(good)
            damaged[at] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            try:
                load(model, optimizer, folder)
                outcome = "loaded"
            except CheckpointError as error:
                header = 8 + int.from_bytes(good[:8], "little") if path.suffix == ".safetensors" else len(good)
                is_named = path.name in str(error) and (at < header or f"{path.name}: '" in str(error))
                outcome = "refused, named" if is_named else "refused, not named"
            except Exception as error:
                print(f"{path.name} byte {at}: {type(error).__name__}: {error}")
                outcome = "another error"
            is_changed = optimizer.state or not all(map(torch.equal, model.parameters(), before))
            seen[outcome + ", model changed" * bool(is_changed)] += 1
            path.write_bytes(good)
        load(model, optimizer, folder)
    return {"files": len(files), **seen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "kills": {"injected": given.kills, **kills(given.kills, given.seed)},
        "flips": {"injected": given.flips, **flips(given.flips, given.seed)},
        "seed": given.seed,
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
