"""Products of experts: torch's grouped product and the kernels' interface, which GPUs take, against the loop."""

from unittest import mock

import pytest
import torch

import ndtp
from ndtp import Grid
from ndtp.compute import grouped
from ndtp.compute.gemm import KernelGemm, TorchGemm
from ndtp.compute.grouped import DeviceGroups, Groups, grouped_product, tally

F32 = torch.float32


@pytest.mark.filterwarnings("ignore::ndtp_kernels.errors.KernelFallback")
def test_the_fused_product_and_the_kernels_are_the_loop():
    """`backend="triton"` goes through `ndtp_kernels`, which has torch here; in the interpreter: tests/kernels."""
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 0, 5, 2]
    x, w, grad = (torch.randn(size, generator=generator).bfloat16() for size in ((10, 16), (4, 24, 16), (10, 24)))
    results = []
    for fused, gemm in ((False, None), (True, None), (False, KernelGemm(backend="triton")), (False, KernelGemm())):
        rows, weights = x.clone().requires_grad_(), w.clone().requires_grad_()
        with mock.patch.object(grouped, "_fused", lambda *_, fused=fused: fused):
            y = grouped_product(rows, weights, sizes, gemm)
            y.backward(grad)
        results.append((y.detach(), rows.grad, weights.grad))
    for one, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(one, other)
    assert not any(found[2][1].any() for found in results)  # an expert without rows
    assert tally(torch.tensor([2, 0, 2]), 4).tolist() == [1, 0, 2, 0]
    with torch.device("meta"):  # a default device is none of these numbers'
        assert Groups((3, 0, 5), x.device).offsets.tolist() == [0, 3, 3, 8]


@pytest.mark.parametrize("dtype, wide", [(torch.float32, 16), (torch.float64, 16), (torch.float32, 6)], ids=str)
@pytest.mark.filterwarnings("ignore::ndtp_kernels.errors.KernelFallback")
def test_products_whose_sizes_only_the_device_knows(dtype, wide):
    """In one call, and where torch has none; behind the experts' rows lie rows of none, which stay zeros."""
    generator = torch.Generator().manual_seed(0)
    sizes, rows = [3, 0, 5, 2], 14
    x, w, grad = (torch.randn(size, generator=generator, dtype=dtype) for size in ((14, wide), (4, 8, wide), (14, 8)))
    groups = DeviceGroups(torch.tensor([0, 3, 3, 8, 10], dtype=torch.int32))
    expected = [t.clone().requires_grad_() for t in (x[:10], w)]
    y = grouped_product(*expected, sizes)
    y.backward(grad[:10])
    for gemm in (None, KernelGemm(), KernelGemm(backend="triton")):
        given = [t.clone().requires_grad_() for t in (x, w)]
        found = grouped_product(*given, groups, gemm)
        found.backward(grad)
        torch.testing.assert_close(found[:10], y)
        assert found.shape[0] == rows and not found[10:].any() and not given[0].grad[10:].any()
        torch.testing.assert_close(given[0].grad[:10], expected[0].grad)
        torch.testing.assert_close(given[1].grad, expected[1].grad)
    none = grouped_product(x[:0].clone(), w, DeviceGroups(torch.zeros(5, dtype=torch.int32)))
    assert none.shape == (0, 8)


def test_a_layer_multiplies_by_what_its_grid_says():
    """Six products of experts in a step, all of them by the grid's."""
    for name, of in (("torch", TorchGemm), ("kernels", KernelGemm)):
        moe = ndtp.nn.MoE(8, 16, 2, mesh=ndtp.ProcessGrid(Grid(x=1), gemm=name), seed=0)
        with (
            mock.patch.object(of, "grouped", autospec=True, side_effect=of.grouped) as rows,
            mock.patch.object(of, "grouped_outer", autospec=True, side_effect=of.grouped_outer) as weights,
        ):
            moe(torch.randn(4, 8, requires_grad=True)).sum().backward()
        assert (rows.call_count, weights.call_count) == (4, 2)
