"""`Pipeline`: a `PipelinePlan` as this process sees it: its stages, their grids, and the group that joins them."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ndtp.algebra.pipeline_plan import AXIS, PipelinePlan
from ndtp.collectives.backends import backend_named, backends_by_device, device_type_of
from ndtp.collectives.grid_options import GridOptions
from ndtp.collectives.groups import default_timeout, shared_group
from ndtp.collectives.labels import Label
from ndtp.collectives.watch import Watch
from ndtp.errors import GridError, MismatchError
from ndtp.runtime.process_grid import ProcessGrid, grid_over

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class Pipeline(PipelinePlan):
    """Stages of a model on grids of their own.

        pipeline = ndtp.Pipeline([ndtp.Grid(dp=2, x=2), ndtp.Grid(x=2)], shape=(64, 512), scheme="1d-sp")
        mesh = pipeline.mesh()  # the process grid of this rank's stage
        stage = ndtp.PipelineStage(module, pipeline)  # for torch's schedules: Schedule1F1B(stage, ...)

    Making one starts nothing: arguments, errors and what can be asked are those of `PipelinePlan`.
    """

    _timeout: float | None = None  # of the grids of stages that there are
    _asked = GridOptions(others=1)  # of the last of them

    def mesh(self, stage: int | None = None, **options: Any) -> ProcessGrid:
        """The process grid of a stage of this rank, made once; its ranks make theirs together.

        Args:
            stage: default: the only one that this rank has.
            options: as for `ProcessGrid`.

        Raises:
            GridError: as `own_stage`.
        """
        index = self.own_stage(stage)
        if index not in self._meshes:
            ranks = list(self.ranks_of[index])
            if len(ranks) == 1:
                options.setdefault("device_type", device_type_of(backends_by_device()))
            self._asked = own = GridOptions.of(others=1, **options)  # `group` is busy beside those of the grid
            self._meshes[index] = grid_over(self.grids[index], own, ranks if len(ranks) > 1 else None)
            self._timeout = self._meshes[index].groups.seconds
        return self._meshes[index]

    def own_stage(self, stage: int | None = None) -> int:
        """A stage that this rank has a part of.

        Raises:
            GridError: it has none of this stage, or none or several and no stage is named.
        """
        if not dist.is_initialized():
            raise GridError("pipeline: torch.distributed is not initialized\n  fix: init_process_group first")
        own = self.stages_of(dist.get_rank())
        if stage is None and len(own) == 1:
            return own[0]
        if stage is None or stage not in own:
            raise GridError(
                f"pipeline: rank {dist.get_rank()} has {f'stages {own}' if own else 'no stage'}, "
                + ("and none was named" if stage is None else f"not stage {stage}")
                + f"\n  {self}"
            )
        return stage

    @cached_property
    def _meshes(self) -> dict[int, ProcessGrid]:
        return {}

    @cached_property
    def group(self) -> ProcessGroup:
        """The process group of all ranks of all stages, over which they send, with the timeout of the grids.

        One of its own: messages would wait for what else goes over the world's, and as long as that does.
        """
        if dist.get_rank() not in self.all_ranks:
            raise GridError(
                f"pipeline: rank {dist.get_rank()} has no stage\n  {self}\n  fix: as many ranks as the stages take, "
                f"{len(self.all_ranks)}, or stages for all {dist.get_world_size()}"
            )
        everybody = len(self.all_ranks) == dist.get_world_size()
        seconds = self._timeout or default_timeout()
        backends, asked = backends_by_device(), self._asked
        kind = backend_named(backends.get(asked.device_type or device_type_of(backends)))
        kind.prepare()
        max_ctas = asked.max_ctas
        if kind.takes_multiprocessors and max_ctas is None:  # what every stage leaves, the same on all ranks
            sms = kind.multiprocessors()
            max_ctas = min(asked.dividing(sms, grid).max_ctas or 1 for grid in self.grids)
        options = (seconds, asked.high_priority, max_ctas)
        arguments, of = partial(kind.group_arguments, *options), ("pipeline", *options)
        with self.watching("the pipeline's process group", "start-up", "making"):
            return shared_group((self.all_ranks,), of, not everybody, arguments, (AXIS,), timeout=seconds)

    def watching(self, what: str, phase: str, collective: str) -> Watch:
        """A collective of all ranks of the pipeline: its name for meters and errors, and in the record."""
        rank = dist.get_rank()
        where = f"rank {rank} of the pipeline waited for the others"
        return Watch(lambda axes: where, Label((what,), phase, collective, (AXIS,)), self.all_ranks)

    def gather(self, said: object, what: str, phase: str = "check") -> list[Any]:
        """Gather the values of all ranks, in the order of `all_ranks`; a collective."""
        every: list[object] = [None] * len(self.all_ranks)
        with self.watching(what, phase, "all_gather"):
            dist.all_gather_object(every, said, group=self.group)
        return every

    def sum(self, x: Tensor, what: str, most: bool = False) -> Tensor:
        """Add up a tensor over all ranks in place, or find the largest values; a collective."""
        with self.watching(what, "all ranks", "all_reduce"):
            dist.all_reduce(x, dist.ReduceOp.MAX if most else dist.ReduceOp.SUM, group=self.group)
        return x

    def agree(self, what: str) -> None:
        """Compare what all ranks are about to do; a collective, which also lets NCCL connect them all.

        Raises:
            MismatchError: they differ; the same on every rank.
        """
        said = self.gather(what, "pipeline")
        if len(set(said)) > 1:
            lines = "\n".join(f"  rank {rank}: {text}" for rank, text in zip(self.all_ranks, said, strict=True))
            raise MismatchError(f"pipeline: ranks disagree on the steps to come\n{lines}")
