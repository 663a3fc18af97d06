"""Bytes that a block holds in forward and backward: predicted by `ndtp.ops.memory`, and counted while it runs.

    python bench/memory.py [--out bench/results/memory.json]

Eight local ranks unless `--grids` says otherwise; MatMul -> GELU -> MatMul on several grids, with every choice of
`regather` and with 1 and 4 chunks.  Counted are the storages that live at a time, beside the block's input and
parameters; the largest of all ranks, and for each rank the least of three steps, since a thread of gloo may hold what
it sent for a moment longer.  The grid's ring of reusable buffers is off where bytes are counted, so that every buffer
counts while it is used; "ring" is what the ring keeps after a step where it is on.  On CUDA ranks, torch's own peak is
recorded beside the count.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

import ndtp
import ndtp.testing
from ndtp.collectives.buffer_ring import BufferRing
from ndtp.ops.memory import Memory, measured

GRIDS = ("1d-sp:x=8", "2d:x=2,y=4", "3d:z=2,x=2,y=2", "3d:z=4,x=1,y=2")
REGATHER = ((), ("a",), ("b",), ("a", "b"))
CHUNKS = (1, 4)
STEPS = 3


def grid_of(text: str) -> tuple[str, ndtp.Grid]:
    """The scheme and the grid of a text such as 2d:x=2,y=4."""
    scheme, _, axes = text.partition(":")
    return scheme, ndtp.Grid({axis: int(size) for axis, _, size in (each.partition("=") for each in axes.split(","))})


def holdings(sizes: tuple[int, int, int], grids: list[str]) -> list[dict]:
    """On each rank: one row a grid, choice of `regather` and number of chunks."""
    rows = []
    for scheme, grid in map(grid_of, grids):
        bare, with_ring = (ndtp.ProcessGrid(grid, **options) for options in ({"ring_bytes": 0}, {}))
        for regather in REGATHER:
            for chunks in CHUNKS:
                how = {"scheme": scheme, "regather": regather, "chunks": chunks}
                rows.append({**how, "grid": str(grid), **held(bare, with_ring, how, *sizes)})
    return rows


def held(bare: ndtp.ProcessGrid, with_ring: ndtp.ProcessGrid, how: dict, tokens: int, hidden: int, inner: int) -> dict:
    block = ndtp.nn.MLP(hidden, inner, mesh=bare, **how)
    device = block.up.weight.device
    x = torch.randn(block.in_layout.shard_shape((tokens, hidden)), device=device, requires_grad=True)
    grad = torch.randn_like(x)
    counted, allocated = [], None
    for _ in range(STEPS):
        block.zero_grad()
        x.grad = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        counted.append(asdict(measured(lambda: block(x), grad)))
        if device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated() - before
    with_ring.ring = with_ring.collectives.ring = BufferRing()
    ringed = ndtp.nn.MLP(hidden, inner, mesh=with_ring, **how)
    ringed(x.detach().requires_grad_()).backward(grad)
    return {
        "predicted": asdict(block.memory(tokens)),
        "measured": {name: min(step[name] for step in counted) for name in counted[0]},
        "allocator_peak": allocated,
        "ring": with_ring.ring.waiting_bytes,
    }


def table(rows: list[dict]) -> str:
    """As Markdown, in KiB."""
    lines = [
        "| grid | regather | chunks | kept | forward | backward | predicted peak | measured peak | ring |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        predicted, counted = Memory(**row["predicted"]), Memory(**row["measured"])
        sizes = (counted.kept, counted.forward, counted.backward, predicted.peak, counted.peak, row["ring"])
        cells = (f"{row['scheme']} {row['grid']}", " ".join(row["regather"]) or "-", str(row["chunks"]))
        lines.append(f"| {' | '.join((*cells, *(f'{size / 1024:,.0f}' for size in sizes)))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("tokens", 768), ("hidden", 128), ("inner", 512)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--grids", nargs="+", default=list(GRIDS), help="as many ranks each, such as 2d:x=2,y=2")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = (arguments.tokens, arguments.hidden, arguments.inner)
    ranks = grid_of(arguments.grids[0])[1].num_ranks
    of_ranks = ndtp.testing.run(holdings, ranks=ranks, args=(sizes, arguments.grids))
    rows = [
        {**same[0], "measured": {name: max(row["measured"][name] for row in same) for name in same[0]["measured"]}}
        for same in zip(*of_ranks, strict=True)
    ]
    print(table(rows))
    if arguments.out is not None:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "ndtp": ndtp.__version__}
        about = {"date": str(date.today()), "versions": versions, "ranks": ranks, "dtype": "float32"}
        arguments.out.write_text(json.dumps({**about, "sizes": sizes, "rows": rows}, indent=1) + "\n")
    off = [row for row in rows if row["measured"] != row["predicted"]]
    if off:
        raise SystemExit(f"{len(off)} of {len(rows)} predictions are off: {off[0]}")


if __name__ == "__main__":
    main()
