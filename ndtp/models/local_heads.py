"""The numbers of heads that an attention module counts on a rank, in itself and in its config.

Where modules come into it later, its code runs on all heads instead (see `ndtp.models.looked_at`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from ndtp.nn.sharded import Sharded

# Numbers of an attention module that become those of one rank.
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
FEATURES = ("all_head_size", "embed_dim", "hidden_size", "inner_dim", "split_size")


class ConfigOfRank:
    """The config of an attention module on a rank: a copy of the model's, with numbers of heads of its own.

    Attributes:
        whole: the model's, which may be changed, as `set_attn_implementation` does.
        here: the copy.
        now: what the model's has, the dict itself, since a config of transformers answers to `vars` by code.
        seen: what it had when the copy last followed it.
    """

    def __init__(self, whole: Any, here: Any, seen: dict[str, Any]) -> None:
        self.whole, self.here, self.now, self.seen = whole, here, vars(whole), dict(seen)

    def follow(self) -> None:
        """Bring what has changed in the model's config into the copy."""
        seen, self.seen = self.seen, dict(self.now)
        vars(self.here).update({key: x for key, x in self.seen.items() if key not in seen or seen[key] != x})

    def __deepcopy__(self, memo: Any) -> ConfigOfRank:
        return ConfigOfRank(copy.deepcopy(self.whole, memo), copy.deepcopy(self.here, memo), self.seen)


def take_heads(module: nn.Module, whole: Any, heads: int, kv_heads: int) -> ConfigOfRank | None:
    """Let a module's code count so many heads; its config is returned, if it has one.

    Args:
        whole: has the numbers of all `heads` and `kv_heads`, and `head_dim`.
    """
    features = whole.heads * whole.head_dim
    given, config = getattr(module, "config", None), None
    if given is not None:
        # Its own: some compute sizes of heads from it.
        config = module.config = copy.copy(given)  # type: ignore[assignment]
    for owner in (module, config):
        for names, before, now in ((HEADS, whole.heads, heads), (KV_HEADS, whole.kv_heads, kv_heads)):
            for name in names:
                if owner is not None and getattr(owner, name, None) == before:
                    setattr(owner, name, now)
    for name in FEATURES:
        if getattr(module, name, None) == features:
            setattr(module, name, heads * whole.head_dim)
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]
    return ConfigOfRank(given, config, vars(given)) if hasattr(given, "__dict__") else None


def parts_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules inside of an attention, without what is inside of its projections."""
    parts = [child for child in module._modules.values() if child is not None]
    return tuple(x for part in parts for x in ((part,) if isinstance(part, Sharded) else part.modules()))


def parts_known(module: nn.Module, known: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Return those that were there before, and adapters that were put on the grid since."""
    found: list[nn.Module] = []
    for part in module.children():
        own = list(part.modules())
        is_adapted = any(getattr(x, "adapts", None) is not None for x in own)
        is_whole = any(type(x) is nn.Linear for x in own)
        found += own if is_adapted and not is_whole else [x for x in own if any(x is each for each in known)]
    return tuple(found)
