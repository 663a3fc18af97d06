"""Forms of results without memory: those of torch's own kernels, computed once."""

import torch

from ndtp.models.forms import FormsOfResults


def results():
    x = torch.empty(4, 6, dtype=torch.bfloat16, device="meta", requires_grad=True)
    columns, ids = torch.empty(6, 4, device="meta").t(), torch.zeros(4, 6, dtype=torch.long, device="meta")
    made = [x * 2.0, x * columns, x > 0, x.softmax(-1), x @ x.t(), torch.cat([x, x], 1), ids / 2, *x.sort(-1)]
    (x * x).sum().backward()
    return [(y.shape, y.stride(), y.dtype, y.requires_grad) for y in (*made, x.grad)]


def test_forms_are_those_of_the_kernels():
    expected = results()
    with FormsOfResults() as forms:
        assert results() == expected
        count = len(forms.given)
        assert results() == expected and len(forms.given) == count > 10


def test_what_has_memory_or_shares_it_is_computed():
    x = torch.empty(4, device="meta")
    with FormsOfResults() as forms:
        for value in (1.0, 2.0):
            assert (torch.full((2,), value) * 2).tolist() == [2 * value] * 2
        for _ in range(2):
            assert x.view(2, 2).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert torch.arange(3).tolist() == [0, 1, 2] and x.add_(1) is x
        assert not forms.given
