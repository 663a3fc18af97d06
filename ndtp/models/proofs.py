"""The proofs of one model's attention modules: each class and its settings are tried once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from ndtp.models.forward_code import functions_of, parts_of
from ndtp.models.local_heads import FEATURES, HEADS, KV_HEADS
from ndtp.models.part_settings import PartSettings
from ndtp.models.proof import why_not
from ndtp.models.rehearsal import Rehearsal, forms, rehearse, seeded, skeleton
from ndtp.models.roles import AttentionRole

SIZES = {*HEADS, *KV_HEADS, *FEATURES, "head_dim", "attention_head_size", "num_key_value_groups", "layer_idx"}
SCORES, DRAWN = 2**23, 2**29  # numbers that the scores of a trial, and the results of all products, may have


def tokens_beyond(model: nn.Module, attention: Sequence[tuple[nn.Module, int]], batch: int, fewest: int) -> int:
    """Return a number of tokens beyond all numbers in the code of attention (windows, chunks) that a trial can reach; 0
    where there is none from `fewest` on.

    Args:
        attention: modules of the model, with their numbers of heads.
    """
    drawn = batch * sum(p.shape[0] for p in model.parameters() if p.dim() == 2)
    found = [0]
    for module, heads in attention:
        most = min(DRAWN // max(drawn, 1), int((SCORES / max(batch * heads, 1)) ** 0.5))
        found += [n + 2 for part in module.modules() for n in _numbers(part) if fewest <= n < most - 1]
    return max(found)


def _numbers(module: nn.Module) -> Iterator[int]:
    """Yield the integers that the code of a module's forward has in it, or reads of the module and its config."""
    own, config = vars(module), vars(module).get("config")
    for function in functions_of(type(module)):
        for code in parts_of(function.__code__):
            values = [x for each in code.co_consts for x in (each if isinstance(each, tuple) else (each,))]
            for name in set(code.co_names) - SIZES:
                values += [own.get(name), getattr(config, name, None)]
            yield from (x for x in values if type(x) is int)


class Proofs:
    """The proofs for the attention modules of one model, made when they are first asked for.

    What was found of a class and its settings is known afterwards, in this model and in others of the process.
    """

    known: ClassVar[dict[Any, str | None]] = {}

    def __init__(self, model: Any, roles: Sequence[AttentionRole], hidden: int, splits: int) -> None:
        self.model, self.roles, self.hidden, self.splits = model, roles, hidden, splits
        self._settings = PartSettings()
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
        # Of all parts: layers of one class may hold parts of one class which are set to do other things.
        own = tuple((name, *self._settings.of(part, role.name).items()) for name, part in module.named_modules())
        key = (self._model, repr(role), kinds, own)
        if any("forward" in vars(each) for each in module.modules()):
            return self._found(role, module)
        if key not in self.known:
            seen, kind = self.seen, str(replace(role, name="", inputs=dict.fromkeys(role.inputs, ""), output=""))
            alike = (self._model, kind, kinds, own, seen.leaks.get(role.name), self._forms(role))
            if alike not in self.known:
                self.known[alike] = self._found(role, module)
            self.known[key] = self.known[alike]
        return self.known[key]

    def _found(self, role: AttentionRole, module: nn.Module) -> str | None:
        seen = self.seen
        if role.name in seen.leaks:
            return f"{seen.leaks[role.name]} reads keys or values of its heads, which would be those of one rank"
        with seeded(2):
            return why_not(
                role, skeleton(module, _projections(role)), seen.calls.get(role.name, ()), self.hidden, self.splits
            )

    def _forms(self, role: AttentionRole) -> str:
        return forms([(call.args, call.kwargs) for call in self.seen.calls.get(role.name, ())])

    @property
    def seen(self) -> Rehearsal:
        if self._seen is None:
            names = [role.name for role in self.roles]
            projections = {role.name: [*role.inputs.values()] for role in self.roles}
            avoid = {size for r in self.roles for size in (r.heads, r.kv_heads, r.head_dim, r.heads // self.splits)}
            parts = [(self.model.get_submodule(role.name), role.heads) for role in self.roles]
            long = lambda batch, fewest: tokens_beyond(self.model, parts, batch, fewest)  # noqa: E731
            self._seen = rehearse(self.model, names, projections, avoid, long)
        return self._seen


def _projections(role: AttentionRole) -> list[str]:
    """Names in the module of those of its layers whose products a trial draws."""
    inside = [*role.inputs.values(), *([role.output] if role.inside else [])]
    return [name.removeprefix(role.name).removeprefix(".") for name in inside]
