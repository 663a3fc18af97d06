"""The models of a program: dense, on shards, and changed by `ndtp.parallelize`; all with the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from program import Program, Unit, block_of, plan_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import Layout, ProcessGrid
from ndtp.algebra.steps import is_legal
from ndtp.compute.epilogues import ACTIVATIONS

MODULES = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


class Place(NamedTuple):
    """Where a tensor of the parallel side lies; None for `layout` is whole."""

    mesh: ProcessGrid
    layout: Layout | None


# ---------------------------------------------------------------------------------------------------------- dense


class DenseUnit(nn.Module):
    """A unit of a stack, by torch alone; parameters have the names and shapes of the parallel ones."""

    def __init__(self, unit: Unit, program: Program) -> None:
        super().__init__()
        self.unit, self.batch = unit, program.ranks
        hidden, inner = program.hidden, unit.inner
        if unit.kind in ("mlp", "gated", "pair"):
            width = 2 if unit.kind == "gated" else 1
            self.up = nn.Linear(hidden, width * inner, unit.bias)
            self.down = nn.Linear(inner, hidden, unit.bias)
        elif unit.kind == "linear":
            self.up = nn.Linear(hidden, hidden, unit.bias)
        elif unit.kind in ("matmul", "batch"):
            shape = (program.ranks, hidden, hidden) if unit.kind == "batch" else (hidden, hidden)
            self.weight = nn.Parameter(torch.randn(shape) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        kind = self.unit.kind
        if kind == "linear":
            return self.up(x)
        if kind == "matmul":
            return x @ computed(self.weight, self.unit)
        if kind == "batch":
            return torch.matmul(x.unflatten(0, (self.batch, x.shape[0] // self.batch)), self.weight).flatten(0, 1)
        if kind == "relayout":
            return x.clone()
        if kind == "elementwise":
            return elementwise(x)
        h = self.up(x)
        if kind == "gated":
            h = ACTIVATIONS[self.unit.activation].forward(h[..., 0::2]) * h[..., 1::2]
        else:
            h = ACTIVATIONS[self.unit.activation].forward(h)
        return self.down(h)


def computed(weight: Tensor, unit: Unit) -> Tensor:
    return torch.tanh(weight) * 1.5 if unit.computed else weight


def elementwise(x: Tensor) -> Tensor:
    return x + 0.3 * torch.sin(x)


class DenseStack(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.units = nn.ModuleList(DenseUnit(unit, program) for unit in program.units)

    def forward(self, x: Tensor) -> Tensor:
        for use in self.program.uses:
            y = run(self.units[use], self.program.units[use], x)
            x = x + y if self.program.units[use].residual else y
        return x


class Block(nn.Module):
    """A block of a plain model, which fx can trace and `ndtp.parallelize` finds pairs in."""

    def __init__(self, unit: Unit, hidden: int) -> None:
        super().__init__()
        self.kind = unit.kind
        act = MODULES.get(unit.activation, nn.GELU)()
        if unit.kind == "sequential":
            self.layers = nn.Sequential(
                nn.Linear(hidden, unit.inner, unit.bias), act, nn.Linear(unit.inner, hidden, unit.bias)
            )
        elif unit.kind == "residual":
            self.norm = nn.LayerNorm(hidden)
            self.fc1, self.act = nn.Linear(hidden, unit.inner, unit.bias), act
            self.fc2 = nn.Linear(unit.inner, hidden, unit.bias)
        elif unit.kind == "gated":
            self.gate, self.act = nn.Linear(hidden, unit.inner, unit.bias), act
            self.up, self.down = nn.Linear(hidden, unit.inner, unit.bias), nn.Linear(unit.inner, hidden, unit.bias)
        else:
            self.head = nn.Linear(hidden, hidden, unit.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sequential":
            return self.layers(x)
        if self.kind == "residual":
            return x + self.fc2(self.act(self.fc1(self.norm(x))))
        if self.kind == "gated":
            return self.down(self.act(self.gate(x)) * self.up(x))
        return self.head(x)


class DenseModel(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.units = nn.ModuleList(Block(unit, program.hidden) for unit in program.units)
        self.between: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        for use in self.program.uses:
            x = self.between(run(self.units[use], self.program.units[use], x))
        return x


def dense_model(program: Program, seed: int) -> nn.Module:
    """The dense model of a program, in fp64 with values that its dtype can hold."""
    torch.manual_seed(seed)
    model = (DenseStack if program.family == "stack" else DenseModel)(program)
    return model.to(getattr(torch, program.dtype)).double()


# ------------------------------------------------------------------------------------------------------- parallel


class Product(nn.Module):
    """One product by explicit layouts, or a pair of them that are two modules, or what moves and maps shards."""

    def __init__(self, unit: Unit, mesh: ProcessGrid, dense: DenseUnit, dtype: torch.dtype, name: str) -> None:
        super().__init__()
        self.unit, self.mesh, self.batch = unit, mesh, dense.batch
        grid = mesh.grid
        self.in_layout = self.out_layout = Layout(grid, None, None)
        options: dict[str, Any] = {"mesh": mesh, "chunks": unit.chunks, "regather": unit.regather, "dtype": dtype}
        if unit.kind == "pair":
            layouts = block_of(unit, grid)
            up = {"in_layout": layouts.input, "weight_layout": layouts.up_weight, "out_layout": layouts.hidden}
            down = {"in_layout": layouts.hidden, "weight_layout": layouts.down_weight, "out_layout": layouts.output}
            self.up = ndtp.nn.Linear.from_dense(dense.up, name=f"{name}.up", **up, **options)
            self.down = ndtp.nn.Linear.from_dense(dense.down, name=f"{name}.down", **down, **options)
            self.in_layout, self.out_layout = layouts.input, layouts.output
        elif unit.kind == "linear":
            plan = plan_of(unit, grid)
            lies = {"in_layout": plan.a, "weight_layout": plan.b, "out_layout": plan.out}
            self.up = ndtp.nn.Linear.from_dense(dense.up, name=f"{name}.up", **lies, **options)
            self.in_layout, self.out_layout = plan.a, plan.out
        elif unit.kind in ("matmul", "batch"):
            self.plan = plan_of(unit, grid, name)
            self.weight = nn.Parameter(self.plan.b.shard(dense.weight.detach(), mesh.rank).to(dtype).clone())
            if unit.kind == "matmul":
                self.in_layout, self.out_layout = self.plan.a, self.plan.out
        elif unit.kind == "relayout":
            self.in_layout, _, self.out_layout = (Layout.parse(grid, text) for text in unit.layouts)

    def forward(self, x: Tensor) -> Tensor:
        unit, mesh = self.unit, self.mesh
        if unit.kind == "pair":
            return self.down(ACTIVATIONS[unit.activation].forward(self.up(x)))
        if unit.kind == "linear":
            return self.up(x)
        if unit.kind == "matmul":
            return ndtp.matmul(x, computed(self.weight, unit), self.plan, mesh)
        if unit.kind == "batch":
            whole = Layout(mesh.grid, None, None, None)
            x = ndtp.relayout(x.unflatten(0, (self.batch, x.shape[0] // self.batch)), whole, self.plan.a, mesh)
            y = ndtp.batch_matmul(x, self.weight, self.plan, mesh)
            return ndtp.relayout(y, self.plan.out, whole, mesh).flatten(0, 1)
        if unit.kind == "relayout":
            return ndtp.relayout(x, self.in_layout, self.out_layout, mesh)
        return elementwise(x)


def parallel_unit(unit: Unit, mesh: ProcessGrid, dense: DenseUnit, dtype: torch.dtype, name: str) -> nn.Module:
    if unit.kind not in ("mlp", "gated"):
        return Product(unit, mesh, dense, dtype, name)
    kind = ndtp.nn.MLP if unit.kind == "mlp" else ndtp.nn.GatedMLP
    block = kind(
        dense.up.in_features, unit.inner, unit.activation, unit.bias, dtype=dtype, mesh=mesh, scheme=unit.scheme,
        axes=unit.axes, chunks=unit.chunks, regather=unit.regather, seed=0, name=name,
    )  # fmt: skip
    block.up.load_dense(dense.up)
    block.down.load_dense(dense.down)
    return block


def run(module: nn.Module, unit: Unit, x: Tensor) -> Tensor:
    """Call a unit, through a checkpoint or compiled where it says so."""
    if unit.checkpoint and torch.is_grad_enabled():
        return checkpoint(module, x, use_reentrant=unit.checkpoint == "reentrant")  # type: ignore[no-any-return]
    if unit.compiled and any(isinstance(m, (ndtp.nn.Linear, ndtp.nn.MLP)) for m in module.modules()):
        return torch.compile(module, backend="aot_eager")(x)  # type: ignore[no-any-return]
    return module(x)  # type: ignore[no-any-return]


class ParallelStack(nn.Module):
    """Units on shards, one after another, on one or two grids.

    Args:
        between: what a rank does with an activation between two units; returns it.
    """

    def __init__(
        self,
        program: Program,
        meshes: list[ProcessGrid],
        dense: DenseStack,
        dtype: torch.dtype,
        between: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.program, self.between = program, between
        self.units = nn.ModuleList(
            parallel_unit(unit, meshes[unit.grid], theirs, dtype, f"unit{i}")  # type: ignore[arg-type]
            for i, (unit, theirs) in enumerate(zip(program.units, dense.units, strict=True))
        )
        first = self.units[program.uses[0]]
        self.start = Place(first.mesh, first.in_layout)
        self.end = self._walk(None)[1]
        self.plain = {
            f"units.{i}.weight": Place(unit.mesh, unit.plan.b)
            for i, unit in enumerate(self.units)
            if isinstance(unit, Product) and hasattr(unit, "weight")
        }

    def forward(self, x: Tensor) -> Tensor:
        y = self._walk(x)[0]
        assert y is not None
        return y

    def _walk(self, x: Tensor | None) -> tuple[Tensor | None, Place]:
        place = self.start
        for use in self.program.uses:
            unit, told = self.units[use], self.program.units[use]
            start, end = Place(unit.mesh, unit.in_layout), Place(unit.mesh, unit.out_layout)
            if x is None:
                place = start if told.residual else end
                continue
            x = self.between(moved(x, place, start))
            y = run(unit, told, x)
            place = start if told.residual else end
            x = x + moved(y, end, start) if told.residual else y
        return (None if x is None else self.between(x)), place


def moved(x: Tensor, source: Place, target: Place) -> Tensor:
    """From one layout to another, which may be on another grid over the same ranks; through whole where needed."""
    assert source.layout is not None and target.layout is not None
    if source.mesh is target.mesh and is_legal(source.mesh.grid, source.layout.dims, target.layout.dims):
        return ndtp.relayout(x, source.layout, target.layout, source.mesh)
    x = ndtp.relayout(x, source.layout, Layout(source.mesh.grid, None, None), source.mesh)
    return ndtp.relayout(x, Layout(target.mesh.grid, None, None), target.layout, target.mesh)


def parallel_model(
    program: Program, meshes: list[ProcessGrid], dense: nn.Module, between: Callable[[Tensor], Tensor]
) -> tuple[nn.Module, Place, Place]:
    """The model on grids, in the program's dtype, and where its input and output lie."""
    dtype = getattr(torch, program.dtype)
    if program.family == "stack":
        stack = ParallelStack(program, meshes, dense, dtype, between)  # type: ignore[arg-type]
        return stack, stack.start, stack.end
    model = DenseModel(program).to(dtype)
    model.load_state_dict(dense.state_dict())
    unit, mesh = program.units[0], meshes[0]
    options = {"axes": unit.axes, "chunks": unit.chunks, "regather": unit.regather}
    ndtp.parallelize(model, mesh, scheme=unit.scheme, strict=False, **options)
    model.between = between
    place = Place(mesh, Layout(mesh.grid, mesh.grid.nontrivial(model.ndtp_report.rows), None))
    return model, place, place
