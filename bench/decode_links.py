"""Decode steps behind slow links: rows that are split, as in training, against few rows that every rank has whole.

    python bench/slow_network.py --ranks 4 --rate 500mbit -- \\
        python bench/decode_links.py --rate 500mbit --out bench/results/decode_links.json

A stock Llama of four layers continues sequences by one token a step.  Both ways take turns on one model; a time is the
median of the slowest rank, bytes are what a rank receives in a step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ndtp
from ndtp.models import frame

GRIDS = ({"x": 4}, "1d-sp"), ({"x": 2, "y": 2}, "2d"), ({"x": 2, "y": 2}, "2d-features"), ({"z": 4}, "3d")
WAYS = {"split": 0, "whole": frame.WHOLE_ROWS}  # up to how many rows are whole


def llama(hidden: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_hidden_layers=4, **sizes)).eval()


@torch.no_grad()
def step(model: Any, ids: torch.Tensor) -> tuple[float, int]:
    """Seconds and bytes of a step behind a prompt of one token."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    dist.barrier()
    with ndtp.CommMeter() as meter:
        begun = time.perf_counter()
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        taken = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken), meter.volume.total


def measure(sizes: dict[str, int], scheme: str, arguments: argparse.Namespace) -> dict[str, Any]:
    model = ndtp.parallelize(llama(arguments.hidden), ndtp.ProcessGrid(ndtp.Grid(sizes)), scheme=scheme)
    ids = torch.arange(arguments.batch).view(-1, 1)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    moved = {}
    for turn in range(arguments.rounds + 1):
        for way, rows in WAYS.items():
            frame.WHOLE_ROWS = rows
            seconds, moved[way] = step(model, ids)
            times[way] += [seconds] * (turn > 0)  # the first one binds
    found = {way: statistics.median(each) for way, each in times.items()}
    return {
        "grid": " ".join(f"{axis}={size}" for axis, size in sizes.items()), "scheme": scheme,
        **{f"{way}_ms": round(seconds * 1e3, 2) for way, seconds in found.items()},
        "times": round(found["split"] / found["whole"], 2), **{f"{way}_bytes": moved[way] for way in WAYS},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"hidden": 1024, "batch": 16, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--rate", required=True, help="of the links, as given to slow_network.py")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    rows = [measure(*each, arguments) for each in GRIDS if math.prod(each[0].values()) == ranks]
    if dist.get_rank() == 0:
        print("| grid | scheme | split, ms | whole, ms | split / whole | bytes, split | bytes, whole |")
        print("|---|---|---:|---:|---:|---:|---:|")
        for row in rows:
            print("| " + " | ".join(str(value) for value in row.values()) + " |")
        if arguments.out:
            given = {key: value for key, value in vars(arguments).items() if key != "out"}
            text = {**given, "ranks": ranks, "date": str(date.today()), "torch": torch.__version__, "rows": rows}
            arguments.out.write_text(json.dumps(text, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
