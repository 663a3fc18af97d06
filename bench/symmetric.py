"""Symmetric memory on one device that is every rank: exact, and on a GPU how much of the copies products hide.

    python bench/symmetric.py --out bench/results/symmetric.json

Peers are buffers of the same device.  On a GPU each rank has a stream for its products and one for its copies, signals
are kernels, and the ranks share the multiprocessors.  A gather and a product of what it brings, and a product and a
scatter of what it gives, all of the one and then all of the other ("in turn"); the gather also with a product per part,
as it arrives ("by parts").

The bytes cross no link: times say whether the order works, not what a network does.  On a CPU the same exchanges run in
one thread, "by parts" alone, and nothing is measured: a check that every number is right.  Exit status 1 where not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndtp.collectives.symmetric.host import HostEngine, Progress
from ndtp.collectives.symmetric.windows import windows_in_process

LABEL = "one device as every rank; no link was crossed"


class Ranks:
    """All ranks, their operands, and what must come out.

    gather    a[r] [rows, k], b[r] [k, n]      c[r] = (a of all ranks) . b[r], [ranks * rows, n]
    scatter   a[r] [ranks * rows, k], b[r]     c[r] = sum of block r of a[s] . b[s] over s, [rows, n]
    """

    def __init__(self, ranks: int, rows: int, k: int, n: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def integers(*shape: int) -> Tensor:  # sums are exact, whatever their order
            return torch.randint(-1, 2, (ranks, *shape), generator=generator).to(device, dtype)

        self.ranks, self.rows, self.n = ranks, rows, n
        self.shards, self.whole, self.b = integers(rows, k), integers(ranks * rows, k), integers(k, n)
        self.gathered = self.shards.new_empty(ranks, ranks * rows, k)
        self.partial = self.shards.new_empty(ranks, ranks * rows, n)
        self.received = self.shards.new_empty(ranks, ranks, rows, n)
        self.c = self.shards.new_empty(ranks, ranks * rows, n)

    def blank(self) -> None:
        for tensor in (self.gathered, self.partial, self.received, self.c):
            tensor.fill_(torch.nan)

    def wrong(self, kind: str) -> int:
        """How many numbers are not what they should be."""
        if kind == "gather":
            expected = self.shards.flatten(0, 1).double() @ self.b.double()
            return int((self.c.double() != expected).sum())
        products = (self.whole.double() @ self.b.double()).view(self.ranks, self.ranks, self.rows, self.n)
        return int((self.received.double().sum(1) != products.sum(0)).sum())

    def operands(self, kind: str, rank: int) -> tuple[list[Tensor], list[Tensor], bool]:
        """What a rank sends and where it receives, flat, and whether parts differ."""
        if kind == "gather":
            flat = _bytes(self.shards[rank])
            return [flat] * self.ranks, [_bytes(x) for x in self.gathered[rank].chunk(self.ranks)], False
        sent, landing = self.partial[rank].chunk(self.ranks), self.received[rank]
        return [_bytes(x) for x in sent], [_bytes(x) for x in landing], True

    @property
    def slot_bytes(self) -> int:
        return max(self.shards[0].nbytes, self.partial[0].nbytes)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def on_host(work: Ranks) -> dict[str, Callable[[str], None]]:
    progress = Progress()
    engines = [HostEngine(window, progress, timeout=60) for window in windows_in_process(work.ranks, work.slot_bytes)]

    def by_parts(kind: str) -> None:
        if kind == "scatter":
            for rank in range(work.ranks):
                torch.matmul(work.whole[rank], work.b[rank], out=work.partial[rank])
        under_way = [engine.exchange(*work.operands(kind, rank)) for rank, engine in enumerate(engines)]
        for rank, exchange in enumerate(under_way):
            for part in exchange.parts():
                if kind == "gather":
                    rows = slice(part * work.rows, (part + 1) * work.rows)
                    torch.mm(work.gathered[rank, rows], work.b[rank], out=work.c[rank, rows])
            exchange.wait()

    return {"by parts": by_parts}


def on_device(work: Ranks) -> dict[str, Callable[[str], None]]:
    from ndtp.collectives.symmetric.device import DeviceEngine, LocalWindow

    device = work.shards.device
    engines = [DeviceEngine(window) for window in LocalWindow.of_all(work.ranks, work.slot_bytes, device)]
    streams = [torch.cuda.Stream() for _ in engines]

    def run(kind: str, way: str) -> None:
        here = torch.cuda.current_stream()
        under_way = []
        for rank, stream in enumerate(streams):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                if kind == "scatter":
                    torch.mm(work.whole[rank], work.b[rank], out=work.partial[rank])
                under_way.append(engines[rank].stage(*work.operands(kind, rank)))
        for engine, exchange in zip(engines, under_way, strict=True):
            engine.pull(exchange)
        for rank, (stream, exchange) in enumerate(zip(streams, under_way, strict=True)):
            with torch.cuda.stream(stream):
                if kind == "gather" and way == "by parts":
                    for part in exchange.parts():
                        rows = slice(part * work.rows, (part + 1) * work.rows)
                        torch.mm(work.gathered[rank, rows], work.b[rank], out=work.c[rank, rows])
                exchange.wait()
                if kind == "gather" and way == "in turn":
                    torch.mm(work.gathered[rank], work.b[rank], out=work.c[rank])
            here.wait_stream(stream)

    return {way: lambda kind, way=way: run(kind, way) for way in ("in turn", "by parts")}


def milliseconds(action: Callable[[], None], repetitions: int) -> float:
    times = []
    for repetition in range(-2, repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        if repetition >= 0:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU, if there is one")
    parser.add_argument("--ranks", type=int, default=4)
    for name, size in (("rows", 1024), ("k", 4096), ("n", 4096)):
        parser.add_argument(f"--{name}", type=int, help=f"default: {size}, on a CPU {size // 64}")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--out", type=Path, metavar="FILE")
    chosen = parser.parse_args(words)
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_cpu = device == "cpu"
    sizes = [getattr(chosen, name) or size // (64 if is_cpu else 1) for name, size in _SIZES]
    work = Ranks(chosen.ranks, *sizes, torch.float32 if is_cpu else torch.bfloat16, device)
    rows: list[dict[str, Any]] = []
    for way, run in (on_host if is_cpu else on_device)(work).items():
        for kind in ("gather", "scatter"):
            work.blank()
            run(kind)
            row: dict[str, Any] = {"kind": kind, "way": way, "wrong": work.wrong(kind)}
            if not is_cpu and not row["wrong"]:
                row["ms"] = round(milliseconds(lambda run=run, kind=kind: run(kind), chosen.repetitions), 4)  # type: ignore[misc]
            rows.append(row)
            print(f"{kind:8} {way:11} {row['wrong']} wrong  " + (f"{row['ms']:.3f} ms" if "ms" in row else ""))
    print("on a CPU; nothing was measured" if is_cpu else LABEL)
    if chosen.out:
        name = "cpu" if is_cpu else torch.cuda.get_device_name()
        report = {
            "label": LABEL, "date": str(date.today()), "device": name, "torch": torch.__version__,
            "ranks": chosen.ranks, "rows_k_n": sizes, "measured": not is_cpu, "rows": rows,
        }  # fmt: skip
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(row["wrong"] for row in rows))


_SIZES = (("rows", 1024), ("k", 4096), ("n", 4096))

if __name__ == "__main__":
    sys.exit(main())
