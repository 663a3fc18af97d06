"""The traffic of a training step of a whole model, from the plans of its modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan, reduction_volume
from ndtp.algebra.volume import Volume
from ndtp.compute.cross_entropy import LossForm
from ndtp.models.expert_layers import experts_volume
from ndtp.models.projections import Projection
from ndtp.ops.losses import LossPlan

if TYPE_CHECKING:
    from ndtp.models.adopted import SplitEmbedding, SplitNorm
    from ndtp.models.attention_core import Core
    from ndtp.models.transformer import Split


def step_volume(split: Split, batch: int, sequence: int) -> Volume:
    """Bytes that a rank receives in forward and backward of `batch` sequences of one dp rank, labels included."""
    frame = split.frame
    rows = frame.padded(batch) * sequence * frame.outside.num_splits(0)
    total = Volume()
    for table in (*split.tables[:1], *split.positions):
        total += _table(table, rows, sequence * frame.outside.num_splits(0))
    for core in split.cores:
        total += _attention(core, rows)
    for layers in split.mlps:
        total += mlp_volume(layers, rows)
    for adapter in split.adapters:
        total += product_volume([adapter], rows)
    for layer in split.others:
        total += product_volume([layer], rows)
    for experts in split.experts:
        block = experts.name.rpartition(".")[0]
        scores = [module for name, module in split.scores.items() if name.rpartition(".")[0] == block]
        total += experts_volume(experts, rows, batch * sequence, scores)
    for norm in split.norms:
        total += norm_volume(norm, rows)
    if split.head is not None:
        total += product_volume([split.head], rows)
        # As transformers computes it, in fp32.
        loss = LossPlan(split.head.plan.out, LossForm(split.head.real_out, 0.0, 0.0))
        total += loss.volume(rows, torch.float32).in_bytes(4)
    for module, sums in split.whole:
        of_heads: Any = getattr(module, "ndtp_of_heads", {})
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if name in of_heads:
                plan: RelayoutPlan = module.ndtp_plan(name)  # type: ignore[operator]
                volume = plan.volume(parameter.shape, parameter.requires_grad, "wgrad")
                total += volume.in_bytes(parameter.element_size())
            elif parameter.requires_grad:
                volume = reduction_volume(frame.mesh.grid, sums, parameter.shape, "wgrad")
                total += volume.in_bytes(parameter.element_size())
    return total


def _table(table: SplitEmbedding, rows: int, positions: int) -> Volume:
    """Of a look-up for all rows, or for those of one sequence, which are then used by the ranks that split others."""
    weight, plan = table.weight, table.lookup
    size, wgrad = weight.element_size(), weight.requires_grad
    count, used = rows, Volume()
    if table.for_all is not None and table.is_for_all:
        count, plan = positions, table.for_all
        inner = [axis for axis in table.lookup.out.dims[0] if axis not in plan.out.dims[0]]
        together = RelayoutPlan(plan.out, plan.out, (), plan.out.grid.nontrivial(inner))
        used = together.volume((count, table.padded_dim), wgrad).in_bytes(size)
    shape = table.lies["weight"].shape
    return plan.volume(count, (shape[0], shape[1]), size, True, wgrad).in_bytes(size) + used


def _attention(core: Core, rows: int) -> Volume:
    members = list(core.inputs.values())
    size = members[0].weight.element_size()
    total = product_volume(members, rows)
    if core.kv_heads % core.inner.num_splits(1):
        bare = core.inner.with_dims(core.inner.dims[0], None)
        axes = core.frame.mesh.grid.nontrivial(core.inner.dims[1])
        shared = RelayoutPlan(core.inner, bare, (), axes)
        for _ in range(2):
            total += shared.volume((rows, core.kv_heads * core.head_dim)).in_bytes(size)
    return total + product_volume([core.output or core.beside], rows)


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
    total = first.plan.volume(
        (rows, first.width, sum(m.out_width for m in members)),
        wgrad=any(m.weight.requires_grad for m in members),
        bias=bool(biases),
        bias_grad=any(bias.requires_grad for bias in biases),
    )
    if first.stored != first.plan.b:
        (member,) = members
        stored = RelayoutPlan(member.stored, member.plan.b)
        total += stored.volume(member.lies["weight"].shape, member.weight.requires_grad)
        for bias in biases:
            one = RelayoutPlan(Layout(member.plan.grid, None), member.plan.bias)
            total += one.volume(bias.shape, bias.requires_grad)
    return total.in_bytes(first.weight.element_size())
