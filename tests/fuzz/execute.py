"""Run programs on the ranks of a pool and compare them with dense."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hooks import register_module_hooks
from language import Language
from language_loop import Wrong
from language_run import run_language
from program import Program
from sides import REFUSAL, Dense, Parallel, Record
from steps import perform
from torch import Tensor

import ndtp
from ndtp.collectives.collectives import Collectives
from ndtp.runtime.probe import KINDS
from ndtp.schedule.chunk_choice import LinkSpeed, Speeds

FACTOR = 8.0  # times the error of the same-dtype dense program against fp64
# Of the largest magnitude; what is added up in bf16 may cancel, most of all in models as small as these.
FLOOR = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.1}


class Finding(Exception):
    """A program that does not do on the grid what it does on dense; its text is what a rank saw."""


def run_programs(programs: Sequence[Program | Language], progress: str = "") -> list[int]:
    """Run programs one after another; a finding ends the call.  Returns how many tensors of each were compared."""
    gc.collect()
    gc.freeze()  # programs collect garbage again and again: their own alone, not torch's modules
    try:
        return [run_program(program, progress) for program in programs]
    finally:
        gc.unfreeze()


def run_program(program: Program | Language, progress: str = "") -> int:
    """Run one program; returns how many results were compared.

    Args:
        progress: a file in which rank 0 leaves the seed of the program that it is at.

    Raises:
        Finding: a wrong result, or an exception that dense does not raise.
    """
    dist.barrier()  # a failure is that of the program at which all ranks are
    if progress and dist.get_rank() == 0:
        Path(progress).write_text(str(program.seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(program, Language):
            return _run_language(program)
        try:
            expected = _dense(program, False)
            exact = expected if program.is_fp64 else _dense(program, True)
        except Exception as error:
            raise Finding(f"seed {program.seed}: the dense program is at fault: {error!r}") from error
        name = f"seed {program.seed} on {program.ranks} ranks"
        try:
            with started_collectives() as order:
                actual = _parallel(program)
        except Exception as error:
            raise Finding(f"{name}: {type(error).__name__}: {error}") from error
    wrong = mismatches(actual.records, expected.records, exact.records, FLOOR[getattr(torch, program.dtype)])
    wrong += out_of_order(order)
    if wrong:
        raise Finding(f"{name}: " + "\n  ".join(wrong[:6]))
    return len(actual.records)


def _run_language(program: Language) -> int:
    try:
        return run_language(program)
    except Exception as error:
        kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
        raise Finding(f"seed {program.seed} on {program.ranks} ranks: {kind}{error}") from error


@contextlib.contextmanager
def started_collectives() -> Iterator[list[str]]:
    """What the collectives are for that this rank starts inside, in order."""
    launch, order = Collectives.launch, []

    def noted(self: Any, route: Any, tensor: Tensor, *arguments: Any) -> Any:
        what = f"{route.kind} over {route.axes} of {tuple(tensor.shape)} for {route.op} {route.phase} {route.part}"
        order.append(f"{self.groups.grid}: {what}")
        return launch(self, route, tensor, *arguments)

    with mock.patch.object(Collectives, "launch", noted):
        yield order


def out_of_order(order: list[str]) -> list[str]:
    """Where this rank starts other collectives than rank 0, in words; on every rank, whatever it found before."""
    theirs = [order]
    dist.broadcast_object_list(theirs)
    if order == theirs[0]:
        return []
    first = next((i for i, pair in enumerate(zip(order, theirs[0], strict=False)) if pair[0] != pair[1]), None)
    ours, others = ("nothing", "more") if first is None else (order[first], theirs[0][first])
    return [f"collective {first} of {len(order)} on this rank is {ours}; on rank 0, of {len(theirs[0])}, {others}"]


def _dense(program: Program, is_exact: bool) -> Dense:
    side = Dense(program, is_exact)
    register_module_hooks(side)
    for index, step in enumerate(program.steps):
        perform(side, step, index)
    return side


def _parallel(program: Program) -> Parallel:
    meshes = [ndtp.ProcessGrid(grid, **dict(program.options)) for grid in program.all_grids]
    for mesh in meshes:  # not measured, which takes a second: "auto" cuts into many chunks
        mesh.step.chunks.profile = _free_calls
    side = Parallel(program, meshes)
    register_module_hooks(side)
    for index, step in enumerate(program.steps):
        perform(side, step, index)
    for mesh in meshes:
        mesh.discard_gradients()
    if any(unit.compiled for unit in program.units):
        torch._dynamo.reset()
    return side


def _free_calls(grid: ndtp.Grid, _: str) -> Speeds:
    return Speeds({(kind, axis): LinkSpeed(0.0, 1e-9) for kind in KINDS for axis in grid}, 1e-9)


def mismatches(
    actual: Sequence[Record], expected: Sequence[Record], exact: Sequence[Record], floor: float
) -> list[str]:
    """What differs, in words.

    Args:
        floor: the least tolerance, of the largest magnitude: a model in fp32 may have been trained in bf16.
    """
    wrong = []
    if [r.label for r in actual] != [r.label for r in expected]:
        odd = [r.label for r in actual if r.label not in {e.label for e in expected}]
        lost = [e.label for e in expected if e.label not in {r.label for r in actual}]
        wrong.append(f"records differ: {odd[:4]} instead of {lost[:4]}")
    by_label = {r.label: r for r in actual}
    for ours, truth in zip(expected, exact, strict=True):
        record = by_label.get(ours.label)
        if record is None or record.value is REFUSAL:
            continue
        if not isinstance(record.value, Tensor) or not isinstance(ours.value, Tensor):
            if type(record.value) is not type(ours.value) or str(record.value) not in str(ours.value).split(" or "):
                said = [v if isinstance(v, str) else type(v).__name__ for v in (record.value, ours.value)]
                wrong.append(f"{ours.label}: {said[0]} instead of {said[1]}")
            continue
        assert isinstance(truth.value, Tensor)
        difference = _distance(record, ours.value, truth.value, floor)
        if difference:
            wrong.append(f"{ours.label}: {difference}")
    return wrong


def _distance(record: Record, dense: Tensor, exact: Tensor, floor: float) -> str:
    """ "" where a result is as near to the fp64 one as it may be; both are whole."""
    actual = record.value
    assert isinstance(actual, Tensor)
    if actual.dtype != dense.dtype:
        return f"{actual.dtype} instead of {dense.dtype}"
    where = record.where or (...,)
    theirs = exact[where]
    if actual.shape != theirs.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(theirs.shape)}"
    if not actual.numel():
        return ""
    scale = exact.abs().max().item()
    own = (dense.double() - exact.double()).abs().max().item()
    tolerance = max(FACTOR * own, max(floor, FLOOR[dense.dtype]) * scale, 1e-14)
    error = (actual.double() - theirs.double()).abs()
    if bool((error <= tolerance).all()):
        return ""
    return f"off by {error.max().item():.3g} of {scale:.3g} (tolerance {tolerance:.2g})"
