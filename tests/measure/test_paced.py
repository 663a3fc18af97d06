"""Local work on a clock: shaped and counted as the real one."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

from ndtp.compute.gemm import TorchGemm
from ndtp.measure.pace import Clock, PacedGemm

M, K, N = 8, 4, 6


@pytest.mark.parametrize(
    "one, other, how, share",
    [
        ((M, K), (N, K), {}, 1),
        ((2, M, K // 2), (N, K), {"blocks": 3}, 1),
        ((2, M, K // 2), (N, K), {"blocks": 1, "parts": (1,)}, 0.5),
        ((M, K), (2, N, K // 2), {"blocks": 1, "parts": (1,)}, 0.5),
    ],
    ids=["whole", "in and as blocks", "own part", "own part of the weight"],
)
def test_a_product_of_the_clock_is_shaped_and_counted_as_the_real_one(one, other, how, share):
    letters, clock = (("m", "k"), ("n", "k"), ("m", "n")), Clock(0.0)
    a, b = torch.ones(one), torch.ones(other)
    real, paced = (gemm.bound(letters, one, other, **how)(a, b) for gemm in (TorchGemm(), PacedGemm(clock)))
    assert paced.shape == real.shape and clock.work == share * 2 * M * K * N


def test_a_clock_lasts_as_long_as_its_work_and_no_wait_adds_up():
    clock = Clock(10.0, rate=1e3)
    now, late = 0.0, 0.0005

    def sleep(seconds):
        nonlocal now
        now += seconds + late

    with (
        mock.patch.object(time, "perf_counter", lambda: now),
        mock.patch.object(time, "sleep", sleep),
    ):
        for _ in range(10):
            clock.multiply(1)
        clock.touch(torch.ones(1, dtype=torch.uint8))
    assert clock.work == 20
    assert now == pytest.approx(0.02 + late), "20 flops: each sleep is shorter by what the one before was late"
