"""Wall time of a training step of a block across grids, on real ranks, checked against dense first."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ndtp.algebra.schemes import block_layouts
from ndtp.measure.rivals import RIVALS, DenseBlock, wait_until_there
from ndtp.measure.volume import BlockShape, VolumeCase, meter_step, scaled_down
from ndtp.nn import MLP
from ndtp.runtime.process_grid import ProcessGrid

Rival = TypeVar("Rival")


@dataclass(frozen=True)
class StepJob:
    """The task of every rank. `log` is a file to which rank 0 appends a line a round, which an interrupted run
    keeps.

    A round measures every grid and every rival once, so that drift of the machine hits all alike.  `local` measures the
    local work of a grid as well.  `together` steps follow one another before a device is waited for, as in training.
    """

    cases: tuple[VolumeCase, ...]
    shape: BlockShape
    dtype: str
    rounds: int
    warmup: int
    rivals: tuple[str, ...]
    log: str
    device: str = "cpu"
    local: bool = True
    together: int = 1


@dataclass(frozen=True)
class StepEntry:
    """Something that is measured, prepared on this rank."""

    name: str
    step: Callable[[], None]
    local: Callable[[], None] | None
    received_bytes: int
    wrong: int


def measure(job: StepJob) -> None:
    """The whole measurement, as every rank runs it.  The results are in the log."""
    entries = [_prepare(case, job) for case in job.cases] + [_prepare_rival(name, job) for name in job.rivals]
    rank0 = dist.get_rank() == 0
    head = [{"name": e.name, "received_bytes": e.received_bytes, "wrong": e.wrong} for e in entries]
    if rank0:
        _append(job.log, {"entries": head, "rounds": job.rounds})
    if any(entry.wrong for entry in entries):
        return
    for round_ in range(-job.warmup, job.rounds):
        times = torch.zeros(len(entries), 3)
        for i in turns(range(len(entries)), round_):
            entry = entries[i]
            local = _timed(entry.local, job)[0] if entry.local else 0.0
            times[i] = torch.tensor([*_timed(entry.step, job), local])
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        if rank0:
            names = ("step_ms", "host_ms", "local_ms")
            _append(job.log, {"round": round_, **{name: times[:, j].tolist() for j, name in enumerate(names)}})


def turns(rivals: Iterable[Rival], round_: int) -> list[Rival]:
    """The order of a round: another one each time, the same on all ranks.  Who comes behind a long step pays for it."""
    rivals = list(rivals)
    return random.Random(round_).sample(rivals, len(rivals))


def _append(path: str, line: dict[str, object]) -> None:
    with Path(path).open("a") as log:
        log.write(json.dumps(line) + "\n")


def _timed(action: Callable[[], None], job: StepJob) -> tuple[float, float]:
    """Milliseconds of one of several actions in a row, until a device is done with it and until the host is."""
    dist.barrier()
    if job.device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(job.together):
        action()
    issued = time.perf_counter()
    if job.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3 / job.together, (issued - begin) * 1e3 / job.together


def _prepare(case: VolumeCase, job: StepJob) -> StepEntry:
    mesh = ProcessGrid(case.grid, device_type=job.device)
    dtype, shape = getattr(torch, job.dtype), job.shape
    mlp = MLP(
        shape.hidden,
        shape.ffn,
        "relu",
        bias=False,
        mesh=mesh,
        scheme=case.scheme,
        chunks=0,  # what plans are for
        dtype=dtype,
        device=job.device,
        seed=0,
    )
    x = torch.randn(mlp.in_layout.shard_shape((shape.tokens, shape.hidden)), dtype=dtype, device=job.device)
    received = meter_step(mlp, x.requires_grad_()).total
    local = _local_work(case, job) if job.local else None
    return StepEntry(str(case), _stepper(mlp, x), local, received, count_wrong(case, mesh, job.shape, job.device))


def _stepper(module: nn.Module, x: Tensor) -> Callable[[], None]:
    grad = torch.randn_like(module(x).detach())

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        y = module(x)
        y.backward(grad)
        wait_until_there(y, x.grad)

    return step


def _local_work(case: VolumeCase, job: StepJob) -> Callable[[], None]:
    """The products and activations of a step on tensors that are already where they are needed: no communication."""
    dtype = getattr(torch, job.dtype)
    plans = block_layouts(case.grid, case.scheme).plans()
    operands = []
    for plan, sizes in zip(plans, job.shape.products(), strict=True):
        _, m, k, n = plan.gemm_shape(sizes)
        operands.append([torch.randn(shape, dtype=dtype, device=job.device) for shape in ((m, k), (n, k), (m, n))])
    hidden_shape = plans[0].out.shard_shape((job.shape.tokens, job.shape.ffn))
    hidden = torch.randn(hidden_shape, dtype=dtype, device=job.device).requires_grad_()
    grad = torch.randn_like(hidden)

    def work() -> None:
        for a, b, dc in operands:
            a @ b.mT, dc @ b, dc.mT @ a
        F.relu(hidden).backward(grad)

    return work


@dataclass(frozen=True)
class Reference:
    """A dense step of small integers in fp32, on a block of the same proportions that is small enough for every sum to
    be exact: what ndtp and its rivals must give, element by element."""

    dense: DenseBlock
    x: Tensor
    grad: Tensor
    y: Tensor

    @classmethod
    def of(cls, shape: BlockShape, ranks: int, device: str) -> Reference:
        shape = scaled_down(shape, ranks, 2**22)
        generator = torch.Generator().manual_seed(1)

        def integers(*sizes: int) -> Tensor:
            return torch.randint(-1, 2, sizes, generator=generator).float().to(device)

        dense = DenseBlock(shape.hidden, shape.ffn, torch.float32, device, F.relu)
        with torch.no_grad():
            dense.up.weight.copy_(integers(shape.ffn, shape.hidden))
            dense.down.weight.copy_(integers(shape.hidden, shape.ffn))
        x, grad = integers(shape.tokens, shape.hidden).requires_grad_(), integers(shape.tokens, shape.hidden)
        y = dense(x)
        y.backward(grad)
        return cls(dense, x, grad, y.detach())


def _sum_over_ranks(wrong: object, device: str) -> int:
    total = torch.as_tensor(wrong, dtype=torch.int64, device=device).reshape(1)
    dist.all_reduce(total)
    return int(total)


def count_wrong(case: VolumeCase, mesh: ProcessGrid, shape: BlockShape, device: str, chunks: int | str = 0) -> int:
    """Elements, over all ranks, of the output and all gradients that differ from the reference."""
    reference = Reference.of(shape, case.grid.num_ranks, device)
    dense, x, grad = reference.dense, reference.x, reference.grad
    block = MLP.from_dense(dense.up, dense.down, "relu", mesh=mesh, scheme=case.scheme, chunks=chunks)
    x_shard = block.in_layout.shard(x.detach(), mesh.rank).clone().requires_grad_()
    actual = block(x_shard)
    actual.backward(block.out_layout.shard(grad, mesh.rank).contiguous())
    pairs = [(actual, reference.y, block.out_layout), (x_shard.grad, x.grad, block.in_layout)]
    for layer, dense_layer in ((block.up, dense.up), (block.down, dense.down)):
        gradient = layer.weight.grad
        pairs.append((getattr(gradient, "_local_tensor", gradient), dense_layer.weight.grad, layer.weight_layout))
    wrong = sum((got != layout.shard(want, mesh.rank)).sum() for got, want, layout in pairs if want is not None)
    return _sum_over_ranks(wrong, device)


def count_wrong_of_rival(name: str, job: StepJob) -> int:
    """Count a rival's wrong elements, as `count_wrong` does: the output, and the gradients of the input and both
    weights.
    """
    reference = Reference.of(job.shape, dist.get_world_size(), job.device)
    build, rows_split = RIVALS[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def mine(whole: Tensor, dim: int, split: bool = True) -> Tensor:
        return whole.detach().chunk(ranks, dim)[rank] if split else whole.detach()

    dense = reference.dense
    wanted = dense.up.weight.grad, dense.down.weight.grad
    block = build(copy.deepcopy(dense), job.device)
    block.zero_grad(set_to_none=True)
    x = mine(reference.x, 0, rows_split).clone().requires_grad_()
    y = block(x)
    y.backward(mine(reference.grad, 0, rows_split))
    pairs = [(y, mine(reference.y, 0, rows_split)), (x.grad, mine(reference.x.grad, 0, rows_split))]  # type: ignore[arg-type]
    for parameter, want, dim in zip(block.parameters(), wanted, (0, 1), strict=True):
        gradient = parameter.grad
        pairs.append((getattr(gradient, "_local_tensor", gradient), mine(want, dim)))  # type: ignore[arg-type]
    return _sum_over_ranks(sum((got != want).sum() for got, want in pairs), job.device)


def _prepare_rival(name: str, job: StepJob) -> StepEntry:
    build, rows_split = RIVALS[name]
    dtype, ranks = getattr(torch, job.dtype), dist.get_world_size()
    torch.manual_seed(0)
    block = build(DenseBlock(job.shape.hidden, job.shape.ffn, dtype, job.device, F.relu), job.device)
    rows = job.shape.tokens // ranks if rows_split else job.shape.tokens
    x = torch.randn(rows, job.shape.hidden, dtype=dtype, device=job.device).requires_grad_()
    received = meter_step(block, x).total
    return StepEntry(name, _stepper(block, x), None, received, count_wrong_of_rival(name, job))


# ------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class StepResult:
    """Medians over rounds of the slowest rank's times."""

    name: str
    received_bytes: int
    wrong: int
    rounds: int
    step_ms: float | None
    slowest_ms: float | None
    local_ms: float | None
    host_ms: float | None = None

    @property
    def exposed_ms(self) -> float | None:
        """The part of the step that the same local work without communication does not take."""
        return None if self.step_ms is None or not self.local_ms else max(0.0, self.step_ms - self.local_ms)


def read_log(path: str | Path) -> list[StepResult]:
    """Return the results that a log has so far; lines that are not finished are left out."""
    lines = []
    for text in Path(path).read_text().splitlines() if Path(path).exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    if not lines:
        return []
    rounds = [line for line in lines[1:] if line["round"] >= 0]
    results = []
    for i, entry in enumerate(lines[0]["entries"]):
        steps, local, host = ([line[key][i] for line in rounds] for key in ("step_ms", "local_ms", "host_ms"))
        found = (median(steps), max(steps), median(local), median(host)) if rounds else (None,) * 4
        results.append(StepResult(entry["name"], entry["received_bytes"], entry["wrong"], len(rounds), *found))
    return results


def num_rounds(path: str | Path) -> int:
    """Rounds done, warm-up included."""
    return max(0, len(Path(path).read_text().splitlines()) - 1) if Path(path).exists() else 0


def ranks_of(values: Sequence[float | None]) -> list[int | None]:
    """1 for the smallest value, and so on."""
    order = sorted(value for value in values if value is not None)
    return [None if value is None else 1 + order.index(value) for value in values]
