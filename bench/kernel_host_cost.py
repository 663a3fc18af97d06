"""What a call of a kernel costs the host, without a device.

    python bench/kernel_host_cost.py [--out bench/results/kernel_host_cost.json]

Everything that runs in Python is run as for an H200: the interface, the key under which a prepared call is kept, the
allocation of results, and Triton's own launcher object with the scratch memory for descriptors.  Stubbed, and so not in
the figures: Triton's launch function in C (which reads the arguments and calls cuLaunchKernelEx), two questions to the
driver (current device, current stream), and CUDA's allocator, in whose place the CPU's allocates.

`first` is the same call with nothing kept of earlier ones: what every call cost before calls were kept, without
Triton's binding of arguments, which a first call has besides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import ndtp_kernels as kernels  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from ndtp_kernels import launch, prepared, products, reductions  # noqa: E402
from ndtp_kernels.choice.chips import CHIPS  # noqa: E402

from ndtp.compute.gemm import KernelGemm  # noqa: E402

SIZE = 256
OPTIONS = kernels.Options(backend="triton")


class Compiled:
    """What Triton returns of a launch: started with a grid it runs Triton's launcher, whose C function does nothing."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        from triton.backends.nvidia.driver import CudaLauncher

        launcher = object.__new__(CudaLauncher)
        launcher.__dict__.update(
            num_ctas=1, global_scratch_size=384, global_scratch_align=128, profile_scratch_size=0,
            profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False, arg_annotations=(),
            kernel_signature=b"", launch=lambda *arguments: None,
        )  # fmt: skip
        return lambda *values: launcher(*grid, 0, 0, b"", None, None, None, *values)


def pretend(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let CPU tensors be taken for an H200's, and launches for done."""

    def started(self: launch.Launch) -> None:
        self.compiled = Compiled()

    replace(launch.Launch, "run", started)
    for module in (products, reductions):
        replace(module, "triton_chip", lambda op, tensor, backend: CHIPS["h200"])
    triton.set_allocator(launch.allocate_on(torch.device("cpu")))


def cases() -> dict[str, Callable[[], Any]]:
    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    x, w, bias = random(SIZE, SIZE), random(SIZE, SIZE), random(SIZE)
    pre, main = random(SIZE, SIZE), random(SIZE, SIZE, dtype=torch.float32)
    blocks = random(4, SIZE, SIZE)
    letters = (("m", "k"), ("k", "n"), ("m", "n"))
    bound = KernelGemm(backend="triton").bound(letters, tuple(x.shape), tuple(w.shape))
    return {
        "product": lambda: kernels.gemm(x, w, transpose_b=True, options=OPTIONS),
        "bias, gelu, pre-activation kept": lambda: kernels.gemm(
            x, w, bias, transpose_b=True, activation="gelu", return_preactivation=True, options=OPTIONS
        ),
        "dgrad with activation gradient": lambda: kernels.backward_gemm(x, w, pre, activation="gelu", options=OPTIONS),
        "wgrad added to fp32": lambda: kernels.gemm(x, w, transpose_a=True, out=main, accumulate=True, options=OPTIONS),
        "four blocks added, bias, gelu": lambda: kernels.reduce_blocks(
            blocks, bias, activation="gelu", backend="triton"
        ),
        "four blocks added, swiglu": lambda: kernels.reduce_blocks(
            blocks, activation="silu", pairs=True, backend="triton"
        ),
        "bound product": lambda: bound(x, w),
    }


def microseconds(run: Callable[[], Any], repetitions: int, calls: int) -> list[float]:
    found = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return found


def first_time(run: Callable[[], Any]) -> Callable[[], Any]:
    def forgetful() -> None:
        prepared.forget()
        run()

    return forgetful


@torch.no_grad()
def measure(repetitions: int = 30, calls: int = 40) -> dict[str, dict[str, float]]:
    """Per case the median and the least of the repetitions, in microseconds a call."""
    rows = {}
    for name, run in cases().items():
        run()
        again = microseconds(run, repetitions, calls)
        first = microseconds(first_time(run), repetitions, max(1, calls // 8))
        rows[name] = {
            "median": round(statistics.median(again), 2), "least": round(min(again), 2),
            "first_median": round(statistics.median(first), 1), "first_least": round(min(first), 1),
        }  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repetitions", type=int, default=30)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    pretend()
    rows = measure(chosen.repetitions)
    print(f"{'us a call, device stubbed':36} {'median':>8} {'least':>8} {'first':>8} {'least':>8}")
    for name, row in rows.items():
        print(
            f"{name:36} " + " ".join(f"{row[key]:8.1f}" for key in ("median", "least", "first_median", "first_least"))
        )
    if chosen.out:
        report = {
            "date": str(date.today()), "torch": torch.__version__, "triton": triton.__version__,
            "python": platform.python_version(), "cpu": platform.processor() or platform.machine(),
            "unit": "microseconds a call", "load_average": round(os.getloadavg()[0], 1), "cores": os.cpu_count(),
            "stubbed": "Triton's launch function in C, the driver's current device and stream, CUDA's allocator",
            "cases": rows,
        }  # fmt: skip
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
