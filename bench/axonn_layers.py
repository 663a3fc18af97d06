"""AxoNN's own layers on gloo, as a rival in `overlap.py` where they are installed.

    pip install axonn==0.2.0

They ask for CUDA in four places, none of which computes: these are answered with the CPU's while they run.

Source: Singh et al., "A 4D hybrid algorithm to scale parallel training to thousands of GPUs", 2023.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ndtp


def rivals(blocks: Sequence[tuple[nn.Linear, Any, nn.Linear]], grid: ndtp.Grid) -> Iterator[tuple[str, AxonnBlocks]]:
    """AxoNN as it is by default, and with gathered weights kept; none where it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        name = f"AxoNN {version('axonn')}"
        yield name, AxonnBlocks(blocks, grid, keeps=False)
        yield f"{name}, weights kept", AxonnBlocks(blocks, grid, keeps=True)


@contextlib.contextmanager
def on_cpus() -> Iterator[None]:
    """What AxoNN asks of CUDA, and of NCCL."""
    from axonn.intra_layer import fully_connected, overlap_communication

    def wait_for_all() -> None:
        for handle in overlap_communication.handles:
            handle.wait()

    groups, gather, parameters = dist.new_group, dist.all_gather_into_tensor, fully_connected.initialize_params
    with (
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.cuda, "synchronize", wait_for_all),
        mock.patch.object(dist, "new_group", lambda ranks, backend: groups([int(rank) for rank in ranks])),
        mock.patch.object(dist, "all_gather_into_tensor", torch.no_grad()(gather)),  # gloo writes into views
        mock.patch.object(fully_connected, "initialize_params", functools.partial(parameters, init_device="cpu")),
    ):
        yield


class AxonnBlocks(nn.Module):
    """Blocks of two layers, residual ones if there is more than one; x splits the input's features, y the inner ones.

    Args:
        blocks: (up, activation, down) of each, dense.
        keeps: whether gathered weights are kept for backward, as ndtp does, or gathered again, AxoNN's default.
    """

    def __init__(self, blocks: Sequence[tuple[nn.Linear, Any, nn.Linear]], grid: ndtp.Grid, keeps: bool) -> None:
        super().__init__()
        from axonn import axonn

        with on_cpus():
            if not axonn.is_initialized:
                axonn.init(1, 1, grid["y"], grid["x"], grid["z"], gpus_per_node=dist.get_world_size())
            self.blocks = nn.ModuleList(
                nn.ModuleList((_layer(up, False), _layer(down, True))) for up, _, down in blocks
            )
        self.activations = [activation for _, activation, _ in blocks]
        self.grid, self.keeps = grid, keeps
        rows, x = divmod(dist.get_rank(), grid["x"])
        self.at = {"z": rows // grid["y"], "x": x}

    def forward(self, x: Tensor) -> Tensor:
        for (up, down), activation in zip(self.blocks, self.activations, strict=True):
            y = down(activation(up(x, self.keeps)), self.keeps)
            x = x + y if len(self.blocks) > 1 else y
        return x

    def of_whole(self, x: Tensor) -> Tensor:
        """This rank's shard of the result, of the whole input."""
        with on_cpus():
            return self(self.shard(x))  # type: ignore[no-any-return]

    def step_of(self, tokens: int, hidden: int) -> Callable[[], None]:
        """Forward and backward with all of AxoNN's overlap, and the sums that it leaves to the user's program."""
        from axonn.intra_layer import optimize_communication, sync_gradients

        x = self.shard(torch.randn(tokens, hidden)).requires_grad_()
        grad = torch.randn_like(x)

        def step() -> None:
            with (
                on_cpus(),
                optimize_communication(
                    overlap_all_reduce=True,
                    overlap_reduce_scatter=True,
                    overlap_all_gather=True,
                    model_object_for_overlapping_allgathers=self,
                ),
            ):
                self(x).backward(grad)
            sync_gradients(self)

        return step

    def shard(self, whole: Tensor) -> Tensor:
        """Of the rows and features of an input or a result."""
        rows = whole.chunk(self.grid["z"], 0)[self.at["z"]]
        return rows.chunk(self.grid["x"], 1)[self.at["x"]].contiguous()


def _layer(dense: nn.Linear, transpose: bool) -> nn.Module:
    from axonn.intra_layer import Drop, Linear

    layer = Linear(
        dense.in_features,
        dense.out_features,
        transpose=transpose,
        init_method=lambda weight: weight.copy_(dense.weight),
        expert_mode=True,
    )
    with torch.no_grad():
        layer.bias.copy_(Drop.apply(dense.bias.detach(), layer.outer_group))
    return layer
