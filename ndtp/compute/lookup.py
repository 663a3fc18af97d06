"""Rows of a table of which one rank has a part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rows_of(table: Tensor, ids: Tensor, start: int, padding_idx: int | None) -> Tensor:
    """Look up [ids, features] in the part of the table that begins at row `start`; rows of other ranks give zeros.

    Args:
        padding_idx: the row of the whole table that gets no gradient.
    """
    rows = table.shape[0]
    local = ids - start
    is_here = (local >= 0) & (local < rows)
    padding = None if padding_idx is None or not 0 <= padding_idx - start < rows else padding_idx - start
    found = F.embedding(torch.where(is_here, local, 0), table, padding)
    return found * is_here[:, None].to(found.dtype)
