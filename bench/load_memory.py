"""What a rank holds while it loads a large safetensors model: its part, and one block of rows.

    python bench/load_memory.py [--out bench/results/load_memory.json] [--hidden 768]

A Llama of random values is written as `save_pretrained` does.  Eight local ranks make it on the meta device, split it
and call `ndtp.checkpoint.load_safetensors`.  Counted are the bytes of all tensors that live at a time, storage by
storage, and from outside what the process takes of the machine's memory: its own pages, at the most, above those that
it had before, with what Python and gloo allocate.  Exits with 1 where tensors are more than an eighth of the model,
what is whole on every rank (gains of norms, rotary frequencies), and a block of rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import warnings
from datetime import date
from pathlib import Path

import torch
import transformers
from torch import nn

import ndtp
import ndtp.testing
from ndtp.checkpoints.safetensors_file import BLOCK_BYTES
from ndtp.ops.memory import LiveBytes

GRIDS = {"1d-sp": {"x": 8}, "2d": {"x": 2, "y": 4}, "3d": {"z": 2, "x": 2, "y": 2}}
SMALL_OBJECTS = 1 << 16  # intermediates of the rotary frequencies, which a model computes by itself


def model_of(hidden: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def own_pages() -> int:
    """Bytes of this process that no file is behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class MostPages:
    """The most pages that the process had at once, looked at every millisecond."""

    def __enter__(self) -> MostPages:
        self.before = self.most = own_pages()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self) -> None:
        while not self.ended.is_set():
            self.most = max(self.most, own_pages())
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def bytes_of(tensors) -> int:
    return sum(getattr(x, "_local_tensor", x).untyped_storage().nbytes() for x in tensors)


def loaded(folder: str, name: str, hidden: int) -> dict[str, int]:
    """On each rank."""
    warnings.simplefilter("ignore")
    mesh = ndtp.ProcessGrid(ndtp.Grid(GRIDS[name]))
    with torch.device("meta"):
        model = model_of(hidden)
    ndtp.parallelize(model, mesh, scheme=name)
    with MostPages() as pages, LiveBytes() as live:
        ndtp.checkpoint.load_safetensors(model, folder)
    parameters = list(model.parameters())
    whole = [p for p in parameters if p._local_tensor.numel() == p.numel()]
    return {
        "own": bytes_of(parameters), "whole": bytes_of(whole) + bytes_of(model.buffers()),
        "peak": live.peak, "pages": pages.most - pages.before,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows, failed = [], []
    with tempfile.TemporaryDirectory(prefix="ndtp-load-") as folder:
        model = model_of(arguments.hidden)
        total = bytes_of(model.parameters())
        model.save_pretrained(folder, max_shard_size="100MB")
        del model
        print(f"{total >> 10:,} KiB of parameters, blocks of {BLOCK_BYTES >> 10:,} KiB; KiB of a rank, at the most:")
        print("| grid | its parameters | tensors while it loads | above its parameters | pages of the process |")
        print("|---|---:|---:|---:|---:|")
        for name, axes in GRIDS.items():
            of_ranks = ndtp.testing.run(loaded, 8, args=(folder, name, arguments.hidden))
            row = {key: max(each[key] for each in of_ranks) for key in of_ranks[0]}
            rows.append({"scheme": name, "grid": str(ndtp.Grid(axes)), **row})
            above, own = row["peak"] - row["own"], f"{row['own'] >> 10:,} (1/{total / row['own']:.3f})"
            cells = (own, *(f"{x >> 10:,}" for x in (row["peak"], above, row["pages"])))
            print(f"| {name} {ndtp.Grid(axes)} | {' | '.join(cells)} |", flush=True)
            if row["peak"] > total / 8 + row["whole"] + BLOCK_BYTES + SMALL_OBJECTS:
                failed.append(f"{name}: {row['peak']:,} bytes of {total:,}")
    if arguments.out is not None:
        versions = {module.__name__: module.__version__ for module in (torch, transformers, ndtp)}
        about = {"date": str(date.today()), "versions": versions, "ranks": 8, "dtype": "float32"}
        about |= {"model_bytes": total, "block_bytes": BLOCK_BYTES, "rows": rows}
        arguments.out.write_text(json.dumps(about, indent=1) + "\n")
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
