"""The settings with which optimizers make their steps, told to those that compare them between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.runtime.facts import Fact, digest

# The number of a step, the class of its optimizer, the settings of its groups by name, how many steps it has counted.
Settings = tuple[int, str, list[dict[str, Any]], float | None]
PLAIN = (bool, int, float, str, tuple, type(None))

OptimizerSettings = tuple[str, "OptimizerGroups", float | None]

_WATCHED: list[ref[Any]] = []


class _Known:
    """The record of an optimizer: the models of which it has weights, and its settings when they last changed.

    Attributes:
        key: the models that were asked, and how many weights it had.
        weights: of each group how many, and a hash of the names that models have for them; of the weights in `ids`.
    """

    key: Any = None
    ids: Any = None
    weights: Sequence[str] = ()
    concerned: Sequence[Any] = ()
    given: Any = None
    groups: OptimizerGroups


_KEY = "_ndtp_known"  # of the record among the attributes of an optimizer, which no copy or file of it has


def watch_steps(calls: object) -> None:
    """Let the optimizers of this process tell of the steps that they take with the weights of a model."""
    _WATCHED.append(ref(calls, _WATCHED.remove))
    _observe()


@cache
def _observe() -> None:
    register_optimizer_step_pre_hook(_before)  # type: ignore[no-untyped-call]
    register_optimizer_step_post_hook(_after)  # type: ignore[no-untyped-call]


def _before(optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> None:
    if not _WATCHED or torch.compiler.is_compiling():
        return
    known = vars(optimizer).get(_KEY)
    if known is None:
        known = vars(optimizer)[_KEY] = _Known()
    elif known.concerned and not any(calls.steps.is_told for calls in known.concerned):
        return
    alive = [each for one in _WATCHED if (each := one()) is not None and each.is_on]
    watched = [(each, model) for each in alive if (model := each.held) is not None]
    key = ([each.number for each, _ in watched], [len(group["params"]) for group in optimizer.param_groups])
    if known.key != key:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [each for each, model in watched if any(id(p) in own for p in model.parameters())]
        known.key, known.concerned = key, sorted(found, key=lambda each: each.number)
    for calls in known.concerned:
        calls.steps.before_step()


def _after(optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> None:
    known = vars(optimizer).get(_KEY)
    if known is not None and known.concerned and not torch.compiler.is_compiling():
        for calls in known.concerned:
            calls.steps.after_step(partial(_settings_of, optimizer, known))


class OptimizerGroups(list[dict[str, Any]]):
    """The settings of the groups of an optimizer by name, whose text is made once."""

    _text = ""

    def __repr__(self) -> str:
        self._text = self._text or super().__repr__()
        return self._text


def _group_settings(group: dict[str, object], weights: str) -> dict[str, object]:
    own: dict[str, object] = {}
    for name, value in group.items():
        if name == "params":
            own["weights"] = weights
        elif isinstance(value, PLAIN):
            own[name] = value
        elif isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            own[name] = float(value)
    return own


def _settings_of(optimizer: Optimizer, known: _Known) -> OptimizerSettings:
    """Return the settings with which an optimizer has made a step."""
    given: Any = [{**group, "params": tuple(map(id, group["params"]))} for group in optimizer.param_groups]
    if known.given is None or known.given != given:
        ids = [group["params"] for group in given]
        if known.ids != ids:
            models = [model for calls in known.concerned if (model := calls.held) is not None]
            names = {id(p): name for model in models for name, p in model.named_parameters()}
            # By any order: that of a set goes by addresses.
            of_models = [sorted(names[i] for i in group if i in names) for group in ids]
            known.weights = [f"{len(i)}, names {digest(names):x}" for i, names in zip(ids, of_models, strict=True)]
            known.ids = ids
        known.groups = OptimizerGroups(map(_group_settings, optimizer.param_groups, known.weights))
        # Others change where they are.
        known.given = given if all(isinstance(value, PLAIN) for group in given for value in group.values()) else None
    state: Any = next(iter(optimizer.state.values()), {})
    count = state.get("step") if isinstance(state, dict) else None
    is_there = count.is_cpu if isinstance(count, Tensor) else isinstance(count, (int, float))
    return type(optimizer).__name__, known.groups, float(count) if is_there else None  # type: ignore[arg-type]


def settings_by_name(number: int, kind: str, groups: Sequence[dict[str, object]], count: float | None) -> list[Fact]:
    """Return the settings with which an optimizer made a step, each as a fact."""
    step = f"optimizer of step {number}"
    facts = [Fact(step, kind)]
    for index, group in enumerate(groups):
        of = f" of group {index}" * (len(groups) > 1)
        facts += [Fact(f"{step}: {name}{of}", value) for name, value in group.items()]
    return facts if count is None else [*facts, Fact(f"{step}: its own count of steps", count)]
