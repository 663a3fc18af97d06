"""Models whose own code calls `torch.distributed`: it sees the ranks that have other rows, and whole tensors."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from products import mesh_of
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import ndtp
from ndtp import Grid
from ndtp.split import SplitTensor, same_rows, whole


class Gathered(torch.autograd.Function):
    """All rows of all ranks, whose gradient is summed over these: in the form in which people write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Any:
        ctx.group = group
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = torch.stack(grads)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


class Contrastive(nn.Module):
    """A table of words and two towers, of which each row is told from the rows of all ranks.

    Attributes:
        way: how the rows are gathered.
        group: the ranks; None means all that there are.
    """

    def __init__(self, way: str, group: Any = None) -> None:
        super().__init__()
        self.way, self.group = way, group
        self.words, self.left, self.right = nn.Embedding(32, 16), nn.Linear(16, 24), nn.Linear(16, 24)
        self.joined = nn.Linear(24, 24, bias=False)

    def everybody(self, x: Tensor) -> Tensor:
        group, count = self.group, dist.get_world_size(self.group)
        if self.way == "function":
            return torch.cat(Gathered.apply(x, group))
        if self.way == "differentiable":
            return torch.cat(dist_nn.all_gather(x, **{"group": group} if group else {}))
        parts = [torch.zeros_like(x) for _ in range(count)]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).mean(1)
        left, right = self.joined(self.left(x)), self.joined(self.right(x))
        first = torch.tensor([1.0 + dist.get_rank(self.group)])
        dist.broadcast(first, **{"group_src" if self.group else "src": 0}, group=self.group)
        mine = dist.get_rank(self.group) * len(ids) + torch.arange(len(ids))
        biggest = left.detach().abs().mean(0)
        dist.all_reduce(biggest, dist.ReduceOp.MAX, group=self.group)
        scores = left @ self.everybody(right).t()  # whose gradient is not contiguous
        return F.cross_entropy(scores * first, mine) + (left * biggest).mean()


def check_rows(way: str, grid: Grid, scheme: str) -> None:
    mesh, rank = mesh_of(grid), dist.get_rank()
    made = [dist.new_group([each]) for each in range(grid.num_ranks)]
    group = mesh.group(("dp",)) if "dp" in grid else made[rank]
    ids = torch.randint(32, (4, 5), generator=torch.Generator().manual_seed(mesh.coordinate.get("dp", 0)))
    torch.manual_seed(0)
    # torch's own differentiable gather fails in subgroups of gloo.
    dense = Contrastive("function" if way == "differentiable" else way, group)
    expected = dense(ids)
    expected.backward()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whole tensors are what these collectives take
        model = ndtp.parallelize(Contrastive(way), mesh, scheme=scheme)
        loss = model(ids)
    loss.backward()
    torch.testing.assert_close(whole(loss), expected)
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        if theirs.grad is None:  # what a gather that is not differentiable hides
            assert ours.grad is None, name
            continue
        dist.all_reduce(theirs.grad, group=group)  # ndtp sums over the ranks that have rows of their own
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert dist.get_world_size() == grid.num_ranks and dist.get_rank() == rank  # outside of the model


@pytest.mark.parametrize("way", ["list", "differentiable", "function"])
def test_code_of_a_model_sees_the_ranks_that_have_other_rows(ranks, way):
    ranks(4).run(check_rows, way, Grid(dp=2, x=2), "2d")
    ranks(2).run(check_rows, way, Grid(x=2), "1d")


def check_rows_with_a_default_device(*case: Any) -> None:
    """It is a mode, through which torch's functions are called."""
    with torch.device(torch.get_default_device()):
        check_rows(*case)


@pytest.mark.cpu
def test_a_default_device_changes_nothing(ranks):
    ranks(4).run(check_rows_with_a_default_device, "list", Grid(dp=2, x=2), "2d")


def check_lists() -> str:
    model = ndtp.parallelize(
        nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), mesh_of(Grid(x=2)), scheme="1d", example=torch.arange(4)
    )
    y = model(torch.arange(4))
    assert isinstance(y, SplitTensor)
    into = torch.zeros(4, 4)
    with pytest.raises(ndtp.LayoutError, match="was given a list with") as caught:
        dist.reduce_scatter(into, [y, y])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        halves = [y * 2, torch.zeros(4, 4)]
        dist.all_gather(halves, y)
    for half in halves:
        torch.testing.assert_close(whole(half), whole(y))
    return str(caught.value)


def test_split_tensors_in_collectives_are_whole_or_refused(ranks):
    assert "fix: x.gathered()" in ranks(2).run(check_lists)[0]


class Mean(nn.Module):
    """A loss that is summed over all ranks, and divided by their number.

    Attributes:
        count: their number when it was made; None: it asks when it is called.
    """

    def __init__(self, count: int | None) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), count

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).square().mean()
        return dist_nn.all_reduce(loss) / (self.count or dist.get_world_size())


