"""One rank does something else: every rank names it, with both sides, before a number is wrong or anybody waits."""

import io
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ndtp
from ndtp import CommunicationError, Grid, MismatchError, ProcessGrid
from ndtp.models.same_gradients import GradientChanges
from ndtp.models.same_optimizers import OptimizerGroups
from ndtp.models.same_steps import Steps
from ndtp.runtime.writes import writes


class Tiny(nn.Module):
    def __init__(self, average=0.0):
        super().__init__()
        self.average = average
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, ids, labels):
        h = self.table(ids)
        h = h + self.down(self.act(self.up(h)))
        return F.cross_entropy(self.head(h).flatten(0, -2), labels.flatten())


def hooked_later(check):
    """The number of the call at which all name a hook that one rank put on after the first call."""
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    torch.manual_seed(0)
    model = ndtp.parallelize(Tiny(), mesh, {"up": "up", "down": "down"}, scheme="1d", check=check)
    ids = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(18):
        try:
            model(ids, ids)
        except MismatchError as error:
            found = re.search("call (\\d+) of Tiny:\n  hooks of 'act': rank 1 has some", str(error))
            return found and int(found[1])
        if mesh.rank == 1 and not model.act._forward_hooks:
            model.act.register_forward_hook(lambda *_: None)
    return None


class Asked(nn.Module):
    """Code asks for the gradient of what a layer of an MLP gives, on all ranks or on some of them."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head, self.asks = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 8), True

    def forward(self, x):
        x = self.down(F.gelu(self.up(x)))
        if self.asks:
            x.register_hook(lambda grad: grad * 2)
        return self.head(x)


def asked_inside():
    mesh = ProcessGrid(Grid(dp=2), timeout=60)
    torch.manual_seed(0)
    model = ndtp.parallelize(Asked(), mesh, scheme="1d")
    for asks in (True, mesh.rank == 1):
        model.asks = asks
        try:
            model(torch.ones(2, 8)).sum().backward()
        except MismatchError as error:
            return "rank 1 is at the register_hook on what 'down' gives" in str(error)
    return None


def test_a_hook_inside_of_what_other_ranks_run_as_one_program_is_named(ranks):
    assert ranks(2).run(asked_inside) == [True, True]


def test_hooks_are_looked_at_in_every_call_if_asked_for(ranks):
    """What else one rank does otherwise, and is named, is in `ndtp.cli.disagreements`: see tests/cli/test_chaos.py."""
    assert ranks(2).run(hooked_later, True) == [2, 2]
    assert ranks(2).run(hooked_later, None) == [17, 17]


class Scores(Tiny):
    def forward(self, ids):
        h = self.table(ids)
        return self.head(h + self.down(self.act(self.up(h))))


def reads_alone():
    """Rank 0 alone prints a number of a split tensor; rank 1 says so, and reads it then, for which rank 0 waits."""
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    torch.manual_seed(0)
    model = ndtp.parallelize(Scores(), mesh, example=(torch.zeros(2, 8, dtype=torch.long),), scheme="1d")
    scores = model(torch.zeros(2, 8, dtype=torch.long))
    if mesh.rank == 0:
        return float(scores.mean())
    try:
        model(torch.zeros(2, 8, dtype=torch.long))
    except MismatchError as error:
        scores.mean()
        return str(error)


def test_a_tensor_that_one_rank_alone_reads_is_named(ranks):
    """Rank 0 waits in a collective, which rank 1 learns of where it waits for rank 0."""
    _, said = ranks(2).run(reads_alone)
    assert re.search("rank 0 is in all_\\w+ of .*head.* over axis x, which rank 1 has not begun", said), said
    assert "rank 1 is at the call 2 of Scores" in said and "call it on every rank" in said


def sum_of(x):
    return float(x.detach().sum())


def whole_of(x):
    return x.detach().full_tensor().cpu().numpy()


def numbers_of(x):
    return x.tolist()


def saved(x):
    torch.save({"model": x.detach()}, io.BytesIO())


def reads_a_parameter_alone(read):
    """As above, of a parameter, before the first call."""
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    torch.manual_seed(0)
    model = ndtp.parallelize(Tiny(), mesh, {"up": "up", "down": "down"}, scheme="1d")
    weight = model.up.weight
    if mesh.rank:
        try:
            model(torch.zeros(2, 8, dtype=torch.long))
        except MismatchError as error:
            read(weight)
            return str(error)
    return read(weight)


@pytest.mark.parametrize("read", [sum_of, whole_of, numbers_of, saved], ids=["a sum", "the whole", "numbers", "a file"])
def test_a_parameter_that_one_rank_alone_reads_is_named(ranks, read):
    _, said = ranks(2).run(reads_a_parameter_alone, read)
    assert re.search(r"rank 0 is in \w+ of up.weight \(read\) over axis x, which rank 1 has not begun", said), said
    assert "rank 1 is at the call 1 of Tiny" in said


def trains_in_silence():
    """Ranks of other `dp` have other rows; what has no effect may differ; with `check=False` all may."""
    for axes, scheme in (({"dp": 2}, "3d"), ({"x": 2}, "1d")):
        mesh = ProcessGrid(Grid(axes), timeout=60)
        torch.manual_seed(0)
        model = ndtp.parallelize(Tiny(), mesh, {"up": "up", "down": "down"}, scheme=scheme)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            mine = mesh.rank if "dp" in axes else 0
            ids = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(step + 10 * mine))
            torch.rand(mesh.rank)  # there is no dropout
            loss = model(ids, ids)
            loss.backward()
            model.average += float(loss.detach())  # of this rank's rows
            optimizer.step()
            optimizer.zero_grad()
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    torch.manual_seed(0)
    model = ndtp.parallelize(Tiny(), mesh, {"up": "up", "down": "down"}, scheme="1d", check=False)
    model(torch.full((2, 8), mesh.rank), torch.full((2, 8), 0)).backward()


def trains_beside_another():
    """On one rank the model of an earlier run is still there, and looks for writes."""
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    for rank in (0, 1):
        torch.manual_seed(0)
        model = ndtp.parallelize(Tiny(), mesh, scheme="1d")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        watcher = type("Watcher", (), {})()
        if mesh.rank == rank:
            writes.watch(watcher)
        ids = torch.arange(8)[None]
        for _ in range(3):
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_what_may_differ_is_no_disagreement(ranks):
    ranks(2).run(trains_in_silence)
    ranks(2).run(trains_beside_another)


def reads_in_a_hook():
    """Rank 0 alone looks at gradients in hooks, as loggers of gradients do: backward runs apart, and nobody waits in
    another one's collective.
    """
    mesh = ProcessGrid(Grid(x=2), timeout=3)
    torch.manual_seed(0)
    model, ids = ndtp.parallelize(Tiny(), mesh, scheme="1d"), torch.zeros(2, 8, dtype=torch.long)
    if mesh.rank == 0:
        for p in model.parameters():
            p.register_hook(lambda grad: float(grad.abs().max()))
    try:
        model(ids, ids).backward()
    except CommunicationError as error:
        return error.how, error.ranks, str(error)


def test_ranks_that_are_apart_in_a_backward_name_each_other(ranks):
    for rank, (how, blamed, said) in enumerate(ranks(2).run(reads_in_a_hook)):
        assert (how, blamed) == ("apart", (1 - rank,)) and "all ranks must do the same in one order" in said
        assert "max of a parameter (read) over axis x" in said


class OfParts(nn.Module):
    """Adds up parts in the order in which they are given."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"left": nn.Linear(8, 8), "right": nn.Linear(8, 8)})

    def forward(self, scale=1.0, **inputs):
        return sum(self.parts[name](x) for name, x in inputs.items()) * scale


