"""A rank that dies or stalls inside a collective: the others get an error that says where, and nobody hangs."""

import os
import signal
import time

import pytest
import torch

import ndtp
from ndtp import CommunicationError, Grid, Layout, MatMulPlan, ProcessGrid
from ndtp.collectives import presence
from ndtp.testing import RankError

GRID = Grid(y=2, x=2)
VICTIM = 3  # y=1, x=1; shares x with rank 2 and y with rank 1


def collective(kind, mesh):
    """One product or relayout that runs this kind of collective over x."""
    grid = mesh.grid
    lay = lambda text: Layout.parse(grid, text)  # noqa: E731
    ones = torch.ones(4, 4, requires_grad=True)
    if kind == "all_gather":
        return ndtp.relayout(ones, lay("x None"), lay("None None"), mesh)
    if kind == "all_to_all":
        return ndtp.relayout(ones, lay("x None"), lay("None x"), mesh)
    out = {"reduce_scatter": "x None", "all_reduce": "None None", "all_reduce bf16": "None None"}.get(kind)
    if out is not None:
        ones = ones.bfloat16() if "bf16" in kind else ones
        return ndtp.matmul(ones, ones, MatMulPlan(lay("None x"), lay("x None"), lay(out)), mesh)
    assert kind == "backward"
    return ndtp.matmul(ones, ones.detach(), MatMulPlan(lay("None None"), lay("None x")), mesh)


KINDS = ["all_gather", "reduce_scatter", "all_reduce", "all_reduce bf16", "all_to_all", "backward"]


def attempt(kind, mesh, lose):
    """Once with everybody; then rank `VICTIM` is lost.  Returns what the others see."""
    result = collective(kind, mesh)
    if mesh.rank == VICTIM:
        return lose()
    try:
        if kind == "backward":
            result.sum().backward()
        else:
            collective(kind, mesh)
    except CommunicationError as error:
        return str(error)
    return "fine"


def check_reports(kind, by_rank):
    # Ranks 0 and 1 share the axis x with each other only, and notice nothing.
    assert by_rank[0] == by_rank[1] == "fine", (kind, by_rank)
    name = {"backward": "all_reduce of matmul dA (dgrad)"}.get(kind, kind.split()[0])
    assert name in by_rank[2] and "over axis x" in by_rank[2], by_rank[2]
    assert "rank 2 (y=1, x=0) waited for rank 3" in by_rank[2], by_rank[2]


STALLED = ("all_reduce bf16", "backward")  # each timeout takes its time; a death is told of every kind


def stall():
    presence.LOCAL_PATIENCE_S = 0.2  # which is left where all have shown whom they wait for, at once
    reports = {}
    for kind in STALLED:
        mesh = ProcessGrid(GRID, timeout=0.5)
        reports[kind] = attempt(kind, mesh, lambda: None)  # waits below, for as long as the others wait for it
        assert not mesh.collectives.in_flight, f"{kind}: handles left over"
        torch.distributed.barrier()
    return reports


def test_a_stalled_rank_becomes_an_error_that_names_axis_and_ranks(ranks):
    reports = ranks(4).run(stall, timeout=200)
    for kind in STALLED:
        check_reports(kind, [report[kind] for report in reports])


def die_in(kind):
    seen = attempt(kind, ProcessGrid(GRID, timeout=60.0), lambda: os.kill(os.getpid(), signal.SIGKILL))
    if seen != "fine":
        raise RuntimeError(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_becomes_an_error_that_names_axis_and_ranks(ranks, kind):
    """Long before the timeout; the pool waits for all who live."""
    with pytest.raises(RankError) as caught:
        ranks(4).run(die_in, kind, timeout=50, wait_all=True)
    error = caught.value
    assert not error.stopped and set(error.errors) == {2, VICTIM}, "ranks 0 and 1 return"
    assert "killed by SIGKILL" in error.errors[VICTIM]
    check_reports(kind, ["fine", "fine", str(error.exceptions[2])])


def stall_in_forward_of_a_block():
    mesh = ProcessGrid(GRID, timeout=0.5)
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="2d")
    if mesh.rank != VICTIM:
        block(torch.ones(block.in_layout.shard_shape((8, 8))))
    else:
        time.sleep(30)


def test_a_stall_reaches_the_caller_of_the_pool(ranks):
    with pytest.raises(RankError) as caught:
        ranks(4).run(stall_in_forward_of_a_block, timeout=100)
    error = caught.value.exceptions[caught.value.rank]
    assert isinstance(error, CommunicationError) and "mlp." in str(error) and "axis" in str(error), error
    assert ranks(4).run(os.getpid), "the pool works again"
