"""The products of one rank's experts: rows sorted by expert, each expert's by its own weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ndtp.compute.torch_calls import AutogradContext

if TYPE_CHECKING:
    from ndtp_kernels import Options

ALIGNMENT = 16  # bytes, of the rows of operands: what torch's grouped product asks for


@dataclass(frozen=True)
class Groups:
    """The number of rows of each expert and, on a device, the row at which each expert begins."""

    sizes: tuple[int, ...]
    device: torch.device

    @cached_property
    def offsets(self) -> Tensor:
        """int32 [experts + 1], made once for all products of a step."""
        # From memory that is not pinned, a copy would hold the host until all before it is done.
        pinned = self.device.type == "cuda"
        numbers = list(accumulate(self.sizes, initial=0))
        starts = torch.tensor(numbers, dtype=torch.int32, pin_memory=pinned, device="cpu")
        return starts.to(self.device, non_blocking=pinned)

    def of(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Each expert's rows."""
        return rows.split(list(self.sizes))


@dataclass(frozen=True)
class DeviceGroups:
    """Groups whose sizes only the device knows; behind those of the last expert there may be rows of no expert.

    Products of rows of no expert are zeros.

    Attributes:
        offsets: int32 [experts + 1], the row at which each expert begins.
    """

    offsets: Tensor
    sizes: None = None

    def inside(self, expert: int, rows: int) -> Tensor:
        """Return which of so many rows are an expert's, as [rows, 1]."""
        number = torch.arange(rows, device=self.offsets.device)
        return ((number >= self.offsets[expert]) & (number < self.offsets[expert + 1])).unsqueeze(1)

    def without_rest(self, x: Tensor) -> Tensor:
        """Return x with zeros, in place, in the rows of no expert."""
        number = torch.arange(x.shape[0], device=x.device)
        return x.masked_fill_((number >= self.offsets[-1]).unsqueeze(1), 0)


AnyGroups = Groups | DeviceGroups


def grouped_product(x: Tensor, weights: Tensor, groups: AnyGroups | Sequence[int], gemm: object = None) -> Tensor:
    """`y[i] = x[i] W_e^T` for the rows i of each expert e.

        x        [sum(sizes), K]     rows sorted by expert
        weights  [experts, N, K]
        returns  [sum(sizes), N]

    The weight of an expert without rows has a gradient of zeros.

    Args:
        groups: or the sizes alone, of rows on the device of x.  With `DeviceGroups` nothing waits for the device.
        gemm: what multiplies, of `ndtp.compute.gemm`; default: torch.
    """
    if not isinstance(groups, AnyGroups):
        groups = Groups(tuple(groups), x.device)
    by = TorchGrouped() if gemm is None else gemm
    result: Tensor = _Grouped.apply(x, weights, groups, by)  # type: ignore[no-untyped-call]
    return result


def tally(x: Tensor, values: int) -> Tensor:
    """Count how often each of 0 to values - 1 occurs in x, as [values].

    A `bincount` would ask the device for the largest number first, and wait for it.
    """
    x = x.flatten()
    return x.new_zeros(values).scatter_add_(0, x, x.new_ones(()).expand_as(x))


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weights: Tensor, groups: AnyGroups, gemm: TorchGrouped) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.groups, ctx.gemm = groups, gemm
        return gemm.grouped(x, weights.mT, groups)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weights = ctx.saved_tensors
        wants_x, wants_weights, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        return (
            ctx.gemm.grouped(grad, weights, ctx.groups) if wants_x else None,
            ctx.gemm.grouped_outer(grad, x, ctx.groups) if wants_weights else None,
            None,
            None,
        )


class TorchGrouped:
    """torch's grouped product where a device has it (bf16 on a GPU), else a loop over experts."""

    def grouped(self, x: Tensor, b: Tensor, groups: AnyGroups) -> Tensor:
        """Multiply [rows, K] by [experts, K, N] to [rows, N], each expert's rows by its matrix."""
        return multiplied(x, b, groups)

    def grouped_outer(self, grad: Tensor, x: Tensor, groups: AnyGroups) -> Tensor:
        """Multiply [rows, N] and [rows, K] to [experts, N, K]: `grad^T x` of each expert's rows, zeros where an
        expert has no row.
        """
        return outer(grad, x, groups)


