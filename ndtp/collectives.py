"""Collectives with handles.  One class a backend; every byte of ndtp passes through `Collectives.start`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ndtp.errors import CommunicationError
from ndtp.meter import LABEL, Label
from ndtp.relayout import Step
from ndtp.spans import is_observed, observed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ndtp.process_grid import ProcessGrid

# torch 2.13 renamed these two; 2.11 has only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What starting a collective returns: the work to wait for, how to finish it, and the buffers to hold until then.
Started = tuple[Any, Callable[[], Tensor], Any]

LOW_PRECISION = (torch.bfloat16, torch.float16)


class Watch:
    """Names the collectives that are started inside, and says of one that fails what it was for."""

    __slots__ = ("_token", "grid", "label")

    def __init__(self, grid: ProcessGrid, label: Label) -> None:
        self.grid, self.label = grid, label

    def __enter__(self) -> None:
        self._token = LABEL.set(self.label)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        LABEL.reset(self._token)
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            label = self.label
            raise CommunicationError(
                f"{label.collective} of {' '.join(label.op)} ({label.phase}) over axis {' '.join(label.axes)} failed: "
                f"{self.grid.describe(label.axes)}\n  cause: {error}"
            ) from error


class Handle:
    """A started collective.  `wait` gives its result, once; the buffers live until then.

    A handle that is dropped (an exception, a gradient nobody asked for) makes the stream wait before its buffers go;
    gloo's own work holds them.
    """

    def __init__(self, owner: Collectives, watch: Watch, work: Any, finish: Callable[[], Tensor], buffers: Any) -> None:
        self._owner, self._watch, self._work, self._finish, self._buffers = owner, watch, work, finish, buffers
        self._open = True
        owner.in_flight += 1

    def wait(self) -> Tensor:
        """Wait on the consumer's stream (NCCL) or in the host (gloo), and return the result.

        Raises:
            CommunicationError: a peer died or stalled.
        """
        try:
            with self._watch:
                if self._work is not None:
                    self._work.wait()
                return self._finish()
        finally:
            self._close()

    def _close(self) -> None:
        self._owner.in_flight -= self._open
        self._open = False
        self._work = self._buffers = None

    def __del__(self) -> None:
        if self._work is not None and self._owner.orders_by_stream:
            self._work.wait()
        self._close()


class Collectives:
    """The collectives of one `ProcessGrid`, by torch's own implementations (NCCL).

    `in_flight` counts the handles that were started and are neither waited for nor dropped.
    """

    orders_by_stream = True  # waiting blocks a stream, not the host

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid = grid
        self.in_flight = 0

    @staticmethod
    def of(grid: ProcessGrid) -> Collectives:
        """The class that fits the backend of the grid's process groups."""
        if grid.backend == "gloo":
            return GlooCollectives(grid)
        return Collectives(grid)

    def start(
        self,
        step: Step,
        tensor: Tensor,
        op: tuple[str, ...],
        phase: str,
        *,
        part: str = "",
        out: Tensor | None = None,
        blocks: bool = False,
    ) -> Handle:
        """Start a collective step on this rank's `tensor`.

        Args:
            step: anything but a slice.
            op: what errors and profiles call it, such as ("matmul", "A").
            phase: "forward", "dgrad" or "wgrad".
            part: which chunk of how many, such as "2/4".
            out: where to put the result of a gather along dim 0 or of a reduce-scatter; contiguous.
            blocks: the gathered matrix stays, or the scattered one comes, as blocks of columns [p, rows, columns / p].
        """
        label = Label(op, phase, step.kind, step.axes, part)
        watch, launch = Watch(self.grid, label), getattr(self, step.kind)
        if is_observed(self.grid):
            launch = observed(launch, self.grid, label)
        with watch:
            group = self.grid.group(step.axes)
            how = {"out": out, "blocks": blocks} if step.kind in ("all_gather", "reduce_scatter") else {}
            work, finish, buffers = launch(tensor, group, group.size(), step, **how)
        return Handle(self, watch, work, finish, buffers)

    def all_gather(
        self,
        x: Tensor,
        group: ProcessGroup,
        ranks: int,
        step: Step,
        out: Tensor | None = None,
        blocks: bool = False,
    ) -> Started:
        """[.., s, ..] -> [.., ranks * s, ..] at `step.dim`, or -> [ranks, .., s, ..] with `blocks`."""
        dim = step.dim or 0
        x = x.contiguous()
        shape = (ranks * x.shape[0], *x.shape[1:])
        gathered = out if out is not None and dim == 0 else x.new_empty(shape)
        work = _all_gather_single(gathered, x, group=group, async_op=True)

        def finish() -> Tensor:
            if dim == 0:
                return gathered
            stacked = gathered.view(ranks, *x.shape)
            return stacked if blocks else stacked.movedim(0, dim).flatten(dim, dim + 1)

        return work, finish, (x, gathered)

    def reduce_scatter(
        self,
        x: Tensor,
        group: ProcessGroup,
        ranks: int,
        step: Step,
        out: Tensor | None = None,
        blocks: bool = False,
    ) -> Started:
        """[.., ranks * s, ..] partial sums, or [ranks, .., s, ..] with `blocks` -> [.., s, ..] at `step.dim`."""
        sent = x.flatten(0, 1) if blocks else _blocks(x, step.dim or 0, ranks)
        summed = sent.new_empty((sent.shape[0] // ranks, *sent.shape[1:])) if out is None else out
        work = _reduce_scatter_single(summed, sent, group=group, async_op=True)
        return work, lambda: summed, (sent, summed)

    def all_reduce(self, x: Tensor, group: ProcessGroup, ranks: int, step: Step) -> Started:
        summed = x.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(summed, group=group, async_op=True)
        return work, lambda: summed, (summed,)

    def all_to_all(self, x: Tensor, group: ProcessGroup, ranks: int, step: Step) -> Started:
        """`step.dim` shrinks by `ranks`, `step.source` grows."""
        source = step.source or 0
        work, received, blocks = self._exchange(x, group, ranks, step.dim or 0)

        def finish() -> Tensor:
            return (
                received.unflatten(0, (ranks, received.shape[0] // ranks))
                .movedim(0, source)
                .flatten(source, source + 1)
            )

        return work, finish, (blocks, received)

    @staticmethod
    def _exchange(x: Tensor, group: ProcessGroup, ranks: int, dim: int) -> tuple[Any, Tensor, Tensor]:
        """Send block i of `dim` to rank i; returns (work, the blocks received, the blocks sent), stacked on dim 0."""
        blocks = _blocks(x, dim, ranks)
        received = torch.empty_like(blocks)
        return dist.all_to_all_single(received, blocks, group=group, async_op=True), received, blocks


class GlooCollectives(Collectives):
    """gloo: reductions that sum in fp32, and a reduce-scatter at half the bytes of gloo's own.

    gloo's reduce-scatter is an all-reduce inside (twice the bytes), and its bf16 sums round at every hop.
    """

    orders_by_stream = False

    def reduce_scatter(
        self,
        x: Tensor,
        group: ProcessGroup,
        ranks: int,
        step: Step,
        out: Tensor | None = None,
        blocks: bool = False,
    ) -> Started:
        stacked, dim = (x.flatten(0, 1), 0) if blocks else (x, step.dim or 0)
        work, received, sent = self._exchange(stacked, group, ranks, dim)
        return work, lambda: _sum(received, ranks, out), (sent, received)

    def all_reduce(self, x: Tensor, group: ProcessGroup, ranks: int, step: Step) -> Started:
        if x.dtype not in LOW_PRECISION:
            return super().all_reduce(x, group, ranks, step)
        # Reduce-scatter and all-gather of the flat tensor, the same volume as gloo's ring.
        flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % ranks))
        work, received, blocks = self._exchange(flat, group, ranks, 0)

        def finish() -> Tensor:
            gathered = torch.empty_like(flat)
            _all_gather_single(gathered, _sum(received, ranks), group=group)
            return gathered[: x.numel()].view(x.shape)

        return work, finish, (blocks, received)


def _blocks(x: Tensor, dim: int, ranks: int) -> Tensor:
    """[.., ranks * s, ..] -> contiguous [ranks * s', ..], the blocks of `dim` behind one another on dim 0."""
    if dim == 0:
        return x.contiguous()
    return x.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0).flatten(0, 1).contiguous()


def _sum(stacked: Tensor, ranks: int, out: Tensor | None = None) -> Tensor:
    """Sum blocks that are stacked on dim 0, low precision in fp32, in the order of the ranks."""
    blocks = stacked.view(ranks, stacked.shape[0] // ranks, *stacked.shape[1:])
    if blocks.dtype in LOW_PRECISION:
        summed = blocks.sum(0, dtype=torch.float32)
        return summed.to(blocks.dtype) if out is None else out.copy_(summed)
    return torch.sum(blocks, 0, out=out)
