"""Few bytes behind slow links: a step of a stock Llama with its operands in fp32, bf16 and fp8 on the wire.

    python bench/slow_network.py --ranks 8 --rate 200mbit --burst 80kb -- \
        python bench/wire.py --rate 200mbit --grid z=4,y=2 --out bench/results/wire.json

Forward and backward, loss included, of the same weights on the same grid by every wire; products compute in fp32.  For
every wire: the median step of the slowest rank, interleaved; the bytes that a rank receives, measured and predicted;
and how far loss and gradients of the first layer, which all that follows goes into, are from those of the dense model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from whole_model import CHECKED, full, model_of, ndtp_grid, timed

import ndtp
from ndtp.measure.step import turns

WIRES = (None, "bf16", "fp8", "int8")
CHECK_LENGTH = 32


def errors(model: Any, step: Any, dense: tuple[Tensor, dict[str, Tensor]], ids: Tensor) -> dict[str, float]:
    """Of the loss, relative; of the gradients of the first layer as one vector: relative norm, and cosine."""
    loss, gradients = dense
    mine = full(step(ids).detach())
    pairs = [
        (full(p.grad).flatten(), gradients[key].flatten()) for key, p in model.named_parameters() if key in gradients
    ]
    a, b = (torch.cat(each).double() for each in zip(*pairs, strict=True))
    model.zero_grad()
    cosine = float(a @ b / (a.norm() * b.norm()))
    return {"loss": abs(float(mine / loss) - 1), "gradient": float((a - b).norm() / b.norm()), "cosine": cosine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"batch": 8, "length": 256, "hidden": 512, "inner": 1408, "layers": 8, "heads": 8, "vocabulary": 4096}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rate", required=True, help="of the links, as given to slow_network.py")
    parser.add_argument("--grid", default="z=4,y=2")
    parser.add_argument("--scheme", default="3d")
    parser.add_argument("--out", type=Path, help="JSON; other rates and grids in it are kept")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    grid = ndtp.Grid({axis: int(size) for axis, _, size in (word.partition("=") for word in arguments.grid.split(","))})
    ids = torch.randint(
        arguments.vocabulary, (arguments.batch, arguments.length), generator=torch.Generator().manual_seed(1)
    )
    few = ids[:, :CHECK_LENGTH]
    dense = model_of(arguments)
    loss = dense(input_ids=few, labels=few).loss
    loss.backward()
    kept = {key: p.grad for key, p in dense.named_parameters() if key.startswith(CHECKED) and p.grad is not None}
    expected, dense = (loss.detach(), kept), None
    rivals, rows = {}, {}
    for wire in WIRES:
        name, model = wire or "fp32", model_of(arguments)
        step = ndtp_grid(model, ndtp.ProcessGrid(grid, wire=wire), arguments.scheme, 1)
        rows[name] = errors(model, step, expected, few)
        with ndtp.CommMeter() as meter:
            timed(model, step, ids)
        said = model.ndtp_report.volume(arguments.batch // grid.size([a for a in grid if a == "dp"]), arguments.length)
        rows[name] |= {"megabytes": meter.volume.total / 1e6, "predicted_megabytes": said.total / 1e6}
        rivals[name] = model, step
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for round_ in range(arguments.repetitions):
        for name in turns(rivals, round_):
            times[name].append(timed(*rivals[name], ids))
    if rank == 0:
        medians = {name: statistics.median(each) * 1e3 for name, each in times.items()}
        for name, row in rows.items():
            row |= {"step_ms": medians[name], "speedup": medians["fp32"] / medians[name]}
            print(f"{name:5} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
        write(arguments, f"{arguments.rate} {arguments.grid}", {"rows": rows, "repetitions": arguments.repetitions})
    dist.barrier()
    dist.destroy_process_group()


def write(arguments: argparse.Namespace, name: str, run: dict[str, Any]) -> None:
    path = arguments.out
    if path is None:
        return
    results = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    results |= {
        "date": str(date.today()), "torch": torch.__version__, "ranks": dist.get_world_size(), "computes in": "float32",
        "unit": "ms of forward and backward, median of the slowest rank; gloo on CPUs, no NCCL figure",
        "sizes": {key: getattr(arguments, key) for key in ("batch", "length", "hidden", "inner", "layers")},
    }  # fmt: skip
    results["runs"][name] = run
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
