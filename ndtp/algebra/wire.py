"""`Wire`: in which dtype tensors of products travel, by kind, and multiply, and the bytes that this takes.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from ndtp.algebra.grid import Grid
from ndtp.algebra.steps import Step, apply
from ndtp.errors import GridError

Shape = tuple[int, ...]
SCALE_BYTES = 4  # a scale is a number of fp32

# What a product calls its tensors -> of which kind they are.
KINDS = {
    "A": "activations", "C": "activations", "B": "weights", "bias": "weights", "dA": "activation_gradients",
    "dC": "activation_gradients", "dB": "weight_gradients", "dbias": "weight_gradients", "gradient": "weight_gradients",
}  # fmt: skip
GRADIENTS = ("activation_gradients", "weight_gradients")
BACK = {"activations": "activation_gradients", "weights": "weight_gradients"}  # of which kind its gradient is
BACK |= {gradient: kind for kind, gradient in BACK.items()}
ALL_KINDS = ("weights", "activations", "activation_gradients", "weight_gradients")
PRODUCTS = ("bf16", "fp8")  # the dtypes in which products may be told to multiply
# How a model is computed, by name: what travels, and in which dtype products multiply it.
RECIPES: dict[str, dict[str, str]] = {
    "bf16": {"weights": "bf16", "activations": "bf16", "gradients": "bf16", "products": "bf16"},
    "fp8-rowwise": {
        "weights": "fp8", "activations": "fp8", "activation_gradients": "fp8", "weight_gradients": "bf16",
        "products": "fp8",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """The form of numbers on the wire.

    Attributes:
        itemsize: bytes of a number.
        is_scaled: whether each row (all of the last dim) travels with a scale.
    """

    name: str
    itemsize: int
    is_scaled: bool = False

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor on the wire, scales included."""
        return prod(shape) * self.itemsize + SCALE_BYTES * self.is_scaled * prod(shape[:-1])

    def saves(self, shape: Sequence[int], itemsize: int) -> bool:
        """Return whether a tensor of a shape travels in fewer bytes so than as it is, with `itemsize` bytes a number.

        Where there are scales, a vector (a bias, a gain, or the gradient of one) travels as it is: it has next to no
        bytes, and what makes a good scale for a row makes none for it.  A tensor without elements has none.
        """
        if not prod(shape) or (self.is_scaled and len(shape) < 2):
            return False
        row = shape[-1:]
        return self.num_bytes(row) < itemsize * prod(row)


