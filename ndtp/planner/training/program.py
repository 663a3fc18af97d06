"""The Python and the torchrun line that run a choice.  Pure text."""

from __future__ import annotations

import shlex

from ndtp.planner.training.choose import SplitChoice
from ndtp.planner.training.sequences import attention_of, rows_axis
from ndtp.planner.training.splits import STEP_AXES

START = """\
def start():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)  # every rank draws the same
    return device
"""

FILL = '''\
def read_by_transformers(folder, error):
    """Return the weights of the whole model: files may have them by other names, such as those of experts.

    Raises:
        ndtp.CheckpointError: the error given, where transformers cannot read them, or would draw some at random.
    """
    try:
        kind = AutoModelForCausalLM
        whole, found = kind.from_pretrained(folder, dtype=torch.{dtype}, output_loading_info=True)
    except Exception:
        raise error from None
    if found["missing_keys"] or found["mismatched_keys"]:
        raise error
    print(f"{{error}}: transformers reads the whole")
    return whole.state_dict()


def fill(model):
    """Read the weights that lie beside the config; where there are none, draw some, the same on every grid."""
    folder = Path(CONFIG).parent
    if not any(folder.glob("*.safetensors")):
        print(f"no *.safetensors in {{folder}}: weights are random")
        return ndtp.checkpoint.initialize(model, seed=0)
    try:
        return ndtp.checkpoint.load_safetensors(model, folder)  # each rank reads its part
    except ndtp.CheckpointError as error:
        whole = read_by_transformers(folder, error)
    ndtp.checkpoint.initialize(model, seed=0)
    for part in [stage.model for stage in model] if isinstance(model, list) else [model]:
        part.load_state_dict({{key: whole[key] for key in part.state_dict()}})
'''

HEAD = '''"""{title}

{torchrun}
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import ndtp

CONFIG = {config!r}
STEPS = 10
SEQUENCES, LENGTH = {sequences}, {length}  # of a micro-batch, of one data-parallel rank
MICRO_BATCHES = {micro_batches}


def next_batch(device):
    """Put your data here: other rows on every data-parallel rank, the same on those that share them."""
    return torch.randint({vocabulary}, (SEQUENCES * MICRO_BATCHES, LENGTH), device=device)


{start}

def dense():
    """Return the model without memory: each rank gets that of its part alone, in `fill`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIG){part}, dtype=torch.{dtype})
{checkpoint}    return model


{fill}
'''

PLAIN = """
def main():
    device = start()
    mesh = ndtp.ProcessGrid(ndtp.Grid({grid}))
    model = ndtp.parallelize(dense(), mesh, scheme={scheme!r}{options})
    fill(model)
    optimizer = torch.optim.{optimizer}
    losses = []
    for _ in range(STEPS):
        batch = next_batch(device)
        for part in batch.chunk(MICRO_BATCHES):
            loss = model(input_ids=part, labels=part).loss / MICRO_BATCHES
            loss.backward()
        losses.append(loss.item() * MICRO_BATCHES)
        ndtp.nn.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    print(main())
    dist.destroy_process_group()
"""

STAGED = """
def main():
    from torch.distributed.pipelining import {schedule}

    device = start()
    grids = [ndtp.Grid({grid})] * {stages}
    stages = ndtp.pipeline_stages(
        dense(), grids, batch=SEQUENCES * {rows}, length=LENGTH, scheme={scheme!r}{options}
    )
    fill(stages)
    schedule = {schedule}({first}, n_microbatches=MICRO_BATCHES, loss_fn=stages[-1].loss)
    parameters = [parameter for stage in stages for parameter in stage.model.parameters()]
    optimizer = torch.optim.{optimizer}
    means = []
    for _ in range(STEPS):
        batch = next_batch(device).repeat({rows}, 1)  # of all data-parallel ranks; each takes its rows
        losses = []
        ids = stages[0].rows(batch, MICRO_BATCHES)
        if stages[0].is_first:
            schedule.step(ids, **({{"target": ids, "losses": losses}} if stages[-1].is_last else {{}}))
        else:
            schedule.step(**({{"target": ids, "losses": losses}} if stages[-1].is_last else {{}}))
        means.append(float(sum(losses)) / MICRO_BATCHES if losses else None)
        optimizer.step()
        optimizer.zero_grad()
    return means


if __name__ == "__main__":
    print(main())
    dist.destroy_process_group()
"""


