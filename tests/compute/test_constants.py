"""Constants are copied to a device once: what a CUDA graph would not hold, and the host would wait for."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ndtp.compute import constants
from ndtp.compute.constants import constant_on, indices_on, inverse_on, numbers_on, zeros_on

pytestmark = pytest.mark.cpu

THERE = torch.device("meta")


def test_one_copy_of_each():
    order = torch.tensor([2, 0, 1])
    assert constant_on(order, order.device) is order
    assert constant_on(order, THERE) is constant_on(order, THERE) and constant_on(order, THERE).device == THERE
    assert inverse_on(order, order.device).tolist() == [1, 2, 0]
    assert inverse_on(order, THERE) is inverse_on(order, THERE)
    assert numbers_on([3, 1], THERE) is numbers_on((3, 1), THERE)
    assert numbers_on([3, 1], order.device, torch.float32).tolist() == [3.0, 1.0]
    assert zeros_on([2, 3], order.device, torch.float64) is zeros_on((2, 3), order.device, torch.float64)
    assert zeros_on([2, 3], order.device, torch.float64).tolist() == [[0.0] * 3] * 2
    for x in (torch.arange(6).view(2, 3), torch.tensor([True, False]), torch.empty(0, dtype=torch.int64)):
        there = indices_on(x.clone(), THERE)
        assert there is indices_on(x.clone(), THERE), "computed anew, and the same"
        assert there.shape == x.shape and there.dtype == x.dtype
    assert indices_on(torch.arange(2), THERE) is not indices_on(torch.arange(2) + 1, THERE)


@pytest.mark.parametrize("kind", ["inference", "fake"])
def test_whatever_mode_asks_first(kind):
    """What an evaluation has made serves training."""
    order = torch.tensor([2, 1, 0]) if kind == "fake" else torch.tensor([1, 2, 0])
    with torch.inference_mode() if kind == "inference" else FakeTensorMode(allow_non_fake_inputs=True):
        inverse_on(order, order.device)
        numbers_on(range(len(kind)), order.device)
        zeros_on((len(kind),), order.device, torch.float32)
    assert type(zeros_on((len(kind),), order.device, torch.float32)) is torch.Tensor
    assert not zeros_on((len(kind),), order.device, torch.float32).is_inference()
    for index in (inverse_on(order, order.device), numbers_on(range(len(kind)), order.device) % 3):
        x = torch.ones(3, requires_grad=True)
        (x.index_select(0, index) * x[index]).sum().backward()
        assert type(x.grad) is torch.Tensor


def test_what_goes_takes_its_copy_along():
    order = torch.tensor([1, 0])
    constant_on(order, THERE)
    inverse_on(order, THERE)
    before = len(constants._COPIES), len(constants._INVERSES)
    del order
    gc.collect()
    assert (len(constants._COPIES), len(constants._INVERSES)) == (before[0] - 2, before[1] - 1)
