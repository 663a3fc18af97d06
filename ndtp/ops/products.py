"""`matmul`, `batch_matmul`, `mlp` and `relayout`: differentiable, from a rank's shards to its shard of the result.

Norms, losses, embeddings and other reductions have doors of their own beside this one, see `ndtp.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.errors import LayoutError
from ndtp.ops.chain_autograd import run_chain
from ndtp.ops.reductions import reduce, relayout_plan
from ndtp.runtime.arrival import is_plain, local_shard
from ndtp.runtime.chain import compare_chain, program_of

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike


def matmul(a: Tensor, b: Tensor, plan: MatMulPlan, mesh: GridLike, bias: Tensor | None = None) -> Tensor:
    """Multiply two sharded matrices over a process grid.

        a        [M / (z y), K / x]      this rank's shard of A[M_zy, K_x]
        b        [K / (x z), N / y]      this rank's shard of B[K_xz, N_y]
        returns  [M / (z x), N / y]      this rank's shard of C[M_zx, N_y]

        forward  C  = RS_x( AG_y(A) . AG_z(B) )
        dgrad    dA = RS_y( AG_x(dC) . AG_z(B)^T )
        wgrad    dB = RS_z( AG_y(A)^T . AG_x(dC) )

    Shapes are those of the 3D scheme; `plan` gives them for any other, with batch dims in front where its layouts have
    them.  Accumulates in fp32, returns `a.dtype`.  An operand may be a DTensor parameter that lies as the plan says.

    The gradient of a tensor has its layout; where that replicates, every rank gets the same full gradient.  The
    loss is the *sum* over ranks that split rows of their local losses.

    Args:
        bias: this rank's shard of a bias[N], laid out as `plan.bias`; added once, after the reduction.

    Raises:
        LayoutError: a shard's shape does not follow from `plan`, or dtypes differ; the same on every rank.
        TypeError: an operand that is no dense tensor.
        CommunicationError: a peer died or stalled.

    Source: MindSpore's high-dimension tensor parallel; Agarwal et al. 1995 for the 3D algorithm.
    """
    _check_operands(a, b, bias, plan, mesh)
    return chain(a, (b,), (bias,), (plan,), (None,), mesh)


def _check_operands(a: Tensor, b: Tensor, bias: Tensor | None, plan: MatMulPlan, mesh: GridLike) -> None:
    if not isinstance(plan, MatMulPlan) or not hasattr(mesh, "step"):
        raise TypeError(
            f"matmul: the plan is a {type(plan).__name__} and the mesh a {type(mesh).__name__}\n"
            "  fix: matmul(a, b, ndtp.MatMulPlan(...), ndtp.ProcessGrid(grid))"
        )
    operands = {"A": a, "B": b} if bias is None else {"A": a, "B": b, "the bias": bias}
    for name, x in operands.items():
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
            kind = f"a {x.layout} tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise TypeError(f"MatMul '{plan.name}': {name} is {kind}\n  fix: a dense tensor, this rank's shard")


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    plans: Sequence[MatMulPlan],
    mesh: GridLike,
    activation: str = "gelu",
    biases: Sequence[Tensor | None] | None = None,
    layers: Sequence[nn.Module] = (),
) -> Tensor:
    """`matmul(activation(matmul(x, up)), down)` as one schedule over a process grid.

        x        [T / (z y), h / x]      this rank's shard of A[T_zy, h_x]
        up, down                         its shards of the weights, laid out as `plans[0].b` and `plans[1].b`
        returns  [T / (z y), h / x]      laid out as `plans[1].out`

        forward  H  = activation(RS_x( AG_y(A) . AG_z(up) ) + bias),   C = RS_y( AG_x(H) . AG_z(down) ) + bias

    Shapes are those of the 3D scheme.  Chunk i of the activation enters the gathers of the second product as soon as it
    is there, and its weight is gathered while the first product computes.  Gradients are those of the two products.

    Args:
        plans: of the two products; C of the first lies as A of the second.
        activation: its name, see `ndtp.nn.MLP`.  A gated one takes two features for each that it gives: `up` is then
            twice as wide as `down` is deep, gate and up in turns (`ndtp.nn.GatedMLP`).
        biases: this rank's shards, laid out as `plans[i].bias`.
        layers: the modules of which the weights are.

    Raises:
        LayoutError: plans that do not follow one another, and all that `matmul` raises.
        ValueError: an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"mlp: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    for before, after in pairwise(plans):
        if before.out != after.a:
            raise LayoutError(
                f"mlp: '{before.name}' leaves its result as {before.out}, '{after.name}' takes {after.a}\n"
                "  fix: pass the layout of one as that of the other"
            )
    if not len(weights) == len(plans) == len(biases or weights):
        raise LayoutError(f"mlp: {len(weights)} weights, {len(plans)} plans, {len(biases or weights)} biases")
    activations = (*(activation for _ in plans[1:]), None)
    return chain(x, weights, biases or (None,) * len(plans), tuple(plans), activations, mesh, layers)


