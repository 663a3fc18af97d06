"""What a pool does for its caller: results, errors of every kind, and ranks that work again afterwards."""

import ctypes
import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from process_states import wait_until_collected, wait_until_gone
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from ndtp.testing import RankError, RankPool, RankTimeout, zygote

P = 4


@pytest.fixture
def pool(ranks):
    """Whatever a test does to it, the pool works afterwards."""
    yield ranks(P)
    assert [rank for rank, _ in ranks(P).run(rank_and_pid)] == list(range(P))


# ---- what the ranks do ----


def has_imported(*names):
    return [name in sys.modules for name in names]


def rank_and_pid():
    return dist.get_rank(), os.getpid()


def sum_of_ranks(scale=1):
    total = torch.full((3,), float(dist.get_rank() * scale))
    dist.all_reduce(total)
    return total


def place_and_threads():
    return os.getcwd(), torch.get_num_threads(), os.environ.get("NDTP_TEST")


def gather_arguments(*args, **kwargs):
    return args, kwargs


def tensors():
    large = torch.arange(1_000_000.0)
    return {
        "gradient": (torch.ones(2, requires_grad=True) * 3),
        "slice": large[10:13],
        "expanded": torch.tensor([1.5], dtype=torch.bfloat16).expand(4),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
    }


def path_of_store():
    return _get_default_store().underlying_store.path


def scheduling_policies():
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}


def raise_on(rank, then):
    """Rank `rank` raises; the others wait for it in an all-reduce, sleep, or return."""
    if dist.get_rank() == rank:
        raise LookupError(f"no shard on rank {rank}")
    if then == "all_reduce":
        dist.all_reduce(torch.ones(1))
    elif then == "sleep":
        time.sleep(600)


def raise_in_turn(pause_s):
    time.sleep(pause_s * dist.get_rank())
    raise ValueError(f"turn of {dist.get_rank()}")


def end_on(rank, how):
    if dist.get_rank() == rank:
        if how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "sys.exit":
            sys.exit("enough")
    dist.all_reduce(torch.ones(1))


def end_with_child(rank):
    if dist.get_rank() == rank:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def sleep_on(ranks):
    if dist.get_rank() in ranks:
        wait_for_godot()


def wait_for_godot():
    time.sleep(600)


def unpicklable():
    return threading.Lock()  # which cloudpickle cannot, either


def print_rank():
    print("rank", dist.get_rank(), "says hello")
    print("no newline", end="")


def destroy_group():
    dist.destroy_process_group()


def make_meshes(number):
    for _ in range(number):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
        dist.all_reduce(torch.ones(1), group=mesh.get_group("x"))


def draw():
    return torch.rand(4)


def skip_here():
    pytest.skip("not on this machine")


class Config:
    def __init__(self, size):
        self.size = size


# ---- results ----


def test_results_come_by_rank(pool):
    assert [rank for rank, _ in pool.run(rank_and_pid)] == list(range(P))


def test_the_group_is_up(pool):
    for total in pool.run(sum_of_ranks, scale=2):
        assert torch.equal(total, torch.full((3,), 12.0))


@pytest.mark.skipif(sys.platform != "linux", reason="a policy of Linux")
def test_no_rank_interrupts_another(pool):
    """Nor do gloo's threads, which spin for a lock that whom they interrupt may hold."""
    pool.run(sum_of_ranks)
    assert pool.run(scheduling_policies) == [{os.SCHED_BATCH}] * P


def test_ranks_are_reused(pool):
    pids = [pid for _, pid in pool.run(rank_and_pid)]
    assert pids == [pid for _, pid in pool.run(rank_and_pid)] == pool.pids
    assert len({os.getpid(), *pids}) == P + 1


def test_the_fixture_returns_one_pool_per_size(ranks):
    assert ranks(P) is ranks(P)
    assert len(ranks(2).run(rank_and_pid)) == 2


def test_arguments(pool):
    config = Config(3)
    for args, kwargs in pool.run(gather_arguments, 1, config, key=torch.ones(2)):
        assert (args[0], args[1].size) == (1, 3)
        assert torch.equal(kwargs["key"], torch.ones(2))
    results = pool.run(gather_arguments, "all", per_rank=[(i, -i) for i in range(P)])
    assert [args for args, _ in results] == [(i, -i, "all") for i in range(P)]
    # Names of run's own options reach the function through call.
    assert pool.call(gather_arguments, (), {"timeout": "mine"})[0] == ((), {"timeout": "mine"})


