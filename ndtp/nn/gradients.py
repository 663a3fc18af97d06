"""Gradients of a model of which a part is on the grid: sharded parameters are DTensors, the others plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ndtp.process_grid import ProcessGrid


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for DTensors and plain tensors together, which torch refuses to mix.

    Returns the total norm before clipping, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite`; on every rank alike.
    """
    from torch.distributed.tensor import DTensor

    kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            kinds[isinstance(parameter, DTensor)].append(parameter)
    norms = []
    for kind in kinds:
        if kind:
            norm = get_total_norm([p.grad for p in kind if p.grad is not None], norm_type)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"clip_grad_norm_: the total norm of order {norm_type} of the gradients is {total.item()}")
    for kind in kinds:
        if kind:
            clip_grads_with_norm_(kind, max_norm, total)
    return total


@torch.no_grad()
def sum_plain_gradients(model: nn.Module, mesh: ProcessGrid, axes: Sequence[str]) -> None:
    """Sum the gradients of a model's plain parameters over axes that split rows (`dp`).

    ndtp's own parameters need none of it: their gradients are already summed.
    """
    from torch.distributed.tensor import DTensor

    if not mesh.grid.nontrivial(axes):
        return
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad, group=mesh.group(mesh.grid.nontrivial(axes)))
