"""Queries, keys and values as one weight in a state dict, where the dense model has them so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.errors import LayoutError
from ndtp.nn.linear import Linear
from ndtp.nn.parameters import full, sharded
from ndtp.runtime.arrival import is_plain

PARTS = ("q_proj", "k_proj", "v_proj")
ORDERS = ("parts", "groups")


@dataclass(frozen=True)
class FusedKeys:
    """The key of a fused layer, and the order of its rows.

    Args:
        name: of the layer in the dense model.
        order: "parts": all queries, then all keys, then all values; "groups": for every key head its queries, the key,
            the value.
        heads, kv_heads: how many there are.
    """

    name: str
    order: str
    heads: int
    kv_heads: int

    def watch(self, module: nn.Module) -> None:
        """Let the state dict of a module with `q_proj`, `k_proj` and `v_proj` have the fused layer in their place."""
        module.register_state_dict_post_hook(partial(_write, self))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(partial(_read, self))  # type: ignore[no-untyped-call]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Rows of three layers as those of the fused one."""
        if self.order == "parts":
            return torch.cat(parts)
        return torch.cat([part.unflatten(0, (self.kv_heads, -1)) for part in parts], 1).flatten(0, 1)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Split the fused weight into those of its layers.

        Raises:
            LayoutError: rows that are not those of such heads.
        """
        shared = self.heads // self.kv_heads
        if whole.shape[0] % (self.heads + 2 * self.kv_heads):
            raise LayoutError(
                f"{whole.shape[0]} rows are not those of {self.heads} heads and twice {self.kv_heads} more"
            )
        dim = whole.shape[0] // (self.heads + 2 * self.kv_heads)
        if self.order == "parts":
            return list(whole.split([self.heads * dim, self.kv_heads * dim, self.kv_heads * dim]))
        parts = whole.unflatten(0, (self.kv_heads, -1)).split([shared * dim, dim, dim], 1)
        return [part.flatten(0, 1) for part in parts]


def fused_keys(name: str | None, order: str, heads: int, kv_heads: int) -> FusedKeys | None:
    """Return the keys of a fused weight.

    Raises:
        ValueError: an unknown order.
    """
    if order not in ORDERS:
        raise ValueError(f"Attention: fused_order={order!r} is not one of {', '.join(ORDERS)}")
    return None if name is None else FusedKeys(name, order, heads, kv_heads)


def _write(fused: FusedKeys, module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
    kinds = [kind for kind in ("weight", "bias") if all(f"{prefix}{part}.{kind}" in state for part in PARTS)]
    mine = [f"{prefix}{part}.{kind}" for part in PARTS for kind in kinds]
    if not mine:
        return
    keys = list(state)
    rest = {key: state.pop(key) for key in keys[min(keys.index(key) for key in mine) :]}
    layers = [module.get_submodule(part) for part in PARTS]
    state.update({f"{prefix}{fused.name}.{kind}": _fused(fused, layers, kind) for kind in kinds})
    state.update({key: value for key, value in rest.items() if key not in mine})


@torch.no_grad()
def _fused(fused: FusedKeys, layers: list[nn.Module], kind: str) -> Tensor:
    """Return this rank's columns of all rows of the fused weight, as a DTensor; layers are gathered one at a time."""
    parts, layout, mesh = [], None, None
    for layer in layers:
        parameter: Any = getattr(layer, kind)
        if not isinstance(layer, Linear):
            parts.append(parameter.detach())
            continue
        mesh = layer.mesh
        lies = layer.plan.b if kind == "weight" else layer.plan.bias
        sizes = (layer.out_features, layer.in_features)[: lies.ndim]
        axes = [axis for axis in mesh.mesh_axes if axis in layer.plan.b.axes]
        columns = axes if layer.in_features % mesh.grid.size(axes) == 0 else []
        layout = Layout(mesh.grid, None, columns) if kind == "weight" else Layout(mesh.grid, None)
        parts.append(layout.shard(full(parameter, lies, mesh, sizes), mesh.rank).clone())
    joined = fused.joined(parts)
    return joined if layout is None or mesh is None else sharded(joined, layout, mesh)


def _read(
    fused: FusedKeys, module: object, state: dict[str, object], prefix: str, metadata: object, strict: bool,
    missing: list[str], unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    for kind in ("weight", "bias"):
        key = f"{prefix}{fused.name}.{kind}"
        value = state.pop(key, None)
        if not isinstance(value, Tensor):
            continue
        whole = value if is_plain(value) else value.full_tensor()  # type: ignore[attr-defined]
        try:
            parts = fused.split(whole)
        except LayoutError as error:
            errors.append(f"{key}: {error}")
            continue
        for part, rows in zip(PARTS, parts, strict=True):
            state[f"{prefix}{part}.{kind}"] = rows
