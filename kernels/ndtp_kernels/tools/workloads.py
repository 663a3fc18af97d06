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


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a product, its dtype, and random operands for it."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    layout: str
    generator: torch.Generator

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator, device=self.device) * scale).to(self.dtype)

    def weight(self, *shape: int) -> Tensor:
        return self.random(*shape, scale=self.k**-0.5)


def _plain(of: _Sizes) -> Workload:
    (ta, tb), (m, n, k) = TRANSPOSES[of.layout], (of.m, of.n, of.k)
    a, b = of.random(*((k, m) if ta else (m, k))), of.weight(*((n, k) if tb else (k, n)))
    left, right = a.mT if ta else a, b.mT if tb else b
    return Workload(
        Problem(m, n, k, of.name, layout=of.layout, out_bytes=a.element_size()),
        lambda options: interface.gemm(a, b, transpose_a=ta, transpose_b=tb, options=options),
        lambda: left @ right,
        lambda: left.float() @ right.float(),
        of.flops,
        operands=(a, b),
    )


def _epilogue(of: _Sizes) -> Workload:
    x, bias, up = of.random(of.m, of.k), of.random(of.n), of.weight(of.n, of.k)

    def ours(options: Options) -> Tensor:
        made = interface.gemm(
            x, up, bias, transpose_b=True, activation="gelu", return_preactivation=True, options=options
        )
        return made.c

    return Workload(
        Problem(of.m, of.n, of.k, of.name, kind="epilogue", torch_passes=1, epilogue_bytes=x.element_size()),
        ours,
        lambda: _activated(torch.nn.functional.linear(x, up, bias)),
        lambda: torch.nn.functional.gelu(x.float() @ up.float().mT + bias.float()),
        of.flops,
    )


def _backward(of: _Sizes) -> Workload:
    dy, weight, pre = of.random(of.m, of.k), of.weight(of.k, of.n), of.random(of.m, of.n)
    return Workload(
        Problem(
            of.m, of.n, of.k, of.name, kind="backward", layout="nn", torch_passes=1, epilogue_bytes=dy.element_size()
        ),
        lambda options: interface.backward_gemm(dy, weight, pre, activation="gelu", options=options),
        lambda: torch.ops.aten.gelu_backward(dy @ weight, pre),
        lambda: reference.activation_gradient(pre.float(), "gelu") * (dy.float() @ weight.float()),
        of.flops,
    )


def _wgrad(of: _Sizes) -> Workload:
    dc, x, main = of.random(of.k, of.m), of.weight(of.k, of.n), torch.zeros(of.m, of.n, device=of.device)
    return Workload(
        Problem(of.m, of.n, of.k, of.name, kind="wgrad", layout="tn", out_bytes=4, torch_passes=1, epilogue_bytes=4),
        lambda options: interface.gemm(dc, x, transpose_a=True, out=main, accumulate=True, options=options),
        lambda: main.add_(dc.mT @ x),
        lambda: dc.float().mT @ x.float(),
        of.flops,
        main.zero_,
    )


def _scatter(of: _Sizes) -> Workload:
    blocks, bias = of.random(4, of.m, of.n), of.random(of.n)
    return Workload(
        Problem(of.m, of.n, 0, of.name, kind="scatter"),
        lambda options: interface.reduce_blocks(blocks, bias, activation="gelu", backend=options.backend),
        lambda: torch.nn.functional.gelu(blocks.sum(0, dtype=torch.float32) + bias).to(of.dtype),
        lambda: torch.nn.functional.gelu(blocks.float().sum(0) + bias.float()),
        0.0,
        num_bytes=5.0 * of.m * of.n * blocks.element_size(),
    )


def _scatter_backward(of: _Sizes) -> Workload:
    blocks, pre = of.random(4, of.m, of.n), of.random(of.m, of.n)
    gelu_backward = torch.ops.aten.gelu_backward
    return Workload(
        Problem(of.m, of.n, 0, of.name, kind="scatter_backward"),
        lambda options: interface.reduce_blocks_backward(blocks, pre, activation="gelu", backend=options.backend),
        lambda: gelu_backward(blocks.sum(0, dtype=torch.float32).to(of.dtype), pre),
        lambda: gelu_backward(blocks.float().sum(0), pre.float()),
        0.0,
        num_bytes=6.0 * of.m * of.n * blocks.element_size(),
    )


_MAKERS = {
    "plain": _plain, "epilogue": _epilogue, "backward": _backward, "wgrad": _wgrad, "scatter": _scatter,
    "scatter_backward": _scatter_backward,
}  # fmt: skip
KINDS = tuple(_MAKERS)


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
    if kind not in _MAKERS:
        raise ValueError(f"workload {kind!r} is not known\n  fix: one of {KINDS}")
    return _MAKERS[kind](_Sizes(m, n, k, dtype, device, layout, torch.Generator(device).manual_seed(seed)))
