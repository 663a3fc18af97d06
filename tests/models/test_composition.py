"""What training programs do, on every kind of grid: the loss of the dense program, or the refusal that the docs print.

The table in docs/train.md is compared with this one; each cell runs here, its columns by turns.
"""

import copy
import re
import tempfile
from pathlib import Path

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ndtp
from ndtp import Grid

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import transformers.modeling_layers
import transformers.modeling_utils
import transformers.trainer  # so that ranks are forked with it
from architectures import build, inputs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from turns import by_turns

NAME = "LlamaForCausalLM"
GRIDS = {
    "1D": ({"x": 2}, "1d"),
    "1D sequence": ({"x": 2}, "1d-sp"),
    "2D": ({"x": 2, "y": 2}, "2d"),
    "3D": ({"z": 2, "y": 2}, "3d"),
    "z, as FSDP": ({"z": 2}, "3d"),
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


# One parameter of each way in which they are split.  Where the optimizer is the point it has these alone: each shape
# costs DTensor a while for each operation.  All of them train in every cell of SGD, and in Trainer's, which is AdamW.
KINDS = ("k_proj", "down_proj", "input_layernorm")


def one_of_each_kind(program):
    return [p for name, p in program.model.named_parameters() if name.split(".")[-2] in KINDS]


def sgd(program, **how):
    return torch.optim.SGD(program.model.parameters(), lr=0.1, momentum=0.9, **how)


def adamw(program, **how):
    return torch.optim.AdamW(one_of_each_kind(program), lr=1e-2, eps=1e-3, **how)


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
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
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
    optimizer = torch.optim.Adafactor(one_of_each_kind(program), lr=1e-2)
    step = optimizer.step

    def finished(*args, **kwargs):
        with ndtp.nn.as_dense():
            return step(*args, **kwargs)

    optimizer.step = finished
    return run(program, optimizer)


def copied(program):
    other = Program(copy.deepcopy(program.model), program.mesh)
    return [*run(other, sgd(other)), program.loss(0).item()]


def trained(program):
    """By transformers' Trainer: every rank its own, on the rows of its dp rank; see docs/train.md for launchers."""
    batch = program.batch(0)
    rows = [{key: value[i] for key, value in batch.items()} for i in range(len(batch["input_ids"]))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=2, per_device_train_batch_size=len(rows), logging_steps=1, report_to=[],
            use_cpu=True, save_strategy="no", learning_rate=1e-2, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.trainer.Trainer(model=program.model, args=arguments, train_dataset=rows)
        trainer.train()
        program.model.to(torch.get_default_device())
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compiled(fullgraph):
    def with_a_compiler(program):
        if program.mesh is None:
            return [] if fullgraph else run(program, sgd(program))
        torch._dynamo.reset()
        options = {"backend": "eager", "fullgraph": fullgraph}
        other = Program(torch.compile(program.model, **options), program.mesh)
        layers = program.model.model.layers
        for layer in layers:  # one by one, too
            layer.compile(**options)
        try:
            return run(other, sgd(other))
        finally:
            for layer in layers:
                layer._compiled_call_impl = None

    return with_a_compiler


def compiled_step(program):
    """A function that calls the model and `backward`."""
    if program.mesh is None:
        return run(program, sgd(program))
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def forward_and_backward(batch):
        loss = program.model(**batch).loss
        loss.backward()
        return loss

    optimizer, losses = sgd(program), []
    for step in range(2):
        losses.append(forward_and_backward(program.batch(step)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_ddp(program):
    if program.mesh is not None:
        nn.parallel.DistributedDataParallel(program.model)
    return []


def in_fsdp(program):
    if program.mesh is not None:
        ranks, kind = program.mesh.grid.num_ranks, program.mesh.device_type
        fully_shard(program.model, mesh=init_device_mesh(kind, (ranks, 1), mesh_dim_names=("grid", "data"))["data"])
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
    "`Trainer` of transformers": trained,
    "`torch.compile`": compiled(False),
    "`torch.compile(fullgraph=True)`": compiled(True),
    "`torch.compile` of a step, `backward` in it": compiled_step,
    "`DistributedDataParallel`": in_ddp,
    "`fully_shard` over another dim of the mesh": in_fsdp,
}
REFUSALS = (ndtp.LayoutError, torch._dynamo.exc.Unsupported)  # the second by torch, with a reason of ndtp's


def cell(feature, expected, model, mesh):
    """What the table says of a feature on a grid."""
    try:
        found = FEATURES[feature](Program(model, mesh))
    except REFUSALS as error:
        return f"refused: {error}"
    off = max((abs(a - b) for a, b in zip(found, expected, strict=False)), default=0.0)
    return WORKS if off < 2e-6 else f"off by {off:.2g}: {found} instead of {expected}"


def cells_of(grid, expected):
    sizes, scheme = GRIDS[grid]
    mesh = mesh_of(Grid(sizes))
    state = {key: value.clone() for key, value in build(NAME, **SIZES).state_dict().items()}
    model = ndtp.parallelize(build(NAME, **SIZES), mesh, scheme=scheme)
    found = {}
    for feature in FEATURES:
        model.load_state_dict(state)
        model.zero_grad()
        found[feature] = cell(feature, expected[feature], model, mesh)
    if grid == "z, as FSDP":
        total, _, held = model.ndtp_report.parameters
        assert held < 0.52 * total
    return found


@pytest.fixture(scope="module")
def expected():
    """What the dense programs give."""
    dense = build(NAME, **SIZES)
    return {feature: program(Program(copy.deepcopy(dense))) for feature, program in FEATURES.items()}


def table():
    """feature -> grid -> what docs/train.md says."""
    text = (Path(__file__).parent.parent.parent / "docs" / "train.md").read_text()
    text = text.split("\n## After parallelize\n")[0]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    start = next(i for i, row in enumerate(rows) if row[0] == "feature")
    end = next((i for i, row in enumerate(rows) if i > start and row[0] == ""), len(rows))
    return {row[0]: dict(zip(rows[start][1:], row[1:], strict=True)) for row in rows[start + 1 : end]}


def test_the_table_is_about_these():
    assert list(table()) == list(FEATURES)
    assert all(list(row) == list(GRIDS) for row in table().values())


@pytest.mark.parametrize("grid", by_turns(GRIDS, 3))
def test_a_column_of_the_table(ranks, expected, grid):
    by_rank = ranks(torch.Size(GRIDS[grid][0].values()).numel()).run(cells_of, grid, expected)
    for rank, cells in enumerate(by_rank):
        for feature, found in cells.items():
            assert found.partition(":")[0] == table()[feature][grid], f"rank {rank}: {feature} on {grid}: {found}"
            assert not found.startswith("refused") or "fix: " in found, f"{feature} on {grid}: {found}"
