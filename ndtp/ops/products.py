"""`matmul`, `batch_matmul`, `mlp` and `relayout`: differentiable, and the only door from tensors to collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ndtp.algebra.binding import bind
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.steps import is_legal
from ndtp.algebra.steps import relayout as relayout_steps
from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.errors import LayoutError
from ndtp.runtime.arrival import Deferred, is_plain, local_shard, taken_in, version_of
from ndtp.runtime.execution import Execution, Stage
from ndtp.runtime.moves import Move
from ndtp.runtime.weight_prefetch import owner_of
from ndtp.schedule.tasks import Wanted

if TYPE_CHECKING:
    from ndtp.runtime.process_grid import ProcessGrid


def matmul(a: Tensor, b: Tensor, plan: MatMulPlan, mesh: ProcessGrid, bias: Tensor | None = None) -> Tensor:
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
        CommunicationError: a peer died or stalled.

    Source: MindSpore's high-dimension tensor parallel; Agarwal et al. 1995 for the 3D algorithm.
    """
    return chain(a, (b,), (bias,), (plan,), (None,), mesh)


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    plans: Sequence[MatMulPlan],
    mesh: ProcessGrid,
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
    return chain(x, weights, biases or (None,) * len(plans), plans, activations, mesh, layers)


def chain(
    a: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    plans: Sequence[MatMulPlan],
    activations: Sequence[str | None],
    mesh: ProcessGrid,
    layers: Sequence[nn.Module] = (),
) -> Tensor:
    """Products one after the other, each but the last with an activation behind it.

    Args:
        layers: the modules of which the weights are, if they are of any: their weights are gathered ahead.
    """
    mesh.step.late.enter()
    for plan, b, bias in zip(plans, weights, biases, strict=True):
        for x, tensor in ((b, "B"), (bias, "bias")):
            if x is not None and not is_plain(x):
                _check_placements(x, tensor, plan, mesh)
    if not is_plain(a):
        _check_placements(a, "A", plans[0], mesh)
    given: tuple[Any, ...] = (*weights, *biases)
    given_a = a
    if not a.is_meta and torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        a = _autocast(a, dtype)
        weights = [_autocast(b, dtype) for b in weights]
        biases = [None if bias is None else _autocast(bias, dtype) for bias in biases]
    a = local_shard(a)
    if torch.compiler.is_compiling():
        from ndtp.ops import compiled

        shards = [None if x is None else local_shard(x) for x in (*weights, *biases)]
        return compiled.chain(a, shards[: len(plans)], shards[len(plans) :], plans, activations, mesh)  # type: ignore[arg-type]
    arriving: list[tuple[Tensor | None, Deferred | None]] = [
        (None, None) if x is None else taken_in(x, plan.relayouts[name], mesh, parameter)
        for name, tensors, parameters in (("dB", weights, given), ("dbias", biases, given[len(plans) :]))
        for x, plan, parameter in zip(tensors, plans, parameters, strict=False)
    ]
    shards = [shard for shard, _ in arriving]
    bound = check_chain(a, shards[: len(plans)], shards[len(plans) :], plans, activations, mesh)  # type: ignore[arg-type]
    owners = [owner_of(b, layer) for b, layer in zip_longest(given[: len(plans)], layers)]
    stages = [
        Stage(plan, sizes, activation, None if owner is None else parameter, owner)
        for (plan, sizes), activation, parameter, owner in zip(bound, activations, given, owners, strict=False)
    ]
    execution = Execution(stages, mesh, num_chunks(plans, [stage.sizes for stage in stages], mesh, a))
    inputs = Inputs(plans, given_a, given, [deferred for _, deferred in arriving])
    c = _Chain.apply(execution, inputs, a, *shards)
    if c.grad_fn is not None and any(deferred is not None for _, deferred in arriving):
        mesh.step.late.note_chain(c.grad_fn._sequence_nr())
    return c


