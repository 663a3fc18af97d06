"""A product (`Problem`) and the way it runs (`Config`): plain values, on which alone a choice depends."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Config:
    """The tile sizes and options with which a GEMM runs.

    kernel: "tma"; "pointer"; or "torch" for the vendor's library through torch.
    """

    kernel: str = "pointer"
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_stages: int = 3
    num_warps: int = 8
    group_m: int = 8
    split_k: int = 1
    subtile: int = 1
    warp_specialize: bool = False
    ctas_per_sm: int = 1

    def __str__(self) -> str:
        if self.kernel == "torch":
            return "torch"
        extra = f" split {self.split_k}" * (self.split_k > 1) + " warp-specialized" * self.warp_specialize
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{self.kernel} {tile} stages {self.num_stages} warps {self.num_warps}{extra}"

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def code(self) -> str:
        """All fields as text without spaces; `from_code` reads it."""
        numbers = (self.block_m, self.block_n, self.block_k, self.num_stages, self.num_warps, self.group_m)
        rest = (self.split_k, self.subtile, int(self.warp_specialize), self.ctas_per_sm)
        return ",".join([self.kernel, *[str(number) for number in numbers + rest]])

    @classmethod
    def from_code(cls, text: str) -> Config:
        parsed: dict[str, Any] = {}
        for known, value in zip(fields(cls), text.split(","), strict=True):
            if known.name == "kernel":
                parsed[known.name] = value
            else:
                parsed[known.name] = value == "1" if known.name == "warp_specialize" else int(value)
        return cls(**parsed)


TORCH = Config(kernel="torch")


@dataclass(frozen=True)
class Problem:
    """All that the choice of a configuration depends on."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"  # of the operands
    batch: int = 1
    out_bytes: int = 2
    # plain, blocks (of an operand, nothing else), epilogue, backward, wgrad; of experts, with m or k the mean of theirs
    # and `batch` how many: grouped, grouped_dgrad, grouped_wgrad
    kind: str = "plain"
    layout: str = "nt"  # A then B: n = contiguous along the second letter (k of A, n of B), t = along the first
    tma: bool = True  # strides and alignment allow tensor descriptors
    blocks: tuple[int, int, int] = (0, 0, 0)  # a tile of a TMA kernel may not cross these multiples of m, n, k
    torch_launches: int = 1  # that torch needs for its product
    torch_passes: int = 0  # passes over C that torch needs after its product
    epilogue_bytes: int = 0  # that the fused epilogue reads and writes, per element of C
    copied_elements: int = 0  # that torch moves to join or cut blocks
    sms_to_leave: int = 0

    @property
    def shape_class(self) -> str:
        """Products of one class share a table entry: sizes are rounded up to two significant bits."""
        sizes = " ".join(str(bucket(x)) for x in (self.m, self.n, self.k))
        batch = f" batch {bucket(self.batch)}" if self.batch > 1 else ""
        return f"{self.kind} {self.layout} {sizes}{batch}"


def bucket(size: int) -> int:
    """The smallest of 4, 5, 6, 7 times a power of two that is >= size."""
    if size <= 8:
        return size
    unit = 1 << ((size - 1).bit_length() - 3)
    return -(-size // unit) * unit
