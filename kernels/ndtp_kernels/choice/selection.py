"""Kernel or torch?  One decision for every op; a request that cannot be met is reported once, with the reason."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from ndtp_kernels.choice import roof
from ndtp_kernels.choice.chips import INTERPRETER, Chip
from ndtp_kernels.choice.problem import TORCH, Config, Problem
from ndtp_kernels.choice.table import Table, candidates, choose_for, default_table, fits
from ndtp_kernels.errors import KernelError, warn_once

BACKENDS = ("auto", "triton", "torch")
INTERPRETER_CONFIG = Config("pointer", 16, 16, 16, 1, 1, group_m=2)


@dataclass(frozen=True)
class Options:
    """Options of how a product runs, which never change the meaning of its result."""

    backend: str = "auto"
    config: Config | None = None
    table: Table | None = None
    sms_to_leave: int = 0

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # asked for in each call
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __getstate__(self) -> dict[str, object]:  # another process hashes text otherwise
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def check(self, op: str) -> None:
        if self.backend not in BACKENDS:
            raise KernelError(op, f"backend {self.backend!r} is not known", f"one of {BACKENDS}")
        if self.sms_to_leave < 0:
            raise KernelError(op, f"sms_to_leave is {self.sms_to_leave}", "a number >= 0")


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
    kernels = [c for c in candidates(problem, chip, table or default_table()) if c != TORCH]
    if not kernels:
        warn_once(f"{op}: the Triton kernel was asked for and torch runs instead: {chip.name} has none that fits")
        return TORCH
    return min(kernels, key=lambda c: roof.estimate(problem, c, chip).seconds)
