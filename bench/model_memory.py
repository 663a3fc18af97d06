"""Bytes that a rank holds while it trains a whole model: parameters, gradients, optimizer state and activations.

    python bench/model_memory.py [--out bench/results/model_memory.json]

A stock Llama of transformers on eight local ranks, on every grid of `GRIDS`.  Predicted are activations by a dry run:
the same model on the meta device, in a world of eight ranks of which one is there and nothing is sent, so that a laptop
can ask about a thousand ranks.  Counted are the storages that live, on the rank where they are most; the ring of
reusable buffers is off, so that every buffer counts while it is used.  "kept" lives from forward to backward.
"""

from __future__ import annotations

import argparse
import json
import warnings
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn

import ndtp
import ndtp.testing
from ndtp.ops.memory import LiveBytes

GRIDS = {
    "1d": {"x": 8},
    "1d-sp": {"x": 8},
    "2d": {"x": 2, "y": 4},
    "3d": {"z": 2, "x": 2, "y": 2},
    "3d z=4": {"z": 4, "x": 1, "y": 2},
}
STEPS = 3
WITHIN = 0.1  # what is predicted of activations


def model_of(sizes: dict) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocabulary"], hidden_size=sizes["hidden"], intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"], num_attention_heads=8, num_key_value_heads=8, use_cache=False,
        max_position_embeddings=sizes["length"], attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def bytes_of(tensors) -> int:
    """Of what this rank has of them."""
    return sum(x.untyped_storage().nbytes() for t in tensors if (x := getattr(t, "_local_tensor", t)) is not None)


def activations(model: nn.Module, ids: torch.Tensor) -> dict[str, int]:
    """Kept from forward to backward, logits and loss included; and the most that lives at a time."""
    batch, length = ids.shape  # a mask that is whole already: transformers looks at no numbers of it
    mask = torch.full((length, length), -torch.inf, device=ids.device).triu(1).expand(batch, 1, length, length)
    with LiveBytes() as live:
        out = model(input_ids=ids, labels=ids, attention_mask=mask)
        kept = live.now
        out.loss.backward()
    return {"kept": kept, "peak": live.peak}


def held(name: str, sizes: dict) -> dict:
    """On each rank."""
    mesh = ndtp.ProcessGrid(ndtp.Grid(GRIDS[name]), ring_bytes=0)
    ids = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["length"]), generator=torch.Generator())
    model = model_of(sizes)
    whole = bytes_of(model.parameters())
    ndtp.parallelize(model, mesh, scheme=name.split()[0])
    optimizer = torch.optim.AdamW(model.parameters())
    counted = []
    for _ in range(STEPS):
        model.zero_grad()
        counted.append(activations(model, ids))
        optimizer.step()
    state = [x for each in optimizer.state.values() for x in each.values() if isinstance(x, torch.Tensor) and x.dim()]
    parameters = list(model.parameters())
    return {
        "parameters": bytes_of(parameters), "gradients": bytes_of(p.grad for p in parameters),
        "optimizer": bytes_of(state), "dense_parameters": whole,
        "not_split": bytes_of(p for p in parameters if p._local_tensor.numel() * mesh.grid.num_ranks != p.numel()),
        **{key: min(step[key] for step in counted) for key in counted[0]},
    }  # fmt: skip


def predicted(name: str, sizes: dict, ranks: int = 8) -> dict[str, int]:
    """In a process of its own, whose world has one rank that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = ndtp.ProcessGrid(ndtp.Grid(GRIDS[name]), ring_bytes=0)
    with torch.device("meta"):
        model = model_of(sizes)
    ndtp.parallelize(model, mesh, scheme=name.split()[0])
    ids = torch.zeros(sizes["batch"], sizes["length"], dtype=torch.long, device="meta")
    found = activations(model, ids)
    dist.destroy_process_group()
    return found


def dense(sizes: dict) -> dict[str, int]:
    with torch.device("meta"):
        model = model_of(sizes)
    return activations(model, torch.zeros(sizes["batch"], sizes["length"], dtype=torch.long, device="meta"))


def table(result: dict) -> str:
    """As Markdown, in KiB; a part of the dense model's beside it."""
    whole = result["dense"]
    parameters = result["rows"][0]["dense_parameters"]
    lines = [
        "| grid | parameters | optimizer | activations kept | predicted | peak | predicted |",
        "|---|---:|---:|---:|---:|---:|---:|",
        f"| one rank | {parameters >> 10:,} | {2 * parameters >> 10:,} | {whole['kept'] >> 10:,} | | "
        f"{whole['peak'] >> 10:,} | |",
    ]
    for row in result["rows"]:
        cells = (
            f"{row['parameters'] >> 10:,} (1/{parameters / row['parameters']:.2f})",
            f"{row['optimizer'] >> 10:,}",
            f"{row['kept'] >> 10:,} (1/{whole['kept'] / row['kept']:.2f})",
            f"{row['predicted']['kept'] >> 10:,}",
            f"{row['peak'] >> 10:,} (1/{whole['peak'] / row['peak']:.2f})",
            f"{row['predicted']['peak'] >> 10:,}",
        )
        lines.append(f"| {row['scheme']} {row['grid']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"batch": 8, "length": 64, "hidden": 128, "inner": 352, "layers": 4, "vocabulary": 512}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in sizes}
    warnings.simplefilter("ignore")
    rows = []
    for name, axes in GRIDS.items():
        of_ranks = ndtp.testing.run(held, 8, args=(name, sizes))
        row = {key: max(each[key] for each in of_ranks) for key in of_ranks[0]}
        rows.append({"scheme": name.split()[0], "grid": str(ndtp.Grid(axes)), **row})
    for name, row in zip(GRIDS, rows, strict=True):
        row["predicted"] = predicted(name, sizes)
    result = {"sizes": sizes, "dense": dense(sizes), "rows": rows}
    print(table(result))
    if arguments.out is not None:
        versions = {module.__name__: module.__version__ for module in (torch, transformers, ndtp)}
        about = {"date": str(date.today()), "versions": versions, "ranks": 8, "dtype": "float32", "optimizer": "AdamW"}
        arguments.out.write_text(json.dumps(about | result, indent=1) + "\n")
    for row in rows:
        for key in ("kept", "peak"):
            if abs(row[key] / row["predicted"][key] - 1) > WITHIN:
                raise SystemExit(f"{row['grid']}: {key} {row[key]:,} bytes, predicted {row['predicted'][key]:,}")


if __name__ == "__main__":
    main()
