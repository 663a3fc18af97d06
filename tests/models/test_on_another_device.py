"""Models whose tensors lie on a device that is not the CPU: an emulated one, where there is no other.

`NDTP_TEST_DEVICE=emulated python -m pytest tests/..` puts the tensors of any test there; see docs/testing.md.
"""

import copy
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from products import mesh_of
from torch import nn
from torch.utils._pytree import tree_map_only

import ndtp
from ndtp import Grid
from ndtp.collectives.recorder import Recorder
from ndtp.models.observation import observe
from ndtp.testing import RankPool, emulated
from ndtp.testing.device import TEST_DEVICE

pytest.importorskip("transformers")
import other_architectures

DEVICE = emulated.NAME
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        None in map(shutil.which, ("g++", "ninja")), reason="a C++ compiler and ninja compile the emulated device"
    ),
]


@pytest.fixture(scope="module")
def pool():
    with mock.patch.dict(os.environ, {TEST_DEVICE: DEVICE}), RankPool(2) as made:
        yield made


def as_users_do():
    """Without a default device: what is made is moved."""
    torch.set_default_device(None)


def there(x):
    return x.to(DEVICE) if isinstance(x, nn.Module) else tree_map_only(torch.Tensor, lambda y: y.to(DEVICE), x)


def device_of_torch():
    as_users_do()
    x, indices = there(torch.arange(6.0).view(2, 3)), torch.tensor([1])
    assert x[indices].device.type == x.t().contiguous().device.type == DEVICE and torch.equal(
        x.cpu()[indices], x[1:].cpu()
    )
    for mixed in (
        lambda: x + torch.ones(2, 3),
        lambda: x.index_select(0, indices),
        lambda: x @ torch.ones(3, 3),
        lambda: x.clone().index_put_((indices,), torch.zeros(1, 3)),
    ):
        with pytest.raises(RuntimeError, match="on the same device"):
            mixed()
    assert float((x + torch.tensor(1.0)).sum()) == 21.0, "numbers of the host have no place"
    threads, leaf = [], x.clone().requires_grad_()
    leaf.register_hook(lambda _: threads.append(threading.current_thread()))
    leaf.square().sum().backward()
    assert torch.equal(leaf.grad, 2 * x) and threads[0] is not threading.current_thread()
    gathered, summed = x.new_empty(4, 3), x + dist.get_rank()
    dist.all_gather_into_tensor(gathered, summed)
    dist.all_reduce(summed)
    parts = list(x.new_empty(3).split([1, 2]))
    dist.all_to_all(parts, list(x[0].split([1, 2])) if dist.get_rank() else [x[0, :1], x[1, :1]])
    return gathered.sum().item(), summed.sum().item()


def test_torch_takes_it_for_a_device(pool):
    assert pool.run(device_of_torch) == [(36.0, 36.0)] * 2


def check_stock(names):
    as_users_do()
    build, inputs = other_architectures.build, other_architectures.inputs
    moved = {
        "build": lambda *given, **options: there(build(*given, **options)),
        "inputs": lambda *of: there(inputs(*of)),
    }
    with mock.patch.multiple(other_architectures, **moved):
        for name in names:
            other_architectures.compare(name, {"x": 1, "y": 2}, "2d")


def test_stock_models_that_are_moved_there_are_as_dense(pool):
    pool.run(check_stock, ["CLIPModel", "GptOssForCausalLM"])


def test_a_process_ends_as_any_other():
    """Also right behind a backward, whose Python objects the thread of the device frees."""
    code = f"""
import torch
from ndtp.testing import emulated
emulated.start()
x = torch.ones(2, device="{DEVICE}", requires_grad=True)
with torch.device("cpu"):
    x.sum().backward()
"""
    emulated.build()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


KILLED = """
import os, signal
from unittest import mock
from ndtp.testing.emulated import build

def dies(command, **_):
    for name in ("lock", f"{command[3]}.so"):
        open(os.path.join(command[4], name), "w").write("half of it")
    os.kill(os.getpid(), signal.SIGKILL)

with mock.patch("subprocess.run", dies):
    build()
"""


def test_a_build_that_is_killed_holds_nobody_up(tmp_path, monkeypatch):
    """A lock file of torch's would: all that come later wait for it, and those who wait in a rank are killed too."""

    def compiles(command, **_):
        (Path(command[4]) / f"{command[3]}.so").write_text("all of it")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert subprocess.run([sys.executable, "-c", KILLED], check=False, timeout=60).returncode == -signal.SIGKILL
    monkeypatch.setattr(subprocess, "run", compiles)
    library = emulated.build()
    assert library.read_text() == "all of it"
    assert {path.name for path in library.parent.iterdir()} == {library.name, "builder"}
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", "ld: no space"))
    assert emulated.build() == library, "compiles once"
    library.unlink()
    with pytest.raises(RuntimeError, match="could not be compiled: ld: no space"):
        emulated.build()


class HostTable(nn.Module):
    """Takes rows of a table that stays on the host."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.table = [torch.ones(4, 8)]

    def forward(self, ids):
        return self.second(self.first(self.table[0].index_select(0, ids).to(self.first.weight.device)))


def check_observed():
    as_users_do()
    bare = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    with torch.device("meta"):
        on_meta = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    x = torch.ones(4, 8)
    for model, example in ((there(bare), x), (there(bare), there(x)), (on_meta, there(x)), (on_meta, x)):
        assert observe(model, example).order == ["0", "1"], (model, example)
    assert observe(there(HostTable()), torch.tensor([0, 2])).order == ["first", "second"]
    return True


def test_an_example_may_be_here_or_there(pool):
    assert pool.run(check_observed) == [True, True]


def check_example_and_breaking_off():
    """A model is run once on its own device, and a backward that broke off there is no other thread at work."""
    as_users_do()
    torch.manual_seed(0)
    dense = there(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)))
    x = there(torch.randn(4, 8))
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d", example=x)
    assert not model.ndtp_report.waits and model.ndtp_report.linears == (2, 2)

    def break_off(_):
        raise KeyError("a hook of the user's")

    handle = model[0].weight.register_hook(break_off)
    with pytest.raises(KeyError):
        model(x).square().sum().backward()
    handle.remove()
    model.zero_grad()
    for each in (model, dense):
        each(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), dense[0].weight.grad)


def test_an_example_there_and_a_backward_that_breaks_off(pool):
    pool.run(check_example_and_breaking_off)


def check_recorded():
    """Where there are no streams of CUDA, the host's clock times collectives."""
    as_users_do()
    model = ndtp.parallelize(there(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))), mesh_of(Grid(x=2)), scheme="1d")
    with Recorder(model[0].mesh) as recorder:
        model(there(torch.ones(4, 8))).square().sum().backward()
    flights = [span for span in recorder.spans() if span.kind == "collective"]
    assert flights and all(span.end > span.start for span in flights), flights


def test_collectives_are_recorded(pool):
    pool.run(check_recorded)
