"""Programs of four ranks that `faults.py` puts the faults of `fault_kinds.py` into."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_kinds import KINDS, RANKS, Named, Plan, fail
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B

import ndtp
from ndtp import CommunicationError, CorruptionError, Grid, ProcessGrid
from ndtp.checkpoints import folder as folders
from ndtp.checkpoints import training_state

Numbers = Iterable[Tensor]  # that a program comes to


def grid_of(plan: Plan, **axes: int) -> ProcessGrid:
    mesh = ProcessGrid(Grid(axes), timeout=plan.timeout)
    plan.flips()
    if plan.kind == "flipped bit":
        ndtp.recheck(mesh, 1.0)
    return mesh


def looked_at(plan: Plan, model: torch.nn.Module) -> Any:
    return ndtp.find_nonfinite(model) if plan.kind == "nan" else nullcontext()


def look(watch: Any) -> None:
    """Whether a NaN came up, which all ranks learn."""
    if watch is not None and (found := watch.first()) is not None:
        raise Named("nan", found.ranks)


def train(plan: Plan) -> Numbers:
    mesh = grid_of(plan, x=2, y=2)
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="2d")
    optimizer = torch.optim.AdamW(block.parameters())
    plan.in_optimizer(optimizer)
    inputs = plan.loader(torch.ones(block.in_layout.shard_shape((8, 8))))
    for step in plan.steps():
        x = next(inputs)
        with looked_at(plan, block) as watch:
            plan.at_step(step if step % 2 or plan.kind == "nan" else -1, x)  # before forward, or before backward
            y = block(x)
            plan.at_step(-1 if step % 2 or plan.kind == "nan" else step)
            plan.in_backward(step, y)
            y.sum().backward()
        look(watch)
        ndtp.nn.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return block.state_dict().values()


def generate(plan: Plan) -> Numbers:
    mesh = grid_of(plan, z=2, x=2)
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="3d")
    x = torch.ones(block.in_layout.shard_shape((8, 8)))
    with torch.no_grad():
        for step in plan.steps():
            with looked_at(plan, block) as watch:
                plan.at_step(step, x)
                x = block(x)
            look(watch)
    return [x]


def experts(plan: Plan) -> Numbers:
    mesh = grid_of(plan, e=2, x=2)
    moe = ndtp.nn.MoE(8, 16, experts=4, top_k=2, router="mixtral", mesh=mesh, scheme="1d-sp", expert_axis="e")
    x = torch.randn(moe.in_layout.shard_shape((16, 8)))
    y = x
    for step in plan.steps():
        with looked_at(plan, moe) as watch:
            plan.at_step(step, x)
            y = moe(x)
            plan.in_backward(step, y)
            y.sum().backward()
        look(watch)
    return [y]


def pipeline(plan: Plan) -> Numbers:
    cut_model = ndtp.Pipeline([Grid(x=2), Grid(x=2)], (4, 8), scheme="1d-sp")
    mesh = cut_model.mesh(timeout=plan.timeout)
    stage = ndtp.PipelineStage(ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d-sp"), cut_model)

    def loss_of(y: Tensor, target: Tensor) -> Tensor:
        return ((y - target) ** 2).sum()

    schedule = Schedule1F1B(stage, 4, loss_fn=loss_of)
    rows = stage.rows(torch.ones(16, 8), 4)
    for step in plan.steps():
        plan.at_step(step)
        if plan.is_due(step) and plan.kind == "in backward":
            next(stage.submod.parameters()).register_post_accumulate_grad_hook(lambda _: fail("raised"))
        schedule.step(rows) if stage.is_first else schedule.step(target=rows)
    return [each.grad.to_local() for each in stage.submod.parameters()]


def start(plan: Plan) -> Numbers:
    for step in plan.steps():  # each of these makes groups of its own
        plan.at_step(step)
        ProcessGrid(Grid(x=2, y=2), timeout=plan.timeout)
    return ()


def _checkpointed(plan: Plan, folder: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, str]:
    mesh = ProcessGrid(Grid(x=2, y=2), timeout=plan.timeout)
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="2d")
    optimizer = torch.optim.AdamW(block.parameters())
    block(torch.ones(block.in_layout.shard_shape((8, 8)))).sum().backward()
    optimizer.step()
    return block, optimizer, f"{folder}/checkpoint"


def _fail_inside(plan: Plan, *places: tuple[Any, str]) -> None:
    """The victim's own failures: in one of these functions, at a call of it that `at` says."""
    if not plan.is_mine or plan.is_at_any_time or not plan.kind:
        return
    if plan.kind in ("disk full", "folder gone"):
        places = ((os, "pwrite"),) if plan.kind == "disk full" else ((training_state.Saving, "_write"),)
    owner, name = places[plan.at % len(places)]
    before: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == plan.at // len(places):
            fail(plan.kind)
        return before(*args, **kwargs)

    setattr(owner, name, failing)


