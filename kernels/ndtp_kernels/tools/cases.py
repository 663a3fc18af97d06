"""The kernels that `ndtp_kernels.tools.aot` compiles: every shipped configuration in each kind, with its arguments."""
# ruff: noqa: C408 (argument lists read better as calls)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ndtp_kernels.call import GemmCall
from ndtp_kernels.choice.chips import CHIPS, Chip
from ndtp_kernels.choice.problem import Config, Problem
from ndtp_kernels.choice.selection import Options
from ndtp_kernels.choice.table import shipped_table
from ndtp_kernels.form import Form
from ndtp_kernels.grouped import GroupedCall
from ndtp_kernels.launch import Launch, gemm_launches, pairs_launch, reduce_launch
from ndtp_kernels.operands import matrix

TARGETS = {"sm_80": "a100", "sm_89": "l40s", "sm_90": "h200", "sm_100": "b200", "gfx942": "mi300x"}
SIZE = 4096
PASSES = ("reduce", "pairs", "pairs_backward")  # kernels without products


@dataclass(frozen=True)
class CompiledCase:
    """One kernel to compile: a configuration, and what it is to do."""

    target: str
    dtype: str
    kind: str
    config: Config

    @property
    def chip(self) -> Chip:
        return CHIPS[TARGETS[self.target]]

    @property
    def is_pass(self) -> bool:
        """Whether it is a pass over memory, without products."""
        return self.kind in PASSES

    @property
    def run(self) -> Config:
        """Return the configuration that is compiled; a split product's has K split."""
        return replace(self.config, split_k=4) if self.kind == "split" else self.config


def cases(targets: Sequence[str] = tuple(TARGETS)) -> Iterator[CompiledCase]:
    """Every shipped configuration in each of its kinds, and the passes over memory."""
    table = shipped_table()
    for target in targets:
        for dtype_class, configs in table.candidates[target].items():
            dtype = {"half": "bfloat16", "fp32": "float32"}[dtype_class]
            for config, kinds in configs:
                for kind in kinds:
                    yield CompiledCase(target, dtype, kind, config)
        best = table.candidates[target]["half"][0].config
        yield CompiledCase(target, "bfloat16", "split", best)
        for kind in PASSES:
            yield CompiledCase(target, "bfloat16", kind, Config(block_m=16, block_n=256))


# (target, dtype, kind, kernel, whether warps have roles): ways to load and to multiply, and the second pass of a sum.
QUICK = (
    ("sm_80", "bfloat16", "backward", "pointer", False),
    ("sm_89", "bfloat16", "plain", "pointer", False),
    ("sm_90", "bfloat16", "epilogue", "tma", False),
    ("sm_90", "bfloat16", "blocks", "pointer", False),
    ("sm_90", "bfloat16", "split", "tma", False),
    ("sm_90", "bfloat16", "reduce", "pointer", False),
    ("sm_90", "bfloat16", "pairs", "pointer", False),
    ("sm_90", "bfloat16", "pairs_backward", "pointer", False),
    ("sm_100", "bfloat16", "plain", "tma", True),
    ("gfx942", "bfloat16", "plain", "pointer", False),
)


def quick_cases(targets: Sequence[str] = tuple(TARGETS)) -> Iterator[CompiledCase]:
    """A quick look, of some seconds: the configuration with the smallest tiles of each way in `QUICK`."""
    found: dict[tuple[object, ...], CompiledCase] = {}
    for case in cases(targets):
        way = (case.target, case.dtype, case.kind, case.config.kernel, case.config.warp_specialize)
        if way in QUICK and (way not in found or _tile(case) < _tile(found[way])):
            found[way] = case
    yield from found.values()


def _tile(case: CompiledCase) -> int:
    return case.config.block_m * case.config.block_n * case.config.block_k


def call_of(case: CompiledCase) -> GemmCall:
    """The product of a case, on meta tensors: a weight [N, K] and its gradients, as in a linear layer."""
    dtype = getattr(torch, case.dtype)

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    # Pointer kernels are for what TMA cannot take: ragged edges, which cost masks and registers.
    m = n = SIZE + 16 if case.config.kernel == "pointer" else SIZE
    k = SIZE
    form = Form(False, True)
    a, b, c = new(m, k), new(n, k), new(m, n)
    extra: dict[str, Any] = {}
    if case.kind == "epilogue" or case.is_pass:
        extra = dict(bias=new(n), activation="gelu", pre=new(m, n))
    if case.kind == "backward":
        form, b = Form(), new(k, n)
        extra = dict(activation="gelu", aux=new(m, n))
    if case.kind == "wgrad":
        form, a, b, c = Form(True, False), new(k, m), new(k, n), new(m, n, dtype=torch.float32)
        extra = dict(accumulate=True)
    if case.kind == "blocks":  # gathered along K, scattered along N, as in a 2D product
        form, a, b, c = Form(False, True, "k", None, 4), new(4, m, k // 4), new(n, k), new(4, m, n // 4)
    return GemmCall(
        a=a,
        b=b,
        c=c,
        view_a=matrix(a, "mk", form.transpose_a, form.a_blocks, op="aot", name="a"),
        view_b=matrix(b, "kn", form.transpose_b, None, op="aot", name="b"),
        view_c=matrix(c, "mn", False, "n" if form.c_blocks > 1 else None, op="aot", name="c"),
        **extra,
    )


EXPERTS = 8


def experts_call(case: CompiledCase) -> GroupedCall:
    """Products of experts, on meta tensors: forward with weights [E, N, K], its dgrad, or the weights' gradient."""
    dtype = getattr(torch, case.dtype)
    n = SIZE + 16 if case.config.kernel == "pointer" else SIZE
    x, y, w = (
        torch.empty(shape, device="meta", dtype=dtype) for shape in ((SIZE, SIZE), (SIZE, n), (EXPERTS, n, SIZE))
    )
    offsets = torch.empty(EXPERTS + 1, device="meta", dtype=torch.int32)
    how = Options(config=case.config)
    if case.kind == "grouped_wgrad":
        return GroupedCall(y, x, w, offsets, True, False, how)
    return (
        GroupedCall(x, w, y, offsets, False, True, how)
        if case.kind == "grouped"
        else GroupedCall(y, w, x, offsets, False, False, how)
    )


def problem_of(case: CompiledCase) -> Problem:
    """Return the problem to which this case would be the answer of the choice."""
    if case.kind.startswith("grouped"):
        return experts_call(case).problem()
    return call_of(case).problem()


def launch_of(case: CompiledCase) -> Launch:
    """The kernel of a case with its arguments."""
    if case.kind.startswith("grouped"):
        return experts_call(case).launch(case.config, case.chip)
    call = call_of(case)
    part = torch.empty(4, SIZE, SIZE, device="meta", dtype=torch.bfloat16)
    if case.kind == "reduce":
        return reduce_launch(call, part, call.view_c)
    if case.kind == "pairs":
        return pairs_launch(part, part[0, :, : SIZE // 2], None, part[0], part[0, 0], SIZE, SIZE // 2, "silu")
    if case.kind == "pairs_backward":
        grad = part[:, :, : SIZE // 2]
        return pairs_launch(grad, part[0], part[0], None, None, SIZE, SIZE // 2, "silu")
    return gemm_launches(call, case.run, case.chip)[0]


def name_of(case: CompiledCase) -> str:
    return f"{'pass' if case.is_pass else 'gemm'} {case.kind} {case.dtype}"


def shown(case: CompiledCase) -> str:
    """The configuration as reports name it."""
    return "16x256" if case.is_pass else str(case.run)
