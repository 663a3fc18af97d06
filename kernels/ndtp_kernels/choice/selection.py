"""Kernel or torch?  One decision for every op; a request that cannot be met is reported once, with the reason."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from ndtp_kernels.choice.chips import Chip, detect
from ndtp_kernels.choice.table import TORCH, Config, Problem, Table, choose_for, fits
from ndtp_kernels.errors import KernelError, warn_once

BACKENDS = ("auto", "triton", "torch")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
INTERPRETER = Chip("interpreter", "interpreter", 3, 1 << 30, 1e9, dict.fromkeys(("bfloat16", "float32"), 1e9))
INTERPRETER_CONFIG = Config("pointer", 16, 16, 16, 1, 1, group_m=2)


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what: everything that never changes the result's meaning."""

    backend: str = "auto"
    config: Config | None = None
    table: Table | None = None
    sms_to_leave: int = 0
    precision: str = "ieee"  # "tf32": fp32 operands may be rounded to tf32
    fast_accumulation: bool = False  # fp8 only, as in torch._scaled_mm

    def check(self, op: str) -> None:
        if self.backend not in BACKENDS:
            raise KernelError(op, f"backend {self.backend!r} is not known", f"one of {BACKENDS}")
        if self.precision not in ("ieee", "tf32"):
            raise KernelError(op, f"precision {self.precision!r} is not known", "'ieee' or 'tf32'")
        if self.sms_to_leave < 0:
            raise KernelError(op, f"sms_to_leave is {self.sms_to_leave}", "a number >= 0")


def triton_chip(op: str, tensor: Tensor, backend: str) -> Chip | None:
    """The chip whose kernels can take `tensor`; None where torch has to do it."""
    if backend == "torch":
        return None
    reason = ""
    chip: Chip | None = None
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    elif tensor.dtype not in DTYPES:
        reason = f"no kernel takes {tensor.dtype}"
    elif tensor.device.type == "cuda":
        chip = detect(tensor.device)
        if tensor.dtype == torch.float8_e4m3fn and chip is not None and not chip.has_fp8:
            reason, chip = f"{chip.name} ({chip.target}) has no e4m3 products", None
    elif tensor.device.type == "cpu" and backend == "triton":
        from ndtp_kernels.launch import interpreted

        if interpreted():
            return INTERPRETER
        reason = "the tensors are on a CPU and Triton's interpreter is off"
    if backend == "triton" and reason:
        warn_once(f"{op}: the Triton kernel was asked for and torch runs instead: {reason}")
    return chip


def configuration(op: str, problem: Problem, chip: Chip, options: Options) -> Config:
    """The configuration that runs `problem`."""
    wanted = options.config
    if wanted is not None and not fits(problem, wanted, chip):
        warn_once(f"{op} [{problem.m} {problem.n} {problem.k}]: {wanted} does not fit on {chip.name}; choosing another")
        wanted = None
    if wanted is not None:
        return wanted
    if chip is INTERPRETER:
        return INTERPRETER_CONFIG
    if options.backend != "triton":
        return choose_for(problem, chip, options.table)
    return _best_kernel(op, problem, chip, options.table)


def _best_kernel(op: str, problem: Problem, chip: Chip, table: Table | None) -> Config:
    """The best configuration that is not torch: what backend="triton" asks for."""
    from ndtp_kernels.choice import roof
    from ndtp_kernels.choice import table as config

    table = table or config.default_table()
    kernels = [c for c in config.candidates(problem, chip, table) if c != TORCH]
    if not kernels:
        warn_once(f"{op}: the Triton kernel was asked for and torch runs instead: {chip.name} has none that fits")
        return TORCH
    return min(kernels, key=lambda c: roof.estimate(problem, c, chip).seconds)
