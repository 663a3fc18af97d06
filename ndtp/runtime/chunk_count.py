"""The number of chunks of rows for a chain that leaves it open: chosen with constants measured on the ranks at hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.collectives.processors import shared_processors
from ndtp.collectives.turns import staying
from ndtp.compute.devices import kind_of
from ndtp.runtime.chunk_choices import ChunkChoice
from ndtp.runtime.probe import measure
from ndtp.runtime.region import is_in_graph
from ndtp.schedule.chunk_choice import SETTLED, SMALL, Speeds, choose, is_small, settled

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike

ROWS = 2**10  # of a rank, for which a weight is worth a measurement, where ranks may have other numbers of rows
logger = logging.getLogger("ndtp")


def resolve(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    mesh: GridLike,
    dtype: torch.dtype,
    device: torch.device,
    trains: bool = True,
    may_measure: bool = True,
) -> int:
    """The number of chunks for a chain of products that leave it open ("auto"), chosen once for each number of rows.

    The first choice that depends on speeds measures them, which all ranks of the grid do together.

    Args:
        trains: whether gradients are wanted; without, what was chosen with them holds, too.
        may_measure: whether that would be worth it.
    """
    if device.type == "meta":  # a dry run
        return 1
    choices, key = mesh.step.chunks, key_of(plans, sizes, mesh, dtype)
    choice = choices.find(key, trains)
    if choice is None:
        may_measure = may_measure and _measured_alike(plans, sizes, mesh, dtype, device)
        choice = ahead(plans, sizes, mesh, dtype, device.type)
        if choice is None:
            choice = _measured(plans, sizes, mesh, dtype, device) if may_measure else (1, "nothing was measured before")
        if mesh.rank == 0:
            level = logging.DEBUG if choice[1] in SETTLED else logging.INFO
            logger.log(level, "%s: chunks: %d, %s", ", ".join(plan.name for plan in plans), *choice)
    choices.add(key, trains, plans, sizes[0]["m"], choice)
    return choice[0]


def _measured_alike(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    mesh: GridLike,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Measure here if the number of rows decides nothing, where the weights are worth it; return whether it may
    decide.

    Ranks of `dp` may have other numbers of rows than this one, and must come to it at the same product.
    """
    if not any(step.kind == "all_reduce" for plan in plans for step in plan.relayouts["dB"]):
        return True
    usual = [{**size, "m": ROWS * mesh.grid.num_ranks} for size in sizes]
    if ahead(plans, usual, mesh, dtype, device.type) is None:
        _measured(plans, usual, mesh, dtype, device)
    return False


def key_of(plans: Sequence[MatMulPlan], sizes: Sequence[Mapping[str, int]], mesh: GridLike, dtype: torch.dtype) -> str:
    """All that a choice depends on, but for speeds: layers alike share one."""
    products = [
        f"{plan.equation} {sorted(plan.roles.items())} again {sorted(plan.regather)} of {sorted(size.items())}"
        for plan, size in zip(plans, sizes, strict=True)
    ]
    return f"{mesh.grid}, {_name(dtype, mesh)}{', captured' * is_in_graph(mesh.collectives)}: " + "; then ".join(
        products
    )


def issued_as_now(speeds: Speeds, mesh: GridLike) -> Speeds:
    """Return the speeds without the host where a graph issues the tasks."""
    return replace(speeds, host=None) if speeds.host is not None and is_in_graph(mesh.collectives) else speeds


def ahead(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    mesh: GridLike,
    dtype: torch.dtype,
    device_type: str,
) -> ChunkChoice | None:
    """Return the choice that needs no measurement, if there is one; no collective, and the same on every rank.

    What is given, by a profile or a checkpoint, holds for small products as well; what was measured does not, which
    would make them depend on what ran before.
    """
    choices = mesh.step.chunks
    if why := settled(plans, sizes):
        return 1, why
    if given := choices.given(mesh.grid, _name(dtype), _name(dtype, mesh)):
        return choose(plans, sizes, dtype.itemsize, issued_as_now(given, mesh), mesh.wire)
    if is_small(plans, sizes, dtype.itemsize, kind_of(device_type).chunks_from, mesh.wire):
        return 1, SMALL
    if not mesh.collectives.groups.kind.has_peers:
        return 1, "a fake process group sends nothing"
    if torch.are_deterministic_algorithms_enabled():
        return 1, "deterministic algorithms: nothing is measured"
    if choices.crowd:
        return 1, _crowded(choices.crowd)
    measured = choices.measured.get((str(mesh.grid), _name(dtype, mesh)))
    if measured is None:
        return None
    return choose(plans, sizes, dtype.itemsize, issued_as_now(measured, mesh), mesh.wire)


def _measured(
    plans: Sequence[MatMulPlan],
    sizes: Sequence[Mapping[str, int]],
    mesh: GridLike,
    dtype: torch.dtype,
    device: torch.device,
) -> ChunkChoice:
    choices = mesh.step.chunks
    with _unseen(mesh):
        if choices.crowd is None:
            may_share = mesh.groups.kind.runs_in_host and device.type == "cpu" and mesh.gemm.takes_processors
            choices.crowd = shared_processors(mesh.groups) if may_share else 0
        if choices.crowd:
            return 1, _crowded(choices.crowd)
        if mesh.rank == 0:
            logger.info("chunks: grid %s measures its links and its %s products", mesh.grid, _name(dtype))
        like = torch.empty(1, dtype=dtype, device=device)
        known = next(iter(choices.measured.values()), None)
        speeds = measure(mesh.collectives, mesh.gemm, like, known=known)
    choices.measured[str(mesh.grid), _name(dtype, mesh)] = speeds
    return choose(plans, sizes, dtype.itemsize, issued_as_now(speeds, mesh), mesh.wire)


@contextmanager
def _unseen(mesh: GridLike) -> Iterator[None]:
    """A context whose traffic meters do not count and recorders do not see.

    And gloo hands a compiler's Python dispatcher on to its threads, which would wait for the interpreter's lock while
    this thread holds it and waits for them.
    """
    recording = mesh.step.recording
    recorder, recording.recorder = recording.recorder, None
    try:
        with _disable_current_modes(), no_python_dispatcher(), staying():
            yield
    finally:
        recording.recorder = recorder


def _crowded(processors: int) -> str:
    return f"the ranks share {processors} processors: overlap takes from products what it hides"


def _name(dtype: torch.dtype, mesh: GridLike | None = None) -> str:
    """Return the name of a dtype, and of the wire of a grid, whose codecs take their time."""
    wire = None if mesh is None else mesh.wire
    return str(dtype).removeprefix("torch.") + (f" as {wire}" if wire else "")
