"""The numbers of heads that an attention module counts on a rank, in itself and in its config.

Where parameters come into it later, its code runs on all heads instead (see `ndtp.models.looked_at`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from ndtp.models.replicated import Replicated
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


def has_new_parameters(module: nn.Module, known: Sequence[nn.Module | None]) -> bool:
    """Return whether parameters came into an attention after it was split, whose code they would meet on one rank's
    heads and sequences.

    Args:
        known: the parts that were there before.
    """
    return any(
        not isinstance(part.get_submodule(key.rpartition(".")[0]), (Replicated, Sharded))
        for part in module.children()
        if not any(part is each for each in known)
        for key, _ in part.named_parameters()
    )
