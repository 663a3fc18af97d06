"""The benchmark's persistent rival multiplies right: an easy rival would be one that is checked out of the race."""

import sys
from pathlib import Path

import pytest
import torch
from poisoned import integers

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
from persistent_rival import persistent_product


@pytest.mark.parametrize("size", [(384, 512, 128), (130, 264, 72)], ids=str)
def test_persistent_product(size):
    """Several tiles a program; edges that no tile divides."""
    m, n, k = size
    a, b = integers(m, k), integers(n, k)
    assert torch.equal(persistent_product(a, b, 2), a @ b.mT)
