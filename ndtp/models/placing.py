"""`Placing`: what it takes to put layers of one model on the grid, and what became of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ndtp.algebra.attention_ways import known_way
from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import BlockLayouts
from ndtp.models import hidden_forms  # noqa: F401  (its functions enter the table of hidden states)
from ndtp.models.adopted import SplitEmbedding, adopt
from ndtp.models.attention_core import Core
from ndtp.models.expert_layers import SplitExperts
from ndtp.models.frame import Frame
from ndtp.models.projections import Projection
from ndtp.models.replicated import PartOfParameter, replicate
from ndtp.models.roles import hidden_size
from ndtp.nn.experts import EXACT, Buffers
from ndtp.nn.padding import row_multiple
from ndtp.ops.lookup import LookupPlan
from ndtp.runtime.process_grid import ProcessGrid


def stock_model(model: Any) -> Any:
    """The model of transformers that a model is, or holds as peft's do: nothing is imported to find out."""
    if any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return model
    return stock_model(model.get_base_model()) if hasattr(type(model), "get_base_model") else None


class Placing:
    """One model on its way to the grid.

    Attributes:
        widths: sizes of activations that lie as hidden states do, with padding.
        replaced: what became of each layer, by name.
        kept: why others were left as they are.
        keep: names of modules that stay whole.
        scores: layers beside experts whose few features every rank wants whole, by name.
        pad: whether parameters whose sizes do not divide are padded, which is an error otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ProcessGrid,
        layouts: BlockLayouts,
        keep: Collection[str] = (),
        *,
        hidden: int | None = None,
        regather: tuple[str, ...] = (),
        chunks: int | str = 0,
        fuse: bool = True,
        expert_axes: Sequence[str] | None = None,
        expert_buffers: Buffers = EXACT,
        attention: str = "auto",
        pad: bool = True,
    ) -> None:
        self.linears, self.pad = 0, pad
        self.experts: list[SplitExperts] = []
        self.scores: dict[str, nn.Module] = {}
        self.cores: list[Core] = []
        self.tables: list[SplitEmbedding] = []
        self.positions: list[SplitEmbedding] = []
        self.head: Projection | None = None
        self.adapters: list[Projection] = []
        self.others: list[Projection] = []
        self.whole: list[tuple[nn.Module, tuple[str, ...]]] = []
        self.keep = frozenset(keep)
        self.model, self.mesh, self.layouts = model, mesh, layouts
        self.stock = stock_model(model)
        self.replaced: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        grid = mesh.grid
        self.expert_buffers = expert_buffers
        self.expert_axes = (("e",) if "e" in grid else ()) if expert_axes is None else tuple(expert_axes)
        weights = {axis for layout in (layouts.up_weight, layouts.down_weight) for axis in layout.axes}
        data = tuple(axis for axis in layouts.input.dims[0] if axis not in weights)
        outside = Layout(grid, data, None)
        self.frame = Frame(mesh, outside, row_multiple(layouts.plans("model"), outside), fuse=fuse)
        self.frame.attention = known_way(attention)
        self.options: dict[str, Any] = {"regather": regather, "chunks": chunks}
        self.tensor_axes = tuple(axis for axis in grid.nontrivial(grid.names) if axis in weights)
        self.hidden = hidden_size(self.stock) if hidden is None else hidden
        multiple = grid.size(self.tensor_axes)
        self.width = -(-self.hidden // multiple) * multiple
        self.widths = {self.hidden: self.width}

    def take_width(self, features: int) -> None:
        """Other activations lie as hidden states do: those between an embedding and a projection to hidden states."""
        multiple = self.mesh.grid.size(self.tensor_axes)
        self.widths.setdefault(features, -(-features // multiple) * multiple)

    @property
    def place(self) -> dict[str, Any]:
        return {
            "frame": self.frame, "layouts": self.layouts, "width": self.width, **self.options
        }  # fmt: skip

    def report(self, layer: Projection) -> None:
        self.replaced[layer.name] = str(layer.plan)
        self.linears += 1

    def is_kept(self, *names: str) -> bool:
        """Return whether one of these layers is to stay whole."""
        return not self.keep.isdisjoint(names)

    @property
    def all_features(self) -> Layout:
        """Return the layout of a table whose features are split over all axes."""
        return self.all_features_as(self.layouts.input)

    def all_features_as(self, out: Layout) -> Layout:
        """The layout of a table whose features are split over all axes, first over those that split the result's."""
        first = out.dims[1]
        rest = [axis for axis in self.mesh.mesh_axes if axis in self.tensor_axes and axis not in first]
        return Layout(self.mesh.grid, None, (*first, *rest))

    def place_table(
        self, module: nn.Embedding, name: str, lookup: LookupPlan, rows: int, for_all: LookupPlan | None = None
    ) -> SplitEmbedding:
        embedding: SplitEmbedding = adopt(module, SplitEmbedding, self.frame, name, behind=True)
        width = self.widths[module.embedding_dim]
        embedding.lookup, embedding.for_all, embedding.padded_dim = lookup, for_all, width
        embedding.is_for_all = for_all is not None
        embedding.placed("weight", lookup.table, (rows, width))
        self.replaced[name] = f"[{lookup.table.label('VK')}]"
        return embedding

    def replicate(
        self, module: nn.Module, name: str, sums: tuple[str, ...], parts: Mapping[str, PartOfParameter] | None = None
    ) -> None:
        replicate(module, self.frame, name, sums, parts or {})
        self.whole.append((module, sums))
