"""The traffic of a whole model on grids of any size, from its config: `report.volume` on ranks that do not exist.

transformers builds the model without memory, `parallelize` splits it over a grid of a fake process group, and its own
code runs a step on a grid that sends nothing.  Layers that are alike move alike: a model of a few is run, and one of
one more of them, and the difference is taken as often as there are more layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ndtp.algebra.grid import Grid
from ndtp.algebra.volume import Traffic, Volume
from ndtp.algebra.wire import Wire
from ndtp.errors import LayoutError
from ndtp.models.counted import built
from ndtp.models.parallelize import parallelize
from ndtp.planner.grid_plan import GridPlan
from ndtp.planner.model_config import with_layers
from ndtp.planner.request import Request
from ndtp.planner.search import search
from ndtp.runtime.process_grid import ProcessGrid

FEWEST = 2  # layers that are run: the first and the last may differ from those between
FAMILIES = ("data parallel", "FSDP", "1D", "2D", "3D")


@dataclass(frozen=True)
class GridCandidate:
    """A grid under a scheme, with what the planner said of it."""

    plan: GridPlan
    scheme: str

    @property
    def grid(self) -> Grid:
        return self.plan.grid

    def __str__(self) -> str:
        axes = self.grid.nontrivial(self.grid.names)
        return " ".join(f"{axis}={self.grid[axis]}" for axis in axes) or "one rank"

    @property
    def keeps_whole(self) -> bool:
        """Whether it is 1D with whole hidden states, which stands beside the planner's schemes."""
        return self.scheme != self.plan.scheme

    @property
    def sequences_split(self) -> int:
        """The number of ranks over which a step's sequences are split."""
        return self.grid["dp"] * (self.grid["e"] if "e" in self.grid else 1)


def candidates(request: Request, top: int) -> list[GridCandidate]:
    """The `top` grids by the planner's volume, and the best of each family; 1D with whole activations, too."""
    plans = search(replace(request, objective="volume"))
    first = {family: next((plan for plan in plans if family_of(plan) == family), None) for family in FAMILIES}
    kept = {id(plan) for plan in (*plans[:top], *first.values())}
    found = [GridCandidate(plan, plan.scheme) for plan in plans if id(plan) in kept]
    whole = next((plan for plan in plans if family_of(plan) == "1D" and plan.grid["z"] == 1), None)
    return found if whole is None else [*found, GridCandidate(whole, "1d")]


def family_of(plan: GridPlan) -> str:
    """Return the family of a grid by what it splits inside a copy: both dims of activations and weights, one dim,
    weights, nothing.
    """
    split = [axis for axis in ("x", "y") if plan.grid[axis] > 1]
    if len(split) == 2:
        return "3D" if plan.grid["z"] > 1 else "2D"
    return "1D" if split else "FSDP" if plan.grid["z"] > 1 else "data parallel"


class ModelVolume:
    """The traffic of a training step of one model on any grid, in the process group that there is.

    Args:
        config: what its `config.json` holds.
        sequence, target: the length of the sequences, and of a decoder's.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        what: str,
        dtype: torch.dtype,
        sequence: int,
        target: int | None = None,
        wire: Wire | None = None,
    ) -> None:
        self.config, self.what, self.dtype = dict(config), what, dtype
        self.sequence, self.target, self.wire = sequence, target, wire
        self.repeat = _repeat(self.config, what)

    def on(self, candidate: GridCandidate, sequences: int) -> Volume:
        """Bytes that a rank receives, of so many sequences over all ranks.

        Raises:
            LayoutError: sequences that the ranks do not divide, or a model that does not lie so.
        """
        here, over = divmod(sequences, candidate.sequences_split)
        if over:
            raise LayoutError(f"{candidate.sequences_split} ranks have rows of their own, {sequences} sequences")
        if self.repeat is None:
            return self._run(self.config, candidate, here)
        few, more, times = self.repeat
        fewer, longer = (self._run(config, candidate, here) for config in (few, more))
        return _extended(fewer, longer, times)

    def _run(self, config: Mapping[str, Any], candidate: GridCandidate, sequences: int) -> Volume:
        model = built(config, self.what).to(self.dtype).train()
        mesh = ProcessGrid(candidate.grid, device_type="cpu", wire=self.wire)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            split: Any = parallelize(
                model, mesh, scheme=candidate.scheme, regather=candidate.plan.regather,
                expert_axis=candidate.plan.expert_axis,
            )  # fmt: skip
            volume: Volume = split.ndtp_report.volume(sequences, self.sequence, self.target)
        return volume


def _extended(fewer: Volume, longer: Volume, times: int) -> Volume:
    """Return the traffic of the longer list of layers, with the extra layers counted `times` the difference."""
    least = {entry.key: entry for entry in fewer}
    found = []
    for entry in longer:
        without = least.get(entry.key, Traffic(*entry.key, 0, calls=0))
        num_bytes, elements, calls = (
            getattr(without, count) + times * (getattr(entry, count) - getattr(without, count))
            for count in ("num_bytes", "elements", "calls")
        )
        found.append(Traffic(*entry.key, num_bytes, elements, dtype=entry.dtype, calls=calls))
    return Volume.of(found)


def _repeat(config: dict[str, Any], what: str) -> tuple[dict[str, object], dict[str, object], int] | None:
    """Configs of two models of few layers, and how often their difference makes the whole one; None if none does.

    Layers are alike where their modules and the shapes of their parameters are.  After the first few the same ones
    follow again and again: one, or several in turns.
    """
    whole = _layers(built(config, what))
    count = max(map(len, whole), default=0)
    alike = list(zip(*(each for each in whole if len(each) == count), strict=True))
    for period in range(1, count // 2):
        begin = next(i for i in range(count) if all(alike[j] == alike[j - period] for j in range(i + period, count)))
        few = max(begin + period, FEWEST)
        few += (count - few) % period
        if few + period >= count:
            continue
        configs = [with_layers(config, layers, what) for layers in (few, few + period)]
        made = [_layers(built(each, what)) for each in configs]
        if all(_are_first(some, whole, count, layers) for some, layers in zip(made, (few, few + period), strict=True)):
            return configs[0], configs[1], (count - few) // period
    return None


def _are_first(some: Sequence[Sequence[object]], whole: Sequence[Sequence[object]], count: int, layers: int) -> bool:
    """Return whether lists of layers begin like each other, and those of a length other than the longest are all
    alike.
    """
    if len(some) != len(whole):
        return False
    return all(a == (b[:layers] if len(b) == count else b) for a, b in zip(some, whole, strict=True))


def _layers(model: nn.Module) -> list[list[Any]]:
    """Return, for each outermost list of layers, the modules of each layer."""
    return [[_made_of(layer) for layer in layers] for layers in _lists(model)]


def _made_of(module: nn.Module) -> tuple[object, ...]:
    kinds = tuple((name, type(part)) for name, part in module.named_modules())
    return kinds, tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            yield child
        else:
            yield from _lists(child)
