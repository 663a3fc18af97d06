"""Bytes that a product or a block needs beside its operands: predicted by a dry run, measured by counting.

The prediction is the program itself, on tensors that have shapes and no memory, and with collectives that send nothing:
the same tasks, the same autograd, the same releases.  It needs no process group, and takes the grid of a million ranks
as it takes one of eight.  `ndtp.planner.block_cost.memory` is the closed form for many grids at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.collectives.backends import GLOO, MOVING
from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.errors import LayoutError
from ndtp.ops.products import matmul, mlp
from ndtp.runtime.chain import asked_of
from ndtp.runtime.chunk_count import ahead
from ndtp.runtime.dry_grid import DryGrid

if TYPE_CHECKING:
    from ndtp.runtime.process_grid import ProcessGrid


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, on top of the operands that came in: input, weights and biases.

    Attributes:
        kept: held from forward to backward; C itself, the caller's, is not counted.
        forward: the most that lives at a time in forward, C included.
        backward: the most that lives at a time in backward, what is kept and the gradients that come out included; C
            and its gradient, the caller's, are not counted.
        gradients: what is left after backward: the gradients of the input, the weights and the biases.
    """

    kept: int
    forward: int
    backward: int
    gradients: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside and still live, of any torch program, by their storages.

        with LiveBytes() as live:
            loss(model(x)).backward()
        live.now, live.peak

    On every device alike, meta included, and to the byte: allocators round up, and keep what was freed.  Tensors of
    FakeTensorMode have no memory and are not counted: DTensor makes some at the first operation of each kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._living: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if func.namespace not in ("c10d", "_c10d_functional") and any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor unfolds into plain operations, which come back here one by one
        result = func(*args, **(kwargs or {}))
        made = {id(storage): storage for storage in _storages(result) if id(storage) not in self._living}
        if made:
            given = set(map(id, _storages((args, *(kwargs or {}).values()))))
            for key, storage in made.items():
                if key not in given:
                    self._born(key, storage)
        return result

    def _born(self, key: int, storage: Any) -> None:
        self._living[key] = weakref.ref(storage, lambda _: self._died(key)), storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _died(self, key: int) -> None:
        self.now -= self._living.pop(key)[1]


def _storages(part: object) -> Iterator[object]:
    """Yield the tensors among an operation's arguments or results.

    torch's pytree takes five times as long.
    """
    if isinstance(part, FakeTensor):
        return
    if isinstance(part, Tensor):
        yield part.untyped_storage()
    elif isinstance(part, (tuple, list)):
        for each in part:
            yield from _storages(each)


def measured(forward: Callable[[], Tensor], grad: Tensor | None) -> Memory:
    """Measure the memory of a forward and, unless `grad` is None, of the backward from that gradient of its result.

    Counts what lives here, not what the ring of a `ProcessGrid` keeps: give it `ring_bytes=0`.
    """
    with LiveBytes() as live:
        c = forward()
        done, after = live.peak, live.now
        ours = c.untyped_storage().nbytes() if after else 0
        live.peak = live.now
        if grad is not None:
            c.backward(grad)
    peak = live.peak - ours if grad is not None else 0
    return Memory(after - ours, done, peak, live.now - ours)


def _decided(
    plans: Sequence[MatMulPlan], sizes: Sequence[Mapping[str, int]], mesh: ProcessGrid | None, dtype: torch.dtype
) -> tuple[MatMulPlan, ...]:
    """The plans with the number of chunks that "auto" chose, or will choose without measuring."""
    if asked_of(plans) is not None:
        return tuple(plans)
    plan, rows, choice = plans[0], sizes[0]["m"], None
    if mesh is not None:
        choice = mesh.chunks_chosen(plan).get(rows) or ahead(plans, sizes, mesh, dtype, mesh.device_type)
    if choice is None:
        raise LayoutError(
            f"memory: '{plan.name}' has not chosen its number of chunks for {rows} rows yet\n"
            "  fix: run it once and say on which mesh, or give a number in the place of chunks='auto'"
        )
    return tuple(replace(plan, chunks=choice[0]) for plan in plans)


def memory(
    plans: Sequence[MatMulPlan] | MatMulPlan,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    activation: str = "gelu",
    dgrad: bool = True,
    wgrad: bool | Sequence[bool] = True,
    bias: bool | Sequence[bool] = False,
    bias_grad: bool | Sequence[bool] = True,
    backend: str = GLOO.name,
    mesh: ProcessGrid | None = None,
) -> Memory:
    """Bytes that a product, or a block of several, needs on a rank beside its operands, forward and backward.

    Exact for torch's GEMMs and activations and a grid that keeps no buffers; those of the ring of a `ProcessGrid` come
    on top once they are lent: at most `ring_bytes`.

    Args:
        plans: of a product, or of the products of a block as `ndtp.ops.products.mlp` takes them.
        shape: `(*batch, M, K, N)` of a product; `(tokens, hidden, inner, hidden)` of a block of two, `inner` being what
            the activation leaves.
        dgrad, wgrad: whether the input and the weights want gradients.
        bias, bias_grad: which products have a bias, and whether it wants a gradient.  These three may be given for
            every product.
        backend: "gloo" or "nccl": they receive partial sums differently.
        mesh: the one on which plans with `chunks="auto"` have chosen a number, or do so without measuring.

    Raises:
        LayoutError: sizes that do not fit the plans, or a number of chunks that is not chosen yet.
        ValueError: an unknown activation or backend.
    """
    plans = (plans,) if isinstance(plans, MatMulPlan) else tuple(plans)
    for what, value, known in (("backend", backend, MOVING), ("activation", activation, ACTIVATIONS)):
        if value not in known:
            raise ValueError(f"memory: {what} {value!r} is not one of {', '.join(known)}")
    cut = len(shape) - len(plans) - 1
    lead, features = shape[:cut], shape[cut:]
    if len(plans) > 1 and len(lead) != 1:
        raise LayoutError(f"memory: a block of {len(plans)} products takes {len(plans) + 2} sizes, not {tuple(shape)}")

    made = partial(_without_memory, dtype)
    widths = (*(ACTIVATIONS[activation].width for _ in plans[1:]), 1)
    sizes = [plan.sizes((*lead, k, w * n)) for plan, w, (k, n) in zip(plans, widths, pairwise(features), strict=True)]
    plans = _decided(plans, sizes, mesh, dtype)
    per_product = [[flag] * len(plans) if isinstance(flag, bool) else list(flag) for flag in (wgrad, bias, bias_grad)]
    a = made(plans[0].shard_shape("A", sizes[0]), dgrad)
    weights, biases = [], []
    for plan, size, wants, has_bias, bias_wants in zip(plans, sizes, *per_product, strict=True):
        weights.append(made(plan.shard_shape("B", size), wants))
        biases.append(made(plan.bias.shard_shape((size["n"],)), bias_wants) if has_bias else None)
    grid = DryGrid(plans[0].grid, backend=backend, wire=None if mesh is None else mesh.wire)

    def forward() -> Tensor:
        if len(plans) == 1:
            return matmul(a, weights[0], plans[0], grid, biases[0])
        return mlp(a, weights, plans, grid, activation, biases)

    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, *weights, *biases))
    return measured(forward, made(plans[-1].shard_shape("C", sizes[-1]), False) if wanted else None)


def _without_memory(dtype: torch.dtype, shape: Sequence[int], needs_grad: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_grad)
