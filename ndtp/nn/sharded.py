"""`Sharded` and `BlockModule`: what modules on a grid share; and what a forward and backward of them keeps."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import BlockLayouts
from ndtp.algebra.volume import Volume
from ndtp.errors import LayoutError
from ndtp.nn.computed_weights import as_computed
from ndtp.nn.parameters import (
    check_own,
    computed_in,
    empty_parameter,
    fill_from_dense,
    full,
    moved_in_place,
    put_in_place,
    taken,
)
from ndtp.ops.memory import Memory, measured
from ndtp.runtime.arrival import is_plain, local_of
from ndtp.runtime.dry_grid import DryGrid, dry_backend
from ndtp.runtime.given_mesh import GivenWire, given_mesh
from ndtp.runtime.halves import laid_sizes
from ndtp.runtime.process_grid import ProcessGrid

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Lies(NamedTuple):
    """The layout of a parameter, its global shape as stored and without padding, its shard's shape, and the dense
    model's shape, which has a dim less where the parameter has halves (`ndtp.runtime.halves`).
    """

    layout: Layout
    shape: tuple[int, ...]
    real: tuple[int, ...]
    shard: tuple[int, ...]
    dense: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, shape: Sequence[int], dense: Sequence[int]) -> Lies:
        real = laid_sizes(dense, layout.ndim) if len(dense) else tuple(dense)
        return cls(layout, tuple(shape), real, layout.shard_shape(shape), tuple(dense))


class Sharded(nn.Module):
    """A module whose own parameters are DTensors on a grid, with the keys and shapes of its dense twin.

    Args:
        mesh: the process grid.
        seed: default: drawn from torch's generator, which must be seeded alike on every rank.
        name: what errors, profiles and the initialisation call this module.
        wire: the dtypes in which its tensors travel.
    """

    ndtp_sums_gradients = True  # over ranks with other rows, see `ndtp.runtime.handed_out`

    def __init__(self, mesh: ProcessGrid, seed: int | None, name: str, wire: GivenWire = None) -> None:
        super().__init__()
        mesh = given_mesh(mesh, name, wire=wire)
        self.mesh, self.seed, self.name = mesh, seed, name
        self.lies: dict[str, Lies] = {}

    def add(
        self,
        name: str,
        real: Sequence[int],
        layout: Layout,
        device: Device,
        dtype: torch.dtype | None,
        shape: Sequence[int] | None = None,
    ) -> None:
        """A parameter of the global shape `real`, stored as `shape` where that is padded."""
        shape = tuple(shape or real)
        self.lies[name] = Lies.of(layout, shape, real)
        self.register_parameter(name, empty_parameter(shape, layout, self.mesh, device, dtype))

    @property
    def qconfig(self) -> object:
        """None is there: `torch.ao.quantization` sets it on the layers that it is to quantise.

        Raises:
            LayoutError: it is set.
        """
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, _: object) -> None:
        raise LayoutError(
            f"torch.ao.quantization: '{self.name}' is split over ranks, and would stay as it is without a word\n"
            "  fix: the dense model, with the weights of state_dict(); low precision of ndtp, parallelize(recipe=)"
        )

    def parameter_names(self) -> list[str]:
        """The names of the parameters that the module has; a bias may have been removed."""
        return [name for name in self.lies if getattr(self, name, None) is not None]

    def own(self, name: str, x: Tensor | None) -> Tensor | None:
        """A parameter that is to be used with `x`, or None with what has no dtype in common with it, as ids.

        Raises:
            LayoutError: it was put in the place of what this module made and is no shard of it, or is still on meta.
        """
        parameter: Tensor | None = getattr(self, name, None)
        if parameter is not None:
            if name not in self.lies:
                raise LayoutError(
                    f"{type(self).__name__} '{self.name}' was made without a {name}, and has been given one\n"
                    f"  fix: make the layer with a {name}"
                )
            lies, device_mesh = self.lies[name], self.mesh.device_mesh
            if device_mesh is not None:
                where = f"{self.name}.{name}"
                if type(parameter) is Tensor and parameter.shape == lies.dense:
                    # Whole, and no parameter: computed, and put in its place by `torch.func.functional_call`.
                    placements = lies.layout.placements_on(self.mesh.mesh_axes)
                    parameter = put_in_place(parameter, placements, device_mesh, lies.shape, where)
                elif name not in self._parameters and not is_plain(parameter):  # by hooks
                    placements = lies.layout.placements_on(self.mesh.mesh_axes)
                    parameter = moved_in_place(parameter, tuple(placements), lies.shape, where)
            beside = parameter if x is None else x
            check_own(parameter, lies.shape, lies.shard, beside, f"{type(self).__name__} '{self.name}': {name}")
            if parameter.grad_fn is not None:
                parameter = as_computed(parameter, self.mesh, f"{type(self).__name__} '{self.name}': {name}")
        return parameter

    def needed(self, name: str, x: Tensor | None) -> Tensor:
        """Return a parameter that is to be used with `x`, and which the layer cannot do without; see `own`."""
        parameter = self.own(name, x)
        if parameter is None:
            raise self.lacks(name)
        return parameter

    def lacks(self, name: str) -> LayoutError:
        """The error of a layer whose parameter was taken away, and which cannot do without."""
        return LayoutError(
            f"{type(self).__name__} '{self.name}' has no {name}, which was set to None or deleted\n"
            f"  fix: give it back a {name}, {self.lies[name].dense}"
        )

    def take_over(self, name: str, dense: Tensor) -> None:
        """Copy this rank's shard out of the dense parameter, and whether it trains.

        Raises:
            LayoutError: another shape.
        """
        own, lies = getattr(self, name), self.lies[name]
        if tuple(dense.shape) != lies.real:
            raise LayoutError(
                f"{type(self).__name__} '{self.name}': {name} is {lies.real}, of the dense layer {tuple(dense.shape)}"
            )
        fill_from_dense(own, lies.layout, self.mesh, dense)
        own.requires_grad_(dense.requires_grad)

    def dense(self, name: str) -> nn.Parameter:
        """The dense parameter, on every rank; a collective."""
        own, lies = getattr(self, name), self.lies[name]
        return nn.Parameter(full(own, lies.layout, self.mesh, lies.real), own.requires_grad)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Load dense tensors as shards, where torch copies or assigns only tensors of the parameter's own shape."""
        errors: list[str] = rest[-1]
        for name, lies in self.lies.items():
            own, value = self._parameters.get(name), state_dict.get(prefix + name)
            if own is None or not isinstance(value, Tensor):
                continue
            if is_plain(value):
                self.mesh.step.note_loaded(f"{prefix}{name}", value)
            try:
                mine = taken(value, own, lies.layout, self.mesh, lies.real)
            except LayoutError as error:
                errors.append(f"{prefix}{name}: {error}")
                mine = own  # stays as it is
            state_dict = {**state_dict, prefix + name: mine}
        super()._load_from_state_dict(state_dict, prefix, *rest)


