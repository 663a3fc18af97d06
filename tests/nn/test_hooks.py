"""Hooks, pruning and their like on the parts of a block, and activations of a user's own: as on a dense one."""

import copy

import pytest
import torch
from products import mesh_of
from test_doors import message
from test_linear import dense_linear
from test_mlp import HIDDEN, INNER, ROWS, dense_block
from torch import nn as dense_nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize, prune

import ndtp
from ndtp import Grid, LayoutError
from ndtp.testing import assert_equal, small_integers


def scaled(factor):
    def patched(module):
        def forward(x):
            return factor * type(module).forward(module, x)

        module.forward = forward

    return patched


class Doubled(dense_nn.Module):
    def forward(self, weight):
        return 2 * weight


class Wrapped(dense_nn.Module):
    """As adapters wrap a layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 3 * self.base(x)


def wrap(name):
    return lambda block: setattr(block, name, Wrapped(getattr(block, name)))


def on(name, act):
    return lambda block: act(getattr(block, name))


def in_backward(module, grad_input, grad_output):
    return tuple(None if grad is None else 2 * grad for grad in grad_input)


CHANGES = {
    "forward": on("up", lambda m: m.register_forward_hook(lambda m, i, o: 2 * o)),
    "forward with kwargs": on("down", lambda m: m.register_forward_hook(lambda m, i, k, o: 3 * o, with_kwargs=True)),
    "forward pre": on("down", lambda m: m.register_forward_pre_hook(lambda m, i: (2 * i[0],))),
    "full backward": on("up", lambda m: m.register_full_backward_hook(in_backward)),
    "full backward pre": on("down", lambda m: m.register_full_backward_pre_hook(lambda m, g: (2 * g[0],))),
    "dropout": on("dropout", lambda m: m.register_forward_hook(lambda m, i, o: 2 * o)),
    "pruned": on("up", lambda m: prune.custom_from_mask(m, "weight", every_other(m.weight))),
    "parametrized": on("down", lambda m: parametrize.register_parametrization(m, "weight", Doubled())),
    "patched": on("up", scaled(3)),
    "wrapped": wrap("down"),
    "activation": lambda block: setattr(block, "activation", lambda x: x.square()),
}


def every_other(weight):
    mask = torch.ones_like(weight)
    local = mask.to_local() if hasattr(mask, "to_local") else mask
    local[:, ::2] = 0
    return mask


class Dense(dense_nn.Module):
    """Parts called as those of a block are."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.dropout, self.down, self.activation = up, dense_nn.Dropout(0.0), down, F.relu

    def forward(self, x):
        return self.down(self.dropout(self.activation(self.up(x))))


def step(module, x, layouts=None, mesh=None):
    x = x.clone().requires_grad_()
    y = module(x)
    y.sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    return y.detach(), x.grad, {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


def check_changes():
    mesh = mesh_of(Grid(x=2))
    x = small_integers((ROWS, HIDDEN), 5, low=-1, high=1)
    handles = []
    for name, change in {"none": lambda block: None, **CHANGES, "global": on_all_modules(handles)}.items():
        for chunks in (0, 2):
            up, down = dense_block()
            block = ndtp.nn.MLP.from_dense(up, down, "relu", mesh=mesh, scheme="1d", chunks=chunks)
            dense = Dense(up, down)
            change(block), change(dense)
            for result, expected in zip(step(block, x), step(dense, x), strict=True):
                if isinstance(result, dict):
                    assert result.keys() == expected.keys(), f"{name}: {result.keys()}"
                    for key in result:
                        assert_equal(result[key], expected[key], f"{name}, {chunks}: d{key}")
                else:
                    assert_equal(result, expected, f"{name}, {chunks}")
            if name == "none":
                assert_equal(step(copy.deepcopy(block), x)[0], expected_of(dense, x), "a copy")
                assert block._is_one_schedule() and copy.deepcopy(block)._is_one_schedule()
                block.memory(ROWS)
            elif name != "parametrized":  # its weight is computed where it is read
                assert "one by one" in message(lambda block=block: block.memory(ROWS)), name
            for handle in handles:
                handle.remove()
            handles.clear()


def expected_of(dense, x):
    return dense(x).detach()


def on_all_modules(handles):
    """Changes what linear layers give, whosever they are."""

    def double(module, inputs, output):
        return 2 * output if "Linear" in type(module).__name__ else None

    def change(block):
        if not handles:
            handles.append(torch_module.register_module_forward_hook(double))

    return change


def test_what_a_user_hangs_on_the_parts_of_a_block_runs(ranks):
    ranks(2).run(check_changes)


def check_gated_hook():
    mesh = mesh_of(Grid(x=2))
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    block = ndtp.nn.GatedMLP(HIDDEN, INNER, mesh=mesh, scheme="1d", seed=1, chunks=2)
    before = block(x)
    block.down.register_forward_hook(lambda m, i, o: 2 * o)
    assert_equal(block(x), 2 * before, "a hook on the last part")
    with pytest.raises(LayoutError, match="one by one"):
        block.memory(ROWS)


def test_hooks_on_a_gated_block(ranks):
    ranks(2).run(check_gated_hook)


def check_hook_on_some_ranks():
    """Chunks of a fused block come in another order: with check=True that is said, not a hang."""
    mesh = ndtp.ProcessGrid(Grid(x=2), check=True)
    block = ndtp.nn.MLP(HIDDEN, INNER, mesh=mesh, scheme="1d-sp", seed=1, chunks=2)
    if mesh.rank == 0:
        block.up.register_forward_hook(lambda *_: None)
    return message(lambda: block(torch.ones(ROWS // 2, HIDDEN)), ndtp.MismatchError)


def test_hooks_on_some_ranks_only_are_found_by_check(ranks):
    said = ranks(2).run(check_hook_on_some_ranks)
    assert said[0] == said[1]


# ---- what an activation makes of padding ----


def check_rows_of_padding():
    """Rows that are padding are zero, where a square root has no derivative."""
    mesh = mesh_of(Grid(z=1, x=2, y=1))
    up = dense_linear(HIDDEN, INNER, bias=False)
    for root in (torch.sqrt, lambda h: 1 / h):
        block = ndtp.nn.MLP.from_dense(up, dense_linear(INNER, HIDDEN, bias=False), root, mesh=mesh, pad=True)
        x = torch.ones(3, HIDDEN)
        with torch.no_grad():
            up.weight.abs_().add_(1), block.up.load_dense(up)
        y = block(block.in_layout.shard(x, mesh.rank))
        y.sum().backward()
        assert all(p.grad.full_tensor().isfinite().all() for p in block.parameters()), "no gradient of padding"


def test_an_activation_without_a_derivative_at_zero(ranks):
    ranks(2).run(check_rows_of_padding)
