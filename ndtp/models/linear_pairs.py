"""Pairs `Linear -> activation -> Linear` of a model, by the names that its owner gives.

A gated pair has two Linears in the place of the first: `down(act(gate(x)) * up(x))`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ndtp.errors import LayoutError
from ndtp.nn.hooks import OF_A_MODULE


@dataclass(frozen=True)
class Pair:
    """Names of the two layers, and of the layer that gates the first."""

    up: str
    down: str
    gate: str | None = None

    @property
    def ups(self) -> tuple[str, ...]:
        """The layers that the input of the pair enters."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


def pairs_by_name(model: nn.Module, plan: Mapping[str, str]) -> list[Pair]:
    """Pairs from `{"encoder.*.fc1": "up", "encoder.*.fc2": "down"}`: the n-th "up" goes with the n-th "down".

    Where there are "gate"s, the n-th goes with both.

    Raises:
        LayoutError: a pattern that matches no `nn.Linear`, another word than "gate", "up" and "down", or counts that
            differ.
    """
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    found: dict[str, list[str]] = {"gate": [], "up": [], "down": []}
    for pattern, position in plan.items():
        matches = [name for name in linears if fnmatchcase(name, pattern)]
        if position not in found or not matches:
            raise LayoutError(
                f"parallelize: {{{pattern!r}: {position!r}}} matches {len(matches)} layers; give a name or pattern of "
                f"an nn.Linear and 'gate', 'up' or 'down'\n  the model has: {', '.join(linears) or 'no nn.Linear'}"
            )
        found[position] += matches
    refuse_unfit(model, [name for matches in found.values() for name in matches])
    gates, ups, downs = ([name for name in linears if name in each] for each in found.values())
    if len(ups) != len(downs) or set(ups) & set(downs):
        raise LayoutError(f"parallelize: up names {ups} and down names {downs}; every up needs a down of its own")
    if gates and (len(gates) != len(ups) or set(gates) & {*ups, *downs}):
        raise LayoutError(
            f"parallelize: gate names {gates} and up names {ups}; every gated up needs a gate of its own\n"
            "  fix: call parallelize once for the gated pairs, and once for the others"
        )
    pairs = [Pair(up, down, gate) for gate, up, down in zip(gates or [None] * len(ups), ups, downs, strict=True)]
    for pair in pairs:
        for up in pair.ups:
            inner = model.get_submodule(up).out_features, model.get_submodule(pair.down).in_features
            if inner[0] != inner[1]:
                raise LayoutError(
                    f"parallelize: {up} gives {inner[0]} features, {pair.down}, paired with it, takes {inner[1]}"
                )
    return pairs


def refuse_unfit(model: nn.Module, names: Sequence[str]) -> None:
    """Layers that were asked for by name, and cannot be swapped alone.

    Raises:
        LayoutError: names the first of them, and why: hooks of the user's own, or a parameter that another one shares.
    """
    counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in names:
        module, reason = model.get_submodule(name), None
        if any(getattr(module, kind) for kind in OF_A_MODULE) or "forward" in module.__dict__:
            reason = "it has hooks or a forward of its own, which a new layer would lose"
        elif any(counts[id(parameter)] > 1 for parameter in module.parameters(recurse=False)):
            reason = "it shares a parameter with another layer"
        if reason is not None:
            raise LayoutError(f"parallelize: {name} cannot be replaced: {reason}")
