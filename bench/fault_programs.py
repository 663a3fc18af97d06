"""Programs of four ranks that `faults.py` puts faults into, and the faults.

A fault that no code of the victim takes part in (killed, exited, stopped, cut) comes from a thread of it at a random
time, in the middle of whatever the victim does; one that its code makes (an exception, memory, a sleep) comes at a
random step, and in saves and loads at a random call inside.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

import ndtp
from ndtp import Grid, ProcessGrid
from ndtp.checkpoints import folder as folders
from ndtp.checkpoints import training_state

RANKS, STEPS, LATEST_S = 4, 6, 0.25
# What survivors may say of the victim.
HOW = {
    "killed": ("gone",), "raised": ("raised",), "exited": ("gone",), "out of memory": ("raised",),
    "stopped": ("stopped",), "late": ("behind",), "cut": ("link", "gone", "absent", "behind", "raised"),
}  # fmt: skip
AT_ANY_TIME = ("killed", "exited", "stopped", "cut")
KINDS = tuple(HOW)


class Fault(Exception):
    """An error of the user's own program."""


@dataclass(frozen=True)
class Plan:
    """Which rank fails, how and when: after `seconds` of the loop, or at its step `at`.

    Attributes:
        port: where the ranks meet; 0: in a file.
    """

    kind: str
    victim: int
    at: int
    seconds: float
    timeout: float
    port: int

    @property
    def is_mine(self) -> bool:
        return dist.get_rank() == self.victim

    def steps(self) -> Iterator[int]:
        """The steps of a program that goes on until the fault is there; it starts with the first."""
        if self.is_mine and self.kind in AT_ANY_TIME:
            threading.Thread(target=self._later, daemon=True).start()
        return itertools.count()

    def _later(self) -> None:
        time.sleep(self.seconds)
        fail(self.kind)
        while True:  # what is connected anew is cut, too
            time.sleep(0.02)
            cut()

    def at_step(self, step: int) -> None:
        """Where the victim's own code fails."""
        if self.is_mine and self.kind not in AT_ANY_TIME and step == self.at:
            fail(self.kind)


def fail(kind: str) -> None:
    Path(tempfile.gettempdir(), "fault").write_text(str(time.time()))
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exited":
        os._exit(3)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "raised":
        raise Fault("the program's own")
    elif kind == "out of memory":
        torch.empty(2**50)
    elif kind == "late":
        time.sleep(600)
    else:
        cut()


def cut() -> None:
    """Every connection of this rank is gone, as with its network card; the process is there."""
    for number in os.listdir("/proc/self/fd"):
        try:
            link = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue
        with link:
            if link.family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(OSError):
                    if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        link.shutdown(socket.SHUT_RDWR)


def train(plan: Plan) -> None:
    mesh = ProcessGrid(Grid(x=2, y=2), timeout=plan.timeout)
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="2d")
    optimizer = torch.optim.AdamW(block.parameters())
    x = torch.ones(block.in_layout.shard_shape((8, 8)))
    for step in plan.steps():
        y = block(x)
        plan.at_step(step if step % 2 else -1)  # between forward and backward
        y.sum().backward()
        plan.at_step(step)
        ndtp.nn.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def generate(plan: Plan) -> None:
    mesh = ProcessGrid(Grid(z=2, x=2), timeout=plan.timeout)
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="3d")
    x = torch.ones(block.in_layout.shard_shape((8, 8)))
    with torch.no_grad():
        for step in plan.steps():
            plan.at_step(step)
            x = block(x)


def experts(plan: Plan) -> None:
    mesh = ProcessGrid(Grid(e=2, x=2), timeout=plan.timeout)
    moe = ndtp.nn.MoE(8, 16, experts=4, top_k=2, router="mixtral", mesh=mesh, scheme="1d-sp", expert_axis="e")
    x = torch.randn(moe.in_layout.shard_shape((16, 8)))
    for step in plan.steps():
        plan.at_step(step)
        moe(x).sum().backward()


def pipeline(plan: Plan) -> None:
    cut_model = ndtp.Pipeline([Grid(x=2), Grid(x=2)], (4, 8), scheme="1d-sp")
    mesh = cut_model.mesh(timeout=plan.timeout)
    stage = ndtp.PipelineStage(ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d-sp"), cut_model)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, target: ((y - target) ** 2).sum())
    rows = stage.rows(torch.ones(16, 8), 4)
    for step in plan.steps():
        plan.at_step(step)
        schedule.step(rows) if stage.is_first else schedule.step(target=rows)


def start(plan: Plan) -> None:
    for step in plan.steps():  # each of these makes groups of its own
        plan.at_step(step)
        ProcessGrid(Grid(x=2, y=2), timeout=plan.timeout)


def _checkpointed(plan: Plan, folder: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, str]:
    mesh = ProcessGrid(Grid(x=2, y=2), timeout=plan.timeout)
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="2d")
    optimizer = torch.optim.AdamW(block.parameters())
    block(torch.ones(block.in_layout.shard_shape((8, 8)))).sum().backward()
    optimizer.step()
    return block, optimizer, f"{folder}/checkpoint"


def _fail_inside(plan: Plan, *places: tuple[Any, str]) -> None:
    """The victim's own failures: in one of these functions, at a call of it that `at` says."""
    if not plan.is_mine or plan.kind in AT_ANY_TIME:
        return
    owner, name = places[plan.at % len(places)]
    before: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == plan.at // len(places):
            fail(plan.kind)
        return before(*args, **kwargs)

    setattr(owner, name, failing)


def save(plan: Plan) -> None:
    block, optimizer, folder = _checkpointed(plan, _folder_of_all())
    _fail_inside(plan, (training_state.Saving, "_write"), (training_state.Saving, "wait"), (training_state, "kept_by"))
    for _ in plan.steps():
        ndtp.checkpoint.save(block, optimizer, folder)


def load(plan: Plan) -> None:
    block, optimizer, folder = _checkpointed(plan, _folder_of_all())
    ndtp.checkpoint.save(block, optimizer, folder)
    _fail_inside(plan, (folders, "read"), (training_state, "fresh_state"), (training_state, "restore_groups"))
    for _ in plan.steps():
        ndtp.checkpoint.load(block, optimizer, folder)


def _folder_of_all() -> str:
    """One for all ranks: in that where they write what they said."""
    return tempfile.gettempdir()


PLACES: dict[str, Callable[[Plan], None]] = {
    "train": train, "generate": generate, "experts": experts, "pipeline": pipeline, "start": start, "save": save,
    "load": load,
}  # fmt: skip


def until_the_end(place: str, plan: Plan, folder: str) -> None:
    """What a program does: a rank that fails ends, and what it said stays."""
    from ndtp.collectives.last_words import tell_of

    tempfile.tempdir = folder
    if plan.port:  # as torchrun and plain programs meet; the ranks of `ndtp.testing` met by a file
        rank = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{plan.port}", rank=rank, world_size=RANKS)
    try:
        PLACES[place](plan)
        said: dict[str, Any] = {"error": "none"}
    except Exception as error:
        told = tell_of(error)  # as at the end of a program
        said = {"error": type(told).__name__, "how": getattr(told, "how", ""), "text": str(told)[:600],
                "ranks": list(getattr(told, "ranks", ()))}  # fmt: skip
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    os._exit(1)
