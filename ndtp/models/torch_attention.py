"""`nn.MultiheadAttention` on a grid: heads and whole sequences of a rank, between two products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import BlockLayouts
from ndtp.compute.attention import attention_weights
from ndtp.errors import LayoutError
from ndtp.models.adopted import Adopted, adopt, as_projection_input
from ndtp.models.frame import Frame, Passage
from ndtp.models.fused_order import order_of
from ndtp.models.hidden import Hidden, enter, leave
from ndtp.models.projections import Projection, place_projection, products, used_and_stored
from ndtp.nn.attention_dropout import AttentionDropout
from ndtp.nn.padding import RowBlocks
from ndtp.ops.products import chain, relayout
from ndtp.runtime.arrival import local_shard


class SplitMultihead(Adopted, nn.MultiheadAttention):
    """Takes hidden states [batch, length, features] that are split, and gives such.

    Attributes:
        plan: of queries, keys and values, whose weight is `stored` as torch has it: one behind the other.
    """

    plan: MatMulPlan
    stored: Layout
    width: int

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch does
        sources = [as_projection_input(x, self.frame, self.plan, self.width, self.name) for x in (query, key, value)]
        sources[1] = sources[0] if key is query else sources[1]
        sources[2] = sources[1] if value is key else sources[0] if value is query else sources[2]
        q, k, v = self._projected(sources)
        passage, inner = sources[0].passage, self.plan.out
        batch, length, keys = *passage.lead, sources[1].passage.lead[1]
        q, k, v = (
            t.unflatten(0, (-1, size)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t, size in ((q, length), (k, keys), (v, keys))
        )
        mask = self._mask(attn_mask, key_padding_mask, batch, (length, keys), q)
        drop = AttentionDropout.of(self.dropout if self.training else 0.0, q.device)
        weights = None
        if need_weights or drop is not None:
            weights = attention_weights(q, k, None, mask)
            blocks = RowBlocks(batch or 1, passage.rows // max(length, 1) or 1)
            dropped = weights if drop is None else drop.of_shard(weights, inner, self.frame.mesh, blocks)
            y = dropped @ v
            weights = self._whole_weights(dropped, batch, average_attn_weights) if need_weights else None
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        rows = y.transpose(1, 2).flatten(0, 1).flatten(1)
        features = self.embed_dim
        given = Passage(self.frame, inner, passage.lead, passage.rows, features, features, came_from=self.name)
        out: Any = self.out_proj
        (made,) = products([out], enter(rows.contiguous(), given))
        return out.as_given(made, given), weights

    def _projected(self, sources: Sequence[Hidden]) -> list[Tensor]:
        """Return queries, keys and values [rows, features / y]; those of one input are one product."""
        weight, bias = self._brought(leave(sources[0]))
        found: dict[int, Tensor] = {}
        for source in {id(x): x for x in sources}.values():
            mine = [i for i, x in enumerate(sources) if x is source]
            own = [None if p is None else self._some(p, mine) for p in (weight, bias)]
            assert own[0] is not None
            y = chain(leave(source), (own[0],), (own[1],), (self.plan,), (None,), self.mesh)
            found |= dict(zip(mine, y.chunk(len(mine), 1), strict=True))
        return [found[i] for i in range(3)]

    def _some(self, p: Tensor, which: Sequence[int]) -> Tensor:
        """Return the rows of weight or bias of some of queries, keys and values."""
        if len(which) == 3:
            return p
        parts = self.plan.out.num_splits(1) // self.plan.b.num_splits(0)
        return p.unflatten(0, (parts, 3, -1))[:, list(which)].flatten(0, 2)

    def _brought(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        mesh, splits = self.mesh, self.plan.out.num_splits(1)
        weight, bias = self.needed("in_proj_weight", rows), self.own("in_proj_bias", rows)
        order: Any = order_of((self.embed_dim,) * 3, splits)
        order = order.to(weight.device)
        shard = local_shard(weight)[order]
        shard = relayout(shard, self.stored, self.plan.b, mesh, f"{self.name}.in_proj_weight", kind="weights")
        if bias is None:
            return shard, None
        one = Layout(mesh.grid, None)
        return shard, relayout(local_shard(bias)[order], one, self.plan.bias, mesh, f"{self.name}.in_proj_bias")

    def _mask(
        self, given: Tensor | None, padding: Tensor | None, batch: int, sizes: tuple[int, int], like: Tensor
    ) -> Tensor | None:
        """Return this rank's mask [sequences or 1, heads or 1, length or 1, keys], added to scores; torch's True
        does not see.
        """
        here, heads = like.shape[:2]
        mask = None
        if given is not None:
            mask = _added(given, like.dtype)
            if mask.dim() == 3 and mask.shape == (batch * self.num_heads, *sizes):
                part = self.mesh.grid.index(self.mesh.rank, self.plan.out.dims[1])
                mask = mask.unflatten(0, (batch, self.num_heads))[:, part * heads : (part + 1) * heads]
                mask = self._cut(mask, here)
            elif mask.shape == sizes:
                mask = mask[None, None]
            else:
                raise LayoutError(
                    f"MultiheadAttention '{self.name}': attn_mask is {tuple(given.shape)}; it is {sizes} or "
                    f"{(batch * self.num_heads, *sizes)}"
                )
        if padding is not None:
            if tuple(padding.shape) != (batch, sizes[1]):
                raise LayoutError(
                    f"MultiheadAttention '{self.name}': key_padding_mask is {tuple(padding.shape)}; it is "
                    f"{(batch, sizes[1])}"
                )
            padded = self._cut(_added(padding, like.dtype), here)[:, None, None]
            mask = padded if mask is None else mask + padded
        return mask

    def _cut(self, x: Tensor, here: int) -> Tensor:
        """Return the sequences of this rank of [batch, ..]; padding's sequences see everything."""
        frame = self.frame
        inner = self.plan.out.dims[0][len(frame.outside.dims[0]) :]
        first = frame.mesh.grid.index(frame.mesh.rank, inner) * here
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, frame.padded(x.shape[0]) - x.shape[0]))
        return x[first : first + here]

    def _whole_weights(self, weights: Tensor, batch: int, averages: bool) -> Tensor:
        """Return [batch, length, keys] or [batch, heads, length, keys] on every rank, for the rows of its dp rank."""
        frame, inner, sizes = self.frame, self.plan.out, weights.shape[2:]
        name = f"{self.name} weights"
        if averages:
            mine = (weights.sum(1) / self.num_heads).flatten(1)
            held = inner.with_dims(inner.dims[0], None)
            axes = frame.mesh.grid.nontrivial(inner.dims[1])
            both = relayout(mine, held, frame.outside, frame.mesh, name, partial=axes)
            return both[:batch].unflatten(1, sizes)
        both = relayout(weights.flatten(1), inner, frame.outside, frame.mesh, name)
        return both[:batch].unflatten(1, (self.num_heads, *sizes))


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers that are added to scores, from numbers or from booleans, whose True does not see."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def reason_against(module: nn.MultiheadAttention, layouts: BlockLayouts) -> str | None:
    """Return the reason why an attention stays whole, if there is one."""
    if type(module) is not nn.MultiheadAttention:
        return "its class is not torch's own"
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        return "kdim, vdim, add_bias_kv and add_zero_attn are not there on a grid"
    splits = layouts.hidden.num_splits(1)
    if module.num_heads % splits or module.embed_dim % layouts.down_weight.num_splits(1):
        return f"{module.num_heads} heads, which {splits} parts of features do not divide"
    return None


def place_multihead(
    module: nn.MultiheadAttention, name: str, frame: Frame, layouts: BlockLayouts, *,
    width: int, regather: tuple[str, ...] = (), chunks: int | str = 0,
) -> Projection:  # fmt: skip
    """Put an attention on the grid; its `out_proj` is returned."""
    a, up = layouts.input, layouts.up_weight
    used, stored = used_and_stored(a, up, frame.mesh.mesh_axes)
    layer: SplitMultihead = adopt(module, SplitMultihead, frame, name)
    layer.stored, layer.width = stored, width
    layer.plan = MatMulPlan(
        a, used, layouts.hidden, transpose_b=True, regather=regather, chunks=chunks,
        name=f"{name}.in_proj",
    )  # fmt: skip
    layer.placed("in_proj_weight", stored, (3 * module.embed_dim, width))
    layer.placed("in_proj_bias", Layout(up.grid, None), real=(3 * module.embed_dim,))
    return place_projection(
        module.out_proj, f"{name}.out_proj", frame, layouts, leads_in=False, width=width, regather=regather,
        chunks=chunks,
    )  # fmt: skip
