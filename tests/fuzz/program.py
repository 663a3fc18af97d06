"""A program of the fuzz: a description drawn from a seed, small enough to print, to pickle and to shrink.

A program makes a model, dense and on grids, and takes it through steps: training, updates in place, loads, swaps.
Nothing here starts a process; every rank draws the same description.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from ndtp import Grid, Layout, LayoutError, MatMulPlan
from ndtp.algebra.schemes import SCHEMES, BlockLayouts, block_layouts
from ndtp.algebra.steps import is_legal

AXES = ("dp", "z", "x", "y")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "squared_relu", "silu", "tanh", "sigmoid", "identity")
GATES = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
UNIT_KINDS = ("mlp", "mlp", "mlp", "gated", "pair", "linear", "matmul", "batch", "relayout", "elementwise")
BLOCK_KINDS = ("sequential", "sequential", "residual", "gated", "head")
NOISES = (
    "aux", "touch", "collect", "cycle", "tensor hook", "retain grad", "private backward", "log", "nested backward",
    "dropped graph", "no grad",
)  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """One module of a model; what it does not name has the default.

    Attributes:
        kind: one of `UNIT_KINDS` in a stack of shards, of `BLOCK_KINDS` in a parallelized model.
        grid: which of the program's grids it lives on.
        axes: those that the scheme uses; None: as the scheme says.
        layouts: of a "linear", "matmul", "batch" or "relayout": of A, of the weight and of the result.
        inner: features inside of a block.
        computed: the weight of a "matmul" is computed from the parameter.
        hooks: module hooks, "where kind": `"unit forward"`, `"up backward"`.
    """

    kind: str
    grid: int = 0
    scheme: str = "1d"
    axes: tuple[str, ...] | None = None
    layouts: tuple[str, ...] = ()
    inner: int = 8
    activation: str = "silu"
    bias: bool = False
    chunks: int | str = 0
    regather: tuple[str, ...] = ()
    residual: bool = False
    checkpoint: str = ""
    computed: bool = False
    compiled: bool = False
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """Something that is done to the models "online" and "target"; `how` are the flags that `steps` reads."""

    kind: str
    seed: int = 0
    model: str = "online"
    micros: int = 1
    how: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """Attributes:
    family: "stack" of units on shards, or "model": plain modules that `ndtp.parallelize` changes.
    grids: as pairs (axis, size), the first being that of the input.
    uses: the order in which the units are called; one that comes twice shares its weights.
    frozen: places of parameters that start without a gradient.
    noise: what ranks do differently, each as its own generator says.
    options: of the process grids.
    """

    seed: int
    ranks: int
    family: str = "stack"
    grids: tuple[tuple[tuple[str, int], ...], ...] = ()
    dtype: str = "float64"
    rows: int = 8
    hidden: int = 8
    lead: int = 0
    units: tuple[Unit, ...] = ()
    uses: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    noise: tuple[str, ...] = ()
    options: tuple[tuple[str, int], ...] = ()
    _grids: list[Grid] = field(default_factory=list, repr=False, compare=False)

    @property
    def is_fp64(self) -> bool:
        return self.dtype == "float64" and not any("float32" in step.how for step in self.steps)

    @property
    def all_grids(self) -> list[Grid]:
        if not self._grids:
            self._grids.extend(Grid(dict(sizes)) for sizes in self.grids)
        return self._grids


def draw(seed: int, ranks: int, focus: str = "") -> Program:
    """The program of a seed.

    Args:
        focus: "noise": ranks do all sorts of things of their own while a model trains; "updates": weights change in
            every way between forwards.
    """
    rng = random.Random(f"{seed} on {ranks}{focus and f' with {focus}'}")
    program = _draw_model(rng, seed, ranks) if rng.random() < 0.3 else _draw_stack(rng, seed, ranks)
    if focus == "noise":
        steps = tuple(step for step in program.steps if step.kind in ("train", "drop", "eval"))
        program = replace(program, noise=tuple(rng.sample(NOISES, 7)), steps=steps)
    elif focus == "updates":
        updates = [_draw_step(rng, rng.choice(UPDATES)) for _ in range(7)]
        looks = [Step("eval", rng.randrange(1 << 16), rng.choice(["online", "target"])) for _ in updates]
        both = [step for pair in zip(looks, updates, strict=True) for step in pair]
        program = replace(program, steps=(*both, *program.steps[-1:]))
    return program if program.is_fp64 else _without_kinks(program)


def _without_kinks(program: Program) -> Program:
    """Rounding flips the slope of a ReLU now and then, on one side and not on the other: no bound holds for that."""
    units = (replace(unit, activation="silu") if unit.activation == "relu" else unit for unit in program.units)
    return replace(program, units=tuple(units))


def block_of(unit: Unit, grid: Grid) -> BlockLayouts:
    return block_layouts(grid, unit.scheme, unit.axes)


def plan_of(unit: Unit, grid: Grid, name: str = "unit") -> MatMulPlan:
    """The plan of a unit that is one product by explicit layouts."""
    a, b, out = (Layout.parse(grid, text) for text in unit.layouts)
    transpose = unit.kind == "linear"
    return MatMulPlan(a, b, out, transpose_b=transpose, regather=unit.regather, chunks=unit.chunks, name=name)


def check_legal(program: Program) -> None:
    """Raises LayoutError for what the library refuses before it runs, ValueError for what makes no program."""
    if not program.units or not program.uses or not program.steps or max(program.uses) >= len(program.units):
        raise ValueError("no program")
    for unit in program.units:
        grid = program.all_grids[unit.grid]
        if unit.kind in ("mlp", "gated", "pair") or unit.kind in BLOCK_KINDS:
            layouts = block_of(unit, grid)
            _check_expressible(layouts.up_weight, layouts.down_weight)
            up, down = layouts.plans(regather=unit.regather, chunks=unit.chunks)
            if program.family == "stack":
                up.check_divides({"m": program.rows, "k": program.hidden, "n": unit.inner})
                down.check_divides({"m": program.rows, "k": unit.inner, "n": program.hidden})
        elif unit.kind == "relayout":
            source, _, target = (Layout.parse(grid, text) for text in unit.layouts)
            if not is_legal(grid, source.dims, target.dims):
                raise LayoutError("not in one go")
        elif unit.kind == "batch":
            plan = plan_of(unit, grid)
            batch = program.ranks
            plan.sizes((batch, program.rows // batch, program.hidden, program.hidden))
        elif unit.kind in ("linear", "matmul"):
            plan = plan_of(unit, grid)
            plan.sizes((program.rows, program.hidden, program.hidden))
            if unit.kind == "linear":
                _check_expressible(plan.b, plan.bias)


def _check_expressible(*weights: Layout) -> None:
    for layout in weights:
        axes = tuple(axis for axis in layout.grid if axis != "z") + tuple(a for a in layout.grid if a == "z")
        layout.placements_on(layout.grid.nontrivial(axes) or axes[:1])


# ------------------------------------------------------------------------------------------------------------ drawing


def _draw_grid(rng: random.Random, ranks: int) -> tuple[tuple[str, int], ...]:
    sizes = dict.fromkeys(rng.sample(AXES, rng.randint(1, 4)), 1)
    left = ranks
    while left > 1:
        factor = rng.choice([f for f in range(2, left + 1) if left % f == 0])
        sizes[rng.choice(list(sizes))] *= factor
        left //= factor
    return tuple(sizes.items())


def _draw_grid_options(rng: random.Random) -> tuple[tuple[str, int], ...]:
    options = {"check": (True, 0.04), "groups_per_axis": (2, 0.1), "ring_bytes": (0, 0.1)}
    return tuple((name, value) for name, (value, share) in options.items() if rng.random() < share)


def _draw_axes(rng: random.Random, grid: Grid, scheme: str) -> tuple[str, ...] | None:
    count = {"1d": rng.randint(1, 3), "2d": 2, "3d": 3}[scheme[:2]]
    return tuple(rng.sample(list(grid), count)) if rng.random() < 0.25 and count <= len(grid.names) else None


def _draw_chunks(rng: random.Random) -> int | str:
    return rng.choice([0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 7, 8, "auto"])


def _draw_options(rng: random.Random, kind: str) -> dict[str, object]:
    return {
        "activation": rng.choice(GATES if kind == "gated" else ACTIVATIONS),
        "bias": rng.random() < 0.6,
        "chunks": _draw_chunks(rng),
        "regather": rng.choice([(), (), (), ("a",), ("b",), ("a", "b")]),
        "residual": rng.random() < 0.4,
        "checkpoint": rng.choice(["", "", "", "", "", "reentrant", "other"]),
        "computed": kind == "matmul" and rng.random() < 0.3,
    }


def _draw_layout(rng: random.Random, grid: Grid, ndim: int) -> str:
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for axis in rng.sample(list(grid), len(grid.names)):
        if (dim := rng.randint(-1, ndim - 1)) >= 0:
            dims[dim].append(axis)
    return " ".join(f"({' '.join(axes)})" if axes else "None" for axes in dims)


def _draw_unit(rng: random.Random, program: Program) -> Unit:
    while True:
        kind = rng.choice(UNIT_KINDS)
        unit = Unit(
            kind,
            grid=rng.randrange(len(program.grids)),
            scheme=rng.choice(list(SCHEMES)),
            inner=program.ranks * rng.choice([1, 2, 3]),
            **_draw_options(rng, kind),  # type: ignore[arg-type]
        )
        grid = program.all_grids[unit.grid]
        unit = replace(unit, axes=_draw_axes(rng, grid, unit.scheme))
        if kind in ("linear", "matmul", "batch", "relayout"):
            ndim = 3 if kind == "batch" else 2
            unit = replace(unit, layouts=tuple(_draw_layout(rng, grid, ndim) for _ in range(3)))
        if rng.random() < 0.12:
            unit = replace(unit, hooks=_draw_hooks(rng, kind))
        elif rng.random() < 0.012 and kind in ("mlp", "gated", "linear"):
            unit = replace(unit, compiled=True, checkpoint="")
        try:
            check_legal(replace(program, units=(unit,), uses=(0,), steps=(Step("eval"),)))
        except LayoutError:
            continue
        return unit


def _draw_hooks(rng: random.Random, kind: str) -> tuple[str, ...]:
    places = ["unit"] if kind not in ("mlp", "gated", "pair") else ["unit", "up", "down", "up"]
    kinds = ["pre", "forward", "backward", "backward pre"]
    return tuple({f"{rng.choice(places)} {rng.choice(kinds)}" for _ in range(rng.randint(1, 2))})


def _draw_uses(rng: random.Random, count: int) -> tuple[int, ...]:
    uses = list(range(count))
    if rng.random() < 0.2:
        uses.insert(rng.randint(0, count), rng.randrange(count))
    return tuple(uses)


def _draw_noise(rng: random.Random) -> tuple[str, ...]:
    return tuple(rng.sample(NOISES, rng.randint(0, 4))) if rng.random() < 0.8 else ()


def _draw_stack(rng: random.Random, seed: int, ranks: int) -> Program:
    grids = [_draw_grid(rng, ranks) for _ in range(rng.choice([1, 1, 1, 2]))]
    program = Program(
        seed,
        ranks,
        grids=tuple(grids),
        dtype=rng.choice(["float64"] * 6 + ["float32"] * 2 + ["bfloat16"]),
        rows=ranks * ranks * rng.choice([1, 1, 2]) if rng.random() < 0.4 else ranks * rng.choice([1, 2, 3, 4, 6]),
        hidden=ranks * rng.choice([1, 2]),
        noise=_draw_noise(rng),
        options=_draw_grid_options(rng),
    )
    if rng.random() < 0.02:
        program = replace(program, rows=0)
    units = tuple(_draw_unit(rng, program) for _ in range(rng.choice([1, 2, 2, 3, 3, 4])))
    program = replace(program, units=units, uses=_draw_uses(rng, len(units)))
    return replace(program, frozen=_draw_frozen(rng), steps=_draw_steps(rng, program))


def _draw_model(rng: random.Random, seed: int, ranks: int) -> Program:
    while True:
        sizes = _draw_grid(rng, ranks)
        program = Program(
            seed,
            ranks,
            "model",
            grids=(sizes,),
            dtype=rng.choice(["float64"] * 6 + ["float32"] * 2 + ["bfloat16"]),
            rows=dict(sizes).get("dp", 1) * rng.choice([1, 2, 3, 4, 5, 8]),
            lead=rng.choice([0, 0, 1, 3]),
            hidden=rng.choice([4, 6, 8, 10, 16]),
            noise=_draw_noise(rng),
            options=_draw_grid_options(rng),
        )
        scheme, chunks = rng.choice(list(SCHEMES)), _draw_chunks(rng)
        regather = rng.choice([(), (), (), ("a",), ("b",), ("a", "b")])
        axes = _draw_axes(rng, program.all_grids[0], scheme)
        if axes is not None or rng.random() < 0.02:
            program = replace(program, rows=ranks * rng.choice([0, 1, 1, 2]))
        units = []
        for _ in range(rng.choice([1, 2, 2, 3])):
            kind = rng.choice(BLOCK_KINDS)
            unit = Unit(kind, scheme=scheme, inner=rng.choice([5, 8, 12, 16]), **_draw_options(rng, kind))  # type: ignore[arg-type]
            units.append(replace(unit, axes=axes, chunks=chunks, regather=regather, residual=False, computed=False))
            if rng.random() < 0.12:
                units[-1] = replace(units[-1], hooks=_draw_hooks(rng, "pair"))
        program = replace(program, units=tuple(units), uses=_draw_uses(rng, len(units)))
        program = replace(program, frozen=_draw_frozen(rng), steps=_draw_steps(rng, program))
        try:
            check_legal(program)
        except LayoutError:
            continue
        return program


def _draw_frozen(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(12) for _ in range(rng.randint(1, 4))) if rng.random() < 0.25 else ()


TRAIN_FLAGS = {
    "accumulate": 0.6, "reduce": 0.3, "outside": 0.2, "twice": 0.1, "two": 0.15, "reversed": 0.1, "input grad": 0.5,
    "inputs": 0.1, "grad": 0.15, "grad of input": 0.1, "keep": 0.15, "to zero": 0.2, "hooks": 0.15, "post hooks": 0.15,
    "tensor hooks": 0.15, "checkpoint": 0.05, "step in backward": 0.05,
}  # fmt: skip
UPDATES = (
    "optimizer", "optimizer", "optimizer", "ema", "ema", "copy", "mul", "load", "swap", "deepcopy", "to", "freeze",
    "tie",
)  # fmt: skip
OTHERS = ("eval", "eval", "drop", "between", "create graph", "refused", "interrupted")


def _draw_steps(rng: random.Random, program: Program) -> tuple[Step, ...]:
    steps = []
    for _ in range(rng.choice([1, 2, 3, 3, 4, 5])):
        if rng.random() < 0.6:
            steps.append(_draw_step(rng, rng.choice(UPDATES + OTHERS)))
        flags = tuple(flag for flag, share in TRAIN_FLAGS.items() if rng.random() < share)
        steps.append(Step("train", rng.randrange(1 << 16), rng.choice(["online"] * 3 + ["target"]), 1, flags))
        if "accumulate" in flags:
            steps[-1] = replace(steps[-1], micros=rng.choice([2, 2, 3]))
    return tuple(steps)


def _draw_step(rng: random.Random, kind: str) -> Step:
    flags = {
        "optimizer": ["adamw", "foreach", "fused", "clip"],
        "ema": ["foreach", "backwards"],
        "load": ["assign", "backwards", "dense"],
        "deepcopy": ["backwards"],
        "eval": ["inference"],
        "to": ["float32"],
        "copy": ["state"],
        "between": ["foreach", "input grad"],
        "interrupted": ["in backward", "reduce"],
    }.get(kind, [])
    how = tuple(flag for flag in flags if rng.random() < 0.4)
    return Step(kind, rng.randrange(1 << 16), rng.choice(["online"] * 2 + ["target"]), 1, how)
