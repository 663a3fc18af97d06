"""The folder of a checkpoint, whoever dies while it is written, and whoever else writes there."""

import errno
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from ndtp.checkpoint import load, save
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid
from ndtp.checkpoints import export_folder, training_state
from ndtp.checkpoints.folder import FolderSwap, locked
from ndtp.checkpoints.parts import Laid
from ndtp.checkpoints.safetensors_file import Writer
from ndtp.errors import CheckpointError, CommunicationError
from ndtp.testing import RankError

OPERATIONS = ("pwrite", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "truncate")


def run_of(step):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(step)
    return model


def die_at(operation, write):
    """A process that is killed in one of its calls of the system; a write has done half of its bytes."""
    left = operation

    def dying(name):
        real = getattr(os, name)

        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                if name == "pwrite":
                    real(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, dying(name))
    write()


def saved(step, folder):
    save(run_of(step), None, folder, extra={"step": step})


def exported(step, folder):
    """Two files and an index."""
    ndtp.checkpoint.export_safetensors(run_of(step), folder, file_bytes=40)


@pytest.mark.parametrize(("write", "read"), [(saved, load), (exported, ndtp.checkpoint.load_safetensors)])
def test_killed_in_any_call_of_the_system(write, read, tmp_path):
    """What was there or what is new is there, and whole; the next one clears up."""
    folder = tmp_path / "run"
    write(1, folder)
    count = len(list(folder.iterdir()))
    seen, operation = [], 0
    while True:
        operation += 1
        child = os.fork()
        if child == 0:
            try:
                die_at(operation, lambda: write(2, folder))
                os._exit(0)
            except BaseException:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        found = run_of(0)
        read(found, None, folder) if read is load else read(found, folder)
        (step,) = {x for p in found.parameters() for x in p.flatten().tolist()}
        seen.append(step)
        write(1, folder)
        assert [each.name for each in tmp_path.iterdir()] == ["run"], operation
        assert len(list(folder.iterdir())) == count, (operation, sorted(folder.iterdir()))
        if not os.WIFSIGNALED(status):
            break
    assert seen == sorted(seen) and {1, 2} == set(seen) and len(seen) > 12, seen


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_that_fails_changes_nothing(tmp_path, monkeypatch):
    """Whatever fails: a full disk, memory, a config that cannot be saved, the last rename; or a file is cut short."""
    folder = tmp_path / "run"
    exported(1, folder)
    ours = sorted(folder.glob("*.safetensors"))
    (folder / "model-00001-of-00007.safetensors").write_bytes(b"of somebody else")
    (folder / "model-abcdef01-00001-of-00002.safetensors").write_bytes(ours[0].read_bytes())  # of one that was killed
    exported(1, folder)
    before = contents(folder)
    assert len(before) == 4 and "model-00001-of-00007.safetensors" in before, sorted(before)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail(error):
        def call(*_, **__):
            raise error

        return call

    write, replace, config = Writer.write, os.replace, SimpleNamespace(save_pretrained=fail(ValueError("refused")))
    late = lambda self, key, *rest: full() if key.startswith("1") else write(self, key, *rest)  # noqa: E731
    last = lambda source, to: full() if str(to).endswith(".json") else replace(source, to)  # noqa: E731
    kept = export_folder.check_written
    gone = lambda at, files: [os.truncate(at / files[1].name, 99), kept(at, files)]  # noqa: E731
    for place, name, call, words in (
        (Writer, "write", late, "No space left"),
        (Writer, "write", fail(MemoryError("too large")), "MemoryError: too large"),
        (nn.Sequential, "config", config, "ValueError: refused"),
        (os, "replace", last, "No space left"),
        (export_folder, "check_written", gone, "has 99 bytes of"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, call, raising=name != "config")
            with pytest.raises(CommunicationError, match=f"{folder} stays as it was.*{words}"):
                exported(2, folder)
        assert contents(folder) == before, words
    odd = run_of(1)
    odd.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    with pytest.raises(CheckpointError, match="'__metadata__' is no name of a tensor"):
        ndtp.checkpoint.export_safetensors(odd, folder)


def test_two_writers(tmp_path):
    first, second = FolderSwap(tmp_path / "run"), FolderSwap(tmp_path / "run")
    first.open()
    (first.partial / "x").touch()
    with pytest.raises(BlockingIOError, match="another process saves there"):
        second.open()
    second.close()
    assert (first.partial / "x").exists(), "who has nothing clears nothing"
    first.finish(b"{}")
    first.close()
    with locked(tmp_path / "run"):  # by who still clears up behind
        second.open()
        with pytest.raises(BlockingIOError, match="another process saves there"):
            second.finish(b"[]")
        second.close()
    assert (tmp_path / "run" / "checkpoint.json").read_bytes() == b"{}"


def test_links(tmp_path):
    """A folder that is a link is replaced where it leads to; one in the place of the partial folder is not followed."""
    (tmp_path / "disk").mkdir()
    save(run_of(1), None, tmp_path / "disk" / "run")
    (tmp_path / "latest").symlink_to(tmp_path / "disk" / "run")
    save(run_of(2), None, tmp_path / "latest", extra={"step": 2})
    assert (tmp_path / "latest").is_symlink() and load(run_of(0), None, tmp_path / "disk" / "run") == {"step": 2}
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "disk" / "run.partial").symlink_to(tmp_path / "precious")
    with pytest.raises(CommunicationError, match="stays as it was"):
        save(run_of(3), None, tmp_path / "latest")
    assert (tmp_path / "precious" / "file").exists()
    assert load(run_of(0), None, tmp_path / "latest") == {"step": 2}


