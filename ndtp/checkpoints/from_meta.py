"""A model that was made on the meta device: memory for what this rank has of it, and first values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device
from torch.utils._python_dispatch import TorchDispatchMode

from ndtp.algebra.layout import Layout
from ndtp.checkpoints.pieces import Staged, whole_of
from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.errors import LayoutError
from ndtp.models.state_entries import Entry, entries_of, mesh_of_model, meta_tensors, take_memory
from ndtp.nn.linear import Linear
from ndtp.nn.random import draw_seed, key_of, uniform
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.process_grid import ProcessGrid


def materialise(model: nn.Module, device: Device = None) -> bool:
    """Memory for this rank's part of what is on the meta device; what is tied stays tied.

    Buffers that no checkpoint has (rotary frequencies, position ids) are computed as the model's own code does.

    Returns whether there was anything.

    Raises:
        LayoutError: names a buffer whose values nobody knows; the same on every rank, before anything is changed.
    """
    parameters, buffers = meta_tensors(model)
    if not parameters and not buffers:
        return False
    mesh = mesh_of_model(model)
    device = device or (mesh.device_type if mesh is not None else torch.get_default_device())
    computed = [b for b in buffers if b[1] in b[0]._non_persistent_buffers_set]
    root = _with_own_values(model)
    if computed and root is None:
        raise LayoutError(
            f"buffer '{computed[0][2]}' is on the meta device, in no checkpoint, and has no values\n"
            "  fix: make the model's buffers on a device, or persistent"
        )
    for parameter in parameters.values():
        take_memory(parameter, device)
    for module, key, _ in buffers:
        buffer = module._buffers[key]
        assert buffer is not None
        module._buffers[key] = torch.empty_like(buffer, device=device)
    _compute(root, computed)
    return True


def _with_own_values(model: nn.Module) -> object:
    """The model of transformers, which knows how to fill each of its modules."""
    return next((m for m in model.modules() if hasattr(m, "_init_weights") and hasattr(m, "config")), None)


@torch.no_grad()
def _compute(root: Any, buffers: list[tuple[nn.Module, str, str]]) -> None:
    from_here = [(module, key, name, module._buffers[key]) for module, key, name in buffers]
    before = {id(p): p for module, _, _ in buffers for p in module.parameters(recurse=False)}
    flags = {key: getattr(p, "_is_hf_initialized", None) for key, p in before.items()}
    for parameter in before.values():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # what transformers leaves as it is
    for module in {id(m): m for m, *_ in buffers}.values():
        root._init_weights(module)
    for at, parameter in before.items():
        if flags[at] is None:
            del parameter._is_hf_initialized  # type: ignore[attr-defined]
        else:
            parameter._is_hf_initialized = flags[at]  # type: ignore[attr-defined]
    for module, key, name, empty in from_here:
        if module._buffers[key] is empty and empty is not None and empty._version == 0 and empty.numel():
            raise LayoutError(
                f"buffer '{name}' was on the meta device, is in no checkpoint, and the model's own code gives it no "
                "values\n  fix: make the model's buffers on a device, or persistent"
            )


def initialize(model: nn.Module | Staged | Sequence[Staged], seed: int | None = None, device: Device = None) -> None:
    """First values for a model on a grid, each rank for what it has: for one that was made on the meta device.

    The model's own code draws (`initialize_weights` of transformers, else `reset_parameters` of the modules); what it
    draws for an element depends on the seed, the parameter's name and the element's index alone, so it is the same on
    every grid.  It is not what torch's generator would give the dense model.

    Args:
        model: or the stages of a pipeline that this rank has: what two of them share gets the first one's values.
        seed: default: drawn from torch's generator, which must be seeded alike on every rank.
        device: default: that of the grid.
    """
    seed = draw_seed() if seed is None else seed
    whole = whole_of(model)
    for piece in whole.pieces:
        _initialize(piece.module, seed, device)
    for settle in whole.settling:
        settle()


def _initialize(model: nn.Module, seed: int, device: Device) -> None:
    materialise(model, device)
    mesh = mesh_of_model(model)
    entries = entries_of(model, mesh)
    for module in model.modules():
        if hasattr(module, "_is_hf_initialized"):
            del module._is_hf_initialized
    root = _with_own_values(model)
    with torch.no_grad(), _seeded(seed % 2**63, {e.local.device.type for e in entries}), _Draws(entries, mesh, seed):
        if root is not None and hasattr(root, "initialize_weights"):
            root.initialize_weights()
        else:
            for module in model.modules():
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if isinstance(module, Linear):
                    module.reset_parameters(int(key_of(seed, module.name)))
                elif reset is not None:
                    reset()
    for entry in entries:
        if entry.stored != entry.real and entry.layout is not None and mesh is not None:
            kept = entry.local[tuple(slice(0, s.stop - s.start) for s in entry.part(mesh.rank))].clone()
            entry.local.zero_()
            entry.local[tuple(slice(0, size) for size in kept.shape)] = kept
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            _zero_row(module, module.padding_idx, mesh)


@contextmanager
def _seeded(seed: int, kinds: set[str]) -> Iterator[None]:
    """Seed the generators of the CPU and of these kinds of devices; behind it they go on as before."""
    with ExitStack() as kept:
        kept.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(seed)
        for kind in kinds - {"cpu", "meta"}:
            module = torch.get_device_module(kind)
            kept.enter_context(torch.random.fork_rng(range(module.device_count()), device_type=kind))
            module.manual_seed_all(seed)
        yield


@torch.no_grad()
def _zero_row(module: nn.Embedding, row: int, mesh: ProcessGrid | None) -> None:
    """The row of padding, which the model's code zeroes through a view that a DTensor does not have."""
    weight: Any = module._parameters["weight"]
    if is_plain(weight) or mesh is None:
        weight.detach()[row] = 0
        return
    layout = Layout.from_placements(mesh.grid, mesh.mesh_axes, weight.placements, 2)
    here = layout.slices(mesh.rank, tuple(weight.shape))[0]
    if here.start <= row < here.stop:
        weight._local_tensor.detach()[row - here.start] = 0