def save(plan: Plan) -> Numbers:
    block, optimizer, folder = _checkpointed(plan, _folder_of_all())
    if KINDS.get(plan.kind, KINDS["killed"]).places == ("save",):
        ndtp.checkpoint.save(block, optimizer, folder)  # this one must stay
    _fail_inside(plan, (training_state.Saving, "_write"), (training_state.Saving, "wait"), (training_state, "kept_by"))
    try:
        for _ in plan.steps():
            ndtp.checkpoint.save(block, optimizer, folder)
    except CommunicationError:
        if plan.kind in ("disk full", "folder gone"):  # nobody is gone, and what was saved before is there
            ndtp.checkpoint.load(block, optimizer, folder)
        raise
    return block.state_dict().values()


def load(plan: Plan) -> Numbers:
    block, optimizer, folder = _checkpointed(plan, _folder_of_all())
    ndtp.checkpoint.save(block, optimizer, folder)
    _fail_inside(plan, (folders, "read"), (training_state, "fresh_state"), (training_state, "restore_groups"))
    for _ in plan.steps():
        ndtp.checkpoint.load(block, optimizer, folder)
    return block.state_dict().values()


def _folder_of_all() -> str:
    """One for all ranks: in that where they write what they said."""
    return tempfile.gettempdir()


PLACES: dict[str, Callable[[Plan], Numbers]] = {
    "train": train, "generate": generate, "experts": experts, "pipeline": pipeline, "start": start, "save": save,
    "load": load,
}  # fmt: skip


def until_the_end(place: str, plan: Plan, folder: str) -> None:
    """What a program does: a rank that fails ends, and what it said stays."""
    from ndtp.collectives.last_words import tell_of

    tempfile.tempdir = folder
    os.dup2(os.open(f"{folder}/{dist.get_rank()}.stderr", os.O_WRONLY | os.O_CREAT), 2)
    if plan.port:  # as torchrun and plain programs meet; the ranks of `ndtp.testing` met by a file
        rank = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{plan.port}", rank=rank, world_size=RANKS)
    rank = dist.get_rank()
    try:
        said: dict[str, Any] = {"error": "none", "numbers": _digest(PLACES[place](plan))}
        dist.barrier()
        time.sleep(0.3)  # nobody is lost by those who come later
    except SystemExit:  # as at the end of a program
        atexit._run_exitfuncs()
        os._exit(0)
    except (Named, CorruptionError) as error:  # what all ranks have found out together
        said = {"error": "", "how": getattr(error, "how", "corrupt"), "text": str(error), "ranks": list(error.ranks)}
    except Exception as error:
        told = tell_of(error)  # as at the end of a program
        said = {"error": type(told).__name__, "how": getattr(told, "how", ""), "text": str(told)[:600],
                "ranks": list(getattr(told, "ranks", ()))}  # fmt: skip
    (Path(folder) / f"{rank}.json").write_text(json.dumps(said))
    os._exit(1)


def _digest(numbers: Numbers) -> str:
    found = hashlib.sha256()
    for each in numbers:
        local: Any = each.to_local() if hasattr(each, "to_local") else each
        found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
