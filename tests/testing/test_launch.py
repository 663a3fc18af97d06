"""`run` in whole programs: scripts, torchrun, interrupted and killed parents.

One is executed by Python itself, as a user's is; the others are forks of a process that has torch: see tests/forked.py.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import python, with_torch
from process_states import parent_of, wait_until_gone

import ndtp
import ndtp.testing
from ndtp.testing import RankError, RankTimeout

SCRIPT = """
    import os, signal, sys, time
    import torch.distributed as dist
    import ndtp.testing
    import ndtp.testing.zygote

    ndtp.testing.zygote._PRELOAD = ("torch.distributed", "ndtp.testing.worker")  # all that these ranks need

    class Answer:
        def __init__(self, rank): self.rank = rank

    def who():
        return Answer(dist.get_rank()), os.getpid()

    def hang():
        print("hanging", flush=True)
        time.sleep(600)
"""


def square(rank_offset, *, timeout=0):
    return (dist.get_rank() + rank_offset) ** 2 + timeout


def fail():
    raise KeyError("missing")


def run_again(ranks):
    return ndtp.testing.run(square, ranks, args=(1,))


def run_again_and_fail(ranks):
    return ndtp.testing.run(fail, ranks, axes={"x": ranks})


def in_fake_group_of_its_own():
    return dist.get_world_size()


def test_run():
    assert ndtp.testing.run(square, 4, args=(1,), kwargs={"timeout": 100}) == [101, 104, 109, 116]
    with pytest.raises(RankError, match="KeyError: 'missing'"):
        ndtp.testing.run(fail, 4)


def test_run_shares_the_pool_of_the_fixture(ranks):
    pids = ranks(4).run(os.getpid)
    assert ndtp.testing.run(os.getpid, 4) == pids


def test_run_inside_a_rank_uses_its_group(ranks):
    assert ranks(4).run(run_again, 4) == [[1, 4, 9, 16]] * 4
    with pytest.raises(RankError, match="8 ranks were asked for in a program that is one of 4"):
        ranks(4).run(run_again, 8)
    with pytest.raises(RankError, match=r"rank 3 \(x=3\): KeyError: 'missing'"):
        ranks(4).run(run_again_and_fail, 4, wait_all=True)


def test_run_beside_a_fake_group():
    """A fake group of 512, as volume tests use, is one process: it must not be taken for a launcher's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=512)
    try:
        assert ndtp.testing.run(in_fake_group_of_its_own, 2) == [2, 2]
    finally:
        dist.destroy_process_group()


def test_functions_of_the_main_script(tmp_path):
    """Found although the working directory changes; classes of the script too; interpreter exit leaves no process."""
    output = check_script(
        tmp_path,
        """
        if __name__ == "__main__":
            os.chdir("/")
            results = ndtp.testing.run(who, 2)
            print([answer.rank for answer, _ in results], all(type(answer) is Answer for answer, _ in results))
            print(*(pid for _, pid in results))
        """,
    )
    first, pids = output.splitlines()
    assert first == "[0, 1] True"
    wait_until_gone(map(int, pids.split()))


def test_a_script_without_main_guard_is_told_so(tmp_path):
    done = with_torch(python, write(tmp_path, "ndtp.testing.run(who, 2)"))
    assert done.returncode == 1
    assert 'if __name__ == "__main__"' in done.stderr
    assert "RankError: rank" in done.stderr


@pytest.mark.parametrize(
    "when, end",
    [
        ("in a call", signal.SIGINT),
        ("between calls", signal.SIGTERM),
        ("in a call", signal.SIGKILL),
    ],
)
def test_a_parent_that_ends_leaves_no_process(tmp_path, when, end):
    script = write(
        tmp_path,
        f"""
        if __name__ == "__main__":
            print(*(pid for _, pid in ndtp.testing.run(who, 2)), flush=True)
            {"ndtp.testing.run(hang, 2)" if when == "in a call" else 'print("hanging", flush=True); time.sleep(600)'}
        """,
    )
    with_torch(end_parent, script, end)


def end_parent(script, end):
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        zygote = parent_of(pids[0])
        assert parent.stdout.readline() == "hanging\n"
        parent.send_signal(end)
        _, errors = parent.communicate(timeout=60)
    assert parent.returncode == -end
    assert errors.count("Traceback") == (1 if end == signal.SIGINT else 0)
    wait_until_gone([zygote, *pids])


