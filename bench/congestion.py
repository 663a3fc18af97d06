"""One chunk, four, and `chunks="auto"`, behind links that pace (bbr) and links that do not (reno), in turns.

    python bench/slow_network.py --ranks 8 --rate 200mbit --timeout 1500 -- \\
        python bench/congestion.py --rate 200mbit --out bench/results/congestion.json

Forward and backward of residual blocks on one grid.  The ranks hold the connections of all rivals at once, each made
under the congestion control that it is measured with, as the kernel's list of sockets (`ss`) must confirm; their steps
take turns, in another order every round.  Written down: medians of the slowest rank, and the chunks that `auto` took.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap import Sizes, Step, check, ndtp_blocks, timed
from slow_network import CONGESTION

import ndtp
from ndtp.cli.bench_step import grid_of
from ndtp.measure.step import turns

CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # of this rank's network namespace
CHUNKS: tuple[int | str, ...] = (1, 4, "auto")


def connections() -> dict[str, int]:
    """How many connections of this rank's namespace are under which congestion control."""
    listed = subprocess.run(["ss", "-tin"], capture_output=True, text=True, check=True).stdout
    return {name: len(re.findall(rf"^\s+{name} ", listed, re.MULTILINE)) for name in CONGESTION}


def rivals(arguments: argparse.Namespace, sizes: Sizes) -> tuple[dict[str, Step], dict[str, Any]]:
    """The step of each rival, and what was found when it was made: connections, and chunks once it has run."""
    steps: dict[str, Step] = {}
    made: dict[str, Any] = {}
    for control in CONGESTION:
        CONTROL.write_text(control)
        dist.barrier()
        for chunks in CHUNKS:
            before = connections()
            mesh = ndtp.ProcessGrid(grid_of(arguments.grid), timeout=600.0)  # which has process groups of its own
            step, forward, model = ndtp_blocks(mesh, arguments.scheme, chunks, sizes)
            check(forward, lambda y, layout=model[0].out_layout: layout.shard(y, dist.get_rank()), sizes)
            step()
            after, plan = connections(), model[0].up.plan
            name = f"{control}, {chunks} chunk{'' if chunks == 1 else 's'}"
            made[name] = {
                "connections": {each: after[each] - before[each] for each in after},
                "chunks": mesh.chunks_chosen(plan)[sizes.tokens] if chunks == "auto" else chunks,
            }
            others = [each for each in CONGESTION if each != control and after[each] > before[each]]
            if others or after[control] == before[control]:
                sys.exit(f"congestion: connections of {name} are {made[name]['connections']}")
            steps[name] = step
            dist.barrier()
    return steps, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("hidden", 512), ("inner", 2048), ("blocks", 4), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--grid", default="z=4,x=1,y=2")
    parser.add_argument("--scheme", default="3d")
    parser.add_argument("--rate", required=True, help="of the links, as given to slow_network.py")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = Sizes(arguments.tokens, arguments.hidden, arguments.inner, arguments.blocks)
    steps, made = rivals(arguments, sizes)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(arguments.rounds):
        for name in turns(steps, round_):
            times[name].append(timed(steps[name]))
    if dist.get_rank() == 0:
        rows = {
            name: {"ms": round(statistics.median(found) * 1e3), "lowest_ms": round(min(found) * 1e3),
                   "highest_ms": round(max(found) * 1e3), **made[name]}
            for name, found in times.items()
        }  # fmt: skip
        for name, row in rows.items():
            print(f"{name:20} {row['ms']:6} ms  {row['lowest_ms']:6} to {row['highest_ms']:6}  chunks {row['chunks']}")
        if arguments.out:
            report = {
                "date": str(date.today()), "torch": torch.__version__, "ranks": dist.get_world_size(),
                "grid": f"{arguments.scheme} {arguments.grid}", "block": sizes._asdict(), "link": arguments.rate,
                "rounds": arguments.rounds, "unit": "ms, median of the slowest rank; gloo on CPUs", "rows": rows,
            }  # fmt: skip
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
