"""A model with whose inputs nobody could come up is split by what its first call shows."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models_from_elsewhere import FusedAttention
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid, LayoutError, MismatchError
from ndtp.models.first_call import WaitsForCall
from ndtp.models.observation import observe


class Seen:
    """What a model writes into in a call, such as a cache."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []


class Odd(nn.Module):
    """It takes a mapping, has two sides of one size, and asks for numbers on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attn = nn.Embedding(24, 32), FusedAttention(True)
        self.gate, self.up, self.down, self.head = (nn.Linear(32, 32) for _ in range(4))
        self.calls = 0

    def forward(self, batch: dict[str, torch.Tensor], seen: Seen | None = None) -> torch.Tensor:
        self.calls += 1
        if seen is not None:
            seen.batches.append(batch["ids"])
        x = self.table(batch["ids"])
        x = x + self.attn(x)
        if "branch" in batch and batch["ids"].max() > 20:
            x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["ids"].flatten())


def batch(branch):
    ids = torch.arange(32).view(4, 8) % 24
    return {"ids": ids, "branch": ids} if branch else {"ids": ids}


def steps(model, optimizer, branch):
    losses = []
    for _ in range(2):
        loss = model(batch(branch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_first_call():
    mesh, told = mesh_of(Grid(x=2)), []
    for branch in (False, True):
        torch.manual_seed(0)
        dense = Odd()
        model, seen = copy.deepcopy(dense), []
        ndtp.parallelize(model, mesh, scheme="2d")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = list(model.parameters())
        model.attn.c_attn.register_forward_hook(lambda *_: seen.append(1))  # noqa: B023
        report = model.ndtp_report
        assert report.linears == (6, 0) and "waits    the first call" in str(report), report
        with pytest.raises(LayoutError, match="first call decides"):
            report.volume(4)
        other = copy.deepcopy(model)
        losses = steps(model, optimizer, branch)
        expected = steps(dense, torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9), branch)
        torch.testing.assert_close(losses, expected)
        assert len(seen) == 2 and model.calls == 2, "a trial is no call"
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert report is model.ndtp_report and "waits" not in str(report) and report.linears == (6, 6), report
        for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-5)
        assert other.ndtp_report is not report and other.ndtp_report.waits
        with torch.inference_mode():
            cache = Seen()
            torch.testing.assert_close(other(batch(branch), cache).item(), losses[0])
        assert len(cache.batches) == 1, "nor does it write into what the call is given"
        assert not other.ndtp_report.waits
        assert not isinstance(model, WaitsForCall)
        told.append(type(model).__name__)
    return told


def test_the_first_call_decides(ranks):
    assert ranks(2).run(check_first_call)[0] == ["Odd", "Odd"]


class Around:
    """A forward that somebody puts in the place of a model's own, as losses of embeddings do for a step."""

    def __init__(self, model) -> None:
        self.forward, self.kept = model.forward, []
        model.forward = self

    def __call__(self, *args):
        self.kept.append(2 * self.forward(*args))
        return self.kept[-1]


def check_own_forwards():
    """A forward of the model's own, given before `parallelize`, after it or both, of the model or of a copy."""
    torch.manual_seed(0)
    model = Odd()
    expected = model(batch(True))
    for times in ((1, 0), (0, 1), (1, 1)):
        for is_copy in (False, True):
            mine = copy.deepcopy(model)
            kept = [Around(mine) for _ in range(times[0])]
            ndtp.parallelize(mine, mesh_of(Grid(x=2)), scheme="1d")
            mine = copy.deepcopy(mine) if is_copy else mine
            assert "first call" in mine.ndtp_report.waits
            kept = [mine.forward.own for _ in kept] + [Around(mine) for _ in range(times[1])]
            for _ in range(2):
                torch.testing.assert_close(mine(batch(True)), expected * 2 ** len(kept))
            assert [len(each.kept) for each in kept] == [2] * len(kept)
            assert mine.ndtp_report.linears == (6, 6) and not mine.ndtp_report.waits


def profiled():
    """A profiler that records shapes holds the tensors that operations get, of which torch exchanges none."""
    torch.manual_seed(0)
    dense, batch = Odd(), {"ids": torch.arange(12).view(2, 6)}
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        scores = model(batch)
        with torch.profiler.record_function("of mine"):
            scores.square().mean().backward()
    torch.testing.assert_close(scores, dense(batch))
    assert any(event.key == "of mine" for event in profile.key_averages())  # it records again


def test_the_first_call_may_be_profiled(ranks):
    ranks(2).run(profiled)


def test_a_forward_that_is_not_of_the_class_is_called_once(ranks):
    ranks(2).run(check_own_forwards)


