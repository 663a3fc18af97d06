"""Files that torch writes of a model that is split, and of its optimizer; for tests."""

import io
import pickle

import torch
from small_models import IDS, build
from training_after import trained


def pickled(kind, model):
    return trained(pickle.loads(pickle.dumps(model)))


def saved(kind, model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return trained(torch.load(file, weights_only=False))


def saved_state(kind, model):
    """By torch, and read by torch's default, which executes nothing; into the dense model, and into this one."""
    trained(model)
    file, dense = io.BytesIO(), build(kind)
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    for p in model.parameters():
        p.data.zero_()
    model.load_state_dict(state)
    dense.load_state_dict(state)
    return torch.cat([trained(dense), trained(model)])


def saved_optimizer(kind, model):
    """The states of Adam of a split model, read into an optimizer of this one and of a dense one."""
    optimizer, dense = torch.optim.AdamW(model.parameters(), lr=0.01), build(kind)
    stepped(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file := io.BytesIO())
    found = []
    for each in (model, dense):
        file.seek(0)
        state, again = torch.load(file), torch.optim.AdamW(each.parameters(), lr=0.5)
        each.load_state_dict(state["model"])
        again.load_state_dict(state["optimizer"])
        found.append(stepped(each, again))
    return torch.stack(found)


def stepped(model, optimizer):
    optimizer.zero_grad()
    model(input_ids=IDS, labels=IDS)[0].backward()
    optimizer.step()
    return model(input_ids=IDS, labels=IDS)[0].detach()