def chain(
    a: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    plans: tuple[MatMulPlan, ...],
    activations: tuple[str | None, ...],
    mesh: GridLike,
    layers: Sequence[nn.Module] = (),
) -> Tensor:
    """Products one after the other, each but the last with an activation behind it.

    Args:
        layers: the modules of which the weights are, if they are of any: their weights are gathered ahead.
    """
    mesh.step.late.enter()
    given: tuple[Any, ...] = (a, *weights, *biases)
    tensors, are_plain = given, [x is None or is_plain(x) for x in given]
    if not all(are_plain):
        for i, x in enumerate(given):
            if not are_plain[i]:
                _check_placements(x, i, plans, mesh)
    if torch._C._is_any_autocast_enabled() and not a.is_meta and torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        tensors = tuple([None if x is None else _autocast(x, dtype) for x in given])
        are_plain = [x is None or is_plain(x) for x in tensors]
    if torch.compiler.is_compiling():
        from ndtp.ops import compiled

        return compiled.chain([None if x is None else local_shard(x) for x in tensors], plans, activations, mesh)
    if mesh.wire is not None and mesh.wire.products == "bf16" and a.dtype in (torch.float32, torch.bfloat16):
        tensors = tuple([None if x is None else _autocast(x, torch.bfloat16) for x in tensors])
        are_plain = [x is None or is_plain(x) for x in tensors]
    wants = torch.is_grad_enabled()
    needs = tuple([wants and x is not None and x.requires_grad for x in tensors])
    shards = tensors
    if not all(are_plain):
        shards = tuple([x if plain else x._local_tensor for x, plain in zip(tensors, are_plain, strict=True)])
    if mesh.check:
        compare_chain(mesh, shards, plans, activations)
    forms = tuple([None if x is None else (x.shape, x.dtype, x.device) for x in shards])
    program = program_of(forms, plans, activations, mesh, needs)
    return run_chain(program, mesh.step, given, tensors, shards, layers)


def batch_matmul(a: Tensor, b: Tensor, plan: MatMulPlan, mesh: GridLike) -> Tensor:
    """`matmul` for operands that both have batch dims: `C[.., M, N] = A[.., M, K] . B[.., K, N]`.

    Batch dims may be split by axes of their own, and are broadcast as `torch.matmul` would.

    Raises:
        LayoutError: an operand without batch dims, and all that `matmul` raises.
    """
    if plan.a.ndim < 3 or plan.b.ndim < 3:
        raise LayoutError(
            f"BatchMatMul '{plan.name}': A has {plan.a.ndim} dims and B {plan.b.ndim}; both need batch dims\n"
            "  fix: ndtp.matmul takes operands without"
        )
    return matmul(a, b, plan, mesh)


def relayout(
    x: Tensor,
    source: Layout,
    target: Layout,
    mesh: GridLike,
    name: str = "relayout",
    partial: Sequence[str] = (),
    grad_partial: Sequence[str] = (),
    kind: str = "",
) -> Tensor:
    """This rank's shard of a tensor in the layout `target`, from its shard in `source`.

    Differentiable: the gradient goes the other way, from `target` to `source`.

    Args:
        partial: axes over which the shards are unreduced parts of a sum, which is reduced on the way.
        grad_partial: axes over which every rank uses the result for something of its own; the gradients that come back
            are unreduced parts of a sum, which is reduced on their way.
        kind: "activations" or "weights", which travel, and their gradients, as the mesh's `ndtp.Wire` says; default:
            as they are computed.

    Raises:
        LayoutError: an axis that is gathered is not the minor one of its dim; shapes that do not divide; an axis that
            splits what is to be summed over it.
    """
    return reduce(x, relayout_plan(source, target, tuple(partial), tuple(grad_partial), name, kind), mesh)


def _check_placements(x: Any, i: int, plans: Sequence[MatMulPlan], mesh: GridLike) -> None:
    """The i-th operand of a chain must lie as its plan says: one that lies otherwise may have shards of its shape."""
    if mesh.device_mesh is None:
        return
    plan = plans[(i - 1) % len(plans)] if i else plans[0]
    tensor, layout = ("A", plan.a) if i == 0 else ("B", plan.b) if i <= len(plans) else ("bias", plan.bias)
    traced = torch.compiler.is_compiling()  # a compiler warns of a cache
    wanted = layout.placements_on(mesh.mesh_axes) if traced else _placements(layout, mesh.mesh_axes)
    if x.device_mesh != mesh.device_mesh or x.placements != wanted:
        raise LayoutError(
            f"MatMul '{plan.name}': {tensor} is a DTensor with placements {x.placements} on {x.device_mesh}; the "
            f"plan wants {layout}\n  fix: redistribute(mesh.device_mesh, {wanted}), or pass the shard itself"
        )


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype in (torch.float64, dtype) else local_shard(x).to(dtype)


@lru_cache(maxsize=4096)
def _placements(layout: Layout, mesh_axes: tuple[str, ...]) -> tuple[object, ...]:
    return layout.placements_on(mesh_axes)