def test_tensors_come_back_plain(pool):
    result = pool.run(tensors)[0]
    assert not any(tensor.requires_grad or type(tensor) is not torch.Tensor for tensor in result.values())
    assert result["slice"].tolist() == [10, 11, 12]
    assert result["slice"].untyped_storage().nbytes() == 12
    assert result["expanded"].dtype == torch.bfloat16
    assert result["expanded"].tolist() == [1.5] * 4


def test_calls_start_from_the_same_seed(pool):
    first, second = pool.run(draw), pool.run(draw)
    assert all(torch.equal(values, first[0]) for values in first + second)


def test_ranks_see_path_directory_and_environment(pool, tmp_path, monkeypatch):
    pool.run(rank_and_pid)
    (tmp_path / "only_here.py").write_text("def answer(): return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NDTP_TEST", "set")
    import only_here

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir("gone")
    assert pool.run(only_here.answer) == [42] * P
    monkeypatch.chdir(tmp_path), (tmp_path / "gone").rmdir()  # and the ranks are there still
    assert pool.run(place_and_threads)[0][:2] == (str(tmp_path), 1)
    pool.close()  # the environment is that of the start
    assert pool.run(place_and_threads) == [(str(tmp_path), 1, "set")] * P
    monkeypatch.undo()
    pool.close()


def test_only_rank_0_prints(pool, capsys):
    pool.run(print_rank)
    assert capsys.readouterr().out == "rank 0 says hello\nno newline"


def test_any_ranks_print_on_request(capsys):
    with RankPool(2, echo=range(2)) as pool:
        pool.run(print_rank)
    assert sorted(capsys.readouterr().out.replace("no newline", "").splitlines()) == [
        "rank 0 says hello",
        "rank 1 says hello",
    ]


def test_what_cannot_be_imported_is_refused(pool, monkeypatch):
    def local():
        return random.random()

    with pytest.raises(ValueError, match="argument of gather_arguments"):
        pool.run(gather_arguments, threading.Lock())
    monkeypatch.setattr("ndtp.testing.messages.find_spec", lambda name: None)  # as if there were no cloudpickle
    for fn in (local, lambda: None):
        with pytest.raises(ValueError, match="module level"):
            pool.run(fn)
    with pytest.raises(ValueError, match="argument of gather_arguments"):
        pool.run(gather_arguments, lambda: None)


def test_numbers_that_do_not_fit_are_refused(pool):
    with pytest.raises(ValueError, match="at least 1"):
        RankPool(0)
    with pytest.raises(ValueError, match="3 entries for 4 ranks"):
        pool.run(rank_and_pid, per_rank=[(), (), ()])
    with pytest.raises(ValueError, match="make 6 ranks, but the pool has 4"):
        pool.run(rank_and_pid, axes={"x": 2, "y": 3})


@pytest.mark.parametrize("then", ["all_reduce", "sleep", "return"])
def test_the_error_of_a_rank_is_relayed(pool, then):
    with pytest.raises(RankError) as caught:
        pool.run(raise_on, 2, then, axes={"y": 2, "x": 2})
    error = caught.value
    assert (error.rank, error.coordinates) == (2, {"y": 1, "x": 0})
    assert list(error.errors) == [2]
    assert error.stopped == (() if then == "return" else (0, 1, 3))
    assert isinstance(error.exceptions[2], LookupError)
    assert "rank 2 (y=1 x=0): LookupError: no shard on rank 2" in str(error)
    assert 'raise LookupError(f"no shard on rank {rank}")' in error.errors[2]
    assert "in raise_on" in error.errors[2]
    assert "worker.py" not in error.errors[2]


def test_all_errors_on_request(pool):
    with pytest.raises(RankError) as caught:
        pool.run(raise_in_turn, 0.4, wait_all=True)
    error = caught.value
    assert error.rank == 0
    assert sorted(error.errors) == list(range(P))
    assert "also rank 3: ValueError: turn of 3" in str(error)


@pytest.mark.parametrize(
    "how, message",
    [("sigkill", "killed by SIGKILL"), ("exit", "exit code 7"), ("segfault", "SIGSEGV"), ("sys.exit", "enough")],
)
def test_a_rank_that_dies_is_named(pool, how, message):
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"rank 1: .*{message}") as caught:
        pool.run(end_on, 1, how)
    assert time.monotonic() - start < 5
    assert caught.value.rank == 1
    if how == "segfault":
        assert "in end_on" in caught.value.errors[1]


