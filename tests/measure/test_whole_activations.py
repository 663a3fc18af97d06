"""The AxoNN-like layers that benches measure against: dense results and gradients, and the bytes of such a scheme."""

from __future__ import annotations

import torch
from torch import nn

import ndtp
from ndtp.measure.whole_activations import WholeBlocks3D
from ndtp.testing import assert_equal, small_integers

TOKENS, HIDDEN, INNER = 16, 8, 24


def dense_blocks():
    blocks = [(nn.Linear(HIDDEN, INNER), nn.ReLU(), nn.Linear(INNER, HIDDEN)) for _ in range(2)]
    with torch.no_grad():
        for i, p in enumerate(p for up, _, down in blocks for p in (*up.parameters(), *down.parameters())):
            p.copy_(small_integers(p.shape, i, low=-1, high=1))
    return blocks


def compare():
    mesh, dense = ndtp.ProcessGrid(ndtp.Grid(z=2, x=2, y=2)), dense_blocks()
    model, at = WholeBlocks3D(dense, mesh), mesh.coordinate
    whole = small_integers((TOKENS, HIDDEN), 9, low=-1, high=1).requires_grad_()
    expected = whole
    for up, act, down in dense:
        expected = expected + down(act(up(expected)))
    expected.sum().backward()
    for _ in range(2):  # gradients of two passes add up
        x = model.shard(whole.detach()).requires_grad_()
        with ndtp.CommMeter() as meter:
            y = model(x)
            y.sum().backward()
            model.finish()
        assert_equal(y, model.shard(expected.detach()), "y")
        assert_equal(x.grad, model.shard(whole.grad), "dx")
    for block, (up, _, down) in zip(model.blocks, dense, strict=True):
        for layer, of, k, n in ((block.up, up, "x", "y"), (block.down, down, "y", "x")):
            rows = of.weight.grad.chunk(2, 0)[at[n]].chunk(2, 1)[at[k]].chunk(2, 0)[at["z"]]
            assert_equal(layer.weight.grad, 2 * rows, "dW")
            assert_equal(layer.bias.grad, 2 * of.bias.grad.chunk(2)[at[n]], "db")
    activations, weights = TOKENS * (HIDDEN + INNER) // 4, 2 * HIDDEN * INNER // 8
    # A block: each activation all-reduced once each way, weights gathered, gradients scattered, those of biases summed.
    elements = 2 * (2 * activations + 2 * weights + (HIDDEN + INNER) // 2)
    return meter.volume.total, 4 * elements


def test_they_are_dense_and_send_what_they_say(ranks):
    for metered, said in ranks(8).run(compare):
        assert metered == said
