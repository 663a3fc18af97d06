"""Norms of split activations: running statistics, sizes that dense refuses, torch's epsilon."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

import ndtp
from ndtp import LayoutError
from ndtp.split import Context, cut, enter, spec_of, whole


def check_running_statistics() -> bool:
    """Those of all samples, channels and places, wherever a norm's input is split."""
    context = Context(ndtp.ProcessGrid(ndtp.Grid(x=2)))
    for norm in (F.batch_norm, F.instance_norm):
        for dim in range(3):
            x = torch.randn(4, 6, 8, dtype=torch.double, generator=torch.Generator().manual_seed(dim)) + 1
            spec = spec_of(context, (4, 6, 8), [("x",) if dim == d else () for d in range(3)])
            dense, split = ([torch.zeros(6).double(), torch.ones(6).double()] for _ in range(2))
            for _ in range(2):
                expected = norm(x, *dense, None, None, True, 0.3)
                made = norm(enter(cut(x, spec), spec), *split, None, None, True, 0.3)
                torch.testing.assert_close([whole(made), *split], [expected, *dense])
    spec = spec_of(context, (4, 6, 1), [("x",), (), ()])
    running = [torch.zeros(6), torch.ones(6)]
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        F.instance_norm(enter(cut(torch.ones(4, 6, 1), spec), spec), *running)
    assert torch.equal(torch.stack(running), torch.stack([torch.zeros(6), torch.ones(6)])), "as they were"
    return True


def test_running_statistics(ranks):
    assert all(ranks(2).run(check_running_statistics))


def check_sizes_and_epsilon() -> bool:
    context = Context(ndtp.ProcessGrid(ndtp.Grid(x=2)))
    for dims in ([("x",), ()], [(), ("x",)]):
        spec = spec_of(context, (8, 6), dims)
        x = enter(cut(torch.randn(8, 6), spec), spec)
        for shape, norm in product(((), (3,), (12,)), (F.layer_norm, F.rms_norm)):
            with pytest.raises(LayoutError, match=r"fix: normalized_shape=\(6,\)"):
                norm(x, shape)
        assert not F.rms_norm(torch.zeros(2, 6), (6,), x[0]).any(), "torch's epsilon"
    return True


def test_sizes_and_epsilon(ranks):
    assert all(ranks(2).run(check_sizes_and_epsilon))