def test_children_of_a_dead_rank_neither_hide_its_death_nor_survive_it(pool, capsys):
    with pytest.raises(RankError, match="rank 0: killed by SIGKILL"):
        pool.run(end_with_child, 0)
    wait_until_gone([int(capsys.readouterr().out)])


def test_a_rank_that_dies_between_calls_is_replaced(pool):
    pids = [pid for _, pid in pool.run(rank_and_pid)]
    os.kill(pids[3], signal.SIGKILL)
    wait_until_collected(pids[3])
    assert not set(pids) & {pid for _, pid in pool.run(rank_and_pid)}


def test_a_timeout_names_ranks_and_places(pool):
    with pytest.raises(
        RankTimeout, match=r"rank 1: still running after 2\.5 s, in wait_for_godot \(test_pool"
    ) as caught:
        pool.run(sleep_on, (1, 3), timeout=2.5)
    assert sorted(caught.value.errors) == [1, 3]
    assert all("in wait_for_godot" in trace for trace in caught.value.errors.values())
    assert "also rank 3: still running" in str(caught.value)


def test_an_interrupt_ends_the_ranks(pool, monkeypatch):
    """Ctrl-C comes while the parent waits: no rank goes on with what nobody waits for any more."""

    def interrupt(*_):
        raise KeyboardInterrupt

    pids = [pid for _, pid in pool.run(rank_and_pid)]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("ndtp.testing.pool.wait", interrupt)
        pool.run(sleep_on, range(P))
    assert pool.pids == []
    wait_until_gone(pids)


def test_a_failure_is_not_mistaken_for_the_timeout_it_causes(pool):
    with pytest.raises(RankError) as caught:
        pool.run(raise_on, 2, "sleep", wait_all=True, timeout=4)
    assert caught.value.rank == 2
    assert not isinstance(caught.value, RankTimeout)
    assert "in raise_on" in caught.value.errors[0]


def test_a_result_that_cannot_be_pickled(pool):
    with pytest.raises(RankError, match="pickle"):
        pool.run(unpicklable)


def test_a_rank_that_skips(pool):
    with pytest.raises(RankError, match="not on this machine"):
        pool.run(skip_here)


def test_ranks_without_their_group_are_replaced(pool):
    pids = pool.pids
    pool.run(destroy_group)
    assert not set(pids) & {pid for _, pid in pool.run(rank_and_pid)}


def test_ranks_full_of_groups_are_replaced(pool):
    pids = [pid for _, pid in pool.run(rank_and_pid)]
    pool.run(make_meshes, 2)
    assert pool.pids == pids
    pool.run(make_meshes, 70)
    assert not set(pids) & {pid for _, pid in pool.run(rank_and_pid)}


def test_closing_leaves_nothing():
    with RankPool(2) as pool:
        pids = [pid for _, pid in pool.run(rank_and_pid)]
    wait_until_gone(pids)
    assert pool.pids == []


def test_ranks_find_imported_what_their_parent_has_imported(monkeypatch):
    """Of some packages: each rank would import it anew.  What cannot be imported is the ranks' own business."""
    monkeypatch.setattr(zygote, "_PACKAGES", ("rlcompleter", "not_there"))
    monkeypatch.setitem(sys.modules, "not_there", sys)
    monkeypatch.delitem(sys.modules, "rlcompleter", raising=False)
    with RankPool(1) as pool:
        assert pool.run(has_imported, "rlcompleter", "not_there") == [[False, False]]
        importlib.import_module("rlcompleter")
        pool.close()
        assert pool.run(has_imported, "rlcompleter", "not_there") == [[True, False]]


def test_ranks_never_meet_in_the_store_of_others():
    """It says where these listened: new ones that read it would call them.  A new pool may get the id of an old one."""
    pool = RankPool(1)
    paths, last = pool.run(path_of_store), id(pool)
    pool.close()
    paths += pool.run(path_of_store)
    del pool
    new = [RankPool(1) for _ in range(1000)]
    pool = min(new, key=lambda candidate: id(candidate) != last)
    paths += pool.run(path_of_store)
    pool.close()
    assert len(set(paths)) == 3, paths
