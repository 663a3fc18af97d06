"""Few bytes behind slow links: four blocks whose tensors travel in fp32, bf16, fp8 and int8, against torch in bf16.

    python bench/slow_network.py --ranks 8 --rate 200mbit --burst 80kb --timeout 400 -- \
        python bench/wire.py --rate 200mbit --inner 512 --repetitions 3 --grid z=4,y=2 --out bench/results/wire.json
    python bench/slow_network.py --ranks 8 --rate 50mbit --burst 80kb --timeout 400 -- \
        python bench/wire.py --rate 50mbit --tokens 1024 --inner 512 --repetitions 3 --out bench/results/wire.json

Forward and backward of four residual blocks, MatMul -> GELU -> MatMul, which compute in fp32.  The rivals are torch's
sequence-parallel plan, and the same plan whose collectives are bf16: hooks around each block cast what is gathered and
what is reduced, both ways.  ndtp runs on the same 1D grid, on that of fewest bytes, and on those of `--grid`, by every
wire.  All of them are interleaved; each number is the median of the slowest rank.  Beside them: the bytes that a rank
receives, the time that these take on its link alone (`link_ms`), that of all ranks on the processors that there are
(`cpu_ms`), which should be the shorter one, and how far output and gradient of the input are from the dense blocks', as
a part of their norm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from overlap import Blocks, Sizes, dense_blocks, ndtps_reduce_scatter, timed
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ndtp
from ndtp.measure.rivals import wait_until_there
from ndtp.measure.step import turns

FEWEST = "dp=4,y=2"  # of eight ranks
WIRES = (None, "bf16", "fp8", "int8")
TORCH, TORCH_BF16 = "torch, fp32", "torch, bf16 collectives"


class Rival(NamedTuple):
    """A model, and how to call it.

    Attributes:
        shard: this rank's rows of the input, and of the output's gradient.
        around: in what a step runs.
    """

    model: Blocks
    shard: Callable[[Tensor], Tensor]
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def step(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Output and gradient of the input, when they are there."""
        x = x.detach().requires_grad_()
        with self.around():
            y = self.model(x)
            y.backward(grad)
        assert x.grad is not None
        wait_until_there(y, x.grad)
        return y.detach(), x.grad


def torch_plan(sizes: Sizes, dtype: torch.dtype | None, around: Any = contextlib.nullcontext) -> Rival:
    """torch's ColwiseParallel and RowwiseParallel, rows split outside; with a dtype, casts around its collectives."""
    ranks, model = dist.get_world_size(), dense_blocks(sizes)
    mesh = init_device_mesh("cpu", (ranks,))
    inside = dtype is None
    styles = {
        "0": ColwiseParallel(input_layouts=Shard(0) if inside else Replicate()),
        "2": RowwiseParallel(output_layouts=Shard(0) if inside else Partial(), use_local_output=inside),
    }

    def enter(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        rows = DTensor.from_local(args[0].to(dtype), mesh, [Shard(0)])
        return (rows.redistribute(placements=[Replicate()]).to(args[0].dtype),)

    def leave(_: Any, args: Any, y: Any) -> Tensor:
        return y.to(dtype).redistribute(placements=[Shard(0)]).to_local().to(y.dtype)

    for block in model:
        parallelize_module(block, mesh, styles)
        if not inside:
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave)
    return Rival(model, lambda whole: whole.chunk(ranks)[dist.get_rank()], around)


def ndtp_blocks(sizes: Sizes, mesh: ndtp.ProcessGrid, scheme: str, wire: str | None) -> Rival:
    how: dict[str, Any] = {"mesh": mesh, "scheme": scheme, "chunks": "auto", "wire": wire}
    model = Blocks(ndtp.nn.MLP.from_dense(up, down, **how) for up, _, down in dense_blocks(sizes))
    return Rival(model, lambda whole: model[0].in_layout.shard(whole, mesh.rank))


def bits_per_second(rate: str) -> float:
    """Return a rate as tc reads it."""
    unit = next((unit for unit in ("kbit", "mbit", "gbit") if rate.endswith(unit)), "")
    return float(rate.removesuffix(unit) if unit else 1) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "": math.inf}[unit]


def grid_of(text: str) -> ndtp.Grid:
    axes = {axis: int(size) for axis, _, size in (word.partition("=") for word in text.split(","))}
    return ndtp.Grid(axes if set(axes) == {"x"} else {"z": 1, "x": 1, "y": 1, **axes})


