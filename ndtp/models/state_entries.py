"""The entries of a model's state dict: each tensor once, with all of its keys, and its layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.layout import Layout
from ndtp.models.replicated import Replicated
from ndtp.nn.experts import Experts
from ndtp.nn.gated import GatedMLP
from ndtp.nn.linear import Linear
from ndtp.nn.sharded import Sharded
from ndtp.runtime.arrival import is_plain, stored_shape
from ndtp.runtime.halves import as_it_lies, laid_sizes
from ndtp.runtime.process_grid import ProcessGrid


class Entry(NamedTuple):
    """One tensor of a state dict.

    Attributes:
        keys: by which it goes there; more than one where it is tied.
        local: this rank's shard: the memory of the model itself.
        layout: of the tensor of the shape `stored`, which is `real` with padding behind it.
        dense: the shape that the dense model has it in: the same elements in the same order as `real`.
    """

    keys: tuple[str, ...]
    local: Tensor
    layout: Layout | None
    stored: tuple[int, ...]
    real: tuple[int, ...]
    dense: tuple[int, ...]

    def part(self, rank: int) -> tuple[slice, ...]:
        """Return the slices of the real tensor that this rank has."""
        whole = tuple(slice(0, size) for size in self.stored)
        slices = whole if self.layout is None else self.layout.slices(rank, self.stored)
        return tuple(slice(min(s.start, size), min(s.stop, size)) for s, size in zip(slices, self.real, strict=True))

    def boxes(self, rank: int) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return this rank's part in the dense shape: the start of each box, and its memory."""
        part = self.part(rank)
        mine, starts = self.local[tuple(slice(0, s.stop - s.start) for s in part)], [s.start for s in part]
        if self.dense == self.real:
            return [(tuple(starts), mine)]
        first, _, row, column = starts
        return [((first, i * self.real[2] + row, column), mine[:, i]) for i in range(self.real[1])]


def mesh_of_model(model: nn.Module) -> ProcessGrid | None:
    """The grid that a model is on; None for one that is on none."""
    report = vars(model).get("ndtp_report")
    if report is not None and report.mesh is not None:
        return report.mesh
    for module in model.modules():
        if isinstance(module, (Sharded, Linear)):
            return module.mesh
        if isinstance(module, Replicated):
            return module.ndtp_frame.mesh
    return None


def entries_of(model: nn.Module, mesh: ProcessGrid | None) -> list[Entry]:
    """Return the entries in the order of the state dict."""
    state = model.state_dict(keep_vars=True)
    real = _real_shapes(model)
    gated = {f"{name}.{e.up_name}" for name, e in model.named_modules() if isinstance(e, Experts) and e.is_gated}
    found: dict[int, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), []).append(key)
    entries = []
    for keys in found.values():
        x: Any = state[keys[0]]
        layout, local = None, x.detach()
        if not is_plain(x) and mesh is not None:
            layout = Layout.from_placements(mesh.grid, mesh.mesh_axes, x.placements, len(stored_shape(x)))
            local = x._local_tensor.detach()
        shape = tuple(stored_shape(x))
        own = next((real[key] for key in keys if key in real), shape)  # of any module that has it
        shape, local = laid_sizes(shape, len(own)), as_it_lies(local, len(own))
        # Gates and ups of experts, which a file has as one dim.
        dense = (own[0], own[1] * own[2], own[3]) if keys[0] in gated else own
        entries.append(Entry(tuple(keys), local, layout, shape, own, dense))
    return entries


def _real_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes without padding of parameters that may be padded."""
    found: dict[str, tuple[int, ...]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        if isinstance(module, Sharded):
            found |= {f"{start}{name}": lies.real for name, lies in module.lies.items()}
        elif isinstance(module, Replicated):
            own = {name: p for name, p in module._parameters.items() if p is not None}
            found |= {f"{start}{name}": p.ndtp_real for name, p in own.items() if hasattr(p, "ndtp_real")}
        elif isinstance(module, Linear):
            found |= {f"{start}weight": (module.out_features, module.in_features)}
            found |= {f"{start}bias": (module.out_features,)}
        elif isinstance(module, GatedMLP):
            inner, hidden = module.up.out_features // 2, module.up.in_features
            for name in ("gate", "up"):
                found |= {f"{start}{name}.weight": (inner, hidden), f"{start}{name}.bias": (inner,)}
    # `up` of a gated block is visited behind it, under the same names.
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, GatedMLP):
            start = f"{prefix}." if prefix else ""
            size = module.up.out_features // 2
            found |= {f"{start}up.weight": (size, module.up.in_features), f"{start}up.bias": (size,)}
    return found


def meta_tensors(model: nn.Module) -> tuple[dict[int, nn.Parameter], list[tuple[nn.Module, str, str]]]:
    """Parameters on the meta device, and the buffers there: (module, key, name)."""
    parameters = {id(p): p for p in model.parameters() if p.is_meta}
    buffers = [
        (module, key, f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key, value in module._buffers.items()
        if value is not None and value.is_meta
    ]
    return parameters, buffers


@torch.no_grad()
def take_memory(parameter: Any, device: Device) -> None:
    """Let a parameter on the meta device have memory, on a grid for this rank's shard; it is the same object."""
    from ndtp.runtime.grid_tensor import become, exchange

    if is_plain(parameter):
        exchange(parameter, nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad))
        return
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(parameter._local_tensor, device=device)
    made = DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter._spec.shape,
        stride=parameter._spec.stride,
    )  # fmt: skip
    become(parameter, made, parameter.ndtp_name, parameter.ndtp_real)


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Parameters, and the buffers that a state dict has; each once."""
    found: dict[int, Tensor] = {id(p): p for p in model.parameters()}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found[id(buffer)] = buffer
    return list(found.values())


@contextmanager
def replaced(model: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Put other tensors, by `id`, in the place of parameters and buffers for a moment, and remove all others."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, value in held.items():
                if value is not None:
                    before.append((held, key, value))
    try:
        for held, key, value in before:
            held[key] = others.get(id(value))  # type: ignore[assignment]
        yield
    finally:
        for held, key, value in before:
            held[key] = value
