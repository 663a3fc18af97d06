"""Any model on a grid: its layers split by what one run of it shows, everything between by the table of rules."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import BlockLayouts
from ndtp.errors import LayoutError
from ndtp.models.adopted import Adopted, adopt, is_placed
from ndtp.models.at_work import reads_parameters
from ndtp.models.called import called_parts
from ndtp.models.computed import plain_weight
from ndtp.models.data_loss import losses_of_all_rows
from ndtp.models.frame import dropouts_of
from ndtp.models.fused_order import order_of
from ndtp.models.left_alone import is_foreign, why_left
from ndtp.models.named_plan import BY_PLAN, OfProduct
from ndtp.models.not_replicated import not_replicated
from ndtp.models.observation import Observation
from ndtp.models.observed_schedule import ObservedHead, ObservedMLP
from ndtp.models.opened_attention import INPUTS, can_open, leave_fast_path, name_of
from ndtp.models.other_layers import reads
from ndtp.models.placing import Placing
from ndtp.models.projections import place_projection, used_and_stored
from ndtp.models.roles import features, is_linear, join
from ndtp.models.run_eagerly import compiled_parts_run_eagerly, run_eagerly
from ndtp.models.saving import saved_whole
from ndtp.models.shared_input import SharedInput
from ndtp.models.sides import guessed_sides, sides
from ndtp.models.split_layers import AsStored, ObservedEmbedding, ObservedLinear
from ndtp.models.table_settings import odd_settings, refuse_own_rows, setting_against
from ndtp.models.torch_attention import ObservedPart, OpenedPart, open_to_split, with_parts
from ndtp.models.tried_linear import computes_under_autocast
from ndtp.nn.padding import row_multiple
from ndtp.ops.lookup import LookupPlan
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.split import Context, guard_functions

TWICE = "the model's code takes gradients of its gradients (create_graph=True), which products on a grid do not have"


class AnyModel(Placing):
    """A model on its way to the grid, whatever its code is."""

    def __init__(
        self,
        model: nn.Module,
        mesh: ProcessGrid,
        layouts: BlockLayouts,
        keep: Collection[str] = (),
        *,
        by_name: Mapping[str, BlockLayouts] | None = None,
        double_backward: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, mesh, layouts, keep, hidden=0, **options)
        self.double_backward = double_backward
        self.by_name = dict(by_name or {})
        products = {
            MatMulPlan(kind.input, kind.up_weight, kind.hidden, transpose_b=True) for kind in self.by_name.values()
        }
        multiples = [row_multiple((product,), self.frame.outside) for product in products]
        self.frame.sequences = math.lcm(self.frame.sequences, *multiples)
        is_stock = self.stock is not None
        self.stock = self.stock or model
        data = tuple(axis for axis in mesh.grid.nontrivial(self.frame.outside.dims[0]))
        self.context = Context(mesh, data, self.frame.sequences, self.frame.gathered, attention=self.frame.attention)
        if is_stock:
            self.context.losses = self.frame
        self.count = mesh.grid.size(self.tensor_axes)

    def place_by(self, seen: Observation | None) -> None:
        """Split the model by what a run of it has shown; see `ndtp.models.observation`."""
        guard_functions(self.model)
        compiled_parts_run_eagerly(self.model)
        modules = dict(self.model.named_modules())
        self.feeds: dict[str, bool] | None = None
        if seen is None:
            self.leads_in, self.turns = guessed_sides(modules), set[str]()
        else:
            self.leads_in, self.turns, self.feeds = sides(seen)
        self.sections = {} if seen is None else seen.sections
        self.twice = set(modules) if self.double_backward else set() if seen is None else seen.twice
        parts = self._opened(modules, seen)
        seen = None if seen is None else with_parts(seen, parts)
        layers = {name: m for name, m in modules.items() if is_linear(m, casts=True) and not isinstance(m, Adopted)}
        self._unite(layers)
        tied = self._tied(modules, layers)
        for name, module in modules.items():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not isinstance(module, Adopted):
                refuse_own_rows(name, module, self.mesh.grid.nontrivial(self.frame.outside.dims[0]))
                if not self.is_kept(name):
                    setting_against(name, module, id(plain_weight(module)) in tied)
        for part in parts:
            self._part(part)
            modules[part.name] = part.layer
        for name, module in layers.items():
            self._linear(name, module)
        for name, module in modules.items():
            if isinstance(module, nn.Embedding) and not isinstance(module, Adopted):
                self._table(name, module, tied)
        if seen is not None:
            self._groups(seen, modules)
            self._schedules(seen, modules)
        self._rest(modules)
        for p in self.model.parameters():
            if self.context.data and is_placed(p):
                p.ndtp_summed_over = self.context.data  # type: ignore[attr-defined]
        self.frame.dropouts = dropouts_of(self.model)  # of all parts, whichever is called first
        for each in called_parts(self.stock):
            reads_parameters(each, self.frame)
        if self.model is not self.stock:
            reads_parameters(self.model, self.frame)
        if self.context.losses is not None:
            losses_of_all_rows(self.model, self.stock, self.frame)
        saved_whole(self.model)
        not_replicated(self.model)
        run_eagerly(self.model)

    def adapt(self, modules: dict[str, nn.Module]) -> dict[str, str]:
        """Adapt to adapters that were added.

        Raises:
            LayoutError: adapters were put around layers that are split already.
        """
        raise LayoutError("parallelize: this model is split already\n  fix: new layers and adapters before parallelize")

    def layouts_of(self, name: str) -> BlockLayouts:
        """The layouts of a layer, which a plan may name."""
        return self.by_name.get(name, self.layouts)

    # ------------------------------------------------------------------------------------------------- the layers

    def _linear(self, name: str, module: Any) -> None:
        inside, outside = features(module)
        if self.is_kept(name):
            self.kept[name] = BY_PLAN
            return
        if min(inside, outside) == 1:
            self.kept[name] = f"{inside} to {outside} features: one cannot be split"
            return
        leads_in = isinstance(self.layouts_of(name), OfProduct) or self.leads_in.get(name, True)
        is_own = isinstance(module, nn.Linear) and not computes_under_autocast(module)  # asked before its class changes
        self._product(name, module, leads_in, sections=self._sections(name, outside, leads_in), kind=ObservedLinear)
        module.is_own_under_autocast, module.is_twice = is_own, name in self.twice
        self.linears += 1

    def _product(self, name: str, module: nn.Module, leads_in: bool, **options: Any) -> None:
        """Put a layer that multiplies on the grid; see `place_projection` for `options`."""
        inside, outside = features(module)
        side = inside if leads_in else outside
        layer: ObservedLinear = place_projection(
            module, name, leads_in=leads_in, pad_to=self.count,
            **self.place | {"width": -(-side // self.count) * self.count, "layouts": self.layouts_of(name)}, **options,
        )  # type: ignore[assignment]  # fmt: skip
        layer.context, layer.turns = self.context, name in self.turns
        self.others.append(layer)
        self.replaced[name] = str(layer.plan)

    def _opened(self, modules: dict[str, nn.Module], seen: Observation | None) -> list[OpenedPart]:
        """Open torch's attentions, whose projections are layers from here on."""
        parts: list[OpenedPart] = []
        for name, module in modules.items():
            leave_fast_path(module)
            if not can_open(module):
                continue
            attention: Any = module
            if self.is_kept(name, join(name, "out_proj")):
                self.kept[name] = BY_PLAN
            elif not self.twice.isdisjoint(join(name, name_of(each)) for each in INPUTS):
                self.kept[name] = TWICE
            elif attention.embed_dim % self.count:
                self.kept[name] = f"{attention.embed_dim} features, which {self.count} ranks do not divide"
            else:
                parts += open_to_split(name, attention, self.frame, seen)
                attention.context = self.context
        return parts

    def _part(self, part: OpenedPart) -> None:
        """Put projections of an attention on the grid, each of which is split by itself."""
        name, owner, size = part.name, part.name.rpartition(".")[0], part.layer.owner.embed_dim
        self.by_name.setdefault(name, self.layouts_of(owner))
        sections = (size,) * len(part.inputs)
        order = order_of(sections, self.layouts_of(name).hidden.num_splits(1))
        self._product(name, part.layer, True, sections=sections, order=order, kind=ObservedPart)

    def _sections(self, name: str, size: int, leads_in: bool) -> tuple[int, ...]:
        """Return the sections into which the features of a layer are taken apart, if each section can be split by
        itself.
        """
        parts = self.sections.get(name, ())
        layouts = self.layouts_of(name)
        splits = (layouts.hidden if leads_in else layouts.output).num_splits(1)
        is_fit = len(parts) > 1 and splits > 1 and all(part % splits == 0 for part in parts) and size % self.count == 0
        if not is_fit:
            return ()
        a, b = (layouts.input, layouts.up_weight) if leads_in else (layouts.hidden, layouts.down_weight)
        axes = used_and_stored(a, b, self.mesh.mesh_axes)[1].dims[1]
        in_order = tuple(axis for axis in self.mesh.mesh_axes if axis in axes)
        return parts if self.mesh.grid.nontrivial(axes) == in_order else ()  # else no DTensor can lie so

    def _unite(self, layers: dict[str, Any]) -> None:
        """Layers that share a weight stand on one side, and those that share it with a table lead in."""
        first: dict[int, str] = {}
        tables = {id(plain_weight(m)) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        for name, layer in layers.items():
            owner = first.setdefault(id(layer.weight), name)
            self.leads_in[name] = id(layer.weight) in tables or self.leads_in.get(owner, True)
            if owner != name or id(layer.weight) in tables:
                self.sections = {key: parts for key, parts in self.sections.items() if key not in (owner, name)}

    def _tied(self, modules: dict[str, nn.Module], layers: dict[str, nn.Module]) -> dict[int, str]:
        """Tables whose weight a layer has, too, by the id of the weight."""
        return {
            id(m.weight): name for name, m in layers.items()
            if any(isinstance(e, nn.Embedding) and plain_weight(e) is m.weight for e in modules.values())
        }  # fmt: skip

    def _table(self, name: str, module: nn.Embedding, tied: dict[int, str]) -> None:
        weight = plain_weight(module)
        is_tied = weight is not None and id(weight) in tied and is_placed(weight)
        reason = BY_PLAN if self.is_kept(name) else setting_against(name, module, id(weight) in tied)
        if reason is None and module.embedding_dim == 1 and not is_tied:
            reason = "it has one feature"
        if reason is not None:
            self.kept[name] = reason
            return
        if type(module) is not nn.Embedding and reads(module, "weight"):
            return  # a class of its own looks rows up in another way
        grid, outside, out = self.mesh.grid, self.frame.outside.dims[0], self.layouts_of(name).input
        width = -(-module.embedding_dim // self.count) * self.count
        if is_tied:
            owner: Any = dict(self.model.named_modules())[tied[id(weight)]]
            table, rows = owner.plan.b, owner.lies["weight"].shape[0]
            if owner.is_conv or owner.stored != owner.plan.b or not owner.leads_in:
                raise LayoutError(
                    f"parallelize: '{name}' shares its weight with '{owner.name}', which wants it otherwise"
                )
        else:
            table, rows = self.all_features_as(out), module.num_embeddings
        embedding: ObservedEmbedding = adopt(module, ObservedEmbedding, self.frame, name, behind=True)
        ids = Layout(grid, outside)
        embedding.lookup = LookupPlan(ids, table, out, name)
        embedding.for_all = LookupPlan(ids, table, out.with_dims(outside, out.dims[1]), name)
        embedding.context, embedding.width = self.context, width
        embedding.placed("weight", table, (rows, width))
        self.replaced[name] = f"[{table.label('VK')}]"

    def _groups(self, seen: Observation, modules: dict[str, nn.Module]) -> None:
        """Layers of one input are one product, where their weights lie alike."""
        for names in seen.groups:
            alike: dict[Any, list[ObservedLinear]] = {}
            for name in names:
                layer = modules.get(name)  # an attention that stays whole has none
                if isinstance(layer, ObservedLinear) and layer.group is None:
                    key = (layer.plan.a, layer.plan.b, layer.plan.out, layer.is_conv, layer.weight.dtype)
                    alike.setdefault(key, []).append(layer)
            for members in alike.values():
                if len(members) > 1 and len({id(m.weight) for m in members}) == len(members):
                    shared = SharedInput(members)
                    for member in members:
                        member.group = shared

    def _schedules(self, seen: Observation, modules: dict[str, nn.Module]) -> None:
        """Layers that follow one another element by element are one program, and so are a head and its loss."""
        if not self.frame.fuse:
            return
        for names, last in seen.chains:
            layers: list[Any] = [modules.get(name) for name in (*names, last)]  # none of an attention's projections
            if not all(isinstance(m, ObservedLinear) and m.schedule is None and not m.turns for m in layers[:-1]):
                continue
            *ups, down = layers
            if not isinstance(down, ObservedLinear) or down.schedule is not None or down.sections or down.leads_in:
                continue
            alike = {(m.plan.a, m.plan.b, m.plan.out, m.is_conv, m.weight.dtype, m.out_width) for m in ups}
            share = any(set(names) <= set(group) for group in seen.groups)
            is_whole = not ups[0].sections or (len(ups) == 1 and len(set(ups[0].sections)) == 1)
            if len(alike) == 1 and share and is_whole and ups[0].plan.out == down.plan.a and len(ups) < 3:
                schedule = ObservedMLP(tuple(ups), down)
                for member in layers:
                    member.schedule = schedule
        is_split = not self.context.data or self.context.losses is not None
        for name in sorted(seen.heads) if is_split else ():
            head: Any = modules.get(name)
            is_plain = isinstance(head, ObservedLinear) and head.schedule is None and head.leads_in
            if is_plain and not (head.sections or head.turns or head.plan.regather):
                head.schedule = ObservedHead()

    def _rest(self, modules: dict[str, nn.Module]) -> None:
        """All other parameters: split with the features that they go with, or whole on every rank."""
        for name, module in modules.items():
            reason = None if isinstance(module, Adopted) else why_left(module)
            if reason:
                self.kept.setdefault(name, reason)
            odd = odd_settings(module) if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else []
            if odd:
                self.kept.setdefault(name, f"it has {odd[0]}={getattr(module, odd[0])}")
            # Ranks sum the gradient of a table of its own as it comes, which may be sparse.
            is_tied = any(is_placed(p) for p in module._parameters.values() if p is not None)
            if is_foreign(module) or (odd and not is_tied):
                continue
            own = {key: p for key, p in module._parameters.items() if p is not None}
            if own and not isinstance(module, Adopted):
                parts = {} if self.is_kept(name) else self._parts(name, module, own)
                whole = [key for key, p in own.items() if key not in parts and not is_placed(p)]
                self.replicate(module, name, self.frame.outside.dims[0], parts)  # type: ignore[arg-type]
                if whole:
                    undivided = ", whose sizes no axis divides" * any(own[key].dim() > 1 for key in whole)
                    of = type(module).__name__ + undivided * (self.count > 1 and not self.is_kept(name))
                    self.kept.setdefault(name, f"whole on every rank: {', '.join(whole)} of {of}")

    def _parts(self, name: str, module: nn.Module, own: dict[str, nn.Parameter]) -> dict[str, AsStored]:
        """Parameters that go with activations element by element."""
        found = {}
        for key, p in own.items():
            if is_placed(p):
                continue
            full = f"{name}.{key}" if name else key
            layout = self._with_features(name, module, full, p) or self._anywhere(p)
            if layout is not None:
                found[key] = AsStored(self.context, layout, layout, tuple(p.shape), tuple(p.shape), full)
                self.replaced[full] = f"[{layout.label('ABCDEFGH'[: p.dim()])}]"
        return found

    def _with_features(self, name: str, module: nn.Module, full: str, p: nn.Parameter) -> Layout | None:
        """A parameter that goes with activations element by element lies as their features do."""
        size = p.shape[-1] if p.dim() else 0
        lead = tuple(p.shape[:-1])
        if self.feeds is None:
            side = False if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) else None
        else:
            side = self.feeds.get(full)
        if side is None:
            return None
        layouts = self.layouts_of(name)
        layout = layouts.hidden if side else layouts.input
        axes = self.mesh.grid.nontrivial(layout.dims[1])
        count = self.mesh.grid.size(axes)
        is_placeable = [axis for axis in self.mesh.mesh_axes if axis in axes] == list(axes)  # as a DTensor
        if count == 1 or size % self.count or not is_placeable:
            return None
        return Layout(self.mesh.grid, *[None] * len(lead), axes)

    def _anywhere(self, p: nn.Parameter) -> Layout | None:
        """Any other one of two dims or more is stored split, each axis along the last dim that it divides, and gathered
        where code uses it.
        """
        axes = [axis for axis in self.mesh.mesh_axes if axis in self.tensor_axes]
        dim = next((d for d in reversed(range(p.dim())) if p.shape[d] % self.count == 0), None)
        split, left = {} if dim is None else dict.fromkeys(axes, dim), list(p.shape)
        for axis in axes if dim is None else ():
            along = next((d for d in reversed(range(p.dim())) if left[d] % self.mesh.grid[axis] == 0), None)
            if along is not None:
                split[axis], left[along] = along, left[along] // self.mesh.grid[axis]
        if p.dim() < 2 or not self.mesh.grid.nontrivial(tuple(split)):
            return None
        return Layout(self.mesh.grid, *[tuple(a for a in split if split[a] == d) or None for d in range(p.dim())])
