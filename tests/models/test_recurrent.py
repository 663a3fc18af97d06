"""Recurrent layers of torch on a grid, which on a GPU ask where the memory of their weights lies."""

import copy
import pickle
from unittest import mock

import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn = nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.gru, self.head = nn.GRU(16, 8, batch_first=True), nn.Linear(8, 16)

    def forward(self, ids):
        self.rnn.flatten_parameters()  # as is usual before a call
        return self.head(self.gru(self.rnn(self.table(ids))[0])[0])


def as_on_a_gpu():
    """What torch looks at before it moves weights together."""
    return mock.patch.object(torch.Tensor, "is_cuda", True), mock.patch("torch.backends.cudnn.is_acceptable")


def trained(model, ids):
    loss = model(ids).square().mean()
    loss.backward()
    return loss.detach()


def flattened():
    torch.manual_seed(0)
    dense, ids = Tagger(), torch.arange(32).view(4, 8) % 16
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2, y=2)))
    expected = trained(dense, ids)
    on_gpu, acceptable = as_on_a_gpu()
    with on_gpu, acceptable:
        torch.testing.assert_close(trained(model, ids), expected)
    for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    again = copy.deepcopy(model)
    with on_gpu, acceptable:
        torch.testing.assert_close(again(ids), model(ids))
    pickle.loads(pickle.dumps(again.rnn.flatten_parameters))()


def test_weights_stay_where_they_lie(ranks):
    ranks(4).run(flattened)


class WithState(nn.Module):
    """The usual way of a language model that is trained on a running text."""

    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(16, 8), nn.GRU(8, 12), nn.Linear(12, 16)

    def begin(self, rows):
        return next(self.parameters()).new_zeros(1, rows, 12)

    def forward(self, ids, state):
        output, state = self.rnn(self.table(ids), state)
        return self.head(output), state


def states_made_by_a_weight():
    torch.manual_seed(0)
    dense, ids = WithState(), torch.arange(32).view(8, 4) % 16
    model, found = ndtp.parallelize(copy.deepcopy(dense)), []
    for each in (dense, model):
        for _ in range(2):  # the weight of the split model's second state lies on the grid
            scores, state = each(ids, each.begin(4))
            scores, state = each(ids, state.detach())
            scores.square().mean().backward()
        found.append([scores.detach(), state.detach(), *(p.grad for p in each.parameters())])
    expected, mine = found
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a.full_tensor() if hasattr(a, "full_tensor") else a, b)


def test_a_state_may_be_made_by_a_weight(ranks):
    ranks(2).run(states_made_by_a_weight)
