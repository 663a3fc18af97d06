"""Gains and biases of norms whose rows are whole: those that are split are gathered, all of a model at once.

A forward needs the gain of each norm.  The first norm of a forward asks for its own and gets those of all norms that
asked in the last one, by one all-reduce.  They hold for that forward alone, and as long as nobody writes to the
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.steps import Step
from ndtp.compute.constants import zeros_on
from ndtp.models.settled import Use, now_of
from ndtp.ops.moving import way_of
from ndtp.runtime.grid_like import GridLike


class Gains:
    """The whole gains of one model; a copy of the model begins without any.

    Args:
        mesh: on which they lie.
    """

    def __init__(self, mesh: GridLike) -> None:
        self._mesh = mesh
        self._asked: dict[int, tuple[Use, Layout]] = {}
        self._found: dict[int, tuple[Tensor, Any, Tensor]] = {}

    def begin(self) -> None:
        """Begin a forward of the model."""
        self._found.clear()

    def of(self, use: Use, layout: Layout, is_in_forward: bool) -> Tensor | None:
        """Return a gain or bias as a whole, padding included.

        Args:
            use: of the parameter, which stands.
            layout: in which it lies, [features].
            is_in_forward: whether the model runs; else nothing is kept.
        """
        shard, parameter = use.local, use.parameter
        if shard is None or parameter is None:
            return None
        if not is_in_forward:
            return self._gathered([shard], layout)[0]
        key = id(use)
        found = self._found.get(key)
        if found is None or found[0] is not shard or found[1] != now_of(parameter):
            self._asked[key] = use, layout
            alike = {k: u for k, (u, lies) in self._asked.items() if lies == layout and k not in self._found}
            stand = {k: u for k, u in alike.items() if u.stands() and _is_like(u.local, shard)} | {key: use}
            for gone in alike.keys() - stand.keys():
                del self._asked[gone]
            shards: list[Any] = [each.local for each in stand.values()]
            for k, gain, x in zip(stand, self._gathered(shards, layout), shards, strict=True):
                self._found[k] = x, now_of(stand[k].parameter), gain  # type: ignore[arg-type]
        return self._found[key][2]

    def _gathered(self, shards: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Return the whole of each shard: what a rank has stands at its place in zeros, which are summed."""
        mesh, count, like = self._mesh, layout.num_splits(0), shards[0]
        index, axes = mesh.grid.index(mesh.rank, layout.dims[0]), mesh.grid.nontrivial(layout.dims[0])
        sizes = [shard.numel() for shard in shards]
        zeros = {n: [zeros_on((k * n,), like.device, like.dtype) for k in (index, count - 1 - index)] for n in {*sizes}}
        parts = [x for n, shard in zip(sizes, shards, strict=True) for x in (zeros[n][0], shard.detach(), zeros[n][1])]
        order = tuple(axis for axis in mesh.grid.names if axis in axes)
        y = torch.cat(parts)
        y = way_of(y, (Step("all_reduce", order),), mesh, "gains", "forward").carried(y, is_own=True)
        return list(y.split([count * size for size in sizes]))

    def __deepcopy__(self, memo: object) -> Gains:
        return Gains(self._mesh)


def _is_like(x: Tensor | None, other: Tensor) -> bool:
    return x is not None and x.dtype == other.dtype and x.device == other.device