# By the dtype of products: weights stay in fp32, of which an optimizer has no copy then.
RECIPES = {"bfloat16": ', recipe="bf16"', "float8": ', recipe="fp8-rowwise"'}
OPTIMIZERS = {
    "adamw": "AdamW({}, lr=1e-4)", "momentum": "SGD({}, lr=1e-2, momentum=0.9)", "sgd": "SGD({}, lr=1e-2)",
    "none": "SGD({}, lr=0.0)",
}  # fmt: skip


def program(choice: SplitChoice, config: str, sees: bool = False, file: object = "FILE") -> str:
    """Return the program that runs a choice.

    Args:
        config: the path of the model's `config.json`.
        sees: whether a part of the model reads other things than text: no stage of a pipeline would have it here.
        file: the path to which the program is written.
    """
    s, question = choice.splits, choice.question
    sizes = sizes_of(choice) | {"z": rows_axis(choice)}
    axes = [axis for axis in choice.order if axis not in ("pp", "cp") and sizes[axis] > 1] or ["x"]
    grid = ", ".join(f"{axis}={sizes[axis]}" for axis in axes)
    scheme = scheme_of_axes(int(s.x), int(s.y), sizes["z"])
    again = "    model.gradient_checkpointing_enable()\n" if choice.practice.recompute != "none" else ""
    options = ', expert_axis=("e",)' if s.e > 1 else ""
    ways = attention_of(choice)
    options += f", attention={ways.best()!r}" if ways is not None else ""
    options += ', regather=("b",)' if choice.practice.regather and s.z > 1 else ""
    options += RECIPES.get(choice.practice.dtype, "")
    options += f", wire={str(choice.practice.wire)!r}" if choice.practice.wire is not None else ""
    part = ".get_text_config()" if sees and s.pp > 1 else ""
    dtype = "float32" if choice.practice.dtype in RECIPES else choice.practice.dtype
    parameters = "model.parameters()" if s.pp == 1 else "parameters"
    optimizer = OPTIMIZERS[question.optimizer].format(parameters)
    head = HEAD.format(
        title=f"{question.model.name} on {question.ranks} ranks: {s}.",
        torchrun=torchrun(question.ranks, question.hardware.ranks_per_node, file), start=START, config=config,
        sequences=int(s.micro * s.z), length=question.model.sequence,
        micro_batches=choice.micro_batches, vocabulary=question.model.vocabulary, dtype=dtype, checkpoint=again,
        part=part, fill=FILL.format(dtype=dtype),
    )  # fmt: skip
    if s.pp == 1:
        return head + PLAIN.format(grid=grid, scheme=scheme, options=options, optimizer=optimizer)
    turns = int(s.virtual)
    return head + STAGED.format(
        grid=grid, scheme=scheme, stages=int(s.pp) * turns, rows=int(s.dp * s.e),
        schedule="ScheduleInterleaved1F1B" if turns > 1 else "Schedule1F1B",
        first="stages" if turns > 1 else "stages[0]", optimizer=optimizer,
        options=options + (f", groups={int(s.pp)}" if turns > 1 else ""),
    )  # fmt: skip


def torchrun(ranks: int, ranks_per_node: int, file: object) -> str:
    """Return the line that starts a program; of hardware with a rank a node, the line for one machine as well."""
    per_node, name = min(ranks, ranks_per_node), shlex.quote(str(file))
    nodes = max(1, ranks // per_node)
    start = f"    torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    here = f"\n    torchrun --nproc-per-node {ranks} {name}  # with all ranks on one machine"
    return f"{start} {name}" + here * (per_node == 1 < nodes)


def scheme_of_axes(x: int, y: int, z: int) -> str:
    """Return the name of the scheme that `ndtp.parallelize` has for these axes."""
    return "3d" if z > 1 or y > 1 else "1d-sp" if x > 1 else "3d"


def sizes_of(choice: SplitChoice) -> dict[str, int]:
    return {axis: int(getattr(choice.splits, axis)) for axis in STEP_AXES}
