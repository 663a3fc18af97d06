import pytest
import torch

from ndtp.testing import assert_close_to_dense, assert_equal, small_integers


def draw_everywhere(seed):
    return small_integers((3, 5), seed)


def test_small_integers_are_the_same_on_every_rank(ranks):
    expected = small_integers((3, 5), 11)
    assert all(torch.equal(drawn, expected) for drawn in ranks(4).run(draw_everywhere, 11))


def test_small_integers_cover_their_range_and_no_more():
    drawn = small_integers((1000,), 0, torch.bfloat16, low=-1, high=2)
    assert drawn.dtype == torch.bfloat16
    assert drawn.unique().tolist() == [-1, 0, 1, 2]
    assert not torch.equal(small_integers((100,), 0), small_integers((100,), 1))


def test_small_integers_from_a_generator_continue():
    generator = torch.Generator().manual_seed(3)
    first, second = small_integers((50,), generator), small_integers((50,), generator)
    assert torch.equal(first, small_integers((50,), 3))
    assert not torch.equal(first, second)


def test_equal_tensors_pass():
    nan, zero = float("nan"), 0.0
    assert_equal(torch.tensor([1.0, nan, -zero]), torch.tensor([1.0, nan, zero]), "y")
    assert_equal(torch.empty(0, 3), torch.empty(0, 3), "empty")
    assert_equal(torch.tensor(True), torch.tensor(True), "scalar")


def test_a_difference_is_located():
    expected = torch.arange(12.0).reshape(3, 4)
    actual = expected.clone()
    actual[1, 2] += 1
    actual[2, 0] -= 5
    with pytest.raises(AssertionError, match=r"C on rank 3: 2 of 12 elements differ, by at most 5; first at \(1, 2\)"):
        assert_equal(actual, expected, "C on rank 3")
    assert_equal(actual.new_tensor(1.0), expected.new_tensor(1.0), "scalar")
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_equal(torch.tensor(float("nan")), torch.tensor(0.0), "nan")


@pytest.mark.parametrize("other, message", [(torch.zeros(3), "shape"), (torch.zeros(2).double(), "float64 instead")])
def test_another_kind_of_tensor_is_named(other, message):
    with pytest.raises(AssertionError, match=message):
        assert_equal(other, torch.zeros(2), "y")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_summation_order_is_close_to_dense(dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(32, 256, generator=generator), torch.randn(256, 16, generator=generator)
    exact = a.to(dtype).double() @ b.to(dtype).double()
    dense = a.to(dtype) @ b.to(dtype)
    halves = a[:, :128].to(dtype) @ b[:128].to(dtype) + a[:, 128:].to(dtype) @ b[128:].to(dtype)
    error = assert_close_to_dense(halves, dense, exact)
    assert error == (halves.double() - exact).abs().max().item()
    halves[3, 4] += 10
    with pytest.raises(AssertionError, match=r"block: off by .* at \(3, 4\).*; 1 of 512 elements"):
        assert_close_to_dense(halves, dense, exact, what="block")


def test_the_floor_allows_a_few_eps_where_dense_is_exact():
    exact = torch.full((4,), 8.0, dtype=torch.float64)
    dense = exact.float()
    eps = torch.finfo(torch.float32).eps
    assert assert_close_to_dense(dense * (1 + 2 * eps), dense, exact) > 0
    with pytest.raises(AssertionError, match="4 of 4"):
        assert_close_to_dense(dense * (1 + 16 * eps), dense, exact)


def test_nan_is_never_close():
    exact = torch.ones(3, dtype=torch.float64)
    actual = torch.tensor([1.0, 1.0, float("nan")])
    with pytest.raises(AssertionError, match=r"\(2,\)"):
        assert_close_to_dense(actual, exact.float(), exact)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        assert_close_to_dense(actual, actual, actual)
