"""Comparisons of parallel results with dense ones, and inputs for which they can be exact."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def small_integers(
    shape: Sequence[int],
    seed: int | torch.Generator,
    dtype: torch.dtype = torch.float32,
    *,
    low: int = -3,
    high: int = 3,
    device: torch.device | str | None = None,
) -> Tensor:
    """Integers drawn uniformly from low..high, both included: the same on every rank and device for the same seed.

    Sums of their products are exact, whatever their order, while they stay below 2^24 in fp32 (2^53 in fp64): with the
    defaults, up to K = 1.8 million terms.  Stored in bf16 a result is exact only up to 256, in fp16 up to 2048.

    Args:
        shape: of the returned tensor.
        seed: an int, or a generator, which advances.
        device: default: that of torch.
    """
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    drawn = torch.randint(low, high + 1, tuple(shape), generator=generator, device=generator.device)
    return drawn.to(device=torch.get_default_device() if device is None else device, dtype=dtype)


def assert_equal(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Every element, the shape and the dtype are the same; NaN equals NaN, and -0 equals 0.  Devices may differ.

    Raises:
        AssertionError: says how many elements differ, by how much at most, and the first index with both values.
    """
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    _assert_same_kind(actual, expected, what)
    wrong = (actual != expected) & ~((actual != actual) & (expected != expected))
    if not wrong.any():
        return
    num_wrong = int(wrong.sum())
    index = _first(wrong)
    error = (_widen(actual) - _widen(expected)).abs()[wrong]
    raise AssertionError(
        f"{what}: {num_wrong} of {wrong.numel()} elements differ, by at most {error.max().item():.6g}; "
        f"first at {index}: {actual[index].item()!r} instead of {expected[index].item()!r} "
        f"(shape {tuple(actual.shape)}, {actual.dtype})"
    )


def assert_close_to_dense(
    actual: Tensor,
    dense: Tensor,
    dense_fp64: Tensor,
    factor: float = 4.0,
    *,
    floor_eps: float = 4.0,
    what: str = "result",
) -> float:
    """`actual` is about as near to the fp64 result as the dense computation in the same dtype is.

    Args:
        actual: the parallel result.
        dense: the dense result in the same dtype, of the same shape.
        dense_fp64: the dense result computed in fp64.
        factor: the largest error may be this many times the largest error of `dense`,
        floor_eps: or this many times eps of the dtype times the largest magnitude, whichever is larger.

    Returns:
        The largest error, in the units of the tensors.

    Raises:
        AssertionError: states both errors, the tolerance and the worst index.
        ValueError: `dense_fp64` is not fp64.
    """
    if dense_fp64.dtype != torch.float64:
        raise ValueError(f"{what}: dense_fp64 is {dense_fp64.dtype}, not torch.float64")
    actual, dense, exact = actual.detach().cpu(), dense.detach().cpu(), dense_fp64.detach().cpu()
    _assert_same_kind(actual, dense, what)
    if exact.shape != actual.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)} instead of {tuple(exact.shape)}")
    if actual.numel() == 0:
        return 0.0
    error = (actual.double() - exact).abs()
    dense_error = (dense.double() - exact).abs().max().item()
    floor = floor_eps * torch.finfo(actual.dtype).eps * exact.abs().max().item()
    tolerance = max(factor * dense_error, floor)
    wrong = ~(error <= tolerance)  # also where it is NaN
    if not wrong.any():
        return error.max().item()
    index = _first(torch.isnan(error)) if error.isnan().any() else _first(error == error.max())
    raise AssertionError(
        f"{what}: off by {error[index].item():.3g} from the fp64 result at {index}: "
        f"{actual[index].item()!r} instead of {exact[index].item()!r}; "
        f"{int(wrong.sum())} of {wrong.numel()} elements exceed the tolerance {tolerance:.3g} "
        f"(the dense {actual.dtype} result is off by {dense_error:.3g}; factor {factor:g}, floor {floor:.3g})"
    )


def _assert_same_kind(actual: Tensor, expected: Tensor, what: str) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{what}: {actual.dtype} instead of {expected.dtype}")


def _widen(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_complex() else tensor.double()


def _first(mask: Tensor) -> tuple[int, ...]:
    """Index of the first True in row-major order."""
    return tuple(int(i) for i in mask.nonzero()[0])