def check_ranks_that_differ():
    mesh = mesh_of(Grid(x=2))
    torch.manual_seed(0)
    model = ndtp.parallelize(Odd(), mesh, scheme="1d", check=False)
    with pytest.raises(MismatchError, match="first call of Odd shows other layers on rank 1"):
        model(batch(mesh.rank == 0))
    model(batch(True)).backward()
    assert not model.ndtp_report.waits


def test_ranks_whose_first_calls_differ_are_told(ranks):
    ranks(2).run(check_ranks_that_differ)


class Images(nn.Module):
    """Takes images, which are made up where none are given."""

    image_size = 8

    def __init__(self):
        super().__init__()
        self.patches, self.up, self.down = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return x + self.down(torch.relu(self.up(x)))


class Tower(nn.Module):
    """A tower over a table that another one has, too: no inputs can be made up for it."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids)).mean(1)


def two_towers_with_one_table(grid):
    """Both wait for their first calls; when the second one is called, the first one has put the table on the grid."""
    table, ids = nn.Embedding(24, 32), torch.arange(40).view(8, 5) % 24
    towers = nn.ModuleList([Tower(table), Tower(table)])
    dense, mesh = copy.deepcopy(towers), mesh_of(grid)
    own = ids.chunk(grid["dp"])[grid.index(mesh.rank, ("dp",))] if "dp" in grid else ids
    for tower in towers:
        ndtp.parallelize(tower, mesh, scheme="3d")
    # Also of a step in which only the first one takes part: its table gets a gradient that is summed.
    (towers[0](own).square().sum()).backward()
    dense[0](ids).square().sum().backward()
    for pair, rows in ((towers, own), (dense, ids)):
        (pair[0](rows) * pair[1](rows.flip(1))).sum().backward()
    for tower in towers:
        assert "replaced 2 of 2 Linears" in str(tower.ndtp_report)
    for (name, theirs), own_one in zip(dense.named_parameters(), towers.parameters(), strict=True):
        torch.testing.assert_close(own_one.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("grid", [Grid(x=2), Grid(dp=2)], ids=str)
def test_two_models_that_wait_may_share_a_parameter(ranks, grid):
    ranks(2).run(two_towers_with_one_table, grid)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_inputs_are_made_up_in_the_dtype_of_the_parameters(dtype):
    assert observe(Images().to(dtype)) is not None


class ByMethod(nn.Module):
    """A flow or an autoencoder, which is no function: its forward raises, and programs call its other methods."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.shift = (
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
            nn.Parameter(torch.ones(8)),
        )

    def forward(self, *_: object) -> torch.Tensor:
        raise RuntimeError("call log_prob")

    def log_prob(self, x: torch.Tensor) -> torch.Tensor:
        return -(self.encoder(x) - self.shift).square().mean(-1)


def check_methods(grid):
    torch.manual_seed(0)
    dense, x, mesh = ByMethod().double(), torch.randn(8, 8, dtype=torch.float64), mesh_of(grid)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d")
    alone = copy.deepcopy(model.encoder)  # a copy of a part is a module of its own
    torch.testing.assert_close(alone(x), dense.encoder(x))
    assert model.ndtp_report.waits
    dp = grid.size(("dp",)) if "dp" in grid else 1
    rows = x.chunk(dp)[mesh.coordinate["dp"] if dp > 1 else 0]
    for each, given, parts in ((model, rows, dp), (copy.deepcopy(model), rows, dp), (dense, x, 1)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (-each.log_prob(given).mean() / parts).backward()
            optimizer.step()
        assert each is dense or each.ndtp_report.linears == (2, 2), each.ndtp_report
        for ours, theirs in zip(model.parameters(), each.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), getattr(theirs, "full_tensor", theirs.detach)())


@pytest.mark.parametrize("grid", [Grid(x=2), Grid(dp=2)], ids=str)
def test_methods_of_a_model_that_is_never_called_split_it(ranks, grid):
    ranks(2).run(check_methods, grid)


def check_odd_part():
    """A call of a part splits the model, so ranks that are elsewhere are named, instead of waiting for each other."""
    torch.manual_seed(0)
    model = ndtp.parallelize(ByMethod(), mesh_of(Grid(x=2)), scheme="1d")
    is_first = dist.get_rank() == 0
    part, features = (model.encoder, 8) if is_first else (model.encoder[2], 16)
    with pytest.raises(MismatchError, match=r"rank 0 is at the call of 'encoder' of ByMethod, which waits"):
        part(torch.ones(2, features))


def test_another_part_on_one_rank_is_named(ranks):
    ranks(2).run(check_odd_part)
