"""The rivals of the benchmarks on the same block: torch's plan, and Megatron's layer written out."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ndtp.compute.torch_calls import AutogradContext


def wait_until_there(*tensors: Tensor | None) -> None:
    """DTensor returns results while their collective is in flight; their first use, which a step contains, waits."""
    for tensor in tensors:
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor.trigger_wait()


class DenseBlock(nn.Module):
    """The block that everyone parallelizes, without biases."""

    def __init__(
        self, hidden: int, ffn: int, dtype: torch.dtype, device: str, activation: Callable[[Tensor], Tensor] = F.gelu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(hidden, ffn, bias=False, dtype=dtype, device=device)
        self.down = nn.Linear(ffn, hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def torch_plan(dense: DenseBlock, device_type: str, sequence_parallel: bool) -> nn.Module:
    """torch's own: ColwiseParallel, then RowwiseParallel; activations whole, or split by rows (`sequence_parallel`)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    lies = Shard(0) if sequence_parallel else Replicate()
    styles = {"up": ColwiseParallel(input_layouts=lies), "down": RowwiseParallel(output_layouts=lies)}
    return parallelize_module(dense, mesh, styles)  # type: ignore[arg-type]


class CopyIn(torch.autograd.Function):
    """Megatron's f: forward nothing, backward an all-reduce over all ranks."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad


class SumOut(torch.autograd.Function):
    """Megatron's g: forward an all-reduce over all ranks, backward nothing."""

    @staticmethod
    def forward(ctx: AutogradContext, y: Tensor) -> Tensor:
        y = y.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Tensor:
        return grad


class MegatronBlock(nn.Module):
    """Columns of `up` and rows of `down` on every rank; an all-reduce forward and one backward.

    Source: Shoeybi et al., "Megatron-LM", 2019.
    """

    def __init__(self, dense: DenseBlock) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.activation = dense.activation
        self.up = nn.Parameter(dense.up.weight.detach().chunk(ranks, 0)[rank].clone())
        self.down = nn.Parameter(dense.down.weight.detach().chunk(ranks, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return SumOut.apply(F.linear(self.activation(F.linear(CopyIn.apply(x), self.up)), self.down))


# name -> (builder from a dense block, whether rows are split outside)
RIVALS: dict[str, tuple[Callable[[DenseBlock, str], nn.Module], bool]] = {
    "torch Colwise/Rowwise": (lambda dense, device: torch_plan(dense, device, False), False),
    "torch sequence parallel": (lambda dense, device: torch_plan(dense, device, True), True),
    "Megatron-style 1D": (lambda dense, device: MegatronBlock(dense), False),
}
