"""Code that takes `type(x)` for a condition is named: a tensor of a split layer is of a class that derives from it."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from ndtp.models.asked_types import warn_of_asked_types


class Same(nn.Module):
    def forward(self, x):
        return self.checked(x) if type(x) is torch.Tensor else x[0]

    def checked(self, x):
        return x


class Equal(nn.Module):
    def forward(self, x):
        return self.first(x)

    def first(self, x):
        assert (type(x) == Tensor) or isinstance(x, tuple)  # noqa: E721
        return x


class OneOf(nn.Module):
    def forward(self, x):
        return x if x.__class__ in (Tensor, nn.Parameter) else None


class ByName(nn.Module):
    def forward(self, x):
        return x if type(x).__name__ == "Tensor" else None


def beside(x):
    return [y for y in x if type(y) is not torch.Tensor]


class Beside(nn.Module):
    def forward(self, x):
        return beside(x)


class OneOfMany(nn.Module):
    def forward(self, x):
        return x if type(x) in (torch.Tensor, nn.Parameter, list, tuple, dict, set) else None


class Grows(dict):
    """A dict that makes what it is asked for."""

    def __getattr__(self, name):
        return self.setdefault(name, Grows())


CONFIG, KINDS = Grows(n=2), {Tensor: 1}


class Odd(nn.Module):
    settings = Grows()

    def forward(self, x):
        print(type(x))
        return CONFIG.n, self.settings.one, Tensor in KINDS


class Fine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.Tensor([1.0]) if isinstance(x, torch.Tensor) and type(self) is not Same else x
        return y if issubclass(type(x), Tensor) and x.shape == y.shape else type(x).__name__


@pytest.mark.parametrize("kind", [Same, Equal, OneOf, OneOfMany, ByName, Beside])
def test_where_code_asks_is_named(kind):
    with pytest.warns(
        UserWarning, match=r"compares a type with torch.Tensor \(.*test_asked_types.py, line \d+\)"
    ) as told:
        warn_of_asked_types(nn.Sequential(kind(), kind(), nn.Linear(2, 2)))
    assert len(told) == 1, "once"


def test_other_code_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_asked_types(
            nn.Sequential(
                Fine(),
                Odd(),
                torch.fx.symbolic_trace(nn.Linear(2, 2)),
                nn.TransformerEncoderLayer(8, 2, 8),
                nn.LSTM(4, 4),
            )
        )