class KernelGrouped(TorchGrouped):
    """`ndtp_kernels.grouped_gemm`: of its kernel and torch's grouped product what its table, or its model, prefers.

    Which is faster was not measured.  On CPUs a loop over experts, as without kernels.
    """

    options: Options

    def _takes(self, x: Tensor) -> bool:
        return x.dtype is not torch.float64 and (x.is_cuda or self.options.backend != "auto")

    def grouped(self, x: Tensor, b: Tensor, groups: AnyGroups) -> Tensor:
        import ndtp_kernels

        if not self._takes(x):
            return super().grouped(x, b, groups)
        options = self._options(x, b, groups)
        y = ndtp_kernels.grouped_gemm(x, b, groups.offsets, sizes=groups.sizes, options=options)
        return groups.without_rest(y) if isinstance(groups, DeviceGroups) else y

    def grouped_outer(self, grad: Tensor, x: Tensor, groups: AnyGroups) -> Tensor:
        import ndtp_kernels

        if not self._takes(x):
            return super().grouped_outer(grad, x, groups)
        options = self._options(grad, x, groups)
        return ndtp_kernels.grouped_wgrad(grad, x, groups.offsets, sizes=groups.sizes, options=options)

    def _options(self, a: Tensor, b: Tensor, groups: AnyGroups) -> Options:
        """Return the options of a product: by the kernel, where torch would ask the device for sizes."""
        asks = isinstance(groups, DeviceGroups) and not _fused(a, b)
        return replace(self.options, backend="triton") if asks else self.options


def multiplied(x: Tensor, b: Tensor, groups: AnyGroups) -> Tensor:
    """Multiply [rows, K] by [experts, K, N] to [rows, N], differentiably."""
    if isinstance(groups, DeviceGroups):
        return _multiplied_unread(x, b, groups)
    if _fused(x, b):
        return torch._grouped_mm(x, b, offs=groups.offsets[1:])
    result = x.new_empty((x.shape[0], b.shape[2]))
    for rows, one, out in zip(groups.of(x), b.unbind(), groups.of(result), strict=True):
        if rows.shape[0]:
            torch.mm(rows, one, out=out)
    return result


def _multiplied_unread(x: Tensor, b: Tensor, groups: DeviceGroups) -> Tensor:
    """Multiply without a look at the sizes: in one call where torch has it, else all rows by each matrix."""
    if _fused(x, b) or _fused_on_host(x, b):
        return groups.without_rest(_in_one_call(x, b, groups, (x.shape[0], b.shape[2])))
    result = x.new_zeros((x.shape[0], b.shape[2]))
    for expert, one in enumerate(b.unbind()):
        result = torch.where(groups.inside(expert, len(x)), x @ one, result)
    return result


def outer(grad: Tensor, x: Tensor, groups: AnyGroups) -> Tensor:
    """Multiply [rows, N] and [rows, K] to [experts, N, K], the outer product of each expert's rows."""
    if isinstance(groups, DeviceGroups):
        return _outer_unread(grad, x, groups)
    if _fused(grad, x):
        result = torch._grouped_mm(grad.mT, x, offs=groups.offsets[1:])
        for out, size in zip(result.unbind(), groups.sizes, strict=True):
            if not size:
                out.zero_()  # a product over nothing: nobody promises what is in it
        return result
    result = x.new_empty((len(groups.sizes), grad.shape[1], x.shape[1]))
    for of_grad, rows, out in zip(groups.of(grad), groups.of(x), result.unbind(), strict=True):
        if rows.shape[0]:
            torch.mm(of_grad.mT, rows, out=out)
        else:
            out.zero_()
    return result


def _outer_unread(grad: Tensor, x: Tensor, groups: DeviceGroups) -> Tensor:
    """Multiply without a look at the sizes: in one call where torch has it, else all rows for each expert."""
    starts = groups.offsets
    shape = (len(starts) - 1, grad.shape[1], x.shape[1])
    if _fused(grad, x) or _fused_on_host(grad, x):
        result = _in_one_call(grad.mT, x, groups, shape)
        return result.masked_fill_((starts[1:] == starts[:-1])[:, None, None], 0)
    result = x.new_empty(shape)
    for expert, out in enumerate(result.unbind()):
        others = ~groups.inside(expert, len(x))
        torch.mm(grad.masked_fill(others, 0).mT, x.masked_fill(others, 0), out=out)
    return result


def _in_one_call(a: Tensor, b: Tensor, groups: DeviceGroups, shape: tuple[int, ...]) -> Tensor:
    """Multiply by torch's grouped product, which takes fewer dtypes on the meta device than on those with memory."""
    return a.new_empty(shape) if a.is_meta else torch._grouped_mm(a, b, offs=groups.offsets[1:])


def _fused(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and a.dtype == torch.bfloat16 and _is_aligned(a, b)


def _fused_on_host(a: Tensor, b: Tensor) -> bool:
    """Return whether torch has one call on CPUs: a loop that reads the sizes where they lie."""
    return a.device.type in ("cpu", "meta") and a.dtype != torch.float64 and _is_aligned(a, b)


def _is_aligned(a: Tensor, b: Tensor) -> bool:
    strides = (a.shape[-1], *b.shape[-1 if b.dim() == 2 else -2 :])  # how many rows there are does not matter
    return all(stride * a.element_size() % ALIGNMENT == 0 for stride in strides) and a.shape[0] > 0
