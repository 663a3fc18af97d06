"""The traffic of a training step of modules of a model, from their plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.algebra.volume import Volume
from ndtp.models.projections import Projection

if TYPE_CHECKING:
    from ndtp.models.adopted import SplitNorm


def mlp_volume(layers: Sequence[Projection], rows: int) -> Volume:
    """Bytes of a step of an MLP, whose last layer leads back."""
    return product_volume(layers[:-1], rows) + product_volume(layers[-1:], rows)


def norm_volume(norm: SplitNorm, rows: int) -> Volume:
    """Bytes of a step of a norm."""
    first = next(norm.parameters(), None)
    dtype = torch.get_default_dtype() if first is None else first.dtype
    trained = sum(p.requires_grad for p in norm.parameters())
    return norm.norm_plan.volume(rows, True, trained, dtype).in_bytes(dtype.itemsize)


def product_volume(members: Sequence[Projection], rows: int) -> Volume:
    """Bytes of a step of layers that are one product."""
    first = members[0]
    biases = [bias for m in members if (bias := m._parameters.get("bias")) is not None]
    itemsize, wire = first.weight.element_size(), first.mesh.wire
    total = first.plan.num_bytes(
        (rows, first.width, sum(m.out_width for m in members)),
        itemsize,
        wire,
        wgrad=any(m.weight.requires_grad for m in members),
        bias=bool(biases),
        bias_grad=any(bias.requires_grad for bias in biases),
    )
    if first.stored != first.plan.b:
        (member,) = members
        stored = RelayoutPlan(member.stored, member.plan.b, kind="weights")
        total += stored.num_bytes(member.lies["weight"].shape, itemsize, wire, member.weight.requires_grad)
        for bias in biases:
            one = RelayoutPlan(Layout(member.plan.grid, None), member.plan.bias)
            total += one.num_bytes(bias.shape, itemsize, wire, bias.requires_grad)
    return total
