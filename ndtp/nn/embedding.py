"""`Embedding`: `nn.Embedding` whose table is split over a grid, features over everything or as a head's weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.layout import Layout, default_mesh_axes
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.volume import Volume
from ndtp.errors import LayoutError
from ndtp.nn.padding import padded_to
from ndtp.nn.parameters import fill_normal
from ndtp.nn.random import given_or_drawn
from ndtp.nn.sharded import Sharded, memory_of, volume_of
from ndtp.ops.lookup import LookupPlan, look_up
from ndtp.ops.memory import Memory
from ndtp.runtime.arrival import local_shard
from ndtp.runtime.given_mesh import GivenWire
from ndtp.runtime.process_grid import ProcessGrid


class Embedding(Sharded):
    """`weight[ids]`, with the rows laid out as the hidden states of the layers behind it.

        ids      [tokens]  as `in_layout`             returns [tokens, features] as `out_layout`
        weight   [num_embeddings, embedding_dim]  as `weight_layout`

    The table's features are split over all axes of the scheme: each rank looks up its features of all rows, and one
    all-to-all brings these where they are wanted; the table's gradient takes no reduction but over axes such as dp.
    A `tied` one lies as the weight of a head, `ndtp.nn.Linear(embedding_dim, num_embeddings)` in the place of an "up":
    set `embedding.weight = head.weight`.  Then a rank finds rows of its part of the vocabulary, and they are summed.

    The same for learned positions: `positions(position_ids)` is added to the rows of tokens.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as for `nn.Embedding`.
        mesh: the process grid.
        scheme: the named scheme of the blocks behind it, whose input the rows are.
        axes: the axes that the scheme uses.
        out_layout: the layout of the rows instead of a scheme; with `tied`, give `weight_layout` too.
        in_layout: of the ids.  Default: whole on every rank, but for axes such as dp, which split them as the rows.
        weight_layout: of the table, [V, K].
        tied: the layout of a head's weight.
        pad: store a table that does not divide padded with zero rows and features; the rows returned are padded then.
        checks: look at the ids before they are used: one that is out of range is an error on every rank, not on the
            one that met it.  It waits for the device; one number is summed over axes such as dp.
        wire: as for `ndtp.nn.Linear`; ids travel as they are.
        seed: default: drawn from torch's generator, which must be seeded alike on every rank.
        name: what errors, profiles and the initialisation call it.

    Raises:
        LayoutError: sizes that do not divide.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: ProcessGrid,
        scheme: str = "3d",
        axes: Sequence[str] | None = None,
        in_layout: Layout | None = None,
        out_layout: Layout | None = None,
        weight_layout: Layout | None = None,
        tied: bool = False,
        pad: bool = False,
        checks: bool = True,
        wire: GivenWire = None,
        seed: int | None = None,
        name: str = "embedding",
    ) -> None:
        super().__init__(mesh, seed, name, wire)
        if tied and out_layout is not None and weight_layout is None:
            raise LayoutError(f"Embedding '{name}': with tied=True and out_layout, give the head's weight_layout")
        named = None if out_layout is not None else block_layouts(mesh.grid, scheme, axes)
        out = out_layout or named.input  # type: ignore[union-attr]
        data = _data_axes(named.input.dims, named.up_weight.dims) if named else in_layout.dims[0] if in_layout else ()
        rows = in_layout or Layout(mesh.grid, data)
        if weight_layout is None:
            weight_layout = named.up_weight if tied and named else _over_everything(out, data, mesh)
        self.plan = LookupPlan(rows, weight_layout, out, name)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise LayoutError(f"Embedding '{name}': padding_idx={padding_idx} is none of {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim, self.checks = num_embeddings, embedding_dim, checks
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        real = (num_embeddings, embedding_dim)
        shape = weight_layout.padded_shape(real)
        shape = (shape[0], padded_to(shape[1], out.num_splits(1)))
        if shape != real and not pad:
            raise LayoutError(
                f"Embedding '{name}': a table {real} lies as [{weight_layout.label('VK')}], and its axes do not divide "
                f"it\n  fix: pad=True, or a table {shape}"
            )
        self.padded_dim = shape[1]
        self.add("weight", real, weight_layout, device, dtype, shape)
        if not self.weight.is_meta:
            self.reset_parameters()

    @property
    def in_layout(self) -> Layout:
        """The layout of the ids, [tokens]."""
        return self.plan.ids

    @property
    def weight_layout(self) -> Layout:
        return self.plan.table

    @property
    def out_layout(self) -> Layout:
        """The layout of the [tokens, features] rows that it returns."""
        return self.plan.out

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the table from N(0, 1), the same values on every grid; the row of `padding_idx` is zero."""
        lies, seed = self.lies["weight"], given_or_drawn(seed, self.seed)
        fill_normal(self.weight, lies.layout, self.mesh, lies.real, seed, f"{self.name}.weight")
        if self.padding_idx is not None:
            part = lies.layout.slices(self.mesh.rank, lies.shape)[0]
            if part.start <= self.padding_idx < part.stop:
                with torch.no_grad():
                    local_shard(self.weight)[self.padding_idx - part.start] = 0

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of this rank, [rows, features].

        Args:
            ids: this rank's shard, of any shape: leading dims are rows, in their order.
        """
        weight = self.needed("weight", self.weight if ids.is_meta else ids)
        return look_up(ids.flatten(), weight, self.plan, self.mesh, self.num_embeddings, self.padding_idx, self.checks)

    def volume(self, tokens: int) -> Volume:
        """The exact traffic of a forward and backward of `tokens` ids, in bytes received per rank."""
        ids = torch.empty(self.in_layout.shard_shape((tokens,)), dtype=torch.long, device="meta")
        return volume_of(self, self.mesh, (ids,))

    def memory(self, tokens: int, backend: str | None = None) -> Memory:
        """Bytes that a forward and backward of `tokens` ids need beside these and the table; see `ndtp.ops.memory`."""
        ids = torch.empty(self.in_layout.shard_shape((tokens,)), dtype=torch.long, device="meta")
        return memory_of(self, self.mesh, (ids,), self.out_layout.shard_shape((tokens, self.padded_dim)), backend)

    @classmethod
    def from_dense(cls, dense: nn.Embedding, *, mesh: ProcessGrid, **arguments: Any) -> Embedding:
        """Make an embedding with the weights of an `nn.Embedding`; further arguments are the constructor's.

        Raises:
            LayoutError: options that a split table does not have: `max_norm`, `scale_grad_by_freq`, `sparse`.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(dense, option, None):
                raise LayoutError(f"Embedding.from_dense: {option}={getattr(dense, option)} is not there on a grid")
        arguments = {"device": dense.weight.device, "dtype": dense.weight.dtype, "seed": 0, **arguments}
        module = cls(dense.num_embeddings, dense.embedding_dim, dense.padding_idx, mesh=mesh, **arguments)
        module.take_over("weight", dense.weight)
        return module

    def to_dense(self) -> nn.Embedding:
        """An `nn.Embedding` with the same values, on every rank; a collective."""
        dense = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        dense.weight = self.dense("weight")
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, [{self.weight_layout.label('VK')}]"


def _data_axes(rows: Sequence[tuple[str, ...]], weight: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The axes that split rows and no weight: those of data parallelism."""
    used = {axis for axes in weight for axis in axes}
    return tuple(axis for axis in rows[0] if axis not in used)


def _over_everything(out: Layout, data: Sequence[str], mesh: ProcessGrid) -> Layout:
    """Features over the axes that split them behind the table, and over all others but those of data parallelism."""
    features = out.dims[1]
    others = (axis for axis in default_mesh_axes(mesh.grid) if axis not in features and axis not in data)
    return Layout(mesh.grid, None, (*features, *others))