FORMATS = {
    each.name: each
    for each in (
        Format("bf16", 2), Format("fp16", 2), Format("fp8_e4m3", 1, True), Format("fp8_e5m2", 1, True),
        Format("int8", 1, True),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Wire:
    """The dtypes in which tensors travel; None: the one in which they are computed.

    Gathers quantise once, at the owner, whose own part is quantised like all others: every rank has the same numbers.
    Sums are never of quantised numbers: the parts are exchanged, widened, and added up in fp32 in the order of the
    ranks, as ZeRO++ does (Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
    Training", 2023).  An all-reduce is such a sum and a gather.

    Attributes:
        weights, activations, activation_gradients, weight_gradients: "bf16", "fp16", "fp8_e4m3", "fp8_e5m2" or "int8".
            The last three have a scale of fp32 for each row.
        products: the dtype in which products multiply: "bf16", which casts operands of fp32 as autocast does; or "fp8",
            operands of e4m3 and gradients of e5m2 with a scale a row, see `ndtp.compute.scaled_gemm`.
        error_feedback: whether what rounding takes from a weight's gradient on its way is added to the next gradient of
            that weight.
    """

    weights: str | None = None
    activations: str | None = None
    activation_gradients: str | None = None
    weight_gradients: str | None = None
    products: str | None = None
    error_feedback: bool = False

    @classmethod
    def of(cls, wire: Wire | str | Mapping[str, str | bool | None] | None, recipe: str | None = None) -> Wire | None:
        """Return the wire that a user has written.

        Args:
            wire: a name for all kinds; "fp8" is e4m3 for weights and activations and e5m2 for gradients.  Or names by
                kind, of which "gradients" stands for both of theirs, and this class's other attributes.  A text may be
                of kinds, too, as commands take it: "weights=fp8,gradients=bf16".
            recipe: the name of one of `RECIPES`, which says what the wire does not name.  A wire by kinds may name it
                itself, as "recipe".

        Raises:
            GridError: a kind, a dtype or a recipe that is none.
        """
        if recipe is None and (wire is None or isinstance(wire, Wire)):
            return wire
        kinds = ALL_KINDS
        asked: Any = wire or {}
        if isinstance(asked, Wire):
            asked = {field.name: getattr(asked, field.name) for field in fields(cls) if getattr(asked, field.name)}
        asked = _by_kind(asked, kinds) if isinstance(asked, str) else asked
        if not isinstance(asked, Mapping):
            raise _refusal(wire, "is neither a dtype nor a dict of dtypes by kind")
        if (name := asked.get("recipe", recipe)) is not None:
            if name not in RECIPES:
                raise GridError(f"recipe={name!r} is none of {', '.join(RECIPES)}")
            asked = _single(RECIPES[name]) | _single(asked)
        found: dict[str, Any] = {}
        for kind, name in asked.items():
            if kind == "recipe":
                continue
            if kind == "error_feedback" and (isinstance(name, bool) or name in ("true", "false")):
                found[kind] = name in (True, "true")
                continue
            if kind == "products" and name in (None, *PRODUCTS):
                found[kind] = name
                continue
            if kind in ("error_feedback", "products"):
                known = "true, false" if kind == "error_feedback" else ", ".join(PRODUCTS)
                raise _refusal(wire, f"has {name!r} for {kind}, which is none of {known}")
            if kind not in (*kinds, "gradients"):
                raise _refusal(wire, f"names {kind!r}, which is none of {', '.join(kinds)}, gradients")
            for each in GRADIENTS if kind == "gradients" else (kind,):
                found[each] = ("fp8_e5m2" if each in GRADIENTS else "fp8_e4m3") if name == "fp8" else name
                if name is not None and found[each] not in FORMATS:
                    raise _refusal(wire, f"has {name!r}, which is none of {', '.join(FORMATS)}, fp8")
        return cls(**found)

    def format(self, kind: str | None) -> Format | None:
        """Return the format of a kind of tensors; None: they travel as they are."""
        name = getattr(self, kind) if kind else None
        return None if name is None else FORMATS[name]

    def __str__(self) -> str:
        """Return the text that commands take, of which `of` makes the same wire."""
        for name in ("bf16", "fp16", "fp8", "int8"):
            if self == Wire.of(name):
                return name
        for name in RECIPES:
            if self == Wire.of(None, name):
                return f"recipe={name}"
        named = {kind: getattr(self, kind) for kind in (*ALL_KINDS, "products")}
        named["error_feedback"] = "true" if self.error_feedback else None
        return ",".join(f"{kind}={name}" for kind, name in named.items() if name is not None) or "as computed"


def part_of(grid: Grid, step: Step, shape: Sequence[int]) -> tuple[Shape, int]:
    """The parts in which a tensor of a local shape travels in a step: their shape, and how many a rank receives.

    Each is quantised by itself, row by row.
    """
    ranks, dim = grid.size(step.axes), step.dim or 0
    if step.kind == "all_gather":
        return tuple(shape), ranks - 1
    if step.kind == "all_reduce":  # to those that sum up a part of the rows each, and from them
        rows, *others = shape or (1,)
        return (-(-rows // ranks), *others), 2 * (ranks - 1)
    return (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :]), ranks - 1


def message_bytes(shape: Sequence[int], itemsize: int, form: Format | None) -> int:
    """Return the bytes of one message that holds a tensor of a shape."""
    if form is not None and form.itemsize < itemsize and form.saves(shape, itemsize):
        return form.num_bytes(shape)
    return prod(shape) * itemsize


def row_bytes(width: int, itemsize: int, wire: Wire | None, kind: str) -> int:
    """Return the bytes of one row of a kind of tensors, its scale included."""
    return message_bytes((1, width), itemsize, None if wire is None else wire.format(kind))


def step_bytes(
    grid: Grid, step: Step, shape: Sequence[int], elements: int, itemsize: int, form: Format | None
) -> tuple[int, bool]:
    """Return the bytes that a rank receives in a step, and whether they travel in the form of the wire.

    Sizes may be arrays, an entry a grid; then both results are.

    Args:
        shape: of the local tensor before the step.
        elements: that it receives.
        itemsize: of the dtype in which the tensor is computed.
    """
    plain = elements * itemsize
    if form is None or form.itemsize >= itemsize:
        return plain, False
    part, count = part_of(grid, step, shape)
    saves = form.saves(part, itemsize)
    return saves * count * form.num_bytes(part) + (1 - saves) * plain, saves


def coded_elements(
    grid: Grid, steps: Sequence[Step], shape: Sequence[int], itemsize: int, form: Format | None
) -> tuple[int, int]:
    """The numbers that a rank brings to the format of the wire, and back from it, for a local tensor of `shape`."""
    encoded = decoded = 0
    for step, after, _ in apply(grid, steps, shape):
        if form is not None and step.kind != "slice" and form.itemsize < itemsize:
            part, _ = part_of(grid, step, shape)
            if form.saves(part, itemsize):
                sums = prod(part) if step.kind == "all_reduce" else 0  # which travel, too
                encoded += prod(shape) + sums
                decoded += max(prod(shape), prod(after)) + sums * grid.size(step.axes)
        shape = after
    return encoded, decoded


def _by_kind(text: str, kinds: Sequence[str]) -> dict[str, str | None]:
    if "=" not in text:
        return dict.fromkeys(kinds, text)
    pairs = [entry.partition("=") for entry in text.split(",")]
    found: dict[str, str | None] = {kind.strip(): name.strip() for kind, _, name in pairs}
    if len(found) < len(pairs):
        raise _refusal(text, "names one of its kinds twice")
    return found


def _single(asked: Mapping[str, object]) -> dict[str, object]:
    """Return names by kind, those of "gradients" by both kinds of gradients."""
    both = dict.fromkeys(GRADIENTS, asked["gradients"]) if "gradients" in asked else {}
    return both | {kind: name for kind, name in asked.items() if kind != "gradients"}


def _refusal(wire: object, why: str) -> GridError:
    return GridError(f"wire={wire!r} {why}\n  fix: wire='bf16', or wire={{'weights': 'fp8', 'gradients': 'bf16'}}")
