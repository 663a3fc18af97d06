"""Do all ranks take the same steps?  What optimizers do, and what weights and gradients are between their steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ndtp.nn.hooks import OF_A_MODULE
from ndtp.nn.sharded import Sharded
from ndtp.runtime.arrival import local_of
from ndtp.runtime.facts import Fact, content_of, digest
from ndtp.runtime.points import compare_facts
from ndtp.runtime.versions import Versions, version_of

# The number of a step, the class of its optimizer, the settings of its groups by name, how many steps it has counted.
Settings = tuple[int, str, list[dict[str, Any]], float | None]
PLAIN = (bool, int, float, str, tuple, type(None))
TRAINS, HOOKED, WANTS, HAS_GRADIENT, STALE, WRITTEN = 1, 2, 1, 2, 4, 8
_LOOKED_AT = 16  # numbers of a gradient
_ASKED = 2  # parameters whose gradient is asked for whether it was there before: `zero_grad` is called for all of them
_BLOCK = 1 << 20  # words of a weight that are hashed at once


@dataclass
class Parts:
    """A model's modules and parameters, in the order of its tree, and how they are at one moment.

    Attributes:
        modules: all of them.
        hooked: for each of them, whether it has hooks.
        names: of modules on the grid, and the seeds of those that were drawn.
        parameters: those that there are.
        flags: of each module and of each parameter, see `Steps.details`.
        counts: of the changes of each parameter.
    """

    modules: list[nn.Module] = field(default_factory=list)
    hooked: list[bool] = field(default_factory=list)
    names: list[Any] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    flags: bytes = b""
    counts: Versions = field(default_factory=lambda: Versions(()))


class Steps:
    """The steps and changes of the weights of one model since its last call.

    Args:
        calls: the `SameCalls` of the model.

    Attributes:
        taken: steps of optimizers that have some of its weights.
    """

    def __init__(self, calls: Any) -> None:
        self._calls = calls
        self.taken = 0
        self._done: list[Settings] = []
        self._seen: list[Any] | None = None  # versions of the weights after their last known change
        self._gradients: dict[int, Any] = {}  # and of gradients after the last step, by the number of the parameter
        self._parts = Parts()
        self._contents: list[int] | None = None  # hashes of the weights after the last step that was looked at
        self._due, self._writes = True, 0
        self._probe: tuple[nn.Parameter, list[float] | Tensor] | None = None
        self._factor: float | Tensor = math.nan

    # ------------------------------------------------------------------------------------------------------ the state

    def state_of(self, model: nn.Module, anew: bool = True) -> Parts:
        """All modules and parameters of a model, and how they are.

        Args:
            anew: whether to look which modules, hooks and parameters there are; else those of the last time are asked.
        """
        parts = self._parts
        if anew or not parts.modules:
            parts = Parts()
            _walk(model, parts, is_root=True)
            parts.counts = Versions(parts.parameters, self._calls.thorough)
        parameters = parts.parameters
        now = parts.counts.now()
        seen = self._seen
        if seen is None or len(seen) != len(now):
            seen = now
        of_modules = [TRAINS * m.training | HOOKED * hooked
                      for m, hooked in zip(parts.modules, parts.hooked, strict=True)]  # fmt: skip
        flags = [WANTS * p.requires_grad | HAS_GRADIENT * (p.grad is not None) for p in parameters]
        for i, before in self._gradients.items():
            grad = parameters[i].grad if i < len(parameters) else None
            if grad is not None and _state_of(grad) == before:
                flags[i] |= STALE
        if now != seen:
            for i, (is_now, was) in enumerate(zip(now, seen, strict=True)):
                flags[i] |= WRITTEN * (is_now != was)
            self._writes += 1
            self._due |= self._writes == 1 or self._writes % self._calls.every == 0
        parts.flags = bytes(of_modules + flags)
        self._parts, self._seen = parts, now
        return parts

    def details(self) -> list[Fact]:
        """The state by names."""
        parts, model = self._parts, self._calls.model
        flags, facts = iter(parts.flags), []
        for name, module in model.named_modules(remove_duplicate=False):
            now, where = next(flags), f" of '{name}'" * bool(name)
            facts.append(Fact(f"training{where}", bool(now & TRAINS)))
            facts.append(Fact(f"hooks{where}", "some" if now & HOOKED else "none"))
            if isinstance(module, Sharded):
                facts.append(Fact(f"module{where}", f"'{module.name}', seed {module.seed}"))
        by_parameter = list(flags)
        for (name, _), now in zip(_in_order(model), by_parameter, strict=True):
            facts.append(Fact(f"requires_grad of '{name}'", bool(now & WANTS)))
            kind = "one that was there before the last step" if now & STALE else "one"
            facts.append(Fact(f"gradient of '{name}' when it was called", kind if now & HAS_GRADIENT else "none"))
            facts.append(Fact(f"weight '{name}' since the last step", "written to" if now & WRITTEN else "as it was"))
        return facts

    def facts(self) -> list[Fact]:
        """Return facts about how often optimizers made a step."""
        return [Fact("optimizer steps so far", self.taken)]

    def taken_settings(self) -> list[Settings]:
        """Return the settings of the optimizer steps since the last call."""
        done, self._done = self._done, []
        return done

    # ------------------------------------------------------------------------------------------------------ optimizers

    def before_step(self, optimizer: Optimizer) -> None:
        self._calls.compare_late()
        if self._probe is not None:
            parameter, before = self._probe
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided:
                self._factor = _factor(before, _numbers(grad))
        self._probe = None

    def after_step(self, optimizer: Optimizer) -> None:
        self.taken += 1
        self._done.append(_settings_of(optimizer, self.taken))
        parameters = self._parts.parameters
        self._seen = self._parts.counts.now()
        apart = 1 if self._calls.thorough else max(1, len(parameters) // _ASKED)
        grads = ((i, parameters[i].grad) for i in range(0, len(parameters), apart))
        self._gradients = {i: _state_of(grad) for i, grad in grads if grad is not None}
        if self.taken == 1 or self.taken % self._calls.every == 0:
            self.note_weights()

    def note_gradient(self) -> None:
        """Note some numbers of a gradient at the end of backward, to see what becomes of them until the step."""
        for parameter in reversed(self._parts.parameters):
            grad: Any = parameter.grad if parameter.requires_grad else None
            is_plain = grad is not None and grad.layout is torch.strided and not grad.is_complex()
            if is_plain and local_of(grad).numel():
                self._probe = (parameter, _numbers(grad))
                return

    def taken_factor(self) -> float:
        """Return the number by which gradients were multiplied between backward and the last step; NaN if not one
        number.
        """
        factor, self._factor = float(self._factor), math.nan
        return factor

    # --------------------------------------------------------------------------------------------------------- weights

    def note_weights(self) -> None:
        """Remember what weights hold, to see whether they hold it when the model is called next."""
        if not self._parts.parameters:
            self.state_of(self._calls.model)
        self._contents = _contents(self._parts.parameters)
        self._due = True

    def compare_weights(self, what: str) -> None:
        """Compare all weights: those that several ranks hold, and which were changed by nobody known.

        At the first call, after a step that was noted, and where they were first written to by others than optimizers.
        """
        if not self._due:
            return
        self._due = False
        parameters, before = self._parts.parameters, self._contents
        now = _contents(parameters)
        before = before if before is not None and len(before) == len(now) else None
        known = before is not None and not any(flag & WRITTEN for flag in self._flags())
        self._contents = None
        mesh = self._calls.mesh
        changed = [known and a != b for a, b in zip(before or now, now, strict=True)]
        every = mesh.mesh_axes
        axes = [_split_over(p, every) for p in parameters]
        topics = sorted(set(axes))
        facts = [
            Fact(f"all of the weights split over {' '.join(topic) or 'nothing'}",
                 digest([x for x, own in zip(now, axes, strict=True) if own == topic]), topic)
            for topic in topics
            if set(topic) != set(every)
        ]  # fmt: skip
        facts.append(Fact("all of the weights that were changed by nobody known", digest(changed)))

        def details() -> list[Fact]:
            found = []
            for (name, _), x, own, is_changed in zip(_in_order(self._calls.model), now, axes, changed, strict=True):
                if set(own) != set(every):
                    found.append(Fact(f"weight '{name}'", f"hash {x:016x}", own))
                found.append(Fact(f"weight '{name}' since the last step", "changed" if is_changed else "as it was"))
            return found

        compare_facts(mesh, f"weights before {what}", facts, details)

    def _flags(self) -> bytes:
        return self._parts.flags[-len(self._parts.parameters) :] if self._parts.parameters else b""


def _walk(module: nn.Module, parts: Parts, is_root: bool = False) -> None:
    own = module.__dict__
    parts.modules.append(module)
    parts.hooked.append(not is_root and any(own[kind] for kind in OF_A_MODULE))
    if isinstance(module, Sharded):
        parts.names.append((own.get("name"), own.get("seed")))
    parts.parameters += [p for p in own["_parameters"].values() if p is not None]
    for child in own["_modules"].values():
        if child is not None:
            _walk(child, parts)


def _in_order(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by names, in the order of `_walk`."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, p in module._parameters.items():
            if p is not None:
                yield f"{prefix}.{key}" if prefix else key, p


def _state_of(grad: Tensor) -> tuple[Any, ...]:
    return id(grad), version_of(grad)


def _numbers(grad: Any) -> list[float] | Tensor:
    """The first numbers of a gradient on this rank; of an accelerator's without waiting for it."""
    with torch.no_grad():
        first = local_of(grad).reshape(-1)[:_LOOKED_AT]
        return first.tolist() if first.device.type == "cpu" else first.double()