@pytest.mark.parametrize("parent", ["/proc", "/dev/null"])
def test_where_nothing_can_be_written(parent):
    """Whoever asks: not even root can make a file there."""
    with pytest.raises(CommunicationError, match=f"save: {parent}/run stays as it was"):
        save(run_of(1), None, f"{parent}/run")
    with pytest.raises(CommunicationError, match=f"{parent}/run.safetensors"):
        ndtp.checkpoint.export_safetensors(run_of(1), f"{parent}/run.safetensors")


@pytest.mark.parametrize("what", ["the folder", "a file", "the end of a file"])
def test_what_was_written_goes_meanwhile(what, tmp_path, monkeypatch):
    """A folder that is half gone must not take the place of the one before."""
    real, run = training_state.Saving.write, tmp_path / "there" / "run"

    def gone(self):
        real(self)
        for path in [run.parent] if what == "the folder" else list(run.with_name("run.partial").glob("*.safetensors")):
            shutil.rmtree(path) if path.is_dir() else path.unlink() if what == "a file" else os.truncate(path, 99)

    if what != "the folder":
        save(run_of(2), None, run, extra={"step": 2})
    monkeypatch.setattr(training_state.Saving, "write", gone)
    with pytest.raises(CommunicationError, match=r"stays as it was.*(No such file|has 99 bytes of)"):
        save(run_of(1), None, run)
    if what != "the folder":
        assert load(run_of(0), None, run) == {"step": 2}


def die_in(folder, place):
    mesh = ndtp.ProcessGrid(Grid(x=2), timeout=60.0)
    model = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d", seed=1)
    save(model, None, folder)
    if mesh.rank == 1:
        victim = Writer if place == "save" else Laid
        setattr(victim, "close" if place == "save" else "fill", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    (save if place == "save" else load)(model, None, folder)


@pytest.mark.parametrize("place", ["save", "load"])
def test_a_rank_that_dies(ranks, tmp_path, place):
    """The other one ends at once, with an error that names the checkpoint and the rank; the one before is whole."""
    with pytest.raises(RankError) as caught:
        ranks(2).run(die_in, tmp_path / "run", place, timeout=50, wait_all=True)
    error = caught.value
    assert not error.stopped and "killed by SIGKILL" in error.errors[1]
    said = error.exceptions[0]
    assert isinstance(said, CommunicationError) and f"{place}: {tmp_path / 'run'}" in str(said), said
    ranks(2).run(check_whole, tmp_path / "run")


def check_whole(folder):
    mesh = mesh_of(Grid(x=2))
    mine, other = (ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d", seed=seed) for seed in (1, 2))
    load(other, None, folder)
    for p, q in zip(mine.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


def check_replicas(folder):
    """Of four ranks that have the same boxes each writes some."""
    mesh = mesh_of(Grid(dp=2, x=2))
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d", seed=1)
    save(block, None, folder)


def test_replicas_write_in_turns(ranks, tmp_path):
    ranks(4).run(check_replicas, tmp_path / "run")
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "run").glob("*.safetensors")}
    assert len(sizes) == 4, sizes