class BlockModule(nn.Module):
    """A module of [tokens, hidden] activations between the two ends of a block."""

    layouts: BlockLayouts

    @property
    def in_layout(self) -> Layout:
        """The layout of the [tokens, hidden] activations that it takes."""
        return self.layouts.input

    @property
    def out_layout(self) -> Layout:
        """The layout of the [tokens, hidden] activations that it returns."""
        return self.layouts.output


def memory_of(
    module: nn.Module, mesh: ProcessGrid, inputs: Sequence[Tensor], out: Sequence[int], backend: str | None
) -> Memory:
    """Bytes that a forward and backward of a module need beside input and parameters; see `ndtp.ops.memory`.

    It runs a copy whose parameters are shards without memory, on a grid that sends nothing.

    Args:
        inputs: this rank's shards, on the meta device.
        out: the shape of this rank's shard of the result.
        backend: "gloo" or "nccl"; default: that of the mesh.
    """
    shadow, _ = shadow_of(module, mesh, backend)
    dtype = next(x.dtype for x in (*inputs, *shadow.parameters()) if x.is_floating_point())
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *shadow.parameters()))
    return measured(lambda: shadow(*inputs), torch.empty(out, dtype=dtype, device="meta") if wanted else None)


def volume_of(
    module: nn.Module,
    mesh: ProcessGrid,
    inputs: Sequence[Tensor],
    end: Callable[[Any], Tensor] = lambda result: result,
    rank: int | None = None,
    leave: Any = None,
) -> Volume:
    """Bytes that a rank receives in a forward and backward of a module, as they travel, scales included.

    It runs a copy whose parameters are shards without memory, on a grid that sends nothing, without anybody's hooks.

    Args:
        inputs: this rank's shards, on the meta device.
        end: the tensor of its result where backward begins.
        rank: default: this one.
        leave: an object that the copy shares with the module.
    """
    shadow, dry = shadow_of(module, mesh, leave=leave, rank=rank)
    for part in shadow.modules():
        for name in HOOKS:
            vars(part)[name] = OrderedDict()
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=()):
        y = end(shadow(*inputs))
        if y.requires_grad:
            y.backward(torch.empty_like(y))
    volume: Volume = dry.volume
    return volume


def shadow_of(
    module: nn.Module, mesh: ProcessGrid, backend: str | None = None, leave: object = None, rank: int | None = None
) -> tuple[Any, Any]:
    """A copy of a module whose parameters are shards without memory, and the grid in the place of `mesh`, on which it
    sends nothing.

    Args:
        backend: "gloo" or "nccl"; default: that of the mesh.
        leave: an object that the copy shares with the module.
        rank: whose copy it is; default: this one's.
    """
    meshes: dict[int, ProcessGrid | DryGrid] = {id(mesh): mesh}
    for part in module.modules():
        meshes.update({id(value): value for value in vars(part).values() if isinstance(value, (ProcessGrid, DryGrid))})
    backend = dry_backend(backend or mesh.backend)
    rank = mesh.rank if rank is None else rank
    dry = DryGrid(mesh.grid, rank, backend, mesh.wire)
    memo: dict[int, object] = {key: DryGrid(m.grid, rank, backend, m.wire, dry) for key, m in meshes.items()}
    memo[id(mesh)] = dry
    for parameter in module.parameters():
        own = local_of(parameter).detach()  # without a hook on the parameter
        if type(own) is Tensor:
            local = torch.empty_like(own, device="meta")
        else:  # of a class that need not know how to make another one
            local = torch.empty(own.shape, dtype=own.dtype, device="meta")
        made = nn.Parameter(local, parameter.requires_grad)
        vars(made).update({key: value for key, value in vars(parameter).items() if key != "_dtensor"})
        memo[id(parameter)] = made
    memo |= {id(x): torch.empty_like(x, device="meta") for x in chain(module.buffers(), computed_in(module))}
    if leave is not None:
        memo[id(leave)] = leave
    return copy.deepcopy(module, memo), dry
