"""Products of experts: torch's grouped product, which GPUs take, against the loop; torch has it on CPUs, too."""

from unittest import mock

import torch

from ndtp.compute import grouped
from ndtp.compute.grouped import grouped_product, tally


def test_the_fused_product_is_the_loop():
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 0, 5, 2]
    x, w, grad = (torch.randn(size, generator=generator).bfloat16() for size in ((10, 16), (4, 24, 16), (10, 24)))
    results = []
    for fused in (False, True):
        rows, weights = x.clone().requires_grad_(), w.clone().requires_grad_()
        with mock.patch.object(grouped, "_fused", lambda *_, fused=fused: fused):
            y = grouped_product(rows, weights, sizes)
            y.backward(grad)
        results.append((y.detach(), rows.grad, weights.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert not results[1][2][1].any()  # an expert without rows
    assert tally(torch.tensor([2, 0, 2]), 4).tolist() == [1, 0, 2, 0]
