"""A stock transformer with every layer on the grid: hidden states stay split from the embedding to the loss."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import BlockLayouts
from ndtp.errors import LayoutError
from ndtp.models.adapters import place_adapters, reason_against, wrappers_in
from ndtp.models.adopted import Adopted, SplitNorm, adopt, is_placed
from ndtp.models.at_work import reads_parameters
from ndtp.models.attention_core import Core
from ndtp.models.bound_attention import AttentionModule, place_core
from ndtp.models.computed import plain_weight
from ndtp.models.data_loss import losses_of_all_rows
from ndtp.models.expert_layers import experts_role, place_experts
from ndtp.models.fused_order import heads_in_order, rows_in_order
from ndtp.models.head_loss import HeadSchedule, place_model
from ndtp.models.left_alone import is_foreign, leave_alone, why_left
from ndtp.models.local_heads import parts_known
from ndtp.models.named_plan import BY_PLAN
from ndtp.models.not_replicated import not_replicated
from ndtp.models.of_heads import place_beside
from ndtp.models.of_heads import reason_against as not_of_heads
from ndtp.models.one_schedule import MLPSchedule
from ndtp.models.other_layers import NAMES, place_others, reads
from ndtp.models.patches import SplitPatches, place_patches, states_of
from ndtp.models.placing import Placing, stock_model
from ndtp.models.projections import Projection, in_group, place_projection
from ndtp.models.proofs import Proofs
from ndtp.models.replicated import Replicated
from ndtp.models.roles import (
    AttentionRole,
    MLPRole,
    around_layers,
    features,
    find_attention,
    find_mlps,
    is_linear,
    is_wrapper,
    names_hidden_size,
    norm_role,
    vocabulary_of,
)
from ndtp.models.run_eagerly import compiled_parts_run_eagerly, run_eagerly
from ndtp.models.saving import saved_whole
from ndtp.models.table_settings import setting_against
from ndtp.nn.sharded import shadow_of
from ndtp.ops.lookup import LookupPlan
from ndtp.ops.norms import NormPlan
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.split.functions import guard_functions


def is_transformer(model: nn.Module) -> bool:
    """Return whether a model is one of transformers, or one around which peft put adapters."""
    return stock_model(model) is not None


def split_before(model: nn.Module, mesh: ProcessGrid | None, report: Any) -> Any:
    """A model that is split as a whole already, given once more: adapters that were put around its layers since.

    Raises:
        LayoutError: on another grid.
    """
    split, modules = report.split, dict(model.named_modules())
    assert split is not None
    own = report.mesh
    if mesh is not None and (mesh.grid, mesh.global_ranks) != (own.grid, own.global_ranks):
        raise LayoutError(
            f"parallelize: the model is split already, on {own}; it cannot be split anew on {mesh}\n"
            "  fix: make the model again, or load what ndtp.checkpoint.export_safetensors has written of it"
        )
    report.replaced |= split.adapt(modules)
    for module in modules.values():
        if isinstance(module, AttentionModule):
            module.ndtp_core.parts = parts_known(module, module.ndtp_core.parts)
    saved_whole(model)
    return report


class Split(Placing):
    """A stock model on its way to the grid."""

    proofs: Proofs

    def run(self) -> None:
        guard_functions(self.model)
        compiled_parts_run_eagerly(self.model)
        model, modules = self.model, dict(self.model.named_modules())
        attention, self.kept = find_attention(model, self.hidden)
        taken = {name for role in attention for name in (*role.inputs.values(), role.output)}
        taken |= {join for name in self.kept for join, _ in _linears_in(model, name)}
        embedded, around = around_layers(self.stock, modules, self.hidden)
        self.take_width(embedded)
        mlps = find_mlps(model, self.hidden, taken | around)
        cores = {role.name for role in attention}
        self.proofs = Proofs(self.model, attention, self.hidden, self.layouts.hidden.num_splits(1))
        for role in attention:
            self._attention(role, modules)
        for mlp in mlps:
            self._mlp(mlp, modules)
        for name, module in modules.items():
            self._experts(name, module)
        self._vocabulary(modules)
        self.replaced |= self.adapt(modules)
        for name, module in modules.items():
            if not any(name.startswith(core + ".") for core in cores):
                self._norm(name, module)
        blocks = {layer.name.rpartition(".")[0] for layer in self.experts}  # whose scores every rank wants whole
        place_others(self, modules, {*cores, *blocks})
        place_patches(self, modules)
        # Patches of an image come image by image; stages of a pipeline pass on rows that lie alike on all of them.
        has_patches = any(isinstance(module, SplitPatches) for module in modules.values())
        all_cut = vars(self.model).get("ndtp_cuts_sequences")
        self.frame.cuts_sequences = not has_patches and all_cut is not False
        self.frame.always_cuts = bool(all_cut)
        self._others(modules)
        losses_of_all_rows(model, self.stock, self.frame)
        if self.frame.head is not None and self.frame.fuse:
            place_model(self.stock, self.frame)
        run_eagerly(self.stock)
        saved_whole(self.model)
        not_replicated(self.model)
        for root in {id(each): each for each in (self.stock, self.model)}.values():
            reads_parameters(
                root, self.frame, compiles=True
            )  # those of lists of parameters, which have no forward, among them
        saved_whole(self.stock)

    def adapt(self, modules: dict[str, nn.Module]) -> dict[str, str]:
        """Adapters around layers that are on the grid, to lie as these do."""
        placed = {}
        for name, wrapper in wrappers_in(modules):
            reason = reason_against(modules, f"{name}.base_layer")
            if reason:
                raise LayoutError(f"parallelize: {name}: {reason}\n  fix: put the adapters on before parallelize")
            for layer in place_adapters(wrapper, name, wrapper.base_layer):
                placed[layer.name] = str(layer.plan)
                self.adapters.append(layer)
                self.linears += 1
        return placed

    def _attention(self, role: AttentionRole, modules: dict[str, nn.Module]) -> None:
        reason = self._attention_reason(role, modules)
        if reason:
            self.kept[role.name] = reason
            return
        layouts = self.layouts
        place = self.place
        splits, order = layouts.hidden.num_splits(1), None
        if role.order:
            order = rows_in_order(role.order, role.heads, role.kv_heads, role.head_dim, splits)
        inputs = {
            kind: place_projection(modules[name], name, leads_in=True, order=order, **place)
            for kind, name in role.inputs.items()
        }
        output = place_projection(modules[role.output], role.output, leads_in=False, **place)
        core = Core(
            self.frame, role.name, layouts.hidden, role.heads, role.kv_heads, role.head_dim, inputs,
            output if role.inside else None, output, role.order,
        )  # fmt: skip
        place_core(modules[role.name], core)
        for name, norm in place_beside(self, role, core, _projects(role)):
            self.replaced[name] = f"[{norm.norm_plan.layout.label('MK')}]"
        self.cores.append(core)
        for layer in (*inputs.values(), output):
            self.report(layer)

    def _attention_reason(self, role: AttentionRole, modules: dict[str, nn.Module]) -> str | None:
        """Return the reason why an attention module cannot be split on this grid, if there is one."""
        grid, layouts = self.mesh.grid, self.layouts
        reason = next((r for n in (*role.inputs.values(), role.output) if (r := reason_against(modules, n))), None)
        if reason:
            return reason
        if self.is_kept(role.name, *role.inputs.values(), role.output):
            return BY_PLAN
        axes = layouts.hidden.dims[1]
        splits = grid.size(axes)
        if role.heads % splits:
            return f"{role.heads} heads, which {_sizes(grid, axes)} do not divide"
        inner, down = role.heads * role.head_dim, layouts.down_weight
        if inner % down.num_splits(1):
            return f"{inner} features of its heads, which {_sizes(grid, down.dims[1])} do not divide"
        kv = role.kv_heads * role.head_dim
        if kv % splits:
            return f"{kv} features of k and v, which {_sizes(grid, axes)} do not divide"
        projections = {*role.inputs.values(), role.output}
        more = [n for n, _ in _linears_in(self.model, role.name) if n not in projections and ".lora_" not in n]
        if more and role.name:
            return f"{more[0]}, beside its projections"
        few = role.heads // splits, role.kv_heads // splits or 1
        if role.order and role.kv_heads % splits == 0 and heads_in_order(role.order, *few) is None:
            return f"its code takes q, k and v apart by {role.order}, which {few[0]} heads a rank do not have"
        reason = not_of_heads(role, modules[role.name], _projects(role), self.hidden, self.width, splits)
        return reason or self.proofs.why_not(role)

    def _mlp(self, role: MLPRole, modules: dict[str, nn.Module]) -> None:
        if self.is_kept(role.name, *role.ups, role.down):
            self.kept[role.name] = BY_PLAN
            return
        reason = next((r for n in (*role.ups, role.down) if (r := reason_against(modules, n))), None)
        if reason:
            self.kept[role.name] = reason
            return
        up, down = self.layouts.up_weight, self.layouts.down_weight
        pad_to = math.lcm(up.num_splits(0), down.num_splits(1), self.layouts.hidden.num_splits(1))
        if role.sections and role.sections[0] % pad_to:
            self.kept[role.name] = f"{role.sections[0]} features of gate and up in one, which {pad_to} does not divide"
            return
        place = self.place
        ups = [
            place_projection(modules[name], name, leads_in=True, sections=role.sections, pad_to=pad_to, **place)
            for name in role.ups
        ]
        in_group(ups)
        for layer in ups:
            layer.leads_into, layer.is_last = self.layouts.hidden, False
        layers = [*ups, place_projection(modules[role.down], role.down, leads_in=False, pad_to=pad_to, **place)]
        inside = [each for each in modules[role.name].modules() if each is not modules[role.name]]
        # What an autograd.Function of the model's computes is nothing that could be noted.
        is_noted = not any(reads(each, "apply") for each in (modules[role.name], *inside) if each not in layers)
        is_bare = not any(name.endswith(".base_layer") for name in (*role.ups, role.down))
        if self.frame.fuse and is_noted and is_bare:
            schedule = MLPSchedule(tuple(ups), layers[-1], tuple(each for each in inside if each not in layers))
            for layer in layers:
                layer.schedule = schedule
        for layer in layers:
            self.report(layer)

    def _experts(self, name: str, module: nn.Module) -> None:
        role = experts_role(module, self.hidden)
        if role is None or isinstance(role, str) or self.is_kept(name):
            if role is not None:
                self.kept[name] = role if isinstance(role, str) else BY_PLAN
            return
        layer = place_experts(module, name, role, self.frame, self.layouts, self.width, self.expert_axes)
        layer.buffer_kind = self.expert_buffers
        self.experts.append(layer)
        self.replaced[name] = str(layer.plan.up)

    def _norm(self, name: str, module: nn.Module) -> None:
        size, role = next(((size, role) for size in self.widths if (role := norm_role(module, size))), (0, None))
        if self.is_kept(name):
            role = BY_PLAN
        if role is None or isinstance(role, str):
            if role:
                self.kept[name] = role
            return
        plan = NormPlan(self.layouts.input, size, self.widths[size], role.centred, role.eps, name)
        layer: SplitNorm = adopt(module, SplitNorm, self.frame, name)
        layer.norm_plan, layer.offset, layer.eps_name = plan, role.offset, role.eps_name
        for key in ("weight", "bias"):
            if key in layer._parameters:
                layer.placed(key, plan.parameter.source, (plan.width,), (size,))
        self.replaced[name] = f"[{plan.layout.label('MK')}]"

    def _vocabulary(self, modules: dict[str, nn.Module]) -> None:
        """The embedding and the head, which may share a weight."""
        model: Any = self.stock
        names = {id(module): name for name, module in modules.items()}
        tables = [m for m in modules.values() if isinstance(m, nn.Embedding) and m.embedding_dim in self.widths]
        first, head = (vocabulary_of(model, name) for name in ("get_input_embeddings", "get_output_embeddings"))
        of_first = None if first is None else plain_weight(first)
        shared = [m for m in tables if m is first or (of_first is not None and plain_weight(m) is of_first)]
        vocabulary = max([m.num_embeddings for m in shared], default=0)
        if not is_linear(head) or features(head)[0] not in self.widths:
            head = None
        by_plan = [names[id(m)] for m in (head, *shared) if m is not None and self.is_kept(names[id(m)])]
        of_head = None if head is None else head.weight
        odd = {names[id(m)]: setting_against(names[id(m)], m, plain_weight(m) is of_head is not None) for m in shared}
        alone = {name: reason for name, reason in odd.items() if reason} | dict.fromkeys(by_plan, BY_PLAN)
        if alone:  # a table and a head that share a weight stay whole together
            self.kept |= alone
            kept = {id(plain_weight(modules[name])) for name in alone}
            head = None if head is not None and id(head.weight) in kept else head
            shared = [m for m in shared if id(plain_weight(m)) not in kept]
        is_tied = head is not None and any(table.weight is head.weight for table in shared)
        up = self.layouts.up_weight
        multiple = math.lcm(up.num_splits(0), self.layouts.hidden.num_splits(1))  # logits may be split further
        if head is not None:
            layer: Projection = place_projection(
                head, names[id(head)], self.frame, self.layouts,
                leads_in=True, width=self.widths[features(head)[0]], pad_to=multiple, chunks=self.options["chunks"],
            )  # fmt: skip
            layer.loud, self.head = False, layer
            self.frame.head, layer.schedule = layer, HeadSchedule()
            self.report(layer)
        for module in shared:
            name = names[id(module)]
            out = self.layouts.input
            table = up if is_tied else self.all_features
            rows = -(-vocabulary // multiple) * multiple if is_tied else vocabulary
            lookup = LookupPlan(Layout(self.mesh.grid, self.frame.outside.dims[0]), table, out, name)
            self.tables.append(self.place_table(module, name, lookup, rows))

    def _others(self, modules: dict[str, nn.Module]) -> None:
        """All other parameters: DTensors, whole on every rank."""
        for name, module in modules.items():
            reason = None if isinstance(module, Adopted) else why_left(module)
            if reason:
                self.kept.setdefault(name, reason)
            if is_foreign(module):
                leave_alone(module, name)
                continue
            own = {key: p for key, p in module._parameters.items() if p is not None}
            if own and not isinstance(module, (Adopted, Replicated)):
                states = {} if self.is_kept(name) else states_of(self, module, name)
                is_whole = any(not is_placed(p) for key, p in own.items() if key not in states)
                self.replicate(module, name, self.frame.outside.dims[0], states)
                if name.rpartition(".")[0] in {layer.name.rpartition(".")[0] for layer in self.experts}:
                    self.scores[name] = module
                    self.replaced[name] = "whole on every rank, which multiplies its own rows and features"
                elif is_whole and not any(name == other or name.startswith(other + ".") for other in self.kept):
                    self.kept[name] = "it is no part of attention, an MLP, a norm or a vocabulary"
        for name, module in modules.items():
            has_whole = any(isinstance(part, Replicated) for part in module.modules())
            if has_whole and not isinstance(module, (Adopted, Replicated, AttentionModule)) and reads(module, *NAMES):
                self.replicate(module, name, self.frame.outside.dims[0])


def _linears_in(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.get_submodule(name).named_modules(prefix=name) if is_linear(m)]


def _projects(role: AttentionRole) -> Callable[[str], bool]:
    """Return a test whether a module of a name is a projection of an attention, or an adapter around one."""
    projections = {*role.inputs.values(), role.output}
    around = tuple(f"{name.removesuffix('.base_layer')}.lora_" for name in projections)
    return lambda name: name in projections or name.startswith(around)


def _sizes(grid: Grid, axes: tuple[str, ...]) -> str:
    return " ".join(f"{axis}={grid[axis]}" for axis in axes) or "no axes"


LEFT = 0.05  # of the parameters


def is_recognised(model: nn.Module, mesh: ProcessGrid, layouts: BlockLayouts, *arguments: Any, **options: Any) -> bool:
    """Return whether nearly all parameters of a stock model belong to known layers, or to layers with adapters."""
    if "ndtp_stage" in vars(model) or stock_model(model) is not model or any(map(is_wrapper, model.modules())):
        return True
    if not mesh.grid.nontrivial((*layouts.up_weight.axes, *layouts.down_weight.axes)):
        return names_hidden_size(model)
    shadow, _ = shadow_of(model, mesh)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            split = Split(shadow, mesh, layouts, *arguments, **options)
            split.run()
    except (LayoutError, ValueError):
        return False
    return _left(shadow, split) <= LEFT * sum(p.numel() for p in shadow.parameters())


def _left(model: nn.Module, split: Split) -> int:
    """Elements of matrices and stacks that stayed whole, but for routers, and what was to stay."""
    stay = [*split.scores, *(name for name, why in split.kept.items() if why == BY_PLAN)]
    count = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not any(name.startswith(f"{each}.") for each in stay):
            local: Any = parameter if is_plain(parameter) else parameter._local_tensor  # type: ignore[attr-defined]
            count += parameter.numel() if local.numel() == parameter.numel() else 0
    return count