def check_chain(
    a: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    plans: Sequence[MatMulPlan],
    activations: Sequence[str | None],
    mesh: ProcessGrid | None,
    needs: Sequence[bool] | None = None,
) -> list[tuple[MatMulPlan, Mapping[str, int]]]:
    """The plans bound to the shapes of the shards, and their sizes; compared across ranks where `mesh` asks for it.

    Args:
        needs: whose gradients are wanted, where the tensors themselves do not say.

    Raises:
        LayoutError: shards that do not fit each other or the plans.
    """
    if mesh is not None and mesh.check:
        from ndtp.collectives.cross_check import chain_signature, cross_check

        cross_check(mesh, chain_signature(a, weights, biases, plans, activations, mesh, needs))
    bound: list[tuple[MatMulPlan, Mapping[str, int]]] = []
    shape: Sequence[int] = a.shape
    for plan, b, bias, activation in zip(plans, weights, biases, activations, strict=True):
        if mesh is not None and plan.grid is not mesh.grid and plan.grid != mesh.grid:
            raise LayoutError(
                f"MatMul '{plan.name}': the plan is for grid {plan.grid}, the process grid is {mesh.grid}"
            )
        fitted, sizes = bind(plan, tuple(shape), tuple(b.shape))
        _check_operands(fitted, a, b, bias, sizes)
        if activation is not None:
            shape = activated_shape(fitted.shard_shape("C", sizes), activation, fitted)
        bound.append((fitted, sizes))
    return bound


