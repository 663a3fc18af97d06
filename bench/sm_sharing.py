"""A GEMM beside a collective, by event simulation: who waits for whom, with each way of handing out tiles.

    python bench/sm_sharing.py [--out FILE] [--ctas 16] [--share 0.5] [--shape 8192 14336 4096]

Not a measurement: no GPU is needed, and none is used.  The model: an SM runs one program at a time, a GEMM's or a
collective's (NCCL's thread blocks do not fit beside those of a GEMM that takes all shared memory).  Programs are
dispatched in order to whichever SM is free, the collective's first (its stream has priority).  A program begins with a
start (descriptors, filling the pipeline, draining it), then takes its tiles one after another, each as long as the
roof model says.  The collective holds its SMs for `share` of the time of the GEMM alone.

    static      each program has its tiles from the beginning, on all SMs or on those that are left
    counter     programs on all SMs that take the next tile from a counter in memory
    one each    as many programs as tiles
    default     what `sms_to_leave` launches: `ndtp_kernels.launch.share_out`
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from ndtp_kernels.choice import roof
from ndtp_kernels.choice.chips import CHIPS, Chip
from ndtp_kernels.choice.problem import Config
from ndtp_kernels.launch import share_out

CONFIG = Config("tma", 128, 256, 64, 3, 8)
WAYS = ("static, all SMs", "static, some left", "counter", "one each", "default")


@dataclass(frozen=True)
class Gemm:
    """Programs in the order of dispatch by their numbers of tiles; with a counter they share `tiles` of them."""

    programs: Sequence[int]
    tile: float  # seconds of one
    start: float  # that a program costs before and after its tiles
    tiles: int = 0


@dataclass(frozen=True)
class Collective:
    ctas: int
    seconds: float
    ready: float = 0.0  # when it is issued, after the GEMM's beginning


def simulate(gemm: Gemm, num_sms: int, collective: Collective | None = None) -> tuple[float, float]:
    """When the GEMM and the collective end, in seconds after the GEMM's beginning."""
    free = [(0.0, sm) for sm in range(num_sms)]  # a heap of the times at which SMs are free
    waiting = 0 if collective is None else collective.ctas
    programs, left = iter(gemm.programs), gemm.tiles
    holding: set[int] = set()  # SMs whose program takes tiles from the counter
    end_of_gemm = end_of_collective = 0.0
    idle: list[tuple[float, int]] = []
    while free:
        now, sm = heapq.heappop(free)
        if sm in holding and left:
            left -= 1
            end_of_gemm = max(end_of_gemm, now + gemm.tile)
            heapq.heappush(free, (now + gemm.tile, sm))
            continue
        holding.discard(sm)
        if collective is not None and waiting and now >= collective.ready:
            waiting -= 1
            end_of_collective = max(end_of_collective, now + collective.seconds)
            heapq.heappush(free, (now + collective.seconds, sm))
            continue
        count = next(programs, None)
        if count is not None and gemm.tiles:
            holding.add(sm)
            heapq.heappush(free, (now + gemm.start, sm))
        elif count is not None:
            took = gemm.start + count * gemm.tile
            end_of_gemm = max(end_of_gemm, now + took)
            heapq.heappush(free, (now + took, sm))
        elif collective is not None and now < collective.ready:
            heapq.heappush(free, (collective.ready, sm))
        else:
            idle.append((now, sm))
    return end_of_gemm, end_of_collective


def ways(tiles: int, chip: Chip, tile: float, start: float, leave: int) -> dict[str, Gemm]:
    """The same tiles, handed out in each way."""

    def static(num_programs: int) -> Gemm:
        counts = [tiles // num_programs + (at < tiles % num_programs) for at in range(num_programs)]
        return Gemm([count for count in counts if count], tile, start)

    shares = share_out(tiles, CONFIG, chip, leave)
    residents = [len(range(at, shares.kept, shares.residents)) for at in range(shares.residents)]
    return {
        "static, all SMs": static(chip.num_sms),
        "static, some left": static(chip.num_sms - leave),
        "counter": Gemm([0] * chip.num_sms, tile, start, tiles),
        "one each": Gemm([1] * tiles, tile, start),
        "default": Gemm([*residents, *[1] * (shares.grid - shares.residents)], tile, start),
    }


def compare(
    shape: tuple[int, int, int], chip: Chip, ctas: int, share: float, ready: float = 0.0
) -> dict[str, dict[str, float]]:
    """Of each way the GEMM's time, and the collective's, by those of either alone.

    Args:
        share: the collective's length by that of the GEMM alone.
        ready: when the collective is issued, likewise.
    """
    m, n, k = shape
    tiles = roof.cdiv(m, CONFIG.block_m) * roof.cdiv(n, CONFIG.block_n)
    tile = 2.0 * CONFIG.block_m * CONFIG.block_n * k / (chip.flops["bfloat16"] / chip.num_sms)
    programs = ways(tiles, chip, tile, roof.TILE_SECONDS, ctas)
    alone, _ = simulate(programs["static, all SMs"], chip.num_sms)
    collective = Collective(ctas, share * alone, ready * alone)
    found = {}
    for way in WAYS:
        gemm, other = simulate(programs[way], chip.num_sms, collective)
        undisturbed, _ = simulate(programs[way], chip.num_sms)
        wait = (other - collective.ready - collective.seconds) / alone
        found[way] = {"gemm": gemm / alone, "collective_waits": wait, "without_collective": undisturbed / alone}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=3, default=(8192, 14336, 4096), metavar=("M", "N", "K"))
    parser.add_argument("--ctas", type=int, default=16, help="SMs that the collective takes")
    parser.add_argument("--share", type=float, default=0.5, help="its length by that of the GEMM alone")
    parser.add_argument("--out", metavar="FILE")
    chosen = parser.parse_args(arguments)
    chip = CHIPS["h200"]
    report: dict[str, Any] = {"simulated": True, "chip": chip.name, "shape": list(chosen.shape), "ctas": chosen.ctas}
    rows = report["rows"] = []
    print("simulated; times by those of the GEMM alone, static on all SMs")
    print(f"{'issued':>7} {'length':>7}  {'way':18} {'GEMM':>6} {'collective waits':>17} {'no collective':>14}")
    for ready, share in ((0.0, chosen.share), (0.3, chosen.share), (0.0, 0.2), (0.0, 1.0)):
        for way, row in compare(tuple(chosen.shape), chip, chosen.ctas, share, ready).items():
            rows.append({"way": way, "ready": ready, "share": share, **{key: round(row[key], 4) for key in row}})
            print(
                f"{ready:7.2f} {share:7.2f}  {way:18} {row['gemm']:6.2f} {row['collective_waits']:17.3f} "
                f"{row['without_collective']:14.2f}"
            )
    if chosen.out:
        Path(chosen.out).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
