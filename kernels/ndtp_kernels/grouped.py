"""Products of experts: rows sorted by expert, each expert's by a matrix of its own; see `triton_code.grouped`.

The kernels read where an expert's rows begin from memory on the device: nothing comes back to the host, and nothing is
compiled or chosen anew when other tokens choose other experts.
"""
# ruff: noqa: C408 (argument lists read better as calls)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ndtp_kernels import launch, tracing
from ndtp_kernels.call import describable
from ndtp_kernels.checks import check_gradients
from ndtp_kernels.choice.chips import Chip
from ndtp_kernels.choice.problem import Config, Problem
from ndtp_kernels.choice.selection import Options, configuration
from ndtp_kernels.errors import KernelError
from ndtp_kernels.launch import Launch, triton_chip
from ndtp_kernels.operands import Matrix, matrix

NO_OPTIONS = Options()
ALIGNMENT = 16  # bytes, of the rows of operands: what torch's grouped product asks for


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    transpose_b: bool = False,
    sizes: Sequence[int] | None = None,
    options: Options = NO_OPTIONS,
) -> Tensor:
    """C[rows of e] = A[rows of e] . B[e] for each expert e, fp32 inside; no autograd.

    a         [rows, K]           sorted by expert
    b         [experts, K, N]     or [experts, N, K] with `transpose_b`
    offsets   int32 [experts + 1] on the device of A: expert e's rows are offsets[e] : offsets[e + 1].  They start with
              0, do not fall, and end with `rows` at most: what they say is never read back, and so not checked.  Rows
              behind the last expert's are not multiplied, and nothing is written for them
    returns   [rows, N]

    Args:
        sizes: rows of each expert, where the host knows them: a loop of torch's products then need not ask the device.

    Raises:
        KernelError: operands that do not fit together.
    """
    op = "grouped_gemm"
    view = matrix(b, "kn", transpose_b, None, op=op, name="b")
    _check(op, a, b, offsets, options)
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != view.rows or offsets.numel() != b.shape[0] + 1:
        raise KernelError(
            op, f"A {tuple(a.shape)}, B {tuple(b.shape)} (transpose_b={transpose_b}), {offsets.numel()} offsets",
            f"A [rows, K], B [experts, {'N, K' if transpose_b else 'K, N'}], an offset more than experts",
        )  # fmt: skip
    check_gradients(op, a, b)
    c = a.new_empty((a.shape[0], view.cols))
    chip = triton_chip(op, a, options.backend) if c.numel() and a.shape[1] else None
    with tracing.record("grouped", a.shape[0], view.cols, view.rows, (), a, c.dtype):
        if chip is not None and _ran(op, GroupedCall(a, b, c, offsets, False, transpose_b, options), chip):
            return c
        return _rows_by_torch(a, b.mT if transpose_b else b, c, offsets, sizes)


def grouped_wgrad(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    sizes: Sequence[int] | None = None,
    options: Options = NO_OPTIONS,
) -> Tensor:
    """C[e] = A[rows of e]^T . B[rows of e] for each expert, zeros where it has no rows: a weight's gradient.

    a         [rows, M]     for a weight [experts, M, N] the gradient of its product
    b         [rows, N]     what was multiplied
    returns   [experts, M, N]

    `offsets` and `sizes` are those of `grouped_gemm`.
    """
    op = "grouped_wgrad"
    check_gradients(op, a, b)
    _check(op, a, b, offsets, options)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[0]:
        raise KernelError(op, f"A {tuple(a.shape)}, B {tuple(b.shape)}", "A [rows, M], B [rows, N]")
    c = a.new_empty((offsets.numel() - 1, a.shape[1], b.shape[1]))
    chip = triton_chip(op, a, options.backend) if c.numel() and a.shape[0] else None
    with tracing.record("grouped", a.shape[1], b.shape[1], a.shape[0], (), a, c.dtype):
        if chip is not None and _ran(op, GroupedCall(a, b, c, offsets, True, False, options), chip):
            return c
        return _outer_by_torch(a, b, c, offsets, sizes)


