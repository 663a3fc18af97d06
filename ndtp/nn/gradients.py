"""Gradients of a model of which a part is on a grid: sharded parameters are DTensors, the others plain tensors.

The norm of a model is the norm of its tensors' norms.  That of a plain tensor is known to its rank; that of a DTensor
is put together from the shards along the dims of its mesh that split it, and on no others: replicas count once.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ndtp.compute.gemm import LOW_PRECISION
from ndtp.errors import GridError
from ndtp.ops.gradients import all_reduce, joined_norms
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.runtime.wide_gradients import WideGradient, wide_gradient_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for DTensors on any meshes and plain tensors together, a mix that torch refuses.

    Returns the total norm before clipping, the same on every rank.  Norms of shards are put together in fp64, so the
    grid does not show beyond rounding.  A collective of every mesh that there is a gradient on, one small all-reduce
    for each of its dims: all ranks give the same parameters in the same order.

    Args:
        norm_type: any order that `torch.linalg.vector_norm` has: 2, 1, inf, -inf, 0, negative ones.
        foreach: as torch's: None takes torch's foreach kernels wherever gradients are dense.

    Raises:
        GridError: a parameter is on a mesh that this rank is not part of, so its norm cannot be known here.
        RuntimeError: the norm is not finite, and `error_if_nonfinite`; on every rank alike.  Or `foreach` is True, and
            a gradient is sparse.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            warnings.warn("`parameters` is an empty generator, no gradient is clipped", stacklevel=3)
    norm_type = float(norm_type)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    shards = [_shard(grad) for grad in grads]
    if foreach and any(shard.is_sparse for shard in shards):
        raise RuntimeError("clip_grad_norm_: foreach=True, but a gradient is sparse\n  fix: foreach=None")
    norms = _whole_norms(grads, _norms([_summable(grad) for grad in grads], norm_type, foreach), norm_type)
    dtype = reduce(torch.promote_types, (_norm_dtype(grad) for grad in grads))
    total = torch.linalg.vector_norm(torch.stack([norm.to(shards[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"clip_grad_norm_: the total norm of order {norm_type} of the gradients is {total.item()}")
    _scale(shards, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0), foreach)
    return total.to(dtype)


def _norm_dtype(grad: Tensor) -> torch.dtype:
    """Return the dtype of `torch.linalg.vector_norm`'s result."""
    return grad.dtype.to_real() if grad.dtype.is_complex else grad.dtype


def _shard(grad: Tensor) -> Tensor:
    """Return this rank's shard of a gradient, without a copy."""
    from torch.distributed.tensor import DTensor

    if not isinstance(grad, DTensor):
        return grad
    if grad.device_mesh.get_coordinate() is None:
        raise GridError(
            f"clip_grad_norm_: this rank is not part of {grad.device_mesh}, which a parameter {tuple(grad.shape)} is on"
            "\n  fix: pass the parameters of this rank's meshes"
        )
    return grad.to_local()


def _summable(grad: Tensor) -> Tensor:
    """This rank's elements of a gradient, each with its final value."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
        placements = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
        grad = grad.redistribute(placements=placements)
    return _shard(grad)


def _norms(tensors: Sequence[Tensor], norm_type: float, foreach: bool | None) -> list[Tensor]:
    """The norm of each, in fp64, made from sums in fp32 at least; of no elements, one that adds nothing to others."""
    if norm_type > 0:  # zeros do not count
        dense = [x.coalesce().values() if x.is_sparse else x for x in tensors]
    else:
        dense = [x.to_dense() if x.is_sparse else x for x in tensors]
    empty = math.inf if norm_type < 0 else 0.0
    norms = [x.new_full((), empty, dtype=torch.float64) for x in dense]
    for (_, dtype), places in _alike(dense).items():
        places = [i for i in places if dense[i].numel()]
        wide = torch.float32 if dtype in LOW_PRECISION else None
        if foreach is False:
            found = [torch.linalg.vector_norm(dense[i], norm_type, dtype=wide) for i in places]
        else:
            found = list(torch._foreach_norm([dense[i] for i in places], norm_type, dtype=wide)) if places else []
        for i, norm in zip(places, found, strict=True):
            norms[i] = norm.double()
    return norms


def _whole_norms(grads: Sequence[Tensor], norms: list[Tensor], norm_type: float) -> list[Tensor]:
    """The norms of whole tensors, from those of this rank's shards: an all-reduce for each dim of each mesh."""
    from torch.distributed.tensor import DTensor

    norms = list(norms)
    on: dict[DeviceMesh, list[int]] = {}
    for i, grad in enumerate(grads):
        if isinstance(grad, DTensor):
            on.setdefault(grad.device_mesh, []).append(i)
    for mesh, places in on.items():
        for dim in range(mesh.ndim):
            split: list[int] = [i for i in places if _is_split(grads[i], dim)]
            if split and mesh.size(dim) > 1:
                whole = joined_norms(torch.stack([norms[i] for i in split]), norm_type, mesh.get_group(dim))
                for i, norm in zip(split, whole.unbind(), strict=True):
                    norms[i] = norm
    return norms


def _is_split(grad: Any, dim: int) -> bool:
    placement = grad.placements[dim]
    return not (placement.is_replicate() or placement.is_partial())


def _scale(tensors: Sequence[Tensor], by: Tensor, foreach: bool | None) -> None:
    for (device, dtype), places in _alike(tensors).items():
        factor = by.to(device, torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32)
        dense = [tensors[i] for i in places if not tensors[i].is_sparse]
        if dense and foreach is not False:
            torch._foreach_mul_(dense, factor)
        for x in dense if foreach is False else []:
            x.mul_(factor)
        for x in (tensors[i] for i in places if tensors[i].is_sparse):
            x.mul_(factor)


def _alike(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Places of those that foreach kernels take together."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        alike.setdefault((x.device, x.dtype), []).append(i)
    return alike


@torch.no_grad()
def sum_plain_gradients(model: nn.Module, mesh: ProcessGrid, axes: Sequence[str]) -> None:
    """Sum the gradients of a model's plain parameters over axes that split rows (`dp`).

    For a model that is put together of ndtp's modules and others.  ndtp's own parameters need none of it: their
    gradients are already summed, as are all in a model that was parallelized.
    """
    from torch.distributed.tensor import DTensor

    left: dict[tuple[str, ...], list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            summed = getattr(parameter, "ndtp_summed_over", ())
            left.setdefault(tuple(axis for axis in axes if axis not in summed), []).append((name, parameter.grad))
    for over, plain in left.items():
        all_reduce(plain, mesh, over)


def accumulate_in_fp32(parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients of 16-bit parameters add up in fp32 from now on, over several backwards.

    `.grad` stays in the parameter's dtype and is the sum, rounded once; so are the sums that `mesh.accumulate()` holds
    back.  Collectives move what they moved.  It takes 4 bytes for each element that this rank has, from the first
    backward on, and keeps a `.grad` that was set to None until the parameter's next one comes.  Parameters of 32 bits
    and more are left as they are.

    Source: `accumulate_allreduce_grads_in_fp32` of Megatron-LM.
    """
    for parameter in parameters:
        is_narrow = parameter.is_floating_point() and parameter.itemsize < 4
        if is_narrow and parameter.requires_grad and wide_gradient_of(parameter) is None:
            WideGradient(parameter)
