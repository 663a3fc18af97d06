"""Products of fp8 with a scale a row: torch's own numbers, what came multiplied as it came, and odd operands."""

import math

import pytest
import torch

from ndtp.compute.quantised import Quantised, scaled_rows
from ndtp.compute.scaled_gemm import GRADIENT, LARGEST, OPERAND, ScaledGemm, by_kernel, multiply

LETTERS = {"C": (("m", "k"), ("n", "k"), ("m", "n")), "dA": (("m", "n"), ("n", "k"), ("m", "k"))}
LETTERS["dB"] = (("m", "n"), ("m", "k"), ("n", "k"))
SIZES = {"m": 32, "n": 48, "k": 64}
ERROR = {"C": 0.05, "dA": 0.1, "dB": 0.1}  # of norms; e5m2 keeps two bits


def drawn(letters, seed):
    x = torch.randn([SIZES[letter] for letter in letters], generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-2, 2, len(x))[:, None]  # rows of all magnitudes


def came(x, dtype, blocks=1):
    """A matrix as it comes over the wire: in blocks of columns, each with a scale a row."""
    parts = [scaled_rows(part, LARGEST[dtype]) for part in x.chunk(blocks, 1)]
    payload, scales = torch.stack([q.to(dtype) for q, _ in parts]), torch.stack([scale for _, scale in parts])
    made = Quantised(payload, scales, x.dtype)
    return made if blocks > 1 else made.joined()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch._scaled_mm has no rowwise scales on CPUs before 2.13")
@pytest.mark.parametrize("formats", [(OPERAND, OPERAND), (GRADIENT, OPERAND)], ids=str)
def test_the_numbers_are_those_of_torch(formats):
    """torch._scaled_mm with rowwise scales multiplies on CPUs, too."""
    one, other = drawn("mk", 0), drawn("nk", 1)
    made = [scaled_rows(x, LARGEST[dtype]) for x, dtype in zip((one, other), formats, strict=True)]
    rows = [(numbers.to(dtype), scale) for (numbers, scale), dtype in zip(made, formats, strict=True)]
    for scaled in (rows, [(rows[0][0], None), rows[1]], [rows[0], (rows[1][0], None)]):
        mine, torchs = multiply(*scaled, torch.float32), by_kernel(*scaled, torch.float32)
        assert float((mine - torchs).norm() / torchs.norm()) < 1e-6


@pytest.mark.parametrize("name", ["C", "dA", "dB"])
@pytest.mark.parametrize("one_came", [0, 1, 2])
@pytest.mark.parametrize("other_came", [0, 1, 4])
def test_each_product_in_each_form(name, one_came, other_came):
    """An operand that came in fp8 gives the result of the numbers that it stands for, within one rounding."""
    letters = LETTERS[name]
    one, other = drawn(letters[0], 0), drawn(letters[1], 1)
    given = [one, other]
    for i, (x, count) in enumerate(((one, one_came), (other, other_came))):
        if count:
            given[i] = came(x, GRADIENT if "k" not in letters[i] else OPERAND, count)
    shapes = [tuple(x.shape) for x in given]
    found = ScaledGemm().bound(letters, *shapes)(*given)
    wide = [x.wide() if isinstance(x, Quantised) else x for x in given]
    wide = [x.movedim(0, 1).flatten(1) if x.dim() == 3 else x for x in wide]
    expected = torch.einsum(
        f"{', '.join(map(''.join, letters[:2]))} -> {''.join(letters[2])}", *map(torch.Tensor.double, wide)
    )
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < ERROR[name]


def test_what_came_is_not_widened(monkeypatch):
    """Nor are its numbers rounded again: those that fp8 has are multiplied without an error."""
    weight = torch.tensor([1.0, -2.0, 0.5, 4.0]).repeat(48, 16) * 2.0 ** torch.arange(48)[:, None]
    quantised = came(weight, OPERAND, 4)
    monkeypatch.setattr(Quantised, "wide", lambda self: pytest.fail("widened"))
    x, grad = torch.ones(32, 64), torch.ones(32, 48)
    forward = ScaledGemm().bound(LETTERS["C"], (32, 64), tuple(quantised.shape))(x, quantised)
    torch.testing.assert_close(forward, x @ weight.mT)
    back = ScaledGemm().bound(LETTERS["dA"], (32, 48), tuple(quantised.shape))(grad, quantised)
    torch.testing.assert_close(back, grad @ weight)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_its_row_alone(value):
    x, weight = drawn("mk", 0), drawn("nk", 1)
    x[3, 5], x[4] = value, 0.0
    found = ScaledGemm().bound(LETTERS["C"], (32, 64), (48, 64))(x, weight)
    assert not found[3].isfinite().any() and found[:3].isfinite().all() and (found[4] == 0).all()
    assert not ScaledGemm().bound(LETTERS["C"], (0, 64), (48, 64))(x[:0], weight).numel()
