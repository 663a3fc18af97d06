"""`ndtp.ops.products` under `torch.compile`: custom ops, whole to the compiler, with the schedules of eager mode
inside.

`ndtp::mlp` is a chain of products, a single one included, and `ndtp::mlp_backward` all of its gradients.  What backward
needs is extra outputs of the first: gathered operands and pre-activations, and an empty tensor where an operand was not
gathered, which is then saved as the input that it is.

Tensors and text pass through an op, objects do not.  So the products are written down as text (`chain_text`), by code
that is traced: the compiler guards on every layout that it reads, and recompiles for another.  The process grid goes by
name (`ndtp.runtime.process_grid.grid_named`), as process groups do in torch.

Shapes are static: another number of rows is compiled anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ndtp.algebra.binding import bind
from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.steps import relayout as relayout_steps
from ndtp.collectives.meter import IMPLEMENTATIONS
from ndtp.ops.products import activated_shape, check_chain, gradients_wanted, num_chunks, relayout_checked
from ndtp.runtime.dry_grid import DryGrid
from ndtp.runtime.execution import Execution, Key, Stage
from ndtp.runtime.moves import Move
from ndtp.runtime.process_grid import ProcessGrid, grid_named

# ------------------------------------------------------------------------------------------------- traced by Dynamo


def chain(
    a: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    plans: Sequence[MatMulPlan],
    activations: Sequence[str | None],
    mesh: ProcessGrid,
) -> Tensor:
    """The chain of products of plain shards; see `ndtp.ops.products.mlp`."""
    tensors = [a, *weights, *(bias for bias in biases if bias is not None)]
    # Decides what is kept and what backward does; the collectives of forward are the same in any case.
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    return _mlp(tensors, chain_text(biases, plans, activations, mesh), needs)[0]


def chain_text(
    biases: Sequence[Tensor | None],
    plans: Sequence[MatMulPlan],
    activations: Sequence[str | None],
    mesh: ProcessGrid,
) -> str:
    """A line with the name of the grid, and one a product; what `_read_chain` reads."""
    lines = [mesh.name]
    for plan, bias, activation in zip(plans, biases, activations, strict=True):
        fields = (
            *(layout_text(layout) for layout in (plan.a, plan.b, plan.out)),
            " ".join([f"{axis} {letter}" for axis, letter in plan.roles.items()]),
            " ".join([word for word, is_on in (("a", plan.transpose_a), ("b", plan.transpose_b)) if is_on]),
            " ".join(plan.regather),
            plan.chunks_text,
            "" if activation is None else activation,
            "" if bias is None else "bias",
            plan.name.replace("\n", " "),
        )
        lines.append("|".join(fields))
    return "\n".join(lines)


def layout_text(layout: Layout) -> str:
    """`(z y) (x)`, which `Layout.parse` reads."""
    return " ".join(["(" + " ".join(axes) + ")" for axes in layout.dims])


def relayout(x: Tensor, source: Layout, target: Layout, mesh: ProcessGrid, name: str) -> Tensor:
    """See `ndtp.ops.products.relayout`."""
    return _relayout(x, mesh.name, layout_text(source), layout_text(target), name, "forward")


# ------------------------------------------------------------------------------------------------------- the chain


class _Chain(NamedTuple):
    mesh: ProcessGrid
    plans: tuple[MatMulPlan, ...]
    activations: tuple[str | None, ...]
    has_bias: tuple[bool, ...]

    def split(self, tensors: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """A, the weights, and the biases or None, of what was given a tensor."""
        count = len(self.plans)
        rest = iter(tensors[count + 1 :])
        return tensors[0], list(tensors[1 : count + 1]), [next(rest) if has else None for has in self.has_bias]

    def wanted(self, needs: Sequence[bool]) -> list[Any]:
        a, weights, biases = self.split(needs)
        return gradients_wanted(self.plans, (a, *weights), [bool(bias) for bias in biases])

    def stages(self, shapes: Sequence[Sequence[int]]) -> list[Stage]:
        """Bound to the shapes of A and the weights."""
        stages, shape = [], shapes[0]
        for plan, b_shape, activation in zip(self.plans, shapes[1:], self.activations, strict=False):
            bound, sizes = bind(plan, tuple(shape), tuple(b_shape))
            if activation is not None:
                shape = activated_shape(bound.shard_shape("C", sizes), activation, bound)
            # No weight is gathered ahead of its chain: the compiler may have changed the order of use.
            stages.append(Stage(bound, sizes, activation))
        return stages

    def chunks(self, shapes: Sequence[Sequence[int]], like: Tensor) -> int:
        """At most so many; where it is left open all ranks measure together, which may be while they compile."""
        with _disable_current_modes():
            real = torch.empty(1, dtype=like.dtype, device=like.device)
            return num_chunks(self.plans, [stage.sizes for stage in self.stages(shapes)], self.mesh, real)


def _read_chain(text: str) -> _Chain:
    name, lines = text.split("\n", 1)
    return _Chain(grid_named(name), *_read_products(grid_named(name).grid, lines))


@lru_cache(maxsize=4096)
def _read_products(grid: Grid, lines: str) -> tuple[tuple[Any, ...], ...]:
    plans, activations, has_bias = [], [], []
    for line in lines.split("\n"):
        a, b, out, roles, transposed, regather, chunks, activation, bias, name = line.split("|", 9)
        words = roles.split()
        plan = MatMulPlan(
            *(Layout.parse(grid, a), Layout.parse(grid, b), Layout.parse(grid, out)),
            roles=dict(zip(words[::2], words[1::2], strict=True)),
            transpose_a="a" in transposed,
            transpose_b="b" in transposed,
            regather=tuple(regather.split()),
            chunks=chunks if chunks == "auto" else int(chunks),
            name=name,
        )
        plans.append(plan)
        activations.append(activation or None)
        has_bias.append(bool(bias))
    return tuple(plans), tuple(activations), tuple(has_bias)


class _Kept(NamedTuple):
    """A tensor that backward needs: its key, its shape, and which of the op's inputs or outputs it is."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    input: int | None  # the operand as it was passed, not gathered
    output: int | None  # kept under another key already

    @property
    def is_new(self) -> bool:
        return self.input is None and self.output is None


