"""Tests whose tensors lie on another device, as far as CPUs show it: `meta` and CUDA's name stand in for a GPU."""

import sys
from unittest import mock

import pytest
import torch

from ndtp.collectives.backends import device_type_of
from ndtp.testing import small_integers, zygote
from ndtp.testing.device import TEST_DEVICE, _DrawnWhereTheGeneratorIs, use_test_device


def test_numbers_of_a_generator_are_drawn_where_it_is():
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        with _DrawnWhereTheGeneratorIs():
            x = torch.randn(3, generator=generator, requires_grad=True)
            assert x.is_meta and x.is_leaf and x.requires_grad and torch.randperm(5, generator=generator).is_meta
            assert torch.randn(2, generator=generator, device="cpu").device.type == "cpu", "as it was asked for"
        assert small_integers((2,), 0).is_meta and small_integers((2,), 0, device="cpu").device.type == "cpu"


def test_a_grid_takes_the_default_device_where_a_backend_serves_it():
    assert device_type_of({"cpu": "gloo", "cuda": "gloo"}) == "cpu"
    with torch.device("cuda:0"):
        assert device_type_of({"cpu": "gloo", "cuda": "gloo"}) == "cuda" and device_type_of({"cpu": "gloo"}) == "cpu"
        assert device_type_of({}) == "cuda", "a grid of one rank"
    with torch.device("meta"):
        assert device_type_of({}) == "cpu"


def own_device():
    modes = torch.overrides._get_current_function_mode_stack()
    return torch.get_default_device().type, [type(mode).__name__ for mode in modes]


def test_ranks_take_the_device_of_the_environment():
    from ndtp.testing import RankPool

    assert use_test_device() == "gloo"
    with mock.patch.dict("os.environ", {TEST_DEVICE: "cpu"}), RankPool(2) as pool:
        assert pool.run(own_device) == [("cpu", ["DeviceContext", "_DrawnWhereTheGeneratorIs"])] * 2


def test_the_process_that_forks_ranks_starts_no_cuda():
    starts = torch.cuda._lazy_init
    with zygote._without_gpus(), pytest.raises(RuntimeError, match="must not start CUDA"):
        torch.cuda.init()
    assert torch.cuda._lazy_init is starts


def test_nor_does_it_import_what_starts_it():
    parent = zygote.Zygote()
    parent._imported_since()
    with mock.patch.dict(sys.modules, {"torch.testing._internal.made_up": torch, "torch.made_up": torch}):
        assert parent._imported_since() == ["torch.made_up"]
