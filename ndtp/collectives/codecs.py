"""`Codec`: how numbers travel in fewer bytes than they are computed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]
_SCALE_BYTES = 4  # a scale is a number of fp32


@dataclass(frozen=True)
class Codec:
    """A dtype of the wire; where it has few values, each row (all of the last dim) travels with a scale of its own.

    A row that holds a NaN or an infinity arrives as NaN as a whole where it has a scale: nothing that is not finite is
    hidden.

    Attributes:
        dtype: of the elements on the wire.
        largest: the number that the largest of a row becomes; None: numbers travel unscaled.
    """

    name: str
    dtype: torch.dtype
    largest: float | None = None

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether tensors of a dtype travel in fewer bytes by it."""
        return dtype.is_floating_point and self.dtype.itemsize < dtype.itemsize

    def num_bytes(self, shape: Shape) -> int:
        """Bytes of a tensor on the wire, its scales included."""
        payload = math.prod(shape) * self.dtype.itemsize
        return payload if self.largest is None else _padded(payload) + _SCALE_BYTES * _rows(shape)

    def encode(self, x: Tensor, sent: Tensor) -> None:
        """Write a tensor into `sent`: bytes, `num_bytes` of them."""
        payload, scales = self._parts(sent, tuple(x.shape))
        x = x.detach()
        if scales is None or not x.numel():
            payload.copy_(x)
            return
        scale = x.abs().amax(-1, keepdim=True).float() / self.largest  # type: ignore[operator]
        scale = torch.where(scale == 0, 1.0, scale)
        scales.copy_(scale)
        x = x / scale
        payload.copy_(x if self.dtype.is_floating_point else x.round_())

    def decode(self, received: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The tensor of a shape that was written into bytes, in `dtype`."""
        payload, scales = self._parts(received, shape)
        return payload.to(dtype) if scales is None else payload.to(dtype) * scales

    def _parts(self, memory: Tensor, shape: Shape) -> tuple[Tensor, Tensor | None]:
        count = math.prod(shape) * self.dtype.itemsize
        payload = memory[:count].view(self.dtype).view(shape)
        if self.largest is None:
            return payload, None
        scales = memory[_padded(count) : self.num_bytes(shape)].view(torch.float32)
        return payload, scales.view(*shape[:-1], 1)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _SCALE_BYTES) * _SCALE_BYTES


def _rows(shape: Shape) -> int:
    return math.prod(shape[:-1])


CODECS = {
    codec.name: codec
    for codec in (
        Codec("bf16", torch.bfloat16),
        Codec("fp16", torch.float16),
        Codec("fp8_e4m3", torch.float8_e4m3fn, 448.0),
        Codec("fp8_e5m2", torch.float8_e5m2, 57344.0),
        Codec("int8", torch.int8, 127.0),
    )
}
