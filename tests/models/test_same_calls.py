"""One rank does something else: every rank names it, with both sides, before a number is wrong or anybody waits."""

import contextlib
import re
import threading

import torch
import torch.nn.functional as F
from torch import nn

import ndtp
from ndtp import Grid, MismatchError, ProcessGrid


class Tiny(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)
        self.drop, self.head = nn.Dropout(p), nn.Linear(8, 16)

    def forward(self, ids, labels=None, mask=None, flag=False):
        h = self.table(ids)
        h = self.drop(h + self.down(self.act(self.up(h))))
        h = h if mask is None else h * mask[..., None]
        return F.cross_entropy(self.head(h).flatten(0, -2), labels.flatten()) + 0 * flag


# What one rank does otherwise, and what the error says of it.
KINDS = {
    "ids": "input ids: values: rank 1 has hash",
    "labels": "input labels: values",
    "mask": "input mask: rank 1 has norm",
    "shape": r"input ids: rank 1 has \(2, 4\) int64",
    "flag": "input flag: rank 1 has True",
    "eval": "training: rank 1 has False",
    "part in eval": "training of 'drop'",
    "no grad": "grad mode: rank 1 has False",
    "autocast": "autocast: rank 1 has cpu torch.bfloat16",
    "frozen": "requires_grad of 'head.weight': rank 1 has False",
    "frozen later": "requires_grad of 'head.weight': rank 1 has False",
    "hook": "hooks of 'act': rank 1 has some",
    "lr": "optimizer of step 1: lr: rank 1 has 0.2",
    "optimizer": "optimizer of step 1: rank 1 has Adam",
    "momentum": "optimizer of step 1: momentum",
    "fewer weights": "optimizer of step 1: weights",
    "loss scale": "factor of the loss",
    "clip": "factor of gradients",
    "zero_grad": "gradient of 'table.weight' when it was called: rank 1 has one that was there before",
    "zero_grad to zeros": "gradient of 'table.weight' when it was called: rank 1 has one that was there before",
    "no step": "optimizer steps so far: rank 1 has 1",
    "no backward": "rank 1 is at the call 3 of Tiny, rank 0 is at the backward of call 2",
    "no call": "input ids: values",
    "own evaluation": "rank 1 is at the call 3 of Tiny, rank 0 is at the backward of call 2",
    "weight": "weight 'head.weight': rank 1 has hash",
    "shard": "weight 'up.weight' since the last step: rank 1 has changed",
    "written": "weight 'up.weight' since the last step: rank 1 has written to",
    "seed": "random numbers of torch before the last call",
    "accumulate": "accumulating gradients: rank 1 has True",
}


THOROUGH = {"hook": True}  # what is looked at in every call with check=True, and by default in every sixteenth


def one_rank_deviates(kinds, rank=1):
    """What a run of each kind raises on this rank."""
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    return {kind: raised(kind, mesh, mesh.rank == rank) for kind in kinds}


def raised(kind, mesh, is_odd):
    try:
        train(mesh, lambda *kinds: is_odd and kind in kinds, kind, THOROUGH.get(kind))
    except MismatchError as error:
        return str(error)
    finally:
        mesh.discard_gradients()
        torch.manual_seed(0)
    return "nothing was raised"


def train(mesh, odd, kind, check):
    torch.manual_seed(0)
    model = Tiny(0.5 if kind == "seed" else 0.0)
    ndtp.parallelize(model, mesh, {"up": "up", "down": "down"}, scheme="1d", check=check)
    parameters = list(model.parameters())[odd("fewer weights") :]
    kinds = torch.optim.Adam if odd("optimizer") else torch.optim.SGD
    more = {"momentum": 0.9} if odd("momentum") else {}
    optimizer = kinds(parameters, lr=0.2 if odd("lr") else 0.1, **more)
    if odd("frozen"):
        model.head.weight.requires_grad_(False)
    if odd("hook"):
        model.act.register_forward_hook(lambda *_: None)
    if odd("seed"):
        torch.manual_seed(1)
    for step in range(3):
        now = step == 1
        ids = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(step + 10 * (now and odd("ids"))))
        labels, mask = (ids + (now and odd("labels"))) % 16, torch.ones(2, 8)
        mask[0, :3] = 0.5 * (now and odd("mask"))
        if now and odd("shape"):
            ids, labels, mask = ids[:, :4], labels[:, :4], mask[:, :4]
        if now and odd("no call"):
            continue
        model.train(not (now and odd("eval")))
        model.drop.train(not (now and odd("eval", "part in eval")))
        if now and odd("frozen later"):
            model.head.weight.requires_grad_(False)
        with contextlib.ExitStack() as stack:
            if now and odd("no grad"):
                stack.enter_context(torch.no_grad())
            if now and odd("autocast"):
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if now and odd("accumulate"):
                stack.enter_context(mesh.accumulate())
            loss = model(ids, labels, mask=mask, flag=bool(now and odd("flag")))
        if now and odd("no backward"):
            continue
        if now and odd("own evaluation"):
            model(ids, labels, mask=mask)
        (loss * (8 if now and odd("loss scale") else 1)).backward()
        if kind == "clip":
            torch._foreach_mul_([p.grad for p in parameters], 0.5 if now and odd("clip") else 0.1)
        if not (now and odd("no step")):
            optimizer.step()
        if not (now and odd("zero_grad", "zero_grad to zeros")):
            optimizer.zero_grad(set_to_none=kind != "zero_grad to zeros")
        if step == 0 and odd("weight"):
            model.head.weight.data.mul_(1.5)
        if step == 0 and odd("shard"):
            model.up.weight.to_local().data.mul_(1.5)
        if now and odd("written"):
            with torch.no_grad():
                model.up.weight.mul_(1.5)


def test_what_one_rank_does_otherwise_is_named_on_all(ranks):
    found = ranks(2).run(one_rank_deviates, list(KINDS))
    assert found[0] == found[1]
    wrong = [f"{kind}: {found[0][kind]}" for kind, expected in KINDS.items() if not _found(found[0][kind], expected)]
    assert not wrong, "\n".join(wrong)


def _found(text, pattern):
    return re.search(pattern, text) is not None


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
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    torch.manual_seed(0)
    model = ndtp.parallelize(Tiny(), mesh, {"up": "up", "down": "down"}, scheme="1d", check=False)
    model(torch.full((2, 8), mesh.rank), torch.full((2, 8), 0)).backward()


def test_what_may_differ_is_no_disagreement(ranks):
    ranks(2).run(trains_in_silence)


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


def in_two_threads():
    """The second thread comes while the first one is in its call."""
    mesh = ProcessGrid(Grid(x=2), timeout=60)
    torch.manual_seed(0)
    models = [ndtp.parallelize(Tiny(), mesh, {"up": "up", "down": "down"}, scheme="1d") for _ in range(2)]
    ids, said = torch.zeros(2, 8, dtype=torch.long), []

    def second():
        try:
            models[1](ids, ids)
        except MismatchError as error:
            said.append(str(error))

    def inside(*_):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    models[0].act.register_forward_hook(inside)
    models[0](ids, ids).backward()
    return said


def test_two_threads_on_one_group_are_refused(ranks):
    for said in ranks(2).run(in_two_threads):
        assert len(said) == 1 and _found(said[0], "two threads .* call 1 of Tiny")


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


def test_losses_of_code_outside_of_a_model(ranks):
    for found in ranks(2).run(losses_outside):
        assert all(_found(found.get(name, ""), "backward of call 2 .*\n.*factor of the loss") for name in LOSSES), found
