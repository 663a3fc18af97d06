"""Bytes that a rank holds in a training step, as `ndtp plan --model` predicts them, and as they are counted.

    python bench/planner_memory.py [--out bench/results/planner_memory.json]

A stock Llama of transformers on four local gloo ranks, fp32 with AdamW: parameters, gradients, optimizer state, what
lives from forward to backward, and the most that lives at a time, storage by storage on the rank where it is most.
Tensors without memory, which ndtp makes to try shapes, are not counted, and the ring of reusable buffers is off.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

import ndtp
import ndtp.testing
from ndtp.ops.memory import LiveBytes
from ndtp.planner.training.memory import StepMemory, memory
from ndtp.planner.training.practice import PRACTICES
from ndtp.planner.training.splits import Splits
from ndtp.planner.training.transformer import Transformer

GRIDS = {
    "1d-sp y=4": {"x": 4}, "3d z=2 y=2": {"z": 2, "y": 2}, "2d x=2 y=2": {"x": 2, "y": 2}, "3d z=4": {"z": 4},
    "3d z=2 x=2": {"z": 2, "x": 2}, "3d dp=2 y=2": {"dp": 2, "y": 2},
}  # fmt: skip
SIZES = (
    {"batch": 8, "length": 64, "hidden": 128, "inner": 352, "layers": 4, "vocabulary": 512},
    {"batch": 8, "length": 64, "hidden": 128, "inner": 704, "layers": 2, "vocabulary": 2048},
    {"batch": 4, "length": 128, "hidden": 256, "inner": 704, "layers": 2, "vocabulary": 512},
)
HEADS = 8


def counted(name: str, sizes: dict[str, int]) -> dict[str, int]:
    """On each rank."""
    scheme = name.split()[0]
    mesh = ndtp.ProcessGrid(ndtp.Grid({"x": 1, "y": 1} | GRIDS[name]), ring_bytes=0)
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocabulary"], hidden_size=sizes["hidden"], intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"], num_attention_heads=HEADS, num_key_value_heads=HEADS, use_cache=False,
        max_position_embeddings=sizes["length"], attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ndtp.parallelize(model, mesh, scheme=scheme)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["length"]))
    mask = torch.full((sizes["length"],) * 2, -torch.inf).triu(1).expand(sizes["batch"], 1, -1, -1)
    steps = []
    for _ in range(2):
        model.zero_grad()
        with LiveBytes() as live:
            loss = model(input_ids=ids, labels=ids, attention_mask=mask).loss
            kept = live.now
            loss.backward()
        optimizer.step()
        steps.append((kept, live.peak))
    parameters = list(model.parameters())
    shards = [p.grad._local_tensor for p in parameters]
    state = [x for each in optimizer.state.values() for x in each.values() if isinstance(x, torch.Tensor) and x.dim()]
    kept, peak = min(steps)
    found = {
        "weights": sum(p._local_tensor.nbytes for p in parameters), "gradients": sum(x.nbytes for x in shards),
        "optimizer": sum(getattr(x, "_local_tensor", x).nbytes for x in state), "activations": kept,
    }  # fmt: skip
    return found | {"total": found["weights"] + found["optimizer"] + peak}


def predicted(name: str, sizes: dict[str, int]) -> StepMemory:
    axes = {"y": 4} if name.startswith("1d-sp") else GRIDS[name]
    model = Transformer(
        sizes["layers"], sizes["hidden"], sizes["inner"], HEADS, sizes["vocabulary"], sizes["length"], gated=True
    )
    practice = replace(PRACTICES["ndtp"], dtype="float32", attention="core")
    splits = Splits(**axes, micro=sizes["batch"] // axes.get("z", 1))
    return memory(model, sizes["batch"] * splits.dp, practice, splits)


def compared(name: str, sizes: dict[str, int], of_ranks: list[dict[str, int]]) -> dict[str, Any]:
    """Counted on the fullest rank, and predicted over that."""
    most = {key: max(each[key] for each in of_ranks) for key in of_ranks[0]}
    told = predicted(name, sizes)
    ratio = {key: float(getattr(told, key)) / value for key, value in most.items()}
    return {"grid": name, "sizes": sizes, "counted": most, "predicted_over_counted": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for sizes in SIZES:
        for name in GRIDS:
            rows.append(compared(name, sizes, ndtp.testing.run(counted, 4, args=(name, sizes))))
            print(name, {key: round(value, 3) for key, value in rows[-1]["predicted_over_counted"].items()}, flush=True)
    if arguments.out is not None:
        versions = {module.__name__: module.__version__ for module in (torch, transformers, ndtp)}
        arguments.out.write_text(
            json.dumps({"date": str(date.today()), "versions": versions, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
