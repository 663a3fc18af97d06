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


def _whole(x: Any) -> Tensor:
    return x.detach() if is_plain(x) else x.full_tensor()  # type: ignore[no-any-return]
