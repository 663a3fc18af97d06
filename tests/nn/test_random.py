"""Counter-based draws: the published known answers, and the same element wherever it is drawn."""

import pytest
import torch

from ndtp import Grid, Layout
from ndtp.nn.random import draw_seed, key_of, philox, uniform
from ndtp.testing import assert_equal


def counter(low, high):
    """As a signed 64-bit integer."""
    value = high << 32 | low
    return torch.tensor([value - (1 << 64) if value >> 63 else value])


@pytest.mark.parametrize(
    ("low", "high", "key", "first"),
    [
        (0, 0, 0, 0xFF1DAE59),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0x2C3F628B),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0xDD7CE038),
    ],
)
def test_known_answers_of_random123(low, high, key, first):
    """`kat_vectors` of Random123, philox2x32 with 10 rounds; ndtp uses the first word."""
    assert philox(counter(low, high), key).item() == first


def test_shards_are_slices_of_the_whole():
    shape, key = (8, 16, 4), key_of(3, "weight")
    whole = uniform(shape, [slice(0, size) for size in shape], key, "cpu")
    for grid in Grid.all(8):
        layout = Layout(grid, ("z", "y"), "x", None)
        for rank in range(8):
            assert_equal(uniform(shape, layout.slices(rank, shape), key, "cpu"), layout.shard(whole, rank))


def test_moments_and_independence():
    draws = uniform((512, 2048), [slice(0, 512), slice(0, 2048)], key_of(0, "a"), "cpu")
    assert draws.dtype == torch.float64 and draws.min() >= 0 and draws.max() < 1
    # Five standard deviations of the estimates over 2^20 draws.
    deviation = 5 / 1024
    assert abs(draws.mean() - 1 / 2) < deviation * 0.2887
    assert abs(draws.var() - 1 / 12) < deviation * 0.0746
    assert abs((draws**3).mean() - 1 / 4) < deviation * 0.2835
    counts = torch.histc(draws, 64, 0, 1)
    assert ((counts - 2**14).abs() < 5 * 2**7).all()
    centred = draws - 0.5
    for neighbours in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(neighbours.mean()) < deviation / 12
    other = uniform((512, 2048), [slice(0, 512), slice(0, 2048)], key_of(0, "b"), "cpu")
    assert abs((centred * (other - 0.5)).mean()) < deviation / 12


def test_indices_beyond_32_bits():
    """A tensor of 2^40 elements: no two of its rows are alike."""
    rows = [uniform((1 << 20, 1 << 20), [slice(r, r + 1), slice(0, 8)], 5, "cpu") for r in (0, 1, 1 << 12, 1 << 19)]
    assert len({tuple(row.flatten().tolist()) for row in rows}) == len(rows)


def test_keys_differ_by_seed_and_name():
    keys = {key_of(seed, name) for seed in range(20) for name in ("up.weight", "up.bias", "down.weight")}
    assert len(keys) == 60


def test_draw_seed_follows_torch():
    torch.manual_seed(1)
    first = draw_seed(), draw_seed()
    torch.manual_seed(1)
    assert (draw_seed(), draw_seed()) == first and first[0] != first[1]
