"""`TokenRows`: what a router has to know of the tokens of other ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.compute.grouped import tally
from ndtp.errors import LayoutError
from ndtp.nn.random import draw_key, uniform_at
from ndtp.ops.experts import known_counts
from ndtp.ops.reductions import sum_over
from ndtp.runtime.process_grid import ProcessGrid


def capacity(tokens: int, experts: int, factor: float) -> int:
    """Rows that an expert takes at most of so many tokens: `tokens / experts * factor`, rounded up, at least one."""
    return max(1, math.ceil(tokens * factor / experts))


@dataclass(frozen=True)
class TokenRows:
    """The rows of a rank among those of all, whose blocks are equally large.

    Args:
        layout: [tokens, features] as the router takes them.
        here: the number of rows of this rank.
    """

    mesh: ProcessGrid
    layout: Layout
    here: int
    name: str

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split rows, major to minor."""
        return self.layout.grid.nontrivial(self.layout.dims[0])

    @property
    def blocks(self) -> int:
        return self.layout.grid.size(self.axes)

    @property
    def total(self) -> int:
        return self.here * self.blocks

    @property
    def first(self) -> int:
        """The index of this rank's first row among all."""
        return self.here * self.layout.grid.index(self.mesh.rank, self.axes)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a vector over the ranks that split rows; its gradient is that of one loss."""
        return sum_over(x, Layout(self.layout.grid, None), self.axes, self.mesh, self.name)

    def uniform(self, what: str, columns: int, device: torch.device) -> Tensor:
        """Return this rank's [rows, columns] of a uniform draw over all tokens in [0, 1), the same on every grid."""
        index = torch.arange(self.first, self.first + self.here, device=device)
        other = torch.arange(columns, device=device)
        return uniform_at((self.total, columns), (index, other), draw_key(f"{self.name}.{what}", device))

    def within_capacity(self, experts: Tensor, wanted: Tensor | None, count: int, factor: float, groups: int) -> Tensor:
        """Return the choices [rows, top_k] that find room at their expert: first choices before second, then by
        token.

        Args:
            wanted: choices that take part at all.
            count: of all experts.
            groups: into how many runs of tokens the batch falls, each with a capacity of its own.
        """
        rows, top_k = experts.shape
        size = self.group_size(groups)
        group = (torch.arange(rows, device=experts.device) + self.first) // size
        cells = groups * count
        cell = (group[:, None] * count + experts).t()  # [top_k, rows]: choice by choice
        if wanted is not None:
            cell = torch.where(wanted.t(), cell, cells)
        counts = torch.stack([tally(choice, cells + 1)[:cells] for choice in cell])
        local = torch.stack([_place_among_equal(choice, cells + 1) for choice in cell])
        before, whole = self._elsewhere(counts, groups)
        earlier = whole.cumsum(0) - whole  # what the choices before have taken
        offset = torch.cat([before + earlier, before.new_zeros(top_k, 1)], 1).gather(1, cell)
        fits = local + offset < capacity(size, count, factor)
        return (fits & (cell < cells)).t()

    def group_size(self, groups: int) -> int:
        """Return the number of tokens in a group.

        Raises:
            LayoutError: groups that do not divide the tokens.
        """
        if self.total % groups:
            raise LayoutError(
                f"Router '{self.name}': {self.total} tokens do not make {groups} groups of one size\n"
                f"  fix: groups={math.gcd(self.total, groups)}"
            )
        return self.total // groups

    def knows_groups(self, groups: int) -> bool:
        """Return whether each group has tokens of one rank only."""
        return groups % self.blocks == 0

    def _elsewhere(self, counts: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Return, of counts [top_k, cells], the sums over rows before this rank's, and over all rows."""
        if self.knows_groups(groups):
            return torch.zeros_like(counts), counts
        grid = self.layout.grid
        axes = tuple(axis for axis in grid.nontrivial(grid.names) if axis in self.axes)
        every = known_counts(counts.to(torch.int32).flatten(), axes, self.mesh, self.name).long()
        peers = grid.group(self.mesh.rank, axes)
        mine = grid.index(self.mesh.rank, self.axes)
        earlier = [i for i, peer in enumerate(peers) if grid.index(peer, self.axes) < mine]
        return every[earlier].sum(0).view_as(counts), every.sum(0).view_as(counts)


def _place_among_equal(x: Tensor, values: int) -> Tensor:
    """Return, for each element, how many equal elements come before it."""
    order = x.argsort(stable=True)
    counts = tally(x, values)
    starts = (counts.cumsum(0) - counts)[x[order]]
    place = torch.empty_like(x)
    place[order] = torch.arange(len(x), device=x.device) - starts
    return place
