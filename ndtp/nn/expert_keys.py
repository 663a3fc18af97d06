"""The names that dense models give to the weights of experts, and how a layer of experts loads them.

| form | keys behind the prefix | shape |
|---|---|---|
| own, gated | `gate_up_proj`, `down_proj` | [experts, 2, inner, hidden], [experts, hidden, inner] |
| own, not gated | `up_proj`, `down_proj` | [experts, inner, hidden], [experts, hidden, inner] |
| fused (transformers) | `gate_up_proj`, `down_proj` | [experts, 2 * inner, hidden], [experts, hidden, inner] |
| separate | `0.gate_proj.weight`, `0.up_proj.weight`, `0.down_proj.weight` ... | those of `nn.Linear` |
| separate (Mixtral's files) | `0.w1.weight`, `0.w3.weight`, `0.w2.weight` ... | the same |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndtp.runtime.arrival import is_plain, stored_shape

SEPARATE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate", "up", "down"))


def read(state: dict[str, Any], prefix: str, count: int, gated: bool, unexpected: list[str]) -> dict[str, Any]:
    """A state dict with any of these forms, in the layer's own."""
    up_name = f"{prefix}{'gate_up_proj' if gated else 'up_proj'}"
    for gate, up, down in SEPARATE:
        names = ([gate] if gated else []) + [up, down]
        keys = [[f"{prefix}{i}.{name}.weight" for name in names] for i in range(count)]
        if all(isinstance(state.get(key), Tensor) for each in keys for key in each):
            *ups, downs = ([_whole(state.pop(key)) for key in of] for of in zip(*keys, strict=True))
            stacked = [torch.stack(each) for each in ups]
            state[up_name] = torch.stack(stacked, 1) if gated else stacked[0]
            state[f"{prefix}down_proj"] = torch.stack(downs)
            taken = {key for each in keys for key in each}
            unexpected[:] = [key for key in unexpected if key not in taken]
    value = state.get(up_name)
    if gated and isinstance(value, Tensor) and len(stored_shape(value)) == 3 and value.shape[1] % 2 == 0:
        state[up_name] = _whole(value).unflatten(1, (2, -1))
    return state


def separate(state: dict[str, Any], prefix: str, names: tuple[str, str, str] = SEPARATE[0]) -> dict[str, object]:
    """Dense tensors in the layer's own form, expert by expert."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name not in ("gate_up_proj", "up_proj", "down_proj"):
            found[key] = value
            continue
        parts = {"gate_up_proj": names[:2], "up_proj": names[1:2], "down_proj": names[2:]}[name]
        for i, expert in enumerate(value):
            each = expert if name == "gate_up_proj" else expert[None]
            found |= {f"{prefix}{i}.{part}.weight": one for part, one in zip(parts, each, strict=True)}
    return found


def fused(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Dense tensors in the layer's own form, as transformers has them."""
    key = f"{prefix}gate_up_proj"
    return {name: value.flatten(1, 2) if name == key else value for name, value in state.items()}


def _whole(x: Any) -> Tensor:
    return x.detach() if is_plain(x) else x.full_tensor()  # type: ignore[no-any-return]
