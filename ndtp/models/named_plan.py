"""Plans of layers by their names: the scheme of each, the layouts of a product, and what stays whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from typing import Any, TypeGuard

from torch import nn

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import SCHEMES, BlockLayouts, block_layouts, known_scheme
from ndtp.errors import LayoutError

ROLES = ("gate", "up", "down")
BY_PLAN = "by the plan"
LAYOUTS = "layouts"  # in the place of a scheme's name
ALL = "*"
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Value = str | Sequence[Layout] | None


class OfProduct(BlockLayouts):
    """Layouts of one product, which leads in: of the other one nothing was said."""


@dataclass(frozen=True)
class NamedPlan:
    """A plan of layers by name, in the form in which it can be given back.

    Attributes:
        scheme: of the layers that nothing names, which is that of "*"; "auto" lets the planner choose.
        entries: what was said, by pattern.  Of those that match a layer or a module that holds it, the last counts.
    """

    scheme: str
    entries: Mapping[str, Value]

    @classmethod
    def given(cls, plan: Mapping[str, Any] | None, keep: Sequence[str], scheme: str) -> NamedPlan:
        """Take the arguments of `parallelize`: `keep` names what stays whole.

        Raises:
            LayoutError: a value that is neither a scheme, None, nor layouts; or roles of pairs beside schemes.
        """
        entries = dict(plan or {})
        for pattern, value in entries.items():
            if value is not None and not _is_layouts(value) and value not in (*ROLES, *SCHEMES):
                if pattern == ALL and value == "auto":
                    continue
                if not isinstance(value, str):
                    raise LayoutError(
                        f"parallelize: plan names {pattern!r} as {value!r}\n  fix: the name of a scheme, None for a "
                        "layer that stays whole, or a tuple of layouts (input, weight, output)"
                    )
                try:
                    known_scheme(value)
                except LayoutError as error:
                    raise LayoutError(f"parallelize: plan names {pattern!r}, {error}") from None
        if entries.get(ALL) is not None:
            scheme = entries.pop(ALL)
        elif entries and ALL in entries:
            scheme = next((v for v in entries.values() if isinstance(v, str) and v not in ROLES), scheme)
            entries = {ALL: entries.pop(ALL), **entries}
        made = cls(scheme, {**entries, **dict.fromkeys([keep] if isinstance(keep, str) else keep)})
        others = [p for p, value in made.entries.items() if value is None or value in SCHEMES]
        if made.names_pairs and others:
            raise LayoutError(
                f"parallelize: plan names layers of pairs, {', '.join(made.roles)}, beside {', '.join(others)}\n"
                '  fix: a plan of "gate", "up" and "down", whose other layers stay whole; or one of schemes and None'
            )
        return made

    @property
    def roles(self) -> dict[str, str]:
        return {name: value for name, value in self.entries.items() if isinstance(value, str) and value in ROLES}

    @property
    def layouts(self) -> dict[str, Sequence[Layout]]:
        return {name: value for name, value in self.entries.items() if _is_layouts(value)}

    @property
    def names_pairs(self) -> bool:
        """Return whether it names all that is to be split: the layers of pairs, and single ones by their layouts."""
        only = [value for value in self.entries.values() if value is None or value in SCHEMES]
        return bool(self.roles) or (bool(self.layouts) and not only)

    def as_dict(self) -> dict[str, Value]:
        return {**({} if ALL in self.entries else {ALL: self.scheme}), **self.entries}

    def values(self, model: nn.Module) -> dict[str, Value]:
        """Return what the plan says of each module, by name.

        Raises:
            LayoutError: a pattern that matches no module with parameters, with the names that are nearest to it.
        """
        names = [name for name, module in model.named_modules() if name]
        found: dict[str, Value] = {"": self.entries.get(ALL, self.scheme), **dict.fromkeys(names, self.scheme)}
        modules = dict(model.named_modules())
        for pattern, value in self.entries.items():
            matches = re.compile(translate(pattern)).match
            named = {name for name in names if matches(name)}
            if not any(True for name in named for _ in modules[name].parameters()):
                raise LayoutError(_unmatched(pattern, names))
            for name in names:
                if name in named or any(above in named for above in _above(name)):
                    found[name] = value
        return found


def _is_layouts(value: object) -> TypeGuard[Sequence[Layout]]:
    return isinstance(value, (tuple, list)) and all(x is None or isinstance(x, Layout) for x in value)


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _unmatched(pattern: str, names: Sequence[str]) -> str:
    forms = list(dict.fromkeys(NUMBER.sub("*", name) for name in names))
    asked = NUMBER.sub("*", pattern)
    near = get_close_matches(asked, forms, 3, 0.4)
    last = asked.rpartition(".")[2]
    near += [form for form in forms if form.rpartition(".")[2] == last and form not in near][: 3 - len(near)]
    return f"parallelize: {pattern!r} matches no module that has parameters\n  fix: " + (
        f"the nearest names are {', '.join(map(repr, near))}" if near else f"the model has {', '.join(forms[:8])}"
    )


def schemes_in(values: Mapping[str, Value], model: nn.Module) -> set[str]:
    """The schemes of the layers that are to be split, and `LAYOUTS` where some have layouts of their own."""
    owners = [values[name] for name, module in model.named_modules() if module._parameters and name in values]
    return {value if isinstance(value, str) else LAYOUTS for value in owners if value is not None}


def named_layouts(
    values: Mapping[str, Value], model: nn.Module, grid: Grid, axes: Sequence[str] | None
) -> dict[str, BlockLayouts]:
    """The layouts of each module's layers, by its name.

    Raises:
        LayoutError: a scheme that the grid does not have, layouts that make no product, or layers that share a weight
            and are not of one scheme.
    """
    found, owners = {}, dict[int, str]()
    for name, module in model.named_modules():
        value = values[name]
        if isinstance(value, str):
            found[name] = block_layouts(grid, value, axes)
        elif value is not None:
            found[name] = _of_product(name, value, grid)
        for p in module.parameters(recurse=False):
            first = owners.setdefault(id(p), name)
            if values[first] != value:
                raise LayoutError(
                    f"parallelize: '{first}' and '{name}' share a weight {tuple(p.shape)}, and the plan names them as "
                    f"{values[first]!r} and {value!r}\n  fix: name both alike"
                )
    return found


def _of_product(name: str, given: Sequence[Layout | None], grid: Grid) -> BlockLayouts:
    """The layouts of one layer, both of whose sides are its own."""
    plan = product_of(name, given)
    data = block_layouts(grid, "1d").input.dims[0]
    for layout in (plan.a, plan.out):
        if layout.dims[0][: len(data)] != data:
            raise LayoutError(f"parallelize: {name!r} as {layout}: {' '.join(data)} has to split its rows first")
    return OfProduct(plan.a, plan.b, plan.out, Layout(grid, *reversed(plan.b.dims)), plan.a)


def product_of(name: str, given: Sequence[Layout | None]) -> MatMulPlan:
    """Return the product of a layer of which layouts were given: of its input, its weight and perhaps its output."""
    a, b, out = (*given, None, None)[:3]
    if a is None or b is None:
        raise LayoutError(f"parallelize: give {name!r} an input and a weight layout")
    return MatMulPlan(a, b, out, transpose_b=True, name=name)
