"""What a first hour on GPUs asks of one or more devices, a verdict each.

    torchrun --standalone --nproc-per-node=N bench/device_checks.py CHECK... [--out FILE]

    topology     versions, devices, links between them
    captured     a step of a stock Llama as one graph, equal to the eager one to the bit; host time of both
    endurance    2000 steps at 8 chunks with the default `max_ctas`: no hang
    host         the host's time to issue a block, eager: at most 600 us, captured: at most 30 us
    beside       a product beside a gather: at most 1.15 of the product alone; and against the longer of the two
    bandwidth    gathers by symmetric memory: at least 0.8 of NCCL's rate
    memory       device memory that a communicator takes

More ranks than devices share them (`ndtp.testing.device.share_gpu`), with fewer steps; times say nothing then.
Without a GPU a check that can runs small on CPUs, over gloo, and judges nothing; the others say that they need one.
Exit status: 0 the goal is met, or there is none; 1 missed or wrong; 2 nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ndtp
from ndtp.algebra.steps import Step
from ndtp.collectives import nccl
from ndtp.testing.device import share_gpu

# cuBLAS gives the same sums in every run with a workspace of a fixed size.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
STEPS = 2000
STEPS_OF_SHARED = 100  # where ranks share a GPU, which gives each of them its turn


@dataclass
class Place:
    """The devices of this run."""

    device: torch.device
    on_gpu: bool
    rank: int
    ranks: int
    is_shared: bool

    @classmethod
    def here(cls) -> Place:
        on_gpu = torch.cuda.is_available()
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        is_shared = on_gpu and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
        device = share_gpu(rank) if is_shared else torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if on_gpu else "gloo", **({"device_id": device} if on_gpu else {}))
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(device, on_gpu, int(os.environ.get("RANK", "0")), ranks, is_shared)

    def mesh(self, **options: Any) -> ndtp.ProcessGrid:
        """The most cubic grid of all ranks."""
        sizes = {"z": 1, "x": 1, "y": 1}
        left, axes = self.ranks, ["x", "y", "z"]
        while left > 1:
            factor = next(f for f in range(2, left + 1) if left % f == 0)
            sizes[min(axes, key=lambda axis: sizes[axis])] *= factor
            left //= factor
        return ndtp.ProcessGrid(ndtp.Grid(**sizes), device_type=self.device.type, **options)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def host_us(self, action: Callable[[], object], times: int = 20) -> float:
        """Microseconds that the host takes to issue an action while the device has nothing else to do: the median."""
        for _ in range(5):
            action()
        found = []
        for _ in range(times):
            self.synchronize()
            begin = time.perf_counter()
            action()
            found.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(found)

    def seconds(self, action: Callable[[], object], times: int = 20) -> tuple[float, float]:
        """Seconds of one of several actions in a row: until the device is done, and until the host is."""
        for _ in range(3):
            action()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            action()
        issued = time.perf_counter()
        self.synchronize()
        return (time.perf_counter() - begin) / times, (issued - begin) / times


class NeedsADevice(Exception):
    """A check that means nothing on CPUs."""


def topology(here: Place) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "ndtp": ndtp.__version__}
    if not here.on_gpu:
        raise NeedsADevice("versions alone: " + json.dumps(found))
    count = torch.cuda.device_count()
    found |= {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "devices": [torch.cuda.get_device_name(i) for i in range(count)],
        "peers": [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)],
        "links": subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout,
    }
    return found


def block_of(here: Place, hidden: int, **options: Any) -> tuple[ndtp.nn.MLP, Tensor]:
    mesh = here.mesh()
    dtype = torch.bfloat16 if here.on_gpu else torch.float32
    block = ndtp.nn.MLP(hidden, 4 * hidden, mesh=mesh, scheme="3d", dtype=dtype, device=here.device, seed=0, **options)
    shape = block.in_layout.shard_shape((8192 if here.on_gpu else 64, hidden))
    return block, torch.randn(shape, dtype=dtype, device=here.device).requires_grad_()


def endurance(here: Place) -> dict[str, Any]:
    block, x = block_of(here, 2048 if here.on_gpu else 16, chunks=8)
    steps = 5 if not here.on_gpu else STEPS_OF_SHARED if here.is_shared else STEPS
    for _ in range(steps):
        block(x).square().mean().backward()
        block.zero_grad()
    here.synchronize()
    return {"steps": steps, "max_ctas": block.mesh.options.max_ctas, "met": here.on_gpu or None}


def host(here: Place) -> dict[str, Any]:
    block, x = block_of(here, 512 if here.on_gpu else 16, chunks=1)

    def step(x: Tensor) -> Tensor:
        loss = block(x).square().mean()
        loss.backward()
        for parameter in block.parameters():
            parameter.grad = None
        return loss.detach()

    eager = here.host_us(lambda: step(x))
    found: dict[str, Any] = {"eager_us": eager}
    if not here.on_gpu:
        return found | {"met": None}
    captured = ndtp.capture(step, (x.detach(),))
    found["captured_us"] = here.host_us(lambda: captured(x.detach()))
    found["captured_step_us"] = here.seconds(lambda: captured(x.detach()))[0] * 1e6
    return found | {"met": eager <= 600 and found["captured_us"] <= 30}


def captured(here: Place) -> dict[str, Any]:
    if not here.on_gpu:
        raise NeedsADevice("CPUs have no graphs")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=1024,
    )  # fmt: skip
    batches = torch.randint(4096, (12, 8, 512), generator=torch.Generator().manual_seed(0)).to(here.device)
    losses, host_us, step_us = {}, {}, {}
    torch.use_deterministic_algorithms(True, warn_only=True)  # else two runs of the dense model differ, too
    for name in ("dense", "eager", "captured"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(here.device, torch.bfloat16)
        if name != "dense":
            ndtp.parallelize(model, here.mesh(), scheme="3d")
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device=here.device), capturable=True)

        def step(ids: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = ndtp.capture(step, (batches[0],)) if name == "captured" else step
        losses[name] = [float(run(ids)) for ids in batches]
        times = 3 if here.is_shared else 20
        host_us[name] = here.host_us(lambda run=run: run(batches[0]), times)  # type: ignore[misc]
        step_us[name] = here.seconds(lambda run=run: run(batches[0]), times)[0] * 1e6  # type: ignore[misc]
    torch.use_deterministic_algorithms(False)
    return {
        "losses": losses, "host_us": host_us, "step_us": step_us, "met": losses["eager"] == losses["captured"]
    }  # fmt: skip


def beside(here: Place) -> dict[str, Any]:
    if not here.on_gpu or here.ranks < 2:
        raise NeedsADevice("two of them, with NCCL between")
    mesh = here.mesh()
    axis = mesh.grid.nontrivial(mesh.grid.names)[0]
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=here.device) for _ in range(2))
    x = torch.randn(16 << 20, dtype=torch.bfloat16, device=here.device)
    gather = Step("all_gather", (axis,), 0)
    multiply = mesh.gemm.bound((("m", "k"), ("k", "n"), ("m", "n")), tuple(a.shape), tuple(b.shape))
    side = torch.cuda.Stream()

    def both() -> None:
        handle = mesh.collectives.start(gather, x, ("beside",), "forward")
        multiply(a, b)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            handle.wait()
        torch.cuda.current_stream().wait_stream(side)

    alone, together = here.seconds(lambda: multiply(a, b))[0], here.seconds(both)[0]
    moved = here.seconds(lambda: mesh.collectives.start(gather, x, ("beside",), "forward").wait())[0]
    return {
        "gemm_ms": alone * 1e3,
        "gather_ms": moved * 1e3,
        "both_ms": together * 1e3,
        "over_gemm": together / alone,
        "over_longest": together / max(alone, moved),
        "met": together <= 1.15 * alone,
    }


def bandwidth(here: Place) -> dict[str, Any]:
    if not here.on_gpu or here.ranks < 2:
        raise NeedsADevice("two of them, that read each other's memory")
    rates: dict[str, float] = {}
    for mover in ("torch", "symmetric"):
        try:
            mesh = here.mesh(collectives=mover)
        except ndtp.GridError as error:
            print(f"{mover}: {error}", flush=True)
            continue
        axis = mesh.grid.nontrivial(mesh.grid.names)[0]
        x = torch.randn(32 << 20, dtype=torch.bfloat16, device=here.device)
        gather, size = Step("all_gather", (axis,), 0), mesh.grid[axis]
        took = here.seconds(
            lambda mesh=mesh, gather=gather, x=x: mesh.collectives.start(gather, x, ("b",), "f").wait()
        )[0]  # type: ignore[misc]
        rates[mover] = x.nbytes * (size - 1) / took / 1e9
    return {"gbs": rates, "met": "symmetric" in rates and rates["symmetric"] >= 0.8 * rates["torch"]}


def memory(here: Place) -> dict[str, Any]:
    if not here.on_gpu or not dist.is_initialized():
        raise NeedsADevice("its memory is asked for, under torchrun")
    found: dict[str, list[float]] = {}
    x = torch.ones(1 << 20, device=here.device)
    for max_ctas in (None, 8):
        for _ in range(3):
            before = torch.cuda.mem_get_info()[0]
            group = dist.new_group(list(range(here.ranks)), **nccl.group_arguments(60, True, max_ctas))
            dist.all_reduce(x, group=group)
            here.synchronize()
            taken = (before - torch.cuda.mem_get_info()[0]) / 2**20
            found.setdefault(f"max_ctas={max_ctas}", []).append(taken)
    return {"mib": found}


CHECKS = {each.__name__: each for each in (topology, captured, endurance, host, beside, bandwidth, memory)}


def judged(name: str, here: Place) -> tuple[int, dict[str, Any]]:
    """Make a check; returns its exit status and what it found, and prints both on the first rank."""
    try:
        found = CHECKS[name](here)
    except NeedsADevice as why:
        if here.rank == 0:
            print(f"{name}: nothing was measured: it needs a device ({why})", flush=True)
        return 2, {"check": name, "verdict": "not measured"}
    met = found.get("met")
    verdict = {True: "met", False: "MISSED", None: "no goal"}[met]
    if here.rank == 0:
        print(f"{name}: {verdict}\n{json.dumps(found, indent=1)}", flush=True)
    return int(met is False), {"check": name, "verdict": verdict, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="+", choices=tuple(CHECKS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    here = Place.here()
    try:
        results = [judged(name, here) for name in arguments.checks]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if arguments.out and here.rank == 0:
        arguments.out.write_text(json.dumps([found for _, found in results], indent=1) + "\n")
    statuses = {status for status, _ in results}
    return 1 if 1 in statuses else 2 if statuses == {2} else 0


if __name__ == "__main__":
    sys.exit(main())