class _Outline(NamedTuple):
    """What a forward returns."""

    shape: tuple[int, ...]
    kept: tuple[_Kept, ...]


@lru_cache(maxsize=4096)
def _outline(
    grid: Grid,
    rank: int,
    lines: str,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    needs: tuple[bool, ...],
    chunks: int,
) -> _Outline:
    """By running the schedule on tensors without memory: what is kept, and where it came from, the executor decides."""
    mesh: Any = DryGrid(grid, rank)
    chain = _Chain(mesh, *_read_products(grid, lines))
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)]
    a, weights, biases = chain.split(tensors)
    check_chain(a, weights, biases, chain.plans, chain.activations, None)
    c, kept = Execution(chain.stages(shapes), mesh, chunks).forward(a, weights, biases, chain.wanted(needs))
    inputs = {_place(tensor): i for i, tensor in enumerate(tensors)}
    outputs: dict[Any, int] = {}
    entries = []
    for i, (key, tensor) in enumerate(kept.items()):
        place = _place(tensor)
        entries.append(_Kept(key, tuple(tensor.shape), tensor.dtype, inputs.get(place), outputs.get(place)))
        outputs.setdefault(place, i)
    return _Outline(tuple(c.shape), tuple(entries))


def _place(x: Tensor) -> tuple[Any, ...]:
    """The same for tensors that are one and the same memory, seen in one way."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def _outline_of(tensors: Sequence[Tensor], text: str, needs: Sequence[bool]) -> _Outline:
    shapes = tuple(tuple(int(size) for size in tensor.shape) for tensor in tensors)
    return _outline_for(text, shapes, tensors, needs)


def _outline_for(
    text: str, shapes: tuple[tuple[int, ...], ...], like: Sequence[Tensor], needs: Sequence[bool]
) -> _Outline:
    name, lines = text.split("\n", 1)
    mesh = grid_named(name)
    chunks, dtypes = _read_chain(text).chunks(shapes, like[0]), tuple(tensor.dtype for tensor in like)
    return _outline(mesh.grid, mesh.rank, lines, shapes, dtypes, tuple(needs), chunks)


def _run_mlp(tensors: Sequence[Tensor], products: str, needs: Sequence[bool]) -> list[Tensor]:
    """C of the last product, and what backward needs.

    Args:
        tensors: A, the weights, and those biases that there are.
        products: of `chain_text`.
        needs: whose gradients are wanted.
    """
    chain, outline = _read_chain(products), _outline_of(tensors, products, needs)
    a, weights, biases = chain.split(tensors)
    check_chain(a, weights, biases, chain.plans, chain.activations, chain.mesh, needs)
    stages = chain.stages([x.shape for x in (a, *weights)])
    chunks = chain.chunks([x.shape for x in (a, *weights)], a)
    c, kept = Execution(stages, chain.mesh, chunks).forward(a, weights, biases, chain.wanted(needs))
    assert tuple(kept) == tuple(entry.key for entry in outline.kept), (tuple(kept), outline)
    outputs, taken = [c.contiguous()], {_place(x)[0] for x in (c, *tensors)}
    for tensor, entry in zip(kept.values(), outline.kept, strict=True):
        if not entry.is_new:
            outputs.append(tensor.new_empty(0))
            continue
        is_part = _place(tensor)[0] in taken  # an op may not return a part of what it was given or returns
        outputs.append(tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor.contiguous())
        taken.add(_place(outputs[-1])[0])
    return outputs


_mlp = torch.library.custom_op("ndtp::mlp", _run_mlp, mutates_args=())


@_mlp.register_fake
def _(tensors: Sequence[Tensor], products: str, needs: Sequence[bool]) -> list[Tensor]:
    outline, a = _outline_of(tensors, products, needs), tensors[0]
    return [
        a.new_empty(outline.shape),
        *(a.new_empty(entry.shape if entry.is_new else (0,), dtype=entry.dtype) for entry in outline.kept),
    ]


def _run_mlp_backward(
    grad: Tensor, kept: Sequence[Tensor], products: str, needs: Sequence[bool], shapes: Sequence[int]
) -> list[Tensor]:
    """The gradients that `needs` asks for, finished.

    Args:
        kept: by the keys of the outline.
        shapes: of all tensors that forward was given, one after the other.
    """
    chain, each = _read_chain(products), _cut(products, shapes)
    keys = [entry.key for entry in _outline_for(products, each, (grad,) * len(each), needs).kept]
    execution = Execution(chain.stages(each), chain.mesh, chain.chunks(each, grad))
    step = chain.mesh.step
    step.late.enter()
    if step.partial_sums and torch._C._current_graph_task_id() >= 0:  # type: ignore[attr-defined]
        step.late.end_with_backward(step.partial_sums)  # of eager code, which left them to the next backward
    da, db, dbias = execution.backward(grad, dict(zip(keys, kept, strict=True)), chain.wanted(needs))
    gradients = [move.finish() for move in db + dbias if move is not None]
    return [gradient.contiguous() for gradient in ([] if da is None else [da]) + gradients]


_mlp_backward = torch.library.custom_op("ndtp::mlp_backward", _run_mlp_backward, mutates_args=())


@_mlp_backward.register_fake
def _(
    grad: Tensor, kept: Sequence[Tensor], products: str, needs: Sequence[bool], shapes: Sequence[int]
) -> list[Tensor]:
    each = _cut(products, shapes)
    return [grad.new_empty(shape) for shape, need in zip(each, needs, strict=True) if need]


def _cut(products: str, shapes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    chain, sizes = _read_chain(products), iter(shapes)
    dims = (chain.plans[0].a.ndim, *(plan.b.ndim for plan in chain.plans), *(1 for has in chain.has_bias if has))
    return tuple(tuple(next(sizes) for _ in range(count)) for count in dims)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, products, needs = inputs
    ctx.set_materialize_grads(False)
    found: list[Tensor] = []
    for entry, own in zip(_outline_of(tensors, products, needs).kept, output[1:], strict=True):
        found.append(
            tensors[entry.input] if entry.input is not None else own if entry.output is None else found[entry.output]
        )
    ctx.save_for_backward(*found)
    ctx.products, ctx.needs = products, needs
    ctx.shapes = [int(size) for tensor in tensors for size in tensor.shape]


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, None, None]:
    if grads[0] is None:
        return [None for _ in ctx.needs], None, None
    found = iter(_mlp_backward(grads[0], list(ctx.saved_tensors), ctx.products, ctx.needs, ctx.shapes))
    return [next(found) if need else None for need in ctx.needs], None, None


_mlp.register_autograd(_differentiate, setup_context=_save)

# --------------------------------------------------------------------------------------------------------- relayout


def _run_relayout(x: Tensor, grid: str, source: str, target: str, name: str, phase: str) -> Tensor:
    """`x` in another layout; always a tensor of its own."""
    mesh = grid_named(grid)
    one, other = Layout.parse(mesh.grid, source), Layout.parse(mesh.grid, target)
    relayout_checked(x, one, other, mesh, name)
    moved = Move(x, relayout_steps(mesh.grid, one.dims, other.dims), mesh, (name,), phase).finish()
    is_own = moved.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    return moved.contiguous() if is_own else moved.clone(memory_format=torch.contiguous_format)


_relayout = torch.library.custom_op("ndtp::relayout", _run_relayout, mutates_args=())


@_relayout.register_fake
def _(x: Tensor, grid: str, source: str, target: str, name: str, phase: str) -> Tensor:
    mesh = grid_named(grid)
    one, other = Layout.parse(mesh.grid, source), Layout.parse(mesh.grid, target)
    return x.new_empty(other.shard_shape(relayout_checked(x, one, other, None, name)))


def _save_layouts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.grid, ctx.source, ctx.target, ctx.name, _ = inputs


def _differentiate_relayout(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _relayout(grad, ctx.grid, ctx.target, ctx.source, ctx.name, "dgrad"), *(None,) * 5


_relayout.register_autograd(_differentiate_relayout, setup_context=_save_layouts)

# By the names of the ops: what they do, for those who look inside (`ndtp.CommMeter`).
IMPLEMENTATIONS.update(
    {"ndtp::mlp": _run_mlp, "ndtp::mlp_backward": _run_mlp_backward, "ndtp::relayout": _run_relayout}
)