def activated_shape(shape: Sequence[int], activation: str, plan: MatMulPlan) -> tuple[int, ...]:
    """The shape of the shard that an activation leaves of a product's.

    Raises:
        LayoutError: a gated activation of an odd number of columns.
    """
    width = ACTIVATIONS[activation].width
    if shape[-1] % width:
        raise LayoutError(
            f"mlp: '{plan.name}' leaves shards of {shape[-1]} columns, {activation} takes {width} for each that it "
            f"gives\n  fix: a multiple of {width * plan.out.num_splits(-1)} features"
        )
    return (*shape[:-1], shape[-1] // width)


def num_chunks(plans: Sequence[MatMulPlan], sizes: Sequence[Mapping[str, int]], mesh: ProcessGrid, a: Tensor) -> int:
    """The number of chunks that a chain asks for, or that pays; a collective where it is chosen for the first time."""
    if any(plan.chunks == "auto" for plan in plans):
        from ndtp.runtime.chunk_count import resolve

        return resolve(plans, sizes, mesh, a)
    return min(int(plan.chunks) for plan in plans)


def _check_operands(plan: MatMulPlan, a: Tensor, b: Tensor, bias: Tensor | None, sizes: Mapping[str, int]) -> None:
    if a.device != b.device or (bias is not None and bias.device != a.device):
        devices = [(name, x.device) for name, x in (("A", a), ("B", b), ("bias", bias)) if x is not None]
        raise LayoutError(
            f"MatMul '{plan.name}': {', '.join(f'{name} is on {device}' for name, device in devices)}\n"
            "  fix: bring the operands to one device; one on meta has no values yet: to_empty, then load or draw them"
        )
    if a.dtype != b.dtype or (bias is not None and bias.dtype != a.dtype):
        raise LayoutError(
            f"MatMul '{plan.name}': A is {a.dtype}, B is {b.dtype}"
            + (f", bias is {bias.dtype}" if bias is not None else "")
            + "; fix: cast them to one dtype, or use torch.autocast"
        )
    if bias is not None and tuple(bias.shape) != plan.bias.shard_shape((sizes["n"],)):
        raise LayoutError(
            f"MatMul '{plan.name}': the bias shard has shape {tuple(bias.shape)}; bias[{plan.bias.label('N')}] of "
            f"{sizes['n']} elements has shards of {plan.bias.shard_shape((sizes['n'],))}"
        )


def batch_matmul(a: Tensor, b: Tensor, plan: MatMulPlan, mesh: ProcessGrid) -> Tensor:
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


def relayout(x: Tensor, source: Layout, target: Layout, mesh: ProcessGrid, name: str = "relayout") -> Tensor:
    """This rank's shard of a tensor in the layout `target`, from its shard in `source`.

    Differentiable: the gradient goes the other way, from `target` to `source`.

    Raises:
        LayoutError: an axis that is gathered is not the minor one of its dim; shapes that do not divide.
    """
    for layout in (source, target):
        if layout.grid is not mesh.grid and layout.grid != mesh.grid:
            raise LayoutError(
                f"relayout '{name}': {layout} lies on grid {layout.grid}, the process grid is {mesh.grid}"
            )
    if source == target:
        return x
    if torch.compiler.is_compiling():
        from ndtp.ops import compiled

        return compiled.relayout(x, source, target, mesh, name)
    mesh.step.late.enter()
    relayout_checked(x, source, target, mesh, name)
    return _Relayout.apply(x, source, target, mesh, name, "forward")


def relayout_checked(x: Tensor, source: Layout, target: Layout, mesh: ProcessGrid | None, name: str) -> tuple[int, ...]:
    """The global shape of what is to be laid out anew; compared across ranks where `mesh` asks for it."""
    if mesh is not None and mesh.check:
        from ndtp.collectives.cross_check import cross_check, signature_of

        cross_check(mesh, f"relayout from {source} to {target}; {signature_of(x)}")
    if x.dim() != source.ndim or target.ndim != source.ndim:
        raise LayoutError(f"relayout '{name}': the shard has {x.dim()} dims, the layouts {source} and {target}")
    shape = tuple(int(size) * source.num_splits(dim) for dim, size in enumerate(x.shape))
    target.shard_shape(shape)
    if not is_legal(source.grid, source.dims, target.dims):
        raise LayoutError(
            f"relayout '{name}': from {source} to {target}, an axis that leaves or enters a dim is not its minor one\n"
            f"  fix: go through {source.with_dims(*((),) * source.ndim)}, the replicated layout"
        )
    return shape


def _check_placements(x: Any, tensor: str, plan: MatMulPlan, mesh: ProcessGrid) -> None:
    """A DTensor must lie as the plan says: one that lies otherwise may have shards of the same shape."""
    if mesh.device_mesh is None:
        return
    layout = {"A": plan.a, "B": plan.b}.get(tensor) or plan.bias
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
def _placements(layout: Layout, mesh_axes: tuple[str, ...]) -> tuple[Any, ...]:
    return layout.placements_on(mesh_axes)


def gradients_wanted(plans: Sequence[MatMulPlan], needs: Sequence[bool], need_bias: Sequence[bool]) -> list[Wanted]:
    """What every product does in backward; `needs` is of A and the weights, `need_bias` of the biases."""
    return [
        Wanted(any(needs[: p + 1]) or any(need_bias[:p]), needs[p + 1], need_bias[p], plan.regather)
        for p, plan in enumerate(plans)
    ]


class Inputs:
    """Operands of a chain as they were passed: what their gradients and their versions are known by."""

    def __init__(
        self, plans: Sequence[MatMulPlan], a: Tensor, given: Sequence[Any], deferred: Sequence[Deferred | None]
    ) -> None:
        self.plans, self.deferred = plans, deferred
        # Of other tensors autograd itself watches those that it saves; A that was gathered is not needed as it was.
        operands = [(0, "A", a)] * (not is_plain(a)) + [(p, "B", b) for p, b in enumerate(given[: len(plans)])]
        watched = [each for each in operands if each[2].is_leaf or not is_plain(each[2])]
        self._watched = [(*each, version_of(each[2])) for each in watched] if torch.is_grad_enabled() else []

    def check_unchanged(self, wanted: Sequence[Wanted]) -> None:
        """Of the operands that backward multiplies by, whether or not a gathered copy was kept.

        Raises:
            RuntimeError: as torch's own, where one was changed in place since forward.
        """
        for p, name, x, version in self._watched:
            is_needed = wanted[p].dgrad if name == "B" else wanted[p].wgrad
            if is_needed and (now := version_of(x)) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{name} of MatMul '{self.plans[p].name}', {tuple(x.shape)}, is at version {now[0]}; expected "
                    f"version {version[0]} instead\n  fix: backward first, or multiply by a clone"
                )

    def held(self, ctx: Any, mesh: ProcessGrid) -> set[tuple[int, str]]:
        """Gradients that stop before an all-reduce: for those of later micro-batches, or to take up earlier ones."""
        if not mesh.step.partial_sums.holds_back:
            return set()
        count, edges = len(self.plans), iter(ctx.next_functions[1:])  # there is one for every tensor
        held = set()
        for i, (deferred, exists) in enumerate(zip(self.deferred, ctx.shapes, strict=True)):
            arrival = None if exists is None else next(edges)[0]
            if deferred is not None and deferred.accumulates(arrival):
                held.add((i % count, "dB" if i < count else "dbias"))
        return held


