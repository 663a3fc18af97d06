"""The rows and dims of the whole that an operation on an activation concerns. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ndtp.models.frame import Passage


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def is_brought(passage: Passage, target: Passage) -> bool:
    """Return whether rows shared by several rows of another activation, as positions are, can be brought to lie so."""
    alike = ("frame", "features", "width", "sections")
    return passage.layout.dims[1] == target.layout.dims[1] and all(
        getattr(passage, key) == getattr(target, key) for key in alike
    )


def rows_of(rows: Tensor, lead: Sequence[int], passage: Passage) -> Tensor:
    """Rows of an operand with the leading dims `lead`, one for each of this rank."""
    if lead == (1,) * len(lead):
        return rows
    here = torch.arange(passage.rows_here.start, passage.rows_here.stop, device=rows.device)
    here = passage.index_of(here)
    index = torch.zeros_like(here)
    stride = math.prod(passage.lead)
    for size, wanted in zip(lead, passage.lead, strict=True):
        stride //= wanted
        position = here // stride % wanted
        index = index * size + (position if size > 1 else 0)
    return rows[index]


def are_all(ids: Tensor, passage: Passage) -> bool:
    """Return whether rows that are picked are all rows, in order: the host's own arithmetic, which no device sees."""
    with _disable_current_modes():
        return ids.shape == passage.lead and torch.equal(ids.flatten(), torch.arange(ids.numel(), device="cpu"))


def is_view(key: object) -> bool:
    """Return whether torch's `x[key]` is a view: a key of numbers and slices alone."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(
        k is None or k is Ellipsis or isinstance(k, slice) or (isinstance(k, Integral) and not isinstance(k, bool))
        or (isinstance(k, Tensor) and not k.dim() and k.dtype != torch.bool)
        for k in keys
    )  # fmt: skip


def picked_rows(passage: Passage, key: Any) -> Tensor | None:
    """Return the rows that `x[key]` picks, in the shape of the result and on the CPU; None where it picks anything
    else.
    """
    keys, dims = list(key) if isinstance(key, tuple) else [key], len(passage.shape)
    named = sum(k is not None and k is not Ellipsis for k in keys)
    if named > dims or any(isinstance(k, Tensor) and (k.dtype == torch.bool or hasattr(k, "passage")) for k in keys):
        return None
    if (Ellipsis in [k for k in keys if not isinstance(k, Tensor)] and keys[-1] is not Ellipsis) or named == dims:
        last = keys.pop()
        if not isinstance(last, slice) or last.indices(passage.features) != (0, passage.features, 1):
            return None
    here = (k.cpu() if isinstance(k, Tensor) and not k.is_meta else k for k in keys)
    ids = torch.arange(math.prod(passage.lead), device="cpu").view(passage.lead)[tuple(here)]
    return ids if ids.dim() else None
