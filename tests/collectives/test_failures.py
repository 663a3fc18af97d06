"""A rank that dies or stalls inside a collective: the others get an error that says where, and nobody hangs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import ndtp
from ndtp import CommunicationError, Grid, Layout, MatMulPlan, ProcessGrid
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


def stall_in_every_kind():
    reports = {}
    for kind in KINDS:
        mesh = ProcessGrid(GRID, timeout=3.0)
        reports[kind] = attempt(kind, mesh, lambda: time.sleep(4))
        assert not mesh.collectives.in_flight, f"{kind}: handles left over"
        torch.distributed.barrier()
    return reports


def test_a_stalled_rank_becomes_an_error_that_names_axis_and_ranks(ranks):
    reports = ranks(4).run(stall_in_every_kind, timeout=200)
    for kind in KINDS:
        check_reports(kind, [report[kind] for report in reports])


def fork_worlds(folder):
    """Ranks of a world for every kind, forked from one process that has imported torch.

    One world after another: with 24 processes at once on a busy machine, some could not connect in 20 s.
    """
    torch.set_num_threads(1)
    for kind in KINDS:
        reports = [report_of(folder, kind, rank) for rank in range(3)]
        for rank in range(4):
            if os.fork() == 0:
                store = torch.distributed.FileStore(os.path.join(folder, f"{kind}.store"), 4)
                timeout = timedelta(seconds=100)
                torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timeout)
                mesh = ProcessGrid(GRID, timeout=60.0)
                seen = attempt(kind, mesh, lambda: os.kill(os.getpid(), signal.SIGKILL))
                path = report_of(folder, kind, rank)
                with open(path + ".part", "w") as file:
                    file.write(seen)
                os.rename(path + ".part", path)
                time.sleep(600)
        while not all(map(os.path.exists, reports)):
            time.sleep(0.02)


def report_of(folder, kind, rank):
    return os.path.join(folder, f"{kind}.{rank}")


def test_a_killed_rank_becomes_an_error_that_names_axis_and_ranks(tmp_path):
    program = f"from test_failures import fork_worlds; fork_worlds({str(tmp_path)!r})"
    path = os.pathsep.join(filter(None, [os.path.dirname(__file__), *sys.path]))
    environ = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen([sys.executable, "-c", program], env=environ, start_new_session=True)
    try:
        assert process.wait(timeout=200) == 0  # far longer than the ranks need: only a hang exceeds it
        for kind in KINDS:
            reports = (report_of(tmp_path, kind, rank) for rank in range(3))
            check_reports(kind, [Path(report).read_text() for report in reports])
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def stall_in_forward_of_a_block():
    mesh = ProcessGrid(GRID, timeout=4.0)
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


SCRIPT = """
    import os, signal, time, torch, torch.distributed as dist, ndtp
    dist.init_process_group("gloo")
    mesh = ndtp.ProcessGrid(ndtp.Grid(x=2), timeout=5)
    layout = ndtp.Layout(mesh.grid, "x", None)
    step = lambda: ndtp.relayout(torch.ones(2, 2), layout, layout.with_dims(None, None), mesh)
    step()
    if mesh.rank == 1:
        time.sleep(600)
    try:
        step()
    except ndtp.CommunicationError as error:
        print("caught:", str(error).splitlines()[0], flush=True)
        raise
"""


def test_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True, text=True, env=environ, timeout=150, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert (
        "caught: all_gather of relayout (forward) over axis x failed: rank 0 (x=0) waited for rank 1" in result.stdout
    ), result.stderr
