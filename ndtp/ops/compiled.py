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

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.collectives.meter import IMPLEMENTATIONS
from ndtp.runtime.chain import Forms, compare_chain, program_of
from ndtp.runtime.dry_grid import DryGrid
from ndtp.runtime.grid_like import GridLike
from ndtp.runtime.moves import Move
from ndtp.runtime.process_grid import grid_named
from ndtp.runtime.program import Program
from ndtp.runtime.slots import Key

# ------------------------------------------------------------------------------------------------- traced by Dynamo


def chain(
    shards: Sequence[Tensor | None],
    plans: Sequence[MatMulPlan],
    activations: Sequence[str | None],
    mesh: GridLike,
) -> Tensor:
    """The chain of products of plain shards: A, the weights, and the biases or None; see `ndtp.ops.products.mlp`."""
    tensors = [x for x in shards if x is not None]
    # Decides what is kept and what backward does; the collectives of forward are the same in any case.
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    return _mlp(tensors, chain_text(shards[len(plans) + 1 :], plans, activations, mesh), needs)[0]


def chain_text(
    biases: Sequence[Tensor | None],
    plans: Sequence[MatMulPlan],
    activations: Sequence[str | None],
    mesh: GridLike,
) -> str:
    """A line with the name of the grid, and one a product; what `ChainSpec.parse` reads."""
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


# ------------------------------------------------------------------------------------------------------- the chain


class ChainSpec(NamedTuple):
    """A chain, read back from the text that a compiled op takes."""

    mesh: GridLike
    plans: tuple[MatMulPlan, ...]
    activations: tuple[str | None, ...]
    has_bias: tuple[bool, ...]

    @classmethod
    def parse(cls, text: str) -> ChainSpec:
        name, lines = text.split("\n", 1)
        mesh = grid_named(name)
        return cls(mesh, *_products(mesh.grid, lines))

    def in_place(self, given: Sequence[Any], missing: Any = None) -> tuple[Any, ...]:
        """Return A, the weights and the biases in their places, with None for biases that are absent."""
        rest = iter(given[len(self.plans) + 1 :])
        biases = [next(rest) if has else missing for has in self.has_bias]
        return (*given[: len(self.plans) + 1], *biases)

    def program(self, forms: Forms, needs: Sequence[bool], may_measure: bool = True) -> Program:
        """Return the chain's program.

        Where the number of chunks is open, all ranks may measure together while they compile.
        """
        return program_of(
            self.in_place(forms), self.plans, self.activations, self.mesh, self.in_place(needs, missing=False),
            may_measure=may_measure,
        )  # fmt: skip

    def outline(self, forms: Forms, needs: Sequence[bool], may_measure: bool = True) -> _Outline:
        chunks = self.program(forms, needs, may_measure).setting.rows[0].count
        return _outline(self.mesh.grid, self.mesh.rank, self[1:], forms, tuple(needs), chunks)


@lru_cache(maxsize=4096)
def _products(grid: Grid, lines: str) -> tuple[tuple[Any, ...], ...]:
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


def _forms(tensors: Sequence[Tensor]) -> Forms:
    return tuple((tuple(int(size) for size in x.shape), x.dtype, x.device) for x in tensors)


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
    """The tensors that a forward returns, without memory."""

    shape: tuple[int, ...]
    kept: tuple[_Kept, ...]


@lru_cache(maxsize=4096)
def _outline(
    grid: Grid, rank: int, products: tuple[Any, ...], forms: Forms, needs: tuple[bool, ...], chunks: int
) -> _Outline:
    """Run the program on tensors without memory, to learn which tensors are kept and from which operands they come."""
    mesh = DryGrid(grid, rank)
    spec = ChainSpec(mesh, *products)
    program = program_of(
        spec.in_place(forms), spec.plans, spec.activations, mesh, spec.in_place(needs, missing=False), chunks
    )
    with _disable_current_modes():  # torch 2.11 asks for the outline inside of its fake mode
        tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, _ in filter(None, forms)]
        c, found = program.forward(mesh.step, spec.in_place(tensors))
    kept = dict(zip(program.kept, found, strict=True))
    inputs = {_place(tensor): i for i, tensor in enumerate(tensors)}
    outputs: dict[Any, int] = {}
    entries = []
    for i, (key, tensor) in enumerate(kept.items()):
        place = _place(tensor)
        entries.append(_Kept(key, tuple(tensor.shape), tensor.dtype, inputs.get(place), outputs.get(place)))
        outputs.setdefault(place, i)
    return _Outline(tuple(c.shape), tuple(entries))


