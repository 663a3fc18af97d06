"""Host overhead of `ndtp.matmul` against DTensor's matmul on the same layouts.

    python bench/host_overhead.py [--out bench/results/host_overhead.json]
    python bench/host_overhead.py --model [--out bench/results/model_host_cost.json]    # see bench/model_host_cost.py

Tiny tensors, one process, the fake process group (collectives return at once, so that only the host's work is timed),
forward and backward, rivals interleaved.  Overhead is the time above plain `a @ b` on the same local shapes.
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
from model_host_cost import of_models
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp

SIZE = 16


def cases(mesh: ndtp.ProcessGrid) -> dict[str, tuple[ndtp.MatMulPlan, tuple[list, list, list, list]]]:
    """name -> plan, and DTensor placements on the mesh (x, y): of A as stored and as multiplied, of B, of C."""
    parse = lambda text: ndtp.Layout.parse(mesh.grid, text)  # noqa: E731
    whole, split0, split1 = Replicate(), Shard(0), Shard(1)
    return {
        "neither communicates: batch split": (
            ndtp.MatMulPlan(parse("x None None"), parse("x None None")),
            ([split0, whole], [split0, whole], [split0, whole], [split0, whole]),
        ),
        "both redistribute: 2D row split": (
            ndtp.MatMulPlan(parse("y x"), parse("x y")),
            ([split1, split0], [split1, whole], [split0, split1], [split0, split1]),
        ),
        "both redistribute: 1D sequence parallel": (
            ndtp.MatMulPlan(parse("x None"), parse("None x")),
            ([split0, whole], [whole, whole], [split1, whole], [split1, whole]),
        ),
    }


def step(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, grad: Tensor) -> Callable[[], None]:
    def run() -> None:
        a.grad = b.grad = None
        product(a, b).backward(grad)

    return run


def rivals(
    plan: ndtp.MatMulPlan, placements: tuple[list, list, list, list], mesh: ndtp.ProcessGrid, device_mesh: DeviceMesh
) -> dict[str, Callable[[], None]]:
    shape = (SIZE,) * plan.a.ndim
    a, b, grad = (torch.randn(layout.shard_shape(shape)) for layout in (plan.a, plan.b, plan.out))
    a_stored, a_multiplied, b_stored, c_stored = placements

    def leaf(t: Tensor) -> Tensor:
        return t.clone().requires_grad_()

    def spread(t: Tensor, stored: list) -> DTensor:
        return DTensor.from_local(t.clone(), device_mesh, stored, run_check=False)

    def dtensor(x: DTensor, w: DTensor) -> DTensor:
        return torch.matmul(x.redistribute(placements=a_multiplied), w).redistribute(placements=c_stored)

    def held(letters: tuple) -> Tensor:
        return torch.randn([SIZE // mesh.grid.size(axes) for axes in plan.need(letters)])

    return {
        "plain": step(torch.matmul, leaf(held(plan.a_letters)), leaf(held(plan.b_letters)), held(plan.c_letters)),
        "ndtp": step(lambda x, w: ndtp.matmul(x, w, plan, mesh), leaf(a), leaf(b), grad),
        "dtensor": step(
            dtensor, spread(a, a_stored).requires_grad_(), spread(b, b_stored).requires_grad_(), spread(grad, c_stored)
        ),
    }


def measure(runs: dict[str, Callable[[], None]], repetitions: int, calls: int) -> dict[str, float]:
    """Median microseconds a call, rivals interleaved."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(20):
            run()
    for _ in range(repetitions):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def written(out: Path | None, unit: str, rows: dict[str, Any]) -> None:
    """Write a record, if one is wanted."""
    if out:
        where = {
            "date": str(date.today()),
            "torch": torch.__version__,
            "cpu": platform.processor() or platform.machine(),
        }
        out.write_text(json.dumps({**where, "unit": unit, "cases": rows}, indent=2) + "\n")


def whole_model(repetitions: int, out: Path | None) -> None:
    """Print and write the host cost of split models."""
    rows = of_models(repetitions, steps=3)
    print(f"{'a Llama of four layers':34} {'calls':>6} {'files':>6} {'dense ms':>9} {'split ms':>9} {'ratio':>6}")
    for name, row in rows.items():
        numbers = f"{row['calls']:6} {row['files']:6} {row['dense_ms']:9.2f} {row['split_ms']:9.2f} {row['ratio']:6.2f}"
        print(f"{name:34} {numbers}")
    written(
        out, "calls of ndtp's functions in one forward of one layer; processor milliseconds of a training step", rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--model", action="store_true", help="a step of a whole split model instead of a product")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.model:
        whole_model(arguments.repetitions, arguments.out)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = ndtp.ProcessGrid(ndtp.Grid(x=2, y=2), device_type="cpu")
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    rows = {}
    print(f"{'forward + backward, us a call':42} {'a @ b':>8} {'ndtp':>8} {'DTensor':>8} {'overhead ratio':>15}")
    for name, (plan, placements) in cases(mesh).items():
        medians = measure(rivals(plan, placements, mesh, device_mesh), arguments.repetitions, arguments.calls)
        ratio = (medians["ndtp"] - medians["plain"]) / (medians["dtensor"] - medians["plain"])
        rows[name] = {**{rival: round(value, 1) for rival, value in medians.items()}, "overhead_ratio": round(ratio, 3)}
        print(f"{name:42} {medians['plain']:8.1f} {medians['ndtp']:8.1f} {medians['dtensor']:8.1f} {ratio:15.2f}")
    written(arguments.out, "median microseconds a call, forward and backward", rows)


if __name__ == "__main__":
    main()
