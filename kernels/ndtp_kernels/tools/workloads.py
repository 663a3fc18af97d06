"""Products as a transformer runs them, each beside what torch would do: for tuning and for benchmarks.

Operands are random (zeros run faster: a chip that multiplies them draws less power), scaled so that results are of
order 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ndtp_kernels import interface, reference
from ndtp_kernels.choice.problem import Problem
from ndtp_kernels.choice.selection import Options

TRANSPOSES = {"nn": (False, False), "nt": (False, True), "tn": (True, False), "tt": (True, True)}
KINDS = ("plain", "epilogue", "backward", "wgrad", "scatter", "scatter_backward")


@dataclass(frozen=True)
class Workload:
    """One product: ours, torch's, and the numbers both must give."""

    problem: Problem
    ours: Callable[[Options], Tensor]
    eager: Callable[
        [], Any
    ]  # the result, or a tuple that starts with it: all that ours keeps, so that no compiler drops it
    expected: Callable[[], Tensor]  # in fp32, from operands cast to fp32
    flops: float
    reset: Callable[[], object] = lambda: None  # before a check: what is accumulated into starts from zero
    operands: tuple[Tensor, ...] = ()  # of a plain product, as they are stored
    num_bytes: float = 0.0  # that must be moved, where nothing is multiplied

    def error(self, got: Any, want: Tensor | None = None) -> float:
        """Largest error against `want` (`expected()`, once it is known), relative to its largest value."""
        want = self.expected() if want is None else want
        got = got[0] if isinstance(got, tuple) else got
        return float((got.float() - want).abs().max() / want.abs().max().clamp(min=1e-6))


def _activated(pre: Tensor) -> tuple[Tensor, Tensor]:
    return torch.nn.functional.gelu(pre), pre


def workload(
    kind: str, m: int, n: int, k: int, *, dtype: torch.dtype, device: torch.device, layout: str = "nt", seed: int = 0
) -> Workload:
    """One product of a kind:

    plain               in any layout
    epilogue            bias and gelu, pre-activation kept
    backward            dgrad with gelu's gradient
    wgrad               into fp32 main gradients
    scatter             four blocks added, bias, gelu; no product
    scatter_backward    four blocks added, gelu's gradient; no product
    """
    generator = torch.Generator(device).manual_seed(seed)
    name = str(dtype).removeprefix("torch.")

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    small = k**-0.5
    flops = 2.0 * m * n * k
    if kind == "plain":
        ta, tb = TRANSPOSES[layout]
        a, b = random(*((k, m) if ta else (m, k))), random(*((n, k) if tb else (k, n)), scale=small)
        left, right = a.mT if ta else a, b.mT if tb else b
        return Workload(
            Problem(m, n, k, name, layout=layout, out_bytes=a.element_size()),
            lambda options: interface.gemm(a, b, transpose_a=ta, transpose_b=tb, options=options),
            lambda: left @ right,
            lambda: left.float() @ right.float(),
            flops,
            operands=(a, b),
        )
    if kind == "epilogue":
        x, bias, up = random(m, k), random(n), random(n, k, scale=small)
        return Workload(
            Problem(m, n, k, name, kind=kind, torch_passes=1, epilogue_bytes=x.element_size()),
            lambda options: (
                interface.gemm(
                    x, up, bias, transpose_b=True, activation="gelu", return_preactivation=True, options=options
                ).c
            ),
            lambda: _activated(torch.nn.functional.linear(x, up, bias)),
            lambda: torch.nn.functional.gelu(x.float() @ up.float().mT + bias.float()),
            flops,
        )
    if kind == "backward":
        dy, weight, pre = random(m, k), random(k, n, scale=small), random(m, n)
        return Workload(
            Problem(m, n, k, name, kind=kind, layout="nn", torch_passes=1, epilogue_bytes=dy.element_size()),
            lambda options: interface.backward_gemm(dy, weight, pre, activation="gelu", options=options),
            lambda: torch.ops.aten.gelu_backward(dy @ weight, pre),
            lambda: reference.activation_gradient(pre.float(), "gelu") * (dy.float() @ weight.float()),
            flops,
        )
    if kind == "wgrad":
        dc, x, main = random(k, m), random(k, n, scale=small), torch.zeros(m, n, device=device)
        return Workload(
            Problem(m, n, k, name, kind=kind, layout="tn", out_bytes=4, torch_passes=1, epilogue_bytes=4),
            lambda options: interface.gemm(dc, x, transpose_a=True, out=main, accumulate=True, options=options),
            lambda: main.add_(dc.mT @ x),
            lambda: dc.float().mT @ x.float(),
            flops,
            main.zero_,
        )
    if kind == "scatter":
        blocks, bias = random(4, m, n), random(n)
        return Workload(
            Problem(m, n, 0, name, kind=kind),
            lambda options: interface.reduce_blocks(blocks, bias, activation="gelu", backend=options.backend),
            lambda: torch.nn.functional.gelu(blocks.sum(0, dtype=torch.float32) + bias).to(dtype),
            lambda: torch.nn.functional.gelu(blocks.float().sum(0) + bias.float()),
            0.0,
            num_bytes=5.0 * m * n * blocks.element_size(),
        )
    if kind == "scatter_backward":
        blocks, pre = random(4, m, n), random(m, n)
        gelu_backward = torch.ops.aten.gelu_backward
        return Workload(
            Problem(m, n, 0, name, kind=kind),
            lambda options: interface.reduce_blocks_backward(blocks, pre, activation="gelu", backend=options.backend),
            lambda: gelu_backward(blocks.sum(0, dtype=torch.float32).to(dtype), pre),
            lambda: gelu_backward(blocks.float().sum(0), pre.float()),
            0.0,
            num_bytes=6.0 * m * n * blocks.element_size(),
        )
    raise ValueError(f"workload {kind!r} is not known\n  fix: one of {KINDS}")
