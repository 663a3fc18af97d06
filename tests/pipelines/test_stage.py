"""Stages on unequal grids under torch's schedules: gradients of the dense model, and bytes as the plan counts them."""

from unittest import mock

import pytest
import torch
from counted import of_ndtp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import ndtp
from ndtp import CommMeter, Grid, Pipeline, PipelineStage
from ndtp.algebra.expert_plan import expert_plan
from ndtp.algebra.layout import Layout
from ndtp.algebra.pipeline_plan import PipelinePlan
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.volume import Traffic, Volume
from ndtp.errors import CheckpointError
from ndtp.pipelines import messages

SHAPE, MICRO_BATCHES = (4, 8), 4


class Residual(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return x + self.block(x)


class WithFactors(Residual):
    """Beside x, which is split, passes the product of all stages' factors, which each rank has whole."""

    def __init__(self, block, stage):
        super().__init__(block)
        self.factors = nn.Parameter(torch.tensor([1.0 + stage, -2.0], dtype=torch.float64))

    def forward(self, x, product=1.0):
        return super().forward(x), product * self.factors


def summed_error(y, target):
    y, product = y if isinstance(y, tuple) else (y, torch.zeros(1))
    return ((y - target) ** 2).sum() + product.sum()


def within(stages):
    """What a step moves inside of stages; gradients are summed over dp once, with the last micro-batch."""
    for stage in stages:
        for e in stage.submod.block.volume(SHAPE[0], dgrad=not stage.is_first):
            once = e.phase == "wgrad" and e.collective == "all_reduce"
            yield Traffic(e.phase, e.collective, e.axes, e.num_bytes * (1 if once else MICRO_BATCHES))


# Grids of the stages, ranks where they are not the next ones, schedule.
CASES = [
    ([Grid(dp=2), Grid(x=1), Grid(y=1)], {}, ScheduleGPipe),
    ([Grid(x=1), Grid(dp=1, z=2, x=1), Grid(y=1)], {}, Schedule1F1B),
    ([Grid(x=2), Grid(y=2)], {"ranks": [(0, 3), (1, 2)]}, Schedule1F1B),
    ([Grid(dp=2), Grid(y=2), Grid(x=2), Grid(z=2)], {"groups": 2}, ScheduleInterleaved1F1B),
    ([Grid(dp=1, x=2), Grid(y=2)] * 2, {"groups": 2}, ScheduleInterleavedZeroBubble),
    ([Grid(x=2), Grid(y=2), Grid(dp=2), Grid(x=2)], {"ranks": [(0, 1), (2, 3), (2, 3), (0, 1)]}, ScheduleZBVZeroBubble),
]


def check_case(grids, where, kind):
    pipeline = Pipeline(grids, SHAPE, **where)
    blocks = {
        i: WithFactors(
            ndtp.nn.MLP(8, 16, mesh=pipeline.mesh(i), scheme="3d", seed=i, dtype=torch.float64, activation="relu"), i
        )
        for i in pipeline.stages_of(torch.distributed.get_rank())
    }
    bare = [(Layout(grid, None), Layout(grid, None)) for grid in grids]
    also = [(PipelinePlan(grids, (2,), layouts=bare, ranks=pipeline.ranks_of), torch.float64)]
    stages = [PipelineStage(block, pipeline, i, dtype=torch.float64, also=also) for i, block in blocks.items()]
    single = kind in (Schedule1F1B, ScheduleGPipe)
    schedule = kind(
        stages[0] if single else stages, n_microbatches=MICRO_BATCHES, loss_fn=summed_error, scale_grads=False
    )
    torch.manual_seed(0)
    whole_x, whole_y = torch.randn(2, MICRO_BATCHES * SHAPE[0], SHAPE[1], dtype=torch.float64)
    x, target = [], None
    for stage in stages:
        x += [stage.rows(whole_x, MICRO_BATCHES)] if stage.is_first else []
        target = stage.rows(whole_y, MICRO_BATCHES) if stage.is_last else target
    for _ in range(2):
        with CommMeter() as meter:
            schedule.step(*x, target=target)
        between = Volume(tuple(entry for entry in of_ndtp(meter.volume) if entry.collective == "receive"))
        planned = stages[0].volume(MICRO_BATCHES)
        if kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):  # others ask for gradients twice
            inside = Volume(tuple(e for e in of_ndtp(meter.volume) if e.collective != "receive" and e.phase != "check"))
            assert inside == Volume.of(within(stages)), f"{inside}, {Volume.of(within(stages))}"
        assert between == planned and [e.calls for e in between] == [e.calls for e in planned], f"{between}, {planned}"
    dense = nn.Sequential(
        *(Residual(ndtp.nn.MLP(8, 16, mesh=ndtp.ProcessGrid(Grid(x=1)), scheme="1d", seed=i, dtype=torch.float64,
                               activation="relu").to_dense()) for i in range(len(grids)))
    )  # fmt: skip
    (2 * summed_error(dense(whole_x), whole_y)).backward()  # two steps
    every = [torch.tensor([1.0 + i, -2.0], dtype=torch.float64) for i in range(len(grids))]
    for i, block in blocks.items():
        others = torch.stack([each for j, each in enumerate(every) if j != i]).prod(0)
        torch.testing.assert_close(block.factors.grad, 2 * MICRO_BATCHES * others)
        mine = dict(block.block.named_parameters())
        for name, parameter in dense[i].block.named_parameters():
            name = name.replace("0.", "up.").replace("2.", "down.")
            grad = mine[name].grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            torch.testing.assert_close(
                grad, parameter.grad, msg=lambda m, i=i, n=name: f"{pipeline}: stage {i} {n}: {m}"
            )


