"""Layers whose weights are of a tensor class of somebody else's stay whole, and split layers are not quantised."""

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid, LayoutError
from ndtp.models.left_alone import why_left


class Packed(torch.Tensor):
    """A tensor class, as libraries of quantisation have one."""


X = torch.linspace(-1, 1, 64).view(4, 16)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8))


def packed(layer: nn.Linear, weight: torch.Tensor) -> None:
    layer.weight = nn.Parameter(weight.detach().as_subclass(Packed), requires_grad=False)


def check_packed() -> None:
    mesh, dense, model = mesh_of(Grid(x=2)), made(), made()
    packed(model[2], model[2].weight)
    ndtp.parallelize(model, mesh, example=X, scheme="1d")
    assert "is of Packed: quantised" in model.ndtp_report.kept["2"] and type(model[2].weight) is Packed
    assert list(model.ndtp_report.replaced)[:2] == ["0", "4"]
    torch.testing.assert_close(model(X), dense(X))
    with pytest.raises(LayoutError, match=r"'0.weight' \(32, 16\) .* of the class Packed, .*\n  fix: quantise before"):
        packed(model[0], dense[0].weight)
    wholly = made()
    for each in (0, 2, 4):
        packed(wholly[each], dense[each].weight)
    with pytest.raises(LayoutError, match=r"was replaced(.|\n)*Packed: quantised"):
        ndtp.parallelize(wholly, mesh, example=X, scheme="1d")


def check_dynamic() -> None:
    model = ndtp.parallelize(made(), mesh_of(Grid(x=2)), example=X, scheme="1d")
    with pytest.raises(LayoutError, match=r"torch\.ao\.quantization: '0' is split over ranks"):
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not hasattr(model[0], "qconfig")


@pytest.mark.parametrize("check", [check_packed, check_dynamic])
def test_by_name(ranks, check):
    ranks(2).run(check)


def test_complex_weights_are_not_called_quantised():
    assert (
        why_left(nn.Linear(2, 2, dtype=torch.cfloat))
        == "it is a Linear, whose weight is of complex numbers, which are not split"
    )