def _place(x: Tensor) -> tuple[Any, ...]:
    """Return one key for tensors that are one memory, viewed in one way."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def _run_mlp(tensors: Sequence[Tensor], chain: str, needs: Sequence[bool]) -> list[Tensor]:
    """C of the last product, and what backward needs.

    Args:
        tensors: A, the weights, and those biases that there are.
        chain: what `chain_text` wrote.
        needs: whose gradients are wanted.
    """
    spec, forms = ChainSpec.parse(chain), _forms(tensors)
    mesh, operands = spec.mesh, spec.in_place(tensors)
    if mesh.check:
        compare_chain(mesh, operands, spec.plans, spec.activations, needs)
    outline = spec.outline(forms, needs)
    # No weight is gathered ahead of its chain: the compiler may have changed the order of use.
    c, kept = spec.program(forms, needs).forward(mesh.step, operands)
    outputs, taken = [c.contiguous()], {_place(x)[0] for x in (c, *tensors)}
    for tensor, entry in zip(kept, outline.kept, strict=True):
        if not entry.is_new:
            outputs.append(tensor.new_empty(0))
            continue
        is_part = _place(tensor)[0] in taken  # an op may not return a part of what it was given or returns
        outputs.append(tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor.contiguous())
        taken.add(_place(outputs[-1])[0])
    return outputs


_mlp = torch.library.custom_op("ndtp::mlp", _run_mlp, mutates_args=())


@_mlp.register_fake
def _(tensors: Sequence[Tensor], chain: str, needs: Sequence[bool]) -> list[Tensor]:
    # Ranks that infer need not compile together: what they compile for may be theirs alone.
    outline, a = ChainSpec.parse(chain).outline(_forms(tensors), needs, may_measure=any(needs)), tensors[0]
    return [
        a.new_empty(outline.shape),
        *(a.new_empty(entry.shape if entry.is_new else (0,), dtype=entry.dtype) for entry in outline.kept),
    ]


def _run_mlp_backward(
    grad: Tensor, kept: Sequence[Tensor], chain: str, needs: Sequence[bool], shapes: Sequence[int]
) -> list[Tensor]:
    """The gradients that `needs` asks for, finished.

    Args:
        kept: by the keys of the outline.
        shapes: of all tensors that forward was given, one after the other.
    """
    spec = ChainSpec.parse(chain)
    program = spec.program(tuple((shape, grad.dtype, grad.device) for shape in _cut(spec, shapes)), needs)
    step = spec.mesh.step
    step.late.enter()
    if step.partial_sums and torch._C._current_graph_task_id() >= 0:  # type: ignore[attr-defined]
        step.late.end_with_backward(step.partial_sums)  # of eager code, which left them to the next backward
    found = program.backward(step, grad, list(kept))
    gradients = [each.wait() if isinstance(each, Move) else each for each in found if each is not None]
    return [gradient.contiguous() for gradient in gradients]


_mlp_backward = torch.library.custom_op("ndtp::mlp_backward", _run_mlp_backward, mutates_args=())


@_mlp_backward.register_fake
def _(grad: Tensor, kept: Sequence[Tensor], chain: str, needs: Sequence[bool], shapes: Sequence[int]) -> list[Tensor]:
    each = _cut(ChainSpec.parse(chain), shapes)
    return [grad.new_empty(shape) for shape, need in zip(each, needs, strict=True) if need]


def _cut(spec: ChainSpec, shapes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    sizes = iter(shapes)
    dims = (spec.plans[0].a.ndim, *(plan.b.ndim for plan in spec.plans), *(1 for has in spec.has_bias if has))
    return tuple(tuple(next(sizes) for _ in range(count)) for count in dims)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, chain, needs = inputs
    ctx.set_materialize_grads(False)
    found: list[Tensor] = []
    for entry, own in zip(ChainSpec.parse(chain).outline(_forms(tensors), needs).kept, output[1:], strict=True):
        found.append(
            tensors[entry.input] if entry.input is not None else own if entry.output is None else found[entry.output]
        )
    ctx.save_for_backward(*found)
    ctx.chain, ctx.needs = chain, needs
    ctx.shapes = [int(size) for tensor in tensors for size in tensor.shape]


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, None, None]:
    if grads[0] is None:
        return [None for _ in ctx.needs], None, None
    found = iter(_mlp_backward(grads[0], list(ctx.saved_tensors), ctx.chain, ctx.needs, ctx.shapes))
    return [next(found) if need else None for need in ctx.needs], None, None


_mlp.register_autograd(_differentiate, setup_context=_save)

# By the names of the ops: what they do, for those who look inside (`ndtp.CommMeter`).
IMPLEMENTATIONS.update({"ndtp::mlp": _run_mlp, "ndtp::mlp_backward": _run_mlp_backward})
