"""The two sides of a comparison: the models on grids, and the dense ones that they must equal."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Place, dense_model, parallel_model
from noise import Noise
from program import Program
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import ndtp

REFUSAL = "an error of ndtp, which is right as well"  # recorded in the place of a result, which is not compared


@dataclass
class Record:
    """Something that both sides have, under one label and in one order."""

    label: str
    value: Tensor | str | None
    where: tuple[slice, ...] | None = None  # of the whole tensor


class Dense:
    """By torch alone, in the program's dtype or in fp64."""

    def __init__(self, program: Program, exact: bool) -> None:
        self.program, self.exact = program, exact
        self.data_dtype = getattr(torch, program.dtype)
        self.records: list[Record] = []
        online, target = (dense_model(program, program.seed + i) for i in (0, 1))
        self.models: dict[str, nn.Module] = {"online": self._cast(online), "target": self._cast(target)}
        self.start = self.end = Place(None, None)  # type: ignore[arg-type]
        self.freeze_first()

    def freeze_first(self) -> None:
        for model in self.models.values():
            parameters = list(model.parameters())
            for place in self.program.frozen if parameters else ():
                parameters[place % len(parameters)].requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else self.data_dtype

    def _cast(self, model: nn.Module) -> nn.Module:
        return model.to(self.dtype)

    # ------------------------------------------------------------------------------------------------- tensors

    def values(self, shape: tuple[int, ...], seed: int) -> Tensor:
        """Whole values that the program's dtype can hold, the same on every side and rank."""
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.to(self.data_dtype).to(self.dtype)

    def shape(self) -> tuple[int, ...]:
        program = self.program
        return (program.rows, *((program.lead,) if program.lead else ()), program.hidden)

    def cut(self, whole: Tensor, place: Place) -> Tensor:
        return whole.clone()

    def as_parameter(self, name: str, parameter: Tensor, whole: Tensor) -> Tensor:
        """A whole value as something that can be copied into a parameter."""
        return whole

    def real_shape(self, model: str, name: str) -> tuple[int, ...]:
        return tuple(self.models[model].get_parameter(name).shape)

    # ------------------------------------------------------------------------------------------------- records

    def record(self, label: str, value: Any, place: Place | None = None) -> None:
        self.records.append(Record(label, value.detach().clone() if isinstance(value, Tensor) else value))

    def record_gradient(self, label: str, name: str, value: Tensor | None) -> None:
        self.record(label, value)

    # --------------------------------------------------------------------------------------------------- doing

    def loss(self, loss: Tensor) -> Tensor:
        return loss

    def keep(self, *things: Any) -> None:
        pass

    def forget(self) -> None:
        pass

    def accumulate(self) -> Any:
        return contextlib.nullcontext()

    def quiet(self, is_quiet: bool) -> Any:
        return contextlib.nullcontext()

    def reduce(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def move(self, dtype: torch.dtype) -> None:
        """Models to another dtype of the data; an exact side rounds its values to it."""
        self.data_dtype = dtype
        for model in self.models.values():
            model.to(dtype)
            if self.exact:
                model.double()


class Parallel(Dense):
    """On grids, with this rank's noise."""

    def __init__(self, program: Program, meshes: list[ndtp.ProcessGrid]) -> None:
        self.program, self.exact, self.meshes = program, False, meshes
        self.data_dtype = getattr(torch, program.dtype)
        self.records = []
        self.noise = Noise(program.noise, program.seed, dist.get_rank())
        self.models = {}
        for i, name in enumerate(("online", "target")):
            theirs = dense_model(program, program.seed + i)
            self.real = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
            self.models[name], self.start, self.end = parallel_model(program, meshes, theirs, self.noise)
        self.freeze_first()

    def cut(self, whole: Tensor, place: Place) -> Tensor:
        if place.layout is None:
            return whole.clone()
        slices = place.layout.slices(place.mesh.rank, (whole.shape[0], whole.shape[-1]))
        return whole[(slices[0], ..., slices[1])].clone()

    def real_shape(self, model: str, name: str) -> tuple[int, ...]:
        return self.real[name]

    def _plain_place(self, name: str) -> Place | None:
        """Of a plain parameter that is a shard."""
        return getattr(self.models["online"], "plain", {}).get(name)

    def as_parameter(self, name: str, parameter: Tensor, whole: Tensor) -> Tensor:
        if isinstance(parameter, DTensor):
            padding = [size for have, want in zip(whole.shape[::-1], parameter.shape[::-1], strict=True)
                       for size in (0, want - have)]  # fmt: skip
            where = _local_part(parameter)
            local = F.pad(whole, padding)[where].clone()
            return DTensor.from_local(
                local, parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        if (place := self._plain_place(name)) is not None:
            assert place.layout is not None
            return whole[place.layout.slices(place.mesh.rank, whole.shape)].clone()
        return whole

    def record(self, label: str, value: Any, place: Place | None = None) -> None:
        if not isinstance(value, Tensor) or place is None or place.layout is None:
            return super().record(label, value)
        whole = (*self.shape()[:1], self.shape()[-1])
        slices = place.layout.slices(place.mesh.rank, whole)
        where = (slices[0], *[slice(None)] * (value.dim() - 2), slices[1])
        self.records.append(Record(label, value.detach().clone(), where))
        return None

    def record_gradient(self, label: str, name: str, value: Tensor | None) -> None:
        """A parameter's gradient, or a value of a parameter; without padding."""
        real = self.real[name]
        if isinstance(value, DTensor):
            local, where = value.to_local().detach().clone(), _local_part(value)
            where = tuple(slice(min(s.start, n), min(s.stop, n)) for s, n in zip(where, real, strict=True))
            inside = local[tuple(slice(0, s.stop - s.start) for s in where)]
            if int(local.count_nonzero()) != int(inside.count_nonzero()):
                label += " (its padding is not zero)"
            self.records.append(Record(label, inside, where))
        elif value is not None and (place := self._plain_place(name)) is not None:
            assert place.layout is not None
            self.records.append(Record(label, value.detach().clone(), place.layout.slices(place.mesh.rank, real)))
        else:
            super().record(label, value)

    def loss(self, loss: Tensor) -> Tensor:
        return self.noise.loss(loss)

    def keep(self, *things: Any) -> None:
        self.noise.keep(*things)

    def forget(self) -> None:
        self.noise.garbage.clear()
        gc.collect()

    @contextlib.contextmanager
    def _quiet(self, is_quiet: bool) -> Iterator[None]:
        kinds = self.noise.kinds
        self.noise.kinds = () if is_quiet else kinds
        yield
        self.noise.kinds = kinds

    def quiet(self, is_quiet: bool) -> Any:
        return self._quiet(is_quiet)

    @contextlib.contextmanager
    def _accumulate(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for mesh in self.meshes:
                stack.enter_context(mesh.accumulate())
            yield

    def accumulate(self) -> Any:
        return self._accumulate()

    def reduce(self) -> None:
        for mesh in self.meshes:
            mesh.reduce_gradients()

    def discard(self) -> None:
        for mesh in self.meshes:
            mesh.discard_gradients()

    def move(self, dtype: torch.dtype) -> None:
        self.data_dtype = dtype
        for model in self.models.values():
            model.to(dtype)


def _local_part(x: Any) -> tuple[slice, ...]:
    """Where this rank's shard of a DTensor lies, by torch's own reckoning."""
    shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