def _factor(before: list[float] | Tensor, now: list[float] | Tensor) -> float | Tensor:
    """Return the number by which all of some numbers were multiplied; NaN if there is none, or if all are zero."""
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        first, then = torch.as_tensor(before), torch.as_tensor(now)
        if first.device != then.device or first.shape != then.shape:
            return math.nan
        ratios = (then / first)[first.abs() * 8 >= first.abs().max()]
        return torch.where(ratios.max() - ratios.min() <= 1e-2 * ratios.abs().max(), ratios.mean(), math.nan)
    least = max(map(abs, before)) / 8
    found = [y / x for x, y in zip(before, now, strict=False) if abs(x) >= least > 0]
    if not found or not max(found) - min(found) <= 1e-2 * max(map(abs, found)):
        return math.nan
    return found[0]


def _split_over(parameter: Tensor, every: Sequence[str]) -> tuple[str, ...]:
    """The axes over which a parameter is split: ranks that differ on these alone hold other parts of it."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return ()
    names = parameter.device_mesh.mesh_dim_names or every  # type: ignore[attr-defined]
    return tuple(axis for axis, placement in zip(names, placements, strict=True) if not placement.is_replicate())


@torch.no_grad()
def _contents(parameters: Sequence[nn.Parameter]) -> list[int]:
    """A hash of what each parameter holds on this rank; one transfer from an accelerator."""
    found = []
    for parameter in parameters:
        x = local_of(parameter).detach().reshape(-1)
        if x.is_meta or not x.numel() or x.is_quantized:
            found.append(torch.zeros((), dtype=torch.int64, device="cpu"))
            continue
        data = x.contiguous().view(torch.uint8)
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8)) if data.numel() % 8 else data
        words = (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)
        found.append(torch.stack([content_of(block) for block in words.split(_BLOCK)]).sum())
    if not found:
        return []
    device = found[-1].device
    mask = (1 << 63) - 1
    return [int(x) & mask for x in torch.stack([x.to(device) for x in found]).tolist()]


# ----------------------------------------------------------------------------------------------------------- optimizers

_WATCHED: WeakSet[Any] = WeakSet()
_OF_OPTIMIZER: WeakKeyDictionary[Optimizer, tuple[Any, list[Any]]] = WeakKeyDictionary()


def watch_steps(calls: Any) -> None:
    """Let the optimizers of this process tell of the steps that they take with the weights of a model."""
    _WATCHED.add(calls)
    _observe()


@cache
def _observe() -> None:
    register_optimizer_step_pre_hook(_before)  # type: ignore[no-untyped-call]
    register_optimizer_step_post_hook(_after)  # type: ignore[no-untyped-call]


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for calls in _concerned(optimizer):
        calls.steps.before_step(optimizer)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for calls in _concerned(optimizer):
        calls.steps.after_step(optimizer)


def _concerned(optimizer: Optimizer) -> list[Any]:
    """The models of which an optimizer has weights."""
    if not _WATCHED or torch.compiler.is_compiling():
        return []
    watched = sorted((each for each in _WATCHED if each.is_on and each.is_alive), key=lambda each: each.number)
    key = (tuple(map(id, watched)), sum(len(group["params"]) for group in optimizer.param_groups))
    known = _OF_OPTIMIZER.get(optimizer)
    if known is None or known[0] != key:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [each for each in watched if any(id(p) in own for p in each.model.parameters())]
        known = _OF_OPTIMIZER[optimizer] = (key, found)
    return known[1]


class OptimizerGroups(list[dict[str, Any]]):
    """The settings of the groups of an optimizer by name, whose text is made once."""

    _text = ""

    def __repr__(self) -> str:
        self._text = self._text or super().__repr__()
        return self._text


_SETTINGS: WeakKeyDictionary[Optimizer, tuple[list[Any], OptimizerGroups]] = WeakKeyDictionary()


def _group_settings(group: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for name, value in group.items():
        if name == "params":
            own["weights"] = len(value)
        elif isinstance(value, PLAIN):
            own[name] = value
        elif isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            own[name] = float(value)
    return own


def _settings_of(optimizer: Optimizer, number: int) -> Settings:
    """Return the settings with which an optimizer made a step."""
    given = [
        [len(value) if name == "params" else value for name, value in group.items()] for group in optimizer.param_groups
    ]
    known = _SETTINGS.get(optimizer)
    if known is None or known[0] != given:
        groups = OptimizerGroups(map(_group_settings, optimizer.param_groups))
        if all(isinstance(value, PLAIN) for values in given for value in values):  # others change where they are
            _SETTINGS[optimizer] = given, groups
    else:
        groups = known[1]
    state: Any = next(iter(optimizer.state.values()), {})
    count = state.get("step") if isinstance(state, dict) else None
    is_there = count.device.type == "cpu" if isinstance(count, Tensor) else isinstance(count, (int, float))
    return number, type(optimizer).__name__, groups, float(count) if is_there else None  # type: ignore[arg-type]


def settings_by_name(number: int, kind: str, groups: Sequence[dict[str, Any]], count: float | None) -> list[Fact]:
    """Return the settings with which an optimizer made a step, each as a fact."""
    step = f"optimizer of step {number}"
    facts = [Fact(step, kind)]
    for index, group in enumerate(groups):
        of = f" of group {index}" * (len(groups) > 1)
        facts += [Fact(f"{step}: {name}{of}", value) for name, value in group.items()]
    return facts if count is None else [*facts, Fact(f"{step}: its own count of steps", count)]
