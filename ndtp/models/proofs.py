"""The proofs of one model's attention modules: each class and its settings are tried once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from ndtp.models.proof import why_not
from ndtp.models.rehearsal import Rehearsal, rehearse, seeded, skeleton
from ndtp.models.roles import AttentionRole


class Proofs:
    """The proofs for the attention modules of one model, made when they are first asked for.

    What was found of a class and its settings is known afterwards, in this model and in others of the process.
    """

    known: ClassVar[dict[Any, str | None]] = {}

    def __init__(self, model: Any, roles: Sequence[AttentionRole], hidden: int, splits: int) -> None:
        self.model, self.roles, self.hidden, self.splits = model, roles, hidden, splits
        self._seen: Rehearsal | None = None
        self._model: tuple[Any, ...]
        try:
            config = model.config
            self._model = (type(model), config.to_json_string(use_diff=False), config._attn_implementation, splits)
        except Exception:  # it tells nothing of itself
            self._model = (object(),)

    def why_not(self, role: AttentionRole) -> str | None:
        """Return the reason why a module is not a function of single heads and sequences; the same on every rank."""
        module = self.model.get_submodule(role.name)
        kinds = tuple((type(each), type(each).forward) for each in module.modules())
        numbers = {int(part) for part in role.name.split(".") if part.isdigit()}  # which layer it is
        own = {k: x for k, x in vars(module).items() if type(x) in (int, float, bool, str) and x not in numbers}
        own |= {"training": None}
        key = (self._model, repr(role), kinds, *own.items())
        if any("forward" in vars(each) for each in module.modules()):
            return self._found(role, module)
        if key not in self.known:
            seen, kind = self.seen, str(replace(role, name="", inputs=dict.fromkeys(role.inputs, ""), output=""))
            alike = (self._model, kind, kinds, *own.items(), seen.leaks.get(role.name), _forms(seen, role.name))
            if alike not in self.known:
                self.known[alike] = self._found(role, module)
            self.known[key] = self.known[alike]
        return self.known[key]

    def _found(self, role: AttentionRole, module: nn.Module) -> str | None:
        seen = self.seen
        if role.name in seen.leaks:
            return f"{seen.leaks[role.name]} reads keys or values of its heads, which would be those of one rank"
        with seeded(2):
            return why_not(role, skeleton(module), seen.calls.get(role.name, ()), self.hidden, self.splits)

    @property
    def seen(self) -> Rehearsal:
        if self._seen is None:
            names = [role.name for role in self.roles]
            projections = {role.name: [*role.inputs.values()] for role in self.roles}
            avoid = {size for r in self.roles for size in (r.heads, r.kv_heads, r.head_dim, r.heads // self.splits)}
            self._seen = rehearse(self.model, names, projections, avoid)
        return self._seen


def _forms(seen: Rehearsal, name: str) -> str:
    """Return the forms of a module's arguments without their numbers; of masks, how many there are of each."""
    calls = [(call.args, call.kwargs) for call in seen.calls.get(name, ())]
    flat, _ = tree_flatten_with_path(calls)
    is_mask = lambda x: x.dtype == torch.bool or not x.is_floating_point()  # noqa: E731
    return str([(str(key), (x.shape, int(x.sum()) if is_mask(x) else 0) if isinstance(x, Tensor) else type(x))
                for key, x in flat])  # fmt: skip
