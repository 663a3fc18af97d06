"""The report of `parallelize`: what became of a model, its memory and its traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ndtp.algebra import html
from ndtp.algebra.volume import Volume
from ndtp.errors import LayoutError
from ndtp.models.dry_step import step_volume, usual_inputs
from ndtp.models.named_plan import NUMBER
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.process_grid import ProcessGrid

if TYPE_CHECKING:
    from ndtp.models.boundary import BoundaryLinear
    from ndtp.models.plain_gradients import PlainGradients


def _names_of_inputs(model: nn.Module) -> list[str]:
    """Return the names of what the forward of a model's own class takes, which classes of a split model pass on."""
    forwards = (vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
    names = ([*signature(forward).parameters][1:] for forward in forwards)
    return next((each for each in names if each != ["args", "kwargs"]), [])


@dataclass
class Report:
    """`replaced` names each layer with its product, `kept` each that was left alone with the reason.

    Attributes:
        linears: how many Linears the model had, and how many of them were replaced.
        parameters: the number of elements of all parameters; of those that are split; of what this rank holds.
        split: of a whole model, its modules on the grid.
        was_dense: whether no parameter was on a grid before.
        carried: what hung on the parameters that there were, and hangs on those in their place now.
        plain: what sums the gradients of its other parameters, where axes split rows.
        planned: what scheme="auto" chose for it, and for what.
        waits: why nothing is split yet; empty once it is.
        plan: what was said of layers by their names, as `parallelize(.., plan=report.plan)` takes it.
        rows: the axes along which each rank calls the model with rows of its own, `dp`.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    layers: list[BoundaryLinear] = field(default_factory=list, repr=False)
    mesh: ProcessGrid | None = field(default=None, repr=False)
    linears: tuple[int, int] = (0, 0)
    parameters: tuple[int, int, int] = (0, 0, 0)
    split: Any = field(default=None, repr=False)
    carried: list[str] = field(default_factory=list)
    was_dense: bool = field(default=False, repr=False)
    planned: str = ""
    waits: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    plain: PlainGradients | None = field(default=None, repr=False)

    @property
    def gathered(self) -> dict[str, int]:
        """The operations of a whole model that took the whole of a split activation so far, and how often."""
        return {} if self.split is None else self.split.frame.gathered

    def volume(
        self, tokens: int | None = None, sequence: int | None = None, target: int | None = None, **inputs: Any
    ) -> Volume:
        """The exact traffic of a training step, in bytes received per rank: a run on a grid that sends nothing.

        Of pairs of Linears, over `tokens` rows, boundaries and the sums of other parameters' gradients over `dp`
        included.  Of a whole model, over `tokens` sequences or images (of one dp rank), loss and whatever is `gathered`
        included: its own code runs, on tensors without memory.

        Args:
            sequence: the length of the sequences.
            target: that of a decoder's; default: the same.
            inputs: what a whole model is called with, instead; of tensors only sizes matter, they may be on meta.
                Tensors that are given without names are its first inputs.

        Raises:
            LayoutError: a whole model without `sequence` or a config, or inputs of anything else.
        """
        if self.waits:
            raise LayoutError(f"report.volume: {self.waits}")
        if self.split is not None:
            names = _names_of_inputs(self.split.model)
            for i, (name, x) in enumerate({"tokens": tokens, "sequence": sequence, "target": target}.items()):
                if isinstance(x, torch.Tensor):
                    inputs[name if name in names or i >= len(names) else names[i]] = x
            inputs = inputs or usual_inputs(self.split.stock, tokens, sequence, target)
            return step_volume(self.split.model, self.split.mesh, inputs)
        if inputs or target is not None or tokens is None:
            raise LayoutError("report.volume: this model takes volume(tokens), or volume(batch, sequence)")
        total = self.plain.volume() if self.plain else Volume()
        for layer in self.layers:
            total += layer.volume(tokens if sequence is None else tokens * sequence)
        return total

    def of(self, model: nn.Module, mesh: ProcessGrid, linears: int, replaced: int, strict: bool) -> None:
        """Become the report of a model that is split.

        Args:
            linears: how many it had, of which `replaced` are on the grid.
            strict: whether none is an error.

        Raises:
            LayoutError: none was replaced.
        """
        if strict:
            self.refuse_nothing(model, replaced)
        self.mesh = mesh
        self.count(model, linears, replaced)
        earlier = vars(model).get("ndtp_report")
        if earlier is not None and earlier is not self:
            self.include(earlier)
        wrapped: Any = model  # perhaps one of peft, whose model may be given alone later
        base = wrapped.get_base_model() if hasattr(type(model), "get_base_model") else model
        wrapped.ndtp_report = base.ndtp_report = self

    def count(self, model: nn.Module, linears: int, replaced: int) -> None:
        """Take stock of the model as it is now."""
        total = split = held = 0
        for parameter in model.parameters():
            local: Any = parameter if is_plain(parameter) else parameter._local_tensor  # type: ignore[attr-defined]
            total += parameter.numel()
            held += local.numel()
            split += parameter.numel() if local.numel() < parameter.numel() else 0
        self.linears, self.parameters = (linears, replaced), (total, split, held)

    def include(self, earlier: Report) -> None:
        """Include the report of an earlier call on the same model, as far as it still holds."""
        self.kept = {name: why for name, why in earlier.kept.items() if name not in self.replaced} | self.kept
        self.kept = {name: why for name, why in self.kept.items() if name not in earlier.replaced}
        self.replaced = earlier.replaced | self.replaced
        self.layers = [*earlier.layers, *self.layers]
        self.linears = (self.linears[0], earlier.linears[1] + self.linears[1])
        self.split = self.split or earlier.split
        self.carried = [*earlier.carried, *self.carried]
        self.plan = earlier.plan | self.plan

    def refuse_nothing(self, model: nn.Module, linears: int) -> None:
        """Refuse a model of which nothing was replaced.

        Args:
            linears: how many of its Linears are on the grid.

        Raises:
            LayoutError: nothing was replaced, or no layer of a model that is quantised; the same on every rank.
        """
        quantised = [line for line in _grouped(self.kept) if "quantised" in line]
        if self.replaced and not linears and quantised:
            raise LayoutError(
                "parallelize: no Linear was replaced, hidden states would be gathered for each\n"
                + "\n".join(f"  {line}" for line in quantised[:8])
                + "\n  fix: load the model without quantisation, or strict=False to go on"
            )
        if self.replaced:
            return
        before = next((name for name, p in model.named_parameters() if not is_plain(p)), None)
        if before is not None and not self.was_dense:
            raise LayoutError(
                f"parallelize: {before!r} lies on a grid already: the model, or one that it is a part of, was split "
                "before\n  fix: no second call; another grid takes the dense model"
            )
        reasons = "\n".join(f"  {line}" for line in _grouped(self.kept)[:8]) or "  it has no nn.Linear"
        raise LayoutError(
            f"parallelize: nothing was replaced\n{reasons}\n  fix: name layers in plan=, or strict=False to go on"
        )

    @property
    def losses(self) -> str:
        """Return the sentence about losses of the user's own where axes split rows.

        It is empty for a stock model, whose loss is the mean over the rows of all ranks.
        """
        context = getattr(self.split, "context", None)
        if context is not None:
            axes = () if context.losses is not None else context.data
        else:
            axes = self.plain.axes if self.plain is not None and self.split is None else ()
        if not axes or self.mesh is None:
            return ""
        return (
            f"ranks along {' '.join(axes)} have losses of their own, whose gradients are summed: divide a mean over a "
            f"rank's rows by {self.mesh.grid.size(axes)}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Report:
        memo[id(self)] = copied = object.__new__(type(self))
        vars(copied).update(deepcopy(vars(self), memo))
        return copied

    def __reduce__(self) -> tuple[Callable[[], SentReport], tuple[()]]:
        """Return what leaves the rank, as a result of `ndtp.testing.run`: what it says, without model and grid."""
        said = {name: getattr(self, name) for name in _SAID}
        return partial(SentReport, said=(str(self), self.losses, self.gathered), **said), ()

    def _repr_html_(self) -> str:
        return html.table(("", "layers"), (line.split(" ", 1) for line in str(self).splitlines()))

    def __str__(self) -> str:
        linears, replaced = self.linears
        total, split, held = (max(each, 0) for each in self.parameters)
        lines = [
            f"replaced {replaced} of {linears} Linears; of {total:,} parameters {100 * split / (total or 1):.1f} % are "
            f"split, {100 * held / (total or 1):.1f} % held per rank"
        ]
        lines += [f"planned  {self.planned}"] if self.planned else []
        lines += [f"waits    {self.waits}"] if self.waits else []
        lines += [f"losses   {self.losses}"] if self.losses else []
        lines += [f"plan     {self.plan}"] if len(self.plan) > 1 else []
        lines += [f"replaced {line}" for line in _grouped(self.replaced)]
        lines += [f"kept     {line}" for line in _grouped(self.kept)]
        lines += [f"carried  {line}" for line in self.carried]
        chosen = {} if self.mesh is None else self.mesh.step.chunks.by_name()
        lines += [f"overlaps {line}" for line in _grouped({k: v for k, v in chosen.items() if k in self.replaced})]
        return "\n".join(lines + [f"gathered {name}: {times} times" for name, times in self.gathered.items()])


_SAID = ("replaced", "kept", "linears", "parameters", "carried", "was_dense", "planned", "waits", "plan", "rows")


@dataclass
class SentReport(Report):
    """A report that has left its rank.

    Attributes:
        said: its text, its sentence about losses, and what was gathered so far.
    """

    said: tuple[str, str, dict[str, int]] = ("", "", {})

    @property
    def losses(self) -> str:
        return self.said[1]

    @property
    def gathered(self) -> dict[str, int]:
        return self.said[2]

    def volume(self, *_: object, **__: object) -> Volume:
        raise LayoutError(
            "report.volume: this report has left its rank, and the model is there\n"
            "  fix: call it on the rank, and send the volume"
        )

    def __str__(self) -> str:
        return self.said[0]


def _grouped(named: Mapping[str, str]) -> list[str]:
    """`layers.{0-31}.mlp.up_proj: ...` where layers differ in a number of their names alone."""
    groups: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for name, text in named.items():
        key = (NUMBER.sub("#", name), text)
        groups.setdefault(key, []).append(tuple(NUMBER.findall(name)))
    lines = []
    for (pattern, text), numbers in groups.items():
        for position in reversed(range(len(numbers[0]))):
            numbers = _merged(numbers, position)
        for values in numbers:
            line = pattern
            for value in values:
                line = line.replace("#", value, 1)
            lines.append(f"{line}: {text}")
    return lines


def _merged(numbers: list[tuple[str, ...]], position: int) -> list[tuple[str, ...]]:
    """Merge names that differ only in the number at this position."""
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for values in numbers:
        groups.setdefault((values[:position], values[position + 1 :]), []).append(int(values[position]))
    return [(*before, _ranges(found), *after) for (before, after), found in groups.items()]


def _ranges(numbers: list[int]) -> str:
    """Return numbers as ranges: [0, 1, 2, 4] -> {0-2,4}."""
    numbers = sorted(set(numbers))
    if len(numbers) == 1:
        return str(numbers[0])
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] + 1 == number:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return "{" + ",".join("-".join(map(str, part)) for part in parts) + "}"