def called_in_orders(kind, given, example=None):
    """What a rank says of arguments that one rank gives in another order."""
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    torch.manual_seed(0)
    model, x = ndtp.parallelize(kind(), mesh, scheme="1d", example=example or given), given
    try:
        model(**(dict(reversed(x.items())) if mesh.rank else x)).sum().backward()
    except MismatchError as error:
        return str(error)


class OfMany(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, **inputs):
        return sum(map(self.layer, inputs.values()))


def called_exchanged(given):
    """What a rank says where one rank exchanges the values of the first and the last argument."""
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    model = ndtp.parallelize(OfMany(), mesh, scheme="1d", example=given)
    own = {**given, "part0": given["part65"], "part65": given["part0"]} if mesh.rank else given
    try:
        model(**own)
    except MismatchError as error:
        return str(error)


def called_without(kind, given):
    """What a rank says where one rank leaves out the last argument."""
    keys = list(given)[: 1 if dist.get_rank() else 2]
    return called_in_orders(kind, {key: given[key] for key in keys}, given)


def test_arguments_by_name_may_come_in_any_order_where_forward_names_them(ranks):
    ids, x = torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8)
    assert ranks(2).run(called_in_orders, Tiny, {"ids": ids, "labels": ids}) == [None, None]
    assert ranks(2).run(called_in_orders, OfParts, {"scale": 2.0, "left": x}) == [None, None]
    for said in ranks(2).run(called_in_orders, OfParts, {"left": x, "right": x + 1}):
        assert "all of the inputs in order: rank 1 has ['right', 'left'], rank 0 has ['left', 'right']" in said
        assert "the same keys in the same order on every rank" in said
    for said in ranks(2).run(called_without, OfParts, {"left": x, "right": x + 1}):
        assert "input right: rank 1 has nothing" in said and "the same rows on all ranks" in said
        assert "in order" not in said
    for said in ranks(2).run(called_exchanged, {f"part{i}": torch.full((2,), float(i)) for i in range(66)}):
        assert "input part0: rank 1 has norm 91.9239" in said and "all of the inputs" not in said