def check_noted_count() -> list[list[str]]:
    found, mesh = [], mesh_of(Grid(x=2))
    for count in (dist.get_world_size(), None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            model = ndtp.parallelize(Mean(count), mesh, scheme="1d", example=torch.ones(2, 4))
            for _ in range(2):
                model(torch.ones(2, 4)).backward()
        found.append([str(each.message) for each in caught if "how many ranks" in str(each.message)])
    return found


def test_a_number_of_ranks_that_was_noted_before_is_warned_of(ranks):
    for noted, asked in ranks(2).run(check_noted_count):
        assert not asked
        assert len(noted) == 1
        assert "the code of 'Mean' calls all_reduce" in noted[0]
        assert "1 of 2" in noted[0]


def everybody(x: Tensor, way: str, group: Any = None) -> Tensor:
    if way == "function":
        return torch.cat(Gathered.apply(x, group))
    return torch.cat(dist_nn.all_gather(x, **{"group": group} if group else {}))


def towers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)).double()


def told_apart(z: Tensor, others: Tensor, first: int = 0) -> Tensor:
    return F.cross_entropy(z @ others.T, first + torch.arange(len(z)))


def check_loss_outside(grid: Grid, way: str, group_axes: tuple[str, ...]) -> list[str]:
    """A loss outside of the model that gathers the rows of all ranks equals that of a dense model of all rows."""
    mesh = mesh_of(grid)
    parts, at = 2 if "dp" in grid else 1, mesh.coordinate.get("dp", 0)
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense = towers()
    z = dense(x)
    told_apart(z, z).backward()
    same_rows._TOLD.clear()  # of other tests on these ranks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ndtp.parallelize(towers(), mesh, example=x[:4])
        own = model(x.chunk(parts)[at])
        others = everybody(own, way, mesh.group(group_axes) if group_axes else None)
        loss = told_apart(own, others, at * own.shape[0])
    if not any("takes rows of a split model" in str(each.message) for each in caught):
        (loss / parts).backward()
        for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    return [str(each.message) for each in caught if "takes rows" in str(each.message)]


@pytest.mark.parametrize("way", ["differentiable", "function"])
def test_a_loss_outside_of_the_model_gathers_rows(ranks, way):
    """gloo takes the memory of a transposed gradient as it is, and a product with a split tensor may give one."""
    assert ranks(2).run(check_loss_outside, Grid(dp=2), way, ()) == [[], []]


@pytest.mark.parametrize("way", ["differentiable", "function"])
def test_ranks_that_have_the_same_rows_are_told_from_others(ranks, way):
    for (said,) in ranks(2).run(check_loss_outside, Grid(x=2), way, ()):
        assert "all_gather over 2 ranks takes rows of a split model 2 times: ranks that differ along x" in said
        assert "fix: without this collective" in said
    for (said,) in ranks(4).run(check_loss_outside, Grid(dp=2, x=2), way, ()):
        assert "fix: group=mesh.group(('dp',))" in said
    if way == "function":  # torch's own differentiable gather fails in subgroups of gloo
        assert ranks(4).run(check_loss_outside, Grid(dp=2, x=2), way, ("dp",)) == [[]] * 4


def check_pooled_outside(grid: Grid) -> list[str]:
    """Hidden states of a recognised model become plain tensors as soon as code pools them."""
    ids = torch.arange(24).view(4, 6)
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    mesh = mesh_of(grid)
    same_rows._TOLD.clear()  # of other tests on these ranks
    model = ndtp.parallelize(BertModel(config), mesh, scheme="3d").eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hidden = model(input_ids=ids).last_hidden_state.mean(1)
        for mine in (torch.ones(3, 16), torch.ones(4), torch.ones(4, 16, dtype=torch.int64)):  # not the model's rows
            dist.all_gather([torch.zeros_like(mine) for _ in range(grid.num_ranks)], mine)
        dist.all_gather_into_tensor(torch.zeros(2 * grid.num_ranks, 5), torch.ones(2, 5))
        assert not [each for each in caught if "takes rows" in str(each.message)]
        assert type(hidden) is Tensor
        for _ in range(2):
            parts = dist_nn.all_gather(hidden)
        dist.all_gather_into_tensor(torch.zeros(8 * grid.num_ranks, 16), torch.cat([parts[0], parts[0]]).detach())
    return [str(each.message) for each in caught if "takes rows" in str(each.message)]


def test_what_is_pooled_of_a_recognised_model_is_known_by_its_rows(ranks):
    for one, two in ranks(2).run(check_pooled_outside, Grid(x=2)):
        assert "all_gather over 2 ranks takes rows of a split model 2 times: ranks that differ along x" in one
        assert re.search("all_gather_(into_tensor|single) over 2 ranks", two)  # torch 2.13 calls one by the other
    assert ranks(2).run(check_pooled_outside, Grid(dp=2)) == [[], []]
