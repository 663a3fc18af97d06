"""`Codec`: how numbers travel in fewer bytes than they are computed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ndtp.algebra.wire import FORMATS, Format
from ndtp.compute.quantised import LARGEST, Quantised, scaled_rows, widened

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Codec:
    """A dtype of the wire; where it has few values, each row (all of the last dim) travels with a scale of its own.

    A row that holds a NaN or an infinity arrives as NaN as a whole where it has a scale: nothing that is not finite is
    hidden.  Of a tensor the numbers come first, then the scales.

    Attributes:
        dtype: of the elements on the wire.
        largest: the number that the largest of a row becomes; None: numbers travel unscaled.
    """

    form: Format
    dtype: torch.dtype
    largest: float | None = None

    def num_bytes(self, shape: Shape) -> int:
        """Bytes of a tensor on the wire, its scales included."""
        return self.form.num_bytes(shape)

    def encode(self, x: Tensor, sent: Tensor) -> None:
        """Write a tensor into `sent`: bytes, `num_bytes` of them."""
        payload, scales = self._parts(sent, tuple(x.shape))
        x = x.detach()
        if self.largest is None:
            payload.copy_(x)
            return
        if not x.numel():
            scales.zero_()
            return
        quantised, scale = self.quantised(x)
        payload.copy_(quantised)
        scales.copy_(scale.flatten().view(torch.uint8))

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers that are yet to be rounded to the dtype, or are integers, and the scale of each row."""
        assert self.largest is not None
        x, scale = scaled_rows(x, self.largest)
        return (x if self.dtype.is_floating_point else x.round_()), scale

    def as_it_came(self, received: Tensor, shape: Shape, dtype: torch.dtype) -> Quantised:
        """Return the parts of a shape that were written into rows of bytes, as blocks [parts, ..] for products of fp8.

        In memory of their own: that of what was received is lent again.
        """
        cut, order = math.prod(shape) * self.dtype.itemsize, torch.contiguous_format
        payload = received[:, :cut].clone(memory_format=order).view(self.dtype).view(-1, *shape)
        scales = received[:, cut:].clone(memory_format=order).view(torch.float32).view(-1, *shape[:-1], 1)
        return Quantised(payload, scales, dtype)

    def decode(self, received: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The tensor of a shape that was written into bytes, in `dtype`."""
        payload, scales = self._parts(received, shape)
        if self.largest is None or not payload.numel():
            return payload.to(dtype)
        scale = scales.clone().view(torch.float32).view(*shape[:-1], 1)  # those bytes may lie at any address
        if dtype == torch.float64:
            return payload.to(dtype) * scale
        return widened(payload).mul_(scale).to(dtype)

    def encode_rows(self, x: Tensor) -> Tensor:
        """Return rows [rows, width] as bytes [rows, ..]: the numbers of each, and its scale behind them."""
        if not x.numel():
            return x.new_zeros(x.shape[0], self.num_bytes((1, x.shape[1])), dtype=torch.uint8)
        if self.largest is None:
            return x.to(self.dtype).view(torch.uint8)
        quantised, scale = self.quantised(x)
        return torch.cat([quantised.to(self.dtype).view(torch.uint8), scale.view(torch.uint8)], 1)

    def decode_rows(self, received: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The rows [rows, width] that were written into bytes, in `dtype`."""
        if not received.shape[0] or not width:
            return received.new_zeros(received.shape[0], width, dtype=dtype)
        if self.largest is None:
            return received.view(self.dtype).to(dtype)
        cut, order = width * self.dtype.itemsize, torch.contiguous_format
        numbers = received[:, :cut].clone(memory_format=order).view(self.dtype)
        scale = received[:, cut:].clone(memory_format=order).view(torch.float32)
        wide = numbers.to(dtype) if dtype == torch.float64 else widened(numbers)
        return wide.mul_(scale).to(dtype)

    def _parts(self, memory: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        count = math.prod(shape) * self.dtype.itemsize
        return memory[:count].view(self.dtype).view(shape), memory[count : self.num_bytes(shape)]


CODECS = {
    name: Codec(FORMATS[name], dtype, LARGEST.get(dtype))
    for name, dtype in (
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
        ("int8", torch.int8),
    )
}
