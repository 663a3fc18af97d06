"""Weights that have queries, keys and values in one: in which order, and what of them a rank has.

The order is in the code that takes the result apart, and it is a function of how many heads there are.  On a rank that
code sees the heads of the rank alone: so its rows are that function of its own heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ndtp.compute.constants import numbers_on
from ndtp.split.moving import section_order

QUARTERS = 4


def heads_in_order(kind: str, heads: int, kv_heads: int) -> list[int] | None:
    """Numbers of heads, those of q before those of k and v, as a weight has them; None where its code forbids them.

    Args:
        kind: "sections": q of all heads, k, v; "groups": the queries of one key head, that, its v, then the next group;
            "quarters": of each quarter of the heads q, v, k.
    """
    q, k, v = (range(n, n + size) for n, size in ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)))
    if kind == "sections":
        return [*q, *k, *v]
    if heads % kv_heads:
        return None
    if kind == "groups":
        group = heads // kv_heads
        return [h for i in range(kv_heads) for h in (*q[i * group : (i + 1) * group], k[i], v[i])]
    assert kind == "quarters"
    size = heads // QUARTERS
    if heads % QUARTERS or kv_heads != heads:
        return None
    return [h for i in range(QUARTERS) for part in (q, v, k) for h in part[i * size : (i + 1) * size]]


def rows_in_order(kind: str, heads: int, kv_heads: int, head_dim: int, splits: int) -> Tensor | None:
    """Rows of the weight, so that each rank along the axes that split them has its heads as its code wants them.

    Where there are too few heads of k and v to split, a rank has q of its heads, then its part of the features of k and
    of v, which are gathered.  None where that is the order of the weight itself.
    """
    given = heads_in_order(kind, heads, kv_heads)
    assert given is not None
    at = {head: place for place, head in enumerate(given)}
    mine, kv = heads // splits, kv_heads * head_dim // splits
    features: list[tuple[int, int]] = []
    for part in range(splits):
        if kv_heads % splits:
            features += [(part * mine + head, f) for head in range(mine) for f in range(head_dim)]
            for first in (heads, heads + kv_heads):
                features += [(first + f // head_dim, f % head_dim) for f in range(part * kv, (part + 1) * kv)]
            continue
        few = kv_heads // splits
        own = [*range(part * mine, (part + 1) * mine)]
        own += [first + part * few + i for first in (heads, heads + kv_heads) for i in range(few)]
        local = heads_in_order(kind, mine, few)
        assert local is not None
        features += [(own[head], f) for head in local for f in range(head_dim)]
    order = torch.tensor([at[head] * head_dim + f for head, f in features], device="cpu")
    return None if torch.equal(order, torch.arange(len(order))) else order


def in_order(kind: str, parts: tuple[Tensor, Tensor, Tensor], head_dim: int) -> Tensor:
    """Return q, k and v [rows, features] of the heads that a rank has, in the order that the model's code wants."""
    y = torch.cat(parts, dim=1)
    heads, kv_heads = (part.shape[1] // head_dim for part in parts[:2])
    order = heads_in_order(kind, heads, kv_heads)
    assert order is not None
    return y if kind == "sections" else y.unflatten(1, (-1, head_dim))[:, numbers_on(order, y.device)].flatten(1)


def order_of(sections: Sequence[int], splits: int) -> Tensor | None:
    """Rows of a weight of several sections, so that each rank along the axes that split them has its part of each.

    One tensor for equal sections, which nobody may write to.
    """
    return section_order(tuple(sections), splits) if sections else None
