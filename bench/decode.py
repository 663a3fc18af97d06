"""The host's cost of a decode step: processor time of a model of four layers, dense and split.

    python bench/decode.py [--out bench/results/decode.json]

Tiny tensors, one process, one thread.  On a grid of one rank nothing is sent; on the others a fake process group
answers at once, so that what is counted is the host's work.  Dense and split steps take turns; the processor time of a
step is the least of all rounds, which others at work on the machine disturb least.  Prompts of lengths that were not
seen before are timed as well: nothing is bound for them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp

GRIDS = (
    ({"x": 1}, "1d"), ({"y": 2}, "1d"), ({"x": 2}, "1d-sp"), ({"x": 2, "y": 2}, "2d"),
    ({"x": 2, "y": 2}, "2d-features"), ({"z": 2, "x": 2, "y": 2}, "3d"),
)  # fmt: skip
BATCH, PROMPT = 4, 5


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=4, **sizes)).eval()


@torch.no_grad()
def step_ms(model: Any, steps: int) -> float:
    """Processor time of a step, of `steps` behind one another."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    prompt = torch.arange(BATCH * PROMPT).view(BATCH, PROMPT)
    model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
    begun = time.process_time()
    for _ in range(steps):
        model(input_ids=prompt[:, :1], past_key_values=cache).logits[:, -1].float()
    return (time.process_time() - begun) / steps * 1e3


@torch.no_grad()
def prompt_ms(model: Any, length: int) -> float:
    """Processor time of a prompt of this length."""
    prompt = torch.arange(BATCH * length).view(BATCH, length) % 256
    begun = time.process_time()
    model(input_ids=prompt, logits_to_keep=1).logits[:, -1].float()
    return (time.process_time() - begun) * 1e3


def measure(sizes: dict[str, int], scheme: str, rounds: int) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes.values()))
    mesh = ndtp.ProcessGrid(ndtp.Grid(sizes), device_type="cpu")
    dense, model = llama(), ndtp.parallelize(llama(), mesh, scheme=scheme)
    found: dict[str, list[float]] = {"dense": [], "split": []}
    for _ in range(rounds):
        for name, each in (("dense", dense), ("split", model)):
            found[name].append(step_ms(each, 20))
    new = [prompt_ms(model, length) / prompt_ms(dense, length) for length in range(8, 8 + rounds)]
    bound = len(mesh.programs)
    dist.destroy_process_group()
    best = {name: min(times) for name, times in found.items()}
    return {
        "grid": " ".join(f"{axis}={size}" for axis, size in sizes.items()), "scheme": scheme,
        "dense_ms": round(best["dense"], 3), "split_ms": round(best["split"], 3),
        "times": round(best["split"] / best["dense"], 2), "new_prompt_times": round(min(new), 2), "bound": bound,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [measure(*each, arguments.rounds) for each in GRIDS]
    print("| grid | scheme | dense, ms | split, ms | split / dense | of a new length | programs bound |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if arguments.out:
        about = {"date": str(date.today()), "torch": torch.__version__, "rounds": arguments.rounds}
        arguments.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