class _Draws(TorchDispatchMode):
    """Operations that fill a parameter, each on this rank's shard; those that draw do so by the element."""

    def __init__(self, entries: list[Entry], mesh: ProcessGrid | None, seed: int) -> None:
        super().__init__()
        self.rank, self.seed = 0 if mesh is None else mesh.rank, seed
        self.entries = {_memory(e.local): e for e in entries}

    def __torch_dispatch__(
        self, func: Any, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if target is None or not name.endswith("_"):
            return func(*args, **kwargs)
        local = target if is_plain(target) else target._local_tensor  # type: ignore[attr-defined]
        entry = self.entries.get(_memory(local))
        if entry is None or local.shape != entry.local.shape:
            return func(*args, **kwargs)
        if name in ("normal_", "uniform_"):
            names = ("mean", "std") if name == "normal_" else ("from", "to")
            given = dict(zip(names, args[1:], strict=False)) | kwargs
            self._draw(entry, name, given.get(names[0]), given.get(names[1]))
        elif name == "copy_" and is_plain(args[1]) and tuple(args[1].shape) == entry.real:
            part = entry.part(self.rank)
            entry.local[tuple(slice(0, s.stop - s.start) for s in part)] = args[1][part].to(entry.local)
        elif all(not isinstance(each, Tensor) for each in args[1:]):
            func(local, *args[1:], **kwargs)
        else:
            return func(*args, **kwargs)
        return target

    def _draw(self, entry: Entry, name: str, first: float | None, second: float | None) -> None:
        # What is drawn twice, as a tied weight is for each of its names, is the same both times: the last one stays.
        key = entry.keys[0]
        part = entry.part(self.rank)
        shape, parts = entry.real or (1,), part or (slice(0, 1),)
        one, other = (
            uniform(shape, parts, key_of(self.seed, f"{key} 1 {which}"), entry.local.device)
            for which in ("first", "second")
        )
        if name == "uniform_":
            low, high = first or 0.0, 1.0 if second is None else second
            drawn = low + (high - low) * one
        else:  # Box and Muller 1958, "A note on the generation of random normal deviates"
            mean, std = first or 0.0, 1.0 if second is None else second
            drawn = mean + std * (-2 * torch.log1p(-one)).sqrt() * torch.cos(2 * torch.pi * other)
        values = drawn.to(entry.local.dtype).reshape([s.stop - s.start for s in part])
        entry.local[tuple(slice(0, s.stop - s.start) for s in part)] = values


def _memory(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage().data_ptr(), int(x.storage_offset())