IN_A_SCRIPT = "dist.init_process_group('gloo'); fail()"
STALLED = "dist.init_process_group('gloo'); fail(timeout=3)"
IN_RUN = "ndtp.testing.run(fail, 2)"


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (STALLED, "CommunicationError: all_gather of relayout (forward) over axis y failed: rank 1 (z=0, x=0, y=1) "
                  "waited for rank 0"),
        (IN_A_SCRIPT, "KeyError: 'missing'"),
        (IN_RUN, "KeyError: 'missing'"),
    ],
    ids=["stalled", "in a script", "in run"],
)  # fmt: skip
def test_a_failure_under_torchrun_ends_all_ranks(tmp_path, start, message):
    """Although a collective of the rank that fails waits for one that never comes."""
    script = write(
        tmp_path,
        f"""
        def fail(timeout=None):
            import torch

            grid = ndtp.Grid(z=1, x=1, y=2)
            mesh, other = ndtp.ProcessGrid(grid), ndtp.ProcessGrid(grid, timeout=timeout)
            group, layout = mesh.group(("y",)), ndtp.Layout(grid, "y", None)
            ndtp.relayout(torch.ones(2, 2), layout, layout.with_dims(None, None), other)
            if dist.get_rank() == 0:
                time.sleep(600)
            dist.all_reduce(torch.ones(2), async_op=True, group=group)
            if timeout:
                ndtp.relayout(torch.ones(2, 2), layout, layout.with_dims(None, None), other)
            raise KeyError("missing")

        if __name__ == "__main__":
            {start}
        """,
    )
    assert message in torchrun(script, code=1)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for threads in /proc")
def test_no_thread_of_gloo_outlives_the_interpreter(tmp_path):
    """One that did, and gave back a tensor then, would abort the program: about one run in thirty.

    Under a launcher `run` runs in the launcher's group.
    """
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import atexit, os, pathlib

            def names():
                return [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]

            @atexit.register
            def tell():
                os.write(1, " ".join(["at exit", *(name for name in names() if "gloo" in name)]).encode() + b"\\n")

            import torch
            import torch.distributed as dist
            import ndtp

            class Answer:
                def __init__(self, rank): self.rank = rank

            def who():
                return Answer(dist.get_rank()), os.getpid()

            def step():
                mesh = ndtp.ProcessGrid(ndtp.Grid(z=1, x=1, y=2))
                block = ndtp.nn.MLP(8, 16, "relu", mesh=mesh, scheme="1d-sp", chunks=2)
                block(torch.ones(4, 8)).sum().backward()
                torch.optim.AdamW(block.parameters()).step()
                assert any("gloo" in name for name in names())
                return mesh, block

            if __name__ == "__main__":
                results = ndtp.testing.run(who, 2)
                assert [answer.rank for answer, _ in results] == [0, 1]
                assert os.getpid() in [pid for _, pid in results]
                step()
                held = step()
            """
        )
    )
    assert torchrun(str(script)).splitlines() == ["at exit"] * 2


def test_importing_and_running_initialises_no_cuda():
    assert not torch.cuda.is_initialized()
    assert ndtp.testing.run(torch.cuda.is_initialized, 2) == [False, False]


def torchrun(script, code=0):
    outputs = f"{script}.out", f"{script}.err"
    status = with_torch(launcher, script, *outputs, spares=2)
    printed, errors = (Path(output).read_text() for output in outputs)
    assert status == code, errors
    return errors if code else printed


def launcher(script, *outputs):
    """The exit status of `torchrun script`, whose standard output and error go to these files."""
    from torch.distributed import run

    for descriptor, output in enumerate(outputs, start=1):
        with open(output, "w") as file:
            os.dup2(file.fileno(), descriptor)
    try:
        run.main(["--standalone", "--nproc-per-node=2", script])
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def write(folder, body):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(body))
    return str(path)


def check_script(folder, body):
    done = python(write(folder, body))
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_on_a_grid():
    """A grid has threads of its own, which watch the other ranks."""
    ndtp.ProcessGrid(ndtp.Grid(x=2))
    wait_for_godot()


def wait_for_godot():
    time.sleep(600)


def test_a_timeout_names_the_place_of_the_main_thread():
    with pytest.raises(RankTimeout, match=r"still running after 4 s, in wait_for_godot \(test_launch"):
        ndtp.testing.run(wait_on_a_grid, 2, timeout=4)