def bytes_of_a_step():
    counted = []
    for check in (True, None, False):
        mesh = ProcessGrid(Grid(x=2), timeout=60)
        torch.manual_seed(0)
        model = ndtp.parallelize(Tiny(), mesh, {"up": "up", "down": "down"}, scheme="1d", check=check)
        with ndtp.CommMeter() as meter:
            model(torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)).backward()
        counted.append(meter.volume.total)
    return counted


def test_comparing_is_no_traffic(ranks):
    thoroughly, by_default, alone = ranks(2).run(bytes_of_a_step)[0]
    assert thoroughly == by_default == alone > 0


class Outside(nn.Module):
    """Gives logits, of which the program outside makes a loss."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down, self.head = (
            nn.Embedding(16, 8),
            nn.Linear(8, 32),
            nn.Linear(32, 8),
            nn.Linear(8, 16),
        )

    def forward(self, ids):
        h = self.table(ids)
        return self.head(h + self.down(F.gelu(self.up(h))))


LOSSES = {
    "of split logits": lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten()),
    "a mean": lambda logits, ids: logits.square().mean(),
    "of whole logits": lambda logits, ids: logits.gathered().logsumexp(-1).mean(),
}


def losses_outside():
    """A loss scale that one rank has otherwise, of losses that no model computes."""
    mesh, found = ProcessGrid(Grid(x=2), timeout=60), {}
    ids = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    for name, loss_of in LOSSES.items():
        torch.manual_seed(0)
        model = ndtp.parallelize(Outside(), mesh, scheme="1d-sp", example=ids)
        try:
            for step in range(2):
                (loss_of(model(ids), ids) * (8 if step and mesh.rank else 1)).backward()
        except MismatchError as error:
            found[name] = str(error)
        mesh.discard_gradients()
    return found


@pytest.mark.cpu
def test_losses_of_code_outside_of_a_model(ranks):
    for found in ranks(2).run(losses_outside):
        assert all(re.search("backward of call 2 .*\n.*factor of the loss", found.get(name, "")) for name in LOSSES), (
            found
        )


def test_a_gradient_that_has_gone_is_not_taken_for_one_that_stayed():
    """Another one may lie where it lay, on one rank and not on others: as the same one does that is put back here."""
    model = nn.Linear(2, 2)
    mesh = SimpleNamespace(device_type="cpu")
    steps = Steps(SimpleNamespace(model=model, mesh=mesh, thorough=True, every=100))
    steps.state_of(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    steps.after_step(lambda: ("SGD", OptimizerGroups(), None))
    assert steps.state_of(model).stale == (0, 1)
    kept = [p.grad for p in model.parameters()]
    model.zero_grad()
    steps.state_of(model)
    for p, grad in zip(model.parameters(), kept, strict=True):
        p.grad = grad
    assert steps.state_of(model).stale == ()


CHANGES = {  # of gradients that have an outlier among equal numbers, and the number by which all of them are multiplied
    "nothing": (2.0, lambda grad: grad, 1.0),
    "scaled": (2.0, lambda grad: grad.mul_(0.5), 0.5),
    "clipped by value": (0.1, lambda grad: grad.clamp_(max=4.5), math.nan),
    "each row by its own norm": (2.0, lambda grad: grad.div_(grad.norm(dim=-1, keepdim=True)), math.nan),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_factor_of_gradients_is_that_of_all(change):
    """What clips by value, or row by row, does other things to the parts of a gradient that ranks have."""
    changes, (usual, do, factor) = GradientChanges(), CHANGES[change]
    weights = [nn.Parameter(torch.zeros(1, 8)) for _ in range(3)]
    for i, weight in enumerate(weights):
        weight.grad = torch.full((1, 8), usual + i / 8)
        weight.grad[0, 3] = 9.0
    changes.after_backward(weights)
    for weight in weights:
        do(weight.grad)
    changes.before_step(weights)
    assert changes.taken()[0] == pytest.approx(factor, nan_ok=True)
