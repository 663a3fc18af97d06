"""What fp8 sums lose in the tensor cores of Ada and Hopper, with and without fast accumulation: emulated on a CPU.

    python bench/fp8_accumulation.py [--out bench/results/fp8_accumulation.json]

Not a measurement of a device.  The model: products of e4m3 are exact; an instruction adds 32 of them to the running
sum, which keeps 13 bits behind the point and drops the rest (towards zero).  `ndtp_kernels` moves the sums to fp32
after every 512 elements of K; fast accumulation leaves them to the end.  Errors are relative to the root mean square
of the exact result, of normally distributed operands.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from ndtp_kernels.launch import PROMOTED_EVERY

STEP, BITS = 32, 13
WAYS = {"fast accumulation": 0, f"moved every {PROMOTED_EVERY}": PROMOTED_EVERY}


def truncated(x: Tensor, bits: int) -> Tensor:
    """x with `bits` bits behind the point of its mantissa, the others dropped."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)


def product(a: Tensor, b: Tensor, every: int) -> Tensor:
    """A[M, K] . B[N, K]^T as the tensor cores sum it; moved to fp32 after `every` elements of K, 0: at the end."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    running = torch.zeros_like(total)
    for k in range(0, a.shape[1], STEP):
        part = a[:, k : k + STEP].double() @ b[:, k : k + STEP].double().mT
        running = truncated(running + part, BITS)
        if every and (k + STEP) % every == 0:
            total, running = (total + running).float().double(), torch.zeros_like(total)
    return (total + running).float().double()


def errors(k: int, size: int = 128, seed: int = 0) -> dict[str, dict[str, float]]:
    """Of each way, and of rounding the exact result to bf16: root mean square and mean of the relative error."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(size, k, generator=generator).to(torch.float8_e4m3fn).float() for _ in range(2))
    exact = a.double() @ b.double().mT
    unit = exact.square().mean().sqrt()
    found = {way: product(a, b, every) for way, every in WAYS.items()}
    found["exact, rounded to bf16"] = exact.bfloat16().double()

    def relative(got: Tensor) -> dict[str, float]:
        error = (got - exact) / unit
        return {"rms": float(error.square().mean().sqrt()), "largest": float(error.abs().max())}

    return {way: relative(got) for way, got in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    rows = {}
    print("emulated; error by the root mean square of the result")
    for k in (1024, 4096, 16384):
        rows[k] = errors(k)
        for way, row in rows[k].items():
            print(f"K {k:6}  {way:24} rms {row['rms']:.2e}  largest {row['largest']:.2e}")
    if chosen.out:
        rounded = {
            k: {way: {name: float(f"{x:.3g}") for name, x in row.items()} for way, row in ways.items()}
            for k, ways in rows.items()
        }
        report = {"emulated": True, "date": str(date.today()), "torch": torch.__version__, "K": rounded}
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