class _Chain(torch.autograd.Function):
    """Products in a chain; tensors are A, then the weights, then the biases (or None)."""

    @staticmethod
    def forward(ctx: Any, execution: Execution, inputs: Inputs, *tensors: Tensor | None) -> Tensor:
        count = len(execution.stages)
        a, weights, biases = tensors[0], tensors[1 : count + 1], tensors[count + 1 :]
        needs, need_bias = ctx.needs_input_grad[2 : count + 3], ctx.needs_input_grad[count + 3 :]
        wanted = gradients_wanted([stage.plan for stage in execution.stages], needs, need_bias)
        c, kept = execution.forward(a, weights, biases, wanted)  # type: ignore[arg-type]
        ctx.execution, ctx.inputs, ctx.wanted, ctx.keys = execution, inputs, wanted, tuple(kept)
        ctx.save_for_backward(*kept.values())
        ctx.shapes = [None if x is None else x.shape for x in tensors[1:]]
        return c

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        execution, inputs = ctx.execution, ctx.inputs
        late, sums = execution.mesh.step.late, execution.mesh.step.partial_sums
        late.enter()
        refuse_double_backward(" -> ".join(stage.plan.name for stage in execution.stages))
        inputs.check_unchanged(ctx.wanted)
        kept = dict(zip(ctx.keys, ctx.saved_tensors, strict=True))
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: each goes when its product is done
        held = inputs.held(ctx, execution.mesh)
        da, db, dbias = execution.backward(grad, kept, ctx.wanted, held)
        gradients: list[Tensor | None] = []
        started = []
        for move, deferred, shape in zip(db + dbias, inputs.deferred, ctx.shapes, strict=True):
            if move is not None and deferred is not None and (move.handle is not None or move.is_held):
                deferred.late = late.expect(move, deferred.leaf if move.hold else None, sums)
                started.append(deferred.late)
                gradients.append(grad.new_zeros(()).expand(shape))  # a placeholder that the arrival drops
            else:
                gradients.append(move and move.finish())
        late.came_through(started, sums if held else None)
        return None, None, da, *gradients


def refuse_double_backward(name: str) -> None:
    """At the first backward that autograd is to differentiate: what it would see is not all that is computed.

    Raises:
        RuntimeError: the same on every rank, before any collective.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"MatMul '{name}': its gradient cannot be differentiated again, and create_graph=True asks for that\n"
            "  fix: create_graph=False, or the dense layer (to_dense) where a gradient of gradients is wanted"
        )


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Layout, target: Layout, mesh: ProcessGrid, name: str, phase: str
    ) -> Tensor:
        ctx.arguments = (source, target, mesh, name)
        steps = relayout_steps(mesh.grid, source.dims, target.dims)
        moved = Move(x, steps, mesh, (name,), phase).finish()
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, target, mesh, name = ctx.arguments
        mesh.step.late.enter()
        # By itself, since it is linear: a relayout can be differentiated as often as wanted.
        return _Relayout.apply(grad, target, source, mesh, name, "dgrad"), None, None, None, None, None
