"""`ndtp train --stages`: the model of a run cut by layers into stages, each on a grid of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.optim import Optimizer

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import block_layouts
from ndtp.checkpoints.training_state import Saving, load, start_save
from ndtp.cli.job import Job
from ndtp.models.byte_model import ByteModel
from ndtp.nn.losses import linear_cross_entropy
from ndtp.pipelines.gradients import clip_grad_norm_
from ndtp.pipelines.pipeline import Pipeline
from ndtp.pipelines.stage import PipelineStage
from ndtp.pipelines.whole_models import pipeline_stages


class BytePart(nn.Module):
    """Some layers of a byte model, on a grid: ids or this rank's shard of rows in, such a shard out.

    ids    [batch, length]  a micro-batch, whole on every rank
    rows   [batch x length / .., width / ..]
    """

    def __init__(self, model: ByteModel, layers: range, *, is_first: bool, is_last: bool, length: int) -> None:
        super().__init__()
        self.length, self.mesh = length, model.mesh
        self.embedding = model.embedding if is_first else None
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in layers})
        self.norm: Any = model.norm if is_last else None
        self.head: Any = model.head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            assert self.mesh is not None
            x = self.embedding(self.embedding.in_layout.shard(x.flatten(), self.mesh.rank))
        for layer in self.layers.values():
            x = layer(x, self.length)
        return x if self.norm is None else self.norm(x)

    def loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(rows, self.head, targets.flatten())


class StagedModel:
    """A `ndtp.cli.training.Model` in stages: this rank's part of it, and its loss, which every rank has."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        dtype, self.micro_batches = getattr(torch, job.dtype), job.micro_batches
        grids = [Grid(job.grid or {"x": 1})] * job.stages
        self.is_ours = job.config is None
        if job.config is None:
            self.stage: Any = _byte_stage(job, grids, dtype)
            loss: Any = self.stage.submod.loss
        else:
            from transformers import AutoConfig, AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.config)).to(dtype)
            each = job.batch // job.micro_batches
            options: dict[str, Any] = {"scheme": job.scheme, "chunks": job.chunks, "wire": job.wire}
            (self.stage,) = pipeline_stages(model, grids, each, job.context + 1, **options)
            loss = self.stage.loss
        self.pipeline, self.rank, self.mesh = self.stage.pipeline, dist.get_rank(), self.stage.mesh
        self.schedule = Schedule1F1B(self.stage, n_microbatches=job.micro_batches, loss_fn=loss)
        self.module = self.stage.submod

    def step(self, batch: Tensor) -> float:
        """Gradients of a batch, and its loss."""
        return self._run(self.schedule.step, batch)

    def loss_of(self, batch: Tensor) -> float:
        return self._run(self.schedule.eval, batch)

    def _run(self, schedule: Any, batch: Tensor) -> float:
        batch = batch.to(self.stage.device)
        whole = Layout(self.stage.mesh.grid, None)
        losses: list[Tensor] = []
        if self.is_ours:
            ids, targets = (self.stage.rows(part, self.micro_batches, whole) for part in (batch[:, :-1], batch[:, 1:]))
        else:
            ids = targets = self.stage.rows(batch, self.micro_batches)
        if self.stage.is_first:
            schedule(ids)
        else:
            schedule(**({"target": targets, "losses": losses} if self.stage.is_last else {}))
        total = torch.zeros((), dtype=torch.float64, device=self.stage.device)
        for loss in losses:  # on each rank of the last stage
            total += loss.detach() / (self.micro_batches * len(self.pipeline.ranks_of[-1]))
        return self.pipeline.sum(total, "loss").item()

    def clip(self, max_norm: float) -> float:
        return clip_grad_norm_([self.stage], max_norm).item()

    def save(self, optimizer: Optimizer, folder: Path, extra: Mapping[str, object]) -> Saving:
        return start_save(self.stage, optimizer, folder, extra=extra, chunks=True)

    def load(self, optimizer: Optimizer, folder: Path) -> dict[str, Any]:
        return load(self.stage, optimizer, folder)

    def most_of_ranks(self, mine: int) -> int:
        flag = torch.tensor(mine, device=self.stage.device)
        return int(self.pipeline.sum(flag, "request to stop", most=True))


def _byte_stage(job: Job, grids: list[Grid], dtype: torch.dtype) -> PipelineStage:
    model, count = ByteModel(job.sizes).to(dtype), job.sizes.layers
    blocks = [block_layouts(grid, job.scheme) for grid in grids]
    pipeline = Pipeline(
        grids,
        (job.batch // job.micro_batches * job.context, job.sizes.width),
        layouts=[(block.input, block.output) for block in blocks],
    )
    index = pipeline.own_stage()
    mesh, stages = pipeline.mesh(wire=job.wire), len(grids)
    bounds = [i * count // stages for i in range(stages + 1)]
    model.to(mesh.device_type).to_grid(mesh, job.scheme, job.chunks)
    part = BytePart(
        model, range(bounds[index], bounds[index + 1]), is_first=index == 0, is_last=index == stages - 1,
        length=job.context,
    )  # fmt: skip
    return PipelineStage(part, pipeline, dtype=dtype)
