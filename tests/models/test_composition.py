"""What training programs do, on every kind of grid: the loss of the dense program, or the refusal that the docs print.

The table in docs/train.md is compared with this one; each cell runs here.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ndtp
from ndtp import Grid

pytest.importorskip("transformers")
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it
from architectures import build, inputs

NAME = "LlamaForCausalLM"
GRIDS = {
    "1D": ({"x": 2}, "1d"),
    "1D sequence": ({"x": 2}, "1d-sp"),
    "2D": ({"x": 2, "y": 2}, "2d"),
    "3D": ({"z": 2, "y": 2}, "3d"),
    "dp": ({"dp": 2}, "1d-sp"),
}
WORKS = "works"
SIZES = {"num_hidden_layers": 1, "vocab_size": 64}


class Program:
    """A model, dense or on a grid, and the batches that its rank is to see."""

    def __init__(self, model, mesh=None):
        self.model, self.mesh = model, mesh

    def batch(self, step):
        given = {key: value.roll(step, 1).clamp(max=63) for key, value in inputs(NAME).items()}
        place = 0 if self.mesh is None else self.mesh.grid.coordinate(self.mesh.rank).get("dp", 0)
        parts = self.mesh.grid["dp"] if self.mesh is not None and "dp" in self.mesh.grid else 1
        return {key: value.chunk(parts)[place] for key, value in given.items()}

    def loss(self, step, **more):
        return self.model(**self.batch(step), **more).loss


def run(program, optimizer, around=None, steps=2):
    """The losses of a plain loop."""
    losses = []
    for step in range(steps):
        loss = program.loss(step)
        loss.backward()
        if around is not None:
            around()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, program.loss(steps).item()]


def sgd(program, **how):
    return torch.optim.SGD(program.model.parameters(), lr=0.1, momentum=0.9, **how)


def adamw(program, **how):
    return torch.optim.AdamW(program.model.parameters(), lr=1e-2, eps=1e-3, **how)


def clipped(program):
    return run(program, sgd(program), lambda: nn.utils.clip_grad_norm_(program.model.parameters(), 0.3))


def scheduled(program):
    optimizer = sgd(program)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    return run(program, optimizer, scheduler.step)


def averaged(program):
    average = AveragedModel(program.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    losses = run(program, sgd(program, foreach=True), lambda: average.update_parameters(program.model))
    return [*losses, average(**program.batch(0)).loss.item()]


def scaled(program):
    optimizer, scaler, losses = sgd(program), torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for step in range(2):
        loss = program.loss(step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_autocast(program):
    with torch.autocast("cpu", torch.bfloat16):
        return [round(program.loss(0).item(), 1)]  # that it runs, and is no other loss


def accumulated(program):
    optimizer, losses = sgd(program), []
    for step in range(3):
        loss = program.loss(step) / 3
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return [*losses, program.loss(0).item()]


def accumulated_late(program):
    if program.mesh is None:
        return accumulated(program)
    optimizer, losses = sgd(program), []
    for step in range(3):
        if step < 2:
            with program.mesh.accumulate():
                loss = program.loss(step) / 3
                loss.backward()
        else:
            loss = program.loss(step) / 3
            loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return [*losses, program.loss(0).item()]


def checkpointed(reentrant):
    def with_checkpoints(program):
        program.model.train()
        program.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        try:
            return run(program, sgd(program))
        finally:
            program.model.gradient_checkpointing_disable()

    return with_checkpoints


def inferred(program):
    with torch.inference_mode():
        losses = [program.loss(0).item()]
    return [*losses, *run(program, sgd(program))]


def generated(program):
    prompt = Program(program.model).batch(0)["input_ids"][:1]
    return program.model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0).flatten().tolist()


def adafactor(program):
    optimizer = torch.optim.Adafactor(program.model.parameters(), lr=1e-2)
    step = optimizer.step

    def finished(*args, **kwargs):
        with ndtp.nn.as_dense():
            return step(*args, **kwargs)

    optimizer.step = finished
    return run(program, optimizer)


def copied(program):
    other = Program(copy.deepcopy(program.model), program.mesh)
    return [*run(other, sgd(other)), program.loss(0).item()]


def in_ddp(program):
    if program.mesh is not None:
        nn.parallel.DistributedDataParallel(program.model)
    return []


FEATURES = {
    "AdamW": lambda program: run(program, adamw(program)),
    "AdamW, `foreach`": lambda program: run(program, adamw(program, foreach=True)),
    "AdamW, `fused`": lambda program: run(program, adamw(program, fused=True)),
    "SGD with momentum": lambda program: run(program, sgd(program)),
    "Adafactor in `ndtp.nn.as_dense()`": adafactor,
    "`torch.nn.utils.clip_grad_norm_`": clipped,
    "`LambdaLR`": scheduled,
    "`AveragedModel`": averaged,
    "`GradScaler`": scaled,
    "`torch.autocast`": in_autocast,
    "accumulation in `.grad`": accumulated,
    "`mesh.accumulate()`": accumulated_late,
    "activation checkpoints": checkpointed(False),
    "activation checkpoints, reentrant": checkpointed(True),
    "`torch.inference_mode`, then training": inferred,
    "`generate` with a cache": generated,
    "`copy.deepcopy`": copied,
    "`DistributedDataParallel`": in_ddp,
}


def cell(feature, expected, dense, model, mesh):
    """What the table says of a feature on a grid, whose dense losses are known."""
    state = {key: value.clone() for key, value in dense.state_dict().items()}
    model.load_state_dict(state)
    model.zero_grad()
    try:
        found = FEATURES[feature](Program(model, mesh))
    except ndtp.LayoutError as error:
        return f"refused: {str(error).splitlines()[0]}"
    off = max((abs(a - b) for a, b in zip(found, expected, strict=False)), default=0.0)
    return WORKS if off < 2e-6 else f"off by {off:.2g}: {found} instead of {expected}"


@pytest.fixture(scope="module")
def losses():
    """Of the dense programs."""
    dense = build(NAME, **SIZES)
    return {feature: run(Program(copy.deepcopy(dense))) for feature, run in FEATURES.items()}


def cells_of(grid, losses):
    sizes, scheme = GRIDS[grid]
    mesh = mesh_of(Grid(sizes))
    dense = build(NAME, **SIZES)
    model = ndtp.parallelize(build(NAME, **SIZES), mesh, scheme=scheme)
    return {feature: cell(feature, losses[feature], dense, model, mesh) for feature in FEATURES}


def table():
    """feature -> grid -> what docs/train.md says."""
    text = (Path(__file__).parent.parent.parent / "docs" / "train.md").read_text()
    rows = [re.split(r" *\| *", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    start = next(i for i, row in enumerate(rows) if row[0] == "feature")
    end = next((i for i, row in enumerate(rows) if i > start and row[0] == ""), len(rows))
    return {row[0]: dict(zip(rows[start][1:], row[1:], strict=True)) for row in rows[start + 1 : end]}


def test_the_table_is_about_these():
    assert list(table()) == list(FEATURES)
    assert all(list(row) == list(GRIDS) for row in table().values())


@pytest.mark.parametrize("grid", GRIDS)
def test_a_column_of_the_table(ranks, grid, losses):
    by_rank = ranks(torch.Size(GRIDS[grid][0].values()).numel()).run(cells_of, grid, losses)
    for rank, cells in enumerate(by_rank):
        for feature, found in cells.items():
            assert found.partition(":")[0] == table()[feature][grid], f"rank {rank}: {feature} on {grid}: {found}"


def check_trainer(folder):
    from transformers import Trainer, TrainingArguments

    given = {key: value.clamp(max=63) for key, value in inputs(NAME, 8).items()}
    rows = [{key: value[i] for key, value in given.items()} for i in range(8)]
    mesh, losses = mesh_of(Grid(x=2)), []
    for model in (build(NAME, **SIZES), ndtp.parallelize(build(NAME, **SIZES), mesh, scheme="1d-sp")):
        arguments = TrainingArguments(
            output_dir=f"{folder}/{mesh.rank}", max_steps=3, per_device_train_batch_size=4, logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="no", learning_rate=1e-2, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return losses


def test_the_trainer_of_transformers(ranks, tmp_path):
    """Every rank its own, on the same rows; see docs/train.md for launchers."""
    pytest.importorskip("accelerate")
    dense, split = ranks(2).run(check_trainer, tmp_path)[0]
    assert len(dense) == 3 and split == pytest.approx(dense, rel=1e-5)
