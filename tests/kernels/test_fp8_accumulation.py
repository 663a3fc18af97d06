"""The emulation of fp8 sums in bench/fp8_accumulation.py: by hand, and what the page says of it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import fp8_accumulation as emulation


def test_what_is_dropped():
    """1 + 2^-13 is kept, 1 + 2^-14 is not; the point moves with the number."""
    x = torch.tensor([1 + 2.0**-13, 1 + 2.0**-14, -(1 + 2.0**-14), 4 + 2.0**-11, 4 + 2.0**-12, 0.0]).double()
    assert emulation.truncated(x, 13).tolist() == [1 + 2.0**-13, 1.0, -1.0, 4 + 2.0**-11, 4.0, 0.0]


def test_small_terms_are_lost_unless_the_sums_are_moved():
    """A sum of 16 keeps multiples of 2^-9: 511 steps that add 2^-10 each add nothing to it."""
    a, b = torch.zeros(1, 32 * 512), torch.ones(1, 32 * 512)
    a[0, 0], a[0, 32::32] = 16.0, 2.0**-10
    assert emulation.product(a, b, 0).item() == 16.0
    assert emulation.product(a, b, 512).item() == 16 + 496 * 2.0**-10  # the first 15 steps meet the 16


def test_moved_sums_lose_less_than_their_rounding():
    found = emulation.errors(4096, size=64)
    moved = found[f"moved every {emulation.PROMOTED_EVERY}"]["rms"]
    assert moved < found["exact, rounded to bf16"]["rms"] < 2 * found["fast accumulation"]["rms"]
    assert moved < found["fast accumulation"]["rms"] / 2
