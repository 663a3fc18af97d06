"""`scheme="auto"` for a whole model: attention, MLPs, experts, embedding and head planned together, on one grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ndtp.algebra.schemes import BlockLayouts
from ndtp.algebra.wire import Wire
from ndtp.errors import LayoutError
from ndtp.models.auto import Choice, best_of_all_grids, best_on_grid, whole_request
from ndtp.models.computed import plain_weight
from ndtp.models.expert_layers import ExpertsRole, experts_role
from ndtp.models.roles import (
    AttentionRole,
    around_layers,
    crosses,
    features,
    find_attention,
    find_mlps,
    hidden_size,
    is_linear,
    vocabulary_of,
)
from ndtp.planner.block_cost import Block, num_bytes
from ndtp.planner.hardware import Hardware
from ndtp.planner.model_sizes import cross_attention
from ndtp.planner.request import Request
from ndtp.runtime.given_mesh import GivenWire, ranks_of_the_world
from ndtp.runtime.process_grid import ProcessGrid


def blocks_of(model: nn.Module, tokens: int) -> list[Block]:
    """Return the planner's blocks of a model's layers, each as often as it occurs; layers that stay whole are left
    out.

    The order is that of a layer, as `ndtp.planner.model_config` has it: of a model that it reads, these are its blocks.
    """
    found = Counter(block for block, _ in blocks_by_name(model, tokens))
    return [replace(block, times=times) for block, times in found.items()]


def blocks_by_name(model: nn.Module, tokens: int) -> list[tuple[Block, tuple[str, ...]]]:
    """Each block that `parallelize` splits, and the modules whose matrices are its weights.

    Raises:
        LayoutError: the config tells no hidden size, or not how many experts a token goes through.
    """
    hidden, modules = hidden_size(model), dict(model.named_modules())
    roles = {name: experts_role(module, hidden) for name, module in modules.items()}
    experts = {name: role for name, role in roles.items() if isinstance(role, ExpertsRole)}
    around_experts = {name.rpartition(".")[0] for name in experts}
    attention, others = find_attention(model, hidden, casts=True)
    taken = {name for role in attention for name in (*role.inputs.values(), role.output)}
    taken |= {name for name, m in modules.items() if is_linear(m, casts=True) and any(_is_in(name, a) for a in others)}
    embedded, around = around_layers(model, modules, hidden, casts=True)
    found = [each for role in attention for each in _attention(tokens, hidden, role)]
    beside: list[tuple[Block, tuple[str, ...]]] = []
    for mlp in find_mlps(model, hidden, taken | around, casts=True):
        is_gated, (inner, _) = len(mlp.ups) == 2 or bool(mlp.sections), features(modules[mlp.down])
        if not inner:  # a shared expert of a config that has none
            continue
        block, names = Block.mlp(tokens, hidden, inner, is_gated), (*mlp.ups, mlp.down)
        is_shared = mlp.name.rpartition(".")[0] in around_experts
        (beside if is_shared else found).append((replace(block, name="shared expert") if is_shared else block, names))
    for name, role in experts.items():
        top_k = _top_k(model, modules[name.rpartition(".")[0]], name)
        block = Block.moe(tokens, hidden, role.inner, role.count, top_k, whole_scores=True)
        found.append((block, (name, *_router(modules, name, role))))
    return found + beside + _vocabulary(model, modules, tokens, embedded)


def _attention(tokens: int, hidden: int, role: AttentionRole) -> list[tuple[Block, tuple[str, ...]]]:
    """One block, or where keys and values are of other rows than queries, which makes two products, one for each."""
    if not crosses(role.name):
        whole = Block.attention(tokens, hidden, role.heads, role.kv_heads, role.head_dim)
        return [(whole, (*role.inputs.values(), role.output))]
    queries, keys = cross_attention(tokens, hidden, role.heads, role.kv_heads, role.head_dim)
    return [(queries, (role.inputs["q"], role.output)), (keys, (role.inputs["k"], role.inputs["v"]))]


def _router(modules: Mapping[str, nn.Module], experts: str, role: ExpertsRole) -> list[str]:
    """The module beside the experts that has a weight of a row for each of them."""
    block = experts.rpartition(".")[0]
    shape = (role.count, role.hidden)
    owners = [name for name in modules if _is_in(name, block) and name != experts]
    return [name for name in owners if any(p.shape == shape for p in modules[name].parameters(recurse=False))][:1]


def _is_in(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _vocabulary(
    model: nn.Module, modules: Mapping[str, nn.Module], tokens: int, width: int
) -> list[tuple[Block, tuple[str, ...]]]:
    table, head = (vocabulary_of(model, which) for which in ("get_input_embeddings", "get_output_embeddings"))
    if not isinstance(table, nn.Embedding):
        return []
    if not is_linear(head, casts=True):  # one that is not named, but has the table's weight
        head = next((m for m in modules.values() if is_linear(m, casts=True) and m.weight is plain_weight(table)), None)
    is_head = head is not None
    tied = is_head and head.weight is plain_weight(table)
    block = Block.vocabulary(tokens, width, table.num_embeddings, tied, is_head)
    if is_head:  # which may have fewer classes than the table has rows
        block = replace(block, outs=features(head)[1:])
    names = tuple(name for name, module in modules.items() if module is table or (is_head and module is head))
    return [(block, names)]


def _top_k(model: Any, block: nn.Module, name: str) -> int:
    """Return the number of experts that a token uses, from the block, its router or the config.

    Raises:
        LayoutError: none of them does.
    """
    text = model.config.get_text_config()
    for owner in (block, getattr(block, "gate", None), getattr(block, "router", None), text):
        for key in ("top_k", "num_experts_per_tok"):
            if isinstance(found := getattr(owner, key, None), int):
                return found
    raise LayoutError(
        f"parallelize: scheme='auto': '{name}' does not tell how many experts a token goes through\n"
        "  fix: num_experts_per_tok in the model's config, or a scheme by name"
    )


def plan_whole(
    model: nn.Module,
    mesh: ProcessGrid | None,
    tokens: int | None,
    hardware: str | Hardware,
    expert_axis: Sequence[str] | None = None,
    wire: GivenWire = None,
) -> tuple[ProcessGrid, BlockLayouts, Sequence[str] | None, str]:
    """The mesh, the layouts, the axes of experts, and a line for the report.  The same on every rank: sizes decide.

    Args:
        expert_axis: the axes of experts, where they are given.
        wire: of the mesh that is made where none is given.

    Raises:
        LayoutError: no number of rows to plan for; heads or experts that nothing divides.
    """
    if tokens is None:
        raise LayoutError("parallelize: scheme='auto' plans for a number of rows; give tokens=, those of a step")
    ranks = mesh.grid.num_ranks if mesh else ranks_of_the_world()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    used = mesh.wire if mesh else Wire.of(wire)
    request = whole_request(blocks_of(model, tokens), ranks, hardware, dtype, used)
    best = best_on_grid(request, mesh.grid, expert_axis) if mesh else best_of_all_grids(request, expert_axis)
    mesh = mesh or ProcessGrid(best.grid, wire=used)
    return mesh, best.layouts, best.experts if request.has_experts else expert_axis, _said(request, best)


def _said(request: Request, best: Choice) -> str:
    moved = sum(
        block.times * int(num_bytes(block, best.sizes, request.itemsize, wire=request.wire)) for block in request.blocks
    )
    names: Counter[str] = Counter()
    for block in request.blocks:
        names[block.name] += block.times
    what = ", ".join(f"{count} {name}" for name, count in names.items())
    experts = f", experts over {' '.join(best.experts) or 'no axis'}" * request.has_experts
    return (
        f"for {request.blocks[0].tokens} rows on {request.hardware.name}: {what} on grid {best.grid}, hidden states "
        f"[{best.layouts.input.label('MK')}]{experts}; {moved / 2**20:.1f} MiB received in a step"
    )
