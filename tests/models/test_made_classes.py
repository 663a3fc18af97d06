"""The classes of a split model's modules derive from the user's, whatever class those have."""

import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid

T = TypeVar("T")


def two_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)]


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*two_layers())

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.layers(x * factor)


class Interface(ABC):
    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class Mixin(ABC):  # noqa: B024
    """One of `abc`, which some libraries derive from beside the class of a model."""


class BeginsWithInterface(Interface, Sized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layers(x)


class BeginsWithGeneric(Generic[T], Sized):
    pass


class WaitsForItsCall(BeginsWithGeneric[int]):
    def forward(self, x: torch.Tensor, factor: dict[str, float] | None = None) -> torch.Tensor:  # type: ignore[override]
        assert factor is not None
        return self.layers(x * factor["factor"])


class GenericLinear(Generic[T], nn.Linear):
    pass


class GenericTable(Generic[T], nn.Embedding):
    pass


class Registry(type):
    known: ClassVar[dict[str, type]] = {}

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, object]) -> type:
        assert name not in mcs.known, f"{name} is registered twice"
        mcs.known[name] = super().__new__(mcs, name, bases, namespace)
        return mcs.known[name]


class OfMetaclass(Sized, metaclass=Registry):
    pass


class Told(Sized):
    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, tag: str) -> None:
        super().__init_subclass__()
        cls.known.append(tag)


class OfBase(Told, tag="only"):
    pass


class ToldLinear(nn.Linear):
    def __init_subclass__(cls, *, tag: str) -> None:
        super().__init_subclass__()


class LinearOfBase(ToldLinear, tag="one"):
    pass


def of_linears(kind: type[nn.Linear]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(8, 16), nn.ReLU(), kind(16, 8))


def table() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(GenericTable(8, 16), nn.Linear(16, 8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in (BeginsWithInterface, BeginsWithGeneric, WaitsForItsCall, OfMetaclass, OfBase)},
    **{kind.__name__: lambda kind=kind: of_linears(kind) for kind in (GenericLinear, LinearOfBase)},
    "table": table,
}


def check_every_class(grid: Grid) -> None:
    for name, make in MODELS.items():
        dense, model = make(), make()
        theirs = type(model)
        ndtp.parallelize(model, mesh_of(grid))
        x = torch.arange(8) if name == "table" else torch.randn(4, 8)
        given = (x, {"factor": 2.0}) if name == "WaitsForItsCall" else (x,)
        for each in (dense, model):
            each(*given).square().mean().backward()
        assert isinstance(model, theirs) and type(model).__mro__.index(theirs) > 0, name
        assert "replaced" in str(model.ndtp_report), name
        if type(theirs) is type:  # libraries derive classes from a model's and from one of their own
            assert issubclass(types.new_class("Mixed", (type(model), Mixin)), theirs), name
        for ours, expected in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(
                ours.grad.full_tensor(), expected.grad, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert isinstance(model, nn.Sequential) and not isinstance(model, Interface)
    assert Told.known == ["only"] and Registry.known == {"OfMetaclass": OfMetaclass}


@pytest.mark.parametrize("grid", [Grid(x=2), Grid(x=2, y=2)], ids=str)
def test_models_of_every_class(ranks, grid):
    ranks(grid.num_ranks).run(check_every_class, grid)