def _check(op: str, a: Tensor, b: Tensor, offsets: Tensor, options: Options) -> None:
    options.check(op)
    if a.dtype != b.dtype or a.element_size() == 1:
        raise KernelError(op, f"A is {a.dtype} and B is {b.dtype}", "two of one dtype: fp32, bf16 or fp16")
    if offsets.dim() != 1 or offsets.dtype != torch.int32 or offsets.device != a.device or not offsets.numel():
        raise KernelError(
            op, f"offsets are {tuple(offsets.shape)} {offsets.dtype} on {offsets.device}",
            f"int32 [experts + 1] on {a.device}",
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ by torch


def library_takes(a: Tensor, b: Tensor) -> bool:
    """Return whether torch has one call for the products of all experts: bf16 on a GPU, rows of whole 16 bytes."""
    aligned = all(size * x.element_size() % ALIGNMENT == 0 for x in (a, b) for size in x.shape[-2:][x.dim() == 2 :])
    return a.is_cuda and a.dtype == torch.bfloat16 and aligned and a.shape[0] > 0


def _rows_by_torch(a: Tensor, b: Tensor, c: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> Tensor:
    if library_takes(a, b):
        return torch._grouped_mm(a, b, offs=offsets[1:])
    each = _sizes(offsets, sizes)
    all_rows = sum(each)
    for rows, one, out in zip(a[:all_rows].split(each), b.unbind(), c[:all_rows].split(each), strict=True):
        if rows.shape[0]:
            torch.mm(rows, one, out=out)
    return c


def _outer_by_torch(a: Tensor, b: Tensor, c: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> Tensor:
    if library_takes(a, b):
        c = torch._grouped_mm(a.mT, b, offs=offsets[1:])
        return c.masked_fill_((offsets[1:] == offsets[:-1])[:, None, None], 0)  # nobody promises what is there
    each = _sizes(offsets, sizes)
    all_rows = sum(each)
    for left, right, out in zip(a[:all_rows].split(each), b[:all_rows].split(each), c.unbind(), strict=True):
        torch.mm(left.mT, right, out=out)
    return c


def _sizes(offsets: Tensor, sizes: Sequence[int] | None) -> list[int]:
    return offsets.diff().tolist() if sizes is None else list(sizes)


# ------------------------------------------------------------------------------------------------------- by a kernel


@dataclass(frozen=True)
class GroupedCall:
    """The tensors of one call as the kernels address them; C of experts' rows, or, of `outer` products, of experts."""

    a: Tensor
    b: Tensor
    c: Tensor
    offsets: Tensor
    outer: bool
    transpose_b: bool
    options: Options

    @cached_property
    def view_a(self) -> Matrix:
        return matrix(self.a, "mk", self.outer, None, op="grouped", name="a")

    @cached_property
    def view_b(self) -> Matrix:
        return matrix(self.b, "kn", self.transpose_b, None, op="grouped", name="b")

    @property
    def experts(self) -> int:
        return self.offsets.numel() - 1

    def problem(self) -> Problem:
        """Return the facts that the choice may depend on: the mean number of rows an expert, not each expert's
        number.
        """
        a, b, options = self.view_a, self.view_b, self.options
        dtype = str(self.a.dtype).removeprefix("torch.")
        m, k = (a.rows, -(-a.cols // self.experts)) if self.outer else (-(-a.rows // self.experts), a.cols)
        in_one = library_takes(self.a, self.b)
        return Problem(
            m=m, n=b.cols, k=k, dtype=dtype,
            batch=self.experts, out_bytes=self.c.element_size(),
            kind="grouped_wgrad" if self.outer else "grouped_dgrad" if b.row_major else "grouped",
            layout=("n" if a.row_major else "t") + ("n" if b.row_major else "t"),
            tma=describable(a, self.a) and describable(b, self.b),
            torch_launches=1 if in_one else self.experts, sms_to_leave=options.sms_to_leave,
        )  # fmt: skip

    def launch(self, config: Config, chip: Chip) -> Launch:
        return (self._of_outer if self.outer else self._of_rows)(config, chip)

    def _of_rows(self, config: Config, chip: Chip) -> Launch:
        from ndtp_kernels.triton_code.grouped import grouped_rows_kernel

        a, b, c, experts = self.view_a, self.view_b, self.c, self.experts
        rows, k, n = a.rows, a.cols, b.cols
        # As many tiles as there can be: each expert with rows has one that is not full.
        tiles = (rows // config.block_m + min(experts, rows)) * -(-n // config.block_n)
        arguments: dict[str, Any] = dict(
            A=self.a, B=self.b, C=c, offsets=self.offsets, rows=rows, experts=experts, N=n, K=k, sa_m=a.stride_row,
            sa_k=a.stride_col, sb_e=b.batch_strides[0], sb_k=b.stride_row, sb_n=b.stride_col, sc_m=c.stride(0),
            sc_n=c.stride(1),
        )  # fmt: skip
        constants = dict(
            EXPERTS=max(2, 1 << (experts - 1).bit_length()), EVEN_N=n % config.block_n == 0,
            EVEN_K=k % config.block_k == 0,
        )  # fmt: skip
        return self._launch(grouped_rows_kernel, arguments, constants, tiles, config, chip)

    def _of_outer(self, config: Config, chip: Chip) -> Launch:
        from ndtp_kernels.triton_code.grouped import grouped_outer_kernel

        a, b, c = self.view_a, self.view_b, self.c
        experts, m, n = c.shape
        tiles = experts * -(-m // config.block_m) * -(-n // config.block_n)
        arguments: dict[str, Any] = dict(
            A=self.a, B=self.b, C=c, offsets=self.offsets, rows=a.cols, experts=experts, M=m, N=n, sa_k=a.stride_col,
            sa_m=a.stride_row, sb_k=b.stride_row, sb_n=b.stride_col, sc_e=c.stride(0), sc_m=c.stride(1),
            sc_n=c.stride(2),
        )  # fmt: skip
        constants = dict(EVEN_M=m % config.block_m == 0, EVEN_N=n % config.block_n == 0)
        return self._launch(grouped_outer_kernel, arguments, constants, tiles, config, chip)

    def _launch(
        self,
        kernel: Any,
        arguments: dict[str, Any],
        constants: dict[str, Any],
        tiles: int,
        config: Config,
        chip: Chip,
    ) -> Launch:
        emulate, options = chip.target == "interpreter", self.options
        shared = dict(
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            TMA=config.kernel == "tma", A_ROW_MAJOR=self.view_a.row_major, B_ROW_MAJOR=self.view_b.row_major,
            UPCAST=emulate and self.a.dtype == torch.bfloat16, SUBTILE=config.subtile,
        )  # fmt: skip
        # Programs of a TMA kernel stay on their SM; who leaves SMs to collectives has as many programs less.
        grid = tiles
        if config.kernel == "tma":
            grid = min(tiles, max(1, chip.num_sms - options.sms_to_leave) * config.ctas_per_sm)
        how = {} if emulate else {"num_warps": config.num_warps, "num_stages": config.num_stages}
        return Launch(kernel, arguments, shared | constants, grid, how)


def _ran(op: str, call: GroupedCall, chip: Chip) -> bool:
    """Launch; False where torch is chosen, or where Triton refuses the configuration, which is warned of."""
    config = configuration(op, call.problem(), chip, call.options)
    return config.kernel != "torch" and launch.ran(op, [call.launch(config, chip)], call.a.device, config)