def check_files(folder):
    """Two halves of the world that know nothing of each other, and stages whose names say nothing of the model."""
    half = ndtp.ProcessGrid.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "x"))["x"])
    pipeline, said = Pipeline([Grid(x=2), Grid(y=2)], SHAPE), []
    stage = PipelineStage(ndtp.nn.MLP(8, 16, mesh=pipeline.mesh()), pipeline)
    elsewhere = PipelinePlan(pipeline.grids, SHAPE, ranks=[(0, 2), (1, 3)])
    with pytest.raises(ndtp.GridError, match=r"also= has stage 0: .*\n  fix: the same ranks="):
        PipelineStage(stage.submod, pipeline, also=[(elsewhere, torch.float64)])
    for model in (ndtp.nn.MLP(8, 16, mesh=half), stage, stage.submod):
        for write in (lambda m, at: ndtp.checkpoint.save(m, None, at), ndtp.checkpoint.export_safetensors):
            try:
                write(model, f"{folder}/{len(said)}")
                said.append("")
            except CheckpointError as error:
                said.append(str(error))
    return said


def check_all(folder):
    for case in CASES:
        check_case(*case)
    # As the messages of a GPU's tensors go: through other memory, both ways.
    elsewhere = mock.patch.object(messages, "is_elsewhere", lambda x: True)
    with elsewhere, mock.patch.object(torch.Tensor, "cpu", torch.Tensor.clone):
        check_case(*CASES[0])
    return check_files(folder)


def test_any_grids_under_any_schedule(ranks, tmp_path):
    first, *_, last = by_rank = ranks(4).run(check_all, str(tmp_path))
    assert by_rank == [first, first, last, last]
    for i in (0, 1, 4, 5):  # who came second has an error, who came first a checkpoint
        own, others = ("0, 1", "2, 3") if first[i] else ("2, 3", "0, 1")
        assert "" in (first[i], last[i])
        assert f"{i}: ranks {others} write their model there; that of ranks {own} would" in first[i] + last[i]
        assert "give the stages instead" in first[i] + last[i] and list((tmp_path / str(i)).iterdir())
    for i, name in ((2, "save"), (3, "export_safetensors")):
        assert first[i] == last[i] and f"{name}: {tmp_path}/{i}: stages 0 and 1 both have 'up.weight'" in first[i]


def check_experts():
    """dp=1 pp=2 e=2 tp=2: two steps of training."""
    grid = Grid(e=2, x=2)
    tokens = expert_plan(block_layouts(grid, "3d"), ("e",)).tokens
    pipeline = Pipeline([grid] * 2, SHAPE, layouts=[(tokens, tokens)] * 2)

    def layer(mesh, i):
        return Residual(ndtp.nn.MoE(8, 8, 4, mesh=mesh, seed=i, dtype=torch.float64))

    stage = PipelineStage(layer(pipeline.mesh(), pipeline.own_stage()), pipeline, dtype=torch.float64)
    one = ndtp.ProcessGrid(Grid(x=1))
    whole = nn.Sequential(layer(one, 0), layer(one, 1))
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=summed_error, scale_grads=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (stage.submod, whole)]
    torch.manual_seed(0)
    x, y = torch.randn(2, MICRO_BATCHES * SHAPE[0], SHAPE[1], dtype=torch.float64)
    curve = []
    for _ in range(2):
        losses = []
        if stage.is_first:
            schedule.step(stage.rows(x, MICRO_BATCHES))
        else:
            schedule.step(target=stage.rows(y, MICRO_BATCHES), losses=losses)
        expected = summed_error(whole(x), y)
        expected.backward()
        curve.append((sum(map(float, losses)), float(expected)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return curve


def test_experts_tensors_and_stages_in_one_launch(ranks):
    by_rank = ranks(8).run(check_experts)
    found = [sum(curve[i][0] for curve in by_rank[4:]) for i in range(2)]
    expected = [loss for _, loss in by_rank[0]]
    assert found == pytest.approx(expected, rel=1e-9) and expected[1] < expected[0]
