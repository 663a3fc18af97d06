"""Numbers in 8 bits with a scale a row: how they are made, and `Quantised`, a tensor of them that products take."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def scaled_rows(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return numbers that are yet to be rounded to a dtype, whose largest is given, and the scale of each row in fp32.

    In fp32 at least: what a scale of fp16 would lose, or a row of bf16 would round before it is divided.
    """
    x = x if x.dtype == torch.float64 else x.float()
    # In two passes without a copy; a NaN is the largest and the smallest.
    most = torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())
    # Its quotient by the largest number must not be 0, nor must what is multiplied by it again overflow.
    scale = (most / largest).float().clamp_(min=torch.finfo(torch.float32).tiny)
    # Where a scale was rounded down, the largest is over by a part in 1e7, which every dtype rounds back.  What is
    # made of a NaN or an infinity does not matter: their scale tells.
    return x / scale, scale


def widened(x: Tensor) -> Tensor:
    """Return numbers in fp32.  On CPUs torch takes seven times as long for e4m3 as to look them up."""
    if x.dtype != torch.float8_e4m3fn or x.device.type != "cpu":
        return x.to(torch.float32)
    return _table().index_select(0, x.contiguous().view(torch.uint8).flatten().int()).view(x.shape)


@cache
def _table() -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


class Quantised(Tensor):
    """A tensor as it came: numbers in 8 bits, and a scale for each row of each block.

    payload  [.., rows, columns]    in an fp8 dtype
    scales   [.., rows, 1]          in fp32

    Products of `ndtp.compute.scaled_gemm` take both.  To everything else it is the tensor that it stands for, in
    `dtype`, which is made when it is asked for.
    """

    payload: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, payload: Tensor, scales: Tensor, dtype: torch.dtype) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=dtype, device=payload.device)
        made.payload, made.scales = payload, scales
        return made

    def wide(self) -> Tensor:
        """Return the tensor that it stands for."""
        found = self.payload.to(self.dtype) if self.dtype == torch.float64 else widened(self.payload)
        return found.mul_(self.scales).to(self.dtype)

    def joined(self) -> Quantised:
        """Return blocks [parts, rows, ..] as one behind the other, [parts rows, ..]."""
        return Quantised(self.payload.flatten(0, 1), self.scales.flatten(0, 1), self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Quantised({tuple(self.shape)}, {self.payload.dtype} for {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: TorchFunction, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if func is torch.ops.aten.detach.default:  # what autograd saves
            x = args[0]
            return Quantised(x.payload, x.scales, x.dtype)
        if func is torch.ops.aten.cat.default and _are_rows(*args):
            payload = torch.cat([x.payload.view(torch.uint8) for x in args[0]]).view(args[0][0].payload.dtype)
            return Quantised(payload, torch.cat([x.scales for x in args[0]]), args[0][0].dtype)
        wide = lambda x: x.wide() if isinstance(x, Quantised) else x  # noqa: E731
        return func(*torch.utils._pytree.tree_map(wide, args), **torch.utils._pytree.tree_map(wide, kwargs or {}))


def _are_rows(parts: Any, dim: int = 0) -> bool:
    """Return whether rows of one form are put behind one another."""
    forms = {(x.payload.dtype, x.dtype) if isinstance(x, Quantised) else None for x in parts}
    return dim == 0 and len(forms) == 1 and None not in forms