def apart(mine: Tensor, dense: Tensor) -> float:
    """The norm of the difference on all ranks, as a part of the dense one's; rows that two ranks have count twice."""
    sums = torch.stack([(mine - dense).double().square().sum(), dense.double().square().sum()])
    dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"tokens": 4096, "hidden": 512, "inner": 2048, "blocks": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rate", required=True, help="of the links, as given to slow_network.py")
    parser.add_argument("--grid", nargs="*", default=[], help="beside the 1D grid and, of eight ranks, dp=4,y=2")
    parser.add_argument("--out", type=Path, help="JSON; other rates in it are kept")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = Sizes(arguments.tokens, arguments.hidden, arguments.inner, arguments.blocks)
    draw = torch.Generator().manual_seed(1)
    whole, grad = (torch.randn(sizes.tokens, sizes.hidden, generator=draw) for _ in range(2))
    dense = dense_blocks(sizes)
    x = whole.clone().requires_grad_()
    y = dense(x)
    y.backward(grad)
    same = f"x={dist.get_world_size()}"
    rivals = {
        TORCH: torch_plan(sizes, None),
        TORCH_BF16: torch_plan(sizes, torch.bfloat16),
        f"{TORCH_BF16}, ndtp's reduce-scatter": torch_plan(sizes, torch.bfloat16, ndtps_reduce_scatter),
    }
    for text in dict.fromkeys((same, FEWEST, *arguments.grid)):
        grid = grid_of(text)
        if grid.num_ranks != dist.get_world_size():
            continue
        mesh = ndtp.ProcessGrid(grid)
        for wire in WIRES:
            rivals[f"ndtp {text}, {wire or 'fp32'}"] = ndtp_blocks(sizes, mesh, "1d-sp" if text == same else "3d", wire)
    assert x.grad is not None
    rows, inputs = dict[str, dict[str, float]](), {}
    for name, rival in rivals.items():
        inputs[name] = mine = rival.shard(whole), rival.shard(grad)
        rival.step(*mine)  # which chooses numbers of chunks
        with ndtp.CommMeter() as meter:
            out, dx = rival.step(*mine)
        errors = {"output": apart(out, rival.shard(y.detach())), "gradient": apart(dx, rival.shard(x.grad))}
        allowed = 1e-5 if "fp32" in name else 0.15
        assert max(errors.values()) < allowed, f"{name}: {errors}"
        rows[name] = {"megabytes": meter.volume.total / 1e6, **errors}
    times: dict[str, list[float]] = {name: [] for name in rivals}
    work, rate = dict.fromkeys(rivals, 0.0), bits_per_second(arguments.rate)
    for round_ in range(arguments.repetitions):
        for name in turns(rivals, round_):
            begun = time.process_time()
            times[name].append(timed(lambda name=name: rivals[name].step(*inputs[name])))  # type: ignore[misc]
            work[name] += (time.process_time() - begun) / arguments.repetitions
    spent = torch.tensor([work[name] for name in rivals])
    dist.all_reduce(spent)
    processors = len(os.sched_getaffinity(0))
    for row, seconds in zip(rows.values(), spent.tolist(), strict=True):
        row |= {"link_ms": row["megabytes"] * 8e9 / rate, "cpu_ms": seconds / processors * 1e3}
    if dist.get_rank() == 0:
        medians = {name: statistics.median(each) * 1e3 for name, each in times.items()}
        for name, row in rows.items():
            own = f"{name.rpartition(', ')[0]}, fp32"
            row |= {
                "step_ms": medians[name],
                "against_torch_bf16": medians[TORCH_BF16] / medians[name],
                "against_own_fp32": medians.get(own, medians[name]) / medians[name],
            }
            print(f"{name:45} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
        write(arguments, {"rows": rows, "repetitions": arguments.repetitions, "sizes": sizes._asdict()})
    dist.barrier()
    dist.destroy_process_group()


def write(arguments: argparse.Namespace, run: dict[str, Any]) -> None:
    path = arguments.out
    if path is None:
        return
    results = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    results |= {
        "date": str(date.today()), "torch": torch.__version__, "computes in": "float32",
        "unit": "ms of forward and backward, median of the slowest rank; gloo on CPUs, no NCCL figure",
        "aims": "bf16: 1.7 x torch's bf16 on the same 1D grid, 4 x on the best grid; 1.8 x own fp32; fp8: 3 x own fp32",
    }  # fmt: skip
    ranks = dist.get_world_size()
    results["runs"][arguments.rate if ranks == 8 else f"{arguments.rate}, {ranks} ranks"] = run
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
