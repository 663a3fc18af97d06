"""torch's attention on a grid: opened, with projections that are split as a model's other layers are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.compute.constants import constant_on
from ndtp.models.adopted import adopt
from ndtp.models.frame import Frame
from ndtp.models.observation import Observation
from ndtp.models.opened_attention import INPUTS, Opened, PartOfWeight, name_of, projection
from ndtp.models.roles import join
from ndtp.models.split_layers import ObservedLinear, ReadAsSplit
from ndtp.nn.sharded import Lies
from ndtp.ops.products import relayout
from ndtp.runtime.arrival import local_shard


@dataclass(frozen=True)
class OpenedPart:
    """A projection of an attention that is to be split: its name, its inputs, and the Linear."""

    name: str
    inputs: str
    layer: PartOfWeight


def open_to_split(name: str, module: Any, frame: Frame, seen: Observation | None) -> list[OpenedPart]:
    """Open an attention on the grid.

    Returns:
        Its projections, which are to be placed; those that share an input in the observed run are one where their
        weights are.
    """
    parts = _parts(name, module, [] if seen is None else seen.groups)
    made = [OpenedPart(join(name, name_of(inputs)), inputs, projection(module, inputs)) for inputs in parts]
    module.out_proj.is_called = True
    adopt(module, ObservedMultihead, frame, name)
    bare = lambda p: Layout(frame.mesh.grid, *[None] * p.dim())  # noqa: E731
    for key in ("bias_k", "bias_v"):
        if module._parameters.get(key) is not None:
            module.placed(key, bare(module._parameters[key]))
    module.parts = [(part.inputs, part.layer) for part in made]
    return made


def _parts(name: str, module: Any, groups: Iterable[Sequence[str]]) -> list[str]:
    """Return the inputs of each projection: consecutive ones that share a tensor and a parameter are one."""
    together = [{each for each in INPUTS if join(name, name_of(each)) in group} for group in groups]
    parts = [INPUTS[0]]
    for each in INPUTS[1:]:
        is_one = module.in_proj_weight is not None and any({parts[-1][-1], each} <= some for some in together)
        parts = [*parts[:-1], parts[-1] + each] if is_one else [*parts, each]
    return parts


def with_parts(seen: Observation, parts: Iterable[OpenedPart]) -> Observation:
    """Return what a run has shown, where projections that are one now share inputs as each of them did."""
    names: dict[str, str] = {}
    for part in parts:
        owner = part.name.rpartition(".")[0]
        names |= {join(owner, name_of(each)): part.name for each in part.inputs}
    groups = [list(dict.fromkeys(names.get(name, name) for name in group)) for group in seen.groups]
    return replace(seen, groups=groups)


class ObservedMultihead(Opened, ReadAsSplit):
    """An opened attention on the grid: its parameters are its own, and lie as its projections want them."""


class ObservedPart(ObservedLinear):
    """A projection whose parameters are rows of another module's, which every rank has of some of their columns."""

    owner: ObservedMultihead
    keys: dict[str, str]
    rows: range
    has_own_weight = False

    @property
    def weight(self) -> Any:  # type: ignore[override]
        return self.owner._parameters[self.keys["weight"]]

    @property
    def bias(self) -> Any:  # type: ignore[override]
        return self.owner._parameters[self.keys["bias"]]

    def placed(
        self, name: str, layout: Layout, shape: Sequence[int] | None = None, real: Sequence[int] = ()
    ) -> None:  # fmt: skip
        key, owner = self.keys[name], self.owner
        p: Any = owner._parameters[key]
        if key not in owner.lies:
            rows = len(INPUTS) * owner.embed_dim if p is None else len(p)
            owner.placed(key, layout, (rows, *(shape or real)[1:]))
        own, count = owner.lies[key], len(self.rows)
        self.lies[name] = Lies.of(own.layout, (count, *own.shape[1:]), (count, *own.real[1:]))

    def held(self, name: str) -> Tensor | None:
        return self.owner.held(self.keys[name])

    def own(self, name: str, x: Tensor | None) -> Tensor | None:
        return self.owner.own(self.keys[name], x)

    def checked(self, name: str, value: Tensor | None, x: Tensor | None) -> Tensor | None:
        return self.owner.checked(self.keys[name], value, x)

    def weight_and_bias(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.held("weight"), self.held("bias")
        if rows is not None:
            self.checked("weight", weight, rows)
        if weight is None:
            raise self.lacks("weight")
        one = Layout(self.mesh.grid, None)
        name = f"{self.name}.weight"
        shard = relayout(self._rows_of(weight), self.stored, self.plan.b, self.mesh, name, kind="weights")
        if bias is None:
            return shard, None
        return shard, relayout(self._rows_of(bias), one, self.plan.bias, self.mesh, f"{self.name}.bias")

    def _rows_of(self, p: Tensor) -> Tensor:
        """Return the rows of a parameter that are this projection's, in the order in which its product has them."""
        shard, order = local_shard(p), self.order
        assert order is not None
        order = constant_on(order, shard.device)
        return shard[order if len(shard) == len(self.rows) else order + self.rows.start]
