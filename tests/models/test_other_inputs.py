"""Inputs that are no block of memory: a sparse matrix of a graph, sparse features; nested ones, and odd gradients."""

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid, LayoutError, MismatchError

pytestmark = pytest.mark.real

WAYS = {
    "torch.sparse.mm": torch.sparse.mm,
    "@": lambda graph, x: graph @ x,
    "torch.sparse.addmm": lambda graph, x: torch.sparse.addmm(x, graph, x),
}


class Graph(nn.Module):
    """Two layers of a graph convolution (Kipf and Welling 2017)."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.second = WAYS[way], nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, graph, x):
        return self.second(torch.relu(self.way(graph, self.first(x)))).log_softmax(-1)


def graph_of(layout):
    dense = (torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) > 0.4).double()
    return dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()


def check_graphs():
    mesh, x = mesh_of(Grid(x=2)), torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    for way, layout in ((way, layout) for way in WAYS for layout in ("coo", "csr")):
        torch.manual_seed(0)
        dense = Graph(way).double()
        model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d-sp")
        for _ in range(2):
            mine, theirs = model(graph_of(layout), x), dense(graph_of(layout), x)
            torch.testing.assert_close(mine.gathered(), theirs, msg=f"{way} {layout}")
            mine.square().sum().backward()
            theirs.square().sum().backward()
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"{way} {layout}")
    model(graph_of("coo"), x)
    other = graph_of("coo").coalesce()
    if mesh.rank:
        other.values()[0] += 1
    with pytest.raises(MismatchError, match="input graph values"):
        for _ in range(2):  # what lies on a device is compared in the next call
            model(other, x)


def check_features():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    x = torch.eye(5, 6, dtype=torch.float64)
    for scheme in ("1d", "1d-sp"):
        model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme=scheme)
        given = model(x.to_sparse())
        torch.testing.assert_close(given.gathered() if hasattr(given, "gathered") else given, dense(x))


def check_refusals():
    torch.manual_seed(0)
    model = ndtp.parallelize(Graph("@").double(), mesh_of(Grid(x=2)), scheme="1d-sp")
    graph, x = graph_of("coo"), torch.ones(5, 6, dtype=torch.float64, requires_grad=True)
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(LayoutError, match="'first': its input is a nested tensor"):
            model(graph, torch.nested.nested_tensor([x[:2].detach(), x[:3].detach()], layout=layout))
    out = model(graph, x)
    with pytest.raises(LayoutError, match="is_grads_batched=True"):
        torch.autograd.grad(out.gathered(), x, torch.ones(3, 5, 4, dtype=x.dtype), is_grads_batched=True)
    with pytest.raises(LayoutError, match="is_grads_batched=True"):
        torch.autograd.grad(model(graph, x), x, torch.ones(3, 5, 4, dtype=x.dtype), is_grads_batched=True)
    with forward_ad.dual_level(), pytest.raises(LayoutError, match="no forward-mode derivatives"):
        model(graph, forward_ad.make_dual(x, torch.ones_like(x)))


def test_a_graph_is_sparse(ranks):
    ranks(2).run(check_graphs)


def test_features_are_sparse(ranks):
    ranks(2).run(check_features)


def test_what_is_refused_by_name(ranks):
    ranks(2).run(check_refusals)
