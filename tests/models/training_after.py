"""What optimizers and averages of weights make of a model, which `test_after_parallelize` compares with dense."""

import copy

import torch
from small_models import called
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def trained(model):
    """The loss, and what a step makes of it."""
    loss = called(model)[0]
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return torch.stack([loss.detach(), called(model)[0].detach()])


def averaged(kind, model):
    average = copy.deepcopy(model)
    kept = {name: p.detach().clone() for name, p in model.state_dict().items()}
    trained(model)
    with torch.no_grad():
        for name, mine, theirs in zip(kept, average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
            kept[name].mul_(0.5).add_(theirs, alpha=0.5)
    losses = called(average)[0].detach()
    model.load_state_dict(kept)
    return torch.stack([losses, called(model)[0].detach()])


def averaged_by_torch(kind, model):
    """By its form for lists, which have a buffer that every rank has."""
    model.register_buffer("count", torch.ones(3))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(model)
    trained(model)
    average.update_parameters(model)
    return torch.stack([called(average.module)[0].detach(), called(model)[0].detach()])


def by_rows_and_signs(kind, model):
    losses = []
    for kind_of in (torch.optim.Adafactor, torch.optim.Rprop):
        optimizer = kind_of(model.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(called(model)[0])
            losses[-1].backward()
            optimizer.step()
    return torch.stack([*losses, called(model)[0]])
