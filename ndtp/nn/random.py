"""Draws that do not depend on the grid: every element of a global tensor has its own counter.

Philox2x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by a seed
and a name, counted by the global index.  A rank draws its own shard and nothing else; the integer arithmetic is
the same on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ndtp.runtime.region import key_of_step

MASK = 0xFFFFFFFF
MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
ROUNDS = 10


def key_of(seed: int, name: str) -> int:
    """A 32-bit key from a seed and the name of what is drawn."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest(), "little")


def philox(counter: Tensor, key: int | Tensor) -> Tensor:
    """32 random bits, as int64, for each 64-bit counter (int64), by a key or one in a tensor of its device."""
    low, high = counter & MASK, (counter >> 32) & MASK
    for _ in range(ROUNDS):
        product = low * MULTIPLIER  # the low 64 bits; a signed shift is masked back to the high word
        low, high = ((product >> 32) & MASK) ^ key ^ high, product & MASK
        key = (key + WEYL) & MASK
    return low


def uniform(shape: Sequence[int], slices: Sequence[slice], key: int, device: torch.device | str) -> Tensor:
    """The part `slices` of a tensor of the global `shape`, uniform in [0, 1), float64, multiples of 2^-32."""
    return uniform_at(shape, [torch.arange(s.start, s.stop, dtype=torch.int64, device=device) for s in slices], key)


def uniform_at(shape: Sequence[int], indices: Sequence[Tensor], key: int | Tensor) -> Tensor:
    """`uniform` at the elements whose index along each dim is in `indices`."""
    index = torch.zeros((), dtype=torch.int64, device=indices[0].device)
    for size, along in zip(shape, indices, strict=True):
        index = index.unsqueeze(-1) * size + along
    return philox(index, key).double() * 2.0**-32


def draw_seed() -> int:
    """A seed from torch's default generator: the same on every rank that called `torch.manual_seed` alike."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


def draw_key(name: str, device: torch.device) -> int | Tensor:
    """A key of what is drawn anew in every call: a number, or a tensor where a CUDA graph is captured."""
    return key_of_step(lambda: key_of(draw_seed(), name), device)


def given_or_drawn(*seeds: int | None) -> int:
    """The first seed that is given, else one from `draw_seed`."""
    given = next((seed for seed in seeds if seed is not None), None)
    return draw_seed() if given is None else given
